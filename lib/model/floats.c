/*
 * Rows as floats. See floats.h.
 *
 * A block is 32 values, or 256 of them with scales for each 16 or 32. What differs between types is
 * where a quant's bits lie; a value is always scale * quant, or scale * quant + minimum, in two
 * roundings at most, as the format defines it.
 */
#include "model/floats.h"

#include "base/half.h"

static uint32_t u16(const uint8_t *p) { return (uint32_t)p[0] | (uint32_t)p[1] << 8; }
static uint32_t u32(const uint8_t *p) { return u16(p) | u16(p + 2) << 16; }
static float half_at(const uint8_t *p) { return kvp__f16_to_f32((uint16_t)u16(p)); }

/* --- blocks of 32 --- */

/* Five-bit types keep the fifth bits of a block in one word; quant i and i + 16 share a byte. */
static uint32_t nibble(const uint8_t *low, uint32_t i)
{
    return i < 16 ? low[i] & 15u : low[i - 16] >> 4;
}

static void q8_0(const uint8_t *b, float *out)
{
    float scale = half_at(b);
    for (uint32_t i = 0; i < 32; i++) out[i] = (float)(int8_t)b[2 + i] * scale;
}

static void centred(const uint8_t *low, uint32_t fifths, int32_t middle, float scale, float *out)
{
    for (uint32_t i = 0; i < 32; i++)
        out[i] = (float)((int32_t)(nibble(low, i) | (fifths >> i & 1u) << 4) - middle) * scale;
}

static void offset(const uint8_t *low, uint32_t fifths, float scale, float minimum, float *out)
{
    for (uint32_t i = 0; i < 32; i++)
        out[i] = (float)(nibble(low, i) | (fifths >> i & 1u) << 4) * scale + minimum;
}

/* --- blocks of 256: eight parts of 32, whose quants are spread over the block's bytes --- */

/* Bits [2 * n, 2 * n + 2) of 32 bytes. */
static uint32_t pair(const uint8_t *p, uint32_t i, uint32_t n) { return p[i] >> 2 * n & 3u; }

static void q2_k(const uint8_t *b, float *out)
{
    float scale = half_at(b + 80), minimum = half_at(b + 82);
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t s = b[i / 16], q = pair(b + 16 + i / 128 * 32, i % 32, i / 32 % 4);
        out[i] = (float)q * (scale * (float)(s & 15u)) - minimum * (float)(s >> 4);
    }
}

static void q3_k(const uint8_t *b, float *out)
{
    const uint8_t *small = b + 96;
    float scale = half_at(b + 108);
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t h = i / 16, low = h < 8 ? small[h] & 15u : small[h - 8] >> 4;
        int32_t s = (int32_t)(low | pair(small + 8, h % 4, h / 4) << 4) - 32;
        int32_t q = (int32_t)(pair(b + 32 + i / 128 * 32, i % 32, i / 32 % 4) |
                              (uint32_t)(b[i % 32] >> i / 32 & 1) << 2) - 4;
        out[i] = (float)q * (scale * (float)s);
    }
}

/* Scale and minimum of part s: six bits each; of the last four parts the upper two bits are above
 * those of the first four. */
static void six_bits(const uint8_t *small, uint32_t s, uint32_t *scale, uint32_t *minimum)
{
    if (s < 4) {
        *scale = small[s] & 63u;
        *minimum = small[s + 4] & 63u;
    } else {
        *scale = (small[s + 4] & 15u) | (uint32_t)(small[s - 4] >> 6) << 4;
        *minimum = (uint32_t)(small[s + 4] >> 4) | (uint32_t)(small[s] >> 6) << 4;
    }
}

/* Q4_K, and Q5_K with `fifths`: 32 bytes, a bit for each part. */
static void q4_q5_k(const uint8_t *b, const uint8_t *low, const uint8_t *fifths, float *out)
{
    float scale = half_at(b), minimum = half_at(b + 2);
    for (uint32_t s = 0; s < 8; s++) {
        uint32_t own_scale, own_minimum;
        six_bits(b + 4, s, &own_scale, &own_minimum);
        float d = scale * (float)own_scale, m = minimum * (float)own_minimum;
        for (uint32_t i = 0; i < 32; i++) {
            uint32_t q = low[s / 2 * 32 + i] >> 4 * (s % 2) & 15u;
            if (fifths) q |= (uint32_t)(fifths[i] >> s & 1) << 4;
            *out++ = (float)q * d - m;
        }
    }
}

static void q6_k(const uint8_t *b, float *out)
{
    float scale = half_at(b + 208);
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t third = i / 128, quarter = i / 32 % 4, at = i % 32;
        uint32_t low = b[64 * third + 32 * (quarter % 2) + at] >> 4 * (quarter / 2) & 15u;
        int32_t q = (int32_t)(low | pair(b + 128 + 32 * third, at, quarter) << 4) - 32;
        out[i] = (float)q * (scale * (float)(int8_t)b[192 + i / 16]);
    }
}

static void block_floats(uint32_t type, const uint8_t *b, float *out)
{
    switch (type) {
    case KVP__Q4_0: centred(b + 2, 0, 8, half_at(b), out); break;
    case KVP__Q4_1: offset(b + 4, 0, half_at(b), half_at(b + 2), out); break;
    case KVP__Q5_0: centred(b + 6, u32(b + 2), 16, half_at(b), out); break;
    case KVP__Q5_1: offset(b + 8, u32(b + 4), half_at(b), half_at(b + 2), out); break;
    case KVP__Q8_0: q8_0(b, out); break;
    case KVP__Q2_K: q2_k(b, out); break;
    case KVP__Q3_K: q3_k(b, out); break;
    case KVP__Q4_K: q4_q5_k(b, b + 16, NULL, out); break;
    case KVP__Q5_K: q4_q5_k(b, b + 48, b + 16, out); break;
    case KVP__Q6_K: q6_k(b, out); break;
    case KVP__F16: *out = half_at(b); break;
    case KVP__BF16: *out = kvp__bf16_to_f32((uint16_t)u16(b)); break;
    default: *out = kvp__bits_float(u32(b)); break;
    }
}

uint64_t kvp__row_bytes(uint32_t type, uint64_t n)
{
    kvp__type_info info = kvp__type_get(type);
    uint64_t bytes;
    if (!info.name || n == 0 || n % info.block) return 0;
    return kvp__mul(n / info.block, info.bytes, &bytes) ? bytes : 0;
}

void kvp__row_floats(uint32_t type, const void *row, uint64_t n, float *out)
{
    kvp__type_info info = kvp__type_get(type);
    const uint8_t *b = row;
    for (uint64_t i = 0; i < n; i += info.block, b += info.bytes) block_floats(type, b, out + i);
}
