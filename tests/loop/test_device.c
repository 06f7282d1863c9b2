/*
 * A device that computes by itself behind the engine: late, in odd order, out of memory, lost. The
 * device is tests/loop/fake.c; the host uses kvpage.h alone.
 */
#define _GNU_SOURCE
#include "fake.h"
#include "rig.h"

#include "support/gguf_writer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <cmocka.h>

#include <dirent.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { USERS = 5, LENGTH = 40 };

static int setup(void **state)
{
    (void)state;
    fake_use();
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    fake_open();
    fake_give_up();
    fake_record seen = fake_seen();
    return seen.stores || seen.runners || seen.places != seen.unplaces;
}

static kvp_status try_open(rig *r, const char *device, const kvp_batch_options *options,
                           kvp_error *err)
{
    gw_model tiny = {.head_dim = 16, .context = 4096, .tokenizer = 1, .seed = 11};
    kvp_pool_options pool = {.size = sizeof pool, .blocks = 128, .device = device};
    size_t bytes;
    memset(r, 0, sizeof *r);
    r->file = gw_tiny(&tiny, &bytes);
    kvp_status s = kvp_model_open_memory(r->file, bytes, NULL, &r->model, err);
    if (s == KVP_OK) s = kvp_pool_create(r->model, &pool, &r->pool, err);
    if (s == KVP_OK) s = kvp_batch_create(r->pool, options, &r->batch, err);
    return s;
}

static void open_on(rig *r, const char *device)
{
    kvp_batch_options batch = {.size = sizeof batch, .token_budget = 32};
    kvp_error err = {.size = sizeof err};
    if (try_open(r, device, &batch, &err) != KVP_OK) fail_msg("%s", err.text);
}

/* --- the same tokens --- */

/* The tokens of some users: greedy, drawn, with penalties, with log-probabilities, chosen by the
 * host from its logits. */
static void generate(const char *device, int32_t out[USERS][LENGTH])
{
    rig r;
    kvp_seq *seqs[USERS];
    open_on(&r, device);
    for (uint64_t i = 0; i < USERS; i++) {
        kvp_sampling sampling = {.size = sizeof sampling};
        kvp_seq_options o = {.size = sizeof o, .max_tokens = LENGTH, .eos = KVP_EOS_IGNORE,
                             .sampling = &sampling};
        sampling.seed = 7 + i;
        if (i > 0) sampling.temperature = 0.9f;
        if (i == 2) sampling.repetition_penalty = 1.3f;
        if (i == 3) sampling.top_logprobs = 3;
        if (i == 4) sampling.mode = KVP_SAMPLE_HOST;
        seqs[i] = rig_seq(&r, i, 20 + 30 * (size_t)i, &o);
        assert_int_equal(kvp_batch_add(r.batch, seqs[i]), KVP_OK);
    }
    uint32_t ended = 0, n[USERS] = {0};
    uint64_t start = rig_now();
    while (ended < USERS) {
        kvp_event e = {.size = sizeof e};
        kvp_status s = kvp_step(r.batch);
        assert_true(s >= 0);
        while (kvp_next_event(r.batch, &e) == KVP_OK) {
            ended += e.kind == KVP_EVENT_ENDED;
            if (e.kind == KVP_EVENT_TOKEN) {
                assert_int_equal(e.n_top, e.tag == 3 ? 3 : 0);
                out[e.tag][n[e.tag]++] = e.token;
            }
            if (e.kind != KVP_EVENT_LOGITS) continue;
            const float *logits;
            size_t count;
            assert_int_equal(kvp_seq_get_logits(e.seq, &logits, &count), KVP_OK);
            int32_t best = 0;
            for (size_t t = 1; t < count; t++)
                if (logits[t] < logits[best]) best = (int32_t)t; /* the least likely one */
            out[e.tag][n[e.tag]++] = best;
            if (n[e.tag] == LENGTH) {
                assert_int_equal(kvp_seq_cancel(e.seq), KVP_OK);
                continue;
            }
            assert_int_equal(kvp_seq_append(e.seq, &best, 1), KVP_OK);
        }
        if (s == KVP_AGAIN) kvp_wait(r.batch, 1000);
        if (rig_now() - start > RIG_PATIENCE_MS * 1000000ull) fail_msg("no end in sight");
    }
    for (int i = 0; i < USERS; i++) {
        assert_int_equal(n[i], LENGTH);
        kvp_seq_destroy(seqs[i]);
    }
    assert_int_equal(kvp_pool_check(r.pool), KVP_OK);
    rig_close(&r);
}

