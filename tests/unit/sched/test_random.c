/*
 * Random workloads on tiny pools: everything the host may do, between steps and while one runs, in
 * any order. The device checks every row's context and every token; the rooms are recounted after
 * every operation; in the end everybody must have ended, in a bounded number of steps.
 *
 * A failing workload prints its seed; one_workload(seed) repeats it.
 */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

#define WORKLOADS 400
#define LIVE 14

static uint64_t totals[4]; /* preemptions, reattached, cached, copied */

static sim_seq *any(sim *s)
{
    for (int tries = 0; tries < 8; tries++) {
        sim_seq *q = &s->seqs[sim_random(s, LIVE)];
        if (q->alive) return q;
    }
    return NULL;
}

static uint32_t alive(const sim *s)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < SIM_SEQS; i++) n += s->seqs[i].alive;
    return n;
}

static uint32_t pool_tokens(const sim *s) { return s->o.blocks * s->o.block_tokens; }

/* A sequence of a text that others have too, and an end of its own. */
static void arrive(sim *s)
{
    if (alive(s) >= LIVE) return;
    uint32_t most = pool_tokens(s), shared = sim_random(s, most), own = sim_random(s, 9);
    sim_seq *q = sim_new(s, sim_random(s, 3), shared, 1 + sim_random(s, 14),
                         (int32_t)sim_random(s, 3) - 1);
    sim_append_text(s, q, 100 + s->random % 1000, own);
    q->by_host = sim_random(s, 4) == 0;
    kvp_status st = sim_add(s, q);
    if (q->seq.length == 0) assert_int_equal(st, KVP_ERR_STATE);
    else if (q->seq.length > most) assert_int_equal(st, KVP_ERR_TOO_LARGE);
    else assert_int_equal(st, KVP_OK);
}

static void fork_one(sim *s, sim_seq *q)
{
    if (alive(s) >= LIVE) return;
    sim_seq *child = sim_fork(s, q, sim_random(s, q->seq.length + 1));
    child->by_host = sim_random(s, 2);
    child->max_tokens = 1 + sim_random(s, 10);
    if (sim_random(s, 3) == 0) sim_append_text(s, child, 7, sim_random(s, 5));
}

static void append_one(sim *s, sim_seq *q)
{
    bool generating = q->entry.state == KVP_SEQ_DECODE ||
                      (q->entry.in_batch && q->entry.generating && !q->entry.paused);
    if (generating || q->seq.length >= pool_tokens(s)) return;
    sim_append_text(s, q, 200 + sim_random(s, 50), 1 + sim_random(s, 4));
}

static void pin_one(sim *s, sim_seq *q)
{
    uint32_t pin = sim_random(s, 2) ? sim_random(s, q->seq.length + 1) : 0;
    assert_int_equal(kvp__seq_pin(&q->seq, pin, NULL), KVP_OK);
    kvp__sched_pinned(&q->entry);
}

static void something(sim *s)
{
    sim_seq *q = any(s);
    uint32_t what = sim_random(s, 16);
    if (!q || what < 4) {
        arrive(s);
        return;
    }
    switch (what) {
    case 4: sim_cancel(s, q); break;
    case 5: sim_free(s, q); break;
    case 6:
    case 7: fork_one(s, q); break;
    case 8: kvp__sched_pause(&s->sched, &q->entry); break;
    case 9:
    case 10: kvp__sched_resume(&s->sched, &q->entry); break;
    case 11: sim_truncate(s, q, sim_random(s, q->seq.length + 1)); break;
    case 12: append_one(s, q); break;
    case 13: pin_one(s, q); break;
    case 14:
        if (q->asks) sim_give(s, q);
        break;
    default:
        if (!q->entry.in_batch && q->seq.length > 0) (void)sim_add(s, q);
    }
    sim_check(s);
}

static void some_things(sim *s)
{
    for (uint32_t n = sim_random(s, 3); n > 0; n--) something(s);
}

/* A host at the end of its day: nothing is held back any more. */
static void let_go(sim *s)
{
    for (uint32_t i = 0; i < SIM_SEQS; i++) {
        sim_seq *q = &s->seqs[i];
        if (!q->alive) continue;
        (void)kvp__seq_pin(&q->seq, 0, NULL);
        kvp__sched_pinned(&q->entry);
        kvp__sched_resume(&s->sched, &q->entry);
        if (q->entry.state == KVP_SEQ_HOST && !q->asks) sim_cancel(s, q); /* after a cut */
    }
    sim_check(s);
}

