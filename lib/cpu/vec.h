/*
 * Sixteen lanes at every instruction-set level: the vocabulary the kernels are written in.
 *
 *     vf  16 floats      vi  16 int32      vm  16 truth values      vb  64 bytes
 *
 * AVX-512 holds one in a register, AVX2 in two, NEON in four, plain C in an array. The lanes stand
 * for outputs, keys or dimensions; where they are summed, it is by one fixed tree (vf_sum).
 *
 * Invariant: each operation gives the same bits at every level (the payload and sign of a NaN that
 * an operation makes excepted). Hence no reciprocal estimates, no fused multiply-add but vf_fma,
 * and functions beyond the basic ones are written once, here, from basic ones.
 *
 * Only the files of level/ include this, and everything in it is inlined into them.
 *
 * Basic operations, from the level's header:
 *     vf_zero vf_set1 vf_load vf_store         unaligned
 *     vf_load_n vf_store_n                     the first n lanes, 0 <= n <= 16, the others 0
 *     vf_add vf_sub vf_mul vf_div vf_sqrt      correctly rounded
 *     vf_fma(a, b, c)                          a * b + c, rounded once
 *     vf_max(a, b) vf_min(a, b)                a > b ? a : b,  a < b ? a : b: b if either is a NaN
 *     vf_abs vf_neg vf_round                   sign bits; to an integer, ties to even
 *     vf_to_vi                                 ties to even; |a| < 2^31 or the result is arbitrary
 *     vi_to_vf                                 rounded to nearest
 *     vf_bits vi_float                         the same bits as the other type
 *     vf_swap_pairs                            lanes 1 0 3 2 5 4 ...
 *     vf_load_f16 vf_store_f16                 16 halves; to nearest, ties to even
 *     vf_sum vf_max_lane                       one float; the tree i + 8, + 4, + 2, + 1
 *     vf_lt vf_le vf_eq vi_gt vi_eq            a vm; false where a NaN is
 *     vm_and vm_or vm_not vm_first(n)
 *     vf_select vi_select(m, a, b)             m ? a : b
 *     vi_zero vi_set1 vi_load vi_store vi_iota
 *     vi_add vi_sub vi_mul vi_and vi_or vi_xor vi_max vi_min
 *     vi_shl vi_shr vi_sar(v, n)               logical and arithmetic, n the same for all lanes
 *     vi_load_u16 vi_store_u16                 16 x 16 bits, zero-extended; the low halves
 *     vi_load_u8 vi_load_s8 vi_store_s8        16 bytes; values from -128 to 127
 *     vi_sum                                   of 16, which must fit
 *     vi_madd16(acc, a, b)                     acc + a.lo * b.lo + a.hi * b.hi, int16 halves
 *     vb_load vb_set1 vb_and vb_or vb_shl vb_shr   bytes; a shift's bits may cross inside 16 bits,
 *                                              so a mask has to follow
 *     vb_vi                                    the bytes as 16 int32
 *     vb_store vb_sub                          AVX-512 only, for level/tiles.c
 *
 * Dot products of bytes, exact: lane o of a vb holds four weights, to be multiplied by the same
 * four activations (-127..127) for every o. A vd is such a sum under way; how many steps it can
 * take before it must be closed depends on the level and on the largest weight:
 *     VD_STEPS(bits)                           1, 2, 4 or 8 steps, for weights below 2^bits
 *     vd_open(vi acc) vd_close(vi acc, vd d)   a new sum; acc + d (some levels start d with acc)
 *     vd_close_scaled(vi acc, vd d, vi s)      acc + d * s, for d opened with zero; the lanes of s
 *                                              hold the scale twice, as two int16
 *     vd_step(d, vb w, const int8_t *x)        d + w . x, 0 <= w < 128
 *     VD_STEPS_S8 vd_step_s8                   the same for w from -128 to 127, plus VD_S8_EXCESS
 *                                              times the sum of x: the caller takes that off
 */
#ifndef KVP_CPU_VEC_H
#define KVP_CPU_VEC_H

#include "base/base.h"
#include "base/half.h"
#include "cpu/kernels.h"

#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "panels hold the file's little-endian numbers as they are"
#endif

#define KVP__INLINE static inline __attribute__((always_inline, unused))

#if KVP__LEVEL == KVP_CPU_GENERIC
#include "cpu/vec_generic.h"
#elif KVP__LEVEL == KVP_CPU_AVX2
#include "cpu/vec_avx2.h"
#elif KVP__LEVEL == KVP_CPU_AVX512 || KVP__LEVEL == KVP_CPU_AMX
#include "cpu/vec_avx512.h"
#elif KVP__LEVEL == KVP_CPU_NEON || KVP__LEVEL == KVP__CPU_NEON_DOT
#include "cpu/vec_neon.h"
#else
#error "KVP__LEVEL is not a level"
#endif

/* --- bfloat16 --- */

KVP__INLINE vf vf_load_bf16(const uint16_t *p) { return vi_float(vi_shl(vi_load_u16(p), 16)); }

