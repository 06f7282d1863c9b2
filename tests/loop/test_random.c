/*
 * A host that does anything at any time: adds, appends, forks, truncates, pauses, cancels,
 * destroys, steps and takes events in random order, in a pool that is too small for all. After
 * every operation the pool is recounted. At the end each token that was generated is compared with
 * what the same model says of the same tokens alone, one at a time, without a prefix cache.
 */
#define _GNU_SOURCE
#include "rig.h"

#include "support/gguf_writer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

enum { SLOTS = 12, LENGTH = 120, OPERATIONS = 220 };

/* What is known of a sequence from outside. */
typedef struct slot {
    kvp_seq *seq;
    bool in_batch, generated[LENGTH + 1]; /* by position: a token event told it */
    int32_t token[LENGTH + 1];
} slot;

typedef struct world {
    rig r;
    slot slots[SLOTS];
    uint64_t rng;
    unsigned adds, endings, forks, refused, checked;
} world;

static uint64_t dice(world *w, uint64_t n) { return gw_rand(&w->rng) % n; }

static void take(world *w, uint64_t most)
{
    kvp_event e = {.size = sizeof e};
    while (most-- && kvp_next_event(w->r.batch, &e) == KVP_OK) {
        slot *s = &w->slots[e.tag];
        assert_ptr_equal(e.seq, s->seq);
        if (e.kind == KVP_EVENT_TOKEN) {
            assert_true(e.position < LENGTH);
            s->generated[e.position] = true;
            s->token[e.position] = e.token;
        } else {
            assert_int_equal(e.kind, KVP_EVENT_ENDED);
            assert_true(s->in_batch);
            if (e.ending == KVP_END_FAILED) fail_msg("failed: %s", kvp_status_name(e.status));
            s->in_batch = false;
            w->endings++;
        }
    }
}

static uint64_t length_of(const slot *s)
{
    kvp_seq_info info = {.size = sizeof info};
    assert_int_equal(kvp_seq_get_info(s->seq, &info), KVP_OK);
    assert_true(info.computed <= info.length);
    assert_true(info.shared_blocks <= info.blocks);
    return info.length;
}

static slot *free_slot(world *w)
{
    for (int i = 0; i < SLOTS; i++)
        if (!w->slots[i].seq) return &w->slots[i];
    return NULL;
}

static slot *some_slot(world *w)
{
    slot *s = &w->slots[dice(w, SLOTS)];
    return s->seq ? s : NULL;
}

/* --- operations --- */

static void append(world *w, slot *s, uint64_t n)
{
    int32_t tokens[LENGTH];
    /* Few kinds of prompt, so that prefixes meet. */
    uint64_t kind = dice(w, 3), length = length_of(s);
    for (uint64_t i = 0; i < n; i++)
        tokens[i] = (int32_t)((length + i) * (kind + 2) % RIG_VOCABULARY);
    kvp_status status = kvp_seq_append(s->seq, tokens, (size_t)n);
    if (status != KVP_OK) w->refused++;
    assert_true(status == KVP_OK || status == KVP_ERR_STATE || status == KVP_ERR_CAPACITY ||
                status == KVP_ERR_TOO_LARGE);
}

static void create(world *w, slot *s)
{
    kvp_seq_options o = {.size = sizeof o, .tag = (uint64_t)(s - w->slots), .context = LENGTH,
                         .max_tokens = 1 + dice(w, 30), .priority = (int32_t)dice(w, 3),
                         .eos = KVP_EOS_IGNORE, .ring = (uint32_t)dice(w, 2) * 3};
    memset(s, 0, sizeof *s);
    assert_int_equal(kvp_seq_create(w->r.pool, &o, &s->seq, NULL), KVP_OK);
    append(w, s, 1 + dice(w, 60));
}

static void fork_one(world *w, const slot *parent, slot *s)
{
    kvp_seq_options o = {.size = sizeof o, .tag = (uint64_t)(s - w->slots)};
    uint64_t length = length_of(parent), at = 1 + dice(w, length);
    *s = *parent;
    s->seq = NULL;
    s->in_batch = false;
    for (uint64_t i = at; i <= LENGTH; i++) s->generated[i] = false;
    assert_int_equal(kvp_seq_fork(parent->seq, at == length ? KVP_FORK_END : at, &o, &s->seq, NULL),
                     KVP_OK);
    w->forks++;
}

static void add(world *w, slot *s)
{
    kvp_status status = kvp_batch_add(w->r.batch, s->seq);
    if (status == KVP_OK) {
        assert_false(s->in_batch);
        s->in_batch = true;
        w->adds++;
    } else {
        w->refused++;
        assert_true(status == KVP_ERR_DUPLICATE || status == KVP_ERR_TOO_LARGE ||
                    status == KVP_ERR_STATE || status == KVP_ERR_CAPACITY);
    }
}

