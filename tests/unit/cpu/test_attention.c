/*
 * Attention against a double-precision oracle that shares no code with it, over the shapes and traps
 * that have broken others: every block size and format, group sizes and head sizes that are no powers
 * of two, windows, soft caps, stale memory full of NaN, splits. And its promise: the bits of a row
 * do not depend on how the step was cut or which level ran it.
 */
#include "cpu/attend.h"

#include "base/half.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static bool few_rounds(void) { return getenv("KVPAGE_SANITIZED") || getenv("KVPAGE_EMULATED"); }

static uint64_t rng = 0x9e3779b97f4a7c15u;

static uint32_t rnd(uint32_t n)
{
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return (uint32_t)((rng >> 20) % n);
}

static float gauss(void)
{
    float s = 0;
    for (int i = 0; i < 6; i++) s += (float)rnd(1u << 20) * 0x1p-20f - 0.5f;
    return s;
}

/* --- a cache, and the sequences in it --- */

typedef struct shape {
    uint32_t kv_heads, group, key_dim, value_dim, window, block, k_format, v_format;
    float softcap;
} shape;

enum { MAX_SEQS = 40 };

typedef struct world {
    shape s;
    kvp__store store;
    kvp_layer_group group;
    uint32_t n_seqs, n_rows;
    uint32_t length[MAX_SEQS], new_rows[MAX_SEQS]; /* all keys, and how many of them are rows */
    uint32_t *table[MAX_SEQS];
    float *k[MAX_SEQS], *v[MAX_SEQS];              /* [key][kv head][dim] as given */
    float *q, *out;                                /* [row][query head][dim] */
    float scale;
} world;

static void poison(uint8_t *p, uint64_t bytes)
{
    memset(p, 0xff, bytes); /* NaN in all three formats */
}

static const kvp__kernels *kernels_of(uint32_t level)
{
    return kvp__kernels_get(level ? level : kvp__cpu_level(0));
}

static void store_keys(world *w, uint32_t seq, uint32_t from, uint32_t to)
{
    const shape *s = &w->s;
    for (uint32_t t = from; t < to; t++)
        kvp__store_token(&w->store, kernels_of(0), 0, 0, w->table[seq][t / s->block], t % s->block,
                         w->k[seq] + (size_t)t * s->kv_heads * s->key_dim, s->key_dim,
                         w->v[seq] + (size_t)t * s->kv_heads * s->value_dim, s->value_dim);
}

/* Memory of the exact size, so that the address sanitizer sees a read past the last block. */
static void world_make(world *w, const shape *s, uint32_t n_seqs, const uint32_t *length,
                       const uint32_t *new_rows)
{
    memset(w, 0, sizeof *w);
    w->s = *s;
    w->n_seqs = n_seqs;
    w->scale = 1.0f / sqrtf((float)s->key_dim);
    w->group = (kvp_layer_group){1, s->kv_heads, s->key_dim, s->value_dim, s->window,
                                 s->kv_heads * s->group};
    kvp_geometry in;
    memset(&in, 0, sizeof in);
    in.size = sizeof in;
    in.n_groups = 1;
    in.groups = &w->group;
    kvp__geometry g;
    assert_int_equal(kvp__geometry_fill(&g, &in, NULL), KVP_OK);
    uint32_t blocks = 0, next = 0;
    for (uint32_t i = 0; i < n_seqs; i++) blocks += (length[i] + s->block - 1) / s->block;
    assert_int_equal(kvp__layout_make(&w->store.layout, &g, s->block, s->k_format, s->v_format,
                                      blocks, NULL), KVP_OK);
    w->store.slab = aligned_alloc(64, w->store.layout.bytes);
    poison(w->store.slab, w->store.layout.bytes);

    uint32_t *order = malloc(blocks * sizeof *order);
    for (uint32_t i = 0; i < blocks; i++) order[i] = i;
    for (uint32_t i = blocks; i > 1; i--) {
        uint32_t j = rnd(i), t = order[i - 1];
        order[i - 1] = order[j];
        order[j] = t;
    }
    for (uint32_t i = 0; i < n_seqs; i++) {
        uint32_t n = (length[i] + s->block - 1) / s->block;
        w->length[i] = length[i];
        w->new_rows[i] = new_rows[i];
        w->n_rows += new_rows[i];
        w->table[i] = malloc(n * sizeof(uint32_t));
        memcpy(w->table[i], order + next, n * sizeof(uint32_t));
        next += n;
        size_t kn = (size_t)length[i] * s->kv_heads * s->key_dim;
        size_t vn = (size_t)length[i] * s->kv_heads * s->value_dim;
        w->k[i] = malloc(kn * sizeof(float));
        w->v[i] = malloc(vn * sizeof(float));
        for (size_t e = 0; e < kn; e++) w->k[i][e] = gauss() * 2;
        for (size_t e = 0; e < vn; e++) w->v[i][e] = gauss();
        store_keys(w, i, 0, length[i]);
    }
    free(order);
    size_t heads = (size_t)w->n_rows * w->group.query_heads;
    w->q = malloc(heads * s->key_dim * sizeof(float));
    w->out = malloc(heads * s->value_dim * sizeof(float));
    for (size_t e = 0; e < heads * s->key_dim; e++) w->q[e] = gauss() * 2;
}

