/*
 * append: what a row's product becomes before attention. Biases, norms of heads, rotation; q into
 * its buffer, K and V into their blocks.
 *
 * A warp a head, eight heads a block. The sines and cosines of the row's position are computed once
 * per block: the product of position and frequency, and its reduction to a quarter turn, are in
 * double precision, which is scarce on most cards, so it is two multiplications and an addition per
 * pair and block; the series are in float. A head lies in shared memory between load and store, so
 * that a pair of the rotation may be anywhere in it; any head size is taken.
 *
 * Bytes a row: its product once (4 or 2 an element) and q, K and V once (2 an element). Operations:
 * about 40 an element with norm and rotation, hidden behind memory on cards with HBM.
 *
 * The rotation's products are those of the CPU device (cpu/level/norm.c): one multiplication, one
 * fused multiply-add; sines and cosines are within 1e-7 of its.
 *
 * Weighed, not measured: a block a (row, head) has 40 to 48 blocks a row with a handful of
 * instructions each, which the scheduler of blocks bounds in prefill; computing the rotation in
 * each warp costs eight times the double precision.
 *
 * Registers on sm_90 / sm_80: 36 / 35; no spills (budget.txt).
 */
#include "cuda/kernels/elements.h"
#include "cuda/kernels/launch.h"

