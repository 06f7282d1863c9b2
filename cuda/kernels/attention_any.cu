/*
 * Attention without tensor cores, for every shape: any head sizes, K and V of different sizes and
 * types, floats too. The same items as attention.cu, so that it can also be run in its place, as
 * the truth on a card.
 *
 * Algorithm: a warp a row of the tile. For 32 keys at a time, each lane multiplies one key with the
 * query in float, the warp finds the maximum and sums of an online softmax to base 2, and then each
 * lane adds up its elements of the values, key after key. Query, sums and the 32 weights lie in
 * shared memory, each warp's own, so there are no barriers of the block.
 *
 * Bytes and operations: every row reads its keys and values anew, 2 to 4 bytes an element, and does
 * 4 d operations a key: made to be simple. Keys are read a row a lane, which a card's caches bear.
 */
#include "cuda/kernels/device.h"
#include "cuda/kernels/launch.h"

namespace {

using namespace kvp;

constexpr float LOG2E = 1.44269504088896340736f;

KVP_DEV float minus_infinity() { return -INFINITY; }
KVP_DEV float base_of(float m) { return m == minus_infinity() ? 0.0f : m; }
KVP_DEV float larger(float a, float b) { return a > b ? a : b; }

template <uint32_t TYPE> KVP_DEV float load_as(const void *p, uint64_t i)
{
    if (TYPE == KVP__EL_F32) return ((const float *)p)[i];
    uint16_t h = ((const uint16_t *)p)[i];
    return TYPE == KVP__EL_BF16 ? bf16_float(h) : f16_float(h);
}

KVP_DEV float load_any(uint32_t type, const void *p, uint64_t i)
{
    if (type == KVP__EL_F32) return load_as<KVP__EL_F32>(p, i);
    return type == KVP__EL_BF16 ? load_as<KVP__EL_BF16>(p, i) : load_as<KVP__EL_F16>(p, i);
}

KVP_DEV void store_as(uint32_t type, void *p, int64_t i, float x)
{
    if (type == KVP__EL_F32)
        ((float *)p)[i] = x;
    else
        ((uint16_t *)p)[i] = type == KVP__EL_BF16 ? float_bf16(x) : float_f16(x);
}

struct row_job {
    kvp__cuda_item item;
    uint32_t token, kv_head, head, row; /* row: of the step */
    uint32_t lo, hi;                    /* keys that it sees */
};

/* A warp's part of shared memory. */
struct room {
    float *q, *o, *p; /* [key_dim], [value_dim], [32] */
};

KVP_DEV uint32_t warp_lane() { return threadIdx.x % 32; }

KVP_DEV const uint8_t *key_block(const kvp__attention_args &a, const row_job &j, uint32_t key)
{
    uint64_t block = a.tables[(uint64_t)j.item.seq * a.table_stride + (key >> a.block_shift)];
    return a.kv.slab + a.kv.base + block * a.kv.pitch;
}

template <uint32_t TYPE>
KVP_DEV float dot(const float *q, const void *k, uint64_t first, uint32_t n)
{
    float s = 0;
    for (uint32_t d = 0; d < n; d++) s = fma_rn(q[d], load_as<TYPE>(k, first + d), s);
    return s;
}

/* Of the lane's key, to base 2; behind the last key minus infinity. */
KVP_DEV float score(const kvp__attention_args &a, const row_job &j, const room &w, uint32_t wanted)
{
    uint32_t key = wanted < j.hi ? wanted : j.hi - 1;
    const uint8_t *k = key_block(a, j, key) + a.kv.k_layer + j.kv_head * a.kv.k_head;
    uint64_t first = (uint64_t)(key & ((1u << a.block_shift) - 1)) * a.key_dim;
    float s = a.k_type == KVP__EL_F32    ? dot<KVP__EL_F32>(w.q, k, first, a.key_dim)
              : a.k_type == KVP__EL_BF16 ? dot<KVP__EL_BF16>(w.q, k, first, a.key_dim)
                                         : dot<KVP__EL_F16>(w.q, k, first, a.key_dim);
    s *= a.scale;
    if (a.softcap != 0) s = a.softcap - 2 * a.softcap * rcp(1 + ex2(2 * LOG2E / a.softcap * s));
    return wanted < j.hi ? s * LOG2E : minus_infinity();
}

/* o = o * shrink + sum of p[i] * value[i], over n keys. */
template <uint32_t TYPE>
KVP_DEV void add_values(const kvp__attention_args &a, const row_job &j, const room &w,
                        uint32_t first_key, uint32_t n, float shrink)
{
    for (uint32_t d = warp_lane(); d < a.value_dim; d += 32) {
        float sum = w.o[d] * shrink;
        for (uint32_t i = 0; i < n; i++) {
            uint32_t key = first_key + i;
            const uint8_t *v = key_block(a, j, key) + a.kv.v_layer + j.kv_head * a.kv.v_head;
            uint64_t at = (uint64_t)(key & ((1u << a.block_shift) - 1)) * a.value_dim + d;
            sum = fma_rn(w.p[i], load_as<TYPE>(v, at), sum);
        }
        w.o[d] = sum;
    }
}

KVP_DEV float warp_max(float x)
{
    for (int lanes = 16; lanes; lanes /= 2) x = larger(x, shfl_xor(x, lanes));
    return x;
}

KVP_DEV float warp_sum(float x)
{
    for (int lanes = 16; lanes; lanes /= 2) x += shfl_xor(x, lanes);
    return x;
}

/* Normalised, with the sink if this is all there is. */
KVP_DEV void write_row(const kvp__attention_args &a, const row_job &j, const room &w, float most,
                       float sum)
{
    bool whole = j.item.slot < 0;
    float sink = whole && a.sinks ? a.sinks[j.head] * LOG2E : minus_infinity();
    float base = base_of(larger(most, sink)), weight = ex2(most - base);
    sum = sum * weight + ex2(sink - base);
    float factor = sum == 0 ? 0.0f : weight * rcp(sum);
    uint64_t part = whole ? 0 : (uint64_t)(j.item.slot + j.token) * a.query_heads + j.head;
    for (uint32_t d = warp_lane(); d < a.value_dim; d += 32) {
        float x = w.o[d] * factor;
        if (whole)
            store_as(a.out_type, a.out, (int64_t)j.row * a.out_row + j.head * a.out_head + d, x);
        else
            a.part_out[part * a.value_dim + d] = x;
    }
    if (!whole && warp_lane() == 0)
        a.part_lse[part] = sum == 0 ? minus_infinity() : base + lg2(sum);
}

KVP_DEV void attend_row(const kvp__attention_args &a, const row_job &j, const room &w)
{
    uint64_t q = ((uint64_t)j.row * a.query_heads + j.head) * a.key_dim;
    for (uint32_t d = warp_lane(); d < a.key_dim; d += 32) w.q[d] = load_any(a.k_type, a.q, q + d);
    for (uint32_t d = warp_lane(); d < a.value_dim; d += 32) w.o[d] = 0;
    __syncwarp();
    float most = minus_infinity(), sum = 0;
    for (uint32_t key = j.lo; key < j.hi; key += 32) {
        float s = score(a, j, w, key + warp_lane());
        float now = larger(most, warp_max(s)), base = base_of(now), p = ex2(s - base);
        float shrink = ex2(most - base);
        sum = sum * shrink + warp_sum(p);
        most = now;
        w.p[warp_lane()] = p;
        __syncwarp();
        uint32_t n = j.hi - key < 32 ? j.hi - key : 32;
        if (a.v_type == KVP__EL_F32) add_values<KVP__EL_F32>(a, j, w, key, n, shrink);
        else if (a.v_type == KVP__EL_BF16) add_values<KVP__EL_BF16>(a, j, w, key, n, shrink);
        else add_values<KVP__EL_F16>(a, j, w, key, n, shrink);
        __syncwarp();
    }
    write_row(a, j, w, most, sum);
    __syncwarp();
}

} // namespace

