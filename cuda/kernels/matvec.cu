/*
 * Products of a few rows with quantised weights: matvec_q8_0, matvec_q4_0; and weights as 16-bit
 * floats: dequant_q8_0, dequant_q4_0.
 *
 * matvec reads the weights once for up to eight rows, and is as fast as they come. So it must do
 * little per weight: the rows are staged in shared memory as integers of 15 bits and a sign, with
 * one scale per 32 inputs as the weights have, cut into a high and a low byte, so that four weights
 * take two integer dot products and no conversion. The error is 2^-16 of the largest of each 32
 * inputs, below what the rounding of that input to 16 bits had made; sums within 32 are exact, sums
 * of them are in float.
 *
 *     x = s (256 h + l),  w = d q:    sum x w = s d (256 sum h q + sum l q)
 *     and for Q4_0, whose q is stored as q + 8:    ... - 8 sum (256 h + l), which is staged too
 *
 * A warp takes two outputs, a lane 16 bytes of each at a time, and asks for the next before it uses
 * these: 1 to 2 KB a warp, 16 to 32 KB an SM with two blocks of 8 warps. Half a block of Q8_0
 * or one of Q4_0 is 16 bytes, so lanes lie along the row. A scale is loaded by one lane alone.
 *
 *     bytes        the weights (values and scales) exactly once per eight rows; x from L2 once per
 *                  block
 *     operations   per 16 weights and row 8 dp4a and about 4 more, and 4 a weight of Q4_0 to unpack
 *     bound        at 18 bytes a clock and SM (an H200's share), with 64 dp4a: memory up to 7 rows
 *                  of Q8_0, up to 3 of Q4_0, which has twice the weights in a byte; 8 rows of that
 *                  take 2.2 times as long
 *
 * Which inputs a lane sums, and in which order, does not depend on how many rows there are: a row's
 * result is its own, whatever is in the step.
 *
 * dequant: a thread 16 weights, in 16-byte pieces; 1 or 0.5 bytes in and 2 out per weight.
 *
 * Tried: four outputs a warp for eight rows read shared memory half as often, but took 147
 * registers, so that one block fits on an SM, and dp4a bounds that case anyway. And, by counting:
 * floats in shared memory need an addition and a permutation to make a float of each byte and a
 * multiply-add per row, 3 to 10 instructions a weight against 1 to 5 here, and are bound by
 * arithmetic from 4 rows on. mma of 16 bits would take 8 rows at once, but a fragment's lanes hold
 * different blocks of 32 and so scales would have to go into the weights before they are rounded.
 *
 * Registers on sm_90 / sm_80: matvec_q8_0 79 / 86, matvec_q4_0 95 / 107, dequant_q8_0 31 / 29,
 * dequant_q4_0 32 / 30; no spills (budget.txt).
 */
#include "cuda/kernels/elements.h"
#include "cuda/kernels/launch.h"

