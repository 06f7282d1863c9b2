/*
 * Sixteen lanes in plain C. See vec.h for what each operation is.
 *
 * This is the definition the other levels are tested against, so it is written for the eye. Without
 * fused multiply-add in the target's base instruction set fmaf is a call into the C library:
 * slow, and the same bits, since it is correctly rounded.
 */
#ifndef KVP_CPU_VEC_GENERIC_H
#define KVP_CPU_VEC_GENERIC_H

typedef struct { float f[16]; } vf;
typedef struct { int32_t i[16]; } vi;
typedef struct { uint8_t b[16]; } vm; /* 0 or 1 */
typedef struct { uint8_t b[64]; } vb;

#define EACH for (uint32_t k = 0; k < 16; k++)

/* --- floats --- */

KVP__INLINE vf vf_set1(float a)
{
    vf r;
    EACH r.f[k] = a;
    return r;
}

KVP__INLINE vf vf_zero(void) { return vf_set1(0.0f); }

KVP__INLINE vf vf_load(const float *p)
{
    vf r;
    memcpy(r.f, p, sizeof r.f);
    return r;
}

KVP__INLINE void vf_store(float *p, vf a) { memcpy(p, a.f, sizeof a.f); }

KVP__INLINE vf vf_load_n(const float *p, uint32_t n)
{
    vf r = vf_zero();
    memcpy(r.f, p, n * sizeof *p);
    return r;
}

KVP__INLINE void vf_store_n(float *p, vf a, uint32_t n) { memcpy(p, a.f, n * sizeof *p); }

#define BINARY(name, expression)                                                                   \
    KVP__INLINE vf name(vf a, vf b)                                                                \
    {                                                                                              \
        vf r;                                                                                      \
        EACH r.f[k] = expression;                                                                  \
        return r;                                                                                  \
    }
BINARY(vf_add, a.f[k] + b.f[k])
BINARY(vf_sub, a.f[k] - b.f[k])
BINARY(vf_mul, a.f[k] * b.f[k])
BINARY(vf_div, a.f[k] / b.f[k])
BINARY(vf_max, a.f[k] > b.f[k] ? a.f[k] : b.f[k])
BINARY(vf_min, a.f[k] < b.f[k] ? a.f[k] : b.f[k])
#undef BINARY

KVP__INLINE vf vf_fma(vf a, vf b, vf c)
{
    vf r;
    EACH r.f[k] = __builtin_fmaf(a.f[k], b.f[k], c.f[k]);
    return r;
}

KVP__INLINE vf vf_sqrt(vf a)
{
    EACH a.f[k] = __builtin_sqrtf(a.f[k]);
    return a;
}

KVP__INLINE vf vf_abs(vf a)
{
    EACH a.f[k] = kvp__bits_float(kvp__float_bits(a.f[k]) & 0x7fffffffu);
    return a;
}

KVP__INLINE vf vf_neg(vf a)
{
    EACH a.f[k] = kvp__bits_float(kvp__float_bits(a.f[k]) ^ 0x80000000u);
    return a;
}

/* Adding 2^23 leaves no room for a fraction, so the addition does the rounding. */
KVP__INLINE vf vf_round(vf a)
{
    EACH {
        uint32_t sign = kvp__float_bits(a.f[k]) & 0x80000000u;
        float m = kvp__bits_float(kvp__float_bits(a.f[k]) ^ sign);
        if (m < 0x1p23f) {
            m = (m + 0x1p23f) - 0x1p23f;
            a.f[k] = kvp__bits_float(kvp__float_bits(m) | sign);
        }
    }
    return a;
}

KVP__INLINE vi vf_to_vi(vf a)
{
    vi r;
    a = vf_round(a);
    EACH r.i[k] = a.f[k] >= -0x1p31f && a.f[k] < 0x1p31f ? (int32_t)a.f[k] : INT32_MIN;
    return r;
}

KVP__INLINE vf vi_to_vf(vi a)
{
    vf r;
    EACH r.f[k] = (float)a.i[k];
    return r;
}

KVP__INLINE vi vf_bits(vf a)
{
    vi r;
    memcpy(r.i, a.f, sizeof r.i);
    return r;
}

KVP__INLINE vf vi_float(vi a)
{
    vf r;
    memcpy(r.f, a.i, sizeof r.f);
    return r;
}

