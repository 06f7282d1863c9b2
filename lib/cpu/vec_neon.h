/*
 * Sixteen lanes in four NEON registers (Arm64). See vec.h for what each operation is.
 *
 * Dot products of bytes: with the dot product instructions (KVP__CPU_NEON_DOT) sdot adds four
 * products to 32 bits, exactly. Without them vmull_s8 makes 16-bit products, which vpadal adds in
 * pairs: exact too.
 */
#ifndef KVP_CPU_VEC_NEON_H
#define KVP_CPU_VEC_NEON_H

#include <arm_neon.h>

typedef struct { float32x4_t v[4]; } vf;
typedef struct { int32x4_t v[4]; } vi;
typedef struct { uint32x4_t v[4]; } vm; /* all ones or zero */
typedef struct { uint8x16_t v[4]; } vb;

#define QUAD(type, expression)                                                                     \
    type r;                                                                                        \
    _Pragma("GCC unroll 4") for (int k = 0; k < 4; k++) r.v[k] = expression;                       \
    return r

/* --- floats --- */

KVP__INLINE vf vf_set1(float a) { QUAD(vf, vdupq_n_f32(a)); }
KVP__INLINE vf vf_zero(void) { return vf_set1(0.0f); }
KVP__INLINE vf vf_load(const float *p) { QUAD(vf, vld1q_f32(p + 4 * k)); }
KVP__INLINE void vf_store(float *p, vf a)
{
    for (int k = 0; k < 4; k++) vst1q_f32(p + 4 * k, a.v[k]);
}

KVP__INLINE vf vf_load_n(const float *p, uint32_t n)
{
    float t[16] = {0};
    memcpy(t, p, n * sizeof *p);
    return vf_load(t);
}

KVP__INLINE void vf_store_n(float *p, vf a, uint32_t n)
{
    float t[16];
    vf_store(t, a);
    memcpy(p, t, n * sizeof *p);
}

KVP__INLINE vf vf_add(vf a, vf b) { QUAD(vf, vaddq_f32(a.v[k], b.v[k])); }
KVP__INLINE vf vf_sub(vf a, vf b) { QUAD(vf, vsubq_f32(a.v[k], b.v[k])); }
KVP__INLINE vf vf_mul(vf a, vf b) { QUAD(vf, vmulq_f32(a.v[k], b.v[k])); }
KVP__INLINE vf vf_div(vf a, vf b) { QUAD(vf, vdivq_f32(a.v[k], b.v[k])); }
KVP__INLINE vf vf_fma(vf a, vf b, vf c) { QUAD(vf, vfmaq_f32(c.v[k], a.v[k], b.v[k])); }
KVP__INLINE vf vf_sqrt(vf a) { QUAD(vf, vsqrtq_f32(a.v[k])); }
KVP__INLINE vf vf_abs(vf a) { QUAD(vf, vabsq_f32(a.v[k])); }
KVP__INLINE vf vf_neg(vf a) { QUAD(vf, vnegq_f32(a.v[k])); }
KVP__INLINE vf vf_round(vf a) { QUAD(vf, vrndnq_f32(a.v[k])); }

/* vmaxq and vminq treat NaNs and signed zeros in a way of their own. */
KVP__INLINE vf vf_max(vf a, vf b)
{
    QUAD(vf, vbslq_f32(vcgtq_f32(a.v[k], b.v[k]), a.v[k], b.v[k]));
}

KVP__INLINE vf vf_min(vf a, vf b)
{
    QUAD(vf, vbslq_f32(vcltq_f32(a.v[k], b.v[k]), a.v[k], b.v[k]));
}

KVP__INLINE vi vf_to_vi(vf a) { QUAD(vi, vcvtnq_s32_f32(a.v[k])); }
KVP__INLINE vf vi_to_vf(vi a) { QUAD(vf, vcvtq_f32_s32(a.v[k])); }
KVP__INLINE vi vf_bits(vf a) { QUAD(vi, vreinterpretq_s32_f32(a.v[k])); }
KVP__INLINE vf vi_float(vi a) { QUAD(vf, vreinterpretq_f32_s32(a.v[k])); }
KVP__INLINE vf vf_swap_pairs(vf a) { QUAD(vf, vrev64q_f32(a.v[k])); }

KVP__INLINE vf vf_load_f16(const uint16_t *p)
{
    QUAD(vf, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * k))));
}

KVP__INLINE void vf_store_f16(uint16_t *p, vf a)
{
    for (int k = 0; k < 4; k++)
        vst1_u16(p + 4 * k, vreinterpret_u16_f16(vcvt_f16_f32(a.v[k])));
}

