/*
 * Cases of the field, through the public interface: forks and copy-on-write, identity of prefixes,
 * whole-prompt hits, eviction. The same rows are held on the pure rooms too (tests/unit); here the
 * bits of the logits are compared with the oracle.
 */
#include "world.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static kvp_model *model;

static int open_model(void **state)
{
    (void)state;
    model = world_model(NULL);
    return 0;
}

static int close_model(void **state)
{
    (void)state;
    kvp_model_destroy(model);
    world_forget();
    return 0;
}

/* Appends `n` own tokens, computes them and compares the last logits with the oracle. */
static void compute(kvp_batch *b, kvp_seq *s, size_t n, uint64_t salt)
{
    int32_t tokens[64];
    world_tokens(tokens, n, salt, 64);
    assert_int_equal(kvp_seq_append(s, tokens, n), KVP_OK);
    if (world_info(s).state == KVP_SEQ_PARKED) assert_int_equal(kvp_batch_add(b, s), KVP_OK);
    world_run(b, NULL);
    world_expect_oracle(model, s);
}

/* B05: a tree of forks, destroyed in every order; whoever is left keeps its logits. */
static void case_b05(void **state)
{
    (void)state;
    for (int order = 0; order < 24; order++) {
        kvp_pool *p = world_pool(model, 16, 8);
        kvp_batch *b = world_batch(p, NULL);
        kvp_seq *s[4];
        s[0] = world_seq(p, NULL, 0, 0, KVP_SAMPLE_HOST, 0);
        compute(b, s[0], 24, 1);
        assert_int_equal(kvp_seq_fork(s[0], 16, NULL, &s[1], NULL), KVP_OK);
        compute(b, s[1], 3, 2);
        assert_int_equal(kvp_seq_fork(s[1], KVP_FORK_END, NULL, &s[2], NULL), KVP_OK);
        compute(b, s[2], 3, 3);
        assert_int_equal(kvp_seq_fork(s[0], 8, NULL, &s[3], NULL), KVP_OK);
        compute(b, s[3], 3, 4);
        compute(b, s[0], 3, 5);
        int left[4] = {0, 1, 2, 3}, n = 4, code = order;
        for (; n; n--) {
            int pick = code % n, who = left[pick];
            code /= n;
            kvp_seq_destroy(s[who]);
            left[pick] = left[n - 1];
            world_account(p);
            for (int i = 0; i < n - 1; i++) world_expect_oracle(model, s[left[i]]);
        }
        assert_int_equal(kvp_pool_reset_prefix(p, NULL), KVP_OK);
        assert_int_equal(world_stats(p).free, 16);
        kvp_batch_destroy(b);
        kvp_pool_destroy(p);
    }
}

/* B08: beams that both descend from beam 0; each beam's logits are those of its own tokens. */
static void case_b08(void **state)
{
    (void)state;
    static const uint64_t used[5] = {3, 3, 4, 4, 4};
    kvp_pool *p = world_pool(model, 16, 4);
    kvp_batch *b = world_batch(p, NULL);
    kvp_seq *beam[2];
    beam[0] = world_seq(p, NULL, 0, 0, KVP_SAMPLE_HOST, 0);
    compute(b, beam[0], 6, 1);
    for (int step = 0; step < 5; step++) {
        if (step) kvp_seq_destroy(beam[1]);
        assert_int_equal(kvp_seq_fork(beam[0], KVP_FORK_END, NULL, &beam[1], NULL), KVP_OK);
        compute(b, beam[0], 1, 100 + (uint64_t)step);
        compute(b, beam[1], 1, 200 + (uint64_t)step);
        assert_int_equal(world_stats(p).used, used[step]);
        world_account(p);
    }
    assert_int_equal(world_stats(p).blocks_copied, 4);
    kvp_seq_destroy(beam[0]);
    kvp_seq_destroy(beam[1]);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
}

/* B09: two equal prompts in one step; neither may lose its blocks to the other's publishing. */
static void case_b09(void **state)
{
    (void)state;
    int32_t prompt[16], other[16], want[8];
    world_tokens(prompt, 16, 1, 64);
    world_tokens(other, 16, 2, 64);
    world_greedy(model, prompt, 16, want, 8);
    kvp_pool *p = world_pool(model, 20, 4);
    kvp_batch *b = world_batch(p, NULL);
    static world_out out[3];
    memset(out, 0, sizeof out);
    kvp_seq *s[3];
    for (uint64_t i = 0; i < 2; i++) {
        s[i] = world_seq(p, prompt, 16, i, KVP_SAMPLE_LIBRARY, 8);
        assert_int_equal(kvp_batch_add(b, s[i]), KVP_OK);
    }
    world_step(b, out);
    world_account(p);
    s[2] = world_seq(p, other, 16, 2, KVP_SAMPLE_LIBRARY, 8);
    assert_int_equal(kvp_batch_add(b, s[2]), KVP_OK);
    world_run(b, out);
    for (int i = 0; i < 2; i++) assert_memory_equal(out[i].ids, want, sizeof want);
    world_account(p);
    for (int i = 0; i < 3; i++) kvp_seq_destroy(s[i]);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
}

