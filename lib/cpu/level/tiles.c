/*
 * Matrix products with AMX tiles, for quantised weights, eight rows or more and 1,024 inputs or more; the
 * rest goes to the level under this one. See level/matmul.c for the arithmetic, which is the same bit for bit: a
 * tile product is the exact integer sum of one block for 16 rows at once.
 *
 * A panel's weights are expanded into signed bytes once for up to MOST_GROUPS groups of rows, a slice of the input
 * at a time, which stays in the first cache; the results of all these rows wait in memory from one
 * slice to the next. Sums leave the tiles through memory.
 *
 * Types with a scale per 16 inputs multiply two half blocks. Their sums and small scales are
 * integers whose products stay below 2^24, so floats compute them exactly.
 *
 * Bytes and operations: as matmul.c, with weights read once per MOST_GROUPS groups of rows; per block, 16 outputs
 * and row one conversion, one product and one fused multiply-add (two with a minimum), which is what
 * limits it (docs/kernels/matmul.md).
 */
#include "cpu/product.h"
#include "cpu/tile_amx.h"

enum {
    MOST_GROUPS = 6, /* these three make up what a call takes of the stack: 27 KB */
    SLICE = 4,       /* blocks */
    RUN = 2,         /* tile products in a row */
    LEAST_ROWS = 8,
    LEAST_IN = 1024, /* shorter rows do not make up for what a panel costs beside */
    MOST_ROWS = 16
};

/* Blocks of a panel, ready to multiply with. */
typedef struct slice {
    _Alignas(64) int8_t w[SLICE][512];
    float scale[SLICE][KVP__LANES], minimum[SLICE][KVP__LANES];
    float half[SLICE][2][KVP__LANES];        /* of types with halves: their small scales, */
    int32_t minimum_pair[SLICE][KVP__LANES]; /* and minima, as matmul.c has them */
} slice;

/* Block `at` of the slice from its place in the panel. */
KVP__INLINE void expand(uint32_t type, const uint8_t *super, const uint8_t *block, uint32_t s,
                        uint32_t at, slice *to)
{
    kvp__panel p = kvp__panel_of(type);
    UNROLL for (uint32_t c = 0; c < 8; c++) {
        vb v = quants(type, block + p.block_head, c);
        if (p.offset) v = vb_sub(v, vb_set1((uint8_t)p.offset));
        vb_store((uint8_t *)to->w[at] + 64 * c, v);
    }
    scales f = read_scales(type, super, s);
    vf_store(to->scale[at], f.scale);
    if (p.minimum) vf_store(to->minimum[at], f.minimum);
    if (!p.halves) return;
    small k = read_small(type, super, block, s);
    for (uint32_t h = 0; h < 2; h++)
        vf_store(to->half[at][h], vi_to_vf(vi_sar(k.half[h], 16)));
    if (p.minimum) vi_store(to->minimum_pair[at], k.minimum_pair);
}

KVP__INLINE void expand_blocks(uint32_t type, const uint8_t *panel, uint32_t first, uint32_t n,
                               slice *to)
{
    kvp__panel p = kvp__panel_of(type);
    ONCE for (uint32_t i = 0; i < n; i++) {
        uint32_t b = first + i, s = b % p.super;
        const uint8_t *super = panel + (size_t)(b / p.super) * kvp__panel_super_bytes(p);
        const uint8_t *block = super + p.super_head + (size_t)s * kvp__panel_block_bytes(p);
        UNROLL for (uint32_t o = 0; o < kvp__panel_block_bytes(p); o += 64)
            __builtin_prefetch(block + AHEAD + o);
        expand(type, super, block, s, i, to);
    }
}

/* A group's rows at the slice's first block. */
typedef struct rows_at {
    kvp__act_block at;
    size_t next; /* bytes from block to block */
} rows_at;

#define AT(x, member, b) ((x)->at.member + (b) * ((x)->next / sizeof *(x)->at.member))

/* Up to two groups of rows by up to two panels: tile 2 g + p. */
typedef struct square {
    const rows_at *x;
    const slice *w;
    float *acc[4];
} square;

typedef int32_t tile_sums[MOST_ROWS * KVP__LANES];