static void the_same_tokens_in_any_order(void **state)
{
    (void)state;
    int32_t want[USERS][LENGTH], got[USERS][LENGTH];
    generate("cpu", want);
    for (int chooses = 0; chooses < 2; chooses++)
        for (int delay = 0; delay < 2; delay++) {
            fake_use();
            fake.chooses = chooses;
            fake.delay_us = delay ? 300 : 0;
            memset(got, 0xff, sizeof got);
            generate("fake", got);
            assert_memory_equal(want, got, sizeof want);
            fake_record seen = fake_seen();
            assert_true(seen.posted >= 3 * LENGTH); /* the device cannot choose for three of them */
            if (chooses)
                assert_int_equal(seen.chosen, 2 * LENGTH);
            else
                assert_int_equal(seen.chosen, 0);
        }
}

static void broken_logits_end_a_sequence_alone(void **state)
{
    (void)state;
    rig r;
    fake.chooses = fake.broken = true;
    open_on(&r, "fake");
    kvp_sampling host = {.size = sizeof host, .mode = KVP_SAMPLE_HOST};
    kvp_seq_options o = {.size = sizeof o, .sampling = &host};
    kvp_seq *bad = rig_add(&r, 1, 9, 4), *good = rig_seq(&r, 2, 9, &o);
    assert_int_equal(kvp_batch_add(r.batch, good), KVP_OK);
    bool failed = false, logits = false;
    uint64_t start = rig_now();
    while (!failed || !logits) {
        kvp_event e = {.size = sizeof e};
        assert_true(kvp_step(r.batch) >= 0);
        while (kvp_next_event(r.batch, &e) == KVP_OK) {
            if (e.kind == KVP_EVENT_LOGITS) logits = true;
            if (e.kind != KVP_EVENT_ENDED) continue;
            assert_int_equal(e.tag, 1);
            assert_int_equal(e.ending, KVP_END_FAILED);
            assert_int_equal(e.status, KVP_ERR_INTERNAL);
            failed = true;
        }
        kvp_wait(r.batch, 10);
        if (rig_now() - start > RIG_PATIENCE_MS * 1000000ull) fail_msg("no end in sight");
    }
    kvp_seq_destroy(bad);
    kvp_seq_destroy(good);
    rig_close(&r);
}

/* --- waiting --- */

static uint32_t threads_now(void)
{
    uint32_t n = 0;
    DIR *dir = opendir("/proc/self/task");
    assert_non_null(dir);
    for (struct dirent *e; (e = readdir(dir));) n += e->d_name[0] != '.';
    closedir(dir);
    return n;
}

static void no_team_is_made(void **state)
{
    (void)state;
    kvp_team *team = NULL;
    kvp_team_options teams = {.size = sizeof teams, .threads = 2};
    assert_int_equal(kvp_team_create(&teams, &team, NULL), KVP_OK);
    for (int way = 0; way < 4; way++) {
        static const int32_t threads[] = {0, KVP_THREADS_INLINE, 8, 0};
        rig r;
        kvp_error err = {.size = sizeof err};
        kvp_batch_options o = {.size = sizeof o, .threads = threads[way],
                               .team = way == 3 ? team : NULL};
        uint32_t before = threads_now();
        assert_int_equal(try_open(&r, "fake", &o, &err), KVP_OK);
        assert_int_equal(threads_now(), before + 1); /* the device's own */
        kvp_batch_stats stats = {.size = sizeof stats};
        assert_int_equal(kvp_batch_get_stats(r.batch, &stats), KVP_OK);
        assert_int_equal(stats.threads, 0);
        kvp_seq *seq = rig_add(&r, 1, 5, 3);
        unsigned tokens[2] = {0};
        rig_finish(&r, NULL, tokens);
        assert_int_equal(tokens[1], 3);
        kvp_seq_destroy(seq);
        rig_close(&r);
    }
    assert_int_equal(fake_seen().with_team, 0);
    kvp_team_destroy(team);
}

/* While the device computes, step answers AGAIN at once, nothing is readable, and the deadline is
 * near; the end of the work makes the fd readable from the device's thread. */