/* What a salted prompt finds, and that it is right; the sequence goes again. */
static uint64_t cached_with_salt(kvp_pool *p, kvp_batch *b, const char *salt,
                                 const int32_t *prompt, size_t n)
{
    static world_out out[1];
    memset(out, 0, sizeof out);
    kvp_seq_options o = {.size = sizeof o, .salt = salt, .salt_bytes = strlen(salt),
                         .max_tokens = 1, .eos = KVP_EOS_IGNORE};
    kvp_seq *s;
    assert_int_equal(kvp_seq_create(p, &o, &s, NULL), KVP_OK);
    assert_int_equal(kvp_seq_append(s, prompt, n), KVP_OK);
    assert_int_equal(kvp_batch_add(b, s), KVP_OK);
    world_run(b, out);
    assert_int_equal(out[0].endings, 1);
    kvp_seq_destroy(s);
    return out[0].usage.cached;
}

/* B19: salts keep tenants apart, and no salt is none of them. */
static void case_b19(void **state)
{
    (void)state;
    int32_t prompt[48];
    world_tokens(prompt, 48, 1, 64);
    kvp_pool *p = world_pool(model, 32, 16);
    kvp_batch *b = world_batch(p, NULL);
    assert_int_equal(cached_with_salt(p, b, "s1", prompt, 48), 0);
    assert_int_equal(cached_with_salt(p, b, "s2", prompt, 48), 0);
    assert_int_equal(cached_with_salt(p, b, "s1", prompt, 48), 47);
    assert_int_equal(cached_with_salt(p, b, "", prompt, 48), 0);
    assert_int_equal(cached_with_salt(p, b, "", prompt, 48), 47);
    uint64_t cached = 99;
    assert_int_equal(kvp_pool_lookup(p, "s2", 2, prompt, 48, &cached), KVP_OK);
    assert_int_equal(cached, 47);
    assert_int_equal(kvp_pool_lookup(p, "s3", 2, prompt, 48, &cached), KVP_OK);
    assert_int_equal(cached, 0);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
}

/* B21: a reset says BUSY while anybody holds KV, and really forgets when it says OK. */
static void case_b21(void **state)
{
    (void)state;
    int32_t prompt[40];
    world_tokens(prompt, 40, 1, 64);
    kvp_pool *p = world_pool(model, 16, 16);
    kvp_batch *b = world_batch(p, NULL);
    kvp_seq *s = world_seq(p, prompt, 40, 0, KVP_SAMPLE_HOST, 0);
    assert_int_equal(kvp_batch_add(b, s), KVP_OK);
    world_run(b, NULL);
    uint64_t held = 0, cached = 0;
    assert_int_equal(kvp_pool_reset_prefix(p, &held), KVP_ERR_BUSY);
    assert_int_equal(held, 1);
    assert_int_equal(kvp_pool_lookup(p, NULL, 0, prompt, 40, &cached), KVP_OK);
    assert_int_equal(cached, 39);
    kvp_seq_destroy(s);
    assert_int_equal(kvp_pool_reset_prefix(p, &held), KVP_OK);
    assert_int_equal(kvp_pool_lookup(p, NULL, 0, prompt, 40, &cached), KVP_OK);
    assert_int_equal(cached, 0);
    s = world_seq(p, prompt, 40, 0, KVP_SAMPLE_HOST, 0);
    assert_int_equal(kvp_batch_add(b, s), KVP_OK);
    world_run(b, NULL);
    world_expect_oracle(model, s);
    assert_int_equal(world_stats(p).tokens_cached, 0);
    kvp_seq_destroy(s);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
}

