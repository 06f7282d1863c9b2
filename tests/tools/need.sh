#!/bin/sh
# Sees to it that a tool is there: need.sh cc|cmocka|fetch|simde|cross|clang|abigail|...
# What is missing is installed with apt-get if we are root; otherwise the line to run is printed.
# Exit 0: it is there. Exit 1: it is not; stderr says what to do.
set -u

compiles() { printf '%s\n' "$1" | ${CC:-cc} ${CPPFLAGS:-} -E -x c - >/dev/null 2>&1; }
has() { command -v "$1" >/dev/null 2>&1; }

# A clang without its run-time libraries compiles, but does not link this.
fuzzes() {
    dir=$(mktemp -d) || return 1
    printf '%s\n' '#include <stddef.h>' \
        'int LLVMFuzzerTestOneInput(const unsigned char *p, size_t n) { return !p && n; }' |
        clang -fsanitize=fuzzer,address -x c - -o "$dir/a" >/dev/null 2>&1
    found=$?
    rm -rf "$dir"
    return $found
}

# A Python that has cffi: the first of the path, or the system's, which Debian's package is for.
with_cffi() {
    for p in python3 /usr/bin/python3; do
        "$p" -c 'import cffi, sys; print(sys.executable)' 2>/dev/null && return 0
    done
    return 1
}

# there THING: is it usable?
there() {
    case $1 in
    cc) compiles '#include <stdio.h>' ;;
    cmocka) compiles '#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>' ;;
    fetch) python3 -m pip --version >/dev/null 2>&1 ;;
    simde) compiles '#include <simde/x86/avx512.h>' ;;
    cross) has aarch64-linux-gnu-gcc && { has qemu-aarch64 || has qemu-aarch64-static; } ;;
    clang) has clang && has llvm-profdata && has llvm-cov && fuzzes ;;
    abigail) has abidw && has abidiff ;;
    pkgconfig) has pkg-config ;;
    cxx) has "${CXX:-c++}" ;;
    cffi) with_cffi >/dev/null ;;
    venv) python3 -c 'import venv, ensurepip' >/dev/null 2>&1 ;;
    *) echo "need.sh: unknown: $1" >&2; exit 2 ;;
    esac
}

packages() {
    case $1 in
    cc) echo "gcc libc6-dev" ;;
    cmocka) echo "libcmocka-dev" ;;
    fetch) echo "python3-pip ca-certificates" ;;
    simde) echo "libsimde-dev" ;;
    cross) echo "gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user" ;;
    clang) echo "clang llvm" ;;
    abigail) echo "abigail-tools" ;;
    pkgconfig) echo "pkg-config" ;;
    cxx) echo "g++" ;;
    cffi) echo "python3-cffi" ;;
    venv) echo "python3-venv" ;;
    esac
}

thing=$1
if [ "$thing" = python-with-cffi ]; then # says its path
    sh "$0" cffi && with_cffi
    exit
fi
there "$thing" && exit 0
# clang's run-time libraries are only recommended by some releases.
lean=--no-install-recommends
[ "$thing" = clang ] && lean=
line="apt-get install -y $lean $(packages "$thing")"
if [ "$(id -u)" = 0 ] && has apt-get; then
    echo "installing: $(packages "$thing")" >&2
    export DEBIAN_FRONTEND=noninteractive
    { $line || { apt-get update && $line; }; } >/dev/null 2>&1
    there "$thing" && exit 0
    echo "kvpage: $thing is missing, and this failed: $line" >&2
    exit 1
fi
echo "kvpage: $thing is missing; as root run: $line" >&2
exit 1