namespace kvp {

#define THREADS KVP__MATVEC_THREADS
#define WARPS (THREADS / 32)
#define MOST_ROWS 8u
#define O 2               /* outputs of a warp */
#define STAGED 16384u     /* inputs of all rows in shared memory at a time */
#define PARTS_OF_X 32639  /* 127 * 256 + 127 */

static_assert(STAGED * 2 + STAGED / 32 * 8 == KVP__MATVEC_SHARED, "launch.h says otherwise");

/* --- the two formats --- */

/* INPUTS: of 16 bytes. staged_at: where input i of a row's plane of bytes is staged, such that a
 * lane reads 16 bytes and its neighbour the next. Q4_0 has the first and second halves of all
 * blocks apart, since a lane takes both. `inputs`: of the plane. */
struct q8_0 {
    static constexpr uint32_t INPUTS = 16, PIECES = 1;
    KVP_DEV static uint32_t staged_at(uint32_t i, uint32_t inputs)
    {
        (void)inputs;
        return i;
    }
    KVP_DEV static uint64_t bytes(uint64_t inputs) { return inputs; }
    KVP_DEV static uint4 piece(uint4 w, uint32_t p)
    {
        (void)p;
        return w;
    }
    static constexpr int ZERO = 0;
};
struct q4_0 {
    static constexpr uint32_t INPUTS = 32, PIECES = 2;
    KVP_DEV static uint32_t staged_at(uint32_t i, uint32_t inputs)
    {
        return (i & 16u) / 16 * (inputs / 2) + i / 32 * 16 + i % 16;
    }
    KVP_DEV static uint64_t bytes(uint64_t inputs) { return inputs / 2; }
    KVP_DEV static uint4 piece(uint4 w, uint32_t p)
    {
        uint32_t shift = 4 * p, mask = 0x0f0f0f0fu;
        return make_uint4(w.x >> shift & mask, w.y >> shift & mask, w.z >> shift & mask,
                          w.w >> shift & mask);
    }
    static constexpr int ZERO = 8;
};

/* --- rows in shared memory --- */

/* R rows' next inputs: a plane of high bytes and one of low ones per row, each of
 * `room` bytes, and for each 32 inputs their scale and ZERO times their sum. */
struct staged_rows {
    int8_t *bytes;
    float2 *blocks; /* (scale, bits of an int) */
    uint32_t room;
};

KVP_DEV void load_eight(float (&v)[8], const void *x, uint32_t type, uint64_t at)
{
    if (type == KVP__EL_F32) {
        float4 a = *(const float4 *)((const float *)x + at);
        float4 b = *(const float4 *)((const float *)x + at + 4);
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
        v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
        return;
    }
    uint4 u = *(const uint4 *)((const uint16_t *)x + at);
    uint32_t words[4] = {u.x, u.y, u.z, u.w};
    KVP_UNROLL
    for (int j = 0; j < 4; j++) {
        v[2 * j] = half_float((uint16_t)words[j], type);
        v[2 * j + 1] = half_float((uint16_t)(words[j] >> 16), type);
    }
}

/* The larger magnitude; NaN if either is. */
KVP_DEV float larger(float a, float b) { return b > a || b != b ? b : a; }
KVP_DEV float magnitude(float v) { return float_of(bits_of(v) & 0x7fffffffu); }

/* The scale of 32 inputs, and its inverse. What is too small for an inverse is zero; infinity or
 * NaN make the result NaN. */
KVP_DEV float scale_of(float most, float *inverse)
{
    *inverse = 0.0f;
    if (!(most <= 3.40282347e+38f)) return most - most;
    if (most < 1e-30f) return 0.0f;
    *inverse = div_rn((float)PARTS_OF_X, most);
    return div_rn(most, (float)PARTS_OF_X);
}

/* Eight inputs as integers: four high and four low bytes each in two words; returns their sum. */
KVP_DEV int split_eight(const float (&v)[8], float inverse, uint32_t (&high)[2], uint32_t (&low)[2])
{
    int sum = 0;
    high[0] = high[1] = low[0] = low[1] = 0;
    KVP_UNROLL
    for (int j = 0; j < 8; j++) {
        float scaled = inverse == 0.0f ? 0.0f : v[j] * inverse; /* not 0 times infinity */
        int i = (int)(bits_of(scaled + 12582912.0f) - 0x4b400000u);
        int h = (i + 128) >> 8;
        sum += i;
        high[j / 4] |= ((uint32_t)h & 255u) << j % 4 * 8;
        low[j / 4] |= ((uint32_t)i & 255u) << j % 4 * 8;
    }
    return sum;
}

/* The inputs from `first` on. Four neighbouring threads have 32 of a row. Rows that are not there
 * are zeros. */
template <class Q, int R>
KVP_DEV void stage(const kvp__matvec_args &a, const staged_rows &s, uint32_t first_row,
                   uint32_t rows, uint32_t first)
{
    uint32_t n = a.n_in - first < s.room ? a.n_in - first : s.room;
    uint32_t eights = n / 8, all = R * eights;
    for (uint32_t begin = 0; begin < all; begin += THREADS) {
        uint32_t e = begin + threadIdx.x, r = e / eights, i = (e - r * eights) * 8;
        float v[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f}, most = 0.0f, inverse;
        if (e < all && r < rows)
            load_eight(v, a.x, a.x_type, (uint64_t)(first_row + r) * a.n_in + first + i);
        KVP_UNROLL
        for (int j = 0; j < 8; j++) most = larger(most, magnitude(v[j]));
        most = larger(most, shfl_xor(most, 1));
        most = larger(most, shfl_xor(most, 2));
        float scale = scale_of(most, &inverse);
        uint32_t high[2], low[2];
        int sum = split_eight(v, inverse, high, low);
        sum += shfl_xor(sum, 1);
        sum += shfl_xor(sum, 2);
        if (e >= all) continue;
        int8_t *to = s.bytes + 2 * r * s.room + Q::staged_at(i, s.room);
        *(uint2 *)to = make_uint2(high[0], high[1]);
        *(uint2 *)(to + s.room) = make_uint2(low[0], low[1]);
        if (i % 32 == 0)
            s.blocks[(r * s.room + i) / 32] =
                make_float2(scale, float_of((uint32_t)(Q::ZERO * sum)));
    }
}

/* --- weights --- */

/* A warp's next weights: of each output 16 bytes a lane, and the scale of these. */
struct weights {
    uint4 values[O];
    float scales[O];
};

/* Those of inputs [i, i + 32 * INPUTS) for the outputs from `o` on; zeros where there are none.
 * Q8_0: two lanes share a block, so a scale is loaded by one lane and handed to both. */
template <class Q>
KVP_DEV void load_weights(weights &w, const kvp__matvec_args &a, uint32_t o, uint32_t i)
{
    uint32_t lane = threadIdx.x % 32, at = i + lane * Q::INPUTS, block = i + lane * 32;
    bool has_scale = block < a.n_in && lane < Q::INPUTS;
    KVP_UNROLL
    for (uint32_t k = 0; k < O; k++) {
        uint64_t row = (uint64_t)(o + k) * a.n_in;
        w.values[k] = make_uint4(0, 0, 0, 0);
        w.scales[k] = 0.0f;
        if (o + k < a.n_out && at < a.n_in) w.values[k] = load16(a.w.values + Q::bytes(row + at));
        if (o + k < a.n_out && has_scale) w.scales[k] = f16_float(a.w.scales[(row + block) / 32]);
        if (Q::INPUTS == 16) w.scales[k] = shfl(w.scales[k], (int)lane / 2);
    }
}

KVP_DEV int dot(uint4 w, uint4 x, int sum)
{
    sum = dp4a((int)w.x, (int)x.x, sum);
    sum = dp4a((int)w.y, (int)x.y, sum);
    sum = dp4a((int)w.z, (int)x.z, sum);
    return dp4a((int)w.w, (int)x.w, sum);
}

/* sum[k] += the weights of output k times a plane of bytes. */
template <class Q>
KVP_DEV void add_dots(int (&sum)[O], const weights &w, const int8_t *plane, uint32_t at,
                      uint32_t room)
{
    KVP_UNROLL
    for (uint32_t p = 0; p < Q::PIECES; p++) {
        uint4 x = *(const uint4 *)(plane + Q::staged_at(at + 16 * p, room));
        KVP_UNROLL
        for (int k = 0; k < O; k++) sum[k] = dot(Q::piece(w.values[k], p), x, sum[k]);
    }
}

/* sums[r][k] += row r times these weights of output k; `at`: their place in what is staged. */
template <class Q, int R>
KVP_DEV void multiply(float (&sums)[R][O], const weights &w, const staged_rows &s, uint32_t at)
{
    KVP_UNROLL
    for (int r = 0; r < R; r++) {
        const int8_t *high = s.bytes + 2 * r * s.room, *low = high + s.room;
        float2 block = s.blocks[(r * s.room + at) / 32];
        int sum[O] = {};
        add_dots<Q>(sum, w, high, at, s.room);
        KVP_UNROLL
        for (int k = 0; k < O; k++) {
            sum[k] *= 256;
            if (Q::ZERO) sum[k] -= (int)bits_of(block.y);
        }
        add_dots<Q>(sum, w, low, at, s.room);
        KVP_UNROLL
        for (int k = 0; k < O; k++)
            sums[r][k] = fma_rn((float)sum[k], mul_rn(block.x, w.scales[k]), sums[r][k]);
    }
}

/* --- a tile of rows --- */

template <class Q, int R>
KVP_DEV void multiply_rows(const kvp__matvec_args &a, uint32_t first_row, uint32_t rows)
{
    KVP_SMEM(smem);
    const uint32_t room = STAGED / R, step = 32 * Q::INPUTS;
    staged_rows s = {(int8_t *)smem, (float2 *)(smem + 2 * STAGED), room};
    uint32_t lane = threadIdx.x % 32;
    for (uint32_t tile = blockIdx.x * WARPS * O; tile < a.n_out; tile += gridDim.x * WARPS * O) {
        uint32_t o = tile + threadIdx.x / 32 * O;
        float sums[R][O] = {};
        weights now, next;
        load_weights<Q>(now, a, o, 0);
        for (uint32_t i = 0; i < a.n_in; i += step) {
            /* What all fits is staged once. */
            if (i % room == 0 && (a.n_in > room || tile < gridDim.x * WARPS * O)) {
                __syncthreads();
                stage<Q, R>(a, s, first_row, rows, i);
                __syncthreads();
            }
            load_weights<Q>(next, a, o, i + step);
            if (i + lane * Q::INPUTS < a.n_in)
                multiply<Q, R>(sums, now, s, i % room + lane * Q::INPUTS);
            now = next;
        }
        KVP_UNROLL
        for (int r = 0; r < R; r++) {
            KVP_UNROLL
            for (int k = 0; k < O; k++) {
                float sum = warp_sum(sums[r][k]);
                if (lane == (uint32_t)(r * O + k) && (uint32_t)r < rows && o + k < a.n_out)
                    a.y[(uint64_t)(first_row + r) * a.y_row + o + k] = sum;
            }
        }
    }
}

template <class Q> KVP_DEV void matvec(const kvp__matvec_args &a)
{
    uint32_t n = a.of_outputs ? a.step->n_outputs : a.step->n_rows;
    for (uint32_t row = 0; row < n; row += MOST_ROWS) {
        uint32_t rows = n - row < MOST_ROWS ? n - row : MOST_ROWS;
        if (rows == 1) multiply_rows<Q, 1>(a, row, rows);
        else if (rows == 2) multiply_rows<Q, 2>(a, row, rows);
        else if (rows <= 4) multiply_rows<Q, 4>(a, row, rows);
        else multiply_rows<Q, 8>(a, row, rows);
    }
}

KVP_KERNEL_BLOCKS(matvec_q8_0, kvp__matvec_args, KVP__MATVEC_THREADS, 2) { matvec<q8_0>(a); }
KVP_KERNEL_BLOCKS(matvec_q4_0, kvp__matvec_args, KVP__MATVEC_THREADS, 2) { matvec<q4_0>(a); }

/* --- as 16-bit floats --- */

/* Four values of a word, less ZERO, times the scale, into two words of halves. */
template <class Q> KVP_DEV uint2 four_halves(uint32_t word, float scale, uint32_t type)
{
    float v[4];
    KVP_UNROLL
    for (int j = 0; j < 4; j++)
        v[j] = (float)((int)(int8_t)(uint8_t)(word >> 8 * j) - Q::ZERO) * scale;
    return make_uint2(pack(v[0], v[1], type), pack(v[2], v[3], type));
}

template <class Q> KVP_DEV void dequant(const kvp__dequant_args &a)
{
    uint64_t i = ((uint64_t)blockIdx.x * KVP__DEQUANT_THREADS + threadIdx.x) * KVP__DEQUANT_EACH;
    if (i >= (uint64_t)a.n_rows * a.n_in) return;
    uint64_t at = (uint64_t)a.first * a.n_in + i;
    uint4 w = load16(a.w.values + Q::bytes(at / Q::INPUTS * Q::INPUTS));
    w = Q::piece(w, (uint32_t)(at % Q::INPUTS) / 16);
    float scale = f16_float(a.w.scales[at / 32]);
    uint2 p = four_halves<Q>(w.x, scale, a.out_type), q = four_halves<Q>(w.y, scale, a.out_type);
    uint2 r = four_halves<Q>(w.z, scale, a.out_type), s = four_halves<Q>(w.w, scale, a.out_type);
    uint4 *out = (uint4 *)((uint16_t *)a.out + i);
    out[0] = make_uint4(p.x, p.y, q.x, q.y);
    out[1] = make_uint4(r.x, r.y, s.x, s.y);
}

KVP_KERNEL(dequant_q8_0, kvp__dequant_args, KVP__DEQUANT_THREADS) { dequant<q8_0>(a); }
KVP_KERNEL(dequant_q4_0, kvp__dequant_args, KVP__DEQUANT_THREADS) { dequant<q4_0>(a); }

} // namespace kvp
