/*
 * Cases of the field, through the public interface: scheduling, preemption, chunked prefill, positions
 * and rollback.
 */
#include "world.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static kvp_model *model;
static world_out out[160];

static int open_model(void **state)
{
    (void)state;
    model = world_model(&(gw_model){.context = 8192});
    return 0;
}

static int close_model(void **state)
{
    (void)state;
    kvp_model_destroy(model);
    world_forget();
    return 0;
}

static int clear(void **state)
{
    (void)state;
    memset(out, 0, sizeof out);
    return 0;
}

/* B42, B44: what can never fit is refused when it is added, with the numbers, and holds up nobody. */
static void never_fits(uint64_t blocks, size_t prompt)
{
    int32_t tokens[128];
    world_tokens(tokens, prompt, 1, 64);
    kvp_pool *p = world_pool(model, blocks, 16);
    kvp_batch *b = world_batch(p, NULL);
    kvp_seq *big = world_seq(p, tokens, prompt, 0, KVP_SAMPLE_LIBRARY, 4);
    kvp_seq *small = world_seq(p, tokens, 10, 1, KVP_SAMPLE_LIBRARY, 4);
    assert_int_equal(kvp_batch_add(b, big), KVP_ERR_TOO_LARGE);
    kvp_error e = {.size = sizeof e};
    kvp_batch_last_error(b, &e);
    assert_int_equal(e.status, KVP_ERR_TOO_LARGE);
    assert_int_equal(e.needed, (prompt + 15) / 16);
    assert_int_equal(e.available, blocks);
    assert_int_equal(world_info(big).length, prompt);
    assert_int_equal(kvp_batch_add(b, small), KVP_OK);
    world_run(b, out);
    assert_int_equal(out[0].endings, 0);
    assert_int_equal(out[1].endings, 1);
    assert_int_equal(out[1].tokens, 4);
    kvp_seq_destroy(big);
    kvp_seq_destroy(small);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
}

static void case_b42(void **state)
{
    (void)state;
    never_fits(4, 100);
}

static void case_b44(void **state)
{
    (void)state;
    never_fits(2, 40);
}

/* B48, B50: two sequences that outgrow the pool; both get all their tokens, once each. */
static void case_b48_b50(void **state)
{
    (void)state;
    int32_t prompt[2][8], want[2][12];
    kvp_pool *p = world_pool(model, 6, 4);
    kvp_batch *b = world_batch(p, NULL);
    kvp_seq *s[2];
    for (uint64_t i = 0; i < 2; i++) {
        world_tokens(prompt[i], 8, 10 + i, 64);
        world_greedy(model, prompt[i], 8, want[i], 12);
        s[i] = world_seq(p, prompt[i], 8, i, KVP_SAMPLE_LIBRARY, 12);
        assert_int_equal(kvp_batch_add(b, s[i]), KVP_OK);
    }
    kvp_status st = KVP_OK;
    for (int i = 0; i < 400 && st != KVP_DONE; i++) {
        st = world_step(b, out);
        world_account(p);
        for (int k = 0; k < 2; k++) {
            kvp_seq_info info = world_info(s[k]);
            assert_true(info.computed <= info.length);
            assert_int_equal(info.blocks, (info.computed + 3) / 4);
        }
    }
    assert_int_equal(st, KVP_DONE);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(out[i].tokens, 12);
        assert_memory_equal(out[i].ids, want[i], sizeof want[i]);
    }
    assert_true(world_stats(p).preemptions >= 1);
    /* B26: what a preemption finds again is not a hit of a user's. */
    assert_int_equal(world_stats(p).tokens_cached, 0);
    for (int i = 0; i < 2; i++) kvp_seq_destroy(s[i]);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
}

/* B52: after a loss of blocks everything known is computed again, in chunks, and only the last row
 * gives a token. */
