#!/bin/sh
# The promise of the ABI, checked: run.sh BUILD
#   - exported symbols, header and version map agree
#   - every public field and constant is where it was (layout.c)
#   - abidiff finds nothing changed against the baseline
#   - a program that was built against the first header still runs with this library
# Exit 77 if the tool for the third is not there and the rest is good.
set -eu
build=$1
here=$(cd "$(dirname "$0")" && pwd)
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
library=$build/libkvpage.so

sh "$here/../tools/symbols.sh" "$library"

for cc in "${CC:-cc}" aarch64-linux-gnu-gcc; do
    command -v "$cc" >/dev/null 2>&1 || continue
    "$cc" -std=c11 -Wall -Wextra -Werror -Iinclude -c "$here/layout.c" -o "$dir/layout.o"
    echo "layout: as recorded ($cc)"
done

old=$here/old-consumer-$(uname -m)
if [ -f "$old" ]; then
    cp "$old" "$dir/old"
    chmod +x "$dir/old"
    LD_LIBRARY_PATH=$build "$dir/old"
fi

sh "$here/../tools/need.sh" abigail || { echo "no abidiff"; exit 77; }
abidw --headers-dir include --out-file "$dir/now.abi" "$library"
if ! abidiff "$here/baseline.abi" "$dir/now.abi"; then
    echo "abi: changed; if that is meant and allowed: sh tests/abi/baseline.sh BUILD"
    exit 1
fi
echo "abi: as the baseline"
