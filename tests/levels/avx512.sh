#!/bin/sh
# Runs the kernels' tests with the AVX-512 level on a machine that may lack it, its intrinsics
# emulated: avx512.sh RESULTS BUILD. The level's files are compiled once more with emulated/ before
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
mkdir -p "$out"
flags="-std=c11 -Wno-psabi -ffp-contract=off -I$root/include -I$root/lib"
objects=
fail() {
    echo "0 1 0 avx512-build" >>"$results"
    echo "  avx512: $1 does not build"
    exit 0
}
for f in "$root"/lib/cpu/level/*.c; do
    o=$out/$(basename "$f" .c).o
    optimise=-O1
    [ "$(basename "$f")" = matmul.c ] && optimise=-O0 # else it takes minutes
    $cc $flags $optimise -I"$here/emulated" -mavx2 -mfma -mf16c -DKVP__LEVEL=3 -DKVP__NO_ASM -w \
        -c -o "$o" "$f" || fail "$f"
    objects="$objects $o"
done
$cc $flags -c -o "$out/levels.o" "$here/emulated/levels.c" || fail levels.c
f=$root/tests/unit/cpu/vec_probe_avx512.c
$cc $flags -O1 -I"$here/emulated" -mavx2 -mfma -mf16c -DKVP__NO_ASM -w -c \
    -o "$out/vec_probe_avx512.o" "$f" || fail "$f"
programs=
for t in "$build"/tests/unit/cpu/test_*.o; do
    program=$out/$(basename "$t" .o)
    helpers=$(ls "$build"/tests/unit/cpu/*.o | grep -v -e /test_ -e vec_probe_avx512)
    $cc -o "$program" "$t" $helpers $objects "$out"/levels.o \
        "$out"/vec_probe_avx512.o "$build"/tests/support/*.o \
        "$build/libkvpage.a" -lcmocka -lm -pthread || fail "$t"
    programs="$programs $program"
done
TEST_TIMEOUT=900 sh "$here/../tools/run-tests.sh" "$results" "avx512:" $programs
