/*
 * Events: one ending per add, their order, backpressure by the ring of one sequence, pause and
 * resume, cancel and remove, the usage.
 */
#define _GNU_SOURCE
#include "rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <cmocka.h>

#include <string.h>

/* Steps until the first token event has come, which it takes. */
static void until_first_token(rig *r)
{
    uint64_t start = rig_now();
    kvp_event e = {.size = sizeof e};
    for (;;) {
        kvp_status status = kvp_step(r->batch);
        assert_true(status >= 0);
        while (kvp_next_event(r->batch, &e) == KVP_OK)
            if (e.kind == KVP_EVENT_TOKEN) return;
        if (status == KVP_AGAIN) kvp_wait(r->batch, 1000);
        if (rig_now() - start > RIG_PATIENCE_MS * 1000000ull) fail_msg("no token came");
    }
}

static uint64_t length_of(const kvp_seq *seq)
{
    kvp_seq_info info = {.size = sizeof info};
    assert_int_equal(kvp_seq_get_info(seq, &info), KVP_OK);
    return info.length;
}

static uint32_t state_of(const kvp_seq *seq)
{
    kvp_seq_info info = {.size = sizeof info};
    assert_int_equal(kvp_seq_get_info(seq, &info), KVP_OK);
    return info.state;
}

static void one_ending_for_each_add(void **state)
{
    rig r;
    kvp_seq *seqs[6];
    unsigned endings[6] = {0}, tokens[6] = {0};
    (void)state;
    rig_open(&r, 0);
    for (uint64_t i = 0; i < 6; i++) seqs[i] = rig_add(&r, i, 3 + 30 * (size_t)i, 2 + i);
    rig_finish(&r, endings, tokens);
    for (unsigned i = 0; i < 6; i++) {
        assert_int_equal(endings[i], 1);
        assert_int_equal(tokens[i], 2 + i);
        assert_int_equal(state_of(seqs[i]), KVP_SEQ_PARKED);
    }
    /* Added again, each goes on where it was and ends once more. */
    for (unsigned i = 0; i < 6; i++)
        assert_int_equal(kvp_batch_add(r.batch, seqs[i]), KVP_OK);
    rig_finish(&r, endings, tokens);
    for (unsigned i = 0; i < 6; i++) {
        assert_int_equal(endings[i], 2);
        assert_int_equal(tokens[i], 2 * (2 + i));
        assert_int_equal(length_of(seqs[i]), 3 + 30 * i + 2 * (2 + i));
        kvp_seq_destroy(seqs[i]);
    }
    rig_close(&r);
}

static void a_refused_add_has_no_ending(void **state)
{
    rig r, other;
    kvp_seq *seq, *empty, *foreign;
    unsigned endings[8] = {0};
    (void)state;
    rig_open(&r, 0);
    rig_open(&other, 0);
    seq = rig_add(&r, 1, 5, 3);
    empty = rig_seq(&r, 2, 0, NULL);
    foreign = rig_seq(&other, 3, 5, NULL);
    assert_int_equal(kvp_batch_add(r.batch, seq), KVP_ERR_DUPLICATE);
    assert_int_equal(kvp_batch_add(r.batch, empty), KVP_ERR_STATE);
    assert_int_equal(kvp_batch_add(r.batch, foreign), KVP_ERR_MISMATCH);
    rig_finish(&r, endings, NULL);
    assert_int_equal(endings[1], 1);
    assert_int_equal(endings[2], 0);
    assert_int_equal(endings[3], 0);
    kvp_seq_destroy(seq);
    kvp_seq_destroy(empty);
    kvp_seq_destroy(foreign);
    rig_close(&other);
    rig_close(&r);
}