static void case_b52(void **state)
{
    (void)state;
    int32_t prompt[8], want[10];
    world_tokens(prompt, 8, 3, 64);
    world_greedy(model, prompt, 8, want, 10);
    kvp_pool *p = world_pool(model, 16, 4);
    kvp_batch *b = world_batch(p, &(kvp_batch_options){.size = sizeof(kvp_batch_options),
                                                       .chunk_tokens = 4});
    kvp_seq *s = world_seq(p, prompt, 8, 0, KVP_SAMPLE_LIBRARY, 5);
    assert_int_equal(kvp_batch_add(b, s), KVP_OK);
    world_run(b, out);
    assert_int_equal(out[0].tokens, 5);
    /* Somebody who needs the whole pool takes the blocks of the parked one, and its cache. */
    int32_t other[64];
    world_tokens(other, 64, 4, 64);
    kvp_seq *t = world_seq(p, other, 64, 1, KVP_SAMPLE_HOST, 0);
    assert_int_equal(kvp_batch_add(b, t), KVP_OK);
    world_run(b, out);
    kvp_seq_destroy(t);
    assert_int_equal(world_info(s).computed, 0);
    assert_int_equal(kvp_pool_reset_prefix(p, NULL), KVP_OK);
    uint64_t rows = world_stats(p).tokens_computed;
    assert_int_equal(kvp_batch_add(b, s), KVP_OK);
    int steps = 0;
    while (out[0].tokens < 6 && steps < 100) {
        world_step(b, out);
        steps++;
    }
    assert_int_equal(steps, 4); /* 13 tokens by four */
    assert_int_equal(world_stats(p).tokens_computed - rows, 13);
    world_run(b, out);
    assert_memory_equal(out[0].ids, want, sizeof want);
    kvp_seq_destroy(s);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
}

/* B56: a long prompt comes in while another sequence generates, which goes on meanwhile. */
static uint32_t tokens_during_prefill(uint32_t share)
{
    memset(out, 0, sizeof out);
    int32_t prompt[16], *longer = malloc(4096 * sizeof *longer);
    assert_non_null(longer);
    world_tokens(prompt, 16, 1, 64);
    world_tokens(longer, 4096, 2, 64);
    kvp_pool *p = world_pool(model, 300, 16);
    kvp_batch *b = world_batch(p, &(kvp_batch_options){.size = sizeof(kvp_batch_options),
                                                       .token_budget = 257, .chunk_tokens = 256,
                                                       .prefill_share = share});
    kvp_seq *a = world_seq(p, prompt, 16, 0, KVP_SAMPLE_LIBRARY, 200);
    assert_int_equal(kvp_batch_add(b, a), KVP_OK);
    world_until(b, out, 0, 1);
    kvp_seq *c = world_seq(p, longer, 4096, 1, KVP_SAMPLE_LIBRARY, 1);
    assert_int_equal(kvp_batch_add(b, c), KVP_OK);
    uint32_t before = out[0].tokens;
    while (!out[1].endings) world_step(b, out);
    uint32_t during = out[0].tokens - before;
    kvp_seq_destroy(a);
    kvp_seq_destroy(c);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
    free(longer);
    return during;
}

static void case_b56(void **state)
{
    (void)state;
    assert_true(tokens_during_prefill(0) >= 8);
    assert_true(tokens_during_prefill(KVP_PREFILL_SHARE_NONE) >= 16);
}