/* To nearest, ties to even; a NaN stays one. */
KVP__INLINE void vf_store_bf16(uint16_t *p, vf a)
{
    vi u = vf_bits(a);
    vi odd = vi_and(vi_shr(u, 16), vi_set1(1));
    vi rounded = vi_shr(vi_add(u, vi_add(odd, vi_set1(0x7fff))), 16);
    vi quiet = vi_or(vi_shr(u, 16), vi_set1(0x40));
    vi_store_u16(p, vi_select(vf_eq(a, a), rounded, quiet));
}

/* --- the first n lanes of halves --- */

KVP__INLINE vf vf_load_f16_n(const uint16_t *p, uint32_t n)
{
    uint16_t t[16] = {0};
    memcpy(t, p, n * sizeof *p);
    return vf_load_f16(t);
}

KVP__INLINE void vf_store_f16_n(uint16_t *p, vf a, uint32_t n)
{
    uint16_t t[16];
    vf_store_f16(t, a);
    memcpy(p, t, n * sizeof *p);
}

KVP__INLINE vf vf_load_bf16_n(const uint16_t *p, uint32_t n)
{
    uint16_t t[16] = {0};
    memcpy(t, p, n * sizeof *p);
    return vf_load_bf16(t);
}

KVP__INLINE void vf_store_bf16_n(uint16_t *p, vf a, uint32_t n)
{
    uint16_t t[16];
    vf_store_bf16(t, a);
    memcpy(p, t, n * sizeof *p);
}

/* Into what a half holds without becoming infinite; a NaN stays one. */
KVP__INLINE vf vf_clamp_f16(vf a)
{
    return vf_max(vf_set1(-65504.0f), vf_min(vf_set1(65504.0f), a));
}

/* --- functions --- */

/*
 * e^x within 1 unit in the last place and a half: x = n ln 2 + r, |r| <= ln 2 / 2, the fraction by
 * a polynomial in r, then two factors that together are 2^n, so that results below the normal
 * range come out rounded once. 0 below -104, infinity above 88.73, NaN for NaN.
 */
/* p and n of e^x = p 2^n, with 0.7 < p < 1.42. */
KVP__INLINE vf exp_parts(vf x, vi *exponent)
{
    vf n = vf_round(vf_mul(x, vf_set1(0x1.715476p+0f)));
    vf r = vf_fma(n, vf_set1(-0x1.62e400p-1f), x);
    r = vf_fma(n, vf_set1(-0x1.7f7d1cp-20f), r);
    vf p = vf_set1(0x1.6a23cep-10f);
    p = vf_fma(p, r, vf_set1(0x1.123a20p-7f));
    p = vf_fma(p, r, vf_set1(0x1.5558f2p-5f));
    p = vf_fma(p, r, vf_set1(0x1.555492p-3f));
    p = vf_fma(p, r, vf_set1(0x1.fffffcp-2f));
    p = vf_fma(vf_mul(p, r), r, r);
    *exponent = vf_to_vi(n);
    return vf_add(p, vf_set1(1.0f));
}

KVP__INLINE vf vf_exp(vf x)
{
    vi i;
    vf p = exp_parts(vf_min(vf_set1(89.0f), vf_max(vf_set1(-104.0f), x)), &i);
    vi half = vi_sar(i, 1);
    vf a = vi_float(vi_shl(vi_add(half, vi_set1(127)), 23));
    vf b = vi_float(vi_shl(vi_add(vi_sub(i, half), vi_set1(127)), 23));
    return vf_mul(vf_mul(p, a), b);
}

/*
 * e^x for x <= 0, and 0 below -64: beside e^0 that is nothing, and it keeps away products too small for a
 * normal number, each of which costs a hundred cycles. Else the same bits as vf_exp's.
 */
KVP__INLINE vf vf_exp_or_zero(vf x)
{
    vi i;
    vf p = exp_parts(x, &i);
    vf e = vi_float(vi_add(vf_bits(p), vi_shl(i, 23)));
    return vf_select(vf_lt(x, vf_set1(-64.0f)), vf_zero(), e);
}

/* 1 / (1 + e^-x) */
KVP__INLINE vf vf_sigmoid(vf x)
{
    vf one = vf_set1(1.0f);
    return vf_div(one, vf_add(one, vf_exp(vf_neg(x))));
}

/*
 * The hyperbolic tangent within 2 units in the last place: an odd polynomial below 0.625, where
 * 1 - 2 / (e^2x + 1) would cancel, and that above.
 */
KVP__INLINE vf vf_tanh(vf x)
{
    vf a = vf_abs(x), z = vf_mul(x, x), one = vf_set1(1.0f);
    vf p = vf_set1(-0x1.759544p-8f);
    p = vf_fma(p, z, vf_set1(0x1.521628p-6f));
    p = vf_fma(p, z, vf_set1(-0x1.b839f2p-5f));
    p = vf_fma(p, z, vf_set1(0x1.110716p-3f));
    p = vf_fma(p, z, vf_set1(-0x1.555532p-2f));
    p = vf_fma(vf_mul(p, z), x, x);
    vf e = vf_exp(vf_add(a, a));
    vf t = vf_sub(one, vf_div(vf_set1(2.0f), vf_add(e, one)));
    t = vf_select(vf_lt(x, vf_zero()), vf_neg(t), t);
    return vf_select(vf_lt(a, vf_set1(0.625f)), p, t);
}

#endif
