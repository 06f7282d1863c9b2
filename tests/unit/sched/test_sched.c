/*
 * The scheduler on the pure rooms: admission, shares, fairness, preemption, what the host may do
 * while a step runs, and the cases of A5 and A6.
 */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

static kvp__seq_usage usage(const sim_seq *q) { return kvp__sched_usage(&q->entry); }

static uint32_t used(const sim *s) { return kvp__pool_used(&s->pool, 0); }

/* --- a sequence alone --- */

static void one_sequence_gives_its_tokens(void **state)
{
    (void)state;
    for (uint32_t groups = 1; groups <= 3; groups++) {
        sim *s = sim_create(&(sim_options){ .groups = groups, .chunk = 6 });
        sim_seq *q = sim_new(s, 1, 21, 9, 0);
        assert_int_equal(sim_add(s, q), KVP_OK);
        assert_int_equal(q->entry.state, KVP_SEQ_WAITING);
        assert_int_equal(sim_step(s), 6);
        assert_int_equal(q->entry.state, KVP_SEQ_PREFILL);
        sim_run(s, 50);
        assert_int_equal(q->ending, KVP_END_LENGTH);
        assert_int_equal(q->generated, 9);
        assert_int_equal(q->seq.length, 30);
        assert_int_equal(q->seq.computed, 29);
        assert_int_equal(s->steps, 4 + 8);
        assert_int_equal(q->logits_rows, 9);
        sim_expect_output(q);
        assert_int_equal(usage(q).computed, 29);
        assert_int_equal(s->sched.stats.rows, 29);
        assert_int_equal(s->sched.stats.rows_decode, 8);
        sim_destroy(s);
    }
}

static void adding_twice_empty_or_too_much_is_refused(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .blocks = 4 });
    sim_seq *empty = sim_new(s, 1, 0, 1, 0), *fits = sim_new(s, 2, 16, 1, 0);
    sim_seq *large = sim_new(s, 3, 17, 1, 0);
    kvp_error err = { .size = sizeof err };
    assert_int_equal(sim_add(s, empty), KVP_ERR_STATE);
    assert_int_equal(kvp__sched_add(&s->sched, &large->entry, 100, &err), KVP_ERR_TOO_LARGE);
    assert_int_equal(err.needed, 5);
    assert_int_equal(err.available, 4);
    assert_int_equal(sim_add(s, fits), KVP_OK);
    assert_int_equal(sim_add(s, fits), KVP_ERR_DUPLICATE);
    assert_int_equal(s->sched.entries, 1);
    assert_int_equal(large->entry.state, KVP_SEQ_PARKED);
    sim_run(s, 10);
    assert_int_equal(fits->ending, KVP_END_LENGTH);
    sim_destroy(s);
}

/* A sequence that was added again with nothing new computes its last row again, pin and all. */
static void added_again_it_goes_on(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ 0 });
    sim_seq *q = sim_new(s, 1, 10, 4, 0);
    sim_add(s, q);
    sim_run(s, 20);
    assert_int_equal(q->seq.length, 14);
    assert_int_equal(kvp__seq_pin(&q->seq, 8, NULL), KVP_OK);
    kvp__sched_pinned(&q->entry);
    sim_truncate(s, q, 8);
    assert_int_equal(q->seq.computed, 8);
    sim_add(s, q);
    assert_int_equal(q->seq.pin, 8);
    sim_truncate(s, q, 8); /* cuts nothing, so changes nothing */
    assert_int_equal(q->entry.state, KVP_SEQ_WAITING);
    sim_run(s, 20);
    assert_int_equal(q->seq.length, 12);
    assert_int_equal(usage(q).computed, 4);
    sim_expect_output(q);
    /* Without a cut the last token is there and not computed: nothing is computed twice. */
    q->max_tokens = 3;
    sim_add(s, q);
    sim_run(s, 20);
    assert_int_equal(q->seq.length, 15);
    assert_int_equal(usage(q).computed, 3);
    assert_int_equal(s->pool.counters.tokens_prompt, 10 + 8 + 12);
    sim_expect_output(q);
    sim_destroy(s);
}

/* --- never fits --- */

static void case_b42_what_never_fits_blocks_nobody(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .blocks = 4, .block_tokens = 16 });
    sim_seq *a = sim_new(s, 1, 100, 4, 0), *b = sim_new(s, 2, 10, 4, 0);
    assert_int_equal(sim_add(s, a), KVP_ERR_TOO_LARGE);
    assert_int_equal(sim_add(s, b), KVP_OK);
    assert_int_equal(sim_step(s), 10);
    sim_run(s, 10);
    sim_expect_output(b);
    sim_destroy(s);
}

static void case_b44_a_refused_sequence_is_no_success(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .blocks = 2, .block_tokens = 16 });
    sim_seq *a = sim_new(s, 1, 40, 4, 0);
    assert_int_equal(sim_add(s, a), KVP_ERR_TOO_LARGE);
    assert_int_equal(a->endings, 0);
    assert_int_equal(sim_step(s), 0);
    assert_int_equal(a->endings, 0);
    sim_destroy(s);
}

static void grown_past_the_pool_it_ends_with_all_its_tokens(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .blocks = 3 });
    sim_seq *q = sim_new(s, 1, 5, 100, 0);
    sim_add(s, q);
    sim_run(s, 50);
    assert_int_equal(q->ending, KVP_END_CAPACITY);
    assert_int_equal(q->endings, 1);
    assert_int_equal(q->seq.length, 13); /* twelve places, and the token after the last of them */
    sim_expect_output(q);
    sim_destroy(s);
}

static void case_b90_a_pool_of_one_token_gives_one(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .blocks = 1, .block_tokens = 1 });
    sim_seq *q = sim_new(s, 1, 1, 5, 0);
    sim_add(s, q);
    sim_run(s, 10);
    assert_int_equal(q->generated, 1);
    assert_int_equal(q->ending, KVP_END_CAPACITY);
    sim_expect_output(q);
    sim_destroy(s);
}

/* --- preemption --- */

/* Two sequences that cannot both stay: P(6,4), 8 + 12 tokens each. */
static void pressed_pair(sim **out, sim_seq **a, sim_seq **b)
{
    sim *s = sim_create(&(sim_options){ .blocks = 6, .chunk = 4 });
    *a = sim_new(s, 11, 8, 12, 0);
    *b = sim_new(s, 12, 8, 12, 0);
    assert_int_equal(sim_add(s, *a), KVP_OK);
    assert_int_equal(sim_add(s, *b), KVP_OK);
    *out = s;
}

