/*
 * Packing and matrix products, every type at every level this machine runs: against the format's
 * definition in double precision, and against themselves for bits (levels, row counts, splits).
 */
#define _GNU_SOURCE
#include "base/half.h"
#include "cpu/kernels.h"
#include "cpu/pack.h"

#include "golden_blocks.h"
#include "gguf_oracle.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <cmocka.h>

enum { MAX_ROWS = 33 };

/* --- a matrix and rows to multiply it with --- */

typedef struct fixture {
    const oracle_type *type;
    uint32_t n_out, n_in, rows;
    size_t row_bytes;
    uint8_t *raw;      /* as in the file */
    uint8_t *panels;
    kvp__mat w;
    float *x;
    void *workspace;
    kvp__act quantised, plain;
} fixture;

static void *take(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    assert_non_null(p);
    memset(p, 0xa5, (bytes + 63) / 64 * 64);
    return p;
}

static fixture setup(const oracle_type *t, uint32_t n_out, uint32_t n_in, uint32_t rows)
{
    fixture f = {.type = t, .n_out = n_out, .n_in = n_in, .rows = rows};
    uint64_t seed = t->type * 1000003u + n_out * 31u + n_in;
    f.row_bytes = n_in / t->block * t->bytes;
    f.raw = take(n_out * f.row_bytes);
    for (uint32_t o = 0; o < n_out; o++)
        oracle_random_row(t, n_in, &seed, f.raw + o * f.row_bytes);

    uint64_t bytes = kvp__mat_describe(&f.w, t->type, n_out, n_in);
    assert_true(bytes > 0);
    assert_int_equal(bytes, kvp__mat_panels(&f.w) * f.w.panel_bytes);
    f.panels = take(bytes);
    f.w.panels = f.panels;
    for (uint32_t p = 0; p < kvp__mat_panels(&f.w); p++) {
        uint32_t n = n_out - 16 * p < 16 ? n_out - 16 * p : 16;
        kvp__pack_panel(t->type, n_in, f.raw + 16 * p * f.row_bytes, n,
                        f.panels + p * f.w.panel_bytes);
    }

    f.x = take(sizeof(float) * rows * n_in);
    for (uint32_t i = 0; i < rows * n_in; i++) {
        double u = oracle_random(&seed);
        f.x[i] = (float)(u * u * u * 4.0);
    }
    f.workspace = take(kvp__act_bytes(rows, n_in));
    kvp__act_place(&f.quantised, f.workspace, rows, n_in);
    f.quantised.x = f.x;
    f.quantised.x_row = n_in;
    f.plain = (kvp__act){.n_in = n_in, .x = f.x, .x_row = n_in};
    return f;
}

static void teardown(fixture *f)
{
    free(f->raw);
    free(f->panels);
    free(f->x);
    free(f->workspace);
}

static bool takes_8_bits(const oracle_type *t) { return t->block > 1; }

static const kvp__kernels *kernels_at(uint32_t level)
{
    return kvp__cpu_level(level) == level ? kvp__kernels_get(level) : NULL;
}

/* Levels this machine runs, plain C first. */
static uint32_t levels(const kvp__kernels *out[5])
{
    uint32_t n = 0;
    for (uint32_t l = KVP_CPU_GENERIC; l <= KVP_CPU_AMX; l++)
        if (kernels_at(l)) out[n++] = kernels_at(l);
    return n;
}

/* All rows and panels. */
static void product(const kvp__kernels *k, const fixture *f, bool eight_bits, float *y)
{
    const kvp__act *a = eight_bits ? &f->quantised : &f->plain;
    k->matmul(&f->w, a, (kvp__span){0, f->rows}, (kvp__span){0, kvp__mat_panels(&f->w)}, y,
              f->n_out, false);
}

/* --- packing --- */

static void packing_keeps_the_size(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < ORACLE_TYPES; i++) {
        const oracle_type *t = &oracle_types[i];
        kvp__mat w;
        const uint32_t n_in = t->block > 1 ? 2048 : 1000;
        uint64_t file = (uint64_t)n_in / t->block * t->bytes;
        assert_int_equal(kvp__mat_describe(&w, t->type, 4096, n_in), file * 4096);
        /* rows that fill no panel are rounded up to one */
        uint64_t odd = kvp__mat_describe(&w, t->type, 32003, n_in);
        assert_true((double)odd <= 1.02 * (double)(file * 32003));
    }
}