/* Gives sequence `seq` the first `tokens` tokens of sequence 0, in the same blocks. */
static void world_share(world *w, uint32_t seq, uint32_t tokens)
{
    const shape *s = &w->s;
    tokens = tokens / s->block * s->block;
    memcpy(w->table[seq], w->table[0], tokens / s->block * sizeof(uint32_t));
    memcpy(w->k[seq], w->k[0], (size_t)tokens * s->kv_heads * s->key_dim * sizeof(float));
    memcpy(w->v[seq], w->v[0], (size_t)tokens * s->kv_heads * s->value_dim * sizeof(float));
}

static void world_free(world *w)
{
    for (uint32_t i = 0; i < w->n_seqs; i++) {
        free(w->table[i]);
        free(w->k[i]);
        free(w->v[i]);
    }
    free(w->store.slab);
    free(w->q);
    free(w->out);
}

/* --- running it --- */

typedef struct cut {
    uint32_t level;   /* 0: the best */
    uint32_t threads; /* what the list is made for */
    bool backwards;   /* order of the items */
    bool no_slots;    /* no room for splits */
} cut;

static uint32_t last_members; /* of the last list: sequences that share a prefix */

/* Rows `skip` to skip + rows of each sequence's new ones, all if rows is 0. Returns the splits. */
static uint32_t run_rows(world *w, cut c, uint32_t skip, uint32_t rows, float *out)
{
    const shape *s = &w->s;
    kvp__work_seq seqs[MAX_SEQS];
    kvp__work work;
    memset(&work, 0, sizeof work);
    memset(seqs, 0, sizeof seqs);
    uint32_t row = 0, longest = 0;
    for (uint32_t i = 0; i < w->n_seqs; i++) {
        uint32_t n = rows ? rows : w->new_rows[i];
        seqs[i].first_row = row + skip;
        seqs[i].n_rows = n;
        seqs[i].first_pos = w->length[i] - w->new_rows[i] + skip;
        seqs[i].n_blocks = (w->length[i] + s->block - 1) / s->block;
        seqs[i].tables[0] = w->table[i];
        row += w->new_rows[i];
        if (w->length[i] > longest) longest = w->length[i];
    }
    work.n_rows = row;
    work.n_seqs = w->n_seqs;
    work.seqs = seqs;

    kvp__items items;
    kvp__items_limits limits = {row, MAX_SEQS, longest, c.threads};
    uint64_t bytes = kvp__items_place(&items, &w->group, 0, s->block, &limits, NULL);
    void *memory = aligned_alloc(64, bytes);
    memset(memory, 0, bytes);
    assert_int_equal(kvp__items_place(&items, &w->group, 0, s->block, &limits, memory), bytes);
    if (c.no_slots) items.max_splits = 0;
    kvp__items_make(&items, &work, c.threads);

    kvp__attention a;
    memset(&a, 0, sizeof a);
    a.kernels = kernels_of(c.level);
    a.store = &w->store;
    a.work = &work;
    a.items = &items;
    uint32_t width = (s->value_dim + 15) / 16 * 16;
    a.partials.acc = malloc(items.max_slots * width * sizeof(float));
    a.partials.max = malloc(items.max_slots * sizeof(float));
    a.partials.sum = malloc(items.max_slots * sizeof(float));
    poison((uint8_t *)a.partials.acc, items.max_slots * width * sizeof(float));
    a.scale = w->scale;
    a.softcap = s->softcap;
    a.q = w->q;
    a.out = out;
    a.q_head = (int64_t)(s->key_dim * sizeof(float));
    a.q_row = a.q_head * w->group.query_heads;
    a.out_head = (int64_t)(s->value_dim * sizeof(float));
    a.out_row = a.out_head * w->group.query_heads;

    void *scratch = aligned_alloc(64, KVP__SCRATCH_BYTES);
    poison(scratch, KVP__SCRATCH_BYTES);
    for (uint32_t layer = 0; layer < 2; layer++) /* twice: a list serves many layers */
        for (uint32_t i = 0; i < items.n; i++)
            kvp__item_run(&a, c.backwards ? items.n - 1 - i : i, scratch);
    uint32_t n_splits = items.n_splits;
    free(scratch);
    free(a.partials.acc);
    free(a.partials.max);
    free(a.partials.sum);
    last_members = items.n_members;
    free(memory);
    return n_splits;
}

