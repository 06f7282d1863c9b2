/*
 * What a row of activations needs between the matrices: RMS norm, rotary embedding, gated
 * activations, residual addition, soft cap. See kernels.h.
 *
 * Invariant: elements are independent of each other, but for the norm's sum of squares: it runs in
 * 16 lanes by index modulo 16, each a fused chain, and is added up by the fixed tree.
 */
#include "cpu/vec.h"

KVP__INLINE vf load_some(const float *p, uint32_t left)
{
    return left >= KVP__LANES ? vf_load(p) : vf_load_n(p, left);
}

KVP__INLINE void store_some(float *p, vf a, uint32_t left)
{
    if (left >= KVP__LANES) vf_store(p, a);
    else vf_store_n(p, a, left);
}

void KVP__AT(rms_norm)(const float *x, const float *weight, uint32_t n, float eps, float *out)
{
    vf squares = vf_zero();
    for (uint32_t i = 0; i < n; i += KVP__LANES) {
        vf v = load_some(x + i, n - i);
        squares = vf_fma(v, v, squares);
    }
    float mean = vf_sum(squares) / (float)n;
    vf factor = vf_div(vf_set1(1.0f), vf_sqrt(vf_set1(mean + eps)));
    for (uint32_t i = 0; i < n; i += KVP__LANES) {
        vf v = vf_mul(load_some(x + i, n - i), factor);
        store_some(out + i, vf_mul(v, load_some(weight + i, n - i)), n - i);
    }
}

static void rotate_pairs(float *x, uint32_t dim, const float *cosine, const float *sine)
{
    for (uint32_t i = 0; i < dim; i += KVP__LANES) {
        uint32_t left = dim - i;
        vf v = load_some(x + i, left), s = load_some(sine + i, left);
        vf turned = vf_mul(vf_swap_pairs(v), s);
        store_some(x + i, vf_fma(v, load_some(cosine + i, left), turned), left);
    }
}

static void rotate_halves(float *x, uint32_t dim, const float *cosine, const float *sine)
{
    uint32_t half = dim / 2;
    for (uint32_t i = 0; i < half; i += KVP__LANES) {
        uint32_t left = half - i;
        vf a = load_some(x + i, left), b = load_some(x + half + i, left);
        vf ca = load_some(cosine + i, left), cb = load_some(cosine + half + i, left);
        vf sa = load_some(sine + i, left), sb = load_some(sine + half + i, left);
        store_some(x + i, vf_fma(a, ca, vf_mul(b, sa)), left);
        store_some(x + half + i, vf_fma(b, cb, vf_mul(a, sb)), left);
    }
}

void KVP__AT(rotate)(float *x, uint32_t n, size_t stride, kvp__rope_kind kind, uint32_t dim,
                     const float *cosine, const float *sine)
{
    for (uint32_t h = 0; h < n; h++) {
        if (kind == KVP__ROPE_PAIRS) rotate_pairs(x + h * stride, dim, cosine, sine);
        else rotate_halves(x + h * stride, dim, cosine, sine);
    }
}

KVP__INLINE vf silu(vf x) { return vf_mul(x, vf_sigmoid(x)); }

/* 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) */
KVP__INLINE vf gelu_tanh(vf x)
{
    vf cube = vf_mul(vf_mul(x, x), x);
    vf inner = vf_mul(vf_set1(0.7978845608028654f), vf_fma(vf_set1(0.044715f), cube, x));
    return vf_mul(vf_mul(vf_set1(0.5f), x), vf_add(vf_set1(1.0f), vf_tanh(inner)));
}

void KVP__AT(activate)(kvp__activation kind, float *gate, const float *up, uint32_t n)
{
    for (uint32_t i = 0; i < n; i += KVP__LANES) {
        vf g = load_some(gate + i, n - i), u = load_some(up + i, n - i);
        vf a = kind == KVP__SILU ? silu(g) : gelu_tanh(g);
        store_some(gate + i, vf_mul(a, u), n - i);
    }
}

void KVP__AT(accumulate)(float *x, const float *y, uint32_t n)
{
    for (uint32_t i = 0; i < n; i += KVP__LANES)
        store_some(x + i, vf_add(load_some(x + i, n - i), load_some(y + i, n - i)), n - i);
}

void KVP__AT(softcap)(float *x, uint32_t n, float cap)
{
    vf c = vf_set1(cap);
    for (uint32_t i = 0; i < n; i += KVP__LANES)
        store_some(x + i, vf_mul(c, vf_tanh(vf_div(load_some(x + i, n - i), c))), n - i);
}