static void case_b26_recomputation_is_no_cache_hit(void **state)
{
    (void)state;
    sim *s;
    sim_seq *a, *b;
    pressed_pair(&s, &a, &b);
    sim_run(s, 200);
    assert_int_equal(usage(a).cached + usage(b).cached, 0);
    assert_int_equal(s->pool.counters.tokens_cached, 0);
    assert_true(s->sched.stats.preemptions >= 1);
    assert_int_equal(s->pool.counters.preemptions, s->sched.stats.preemptions);
    assert_int_equal(a->entry.preemptions + b->entry.preemptions, s->sched.stats.preemptions);
    assert_int_equal(s->pool.counters.tokens_prompt, 16);
    sim_seq *const both[] = { a, b };
    for (int i = 0; i < 2; i++) /* what was not found again was computed again */
        assert_int_equal(usage(both[i]).computed, 19 + usage(both[i]).recomputed);
    assert_int_equal(s->pool.counters.tokens_reattached,
                     usage(a).reattached + usage(b).reattached);
    sim_destroy(s);
}

static void case_b48_a_preempted_output_is_complete(void **state)
{
    (void)state;
    sim *s;
    sim_seq *a, *b;
    pressed_pair(&s, &a, &b);
    sim_run(s, 200);
    assert_int_equal(a->entry.preemptions, 0); /* it came first */
    assert_true(b->entry.preemptions >= 1);
    assert_int_equal(a->generated, 12);
    assert_int_equal(b->generated, 12);
    assert_int_equal(a->logits_rows, 12);
    assert_int_equal(b->logits_rows, 12);
    sim_expect_output(a);
    sim_expect_output(b);
    sim_destroy(s);
}

static sim_seq *watched;
static uint32_t resumes;

static void look_at_resume(sim *s, const kvp__sched_step *p)
{
    for (uint32_t i = 0; i < p->n_items; i++) {
        const kvp__sched_item *item = &p->items[i];
        const kvp__seq *q = item->entry->seq;
        if (!item->admitted || item->entry->preemptions == 0) continue;
        resumes++;
        assert_true(q->computed <= q->length - 1);
        uint32_t rest = q->length - q->computed;
        assert_int_equal(item->n_rows, rest < s->o.chunk ? rest : s->o.chunk);
        assert_int_equal(q->n_blocks,
                         (item->first_pos + item->n_rows + s->o.block_tokens - 1) /
                             s->o.block_tokens);
    }
}

static void case_b50_a_resume_finds_its_own_blocks(void **state)
{
    (void)state;
    sim *s;
    sim_seq *a, *b;
    pressed_pair(&s, &a, &b);
    s->planned = look_at_resume;
    resumes = 0;
    sim_run(s, 200);
    assert_true(resumes >= 1);
    sim_expect_output(b);
    sim_destroy(s);
}

static void look_at_boundary(sim *s, const kvp__sched_step *p)
{
    (void)s;
    for (uint32_t i = 0; i < p->n_items; i++) {
        const kvp__sched_item *item = &p->items[i];
        if (item->entry != &watched->entry || watched->entry.preemptions == 0) continue;
        assert_int_equal(item->logits, item->first_pos + item->n_rows == watched->seq.length);
        if (watched->seq.length == 13) resumes += item->n_rows;
        if (watched->seq.length == 13) assert_true(item->n_rows <= 4);
    }
}

static void case_b52_the_boundary_is_prompt_and_generated(void **state)
{
    (void)state;
    /* Without the cache, so that all 13 tokens are computed again. */
    sim *s = sim_create(&(sim_options){ .blocks = 8, .chunk = 4, .no_cache = true });
    sim_seq *q = sim_new(s, 1, 8, 12, 0);
    sim_add(s, q);
    while (q->generated < 5) sim_step(s);
    watched = q;
    resumes = 0;
    s->planned = look_at_boundary;
    uint32_t logits_rows = q->logits_rows;
    /* One that has a right to its blocks comes: paused first, so that it gives up all it has. */
    kvp__sched_pause(&s->sched, &q->entry);
    sim_seq *other = sim_new(s, 2, 32, 1, 1);
    sim_add(s, other);
    sim_run(s, 20);
    assert_int_equal(q->seq.computed, 0);
    q->entry.preemptions = 1;
    kvp__sched_resume(&s->sched, &q->entry);
    while (q->generated < 6) sim_step(s);
    assert_int_equal(resumes, 13);
    assert_int_equal(q->logits_rows, logits_rows + 1);
    assert_int_equal(usage(q).recomputed, 12);
    sim_run(s, 50);
    sim_expect_output(q);
    sim_destroy(s);
}

/* The victim is the last in order: lower priority first, then the newest. */
static void who_is_last_in_order_gives_up(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .blocks = 9 });
    sim_seq *high = sim_new(s, 3, 8, 12, 5), *low = sim_new(s, 1, 8, 12, -1);
    sim_seq *mid = sim_new(s, 2, 8, 12, 0);
    sim_add(s, low);
    sim_add(s, high);
    sim_add(s, mid);
    sim_run(s, 300);
    assert_int_equal(high->entry.preemptions, 0);
    assert_true(low->entry.preemptions >= mid->entry.preemptions);
    assert_true(low->entry.preemptions >= 1);
    sim_expect_output(high);
    sim_expect_output(mid);
    sim_expect_output(low);
    sim_destroy(s);
}

/* Preempted entries keep their place: whoever came later does not overtake them. */
static void a_preempted_entry_keeps_its_place(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .blocks = 6, .chunk = 8 });
    sim_seq *a = sim_new(s, 1, 8, 12, 0), *b = sim_new(s, 2, 8, 12, 0);
    sim_seq *c = sim_new(s, 3, 8, 12, 0);
    sim_add(s, a);
    sim_add(s, b);
    sim_add(s, c);
    bool b_ended = false;
    for (int i = 0; i < 300 && kvp__sched_has_work(&s->sched); i++) {
        sim_step(s);
        b_ended = b_ended || b->endings;
        if (c->endings) assert_true(b_ended);
    }
    assert_int_equal(a->endings + b->endings + c->endings, 3);
    sim_destroy(s);
}

