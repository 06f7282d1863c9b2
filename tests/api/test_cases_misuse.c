/*
 * Wrong use of the public interface: a status, one line that names the thing, nothing changed. Rows of
 * the field (B86, B88, B90, B109, B111), and our own of the same kind.
 */
#define _GNU_SOURCE
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

static void expect_error(kvp_pool *p, kvp_status status, const char *word)
{
    kvp_error e = {.size = sizeof e};
    kvp_pool_last_error(p, &e);
    assert_int_equal(e.status, status);
    if (!strstr(e.text, word)) fail_msg("\"%s\" does not say \"%s\"", e.text, word);
}

/* B86: token ids outside the vocabulary, with the index of the first. */
static void case_b86(void **state)
{
    (void)state;
    kvp_pool *p = world_pool(model, 8, 16);
    kvp_seq *s = world_seq(p, NULL, 0, 0, KVP_SAMPLE_HOST, 0);
    const int32_t bad[] = {-1, 64, 65, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < 5; i++) {
        int32_t tokens[3] = {0, 63, bad[i]};
        assert_int_equal(kvp_seq_append(s, tokens, 3), KVP_ERR_INVALID_TOKEN);
        expect_error(p, KVP_ERR_INVALID_TOKEN, "index 2");
        assert_int_equal(world_info(s).length, 0);
    }
    const int32_t good[] = {0, 63};
    assert_int_equal(kvp_seq_append(s, good, 2), KVP_OK);
    assert_int_equal(world_info(s).length, 2);
    kvp_seq_destroy(s);
    kvp_pool_destroy(p);
}

/* B88: the same sequence twice. */
static void case_b88(void **state)
{
    (void)state;
    int32_t tokens[3] = {1, 2, 3};
    kvp_pool *p = world_pool(model, 8, 16);
    kvp_batch *b = world_batch(p, NULL);
    kvp_seq *s = world_seq(p, tokens, 3, 0, KVP_SAMPLE_HOST, 0);
    assert_int_equal(kvp_batch_add(b, s), KVP_OK);
    assert_int_equal(kvp_batch_add(b, s), KVP_ERR_DUPLICATE);
    world_run(b, NULL);
    world_expect_oracle(model, s);
    kvp_seq_destroy(s);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
}

/* B90: the smallest lengths, and impossible ones. */
static void case_b90(void **state)
{
    (void)state;
    static world_out out[1];
    memset(out, 0, sizeof out);
    kvp_pool_options po = {.size = sizeof po, .blocks = 1, .block_tokens = 3};
    kvp_pool *p = NULL;
    kvp_error e = {.size = sizeof e};
    assert_int_equal(kvp_pool_create(model, &po, &p, &e), KVP_ERR_INVALID_ARG);
    assert_non_null(strstr(e.text, "block_tokens"));
    assert_null(p);
    po.block_tokens = 1;
    assert_int_equal(kvp_pool_create(model, &po, &p, &e), KVP_OK);
    kvp_batch *b = world_batch(p, NULL);
    int32_t one = 5;
    kvp_seq_options so = {.size = sizeof so, .context = 257};
    kvp_seq *s = NULL;
    assert_int_equal(kvp_seq_create(p, &so, &s, &e), KVP_ERR_INVALID_ARG);
    assert_non_null(strstr(e.text, "context"));
    s = world_seq(p, &one, 1, 0, KVP_SAMPLE_LIBRARY, 0);
    assert_int_equal(kvp_batch_add(b, s), KVP_OK);
    world_run(b, out);
    assert_int_equal(out[0].tokens, 1);
    assert_int_equal(out[0].ending, KVP_END_CAPACITY);
    assert_int_equal(world_info(s).length, 2);
    kvp_seq_destroy(s);
    so.context = 1;
    so.sampling = &(kvp_sampling){.size = sizeof(kvp_sampling), .mode = KVP_SAMPLE_HOST};
    assert_int_equal(kvp_seq_create(p, &so, &s, &e), KVP_OK);
    assert_int_equal(kvp_seq_append(s, &one, 1), KVP_OK);
    assert_int_equal(kvp_batch_add(b, s), KVP_OK);
    world_run(b, out);
    world_expect_oracle(model, s);
    assert_int_equal(kvp_seq_append(s, &one, 1), KVP_ERR_CAPACITY);
    world_expect_oracle(model, s);
    kvp_seq_destroy(s);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
}

