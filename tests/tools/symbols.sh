#!/bin/sh
# The shared library exports exactly what the header declares and the version map lists:
# symbols.sh libkvpage.so
set -eu
here=$(dirname "$0")
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
sh "$here/header-symbols.sh" | sort >"$dir/header"
sed -n 's/^ *\(kvp_[a-z0-9_]*\);$/\1/p' lib/kvpage.map | sort >"$dir/map"
${NM:-nm} -D --defined-only "$1" | awk '$2 == "T" || $2 == "D" || $2 == "B" || $2 == "R" || $2 == "W" {
    sub(/@.*/, "", $3); print $3 }' | sort >"$dir/library"
bad=0
compare() { diff "$dir/$1" "$dir/$2" >"$dir/diff" || {
    echo "symbols: < only in the $1, > only in the $2"; grep '^[<>]' "$dir/diff"; bad=1; }; }
compare header map
compare header library
echo "symbols: $(wc -l <"$dir/header") functions"
exit $bad