static void step_never_waits_for_the_device(void **state)
{
    (void)state;
    rig r;
    open_on(&r, "fake");
    fake_shut();
    kvp_seq *seq = rig_add(&r, 1, 5, 2);
    for (int i = 0; i < 50; i++) {
        uint64_t deadline, now = rig_now();
        int32_t timeout;
        assert_int_equal(kvp_step(r.batch), KVP_AGAIN);
        assert_int_equal(kvp_batch_deadline(r.batch, &deadline), KVP_OK);
        assert_true(deadline > now && deadline <= rig_now() + 100000000u);
        assert_int_equal(kvp_batch_timeout_ms(r.batch, &timeout), KVP_OK);
        assert_true(timeout > 0 && timeout <= 100);
        assert_false(rig_readable(&r));
    }
    assert_int_equal(fake_seen().steps, 0);
    fake_open();
    struct pollfd p = {.fd = rig_fd(&r), .events = POLLIN};
    assert_int_equal(poll(&p, 1, RIG_PATIENCE_MS), 1);
    int32_t timeout;
    assert_int_equal(kvp_batch_timeout_ms(r.batch, &timeout), KVP_OK);
    assert_int_equal(timeout, 0);
    assert_int_equal(kvp_step(r.batch), KVP_EVENTS);
    unsigned tokens[2] = {0};
    rig_finish(&r, NULL, tokens);
    assert_int_equal(tokens[1], 2);
    kvp_seq_destroy(seq);
    rig_close(&r);
}

/* A host that sleeps in kvp_wait is woken by the device. */
static void wait_ends_with_the_work(void **state)
{
    (void)state;
    rig r;
    fake.delay_us = 20000;
    open_on(&r, "fake");
    kvp_seq *seq = rig_add(&r, 1, 5, 3);
    uint64_t start = rig_now();
    assert_int_equal(kvp_step(r.batch), KVP_AGAIN);
    assert_int_equal(kvp_wait(r.batch, -1), KVP_OK);
    assert_true(rig_now() - start < 90000000u); /* not the deadline's doing */
    rig_finish(&r, NULL, NULL);
    kvp_seq_destroy(seq);
    rig_close(&r);
}

/* What a host may do to sequences under a step in flight. */
static void the_host_may_change_its_mind(void **state)
{
    (void)state;
    rig r;
    open_on(&r, "fake");
    fake_shut();
    kvp_seq *cut = rig_add(&r, 0, 30, 5), *gone = rig_add(&r, 1, 31, 5);
    kvp_seq *stopped = rig_add(&r, 2, 32, 5), *left = rig_add(&r, 3, 10, 5);
    assert_int_equal(kvp_step(r.batch), KVP_AGAIN);
    assert_int_equal(kvp_seq_truncate(cut, 3), KVP_OK);
    kvp_seq_destroy(gone);
    assert_int_equal(kvp_seq_cancel(stopped), KVP_OK);
    assert_int_equal(kvp_pool_check(r.pool), KVP_OK);
    fake_open();
    unsigned endings[4] = {0}, tokens[4] = {0};
    rig_finish(&r, endings, tokens);
    assert_int_equal(endings[1], 0);
    assert_int_equal(endings[2], 1);
    assert_int_equal(tokens[2], 0);
    assert_int_equal(endings[3], 1);
    assert_int_equal(tokens[3], 5);
    assert_int_equal(kvp_pool_check(r.pool), KVP_OK);
    kvp_seq_destroy(cut);
    kvp_seq_destroy(stopped);
    kvp_seq_destroy(left);
    rig_close(&r);
}

static void a_batch_may_go_under_a_step(void **state)
{
    (void)state;
    rig r;
    open_on(&r, "fake");
    fake_shut();
    kvp_seq *seq = rig_add(&r, 1, 20, 5);
    assert_int_equal(kvp_step(r.batch), KVP_AGAIN);
    kvp_batch_destroy(r.batch); /* cancels, and waits for the rest */
    assert_int_equal(kvp_pool_check(r.pool), KVP_OK);
    fake_open();
    assert_int_equal(kvp_batch_create(r.pool, NULL, &r.batch, NULL), KVP_OK);
    assert_int_equal(kvp_batch_add(r.batch, seq), KVP_OK);
    unsigned tokens[2] = {0};
    rig_finish(&r, NULL, tokens);
    assert_int_equal(tokens[1], 5);
    kvp_seq_destroy(seq);
    rig_close(&r);
}

/* --- losing it --- */

static void expect_as_before(rig *r, kvp_seq *seq, uint64_t length, uint64_t computed)
{
    kvp_seq_info info = {.size = sizeof info};
    assert_int_equal(kvp_seq_get_info(seq, &info), KVP_OK);
    assert_int_equal(info.length, length);
    assert_int_equal(info.computed, computed);
    assert_int_equal(kvp_pool_check(r->pool), KVP_OK);
}

