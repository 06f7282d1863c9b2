/*
 * Plans of attention against what they are for: whatever a step is, every key that a row sees is in
 * exactly one of the row's items, read through a table that has it; parts meet in a merge; nothing
 * is beyond its bounds. Then what makes a plan good: equal shares, shared prefixes read once, few
 * splits.
 */
#include "cuda/plan.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum { NONE = -1, MAX_SEQS = 64, MAX_RANGES = 400 };
#define FREED 0xffffffffu

static uint64_t rng;

static uint32_t rnd(uint32_t n)
{
    rng = rng * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((rng >> 33) % n);
}

/* --- steps --- */

typedef struct step {
    kvp_layer_group group;
    kvp__layout layout;
    kvp__cuda_limits limits;
    uint32_t n_seqs, n_rows;
    kvp__work_seq seqs[MAX_SEQS];
    uint32_t *tables[MAX_SEQS];
    uint32_t next_block;
    bool stale; /* ids of blocks before the window stay in the tables, though the blocks are gone */
} step;

static uint32_t lowest(uint32_t window, uint32_t position)
{
    return window && position + 1 > window ? position + 1 - window : 0;
}

static step *new_step(uint32_t kv_heads, uint32_t heads, uint32_t dim, uint32_t window,
                      uint32_t block)
{
    step *s = calloc(1, sizeof *s);
    assert_non_null(s);
    s->group = (kvp_layer_group){.layers = 1, .kv_heads = kv_heads, .key_dim = dim,
                                 .value_dim = dim, .window = window,
                                 .query_heads = kv_heads * heads};
    s->layout.block_tokens = block;
    s->layout.k_format = s->layout.v_format = KVP_KV_F16;
    s->limits.sms = 132;
    return s;
}

/* Whether a sequence still has a block: not if its window has passed it. */
static bool has_block(const step *s, const kvp__work_seq *q, uint32_t b)
{
    return b < q->n_blocks && (!q->n_rows || (b + 1ull) * s->layout.block_tokens >
                                                 lowest(s->group.window, q->first_pos));
}

/* Keys 0 to first_pos + rows - 1, of which the first `shared` lie in the blocks of sequence
 * `with`. */
static void add(step *s, uint32_t first_pos, uint32_t rows, uint32_t shared, uint32_t with)
{
    kvp__work_seq *q = &s->seqs[s->n_seqs];
    uint32_t keys = first_pos + rows, bs = s->layout.block_tokens;
    uint32_t blocks = (uint32_t)(((uint64_t)keys + bs - 1) / bs);
    uint32_t *t = malloc(((size_t)blocks + 1) * sizeof *t);
    assert_non_null(t);
    for (uint32_t b = 0; b < blocks; b++) {
        t[b] = (uint64_t)(b + 1) * bs <= shared ? s->tables[with][b] : s->next_block++;
    }
    *q = (kvp__work_seq){.first_row = s->n_rows, .n_rows = rows, .first_pos = first_pos,
                         .n_blocks = blocks};
    for (uint32_t b = 0; b < blocks && !s->stale; b++)
        if (!has_block(s, q, b)) t[b] = FREED;
    q->tables[0] = s->tables[s->n_seqs++] = t;
    s->n_rows += rows;
    if (keys > s->limits.max_positions) s->limits.max_positions = keys;
}

static void free_step(step *s)
{
    for (uint32_t i = 0; i < s->n_seqs; i++) free(s->tables[i]);
    free(s);
}

typedef struct made {
    kvp__cuda_plan plan;
    uint8_t *upload, *scratch;
} made;

static void place(made *m, const step *s)
{
    kvp__cuda_limits l = s->limits;
    if (l.max_rows == 0) l.max_rows = s->n_rows;
    if (l.max_seqs == 0) l.max_seqs = s->n_seqs;
    assert_int_equal(
        kvp__cuda_plan_place(&m->plan, &s->group, 0, &s->layout, &l, NULL), KVP_OK);
    m->upload = aligned_alloc(64, m->plan.upload_bytes + 64);
    m->scratch = aligned_alloc(64, m->plan.scratch_bytes + 64);
    assert_true(m->upload && m->scratch);
    memset(m->upload, 0xee, m->plan.upload_bytes + 64);
    kvp__cuda_plan_use(&m->plan, m->upload, m->scratch);
}