KVP__INLINE float vf_sum(vf a)
{
    float32x4_t q = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
    float32x2_t d = vadd_f32(vget_low_f32(q), vget_high_f32(q));
    return vget_lane_f32(d, 0) + vget_lane_f32(d, 1);
}

KVP__INLINE float vf_max_lane(vf a)
{
    float t[16];
    vf_store(t, a);
    for (int n = 8; n; n /= 2)
        for (int k = 0; k < n; k++) t[k] = t[k] > t[k + n] ? t[k] : t[k + n];
    return t[0];
}

/* --- truth values --- */

KVP__INLINE vm vf_lt(vf a, vf b) { QUAD(vm, vcltq_f32(a.v[k], b.v[k])); }
KVP__INLINE vm vf_le(vf a, vf b) { QUAD(vm, vcleq_f32(a.v[k], b.v[k])); }
KVP__INLINE vm vf_eq(vf a, vf b) { QUAD(vm, vceqq_f32(a.v[k], b.v[k])); }
KVP__INLINE vm vi_gt(vi a, vi b) { QUAD(vm, vcgtq_s32(a.v[k], b.v[k])); }
KVP__INLINE vm vi_eq(vi a, vi b) { QUAD(vm, vceqq_s32(a.v[k], b.v[k])); }
KVP__INLINE vm vm_and(vm a, vm b) { QUAD(vm, vandq_u32(a.v[k], b.v[k])); }
KVP__INLINE vm vm_or(vm a, vm b) { QUAD(vm, vorrq_u32(a.v[k], b.v[k])); }
KVP__INLINE vm vm_not(vm a) { QUAD(vm, vmvnq_u32(a.v[k])); }
KVP__INLINE vf vf_select(vm m, vf a, vf b) { QUAD(vf, vbslq_f32(m.v[k], a.v[k], b.v[k])); }
KVP__INLINE vi vi_select(vm m, vi a, vi b) { QUAD(vi, vbslq_s32(m.v[k], a.v[k], b.v[k])); }

/* --- integers --- */

KVP__INLINE vi vi_set1(int32_t a) { QUAD(vi, vdupq_n_s32(a)); }
KVP__INLINE vi vi_zero(void) { return vi_set1(0); }
KVP__INLINE vi vi_load(const int32_t *p) { QUAD(vi, vld1q_s32(p + 4 * k)); }
KVP__INLINE void vi_store(int32_t *p, vi a)
{
    for (int k = 0; k < 4; k++) vst1q_s32(p + 4 * k, a.v[k]);
}

KVP__INLINE vi vi_iota(void)
{
    static const int32_t first[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return vi_load(first);
}

KVP__INLINE vm vm_first(uint32_t n) { return vi_gt(vi_set1((int32_t)n), vi_iota()); }

KVP__INLINE vi vi_add(vi a, vi b) { QUAD(vi, vaddq_s32(a.v[k], b.v[k])); }
KVP__INLINE vi vi_sub(vi a, vi b) { QUAD(vi, vsubq_s32(a.v[k], b.v[k])); }
KVP__INLINE vi vi_mul(vi a, vi b) { QUAD(vi, vmulq_s32(a.v[k], b.v[k])); }
KVP__INLINE vi vi_and(vi a, vi b) { QUAD(vi, vandq_s32(a.v[k], b.v[k])); }
KVP__INLINE vi vi_or(vi a, vi b) { QUAD(vi, vorrq_s32(a.v[k], b.v[k])); }
KVP__INLINE vi vi_xor(vi a, vi b) { QUAD(vi, veorq_s32(a.v[k], b.v[k])); }
KVP__INLINE vi vi_max(vi a, vi b) { QUAD(vi, vmaxq_s32(a.v[k], b.v[k])); }
KVP__INLINE vi vi_min(vi a, vi b) { QUAD(vi, vminq_s32(a.v[k], b.v[k])); }
KVP__INLINE vi vi_shl(vi a, int n) { QUAD(vi, vshlq_s32(a.v[k], vdupq_n_s32(n))); }
KVP__INLINE vi vi_sar(vi a, int n) { QUAD(vi, vshlq_s32(a.v[k], vdupq_n_s32(-n))); }
KVP__INLINE vi vi_shr(vi a, int n)
{
    QUAD(vi, vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a.v[k]), vdupq_n_s32(-n))));
}

KVP__INLINE vi vi_load_u16(const uint16_t *p)
{
    QUAD(vi, vreinterpretq_s32_u32(vmovl_u16(vld1_u16(p + 4 * k))));
}

