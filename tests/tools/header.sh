#!/bin/sh
# The public header compiles alone, without a warning, in every language standard we promise, with
# every compiler that is there. A standard that a compiler does not know is left out.
set -u
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
done=0 bad=0

try() { # compiler language standard
    [ "$2" = c ] && src="$dir/a.c" || src="$dir/a.cc"
    printf '#include <kvpage.h>\nint unused_main(void);\nint unused_main(void) { return KVP_OK; }\n' \
        >"$src"
    $1 -std="$3" -E -x "$2" /dev/null >/dev/null 2>&1 || return 0
    done=$((done + 1))
    $1 -std="$3" -x "$2" -Wall -Wextra -Wpedantic -Wshadow -Werror -Iinclude -fsyntax-only "$src" &&
        return 0
    echo "header: $1 -std=$3 fails"
    bad=1
}

for cc in "${CC:-cc}" gcc clang; do
    command -v $cc >/dev/null 2>&1 || continue
    for std in c99 c11 c17; do try "$cc" c $std; done
done
for cxx in "${CXX:-c++}" g++ clang++; do
    command -v $cxx >/dev/null 2>&1 || continue
    for std in c++11 c++14 c++17 c++20; do try "$cxx" c++ $std; done
done
echo "header: $done combinations of compiler and standard"
exit $bad
