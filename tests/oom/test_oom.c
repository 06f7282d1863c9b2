/*
 * Every request for memory, a thread or a descriptor fails once, for every one of them, in a story
 * that loads a model, places it, makes a pool, a team, a batch and sequences, computes, forks and
 * generates. After each refusal: a status and a line of text, the same call works when made again,
 * the tokens are those of the undisturbed story, and nothing is left at the end.
 */
#include "scarce.h"
#include "support/gguf_writer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define PROMPT 21u
#define LENGTH 34u /* of each sequence at the end */
#define SEQS 3u

typedef struct story {
    const uint8_t *file;
    size_t file_bytes;
    int32_t threads; /* of the batch; 0: a shared team of two */
    kvp_model *model;
    kvp_pool *pool;
    kvp_team *team;
    kvp_batch *batch;
    kvp_seq *seqs[SEQS];
    bool ended[SEQS];
    int32_t tokens[SEQS][LENGTH];
    kvp_error err;
    bool excused; /* the one refusal has been answered by an error */
} story;

/* Did this call fail because of the refusal? Then the error must say so, and it is called again. */
static bool again(story *t, kvp_status s, bool has_text)
{
    if (s >= 0) return false;
    if (!scarce_refused() || t->excused) {
        print_error("%s: %s\n", kvp_status_name(s), t->err.text);
        fail();
    }
    assert_true(s == KVP_ERR_NO_MEMORY || s == KVP_ERR_SYSTEM);
    if (has_text) {
        assert_int_equal(t->err.status, s);
        assert_true(t->err.text[0] != 0);
    }
    if (t->pool) assert_int_equal(kvp_pool_check(t->pool), KVP_OK);
    t->excused = true;
    return true;
}

#define WITH_ERROR(call) do {} while (again(t, (call), true))
#define WITHOUT_ERROR(call) do {} while (again(t, (call), false))

static void make_batch(story *t)
{
    kvp_batch_options o;
    int32_t fd;
    kvp_batch_options_init(&o, sizeof o);
    o.threads = t->threads;
    o.team = t->team;
    o.chunk_tokens = 8;
    WITH_ERROR(kvp_batch_create(t->pool, &o, &t->batch, &t->err));
    WITHOUT_ERROR(kvp_batch_fd(t->batch, &fd));
    assert_true(fd >= 0);
}

static uint64_t length(const kvp_seq *seq)
{
    kvp_seq_info info;
    kvp_seq_info_init(&info, sizeof info);
    assert_int_equal(kvp_seq_get_info(seq, &info), KVP_OK);
    return info.length;
}

static void add(story *t, uint32_t i)
{
    t->ended[i] = length(t->seqs[i]) >= LENGTH;
    if (t->ended[i]) return;
    WITHOUT_ERROR(kvp_seq_set_max_tokens(t->seqs[i], LENGTH - length(t->seqs[i])));
    WITHOUT_ERROR(kvp_batch_add(t->batch, t->seqs[i]));
}

/* A sequence that failed for want of memory goes on from where it was. */
static void take_events(story *t)
{
    kvp_event e;
    kvp_event_init(&e, sizeof e);
    while (kvp_next_event(t->batch, &e) == KVP_OK) {
        if (e.kind != KVP_EVENT_ENDED) continue;
        if (e.ending == KVP_END_FAILED) {
            t->err.text[0] = 0;
            assert_true(again(t, e.status, false));
            add(t, (uint32_t)e.tag);
        } else {
            assert_int_equal(e.ending, KVP_END_LENGTH);
            t->ended[e.tag] = true;
        }
    }
}