static void truncate_to(world *w, slot *s)
{
    uint64_t length, at;
    take(w, UINT64_MAX); /* events of what is cut would come late */
    length = length_of(s);
    at = dice(w, length + 1);
    assert_int_equal(kvp_seq_truncate(s->seq, at), KVP_OK);
    assert_int_equal(length_of(s), at);
    for (uint64_t i = at; i <= LENGTH; i++) s->generated[i] = false;
}

static void destroy(world *w, slot *s)
{
    kvp_seq_destroy(s->seq);
    if (s->in_batch) w->endings++; /* will never come */
    memset(s, 0, sizeof *s);
}

static void operate(world *w)
{
    slot *s = some_slot(w), *empty = free_slot(w);
    uint64_t what = dice(w, 100);
    if (what < 40) {
        assert_true(kvp_step(w->r.batch) >= 0);
    } else if (what < 50) {
        take(w, 1 + dice(w, 20));
    } else if (!s) {
        if (empty) create(w, empty);
    } else if (what < 60) {
        if (empty) create(w, empty);
    } else if (what < 75) {
        add(w, s);
    } else if (what < 80) {
        append(w, s, 1 + dice(w, 5));
    } else if (what < 86) {
        if (empty && length_of(s)) fork_one(w, s, empty);
    } else if (what < 89) {
        truncate_to(w, s);
    } else if (what < 91) {
        assert_int_equal(kvp_seq_pin(s->seq, dice(w, length_of(s) + 1)) < 0, 0);
        assert_int_equal(kvp_seq_pin(s->seq, 0), KVP_OK);
    } else if (what < 94) {
        kvp_seq_pause(s->seq);
    } else if (what < 97) {
        kvp_seq_resume(s->seq);
    } else if (what < 98) {
        assert_int_equal(kvp_seq_cancel(s->seq), KVP_OK);
    } else {
        destroy(w, s);
    }
    kvp_error err = {.size = sizeof err};
    if (kvp_pool_check(w->r.pool) != KVP_OK) {
        kvp_pool_last_error(w->r.pool, &err);
        fail_msg("%s", err.text);
    }
}

/* Lets everything come to its end: whoever was cut to nothing is cancelled. */
static void wind_up(world *w)
{
    uint64_t start = rig_now();
    for (int i = 0; i < SLOTS; i++)
        if (w->slots[i].seq) kvp_seq_resume(w->slots[i].seq);
    for (;;) {
        kvp_status status = kvp_step(w->r.batch);
        if (status < 0) fail_msg("step: %s", kvp_status_name(status));
        take(w, UINT64_MAX);
        if (status == KVP_DONE) break;
        if (status == KVP_AGAIN || status == KVP_STALLED) kvp_wait(w->r.batch, 1000);
        if (rig_now() - start > RIG_PATIENCE_MS * 1000000ull) fail_msg("no end in sight");
    }
    for (int i = 0; i < SLOTS; i++)
        if (w->slots[i].seq) assert_int_equal(kvp_seq_cancel(w->slots[i].seq), KVP_OK);
    while (kvp_step(w->r.batch) != KVP_DONE) take(w, UINT64_MAX);
    take(w, UINT64_MAX);
    assert_int_equal(w->endings, w->adds);
}

/* --- the oracle --- */

static void check_alone(world *w, rig *alone, const slot *s)
{
    kvp_sampling host = {.size = sizeof host, .mode = KVP_SAMPLE_HOST};
    kvp_seq_options o = {.size = sizeof o, .sampling = &host};
    int32_t tokens[LENGTH + 1];
    size_t n = 0;
    kvp_seq *seq = NULL;
    assert_int_equal(kvp_seq_get_tokens(s->seq, 0, tokens, LENGTH + 1, &n), KVP_OK);
    if (n == 0) return;
    assert_int_equal(kvp_seq_create(alone->pool, &o, &seq, NULL), KVP_OK);
    assert_int_equal(kvp_seq_append(seq, tokens, 1), KVP_OK);
    assert_int_equal(kvp_batch_add(alone->batch, seq), KVP_OK);
    for (size_t i = 1; i < n; i++) {
        const float *logits = NULL;
        size_t count = 0;
        int32_t best = 0;
        rig_finish(alone, NULL, NULL);
        assert_int_equal(kvp_seq_get_logits(seq, &logits, &count), KVP_OK);
        for (int32_t t = 1; t < RIG_VOCABULARY; t++)
            if (logits[t] > logits[best]) best = t;
        if (s->generated[i]) {
            assert_int_equal(tokens[i], s->token[i]);
            if (best != tokens[i])
                fail_msg("position %zu of %zu: %d, alone %d", i, n, tokens[i], best);
            w->checked++;
        }
        assert_int_equal(kvp_seq_append(seq, &tokens[i], 1), KVP_OK);
    }
    kvp_seq_destroy(seq);
}