static void make_plan(made *m, const step *s)
{
    kvp__work w = {.n_rows = s->n_rows, .n_seqs = s->n_seqs, .seqs = s->seqs};
    kvp__cuda_plan_make(&m->plan, &w);
    for (int i = 0; i < 64; i++) assert_int_equal(m->upload[m->plan.upload_bytes + i], 0xee);
}

static made plan_of(const step *s)
{
    made m;
    place(&m, s);
    make_plan(&m, s);
    return m;
}

static void free_made(made *m)
{
    free(m->upload);
    free(m->scratch);
}

static uint32_t all_items(const kvp__cuda_plan *p)
{
    return p->n_items[0] + p->n_items[1] + p->n_items[2] + p->n_items[3];
}

static uint32_t tile_of(const kvp__cuda_plan *p, uint32_t item)
{
    uint32_t t = 0;
    while (item >= p->n_items[t]) item -= p->n_items[t++];
    return t;
}

/* Keys read by all items, for one KV head. */
static uint64_t keys_read(const kvp__cuda_plan *p)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < all_items(p); i++) n += p->items[i].kv_end - p->items[i].kv_begin;
    return n;
}

/* --- what every plan must be --- */

typedef struct range {
    uint32_t begin, end;
    int32_t slot;
} range;

static int by_begin(const void *a, const void *b)
{
    const range *x = a, *y = b;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

static uint32_t seq_of(const step *s, uint32_t row)
{
    for (uint32_t i = 0; i < s->n_seqs; i++)
        if (row >= s->seqs[i].first_row && row - s->seqs[i].first_row < s->seqs[i].n_rows) return i;
    fail();
    return 0;
}

/* The ranges of one row and head; all keys that the row sees in them lie in its own blocks. */
static uint32_t gather(const step *s, const kvp__cuda_plan *p, uint32_t row, uint32_t head,
                       range *r)
{
    uint32_t n = 0, bs = s->layout.block_tokens, seq = seq_of(s, row);
    uint32_t position = s->seqs[seq].first_pos + row - s->seqs[seq].first_row;
    for (uint32_t i = 0; i < all_items(p); i++) {
        const kvp__cuda_item *x = &p->items[i];
        uint32_t most = KVP__ATTEND_ROWS(tile_of(p, i));
        for (uint32_t t = 0; t < x->n_tokens; t++) {
            uint32_t at = t * p->heads + head;
            if (p->rows[x->first_token + t] != row || at < x->first_row ||
                at >= x->first_row + most)
                continue;
            assert_true(n < MAX_RANGES);
            r[n++] = (range){x->kv_begin, x->kv_end, x->slot < 0 ? NONE : x->slot + (int32_t)t};
            uint32_t from = lowest(s->group.window, position), to = position + 1;
            if (from < x->kv_begin) from = x->kv_begin;
            if (to > x->kv_end) to = x->kv_end;
            for (uint32_t b = from / bs; from < to && b <= (to - 1) / bs; b++)
                assert_int_equal(s->tables[x->seq][b], s->tables[seq][b]);
        }
    }
    qsort(r, n, sizeof *r, by_begin);
    return n;
}

/* In order, without gap or overlap, over all keys that are seen. */
static void check_cover(const step *s, const range *r, uint32_t n, uint32_t position)
{
    uint32_t next = lowest(s->group.window, position);
    for (uint32_t i = 0; i < n; i++) {
        if (r[i].end <= next) continue; /* another row of the tile sees that */
        assert_true(i == 0 ? r[i].begin <= next : r[i].begin == r[i - 1].end);
        next = r[i].end;
    }
    assert_true(next >= position + 1);
}

static void check_row(const step *s, const kvp__cuda_plan *p, uint32_t row, uint8_t *slot_used)
{
    uint32_t seq = seq_of(s, row), merge = p->n_merges;
    uint32_t position = s->seqs[seq].first_pos + row - s->seqs[seq].first_row;
    range r[MAX_RANGES], other[MAX_RANGES];
    uint32_t n = gather(s, p, row, 0, r);
    check_cover(s, r, n, position);
    for (uint32_t h = 1; h < p->heads; h += h < 16 || h + 13 > p->heads ? 1 : 13) {
        assert_int_equal(gather(s, p, row, h, other), n);
        assert_memory_equal(r, other, n * sizeof *r);
    }
    for (uint32_t i = 0; i < p->n_merges; i++)
        if (p->merges[i].row == row) {
            assert_int_equal(merge, p->n_merges);
            merge = i;
        }
    if (n == 1 && r[0].slot == NONE) {
        assert_int_equal(merge, p->n_merges);
        return;
    }
    assert_true(merge < p->n_merges);
    const kvp__cuda_merge *m = &p->merges[merge];
    assert_int_equal(m->count, n);
    for (uint32_t i = 0; i < n; i++) {
        assert_int_equal(p->slots[m->first + i], r[i].slot);
        assert_true(r[i].slot >= 0 && (uint32_t)r[i].slot < p->max_slots);
        assert_int_equal(slot_used[r[i].slot]++, 0);
    }
}

static void check_bounds(const step *s, const kvp__cuda_plan *p)
{
    uint32_t pieces[KVP__ATTEND_TILES] = {0}, units[KVP__ATTEND_TILES] = {0}, tiles = 0;
    assert_int_equal(p->n_rows, s->n_rows);
    assert_true(p->n_units <= p->max_units && p->n_pieces <= p->max_pieces);
    assert_true(all_items(p) <= p->max_items && p->n_merges <= p->max_merges);
    assert_true(p->n_slots <= p->max_slots);
    for (uint32_t i = 0; i < p->n_units; i++) units[p->units[i].tile]++;
    for (uint32_t i = 0; i < p->n_pieces; i++) pieces[p->units[p->pieces[i].unit].tile]++;
    for (uint32_t t = 0; t < KVP__ATTEND_TILES; t++) {
        assert_true(p->n_items[t] <= p->most_items[t]);
        if (!p->split) assert_true(pieces[t] <= units[t] + (units[t] ? p->parts - 1 : 0));
        tiles += p->n_items[t] > 0;
        assert_int_equal(p->tiles >> t & 1, p->n_items[t] > 0);
    }
    assert_true(tiles <= 2);
    for (uint32_t i = 0; i < all_items(p); i++) {
        const kvp__cuda_item *x = &p->items[i];
        assert_true(x->kv_begin < x->kv_end);
        assert_true(x->kv_begin % KVP__PLAN_KEYS == 0 || s->group.window);
        for (uint32_t b = x->kv_begin / s->layout.block_tokens;
             b <= (x->kv_end - 1) / s->layout.block_tokens; b++)
            assert_true(has_block(s, &s->seqs[x->seq], b));
    }
}

/* From long to short, as far as they are told apart. */
static void check_order(const kvp__cuda_plan *p)
{
    uint32_t first = 0;
    for (uint32_t t = 0; t < KVP__ATTEND_TILES; first += p->n_items[t++])
        for (uint32_t i = first + 1; i < first + p->n_items[t]; i++) {
            const kvp__cuda_item *x = &p->items[i - 1], *y = &p->items[i];
            uint32_t longest = p->items[first].kv_end - p->items[first].kv_begin;
            assert_true(y->kv_end - y->kv_begin <=
                        x->kv_end - x->kv_begin + longest / 200 + 3 * KVP__PLAN_KEYS);
        }
}

static void check_plan(const step *s, const kvp__cuda_plan *p)
{
    check_bounds(s, p);
    check_order(p);
    uint8_t *used = calloc(p->max_slots + 1u, 1);
    assert_non_null(used);
    for (uint32_t row = 0; row < s->n_rows; row++) check_row(s, p, row, used);
    for (uint32_t i = 0; i < p->max_slots; i++) assert_true(used[i] == (i < p->n_slots));
    free(used);
}

/* --- random steps --- */

static step *random_step(void)
{
    static const uint32_t groups[] = {1, 2, 4, 5, 6, 7, 8, 12, 16, 71, 140};
    static const uint32_t dims[] = {64, 80, 128, 256, 100};
    static const uint32_t windows[] = {0, 0, 0, 1, 50, 64, 300, 4096};
    uint32_t windowed = windows[rnd(8)];
    step *s = new_step(1 + rnd(9), groups[rnd(11)], dims[rnd(5)], windowed, 1u << rnd(9));
    s->limits.sms = 1 + rnd(150);
    s->limits.split = rnd(4) ? 0 : 64 * (1 + rnd(8));
    s->stale = rnd(2);
    uint32_t n = 1 + rnd(rnd(2) ? 4 : 40), deep = 64u << rnd(7), few = rnd(3);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t first = rnd(deep), rows = few ? 1 + rnd(few * 3) : 1 + rnd(60);
        uint32_t with = i ? rnd(i) : 0, shared = i && rnd(3) ? rnd(deep) : 0;
        if (shared > first) shared = first;
        if (i && shared > s->seqs[with].first_pos) shared = s->seqs[with].first_pos;
        /* What a sequence still holds of a window's blocks its forks hold too. */
        if (windowed && !s->stale && i &&
            lowest(windowed, first) < lowest(windowed, s->seqs[with].first_pos))
            shared = 0;
        if (rnd(12) == 0) rows = 0;
        add(s, first, rows, shared, with);
    }
    if (s->n_rows == 0) add(s, 5, 1, 0, 0);
    return s;
}

