/*
 * Sequences: forks, copy-on-write, truncation, publishing, and what happens while a step is in
 * flight. The world reads all KV back after every operation, so that "its own KV" needs no assert.
 */
#include "support/cache_world.h"
#include "support/heap.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static uint64_t step1(world *w, kvp__seq *s)
{
    uint32_t rows = s->length - s->computed;
    return world_step(w, &s, &rows, 1);
}

static kvp__seq *computed_seq(world *w, int32_t first, uint32_t count)
{
    kvp__seq *s = world_seq(w, NULL);
    world_append(w, s, first, count);
    assert_true(world_run(w, s));
    return s;
}

/* --- A1 --- */

/* References count holders, and what is freed once is free. (No ring: tables name a block once.) */
static void case_b01(void **state)
{
    (void)state;
    world w;
    world_make(&w, 8, 4, 2, WORLD_SHUFFLED);
    kvp__seq *a = computed_seq(&w, 0, 20), *b = world_fork(&w, a, 20);
    assert_int_equal(world_used(&w), 5);
    for (uint32_t k = 0; k < 5; k++) {
        assert_int_equal(world_ref(&w, a, k), 2);
        for (uint32_t j = 0; j < k; j++) assert_true(a->tables[0][k] != a->tables[0][j]);
    }
    world_append(&w, a, 100, 1);
    world_append(&w, b, 200, 1);
    kvp__seq *both[2] = {a, b};
    uint32_t rows[2] = {1, 1};
    assert_int_equal(world_step(&w, both, rows, 2), 3);
    assert_int_equal(world_used(&w), 7);
    world_end(&w, a);
    world_end(&w, b);
    assert_int_equal(world_used(&w), 0);
    assert_int_equal(kvp__prefix_reset(&w.prefix, NULL), KVP_OK);
    assert_int_equal(w.pool.groups[0].n_free, 8);
    assert_int_equal(w.pool.groups[1].n_free, 8);
    world_free(&w);
}

/* A copy that cannot be had leaves all as it was; the last holder needs none. */
static void case_b03(void **state)
{
    (void)state;
    world w;
    world_make(&w, 3, 16, 1, 0);
    kvp__seq *a = computed_seq(&w, 0, 40), *b = world_fork(&w, a, 40);
    assert_int_equal(world_used(&w), 3);
    world_append(&w, b, 100, 1);
    assert_int_equal(kvp__seq_reserve(b, 1, NULL), KVP_ERR_NO_BLOCKS);
    world_check(&w);
    assert_int_equal(kvp__seq_truncate(b, 40, NULL), KVP_OK);
    assert_int_equal(b->length, 40);
    for (uint32_t k = 0; k < 3; k++) assert_int_equal(world_ref(&w, a, k), 2);
    world_end(&w, a);
    world_append(&w, b, 100, 1);
    assert_int_equal(step1(&w, b), 1);
    assert_int_equal(b->usage.copied, 0);
    assert_int_equal(w.pool.counters.blocks_copied, 0);
    assert_int_equal(world_used(&w), 3);
    world_free(&w);

    /* Five writers of one shared block, room for two copies: three wait, whole and unchanged. */
    world_make(&w, 5, 16, 1, 0);
    kvp__seq *s[6] = {computed_seq(&w, 0, 40)};
    uint32_t rows[6];
    for (int i = 1; i < 6; i++) s[i] = world_fork(&w, s[0], 40);
    for (int i = 1; i < 6; i++) {
        world_append(&w, s[i], 100 * i, 1);
        rows[i] = 1;
    }
    assert_int_equal(world_step(&w, s + 1, rows + 1, 5), 3);
    assert_int_equal(world_used(&w), 5);
    assert_int_equal(world_ref(&w, s[0], 2), 4);
    for (int i = 3; i < 6; i++) assert_int_equal(s[i]->computed, 40);
    /* The first two end: the others go on, the last of them without a copy. */
    world_end(&w, s[1]);
    world_end(&w, s[2]);
    world_end(&w, s[0]);
    assert_int_equal(world_step(&w, s + 3, rows + 3, 3), 7);
    assert_int_equal(w.pool.counters.blocks_copied, 4);
    world_free(&w);
}

static void b05_order(const uint32_t order[4], uint32_t groups)
{
    world w;
    world_make(&w, 16, 8, groups, WORLD_SHUFFLED);
    kvp__seq *s[4];
    uint32_t rows[4] = {3, 3, 3, 3};
    s[0] = computed_seq(&w, 0, 24);
    s[1] = world_fork(&w, s[0], 16);
    s[2] = world_fork(&w, s[1], 16);
    s[3] = world_fork(&w, s[0], 8);
    for (uint32_t i = 0; i < 4; i++) world_append(&w, s[i], 1000 * (int32_t)(i + 1), 3);
    assert_int_equal(world_step(&w, s, rows, 4), 15);
    for (uint32_t i = 0; i < 4; i++) world_end(&w, s[order[i]]);
    assert_int_equal(world_used(&w), 0);
    assert_int_equal(kvp__prefix_reset(&w.prefix, NULL), KVP_OK);
    assert_int_equal(w.pool.groups[0].n_free, 16);
    world_free(&w);
}

/* Any order of destruction. */
static void case_b05(void **state)
{
    (void)state;
    for (uint32_t n = 0; n < 256; n++) {
        uint32_t order[4] = {n & 3, n >> 2 & 3, n >> 4 & 3, n >> 6}, seen = 0;
        for (int i = 0; i < 4; i++) seen |= 1u << order[i];
        if (seen == 15) b05_order(order, 1 + n % 3);
    }
}

