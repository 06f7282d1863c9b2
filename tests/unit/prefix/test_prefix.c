/*
 * What the cache finds, what it forgets, and in which order.
 */
#include "support/cache_world.h"
#include "support/heap.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static kvp__hash128 hash_seven(kvp__hash_key key, const void *data, size_t bytes)
{
    (void)key, (void)data, (void)bytes;
    return (kvp__hash128){7, 7};
}

/* Computes a prompt of `count` tokens from `first` on and ends; gives what the cache served. */
static uint32_t run_and_end(world *w, const char *salt, int32_t first, uint32_t count)
{
    kvp__seq *s = world_seq(w, salt);
    world_append(w, s, first, count);
    assert_true(world_run(w, s));
    uint32_t cached = (uint32_t)s->usage.cached;
    assert_int_equal(s->usage.computed + cached, count);
    world_end(w, s);
    return cached;
}

/* A hash that is the same for all: nothing of another prompt is served, because tokens are
 * compared. */
static void case_b11(void **state)
{
    (void)state;
    world w;
    world_make_hash(&w, 16, 16, hash_seven);
    assert_int_equal(run_and_end(&w, NULL, 0, 32), 0);
    assert_int_equal(run_and_end(&w, NULL, 1000, 32), 0);
    assert_int_equal(run_and_end(&w, NULL, 0, 32), 31);
    assert_int_equal(run_and_end(&w, NULL, 1000, 32), 31);
    world_free(&w);
}

/* Equal blocks under different parents are different prefixes. */
static void case_b13(void **state)
{
    (void)state;
    for (int bad_hash = 0; bad_hash < 2; bad_hash++) {
        world w;
        world_make_hash(&w, 32, 16, bad_hash ? hash_seven : NULL);
        kvp__seq *s[3];
        static const int32_t blocks[3][3] = {{0, 100, 200}, {300, 100, 200}, {0, 100, 400}};
        static const uint32_t cached[3] = {0, 0, 32};
        for (int i = 0; i < 3; i++) {
            s[i] = world_seq(&w, NULL);
            for (int k = 0; k < 3; k++) world_append(&w, s[i], blocks[i][k], 16);
            assert_true(world_run(&w, s[i]));
            assert_int_equal(s[i]->usage.cached, cached[i]);
        }
        assert_int_equal(world_used(&w), 3 + 3 + 1);
        world_free(&w);
    }
}

/* Salts are walls, no salt is one too; and the cache does work. */
static void case_b19(void **state)
{
    (void)state;
    world w;
    world_make(&w, 32, 16, 1, 0);
    assert_int_equal(run_and_end(&w, "s1", 0, 48), 0);
    assert_int_equal(run_and_end(&w, "s2", 0, 48), 0);
    assert_int_equal(run_and_end(&w, NULL, 0, 48), 0);
    assert_int_equal(run_and_end(&w, "s1", 0, 48), 47);
    assert_int_equal(run_and_end(&w, "", 0, 48), 47); /* no bytes of salt are no salt */
    world_free(&w);

    /* The same in numbers of whole blocks: 32 of 48 tokens without the copied tail. */
    world_make(&w, 32, 16, 1, 0);
    run_and_end(&w, "s1", 0, 48);
    kvp__seq *s = world_seq(&w, "s1");
    world_append(&w, s, 0, 48);
    kvp__hit h = kvp__prefix_lookup(&w.prefix, s->root, s->tokens, s->length);
    assert_int_equal(h.full * 16, 32);
    assert_int_equal(h.tail, 15);
    world_free(&w);
}

/* A block given to somebody else is no more found under what was in it. */
static void case_b28(void **state)
{
    (void)state;
    world w;
    world_make(&w, 2, 4, 1, 0);
    assert_int_equal(run_and_end(&w, NULL, 0, 5), 0);
    assert_int_equal(run_and_end(&w, NULL, 100, 8), 0);
    assert_int_equal(w.pool.counters.blocks_evicted, 2);
    assert_int_equal(run_and_end(&w, NULL, 0, 5), 0);
    world_free(&w);
}

