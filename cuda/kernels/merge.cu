/*
 * The parts of rows whose keys were attended to by several items become one result.
 *
 * Algorithm: a warp a (row, query head). A part is a normalised output and the logarithm to base 2
 * of its sum of exponentials (LSE); with M the largest of those, part i has the weight 2^(lse[i] -
 * M), and the sink one of its own, whose value is zero. The order of a row's parts is the list's,
 * so the result does not depend on which of them was ready first. A row without parts, or with
 * parts that saw nothing, is 0, its LSE minus infinity. One part is copied: its weight is 1.
 *
 * Parts are taken 32 at a time, one a lane, whose weights then go round; a lane adds up four
 * neighbouring elements, so that a head of 128 is one load of each part, and loads do not wait for
 * one another.
 *
 * Bytes and operations: a part's value_dim floats are read once; its slot and LSE twice. 2
 * operations an element, 2 ex2 a part.
 */
#include "cuda/kernels/device.h"
#include "cuda/kernels/launch.h"

namespace {

using namespace kvp;

constexpr float LOG2E = 1.44269504088896340736f;

KVP_DEV float minus_infinity() { return -INFINITY; }
KVP_DEV uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }
KVP_DEV float larger(float a, float b) { return a > b ? a : b; }

/* A warp's row and head: its parts' slots, the greatest logarithm (0 if there is none), the inverse
 * of the sum. */
struct merged {
    const uint32_t *slots;
    uint32_t count, head;
    float base, sum, inverse;
};

KVP_DEV float lse_of(const kvp__merge_args &a, const merged &m, uint32_t i)
{
    return a.part_lse[(uint64_t)m.slots[i] * a.query_heads + m.head];
}

KVP_DEV void weigh(const kvp__merge_args &a, merged &m)
{
    uint32_t lane = threadIdx.x % 32;
    float sink = a.sinks ? a.sinks[m.head] * LOG2E : minus_infinity(), most = sink;
    for (uint32_t i = lane; i < m.count; i += 32) most = larger(most, lse_of(a, m, i));
    for (int lanes = 16; lanes; lanes /= 2) most = larger(most, shfl_xor(most, lanes));
    m.base = most == minus_infinity() ? 0.0f : most;
    m.sum = 0;
    for (uint32_t i = lane; i < m.count; i += 32) m.sum += ex2(lse_of(a, m, i) - m.base);
    for (int lanes = 16; lanes; lanes /= 2) m.sum += shfl_xor(m.sum, lanes);
    m.sum += ex2(sink - m.base);
    m.inverse = m.sum == 0 ? 0.0f : rcp(m.sum);
}

KVP_DEV void store_as(uint32_t type, void *p, int64_t i, float x)
{
    if (type == KVP__EL_F32)
        ((float *)p)[i] = x;
    else
        ((uint16_t *)p)[i] = type == KVP__EL_BF16 ? float_bf16(x) : float_f16(x);
}

/* N elements at an offset that is a multiple of N. */
template <int N> struct elements;
template <> struct elements<1> {
    float x[1];
};
template <> struct alignas(16) elements<4> {
    float x[4];
};

/* Elements first to first + N - 1 of the row. Lanes behind the end go along, with the first's. */
template <int N>
KVP_DEV void merge_elements(const kvp__merge_args &a, const merged &m, uint32_t first, int64_t to)
{
    uint32_t lane = threadIdx.x % 32, from = first < a.value_dim ? first : 0;
    float sum[N];
    KVP_UNROLL
    for (int e = 0; e < N; e++) sum[e] = 0;
    for (uint32_t begin = 0; begin < m.count; begin += 32) {
        uint32_t n = smaller(32, m.count - begin), slot = 0;
        float weight = 0;
        if (lane < n) {
            slot = m.slots[begin + lane];
            weight = ex2(lse_of(a, m, begin + lane) - m.base) * m.inverse;
        }
        for (uint32_t i = 0; i < n; i++) {
            float w = shfl(weight, (int)i);
            uint64_t part = (uint64_t)shfl(slot, (int)i) * a.query_heads + m.head;
            elements<N> p = *(const elements<N> *)(a.part_out + part * a.value_dim + from);
            KVP_UNROLL
            for (int e = 0; e < N; e++) sum[e] = fma_rn(w, p.x[e], sum[e]);
        }
    }
    if (first >= a.value_dim) return;
    KVP_UNROLL
    for (int e = 0; e < N; e++) store_as(a.out_type, a.out, to + first + e, sum[e]);
}

} // namespace

KVP_KERNEL(merge, kvp__merge_args, 32 * KVP__MERGE_WARPS)
{
    uint32_t n = blockIdx.x * KVP__MERGE_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (n / a.query_heads >= a.step->n_merges[a.group]) return;
    kvp__cuda_merge row = a.merges[n / a.query_heads];
    merged m;
    m.slots = a.slots + row.first;
    m.count = row.count;
    m.head = n % a.query_heads;
    weigh(a, m);

    int64_t to = (int64_t)row.row * a.out_row + m.head * a.out_head;
    if (a.value_dim % 4 == 0)
        for (uint32_t d = 0; d < a.value_dim; d += 128) merge_elements<4>(a, m, d + lane * 4, to);
    else
        for (uint32_t d = 0; d < a.value_dim; d += 32) merge_elements<1>(a, m, d + lane, to);
    if (a.lse && lane == 0)
        a.lse[(uint64_t)row.row * a.query_heads + m.head] =
            m.sum == 0 ? minus_infinity() : m.base + lg2(m.sum);
}
