/*
 * Sixteen lanes in one AVX-512 register (F, BW, DQ, VL and VNNI). See vec.h for what each operation
 * is.
 *
 * vpdpbusd adds four products of unsigned weights and signed activations to 32 bits: exact. Signed
 * weights are moved up by 128, and the caller takes 128 times the sum of the activations away.
 * With KVP__NO_ASM (the test build on emulated intrinsics) intrinsics replace the one-line asm,
 * which is there because GCC copies the accumulators and loads the activations apart.
 */
#ifndef KVP_CPU_VEC_AVX512_H
#define KVP_CPU_VEC_AVX512_H

#include <immintrin.h>

typedef __m512 vf;
typedef __m512i vi;
typedef __mmask16 vm;
typedef __m512i vb;

/* --- floats --- */

KVP__INLINE vf vf_zero(void) { return _mm512_setzero_ps(); }
KVP__INLINE vf vf_set1(float a) { return _mm512_set1_ps(a); }
KVP__INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
KVP__INLINE void vf_store(float *p, vf a) { _mm512_storeu_ps(p, a); }

KVP__INLINE vm vm_first(uint32_t n) { return (vm)((1u << n) - 1u); }

KVP__INLINE vf vf_load_n(const float *p, uint32_t n)
{
    return _mm512_maskz_loadu_ps(vm_first(n), p);
}

KVP__INLINE void vf_store_n(float *p, vf a, uint32_t n)
{
    _mm512_mask_storeu_ps(p, vm_first(n), a);
}

KVP__INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
KVP__INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
KVP__INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
KVP__INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
KVP__INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
KVP__INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
KVP__INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
KVP__INLINE vf vf_sqrt(vf a) { return _mm512_sqrt_ps(a); }

KVP__INLINE vf vf_abs(vf a) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), a); }
KVP__INLINE vf vf_neg(vf a) { return _mm512_xor_ps(_mm512_set1_ps(-0.0f), a); }
KVP__INLINE vf vf_round(vf a)
{
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

KVP__INLINE vi vf_to_vi(vf a) { return _mm512_cvtps_epi32(a); }
KVP__INLINE vf vi_to_vf(vi a) { return _mm512_cvtepi32_ps(a); }
KVP__INLINE vi vf_bits(vf a) { return _mm512_castps_si512(a); }
KVP__INLINE vf vi_float(vi a) { return _mm512_castsi512_ps(a); }

KVP__INLINE vf vf_swap_pairs(vf a)
{
    return _mm512_castsi512_ps(
        _mm512_shuffle_epi32(_mm512_castps_si512(a), (_MM_PERM_ENUM)0xb1));
}

KVP__INLINE vf vf_load_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}

KVP__INLINE void vf_store_f16(uint16_t *p, vf a)
{
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}

KVP__INLINE __m256 upper(vf a)
{
    return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1));
}

