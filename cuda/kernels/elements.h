/*
 * Elements of F32, F16 and BF16 four at a time, and the few sums that row kernels share.
 *
 * Rows may begin anywhere and be of any length: four elements are one load or store where they are
 * aligned and all there, else one each. The test costs two instructions and keeps a second body out
 * of every kernel.
 */
#ifndef KVP_CUDA_KERNELS_ELEMENTS_H
#define KVP_CUDA_KERNELS_ELEMENTS_H

#include "cuda/kernels/device.h"

namespace kvp {

KVP_DEV uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
KVP_DEV float float_of(uint32_t u) { return __builtin_bit_cast(float, u); }

KVP_DEV bool is_aligned(const void *p, uint32_t bytes)
{
    return ((uintptr_t)p & (bytes - 1)) == 0;
}

KVP_DEV float half_float(uint16_t h, uint32_t type)
{
    return type == KVP__EL_BF16 ? bf16_float(h) : f16_float(h);
}

/* Into what a half holds without becoming infinite; a NaN stays one. */
KVP_DEV float within_f16(float v)
{
    return v > 65504.0f ? 65504.0f : v < -65504.0f ? -65504.0f : v;
}

KVP_DEV uint32_t pack(float low, float high, uint32_t type)
{
    return type == KVP__EL_BF16 ? pack_bf16(low, high)
                                : pack_f16(within_f16(low), within_f16(high));
}

/* Elements [at, at + 4) of those at `base`; zeros from the n-th on. */
KVP_DEV void load_some(float (&v)[4], const void *base, uint32_t type, uint64_t at, uint32_t n)
{
    if (type == KVP__EL_F32) {
        const float *p = (const float *)base + at;
        if (n >= 4 && is_aligned(p, 16)) {
            float4 t = *(const float4 *)p;
            v[0] = t.x;
            v[1] = t.y;
            v[2] = t.z;
            v[3] = t.w;
            return;
        }
        KVP_UNROLL
        for (uint32_t j = 0; j < 4; j++) v[j] = j < n ? p[j] : 0.0f;
        return;
    }
    const uint16_t *p = (const uint16_t *)base + at;
    uint32_t low = 0, high = 0;
    if (n >= 4 && is_aligned(p, 8)) {
        uint2 t = *(const uint2 *)p;
        low = t.x;
        high = t.y;
    } else {
        if (n > 0) low = p[0];
        if (n > 1) low |= (uint32_t)p[1] << 16;
        if (n > 2) high = p[2];
        if (n > 3) high |= (uint32_t)p[3] << 16;
    }
    v[0] = half_float((uint16_t)low, type);
    v[1] = half_float((uint16_t)(low >> 16), type);
    v[2] = half_float((uint16_t)high, type);
    v[3] = half_float((uint16_t)(high >> 16), type);
}

/* The first n of four to [at, at + n), rounded to nearest. */
KVP_DEV void store_some(void *base, uint32_t type, uint64_t at, const float (&v)[4], uint32_t n)
{
    if (type == KVP__EL_F32) {
        float *p = (float *)base + at;
        if (n >= 4 && is_aligned(p, 16)) {
            *(float4 *)p = make_float4(v[0], v[1], v[2], v[3]);
            return;
        }
        KVP_UNROLL
        for (uint32_t j = 0; j < 4; j++)
            if (j < n) p[j] = v[j];
        return;
    }
    uint16_t *p = (uint16_t *)base + at;
    uint32_t low = pack(v[0], v[1], type), high = pack(v[2], v[3], type);
    if (n >= 4 && is_aligned(p, 8)) {
        *(uint2 *)p = make_uint2(low, high);
        return;
    }
    if (n > 0) p[0] = (uint16_t)low;
    if (n > 1) p[1] = (uint16_t)(low >> 16);
    if (n > 2) p[2] = (uint16_t)high;
    if (n > 3) p[3] = (uint16_t)(high >> 16);
}

KVP_DEV float warp_sum(float v)
{
    KVP_UNROLL
    for (int m = 16; m > 0; m /= 2) v = add_rn(v, shfl_xor(v, m));
    return v;
}

/* 1 / sqrt(x) to a unit in the last place or two, x >= 0; finite at 0, so that a row of zeros stays
 * one. Newton's iteration from the well-known first guess by the exponent. */
KVP_DEV float inverse_root(float x)
{
    float y = float_of(0x5f3759dfu - (bits_of(x) >> 1));
    KVP_UNROLL
    for (int i = 0; i < 4; i++) y = y * (1.5f - (0.5f * x) * y * y);
    return y;
}

} // namespace kvp

#endif