/* B58: sequences cancelled in every state; nothing is left behind, and nobody is told twice. */
static void case_b58(void **state)
{
    (void)state;
    uint64_t rng = 7;
    kvp_pool *p = world_pool(model, 40, 16);
    kvp_batch *b = world_batch(p, NULL);
    kvp_seq *s[120];
    int32_t tokens[200];
    for (uint64_t i = 0; i < 120; i++) {
        size_t n = 20 + gw_rand(&rng) % 180;
        world_tokens(tokens, n, 1000 + i, 64);
        s[i] = world_seq(p, tokens, n, i, KVP_SAMPLE_LIBRARY, 1 + gw_rand(&rng) % 20);
        assert_int_equal(kvp_batch_add(b, s[i]), KVP_OK);
    }
    for (int i = 0; i < 20000; i++) {
        kvp_status st = world_step(b, out);
        assert_true(st >= 0);
        if (st == KVP_DONE) break;
        if (gw_rand(&rng) % 4 == 0) {
            uint64_t k = gw_rand(&rng) % 120;
            if (k % 5 == 0 && s[k]) {
                if (gw_rand(&rng) % 2) {
                    assert_int_equal(kvp_seq_cancel(s[k]), KVP_OK);
                } else {
                    kvp_seq_destroy(s[k]);
                    s[k] = NULL;
                }
            }
        }
        if (i % 16 == 0) world_account(p);
    }
    for (int i = 0; i < 120; i++) {
        assert_true(out[i].endings <= 1);
        if (s[i]) assert_int_equal(out[i].endings, 1);
        kvp_seq_destroy(s[i]);
    }
    assert_int_equal(kvp_pool_reset_prefix(p, NULL), KVP_OK);
    assert_int_equal(world_stats(p).free, 40);
    assert_int_equal(world_stats(p).sequences, 0);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
}

/* B59: what is computed is published step by step, and nothing before it is. */
static void case_b59(void **state)
{
    (void)state;
    static const uint64_t found[3] = {6, 12, 18};
    int32_t prompt[25];
    world_tokens(prompt, 25, 1, 64);
    kvp_pool *p = world_pool(model, 16, 8);
    kvp_batch *b = world_batch(p, &(kvp_batch_options){.size = sizeof(kvp_batch_options),
                                                       .chunk_tokens = 6});
    kvp_seq *a = world_seq(p, prompt, 24, 0, KVP_SAMPLE_HOST, 0);
    uint64_t cached = 99;
    assert_int_equal(kvp_batch_add(b, a), KVP_OK);
    assert_int_equal(kvp_pool_lookup(p, NULL, 0, prompt, 25, &cached), KVP_OK);
    assert_int_equal(cached, 0);
    for (int i = 0; i < 3; i++) {
        world_step(b, out);
        assert_int_equal(kvp_pool_lookup(p, NULL, 0, prompt, 25, &cached), KVP_OK);
        assert_int_equal(cached, found[i]);
    }
    kvp_seq_destroy(a);
    /* cancelled before its first step: nothing */
    assert_int_equal(kvp_pool_reset_prefix(p, NULL), KVP_OK);
    a = world_seq(p, prompt, 24, 0, KVP_SAMPLE_HOST, 0);
    assert_int_equal(kvp_batch_add(b, a), KVP_OK);
    assert_int_equal(kvp_seq_cancel(a), KVP_OK);
    world_step(b, out);
    assert_int_equal(kvp_pool_lookup(p, NULL, 0, prompt, 25, &cached), KVP_OK);
    assert_int_equal(cached, 0);
    kvp_seq_destroy(a);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
}

/* B61: a prompt that goes on from cached KV has the bits of one computed whole, whatever the offset. */
static void case_b61(void **state)
{
    (void)state;
    int32_t prompt[32];
    world_tokens(prompt, 32, 1, 64);
    static const size_t offsets[] = {16, 1, 5, 15, 31};
    for (size_t i = 0; i < sizeof offsets / sizeof *offsets; i++) {
        kvp_pool *p = world_pool(model, 16, 16);
        kvp_batch *b = world_batch(p, NULL);
        kvp_seq *s = world_seq(p, prompt, offsets[i], 0, KVP_SAMPLE_HOST, 0), *f;
        assert_int_equal(kvp_batch_add(b, s), KVP_OK);
        world_run(b, NULL);
        assert_int_equal(kvp_seq_fork(s, KVP_FORK_END, NULL, &f, NULL), KVP_OK);
        assert_int_equal(kvp_batch_add(b, f), KVP_OK);
        world_run(b, NULL);
        for (size_t n = offsets[i]; n < 32; n++) {
            assert_int_equal(kvp_seq_append(f, prompt + n, 1), KVP_OK);
            world_run(b, NULL);
            world_expect_oracle(model, f);
        }
        assert_int_equal(kvp_seq_append(s, prompt + offsets[i], 32 - offsets[i]), KVP_OK);
        world_run(b, NULL);
        world_expect_oracle(model, s);
        kvp_seq_destroy(s);
        kvp_seq_destroy(f);
        kvp_batch_destroy(b);
        kvp_pool_destroy(p);
    }
}