static uint32_t run(world *w, cut c) { return run_rows(w, c, 0, 0, w->out); }

/* --- the oracle --- */

static double stored(float x, uint32_t format)
{
    if (format == KVP_KV_F32) return (double)x;
    if (format == KVP_KV_BF16) return (double)kvp__bf16_to_f32(kvp__f32_to_bf16(x));
    float c = x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x;
    return (double)kvp__f16_to_f32(kvp__f32_to_f16(c));
}

static void oracle_row(const world *w, uint32_t seq, uint32_t new_row, uint32_t row, uint32_t head,
                       double *out)
{
    const shape *s = &w->s;
    uint32_t p = w->length[seq] - w->new_rows[seq] + new_row, kv = head / s->group;
    uint32_t lo = s->window && p + 1 > s->window ? p + 1 - s->window : 0;
    const float *q = w->q + ((size_t)row * w->group.query_heads + head) * s->key_dim;
    double *e = malloc((p + 1) * sizeof(double)), top = -INFINITY, sum = 0;
    for (uint32_t t = lo; t <= p; t++) {
        const float *k = w->k[seq] + ((size_t)t * s->kv_heads + kv) * s->key_dim;
        e[t] = 0;
        for (uint32_t d = 0; d < s->key_dim; d++)
            e[t] += (double)q[d] * stored(k[d], s->k_format);
        e[t] *= (double)w->scale;
        if (s->softcap != 0) e[t] = (double)s->softcap * tanh(e[t] / (double)s->softcap);
        if (e[t] > top) top = e[t];
    }
    for (uint32_t d = 0; d < s->value_dim; d++) out[d] = 0;
    for (uint32_t t = lo; t <= p; t++) {
        const float *v = w->v[seq] + ((size_t)t * s->kv_heads + kv) * s->value_dim;
        double x = exp(e[t] - top);
        sum += x;
        for (uint32_t d = 0; d < s->value_dim; d++) out[d] += x * stored(v[d], s->v_format);
    }
    for (uint32_t d = 0; d < s->value_dim; d++) out[d] /= sum;
    free(e);
}

/* The largest difference, NaN if anything is. `stride` picks rows, to stay fast. */
static double worst(const world *w, uint32_t stride)
{
    double max = 0;
    double *want = malloc(w->s.value_dim * sizeof(double));
    for (uint32_t i = 0, row = 0; i < w->n_seqs; row += w->new_rows[i], i++)
        for (uint32_t r = 0; r < w->new_rows[i]; r += 1 + rnd(stride))
            for (uint32_t h = 0; h < w->group.query_heads; h += 1 + rnd(stride)) {
                oracle_row(w, i, r, row + r, h, want);
                const float *got = w->out + ((size_t)(row + r) * w->group.query_heads + h) *
                                                w->s.value_dim;
                for (uint32_t d = 0; d < w->s.value_dim; d++) {
                    double diff = fabs((double)got[d] - want[d]);
                    if (!(diff <= max)) max = diff;
                    if (max != max) goto out;
                }
            }
out:
    free(want);
    return max;
}

static size_t out_bytes(const world *w)
{
    return (size_t)w->n_rows * w->group.query_heads * w->s.value_dim * sizeof(float);
}

