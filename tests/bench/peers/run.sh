#!/bin/sh
# make bench-peers: run.sh BENCH_ENGINE [options of compare.py]. MODEL=path uses another file.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
tools=$here/../../tools
bench=$1
shift
sh "$tools/need.sh" fetch
sh "$tools/need.sh" venv
[ -n "${KVPAGE_PEER_SITE:-}" ] || sh "$tools/need.sh" cxx
[ -n "${MODEL:-}" ] || MODEL=$(sh "$tools/fetch.sh" smollm2)
exec python3 "$here/compare.py" "$bench" "$MODEL" "$@"
