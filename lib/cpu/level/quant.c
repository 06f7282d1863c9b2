/*
 * Activations to 8-bit blocks of 32: q = round(x * 127 / max|x|), scale = max|x| / 127, and the
 * sums that offsets and minima of weights multiply.
 *
 * q never is -128 (vec.h's dot products rely on it), whatever the row holds: a NaN becomes -127, and
 * a block whose largest magnitude is below 2^-100, where 127 / max could overflow, becomes zero. A
 * block with an infinity has an infinite scale, so it shows in the result.
 *
 * Bytes and operations: 4 bytes in, 1.4 out, per input; some 30 vector operations per block.
 */
#include "cpu/vec.h"

KVP__INLINE vi to_q(vf x, vf inverse)
{
    vf t = vf_mul(x, inverse);
    return vf_to_vi(vf_min(vf_max(t, vf_set1(-127.0f)), vf_set1(127.0f)));
}

KVP__INLINE void block(const float *x, kvp__act_block to)
{
    vf a = vf_load(x), b = vf_load(x + 16);
    float max = vf_max_lane(vf_max(vf_abs(a), vf_abs(b)));
    bool zero = max < 0x1p-100f;
    vf inverse = vf_set1(zero ? 0.0f : 127.0f / max);
    vi qa = to_q(a, inverse), qb = to_q(b, inverse);
    vi_store_s8(to.q, qa);
    vi_store_s8(to.q + 16, qb);
    int32_t low = vi_sum(qa), high = vi_sum(qb);
    to.sums[0] = (int16_t)low;
    to.sums[1] = (int16_t)high;
    *to.scale = zero ? 0.0f : max / 127.0f;
    *to.scaled_sum = *to.scale * (float)(low + high);
}

/* What a tile of rows reads beyond the last row must be numbers that cost nothing. */
static void clear_beyond(const kvp__act *a)
{
    const uint32_t left = -a->rows % a->group;
    if (left)
        for (uint32_t b = 0; b < a->n_in / 32; b++) {
            kvp__act_block to = kvp__act_at(a, a->rows, b);
            memset(to.scale, 0, left * sizeof *to.scale);
            memset(to.scaled_sum, 0, left * sizeof *to.scaled_sum);
            memset(to.sums, 0, left * 2 * sizeof *to.sums);
        }
}

void KVP__AT(quantize)(const kvp__act *a, uint32_t first, uint32_t rows)
{
    const size_t step = (size_t)KVP__ACT_BYTES * a->group;
    for (uint32_t r = first; r < first + rows; r++) {
        const float *x = a->x + r * a->x_row;
        kvp__act_block to = kvp__act_at(a, r, 0);
        for (uint32_t b = 0; b < a->n_in / 32; b++) {
            block(x + 32 * b, to);
            to.q += step;
            to.scale += step / sizeof *to.scale;
            to.scaled_sum += step / sizeof *to.scaled_sum;
            to.sums += step / sizeof *to.sums;
        }
    }
    if (first + rows == a->rows) clear_beyond(a);
}