static void events_come_in_order(void **state)
{
    rig r;
    kvp_seq *seqs[3];
    uint64_t next[3], start = rig_now();
    unsigned ended[3] = {0};
    kvp_status status = KVP_OK;
    (void)state;
    rig_open(&r, 0);
    for (uint64_t i = 0; i < 3; i++) {
        seqs[i] = rig_add(&r, i, 10, 20);
        next[i] = 10;
    }
    while (status != KVP_DONE) {
        kvp_event e = {.size = sizeof e};
        status = kvp_step(r.batch);
        assert_true(status >= 0);
        while (kvp_next_event(r.batch, &e) == KVP_OK) {
            assert_true(e.tag < 3);
            assert_ptr_equal(e.seq, seqs[e.tag]);
            assert_non_null(e.text);
            assert_int_equal(ended[e.tag], 0);
            if (e.kind == KVP_EVENT_TOKEN) {
                assert_int_equal(e.position, next[e.tag]);
                assert_in_range(e.token, 0, RIG_VOCABULARY - 1);
                assert_null(e.usage);
                next[e.tag]++;
            } else {
                assert_int_equal(e.kind, KVP_EVENT_ENDED);
                assert_int_equal(e.ending, KVP_END_LENGTH);
                assert_non_null(e.usage);
                ended[e.tag]++;
            }
        }
        if (status == KVP_AGAIN) kvp_wait(r.batch, 1000);
        if (rig_now() - start > RIG_PATIENCE_MS * 1000000ull) fail_msg("no end in sight");
    }
    for (int i = 0; i < 3; i++) {
        assert_int_equal(next[i], 30);
        assert_int_equal(ended[i], 1);
        kvp_seq_destroy(seqs[i]);
    }
    rig_close(&r);
}

static void a_full_ring_pauses_only_its_sequence(void **state)
{
    rig r;
    kvp_seq_options narrow = {.size = sizeof narrow, .max_tokens = 30, .eos = KVP_EOS_IGNORE,
                              .ring = 4};
    kvp_seq *slow, *fast;
    kvp_seq_info info = {.size = sizeof info};
    unsigned endings[3] = {0}, tokens[3] = {0};
    (void)state;
    rig_open(&r, 0);
    slow = rig_seq(&r, 1, 5, &narrow);
    assert_int_equal(kvp_batch_add(r.batch, slow), KVP_OK);
    fast = rig_add(&r, 2, 5, 30);
    rig_settle(&r);

    kvp_seq_get_info(fast, &info);
    assert_int_equal(info.state, KVP_SEQ_PARKED);
    assert_int_equal(info.length, 35);
    assert_int_equal(info.events, 31);
    kvp_seq_get_info(slow, &info);
    assert_int_equal(info.state, KVP_SEQ_PAUSED);
    assert_true(info.events <= 4);
    assert_true(info.length <= 5 + 4 + 1);

    rig_take(&r, endings, tokens);
    rig_finish(&r, endings, tokens);
    assert_int_equal(endings[1], 1);
    assert_int_equal(endings[2], 1);
    assert_int_equal(tokens[1], 30);
    assert_int_equal(tokens[2], 30);
    kvp_seq_destroy(slow);
    kvp_seq_destroy(fast);
    rig_close(&r);
}

/* The ending has its slot even in a ring of one that is full. */
static void the_ending_always_has_its_slot(void **state)
{
    rig r;
    kvp_seq_options narrow = {.size = sizeof narrow, .max_tokens = 50, .eos = KVP_EOS_IGNORE,
                              .ring = 1};
    kvp_seq *seq;
    unsigned endings[2] = {0}, tokens[2] = {0};
    (void)state;
    rig_open(&r, 0);
    seq = rig_seq(&r, 1, 5, &narrow);
    assert_int_equal(kvp_batch_add(r.batch, seq), KVP_OK);
    rig_settle(&r);
    assert_int_equal(kvp_seq_cancel(seq), KVP_OK);
    rig_finish(&r, endings, tokens);
    assert_int_equal(endings[1], 1);
    kvp_seq_destroy(seq);
    rig_close(&r);
}

static void a_mask_leaves_endings_alone(void **state)
{
    rig r;
    kvp_seq_options o = {.size = sizeof o, .max_tokens = 100, .eos = KVP_EOS_IGNORE, .ring = 2,
                         .event_mask = KVP_MASK_LOGITS};
    kvp_seq *seq;
    unsigned endings[2] = {0}, tokens[2] = {0};
    (void)state;
    rig_open(&r, 0);
    seq = rig_seq(&r, 1, 5, &o);
    assert_int_equal(kvp_batch_add(r.batch, seq), KVP_OK);
    rig_finish(&r, endings, tokens);
    assert_int_equal(tokens[1], 0);
    assert_int_equal(endings[1], 1);
    assert_int_equal(length_of(seq), 105);
    kvp_seq_destroy(seq);
    rig_close(&r);
}