/* A large one that does not fit yet is not passed by small ones, or it would never come in. */
static void nobody_passes_one_that_does_not_fit(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .blocks = 16 });
    sim_seq *a = sim_new(s, 1, 32, 8, 0), *b = sim_new(s, 2, 40, 4, 0);
    sim_seq *c = sim_new(s, 3, 4, 4, 0);
    sim_add(s, a);
    sim_step(s);
    sim_add(s, b);
    sim_add(s, c);
    while (!a->endings) {
        sim_step(s);
        if (b->entry.state == KVP_SEQ_WAITING) assert_int_equal(c->rows, 0);
    }
    sim_run(s, 100);
    assert_int_equal(b->endings + c->endings, 2);
    sim_destroy(s);
}

/* An older prompt takes what is there before it takes from others. */
static void a_chunk_shrinks_before_anybody_is_preempted(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .blocks = 10, .chunk = 16 });
    sim_seq *a = sim_new(s, 1, 24, 2, 0), *b = sim_new(s, 2, 20, 20, 0);
    a->by_host = true;
    s->sched.o.chunk_tokens = 4;
    sim_add(s, a);
    sim_step(s);
    kvp__sched_pause(&s->sched, &a->entry); /* one block, and five promised no more */
    s->sched.o.chunk_tokens = 16;
    sim_add(s, b);
    while (b->seq.computed < 27) sim_step(s);
    kvp__sched_resume(&s->sched, &a->entry);
    assert_int_equal(a->entry.state, KVP_SEQ_PREFILL);
    sim_step(s); /* of the ten, a has one and b seven */
    assert_int_equal(b->entry.preemptions, 0);
    assert_int_equal(a->seq.computed, 12);
    assert_int_equal(b->seq.computed, 28);
    sim_run(s, 50);
    assert_true(b->entry.preemptions > 0);
    sim_expect_output(a);
    sim_expect_output(b);
    sim_destroy(s);
}

/* Deep in a prompt a row costs more, so that chunks of equal cost get shorter; but only others who
 * generate gain from that, and an eighth is the least. */
static void deep_chunks_are_shorter_beside_others(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .blocks = 400, .block_tokens = 16, .budget = 256, .chunk = 64 });
    s->sched.o.level_tokens = 100;
    sim_seq *prompt = sim_new(s, 1, 3000, 1, 0), *other = sim_new(s, 2, 10, 400, 0);
    sim_add(s, prompt);
    sim_step(s);
    sim_step(s);
    assert_int_equal(prompt->seq.computed, 128); /* alone: whole chunks */
    sim_add(s, other);
    sim_step(s);
    assert_int_equal(other->seq.computed, 10);
    uint32_t before = prompt->seq.computed, last = 64;
    while (prompt->seq.computed < 2900) {
        sim_step(s);
        uint32_t rows = prompt->seq.computed - before;
        /* Twice the cost, in hundredths of a row at the beginning: of these, and of a first chunk. */
        uint64_t cost = (uint64_t)rows * (200 + 2 * before + rows), whole = 64 * (200 + 64);
        assert_in_range(rows, 9, last);
        if (rows > 9) assert_in_range(cost, whole * 8 / 10, whole * 12 / 10);
        before = prompt->seq.computed;
        last = rows;
    }
    assert_int_equal(last, 9);
    sim_run(s, 500);
    sim_expect_output(prompt);
    sim_expect_output(other);
    sim_destroy(s);
}

/* A waiting entry is not asked for its own blocks, so it keeps them if it does not get in. */
static void who_does_not_get_in_keeps_what_it_has(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .blocks = 8, .no_cache = true });
    sim_seq *a = sim_new(s, 1, 13, 1, 0), *b = sim_new(s, 2, 13, 3, 0);
    sim_add(s, a);
    sim_run(s, 10);
    sim_add(s, b);
    sim_step(s);
    assert_int_equal(used(s), 8);
    sim_append_text(s, a, 3, 4);
    sim_add(s, a);
    sim_step(s); /* it needs a fifth block, and b has the other four */
    assert_int_equal(a->entry.state, KVP_SEQ_WAITING);
    assert_int_equal(a->seq.computed, 13);
    sim_run(s, 20);
    assert_int_equal(a->endings, 2);
    assert_int_equal(usage(a).computed, 5);
    sim_expect_output(b);
    sim_destroy(s);
}

/* The host cannot tell that KV was lost: what it cuts to something once computed waits for it. */
static void a_cut_after_a_preemption_waits_for_the_host(void **state)
{
    (void)state;
    sim *s;
    sim_seq *a, *b;
    pressed_pair(&s, &a, &b);
    while (b->entry.preemptions == 0) sim_step(s);
    assert_int_equal(b->entry.state, KVP_SEQ_WAITING);
    assert_int_equal(b->seq.computed, 0);
    sim_truncate(s, b, b->seq.peak - 2);
    assert_int_equal(b->entry.state, KVP_SEQ_HOST);
    sim_append_text(s, b, 9, 2);
    assert_int_equal(b->entry.state, KVP_SEQ_WAITING);
    sim_run(s, 200);
    assert_int_equal(b->endings, 1);
    sim_expect_output(b);
    sim_destroy(s);
}

/* Admission counts what running prompts will still need, so that they are not preempted by those
 * that came after. */
static void blocks_of_running_prompts_are_spoken_for(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .blocks = 16, .chunk = 4, .budget = 8 });
    sim_seq *a = sim_new(s, 1, 48, 4, 0), *b = sim_new(s, 2, 20, 4, 0);
    sim_add(s, a);
    sim_add(s, b);
    sim_step(s);
    assert_int_equal(b->entry.state, KVP_SEQ_WAITING); /* 12 + 5 > 16, whatever is free now */
    sim_run(s, 100);
    assert_int_equal(s->sched.stats.preemptions, 0);
    sim_destroy(s);
}

static void the_watermark_rounds_down_and_spares_the_only_one(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .blocks = 10, .watermark = 299 });
    assert_int_equal(s->sched.watermark, 2);
    sim_seq *a = sim_new(s, 1, 40, 1, 0);
    sim_add(s, a);
    assert_int_equal(sim_step(s), 16); /* all ten blocks, but it is alone */
    sim_run(s, 10);
    sim_free(s, a);
    sim_seq *b = sim_new(s, 2, 8, 6, 0), *c = sim_new(s, 3, 20, 1, 0), *d = sim_new(s, 4, 24, 1, 0);
    sim_add(s, b);
    sim_step(s);
    sim_add(s, d); /* 3 + 6 leave one */
    sim_step(s);
    assert_int_equal(d->entry.state, KVP_SEQ_WAITING);
    sim_cancel(s, d);
    sim_add(s, c); /* 3 + 5 leave two */
    sim_step(s);
    assert_int_equal(c->entry.state, KVP_SEQ_PREFILL);
    sim_run(s, 50);
    sim_destroy(s);
}