static const uint32_t all_levels[] = {KVP_CPU_GENERIC, KVP_CPU_AVX2, KVP_CPU_AVX512, KVP_CPU_NEON};

static bool runs_here(uint32_t level)
{
    return kvp__cpu_level(level) == level && kvp__kernels_get(level) != NULL;
}

/* Right, and the same bits at every level and for every cut. */
static void check(const shape *s, uint32_t n_seqs, const uint32_t *length, const uint32_t *new_rows,
                  uint32_t stride)
{
    world w;
    world_make(&w, s, n_seqs, length, new_rows);
    run(&w, (cut){0, 1, false, true});
    double err = worst(&w, stride);
    if (!(err <= 3e-6))
        fail_msg("heads %u x %u, dims %u %u, window %u, block %u, formats %u %u: error %g",
                 s->kv_heads, s->group, s->key_dim, s->value_dim, s->window, s->block, s->k_format,
                 s->v_format, err);
    float *other = malloc(out_bytes(&w));
    for (unsigned l = 0; l < KVP__COUNT(all_levels); l++) {
        if (!runs_here(all_levels[l])) continue;
        memset(other, 0xee, out_bytes(&w));
        run_rows(&w, (cut){all_levels[l], 1 + l, l % 2 == 1, false}, 0, 0, other);
        assert_memory_equal(w.out, other, out_bytes(&w));
    }
    free(other);
    world_free(&w);
}

/* --- tests --- */

static void plain_shapes(void **state)
{
    (void)state;
    for (uint32_t f = KVP_KV_F16; f <= KVP_KV_F32; f++) {
        shape s = {3, 3, 64, 64, 0, 16, f, f, 0};
        check(&s, 3, (uint32_t[]){600, 37, 1}, (uint32_t[]){5, 37, 1}, 4);
        shape mixed = {2, 4, 128, 64, 0, 16, f, f % 3 + 1, 0};
        check(&mixed, 2, (uint32_t[]){300, 20}, (uint32_t[]){1, 9}, 3);
    }
}

/* B111 at the kernels: every block size that a pool may have. */
static void case_b111(void **state)
{
    (void)state;
    for (uint32_t b = 1; b <= 256; b *= 2)
        for (uint32_t f = KVP_KV_F16; f <= KVP_KV_F32; f += 2) {
            shape s = {2, 2, 24, 40, b % 3 == 1 ? 50u : 0, b, f, f, 0};
            check(&s, 3, (uint32_t[]){281, 16, b}, (uint32_t[]){7, 16, 1}, 3);
        }
}

static void case_b109(void **state)
{
    (void)state;
    static const uint32_t groups[] = {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64, 71};
    for (unsigned g = 0; g < KVP__COUNT(groups); g++)
        for (uint32_t kv = 1; kv <= 8; kv += 1 + rnd(4)) {
            shape s = {kv, groups[g], 16, 16, 0, 16, KVP_KV_F16, KVP_KV_F16, 0};
            check(&s, 2, (uint32_t[]){40, 270}, (uint32_t[]){11, 1}, 8);
        }
}

static void head_sizes(void **state)
{
    (void)state;
    static const uint32_t dims[] = {1, 2, 7, 15, 17, 33, 80, 96, 100, 112, 192, 255, 256};
    for (unsigned i = 0; i < KVP__COUNT(dims); i++)
        for (uint32_t b = 4; b <= 64; b *= 4) {
            shape s = {1, 3, dims[i], dims[(i * 5 + 3) % KVP__COUNT(dims)], 0, b,
                       i % 3 + 1, (i + b) % 3 + 1, 0};
            check(&s, 1, (uint32_t[]){70}, (uint32_t[]){13}, 3);
        }
}

static void windows(void **state)
{
    (void)state;
    static const uint32_t w[] = {1, 2, 8, 15, 16, 17, 255, 256, 257, 512};
    for (unsigned i = 0; i < KVP__COUNT(w); i++) {
        shape s = {2, 2, 32, 32, w[i], 16, KVP_KV_F16, KVP_KV_F16, 0};
        check(&s, 3, (uint32_t[]){700, 300, 5}, (uint32_t[]){1, 60, 5}, 4);
    }
}