static void a_lost_device_is_noticed_at_the_deadline(void **state)
{
    (void)state;
    rig r;
    kvp_error err = {.size = sizeof err};
    open_on(&r, "fake");
    kvp_seq *seq = rig_add(&r, 1, 20, 100), *other = rig_add(&r, 2, 50, 100);
    unsigned tokens[3] = {0};
    while (tokens[1] < 3) {
        assert_true(kvp_step(r.batch) >= 0);
        rig_take(&r, NULL, tokens);
        kvp_wait(r.batch, 100);
    }
    fake_shut();
    while (kvp_step(r.batch) != KVP_AGAIN || rig_readable(&r)) rig_take(&r, NULL, tokens);
    kvp_seq_info before = {.size = sizeof before}, before_other = {.size = sizeof before_other};
    assert_int_equal(kvp_seq_get_info(seq, &before), KVP_OK);
    assert_int_equal(kvp_seq_get_info(other, &before_other), KVP_OK);
    fake_lose();
    /* A host that only sleeps until the deadline, and steps once. */
    struct pollfd p = {.fd = rig_fd(&r), .events = POLLIN};
    int32_t timeout;
    assert_int_equal(kvp_batch_timeout_ms(r.batch, &timeout), KVP_OK);
    assert_true(timeout > 0 && timeout <= 100);
    assert_int_equal(poll(&p, 1, timeout), 0);
    assert_int_equal(kvp_step(r.batch), KVP_ERR_DEVICE_LOST);
    kvp_batch_last_error(r.batch, &err);
    assert_string_equal(err.text, "the device stopped working: it fell off the bus");
    /* It stays so, quietly. */
    uint64_t deadline;
    assert_int_equal(kvp_step(r.batch), KVP_ERR_DEVICE_LOST);
    assert_false(rig_readable(&r));
    assert_int_equal(kvp_batch_deadline(r.batch, &deadline), KVP_OK);
    assert_true(deadline == UINT64_MAX);
    expect_as_before(&r, seq, before.length, before.computed);
    expect_as_before(&r, other, before_other.length, before_other.computed);
    kvp_seq *fresh = rig_seq(&r, 1, 5, NULL);
    assert_int_equal(kvp_batch_add(r.batch, fresh), KVP_ERR_DEVICE_LOST);
    kvp_seq_destroy(fresh);
    kvp_seq_destroy(seq);
    kvp_batch_destroy(r.batch);
    assert_int_equal(kvp_pool_check(r.pool), KVP_OK);
    kvp_seq_destroy(other);
    r.batch = NULL;
    rig_close(&r);
}

/* Everything is destroyed while a lost step hangs in the air, in an order of its own. */
static void what_is_lost_can_be_destroyed(void **state)
{
    (void)state;
    for (int order = 0; order < 6; order++) {
        rig r;
        fake_use();
        open_on(&r, "fake");
        fake_shut();
        kvp_seq *seq = rig_add(&r, 1, 20, 100);
        assert_int_equal(kvp_step(r.batch), KVP_AGAIN);
        fake_lose();
        if (order % 2) assert_int_equal(kvp_step(r.batch), KVP_ERR_DEVICE_LOST);
        if (order / 2 == 0) kvp_seq_destroy(seq);
        if (order / 2 == 1) kvp_pool_destroy(r.pool);
        kvp_batch_destroy(r.batch);
        kvp_seq_destroy(seq);
        kvp_pool_destroy(r.pool);
        kvp_model_destroy(r.model);
        free(r.file);
        fake_record seen = fake_seen();
        assert_int_equal(seen.stores, 0);
        assert_int_equal(seen.runners, 0);
        assert_int_equal(seen.unplaces, 1);
    }
}

/* --- refusals --- */

static void expect_refusal(fake_call call, kvp_status status)
{
    rig r;
    kvp_error err = {.size = sizeof err};
    fake_use();
    fake.refuses = call;
    fake.refusal = status;
    assert_int_equal(try_open(&r, "fake:1", NULL, &err), status);
    assert_int_equal(err.needed, 1000);
    assert_int_equal(err.available, 10);
    assert_string_equal(err.text, "the fake has 10 of 1000");
    /* Nothing is kept, and with memory to spare it can be had. */
    fake.refuses = FAKE_NEVER;
    kvp_pool_options pool = {.size = sizeof pool, .blocks = 128, .device = "fake:1"};
    if (!r.pool) assert_int_equal(kvp_pool_create(r.model, &pool, &r.pool, &err), KVP_OK);
    assert_int_equal(kvp_batch_create(r.pool, NULL, &r.batch, &err), KVP_OK);
    kvp_seq *seq = rig_add(&r, 1, 20, 3);
    unsigned tokens[2] = {0};
    rig_finish(&r, NULL, tokens);
    assert_int_equal(tokens[1], 3);
    assert_int_equal(fake_seen().ordinal, 1);
    assert_int_equal(fake_seen().places, 1);
    kvp_seq_destroy(seq);
    rig_close(&r);
}