static void every_key_is_seen_once(void **state)
{
    (void)state;
    uint32_t shared = 0, cut = 0, rounds = getenv("KVPAGE_EMU_ALL") ? 6000 : 300;
    for (uint32_t i = 0; i < rounds; i++) {
        rng = i;
        step *s = random_step();
        made m = plan_of(s);
        check_plan(s, &m.plan);
        for (uint32_t u = 0; u < m.plan.n_units; u++) {
            shared += m.plan.units[u].shared;
            cut += m.plan.units[u].n_pieces > 1;
        }
        free_made(&m);
        free_step(s);
    }
    assert_true(shared > rounds / 20 && cut > rounds); /* or the steps are not worth much */
}

/* In the memory of the largest step, a plan is the same whatever was there before. */
static void a_plan_depends_on_its_step_alone(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 30; i++) {
        rng = 1000 + i;
        step *s = random_step(), *before = new_step(1, 1, 64, 0, 16);
        before->group = s->group;
        before->layout = s->layout;
        s->limits.max_rows = s->n_rows + 200;
        s->limits.max_seqs = s->n_seqs + 20;
        for (uint32_t k = 0; k < s->n_seqs + 20; k++)
            add(before, rnd(s->limits.max_positions - 8), 1 + rnd(3), 0, 0);
        made m, once;
        place(&m, s);
        place(&once, s);
        make_plan(&once, s);
        make_plan(&m, before);
        check_plan(before, &m.plan);
        make_plan(&m, s);
        check_plan(s, &m.plan);
        const kvp__cuda_plan *a = &m.plan, *b = &once.plan;
        assert_memory_equal(a->n_items, b->n_items, sizeof a->n_items);
        assert_int_equal(a->n_merges, b->n_merges);
        assert_int_equal(a->n_slots, b->n_slots);
        assert_memory_equal(a->rows, b->rows, a->n_rows * sizeof *a->rows);
        assert_memory_equal(a->items, b->items, all_items(a) * sizeof *a->items);
        assert_memory_equal(a->merges, b->merges, a->n_merges * sizeof *a->merges);
        assert_memory_equal(a->slots, b->slots, a->n_slots * sizeof *a->slots);
        kvp__cuda_step head;
        memset(&head, 0, sizeof head);
        kvp__cuda_plan_counts(a, &head);
        assert_memory_equal(head.n_items[0], a->n_items, sizeof a->n_items);
        assert_int_equal(head.n_merges[0], a->n_merges);
        free_made(&m);
        free_made(&once);
        free_step(s);
        free_step(before);
    }
}