static void bad_shapes_are_refused(void **state)
{
    (void)state;
    kvp__mat w;
    assert_int_equal(kvp__mat_describe(&w, KVP__Q4_0, 16, 33), 0);
    assert_int_equal(kvp__mat_describe(&w, KVP__Q4_K, 16, 32), 0);
    assert_int_equal(kvp__mat_describe(&w, KVP__Q4_0, 16, 0), 0);
    assert_int_equal(kvp__mat_describe(&w, KVP__Q4_0, 0, 32), 0);
    assert_int_equal(kvp__mat_describe(&w, 4, 16, 32), 0);
    assert_int_equal(kvp__mat_describe(&w, KVP__F32, 0xffffffffu, 0xffffffffu), 0);
    assert_int_equal(kvp__act_bytes(0xffffffffu, 0xffffffffu), 0);
}

static void rows_come_back_as_they_were(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < ORACLE_TYPES; i++) {
        fixture f = setup(&oracle_types[i], 37, 512, 1);
        float *row = take(sizeof(float) * f.n_in);
        for (uint32_t o = 0; o < f.n_out; o++) {
            kvp__pack_row(&f.w, o, row);
            for (uint32_t n = 0; n < f.n_in; n++) {
                double want = oracle_weight(f.type, f.raw + o * f.row_bytes, n);
                if (fabs((double)row[n] - want) > 1e-7 * fabs(want) + 1e-7)
                    fail_msg("%s row %u input %u: %g, not %g", f.type->name, o, n, (double)row[n],
                             want);
            }
        }
        free(row);
        teardown(&f);
    }
}

/* The reference implementation rounds in the same places, so the floats are equal. */
static void golden_blocks_are_equal(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < KVP__COUNT(goldens); i++) {
        const struct golden *g = &goldens[i];
        kvp__mat w;
        uint8_t *panel = take(kvp__mat_describe(&w, g->type, 1, g->n));
        kvp__pack_panel(g->type, g->n, g->block, 1, panel);
        w.panels = panel;
        float row[256];
        kvp__pack_row(&w, 0, row);
        for (uint32_t n = 0; n < g->n; n++) {
            float want;
            memcpy(&want, &g->bits[n], sizeof want);
            if (row[n] != want)
                fail_msg("type %u input %u: %.9g, not %.9g", g->type, n, (double)row[n],
                         (double)want);
        }
        free(panel);
    }
}

/* --- activations --- */

static void activations_are_rounded_to_the_nearest(void **state)
{
    (void)state;
    const kvp__kernels *k[5];
    uint32_t n_levels = levels(k);
    fixture f = setup(&oracle_types[3], 16, 544, 3);
    for (uint32_t l = 0; l < n_levels; l++) {
        memset(f.workspace, 0x55, kvp__act_bytes(3, f.n_in));
        k[l]->quantize(&f.quantised, 0, 3);
        for (uint32_t r = 0; r < 3; r++)
            for (uint32_t b = 0; b < f.n_in / 32; b++) {
                const float *x = f.x + r * f.n_in + 32 * b;
                kvp__act_block at = kvp__act_at(&f.quantised, r, b);
                const int8_t *q = at.q;
                double max = 0, scale = (double)*at.scale;
                int sum[2] = {0, 0};
                for (uint32_t i = 0; i < 32; i++) {
                    max = fmax(max, fabs((double)x[i]));
                    sum[i / 16] += q[i];
                    assert_true(q[i] >= -127);
                    assert_true(fabs(q[i] * scale - (double)x[i]) <= 0.50001 * scale);
                }
                assert_true(fabs(scale - max / 127) <= 1e-7 * scale);
                assert_int_equal(at.sums[0], sum[0]);
                assert_int_equal(at.sums[1], sum[1]);
                assert_true(*at.scaled_sum == *at.scale * (float)(sum[0] + sum[1]));
                kvp__act_block beyond = kvp__act_at(&f.quantised, 3, b); /* groups are of four */
                assert_true(*beyond.scale == 0 && *beyond.scaled_sum == 0);
                assert_true(beyond.sums[0] == 0 && beyond.sums[1] == 0);
            }
    }
    teardown(&f);
}

