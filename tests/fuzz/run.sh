#!/bin/sh
# Builds the fuzz targets with clang, address and undefined-behaviour sanitizers, and runs each for
# FUZZ_SECONDS (60), from its committed seeds and what earlier runs found (build/fuzz/corpus).
# usage: run.sh [target...]    (names without fuzz_)
set -eu
here=$(cd "$(dirname "$0")" && pwd)
sh "$here/../tools/need.sh" clang
san='-fsanitize=address,undefined,fuzzer-no-link -fno-sanitize-recover=undefined'
make="sh $here/../tools/make.sh"
$make -s CC=clang SAN="$san" FUZZ_LINK=-fsanitize=fuzzer fuzz-programs
programs=$($make -s CC=clang SAN="$san" FUZZ_LINK=-fsanitize=fuzzer print-fuzz)
bad=0
for program in $programs; do
    name=$(basename "$program")
    name=${name#fuzz_}
    [ $# -eq 0 ] || case " $* " in *" $name "*) ;; *) continue ;; esac
    corpus=build/fuzz/corpus/$name
    mkdir -p "$corpus" build/fuzz/found
    dict=
    [ -f "$here/$name.dict" ] && dict=-dict=$here/$name.dict
    echo "fuzzing $name for ${FUZZ_SECONDS:-60} s"
    if ! "$program" -max_total_time="${FUZZ_SECONDS:-60}" -timeout=10 -rss_limit_mb=2048 \
        -print_final_stats=1 -artifact_prefix="build/fuzz/found/$name-" $dict \
        "$corpus" "$here/seeds/$name" >"build/fuzz/$name.log" 2>&1; then
        bad=1
        echo "fuzzing $name: FAILED; the end of build/fuzz/$name.log:"
        tail -n 40 "build/fuzz/$name.log"
    fi
    grep -E 'stat::number_of_executed_units|cov:' "build/fuzz/$name.log" | tail -n 2
done
exit $bad