/* B81: the last sampled token, which nobody has fed yet, counts in the next turn. */
static void case_b81(void **state)
{
    (void)state;
    int32_t prompt[6], more[5], all[14];
    world_tokens(prompt, 6, 1, 64);
    world_tokens(more, 5, 2, 64);
    kvp_pool *p = world_pool(model, 8, 16);
    kvp_batch *b = world_batch(p, NULL);
    kvp_seq *s = world_seq(p, prompt, 6, 0, KVP_SAMPLE_LIBRARY, 3);
    assert_int_equal(kvp_batch_add(b, s), KVP_OK);
    world_run(b, out);
    assert_int_equal(out[0].ending, KVP_END_LENGTH);
    assert_int_equal(world_info(s).length, 9);
    assert_int_equal(world_info(s).computed, 8);
    assert_int_equal(kvp_seq_append(s, more, 5), KVP_OK);
    kvp_sampling host = {.size = sizeof host, .mode = KVP_SAMPLE_HOST};
    assert_int_equal(kvp_seq_set_sampling(s, &host), KVP_OK);
    assert_int_equal(kvp_seq_set_max_tokens(s, 0), KVP_OK);
    assert_int_equal(kvp_batch_add(b, s), KVP_OK);
    world_run(b, out);
    assert_int_equal(world_info(s).computed, 14);
    size_t n;
    assert_int_equal(kvp_seq_get_tokens(s, 0, all, 14, &n), KVP_OK);
    assert_int_equal(all[8], out[0].ids[2]);
    world_expect_oracle(model, s);
    kvp_seq_destroy(s);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
}

/* Truncate to any length and write on: the logits are those of the new tokens, for every length and
 * while others share what is cut. */
static void own_truncate(void **state)
{
    (void)state;
    int32_t prompt[40], other[40];
    world_tokens(prompt, 40, 1, 64);
    world_tokens(other, 40, 2, 64);
    for (size_t cut = 0; cut < 40; cut += 3) {
        kvp_pool *p = world_pool(model, 24, 8);
        kvp_batch *b = world_batch(p, NULL);
        kvp_seq *s = world_seq(p, prompt, 40, 0, KVP_SAMPLE_HOST, 0), *f;
        assert_int_equal(kvp_batch_add(b, s), KVP_OK);
        world_run(b, NULL);
        assert_int_equal(kvp_seq_fork(s, KVP_FORK_END, NULL, &f, NULL), KVP_OK);
        assert_int_equal(kvp_seq_truncate(s, cut), KVP_OK);
        world_account(p);
        const float *logits;
        assert_int_equal(kvp_seq_get_logits(s, &logits, NULL), KVP_ERR_STATE);
        assert_int_equal(kvp_seq_append(s, other, 40 - cut), KVP_OK);
        world_run(b, NULL);
        world_expect_oracle(model, s);
        world_expect_oracle(model, f);
        world_account(p);
        kvp_seq_destroy(s);
        kvp_seq_destroy(f);
        kvp_batch_destroy(b);
        kvp_pool_destroy(p);
    }
}

/* Who chooses the token is what it was when the step was launched; no stale row is ever shown. */
static void own_mode_changes_in_flight(void **state)
{
    (void)state;
    int32_t prompt[8];
    world_tokens(prompt, 8, 1, 64);
    kvp_pool *p = world_pool(model, 16, 8);
    kvp_batch *b = world_batch(p, &(kvp_batch_options){.size = sizeof(kvp_batch_options),
                                                       .inline_budget_ns = 1});
    kvp_seq *s = world_seq(p, prompt, 8, 0, KVP_SAMPLE_LIBRARY, 0);
    assert_int_equal(kvp_batch_add(b, s), KVP_OK);
    assert_int_equal(kvp_step(b), KVP_OK);
    kvp_sampling host = {.size = sizeof host, .mode = KVP_SAMPLE_HOST};
    assert_int_equal(kvp_seq_set_sampling(s, &host), KVP_OK);
    world_run(b, out);
    assert_int_equal(out[0].tokens, 1);
    assert_int_equal(out[0].logits, 1);
    world_expect_oracle(model, s);
    kvp_seq_destroy(s);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
}