/* B109: any group of query heads runs, or is refused when the pool is made. */
static void case_b109(void **state)
{
    (void)state;
    static const uint32_t groups[] = {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64, 71};
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
        for (uint32_t kv = 1; kv <= 3; kv += 2) {
            kvp_model *m = world_model(&(gw_model){.heads = groups[i] * kv, .kv_heads = kv,
                                                   .head_dim = 8, .width = 64, .layers = 1});
            int32_t tokens[20];
            world_tokens(tokens, 20, 1, 64);
            kvp_pool *p = world_pool(m, 4, 8);
            kvp_batch *b = world_batch(p, &(kvp_batch_options){.size = sizeof(kvp_batch_options),
                                                               .chunk_tokens = 7});
            kvp_seq *s = world_seq(p, tokens, 20, 0, KVP_SAMPLE_HOST, 0);
            assert_int_equal(kvp_batch_add(b, s), KVP_OK);
            world_run(b, NULL);
            world_expect_oracle(m, s);
            kvp_seq_destroy(s);
            kvp_batch_destroy(b);
            kvp_pool_destroy(p);
            kvp_model_destroy(m);
        }
    }
}

/* B111: every block size runs and has the same bits, or is refused at once. */
static void case_b111(void **state)
{
    (void)state;
    static const uint32_t sizes[] = {1, 2, 3, 4, 8, 16, 32, 64, 100, 128, 256, 512};
    int32_t tokens[70];
    world_tokens(tokens, 70, 1, 64);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        kvp_pool_options po = {.size = sizeof po, .blocks = 80, .block_tokens = sizes[i]};
        kvp_pool *p = NULL;
        bool good = sizes[i] <= 256 && !(sizes[i] & (sizes[i] - 1));
        assert_int_equal(kvp_pool_create(model, &po, &p, NULL), good ? KVP_OK : KVP_ERR_INVALID_ARG);
        if (!good) continue;
        kvp_batch *b = world_batch(p, NULL);
        kvp_seq *s = world_seq(p, tokens, 70, 0, KVP_SAMPLE_HOST, 0);
        assert_int_equal(kvp_batch_add(b, s), KVP_OK);
        world_run(b, NULL);
        world_expect_oracle(model, s);
        kvp_seq_destroy(s);
        kvp_batch_destroy(b);
        kvp_pool_destroy(p);
    }
}

/* Handles of another kind, destroyed ones, and none. */
static void own_handles(void **state)
{
    (void)state;
    kvp_pool *p = world_pool(model, 8, 16);
    kvp_batch *b = world_batch(p, NULL);
    kvp_seq *s = world_seq(p, NULL, 0, 0, KVP_SAMPLE_HOST, 0);
    int32_t token = 1;
    assert_int_equal(kvp_seq_append((kvp_seq *)p, &token, 1), KVP_ERR_INVALID_HANDLE);
    assert_int_equal(kvp_seq_append((kvp_seq *)b, &token, 1), KVP_ERR_INVALID_HANDLE);
    assert_int_equal(kvp_step((kvp_batch *)s), KVP_ERR_INVALID_HANDLE);
    assert_int_equal(kvp_step(NULL), KVP_ERR_INVALID_HANDLE);
    assert_int_equal(kvp_batch_add(b, (kvp_seq *)model), KVP_ERR_INVALID_HANDLE);
    kvp_pool *none = NULL;
    kvp_error e = {.size = sizeof e};
    assert_int_equal(kvp_pool_create((kvp_model *)s, NULL, &none, &e), KVP_ERR_INVALID_HANDLE);
    assert_non_null(strstr(e.text, "model"));
    kvp_seq_destroy(s);
    kvp_seq_destroy(s);
    assert_int_equal(kvp_seq_append(s, &token, 1), KVP_ERR_INVALID_HANDLE);
    assert_int_equal(kvp_batch_add(b, s), KVP_ERR_INVALID_HANDLE);
    for (int i = 0; i < 1000; i++) {
        kvp_seq *other = world_seq(p, NULL, 0, 0, KVP_SAMPLE_HOST, 0);
        kvp_seq_destroy(other);
        assert_int_equal(kvp_seq_append(s, &token, 1), KVP_ERR_INVALID_HANDLE);
    }
    kvp_seq_last_error(s, &e);
    assert_int_equal(e.status, KVP_ERR_INVALID_HANDLE);
    kvp_batch_destroy(b);
    kvp_batch_destroy(b);
    assert_int_equal(kvp_step(b), KVP_ERR_INVALID_HANDLE);
    kvp_pool_destroy(p);
    kvp_pool_destroy(p);
    kvp_pool_destroy(NULL);
    kvp_seq_destroy(NULL);
}