/* Products of blocks b to end - 1, RUN at most, or of half as many where they have halves. */
KVP__INLINE void multiply(bool halves, uint32_t G, uint32_t P, const square *s, uint32_t b,
                          uint32_t end, tile_sums sums[4][RUN])
{
    ONCE for (uint32_t i = 0, all = (end - b) * (1 + halves); i < all; i++) {
        const uint32_t block = b + (halves ? i / 2 : i), half = halves ? i % 2 : 0;
        UNROLL for (uint32_t p = 0; p < P; p++) kt_load_weights(p, s->w[p].w[block] + 256 * half);
        UNROLL for (uint32_t g = 0; g < G; g++) {
            kt_load_rows(g, AT(&s->x[g], q, block) + 16 * half, 32);
            UNROLL for (uint32_t p = 0; p < P; p++) kt_dot(2 * g + p);
        }
        UNROLL for (uint32_t g = 0; g < G; g++)
            UNROLL for (uint32_t p = 0; p < P; p++) kt_store(2 * g + p, sums[2 * g + p][i]);
    }
}

/* acc[t][lane] += those blocks, for T rows of one panel. */
KVP__INLINE void add_blocks(bool halves, bool minimum, uint32_t T, const slice *w, const rows_at *x,
                            uint32_t b, uint32_t end, const tile_sums *sums, float *acc)
{
    vf y[MOST_ROWS];
    UNROLL for (uint32_t t = 0; t < T; t++) y[t] = vf_load(acc + KVP__LANES * t);
    ONCE for (; b < end; b++, sums += 1 + halves) {
        const vf scale = vf_load(w->scale[b]);
        const float *row_scale = AT(x, scale, b);
        UNROLL for (uint32_t t = 0; t < T; t++) {
            vf sum = vi_to_vf(vi_load(sums[0] + KVP__LANES * t));
            if (halves) {
                sum = vf_mul(sum, vf_load(w->half[b][0]));
                sum = vf_fma(vi_to_vf(vi_load(sums[1] + KVP__LANES * t)), vf_load(w->half[b][1]),
                             sum);
            }
            y[t] = vf_fma(sum, vf_mul(scale, vf_set1(row_scale[t])), y[t]);
        }
        if (minimum && !halves) {
            const vf m = vf_load(w->minimum[b]);
            const float *scaled_sum = AT(x, scaled_sum, b);
            UNROLL for (uint32_t t = 0; t < T; t++)
                y[t] = vf_fma(m, vf_set1(scaled_sum[t]), y[t]);
        }
        if (minimum && halves) {
            const vf m = vf_load(w->minimum[b]);
            const vi pair = vi_load(w->minimum_pair[b]);
            const int16_t *halves_of = AT(x, sums, b);
            UNROLL for (uint32_t t = 0; t < T; t++) {
                vi sum = vi_madd16(vi_zero(), pair, sums_of(halves_of + 2 * t));
                y[t] = vf_fma(vi_to_vf(sum), vf_mul(m, vf_set1(row_scale[t])), y[t]);
            }
        }
    }
    UNROLL for (uint32_t t = 0; t < T; t++) vf_store(acc + KVP__LANES * t, y[t]);
}

KVP__INLINE void square_of(bool halves, bool minimum, uint32_t T, uint32_t G, uint32_t P,
                           const square *s, uint32_t n)
{
    _Alignas(64) tile_sums sums[4][RUN];
    const uint32_t run = halves ? RUN / 2 : RUN;
    ONCE for (uint32_t b = 0; b < n; b += run) {
        const uint32_t end = n - b < run ? n : b + run; /* behind lies other memory */
        multiply(halves, G, P, s, b, end, sums);
        ONCE for (uint32_t g = 0; g < G; g++)
            ONCE for (uint32_t p = 0; p < P; p++)
                add_blocks(halves, minimum, T, &s->w[p], &s->x[g], b, end,
                           (const tile_sums *)sums[2 * g + p], s->acc[2 * g + p]);
    }
}

typedef void square_fn(const square *s, uint32_t groups, uint32_t panels, uint32_t n);
typedef void expand_fn(const uint8_t *panel, uint32_t first, uint32_t n, slice *to);

#define SQUARE(name, halves, minimum, T)                                                           \
    static void name(const square *s, uint32_t groups, uint32_t panels, uint32_t n)                \
    {                                                                                              \
        if (groups == 2 && panels == 2) square_of(halves, minimum, T, 2, 2, s, n);                 \
        else if (groups == 2) square_of(halves, minimum, T, 2, 1, s, n);                           \
        else if (panels == 2) square_of(halves, minimum, T, 1, 2, s, n);                           \
        else square_of(halves, minimum, T, 1, 1, s, n);                                            \
    }
