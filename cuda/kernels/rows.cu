/*
 * Rows of activations: embed, rms_norm, activate.
 *
 * All three are bound by memory: they read each input once and write each output once, in 16-byte
 * pieces of neighbouring threads where rows are aligned, and do a few operations per element.
 *
 *     embed      a row: its bytes in the table + 4 width
 *     rms_norm   a row: 4 width (x) + 4 width (delta) + 4 width (x written) + 2 width (out), and
 *                weights from L2. The row stays in shared memory between the passes, each thread
 *                reading back what it wrote itself, so that only the sums need a barrier. Rows
 *                of 4,096 are four pieces a thread.
 *     activate   an element: 8 + 2 bytes
 *
 * A row's result depends on nothing but that row: one block a row, and the sum of squares is cut in
 * the same way whatever else is in the step.
 *
 * Weighed, not measured: the row in registers instead of shared memory needs a bound on the width,
 * or a kernel for each; it saves one store and one load of shared memory per element, which nothing
 * waits for. A warp a row would spare the barrier, but leaves 31 of 32 warps without work where a
 * step has few rows.
 *
 * Registers on sm_90 / sm_80: embed 21 / 19, rms_norm 28 / 28, activate 25 / 24; no spills
 * (budget.txt).
 */
#include "cuda/kernels/elements.h"
#include "cuda/kernels/launch.h"

