/*
 * Matrix products: y = W x for one row or many, from packed panels (panel.h).
 *
 * A tile is 16 outputs (the lanes) times a few rows. Along the input, block after block, 8-bit
 * products are summed exactly in integers, then enter the result by one fused multiply-add:
 *
 *     y += float(sum of w q) * (weight scale * activation scale)
 *     y += minimum * (activation scale * sum of q)                    types with a minimum
 *
 * Offsets of unsigned quants are taken off in integers, by the activations' sums. Types with a scale
 * per 16 inputs multiply the two half sums by their small integer scales, exactly, before the one
 * conversion: at most 2 * 128 * 16 * 32 * 127 < 2^24. So the order is the same for one row as for
 * five hundred, and the rows in a call do not show in its bits.
 *
 * With 32-bit activations, y += w x input by input, weights expanded in registers: the only way for
 * F32, F16 and BF16 weights, and for quantised ones the way without 8-bit activations.
 *
 * Bytes and operations: each weight is read once per call for few rows, and once per ROW_BYTES of
 * activations for many; 2 operations per weight and row.
 */
#include "cpu/product.h"

/*
 * Rows that tiles have, largest first: what the level's registers hold, for 8-bit and for 32-bit
 * activations. Plain C has no registers to fill, and is kept small.
 */
#if KVP__LEVEL == KVP_CPU_AVX512
#define SIZES(X, type) X(type, 8) X(type, 4) X(type, 2) X(type, 1)
#define FLOAT_SIZES(X, type) X(type, 8) X(type, 4) X(type, 1)
static const uint32_t sizes[] = {8, 4, 2, 1}, float_sizes[] = {8, 4, 1};
enum { TILE_ROWS = 8, PANELS = 4 };
#elif KVP__LEVEL == KVP_CPU_GENERIC
#define SIZES(X, type) X(type, 1)
#define FLOAT_SIZES(X, type) X(type, 1)
static const uint32_t sizes[] = {1}, float_sizes[] = {1};
enum { TILE_ROWS = 4, PANELS = 4 };
#else
#define SIZES(X, type) X(type, 4) X(type, 2) X(type, 1)
#define FLOAT_SIZES(X, type) X(type, 6) X(type, 3) X(type, 1)
static const uint32_t sizes[] = {4, 2, 1}, float_sizes[] = {6, 3, 1};
enum { TILE_ROWS = 6, PANELS = 4 };
#endif

/* Activations that are gone through for each panel: they should stay in the second cache. */
enum { ROW_BYTES = 192 << 10 };

/* --- 8-bit activations --- */

KVP__INLINE vd step(uint32_t type, vd d, vb w, const int8_t *x)
{
    return type == KVP__Q8_0 ? vd_step_s8(d, w, x) : vd_step(d, w, x);
}

/* One block for T rows: sum[t] becomes the integer sum, offsets taken off. */
KVP__INLINE void block_sums(uint32_t type, uint32_t T, const uint8_t *planes, const small *k,
                            const kvp__act_block *x, vi *sum)
{
    kvp__panel p = kvp__panel_of(type);
    const uint32_t bits = p.low_bits + p.high_bits;
    const uint32_t steps = type == KVP__Q8_0 ? VD_STEPS_S8 : VD_STEPS(bits);
    const uint32_t run = p.halves && steps > 4 ? 4 : steps;
    const bool offset = type == KVP__Q8_0 ? VD_S8_EXCESS != 0 : p.offset != 0;
    vd d[TILE_ROWS];
    UNROLL for (uint32_t t = 0; t < T; t++)
        sum[t] = offset ? vi_madd16(vi_zero(), k->offset_pair, sums_of(x->sums + 2 * t))
                        : vi_zero();
    UNROLL for (uint32_t i = 0; i < 8; i += run) {
        UNROLL for (uint32_t t = 0; t < T; t++) d[t] = vd_open(p.halves ? vi_zero() : sum[t]);
        UNROLL for (uint32_t j = i; j < i + run; j++) {
            /* Both halves of a unit one after the other: the sum is exact in any order. */
            uint32_t c = p.low_bits == 4 && run == 8 ? j / 2 + j % 2 * 4 : j;
            vb w = quants(type, planes, c);
            UNROLL for (uint32_t t = 0; t < T; t++) d[t] = step(type, d[t], w, x->q + 32 * t + 4 * c);
        }
        UNROLL for (uint32_t t = 0; t < T; t++)
            sum[t] = p.halves ? vd_close_scaled(sum[t], d[t], k->half[i / 4])
                              : vd_close(sum[t], d[t]);
    }
}

