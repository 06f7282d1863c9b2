#!/bin/sh
# How much of the GGUF reader and of the tokenizer the committed seeds reach; exit 1 below 90 % of
# the lines of either. CORPUS=1 counts what `make fuzz` found here as well.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
sh "$here/../tools/need.sh" clang
flags='-fprofile-instr-generate -fcoverage-mapping'
make="sh $here/../tools/make.sh"
$make -s CC=clang SAN="$flags" fuzz-programs
programs=$($make -s CC=clang SAN="$flags" print-fuzz)
dir=build/fuzz/coverage
rm -rf "$dir"
mkdir -p "$dir"
objects=
for program in $programs; do
    name=$(basename "$program")
    name=${name#fuzz_}
    more=
    [ "${CORPUS:-}" = 1 ] && [ -d "build/fuzz/corpus/$name" ] && more=build/fuzz/corpus/$name
    LLVM_PROFILE_FILE=$dir/$name.profraw "$program" "$here/seeds/$name" $more
    objects="$objects -object $program"
done
llvm-profdata merge -o "$dir/all.profdata" "$dir"/*.profraw
bad=0
for room in gguf tokenizer; do
    files=$(ls lib/model/$room*.c)
    llvm-cov report ${objects# -object} -instr-profile="$dir/all.profdata" $files >"$dir/$room.txt"
    cat "$dir/$room.txt"
    # The columns of TOTAL: regions, missed, cover, functions, missed, cover, lines, missed, cover.
    awk -v room=$room '$1 == "TOTAL" {
        sub(/%/, "", $10)
        printf "%s: %s %% of the lines\n", room, $10
        exit $10 < 90 }' "$dir/$room.txt" || { echo "coverage: below 90 %"; bad=1; }
done
exit $bad