static void note(const sim *s)
{
    totals[0] += s->sched.stats.preemptions;
    totals[1] += s->pool.counters.tokens_reattached;
    totals[2] += s->pool.counters.tokens_cached;
    totals[3] += s->pool.counters.tokens_copied;
}

static void one_workload(uint64_t seed)
{
    sim *s = sim_create(&(sim_options){ .seed = seed, .blocks = 1 });
    sim_options o = { .groups = 1 + sim_random(s, 2), .block_tokens = 1u << sim_random(s, 5),
                      .budget = 1 + sim_random(s, 40), .max_sequences = 1 + sim_random(s, 8),
                      .chunk = 1 + sim_random(s, 24), .no_cache = sim_random(s, 5) == 0,
                      .watermark = sim_random(s, 2) ? sim_random(s, 300) : 0, .seed = seed };
    o.blocks = 2 + sim_random(s, 96 / o.block_tokens + 2);
    o.share = sim_random(s, 4) ? 1 + sim_random(s, 1000) : KVP_PREFILL_SHARE_NONE;
    sim_destroy(s);

    s = sim_create(&o);
    for (uint32_t i = 0; i < 120; i++) {
        some_things(s);
        s->in_flight = sim_random(s, 3) == 0 ? some_things : NULL;
        s->abort_next = sim_random(s, 12) == 0;
        uint32_t pinned = s->pool.n_pinned;
        sim_step(s);
        if (s->stalled && pinned == 0) fail_msg("seed %llu: stalled without a pin",
                                                (unsigned long long)seed);
    }
    s->in_flight = NULL;
    s->abort_next = false;
    let_go(s);
    sim_run(s, 4000);
    if (s->stalled) fail_msg("seed %llu: stalled without a pin", (unsigned long long)seed);
    for (uint32_t i = 0; i < SIM_SEQS; i++)
        if (s->seqs[i].alive) assert_false(s->seqs[i].entry.in_batch);
    note(s);
    sim_destroy(s);
}

static void random_workloads_end_with_the_right_tokens(void **state)
{
    (void)state;
    uint32_t n = getenv("KVPAGE_SANITIZED") ? WORKLOADS / 4 : WORKLOADS;
    for (uint64_t seed = 1; seed <= n; seed++) one_workload(seed);
    print_message("%u workloads: %llu preemptions; tokens: %llu found again, %llu from the cache, "
                  "%llu copied\n", n, (unsigned long long)totals[0],
                  (unsigned long long)totals[1], (unsigned long long)totals[2],
                  (unsigned long long)totals[3]);
    for (size_t i = 0; i < KVP__COUNT(totals); i++) assert_true(totals[i] > 0);
}

/* Without a host that interferes: each ends with all that it was to generate, unless the pool is
 * too small for it alone. */
static void everybody_gets_all_its_tokens(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 60; seed++) {
        sim *s = sim_create(&(sim_options){ .seed = seed, .blocks = 20, .block_tokens = 4,
                                            .budget = 1 + (uint32_t)seed % 9, .chunk = 5,
                                            .max_sequences = 1 + (uint32_t)seed % 6 });
        sim_seq *q[16];
        for (uint32_t i = 0; i < 16; i++) {
            q[i] = sim_new(s, sim_random(s, 4), 1 + sim_random(s, 40), 1 + sim_random(s, 60),
                           (int32_t)sim_random(s, 2));
            assert_int_equal(sim_add(s, q[i]), KVP_OK);
        }
        sim_run(s, 20000);
        for (uint32_t i = 0; i < 16; i++) {
            assert_int_equal(q[i]->endings, 1);
            sim_expect_output(q[i]);
            if (q[i]->ending == KVP_END_CAPACITY) assert_int_equal(q[i]->seq.length, 81);
            else assert_int_equal(q[i]->generated, q[i]->max_tokens);
        }
        sim_destroy(s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(everybody_gets_all_its_tokens),
        cmocka_unit_test(random_workloads_end_with_the_right_tokens),
    };
    return cmocka_run_group_tests_name("sched, random", tests, NULL, NULL);
}