/* y[t] += block s of `super`, for T rows. */
KVP__INLINE void add_block(uint32_t type, uint32_t T, const uint8_t *super, const uint8_t *block,
                           uint32_t s, const kvp__act_block *at, vf *y)
{
    kvp__panel p = kvp__panel_of(type);
    small k = read_small(type, super, block, s);
    vi sum[TILE_ROWS];
    block_sums(type, T, block + p.block_head, &k, at, sum);
    scales f = read_scales(type, super, s); /* late: registers are needed before */
    UNROLL for (uint32_t t = 0; t < T; t++) {
        vf both = vf_mul(f.scale, vf_set1(at->scale[t]));
        y[t] = vf_fma(vi_to_vf(sum[t]), both, y[t]);
    }
    if (p.minimum && p.halves)
        UNROLL for (uint32_t t = 0; t < T; t++) {
            vi m = vi_madd16(vi_zero(), k.minimum_pair, sums_of(at->sums + 2 * t));
            vf both = vf_mul(f.minimum, vf_set1(at->scale[t]));
            y[t] = vf_fma(vi_to_vf(m), both, y[t]);
        }
    if (p.minimum && !p.halves)
        UNROLL for (uint32_t t = 0; t < T; t++)
            y[t] = vf_fma(f.minimum, vf_set1(at->scaled_sum[t]), y[t]);
}

/* Rows `row` to `row` + T, P panels: out[panel][t][lane]. */
KVP__INLINE void integer_tile(uint32_t type, uint32_t T, uint32_t P, const uint8_t *panel,
                              uint64_t panel_bytes, const kvp__act *x, uint32_t row, float *out)
{
    kvp__panel p = kvp__panel_of(type);
    kvp__act_block at = kvp__act_at(x, row, 0);
    const size_t next = (size_t)KVP__ACT_BYTES * x->group;
    const uint32_t supers = x->n_in / (32 * p.super);
    vf y[TILE_ROWS];
    UNROLL for (uint32_t t = 0; t < T * P; t++) y[t] = vf_zero();
    ONCE for (uint32_t i = 0; i < supers; i++, panel += kvp__panel_super_bytes(p)) {
        const uint8_t *block = panel + p.super_head;
        ONCE for (uint32_t s = 0; s < p.super; s++, block += kvp__panel_block_bytes(p)) {
            UNROLL for (uint32_t n = 0; n < P; n++) {
                const size_t beside = n * panel_bytes;
                if (T <= 2)
                    UNROLL for (uint32_t b = 0; b < kvp__panel_block_bytes(p); b += 64)
                        __builtin_prefetch(block + beside + AHEAD + b);
                add_block(type, T, panel + beside, block + beside, s, &at, y + n * T);
            }
            at.q += next;
            at.scale += next / sizeof *at.scale;
            at.scaled_sum += next / sizeof *at.scaled_sum;
            at.sums += next / sizeof *at.sums;
        }
    }
    UNROLL for (uint32_t t = 0; t < T * P; t++) vf_store(out + KVP__LANES * t, y[t]);
}

/* --- 32-bit activations --- */

KVP__INLINE vf plain_weights(uint32_t type, const uint8_t *p)
{
    const uint16_t *h = (const uint16_t *)(const void *)p;
    if (type == KVP__F32) return vf_load((const float *)(const void *)p);
    return type == KVP__F16 ? vf_load_f16(h) : vf_load_bf16(h);
}

