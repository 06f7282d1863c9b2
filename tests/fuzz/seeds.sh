#!/bin/sh
# Replays the committed seeds of every fuzz target: seeds.sh program...
set -u
here=$(cd "$(dirname "$0")" && pwd)
[ $# -gt 0 ] || { echo "no fuzz target is built"; exit 77; }
for program in "$@"; do
    name=$(basename "$program")
    echo "$name"
    "$program" "$here/seeds/${name#fuzz_}" || exit 1
done