/* Ties, zeros, denormals, infinities and NaNs: the same at every level, and never -128. */
static void strange_activations_stay_in_range(void **state)
{
    (void)state;
    const kvp__kernels *k[5];
    uint32_t n_levels = levels(k);
    fixture f = setup(&oracle_types[3], 16, 256, 1);
    float *x = f.x;
    memset(x, 0, 256 * sizeof *x);
    for (int i = 0; i < 32; i++) {
        x[32 + i] = (float)(i - 16) * 1e-42f;
        x[64 + i] = i ? (float)i + 0.5f : 127.0f;
        x[96 + i] = i ? -127.0f : -1.0f;
        x[128 + i] = i == 9 ? (float)INFINITY : 1.0f;
        x[160 + i] = i == 3 ? (float)NAN : (float)i;
        x[192 + i] = (float)(i - 16) * 1e37f;
    }
    uint64_t bytes = kvp__act_bytes(1, 256);
    uint8_t *first = take(bytes);
    for (uint32_t l = 0; l < n_levels; l++) {
        memset(f.workspace, 0x55, bytes);
        k[l]->quantize(&f.quantised, 0, 1);
        kvp__act_block at[8];
        for (uint32_t b = 0; b < 8; b++) at[b] = kvp__act_at(&f.quantised, 0, b);
        for (int i = 0; i < 256; i++) assert_true(at[i / 32].q[i % 32] >= -127);
        for (int i = 0; i < 64; i++) assert_int_equal(at[i / 32].q[i % 32], 0);
        for (int i = 1; i < 32; i++) assert_int_equal(at[2].q[i], i + i % 2); /* ties to even */
        assert_true(*at[0].scale == 0 && *at[1].scale == 0);
        assert_true(isinf(*at[4].scale));
        if (l == 0) memcpy(first, f.workspace, bytes);
        assert_memory_equal(at[0].q, first, 5 * KVP__ACT_BYTES); /* a NaN's own bits may differ */
    }
    free(first);
    teardown(&f);
}

/* --- products --- */

/* The error that n additions in 32 bits may make, of the sum of magnitudes. */
static void check_product(const fixture *f, const float *y, bool eight_bits, const char *level)
{
    for (uint32_t r = 0; r < f->rows; r++)
        for (uint32_t o = 0; o < f->n_out; o++) {
            double want = 0, magnitude = 0;
            for (uint32_t n = 0; n < f->n_in; n++) {
                kvp__act_block at = kvp__act_at(&f->quantised, r, n / 32);
                double x = eight_bits ? (double)*at.scale * at.q[n % 32]
                                      : (double)f->x[r * f->n_in + n];
                double t = x * oracle_weight(f->type, f->raw + o * f->row_bytes, n);
                want += t;
                magnitude += fabs(t);
            }
            double additions = eight_bits ? f->n_in / 32 * 2 + 4 : f->n_in + 4;
            double got = (double)y[r * f->n_out + o];
            if (!(fabs(got - want) <= additions * 6e-8 * magnitude + 1e-30))
                fail_msg("%s at %s, row %u output %u: %.9g, not %.9g", f->type->name, level, r, o,
                         got, want);
        }
}

static const char *level_name(const kvp__kernels *k)
{
    static const char *const names[] = {"", "plain C", "AVX2", "AVX-512", "NEON", "AMX", "NEON dot"};
    return names[k->level];
}

static void products_match_the_definition(void **state)
{
    (void)state;
    const kvp__kernels *k[5];
    uint32_t n_levels = levels(k);
    for (uint32_t i = 0; i < ORACLE_TYPES; i++) {
        fixture f = setup(&oracle_types[i], 41, 1024, 11);
        float *first = take(sizeof(float) * f.rows * f.n_out);
        float *y = take(sizeof(float) * f.rows * f.n_out);
        for (int eight = 0; eight <= takes_8_bits(f.type); eight++)
            for (uint32_t l = 0; l < n_levels; l++) {
                k[l]->quantize(&f.quantised, 0, f.rows);
                product(k[l], &f, eight, y);
                if (l == 0) memcpy(first, y, sizeof(float) * f.rows * f.n_out);
                if (l == 0) check_product(&f, y, eight, level_name(k[l]));
                if (memcmp(first, y, sizeof(float) * f.rows * f.n_out))
                    fail_msg("%s, %s activations: %s differs from plain C", f.type->name,
                             eight ? "8-bit" : "32-bit", level_name(k[l]));
            }
        free(first);
        free(y);
        teardown(&f);
    }
}