/* Beams: both survivors of every step come from the first one. */
static void case_b08(void **state)
{
    (void)state;
    static const uint32_t used[5] = {3, 3, 4, 4, 4};
    world w;
    world_make(&w, 16, 4, 1, 0);
    kvp__seq *beam[2];
    uint32_t rows[2] = {1, 1};
    beam[0] = computed_seq(&w, 0, 6);
    beam[1] = world_fork(&w, beam[0], 6);
    for (int i = 0; i < 5; i++) {
        if (i) {
            world_end(&w, beam[1]);
            beam[1] = world_fork(&w, beam[0], beam[0]->length);
        }
        world_append(&w, beam[0], 100 + i, 1);
        world_append(&w, beam[1], 200 + i, 1);
        assert_int_equal(world_step(&w, beam, rows, 2), 3);
        assert_int_equal(world_used(&w), used[i]);
    }
    assert_int_equal(w.pool.counters.blocks_copied, 4);
    world_free(&w);
}

/* Two that computed the same prompt in one step end with one copy of it, and no table names a block
 * that is free. */
static void case_b09(void **state)
{
    (void)state;
    for (uint32_t groups = 1; groups <= 3; groups++) {
        world w;
        world_make(&w, 20, 4, groups, WORLD_SHUFFLED);
        kvp__seq *s[3];
        uint32_t rows[3] = {16, 16, 0};
        for (int i = 0; i < 2; i++) {
            s[i] = world_seq(&w, NULL);
            world_append(&w, s[i], 0, 16);
            assert_int_equal(world_attach(&w, s[i]), 0);
        }
        assert_int_equal(world_step(&w, s, rows, 2), 3);
        assert_int_equal(world_used(&w), 4);
        for (uint32_t k = 0; k < 4; k++) {
            assert_int_equal(s[0]->tables[0][k], s[1]->tables[0][k]);
            assert_int_equal(world_ref(&w, s[0], k), 2);
        }
        s[2] = world_seq(&w, NULL);
        world_append(&w, s[2], 500, 16);
        assert_true(world_run(&w, s[2]));
        for (int i = 0; i < 8; i++) {
            world_append(&w, s[0], 1000 + i, 1);
            world_append(&w, s[1], 2000 + i, 1);
            rows[0] = rows[1] = 1;
            assert_int_equal(world_step(&w, s, rows, 2), 3);
        }
        assert_int_equal(world_used(&w), 4 + 4 + 2 * 2);
        world_free(&w);
    }
}

/* --- A3 --- */

/* A prompt that is cached as a whole still computes its last token, without harm to who reads
 * it. */
static void case_b23(void **state)
{
    (void)state;
    world w;
    world_make(&w, 8, 16, 1, 0);
    kvp__seq *a = computed_seq(&w, 0, 32);
    world_end(&w, a);
    kvp__seq *live = world_seq(&w, NULL), *b = world_seq(&w, NULL);
    world_append(&w, live, 0, 32);
    world_append(&w, live, 900, 1);
    assert_true(world_run(&w, live));
    assert_int_equal(live->usage.cached, 32);
    world_append(&w, b, 0, 32);
    kvp__hit h = kvp__prefix_lookup(&w.prefix, b->root, b->tokens, b->length);
    assert_int_equal(h.full * 16, 16);
    assert_int_equal(world_attach(&w, b), 31);
    assert_int_equal(b->length - b->computed, 1);
    assert_int_equal(step1(&w, b), 1);
    assert_int_equal(b->usage.cached, 31);
    assert_int_equal(b->usage.computed, 1);
    assert_int_equal(b->tables[0][1], live->tables[0][1]);
    kvp__seq *c = world_seq(&w, NULL);
    world_append(&w, c, 0, 32);
    world_append(&w, c, 600, 16);
    assert_true(world_run(&w, c));
    assert_int_equal(c->usage.cached, 32);
    assert_int_equal(c->usage.computed, 16);
    world_free(&w);
}

/* Own blocks found again are not hits, and hits that are given up again are none either. */
static void case_b26(void **state)
{
    (void)state;
    world w;
    world_make(&w, 6, 4, 1, 0);
    kvp__seq *s[2];
    for (int i = 0; i < 2; i++) s[i] = computed_seq(&w, 100 * i, 8);
    uint32_t preempted = 0;
    for (uint32_t done[2] = {0, 0}; done[0] < 12 || done[1] < 12;) {
        for (int i = 0; i < 2; i++) {
            if (done[i] == 12) continue;
            if (s[i]->computed < s[i]->length) {
                world_attach(&w, s[i]);
            } else {
                world_append(&w, s[i], 500 * (i + 1) + (int32_t)done[i], 1);
                done[i]++;
            }
            if (step1(&w, s[i])) continue;
            /* The second one gives way, to itself too, until the first has all its tokens. */
            bool second = i == 0 || done[0] < 12;
            kvp__seq_release(s[second]);
            preempted += second;
            world_check(&w);
            if (i == 0) assert_int_equal(step1(&w, s[0]), 1);
        }
    }
    assert_true(preempted > 0);
    uint64_t computed = 0, again = 0;
    for (int i = 0; i < 2; i++) {
        if (s[i]->computed < s[i]->length) {
            kvp__seq_release(s[1 - i]);
            world_attach(&w, s[i]);
            assert_int_equal(step1(&w, s[i]), 1);
        }
        assert_int_equal(s[i]->usage.cached, 0);
        assert_int_equal(s[i]->usage.computed - s[i]->usage.recomputed, 20);
        computed += s[i]->usage.computed;
        again += s[i]->usage.reattached;
    }
    assert_int_equal(w.pool.counters.tokens_cached, 0);
    assert_true(again > 0);
    assert_int_equal(w.pool.counters.tokens_reattached, again);
    assert_int_equal(w.pool.counters.tokens_computed, computed);
    world_free(&w);

    world_make(&w, 8, 4, 1, 0);
    kvp__seq *a = computed_seq(&w, 0, 10), *b = world_seq(&w, NULL);
    world_append(&w, b, 0, 11);
    assert_int_equal(world_attach(&w, b), 10);
    kvp__seq_release(b);
    world_check(&w);
    assert_int_equal(b->usage.cached, 0);
    assert_int_equal(w.pool.counters.tokens_cached, 0);
    assert_int_equal(world_attach(&w, b), 10);
    assert_int_equal(step1(&w, b), 1);
    assert_int_equal(b->usage.cached, 10);
    assert_int_equal(b->usage.copied, 2);
    assert_int_equal(a->usage.cached, 0);
    world_free(&w);
}