static void progress_grows_to_the_total(void **state)
{
    rig r;
    kvp_seq_options o = {.size = sizeof o, .max_tokens = 1, .eos = KVP_EOS_IGNORE,
                         .event_mask = KVP_MASK_DEFAULT | KVP_MASK_PROGRESS};
    uint64_t done = 0, reports = 0, start = rig_now();
    kvp_seq *seq;
    kvp_status status = KVP_OK;
    (void)state;
    rig_open(&r, 0);
    seq = rig_seq(&r, 1, 1500, &o);
    assert_int_equal(kvp_batch_add(r.batch, seq), KVP_OK);
    while (status != KVP_DONE) {
        kvp_event e = {.size = sizeof e};
        status = kvp_step(r.batch);
        assert_true(status >= 0);
        while (kvp_next_event(r.batch, &e) == KVP_OK) {
            if (e.kind != KVP_EVENT_PROGRESS) continue;
            assert_int_equal(e.total, 1500);
            assert_true(e.done > done && e.done <= 1500);
            done = e.done;
            reports++;
        }
        if (status == KVP_AGAIN) kvp_wait(r.batch, 1000);
        if (rig_now() - start > RIG_PATIENCE_MS * 1000000ull) fail_msg("no end in sight");
    }
    assert_int_equal(done, 1500);
    assert_true(reports >= 3); /* chunks of 256 at most */
    kvp_seq_destroy(seq);
    rig_close(&r);
}

static void destroying_purges_its_events(void **state)
{
    rig r;
    kvp_seq *gone, *stays;
    unsigned endings[3] = {0}, tokens[3] = {0};
    (void)state;
    rig_open(&r, 0);
    gone = rig_add(&r, 1, 5, 8);
    stays = rig_add(&r, 2, 5, 8);
    rig_settle(&r);
    kvp_seq_destroy(gone);
    rig_take(&r, endings, tokens);
    rig_finish(&r, endings, tokens);
    assert_int_equal(endings[1] + tokens[1], 0);
    assert_int_equal(endings[2], 1);
    assert_int_equal(tokens[2], 8);
    kvp_seq_destroy(stays);
    assert_int_equal(kvp_pool_check(r.pool), KVP_OK);
    rig_close(&r);
}

static void pause_and_resume(void **state)
{
    rig r;
    kvp_seq *paused, *other;
    unsigned endings[3] = {0}, tokens[3] = {0};
    uint64_t length;
    (void)state;
    rig_open(&r, 0);
    paused = rig_add(&r, 1, 5, 40);
    until_first_token(&r);
    assert_int_equal(kvp_seq_pause(paused), KVP_OK);
    assert_int_equal(kvp_seq_pause(paused), KVP_OK);
    rig_finish(&r, endings, tokens); /* what was running comes to its end */
    length = length_of(paused);
    assert_true(length < 45);
    assert_int_equal(state_of(paused), KVP_SEQ_PAUSED);

    other = rig_add(&r, 2, 5, 40);
    rig_finish(&r, endings, tokens);
    assert_int_equal(endings[2], 1);
    assert_int_equal(endings[1], 0);
    assert_int_equal(length_of(paused), length);

    assert_int_equal(kvp_seq_resume(paused), KVP_OK);
    assert_int_equal(kvp_seq_resume(paused), KVP_OK);
    rig_finish(&r, endings, tokens);
    assert_int_equal(endings[1], 1);
    assert_int_equal(length_of(paused), 45);
    assert_int_equal(kvp_seq_pause(paused), KVP_ERR_STATE);
    assert_int_equal(kvp_seq_resume(paused), KVP_ERR_STATE);
    kvp_seq_destroy(paused);
    kvp_seq_destroy(other);
    rig_close(&r);
}

static void after_a_cancel_no_token_follows(void **state)
{
    rig r;
    kvp_seq *seq;
    unsigned endings[2] = {0}, tokens[2] = {0};
    uint64_t length;
    (void)state;
    rig_open(&r, 0);
    seq = rig_add(&r, 1, 5, 1000);
    until_first_token(&r);
    kvp_step(r.batch);
    rig_take(&r, NULL, NULL);
    assert_int_equal(kvp_seq_cancel(seq), KVP_OK);
    length = length_of(seq);
    rig_finish(&r, endings, tokens);
    assert_int_equal(tokens[1], 0);
    assert_int_equal(endings[1], 1);
    assert_int_equal(length_of(seq), length);
    assert_int_equal(state_of(seq), KVP_SEQ_PARKED);
    assert_int_equal(kvp_seq_cancel(seq), KVP_OK); /* in no batch: nothing happens */
    rig_finish(&r, endings, tokens);
    assert_int_equal(endings[1], 1);
    kvp_seq_destroy(seq);
    rig_close(&r);
}