KVP_KERNEL(attention_any, kvp__attention_args, 32 * KVP__ATTEND_ANY_WARPS)
{
    KVP_SMEM(shared);
    const uint32_t *counts = a.step->n_items[a.group];
    uint32_t before = 0, n = blockIdx.x / a.kv_heads;
    for (uint32_t i = 0; i < a.tile; i++) before += counts[i];
    if (n >= counts[a.tile]) return;

    row_job j;
    j.item = a.items[before + n];
    j.kv_head = blockIdx.x % a.kv_heads;
    room w;
    w.q = (float *)shared + threadIdx.x / 32 * (a.key_dim + a.value_dim + 32);
    w.o = w.q + a.key_dim;
    w.p = w.o + a.value_dim;
    uint32_t group = a.query_heads / a.kv_heads, rows = j.item.n_tokens * group - j.item.first_row;
    if (rows > KVP__ATTEND_ROWS(a.tile)) rows = KVP__ATTEND_ROWS(a.tile);
    for (uint32_t r = threadIdx.x / 32; r < rows; r += KVP__ATTEND_ANY_WARPS) {
        j.token = (j.item.first_row + r) / group;
        j.head = j.kv_head * group + (j.item.first_row + r) % group;
        j.row = a.rows[j.item.first_token + j.token];
        uint32_t position = a.positions[j.row];
        j.lo = a.window && position >= a.window ? position + 1 - a.window : 0;
        if (j.lo < j.item.kv_begin) j.lo = j.item.kv_begin;
        j.hi = position + 1 < j.item.kv_end ? position + 1 : j.item.kv_end;
        attend_row(a, j, w);
    }
}