/* Every option out of range is named, and leaves nothing behind. */
static void own_options(void **state)
{
    (void)state;
    kvp_error e = {.size = sizeof e};
    kvp_pool *none = NULL;
    kvp_pool_options po = {.size = sizeof po, .blocks = 4, .k_format = 9};
    assert_int_equal(kvp_pool_create(model, &po, &none, &e), KVP_ERR_INVALID_ARG);
    assert_non_null(strstr(e.text, "k_format"));
    po = (kvp_pool_options){.size = sizeof po, .device = "abacus"};
    assert_int_equal(kvp_pool_create(model, &po, &none, &e), KVP_ERR_NO_DEVICE);
    assert_non_null(strstr(e.text, "abacus"));
    po = (kvp_pool_options){.size = sizeof po, .bytes = 10};
    assert_int_equal(kvp_pool_create(model, &po, &none, &e), KVP_ERR_INVALID_ARG);
    assert_non_null(strstr(e.text, "bytes"));
    assert_int_equal(e.available, 10);
    po = (kvp_pool_options){.size = 4};
    assert_int_equal(kvp_pool_create(model, &po, &none, &e), KVP_ERR_INVALID_ARG);

    kvp_pool *p = world_pool(model, 8, 16);
    kvp_batch *b = NULL;
    const struct {
        const char *word;
        kvp_batch_options o;
    } batches[] = {
        {"token_budget", {.size = sizeof(kvp_batch_options), .token_budget = 8193}},
        {"max_sequences", {.size = sizeof(kvp_batch_options), .max_sequences = 4097}},
        {"watermark", {.size = sizeof(kvp_batch_options), .watermark = 1000}},
        {"prefill_share", {.size = sizeof(kvp_batch_options), .prefill_share = 1000}},
        {"threads", {.size = sizeof(kvp_batch_options), .threads = -2}},
    };
    for (size_t i = 0; i < sizeof batches / sizeof *batches; i++) {
        assert_int_equal(kvp_batch_create(p, &batches[i].o, &b, &e), KVP_ERR_INVALID_ARG);
        assert_non_null(strstr(e.text, batches[i].word));
    }
    b = world_batch(p, NULL);
    kvp_batch *second = NULL;
    assert_int_equal(kvp_batch_create(p, NULL, &second, &e), KVP_ERR_BUSY);

    kvp_seq *s = NULL;
    kvp_sampling cold = {.size = sizeof cold, .temperature = -1};
    const struct {
        const char *word;
        kvp_seq_options o;
    } seqs[] = {
        {"salt", {.size = sizeof(kvp_seq_options), .salt_bytes = 1}},
        {"salt_bytes", {.size = sizeof(kvp_seq_options), .salt = "x", .salt_bytes = 257}},
        {"eos", {.size = sizeof(kvp_seq_options), .eos = 3}},
        {"event_mask", {.size = sizeof(kvp_seq_options), .event_mask = 0x80}},
        {"temperature", {.size = sizeof(kvp_seq_options), .sampling = &cold}},
        {"n_stop_tokens", {.size = sizeof(kvp_seq_options), .n_stop_tokens = 65}},
        {"stop_strings", {.size = sizeof(kvp_seq_options), .n_stop_strings = 1}},
    };
    for (size_t i = 0; i < sizeof seqs / sizeof *seqs; i++) {
        assert_int_equal(kvp_seq_create(p, &seqs[i].o, &s, &e), KVP_ERR_INVALID_ARG);
        if (!strstr(e.text, seqs[i].word)) fail_msg("\"%s\": no %s", e.text, seqs[i].word);
    }
    assert_null(s);
    assert_int_equal(world_stats(p).sequences, 0);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
}