/* Closed loop of lengths from a long-tailed distribution, the way the figures on watermarks were
 * found: it must reduce preemptions, and cost little. */
static void closed_loop(uint32_t watermark, uint64_t *preemptions, uint64_t *steps)
{
    sim *s = sim_create(&(sim_options){ .blocks = 120, .block_tokens = 4, .budget = 64, .chunk = 32,
                                        .max_sequences = 64, .watermark = watermark, .seed = 3,
                                        .no_cache = true });
    uint32_t made = 0, ended = 0;
    while (ended < 300) {
        while (made < 300 && s->sched.waiting.count < 4) {
            uint32_t prompt = 4 + sim_random(s, 20), out = 4 + sim_random(s, 12);
            if (sim_random(s, 4) == 0) out += sim_random(s, 60);
            sim_add(s, sim_new(s, 1000 + made++, prompt, out, 0));
        }
        sim_step(s);
        for (uint32_t i = 0; i < SIM_SEQS; i++)
            if (s->seqs[i].alive && s->seqs[i].endings) {
                sim_expect_output(&s->seqs[i]);
                sim_free(s, &s->seqs[i]);
                ended++;
            }
    }
    *preemptions = s->sched.stats.preemptions;
    *steps = s->steps;
    sim_destroy(s);
}

static void a_watermark_saves_preemptions(void **state)
{
    (void)state;
    uint64_t without, steps_without, with, steps_with;
    closed_loop(KVP_WATERMARK_NONE, &without, &steps_without);
    closed_loop(100, &with, &steps_with);
    print_message("preemptions per completion: %.2f without, %.2f with a watermark of 10 %%; "
                  "steps %llu and %llu\n", (double)without / 300, (double)with / 300,
                  (unsigned long long)steps_without, (unsigned long long)steps_with);
    assert_true(without > 30);
    assert_true(with * 2 < without);
    assert_true(steps_with < steps_without * 11 / 10);
}

/* --- shares --- */

static void case_b56_decodes_go_on_beside_a_long_prompt(void **state)
{
    (void)state;
    for (int decode_first = 0; decode_first < 2; decode_first++) {
        sim *s = sim_create(&(sim_options){
            .blocks = 512, .block_tokens = 16, .budget = 512, .chunk = 256,
            .share = decode_first ? KVP_PREFILL_SHARE_NONE : 500 });
        sim_seq *a = sim_new(s, 1, 10, 100, 0), *b = sim_new(s, 2, 4096, 2, 0);
        sim_add(s, a);
        sim_step(s);
        sim_add(s, b);
        uint32_t before = a->generated, steps = 0;
        while (b->generated == 0) {
            sim_step(s);
            steps++;
        }
        assert_true(steps >= 16);
        assert_true(a->generated - before >= 8);
        if (decode_first) assert_int_equal(a->generated - before, steps);
        sim_destroy(s);
    }
}

static void decodes_take_turns_when_there_are_too_many(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .budget = 4, .max_sequences = 10, .blocks = 200 });
    sim_seq *q[10];
    for (uint32_t i = 0; i < 10; i++) sim_add(s, q[i] = sim_new(s, i, 1 + i % 3, 1000, 0));
    for (uint32_t i = 0; i < 60; i++) sim_step(s);
    uint32_t from[10];
    for (uint32_t i = 0; i < 10; i++) {
        assert_int_equal(q[i]->entry.state, KVP_SEQ_DECODE);
        from[i] = q[i]->generated;
    }
    for (uint32_t i = 0; i < 25; i++) assert_int_equal(sim_step(s), 4);
    for (uint32_t i = 0; i < 10; i++) assert_int_equal(q[i]->generated - from[i], 10);
    sim_destroy(s);
}

/* Prompts get their share, and decodes the rest, for every budget and share. */
static void shares_hold(uint32_t budget, uint32_t share)
{
    enum { DECODES = 24, STEPS = 40 };
    sim *s = sim_create(&(sim_options){ .budget = budget, .max_sequences = DECODES + 8, .chunk = 64,
                                        .blocks = 4000, .block_tokens = 4, .share = share });
    sim_seq *q[DECODES];
    for (uint32_t i = 0; i < DECODES; i++) sim_add(s, q[i] = sim_new(s, i, 1, 100000, 0));
    for (uint32_t i = 0; i < 400 && s->sched.decode.count < DECODES; i++) sim_step(s);
    assert_int_equal(s->sched.decode.count, DECODES);
    for (uint32_t i = 0; i < 4; i++) sim_add(s, sim_new(s, 100 + i, 3000, 1, 0));
    uint64_t prefill = s->sched.stats.rows_prefill, decode = s->sched.stats.rows_decode;
    for (uint32_t i = 0; i < STEPS; i++) assert_int_equal(sim_step(s), budget);
    prefill = s->sched.stats.rows_prefill - prefill;
    decode = s->sched.stats.rows_decode - decode;
    uint64_t all = (uint64_t)budget * STEPS;
    uint64_t thousandths = share == KVP_PREFILL_SHARE_NONE ? 0 : share;
    assert_true(prefill > 0);
    assert_true(decode > 0);
    uint64_t most = budget > 1 ? (uint64_t)(budget - 1) * STEPS : all * 9 / 10;
    if (thousandths >= 100) assert_true(prefill >= kvp__min64(all * thousandths / 1000, most));
    if (DECODES + 1 + budget * thousandths / 1000 <= budget)
        assert_int_equal(decode, (uint64_t)DECODES * STEPS);
    if (share == KVP_PREFILL_SHARE_NONE && budget > 1 && budget <= DECODES)
        assert_int_equal(prefill, STEPS);
    sim_destroy(s);
}

static void prompts_and_decodes_get_their_shares(void **state)
{
    (void)state;
    const uint32_t budgets[] = { 1, 2, 3, 8, 24, 25, 64 };
    const uint32_t shares[] = { KVP_PREFILL_SHARE_NONE, 1, 250, 500, 900, 1000 };
    for (size_t i = 0; i < KVP__COUNT(budgets); i++)
        for (size_t k = 0; k < KVP__COUNT(shares); k++) shares_hold(budgets[i], shares[k]);
}