/* --- good plans --- */

/* How long a card takes that always gives the next block to whoever is free, and how long if all
 * were equally busy; in tiles of 64 keys and 4 for an item. */
static double busy(const kvp__cuda_plan *p, uint32_t sms)
{
    uint32_t places = 2 * sms, n = all_items(p);
    uint64_t *until = calloc(places, sizeof *until), total = 0, end = 0;
    assert_non_null(until);
    for (uint32_t i = 0; i < n * p->kv_heads; i++) {
        const kvp__cuda_item *x = &p->items[i / p->kv_heads];
        uint64_t cost = (x->kv_end - x->kv_begin + 63) / 64 + 4;
        uint32_t at = 0;
        for (uint32_t k = 1; k < places; k++)
            if (until[k] < until[at]) at = k;
        until[at] += cost;
        total += cost;
        if (until[at] > end) end = until[at];
    }
    free(until);
    return (double)total / (double)places / (double)end;
}

/* A host's recording has the bounds of so many rows alone, and is launched for whatever a later decode
 * step of the whole runner is cut into (cuda/attend.c): that must fit. */
static void a_decode_step_fits_its_own_bounds(void **state)
{
    (void)state;
    uint32_t shared = 0;
    for (uint32_t i = 0; i < 200; i++) {
        rng = 5000 + i;
        step *s = new_step(1 + rnd(4), 1 + rnd(12), 64, 0, 16u << rnd(3));
        s->limits.sms = 1 + rnd(150);
        uint32_t n = 1 + rnd(40), deep = 200 + rnd(6000);
        for (uint32_t k = 0; k < n; k++) {
            uint32_t first = deep / 2 + rnd(deep), with = k ? rnd(k) : 0;
            uint32_t most = k ? s->seqs[with].first_pos : 0;
            add(s, first, 1, rnd(3) ? most < first ? most : first : 0, with);
        }
        step bucket = *s;
        bucket.limits.max_rows = bucket.limits.max_seqs = n;
        s->limits.max_rows = n + rnd(3000);
        s->limits.max_seqs = n + rnd(300);
        made most, m;
        place(&most, &bucket);
        place(&m, s);
        make_plan(&m, s);
        const kvp__cuda_plan *p = &m.plan, *b = &most.plan;
        for (uint32_t t = 0; t < KVP__ATTEND_TILES; t++)
            assert_true(p->n_items[t] <= b->most_items[t]);
        assert_true(all_items(p) <= b->max_items && p->n_merges <= b->max_merges);
        assert_true(p->n_slots <= b->max_slots);
        for (uint32_t u = 0; u < p->n_units; u++) shared += p->units[u].shared;
        free_made(&most);
        free_made(&m);
        free_step(s);
    }
    assert_true(shared > 50);
}

