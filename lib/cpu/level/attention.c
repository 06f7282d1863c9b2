/*
 * Attention of some rows against one segment of 256 keys, and the merging of segments. The
 * algorithm, its order of operations and its cost are told in docs/kernels/attention.md.
 *
 * Invariant: a row's result depends on its query and on the keys it sees, in this order alone:
 *     score of a key     one fused chain over the head's dimension, from 0
 *     maximum            any order
 *     sum of exp         16 lanes by key modulo 16, tiles in order, then the fixed tree
 *     value              one fused chain over the keys it sees, in order, from 0
 * so rows can be grouped at will. Keys that a row does not see are never multiplied by zero, they are
 * left out: zero times NaN is NaN, and even a finite one could change the sign of a zero.
 *
 * Called by cpu/attend.c.
 */
#include "cpu/vec.h"

/*
 * Up to MICRO rows, or just WIDE, share one load of keys or values. `beside` says how many tiles, or chunks of 16 columns,
 * go with so many rows: as many accumulators as there are registers. BY_ROWS makes the number of
 * rows, and with it the length of every inner loop, a constant.
 */
#if KVP__LEVEL == KVP_CPU_GENERIC
#define UNROLL
#define MICRO 2u
#define WIDE MICRO
static const uint8_t beside[WIDE + 1] = {0, 1, 1};
#define BY_ROWS(call, rows)                                                                        \
    switch (rows) {                                                                                \
    case 1: call(1); break;                                                                        \
    default: call(2); break;                                                                       \
    }
#else
#define UNROLL _Pragma("GCC unroll 16")
#define MICRO 6u
#if KVP__LEVEL == KVP_CPU_AVX512
#define WIDE 12u
static const uint8_t beside[WIDE + 1] = {0, 4, 4, 4, 2, 2, 2, [WIDE] = 2};
#define IF_WIDE(call) case WIDE: call(WIDE); break;
#else
#define WIDE MICRO
static const uint8_t beside[WIDE + 1] = {0, 4, 2, 2, 1, 1, 1};
#define IF_WIDE(call)
#endif
#define BY_ROWS(call, rows)                                                                        \
    switch (rows) {                                                                                \
    case 1: call(1); break;                                                                        \
    case 2: call(2); break;                                                                        \
    case 3: call(3); break;                                                                        \
    case 4: call(4); break;                                                                        \
    case 5: call(5); break;                                                                        \
    IF_WIDE(call)                                                                                  \
    default: call(6); break;                                                                       \
    }
#endif

KVP__INLINE size_t kv_size(uint32_t format) { return format == KVP_KV_F32 ? 4 : 2; }

KVP__INLINE vf load_kv(uint32_t format, const void *base, size_t i)
{
    switch (format) {
    case KVP_KV_F16: return vf_load_f16((const uint16_t *)base + i);
    case KVP_KV_BF16: return vf_load_bf16((const uint16_t *)base + i);
    default: return vf_load((const float *)base + i);
    }
}

/*
 * Tiles lie scattered, so the processor does not see what comes next: the values are asked for while
 * scores are computed, the next segment's keys while values are summed, each line where the line at the
 * same place is used, by the first rows alone. Into the second cache, for a segment's keys or values fill most of the first.
 */
KVP__INLINE void ask_for(const void *tile, size_t offset, size_t bytes)
{
    const char *p = (const char *)tile + offset;
    UNROLL for (size_t i = 0; i < bytes; i += KVP__CACHE_LINE) __builtin_prefetch(p + i, 0, 2);
}

/* --- scores --- */