/* --- A4 --- */

/* Look-ahead that is not used goes back once; ending twice gives back nothing twice. */
static void case_b36(void **state)
{
    (void)state;
    world w;
    world_make(&w, 8, 4, 1, 0);
    kvp__seq *s = computed_seq(&w, 0, 7);
    world_append(&w, s, 50, 4);
    assert_int_equal(kvp__seq_reserve(s, 4, NULL), KVP_OK);
    assert_int_equal(world_used(&w), 3);
    kvp__pool_fence_raise(&w.pool);
    for (uint32_t g = 0; g < 1; g++) w.kv[g][kvp__seq_slot(s, g, 7)] = world_expected(s, g, 7);
    assert_int_equal(kvp__seq_commit(s, 1), 1);
    assert_int_equal(s->n_blocks, 2);
    assert_int_equal(kvp__seq_truncate(s, 8, NULL), KVP_OK);
    kvp__pool_fence_drop(&w.pool);
    world_check(&w);
    assert_int_equal(world_used(&w), 2);
    kvp__seq_abort(s);
    kvp__seq_release(s);
    kvp__seq_release(s);
    world_check(&w);
    assert_int_equal(world_used(&w), 0);

    kvp__seq two;
    uint32_t root;
    assert_int_equal(kvp__prefix_root_intern(&w.prefix, NULL, 0, NULL, 0, &root, NULL), KVP_OK);
    kvp__seq_init(&two, &w.pool, &w.prefix, root);
    static const int32_t tokens[3] = {9, 9, 9};
    assert_int_equal(kvp__seq_append(&two, tokens, 3, NULL), KVP_OK);
    assert_int_equal(kvp__seq_reserve(&two, 3, NULL), KVP_OK);
    kvp__seq_fini(&two);
    kvp__seq_fini(&two);
    world_check(&w);
    assert_int_equal(w.pool.groups[0].n_free + w.pool.groups[0].n_idle, 8);
    world_free(&w);
}

/* --- A6, A8 --- */

/* The token after a prompt that fills its last block goes to slot 0 of a new one. */
static void case_b63(void **state)
{
    (void)state;
    for (uint32_t prompt = 15; prompt <= 32; prompt += prompt == 15 ? 1 : 16) {
        world w;
        world_make(&w, 4, 16, 2, WORLD_SHUFFLED);
        kvp__seq *s = computed_seq(&w, 0, prompt);
        uint32_t blocks = s->n_blocks;
        assert_int_equal(blocks, prompt == 32 ? 2 : 1);
        uint64_t last = w.kv[1][kvp__seq_slot(s, 1, prompt - 1)];
        world_append(&w, s, 100, 1);
        assert_int_equal(step1(&w, s), 1);
        if (prompt == 15) {
            assert_int_equal(s->n_blocks, 1);
            assert_int_equal(kvp__seq_slot(s, 1, 15), (int64_t)s->tables[1][0] * 16 + 15);
        } else {
            assert_int_equal(s->n_blocks, blocks + 1);
            assert_int_equal(kvp__seq_slot(s, 1, prompt), (int64_t)s->tables[1][blocks] * 16);
        }
        assert_int_equal(w.kv[1][kvp__seq_slot(s, 1, prompt - 1)], last);
        world_free(&w);
    }
}

/* A table that is not contiguous: rows go where the table says, and nowhere else. */
static void case_b75(void **state)
{
    (void)state;
    world w;
    world_make(&w, 9, 4, 1, 0);
    static const uint32_t want[3] = {5, 2, 7};
    uint32_t ids[9];
    for (int i = 0; i < 9; i++) ids[i] = kvp__pool_take(&w.pool, 0);
    for (int i = 0; i < 9; i++)
        if (ids[i] != 5 && ids[i] != 2 && ids[i] != 7) kvp__pool_release(&w.pool, 0, ids[i]);
    for (int i = 2; i >= 0; i--) kvp__pool_release(&w.pool, 0, want[i]);
    kvp__seq *s = computed_seq(&w, 0, 10);
    assert_memory_equal(s->tables[0], want, sizeof want);

    uint64_t before[36];
    memcpy(before, w.kv[0], sizeof before);
    world_append(&w, s, 100, 5);
    assert_int_equal(step1(&w, s), 1);
    assert_int_equal(kvp__seq_slot(s, 0, 10), 7 * 4 + 2);
    assert_int_equal(kvp__seq_slot(s, 0, 11), 7 * 4 + 3);
    uint32_t fresh = s->tables[0][3];
    for (uint32_t i = 0; i < 36; i++) {
        bool written = i == 30 || i == 31 || (i >= fresh * 4 && i < fresh * 4 + 3);
        assert_int_equal(before[i] != w.kv[0][i], written);
    }
    world_free(&w);
}