/* One number for the bits of every type and both kinds of activations, the same on every machine. */
static void bits_are_the_committed_ones(void **state)
{
    (void)state;
    const uint64_t committed = 0x38da5ef83a713f9cu;
    const kvp__kernels *k[5];
    uint32_t n_levels = levels(k);
    for (uint32_t l = 0; l < n_levels; l++) {
        uint64_t hash = 0xcbf29ce484222325u;
        for (uint32_t i = 0; i < ORACLE_TYPES; i++) {
            fixture f = setup(&oracle_types[i], 33, 512, 13);
            float *y = take(sizeof(float) * f.rows * f.n_out);
            k[l]->quantize(&f.quantised, 0, f.rows);
            for (int eight = 0; eight <= takes_8_bits(f.type); eight++) {
                product(k[l], &f, eight, y);
                for (uint32_t n = 0; n < f.rows * f.n_out; n++)
                    hash = (hash ^ kvp__float_bits(y[n])) * 0x100000001b3u;
            }
            free(y);
            teardown(&f);
        }
        if (hash != committed)
            fail_msg("%s: 0x%016llx", level_name(k[l]), (unsigned long long)hash);
    }
}

/* Widths of one block, of odd blocks, and for the plain types any. */
static void odd_widths_match_too(void **state)
{
    (void)state;
    static const uint32_t plain[] = {1, 2, 17, 31, 100}, small[] = {32, 96, 160}, k_type[] = {256, 768};
    const kvp__kernels *k[5];
    uint32_t n_levels = levels(k);
    for (uint32_t i = 0; i < ORACLE_TYPES; i++) {
        const oracle_type *t = &oracle_types[i];
        const uint32_t *widths = t->block == 1 ? plain : t->block == 32 ? small : k_type;
        uint32_t n = t->block == 1 ? 5 : t->block == 32 ? 3 : 2;
        for (uint32_t j = 0; j < n; j++)
            for (uint32_t n_out = 1; n_out <= 65; n_out += 16) {
                fixture f = setup(t, n_out, widths[j], 5);
                float *y = take(sizeof(float) * 5 * n_out);
                for (uint32_t l = 0; l < n_levels; l++) {
                    if (takes_8_bits(t)) k[l]->quantize(&f.quantised, 0, 5);
                    product(k[l], &f, takes_8_bits(t), y);
                    check_product(&f, y, takes_8_bits(t), level_name(k[l]));
                }
                free(y);
                teardown(&f);
            }
    }
}

/* The largest sums there can be: integers must not overflow at any level. */
static void extreme_quants_do_not_overflow(void **state)
{
    (void)state;
    const kvp__kernels *k[5];
    uint32_t n_levels = levels(k);
    for (uint32_t i = 0; i < ORACLE_TYPES; i++) {
        if (!takes_8_bits(&oracle_types[i])) continue;
        for (int fill = 0; fill < 4; fill++) {
            static const uint8_t fills[] = {0xff, 0x00, 0x80, 0x7f};
            fixture f = setup(&oracle_types[i], 16, 256, 2);
            /* all but the f16 scales becomes the extreme, also the small scales */
            for (uint32_t o = 0; o < 16; o++)
                for (uint32_t b = 0; b < f.row_bytes; b++) {
                    uint32_t at = b % f.type->bytes;
                    bool tail = f.type->type == KVP__Q2_K || f.type->type == KVP__Q3_K ||
                                f.type->type == KVP__Q6_K;
                    uint32_t keep = f.type->type == KVP__Q2_K ? 4
                                    : tail                    ? 2
                                    : f.type->type == KVP__Q4_1 || f.type->type == KVP__Q5_1 ||
                                            f.type->block == 256
                                        ? 4
                                        : 2;
                    if (tail ? at < f.type->bytes - keep : at >= keep)
                        f.raw[o * f.row_bytes + b] = fills[fill];
                }
            kvp__pack_panel(f.type->type, f.n_in, f.raw, 16, f.panels);
            for (uint32_t n = 0; n < f.n_in; n++) {
                f.x[n] = -3.0f;
                f.x[f.n_in + n] = n % 2 ? 3.0f : -3.0f;
            }
            float y[32];
            for (uint32_t l = 0; l < n_levels; l++) {
                k[l]->quantize(&f.quantised, 0, 2);
                product(k[l], &f, true, y);
                check_product(&f, y, true, level_name(k[l]));
            }
            teardown(&f);
        }
    }
}