SQUARE(plain_8, false, false, 8)
SQUARE(plain_16, false, false, 16)
SQUARE(minimum_8, false, true, 8)
SQUARE(minimum_16, false, true, 16)
SQUARE(halves_8, true, false, 8)
SQUARE(halves_16, true, false, 16)
SQUARE(halves_minimum_8, true, true, 8)
SQUARE(halves_minimum_16, true, true, 16)

#define TYPES(X) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K)
#define EXPAND(type)                                                                               \
    static void expand_##type(const uint8_t *panel, uint32_t first, uint32_t n, slice *to)         \
    {                                                                                              \
        expand_blocks(KVP__##type, panel, first, n, to);                                           \
    }
TYPES(EXPAND)
#define ENTRY(type) [KVP__##type] = expand_##type,
static expand_fn *const expanders[] = {TYPES(ENTRY)};
/* [has halves][has a minimum][16 rows, not 8] */
static square_fn *const squares[2][2][2] = {
    {{plain_8, plain_16}, {minimum_8, minimum_16}},
    {{halves_8, halves_16}, {halves_minimum_8, halves_minimum_16}}};

/* Up to MOST_GROUPS groups of rows by one or two panels, from row `first` on, which begins a group. */
static void some_panels(const product *j, expand_fn *expand_slice, square_fn *add, kvp__span rows,
                        kvp__span panels)
{
    _Alignas(64) slice w[2];
    _Alignas(64) float acc[MOST_GROUPS][2][MOST_ROWS * KVP__LANES];
    const kvp__act *x = j->x;
    const uint32_t groups = (rows.count + x->group - 1) / x->group, blocks = j->w->n_in / 32;
    memset(acc, 0, groups * sizeof *acc);
    for (uint32_t b = 0; b < blocks; b += SLICE) {
        const uint32_t n = blocks - b < SLICE ? blocks - b : SLICE;
        for (uint32_t p = 0; p < panels.count; p++)
            expand_slice(j->w->panels + (panels.first + p) * j->w->panel_bytes, b, n, &w[p]);
        for (uint32_t g = 0; g < groups; g += 2) {
            const size_t next = (size_t)KVP__ACT_BYTES * x->group;
            const uint32_t row = rows.first + g * x->group, two = groups - g < 2 ? 1 : 2;
            rows_at r[2] = {{kvp__act_at(x, row, b), next}};
            if (two == 2) r[1] = (rows_at){kvp__act_at(x, row + x->group, b), next};
            square s = {r, w, {acc[g][0], acc[g][1], acc[g + two - 1][0], acc[g + two - 1][1]}};
            add(&s, two, panels.count, n);
        }
    }
    for (uint32_t g = 0, done = 0; g < groups; g++, done += x->group)
        for (uint32_t p = 0; p < panels.count; p++) {
            uint32_t left = rows.count - done;
            store_tile(j, rows.first + done, left < x->group ? left : x->group, panels.first + p,
                       acc[g][p]);
        }
}

void KVP__AT(matmul)(const kvp__mat *w, const kvp__act *x, kvp__span rows, kvp__span panels, float *y,
                     size_t y_row, bool add)
{
    const kvp__panel p = kvp__panel_of(w->type);
    if (!p.super || !x->blocks || x->n_in < LEAST_IN || rows.count < LEAST_ROWS ||
        x->group < LEAST_ROWS || rows.first % x->group) {
        kvp__matmul_avx512(w, x, rows, panels, y, y_row, add);
        return;
    }
    const product j = {w, x, y, y_row, add};
    const uint32_t groups = (rows.count + x->group - 1) / x->group;
    const uint32_t times = (groups + MOST_GROUPS - 1) / MOST_GROUPS;
    const uint32_t most = (groups + times - 1) / times * x->group; /* even shares */
    square_fn *const add_slice = squares[p.halves][p.minimum][x->group == MOST_ROWS];
    kt_begin(x->group, p.halves ? 4 : 8);
    for (uint32_t done = 0; done < rows.count; done += most) {
        kvp__span part = {rows.first + done, rows.count - done};
        if (part.count > most) part.count = most;
        for (uint32_t i = 0; i < panels.count; i += 2) {
            kvp__span two = {panels.first + i, panels.count - i < 2 ? 1 : 2};
            some_panels(&j, expanders[w->type], add_slice, part, two);
        }
    }
    kt_end();
}