/* The first 20 tokens of another sequence: one block shared, one copied when it is written to. */
static void case_b79(void **state)
{
    (void)state;
    world w;
    world_make(&w, 8, 16, 1, 0);
    kvp__seq *a = computed_seq(&w, 0, 40), *b = world_fork(&w, a, 20);
    assert_int_equal(b->length, 20);
    assert_int_equal(b->computed, 20);
    assert_int_equal(world_used(&w), 3);
    assert_int_equal(world_ref(&w, a, 0), 2);
    world_append(&w, b, 500, 1);
    assert_int_equal(step1(&w, b), 1);
    assert_int_equal(b->usage.copied, 4);
    assert_int_equal(world_ref(&w, a, 0), 2);
    assert_int_equal(world_ref(&w, a, 1), 1);
    assert_int_equal(world_ref(&w, b, 1), 1);
    assert_int_equal(world_used(&w), 4);
    world_free(&w);
}

/* After a truncation nothing of what stood beyond it is read: it may be anything. */
static void case_b83(void **state)
{
    (void)state;
    world w;
    world_make(&w, 16, 16, 1, WORLD_NO_PREFIX);
    kvp__seq *s = computed_seq(&w, 0, 100);
    assert_int_equal(kvp__seq_truncate(s, 10, NULL), KVP_OK);
    world_check(&w);
    assert_int_equal(world_used(&w), 1);
    for (uint32_t i = 0; i < 16 * 16; i++)
        if (i / 16 != s->tables[0][0] || i % 16 >= 10) w.kv[0][i] = UINT64_MAX;
    world_append(&w, s, 700, 3);
    assert_int_equal(step1(&w, s), 1);
    assert_int_equal(world_read(&w, s, 0, 12), world_expected(s, 0, 12));
    world_free(&w);

    /* With the cache: the cut prefix stays for others when somebody builds on it. */
    world_make(&w, 16, 16, 1, 0);
    s = computed_seq(&w, 0, 100);
    assert_int_equal(kvp__seq_truncate(s, 10, NULL), KVP_OK);
    world_append(&w, s, 700, 3);
    assert_int_equal(step1(&w, s), 1);
    assert_int_equal(s->usage.copied, 10);
    kvp__seq *other = world_seq(&w, NULL);
    world_append(&w, other, 0, 100);
    assert_int_equal(world_cached(&w, other), 99);
    world_free(&w);
}

/* --- what is refused --- */

static void case_b88(void **state)
{
    (void)state;
    world w;
    world_make(&w, 4, 4, 1, 0);
    kvp__seq *s = computed_seq(&w, 0, 6), child = {0};
    kvp_error e = {.size = sizeof e};
    assert_int_equal(kvp__seq_fork(s, 7, &child, &e), KVP_ERR_INVALID_ARG);
    assert_null(child.pool);
    assert_int_equal(kvp__seq_truncate(s, 7, &e), KVP_ERR_INVALID_ARG);
    assert_int_equal(kvp__seq_pin(s, 7, &e), KVP_ERR_INVALID_ARG);
    assert_int_equal(kvp__seq_reserve(s, 1, &e), KVP_ERR_INVALID_ARG);
    assert_int_equal(kvp__seq_reserve(s, 0, &e), KVP_ERR_INVALID_ARG);
    assert_int_equal(kvp__seq_append(s, s->tokens, KVP__MAX_TOKENS, &e), KVP_ERR_CAPACITY);
    assert_int_equal(e.needed, (uint64_t)KVP__MAX_TOKENS + 6);
    assert_int_equal(s->length, 6);
    assert_int_equal(s->computed, 6);
    world_free(&w);
}

static void test_no_memory_changes_nothing(void **state)
{
    (void)state;
    heap h;
    heap_init(&h);
    kvp__pool pool;
    assert_int_equal(kvp__pool_init(&pool, &h.hooks, 2, 16, 4, NULL), KVP_OK);
    kvp__seq s, child;
    kvp__seq_init(&s, &pool, NULL, KVP__NONE);
    static const int32_t tokens[100] = {1, 2, 3};
    h.refuse = h.calls + 1;
    assert_int_equal(kvp__seq_append(&s, tokens, 9, NULL), KVP_ERR_NO_MEMORY);
    assert_int_equal(s.length, 0);
    assert_int_equal(kvp__seq_append(&s, tokens, 9, NULL), KVP_OK);
    h.refuse = h.calls + 1;
    assert_int_equal(kvp__seq_reserve(&s, 9, NULL), KVP_ERR_NO_MEMORY);
    assert_int_equal(kvp__pool_used(&pool, 0), 0);
    assert_int_equal(kvp__seq_reserve(&s, 9, NULL), KVP_OK);
    assert_int_equal(kvp__seq_commit(&s, 9), 9);
    h.refuse = h.calls + 1;
    assert_int_equal(kvp__seq_fork(&s, 9, &child, NULL), KVP_ERR_NO_MEMORY);
    assert_int_equal(pool.groups[0].blocks[s.tables[0][0]].ref, 1);
    for (uint64_t n = 1; n <= 2; n++) {
        h.refuse = h.calls + n;
        assert_int_equal(kvp__seq_reserve_capacity(&s, 100, NULL), KVP_ERR_NO_MEMORY);
        assert_int_equal(s.length, 9);
        if (n == 1) assert_int_equal(s.table_capacity, 3);
    }
    h.refuse = 0;
    assert_int_equal(kvp__seq_reserve_capacity(&s, 100, NULL), KVP_OK);

    /* From here to 64 tokens (all 16 blocks) nothing is allocated. */
    uint64_t calls = h.calls;
    for (uint32_t i = 9; i < 64; i++) {
        assert_int_equal(kvp__seq_append(&s, tokens, 1, NULL), KVP_OK);
        assert_int_equal(kvp__seq_reserve(&s, 1, NULL), KVP_OK);
        assert_int_equal(kvp__seq_commit(&s, 1), 1);
    }
    assert_int_equal(h.calls, calls);
    kvp__seq_fini(&s);
    kvp__pool_fini(&pool);
    assert_int_equal(h.live, 0);
    assert_int_equal(h.mismatches, 0);
}

