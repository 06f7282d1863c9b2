/*
 * Sixteen lanes in two AVX2 registers. See vec.h for what each operation is.
 *
 * Dot products of bytes: vpmaddubsw adds two products in 16 bits and saturates, so a sum under way
 * (vd) holds, for each output, the two halves of its group of four, and is closed before 16 bits
 * can overflow: |x| <= 127, so a step adds at most 254 times the largest weight. Signed weights go
 * in as magnitudes, their signs moved to the activations; 2 * 128 * 127 fits, once.
 */
#ifndef KVP_CPU_VEC_AVX2_H
#define KVP_CPU_VEC_AVX2_H

#include <immintrin.h>

typedef struct { __m256 a, b; } vf;
typedef struct { __m256i a, b; } vi;
typedef vi vm; /* all ones or zero */
typedef vi vb;

/* --- floats --- */

KVP__INLINE vf vf_zero(void) { return (vf){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
KVP__INLINE vf vf_set1(float a) { return (vf){_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
KVP__INLINE vf vf_load(const float *p) { return (vf){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
KVP__INLINE void vf_store(float *p, vf a)
{
    _mm256_storeu_ps(p, a.a);
    _mm256_storeu_ps(p + 8, a.b);
}

KVP__INLINE vm vm_first(uint32_t n)
{
    __m256i c = _mm256_set1_epi32((int)n);
    return (vm){_mm256_cmpgt_epi32(c, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
                _mm256_cmpgt_epi32(c, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15))};
}

KVP__INLINE vf vf_load_n(const float *p, uint32_t n)
{
    vm m = vm_first(n);
    return (vf){_mm256_maskload_ps(p, m.a), _mm256_maskload_ps(p + 8, m.b)};
}

KVP__INLINE void vf_store_n(float *p, vf a, uint32_t n)
{
    vm m = vm_first(n);
    _mm256_maskstore_ps(p, m.a, a.a);
    _mm256_maskstore_ps(p + 8, m.b, a.b);
}

#define BINARY(name, op)                                                                           \
    KVP__INLINE vf name(vf a, vf b) { return (vf){op(a.a, b.a), op(a.b, b.b)}; }
BINARY(vf_add, _mm256_add_ps)
BINARY(vf_sub, _mm256_sub_ps)
BINARY(vf_mul, _mm256_mul_ps)
BINARY(vf_div, _mm256_div_ps)
BINARY(vf_max, _mm256_max_ps)
BINARY(vf_min, _mm256_min_ps)
#undef BINARY

KVP__INLINE vf vf_fma(vf a, vf b, vf c)
{
    return (vf){_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b)};
}

KVP__INLINE vf vf_sqrt(vf a) { return (vf){_mm256_sqrt_ps(a.a), _mm256_sqrt_ps(a.b)}; }

KVP__INLINE vf vf_abs(vf a)
{
    __m256 s = _mm256_set1_ps(-0.0f);
    return (vf){_mm256_andnot_ps(s, a.a), _mm256_andnot_ps(s, a.b)};
}

KVP__INLINE vf vf_neg(vf a)
{
    __m256 s = _mm256_set1_ps(-0.0f);
    return (vf){_mm256_xor_ps(s, a.a), _mm256_xor_ps(s, a.b)};
}

KVP__INLINE vf vf_round(vf a)
{
    return (vf){_mm256_round_ps(a.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                _mm256_round_ps(a.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

KVP__INLINE vi vf_to_vi(vf a) { return (vi){_mm256_cvtps_epi32(a.a), _mm256_cvtps_epi32(a.b)}; }
KVP__INLINE vf vi_to_vf(vi a) { return (vf){_mm256_cvtepi32_ps(a.a), _mm256_cvtepi32_ps(a.b)}; }

KVP__INLINE vi vf_bits(vf a)
{
    return (vi){_mm256_castps_si256(a.a), _mm256_castps_si256(a.b)};
}

KVP__INLINE vf vi_float(vi a)
{
    return (vf){_mm256_castsi256_ps(a.a), _mm256_castsi256_ps(a.b)};
}

KVP__INLINE vf vf_swap_pairs(vf a)
{
    return (vf){_mm256_permute_ps(a.a, 0xb1), _mm256_permute_ps(a.b, 0xb1)};
}

KVP__INLINE vf vf_load_f16(const uint16_t *p)
{
    return (vf){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p)),
                _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(p + 8)))};
}

KVP__INLINE void vf_store_f16(uint16_t *p, vf a)
{
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_cvtps_ph(a.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i *)(void *)(p + 8), _mm256_cvtps_ph(a.b, _MM_FROUND_TO_NEAREST_INT));
}

KVP__INLINE float vf_sum(vf a)
{
    __m256 e = _mm256_add_ps(a.a, a.b);
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

KVP__INLINE float vf_max_lane(vf a)
{
    __m256 e = _mm256_max_ps(a.a, a.b);
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

/* --- truth values --- */

#define COMPARE(name, how)                                                                         \
    KVP__INLINE vm name(vf a, vf b)                                                                \
    {                                                                                              \
        return (vm){_mm256_castps_si256(_mm256_cmp_ps(a.a, b.a, how)),                             \
                    _mm256_castps_si256(_mm256_cmp_ps(a.b, b.b, how))};                            \
    }
COMPARE(vf_lt, _CMP_LT_OQ)
COMPARE(vf_le, _CMP_LE_OQ)
COMPARE(vf_eq, _CMP_EQ_OQ)
#undef COMPARE

KVP__INLINE vf vf_select(vm m, vf a, vf b)
{
    return (vf){_mm256_blendv_ps(b.a, a.a, _mm256_castsi256_ps(m.a)),
                _mm256_blendv_ps(b.b, a.b, _mm256_castsi256_ps(m.b))};
}

KVP__INLINE vi vi_select(vm m, vi a, vi b)
{
    return (vi){_mm256_blendv_epi8(b.a, a.a, m.a), _mm256_blendv_epi8(b.b, a.b, m.b)};
}

/* --- integers --- */

KVP__INLINE vi vi_zero(void) { return (vi){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
KVP__INLINE vi vi_set1(int32_t a) { return (vi){_mm256_set1_epi32(a), _mm256_set1_epi32(a)}; }

KVP__INLINE vi vi_iota(void)
{
    return (vi){_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}

KVP__INLINE vi vi_load(const int32_t *p)
{
    return (vi){_mm256_loadu_si256((const __m256i *)(const void *)p),
                _mm256_loadu_si256((const __m256i *)(const void *)(p + 8))};
}

KVP__INLINE void vi_store(int32_t *p, vi a)
{
    _mm256_storeu_si256((__m256i *)(void *)p, a.a);
    _mm256_storeu_si256((__m256i *)(void *)(p + 8), a.b);
}

#define BINARY(name, op)                                                                           \
    KVP__INLINE vi name(vi a, vi b) { return (vi){op(a.a, b.a), op(a.b, b.b)}; }
BINARY(vi_add, _mm256_add_epi32)
BINARY(vi_sub, _mm256_sub_epi32)
BINARY(vi_mul, _mm256_mullo_epi32)
BINARY(vi_and, _mm256_and_si256)
BINARY(vi_or, _mm256_or_si256)
BINARY(vi_xor, _mm256_xor_si256)
BINARY(vi_max, _mm256_max_epi32)
BINARY(vi_min, _mm256_min_epi32)
BINARY(vi_gt, _mm256_cmpgt_epi32)
BINARY(vi_eq, _mm256_cmpeq_epi32)
BINARY(vm_and, _mm256_and_si256)
BINARY(vm_or, _mm256_or_si256)
#undef BINARY

KVP__INLINE vm vm_not(vm a) { return vi_xor(a, vi_set1(-1)); }

KVP__INLINE vi vi_shl(vi a, int n)
{
    return (vi){_mm256_slli_epi32(a.a, n), _mm256_slli_epi32(a.b, n)};
}

KVP__INLINE vi vi_shr(vi a, int n)
{
    return (vi){_mm256_srli_epi32(a.a, n), _mm256_srli_epi32(a.b, n)};
}

KVP__INLINE vi vi_sar(vi a, int n)
{
    return (vi){_mm256_srai_epi32(a.a, n), _mm256_srai_epi32(a.b, n)};
}

KVP__INLINE vi vi_load_u16(const uint16_t *p)
{
    return (vi){_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p)),
                _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)(p + 8)))};
}

KVP__INLINE void vi_store_u16(uint16_t *p, vi a)
{
    __m256i low = _mm256_set1_epi32(0xffff);
    __m256i t = _mm256_packus_epi32(_mm256_and_si256(a.a, low), _mm256_and_si256(a.b, low));
    _mm256_storeu_si256((__m256i *)(void *)p, _mm256_permute4x64_epi64(t, 0xd8));
}

KVP__INLINE vi vi_load_u8(const uint8_t *p)
{
    __m128i t = _mm_loadu_si128((const __m128i *)(const void *)p);
    return (vi){_mm256_cvtepu8_epi32(t), _mm256_cvtepu8_epi32(_mm_srli_si128(t, 8))};
}

KVP__INLINE vi vi_load_s8(const int8_t *p)
{
    __m128i t = _mm_loadu_si128((const __m128i *)(const void *)p);
    return (vi){_mm256_cvtepi8_epi32(t), _mm256_cvtepi8_epi32(_mm_srli_si128(t, 8))};
}

KVP__INLINE void vi_store_s8(int8_t *p, vi a)
{
    __m256i t = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.a, a.b), 0xd8);
    __m128i b = _mm_packs_epi16(_mm256_castsi256_si128(t), _mm256_extracti128_si256(t, 1));
    _mm_storeu_si128((__m128i *)(void *)p, b);
}

KVP__INLINE int32_t vi_sum(vi a)
{
    __m256i e = _mm256_add_epi32(a.a, a.b);
    __m128i q = _mm_add_epi32(_mm256_castsi256_si128(e), _mm256_extracti128_si256(e, 1));
    q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}

KVP__INLINE vi vi_madd16(vi acc, vi a, vi b)
{
    return (vi){_mm256_add_epi32(acc.a, _mm256_madd_epi16(a.a, b.a)),
                _mm256_add_epi32(acc.b, _mm256_madd_epi16(a.b, b.b))};
}

/* --- bytes --- */

KVP__INLINE vb vb_load(const uint8_t *p)
{
    return (vb){_mm256_loadu_si256((const __m256i *)(const void *)p),
                _mm256_loadu_si256((const __m256i *)(const void *)(p + 32))};
}

KVP__INLINE vb vb_set1(uint8_t a)
{
    return (vb){_mm256_set1_epi8((char)a), _mm256_set1_epi8((char)a)};
}

KVP__INLINE vb vb_and(vb a, vb b) { return vi_and(a, b); }
KVP__INLINE vb vb_or(vb a, vb b) { return vi_or(a, b); }

KVP__INLINE vb vb_shl(vb a, int n)
{
    return (vb){_mm256_slli_epi16(a.a, n), _mm256_slli_epi16(a.b, n)};
}

KVP__INLINE vb vb_shr(vb a, int n)
{
    return (vb){_mm256_srli_epi16(a.a, n), _mm256_srli_epi16(a.b, n)};
}

KVP__INLINE vi vb_vi(vb a) { return a; }

/* --- dot products of bytes --- */

typedef vi vd; /* 32 int16: each output's two half sums */

#define VD_STEPS(bits) ((bits) <= 4 ? 8 : (bits) == 5 ? 4 : (bits) == 6 ? 2 : 1)
#define VD_STEPS_S8 1
#define VD_S8_EXCESS 0

KVP__INLINE vd vd_open(vi acc) { return (void)acc, vi_zero(); }

KVP__INLINE vi vd_close_scaled(vi acc, vd d, vi s) { return vi_madd16(acc, d, s); }

KVP__INLINE vi vd_close(vi acc, vd d) { return vd_close_scaled(acc, d, vi_set1(0x10001)); }

KVP__INLINE __m256i four_bytes(const int8_t *x)
{
    int32_t t;
    memcpy(&t, x, sizeof t);
    return _mm256_set1_epi32(t);
}

/* Sums stay in order: GCC would add up a tree, whose leaves do not fit into registers. */
KVP__INLINE vd vd_add(vd d, __m256i a, __m256i b)
{
    d.a = _mm256_add_epi16(d.a, a);
    d.b = _mm256_add_epi16(d.b, b);
    __asm__("" : "+x"(d.a), "+x"(d.b));
    return d;
}

KVP__INLINE vd vd_step(vd d, vb w, const int8_t *x)
{
    __m256i t = four_bytes(x);
    return vd_add(d, _mm256_maddubs_epi16(w.a, t), _mm256_maddubs_epi16(w.b, t));
}

KVP__INLINE vd vd_step_s8(vd d, vb w, const int8_t *x)
{
    __m256i t = four_bytes(x);
    return vd_add(d, _mm256_maddubs_epi16(_mm256_abs_epi8(w.a), _mm256_sign_epi8(t, w.a)),
                  _mm256_maddubs_epi16(_mm256_abs_epi8(w.b), _mm256_sign_epi8(t, w.b)));
}

#endif