static void random_shapes(void **state)
{
    (void)state;
    for (int i = 0; i < (few_rounds() ? 15 : 60); i++) {
        shape s = {1 + rnd(4), 1 + rnd(9), 1 + rnd(80), 1 + rnd(80), rnd(3) ? 0 : 1 + rnd(300),
                   1u << rnd(9), 1 + rnd(3), 1 + rnd(3), rnd(3) ? 0 : 1.0f + (float)rnd(40)};
        uint32_t length[3], new_rows[3];
        for (int k = 0; k < 3; k++) {
            length[k] = 1 + rnd(k == 0 ? 800 : 100);
            new_rows[k] = rnd(2) ? 1 : 1 + rnd(length[k] < 40 ? length[k] : 40);
        }
        check(&s, 3, length, new_rows, 6);
    }
}

static void long_decode_is_split(void **state)
{
    (void)state;
    shape s = {3, 3, 64, 64, 0, 16, KVP_KV_F16, KVP_KV_F16, 0};
    world w;
    world_make(&w, &s, 2, (uint32_t[]){5000, 30}, (uint32_t[]){1, 1});
    assert_int_equal(run(&w, (cut){0, 4, false, true}), 0);
    assert_true(worst(&w, 1) <= 3e-6);
    float *other = malloc(out_bytes(&w));
    for (uint32_t threads = 1; threads <= 16; threads *= 2)
        for (int back = 0; back < 2; back++) {
            memset(other, 0xee, out_bytes(&w));
            uint32_t n = run_rows(&w, (cut){0, threads, back != 0, false}, 0, 0, other);
            if (threads > 1) assert_true(n > 0);
            assert_memory_equal(w.out, other, out_bytes(&w));
        }
    free(other);
    world_free(&w);
}

/* Sequences over the same blocks: the bits of each attending alone, in whatever order, by whichever
 * level, and right. */
static void check_shared(const shape *s, uint32_t n, const uint32_t *length, const uint32_t *common,
                         bool must_share)
{
    world w;
    uint32_t ones[MAX_SEQS];
    for (uint32_t i = 0; i < MAX_SEQS; i++) ones[i] = 1;
    world_make(&w, s, n, length, ones);
    for (uint32_t i = 1; i < n; i++) world_share(&w, i, common[i]);
    run(&w, (cut){0, 1, false, true});
    assert_int_equal(last_members, 0);
    assert_true(worst(&w, 8) <= 3e-6);
    float *other = malloc(out_bytes(&w));
    for (unsigned l = 0; l < KVP__COUNT(all_levels); l++)
        for (uint32_t threads = 1; threads <= 8 && runs_here(all_levels[l]); threads += 7) {
            memset(other, 0xee, out_bytes(&w));
            run_rows(&w, (cut){all_levels[l], threads, rnd(2) != 0, false}, 0, 0, other);
            if (must_share) assert_true(last_members > 1);
            assert_memory_equal(w.out, other, out_bytes(&w));
        }
    free(other);
    world_free(&w);
}

static void a_shared_prefix_is_read_once_and_does_not_show(void **state)
{
    (void)state;
    uint32_t length[MAX_SEQS], common[MAX_SEQS];
    for (uint32_t i = 0; i < 33; i++) {
        length[i] = 1100 + i * 7 % 40;
        common[i] = 1040;
    }
    check_shared(&(shape){3, 3, 64, 64, 0, 16, KVP_KV_F16, KVP_KV_F16, 0}, 33, length, common, true);
    /* Deep, and with as many query heads as a large model: cut in ranges, shared all the same. */
    for (uint32_t i = 0; i < 12; i++) {
        length[i] = 4200 + i * 3;
        common[i] = 4096;
    }
    check_shared(&(shape){2, 16, 32, 16, 0, 16, KVP_KV_F16, KVP_KV_F16, 0}, 12, length, common,
                 true);
    /* Some see the prefix through a window, some no more; others leave it early. */
    for (uint32_t i = 0; i < 20; i++) {
        length[i] = 700 + i * 61;
        common[i] = i % 3 == 2 ? 256 : 600;
    }
    check_shared(&(shape){2, 4, 32, 48, 500, 32, KVP_KV_BF16, KVP_KV_F32, 3}, 20, length, common,
                 true);
    check_shared(&(shape){1, 71, 16, 16, 0, 256, KVP_KV_F32, KVP_KV_F16, 0}, 9, length, common, true);
    for (int round = 0; round < (few_rounds() ? 8 : 40); round++) {
        shape s = {1 + rnd(3), 1 + rnd(6), 1 + rnd(40), 1 + rnd(40), rnd(3) ? 0 : 1 + rnd(900),
                   1u << rnd(9), 1 + rnd(3), 1 + rnd(3), 0};
        uint32_t n = 2 + rnd(12);
        for (uint32_t i = 0; i < n; i++) {
            length[i] = 1 + rnd(1500);
            common[i] = rnd(4) ? rnd(length[i]) : 0;
            if (common[i] >= length[0]) common[i] = length[0] - 1;
        }
        check_shared(&s, n, length, common, false);
    }
}

