#!/bin/sh
# make bench-peers: run.sh BENCH_ENGINE [options of compare.py]. MODEL=path uses another file, and
# PEER_OPTIONS="..." adds options where make leaves no place for them.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
tools=$here/../../tools
bench=$1
shift
sh "$tools/need.sh" fetch
sh "$tools/need.sh" venv
# llama.cpp is built here, and vLLM compiles its kernels: without a compiler they are left out.
sh "$tools/need.sh" cxx || true
[ -n "${MODEL:-}" ] || MODEL=$(sh "$tools/fetch.sh" smollm2)
export PYTHONDONTWRITEBYTECODE=1
# shellcheck disable=SC2086
exec python3 "$here/compare.py" "$bench" "$MODEL" ${PEER_OPTIONS:-} "$@"