/* A cancelled sequence that is added again gives what it would have given. */
static void a_cancelled_sequence_goes_on_alike(void **state)
{
    rig r;
    kvp_seq *whole, *cut;
    int32_t a[64], b[64];
    size_t n = 0, left;
    (void)state;
    rig_open(&r, 0);
    whole = rig_add(&r, 1, 20, 30);
    rig_finish(&r, NULL, NULL);
    cut = rig_add(&r, 1, 20, 30);
    until_first_token(&r);
    assert_int_equal(kvp_seq_cancel(cut), KVP_OK);
    rig_finish(&r, NULL, NULL);
    left = 50 - (size_t)length_of(cut);
    assert_in_range(left, 1, 29);
    assert_int_equal(kvp_seq_set_max_tokens(cut, left), KVP_OK);
    assert_int_equal(kvp_batch_add(r.batch, cut), KVP_OK);
    rig_finish(&r, NULL, NULL);
    assert_int_equal(kvp_seq_get_tokens(whole, 0, a, 64, &n), KVP_OK);
    assert_int_equal(n, 50);
    assert_int_equal(kvp_seq_get_tokens(cut, 0, b, 64, &n), KVP_OK);
    assert_int_equal(n, 50);
    assert_memory_equal(a, b, 50 * sizeof a[0]);
    kvp_seq_destroy(whole);
    kvp_seq_destroy(cut);
    rig_close(&r);
}

static void remove_has_no_ending(void **state)
{
    rig r;
    kvp_seq *seq;
    unsigned endings[2] = {0};
    (void)state;
    rig_open(&r, 0);
    seq = rig_add(&r, 1, 5, 1000);
    until_first_token(&r);
    assert_int_equal(kvp_batch_remove(r.batch, seq), KVP_OK);
    rig_finish(&r, endings, NULL);
    assert_int_equal(endings[1], 0);
    assert_int_equal(state_of(seq), KVP_SEQ_PARKED);
    assert_int_equal(kvp_batch_remove(r.batch, seq), KVP_ERR_STATE);
    kvp_seq_destroy(seq);
    rig_close(&r);
}

static void a_prompt_alone_can_be_computed(void **state)
{
    rig r;
    kvp_seq_info info = {.size = sizeof info};
    kvp_seq *seq;
    unsigned endings[2] = {0}, tokens[2] = {0};
    (void)state;
    rig_open(&r, 0);
    seq = rig_add(&r, 1, 40, KVP_MAX_TOKENS_NONE);
    rig_finish(&r, endings, tokens);
    assert_int_equal(endings[1], 1);
    assert_int_equal(tokens[1], 0);
    kvp_seq_get_info(seq, &info);
    assert_int_equal(info.length, 40);
    assert_int_equal(info.computed, 40);
    kvp_seq_destroy(seq);
    rig_close(&r);
}

static void the_usage_adds_up(void **state)
{
    rig r;
    kvp_seq *seqs[2];
    kvp_status status = KVP_OK;
    uint64_t start = rig_now();
    unsigned seen = 0;
    (void)state;
    rig_open(&r, 0);
    seqs[0] = rig_add(&r, 5, 64, 8);
    rig_finish(&r, NULL, NULL);
    seqs[1] = rig_add(&r, 5, 64, 8); /* the same tokens: served from the cache */
    while (status != KVP_DONE) {
        kvp_event e = {.size = sizeof e};
        status = kvp_step(r.batch);
        assert_true(status >= 0);
        while (kvp_next_event(r.batch, &e) == KVP_OK) {
            if (e.kind != KVP_EVENT_ENDED) continue;
            seen++;
            assert_int_equal(e.usage->prompt, 64);
            assert_int_equal(e.usage->cached, 63);
            assert_int_equal(e.usage->generated, 8);
            assert_int_equal(e.usage->computed, 1 + 7);
            assert_int_equal(e.usage->recomputed, 0);
            assert_int_equal(e.usage->preemptions, 0);
            assert_true(e.usage->queued_ns <= e.usage->first_token_ns);
            assert_true(e.usage->first_token_ns > 0);
            assert_true(e.usage->first_token_ns <= e.usage->total_ns);
        }
        if (status == KVP_AGAIN) kvp_wait(r.batch, 1000);
        if (rig_now() - start > RIG_PATIENCE_MS * 1000000ull) fail_msg("no end in sight");
    }
    assert_int_equal(seen, 1);
    kvp_seq_destroy(seqs[0]);
    kvp_seq_destroy(seqs[1]);
    rig_close(&r);
}