/* A fork keeps the parent's stop tokens when it brings only stop strings, and the other way round. */
static void own_fork_keeps_endings(void **state)
{
    (void)state;
    int32_t prompt[8], want[6];
    world_tokens(prompt, 8, 1, 64);
    world_greedy(model, prompt, 8, want, 6);
    kvp_pool *p = world_pool(model, 16, 8);
    kvp_batch *b = world_batch(p, NULL);
    kvp_seq_options o = {.size = sizeof o, .stop_tokens = &want[3], .n_stop_tokens = 1,
                         .max_tokens = 6, .eos = KVP_EOS_IGNORE};
    kvp_string never = {"\x01never", 6};
    kvp_seq_options of = {.size = sizeof of, .stop_strings = &never, .n_stop_strings = 1};
    kvp_seq *s, *f;
    uint32_t first = 0;
    while (want[first] != want[3]) first++;
    assert_int_equal(kvp_seq_create(p, &o, &s, NULL), KVP_OK);
    assert_int_equal(kvp_seq_append(s, prompt, 8), KVP_OK);
    assert_int_equal(kvp_seq_fork(s, KVP_FORK_END, &of, &f, NULL), KVP_OK);
    assert_int_equal(kvp_batch_add(b, f), KVP_OK);
    world_run(b, out);
    assert_int_equal(out[0].ending, KVP_END_STOP);
    assert_int_equal(out[0].tokens, first);
    kvp_seq_destroy(s);
    kvp_seq_destroy(f);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
}

/* Usage adds up: what was there, found and computed is the prompt, for a first add, a second one and
 * a fork. */
static void own_usage_adds_up(void **state)
{
    (void)state;
    int32_t prompt[40];
    world_tokens(prompt, 40, 1, 64);
    kvp_pool *p = world_pool(model, 24, 8);
    kvp_batch *b = world_batch(p, NULL);
    kvp_seq *s = world_seq(p, prompt, 30, 0, KVP_SAMPLE_LIBRARY, KVP_MAX_TOKENS_NONE), *f;
    assert_int_equal(kvp_batch_add(b, s), KVP_OK);
    world_run(b, out);
    assert_int_equal(out[0].usage.computed, 30);
    assert_int_equal(kvp_seq_append(s, prompt + 30, 10), KVP_OK);
    assert_int_equal(kvp_batch_add(b, s), KVP_OK);
    world_run(b, out);
    assert_int_equal(out[0].usage.prompt, 40);
    assert_int_equal(out[0].usage.reattached, 30);
    assert_int_equal(out[0].usage.computed, 10);
    assert_int_equal(kvp_seq_fork(s, 21, &(kvp_seq_options){.size = sizeof(kvp_seq_options), .tag = 1},
                                  &f, NULL), KVP_OK);
    assert_int_equal(kvp_seq_append(f, prompt, 5), KVP_OK);
    assert_int_equal(kvp_batch_add(b, f), KVP_OK);
    world_run(b, out);
    assert_int_equal(out[1].usage.prompt, 26);
    assert_int_equal(out[1].usage.reattached, 21);
    assert_int_equal(out[1].usage.cached, 0);
    assert_int_equal(out[1].usage.computed, 5);
    assert_int_equal(out[1].usage.copied, 5);
    kvp_seq_destroy(s);
    kvp_seq_destroy(f);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
}