/* P panels, so that one row has enough independent sums: out[panel][t][lane]. */
KVP__INLINE void plain_tile(uint32_t type, uint32_t T, uint32_t P, const uint8_t *panel,
                            uint64_t panel_bytes, const kvp__act *x, uint32_t row, float *out)
{
    const uint32_t step_bytes = type == KVP__F32 ? 64 : 32;
    const float *in = x->x + row * x->x_row;
    vf y[TILE_ROWS];
    UNROLL for (uint32_t t = 0; t < T * P; t++) y[t] = vf_zero();
    ONCE for (uint32_t i = 0; i < x->n_in; i++, in++, panel += step_bytes)
        UNROLL for (uint32_t n = 0; n < P; n++) {
            const uint8_t *at = panel + n * panel_bytes;
            if (T == 1) __builtin_prefetch(at + AHEAD);
            vf w = plain_weights(type, at);
            UNROLL for (uint32_t t = 0; t < T; t++)
                y[n * T + t] = vf_fma(w, vf_set1(in[t * x->x_row]), y[n * T + t]);
        }
    UNROLL for (uint32_t t = 0; t < T * P; t++) vf_store(out + KVP__LANES * t, y[t]);
}

/* Quantised weights, expanded to what the file's format defines. */
KVP__INLINE void expanded_tile(uint32_t type, uint32_t T, const uint8_t *panel, const kvp__act *x,
                               uint32_t row, float *out)
{
    kvp__panel p = kvp__panel_of(type);
    const float *in = x->x + row * x->x_row;
    vf y[TILE_ROWS];
    UNROLL for (uint32_t t = 0; t < T; t++) y[t] = vf_zero();
    ONCE for (uint32_t b = 0; b < x->n_in / 32; b++, in += 32) {
        const uint32_t s = b % p.super;
        const uint8_t *super = panel + (size_t)(b / p.super) * kvp__panel_super_bytes(p);
        const uint8_t *block = super + p.super_head + (size_t)s * kvp__panel_block_bytes(p);
        small k = read_small(type, super, block, s);
        scales f = read_scales(type, super, s);
        UNROLL for (uint32_t h = 0; h < 2; h++) {
            vf scale = f.scale, minimum = f.minimum;
            if (p.halves) scale = vf_mul(scale, vi_to_vf(vi_sar(k.half[h], 16)));
            if (p.halves && p.minimum) {
                vi m = vi_shr(vi_shl(k.minimum_pair, h ? 0 : 16), 16);
                minimum = vf_mul(minimum, vi_to_vf(m));
            }
            UNROLL for (uint32_t c = 4 * h; c < 4 * h + 4; c++) {
                vi group = vb_vi(quants(type, block + p.block_head, c));
                ONCE for (uint32_t i = 0; i < 4; i++) {
                    vi v = vi_shl(group, (int)(24 - 8 * i));
                    v = type == KVP__Q8_0 ? vi_sar(v, 24) : vi_shr(v, 24);
                    vf w = vi_to_vf(vi_sub(v, vi_set1(p.offset)));
                    w = p.minimum ? vf_fma(w, scale, minimum) : vf_mul(w, scale);
                    UNROLL for (uint32_t t = 0; t < T; t++)
                        y[t] = vf_fma(w, vf_set1(in[t * x->x_row + 4 * c + i]), y[t]);
                }
            }
        }
    }
    UNROLL for (uint32_t t = 0; t < T; t++) vf_store(out + KVP__LANES * t, y[t]);
}

/* --- the tiles that there are --- */

typedef void tile_fn(const uint8_t *panel, uint64_t panel_bytes, const kvp__act *x, uint32_t row,
                     float *out);

#define TILE(name, call)                                                                           \
    static void name(const uint8_t *panel, uint64_t panel_bytes, const kvp__act *x, uint32_t row,  \
                     float *out)                                                                   \
    {                                                                                              \
        (void)panel_bytes;                                                                         \
        call;                                                                                      \
    }