KVP__INLINE void vi_store_u16(uint16_t *p, vi a)
{
    for (int k = 0; k < 4; k++) vst1_u16(p + 4 * k, vmovn_u32(vreinterpretq_u32_s32(a.v[k])));
}

KVP__INLINE vi vi_load_u8(const uint8_t *p)
{
    uint8x16_t t = vld1q_u8(p);
    uint16x8_t h[2] = {vmovl_u8(vget_low_u8(t)), vmovl_u8(vget_high_u8(t))};
    QUAD(vi, vreinterpretq_s32_u32(vmovl_u16(k & 1 ? vget_high_u16(h[k / 2])
                                                   : vget_low_u16(h[k / 2]))));
}

KVP__INLINE vi vi_load_s8(const int8_t *p)
{
    int8x16_t t = vld1q_s8(p);
    int16x8_t h[2] = {vmovl_s8(vget_low_s8(t)), vmovl_s8(vget_high_s8(t))};
    QUAD(vi, vmovl_s16(k & 1 ? vget_high_s16(h[k / 2]) : vget_low_s16(h[k / 2])));
}

KVP__INLINE void vi_store_s8(int8_t *p, vi a)
{
    int16x8_t low = vcombine_s16(vmovn_s32(a.v[0]), vmovn_s32(a.v[1]));
    int16x8_t high = vcombine_s16(vmovn_s32(a.v[2]), vmovn_s32(a.v[3]));
    vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

KVP__INLINE int32_t vi_sum(vi a)
{
    return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3])));
}

KVP__INLINE vi vi_madd16(vi acc, vi a, vi b)
{
    vi t = vi_mul(vi_sar(a, 16), vi_sar(b, 16));
    vi low_a = vi_sar(vi_shl(a, 16), 16), low_b = vi_sar(vi_shl(b, 16), 16);
    QUAD(vi, vmlaq_s32(vaddq_s32(acc.v[k], t.v[k]), low_a.v[k], low_b.v[k]));
}

/* --- bytes --- */

KVP__INLINE vb vb_load(const uint8_t *p) { QUAD(vb, vld1q_u8(p + 16 * k)); }
KVP__INLINE vb vb_set1(uint8_t a) { QUAD(vb, vdupq_n_u8(a)); }
KVP__INLINE vb vb_and(vb a, vb b) { QUAD(vb, vandq_u8(a.v[k], b.v[k])); }
KVP__INLINE vb vb_or(vb a, vb b) { QUAD(vb, vorrq_u8(a.v[k], b.v[k])); }
KVP__INLINE vb vb_shl(vb a, int n) { QUAD(vb, vshlq_u8(a.v[k], vdupq_n_s8((int8_t)n))); }
KVP__INLINE vb vb_shr(vb a, int n) { QUAD(vb, vshlq_u8(a.v[k], vdupq_n_s8((int8_t)-n))); }
KVP__INLINE vi vb_vi(vb a) { QUAD(vi, vreinterpretq_s32_u8(a.v[k])); }

/* --- dot products of bytes --- */

typedef vi vd;

#define VD_STEPS(bits) ((void)(bits), 8)
#define VD_STEPS_S8 8
#define VD_S8_EXCESS 0

KVP__INLINE vd vd_open(vi acc) { return acc; }
KVP__INLINE vi vd_close(vi acc, vd d) { return (void)acc, d; }
KVP__INLINE vi vd_close_scaled(vi acc, vd d, vi s)
{
    vi scale = vi_sar(vi_shl(s, 16), 16);
    QUAD(vi, vmlaq_s32(acc.v[k], d.v[k], scale.v[k]));
}

KVP__INLINE int8x16_t four_bytes(const int8_t *x)
{
    int32_t t;
    memcpy(&t, x, sizeof t);
    return vreinterpretq_s8_s32(vdupq_n_s32(t));
}

KVP__INLINE int32x4_t dot_four(int32x4_t d, int8x16_t w, int8x16_t x)
{
#if KVP__LEVEL == KVP__CPU_NEON_DOT
    return vdotq_s32(d, w, x);
#else
    int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x));
    int16x8_t high = vmull_high_s8(w, x);
    return vaddq_s32(d, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}

KVP__INLINE vd vd_step_s8(vd d, vb w, const int8_t *x)
{
    int8x16_t t = four_bytes(x);
    QUAD(vd, dot_four(d.v[k], vreinterpretq_s8_u8(w.v[k]), t));
}

KVP__INLINE vd vd_step(vd d, vb w, const int8_t *x) { return vd_step_s8(d, w, x); }

#undef QUAD

#endif