/* A row's bits do not tell how many rows, panels or calls there were. */
static void rows_do_not_depend_on_company(void **state)
{
    (void)state;
    const kvp__kernels *k[5];
    uint32_t n_levels = levels(k);
    for (uint32_t i = 0; i < ORACLE_TYPES; i++) {
        fixture f = setup(&oracle_types[i], 20, 1024, MAX_ROWS);
        const uint32_t panels = kvp__mat_panels(&f.w);
        size_t bytes = sizeof(float) * f.rows * f.n_out;
        float *one = take(bytes), *y = take(bytes);
        for (int eight = 0; eight <= takes_8_bits(f.type); eight++) {
            const kvp__act *a = eight ? &f.quantised : &f.plain;
            for (uint32_t l = 0; l < n_levels; l++) {
                k[l]->quantize(&f.quantised, 0, f.rows);
                for (uint32_t r = 0; r < f.rows; r++)
                    k[l]->matmul(&f.w, a, (kvp__span){r, 1}, (kvp__span){0, panels}, one, f.n_out,
                                 false);
                for (uint32_t n = 1; n <= MAX_ROWS; n++) {
                    uint32_t first = (MAX_ROWS - n) / 2, cut = n % (panels + 1);
                    memset(y, 0xa5, bytes);
                    k[l]->matmul(&f.w, a, (kvp__span){first, n}, (kvp__span){0, cut}, y, f.n_out,
                                 false);
                    k[l]->matmul(&f.w, a, (kvp__span){first, n}, (kvp__span){cut, panels - cut}, y,
                                 f.n_out, false);
                    if (memcmp(y + first * f.n_out, one + first * f.n_out,
                               sizeof(float) * n * f.n_out))
                        fail_msg("%s at %s: %u rows differ", f.type->name, level_name(k[l]), n);
                    /* and nothing else was written */
                    for (uint32_t o = 0; o < first * f.n_out; o++)
                        assert_memory_equal(y + o, "\xa5\xa5\xa5\xa5", 4);
                    for (uint32_t o = (first + n) * f.n_out; o < f.rows * f.n_out; o++)
                        assert_memory_equal(y + o, "\xa5\xa5\xa5\xa5", 4);
                }
            }
        }
        free(one);
        free(y);
        teardown(&f);
    }
}

/* More rows than are taken through a panel at once. */
static void long_batches_are_cut_without_a_trace(void **state)
{
    (void)state;
    const kvp__kernels *k = kvp__kernels_get(kvp__cpu_level(0));
    fixture f = setup(&oracle_types[4], 48, 2048, 203);
    float *one = take(sizeof(float) * f.rows * f.n_out), *y = take(sizeof(float) * f.rows * f.n_out);
    k->quantize(&f.quantised, 0, f.rows);
    for (int eight = 0; eight < 2; eight++) {
        const kvp__act *a = eight ? &f.quantised : &f.plain;
        for (uint32_t r = 0; r < f.rows; r++)
            k->matmul(&f.w, a, (kvp__span){r, 1}, (kvp__span){0, 3}, one, f.n_out, false);
        product(k, &f, eight, y);
        assert_memory_equal(y, one, sizeof(float) * f.rows * f.n_out);
    }
    free(one);
    free(y);
    teardown(&f);
}

/* Behind the activations lies memory that must not be read: an odd number of blocks, and groups that
 * are not full. */
