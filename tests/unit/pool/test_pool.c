/*
 * Blocks alone: states, order, fence, pins, and that the checker sees what is wrong.
 */
#include "pool/pool.h"
#include "support/heap.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static kvp__hooks hooks;

static void make(kvp__pool *p, uint32_t groups, uint32_t blocks)
{
    assert_int_equal(kvp__hooks_fill(&hooks, NULL, NULL), KVP_OK);
    assert_int_equal(kvp__pool_init(p, &hooks, groups, blocks, 16, NULL), KVP_OK);
}

/* Holders are blocks that the test took once each. */
static kvp_status check(kvp__pool *p, uint32_t g, const uint32_t *held, uint32_t n, kvp_error *e)
{
    kvp__pool_check_begin(p);
    for (uint32_t i = 0; i < n; i++) p->groups[g].blocks[held[i]].mark++;
    return kvp__pool_check_end(p, e);
}

static void test_options_out_of_range(void **state)
{
    (void)state;
    static const struct {
        uint32_t groups;
        uint64_t blocks;
        uint32_t tokens;
    } bad[] = {{0, 4, 16}, {17, 4, 16}, {1, 0, 16},  {1, 0x80000000u, 16}, {1, 1ull << 40, 16},
               {1, 4, 0},  {1, 4, 3},   {1, 4, 512}, {1, 4, 0x80000000u}};
    assert_int_equal(kvp__hooks_fill(&hooks, NULL, NULL), KVP_OK);
    for (size_t i = 0; i < KVP__COUNT(bad); i++) {
        kvp__pool p;
        kvp_error e = {.size = sizeof e};
        assert_int_equal(
            kvp__pool_init(&p, &hooks, bad[i].groups, bad[i].blocks, bad[i].tokens, &e),
            KVP_ERR_INVALID_ARG);
        assert_true(strlen(e.text) > 10);
        kvp__pool_fini(&p);
    }
}

static void test_no_memory_leaves_nothing(void **state)
{
    (void)state;
    for (uint64_t n = 1; n <= 3; n++) {
        heap h;
        heap_init(&h);
        h.refuse = n;
        kvp__pool p;
        assert_int_equal(kvp__pool_init(&p, &h.hooks, 3, 8, 16, NULL), KVP_ERR_NO_MEMORY);
        kvp__pool_fini(&p);
        assert_int_equal(h.live, 0);
        assert_int_equal(h.mismatches, 0);
    }
}

static void test_take_all_and_return(void **state)
{
    (void)state;
    kvp__pool p;
    uint32_t ids[5];
    make(&p, 2, 5);
    for (uint32_t i = 0; i < 5; i++) {
        ids[i] = kvp__pool_take(&p, 1);
        assert_true(ids[i] < 5);
        for (uint32_t j = 0; j < i; j++) assert_true(ids[i] != ids[j]);
        assert_int_equal(check(&p, 1, ids, i + 1, NULL), KVP_OK);
    }
    assert_int_equal(kvp__pool_used(&p, 1), 5);
    assert_int_equal(kvp__pool_available(&p), 0);
    assert_int_equal(kvp__pool_take(&p, 1), KVP__NONE);
    assert_int_equal(kvp__pool_used(&p, 0), 0);

    /* What was given back last is taken first: it is warm in the cache. */
    kvp__pool_release(&p, 1, ids[3]);
    kvp__pool_release(&p, 1, ids[1]);
    assert_int_equal(kvp__pool_available(&p), 2);
    assert_int_equal(kvp__pool_take(&p, 1), ids[1]);
    assert_int_equal(kvp__pool_take(&p, 1), ids[3]);
    for (uint32_t i = 0; i < 5; i++) kvp__pool_release(&p, 1, ids[i]);
    assert_int_equal(check(&p, 1, NULL, 0, NULL), KVP_OK);
    assert_int_equal(p.groups[1].n_free, 5);
    kvp__pool_fini(&p);
}

