/*
 * Every operation that kernels are written in, lane by lane: what goes in, and how near what comes
 * out on the emulator must be to what came out on a card. tests/gpu captures a card's answers once,
 * into tests/emu/lanes.bin; test_lanes.cc replays them.
 *
 * An operation is run in LANES_ROUNDS blocks of one warp; each lane is given four words and gives
 * four. What is given is a function of operation, round, lane and word alone, so that only answers
 * are kept.
 */
#ifndef TESTS_EMU_LANES_H
#define TESTS_EMU_LANES_H

#include <stdint.h>

enum { LANES_ROUNDS = 8, LANES_WORDS = 4, LANES_OF_OP = LANES_ROUNDS * 32 * LANES_WORDS };

/* What words are: any bits; floats of every kind; floats between -8 and 8, above 0 for POSITIVE;
 * pairs of 16-bit floats, between -2 and 2 where they go in. */
enum {
    LANES_BITS, LANES_FLOATS, LANES_SMALL, LANES_POSITIVE, LANES_F16, LANES_BF16, LANES_DOUBLES
};

/* Name, what goes in, what comes out, and by what a float may differ: relative, and absolute; both
 * 0: by no bit, but that all NaNs are one. Tolerances are those that CUDA documents for the
 * approximate functions; products of fragments may differ in how the card rounds its sums, which is
 * documented nowhere. */
#define LANES_OPERATIONS(X)                                                                        \
    X(cp_async16_on, LANES_BITS, LANES_BITS, 0, 0)                                                 \
    X(cp_async16_off, LANES_BITS, LANES_BITS, 0, 0)                                                \
    X(ldsm4, LANES_BITS, LANES_BITS, 0, 0)                                                         \
    X(ldsm4t, LANES_BITS, LANES_BITS, 0, 0)                                                        \
    X(load16, LANES_BITS, LANES_BITS, 0, 0)                                                        \
    X(mma_f16, LANES_F16, LANES_FLOATS, 1e-5, 1e-5)                                                \
    X(mma_bf16, LANES_BF16, LANES_FLOATS, 1e-5, 1e-5)                                              \
    X(ex2, LANES_SMALL, LANES_FLOATS, 4e-7, 0)                                                     \
    X(ex2_any, LANES_FLOATS, LANES_FLOATS, 4e-7, 0)                                                \
    X(lg2, LANES_POSITIVE, LANES_FLOATS, 4e-7, 4e-7)                                               \
    X(rcp, LANES_FLOATS, LANES_FLOATS, 3e-7, 0)                                                    \
    X(tanh_fast, LANES_SMALL, LANES_FLOATS, 1e-3, 1e-6)                                            \
    X(pack_f16, LANES_FLOATS, LANES_F16, 0, 0)                                                     \
    X(pack_bf16, LANES_FLOATS, LANES_BF16, 0, 0)                                                   \
    X(float_f16, LANES_FLOATS, LANES_F16, 0, 0)                                                    \
    X(float_bf16, LANES_FLOATS, LANES_BF16, 0, 0)                                                  \
    X(f16_float, LANES_BITS, LANES_FLOATS, 0, 0)                                                   \
    X(bf16_float, LANES_BITS, LANES_FLOATS, 0, 0)                                                  \
    X(unpack_f16, LANES_BITS, LANES_FLOATS, 0, 0)                                                  \
    X(unpack_bf16, LANES_BITS, LANES_FLOATS, 0, 0)                                                 \
    X(shuffles, LANES_BITS, LANES_BITS, 0, 0)                                                      \
    X(shuffles_of_doubles, LANES_DOUBLES, LANES_BITS, 0, 0)                                        \
    X(votes, LANES_BITS, LANES_BITS, 0, 0)                                                         \
    X(bar_sync, LANES_BITS, LANES_BITS, 0, 0)                                                      \
    X(atomic_add, LANES_BITS, LANES_BITS, 0, 0)                                                    \
    X(add_rn, LANES_FLOATS, LANES_FLOATS, 0, 0)                                                    \
    X(mul_rn, LANES_FLOATS, LANES_FLOATS, 0, 0)                                                    \
    X(fma_rn, LANES_FLOATS, LANES_FLOATS, 0, 0)                                                    \
    X(div_rn, LANES_FLOATS, LANES_FLOATS, 0, 0)                                                    \
    X(add_rn_double, LANES_DOUBLES, LANES_BITS, 0, 0)                                              \
    X(mul_rn_double, LANES_DOUBLES, LANES_BITS, 0, 0)                                              \
    X(fma_rn_double, LANES_DOUBLES, LANES_BITS, 0, 0)                                              \
    X(div_rn_double, LANES_DOUBLES, LANES_BITS, 0, 0)                                              \
    X(dp4a, LANES_BITS, LANES_BITS, 0, 0)                                                          

#define LANES_NUMBER(name, in, out, relative, absolute) LANES_##name,
enum { LANES_OPERATIONS(LANES_NUMBER) LANES_N };
#undef LANES_NUMBER

/* grid (LANES_ROUNDS), 32 threads, LANES_SHARED bytes. */
enum { LANES_SHARED = 1024 };
typedef struct lanes_args {
    const uint32_t *in; /* [round][lane][word] */
    uint32_t *out;
    uint32_t operation, pad;
} lanes_args;

#endif