static void what_a_device_refuses_is_passed_on(void **state)
{
    (void)state;
    expect_refusal(FAKE_SUPPORTS, KVP_ERR_UNSUPPORTED);
    expect_refusal(FAKE_SUPPORTS, KVP_ERR_NO_DEVICE);
    expect_refusal(FAKE_PLACE, KVP_ERR_NO_MEMORY);
    expect_refusal(FAKE_PLACE, KVP_ERR_NO_DEVICE);
    expect_refusal(FAKE_STORE, KVP_ERR_NO_MEMORY);
    expect_refusal(FAKE_RUNNER, KVP_ERR_NO_MEMORY);
}

static void a_step_that_is_not_taken_fails_the_batch(void **state)
{
    (void)state;
    static const fake_call calls[] = {FAKE_PREPARE, FAKE_LAUNCH};
    for (size_t i = 0; i < KVP__COUNT(calls); i++) {
        rig r;
        kvp_error err = {.size = sizeof err};
        fake_use();
        open_on(&r, "fake");
        kvp_seq *seq = rig_add(&r, 1, 20, 3);
        fake.refuses = calls[i];
        fake.refusal = KVP_ERR_NO_MEMORY;
        assert_int_equal(kvp_step(r.batch), KVP_ERR_NO_MEMORY);
        kvp_batch_last_error(r.batch, &err);
        assert_string_equal(err.text, "the device took no step: it said no");
        expect_as_before(&r, seq, 20, 0);
        kvp_batch_destroy(r.batch);
        fake.refuses = FAKE_NEVER;
        assert_int_equal(kvp_batch_create(r.pool, NULL, &r.batch, NULL), KVP_OK);
        assert_int_equal(kvp_batch_add(r.batch, seq), KVP_OK);
        unsigned tokens[2] = {0};
        rig_finish(&r, NULL, tokens);
        assert_int_equal(tokens[1], 3);
        kvp_seq_destroy(seq);
        rig_close(&r);
    }
}

static void names_that_are_no_device(void **state)
{
    (void)state;
    static const char *const names[] = {"", "gpu", "fake:", "fake:64", "fake:01", "cpu:0"};
    rig r;
    kvp_error err = {.size = sizeof err};
    open_on(&r, "cpu");
    for (size_t i = 0; i < KVP__COUNT(names); i++) {
        kvp_pool *pool = NULL;
        kvp_pool_options o = {.size = sizeof o, .device = names[i], .blocks = 4};
        kvp_place_options p = {.size = sizeof p, .device = names[i]};
        kvp_plan_options plan = {.size = sizeof plan, .device = names[i]};
        kvp_plan_result result = {.size = sizeof result};
        uint64_t bytes, align;
        char want[64];
        snprintf(want, sizeof want, "device \"%s\": there is none of that name", names[i]);
        assert_int_equal(kvp_pool_create(r.model, &o, &pool, &err), KVP_ERR_NO_DEVICE);
        assert_string_equal(err.text, want);
        assert_int_equal(kvp_pool_slab_size(r.model, &o, &bytes, &align, &err), KVP_ERR_NO_DEVICE);
        assert_int_equal(kvp_model_place(r.model, &p, &err), KVP_ERR_NO_DEVICE);
        assert_string_equal(err.text, want);
        assert_int_equal(kvp_plan(r.model, &plan, &result, &err), KVP_ERR_NO_DEVICE);
        assert_null(pool);
    }
    kvp_place_options p = {.size = sizeof p, .device = "fake:9"};
    kvp_pool_options o = {.size = sizeof o, .device = "fake:9"};
    kvp_pool *pool = NULL;
    assert_int_equal(kvp_pool_create(r.model, &o, &pool, &err), KVP_ERR_NO_DEVICE);
    assert_string_equal(err.text, "fake:9: there are four");
    p.device = "fake:2";
    p.packed_file = "weights.packed";
    assert_int_equal(kvp_model_place(r.model, &p, &err), KVP_ERR_UNSUPPORTED);
    assert_non_null(strstr(err.text, "packed_file"));
    rig_close(&r);
}

