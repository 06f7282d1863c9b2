#!/bin/sh
# What `make check` runs once everything is built: check.sh BUILD program...
# The last line says how many tests passed, failed and were skipped; exit 1 if any failed.
set -u
build=$1
shift
here=$(dirname "$0")
dir=$build/check
results=$dir/results
rm -rf "$dir"
mkdir -p "$dir"
: >"$results"
KVPAGE_TESTS=$(cd "$here/.." && pwd)
export KVPAGE_TESTS

echo "test models"
if path=$(sh "$here/fetch.sh" smollm2); then
    KVPAGE_TEST_SMOLLM2=$path
    export KVPAGE_TEST_SMOLLM2
fi
if path=$(sh "$here/fetch.sh" gemma3); then
    KVPAGE_TEST_GEMMA3=$path
    export KVPAGE_TEST_GEMMA3
fi

if python=$(sh "$here/need.sh" python-with-cffi); then
    KVPAGE_TEST_PYTHON=$python
    export KVPAGE_TEST_PYTHON
fi

echo "test programs"
sh "$here/run-tests.sh" "$results" "" "$@"

echo "checks"
step() { sh "$here/step.sh" "$results" "$@"; }
step header sh "$here/header.sh"
step header-docs sh "$here/header-docs.sh"
step check-includes sh "$here/check-includes.sh"
step forbidden sh "$here/forbidden.sh" "$build/libkvpage.a"
step cases sh "$here/cases.sh"
step ptx-lint sh -c "command -v python3 >/dev/null || exit 77; exec python3 \"$here/ptx-lint.py\""
step symbols sh "$here/symbols.sh" "$build/libkvpage.so"
step fuzz-seeds sh "$here/../fuzz/seeds.sh" ${FUZZ:-}
step install sh "$here/install-test.sh"
step consumers sh "$here/../consumer/run.sh"

for program in ${LEVELS:-}; do step "$(basename "$program")" "$program"; done

echo "the AVX-512 level, emulated"
[ "$(uname -m)" = x86_64 ] && sh "$here/need.sh" simde
sh "$here/../levels/avx512.sh" "$results" "$build"

echo "the NEON level, emulated"
if sh "$here/need.sh" cross; then
    sh "$here/neon.sh" "$results"
else
    echo "0 0 1 neon" >>"$results"
fi

echo
sh "$here/tally.sh" "$results"