static void decode_is_shared_out_equally(void **state)
{
    (void)state;
    static const struct {
        uint32_t seqs, keys;
        double least;
    } cases[] = {{1, 1 << 17, 0.95}, {1, 1 << 13, 0.85}, {2, 50000, 0.9}, {8, 4096, 0.85},
                 {32, 4096, 0.85},   {40, 8192, 0.9},    {33, 8192, 0.9}, {64, 8192, 0.95}};
    for (uint32_t i = 0; i < KVP__COUNT(cases); i++) {
        step *s = new_step(8, 4, 128, 0, 16);
        for (uint32_t k = 0; k < cases[i].seqs; k++) add(s, cases[i].keys - 1, 1, 0, 0);
        made m = plan_of(s);
        check_plan(s, &m.plan);
        double b = busy(&m.plan, 132);
        if (b < cases[i].least)
            fail_msg("%u sequences of %u keys: %.2f of the card is busy", cases[i].seqs,
                     cases[i].keys, b);
        free_made(&m);
        free_step(s);
    }
    step *s = new_step(8, 4, 128, 0, 16); /* of very different lengths */
    for (uint32_t k = 0; k < 60; k++) add(s, k * k * 8, 1, 0, 0);
    made m = plan_of(s);
    check_plan(s, &m.plan);
    assert_true(busy(&m.plan, 132) > 0.9);
    free_made(&m);
    free_step(s);
}

/* Three lengths for which equal parts do not suffice, since cuts would be too near an end. */
static void there_are_never_more_cuts_than_parts(void **state)
{
    (void)state;
    step *s = new_step(1, 4, 128, 0, 16);
    s->limits.sms = 3;
    add(s, 32 * 64 - 2, 2, 0, 0);
    add(s, 55 * 64 - 2, 2, 0, 0);
    add(s, 33 * 64 - 2, 2, 0, 0);
    made m = plan_of(s);
    check_plan(s, &m.plan);
    assert_int_equal(m.plan.parts, 6);
    assert_int_equal(m.plan.n_pieces, 3 + 6 - 1);
    free_made(&m);
    free_step(s);

    s = new_step(1, 4, 128, 0, 16); /* nearly every cut is in a unit of its own: two parts of 32 */
    s->limits.sms = 5;
    for (uint32_t i = 0; i < 8; i++) add(s, 100 * 64, 32, 0, 0);
    m = plan_of(s);
    check_plan(s, &m.plan);
    assert_true(m.plan.n_slots >= 14 * 32);
    free_made(&m);
    free_step(s);
}