static void run(story *t, uint32_t n)
{
    for (uint32_t left = n; left;) {
        kvp_status s = kvp_step(t->batch);
        if (again(t, s, false)) {
            /* An error of step stays: the batch is replaced, the sequences are not. */
            kvp_batch_destroy(t->batch);
            t->batch = NULL;
            make_batch(t);
            for (uint32_t i = 0; i < n; i++) add(t, i);
        }
        take_events(t);
        if (s == KVP_AGAIN) kvp_wait(t->batch, -1);
        left = 0;
        for (uint32_t i = 0; i < n; i++) left += !t->ended[i];
        if (left) assert_int_not_equal(s, KVP_DONE);
    }
    assert_int_equal(kvp_pool_check(t->pool), KVP_OK);
}

static void tell(story *t)
{
    kvp_model_options mo;
    kvp_place_options po;
    kvp_pool_options pool;
    kvp_seq_options so;
    kvp_sampling sampling;
    const kvp_logit_bias bias = {3, -1.0f};
    const kvp_string stop = {"no such text", 12};
    int32_t prompt[PROMPT], ids[64];
    size_t count = 0;

    kvp_error_init(&t->err, sizeof t->err);
    kvp_model_options_init(&mo, sizeof mo);
    mo.hooks = &scarce_hooks;
    WITH_ERROR(kvp_model_open_memory(t->file, t->file_bytes, &mo, &t->model, &t->err));
    kvp_place_options_init(&po, sizeof po);
    po.threads = t->threads ? t->threads : 2;
    WITH_ERROR(kvp_model_place(t->model, &po, &t->err));
    WITH_ERROR(kvp_tokenize(t->model, "some text", 9, 0, ids, 64, &count, &t->err));

    kvp_pool_options_init(&pool, sizeof pool);
    pool.blocks = 24;
    pool.block_tokens = 4;
    WITH_ERROR(kvp_pool_create(t->model, &pool, &t->pool, &t->err));
    if (!t->threads) {
        kvp_team_options to;
        kvp_team_options_init(&to, sizeof to);
        to.threads = 2;
        to.hooks = &scarce_hooks;
        WITH_ERROR(kvp_team_create(&to, &t->team, &t->err));
    }
    make_batch(t);

    for (uint32_t i = 0; i < PROMPT; i++) prompt[i] = (int32_t)(i * 7 % 50 + 3);
    kvp_seq_options_init(&so, sizeof so);
    so.eos = KVP_EOS_IGNORE;
    so.stop_strings = &stop;
    so.n_stop_strings = 1;
    for (uint32_t i = 0; i < 2; i++) {
        so.tag = i;
        WITH_ERROR(kvp_seq_create(t->pool, &so, &t->seqs[i], &t->err));
        prompt[PROMPT - 1] = (int32_t)i;
        WITHOUT_ERROR(kvp_seq_append(t->seqs[i], prompt, PROMPT));
        add(t, i);
    }
    run(t, 2);

    so.tag = 2;
    WITH_ERROR(kvp_seq_fork(t->seqs[0], PROMPT + 2, &so, &t->seqs[2], &t->err));
    kvp_sampling_init(&sampling, sizeof sampling);
    sampling.bias = &bias;
    sampling.n_bias = 1;
    sampling.repetition_penalty = 1.1f;
    WITHOUT_ERROR(kvp_seq_set_sampling(t->seqs[2], &sampling));
    WITHOUT_ERROR(kvp_seq_append_text(t->seqs[2], "x", 1, 0));
    WITHOUT_ERROR(kvp_seq_pin(t->seqs[2], PROMPT));
    add(t, 2);
    run(t, 3);
    for (uint32_t i = 0; i < SEQS; i++) {
        assert_int_equal(kvp_seq_get_tokens(t->seqs[i], 0, t->tokens[i], LENGTH, &count), KVP_OK);
        assert_int_equal(count, LENGTH);
    }

    for (uint32_t i = 0; i < SEQS; i++) kvp_seq_destroy(t->seqs[i]);
    kvp_batch_destroy(t->batch);
    kvp_pool_destroy(t->pool);
    kvp_team_destroy(t->team);
    kvp_model_destroy(t->model);
}