/* --- several devices --- */

static void weights_are_on_each_device_once(void **state)
{
    (void)state;
    rig r;
    kvp_error err = {.size = sizeof err};
    open_on(&r, "fake:1");
    kvp_model_info info = {.size = sizeof info};
    assert_int_equal(kvp_model_get_info(r.model, &info), KVP_OK);
    assert_int_equal(info.placed, 1);
    assert_int_equal(fake_seen().places, 1);
    static const char *const names[] = {"fake:1", "cpu", "fake:0", "fake", NULL, "fake:3"};
    kvp_pool *pools[KVP__COUNT(names)];
    for (size_t i = 0; i < KVP__COUNT(names); i++) {
        kvp_pool_options o = {.size = sizeof o, .device = names[i], .blocks = 8};
        assert_int_equal(kvp_pool_create(r.model, &o, &pools[i], &err), KVP_OK);
    }
    assert_int_equal(fake_seen().places, 3);
    kvp_place_options p = {.size = sizeof p, .device = "fake:3"};
    assert_int_equal(kvp_model_place(r.model, &p, &err), KVP_OK);
    assert_int_equal(fake_seen().places, 3);
    for (size_t i = 0; i < KVP__COUNT(names); i++) kvp_pool_destroy(pools[i]);
    assert_int_equal(fake_seen().unplaces, 0);
    rig_close(&r);
    assert_int_equal(fake_seen().unplaces, 3);
}

static void figures_are_the_devices(void **state)
{
    (void)state;
    rig r;
    open_on(&r, "cpu");
    kvp_plan_options o = {.size = sizeof o};
    kvp_plan_result on_cpu = {.size = sizeof on_cpu}, on_fake = {.size = sizeof on_fake};
    assert_int_equal(kvp_plan(r.model, &o, &on_cpu, NULL), KVP_OK);
    o.device = "fake:63"; /* it need not be there */
    assert_int_equal(kvp_plan(r.model, &o, &on_fake, NULL), KVP_OK);
    assert_int_equal(on_fake.weight_bytes, on_cpu.weight_bytes + 1);
    assert_int_equal(on_fake.workspace_bytes, on_cpu.workspace_bytes + 1);
    assert_int_equal(on_fake.kv_bytes, on_cpu.kv_bytes);
    kvp_pool_options p = {.size = sizeof p, .device = "fake", .blocks = 3};
    uint64_t bytes, align;
    assert_int_equal(kvp_pool_slab_size(r.model, &p, &bytes, &align, NULL), KVP_OK);
    assert_int_equal(align, 256);
    uint32_t there = 0;
    kvp_device_info info = {.size = sizeof info};
    for (uint32_t i = 0; kvp_device_get(i, &info) == KVP_OK; i++)
        if (strncmp(info.name, "fake:", 5) == 0) assert_int_equal(info.name[5], '0' + there++);
    assert_int_equal(there, 4);
    rig_close(&r);
}

static void a_stream_is_handed_on(void **state)
{
    (void)state;
    rig r;
    int stream;
    kvp_error err = {.size = sizeof err};
    kvp_batch_options o = {.size = sizeof o, .stream = &stream};
    assert_int_equal(try_open(&r, "cpu", &o, &err), KVP_ERR_INVALID_ARG);
    assert_non_null(strstr(err.text, "stream"));
    rig_close(&r);
    assert_int_equal(try_open(&r, "fake", &o, &err), KVP_OK);
    assert_ptr_equal(fake_seen().stream, &stream);
    rig_close(&r);
}

