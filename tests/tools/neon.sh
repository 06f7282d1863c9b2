#!/bin/sh
# Builds the kernels' and the engine's tests for Arm64 and runs them under emulation:
# neon.sh RESULTS. CMocka is not there for a foreign target, so tests/cross stands in for it.
set -u
results=$1
here=$(dirname "$0")
unset CC CFLAGS CPPFLAGS LDFLAGS LDLIBS MAKEFLAGS
make="sh $here/make.sh -s CC=aarch64-linux-gnu-gcc"
if ! $make neon-tests >"$results.neon" 2>&1; then
    echo "0 1 0 neon-build" >>"$results"
    echo "  neon: does not build"
    tail -n 30 "$results.neon" | sed 's/^/    | /'
    exit 0
fi
qemu=$(command -v qemu-aarch64 || command -v qemu-aarch64-static)
emulate="$qemu -L /usr/aarch64-linux-gnu"
export TEST_TIMEOUT=900 KVPAGE_EMULATED=1 # fewer rounds: emulation is slow
WRAP=$emulate sh "$here/run-tests.sh" "$results" "neon:" $($make print-neon)
for program in $($make print-levels); do
    sh "$here/step.sh" "$results" "neon-$(basename "$program")" $emulate "$program"
done