/* Without refusals first: what the tokens are, and how many requests there are. */
static void every_request(uint32_t type, int32_t threads)
{
    gw_model shape = {.type = type, .vocabulary = 80, .tokenizer = 1, .seed = 5};
    size_t bytes;
    uint8_t *file = gw_tiny(&shape, &bytes);
    story quiet = {.file = file, .file_bytes = bytes, .threads = threads};
    uint32_t descriptors = scarce_descriptors(), tasks = scarce_threads();
    uint32_t roots = threads ? 1 : 2;
    scarce_reset(0);
    tell(&quiet);
    uint64_t n = scarce_requests();
    print_message("%llu requests\n", (unsigned long long)n);
    assert_true(n > 20);
    assert_int_equal(scarce_live(), 0);
    assert_int_equal(scarce_released(), roots);

    for (uint64_t i = 1; i <= n; i++) {
        story t = {.file = file, .file_bytes = bytes, .threads = threads};
        scarce_reset(i);
        tell(&t);
        assert_true(scarce_refused());
        if (memcmp(t.tokens, quiet.tokens, sizeof t.tokens) || scarce_live() ||
            scarce_released() < roots)
            print_error("request %llu of %llu: live %lld, released %u\n", (unsigned long long)i,
                        (unsigned long long)n, (long long)scarce_live(), scarce_released());
        assert_memory_equal(t.tokens, quiet.tokens, sizeof t.tokens);
        assert_int_equal(scarce_live(), 0);
        assert_true(scarce_released() >= roots);
        assert_int_equal(scarce_descriptors(), descriptors);
        assert_int_equal(scarce_threads(), tasks);
    }
    free(file);
}

static void every_request_fails_once_inline(void **state)
{
    (void)state;
    every_request(0, KVP_THREADS_INLINE);
}

static void every_request_fails_once_with_workers(void **state)
{
    (void)state;
    every_request(8, 2);
}

static void every_request_fails_once_with_a_shared_team(void **state)
{
    (void)state;
    every_request(0, 0);
}

/* --- hosts that run their own projections --- */

static void own_model_story(story *t)
{
    kvp_model_options mo;
    kvp_geometry g;
    kvp_pool_options pool;
    kvp_seq_options so;
    const kvp_layer_group group = {.layers = 1, .kv_heads = 1, .key_dim = 16, .value_dim = 16};
    static float rows[64 * 16], out[64 * 16];
    int32_t prompt[PROMPT];

    kvp_error_init(&t->err, sizeof t->err);
    kvp_model_options_init(&mo, sizeof mo);
    mo.hooks = &scarce_hooks;
    kvp_geometry_init(&g, sizeof g);
    g.n_groups = 1;
    g.groups = &group;
    WITH_ERROR(kvp_model_create(&g, &mo, &t->model, &t->err));
    kvp_pool_options_init(&pool, sizeof pool);
    pool.blocks = 24;
    pool.block_tokens = 4;
    WITH_ERROR(kvp_pool_create(t->model, &pool, &t->pool, &t->err));
    make_batch(t);
    for (uint32_t i = 0; i < PROMPT; i++) prompt[i] = (int32_t)i;
    kvp_sampling sampling;
    kvp_sampling_init(&sampling, sizeof sampling);
    sampling.mode = KVP_SAMPLE_HOST;
    kvp_seq_options_init(&so, sizeof so);
    so.sampling = &sampling;
    WITH_ERROR(kvp_seq_create(t->pool, &so, &t->seqs[0], &t->err));
    WITHOUT_ERROR(kvp_seq_append(t->seqs[0], prompt, PROMPT));
    add(t, 0);
    while (!t->ended[0]) {
        kvp_status s = kvp_step(t->batch);
        if (again(t, s, false)) {
            kvp_batch_destroy(t->batch);
            t->batch = NULL;
            make_batch(t);
            add(t, 0);
            continue;
        }
        if (s == KVP_PLANNED) {
            kvp_view view;
            kvp_attention_args args;
            int32_t token = 7;
            kvp_view_init(&view, sizeof view);
            WITHOUT_ERROR(kvp_batch_get_view(t->batch, &view));
            assert_true(view.n_rows <= 64 && view.n_outputs <= 1);
            kvp_attention_args_init(&args, sizeof args);
            args.q = args.k = args.v = rows;
            args.out = out;
            WITHOUT_ERROR(kvp_attention(t->batch, 0, &args));
            WITHOUT_ERROR(kvp_commit(t->batch, view.n_outputs ? &token : NULL, view.n_outputs));
        }
        take_events(t);
    }
    assert_int_equal(length(t->seqs[0]), LENGTH);
    kvp_seq_destroy(t->seqs[0]);
    kvp_batch_destroy(t->batch);
    kvp_pool_destroy(t->pool);
    kvp_model_destroy(t->model);
}

