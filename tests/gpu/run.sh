#!/bin/sh
# `make gpu-check`: what only a machine with a card can tell, in one go of less than 8 minutes on an H200
# (and a build before): the tests of kernels, device and engine on the card, its lane-level answers, the
# sanitizer on a few of them, ceilings, the gates of attention and, where PyTorch is, its attention in the
# same run. Nothing is fetched. Writes build/gpu/results.json and results.md, which docs/gpu-results.md
# is made from, and build/gpu/lanes.bin, which belongs into tests/emu.
#
# Without a card all of it runs on the emulator, with the times left out, and says so.
#
# run.sh [build|run]: only that. What `build` makes needs nothing of the machine that `run` runs it on but
# the driver and cuBLAS. MODE=card|emulator overrides what is found.
set -u
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.." || exit 1
dir=build/gpu
tools=tests/tools
phase=${1:-both}
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
mode=${MODE:-emulator}
[ -z "${MODE:-}" ] && nvidia-smi -L 2>/dev/null | grep -q GPU && mode=card

# What of each program runs on a card: all tests, but for those about faults, counters and timings, which
# only the emulator has. `none`: the program is about the emulator itself.
on_card() {
    case $1 in
    test_device) echo models_agree_with_the_cpu,every_kv_format_and_block_size,mixed_steps,forks_copy_on_write_and_share,the_device_chooses_what_the_host_would ;;
    test_engine) echo greedy_tokens_are_the_cpus,logits_are_close,drawn_tokens_are_those_of_the_logits,preempted_and_resumed,a_host_changes_its_mind,smollm2 ;;
    test_attention) echo not:decoding_loads_each_key_once_without_conflicts,no_tile_has_bank_conflicts ;;
    test_driver | test_emulator) echo none ;;
    *) echo all ;;
    esac
}

# --- build ---

jobs=$(nproc 2>/dev/null || echo 2)
flags="-O2 -g -ffp-contract=off -pthread -I. -Iinclude -Ilib -Itests/gpu/include -Itests -DKVPAGE_TESTS=\"tests\""

# Lines "output input more flags", compiled side by side.
compile() {
    xargs -P "$jobs" -I LINE sh -c '
        set -- LINE
        out=$1 in=$2
        shift 2
        mkdir -p "$(dirname "$out")"
        case $in in
        *.c) ${CC:-cc} -std=c11 $FLAGS "$@" -c "$in" -o "$out" ;;
        *) ${CXX:-c++} -std=c++17 $FLAGS "$@" -c "$in" -o "$out" ;;
        esac || { echo "does not compile: $in" >&2; exit 255; }'
}

images() {
    mkdir -p $dir/images
    ls tests/emu/*.cu tests/gpu/*.cu | xargs -P "$jobs" -I FILE sh -c '
        "$0" -std=c++17 -O3 -I. -gencode arch=compute_90,code=sm_90 \
            -gencode arch=compute_80,code=compute_80 -fatbin \
            -o '$dir'/images/$(basename FILE .cu).fatbin FILE || exit 255' "$nvcc"
}

link() { # program objects
    out=$1
    shift
    ${CXX:-c++} -s -pthread -static-libgcc -static-libstdc++ -o "$out" "$@" $support "$library" -lm -ldl
}

build() {
    rm -rf $dir
    mkdir -p $dir/o
    FLAGS=$flags
    export FLAGS
    library=$(sh $tools/make.sh -s print-tests | tr ' ' '\n' | sed -n '1s|/tests/.*|/libkvpage.a|p')
    sh $tools/make.sh -s "$library" || return 1
    cp "$library" $dir/o/ && library=$dir/o/libkvpage.a
    {
        for f in tests/support/*.c tests/gpu/*.cc; do echo "$dir/o/${f%.*}.o $f"; done
        for f in tests/emu/*.cc; do
            case $f in tests/emu/main_*) ;; *) echo "$dir/o/${f%.cc}.o $f" ;; esac
        done
        # The replay of lanes is by the emulator in any case; the other kernels only without a card.
        echo "$dir/o/tests/emu/lanes_cu.o tests/emu/lanes.cu -x c++"
        [ $mode = card ] || for f in cuda/kernels/*.cu tests/emu/*.cu; do
            echo "$dir/o/kernels/$(basename "$f" .cu).o $f -x c++"
        done
    } | compile || return 1
    support=$(ls $dir/o/tests/support/*.o)
    emulator=$(ls $dir/o/tests/emu/*.o | grep -v -E '/test_[a-z_]*\.o$|/lanes(_cu)?\.o$')
    if [ $mode = card ]; then
        images || return 1
        machine="$dir/o/tests/gpu/card.o"
    else
        machine="$emulator $(ls $dir/o/kernels/*.o)"
    fi
    lanes=$dir/o/tests/emu/lanes.o
    for f in $dir/o/tests/emu/test_*.o; do
        name=$(basename "$f" .o)
        [ "$(on_card "$name")" = none ] || link $dir/"$name" "$f" $machine $lanes || return 1
    done
    link $dir/gates $dir/o/tests/gpu/gates.o $machine &&
        link $dir/capture $dir/o/tests/gpu/capture.o $machine $lanes &&
        link $dir/replay_lanes $dir/o/tests/emu/test_lanes.o $emulator $lanes $dir/o/tests/emu/lanes_cu.o || return 1
    echo $mode >$dir/mode
    rm -rf $dir/o
}

# --- run ---

say() { printf '%s\t%s\t%s\t%s\t%s\n' "$@" >>$lines; }

# What a run of tests came to, from the counts that run-tests.sh adds to a file.
tests() { # label program
    TEST_TIMEOUT=${LIMIT:-150} sh $tools/run-tests.sh $dir/counts "$1 " "$2"
    tail -n 1 $dir/counts | {
        read -r passed failed skipped _
        verdict=passed
        [ "$failed" = 0 ] || verdict=FAILED
        say "$1 $(basename "$2")" "$passed" tests "0 failed" "$verdict: $failed failed, $skipped skipped"
    }
}

sanitizer() { # tool program tests
    if ! command -v compute-sanitizer >/dev/null 2>&1; then
        say "compute-sanitizer $1, $(basename "$2")" - errors 0 "skipped: not installed"
        return
    fi
    KVPAGE_ONLY=$3 timeout 100 compute-sanitizer --tool "$1" "$2" >$dir/sanitizer.txt 2>&1
    summary=$(sed -n 's/^========= ERROR SUMMARY: \([0-9]*\) error.*/\1/p' $dir/sanitizer.txt | tail -n 1)
    [ -n "$summary" ] || summary=$(sed -n 's/^========= RACECHECK SUMMARY: \([0-9]*\) hazard.*/\1/p' \
        $dir/sanitizer.txt | tail -n 1)
    if [ -z "$summary" ]; then
        say "compute-sanitizer $1, $(basename "$2")" - errors 0 \
            "skipped: $(grep -v '^ok\|^1\.\.' $dir/sanitizer.txt | tail -n 1 | tr '\t' ' ')"
    else
        verdict=FAILED
        [ "$summary" = 0 ] && verdict=passed
        say "compute-sanitizer $1, $(basename "$2")" "$summary" errors 0 $verdict
    fi
}