/* Hits on idle blocks use up what is available; refused before anything has changed. */
static void case_b30(void **state)
{
    (void)state;
    for (int with_other = 0; with_other < 2; with_other++) {
        world w;
        world_make(&w, 4, 4, 1, 0);
        run_and_end(&w, NULL, 0, 8);
        assert_int_equal(w.pool.groups[0].n_idle, 2);
        assert_int_equal(w.pool.groups[0].n_free, 2);
        kvp__seq *other = world_seq(&w, NULL);
        world_append(&w, other, 500, 1);
        if (with_other) assert_true(world_run(&w, other));
        assert_int_equal(kvp__pool_available(&w.pool), with_other ? 3 : 4);

        kvp__seq *y = world_seq(&w, NULL);
        world_append(&w, y, 0, 8);
        world_append(&w, y, 200, 8);
        kvp__hit h = kvp__prefix_lookup(&w.prefix, y->root, y->tokens, y->length);
        assert_int_equal(h.full, 2);
        assert_int_equal(h.tail, 0);
        assert_int_equal(h.idle, 2);
        kvp_error e = {.size = sizeof e};
        kvp_status status = kvp__seq_attach(y, &h, 2, &e);
        if (with_other) {
            assert_int_equal(status, KVP_ERR_NO_BLOCKS);
            assert_int_equal(e.needed, 4);
            assert_int_equal(e.available, 3);
            assert_int_equal(y->n_blocks, 0);
            assert_int_equal(w.pool.groups[0].n_idle, 2);
            world_check(&w);
            assert_int_equal(world_cached(&w, y), 8);
        } else {
            assert_int_equal(status, KVP_OK);
            uint32_t rows = 8;
            assert_int_equal(world_step(&w, &y, &rows, 1), 1);
            assert_int_equal(y->usage.cached, 8);
            assert_int_equal(world_used(&w), 4);
        }
        world_free(&w);
    }
}

/* Leaves go first: a prefix gets shorter, it never gets holes. */
static void case_b32(void **state)
{
    (void)state;
    static const uint32_t found[5] = {15, 12, 8, 4, 0};
    for (uint32_t groups = 1; groups <= 2; groups++)
        for (uint32_t k = 0; k <= 4; k++) {
            world w;
            world_make(&w, 4, 4, groups, WORLD_SHUFFLED);
            run_and_end(&w, NULL, 0, 16);
            kvp__seq *other = world_seq(&w, NULL);
            for (uint32_t i = 0; i < k; i++) {
                world_append(&w, other, 1000 + 10 * (int32_t)i, 4);
                uint32_t rows = 4;
                assert_int_equal(world_step(&w, &other, &rows, 1), 1);
            }
            kvp__seq *x = world_seq(&w, NULL);
            world_append(&w, x, 0, 16);
            assert_int_equal(world_cached(&w, x), found[k]);
            assert_int_equal(world_used(&w), k);
            world_free(&w);
        }
}

/* What an allocation costs does not depend on how much is cached. */
static void case_b34(void **state)
{
    (void)state;
    static const uint32_t sizes[3] = {1000, 10000, 100000};
    uint64_t visits[3];
    for (int i = 0; i < 3; i++) {
        uint32_t n = sizes[i];
        kvp__hooks hooks;
        kvp__pool pool;
        kvp__prefix x;
        kvp__prefix_options o = {.key = {1, 2}};
        uint32_t root;
        assert_int_equal(kvp__hooks_fill(&hooks, NULL, NULL), KVP_OK);
        assert_int_equal(kvp__pool_init(&pool, &hooks, 1, n, 1, NULL), KVP_OK);
        assert_int_equal(kvp__prefix_init(&x, &pool, &o, NULL), KVP_OK);
        assert_int_equal(kvp__prefix_root_intern(&x, NULL, 0, NULL, 0, &root, NULL), KVP_OK);
        for (uint32_t k = 0; k < n; k++) {
            uint32_t id = kvp__pool_take(&pool, 0);
            int32_t token = (int32_t)k;
            kvp__hash128 h;
            uint32_t parent = kvp__prefix_under_root(&x, root);
            assert_int_equal(kvp__prefix_find_full(&x, parent, &token, &h), KVP__NONE);
            kvp__prefix_add(&x, parent, &id, &token, 1, &h);
            kvp__pool_release(&pool, 0, id);
        }
        assert_int_equal(pool.groups[0].n_idle, n);
        uint64_t before = x.visits;
        for (uint32_t k = 0; k < 1000; k++) assert_true(kvp__pool_take(&pool, 0) != KVP__NONE);
        visits[i] = x.visits - before;
        assert_int_equal(pool.counters.blocks_evicted, 1000);
        kvp__prefix_fini(&x);
        kvp__pool_fini(&pool);
    }
    /* One victim each, and the nodes before it in its bucket: under one on average at any size. */
    for (int i = 0; i < 3; i++) {
        assert_true(visits[i] >= 1000);
        assert_true(visits[i] < 2000);
    }
}