/* A prompt in one piece and in pieces, with the later keys not there yet or there already. */
static void chunks_do_not_show(void **state)
{
    (void)state;
    shape s = {2, 3, 48, 48, 0, 16, KVP_KV_BF16, KVP_KV_F16, 0};
    for (uint32_t window = 0; window <= 100; window += 100) {
        s.window = window;
        world w;
        world_make(&w, &s, 2, (uint32_t[]){330, 330}, (uint32_t[]){330, 330});
        run(&w, (cut){0, 2, false, false});
        float *other = malloc(out_bytes(&w));
        memset(other, 0xee, out_bytes(&w));
        poison(w.store.slab, w.store.layout.bytes);
        for (uint32_t at = 0, n; at < 330; at += n) {
            n = 1 + rnd(50);
            if (n > 330 - at) n = 330 - at;
            for (uint32_t i = 0; i < 2; i++) store_keys(&w, i, at, at + n);
            run_rows(&w, (cut){0, 1 + rnd(4), rnd(2) != 0, false}, at, n, other);
        }
        assert_memory_equal(w.out, other, out_bytes(&w));
        free(other);
        world_free(&w);
    }
}

/* A later token of the same tile holds NaN, infinity or a sign that would turn a zero. */
static void later_keys_have_no_influence(void **state)
{
    (void)state;
    shape s = {1, 2, 16, 16, 0, 16, KVP_KV_F32, KVP_KV_F32, 0};
    static const float bad[] = {NAN, INFINITY, -INFINITY, 3e38f};
    world w;
    world_make(&w, &s, 1, (uint32_t[]){24}, (uint32_t[]){24});
    for (size_t e = 0; e < 24 * 16; e++) w.v[0][e] = -0.0f;
    store_keys(&w, 0, 0, 24);
    run(&w, (cut){0, 1, false, false});
    size_t early = (size_t)20 * 2 * 16;
    float *before = malloc(early * sizeof(float));
    memcpy(before, w.out, early * sizeof(float));
    for (unsigned b = 0; b < KVP__COUNT(bad); b++) {
        for (size_t e = 20 * 16; e < 24 * 16; e++) {
            w.v[0][e] = bad[b];
            w.k[0][e] = bad[(b + 1) % KVP__COUNT(bad)];
        }
        store_keys(&w, 0, 20, 24);
        run(&w, (cut){0, 1, false, false});
        assert_memory_equal(before, w.out, early * sizeof(float));
    }
    free(before);
    world_free(&w);
}

static void case_b93(void **state)
{
    (void)state;
    for (uint32_t f = KVP_KV_F16; f <= KVP_KV_F32; f++)
        for (uint32_t rows = 1; rows <= 5; rows += 4) {
            shape s = {2, 2, 8, 8, 0, 16, f, f, 0};
            world w;
            world_make(&w, &s, 1, (uint32_t[]){5}, (uint32_t[]){rows});
            run(&w, (cut){0, 1, false, false});
            size_t n = out_bytes(&w) / sizeof(float);
            float *poisoned = malloc(n * sizeof(float));
            memcpy(poisoned, w.out, n * sizeof(float));
            for (size_t i = 0; i < n; i++) assert_true(isfinite(poisoned[i]));
            memset(w.store.slab, 0, w.store.layout.bytes);
            store_keys(&w, 0, 0, 5);
            run(&w, (cut){0, 1, false, false});
            assert_memory_equal(poisoned, w.out, n * sizeof(float));
            free(poisoned);
            world_free(&w);
        }
}