/* A prompt's chunk has enough tiles by itself, or few and a deep past. */
static void prompts_are_cut_only_where_the_card_would_be_idle(void **state)
{
    (void)state;
    step *s = new_step(8, 4, 128, 0, 16);
    add(s, 0, 8192, 0, 0);
    made m = plan_of(s);
    assert_int_equal(m.plan.tiles, 8);
    assert_int_equal(m.plan.n_items[3], 8192 * 4 / 128);
    assert_int_equal(m.plan.n_merges, 0);
    assert_true(busy(&m.plan, 132) > 0.95);
    free_made(&m);
    free_step(s);
    s = new_step(8, 4, 128, 0, 16);
    add(s, 100000, 64, 0, 0);
    m = plan_of(s);
    check_plan(s, &m.plan);
    assert_int_equal(m.plan.n_merges, 64);
    assert_true(busy(&m.plan, 132) > 0.9);
    free_made(&m);
    free_step(s);
}

static void a_shared_prefix_is_read_once(void **state)
{
    (void)state;
    step *s = new_step(8, 4, 128, 0, 16);
    add(s, 2048 + 5, 1, 0, 0);
    for (uint32_t i = 1; i < 32; i++) add(s, 2048 + 3 * i, 1, 2048, 0);
    made m = plan_of(s);
    check_plan(s, &m.plan);
    assert_int_equal(m.plan.tiles, 1 | 8); /* own rows, and 32 x 4 rows together */
    assert_int_equal(m.plan.n_merges, 32);
    uint64_t own = 6;
    for (uint32_t i = 1; i < 32; i++) own += 3 * i + 1;
    assert_int_equal(keys_read(&m.plan), 2048 + own);
    free_made(&m);

    s->limits.split = 1024; /* nobody's results may depend on who else is there */
    m = plan_of(s);
    check_plan(s, &m.plan);
    for (uint32_t u = 0; u < m.plan.n_units; u++) assert_int_equal(m.plan.units[u].shared, 0);
    free_made(&m);
    free_step(s);

    s = new_step(8, 4, 128, 0, 16); /* too little to be worth it */
    add(s, 130, 1, 0, 0);
    add(s, 130, 1, 128, 0);
    m = plan_of(s);
    assert_int_equal(m.plan.n_merges, 0);
    free_made(&m);
    free_step(s);

    s = new_step(8, 4, 128, 0, 16); /* others in the step, and drafts of several rows */
    add(s, 5000, 300, 0, 0);
    add(s, 4096, 3, 0, 0);
    for (uint32_t i = 0; i < 20; i++) add(s, 4096 + 10 * i, 3, 4096, 1);
    m = plan_of(s);
    check_plan(s, &m.plan);
    uint32_t shared = 0;
    for (uint32_t u = 0; u < m.plan.n_units; u++) shared += m.plan.units[u].shared;
    assert_int_equal(shared, (21 * 3 * 4 + 127) / 128);
    free_made(&m);
    free_step(s);

    s = new_step(8, 4, 128, 0, 16); /* more rows than there is room for: some share */
    for (uint32_t i = 0; i < 30; i++) add(s, 4096, 8, i ? 4096 : 0, 0);
    m = plan_of(s);
    check_plan(s, &m.plan);
    shared = 0;
    for (uint32_t u = 0; u < m.plan.n_units; u++)
        shared += m.plan.units[u].shared ? m.plan.units[u].n_tokens : 0;
    assert_int_equal(shared, 30 * 4);
    free_made(&m);
    free_step(s);
}

/* A windowed row has no item for what it does not see, and what all see of a prefix is shared. */
static void windows_are_not_read_in_full(void **state)
{
    (void)state;
    step *s = new_step(8, 4, 128, 1000, 16);
    for (uint32_t i = 0; i < 8; i++) add(s, 50000, 1, 0, 0);
    made m = plan_of(s);
    check_plan(s, &m.plan);
    assert_int_equal(keys_read(&m.plan), 8 * 1000);
    free_made(&m);
    free_step(s);

    s = new_step(8, 4, 128, 1000, 16); /* whoever comes first has lost what others still see */
    s->stale = true;
    add(s, 3000, 1, 0, 0);
    for (uint32_t i = 0; i < 7; i++) add(s, 2600 + 10 * i, 1, 2560, 0);
    m = plan_of(s);
    check_plan(s, &m.plan);
    assert_int_equal(m.plan.units[0].shared, 1);
    assert_int_equal(m.plan.units[0].begin, 2600 - 999);
    free_made(&m);
    free_step(s);
}