/* What a GPU holds does not survive a fork; what the CPU holds does. */
static void weights_of_the_parent_are_refused_in_a_child(void **state)
{
    (void)state;
    rig r;
    open_on(&r, "fake:2");
    kvp_place_options cpu = {.size = sizeof cpu};
    assert_int_equal(kvp_model_place(r.model, &cpu, NULL), KVP_OK);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        kvp_error err = {.size = sizeof err};
        kvp_pool *pool = NULL;
        kvp_pool_options o = {.size = sizeof o, .device = "fake:2", .blocks = 8};
        bool ok = kvp_pool_create(r.model, &o, &pool, &err) == KVP_ERR_FORKED &&
                  strstr(err.text, "parent");
        o.device = "cpu";
        ok = ok && kvp_pool_create(r.model, &o, &pool, &err) == KVP_OK;
        kvp_pool_destroy(pool);
        kvp_model_destroy(r.model);
        _exit(ok && fake_seen().unplaces == 0 ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    rig_close(&r);
}

/* --- an own model --- */

typedef struct own {
    kvp_model *model;
    kvp_pool *pool;
    kvp_batch *batch;
    kvp_seq *seq;
    float q[16], k[16], v[16], out[16];
    kvp_attention_args args;
} own;

static void own_open(own *w, const char *device, void *stream)
{
    kvp_layer_group group = {.layers = 2, .kv_heads = 1, .key_dim = 4, .value_dim = 4};
    kvp_geometry g = {.size = sizeof g, .n_groups = 1, .groups = &group};
    kvp_pool_options po = {.size = sizeof po, .blocks = 8, .device = device};
    kvp_batch_options bo = {.size = sizeof bo, .stream = stream};
    static const int32_t prompt[] = {1, 2, 3};
    memset(w, 0, sizeof *w);
    assert_int_equal(kvp_model_create(&g, NULL, &w->model, NULL), KVP_OK);
    assert_int_equal(kvp_pool_create(w->model, &po, &w->pool, NULL), KVP_OK);
    assert_int_equal(kvp_batch_create(w->pool, &bo, &w->batch, NULL), KVP_OK);
    assert_int_equal(kvp_seq_create(w->pool, NULL, &w->seq, NULL), KVP_OK);
    assert_int_equal(kvp_seq_append(w->seq, prompt, 3), KVP_OK);
    assert_int_equal(kvp_batch_add(w->batch, w->seq), KVP_OK);
    w->args = (kvp_attention_args){.size = sizeof w->args, .q = w->q, .k = w->k, .v = w->v,
                                   .out = w->out};
}

static void own_close(own *w)
{
    kvp_seq_destroy(w->seq);
    kvp_batch_destroy(w->batch);
    kvp_pool_destroy(w->pool);
    kvp_model_destroy(w->model);
}

static void an_own_model_attends(void **state)
{
    (void)state;
    own w;
    int stream;
    kvp_view view = {.size = sizeof view};
    own_open(&w, "fake", &stream);
    assert_int_equal(kvp_step(w.batch), KVP_PLANNED);
    assert_int_equal(fake_seen().begun, 1);
    assert_int_equal(kvp_batch_get_view(w.batch, &view), KVP_OK);
    assert_int_equal(view.n_rows, 3);
    assert_int_equal(kvp_attention(w.batch, 0, &w.args), KVP_OK);
    w.args.type = KVP_KV_F32;
    assert_int_equal(kvp_attention(w.batch, 1, &w.args), KVP_OK);
    assert_int_equal(fake_seen().attended, 2);
    assert_int_equal(kvp_commit(w.batch, NULL, 0), KVP_OK);
    own_close(&w);
}

/* A call that went into a graph of the host's counts as made in every later step, not twice in one. */
static void a_layer_in_a_graph_counts_as_done(void **state)
{
    (void)state;
    own w;
    int stream;
    own_open(&w, "fake", &stream);
    static const int32_t token = 5;
    fake.records = true;
    assert_int_equal(kvp_step(w.batch), KVP_PLANNED);
    assert_int_equal(kvp_attention(w.batch, 0, &w.args), KVP_OK);
    assert_int_equal(kvp_attention(w.batch, 0, &w.args), KVP_ERR_STATE);
    fake.records = false;
    assert_int_equal(kvp_commit(w.batch, NULL, 0), KVP_ERR_STATE);
    assert_int_equal(kvp_attention(w.batch, 1, &w.args), KVP_OK);
    assert_int_equal(kvp_commit(w.batch, NULL, 0), KVP_OK);
    assert_int_equal(kvp_seq_append(w.seq, &token, 1), KVP_OK);
    assert_int_equal(kvp_step(w.batch), KVP_PLANNED);
    assert_int_equal(kvp_commit(w.batch, NULL, 0), KVP_ERR_STATE);
    assert_int_equal(kvp_attention(w.batch, 1, &w.args), KVP_OK);
    assert_int_equal(kvp_commit(w.batch, NULL, 0), KVP_OK);
    own_close(&w);
}

/* What the device refuses changes nothing; a type that is none, and strides and pointers that would
 * break an element, do not reach it. */
static void attention_that_is_refused(void **state)
{
    (void)state;
    own w;
    int stream;
    kvp_error err = {.size = sizeof err};
    own_open(&w, "fake", &stream);
    assert_int_equal(kvp_step(w.batch), KVP_PLANNED);
    w.args.type = 4;
    assert_int_equal(kvp_attention(w.batch, 0, &w.args), KVP_ERR_INVALID_ARG);
    kvp_batch_last_error(w.batch, &err);
    assert_non_null(strstr(err.text, "type: 4"));
    w.args.type = KVP_KV_F16; /* which this device does not take */
    assert_int_equal(kvp_attention(w.batch, 0, &w.args), KVP_ERR_UNSUPPORTED);
    w.args.q_row_stride = 2 * 4 + 1;
    assert_int_equal(kvp_attention(w.batch, 0, &w.args), KVP_ERR_INVALID_ARG);
    w.args.q_row_stride = 2 * 4 + 2; /* fits two bytes, not four */
    assert_int_equal(kvp_attention(w.batch, 0, &w.args), KVP_ERR_UNSUPPORTED);
    w.args.type = 0;
    assert_int_equal(kvp_attention(w.batch, 0, &w.args), KVP_ERR_INVALID_ARG);
    w.args.q_row_stride = 0;
    w.args.k = (const char *)w.k + 2;
    assert_int_equal(kvp_attention(w.batch, 0, &w.args), KVP_ERR_INVALID_ARG);
    w.args.k = w.k;
    fake.refuses = FAKE_ATTEND;
    fake.refusal = KVP_ERR_UNSUPPORTED;
    assert_int_equal(kvp_attention(w.batch, 0, &w.args), KVP_ERR_UNSUPPORTED);
    kvp_batch_last_error(w.batch, &err);
    assert_string_equal(err.text, "the fake has 10 of 1000");
    assert_int_equal(fake_seen().attended, 0);
    fake.refuses = FAKE_NEVER;
    assert_int_equal(kvp_attention(w.batch, 0, &w.args), KVP_OK);
    assert_int_equal(kvp_attention(w.batch, 1, &w.args), KVP_OK);
    assert_int_equal(kvp_commit(w.batch, NULL, 0), KVP_OK);
    own_close(&w);
}

static void a_device_lost_under_attention_fails_the_batch(void **state)
{
    (void)state;
    static const fake_call calls[] = {FAKE_BEGIN, FAKE_ATTEND};
    for (size_t i = 0; i < KVP__COUNT(calls); i++) {
        own w;
        int stream;
        kvp_seq_info info = {.size = sizeof info};
        fake_use();
        own_open(&w, "fake", &stream);
        fake.refuses = calls[i];
        fake.refusal = KVP_ERR_DEVICE_LOST;
        if (calls[i] == FAKE_ATTEND) {
            assert_int_equal(kvp_step(w.batch), KVP_PLANNED);
            assert_int_equal(kvp_attention(w.batch, 0, &w.args), KVP_ERR_DEVICE_LOST);
            assert_int_equal(kvp_attention(w.batch, 0, &w.args), KVP_ERR_STATE);
            assert_int_equal(kvp_commit(w.batch, NULL, 0), KVP_ERR_STATE);
        }
        assert_int_equal(kvp_step(w.batch), KVP_ERR_DEVICE_LOST);
        assert_int_equal(kvp_seq_get_info(w.seq, &info), KVP_OK);
        assert_int_equal(info.length, 3);
        assert_int_equal(info.computed, 0);
        assert_int_equal(kvp_pool_check(w.pool), KVP_OK);
        own_close(&w);
    }
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(the_same_tokens_in_any_order),
        TEST(broken_logits_end_a_sequence_alone),
        TEST(no_team_is_made),
        TEST(step_never_waits_for_the_device),
        TEST(wait_ends_with_the_work),
        TEST(the_host_may_change_its_mind),
        TEST(a_batch_may_go_under_a_step),
        TEST(a_lost_device_is_noticed_at_the_deadline),
        TEST(what_is_lost_can_be_destroyed),
        TEST(what_a_device_refuses_is_passed_on),
        TEST(a_step_that_is_not_taken_fails_the_batch),
        TEST(names_that_are_no_device),
        TEST(weights_are_on_each_device_once),
        TEST(figures_are_the_devices),
        TEST(a_stream_is_handed_on),
        TEST(weights_of_the_parent_are_refused_in_a_child),
        TEST(an_own_model_attends),
        TEST(a_layer_in_a_graph_counts_as_done),
        TEST(attention_that_is_refused),
        TEST(a_device_lost_under_attention_fails_the_batch),
    };
    return cmocka_run_group_tests_name("loop/device", tests, NULL, NULL);
}
