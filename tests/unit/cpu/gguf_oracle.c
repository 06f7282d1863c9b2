/*
 * See gguf_oracle.h.
 */
#include "gguf_oracle.h"

#include <math.h>
#include <string.h>

enum { F32, F16, Q4_0, Q4_1, Q5_0 = 6, Q5_1, Q8_0, Q2_K = 10, Q3_K, Q4_K, Q5_K, Q6_K, BF16 = 30 };

const oracle_type oracle_types[ORACLE_TYPES] = {
    {"F32", F32, 1, 4},        {"F16", F16, 1, 2},        {"BF16", BF16, 1, 2},
    {"Q4_0", Q4_0, 32, 18},    {"Q4_1", Q4_1, 32, 20},    {"Q5_0", Q5_0, 32, 22},
    {"Q5_1", Q5_1, 32, 24},    {"Q8_0", Q8_0, 32, 34},    {"Q2_K", Q2_K, 256, 84},
    {"Q3_K", Q3_K, 256, 110},  {"Q4_K", Q4_K, 256, 144},  {"Q5_K", Q5_K, 256, 176},
    {"Q6_K", Q6_K, 256, 210},
};

static double half(const uint8_t *p)
{
    unsigned u = p[0] + 256u * p[1];
    double sign = u & 0x8000u ? -1.0 : 1.0;
    int exponent = (int)(u / 1024 % 32);
    double fraction = (double)(u % 1024) / 1024.0;
    return sign * (exponent ? ldexp(1.0 + fraction, exponent - 15) : ldexp(fraction, -14));
}

static int nibble(uint8_t byte, int upper) { return upper ? byte / 16 : byte % 16; }

static int bits2(uint8_t byte, int which) { return byte >> 2 * which & 3; }

/* Twelve bytes hold eight six-bit scales and eight six-bit minima. */
static int k4_scale(const uint8_t *s, int i)
{
    return i < 4 ? s[i] % 64 : s[i + 4] % 16 + s[i - 4] / 64 * 16;
}

static int k4_minimum(const uint8_t *s, int i)
{
    return i < 4 ? s[i + 4] % 64 : s[i + 4] / 16 + s[i] / 64 * 16;
}

/* Twelve bytes hold sixteen six-bit scales. */
static int k3_scale(const uint8_t *s, int i)
{
    int low = i < 8 ? s[i] % 16 : s[i - 8] / 16;
    return low + bits2(s[8 + i % 4], i / 4) * 16 - 32;
}

double oracle_weight(const oracle_type *t, const uint8_t *row, uint32_t at)
{
    const uint8_t *b = row + (size_t)(at / t->block) * t->bytes;
    const int i = (int)(at % t->block);
    const int h = i % 32 / 16, j = i % 16; /* of a 32-block: the half, the place in it */
    const int part = i / 128, l = i % 32, quarter = i % 128 / 32; /* of a 256-block */
    float f;
    uint32_t u;
    switch (t->type) {
    case F32:
        memcpy(&f, b, 4);
        return f;
    case F16: return half(b);
    case BF16:
        u = ((uint32_t)b[0] + 256u * b[1]) << 16;
        memcpy(&f, &u, 4);
        return f;
    case Q4_0: return half(b) * (nibble(b[2 + j], h) - 8);
    case Q4_1: return half(b) * nibble(b[4 + j], h) + half(b + 2);
    case Q5_0: return half(b) * (nibble(b[6 + j], h) + (b[2 + i / 8] >> i % 8 & 1) * 16 - 16);
    case Q5_1: return half(b) * (nibble(b[8 + j], h) + (b[4 + i / 8] >> i % 8 & 1) * 16) + half(b + 2);
    case Q8_0: return half(b) * (b[2 + i] < 128 ? b[2 + i] : b[2 + i] - 256);
    case Q2_K: {
        int s = b[i / 16];
        return half(b + 80) * (s % 16) * bits2(b[16 + 32 * part + l], quarter) -
               half(b + 82) * (s / 16);
    }
    case Q3_K: {
        int q = bits2(b[32 + 32 * part + l], quarter) - (b[l] >> i / 32 & 1 ? 0 : 4);
        return half(b + 108) * k3_scale(b + 96, i / 16) * q;
    }
    case Q4_K:
        return half(b) * k4_scale(b + 4, i / 32) * nibble(b[16 + i / 64 * 32 + l], i / 32 % 2) -
               half(b + 2) * k4_minimum(b + 4, i / 32);
    case Q5_K: {
        int q = nibble(b[48 + i / 64 * 32 + l], i / 32 % 2) + (b[16 + l] >> i / 32 & 1) * 16;
        return half(b) * k4_scale(b + 4, i / 32) * q - half(b + 2) * k4_minimum(b + 4, i / 32);
    }
    default: { /* Q6_K */
        int q = nibble(b[64 * part + 32 * (quarter % 2) + l], quarter / 2) +
                bits2(b[128 + 32 * part + l], quarter) * 16 - 32;
        int s = b[192 + i / 16];
        return half(b + 208) * (s < 128 ? s : s - 256) * q;
    }
    }
}

static uint64_t next(uint64_t *seed)
{
    *seed += 0x9e3779b97f4a7c15u;
    uint64_t z = *seed;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

double oracle_random(uint64_t *seed) { return (double)(next(seed) >> 11) * 0x1p-52 - 1.0; }

/* A half between 2^-6 and 2^-4, of either sign. */
static void random_half(uint64_t *seed, uint8_t *p)
{
    uint64_t r = next(seed);
    unsigned u = (unsigned)((9 + r % 2) << 10 | (r >> 8 & 1023) | (r >> 40 & 1) << 15);
    p[0] = (uint8_t)u;
    p[1] = (uint8_t)(u >> 8);
}

void oracle_random_row(const oracle_type *t, uint32_t n_in, uint64_t *seed, uint8_t *row)
{
    static const struct { uint8_t type, first, second; } scales[] = {
        {F16, 0, 0},   {Q4_0, 0, 0},  {Q4_1, 0, 2},   {Q5_0, 0, 0}, {Q5_1, 0, 2}, {Q8_0, 0, 0},
        {Q2_K, 80, 82}, {Q3_K, 108, 108}, {Q4_K, 0, 2}, {Q5_K, 0, 2}, {Q6_K, 208, 208},
    };
    for (uint32_t i = 0; i < n_in; i += t->block, row += t->bytes) {
        for (uint32_t k = 0; k < t->bytes; k++) row[k] = (uint8_t)next(seed);
        float f = (float)oracle_random(seed);
        if (t->type == F32) memcpy(row, &f, 4);
        if (t->type == BF16) memcpy(row, (const uint8_t *)&f + 2, 2);
        for (uint32_t k = 0; k < sizeof scales / sizeof *scales; k++)
            if (scales[k].type == t->type) {
                random_half(seed, row + scales[k].first);
                if (scales[k].second != scales[k].first) random_half(seed, row + scales[k].second);
            }
    }
}