static void test_fence_keeps_blocks(void **state)
{
    (void)state;
    kvp__pool p;
    make(&p, 1, 4);
    uint32_t a = kvp__pool_take(&p, 0), b = kvp__pool_take(&p, 0);
    kvp__pool_fence_raise(&p);
    kvp__pool_release(&p, 0, a);
    kvp__pool_release(&p, 0, b);
    assert_int_equal(kvp__pool_used(&p, 0), 2);
    assert_int_equal(p.groups[0].blocks[a].state, KVP__BLOCK_LIMBO);
    assert_int_equal(check(&p, 0, NULL, 0, NULL), KVP_OK);

    /* Somebody takes one of them up again while the step runs. */
    kvp__pool_retain(&p, 0, a);
    assert_int_equal(check(&p, 0, &a, 1, NULL), KVP_OK);
    kvp__pool_fence_drop(&p);
    assert_int_equal(kvp__pool_used(&p, 0), 1);
    assert_int_equal(p.groups[0].blocks[b].state, KVP__BLOCK_FREE);
    kvp__pool_release(&p, 0, a);
    assert_int_equal(check(&p, 0, NULL, 0, NULL), KVP_OK);
    kvp__pool_fence_drop(&p);
    assert_int_equal(p.groups[0].n_free, 4);
    kvp__pool_fini(&p);
}

/* The list stays whole when a block leaves it from the middle. */
static void test_limbo_is_left_from_the_middle(void **state)
{
    (void)state;
    kvp__pool p;
    uint32_t ids[3];
    make(&p, 1, 4);
    for (int i = 0; i < 3; i++) ids[i] = kvp__pool_take(&p, 0);
    kvp__pool_fence_raise(&p);
    for (int i = 0; i < 3; i++) kvp__pool_release(&p, 0, ids[i]);
    kvp__pool_retain(&p, 0, ids[1]);
    assert_int_equal(check(&p, 0, &ids[1], 1, NULL), KVP_OK);
    kvp__pool_fence_drop(&p);
    assert_int_equal(check(&p, 0, &ids[1], 1, NULL), KVP_OK);
    assert_int_equal(p.groups[0].n_free, 3);
    kvp__pool_fini(&p);
}

static void test_pins_are_counted_once_per_block(void **state)
{
    (void)state;
    kvp__pool p;
    make(&p, 1, 4);
    uint32_t a = kvp__pool_take(&p, 0);
    kvp__pool_retain(&p, 0, a);
    kvp__pool_pin(&p, a);
    kvp__pool_pin(&p, a);
    assert_int_equal(p.n_pinned, 1);
    kvp__pool_unpin(&p, a);
    assert_int_equal(p.n_pinned, 1);
    kvp__pool_unpin(&p, a);
    assert_int_equal(p.n_pinned, 0);
    kvp__pool_fini(&p);
}

/* Each fault alone is INTERNAL with a text that names the block. */
static void test_checker_sees_faults(void **state)
{
    (void)state;
    for (int fault = 0; fault < 9; fault++) {
        kvp__pool p;
        kvp_error e = {.size = sizeof e};
        make(&p, 1, 6);
        uint32_t held[2] = {kvp__pool_take(&p, 0), kvp__pool_take(&p, 0)}, n = 2;
        kvp__pool_group *gr = &p.groups[0];
        kvp__block *in_use = &gr->blocks[held[0]], *unused = &gr->blocks[gr->free.head];
        switch (fault) {
        case 0: in_use->ref++; break;
        case 1: n = 1; break;
        case 2: in_use->state = KVP__BLOCK_FREE; break;
        case 3: unused->node = 3; break;
        case 4: gr->n_free--; break;
        case 5: gr->n_idle++; break;
        case 6: in_use->pins = 1; break;
        case 7: in_use->holds = 1; break;
        case 8: gr->blocks[unused->next].prev = held[0]; break;
        }
        assert_int_equal(check(&p, 0, held, n, &e), KVP_ERR_INTERNAL);
        assert_non_null(strstr(e.text, "group 0"));
        kvp__pool_fini(&p);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_options_out_of_range),
        cmocka_unit_test(test_no_memory_leaves_nothing),
        cmocka_unit_test(test_take_all_and_return),
        cmocka_unit_test(test_fence_keeps_blocks),
        cmocka_unit_test(test_limbo_is_left_from_the_middle),
        cmocka_unit_test(test_pins_are_counted_once_per_block),
        cmocka_unit_test(test_checker_sees_faults),
    };
    return cmocka_run_group_tests_name("pool", tests, NULL, NULL);
}
