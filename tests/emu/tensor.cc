/*
 * ldmatrix and mma.m16n8k16. The fragments are those of the PTX manual; lane = 4 * g + t:
 *
 *     8x8 matrix of halves (ldmatrix, A's quarters, B's halves): row g, columns 2t and 2t + 1
 *     A: a0 rows 0-7, columns 0-7   a1 rows 8-15   a2 columns 8-15   a3 both
 *     B: b0 k 0-7, b1 k 8-15; the matrix's rows are B's columns
 *     C: c0, c1 row g, columns 2t, 2t + 1; c2, c3 row g + 8
 *
 * So a register of all 32 lanes, side by side, is a matrix row by row, and needs no gathering.
 * Products of halves are exact in float; they are added to C in the order of k, each sum rounded.
 * The GPU's order and rounding are its own: tests must leave room for that, and results here do not
 * depend on the CPU.
 */
#include <string.h>

#include "tests/emu/runtime.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace emu {

typedef uint16_t half8 __attribute__((vector_size(16)));

/* Rows become columns: pairs, then pairs of pairs, then quads. */
static inline void transpose(half8 (&m)[8])
{
    half8 a[8], b[8];
    for (int i = 0; i < 4; i++) {
        a[2 * i] = __builtin_shufflevector(m[i], m[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
        a[2 * i + 1] = __builtin_shufflevector(m[i], m[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
    }
    for (int i = 0; i < 4; i++) {
        b[2 * i] = __builtin_shufflevector(a[i], a[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
        b[2 * i + 1] = __builtin_shufflevector(a[i], a[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
    }
    for (int i = 0; i < 4; i++) {
        m[2 * i] = __builtin_shufflevector(b[i], b[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
        m[2 * i + 1] = __builtin_shufflevector(b[i], b[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
    }
}

/* --- ldmatrix --- */

/* Passes over the banks for eight rows of 16 bytes: two rows in one group of four banks take two,
 * unless they are the same row. */
static unsigned passes(const unsigned char *const *rows)
{
    unsigned most = 1;
    for (unsigned i = 0; i < 8; i++) {
        unsigned n = 1;
        for (unsigned j = 0; j < i; j++) {
            bool same_bank = !(((uintptr_t)rows[i] ^ (uintptr_t)rows[j]) >> 4 & 7);
            if (rows[i] == rows[j]) {
                n = 0;
                break;
            }
            n += same_bank;
        }
        if (n > most) most = n;
    }
    return most;
}

/* A lane reads the elements that it is given, wherever the address of their row came from. */
static void note_reads(warp *w, bool transposed, const char *file, int line)
{
    lane_view *caller = current;
    for (unsigned i = 0; i < LANES; i++) {
        unsigned step = transposed ? 1 : 2;
        for (unsigned j = 0; j < 8; j += step) {
            current = &w->lanes[transposed ? 4 * j + i % 8 / 2 : 4 * (i % 8) + j / 2];
            race_read(w->rows[i] + 2 * j, 2 * step, file, line);
        }
    }
    current = caller;
}

static void load_matrices(warp *w, bool transposed)
{
    for (unsigned i = 0; i < 4; i++) {
        half8 m[8];
        for (unsigned j = 0; j < 8; j++) memcpy(&m[j], w->rows[8 * i + j], 16);
        if (transposed) transpose(m);
        memcpy(w->r[i], m, sizeof m);
        self->stats.ldmatrix_conflicts += passes(w->rows + 8 * i) - 1;
    }
}

void ldmatrix(uint32_t *r, const void *s, bool transposed, const char *file, int line)
{
    const char *what = transposed ? "ldmatrix.trans" : "ldmatrix";
    fiber *f = me();
    warp *w = f->warp;
    check_shared(s, 16, what, file, line);
    w->rows[f->lane] = static_cast<const unsigned char *>(s);
    if (last_to_arrive(w, ALL, what, file, line)) {
        if (self->race) note_reads(w, transposed, file, line);
        load_matrices(w, transposed);
        self->stats.ldmatrix++;
        wake(w, ALL);
    }
    for (unsigned i = 0; i < 4; i++) r[i] = w->r[i][f->lane];
}

/* --- mma --- */

/* B with k going down and columns across. */
static inline void rows_of_b(const warp *w, half8 (&b)[2][8])
{
    for (unsigned i = 0; i < 2; i++) {
        memcpy(b[i], w->b[i], sizeof b[i]);
        transpose(b[i]);
    }
}

static void multiply_plain(warp *w, bool bf16)
{
    half8 halves[2][8];
    rows_of_b(w, halves);
    float b[16][8];
    for (unsigned k = 0; k < 16; k++)
        for (unsigned n = 0; n < 8; n++) {
            uint16_t h = halves[k / 8][k % 8][n];
            b[k][n] = bf16 ? kvp::bf16_float(h) : kvp::f16_float(h);
        }
    for (unsigned row = 0; row < 16; row++) {
        float *c = &w->c[row / 8][row % 8 * 4][0];
        for (unsigned k = 0; k < 16; k++) {
            uint16_t h;
            const uint32_t *a = w->a[k / 8 * 2 + row / 8];
            memcpy(&h, reinterpret_cast<const char *>(a) + (row % 8 * 8 + k % 8) * 2, 2);
            float x = bf16 ? kvp::bf16_float(h) : kvp::f16_float(h);
            for (unsigned n = 0; n < 8; n++) c[n] += x * b[k][n];
        }
    }
}

#if defined(__x86_64__)
#define EMU_AVX2 __attribute__((target("avx2,fma,f16c"), always_inline)) static inline

EMU_AVX2 __m256 floats_of(__m128i h, bool bf16)
{
    if (!bf16) return _mm256_cvtph_ps(h);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

/* The products are exact, so that fusing them with the sums changes nothing. */
template <bool bf16>
__attribute__((target("avx2,fma,f16c"))) static void multiply_avx2(warp *w)
{
    half8 halves[2][8];
    rows_of_b(w, halves);
    __m256 b[16];
    for (unsigned k = 0; k < 16; k++) b[k] = floats_of((__m128i)halves[k / 8][k % 8], bf16);
    for (unsigned half = 0; half < 2; half++) {
        alignas(32) float a[8][16];
        for (unsigned i = 0; i < 2; i++) {
            const __m128i *m = reinterpret_cast<const __m128i *>(w->a[2 * i + half]);
            for (unsigned row = 0; row < 8; row++)
                _mm256_store_ps(&a[row][8 * i], floats_of(_mm_load_si128(m + row), bf16));
        }
        __m256 c[8];
        float *to = &w->c[half][0][0];
#pragma GCC unroll 8
        for (unsigned row = 0; row < 8; row++) c[row] = _mm256_load_ps(to + 8 * row);
        for (unsigned k = 0; k < 16; k++)
#pragma GCC unroll 8
            for (unsigned row = 0; row < 8; row++)
                c[row] = _mm256_fmadd_ps(_mm256_broadcast_ss(&a[row][k]), b[k], c[row]);
#pragma GCC unroll 8
        for (unsigned row = 0; row < 8; row++) _mm256_store_ps(to + 8 * row, c[row]);
    }
}

static bool has_avx2()
{
    /* Not every compiler knows the last by name. */
    unsigned a, b, c, d;
    static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                            __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
    return has;
}
#endif

static void multiply(warp *w, bool bf16)
{
#if defined(__x86_64__)
    if (has_avx2()) {
        bf16 ? multiply_avx2<true>(w) : multiply_avx2<false>(w);
        return;
    }
#endif
    multiply_plain(w, bf16);
}

void mma(float *c, const uint32_t *a, uint32_t b0, uint32_t b1, bool bf16, const char *file,
         int line)
{
    fiber *f = me();
    warp *w = f->warp;
    unsigned lane = f->lane;
    for (unsigned i = 0; i < 4; i++) w->a[i][lane] = a[i];
    w->b[0][lane] = b0;
    w->b[1][lane] = b1;
    memcpy(w->c[0][lane], c, 8);
    memcpy(w->c[1][lane], c + 2, 8);
    if (last_to_arrive(w, ALL, bf16 ? "mma_bf16" : "mma_f16", file, line)) {
        multiply(w, bf16);
        self->stats.mma++;
        wake(w, ALL);
    }
    memcpy(c, w->c[0][lane], 8);
    memcpy(c + 2, w->c[1][lane], 8);
}

} // namespace emu