/* B23: a prompt that is cached whole still computes one token, and its logits are right. */
static void case_b23(void **state)
{
    (void)state;
    int32_t prompt[48];
    world_tokens(prompt, 48, 1, 64);
    kvp_pool *p = world_pool(model, 8, 16);
    kvp_batch *b = world_batch(p, NULL);
    static world_out out[3];
    memset(out, 0, sizeof out);
    static const size_t length[3] = {32, 32, 48};
    static const uint64_t cached[3] = {0, 31, 32};
    for (uint64_t i = 0; i < 3; i++) {
        kvp_seq *s = world_seq(p, prompt, length[i], i, KVP_SAMPLE_HOST, 0);
        assert_int_equal(kvp_batch_add(b, s), KVP_OK);
        world_run(b, out);
        world_expect_oracle(model, s);
        assert_int_equal(kvp_seq_cancel(s), KVP_OK);
        world_run(b, out);
        assert_int_equal(out[i].usage.cached, cached[i]);
        assert_int_equal(out[i].usage.computed, length[i] - cached[i]);
        kvp_seq_destroy(s);
        world_account(p);
    }
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
}

/* B28: blocks given to others take their old prefixes with them. */
static void case_b28(void **state)
{
    (void)state;
    int32_t x[5], y[8];
    world_tokens(x, 5, 1, 64);
    world_tokens(y, 8, 2, 64);
    kvp_pool *p = world_pool(model, 2, 4);
    kvp_batch *b = world_batch(p, NULL);
    const struct {
        const int32_t *tokens;
        size_t n;
    } runs[] = {{x, 5}, {y, 8}, {x, 5}};
    for (int i = 0; i < 3; i++) {
        kvp_seq *s = world_seq(p, runs[i].tokens, runs[i].n, 0, KVP_SAMPLE_HOST, 0);
        assert_int_equal(kvp_batch_add(b, s), KVP_OK);
        world_run(b, NULL);
        world_expect_oracle(model, s);
        kvp_seq_destroy(s);
        world_account(p);
    }
    assert_int_equal(world_stats(p).tokens_cached, 0);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
}

/* One system prompt, eight sequences added together: it is computed once. */
static void own_prompt_computed_once(void **state)
{
    (void)state;
    int32_t prompt[100];
    world_tokens(prompt, 100, 1, 64);
    kvp_pool *p = world_pool(model, 64, 16);
    kvp_batch *b = world_batch(p, NULL);
    kvp_seq *s[8];
    for (uint64_t i = 0; i < 8; i++) {
        s[i] = world_seq(p, prompt, 96, i, KVP_SAMPLE_HOST, 0);
        int32_t own[4];
        world_tokens(own, 4, 50 + i, 64);
        assert_int_equal(kvp_seq_append(s[i], own, 4), KVP_OK);
        assert_int_equal(kvp_batch_add(b, s[i]), KVP_OK);
    }
    world_run(b, NULL);
    for (int i = 0; i < 8; i++) world_expect_oracle(model, s[i]);
    kvp_pool_stats st = world_stats(p);
    assert_int_equal(st.tokens_computed, 100 + 7 * 4);
    assert_int_equal(st.used, 6 + 8);
    world_account(p);
    for (int i = 0; i < 8; i++) kvp_seq_destroy(s[i]);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
}

/* A fork has its parent's pending logits, without a row computed. */
static void own_fork_inherits_logits(void **state)
{
    (void)state;
    int32_t prompt[20];
    world_tokens(prompt, 20, 1, 64);
    kvp_pool *p = world_pool(model, 16, 16);
    kvp_batch *b = world_batch(p, NULL);
    kvp_seq *s = world_seq(p, prompt, 20, 0, KVP_SAMPLE_HOST, 0), *f;
    assert_int_equal(kvp_batch_add(b, s), KVP_OK);
    world_run(b, NULL);
    uint64_t used = world_stats(p).used;
    assert_int_equal(kvp_seq_fork(s, KVP_FORK_END, NULL, &f, NULL), KVP_OK);
    assert_int_equal(world_stats(p).used, used);
    world_expect_oracle(model, f);
    assert_int_equal(kvp_seq_append(f, prompt, 1), KVP_OK);
    const float *logits;
    assert_int_equal(kvp_seq_get_logits(f, &logits, NULL), KVP_ERR_STATE);
    world_expect_oracle(model, s);
    assert_int_equal(kvp_batch_add(b, f), KVP_OK);
    world_run(b, NULL);
    world_expect_oracle(model, f);
    assert_int_equal(world_stats(p).blocks_copied, 1);
    kvp_seq_destroy(s);
    kvp_seq_destroy(f);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(case_b05), cmocka_unit_test(case_b08), cmocka_unit_test(case_b09),
        cmocka_unit_test(case_b19), cmocka_unit_test(case_b21), cmocka_unit_test(case_b23),
        cmocka_unit_test(case_b28), cmocka_unit_test(own_prompt_computed_once),
        cmocka_unit_test(own_fork_inherits_logits),
    };
    return cmocka_run_group_tests_name("api/cases_sharing", tests, open_model, close_model);
}