/* The host reads the logits and says the token; the greedy one, so it equals the library's way. */
static void the_host_chooses(void **state)
{
    rig r;
    kvp_sampling host = {.size = sizeof host, .mode = KVP_SAMPLE_HOST};
    kvp_seq_options o = {.size = sizeof o, .sampling = &host};
    kvp_seq *library, *mine;
    int32_t a[32], b[32];
    size_t n = 0;
    (void)state;
    rig_open(&r, 0);
    library = rig_add(&r, 3, 12, 10);
    rig_finish(&r, NULL, NULL);
    mine = rig_seq(&r, 3, 12, &o);
    assert_int_equal(kvp_batch_add(r.batch, mine), KVP_OK);
    for (int i = 0; i < 10; i++) {
        const float *logits = NULL;
        int32_t best = 0;
        size_t count = 0;
        rig_finish(&r, NULL, NULL);
        assert_int_equal(state_of(mine), KVP_SEQ_HOST);
        assert_int_equal(kvp_seq_get_logits(mine, &logits, &count), KVP_OK);
        assert_int_equal(count, RIG_VOCABULARY);
        for (int32_t t = 1; t < RIG_VOCABULARY; t++)
            if (logits[t] > logits[best]) best = t;
        assert_int_equal(kvp_seq_append(mine, &best, 1), KVP_OK);
        assert_int_equal(kvp_seq_get_logits(mine, &logits, &count), KVP_ERR_STATE);
    }
    assert_int_equal(kvp_seq_get_tokens(library, 0, a, 32, &n), KVP_OK);
    assert_int_equal(n, 22);
    assert_int_equal(kvp_seq_get_tokens(mine, 0, b, 32, &n), KVP_OK);
    assert_int_equal(n, 22);
    assert_memory_equal(a, b, 22 * sizeof a[0]);
    kvp_seq_destroy(library);
    kvp_seq_destroy(mine);
    rig_close(&r);
}

/* A tag says which sequence, so 0 is a tag as good as any other; only a fork without options of its
 * own has its parent's. */
static void a_fork_has_the_tag_it_is_given(void **state)
{
    rig r;
    kvp_seq_options o = {.size = sizeof o};
    kvp_seq_info info = {.size = sizeof info};
    kvp_seq *child = NULL, *same = NULL;
    (void)state;
    rig_open(&r, KVP_THREADS_INLINE);
    kvp_seq *parent = rig_seq(&r, 7, 5, NULL);
    assert_int_equal(kvp_seq_fork(parent, KVP_FORK_END, &o, &child, NULL), KVP_OK);
    assert_int_equal(kvp_seq_get_info(child, &info), KVP_OK);
    assert_int_equal(info.tag, 0);
    assert_int_equal(kvp_seq_fork(parent, KVP_FORK_END, NULL, &same, NULL), KVP_OK);
    assert_int_equal(kvp_seq_get_info(same, &info), KVP_OK);
    assert_int_equal(info.tag, 7);
    kvp_seq_destroy(parent);
    kvp_seq_destroy(child);
    kvp_seq_destroy(same);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_ending_for_each_add),
        cmocka_unit_test(a_refused_add_has_no_ending),
        cmocka_unit_test(events_come_in_order),
        cmocka_unit_test(a_full_ring_pauses_only_its_sequence),
        cmocka_unit_test(the_ending_always_has_its_slot),
        cmocka_unit_test(a_mask_leaves_endings_alone),
        cmocka_unit_test(progress_grows_to_the_total),
        cmocka_unit_test(destroying_purges_its_events),
        cmocka_unit_test(pause_and_resume),
        cmocka_unit_test(after_a_cancel_no_token_follows),
        cmocka_unit_test(a_cancelled_sequence_goes_on_alike),
        cmocka_unit_test(remove_has_no_ending),
        cmocka_unit_test(a_prompt_alone_can_be_computed),
        cmocka_unit_test(the_usage_adds_up),
        cmocka_unit_test(the_host_chooses),
        cmocka_unit_test(a_fork_has_the_tag_it_is_given),
    };
    return cmocka_run_group_tests_name("loop: events", tests, NULL, NULL);
}