/* `rows` rows against `tiles` tiles from tile t on, both known when this is inlined. */
KVP__INLINE void score_micro(const kvp__segment *s, uint32_t format, uint32_t rows, uint32_t tiles,
                             uint32_t row, uint32_t t)
{
    vf acc[WIDE][4];
    UNROLL for (uint32_t r = 0; r < rows; r++)
        UNROLL for (uint32_t i = 0; i < tiles; i++) acc[r][i] = vf_zero();
    const float *q = s->q + row * s->q_row;
    size_t q_row = s->q_row;
    const size_t line = KVP__CACHE_LINE / (KVP__TILE * kv_size(format)); /* 1 or 2 elements */
    const void *keys[4], *values[4];
    UNROLL for (uint32_t i = 0; i < tiles; i++) {
        keys[i] = s->k[t + i];
        values[i] = s->v[t + i];
    }
    for (uint32_t d = 0; d < s->key_dim; d++) {
        vf k[4];
        if (row == 0 && d % line == 0)
            UNROLL for (uint32_t i = 0; i < tiles; i++)
                ask_for(values[i], (size_t)d * KVP__TILE * kv_size(format), 1);
        UNROLL for (uint32_t i = 0; i < tiles; i++)
            k[i] = load_kv(format, keys[i], (size_t)d * KVP__TILE);
        UNROLL for (uint32_t r = 0; r < rows; r++) {
            vf x = vf_set1(q[r * q_row + d]);
            UNROLL for (uint32_t i = 0; i < tiles; i++) acc[r][i] = vf_fma(k[i], x, acc[r][i]);
        }
    }
    UNROLL for (uint32_t r = 0; r < rows; r++)
        UNROLL for (uint32_t i = 0; i < tiles; i++)
            vf_store(s->p + (size_t)(row + r) * KVP__SEGMENT + (t + i) * KVP__TILE, acc[r][i]);
}

KVP__INLINE void score_rows(const kvp__segment *s, uint32_t format, uint32_t rows, uint32_t row,
                            uint32_t t, uint32_t end)
{
    const uint32_t step = beside[rows];
    for (; t + step <= end; t += step) score_micro(s, format, rows, step, row, t);
    for (; t < end; t++) score_micro(s, format, rows, 1, row, t);
}

KVP__INLINE void scores_of(const kvp__segment *s, uint32_t format, uint32_t row, uint32_t rows,
                           uint32_t t, uint32_t end)
{
#define CALL(n) score_rows(s, format, n, row, t, end)
    BY_ROWS(CALL, rows)
#undef CALL
}

static void scores(const kvp__segment *s, uint32_t row, uint32_t rows, uint32_t t, uint32_t end)
{
    switch (s->k_format) {
    case KVP_KV_F16: scores_of(s, KVP_KV_F16, row, rows, t, end); break;
    case KVP_KV_BF16: scores_of(s, KVP_KV_BF16, row, rows, t, end); break;
    default: scores_of(s, KVP_KV_F32, row, rows, t, end); break;
    }
}

/* --- softmax of one row --- */

/* The lanes of tile t that the row sees. */
KVP__INLINE vm seen(uint32_t t, uint32_t lo, uint32_t hi)
{
    uint32_t first = t * KVP__TILE;
    uint32_t below = lo > first ? lo - first : 0, above = hi - first < 16 ? hi - first : 16;
    return vm_and(vm_first(above), vm_not(vm_first(below)));
}

static void softmax(const kvp__segment *s, uint32_t row)
{
    uint32_t lo = s->lo[row], hi = s->hi[row];
    float *p = s->p + (size_t)row * KVP__SEGMENT;
    uint32_t t0 = lo / KVP__TILE, t1 = (hi + KVP__TILE - 1) / KVP__TILE;
    vf low = vf_set1(-__builtin_inff()), top = low;
    for (uint32_t t = t0; t < t1; t++) {
        vf x = vf_load(p + t * KVP__TILE);
        if (s->softcap != 0) {
            vf cap = vf_set1(s->softcap);
            x = vf_mul(cap, vf_tanh(vf_div(x, cap)));
        }
        if (t == t0 || t == t1 - 1) x = vf_select(seen(t, lo, hi), x, low);
        vf_store(p + t * KVP__TILE, x);
        top = vf_max(x, top); /* a NaN is passed over here and shows in the sum */
    }
    float max = vf_max_lane(top);
    /* All scores -inf: the differences below must not be NaN; each exp is then 0. */
    vf base = vf_set1(max == -__builtin_inff() ? 0.0f : max), sum = vf_zero();
    for (uint32_t t = t0; t < t1; t++) {
        vf e = vf_exp_or_zero(vf_sub(vf_load(p + t * KVP__TILE), base));
        if (t == t0 || t == t1 - 1) e = vf_select(seen(t, lo, hi), e, vf_zero());
        vf_store(p + t * KVP__TILE, e);
        sum = vf_add(sum, e);
    }
    s->max[row] = max;
    s->sum[row] = vf_sum(sum);
}