/* --- worlds --- */

/* Sizes differ by the seed; all share one model file. */
static void open_world(world *w, rig *alone, uint64_t seed)
{
    kvp_pool_options po = {.size = sizeof po, .block_tokens = 1u << seed % 5};
    kvp_batch_options bo = {.size = sizeof bo, .token_budget = 8 + (uint32_t)(seed * 7 % 60),
                            .max_sequences = 2 + (uint32_t)(seed % 7),
                            .chunk_tokens = 3 + (uint32_t)(seed * 5 % 40),
                            .threads = seed % 3 ? (int32_t)(seed % 3) : KVP_THREADS_INLINE};
    kvp_error err = {.size = sizeof err};
    memset(w, 0, sizeof *w);
    w->rng = seed * 0x9e3779b97f4a7c15u + 1;
    w->r.model = alone->model;
    po.blocks = 130 / po.block_tokens + 1 + seed % 9 * (16 / po.block_tokens + 1);
    if (kvp_pool_create(w->r.model, &po, &w->r.pool, &err) < 0 ||
        kvp_batch_create(w->r.pool, &bo, &w->r.batch, &err) < 0)
        fail_msg("%s", err.text);
}

static void close_world(world *w)
{
    kvp_pool_stats stats = {.size = sizeof stats};
    for (int i = 0; i < SLOTS; i++) kvp_seq_destroy(w->slots[i].seq);
    kvp_batch_destroy(w->r.batch);
    assert_int_equal(kvp_pool_get_stats(w->r.pool, &stats), KVP_OK);
    assert_int_equal(stats.used, 0);
    assert_int_equal(stats.idle + stats.free, stats.blocks);
    assert_int_equal(kvp_pool_check(w->r.pool), KVP_OK);
    assert_int_equal(kvp_pool_reset_prefix(w->r.pool, NULL), KVP_OK);
    assert_int_equal(kvp_pool_get_stats(w->r.pool, &stats), KVP_OK);
    assert_int_equal(stats.free, stats.blocks);
    kvp_pool_destroy(w->r.pool);
}

static void open_alone(rig *alone)
{
    gw_model tiny = {.head_dim = 16, .context = 4096, .seed = 11};
    kvp_pool_options po = {.size = sizeof po, .blocks = 16,
                           .prefix_cache = KVP_PREFIX_CACHE_OFF};
    kvp_batch_options bo = {.size = sizeof bo, .threads = KVP_THREADS_INLINE};
    size_t bytes;
    kvp_error err = {.size = sizeof err};
    memset(alone, 0, sizeof *alone);
    alone->file = gw_tiny(&tiny, &bytes);
    if (kvp_model_open_memory(alone->file, bytes, NULL, &alone->model, &err) < 0 ||
        kvp_pool_create(alone->model, &po, &alone->pool, &err) < 0 ||
        kvp_batch_create(alone->pool, &bo, &alone->batch, &err) < 0)
        fail_msg("%s", err.text);
}

static void any_order_gives_the_same_tokens(void **state)
{
    static world w;
    rig alone;
    uint64_t checked = 0, preemptions = 0, copied = 0, cached = 0;
    const char *asked = getenv("KVPAGE_TEST_ROUNDS");
    uint64_t rounds = asked ? strtoull(asked, NULL, 10) : getenv("KVPAGE_SANITIZED") ? 6 : 40;
    (void)state;
    open_alone(&alone);
    for (uint64_t seed = 1; seed <= rounds; seed++) {
        kvp_pool_stats stats = {.size = sizeof stats};
        open_world(&w, &alone, seed);
        for (int i = 0; i < OPERATIONS; i++) operate(&w);
        wind_up(&w);
        for (int i = 0; i < SLOTS; i++)
            if (w.slots[i].seq) check_alone(&w, &alone, &w.slots[i]);
        kvp_pool_get_stats(w.r.pool, &stats);
        checked += w.checked;
        preemptions += stats.preemptions;
        copied += stats.blocks_copied;
        cached += stats.tokens_cached;
        close_world(&w);
    }
    print_message("%llu tokens compared, %llu preemptions, %llu blocks copied, %llu cached\n",
                  (unsigned long long)checked, (unsigned long long)preemptions,
                  (unsigned long long)copied, (unsigned long long)cached);
    assert_true(checked > rounds * 10);
    assert_true(cached > 0 && copied > 0);
    rig_close(&alone);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_order_gives_the_same_tokens),
    };
    return cmocka_run_group_tests_name("loop: random", tests, NULL, NULL);
}