static void rows_that_prompts_leave_go_to_decodes(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .budget = 8, .share = 750, .blocks = 200 });
    sim_seq *q[7];
    for (uint32_t i = 0; i < 7; i++) sim_add(s, q[i] = sim_new(s, i, 1, 1000, 0));
    for (uint32_t i = 0; i < 5; i++) sim_step(s);
    sim_add(s, sim_new(s, 50, 1, 1, 0));
    assert_int_equal(sim_step(s), 8); /* one row of prompt, seven decodes */
    sim_destroy(s);
}

/* --- prefixes --- */

static void one_system_prompt_is_computed_once(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .blocks = 200, .budget = 64, .chunk = 16 });
    int32_t system[50];
    sim_text(system, 50, 7);
    sim_seq *q[8];
    for (uint32_t i = 0; i < 8; i++) {
        q[i] = sim_new(s, 0, 0, 5, 0);
        sim_append(s, q[i], system, 50);
        sim_append_text(s, q[i], 100 + i, 9);
        sim_add(s, q[i]);
    }
    sim_run(s, 100);
    uint64_t computed = 0;
    for (uint32_t i = 0; i < 8; i++) {
        computed += usage(q[i]).computed;
        if (i > 0) assert_in_range(usage(q[i]).cached, 50, 52);
        sim_expect_output(q[i]);
    }
    assert_true(computed <= 59 + 7 * 9 + 8 * 4);
    sim_destroy(s);
}

/* A leader leads only through the tokens that it shares. */
static void followers_go_as_soon_as_they_can(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .blocks = 200, .budget = 64, .chunk = 8 });
    int32_t common[20];
    sim_text(common, 20, 7);
    sim_seq *q[2];
    for (uint32_t i = 0; i < 2; i++) {
        q[i] = sim_new(s, 0, 0, 3, 0);
        sim_append(s, q[i], common, 20);
        sim_append_text(s, q[i], 50 + i, 100);
        sim_add(s, q[i]);
    }
    for (int i = 0; i < 3; i++) {
        sim_step(s);
        assert_int_equal(q[1]->entry.state, KVP_SEQ_WAITING);
    }
    sim_step(s); /* 24 of the leader's tokens are there */
    assert_int_equal(q[1]->entry.state, KVP_SEQ_PREFILL);
    sim_run(s, 50);
    assert_int_equal(usage(q[1]).cached, 20);
    sim_destroy(s);
}

/* What a leader has computed and the cache nevertheless does not find is not waited for: here
 * eight newer texts with the same beginning stand before it. */
static void nobody_waits_for_what_is_there_already(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .blocks = 200, .block_tokens = 16, .budget = 256,
                                        .chunk = 32, .max_sequences = 20 });
    sim_seq *leader = sim_new(s, 1, 150, 1, 0);
    sim_add(s, leader);
    s->sched.o.chunk_tokens = 24;
    sim_step(s);
    s->sched.o.chunk_tokens = 32;
    for (uint32_t i = 0; i < 9; i++) {
        sim_seq *other = sim_new(s, 1, 17, 1, 0);
        sim_append_text(s, other, 100 + i, 3);
        sim_add(s, other);
    }
    sim_step(s);
    assert_int_equal(leader->seq.computed, 56);
    sim_seq *q = sim_new(s, 1, 31, 1, 0);
    sim_add(s, q);
    assert_true(sim_probe(s, 1, 31) < 30);
    sim_step(s);
    assert_int_not_equal(q->entry.state, KVP_SEQ_WAITING);
    sim_run(s, 30);
    sim_destroy(s);
}

/* Followers hold up nobody, and their leader's end or pause sets them free. */
static void followers_wait_without_blocking(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .blocks = 200, .budget = 64, .chunk = 8 });
    sim_seq *a = sim_new(s, 1, 100, 3, 0), *b = sim_new(s, 1, 90, 3, 0);
    sim_seq *c = sim_new(s, 2, 12, 3, 0), *d = sim_new(s, 1, 100, 3, 5);
    sim_add(s, a);
    sim_step(s);
    sim_add(s, b);
    sim_add(s, c);
    sim_add(s, d);
    sim_step(s);
    assert_int_equal(b->entry.state, KVP_SEQ_WAITING); /* for a */
    assert_int_equal(c->entry.state, KVP_SEQ_PREFILL);
    assert_int_equal(d->entry.state, KVP_SEQ_PREFILL); /* waits for nobody of less priority */
    sim_cancel(s, d);
    kvp__sched_pause(&s->sched, &a->entry);
    sim_step(s);
    assert_int_equal(b->entry.state, KVP_SEQ_PREFILL);
    kvp__sched_resume(&s->sched, &a->entry);
    sim_run(s, 100);
    sim_expect_output(a);
    sim_expect_output(b);
    sim_expect_output(c);
    sim_destroy(s);
}

static void case_b59_nothing_is_found_before_it_is_computed(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .blocks = 16, .block_tokens = 8, .chunk = 6 });
    sim_seq *early = sim_new(s, 2, 24, 1, 0);
    sim_add(s, early);
    sim_cancel(s, early);
    assert_int_equal(sim_probe(s, 2, 25), 0);
    sim_seq *a = sim_new(s, 1, 24, 4, 0);
    sim_add(s, a);
    const uint32_t found[] = { 6, 12, 18 };
    for (int i = 0; i < 3; i++) {
        sim_step(s);
        assert_int_equal(sim_probe(s, 1, 25), found[i]);
    }
    sim_destroy(s);
}

static void cancel_watched(sim *s) { sim_cancel(s, watched); }
static void free_watched(sim *s) { sim_free(s, watched); }

static void case_b59_cancelled_in_flight_nothing_is_found(void **state)
{
    (void)state;
    for (int destroy = 0; destroy < 2; destroy++) {
        sim *s = sim_create(&(sim_options){ .blocks = 16, .block_tokens = 8, .chunk = 6 });
        watched = sim_new(s, 1, 24, 4, 0);
        sim_add(s, watched);
        s->in_flight = destroy ? free_watched : cancel_watched;
        sim_step(s);
        assert_int_equal(sim_probe(s, 1, 25), 0);
        assert_int_equal(used(s), 0);
        sim_destroy(s);
    }
}