/* A pinned prefix is kept while everything else is asked for; what cannot go on says STALLED. */
static void own_pin_stalls(void **state)
{
    (void)state;
    int32_t prompt[48];
    world_tokens(prompt, 48, 1, 64);
    kvp_pool *p = world_pool(model, 4, 16);
    kvp_batch *b = world_batch(p, NULL);
    kvp_seq *s = world_seq(p, prompt, 32, 0, KVP_SAMPLE_LIBRARY, KVP_MAX_TOKENS_NONE);
    assert_int_equal(kvp_batch_add(b, s), KVP_OK);
    world_run(b, out);
    assert_int_equal(out[0].ending, KVP_END_LENGTH);
    assert_int_equal(kvp_seq_pin(s, 32), KVP_OK);
    assert_int_equal(world_stats(p).pinned, 2);
    int32_t other[48];
    world_tokens(other, 48, 2, 64);
    kvp_seq *t = world_seq(p, other, 48, 1, KVP_SAMPLE_HOST, 0);
    assert_int_equal(kvp_batch_add(b, t), KVP_OK);
    assert_int_equal(world_run(b, out), KVP_STALLED);
    assert_int_equal(world_info(s).computed, 32);
    assert_int_equal(kvp_seq_pin(s, 0), KVP_OK);
    assert_int_equal(world_run(b, out), KVP_DONE);
    world_expect_oracle(model, t);
    assert_int_equal(world_info(s).computed, 0);
    kvp_seq_destroy(s);
    kvp_seq_destroy(t);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
}

/* B117: a cancel inside a long prefill ends it within a chunk; adding it again goes on from there. */
static void case_b117(void **state)
{
    (void)state;
    int32_t *prompt = malloc(4096 * sizeof *prompt);
    assert_non_null(prompt);
    world_tokens(prompt, 4096, 1, 64);
    kvp_pool *p = world_pool(model, 300, 16);
    kvp_batch *b = world_batch(p, &(kvp_batch_options){.size = sizeof(kvp_batch_options),
                                                       .chunk_tokens = 256, .threads = 1});
    kvp_seq *s = world_seq(p, prompt, 4096, 0, KVP_SAMPLE_HOST, 0);
    assert_int_equal(kvp_batch_add(b, s), KVP_OK);
    while (world_info(s).computed < 512) {
        world_step(b, out);
        assert_int_equal(kvp_wait(b, 10), KVP_OK);
    }
    assert_int_equal(kvp_seq_cancel(s), KVP_OK); /* the third chunk is running */
    world_step(b, out);
    assert_int_equal(out[0].endings, 1);
    assert_int_equal(out[0].ending, KVP_END_CANCELLED);
    while (world_step(b, out) != KVP_DONE) kvp_wait(b, 1000);
    uint64_t computed = world_info(s).computed;
    assert_int_equal(computed % 256, 0);
    assert_true(computed >= 512 && computed <= 768);
    assert_int_equal(kvp_batch_add(b, s), KVP_OK);
    world_run(b, out);
    world_expect_oracle(model, s);
    assert_int_equal(world_stats(p).tokens_computed, 4096);
    assert_int_equal(out[0].endings, 1);
    kvp_seq_destroy(s);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
    free(prompt);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(case_b42, clear), cmocka_unit_test_setup(case_b44, clear),
        cmocka_unit_test_setup(case_b48_b50, clear), cmocka_unit_test_setup(case_b52, clear),
        cmocka_unit_test_setup(case_b56, clear), cmocka_unit_test_setup(case_b58, clear),
        cmocka_unit_test_setup(case_b59, clear), cmocka_unit_test_setup(case_b61, clear),
        cmocka_unit_test_setup(case_b81, clear), cmocka_unit_test_setup(case_b117, clear),
        cmocka_unit_test_setup(own_truncate, clear),
        cmocka_unit_test_setup(own_usage_adds_up, clear),
        cmocka_unit_test_setup(own_mode_changes_in_flight, clear),
        cmocka_unit_test_setup(own_fork_keeps_endings, clear),
        cmocka_unit_test_setup(own_pin_stalls, clear),
    };
    return cmocka_run_group_tests_name("api/cases_stepping", tests, open_model, close_model);
}