namespace kvp {

#define WARPS (KVP__APPEND_THREADS / 32)
#define ROPE_NONE 0u /* kvp__rope_kind of model/model.h */
#define ROPE_PAIRS 1u

/* --- the rotation --- */

/* The sine and cosine of x within 1e-7, |x| < 2^31: x = k pi / 2 + r, |r| <= pi / 4. One fused
 * subtraction is enough: what pi / 2 lacks in double, times k, stays below 1e-7. */
KVP_DEV void sine_cosine(double x, float *sine, float *cosine)
{
    const double magic = 0x1.8p52; /* rounds to an integer */
    double shifted = add_rn(mul_rn(x, 0.63661977236758134), magic);
    double k = add_rn(shifted, -magic);
    float r = (float)fma_rn(-k, 1.5707963267948966, x), z = r * r;
    float s = 2.75573192e-6f;
    s = s * z - 1.98412698e-4f;
    s = s * z + 8.33333333e-3f;
    s = s * z - 0.166666667f;
    s = r + r * z * s;
    float c = 2.48015873e-5f;
    c = c * z - 1.38888889e-3f;
    c = c * z + 4.16666667e-2f;
    c = 1.0f - z * 0.5f + z * z * c;
    uint32_t quadrant = (uint32_t)(int64_t)k & 3u;
    float up = quadrant & 1u ? c : s, across = quadrant & 1u ? s : c;
    *sine = quadrant & 2u ? -up : up;
    *cosine = (quadrant + 1u) & 2u ? -across : across;
}

KVP_DEV void rotate(float *x, uint32_t half, uint32_t kind, const float *cosine, const float *sine)
{
    for (uint32_t i = threadIdx.x % 32; i < half; i += 32) {
        uint32_t first = kind == ROPE_PAIRS ? 2 * i : i;
        uint32_t second = kind == ROPE_PAIRS ? 2 * i + 1 : i + half;
        float p = x[first], q = x[second], c = cosine[i], s = sine[i];
        x[first] = fma_rn(p, c, mul_rn(q, -s));
        x[second] = fma_rn(q, c, mul_rn(p, s));
    }
}

/* --- a head --- */

/* Where a head comes from and what is done with it. */
struct head_work {
    const void *from;  /* of in_type */
    int64_t at;        /* its first element */
    const float *bias; /* its own, or NULL */
    const float *norm;
    uint32_t dim, half; /* half: pairs that are rotated */
    uint8_t *to;
    uint32_t type;
};

KVP_DEV void load_head(float *x, const head_work &w, const kvp__append_args &a)
{
    uint32_t first = threadIdx.x % 32 * 4;
    float squares = 0.0f;
    for (uint32_t i = first; i < w.dim; i += 128) {
        float v[4];
        load_some(v, w.from, a.in_type, (uint64_t)(w.at + i), w.dim - i);
        if (w.bias) {
            float bias[4];
            load_some(bias, w.bias, KVP__EL_F32, i, w.dim - i);
            KVP_UNROLL
            for (int j = 0; j < 4; j++) v[j] += bias[j];
        }
        squares += (v[0] * v[0] + v[1] * v[1]) + (v[2] * v[2] + v[3] * v[3]);
        *(float4 *)(x + i) = make_float4(v[0], v[1], v[2], v[3]);
    }
    if (!w.norm) return;
    float factor = inverse_root(div_rn(warp_sum(squares), (float)w.dim) + a.eps);
    for (uint32_t i = first; i < w.dim; i += 128) {
        float weight[4];
        load_some(weight, w.norm, KVP__EL_F32, i, w.dim - i);
        KVP_UNROLL
        for (int j = 0; j < 4; j++) x[i + j] = x[i + j] * factor * weight[j];
    }
}

KVP_DEV void store_head(const float *x, const head_work &w)
{
    for (uint32_t i = threadIdx.x % 32 * 4; i < w.dim; i += 128) {
        float4 t = *(const float4 *)(x + i);
        float v[4] = {t.x, t.y, t.z, t.w};
        store_some(w.to, w.type, i, v, w.dim - i);
    }
}

KVP_DEV uint32_t size_of(uint32_t type) { return type == KVP__EL_F32 ? 4 : 2; }

/* Where this row's token lies in its block, before the part of a layer and head. */
KVP_DEV uint8_t *block_of(const kvp__append_args &a, uint32_t row, uint32_t *token)
{
    uint32_t position = a.positions[row];
    uint64_t entry = (uint64_t)a.row_seq[row] * a.table_stride + (position >> a.block_shift);
    *token = position & ((1u << a.block_shift) - 1);
    return a.kv.slab + a.kv.base + a.tables[entry] * a.kv.pitch;
}

KVP_DEV head_work query_head(const kvp__append_args &a, uint32_t row, uint32_t h, uint32_t half)
{
    head_work w;
    w.from = a.q;
    w.at = row * a.q_row + h * a.q_head;
    w.bias = a.q_bias ? a.q_bias + (uint64_t)h * a.key_dim : nullptr;
    w.norm = a.q_norm;
    w.dim = a.key_dim;
    w.half = half;
    w.type = a.k_type;
    w.to = (uint8_t *)a.q_out +
           ((uint64_t)row * a.query_heads + h) * a.key_dim * size_of(a.k_type);
    return w;
}

KVP_DEV head_work key_head(const kvp__append_args &a, uint32_t row, uint32_t h, uint32_t half)
{
    head_work w;
    uint32_t token;
    uint8_t *block = block_of(a, row, &token);
    w.from = a.k;
    w.at = row * a.k_row + h * a.k_head;
    w.bias = a.k_bias ? a.k_bias + (uint64_t)h * a.key_dim : nullptr;
    w.norm = a.k_norm;
    w.dim = a.key_dim;
    w.half = half;
    w.type = a.k_type;
    w.to = block + a.kv.k_layer + h * a.kv.k_head +
           (uint64_t)token * a.key_dim * size_of(a.k_type);
    return w;
}

KVP_DEV head_work value_head(const kvp__append_args &a, uint32_t row, uint32_t h)
{
    head_work w;
    uint32_t token;
    uint8_t *block = block_of(a, row, &token);
    w.from = a.v;
    w.at = row * a.v_row + h * a.v_head;
    w.bias = a.v_bias ? a.v_bias + (uint64_t)h * a.value_dim : nullptr;
    w.norm = nullptr;
    w.dim = a.value_dim;
    w.half = 0;
    w.type = a.v_type;
    w.to = block + a.kv.v_layer + h * a.kv.v_head +
           (uint64_t)token * a.value_dim * size_of(a.v_type);
    return w;
}

KVP_KERNEL(append, kvp__append_args, KVP__APPEND_THREADS)
{
    KVP_SMEM(smem);
    uint32_t row = blockIdx.x, warp = threadIdx.x / 32;
    if (row >= a.step->n_rows) return;
    uint32_t widest = a.key_dim > a.value_dim ? a.key_dim : a.value_dim;
    uint32_t room = (widest + 3) / 4 * 4, half = a.rope_kind == ROPE_NONE ? 0 : a.rope_dim / 2;
    float *x = (float *)smem + warp * room;
    float *cosine = (float *)smem + WARPS * room, *sine = cosine + half;
    for (uint32_t i = threadIdx.x; i < half; i += KVP__APPEND_THREADS) {
        float s, c;
        sine_cosine(mul_rn((double)a.positions[row], a.inv_freq[i]), &s, &c);
        sine[i] = s * a.rope_magnitude;
        cosine[i] = c * a.rope_magnitude;
    }
    __syncthreads();

    uint32_t head = blockIdx.y * WARPS + warp, keys = a.query_heads, values = keys + a.kv_heads;
    if (head >= values + (a.value_dim ? a.kv_heads : 0)) return;
    head_work w;
    if (head < keys) w = query_head(a, row, head, half);
    else if (head < values) w = key_head(a, row, head - keys, half);
    else w = value_head(a, row, head - values);
    load_head(x, w, a);
    __syncwarp();
    rotate(x, w.half, a.rope_kind, cosine, sine);
    __syncwarp();
    store_head(x, w);
}

} // namespace kvp