/* Forks share tokens; only an owner lengthens them in place, and a fork cannot become it
 * meanwhile. */
static void test_token_buffers(void **state)
{
    (void)state;
    heap h;
    heap_init(&h);
    kvp__pool pool;
    assert_int_equal(kvp__pool_init(&pool, &h.hooks, 1, 16, 4, NULL), KVP_OK);
    kvp__seq a, b, c;
    static const int32_t tokens[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    kvp__seq_init(&a, &pool, NULL, KVP__NONE);
    assert_int_equal(kvp__seq_reserve_capacity(&a, 64, NULL), KVP_OK);
    assert_int_equal(kvp__seq_append(&a, tokens, 8, NULL), KVP_OK);
    uint64_t calls = h.calls;
    assert_int_equal(kvp__seq_fork(&a, 8, &b, NULL), KVP_OK);
    assert_int_equal(kvp__seq_fork(&a, 5, &c, NULL), KVP_OK);
    assert_int_equal(h.calls, calls); /* nothing computed: no table, no copy of the tokens */
    assert_ptr_equal(a.tokens, b.tokens);

    assert_int_equal(kvp__seq_append(&b, tokens + 3, 1, NULL), KVP_OK);
    assert_ptr_not_equal(a.tokens, b.tokens);
    calls = h.calls;
    assert_int_equal(kvp__seq_append(&a, tokens + 4, 1, NULL), KVP_OK);
    assert_int_equal(h.calls, calls);
    assert_int_equal(a.tokens[8], 4);
    assert_int_equal(b.tokens[8], 3);

    /* The shorter fork writes over nothing that the longer one reads. */
    assert_int_equal(kvp__seq_append(&c, tokens + 7, 1, NULL), KVP_OK);
    assert_int_equal(c.tokens[5], 7);
    assert_int_equal(a.tokens[5], 5);
    kvp__seq_fini(&a);
    kvp__seq_fini(&c);

    /* The last one left owns what it has. */
    assert_int_equal(kvp__seq_fork(&b, 4, &a, NULL), KVP_OK);
    kvp__seq_fini(&b);
    calls = h.calls;
    assert_int_equal(kvp__seq_append(&a, tokens, 2, NULL), KVP_OK);
    assert_int_equal(h.calls, calls);
    static const int32_t want[6] = {0, 1, 2, 3, 0, 1};
    assert_memory_equal(a.tokens, want, sizeof want);

    /* An owner that was cut while a fork reads the rest does not write into it. */
    assert_int_equal(kvp__seq_fork(&a, 6, &b, NULL), KVP_OK);
    assert_int_equal(kvp__seq_truncate(&a, 3, NULL), KVP_OK);
    assert_int_equal(kvp__seq_append(&a, tokens + 7, 1, NULL), KVP_OK);
    assert_memory_equal(b.tokens, want, sizeof want);
    assert_int_equal(a.tokens[3], 7);
    kvp__seq_fini(&a);
    kvp__seq_fini(&b);
    kvp__pool_fini(&pool);
    assert_int_equal(h.live, 0);
}

/* --- copy-on-write and publishing, finer --- */

/* A block that only one holds and nobody builds on is written in place, and its cache cut down. */
static void test_rewrite_in_place(void **state)
{
    (void)state;
    world w;
    world_make(&w, 8, 8, 2, WORLD_SHUFFLED);
    kvp__seq *s = computed_seq(&w, 0, 14);
    assert_int_equal(kvp__seq_truncate(s, 11, NULL), KVP_OK);
    world_check(&w);
    kvp__seq *probe = world_seq(&w, NULL);
    world_append(&w, probe, 0, 20);
    assert_int_equal(world_cached(&w, probe), 14);
    world_append(&w, s, 300, 2);
    assert_int_equal(step1(&w, s), 1);
    assert_int_equal(s->usage.copied, 0);
    assert_int_equal(world_cached(&w, probe), 11);
    assert_int_equal(world_used(&w), 2);
    world_free(&w);
}

/* One token cut and written anew: the index must not go on answering with the old one. */
static void test_rewrite_one_token(void **state)
{
    (void)state;
    for (uint32_t length = 9; length < 16; length++) {
        world w;
        world_make(&w, 8, 8, 1, 0);
        kvp__seq *s = computed_seq(&w, 0, length + 1);
        kvp__seq *probe = world_seq(&w, NULL);
        world_append(&w, probe, 0, 20);
        assert_int_equal(world_cached(&w, probe), length + 1);
        assert_int_equal(kvp__seq_truncate(s, length, NULL), KVP_OK);
        world_append(&w, s, 300, 1);
        assert_int_equal(step1(&w, s), 1);
        assert_int_equal(world_cached(&w, probe), length);
        world_free(&w);
    }
}

/* A tail that the cache has already stays private, and takes the canonical block once it is
 * full. */
static void test_covered_tail(void **state)
{
    (void)state;
    world w;
    world_make(&w, 8, 8, 1, 0);
    kvp__seq *a = world_seq(&w, NULL), *b = world_seq(&w, NULL);
    kvp__seq *both[2] = {a, b};
    uint32_t rows[2] = {6, 4};
    world_append(&w, a, 0, 6);
    world_append(&w, b, 0, 4);
    assert_int_equal(world_step(&w, both, rows, 2), 3);
    assert_int_equal(w.prefix.n_nodes, 1);
    world_append(&w, a, 6, 3);
    world_append(&w, b, 4, 5);
    rows[0] = 3;
    rows[1] = 5;
    assert_int_equal(world_step(&w, both, rows, 2), 3);
    assert_int_equal(a->tables[0][0], b->tables[0][0]);
    assert_int_equal(w.prefix.n_nodes, 2);
    assert_int_equal(world_used(&w), 3);
    world_free(&w);
}

/* A block given up for an equal one leaves nothing in the cache. */
static void test_replaced_tail_is_forgotten(void **state)
{
    (void)state;
    world w;
    world_make(&w, 8, 8, 2, WORLD_SHUFFLED);
    kvp__seq *a = computed_seq(&w, 0, 4), *b = world_seq(&w, NULL);
    world_append(&w, a, 4, 4);
    world_append(&w, b, 0, 8);
    kvp__seq *both[2] = {b, a};
    uint32_t rows[2] = {8, 4};
    assert_int_equal(world_step(&w, both, rows, 2), 3);
    assert_int_equal(a->tables[1][0], b->tables[1][0]);
    assert_int_equal(w.prefix.n_nodes, 1);
    assert_int_equal(w.pool.groups[1].n_free, 7);
    world_free(&w);
}

/* A copy and a write to its source in one step: copies are made first. */
static void test_copy_from_a_block_that_is_written(void **state)
{
    (void)state;
    world w;
    world_make(&w, 8, 8, 1, 0);
    kvp__seq *a = computed_seq(&w, 0, 6), *b = world_fork(&w, a, 6), *c = world_fork(&w, a, 3);
    world_append(&w, a, 100, 1);
    world_append(&w, b, 200, 1);
    world_append(&w, c, 300, 1);
    kvp__seq *s[3] = {c, b, a};
    uint32_t rows[3] = {1, 1, 1};
    assert_int_equal(world_step(&w, s, rows, 3), 7);
    assert_int_equal(w.pool.counters.blocks_copied, 2); /* the last one writes in place */
    assert_int_equal(w.pool.counters.tokens_copied, 3 + 6);
    world_free(&w);
}

/* ... but not over what a copy takes: it may be undone after the rows were stored, and a fork made
 * meanwhile reads the source. */
static void test_write_below_a_planned_copy(void **state)
{
    (void)state;
    for (int forks = 0; forks < 2; forks++) {
        world w;
        world_make(&w, 8, 8, 2, WORLD_SHUFFLED);
        kvp__seq *a = computed_seq(&w, 0, 6), *b = world_fork(&w, a, 3);
        world_append(&w, a, 100, 1);
        world_append(&w, b, 200, 2);
        kvp__seq *s[2] = {a, b};
        uint32_t rows[2] = {1, 2};
        world_flight f;
        world_launch(&w, &f, s, rows, 2);
        f.spoiled = true;
        if (forks) world_fork(&w, a, 6);
        world_land(&w, &f, true);
        assert_int_equal(a->computed, 6);
        assert_int_equal(b->computed, 3);
        assert_int_equal(world_step(&w, s, rows, 2), 3);
        world_free(&w);
    }

    /* The same with a copy of a cached tail. */
    world w;
    world_make(&w, 8, 8, 1, 0);
    kvp__seq *b = computed_seq(&w, 0, 6), *a = world_seq(&w, NULL);
    assert_int_equal(kvp__seq_truncate(b, 3, NULL), KVP_OK);
    world_append(&w, b, 200, 2);
    world_append(&w, a, 0, 7);
    assert_int_equal(world_attach(&w, a), 6);
    kvp__seq *s[2] = {a, b};
    uint32_t rows[2] = {1, 2};
    world_flight f;
    world_launch(&w, &f, s, rows, 2);
    kvp__seq *c = world_fork(&w, a, 6);
    world_land(&w, &f, false);
    assert_int_equal(c->computed, 6);
    world_free(&w);
}

static void test_abort_is_as_if_not_planned(void **state)
{
    (void)state;
    world w;
    world_make(&w, 8, 8, 2, WORLD_SHUFFLED);
    kvp__seq *a = computed_seq(&w, 0, 12), *b = world_fork(&w, a, 12);
    assert_int_equal(kvp__seq_pin(b, 12, NULL), KVP_OK);
    world_append(&w, b, 200, 10);
    uint32_t id = b->tables[1][1], rows = 10;
    world_flight f;
    world_launch(&w, &f, &b, &rows, 1);
    assert_int_equal(world_used(&w), 2 + 2);
    assert_int_not_equal(b->tables[1][1], id);
    world_land(&w, &f, true);
    assert_int_equal(b->tables[1][1], id);
    assert_int_equal(world_used(&w), 2);
    assert_int_equal(b->usage.copied, 0);

    /* A hit that was to be copied. */
    kvp__seq *c = world_seq(&w, NULL);
    world_append(&w, c, 0, 30);
    assert_int_equal(world_attach(&w, c), 12);
    rows = 18;
    world_launch(&w, &f, &c, &rows, 1);
    world_land(&w, &f, true);
    assert_int_equal(c->computed, 8);
    assert_int_equal(c->n_blocks, 1);
    assert_int_equal(c->usage.cached, 0);
    assert_true(world_run(&w, c));
    assert_int_equal(c->usage.cached, 12);
    world_free(&w);
}

/* The host cuts, forks and destroys while the step runs. */
static void test_changes_in_flight(void **state)
{
    (void)state;
    for (int what = 0; what < 6; what++) {
        world w;
        world_make(&w, 16, 4, 2, WORLD_SHUFFLED);
        kvp__seq *a = computed_seq(&w, 0, 10), *b = world_fork(&w, a, 10);
        world_append(&w, a, 100, 5);
        world_append(&w, b, 200, 5);
        kvp__seq *s[2] = {a, b};
        uint32_t rows[2] = {5, 5};
        world_flight f;
        world_launch(&w, &f, s, rows, 2);
        assert_int_equal(f.n_copies, 2);
        uint32_t used = world_used(&w);
        switch (what) {
        case 0: /* into the rows of the step, then other tokens */
            assert_int_equal(kvp__seq_truncate(a, 12, NULL), KVP_OK);
            world_append(&w, a, 300, 4);
            break;
        case 1: /* below them */
            assert_int_equal(kvp__seq_truncate(a, 9, NULL), KVP_OK);
            break;
        case 2: /* away with the block that is being copied to */
            assert_int_equal(kvp__seq_truncate(a, 8, NULL), KVP_OK);
            assert_int_equal(a->copy_kind, KVP__COPY_NONE);
            break;
        case 3:
            world_end(&w, a);
            f.seqs[0] = NULL;
            break;
        case 4: { /* a fork of one whose copy is not made yet */
            kvp__seq *c = world_fork(&w, a, 15);
            assert_int_equal(c->computed, 10);
            break;
        }
        case 5:
            kvp__seq_release(a);
            break;
        }
        world_check(&w);
        assert_int_equal(world_used(&w), used);
        world_land(&w, &f, what == 5);
        if (what == 0) assert_int_equal(a->computed, 12);
        if (what == 1) assert_int_equal(a->computed, 9);
        if (what == 2) assert_int_equal(a->computed, 8);
        for (uint32_t i = 0; i < w.n_seqs; i++) assert_true(world_run(&w, w.seqs[i]));
        world_free(&w);
    }
}

static void test_pins(void **state)
{
    (void)state;
    world w;
    world_make(&w, 8, 4, 1, 0);
    kvp__seq *s = world_seq(&w, NULL);
    world_append(&w, s, 0, 15);
    assert_int_equal(kvp__seq_pin(s, 6, NULL), KVP_OK);
    assert_int_equal(w.pool.n_pinned, 0); /* nothing is computed */
    assert_true(world_run(&w, s));
    assert_int_equal(w.pool.n_pinned, 2);
    assert_int_equal(kvp__seq_releasable(s), 2);
    kvp__seq_release_unpinned(s);
    world_check(&w);
    assert_int_equal(s->computed, 8);
    assert_int_equal(world_used(&w), 2);
    assert_int_equal(kvp__seq_releasable(s), 0);
    assert_int_equal(kvp__prefix_reset(&w.prefix, NULL), KVP_ERR_BUSY);
    assert_true(world_run(&w, s));
    assert_int_equal(s->usage.reattached, 6);
    assert_int_equal(s->usage.recomputed, 1);
    assert_int_equal(s->usage.cached, 0);

    /* A cut cuts the pin; a fork has none. */
    assert_int_equal(kvp__seq_truncate(s, 3, NULL), KVP_OK);
    world_check(&w);
    assert_int_equal(s->pin, 3);
    assert_int_equal(w.pool.n_pinned, 1);
    kvp__seq *c = world_fork(&w, s, 3);
    assert_int_equal(c->pin, 0);
    assert_int_equal(kvp__seq_pin(c, 3, NULL), KVP_OK);
    assert_int_equal(w.pool.n_pinned, 1);
    /* A write to a pinned, shared block: the pin goes with the copy. */
    world_append(&w, c, 70, 1);
    assert_int_equal(step1(&w, c), 1);
    assert_int_equal(w.pool.n_pinned, 2);
    assert_int_equal(kvp__seq_pin(s, 0, NULL), KVP_OK);
    assert_int_equal(kvp__seq_pin(c, 0, NULL), KVP_OK);
    assert_int_equal(w.pool.n_pinned, 0);
    world_free(&w);
}

/* A pinned block that is only partly computed gives way to a cached one that has more. */
static void test_attach_beyond_a_partial_pin(void **state)
{
    (void)state;
    world w;
    world_make(&w, 8, 8, 2, WORLD_SHUFFLED);
    kvp__seq *s = computed_seq(&w, 0, 12);
    assert_int_equal(kvp__seq_pin(s, 12, NULL), KVP_OK);
    kvp__seq_release_unpinned(s);
    assert_int_equal(s->computed, 12);
    kvp__seq *other = computed_seq(&w, 0, 30);
    world_append(&w, s, 12, 18);
    assert_int_equal(world_attach(&w, s), 17);
    assert_int_equal(step1(&w, s), 1);
    assert_int_equal(s->tables[1][1], other->tables[1][1]);
    assert_int_equal(w.pool.n_pinned, 2);
    world_free(&w);

    /* The tail only. */
    world_make(&w, 8, 8, 1, 0);
    s = computed_seq(&w, 0, 12);
    other = world_fork(&w, s, 12);
    world_append(&w, other, 12, 3);
    assert_int_equal(step1(&w, other), 1);
    world_append(&w, s, 12, 8);
    assert_int_equal(world_attach(&w, s), 3);
    assert_int_equal(step1(&w, s), 1);
    world_free(&w);

    /* Its own block had it all the time. */
    world_make(&w, 8, 8, 1, 0);
    s = computed_seq(&w, 0, 14);
    assert_int_equal(kvp__seq_truncate(s, 10, NULL), KVP_OK);
    world_append(&w, s, 10, 6);
    assert_int_equal(world_attach(&w, s), 4);
    assert_int_equal(s->copy_kind, KVP__COPY_NONE);
    assert_int_equal(step1(&w, s), 1);
    assert_int_equal(world_used(&w), 2);
    world_free(&w);
}

/* Where the tail's source is the last block to be had, the tail is computed instead. */
static void test_tail_gives_way_when_blocks_lack(void **state)
{
    (void)state;
    world w;
    world_make(&w, 4, 4, 1, 0);
    kvp__seq *x = computed_seq(&w, 0, 6);
    world_end(&w, x);
    kvp__seq *y = world_seq(&w, NULL);
    world_append(&w, y, 0, 6);
    world_append(&w, y, 100, 10);
    kvp__hit h = kvp__prefix_lookup(&w.prefix, y->root, y->tokens, y->length);
    assert_int_equal(h.full, 1);
    assert_int_equal(h.tail, 2);
    assert_int_equal(kvp__seq_attach(y, &h, 3, NULL), KVP_OK);
    world_check(&w);
    assert_int_equal(y->computed, 4);
    assert_int_equal(step1(&w, y), 1);
    assert_int_equal(y->usage.cached, 4);
    world_free(&w);
}

static void test_rewind_computes_the_last_token_again(void **state)
{
    (void)state;
    world w;
    world_make(&w, 8, 4, 1, 0);
    kvp__seq *a = computed_seq(&w, 0, 12), *b = world_fork(&w, a, 12);
    kvp__seq_rewind(b, 11);
    world_check(&w);
    assert_int_equal(b->computed, 11);
    assert_int_equal(b->length, 12);
    assert_int_equal(step1(&w, b), 1);
    assert_int_equal(b->usage.recomputed, 1);
    assert_int_equal(b->tables[0][2], a->tables[0][2]);
    assert_int_equal(world_used(&w), 3);
    kvp__seq_rewind(b, 12);
    assert_int_equal(b->computed, 12);
    kvp__seq_rewind(b, 0);
    world_check(&w);
    assert_int_equal(b->n_blocks, 0);
    assert_true(world_run(&w, b));
    world_free(&w);
}

/* Chunks of any size leave the cache in the same state as one. */
static void test_chunks(void **state)
{
    (void)state;
    for (uint32_t chunk = 1; chunk <= 13; chunk++) {
        world w;
        world_make(&w, 16, 8, 2, WORLD_SHUFFLED);
        kvp__seq *s = world_seq(&w, NULL), *probe = world_seq(&w, NULL);
        world_append(&w, s, 0, 24);
        world_append(&w, probe, 0, 25);
        assert_int_equal(world_cached(&w, probe), 0);
        while (s->computed < 24) {
            uint32_t rows = s->length - s->computed < chunk ? s->length - s->computed : chunk;
            assert_int_equal(world_step(&w, &s, &rows, 1), 1);
            assert_int_equal(world_cached(&w, probe), s->computed);
        }
        assert_int_equal(world_used(&w), 3);
        assert_int_equal(w.prefix.n_nodes, 3);
        world_free(&w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(case_b01),
        cmocka_unit_test(case_b03),
        cmocka_unit_test(case_b05),
        cmocka_unit_test(case_b08),
        cmocka_unit_test(case_b09),
        cmocka_unit_test(case_b23),
        cmocka_unit_test(case_b26),
        cmocka_unit_test(case_b36),
        cmocka_unit_test(case_b63),
        cmocka_unit_test(case_b75),
        cmocka_unit_test(case_b79),
        cmocka_unit_test(case_b83),
        cmocka_unit_test(case_b88),
        cmocka_unit_test(test_no_memory_changes_nothing),
        cmocka_unit_test(test_token_buffers),
        cmocka_unit_test(test_rewrite_in_place),
        cmocka_unit_test(test_rewrite_one_token),
        cmocka_unit_test(test_covered_tail),
        cmocka_unit_test(test_replaced_tail_is_forgotten),
        cmocka_unit_test(test_copy_from_a_block_that_is_written),
        cmocka_unit_test(test_write_below_a_planned_copy),
        cmocka_unit_test(test_abort_is_as_if_not_planned),
        cmocka_unit_test(test_changes_in_flight),
        cmocka_unit_test(test_pins),
        cmocka_unit_test(test_attach_beyond_a_partial_pin),
        cmocka_unit_test(test_tail_gives_way_when_blocks_lack),
        cmocka_unit_test(test_rewind_computes_the_last_token_again),
        cmocka_unit_test(test_chunks),
    };
    return cmocka_run_group_tests_name("seq", tests, NULL, NULL);
}