#define INTEGER(type, T)                                                                           \
    TILE(integer_##type##_##T, integer_tile(KVP__##type, T, 1, panel, panel_bytes, x, row, out))
#define INTEGER_PANELS(type)                                                                       \
    TILE(integer_##type##_panels,                                                                  \
         integer_tile(KVP__##type, 1, PANELS, panel, panel_bytes, x, row, out))
#define EXPANDED(type, T)                                                                          \
    TILE(expanded_##type##_##T, expanded_tile(KVP__##type, T, panel, x, row, out))
#define PLAIN(type, T)                                                                             \
    TILE(plain_##type##_##T, plain_tile(KVP__##type, T, 1, panel, panel_bytes, x, row, out))
#define PLAIN_PANELS(type)                                                                         \
    TILE(plain_##type##_panels, plain_tile(KVP__##type, 1, PANELS, panel, panel_bytes, x, row, out))

#define QUANTISED(X) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K)
#define UNQUANTISED(X) X(F32) X(F16) X(BF16)

#define DEFINE(type) SIZES(INTEGER, type) INTEGER_PANELS(type) FLOAT_SIZES(EXPANDED, type)
QUANTISED(DEFINE)
#undef DEFINE
#define DEFINE(type) FLOAT_SIZES(PLAIN, type) PLAIN_PANELS(type)
UNQUANTISED(DEFINE)
#undef DEFINE

typedef struct kind {
    tile_fn *integer[KVP__COUNT(sizes)];
    tile_fn *floats[KVP__COUNT(float_sizes)];
    tile_fn *panels; /* of one row: PANELS side by side */
} kind;

#define INTEGER_NAME(type, T) integer_##type##_##T,
#define EXPANDED_NAME(type, T) expanded_##type##_##T,
#define PLAIN_NAME(type, T) plain_##type##_##T,
static const kind kinds[] = {
#define ENTRY(type)                                                                                \
    [KVP__##type] = {{SIZES(INTEGER_NAME, type)}, {FLOAT_SIZES(EXPANDED_NAME, type)},     \
                    integer_##type##_panels},
    QUANTISED(ENTRY)
#undef ENTRY
#define ENTRY(type)                                                                                \
    [KVP__##type] = {{NULL}, {FLOAT_SIZES(PLAIN_NAME, type)}, plain_##type##_panels},
    UNQUANTISED(ENTRY)
#undef ENTRY
};

/* --- going through rows and panels --- */

/* All rows of one panel, in tiles of the sizes there are, each within a group of rows (32-bit
 * activations have none). */
KVP__INLINE void one_panel(const product *j, tile_fn *const *tiles, const uint32_t *rows_of,
                           uint32_t group, kvp__span rows, uint32_t panel)
{
    float tile[TILE_ROWS * KVP__LANES];
    const uint8_t *w = j->w->panels + panel * j->w->panel_bytes;
    uint32_t row = rows.first, end = rows.first + rows.count;
    while (row < end) {
        uint32_t left = end - row, inside = group ? group - row % group : left, i = 0;
        while (rows_of[i] > left || rows_of[i] > inside) i++;
        uint32_t n = rows_of[i];
        tiles[i](w, 0, j->x, row, tile);
        store_tile(j, row, n, panel, tile);
        row += n;
    }
}

/* One row after the other. */
static void panels_beside(const product *j, const kind *k, kvp__span rows, uint32_t panel)
{
    float tile[PANELS * KVP__LANES];
    const uint8_t *w = j->w->panels + panel * j->w->panel_bytes;
    for (uint32_t row = rows.first; row < rows.first + rows.count; row++) {
        k->panels(w, j->w->panel_bytes, j->x, row, tile);
        for (uint32_t p = 0; p < PANELS; p++) store_tile(j, row, 1, panel + p, tile + p * KVP__LANES);
    }
}

void KVP__AT(matmul)(const kvp__mat *w, const kvp__act *x, kvp__span rows, kvp__span panels, float *y,
                     size_t y_row, bool add)
{
    const product j = {w, x, y, y_row, add};
    const kind *k = &kinds[w->type];
    const bool integer = k->integer[0] && x->blocks;
    const uint32_t row_bytes = integer ? w->n_in : 4 * w->n_in;
    const uint32_t unit = integer ? 16 : 12; /* whole groups, or tiles at every level */
    uint32_t chunk = ROW_BYTES / row_bytes / unit * unit;
    if (chunk < unit) chunk = unit;
    /* Weights from memory come faster in several streams. */
    const uint32_t most = integer ? 1 : k->integer[0] ? 0 : 3;
    for (uint32_t done = 0; done < rows.count; done += chunk) {
        kvp__span part = {rows.first + done, rows.count - done};
        if (part.count > chunk) part.count = chunk;
        const bool beside = part.count <= most;
        for (uint32_t p = panels.first, end = panels.first + panels.count; p < end; p++) {
            if (beside && end - p >= PANELS) {
                panels_beside(&j, k, part, p);
                p += PANELS - 1;
            } else if (integer) {
                one_panel(&j, k->integer, sizes, x->group, part, p);
            } else {
                one_panel(&j, k->floats, float_sizes, 0, part, p);
            }
        }
    }
}