/* The parts of a row do not depend on the rest of the step. */
static void a_fixed_length_makes_rows_independent(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 30; i++) {
        rng = 77 + i;
        uint32_t position = rnd(20000);
        step *alone = new_step(4, 4, 128, 0, 16), *among = new_step(4, 4, 128, 0, 16);
        alone->limits.split = among->limits.split = 512;
        add(alone, position, 1, 0, 0);
        for (uint32_t k = rnd(6); k; k--) add(among, rnd(9000), 1 + rnd(20), 0, 0);
        uint32_t row = among->n_rows;
        add(among, position, 1, 0, 0);
        for (uint32_t k = rnd(6); k; k--) add(among, rnd(9000), 1 + rnd(20), 0, 0);
        made a = plan_of(alone), b = plan_of(among);
        check_plan(among, &b.plan);
        range x[MAX_RANGES], y[MAX_RANGES];
        uint32_t n = gather(alone, &a.plan, 0, 0, x);
        assert_int_equal(n, position / 512 + 1);
        assert_int_equal(gather(among, &b.plan, row, 0, y), n);
        for (uint32_t k = 0; k < n; k++) {
            assert_int_equal(x[k].begin, y[k].begin);
            assert_int_equal(x[k].end, y[k].end);
        }
        free_made(&a);
        free_made(&b);
        free_step(alone);
        free_step(among);
    }
}

/* --- corners --- */

static void positions_up_to_two_thousand_millions(void **state)
{
    (void)state;
    step *s = new_step(8, 4, 128, 0, 256);
    add(s, (1u << 31) - 3, 2, 0, 0);
    add(s, (1u << 31) - 300, 1, (1u << 31) - 600, 0);
    made m = plan_of(s);
    check_bounds(s, &m.plan);
    range r[MAX_RANGES];
    uint32_t n = gather(s, &m.plan, 1, 3, r);
    check_cover(s, r, n, (1u << 31) - 2);
    assert_int_equal(r[n - 1].end, (1u << 31) - 1);
    free_made(&m);
    free_step(s);
}

static void what_does_not_fit_is_refused(void **state)
{
    (void)state;
    step *s = new_step(8, 4, 128, 0, 16);
    kvp__cuda_plan p, untouched;
    memset(&p, 7, sizeof p);
    untouched = p;
    kvp_error err = {.size = sizeof err};
    kvp__cuda_limits l = {.max_rows = 64, .max_seqs = 64, .max_positions = 1000, .sms = 132};
    kvp__cuda_limits wrong = l;
    wrong.max_positions = (1u << 31) + 1;
    assert_int_equal(kvp__cuda_plan_place(&p, &s->group, 0, &s->layout, &wrong, &err),
                     KVP_ERR_TOO_LARGE);
    wrong = l;
    wrong.max_rows = 0xffffffffu;
    assert_int_equal(kvp__cuda_plan_place(&p, &s->group, 0, &s->layout, &wrong, &err),
                     KVP_ERR_TOO_LARGE);
    wrong.max_rows = 1u << 30;
    assert_int_equal(kvp__cuda_plan_place(&p, &s->group, 0, &s->layout, &wrong, &err),
                     KVP_ERR_TOO_LARGE);
    wrong = (kvp__cuda_limits){1u << 16, 1u << 16, 1u << 31, 132, 64};
    assert_int_equal(kvp__cuda_plan_place(&p, &s->group, 0, &s->layout, &wrong, &err),
                     KVP_ERR_TOO_LARGE);
    wrong = l;
    wrong.split = 100;
    assert_int_equal(kvp__cuda_plan_place(&p, &s->group, 0, &s->layout, &wrong, &err),
                     KVP_ERR_INVALID_ARG);
    wrong = l;
    wrong.max_seqs = 0;
    assert_int_equal(kvp__cuda_plan_place(&p, &s->group, 0, &s->layout, &wrong, &err),
                     KVP_ERR_INVALID_ARG);
    kvp_layer_group g = s->group;
    g.value_dim = KVP_DIM_NONE;
    assert_int_equal(kvp__cuda_plan_place(&p, &g, 0, &s->layout, &l, &err), KVP_ERR_UNSUPPORTED);
    g = s->group;
    g.kv_heads = 0;
    assert_int_equal(kvp__cuda_plan_place(&p, &g, 0, &s->layout, &l, &err), KVP_ERR_UNSUPPORTED);
    assert_memory_equal(&p, &untouched, sizeof p);
    free_step(s);
}