/* Rows straight into the kernel: what they see is free. */
typedef struct direct {
    kvp__segment s;
    float k[16][16], v[16][16], q[8], p[8 * 256], out[8 * 16], max[8], sum[8];
    uint16_t lo[8], hi[8];
} direct;

static void direct_init(direct *d, uint32_t rows, float value)
{
    memset(d, 0, sizeof *d);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) d->v[i][j] = value;
    d->s.k_format = d->s.v_format = KVP_KV_F32;
    d->s.key_dim = 1;
    d->s.value_dim = d->s.v_row = 16;
    d->s.n_rows = rows;
    d->s.k[0] = d->k;
    d->s.v[0] = d->v;
    d->s.q = d->q;
    d->s.q_row = 1;
    d->s.lo = d->lo;
    d->s.hi = d->hi;
    d->s.p = d->p;
    d->s.max = d->max;
    d->s.sum = d->sum;
    d->s.out = d->out;
    d->s.out_row = 16;
}

static void case_b95(void **state)
{
    (void)state;
    for (unsigned l = 0; l < KVP__COUNT(all_levels); l++) {
        if (!runs_here(all_levels[l])) continue;
        direct d;
        direct_init(&d, 4, 7.0f);
        for (uint16_t r = 0; r < 4; r++) d.hi[r] = r < 2 ? 0 : (uint16_t)(r - 1); /* rows 0, 1 blind */
        kernels_of(all_levels[l])->attend(&d.s);
        for (int r = 0; r < 4; r++) {
            assert_true(r < 2 ? d.sum[r] == 0 : d.sum[r] > 0);
            for (int i = 0; i < 16; i++)
                assert_true(r < 2 ? d.out[r * 16 + i] == 0 : d.out[r * 16 + i] == 7 * d.sum[r]);
            kvp__row_state st = {0, 0};
            float acc[16] = {0};
            kernels_of(all_levels[l])->merge(&st, acc, d.max[r], d.sum[r], d.out + r * 16, 16);
            assert_true(r < 2 ? st.sum == 0 && acc[0] == 0 : acc[0] / st.sum == 7);
        }
    }
}

/* Four parts, keys in the third alone; and rows that see nothing beside one that does. */
static void case_b97(void **state)
{
    (void)state;
    direct d;
    direct_init(&d, 3, 5.0f);
    d.lo[1] = 2, d.hi[1] = 9;
    d.lo[2] = d.hi[2] = 9;
    kernels_of(0)->attend(&d.s);
    kvp__row_state st = {0, 0};
    float acc[16], stale[16], nan_part[16];
    for (int i = 0; i < 16; i++) acc[i] = stale[i] = 1e30f, nan_part[i] = NAN;
    for (int part = 0; part < 4; part++) {
        if (part == 2) kernels_of(0)->merge(&st, acc, d.max[1], d.sum[1], d.out + 16, 16);
        else kernels_of(0)->merge(&st, acc, part % 2 ? 1e30f : NAN, 0, part ? nan_part : stale, 16);
    }
    assert_true(st.max == d.max[1] && st.sum == d.sum[1]);
    assert_memory_equal(acc, d.out + 16, sizeof acc);
    assert_true(d.sum[0] == 0 && d.sum[2] == 0);
}

static void case_b103(void **state)
{
    (void)state;
    for (int capped = 0; capped < 2; capped++) {
        shape s = {1, 1, 1, 1, 0, 16, KVP_KV_F32, KVP_KV_F32, capped ? 1.0f : 0};
        world w;
        world_make(&w, &s, 1, (uint32_t[]){2}, (uint32_t[]){1});
        w.q[0] = 1;
        w.k[0][0] = 2, w.k[0][1] = 0;
        w.v[0][0] = 1, w.v[0][1] = 0;
        w.scale = 1;
        store_keys(&w, 0, 0, 2);
        run(&w, (cut){0, 1, false, false});
        assert_true(fabsf(w.out[0] - (capped ? 0.7239f : 0.8808f)) < 1e-4f);
        world_free(&w);
    }
}