/* Everything that was cached goes with the pool. */
static void case_b39(void **state)
{
    (void)state;
    heap h;
    heap_init(&h);
    kvp__pool pool;
    kvp__prefix x;
    kvp__prefix_options o = {.key = {1, 2}};
    assert_int_equal(kvp__pool_init(&pool, &h.hooks, 2, 400, 4, NULL), KVP_OK);
    assert_int_equal(kvp__prefix_init(&x, &pool, &o, NULL), KVP_OK);
    for (int i = 0; i < 100; i++) {
        char salt[16];
        int n = snprintf(salt, sizeof salt, "tenant %d", i);
        uint32_t root;
        assert_int_equal(kvp__prefix_root_intern(&x, salt, (uint32_t)n, NULL, 0, &root, NULL),
                         KVP_OK);
        kvp__seq s;
        kvp__seq_init(&s, &pool, &x, root);
        for (int32_t t = 0; t < 10; t++)
            assert_int_equal(kvp__seq_append(&s, &t, 1, NULL), KVP_OK);
        assert_int_equal(kvp__seq_reserve(&s, 10, NULL), KVP_OK);
        assert_int_equal(kvp__seq_commit(&s, 10), 10);
        kvp__seq_fini(&s);
    }
    assert_int_equal(x.n_nodes, 300);
    kvp__prefix_fini(&x);
    kvp__pool_fini(&pool);
    assert_int_equal(h.live, 0);
    assert_int_equal(h.blocks, 0);
    assert_int_equal(h.mismatches, 0);
}

/* Partly filled blocks: the longest of the newest candidates, also out of a full block. */
static void test_longest_partial_match(void **state)
{
    (void)state;
    world w;
    world_make(&w, 32, 16, 1, 0);
    kvp__seq *a = world_seq(&w, NULL);
    world_append(&w, a, 0, 3);
    world_append(&w, a, 50, 2);
    assert_true(world_run(&w, a));
    run_and_end(&w, NULL, 0, 20);
    kvp__seq *b = world_seq(&w, NULL);
    world_append(&w, b, 0, 3);
    world_append(&w, b, 50, 4);
    assert_int_equal(world_cached(&w, b), 5);
    kvp__seq *c = world_seq(&w, NULL);
    world_append(&w, c, 0, 10);
    assert_int_equal(world_cached(&w, c), 9);
    kvp__seq *d = world_seq(&w, NULL);
    world_append(&w, d, 7, 10);
    assert_int_equal(world_cached(&w, d), 0);
    assert_true(world_run(&w, b));
    assert_int_equal(b->usage.cached, 5);
    assert_int_equal(b->usage.copied, 5);
    world_free(&w);
}

/* One token is never served, none at all neither. */
static void test_something_is_always_computed(void **state)
{
    (void)state;
    for (uint32_t b = 1; b <= 4; b *= 2) {
        world w;
        world_make(&w, 64, b, 1, 0);
        run_and_end(&w, NULL, 0, 20);
        for (uint32_t n = 0; n <= 20; n++) {
            kvp__seq *s = world_seq(&w, NULL);
            world_append(&w, s, 0, n);
            assert_int_equal(world_cached(&w, s), n ? n - 1 : 0);
            world_end(&w, s);
        }
        world_free(&w);
    }
}

static void test_roots_are_reused_when_unused(void **state)
{
    (void)state;
    world w;
    world_make(&w, 8, 4, 1, 0);
    for (int i = 0; i < 1000; i++) {
        char salt[16];
        snprintf(salt, sizeof salt, "user %d", i);
        assert_int_equal(run_and_end(&w, salt, 0, 5), 0);
        assert_int_equal(run_and_end(&w, salt, 0, 5), 4);
    }
    assert_true(w.prefix.cap_roots <= 32);
    uint32_t unknown = kvp__prefix_root_find(&w.prefix, "user x", 6, "key", 3);
    assert_int_equal(unknown, KVP__NONE);
    uint32_t known = kvp__prefix_root_find(&w.prefix, "user 999", 8, "key", 3);
    assert_true(known != KVP__NONE);
    assert_int_equal(kvp__prefix_root_find(&w.prefix, "user 999k", 9, "ey", 2), KVP__NONE);
    static const int32_t tokens[5] = {0, 1, 2, 3, 4};
    kvp__hit h = kvp__prefix_lookup(&w.prefix, unknown, tokens, 5);
    assert_int_equal(kvp__hit_tokens(&w.prefix, &h), 0);
    h = kvp__prefix_lookup(&w.prefix, known, tokens, 5);
    assert_int_equal(kvp__hit_tokens(&w.prefix, &h), 4);
    world_free(&w);
}