static void case_b117_cancel_keeps_whole_chunks(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .blocks = 300, .block_tokens = 16, .chunk = 256,
                                        .budget = 512 });
    sim_seq *q = watched = sim_new(s, 1, 4096, 2, 0);
    sim_add(s, q);
    sim_step(s);
    sim_step(s);
    s->in_flight = cancel_watched;
    sim_step(s); /* the third chunk is running when the cancel comes */
    s->in_flight = NULL;
    assert_int_equal(q->ending, KVP_END_CANCELLED);
    assert_int_equal(q->seq.computed, 512);
    assert_int_equal(q->entry.state, KVP_SEQ_PARKED);
    sim_add(s, q);
    sim_step(s);
    assert_int_equal(q->seq.computed, 768);
    assert_int_equal(usage(q).computed, 256);
    sim_run(s, 30);
    sim_expect_output(q);
    sim_destroy(s);
}

/* The whole pool is one cached prompt, and the same prompt comes again: a copy of its last block
 * would need a block more than there is, so it does without. */
static void a_full_pool_serves_its_own_prompt(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .blocks = 4 });
    sim_seq *a = sim_new(s, 1, 16, 1, 0);
    sim_add(s, a);
    sim_run(s, 10);
    sim_free(s, a);
    sim_seq *b = sim_new(s, 1, 16, 1, 0);
    sim_add(s, b);
    sim_run(s, 10);
    assert_int_equal(b->ending, KVP_END_LENGTH);
    assert_int_equal(usage(b).cached, 12);
    sim_expect_output(b);
    sim_destroy(s);
}

/* The same for a copy-on-write of the only running sequence. */
static void a_full_pool_lets_a_fork_go_on(void **state)
{
    (void)state;
    for (int no_cache = 0; no_cache < 2; no_cache++) {
        sim *s = sim_create(&(sim_options){ .blocks = 4, .no_cache = no_cache });
        sim_seq *a = sim_new(s, 1, 14, 1, 0);
        sim_add(s, a);
        sim_run(s, 10);
        sim_seq *b = sim_fork(s, a, 14);
        b->max_tokens = 3;
        sim_add(s, b);
        sim_run(s, 20);
        assert_int_equal(b->generated, 3);
        sim_expect_output(b);
        sim_destroy(s);
    }
}

static void a_fork_of_what_is_not_computed_yet_shares_it_later(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .blocks = 100, .chunk = 7 });
    sim_seq *a = sim_new(s, 1, 60, 2, 0);
    sim_add(s, a);
    sim_step(s);
    sim_seq *b = sim_fork(s, a, 60);
    sim_add(s, b);
    sim_run(s, 60);
    assert_true(usage(b).computed <= 4);
    sim_expect_output(a);
    sim_expect_output(b);
    sim_destroy(s);
}

/* --- who does not run gives up its blocks --- */

static void holders_give_up_parked_then_paused_then_host(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .blocks = 12, .no_cache = true });
    sim_seq *parked = sim_new(s, 1, 12, 1, 0), *paused = sim_new(s, 2, 12, 9, 0);
    sim_seq *host = sim_new(s, 3, 12, 9, 0);
    host->by_host = true;
    sim_add(s, parked);
    sim_add(s, paused);
    sim_add(s, host);
    sim_step(s);
    kvp__sched_pause(&s->sched, &paused->entry);
    assert_int_equal(parked->entry.state, KVP_SEQ_PARKED);
    assert_int_equal(host->entry.state, KVP_SEQ_HOST);
    assert_int_equal(used(s), 9);
    sim_seq *q = sim_new(s, 4, 16, 30, 0);
    sim_add(s, q);
    sim_step(s);
    assert_int_equal(parked->seq.computed, 0);
    assert_int_equal(paused->seq.computed, 12);
    while (q->seq.length < 26) sim_step(s);
    assert_int_equal(paused->seq.computed, 0);
    assert_int_equal(host->seq.computed, 12);
    while (q->seq.length < 38) sim_step(s);
    assert_int_equal(host->seq.computed, 0);
    assert_int_equal(s->pool.counters.reclaims, 3);
    assert_int_equal(s->sched.stats.preemptions, 0);
    kvp__sched_resume(&s->sched, &paused->entry);
    sim_run(s, 100);
    assert_int_equal(q->generated, 30);
    assert_int_equal(paused->generated, 9);
    assert_int_equal(host->generated, 9);
    sim_expect_output(paused);
    sim_expect_output(host);
    sim_destroy(s);
}

/* B46 without tiers: what does not run holds the blocks that the head of the queue needs. */
static void idle_holders_never_block_the_queue(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .blocks = 4, .block_tokens = 16 });
    sim_seq *r1 = sim_new(s, 1, 40, 8, 0), *r0 = sim_new(s, 2, 60, 2, 0);
    r1->by_host = true;
    sim_add(s, r1);
    for (int i = 0; i < 3; i++) sim_step(s);
    assert_int_equal(r1->entry.state, KVP_SEQ_HOST);
    sim_add(s, r0);
    assert_true(sim_step(s) > 0);
    assert_int_equal(r0->entry.state, KVP_SEQ_PREFILL);
    sim_run(s, 300);
    sim_expect_output(r0);
    sim_expect_output(r1);
    sim_destroy(s);
}

static void pins_in_the_way_are_a_stall(void **state)
{
    (void)state;
    for (int with_cache = 0; with_cache < 2; with_cache++) {
        sim *s = sim_create(&(sim_options){ .blocks = 6, .no_cache = !with_cache });
        sim_seq *pinned = sim_new(s, 1, 12, 1, 0);
        sim_add(s, pinned);
        sim_run(s, 10);
        assert_int_equal(kvp__seq_pin(&pinned->seq, 12, NULL), KVP_OK);
        kvp__sched_pinned(&pinned->entry);
        sim_seq *q = sim_new(s, 2, 16, 4, 0), *r = sim_new(s, 3, 8, 12, 0);
        sim_add(s, q);
        assert_int_equal(sim_step(s), 0);
        assert_true(s->stalled);
        sim_cancel(s, q);
        sim_add(s, r); /* grows until the pin is in its way */
        sim_run(s, 50);
        assert_true(s->stalled);
        assert_int_equal(r->endings, 0);
        assert_int_equal(r->seq.length, 13);
        assert_int_equal(kvp__seq_pin(&pinned->seq, 0, NULL), KVP_OK);
        kvp__sched_pinned(&pinned->entry);
        sim_run(s, 50);
        assert_false(s->stalled);
        assert_int_equal(r->generated, 12);
        sim_expect_output(r);
        sim_destroy(s);
    }
}

/* --- while a step runs --- */

static void append_watched(sim *s) { sim_append_text(s, watched, 77, 5); }

