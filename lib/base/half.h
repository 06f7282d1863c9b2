/*
 * Half floats, one value at a time, the same bits as the hardware's conversions: round to nearest,
 * ties to even, denormals kept, infinities and NaNs kept. Kernels have vector versions.
 */
#ifndef KVP_BASE_HALF_H
#define KVP_BASE_HALF_H

#include <stdint.h>
#include <string.h>

static inline float kvp__bits_float(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline uint32_t kvp__float_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static inline float kvp__f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exp = (h >> 10) & 31u, man = h & 0x3ffu;
    if (exp == 31) return kvp__bits_float(sign | 0x7f800000u | man << 13 | (man ? 0x400000u : 0));
    if (exp == 0) { /* zero or denormal: man * 2^-24, exact in float */
        float f = (float)man * kvp__bits_float(0x33800000u);
        return kvp__bits_float(sign | kvp__float_bits(f));
    }
    return kvp__bits_float(sign | (exp + 112u) << 23 | man << 13);
}

static inline uint16_t kvp__f32_to_f16(float f)
{
    uint32_t u = kvp__float_bits(f), sign = u >> 16 & 0x8000u;
    u &= 0x7fffffffu;
    if (u >= 0x7f800000u) /* infinity, or NaN made quiet with its high bits kept */
        return (uint16_t)(sign | 0x7c00u | (u > 0x7f800000u ? 0x200u | (u >> 13 & 0x3ffu) : 0));
    if (u >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* rounds beyond 65504 */
    if (u < 0x38800000u) { /* denormal: add 0.5 so that the mantissa lands in the low bits */
        float v = kvp__bits_float(u) + 0.5f;
        return (uint16_t)(sign | (kvp__float_bits(v) - 0x3f000000u));
    }
    uint32_t r = u - 0x38000000u;
    r += 0xfffu + (r >> 13 & 1u);
    return (uint16_t)(sign | r >> 13);
}

static inline float kvp__bf16_to_f32(uint16_t h) { return kvp__bits_float((uint32_t)h << 16); }

static inline uint16_t kvp__f32_to_bf16(float f)
{
    uint32_t u = kvp__float_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40u);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

#endif