KVP__INLINE float vf_sum(vf a)
{
    __m256 e = _mm256_add_ps(_mm512_castps512_ps256(a), upper(a));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

KVP__INLINE float vf_max_lane(vf a)
{
    __m256 e = _mm256_max_ps(_mm512_castps512_ps256(a), upper(a));
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

/* --- truth values --- */

KVP__INLINE vm vf_lt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
KVP__INLINE vm vf_le(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
KVP__INLINE vm vf_eq(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
KVP__INLINE vm vi_gt(vi a, vi b) { return _mm512_cmpgt_epi32_mask(a, b); }
KVP__INLINE vm vi_eq(vi a, vi b) { return _mm512_cmpeq_epi32_mask(a, b); }
KVP__INLINE vm vm_and(vm a, vm b) { return (vm)(a & b); }
KVP__INLINE vm vm_or(vm a, vm b) { return (vm)(a | b); }
KVP__INLINE vm vm_not(vm a) { return (vm)~a; }
KVP__INLINE vf vf_select(vm m, vf a, vf b) { return _mm512_mask_blend_ps(m, b, a); }
KVP__INLINE vi vi_select(vm m, vi a, vi b) { return _mm512_mask_blend_epi32(m, b, a); }

/* --- integers --- */

KVP__INLINE vi vi_zero(void) { return _mm512_setzero_si512(); }
KVP__INLINE vi vi_set1(int32_t a) { return _mm512_set1_epi32(a); }
KVP__INLINE vi vi_iota(void)
{
    return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
KVP__INLINE vi vi_load(const int32_t *p) { return _mm512_loadu_si512(p); }
KVP__INLINE void vi_store(int32_t *p, vi a) { _mm512_storeu_si512(p, a); }
KVP__INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
KVP__INLINE vi vi_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
KVP__INLINE vi vi_mul(vi a, vi b) { return _mm512_mullo_epi32(a, b); }
KVP__INLINE vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
KVP__INLINE vi vi_or(vi a, vi b) { return _mm512_or_si512(a, b); }
KVP__INLINE vi vi_xor(vi a, vi b) { return _mm512_xor_si512(a, b); }
KVP__INLINE vi vi_max(vi a, vi b) { return _mm512_max_epi32(a, b); }
KVP__INLINE vi vi_min(vi a, vi b) { return _mm512_min_epi32(a, b); }
KVP__INLINE vi vi_shl(vi a, int n) { return _mm512_sll_epi32(a, _mm_cvtsi32_si128(n)); }
KVP__INLINE vi vi_shr(vi a, int n) { return _mm512_srl_epi32(a, _mm_cvtsi32_si128(n)); }
KVP__INLINE vi vi_sar(vi a, int n) { return _mm512_sra_epi32(a, _mm_cvtsi32_si128(n)); }

KVP__INLINE vi vi_load_u16(const uint16_t *p)
{
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p));
}

KVP__INLINE void vi_store_u16(uint16_t *p, vi a)
{
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtepi32_epi16(a));
}

KVP__INLINE vi vi_load_u8(const uint8_t *p)
{
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
}

KVP__INLINE vi vi_load_s8(const int8_t *p)
{
    return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
}

KVP__INLINE void vi_store_s8(int8_t *p, vi a)
{
    _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtepi32_epi8(a));
}

KVP__INLINE int32_t vi_sum(vi a) { return _mm512_reduce_add_epi32(a); }

KVP__INLINE vi vi_madd16(vi acc, vi a, vi b) { return _mm512_dpwssd_epi32(acc, a, b); }

/* --- bytes --- */

KVP__INLINE vb vb_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
KVP__INLINE void vb_store(uint8_t *p, vb a) { _mm512_storeu_si512(p, a); }
KVP__INLINE vb vb_set1(uint8_t a) { return _mm512_set1_epi8((char)a); }
KVP__INLINE vb vb_and(vb a, vb b) { return _mm512_and_si512(a, b); }
KVP__INLINE vb vb_sub(vb a, vb b) { return _mm512_sub_epi8(a, b); }
KVP__INLINE vb vb_or(vb a, vb b) { return _mm512_or_si512(a, b); }
KVP__INLINE vb vb_shl(vb a, int n) { return _mm512_sll_epi16(a, _mm_cvtsi32_si128(n)); }
KVP__INLINE vb vb_shr(vb a, int n) { return _mm512_srl_epi16(a, _mm_cvtsi32_si128(n)); }
KVP__INLINE vi vb_vi(vb a) { return a; }

/* --- dot products of bytes --- */

typedef __m512i vd;

#define VD_STEPS(bits) ((void)(bits), 8)
#define VD_STEPS_S8 8
#define VD_S8_EXCESS 128

KVP__INLINE vd vd_open(vi acc) { return acc; }
KVP__INLINE vi vd_close(vi acc, vd d) { return (void)acc, d; }

/* |d| < 2^16: as two int16 halves it is d = high * 65536 + low, but scales are needed with a
 * single product, so the 32-bit multiply it is. The scale's copy in the high half is cut off. */
KVP__INLINE vi vd_close_scaled(vi acc, vd d, vi s)
{
    vi scale = vi_sar(vi_shl(s, 16), 16);
    return _mm512_add_epi32(acc, _mm512_mullo_epi32(d, scale));
}

KVP__INLINE vd vd_step(vd d, vb w, const int8_t *x)
{
#ifdef KVP__NO_ASM
    int32_t t;
    memcpy(&t, x, sizeof t);
    return _mm512_dpbusd_epi32(d, w, _mm512_set1_epi32(t));
#else
    typedef struct { int8_t x[4]; } four;
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(d) : "v"(w), "m"(*(const four *)x));
    return d;
#endif
}

KVP__INLINE vd vd_step_s8(vd d, vb w, const int8_t *x)
{
    return vd_step(d, _mm512_xor_si512(w, _mm512_set1_epi8((char)0x80)), x);
}

#endif