static void test_root_limits(void **state)
{
    (void)state;
    world w;
    world_make(&w, 4, 4, 1, 0);
    uint8_t salt[KVP__ROOT_BYTES + 1] = {0};
    uint32_t a = 77, b;
    assert_int_equal(kvp__prefix_root_intern(&w.prefix, salt, sizeof salt, NULL, 0, &a, NULL),
                     KVP_ERR_INVALID_ARG);
    assert_int_equal(kvp__prefix_root_intern(&w.prefix, NULL, 0, salt, sizeof salt, &a, NULL),
                     KVP_ERR_INVALID_ARG);
    assert_int_equal(a, 77);
    assert_int_equal(kvp__prefix_root_intern(&w.prefix, salt, 1, NULL, 0, &a, NULL), KVP_OK);
    assert_int_equal(kvp__prefix_root_intern(&w.prefix, NULL, 0, salt, 1, &b, NULL), KVP_OK);
    assert_int_not_equal(a, b);
    kvp__prefix_root_release(&w.prefix, a);
    kvp__prefix_root_release(&w.prefix, b);
    world_free(&w);
}

static void test_reset_says_what_is_in_the_way(void **state)
{
    (void)state;
    world w;
    world_make(&w, 8, 4, 2, 0);
    run_and_end(&w, NULL, 0, 8);
    kvp__seq *s = world_seq(&w, NULL);
    world_append(&w, s, 0, 9);
    assert_true(world_run(&w, s));
    kvp_error e = {.size = sizeof e};
    assert_int_equal(kvp__prefix_reset(&w.prefix, &e), KVP_ERR_BUSY);
    assert_int_equal(e.available, 3);
    assert_int_equal(world_cached(&w, s), 8);
    kvp__seq_release(s);
    assert_int_equal(kvp__prefix_reset(&w.prefix, &e), KVP_OK);
    assert_int_equal(w.pool.groups[0].n_free, 8);
    assert_int_equal(world_cached(&w, s), 0);
    world_free(&w);
}

/* The order of release does not matter: a child that becomes idle after its parent goes first. */
static void test_late_child_goes_first(void **state)
{
    (void)state;
    world w;
    world_make(&w, 8, 4, 1, 0);
    kvp__seq *s = world_seq(&w, NULL);
    world_append(&w, s, 0, 12);
    assert_true(world_run(&w, s));
    uint32_t ids[3];
    memcpy(ids, s->tables[0], sizeof ids);
    for (int i = 0; i < 3; i++) kvp__pool_retain(&w.pool, 0, ids[i]);
    kvp__seq_release(s);
    for (int i = 0; i < 3; i++) kvp__pool_release(&w.pool, 0, ids[i]);
    world_check(&w);
    for (int i = 2; i >= 0; i--) {
        assert_int_equal(kvp__policy_lru.victim(&w.prefix), ids[i]);
        kvp__prefix_shrink(&w.prefix, ids[i], 0);
        world_check(&w);
    }
    world_free(&w);
}

/* Use makes a prefix young again. */
static void test_least_recently_used_goes_first(void **state)
{
    (void)state;
    world w;
    world_make(&w, 3, 4, 1, 0);
    run_and_end(&w, NULL, 100, 4);
    run_and_end(&w, NULL, 200, 4);
    run_and_end(&w, NULL, 300, 4);
    kvp__seq *a = world_seq(&w, NULL);
    world_append(&w, a, 100, 5);
    world_attach(&w, a);
    assert_int_equal(a->computed, 4);
    world_end(&w, a);
    kvp__seq *other = world_seq(&w, NULL);
    world_append(&w, other, 900, 4);
    assert_true(world_run(&w, other));
    static const uint32_t left[3] = {4, 0, 4};
    for (int i = 0; i < 3; i++) {
        kvp__seq *s = world_seq(&w, NULL);
        world_append(&w, s, 100 * (i + 1), 5);
        assert_int_equal(world_cached(&w, s), left[i]);
    }
    world_free(&w);
}