static void every_request_fails_once_own_model(void **state)
{
    (void)state;
    story quiet = {.threads = KVP_THREADS_INLINE};
    scarce_reset(0);
    own_model_story(&quiet);
    uint64_t n = scarce_requests();
    assert_true(n > 8);
    assert_int_equal(scarce_live(), 0);
    for (uint64_t i = 1; i <= n; i++) {
        story t = {.threads = KVP_THREADS_INLINE};
        scarce_reset(i);
        own_model_story(&t);
        assert_true(scarce_refused());
        assert_int_equal(scarce_live(), 0);
    }
}

/* --- the steady state asks for nothing --- */

static void a_steady_step_asks_for_nothing(void **state)
{
    (void)state;
    gw_model shape = {.vocabulary = 80, .tokenizer = 1, .context = 512, .seed = 9};
    size_t bytes;
    uint8_t *file = gw_tiny(&shape, &bytes);
    scarce_reset(0);
    story story_ = {.file = file, .file_bytes = bytes, .threads = 2}, *t = &story_;
    kvp_model_options mo;
    kvp_pool_options pool;
    kvp_seq_options so;
    int32_t prompt[PROMPT] = {1, 2, 3};
    kvp_model_options_init(&mo, sizeof mo);
    mo.hooks = &scarce_hooks;
    kvp_error_init(&t->err, sizeof t->err);
    WITH_ERROR(kvp_model_open_memory(file, bytes, &mo, &t->model, &t->err));
    kvp_pool_options_init(&pool, sizeof pool);
    pool.blocks = 128;
    WITH_ERROR(kvp_pool_create(t->model, &pool, &t->pool, &t->err));
    make_batch(t);
    kvp_seq_options_init(&so, sizeof so);
    so.eos = KVP_EOS_IGNORE;
    so.max_tokens = 300;
    for (uint32_t i = 0; i < SEQS; i++) {
        so.tag = i;
        prompt[0] = (int32_t)i;
        WITH_ERROR(kvp_seq_create(t->pool, &so, &t->seqs[i], &t->err));
        WITHOUT_ERROR(kvp_seq_append(t->seqs[i], prompt, PROMPT));
        WITHOUT_ERROR(kvp_batch_add(t->batch, t->seqs[i]));
    }
    uint64_t before = scarce_requests();
    run(t, SEQS);
    assert_int_equal(scarce_requests(), before);
    for (uint32_t i = 0; i < SEQS; i++) kvp_seq_destroy(t->seqs[i]);
    kvp_batch_destroy(t->batch);
    kvp_pool_destroy(t->pool);
    kvp_model_destroy(t->model);
    assert_int_equal(scarce_live(), 0);
    free(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_request_fails_once_inline),
        cmocka_unit_test(every_request_fails_once_with_workers),
        cmocka_unit_test(every_request_fails_once_with_a_shared_team),
        cmocka_unit_test(every_request_fails_once_own_model),
        cmocka_unit_test(a_steady_step_asks_for_nothing),
    };
    return cmocka_run_group_tests_name("oom", tests, NULL, NULL);
}