KVP__INLINE vf vf_swap_pairs(vf a)
{
    vf r;
    EACH r.f[k] = a.f[k ^ 1];
    return r;
}

KVP__INLINE vf vf_load_f16(const uint16_t *p)
{
    vf r;
    EACH r.f[k] = kvp__f16_to_f32(p[k]);
    return r;
}

KVP__INLINE void vf_store_f16(uint16_t *p, vf a)
{
    EACH p[k] = kvp__f32_to_f16(a.f[k]);
}

KVP__INLINE float vf_sum(vf a)
{
    for (uint32_t n = 8; n; n /= 2)
        for (uint32_t k = 0; k < n; k++) a.f[k] += a.f[k + n];
    return a.f[0];
}

KVP__INLINE float vf_max_lane(vf a)
{
    for (uint32_t n = 8; n; n /= 2)
        for (uint32_t k = 0; k < n; k++) a.f[k] = a.f[k] > a.f[k + n] ? a.f[k] : a.f[k + n];
    return a.f[0];
}

/* --- truth values --- */

#define COMPARE(name, type, expression)                                                            \
    KVP__INLINE vm name(type a, type b)                                                            \
    {                                                                                              \
        vm r;                                                                                      \
        EACH r.b[k] = expression;                                                                  \
        return r;                                                                                  \
    }
COMPARE(vf_lt, vf, a.f[k] < b.f[k])
COMPARE(vf_le, vf, a.f[k] <= b.f[k])
COMPARE(vf_eq, vf, a.f[k] == b.f[k])
COMPARE(vi_gt, vi, a.i[k] > b.i[k])
COMPARE(vi_eq, vi, a.i[k] == b.i[k])
COMPARE(vm_and, vm, a.b[k] & b.b[k])
COMPARE(vm_or, vm, a.b[k] | b.b[k])
#undef COMPARE

KVP__INLINE vm vm_not(vm a)
{
    EACH a.b[k] ^= 1;
    return a;
}

KVP__INLINE vm vm_first(uint32_t n)
{
    vm r;
    EACH r.b[k] = k < n;
    return r;
}

KVP__INLINE vf vf_select(vm m, vf a, vf b)
{
    EACH a.f[k] = m.b[k] ? a.f[k] : b.f[k];
    return a;
}

KVP__INLINE vi vi_select(vm m, vi a, vi b)
{
    EACH a.i[k] = m.b[k] ? a.i[k] : b.i[k];
    return a;
}

/* --- integers: they wrap --- */

KVP__INLINE vi vi_set1(int32_t a)
{
    vi r;
    EACH r.i[k] = a;
    return r;
}

KVP__INLINE vi vi_zero(void) { return vi_set1(0); }

KVP__INLINE vi vi_iota(void)
{
    vi r;
    EACH r.i[k] = (int32_t)k;
    return r;
}

KVP__INLINE vi vi_load(const int32_t *p)
{
    vi r;
    memcpy(r.i, p, sizeof r.i);
    return r;
}

KVP__INLINE void vi_store(int32_t *p, vi a) { memcpy(p, a.i, sizeof a.i); }

#define BINARY(name, expression)                                                                   \
    KVP__INLINE vi name(vi a, vi b)                                                                \
    {                                                                                              \
        EACH a.i[k] = (int32_t)(expression);                                                       \
        return a;                                                                                  \
    }
BINARY(vi_add, (uint32_t)a.i[k] + (uint32_t)b.i[k])
BINARY(vi_sub, (uint32_t)a.i[k] - (uint32_t)b.i[k])
BINARY(vi_mul, (uint32_t)a.i[k] * (uint32_t)b.i[k])
BINARY(vi_and, a.i[k] & b.i[k])
BINARY(vi_or, a.i[k] | b.i[k])
BINARY(vi_xor, a.i[k] ^ b.i[k])
BINARY(vi_max, a.i[k] > b.i[k] ? a.i[k] : b.i[k])
BINARY(vi_min, a.i[k] < b.i[k] ? a.i[k] : b.i[k])
#undef BINARY

KVP__INLINE vi vi_shl(vi a, int n)
{
    EACH a.i[k] = (int32_t)((uint32_t)a.i[k] << n);
    return a;
}

KVP__INLINE vi vi_shr(vi a, int n)
{
    EACH a.i[k] = (int32_t)((uint32_t)a.i[k] >> n);
    return a;
}

