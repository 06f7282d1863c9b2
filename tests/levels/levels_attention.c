/*
 * Prints, for every level this machine has, a hash of what the attention and row kernels give on
 * fixed inputs, without CMocka. Exit status 1: a level's bits are not those written down here.
 */
#include "base/hash.h"
#include "cpu/kernels.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPECTED UINT64_C(0xd9d4d410f83d2ece)

enum { ROWS = 11, DIM = 40, WIDTH = 48, LONG = 137 };

static uint32_t rng;

static float number(void)
{
    rng = rng * 1664525u + 1013904223u;
    return (float)((int32_t)(rng >> 8) - (1 << 23)) * 0x1p-21f;
}

static void numbers(float *x, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) x[i] = number();
}

static uint64_t mix(uint64_t so_far, const void *data, size_t bytes)
{
    return kvp__hash((kvp__hash_key){so_far, bytes}, data, bytes).lo;
}

/* One segment, with rows that see all, a part or nothing of it, in one format. */
static uint64_t attention(const kvp__kernels *k, uint32_t format, float softcap, uint64_t hash)
{
    static float keys[16][DIM * 16], vals[16][16 * WIDTH], q[ROWS * DIM], p[ROWS * 256];
    static float out[ROWS * WIDTH], acc[ROWS * WIDTH], max[ROWS], sum[ROWS];
    static uint32_t kept[2][16][16 * WIDTH];
    uint16_t lo[ROWS], hi[ROWS];
    kvp__segment s = {.k_format = format, .v_format = format, .key_dim = DIM, .value_dim = DIM,
                      .v_row = WIDTH, .n_rows = ROWS, .softcap = softcap, .q = q, .q_row = DIM,
                      .lo = lo, .hi = hi, .p = p, .max = max, .sum = sum, .out = out,
                      .out_row = WIDTH};
    numbers(q, ROWS * DIM);
    for (int t = 0; t < 16; t++) {
        numbers(keys[t], DIM * 16);
        numbers(vals[t], 16 * WIDTH);
        k->to_kv(format, keys[t], DIM * 16, kept[0][t]);
        k->to_kv(format, vals[t], 16 * WIDTH, kept[1][t]);
        s.k[t] = kept[0][t];
        s.v[t] = kept[1][t];
    }
    kvp__row_state state[ROWS];
    memset(state, 0, sizeof state);
    for (int turn = 0; turn < 3; turn++) {
        for (uint16_t r = 0; r < ROWS; r++) {
            lo[r] = turn == 1 ? (uint16_t)(r * 20) : 0;
            hi[r] = turn == 2 ? (uint16_t)(r / 3 * 7) : (uint16_t)(200 + r * 5);
        }
        k->attend(&s);
        for (int r = 0; r < ROWS; r++)
            k->merge(&state[r], acc + r * WIDTH, max[r], sum[r], out + r * WIDTH, WIDTH);
        hash = mix(mix(hash, out, sizeof out), sum, sizeof sum);
    }
    return mix(mix(hash, acc, sizeof acc), state, sizeof state);
}

static uint64_t rows(const kvp__kernels *k, uint64_t hash)
{
    static float x[LONG], w[LONG], y[LONG], c[LONG], s[LONG];
    for (uint32_t n = LONG - 20; n <= LONG; n++) {
        numbers(x, LONG), numbers(w, LONG), numbers(c, LONG), numbers(s, LONG);
        k->rms_norm(x, w, n, 1e-6f, y);
        hash = mix(hash, y, n * sizeof *y);
        k->rotate(y, 1, 0, KVP__ROPE_PAIRS, n & ~1u, c, s);
        k->rotate(y, 1, 0, KVP__ROPE_HALVES, n & ~1u, c, s);
        hash = mix(hash, y, n * sizeof *y);
        k->activate(n % 2 ? KVP__SILU : KVP__GELU_TANH, y, w, n);
        k->accumulate(y, x, n);
        k->softcap(y, n, 3.5f);
        hash = mix(hash, y, n * sizeof *y);
    }
    return hash;
}

int main(void)
{
    int wrong = 0;
    for (uint32_t level = KVP_CPU_GENERIC; level <= KVP__CPU_NEON_DOT; level++) {
        const kvp__kernels *k = kvp__kernels_get(level);
        if (!k || (level <= KVP_CPU_AMX && kvp__cpu_level(level) != level)) continue;
        rng = 12345;
        uint64_t hash = 1;
        for (uint32_t f = KVP_KV_F16; f <= KVP_KV_F32; f++)
            hash = attention(k, f, 20.0f, attention(k, f, 0, hash));
        hash = rows(k, hash);
        printf("level %" PRIu32 "  0x%016" PRIx64 "%s\n", level, hash,
               hash == EXPECTED ? "" : "  WRONG");
        wrong += hash != EXPECTED;
    }
    return wrong ? 1 : 0;
}