static void a_prompt_may_grow_while_its_last_chunk_runs(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ 0 });
    watched = sim_new(s, 1, 10, 3, 0);
    sim_add(s, watched);
    s->in_flight = append_watched;
    sim_step(s);
    s->in_flight = NULL;
    assert_int_equal(watched->logits_rows, 0); /* the end that it computed is the end no more */
    assert_int_equal(watched->entry.state, KVP_SEQ_PREFILL);
    sim_run(s, 10);
    assert_int_equal(watched->seq.length, 18);
    sim_expect_output(watched);
    sim_destroy(s);
}

static uint32_t cut_to;
static void truncate_watched(sim *s) { sim_truncate(s, watched, cut_to); }

static void a_cut_in_flight_drops_the_result(void **state)
{
    (void)state;
    for (cut_to = 0; cut_to <= 14; cut_to++) {
        sim *s = sim_create(&(sim_options){ .chunk = 6 });
        sim_seq *q = watched = sim_new(s, 1, 12, 8, 0);
        sim_add(s, q);
        sim_step(s);
        if (cut_to > 12)
            while (q->seq.length < 15) sim_step(s);
        s->in_flight = truncate_watched;
        sim_step(s);
        s->in_flight = NULL;
        assert_int_equal(q->seq.length, cut_to);
        assert_int_equal(q->generated, 0);
        if (q->seq.computed == cut_to) assert_int_equal(q->entry.state, KVP_SEQ_HOST);
        if (q->entry.state == KVP_SEQ_HOST) {
            assert_int_equal(sim_step(s), 0);
            sim_append_text(s, q, 5, 3);
        }
        sim_run(s, 20);
        assert_int_equal(q->generated, 8);
        sim_expect_output(q);
        sim_destroy(s);
    }
}

static void cut_to_nothing_it_waits_for_the_host(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .no_cache = true });
    sim_seq *q = sim_new(s, 1, 12, 4, 0);
    sim_add(s, q);
    sim_truncate(s, q, 0);
    assert_int_equal(q->entry.state, KVP_SEQ_HOST);
    assert_false(kvp__sched_has_work(&s->sched));
    sim_append_text(s, q, 2, 3);
    sim_run(s, 10);
    assert_int_equal(q->seq.length, 7);
    sim_expect_output(q);
    sim_destroy(s);
}

static void pause_watched(sim *s)
{
    kvp__sched_pause(&s->sched, &watched->entry);
    sim_check(s);
}

static void a_result_counts_that_comes_after_a_pause(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ 0 });
    sim_seq *q = watched = sim_new(s, 1, 12, 8, 0);
    sim_add(s, q);
    s->in_flight = pause_watched;
    sim_step(s);
    s->in_flight = NULL;
    assert_int_equal(q->entry.state, KVP_SEQ_PAUSED);
    assert_int_equal(q->generated, 1);
    assert_false(kvp__sched_has_work(&s->sched));
    assert_int_equal(sim_step(s), 0);
    kvp__sched_resume(&s->sched, &q->entry);
    assert_int_equal(q->entry.state, KVP_SEQ_DECODE); /* it has lost nothing */
    sim_run(s, 10);
    sim_expect_output(q);
    sim_destroy(s);
}

/* An aborted step leaves lengths, states and used blocks as they were. */
static void an_aborted_step_has_not_been(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .blocks = 40, .chunk = 8, .budget = 20 });
    sim_seq *old = sim_new(s, 1, 30, 1, 0);
    sim_add(s, old);
    sim_run(s, 20);
    sim_free(s, old);
    sim_seq *q[3];
    for (uint32_t i = 0; i < 3; i++) sim_add(s, q[i] = sim_new(s, 1, 11 + 9 * i, 6, 0));
    for (uint32_t i = 0; kvp__sched_has_work(&s->sched); i++) {
        assert_true(i < 200);
        uint32_t before[3][3], in_use = used(s);
        for (int k = 0; k < 3; k++) {
            before[k][0] = q[k]->seq.computed;
            before[k][1] = q[k]->entry.state;
            before[k][2] = q[k]->seq.n_blocks;
        }
        s->abort_next = true;
        sim_step(s);
        assert_int_equal(used(s), in_use);
        for (int k = 0; k < 3; k++) {
            assert_int_equal(before[k][0], q[k]->seq.computed);
            assert_int_equal(before[k][1], q[k]->entry.state);
            assert_int_equal(before[k][2], q[k]->seq.n_blocks);
        }
        sim_step(s);
    }
    for (int k = 0; k < 3; k++) {
        assert_int_equal(q[k]->generated, 6);
        sim_expect_output(q[k]);
    }
    sim_destroy(s);
}

static void case_b58_cancel_in_every_state(void **state)
{
    (void)state;
    uint32_t cancelled[8] = { 0 };
    for (uint64_t seed = 0; seed < 6; seed++) {
        sim *s = sim_create(&(sim_options){ .blocks = 40, .block_tokens = 16, .budget = 96,
                                            .chunk = 24, .max_sequences = 12, .watermark = 30,
                                            .seed = seed });
        sim_seq *q[120];
        for (uint32_t i = 0; i < 120; i++) {
            q[i] = sim_new(s, sim_random(s, 60), 1 + sim_random(s, 200), 1 + sim_random(s, 60), 0);
            assert_int_equal(sim_add(s, q[i]), KVP_OK);
        }
        uint32_t to_cancel = 24;
        for (uint32_t i = 0; kvp__sched_has_work(&s->sched); i++) {
            assert_true(i < 20000);
            sim_step(s);
            watched = q[sim_random(s, 120)];
            if (to_cancel == 0 || !watched->entry.in_batch || sim_random(s, 8)) continue;
            cancelled[watched->entry.preemptions ? 0 : watched->entry.state]++;
            if (sim_random(s, 2)) sim_cancel(s, watched);
            else {
                s->in_flight = cancel_watched;
                sim_step(s);
                s->in_flight = NULL;
            }
            to_cancel--;
        }
        for (uint32_t i = 0; i < 120; i++) {
            assert_int_equal(q[i]->endings, 1);
            sim_expect_output(q[i]);
        }
        sim_destroy(s);
    }
    assert_true(cancelled[KVP_SEQ_WAITING] && cancelled[KVP_SEQ_PREFILL] &&
                cancelled[KVP_SEQ_DECODE] && cancelled[0]);
}