namespace kvp {

/* --- embed --- */

/* Elements i to i + 3 of a block of a quantised row; i a multiple of 4. */
KVP_DEV void load_quantised(float (&v)[4], const kvp__embed_args &a, uint64_t at)
{
    uint64_t begin = KVP__QUANT_SCALES_AT(a.type, a.vocabulary, a.width);
    const uint8_t *values = (const uint8_t *)a.table;
    float scale = f16_float(((const uint16_t *)(values + begin))[at / 32]);
    uint32_t i = (uint32_t)(at % 32);
    if (a.type == KVP__EL_Q8_0) {
        uint32_t four = *(const uint32_t *)(values + at);
        KVP_UNROLL
        for (int j = 0; j < 4; j++) v[j] = (float)(int8_t)(four >> 8 * j) * scale;
    } else {
        uint32_t four = *(const uint32_t *)(values + at / 32 * 16 + i % 16) >> (i < 16 ? 0 : 4);
        KVP_UNROLL
        for (int j = 0; j < 4; j++)
            v[j] = (float)((int)(four >> 8 * j & 15u) - 8) * scale;
    }
}

KVP_KERNEL(embed, kvp__embed_args, KVP__EMBED_THREADS)
{
    uint32_t row = blockIdx.x;
    if (row >= a.step->n_rows) return;
    uint32_t token = (uint32_t)a.tokens[row];
    for (uint32_t i = threadIdx.x * 4; i < a.width; i += KVP__EMBED_THREADS * 4) {
        float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        uint64_t at = (uint64_t)token * a.width + i;
        if (token < a.vocabulary) {
            if (a.type == KVP__EL_Q8_0 || a.type == KVP__EL_Q4_0) load_quantised(v, a, at);
            else load_some(v, a.table, a.type, at, a.width - i);
        }
        KVP_UNROLL
        for (int j = 0; j < 4; j++) v[j] *= a.scale;
        store_some(a.x, KVP__EL_F32, (uint64_t)row * a.width + i, v, a.width - i);
    }
}

/* --- norm --- */

#define NORM_WARPS (KVP__NORM_THREADS / 32)

/* The factor of a row from its threads' sums of squares. `sums` is used by no other call. */
KVP_DEV float norm_factor(float squares, float *sums, uint32_t n, float eps)
{
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
    __syncthreads();
    float total = 0.0f;
    KVP_UNROLL
    for (int w = 0; w < NORM_WARPS; w++) total = add_rn(total, sums[w]);
    return inverse_root(div_rn(total, (float)n) + eps);
}

KVP_DEV void load_row(float (&v)[4], const float *row, uint32_t i)
{
    float4 t = *(const float4 *)(row + i);
    v[0] = t.x;
    v[1] = t.y;
    v[2] = t.z;
    v[3] = t.w;
}

KVP_DEV float square_of(const float (&v)[4])
{
    return (v[0] * v[0] + v[1] * v[1]) + (v[2] * v[2] + v[3] * v[3]);
}

/* What is added to elements [i, i + 4) before any norm. */
KVP_DEV void load_delta(float (&d)[4], const kvp__norm_args &a, uint64_t at, uint32_t i)
{
    load_some(d, a.delta, KVP__EL_F32, at + i, a.width - i);
    if (!a.bias) return;
    float bias[4];
    load_some(bias, a.bias, KVP__EL_F32, i, a.width - i);
    KVP_UNROLL
    for (int j = 0; j < 4; j++) d[j] += bias[j];
}

KVP_KERNEL(rms_norm, kvp__norm_args, KVP__NORM_THREADS)
{
    KVP_SMEM(smem);
    float *sums = (float *)smem, *row = sums + 2 * NORM_WARPS;
    uint32_t index = blockIdx.x;
    if (index >= (a.rows ? a.step->n_outputs : a.step->n_rows)) return;
    uint64_t at = (uint64_t)(a.rows ? a.rows[index] : index) * a.width;
    uint32_t first = threadIdx.x * 4, each = KVP__NORM_THREADS * 4;
    bool adds = a.delta != nullptr, norms_delta = adds && a.post != nullptr;

    float factor = 1.0f, squares = 0.0f;
    if (norms_delta) {
        for (uint32_t i = first; i < a.width; i += each) {
            float d[4];
            load_delta(d, a, at, i);
            squares += square_of(d);
            *(float4 *)(row + i) = make_float4(d[0], d[1], d[2], d[3]);
        }
        factor = norm_factor(squares, sums, a.width, a.eps);
        squares = 0.0f;
    }
    for (uint32_t i = first; i < a.width; i += each) {
        float v[4], d[4], post[4];
        load_some(v, a.x, KVP__EL_F32, at + i, a.width - i);
        if (norms_delta) {
            load_row(d, row, i);
            load_some(post, a.post, KVP__EL_F32, i, a.width - i);
            KVP_UNROLL
            for (int j = 0; j < 4; j++) v[j] += d[j] * factor * post[j];
        } else if (adds) {
            load_delta(d, a, at, i);
            KVP_UNROLL
            for (int j = 0; j < 4; j++) v[j] += d[j];
        }
        if (adds && !a.rows) store_some(a.x, KVP__EL_F32, at + i, v, a.width - i);
        squares += square_of(v);
        *(float4 *)(row + i) = make_float4(v[0], v[1], v[2], v[3]);
    }
    factor = norm_factor(squares, sums + NORM_WARPS, a.width, a.eps);
    for (uint32_t i = first; i < a.width; i += each) {
        float v[4], weight[4];
        load_row(v, row, i);
        load_some(weight, a.weight, KVP__EL_F32, i, a.width - i);
        KVP_UNROLL
        for (int j = 0; j < 4; j++) v[j] = v[j] * factor * weight[j];
        store_some(a.out, a.out_type, (uint64_t)index * a.width + i, v, a.width - i);
    }
}

/* --- activate --- */

#define LOG2_E 1.44269504f
#define ROOT_2_OVER_PI 0.797884561f

/* Both are x / (1 + e^-z): SiLU with z = x; and 0.5 (1 + tanh u) is that with z = 2 u, where
 * nothing cancels for negative u. */
KVP_DEV float activation_of(float x, uint32_t kind)
{
    float z = kind == 0 ? x : 2.0f * ROOT_2_OVER_PI * (x + 0.044715f * x * x * x);
    return x * rcp(1.0f + ex2(-z * LOG2_E));
}

KVP_KERNEL(activate, kvp__activate_args, KVP__ACTIVATE_THREADS)
{
    uint32_t row = blockIdx.x;
    uint32_t i = (blockIdx.y * KVP__ACTIVATE_THREADS + threadIdx.x) * KVP__ACTIVATE_EACH;
    if (row >= a.step->n_rows || i >= a.n) return;
    uint64_t at = (uint64_t)row * 2 * a.n + i;
    float gate[4], up[4];
    load_some(gate, a.gate_up, KVP__EL_F32, at, a.n - i);
    load_some(up, a.gate_up, KVP__EL_F32, at + a.n, a.n - i);
    KVP_UNROLL
    for (int j = 0; j < 4; j++) gate[j] = activation_of(gate[j], a.activation) * up[j];
    store_some(a.out, a.out_type, (uint64_t)row * a.n + i, gate, a.n - i);
}

} // namespace kvp