/* A newer host's struct is taken while what this version does not know is zero. */
static void own_struct_sizes(void **state)
{
    (void)state;
    struct {
        kvp_pool_options o;
        uint64_t future;
    } newer = {.o = {.size = sizeof newer, .blocks = 4}};
    kvp_pool *p = NULL;
    kvp_error e = {.size = sizeof e};
    assert_int_equal(kvp_pool_create(model, &newer.o, &p, &e), KVP_OK);
    kvp_pool_destroy(p);
    newer.future = 1;
    assert_int_equal(kvp_pool_create(model, &newer.o, &p, &e), KVP_ERR_INVALID_ARG);
    /* An older host's struct is filled as far as it goes, and not beyond. */
    p = world_pool(model, 4, 16);
    struct {
        uint32_t size, block_tokens;
        uint64_t block_bytes, beyond;
    } older = {.size = 16, .beyond = 0x1234};
    assert_int_equal(kvp_pool_get_stats(p, (kvp_pool_stats *)(void *)&older), KVP_OK);
    assert_int_equal(older.size, 16);
    assert_int_equal(older.block_tokens, 16);
    assert_int_equal(older.beyond, 0x1234);
    kvp_pool_destroy(p);
}

/* States in which a call makes no sense. */
static void own_states(void **state)
{
    (void)state;
    int32_t tokens[4] = {1, 2, 3, 4};
    kvp_pool *p = world_pool(model, 8, 16), *q = world_pool(model, 8, 16);
    kvp_batch *b = world_batch(p, NULL);
    kvp_seq *s = world_seq(p, NULL, 0, 0, KVP_SAMPLE_LIBRARY, 3), *t = NULL;
    kvp_seq *foreign = world_seq(q, tokens, 4, 0, KVP_SAMPLE_LIBRARY, 3);
    assert_int_equal(kvp_batch_add(b, s), KVP_ERR_STATE);
    assert_int_equal(kvp_batch_add(b, foreign), KVP_ERR_MISMATCH);
    assert_int_equal(kvp_batch_remove(b, s), KVP_ERR_STATE);
    assert_int_equal(kvp_seq_pause(s), KVP_ERR_STATE);
    assert_int_equal(kvp_seq_append(s, tokens, 4), KVP_OK);
    assert_int_equal(kvp_seq_truncate(s, 5), KVP_ERR_INVALID_ARG);
    assert_int_equal(kvp_seq_pin(s, 5), KVP_ERR_INVALID_ARG);
    assert_int_equal(kvp_seq_fork(s, 5, NULL, &t, NULL), KVP_ERR_INVALID_ARG);
    const float *logits;
    assert_int_equal(kvp_seq_get_logits(s, &logits, NULL), KVP_ERR_STATE);
    assert_int_equal(kvp_batch_add(b, s), KVP_OK);
    world_step(b, NULL);
    assert_int_equal(world_info(s).state, KVP_SEQ_DECODE);
    assert_int_equal(kvp_seq_append(s, tokens, 1), KVP_ERR_STATE);
    assert_int_equal(kvp_seq_pause(s), KVP_OK);
    assert_int_equal(world_info(s).state, KVP_SEQ_PAUSED);
    assert_int_equal(kvp_seq_append(s, tokens, 1), KVP_OK);
    assert_int_equal(kvp_seq_resume(s), KVP_OK);
    kvp_view v = {.size = sizeof v};
    assert_int_equal(kvp_batch_get_view(b, &v), KVP_ERR_STATE);
    assert_int_equal(kvp_commit(b, NULL, 0), KVP_ERR_STATE);
    assert_int_equal(kvp_abort(b), KVP_ERR_STATE);
    world_run(b, NULL);
    size_t n = 0;
    int32_t few[2];
    assert_int_equal(kvp_seq_get_tokens(s, 0, few, 2, &n), KVP_ERR_BUFFER);
    assert_int_equal(n, 8);
    kvp_seq_destroy(s);
    kvp_seq_destroy(foreign);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
    kvp_pool_destroy(q);
}

