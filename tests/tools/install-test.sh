#!/bin/sh
# `make install` puts the files where the variables say, DESTDIR in front, and `make uninstall`
# leaves nothing behind: not with a fresh prefix, and no foreign file of a shared one is touched.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
make="sh $(dirname "$0")/make.sh"

$make -s install DESTDIR="$dir/stage" PREFIX=/opt/kvpage LIBDIR=/opt/kvpage/lib/multi
for f in include/kvpage.h lib/multi/libkvpage.so.0 lib/multi/libkvpage.a \
    lib/multi/pkgconfig/kvpage.pc; do
    [ -e "$dir/stage/opt/kvpage/$f" ] || { echo "install: no $f"; exit 1; }
done
if grep -r "$dir" "$dir/stage/opt/kvpage/lib/multi/pkgconfig"; then
    echo "install: DESTDIR is in kvpage.pc"
    exit 1
fi
if grep '@' "$dir/stage/opt/kvpage/lib/multi/pkgconfig/kvpage.pc"; then
    echo "install: kvpage.pc is not filled in"
    exit 1
fi
$make -s uninstall DESTDIR="$dir/stage" PREFIX=/opt/kvpage LIBDIR=/opt/kvpage/lib/multi
left=$(find "$dir/stage" ! -type d)
[ -z "$left" ] && [ ! -d "$dir/stage/opt/kvpage/include" ] || {
    echo "uninstall leaves behind: $left"; exit 1; }

mkdir -p "$dir/shared/lib"
: >"$dir/shared/lib/other.so"
$make -s install PREFIX="$dir/shared"
$make -s uninstall PREFIX="$dir/shared"
[ "$(cd "$dir/shared" && find . -type f)" = ./lib/other.so ] || {
    echo "uninstall: a shared prefix is not as it was"; exit 1; }