static void kernels_are_named_by_shape(void **state)
{
    (void)state;
    static const struct {
        uint32_t key_dim, value_dim, k, v, tile;
        const char *name;
    } cases[] = {{64, 64, KVP_KV_F16, KVP_KV_F16, 0, "attention_f16_d64_r16"},
                 {80, 80, KVP_KV_BF16, KVP_KV_BF16, 1, "attention_bf16_d96_r32"},
                 {112, 112, KVP_KV_F16, KVP_KV_F16, 3, "attention_f16_d128_r128"},
                 {192, 192, KVP_KV_F16, KVP_KV_F16, 2, "attention_f16_d256_r64"},
                 {32, 32, KVP_KV_BF16, KVP_KV_BF16, 2, "attention_bf16_d64_r64"},
                 {192, 128, KVP_KV_F16, KVP_KV_F16, 0, "attention_any"},
                 {128, 128, KVP_KV_F16, KVP_KV_BF16, 0, "attention_any"},
                 {128, 128, KVP_KV_F32, KVP_KV_F32, 0, "attention_any"},
                 {100, 100, KVP_KV_F16, KVP_KV_F16, 0, "attention_any"}};
    for (uint32_t i = 0; i < KVP__COUNT(cases); i++) {
        step *s = new_step(2, 4, cases[i].key_dim, 0, 16);
        s->group.value_dim = cases[i].value_dim;
        s->layout.k_format = cases[i].k;
        s->layout.v_format = cases[i].v;
        add(s, 100, 1, 0, 0);
        made m = plan_of(s);
        char name[KVP__KERNEL_NAME];
        assert_string_equal(kvp__cuda_plan_kernel(&m.plan, cases[i].tile, name), cases[i].name);
        free_made(&m);
        free_step(s);
    }
}

/* A decode step takes one tile alone, which holds a token's heads. */
static void tiles_follow_the_rows(void **state)
{
    (void)state;
    static const struct {
        uint32_t heads, dim, rows, tiles;
    } cases[] = {{1, 128, 1, 1},  {16, 128, 1, 1}, {17, 128, 1, 2}, {4, 128, 4, 1},
                 {4, 128, 5, 2},  {4, 128, 9, 4},  {4, 128, 17, 8}, {4, 256, 17, 4},
                 {71, 128, 1, 8}, {71, 256, 1, 4}, {140, 128, 1, 8}};
    for (uint32_t i = 0; i < KVP__COUNT(cases); i++) {
        step *s = new_step(2, cases[i].heads, cases[i].dim, 0, 16);
        add(s, 1000, cases[i].rows, 0, 0);
        made m = plan_of(s);
        check_plan(s, &m.plan);
        assert_int_equal(m.plan.tiles, cases[i].tiles);
        free_made(&m);
        free_step(s);
    }
    step *s = new_step(8, 4, 128, 0, 16); /* drafts go with the prompt, decoding rows do not */
    add(s, 1000, 200, 0, 0);
    add(s, 1000, 5, 0, 0);
    add(s, 1000, 1, 0, 0);
    made m = plan_of(s);
    check_plan(s, &m.plan);
    assert_int_equal(m.plan.tiles, 1 | 8);
    free_made(&m);
    free_step(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_key_is_seen_once),
        cmocka_unit_test(a_plan_depends_on_its_step_alone),
        cmocka_unit_test(a_decode_step_fits_its_own_bounds),
        cmocka_unit_test(decode_is_shared_out_equally),
        cmocka_unit_test(there_are_never_more_cuts_than_parts),
        cmocka_unit_test(prompts_are_cut_only_where_the_card_would_be_idle),
        cmocka_unit_test(a_shared_prefix_is_read_once),
        cmocka_unit_test(windows_are_not_read_in_full),
        cmocka_unit_test(a_fixed_length_makes_rows_independent),
        cmocka_unit_test(positions_up_to_two_thousand_millions),
        cmocka_unit_test(what_does_not_fit_is_refused),
        cmocka_unit_test(kernels_are_named_by_shape),
        cmocka_unit_test(tiles_follow_the_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