/* What kvp_step and the rest answer to a call out of one of their own hooks. */
struct reentrant {
    kvp_batch *batch;
    kvp_status seen;
};

static uint64_t clock_hook(void *user)
{
    struct reentrant *r = user;
    static uint64_t now = 1;
    if (r->batch) r->seen = kvp_step(r->batch);
    return now++;
}

static void own_reentrant(void **state)
{
    (void)state;
    struct reentrant r = {0};
    kvp_hooks hooks = {.size = sizeof hooks, .user = &r, .clock = clock_hook};
    kvp_model_options mo = {.size = sizeof mo, .hooks = &hooks};
    size_t bytes;
    uint8_t *file = gw_tiny(&(gw_model){0}, &bytes);
    kvp_model *m = NULL;
    assert_int_equal(kvp_model_open_memory(file, bytes, &mo, &m, NULL), KVP_OK);
    kvp_pool *p = world_pool(m, 8, 16);
    kvp_batch *b = world_batch(p, NULL);
    int32_t tokens[4] = {1, 2, 3, 4};
    kvp_seq *s = world_seq(p, tokens, 4, 0, KVP_SAMPLE_LIBRARY, 3);
    assert_int_equal(kvp_batch_add(b, s), KVP_OK);
    r.batch = b;
    assert_true(kvp_step(b) >= 0);
    assert_int_equal(r.seen, KVP_ERR_REENTRANT);
    r.batch = NULL;
    world_run(b, NULL);
    kvp_seq_destroy(s);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
    kvp_model_destroy(m);
    free(file);
}

/* The record says why the last call failed: a call that succeeds does not touch it. And an error struct
 * whose size was not set is not written at all. */
static void own_error_records(void **state)
{
    (void)state;
    kvp_model *m = world_model(&(gw_model){.context = 64, .tokenizer = 1, .vocabulary = 300});
    kvp_pool *p = world_pool(m, 8, 16);
    kvp_seq *s = world_seq(p, NULL, 0, 0, KVP_SAMPLE_HOST, 0), *none = NULL;
    kvp_error before = {.size = sizeof before}, after = {.size = sizeof after};
    assert_int_equal(kvp_seq_append_text(s, "abc", 3, 0), KVP_OK);
    kvp_pool_last_error(p, &after);
    assert_int_equal(after.status, KVP_OK);
    assert_int_equal(kvp_seq_truncate(s, 1000), KVP_ERR_INVALID_ARG);
    kvp_pool_last_error(p, &before);
    assert_int_equal(before.status, KVP_ERR_INVALID_ARG);
    assert_int_equal(kvp_seq_append_text(s, "abc", 3, 0), KVP_OK);
    kvp_pool_last_error(p, &after);
    assert_memory_equal(&before, &after, sizeof before);
    kvp_error unset, zero;
    memset(&unset, 0, sizeof unset);
    memset(&zero, 0, sizeof zero);
    kvp_seq_options o = {.size = sizeof o, .context = UINT64_MAX};
    assert_int_equal(kvp_seq_create(p, &o, &none, &unset), KVP_ERR_INVALID_ARG);
    assert_memory_equal(&unset, &zero, sizeof zero);
    assert_int_equal(kvp_seq_fork(s, 1000, NULL, &none, &unset), KVP_ERR_INVALID_ARG);
    assert_memory_equal(&unset, &zero, sizeof zero);
    kvp_seq_destroy(s);
    kvp_pool_destroy(p);
    kvp_model_destroy(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(case_b86), cmocka_unit_test(case_b88), cmocka_unit_test(case_b90),
        cmocka_unit_test(case_b109), cmocka_unit_test(case_b111), cmocka_unit_test(own_handles),
        cmocka_unit_test(own_options), cmocka_unit_test(own_struct_sizes),
        cmocka_unit_test(own_states), cmocka_unit_test(own_reentrant),
        cmocka_unit_test(own_error_records),
    };
    return cmocka_run_group_tests_name("api/cases_misuse", tests, open_model, close_model);
}