KVP__INLINE vi vi_sar(vi a, int n)
{
    EACH a.i[k] = a.i[k] >> n;
    return a;
}

KVP__INLINE vi vi_load_u16(const uint16_t *p)
{
    vi r;
    EACH r.i[k] = p[k];
    return r;
}

KVP__INLINE void vi_store_u16(uint16_t *p, vi a)
{
    EACH p[k] = (uint16_t)a.i[k];
}

KVP__INLINE vi vi_load_u8(const uint8_t *p)
{
    vi r;
    EACH r.i[k] = p[k];
    return r;
}

KVP__INLINE vi vi_load_s8(const int8_t *p)
{
    vi r;
    EACH r.i[k] = p[k];
    return r;
}

KVP__INLINE void vi_store_s8(int8_t *p, vi a)
{
    EACH p[k] = (int8_t)a.i[k];
}

KVP__INLINE int32_t vi_sum(vi a)
{
    int32_t s = 0;
    EACH s += a.i[k];
    return s;
}

KVP__INLINE vi vi_madd16(vi acc, vi a, vi b)
{
    EACH {
        uint32_t low = (uint32_t)((int16_t)a.i[k] * (int16_t)b.i[k]);
        uint32_t high = (uint32_t)((a.i[k] >> 16) * (b.i[k] >> 16));
        acc.i[k] = (int32_t)((uint32_t)acc.i[k] + low + high);
    }
    return acc;
}

/* --- bytes --- */

#define EACH_BYTE for (uint32_t k = 0; k < 64; k++)

KVP__INLINE vb vb_load(const uint8_t *p)
{
    vb r;
    memcpy(r.b, p, sizeof r.b);
    return r;
}

KVP__INLINE vb vb_set1(uint8_t a)
{
    vb r;
    memset(r.b, a, sizeof r.b);
    return r;
}

KVP__INLINE vb vb_and(vb a, vb b)
{
    EACH_BYTE a.b[k] &= b.b[k];
    return a;
}

KVP__INLINE vb vb_or(vb a, vb b)
{
    EACH_BYTE a.b[k] |= b.b[k];
    return a;
}

KVP__INLINE vb vb_shl(vb a, int n)
{
    EACH_BYTE a.b[k] = (uint8_t)(a.b[k] << n);
    return a;
}

KVP__INLINE vb vb_shr(vb a, int n)
{
    EACH_BYTE a.b[k] = (uint8_t)(a.b[k] >> n);
    return a;
}

KVP__INLINE vi vb_vi(vb a)
{
    vi r;
    memcpy(r.i, a.b, sizeof r.i);
    return r;
}

/* --- dot products of bytes --- */

typedef vi vd;

#define VD_STEPS(bits) ((void)(bits), 8)
#define VD_STEPS_S8 8
#define VD_S8_EXCESS 0

KVP__INLINE vd vd_open(vi acc) { return acc; }
KVP__INLINE vi vd_close(vi acc, vd d) { return (void)acc, d; }
KVP__INLINE vi vd_close_scaled(vi acc, vd d, vi s)
{
    EACH acc.i[k] += d.i[k] * (int16_t)s.i[k];
    return acc;
}

/* Two products of a lane are added in 16 bits, where 2 * 128 * 127 fits, and in the compiler's own
 * 16-byte vectors, which it has for every machine: this is where a model's time goes. */
KVP__INLINE vd vd_step_s8(vd d, vb w, const int8_t *x)
{
    typedef int16_t eight __attribute__((vector_size(16)));
    typedef int32_t four __attribute__((vector_size(16)));
    const eight even = {x[0], x[2], x[0], x[2], x[0], x[2], x[0], x[2]};
    const eight odd = {x[1], x[3], x[1], x[3], x[1], x[3], x[1], x[3]};
    for (uint32_t k = 0; k < 4; k++) {
        eight v;
        four sum;
        memcpy(&v, w.b + 16 * k, sizeof v);
        memcpy(&sum, d.i + 4 * k, sizeof sum);
        v = ((v << 8) >> 8) * even + (v >> 8) * odd;
        sum += (((four)v << 16) >> 16) + ((four)v >> 16);
        memcpy(d.i + 4 * k, &sum, sizeof sum);
    }
    return d;
}

KVP__INLINE vd vd_step(vd d, vb w, const int8_t *x) { return vd_step_s8(d, w, x); }

#undef EACH
#undef EACH_BYTE

#endif
