#!/bin/sh
# make bench: runs every benchmark program: run.sh program... MODEL=path uses another file.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
[ -n "${MODEL:-}" ] || MODEL=$(sh "$here/../tools/fetch.sh" smollm2)
date -u '+%Y-%m-%d %H:%M UTC'
sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | sort | uniq -c
for program in "$@"; do
    echo "== $(basename "$program")"
    "$program" "$MODEL"
    [ "$(basename "$program")" = bench_engine ] && "$program" "$MODEL" memory
done
