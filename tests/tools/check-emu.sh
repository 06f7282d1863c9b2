#!/bin/sh
# The CUDA device's tests on the emulator, and nothing else: check-emu.sh BUILD program...
# Exit 1 if any failed; the last line counts them.
set -u
build=$1
shift
here=$(dirname "$0")
dir=$build/check-emu
results=$dir/results
rm -rf "$dir"
mkdir -p "$dir"
: >"$results"
KVPAGE_TESTS=$(cd "$here/.." && pwd)
export KVPAGE_TESTS
if path=$(sh "$here/fetch.sh" smollm2); then
    KVPAGE_TEST_SMOLLM2=$path
    export KVPAGE_TEST_SMOLLM2
fi
sh "$here/run-tests.sh" "$results" "" "$@"
sh "$here/tally.sh" "$results"
