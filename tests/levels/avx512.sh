#!/bin/sh
# Runs the kernels' tests with the AVX-512 and AMX levels on a machine that may lack them, their
# intrinsics emulated: avx512.sh RESULTS BUILD. The level's files are compiled once more with emulated/ before
# the compiler's headers, and linked in front of the library, so that its own are not taken.
# Skips where SIMDe or AVX2 is missing. Adds lines to RESULTS as run-tests.sh does.
set -u
results=$1 build=$2
here=$(dirname "$0")
root=$here/../..
out=$build/emulated/tests/unit/cpu
cc=${CC:-cc}
if ! grep -qw avx2 /proc/cpuinfo 2>/dev/null ||
   ! echo '#include <simde/x86/avx512.h>' | $cc -fsyntax-only -x c - 2>/dev/null; then
    echo "  avx512: skipped, needs AVX2 and SIMDe (libsimde-dev)"
    echo "0 0 1 avx512" >>"$results"
    exit 0
fi
# What the machine has, the ordinary test programs have run.
native() { grep -qw "$1" /proc/cpuinfo; }
tests=test_
if native avx512_vnni && native avx512dq && native avx512vl; then
    tests=test_matmul # the one with a kernel for AMX
    if native amx_int8; then
        echo "  avx512: nothing to emulate, the machine has AVX-512 and AMX"
        echo "0 0 1 avx512" >>"$results"
        exit 0
    fi
fi
mkdir -p "$out"
flags="-std=c11 -Wno-psabi -ffp-contract=off -I$root/include -I$root/lib"
objects=
fail() {
    echo "0 1 0 avx512-build" >>"$results"
    echo "  avx512: $1 does not build"
    exit 0
}
compile() { # level source
    o=$out/$(basename "$2" .c)$1.o
    optimise=-O1
    [ "$(basename "$2")" = matmul.c ] && optimise=-O0 # else it takes minutes
    $cc $flags $optimise -I"$here/emulated" -mavx2 -mfma -mf16c -DKVP__LEVEL=$1 -DKVP__NO_ASM -w \
        -c -o "$o" "$2" || fail "$2"
    objects="$objects $o"
}
for f in "$root"/lib/cpu/level/*.c; do
    case $f in
    */tiles.c) compile 5 "$f" ;;
    */table.c) compile 3 "$f"; compile 5 "$f" ;;
    *) compile 3 "$f" ;;
    esac
done
$cc $flags -c -o "$out/levels.o" "$here/emulated/levels.c" || fail levels.c
f=$root/tests/unit/cpu/vec_probe_avx512.c
$cc $flags -O1 -I"$here/emulated" -mavx2 -mfma -mf16c -DKVP__NO_ASM -w -c \
    -o "$out/vec_probe_avx512.o" "$f" || fail "$f"
programs=
for t in "$build"/tests/unit/cpu/$tests*.o; do
    program=$out/$(basename "$t" .o)
    helpers=$(ls "$build"/tests/unit/cpu/*.o | grep -v -e /test_ -e vec_probe_avx512)
    $cc -o "$program" "$t" $helpers $objects "$out"/levels.o \
        "$out"/vec_probe_avx512.o "$build"/tests/support/*.o \
        "$build/libkvpage.a" -lcmocka -lm -pthread || fail "$t"
    programs="$programs $program"
done
TEST_TIMEOUT=900 sh "$here/../tools/run-tests.sh" "$results" "avx512:" $programs