/* Every allocation of init and intern refused in turn. */
static void test_no_memory_leaves_nothing(void **state)
{
    (void)state;
    bool ok = false;
    for (uint64_t n = 1; !ok; n++) {
        heap h;
        heap_init(&h);
        kvp__pool pool;
        kvp__prefix x;
        kvp__prefix_options o = {.key = {1, 2}};
        uint32_t root = 5;
        assert_int_equal(kvp__pool_init(&pool, &h.hooks, 2, 8, 4, NULL), KVP_OK);
        h.refuse = h.calls + n;
        kvp_status a = kvp__prefix_init(&x, &pool, &o, NULL);
        if (a == KVP_OK) {
            kvp_status b = kvp__prefix_root_intern(&x, "salt", 4, NULL, 0, &root, NULL);
            ok = b == KVP_OK;
            if (!ok) {
                assert_int_equal(b, KVP_ERR_NO_MEMORY);
                assert_int_equal(root, 5);
                assert_int_equal(
                    kvp__prefix_root_intern(&x, "salt", 4, NULL, 0, &root, NULL), KVP_OK);
            }
        } else {
            assert_int_equal(a, KVP_ERR_NO_MEMORY);
            assert_null(pool.evict);
        }
        kvp__prefix_fini(&x);
        kvp__pool_fini(&pool);
        assert_int_equal(h.live, 0);
        assert_int_equal(h.mismatches, 0);
        assert_true(n < 20);
    }
}

/* Each fault alone is seen. */
static void test_checker_sees_faults(void **state)
{
    (void)state;
    for (int fault = 0; fault < 10; fault++) {
        world w;
        kvp_error e = {.size = sizeof e};
        world_make(&w, 8, 4, 2, 0);
        run_and_end(&w, NULL, 0, 10);
        kvp__seq *s = world_seq(&w, NULL);
        world_append(&w, s, 100, 10);
        assert_true(world_run(&w, s));
        kvp__prefix *x = &w.prefix;
        uint32_t full = s->tables[0][1], idle = x->idle_head;
        kvp__prefix keep = *x;
        kvp__node keep_full = x->nodes[full], keep_idle = x->nodes[idle];
        int32_t *token = x->tokens + (size_t)full * 4 + 1, keep_token = *token;
        kvp__block *b = &w.pool.groups[1].blocks[kvp__prefix_block(x, full, 1)], keep_b = *b;
        switch (fault) {
        case 0: x->nodes[full].hash.lo++; break;
        case 1: x->nodes[full].children++; break;
        case 2: (*token)++; break;
        case 3: x->nodes[full].held = 1; break;
        case 4: x->nodes[full].n = 3; break;
        case 5: x->n_nodes++; break;
        case 6: b->node = KVP__NONE; break;
        case 7: x->idle_head = x->nodes[idle].idle_next; break;
        case 8: x->nodes[idle].child_prev = full; break;
        case 9: x->roots[s->root].refs++; break;
        }
        kvp__check_begin(&w.pool);
        kvp_status status = kvp__check_seq(s, &e);
        if (status == KVP_OK) status = kvp__check_end(&w.pool, x, &e);
        assert_int_equal(status, KVP_ERR_INTERNAL);
        assert_true(strlen(e.text) > 10);
        if (fault == 9) x->roots[s->root].refs--;
        *x = keep;
        x->nodes[full] = keep_full;
        x->nodes[idle] = keep_idle;
        *token = keep_token;
        *b = keep_b;
        world_free(&w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(case_b11),
        cmocka_unit_test(case_b13),
        cmocka_unit_test(case_b19),
        cmocka_unit_test(case_b28),
        cmocka_unit_test(case_b30),
        cmocka_unit_test(case_b32),
        cmocka_unit_test(case_b34),
        cmocka_unit_test(case_b39),
        cmocka_unit_test(test_longest_partial_match),
        cmocka_unit_test(test_something_is_always_computed),
        cmocka_unit_test(test_roots_are_reused_when_unused),
        cmocka_unit_test(test_root_limits),
        cmocka_unit_test(test_reset_says_what_is_in_the_way),
        cmocka_unit_test(test_late_child_goes_first),
        cmocka_unit_test(test_least_recently_used_goes_first),
        cmocka_unit_test(test_no_memory_leaves_nothing),
        cmocka_unit_test(test_checker_sees_faults),
    };
    return cmocka_run_group_tests_name("prefix", tests, NULL, NULL);
}