/* The host that chooses tokens: its sequences keep their turn. */
static void the_host_may_choose_every_token(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .blocks = 200, .max_sequences = 3, .budget = 16 });
    sim_seq *q[9];
    for (uint32_t i = 0; i < 9; i++) {
        q[i] = sim_new(s, i, 5 + i, 10, 0);
        q[i]->by_host = i % 3 != 0;
        sim_add(s, q[i]);
    }
    sim_run(s, 500);
    for (uint32_t i = 0; i < 9; i++) {
        assert_int_equal(q[i]->ending, KVP_END_LENGTH);
        assert_int_equal(q[i]->generated, 10);
        assert_int_equal(usage(q[i]).recomputed, 0);
        sim_expect_output(q[i]);
    }
    sim_destroy(s);
}

static uint32_t refuse_at;

static void *refuse_one(void *user, size_t size, size_t align)
{
    if (refuse_at > 0 && --refuse_at == 0) return NULL;
    sim *s = user;
    s->allocations++;
    return aligned_alloc(align, (size + align - 1) / align * align);
}

/* Coming back from the host is no way past those who were ahead. */
static void the_host_does_not_jump_the_queue(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ .max_sequences = 1 });
    sim_seq *a = sim_new(s, 1, 6, 9, 0), *b = sim_new(s, 2, 6, 3, 1);
    a->by_host = true;
    sim_add(s, a);
    sim_step(s);
    sim_add(s, b);
    sim_give(s, a);
    assert_int_equal(a->entry.state, KVP_SEQ_WAITING);
    sim_step(s);
    assert_int_equal(b->entry.state, KVP_SEQ_DECODE);
    assert_int_equal(a->entry.state, KVP_SEQ_WAITING);
    sim_run(s, 50);
    assert_int_equal(usage(a).recomputed, 0);
    sim_expect_output(a);
    sim_expect_output(b);
    sim_destroy(s);
}

static void memory_that_is_refused_leaves_nothing(void **state)
{
    (void)state;
    sim *s = sim_create(&(sim_options){ 0 });
    kvp__hooks scarce = s->hooks;
    scarce.alloc = refuse_one;
    kvp__sched_options o = { .token_budget = 8, .max_sequences = 100, .watermark = 30,
                             .prefill_share = 500, .chunk_tokens = 8 };
    kvp__sched other;
    uint32_t n = 1;
    for (;; n++) {
        kvp_error err = { .size = sizeof err };
        refuse_at = n;
        kvp_status st = kvp__sched_init(&other, &scarce, &o, &s->pool, &s->prefix, &s->holders,
                                        &err);
        if (st == KVP_OK) break;
        assert_int_equal(st, KVP_ERR_NO_MEMORY);
        assert_non_null(strstr(err.text, "100 sequences"));
        kvp__sched_fini(&other); /* takes what a failed init left: nothing */
    }
    assert_int_equal(n, 4);
    kvp__sched_fini(&other);
    kvp__sched_fini(&other);
    sim_destroy(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_sequence_gives_its_tokens),
        cmocka_unit_test(adding_twice_empty_or_too_much_is_refused),
        cmocka_unit_test(added_again_it_goes_on),
        cmocka_unit_test(case_b42_what_never_fits_blocks_nobody),
        cmocka_unit_test(case_b44_a_refused_sequence_is_no_success),
        cmocka_unit_test(grown_past_the_pool_it_ends_with_all_its_tokens),
        cmocka_unit_test(case_b90_a_pool_of_one_token_gives_one),
        cmocka_unit_test(case_b26_recomputation_is_no_cache_hit),
        cmocka_unit_test(case_b48_a_preempted_output_is_complete),
        cmocka_unit_test(case_b50_a_resume_finds_its_own_blocks),
        cmocka_unit_test(case_b52_the_boundary_is_prompt_and_generated),
        cmocka_unit_test(who_is_last_in_order_gives_up),
        cmocka_unit_test(a_preempted_entry_keeps_its_place),
        cmocka_unit_test(nobody_passes_one_that_does_not_fit),
        cmocka_unit_test(a_chunk_shrinks_before_anybody_is_preempted),
        cmocka_unit_test(deep_chunks_are_shorter_beside_others),
        cmocka_unit_test(who_does_not_get_in_keeps_what_it_has),
        cmocka_unit_test(a_cut_after_a_preemption_waits_for_the_host),
        cmocka_unit_test(blocks_of_running_prompts_are_spoken_for),
        cmocka_unit_test(the_watermark_rounds_down_and_spares_the_only_one),
        cmocka_unit_test(a_watermark_saves_preemptions),
        cmocka_unit_test(case_b56_decodes_go_on_beside_a_long_prompt),
        cmocka_unit_test(decodes_take_turns_when_there_are_too_many),
        cmocka_unit_test(prompts_and_decodes_get_their_shares),
        cmocka_unit_test(rows_that_prompts_leave_go_to_decodes),
        cmocka_unit_test(one_system_prompt_is_computed_once),
        cmocka_unit_test(followers_go_as_soon_as_they_can),
        cmocka_unit_test(nobody_waits_for_what_is_there_already),
        cmocka_unit_test(followers_wait_without_blocking),
        cmocka_unit_test(case_b59_nothing_is_found_before_it_is_computed),
        cmocka_unit_test(case_b59_cancelled_in_flight_nothing_is_found),
        cmocka_unit_test(case_b117_cancel_keeps_whole_chunks),
        cmocka_unit_test(a_full_pool_serves_its_own_prompt),
        cmocka_unit_test(a_full_pool_lets_a_fork_go_on),
        cmocka_unit_test(a_fork_of_what_is_not_computed_yet_shares_it_later),
        cmocka_unit_test(holders_give_up_parked_then_paused_then_host),
        cmocka_unit_test(idle_holders_never_block_the_queue),
        cmocka_unit_test(pins_in_the_way_are_a_stall),
        cmocka_unit_test(a_prompt_may_grow_while_its_last_chunk_runs),
        cmocka_unit_test(a_cut_in_flight_drops_the_result),
        cmocka_unit_test(cut_to_nothing_it_waits_for_the_host),
        cmocka_unit_test(a_result_counts_that_comes_after_a_pause),
        cmocka_unit_test(an_aborted_step_has_not_been),
        cmocka_unit_test(case_b58_cancel_in_every_state),
        cmocka_unit_test(the_host_may_choose_every_token),
        cmocka_unit_test(the_host_does_not_jump_the_queue),
        cmocka_unit_test(memory_that_is_refused_leaves_nothing),
    };
    return cmocka_run_group_tests_name("sched", tests, NULL, NULL);
}