report() { # JSON and a table of the lines
    awk -F'\t' -v card="$card" -v date="$(date -u +%Y-%m-%d)" -v seconds="$seconds" '
        function text(s) { gsub(/\\/, "\\\\", s); gsub(/"/, "\\\"", s); return "\"" s "\"" }
        function value(s) { return s ~ /^-?[0-9.]+(e[-+]?[0-9]+)?$/ ? s : s == "-" ? "null" : text(s) }
        BEGIN { printf "{\"card\": %s, \"date\": \"%s\", \"seconds\": %s, \"lines\": [", text(card), date, seconds }
        { printf "%s\n  {\"what\": %s, \"measured\": %s, \"unit\": %s, \"wanted\": %s, \"verdict\": %s}",
              (NR > 1 ? "," : ""), text($1), value($2), text($3), text($4), text($5) }
        END { print "\n]}" }' $lines >$dir/results.json
    awk -F'\t' -v card="$card" -v date="$(date -u +%Y-%m-%d)" -v seconds="$seconds" '
        BEGIN {
            printf "`make gpu-check` on %s, %s, %s s.\n\n", card, date, seconds
            print "| what | measured | unit | wanted | |"
            print "|---|---|---|---|---|"
        }
        { printf "| %s | %s | %s | %s | %s |\n", $1, $2, $3, $4, $5 }' $lines >$dir/results.md
}

run() {
    [ -f $dir/mode ] || { echo "gpu-check: nothing is built" >&2; return 1; }
    mode=$(cat $dir/mode)
    begin=$(date +%s)
    lines=$dir/lines.tsv
    : >$lines
    : >$dir/counts
    KVPAGE_GPU_IMAGES=$dir/images
    KVPAGE_TESTS=tests
    export KVPAGE_GPU_IMAGES KVPAGE_TESTS
    if [ $mode = card ]; then
        card=$(nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader 2>/dev/null |
            sed 1q)
        card=${card:-an unknown card}
    else
        card="the emulator: no card, no times"
    fi
    echo "gpu-check on $card"

    $dir/gates >$dir/gates.tsv 2>$dir/gates.err
    [ $? = 0 ] || say gates - "" "" "FAILED: $(tail -n 1 $dir/gates.err | tr '\t' ' ')"
    cat $dir/gates.tsv
    cat $dir/gates.tsv >>$lines
    if [ $mode = card ]; then
        python3 tests/gpu/torch_attention.py >$dir/torch.tsv 2>$dir/torch.err ||
            printf 'PyTorch attention\t-\t\t\tskipped: %s\n' "$(tail -n 1 $dir/torch.err)" >$dir/torch.tsv
        cat $dir/torch.tsv
        cat $dir/torch.tsv >>$lines
    fi

    if $dir/capture $dir/lanes.bin; then
        (KVPAGE_LANES=$dir/lanes.bin && export KVPAGE_LANES && tests "lanes:" $dir/replay_lanes)
    else
        say "lanes" - "" "" "FAILED: not captured"
    fi
    for program in $dir/test_*; do
        name=$(basename "$program")
        only=$(on_card "$name")
        (
            case $only in
            all) ;;
            not:*) export KVPAGE_NOT="${only#not:}" ;;
            *) export KVPAGE_ONLY="$only" ;;
            esac
            tests "$mode:" "$program"
        )
    done
    if [ $mode = card ]; then
        sanitizer memcheck $dir/test_rows embed_gathers_rows_of_every_type
        sanitizer memcheck $dir/test_device models_agree_with_the_cpu
        sanitizer racecheck $dir/test_device mixed_steps
    fi
    seconds=$(($(date +%s) - begin))
    report
    sh $tools/tally.sh $dir/counts
    echo "$(grep -c MISSED $lines) gates missed; $seconds s; $dir/results.json, $dir/results.md"
    ! grep -q -E '	(FAILED|WRONG)' $lines
}

status=0
if [ "$phase" != run ]; then build || exit 1; fi
if [ "$phase" != build ]; then run || status=1; fi
exit $status