/* --- values --- */

/* `rows` rows, `chunks` chunks of 16 columns from `column` on, keys `key` to `end` - 1. */
KVP__INLINE void value_micro(const kvp__segment *s, uint32_t format, uint32_t rows,
                             uint32_t chunks, uint32_t row, uint32_t column, uint32_t key,
                             uint32_t end)
{
    vf acc[WIDE][4];
    float *out = s->out + row * s->out_row + column;
    size_t out_row = s->out_row, v_row = s->v_row;
    const float *p = s->p + (size_t)row * KVP__SEGMENT;
    UNROLL for (uint32_t r = 0; r < rows; r++)
        UNROLL for (uint32_t i = 0; i < chunks; i++)
            acc[r][i] = vf_load(out + r * out_row + i * KVP__LANES);
    while (key < end) {
        uint32_t tile = key / KVP__TILE, stop = (tile + 1) * KVP__TILE;
        if (stop > end) stop = end;
        size_t at = ((size_t)(key % KVP__TILE) * v_row + column) * kv_size(format);
        const char *v = (const char *)s->v[tile] + at;
        const char *next = s->next_k[tile] ? (const char *)s->next_k[tile] + at : v;
        for (; key < stop; key++, v += v_row * kv_size(format), next += v_row * kv_size(format)) {
            vf x[4];
            if (row == 0) ask_for(next, 0, chunks * KVP__LANES * kv_size(format));
            UNROLL for (uint32_t i = 0; i < chunks; i++)
                x[i] = load_kv(format, v, (size_t)i * KVP__LANES);
            UNROLL for (uint32_t r = 0; r < rows; r++) {
                vf w = vf_set1(p[r * KVP__SEGMENT + key]);
                UNROLL for (uint32_t i = 0; i < chunks; i++) acc[r][i] = vf_fma(x[i], w, acc[r][i]);
            }
        }
    }
    UNROLL for (uint32_t r = 0; r < rows; r++)
        UNROLL for (uint32_t i = 0; i < chunks; i++)
            vf_store(out + r * out_row + i * KVP__LANES, acc[r][i]);
}

KVP__INLINE void value_rows(const kvp__segment *s, uint32_t format, uint32_t rows, uint32_t row,
                            uint32_t key, uint32_t end)
{
    const uint32_t step = beside[rows] * KVP__LANES;
    uint32_t c = 0;
    for (; c + step <= s->v_row; c += step)
        value_micro(s, format, rows, step / KVP__LANES, row, c, key, end);
    for (; c < s->v_row; c += KVP__LANES) value_micro(s, format, rows, 1, row, c, key, end);
}

KVP__INLINE void values_of(const kvp__segment *s, uint32_t format, uint32_t row, uint32_t rows,
                           uint32_t key, uint32_t end)
{
#define CALL(n) value_rows(s, format, n, row, key, end)
    BY_ROWS(CALL, rows)
#undef CALL
}

static void values(const kvp__segment *s, uint32_t row, uint32_t rows, uint32_t key, uint32_t end)
{
    if (key >= end) return;
    switch (s->v_format) {
    case KVP_KV_F16: values_of(s, KVP_KV_F16, row, rows, key, end); break;
    case KVP_KV_BF16: values_of(s, KVP_KV_BF16, row, rows, key, end); break;
    default: values_of(s, KVP_KV_F32, row, rows, key, end); break;
    }
}

/* Rows of the same token see the same keys: each such run over keys from..to - 1, cut to what it
 * sees. */
