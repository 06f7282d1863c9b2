#!/bin/sh
# make demo: from a fresh clone to eight users answered from one cache. MODEL=path uses one's own.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
make="sh $here/make.sh"
sh "$here/need.sh" cc
[ -n "${MODEL:-}" ] || MODEL=$(sh "$here/fetch.sh" smollm2)
$make -s all
demo=build/last/examples/demo
exec "$demo" "$MODEL"