static void nothing_is_read_beyond_activations(void **state)
{
    (void)state;
    const kvp__kernels *k[5];
    uint32_t n_levels = levels(k);
    for (uint32_t i = 0; i < ORACLE_TYPES; i++) {
        if (!takes_8_bits(&oracle_types[i])) continue;
        fixture f = setup(&oracle_types[i], 32, oracle_types[i].block > 32 ? 1280 : 1056, 11);
        size_t bytes = (size_t)kvp__act_bytes(f.rows, f.n_in), page = 65536;
        size_t room = (bytes + page - 1) / page * page;
        uint8_t *p = mmap(NULL, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        assert_true(p != MAP_FAILED);
        assert_int_equal(mprotect(p + room, page, PROT_NONE), 0);
        /* A cache line at the end keeps groups apart and holds nothing. */
        f.quantised.blocks = p + room - (bytes - KVP__CACHE_LINE);
        float *first = take(sizeof(float) * f.rows * f.n_out);
        float *y = take(sizeof(float) * f.rows * f.n_out);
        for (uint32_t l = 0; l < n_levels; l++) {
            k[l]->quantize(&f.quantised, 0, f.rows);
            product(k[l], &f, true, l ? y : first);
            if (l) assert_memory_equal(y, first, sizeof(float) * f.rows * f.n_out);
        }
        free(first);
        free(y);
        assert_int_equal(munmap(p, room + page), 0);
        teardown(&f);
    }
}

static void adding_adds(void **state)
{
    (void)state;
    const kvp__kernels *k[5];
    uint32_t n_levels = levels(k);
    for (uint32_t i = 0; i < ORACLE_TYPES; i++) {
        fixture f = setup(&oracle_types[i], 35, 1024, 9);
        const uint32_t n = f.rows * f.n_out;
        float *plain = take(sizeof(float) * n), *sum = take(sizeof(float) * n);
        for (uint32_t l = 0; l < n_levels; l++) {
            k[l]->quantize(&f.quantised, 0, f.rows);
            product(k[l], &f, takes_8_bits(f.type), plain);
            for (uint32_t j = 0; j < n; j++) sum[j] = (float)j * 0.37f - 20.0f;
            k[l]->matmul(&f.w, takes_8_bits(f.type) ? &f.quantised : &f.plain,
                         (kvp__span){0, f.rows}, (kvp__span){0, 3}, sum, f.n_out, true);
            for (uint32_t j = 0; j < n; j++)
                assert_true(sum[j] == ((float)j * 0.37f - 20.0f) + plain[j]);
        }
        free(plain);
        free(sum);
        teardown(&f);
    }
}

/* --- levels --- */

static void levels_are_capped(void **state)
{
    (void)state;
    assert_int_equal(kvp__cpu_level(KVP_CPU_GENERIC), KVP_CPU_GENERIC);
    uint32_t best = kvp__cpu_level(0);
    assert_int_equal(kvp__cpu_level(best), best);
    assert_non_null(kvp__kernels_get(best));
#if defined(__x86_64__)
    assert_int_equal(kvp__cpu_level(KVP_CPU_NEON), KVP_CPU_GENERIC);
    assert_true(kvp__cpu_level(KVP_CPU_AVX512) >= kvp__cpu_level(KVP_CPU_AVX2));
    assert_true(kvp__cpu_level(KVP_CPU_AVX2) <= KVP_CPU_AVX2);
    assert_true(kvp__cpu_level(KVP_CPU_AVX512) <= KVP_CPU_AVX512);
    assert_true(kvp__cpu_level(KVP_CPU_AMX) >= kvp__cpu_level(KVP_CPU_AVX512));
    assert_null(kvp__kernels_get(KVP_CPU_NEON));
#elif defined(__aarch64__)
    assert_int_equal(best, KVP_CPU_NEON);
    assert_int_equal(kvp__cpu_level(KVP_CPU_AVX512), KVP_CPU_GENERIC);
    assert_null(kvp__kernels_get(KVP_CPU_AVX2));
#endif
    assert_null(kvp__kernels_get(0));
    assert_null(kvp__kernels_get(77));
    for (uint32_t l = 1; l <= KVP_CPU_AMX; l++)
        if (kernels_at(l) && l != KVP_CPU_NEON) assert_int_equal(kernels_at(l)->level, l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(packing_keeps_the_size),
        cmocka_unit_test(bad_shapes_are_refused),
        cmocka_unit_test(rows_come_back_as_they_were),
        cmocka_unit_test(golden_blocks_are_equal),
        cmocka_unit_test(activations_are_rounded_to_the_nearest),
        cmocka_unit_test(strange_activations_stay_in_range),
        cmocka_unit_test(products_match_the_definition),
        cmocka_unit_test(bits_are_the_committed_ones),
        cmocka_unit_test(odd_widths_match_too),
        cmocka_unit_test(extreme_quants_do_not_overflow),
        cmocka_unit_test(rows_do_not_depend_on_company),
        cmocka_unit_test(long_batches_are_cut_without_a_trace),
        cmocka_unit_test(nothing_is_read_beyond_activations),
        cmocka_unit_test(adding_adds),
        cmocka_unit_test(levels_are_capped),
    };
    return cmocka_run_group_tests_name("matmul", tests, NULL, NULL);
}