static void case_b66(void **state)
{
    (void)state;
    shape s = {1, 1, 4, 4, 8, 4, KVP_KV_F32, KVP_KV_F32, 0};
    static const uint32_t first[] = {0, 0, 1, 2}, last[] = {6, 7, 8, 9};
    for (uint32_t step = 0; step < 4; step++) {
        uint32_t length = 7 + step;
        world w;
        world_make(&w, &s, 1, &length, (uint32_t[]){1});
        for (uint32_t t = 0; t < length; t++)
            for (uint32_t d = 0; d < 4; d++) {
                w.k[0][t * 4 + d] = 0; /* all keys alike: the output is the mean of the values */
                w.v[0][t * 4 + d] = 10.0f + 0.1f * (float)t;
            }
        store_keys(&w, 0, 0, length);
        run(&w, (cut){0, 1, false, false});
        float mean = 10.0f + 0.05f * (float)(first[step] + last[step]);
        assert_true(fabsf(w.out[0] - mean) < 1e-5f);
        world_free(&w);
    }
}

/* Scores around 1e5: a finite stand-in for minus infinity would show. */
static void large_scores(void **state)
{
    (void)state;
    shape s = {1, 2, 8, 8, 0, 16, KVP_KV_F32, KVP_KV_F32, 0};
    for (int sign = -1; sign <= 1; sign += 2) {
        world w;
        world_make(&w, &s, 1, (uint32_t[]){300}, (uint32_t[]){20});
        for (size_t e = 0; e < (size_t)20 * 2 * 8; e++) w.q[e] = (float)sign * (100.0f + gauss());
        for (size_t e = 0; e < (size_t)300 * 8; e++) w.k[0][e] = 350.0f + gauss() * 0.001f;
        store_keys(&w, 0, 0, 300);
        run(&w, (cut){0, 1, false, false});
        size_t n = out_bytes(&w) / sizeof(float);
        for (size_t i = 0; i < n; i++) assert_true(fabsf(w.out[i]) <= 3.0f);
        world_free(&w);
    }
}

static void f16_store_saturates(void **state)
{
    (void)state;
    shape s = {1, 1, 2, 2, 0, 16, KVP_KV_F16, KVP_KV_F16, 0};
    world w;
    world_make(&w, &s, 1, (uint32_t[]){1}, (uint32_t[]){1});
    w.v[0][0] = 1e6f, w.v[0][1] = -1e30f;
    store_keys(&w, 0, 0, 1);
    run(&w, (cut){0, 1, false, false});
    assert_true(w.out[0] == 65504.0f && w.out[1] == -65504.0f);
    world_free(&w);
}

static void copies_take_the_live_tokens(void **state)
{
    (void)state;
    for (uint32_t b = 1; b <= 64; b *= 2) {
        shape s = {2, 1, 12, 20, 0, b, KVP_KV_F16, KVP_KV_F32, 0};
        world w;
        uint32_t n = b, one[2] = {1, 1};
        world_make(&w, &s, 2, (uint32_t[]){n, n}, one);
        uint8_t *dst = w.store.slab + kvp__layout_block(&w.store.layout, 0, w.table[1][0]);
        poison(dst, w.store.layout.groups[0].extent);
        kvp__store_copy(&w.store, &(kvp__copy){0, w.table[0][0], w.table[1][0], n});
        memcpy(w.q + 2 * 12, w.q, 2 * 12 * sizeof(float));
        run(&w, (cut){0, 1, false, false});
        assert_memory_equal(w.out, w.out + 2 * 20, 2 * 20 * sizeof(float));
        world_free(&w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_shapes),
        cmocka_unit_test(case_b111),
        cmocka_unit_test(case_b109),
        cmocka_unit_test(head_sizes),
        cmocka_unit_test(windows),
        cmocka_unit_test(random_shapes),
        cmocka_unit_test(long_decode_is_split),
        cmocka_unit_test(a_shared_prefix_is_read_once_and_does_not_show),
        cmocka_unit_test(chunks_do_not_show),
        cmocka_unit_test(later_keys_have_no_influence),
        cmocka_unit_test(case_b93),
        cmocka_unit_test(case_b95),
        cmocka_unit_test(case_b97),
        cmocka_unit_test(case_b103),
        cmocka_unit_test(case_b66),
        cmocka_unit_test(large_scores),
        cmocka_unit_test(f16_store_saturates),
        cmocka_unit_test(copies_take_the_live_tokens),
    };
    return cmocka_run_group_tests_name("attention", tests, NULL, NULL);
}
