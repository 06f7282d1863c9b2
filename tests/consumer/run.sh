#!/bin/sh
# Installs into a fresh prefix and builds hosts against that tree alone: C and C++, shared and
# static, by dlopen, and from Python by cffi.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
tools=$here/../tools
sh "$tools/need.sh" pkgconfig || { echo "no pkg-config"; exit 77; }
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
sh "$tools/make.sh" -s install PREFIX="$dir/tree"
PKG_CONFIG_PATH=$dir/tree/lib/pkgconfig
export PKG_CONFIG_PATH
library=$dir/tree/lib/libkvpage.so.0
flags=$(pkg-config --cflags kvpage)
shared=$(pkg-config --libs kvpage)
# As the .pc says, but the archive by name: both kinds lie in one folder.
static=$(pkg-config --static --libs kvpage | sed "s|-lkvpage|$dir/tree/lib/libkvpage.a|")
cc=${CC:-cc} cxx=${CXX:-c++}
cd "$dir"

"$cc" -Wall -Wextra $flags "$here/consumer.c" -o c-shared $shared -Wl,-rpath,"$dir/tree/lib"
./c-shared
readelf -d c-shared | grep -q 'NEEDED.*libkvpage\.so\.0\]'
"$cc" -Wall -Wextra $flags "$here/consumer.c" -o c-static $static
./c-static
if readelf -d c-static | grep -q libkvpage; then echo "the static host needs the library"; exit 1; fi
"$cc" -Wall -Wextra $flags "$here/dlopen.c" -o by-name -ldl
./by-name "$library"
if sh "$tools/need.sh" cxx; then
    "$cxx" -x c++ -Wall -Wextra $flags "$here/consumer.c" -x none -o cxx-shared $shared \
        -Wl,-rpath,"$dir/tree/lib"
    ./cxx-shared
    "$cxx" -x c++ -Wall -Wextra $flags "$here/consumer.c" -x none -o cxx-static $static
    ./cxx-static
fi
if python=$(sh "$tools/need.sh" python-with-cffi); then
    "$python" "$here/consumer.py" "$library" "$dir/tree/include/kvpage.h"
fi
