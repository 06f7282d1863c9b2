#!/bin/sh
# Which lines of the CUDA device's host code the tests reach, on a machine without a GPU: builds cuda/*.c
# once more with --coverage, links the programs to that which use the emulated driver and those of
# tests/unit/cuda, runs them, and lists, by gcov, each file's share and every line that was not run. Exit 1
# if a test fails or a file is below COVERAGE (98) percent. COVERAGE_ONLY=regex takes some of the programs.
set -u
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.." || exit 1
sh tests/tools/need.sh cmocka || exit 1
cc=${CC:-cc} cxx=${CXX:-c++}
wanted=$(grep -l 'emu/driver\.h' tests/emu/test_*.cc | sed 's|.*/\(.*\)\.cc|emu/\1|' | tr '\n' '|')unit/cuda/.*
programs=$(sh "$here/make.sh" -s CUDA=0 print-tests | tr ' ' '\n' |
    grep -E "/tests/($wanted)\$" | grep -E "${COVERAGE_ONLY:-.}")
[ -n "$programs" ] || { echo "cuda-coverage: no programs" >&2; exit 1; }
sh "$here/make.sh" CUDA=0 $programs || exit 1
build=$(printf '%s\n' "$programs" | sed -n '1s|/tests/.*||p')
dir=build/cuda-coverage
rm -rf "$dir"
mkdir -p "$dir"

echo "cuda/*.c, with coverage"
for file in $(ls cuda/*.c | grep -v '/image\.c$'); do # which has no code
    $cc -std=c11 -O1 -g --coverage -pthread -I. -Iinclude -Ilib -c "$file" \
        -o "$dir/$(basename "$file" .c).o" || exit 1
done
# Linked as objects, so that those in the library are not looked for.
covered=$(ls "$dir"/*.o)

if path=$(sh "$here/fetch.sh" smollm2); then
    KVPAGE_TEST_SMOLLM2=$path
    export KVPAGE_TEST_SMOLLM2
fi
KVPAGE_TESTS=$(pwd)/tests
export KVPAGE_TESTS
results=$dir/results
: >"$results"
emulator=$(ls "$build"/tests/emu/*.o | grep -v -E '/(test|main)_[^/]*\.o$')
kernels=$(find "$build/emu/plain" -name '*.o')
for program in $programs; do
    out=$dir/${program#"$build"/}
    mkdir -p "$(dirname "$out")"
    others=
    case $program in */tests/emu/*) others="$emulator $kernels" ;; esac
    $cxx -pthread --coverage -o "$out" "$program.o" $others $covered \
        "$build/libsupport.a" "$build/libkvpage.a" -lcmocka -lm -ldl || exit 1
    sh "$here/run-tests.sh" "$results" "" "$out"
done

bad=0
for file in $(ls cuda/*.c | grep -v '/image\.c$'); do
    ${GCOV:-gcov} -t -r -o "$dir/$(basename "$file" .c).o" "$file" 2>/dev/null |
        awk -F: -v file="$file" -v least="${COVERAGE:-98}" '
        $2 + 0 == 0 { if ($3 == "Source") source = $4; next }
        { n = $1; gsub(/[ *]/, "", n) }
        source != file || n == "-" { next }
        { lines++ }
        n == "#####" { sub(/^[^:]*:/, ""); text[++missed] = $0 }
        END {
            if (!lines) exit
            share = 100 * (lines - missed) / lines
            printf "%-20s %6.2f %% of %d lines\n", file, share, lines
            for (i = 1; i <= missed; i++) print "    not run:" text[i]
            exit share < least
        }' || bad=1
done
sh "$here/tally.sh" "$results" || bad=1
exit $bad
