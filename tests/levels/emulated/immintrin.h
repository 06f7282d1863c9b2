/*
 * AVX-512 on a machine without it: SIMDe's emulation under the compiler's names, and the few
 * intrinsics it lacks, from their definitions. For tests only (avx512.sh): the folder stands before
 * the compiler's own headers. Needs AVX2, FMA and F16C, without which SIMDe's fused multiply-add
 * rounds twice.
 */
#ifndef EMULATED_IMMINTRIN_H
#define EMULATED_IMMINTRIN_H

#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "compile with -mavx2 -mfma -mf16c"
#endif

#include_next <immintrin.h>

#define SIMDE_X86_AVX512F_ENABLE_NATIVE_ALIASES
#define SIMDE_X86_AVX512BW_ENABLE_NATIVE_ALIASES
#define SIMDE_X86_AVX512DQ_ENABLE_NATIVE_ALIASES
#define SIMDE_X86_AVX512VL_ENABLE_NATIVE_ALIASES
#define SIMDE_X86_AVX512VNNI_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include <string.h>

#define EMULATE static inline __attribute__((always_inline, unused))
#define LANES for (int k = 0; k < 16; k++)

EMULATE __m512i emulated_cvtepi32_ps_bits(__m512i a, int to_float)
{
    int32_t i[16];
    float f[16];
    memcpy(to_float ? (void *)i : (void *)f, &a, 64);
    if (to_float) {
        LANES f[k] = (float)i[k];
        memcpy(&a, f, 64);
    } else {
        LANES i[k] = _mm_cvtss_si32(_mm_set_ss(f[k]));
        memcpy(&a, i, 64);
    }
    return a;
}
#define _mm512_cvtepi32_ps(a) _mm512_castsi512_ps(emulated_cvtepi32_ps_bits(a, 1))
#define _mm512_cvtps_epi32(a) emulated_cvtepi32_ps_bits(_mm512_castps_si512(a), 0)

#define WIDEN(name, half, type)                                                                    \
    EMULATE __m512i name(half a)                                                                   \
    {                                                                                              \
        type t[16];                                                                                \
        int32_t i[16];                                                                             \
        __m512i r;                                                                                 \
        memcpy(t, &a, sizeof t);                                                                   \
        LANES i[k] = t[k];                                                                         \
        memcpy(&r, i, sizeof r);                                                                   \
        return r;                                                                                  \
    }
WIDEN(emulated_cvtepi8_epi32, __m128i, int8_t)
WIDEN(emulated_cvtepu8_epi32, __m128i, uint8_t)
WIDEN(emulated_cvtepu16_epi32, __m256i, uint16_t)

#define NARROW(name, half, type)                                                                   \
    EMULATE half name(__m512i a)                                                                   \
    {                                                                                              \
        type t[16];                                                                                \
        int32_t i[16];                                                                             \
        half r;                                                                                    \
        memcpy(i, &a, sizeof i);                                                                   \
        LANES t[k] = (type)i[k];                                                                   \
        memcpy(&r, t, sizeof r);                                                                   \
        return r;                                                                                  \
    }
NARROW(emulated_cvtepi32_epi8, __m128i, int8_t)
NARROW(emulated_cvtepi32_epi16, __m256i, int16_t)

EMULATE __m512 emulated_cvtph_ps(__m256i a)
{
    __m128i h[2];
    __m256 f[2];
    __m512 r;
    memcpy(h, &a, sizeof h);
    f[0] = _mm256_cvtph_ps(h[0]);
    f[1] = _mm256_cvtph_ps(h[1]);
    memcpy(&r, f, sizeof r);
    return r;
}

EMULATE __m256i emulated_cvtps_ph(__m512 a)
{
    __m256 f[2];
    __m128i h[2];
    __m256i r;
    memcpy(f, &a, sizeof f);
    h[0] = _mm256_cvtps_ph(f[0], 0);
    h[1] = _mm256_cvtps_ph(f[1], 0);
    memcpy(&r, h, sizeof r);
    return r;
}
#define _mm512_cvtps_ph(a, rounding) emulated_cvtps_ph(a)

EMULATE __m512 emulated_maskz_loadu_ps(__mmask16 m, const void *p)
{
    float f[16];
    __m512 r;
    LANES f[k] = 0;
    LANES if (m >> k & 1) memcpy(&f[k], (const char *)p + 4 * k, 4);
    memcpy(&r, f, sizeof r);
    return r;
}

EMULATE void emulated_mask_storeu_ps(void *p, __mmask16 m, __m512 a)
{
    float f[16];
    memcpy(f, &a, sizeof f);
    LANES if (m >> k & 1) memcpy((char *)p + 4 * k, &f[k], 4);
}

EMULATE int emulated_reduce_add_epi32(__m512i a)
{
    uint32_t i[16], s = 0;
    memcpy(i, &a, sizeof i);
    LANES s += i[k];
    return (int)s;
}

/* Within each group of four lanes, lane k becomes lane (choice >> 2k) & 3. */
EMULATE __m512i emulated_shuffle_epi32(__m512i a, int choice)
{
    int32_t i[16], o[16];
    memcpy(i, &a, sizeof i);
    LANES o[k] = i[k / 4 * 4 + (choice >> 2 * (k % 4) & 3)];
    memcpy(&a, o, sizeof a);
    return a;
}
#define _mm512_shuffle_epi32(a, choice) emulated_shuffle_epi32(a, choice)

EMULATE __m512i emulated_sra_epi32(__m512i a, __m128i count)
{
    int32_t i[16];
    memcpy(i, &a, sizeof i);
    LANES i[k] >>= _mm_cvtsi128_si32(count);
    memcpy(&a, i, sizeof a);
    return a;
}

#define _mm512_cvtepi32_epi16 emulated_cvtepi32_epi16
#define _mm512_cvtepi32_epi8 emulated_cvtepi32_epi8
#define _mm512_cvtepi8_epi32 emulated_cvtepi8_epi32
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32
#define _mm512_cvtepu8_epi32 emulated_cvtepu8_epi32
#define _mm512_cvtph_ps emulated_cvtph_ps
#define _mm512_mask_storeu_ps emulated_mask_storeu_ps
#define _mm512_maskz_loadu_ps emulated_maskz_loadu_ps
#define _mm512_reduce_add_epi32 emulated_reduce_add_epi32
#define _mm512_sra_epi32 emulated_sra_epi32

#undef EMULATE
#undef LANES
#undef WIDEN
#undef NARROW

#endif
