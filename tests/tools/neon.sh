#!/bin/sh
# Builds the kernels' and the engine's tests for Arm64 and runs them under emulation:
# neon.sh RESULTS. CMocka is not there for a foreign target, so tests/cross stands in for it.
set -u
results=$1
here=$(dirname "$0")
unset CC CFLAGS CPPFLAGS LDFLAGS LDLIBS MAKEFLAGS
CC=aarch64-linux-gnu-gcc
list=$(${MAKE:-make} -s CC=$CC print-neon) && ${MAKE:-make} CC=$CC neon-tests >"$results.neon" 2>&1 || {
    echo "0 1 0 neon-build" >>"$results"
    echo "  neon: does not build"
    tail -n 30 "$results.neon" | sed 's/^/    | /'
    exit 0
}
qemu=$(command -v qemu-aarch64 || command -v qemu-aarch64-static)
WRAP="$qemu -L /usr/aarch64-linux-gnu" KVPAGE_EMULATED=1 TEST_TIMEOUT=900 \
    sh "$here/run-tests.sh" "$results" "neon:" $list
