#!/bin/sh
# The test programs under sanitizers: sanitize.sh [asan|tsan]. Address and undefined behaviour for
# all of them, threads for those that have some. KVPAGE_SANITIZED=1 tells the tests to take fewer
# rounds: everything is 5 to 20 times slower here. test_accuracy is left out: it computes thousands of
# rows of real models to compare numbers, by code that the others run as well. SANITIZE_ONLY=regex takes
# some of the programs.
set -u
here=$(cd "$(dirname "$0")" && pwd)
make="sh $here/make.sh"
dir=build/sanitize
mkdir -p "$dir"
results=$dir/results
: >"$results"
KVPAGE_TESTS=$(cd "$here/.." && pwd)
KVPAGE_SANITIZED=1
export KVPAGE_TESTS KVPAGE_SANITIZED

for model in SMOLLM2 GEMMA3; do
    if path=$(sh "$here/fetch.sh" "$(echo $model | tr A-Z a-z)"); then
        export "KVPAGE_TEST_$model=$path"
    fi
done

run() { # label flags filter
    echo "$1: $2"
    flags="$2 -fno-sanitize-recover=all -fno-omit-frame-pointer"
    programs=$($make -s SAN="$flags" print-tests | tr ' ' '\n' | grep -E "$3" | grep -v test_accuracy)
    if ! $make -s SAN="$flags" $programs >"$dir/$1.build" 2>&1; then
        echo "0 1 0 $1-build" >>"$results"
        tail -n 30 "$dir/$1.build"
        return
    fi
    TEST_TIMEOUT=1200 sh "$here/run-tests.sh" "$results" "$1:" $programs
}

ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=1:allocator_may_return_null=1
UBSAN_OPTIONS=print_stacktrace=1
TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
export ASAN_OPTIONS UBSAN_OPTIONS TSAN_OPTIONS
[ "${1:-asan}" = asan ] && run asan -fsanitize=address,undefined "${SANITIZE_ONLY:-.}"
[ "${1:-tsan}" = tsan ] && run tsan -fsanitize=thread "${SANITIZE_ONLY:-/(base|cpu|engine|api|loop)/}"
sh "$here/tally.sh" "$results"