static void values_by_token(const kvp__segment *s, uint32_t row, uint32_t rows, uint32_t from,
                            uint32_t to)
{
    for (uint32_t r = row, n; r < row + rows; r += n) {
        for (n = 1; r + n < row + rows && s->lo[r + n] == s->lo[r] && s->hi[r + n] == s->hi[r];)
            n++;
        if (n > MICRO && n != WIDE) n = MICRO;
        uint32_t key = s->lo[r] > from ? s->lo[r] : from, end = s->hi[r] < to ? s->hi[r] : to;
        values(s, r, n, key, end);
    }
}

/* --- a group of rows --- */

static void attend_rows(const kvp__segment *s, uint32_t row, uint32_t rows)
{
    uint32_t last = row + rows - 1;
    uint32_t all_lo = s->lo[last], all_hi = s->hi[row];   /* what every row sees, */
    uint32_t any_lo = s->lo[row], any_hi = s->hi[last];   /* and what some row may see */
    scores(s, row, rows, any_lo / KVP__TILE, (any_hi + KVP__TILE - 1) / KVP__TILE);
    for (uint32_t r = row; r <= last; r++) softmax(s, r);
    if (all_lo >= all_hi) {
        values_by_token(s, row, rows, 0, KVP__SEGMENT);
        return;
    }
    values_by_token(s, row, rows, 0, all_lo);
    values(s, row, rows, all_lo, all_hi);
    values_by_token(s, row, rows, all_hi, KVP__SEGMENT);
}

void KVP__AT(attend)(const kvp__segment *s)
{
    for (uint32_t r = 0; r < s->n_rows; r++) {
        s->max[r] = -__builtin_inff();
        s->sum[r] = 0;
        for (uint32_t c = 0; c < s->v_row; c += KVP__LANES)
            vf_store(s->out + r * s->out_row + c, vf_zero());
    }
    for (uint32_t row = 0, end; row < s->n_rows; row = end) {
        end = row + 1;
        if (s->lo[row] >= s->hi[row]) continue;
        while (end < s->n_rows && s->lo[end] < s->hi[end]) end++;
        for (uint32_t n; row < end; row += n) {
            /* Groups of about equal size: eight rows are four and four, not six and two. */
            uint32_t left = end - row, groups = (left + MICRO - 1) / MICRO;
            n = WIDE > MICRO && left >= WIDE ? WIDE : left / groups;
            attend_rows(s, row, n);
        }
    }
}

/* --- merging --- */

void KVP__AT(merge)(kvp__row_state *state, float *acc, float max, float sum, const float *segment,
                    uint32_t dim)
{
    if (sum == 0) return;
    if (state->sum == 0) {
        memcpy(acc, segment, dim * sizeof *acc);
        state->max = max;
        state->sum = sum;
        return;
    }
    float top = max > state->max ? max : state->max;
    vf old = vf_exp_or_zero(vf_set1(state->max - top)), new = vf_exp_or_zero(vf_set1(max - top));
    for (uint32_t c = 0; c < dim; c += KVP__LANES)
        vf_store(acc + c, vf_fma(vf_load(segment + c), new, vf_mul(vf_load(acc + c), old)));
    float lanes[KVP__LANES];
    vf_store(lanes, vf_fma(vf_set1(sum), new, vf_mul(vf_set1(state->sum), old)));
    state->sum = lanes[0];
    state->max = top;
}

/* --- storing --- */

void KVP__AT(to_kv)(uint32_t format, const float *x, uint32_t n, void *out)
{
    uint16_t *h = out;
    if (format == KVP_KV_F32) {
        memcpy(out, x, n * sizeof *x);
        return;
    }
    uint32_t i = 0;
    for (; i + KVP__LANES <= n; i += KVP__LANES) {
        if (format == KVP_KV_F16) vf_store_f16(h + i, vf_clamp_f16(vf_load(x + i)));
        else vf_store_bf16(h + i, vf_load(x + i));
    }
    vf rest = vf_load_n(x + i, n - i);
    if (format == KVP_KV_F16) vf_store_f16_n(h + i, vf_clamp_f16(rest), n - i);
    else vf_store_bf16_n(h + i, rest, n - i);
}
