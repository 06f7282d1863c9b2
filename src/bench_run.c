/*
 * One case of `kvpage bench`, a few times.
 *
 * Prompts are random tokens, each under a salt of its own, so that no run finds the prefix of an
 * earlier one; end tokens are ignored, so that every run has the same work. Where only decoding is
 * timed the prompts are computed once and forked for each repeat: a fork copies nothing, and a
 * fresh token behind it makes every repeat generate something new.
 */
#include "bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Sequences seldom move in step to the last token: room for those ahead. */
enum { SLACK = 8 };

/* --- how long, how much --- */

static uint64_t generated_by_each(const bench_result *r)
{
    return r->spec->kind == BENCH_MIXED ? r->steps : BENCH_WARM_STEPS + r->steps + SLACK;
}

uint64_t bench_case_length(const bench_result *r)
{
    switch (r->spec->kind) {
    case BENCH_PREFILL:
    case BENCH_START:
        return r->prompt + 1;
    case BENCH_MIXED: {
        uint64_t decoding = r->prompt + 1 + generated_by_each(r);
        return r->long_prompt + 1 > decoding ? r->long_prompt + 1 : decoding;
    }
    default:
        return r->prompt + 1 + generated_by_each(r);
    }
}

static uint64_t whole_blocks(uint64_t tokens, uint64_t block)
{
    return (tokens + block - 1) / block * block;
}

/* A fork takes one block more than its own tokens: a copy of the one it shares in part. */
uint64_t bench_case_tokens(const bench_result *r, uint64_t block)
{
    uint64_t fork = whole_blocks(1 + generated_by_each(r), block) + block;
    uint64_t prompts = whole_blocks(r->prompt, block) * (r->spec->shared ? 1 : r->sequences);
    switch (r->spec->kind) {
    case BENCH_PREFILL:
    case BENCH_START:
        return whole_blocks(r->prompt + 1, block);
    case BENCH_MIXED:
        return prompts + r->sequences * fork + whole_blocks(r->long_prompt + 1, block);
    default:
        return prompts + r->sequences * fork;
    }
}

/* --- limits --- */

/* Bytes of keys and values that a query at this depth reads, in all layers. */
static double kv_bytes(const bench *b, uint64_t depth)
{
    double element = b->set.kv == KVP_KV_F32 ? 4 : 2, sum = 0;
    kvp_layer_group g;
    for (uint32_t i = 0; kvp_model_get_group(b->session.model, i, &g, sizeof g) == KVP_OK; i++) {
        uint64_t seen = g.window && g.window < depth ? g.window : depth;
        uint64_t width = g.key_dim + (g.value_dim == KVP_DIM_NONE ? 0 : (uint64_t)g.value_dim);
        sum += (double)g.layers * g.kv_heads * (double)width * element * (double)seen;
    }
    return sum;
}

/* Bytes that a step of these sequences must read: the weights, each one's KV, a shared prompt
 * once. */
static double step_bytes(const bench *b, const bench_result *r, uint64_t depth)
{
    double each = kv_bytes(b, depth), once = r->spec->shared ? kv_bytes(b, r->prompt) : 0;
    return (double)b->weight_bytes + once + (double)r->sequences * (each - once);
}

static uint64_t middle_depth(const bench_result *r)
{
    return r->prompt + 1 + BENCH_WARM_STEPS + r->steps / 2;
}

/* --- measures --- */

static bench_measure *measure(bench_result *r, size_t i, const char *name, const char *label,
                              const char *unit)
{
    bench_measure *m = &r->measures[i];
    m->name = name;
    m->label = label;
    m->unit = unit;
    if (r->n_measures <= i) r->n_measures = i + 1;
    return m;
}

static void add_value(bench_measure *m, double value) { m->values[m->n++] = value; }

/* --- errors --- */

static kvp_status too_early(kvp_error *err)
{
    err->status = KVP_ERR_INTERNAL;
    snprintf(err->text, sizeof err->text, "a sequence ended before its measuring did");
    return err->status;
}

/* The status with what the domain says of it. */
static kvp_status told(const bench *b, kvp_status status, kvp_error *err)
{
    if (status == KVP_ERR_CANCELLED) err->status = status;
    else if (status < 0) kvp_pool_last_error(b->session.pool, err);
    return status;
}

/* --- stepping --- */

static void note_gap(bench *b, uint64_t tag, uint64_t now)
{
    bench_gaps *g = b->recording;
    if (g->n == g->capacity) {
        size_t capacity = g->capacity ? 2 * g->capacity : 1024;
        bench_gap *items = realloc(g->items, capacity * sizeof *items);
        if (!items) return; /* a point less in the picture */
        g->items = items;
        g->capacity = capacity;
    }
    g->items[g->n++] = (bench_gap){(double)(now - b->recording_from_ns) / 1e6,
                                   (double)(now - b->given_ns[tag]) / 1e6};
}

static void note_token(bench *b, uint64_t tag, uint64_t now)
{
    if (b->recording && b->given[tag] && tag < BENCH_SEQUENCES_MAX - 1) note_gap(b, tag, now);
    b->given[tag]++;
    b->given_ns[tag] = now;
}

static void show(const bench *b)
{
    kvp_batch_stats stats = {.size = sizeof stats};
    uint64_t rows;
    kvp_batch_get_stats(b->session.batch, &stats);
    rows = stats.rows - b->rows_from;
    progress_show(b->label, rows < b->rows_expected ? rows : b->rows_expected, b->rows_expected);
}

/* The line is as long for every run of a case: it overwrites itself. */
static void announce(bench *b, const bench_result *r, uint64_t run, uint64_t rows)
{
    kvp_batch_stats stats = {.size = sizeof stats};
    char which[24] = "prompts";
    if (run)
        snprintf(which, sizeof which, "run %u of %u", (unsigned)run, (unsigned)b->repeats);
    kvp_batch_get_stats(b->session.batch, &stats);
    snprintf(b->label, sizeof b->label, "%-11s %-12s", r->spec->name, which);
    b->rows_from = stats.rows;
    b->rows_expected = rows;
}

/* One call of kvp_step and what it leads to. All tokens of a step have the same time. */
static kvp_status turn(bench *b)
{
    kvp_event e = {.size = sizeof e};
    kvp_status status = kvp_step(b->session.batch);
    uint64_t now = clock_ns();
    while (kvp_next_event(b->session.batch, &e) == KVP_OK)
        if (e.kind == KVP_EVENT_TOKEN) note_token(b, e.tag, now);
    if (interrupted()) return KVP_ERR_CANCELLED;
    show(b);
    if (status == KVP_AGAIN || status == KVP_STALLED) kvp_wait(b->session.batch, -1);
    return status;
}

static kvp_status until_done(bench *b, kvp_error *err)
{
    kvp_status status;
    do status = turn(b);
    while (status >= 0 && status != KVP_DONE);
    return status < 0 ? told(b, status, err) : KVP_OK;
}

/* Until each of the sequences `from` to before `to` has given so many tokens. */
static kvp_status until_given(bench *b, uint64_t from, uint64_t to, uint64_t least, kvp_error *err)
{
    for (;;) {
        bool all = true;
        kvp_status status;
        for (uint64_t i = from; i < to; i++) all = all && b->given[i] >= least;
        if (all) return KVP_OK;
        status = turn(b);
        if (status < 0) return told(b, status, err);
        for (uint64_t i = from; i < to && status == KVP_DONE; i++)
            if (b->given[i] < least) return too_early(err);
    }
}

static uint64_t given_in_all(const bench *b, uint64_t n)
{
    uint64_t sum = 0;
    for (uint64_t i = 0; i < n; i++) sum += b->given[i];
    return sum;
}

static uint64_t given_most(const bench *b, uint64_t n)
{
    uint64_t most = 0;
    for (uint64_t i = 0; i < n; i++)
        if (b->given[i] > most) most = b->given[i];
    return most;
}

/* --- sequences --- */

static int32_t next_token(bench *b)
{
    for (;;) {
        int32_t token;
        b->random = b->random * 6364136223846793005u + 1442695040888963407u;
        token = (int32_t)((b->random >> 33) % b->info.vocabulary);
        if (!(kvp_token_flags(b->session.model, token) & (KVP_TOKEN_SPECIAL | KVP_TOKEN_END)))
            return token;
    }
}

static kvp_status append_random(bench *b, kvp_seq *seq, uint64_t n)
{
    int32_t tokens[256];
    kvp_status status = KVP_OK;
    while (n && status == KVP_OK) {
        uint64_t count = n < COUNT(tokens) ? n : COUNT(tokens);
        for (uint64_t i = 0; i < count; i++) tokens[i] = next_token(b);
        status = kvp_seq_append(seq, tokens, (size_t)count);
        n -= count;
    }
    return status;
}

/* A sequence with a new prompt, in the batch. */
static kvp_status add_prompt(bench *b, uint64_t tag, uint64_t tokens, uint64_t max_tokens,
                             kvp_seq **out, kvp_error *err)
{
    kvp_seq_options options = {.size = sizeof options, .tag = tag, .salt = &b->salt,
                               .salt_bytes = sizeof b->salt, .max_tokens = max_tokens,
                               .eos = KVP_EOS_IGNORE};
    kvp_status status;
    b->salt++;
    status = kvp_seq_create(b->session.pool, &options, out, err);
    if (status < 0) return status;
    status = append_random(b, *out, tokens);
    if (status == KVP_OK) status = kvp_batch_add(b->session.batch, *out);
    return told(b, status, err);
}

/* The case's sequences: each its prompt, or the one prompt, and a token of its own. */
static kvp_status add_forks(bench *b, const bench_result *r, kvp_error *err)
{
    kvp_seq_options options = {.size = sizeof options, .max_tokens = generated_by_each(r)};
    for (uint64_t i = 0; i < r->sequences; i++) {
        kvp_status status;
        options.tag = i;
        status = kvp_seq_fork(b->prompts[r->spec->shared ? 0 : i], KVP_FORK_END, &options,
                              &b->seqs[i], err);
        if (status < 0) return status;
        status = append_random(b, b->seqs[i], 1);
        if (status == KVP_OK) status = kvp_batch_add(b->session.batch, b->seqs[i]);
        if (status < 0) return told(b, status, err);
    }
    return KVP_OK;
}

static void destroy_all(kvp_seq *seqs[BENCH_SEQUENCES_MAX])
{
    for (size_t i = 0; i < BENCH_SEQUENCES_MAX; i++) {
        kvp_seq_destroy(seqs[i]);
        seqs[i] = NULL;
    }
}

/* Ends a repeat: nothing of it is left in the batch. */
static kvp_status clear_run(bench *b, kvp_error *err)
{
    for (size_t i = 0; i < BENCH_SEQUENCES_MAX; i++)
        if (b->seqs[i]) kvp_batch_remove(b->session.batch, b->seqs[i]);
    destroy_all(b->seqs);
    b->recording = NULL;
    memset(b->given, 0, sizeof b->given);
    return until_done(b, err);
}

/* Computes the prompts that stay. */
static kvp_status read_prompts(bench *b, bench_result *r, kvp_error *err)
{
    uint64_t n = r->spec->shared ? 1 : r->sequences, start = clock_ns();
    kvp_status status = KVP_OK;
    announce(b, r, 0, n * r->prompt);
    for (uint64_t i = 0; i < n && status == KVP_OK; i++)
        status = add_prompt(b, i, r->prompt, KVP_MAX_TOKENS_NONE, &b->prompts[i], err);
    if (status == KVP_OK) status = until_done(b, err);
    r->first_ms = (double)(clock_ns() - start) / 1e6;
    r->prompt_rate = (double)(n * r->prompt) / (r->first_ms / 1e3);
    return status;
}

static void note_blocks(const bench *b, bench_result *r)
{
    kvp_pool_stats stats = {.size = sizeof stats};
    kvp_pool_get_stats(b->session.pool, &stats);
    if (stats.used > r->blocks_used) r->blocks_used = stats.used;
}

/* --- the kinds --- */

static kvp_status run_prefill(bench *b, bench_result *r, uint64_t run, kvp_error *err)
{
    bench_measure *m = measure(r, 0, "rate", NULL, "tok/s");
    uint64_t start;
    kvp_status status;
    announce(b, r, run, r->prompt);
    start = clock_ns();
    status = add_prompt(b, 0, r->prompt, 1, &b->seqs[0], err);
    if (status == KVP_OK) status = until_given(b, 0, 1, 1, err);
    if (status < 0 || !run) return status;
    add_value(m, (double)r->prompt / ((double)(b->given_ns[0] - start) / 1e9));
    return status;
}

static kvp_status run_decode(bench *b, bench_result *r, uint64_t run, kvp_error *err)
{
    bool overhead = r->spec->kind == BENCH_OVERHEAD;
    kvp_batch_stats before = {.size = sizeof before}, after = {.size = sizeof after};
    uint64_t n = r->sequences, start, tokens;
    double seconds;
    bench_measure *m;
    kvp_status status;
    announce(b, r, run, n * (1 + BENCH_WARM_STEPS + r->steps));
    status = add_forks(b, r, err);
    if (status == KVP_OK) status = until_given(b, 0, n, BENCH_WARM_STEPS, err);
    if (status < 0) return status;
    kvp_batch_get_stats(b->session.batch, &before);
    start = clock_ns();
    tokens = given_in_all(b, n);
    status = until_given(b, 0, n, given_most(b, n) + r->steps, err);
    if (status < 0) return status;
    seconds = (double)(clock_ns() - start) / 1e9;
    tokens = given_in_all(b, n) - tokens;
    kvp_batch_get_stats(b->session.batch, &after);
    if (overhead) {
        m = measure(r, 0, "overhead", NULL, "%");
        m->less_is_better = true;
        add_value(m, (double)(after.plan_ns - before.plan_ns) / 1e9 / seconds * 100);
    } else {
        m = measure(r, 0, "rate", NULL, "tok/s");
        m->limit = (double)n * b->bandwidth / step_bytes(b, r, middle_depth(r));
        add_value(m, (double)tokens / seconds);
    }
    return status;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The gap that 99 of 100 tokens stay below while the long prompt is read. */
static double percentile_99(const bench_gaps *g)
{
    static const double rounding = 1e-3; /* the last gaps end when the prompt does */
    double *sorted = malloc((g->n + 1) * sizeof *sorted), value = 0;
    size_t n = 0;
    for (size_t i = 0; sorted && i < g->n; i++)
        if (g->items[i].at_ms > 0 && g->items[i].at_ms <= g->end_ms + rounding)
            sorted[n++] = g->items[i].gap_ms;
    if (n) {
        qsort(sorted, n, sizeof *sorted, by_value);
        value = sorted[(size_t)ceil(0.99 * (double)n) - 1];
    }
    free(sorted);
    return value;
}

static kvp_status decode_around(bench *b, uint64_t n, uint64_t most, kvp_error *err)
{
    uint64_t target = given_most(b, n) + BENCH_MIXED_AROUND;
    return until_given(b, 0, n, target < most ? target : most, err);
}

static kvp_status run_mixed(bench *b, bench_result *r, uint64_t run, kvp_error *err)
{
    enum { LONG = BENCH_SEQUENCES_MAX - 1 };
    bench_measure *gap = measure(r, 0, "gap_p99", "8 generate, a prompt of 8,000 comes in: P99 gap",
                                 "ms");
    bench_measure *rate = measure(r, 1, "rate", "8 generate, a prompt of 8,000 comes in: all tokens",
                                  "tok/s");
    bench_gaps *g = &b->gaps;
    uint64_t n = r->sequences, start, tokens;
    kvp_status status;
    announce(b, r, run, r->long_prompt + n * 4 * BENCH_MIXED_AROUND);
    status = add_forks(b, r, err);
    if (status == KVP_OK) status = until_given(b, 0, n, BENCH_WARM_STEPS, err);
    g->n = 0;
    b->recording = g;
    b->recording_from_ns = clock_ns();
    if (status == KVP_OK) status = decode_around(b, n, r->steps, err);
    if (status < 0) return status;
    start = clock_ns();
    tokens = given_in_all(b, n);
    status = add_prompt(b, LONG, r->long_prompt, 1, &b->seqs[LONG], err);
    if (status == KVP_OK) status = until_given(b, LONG, LONG + 1, 1, err);
    if (status < 0) return status;
    tokens = given_in_all(b, n) - tokens + r->long_prompt;
    g->end_ms = (double)(b->given_ns[LONG] - start) / 1e6;
    note_blocks(b, r);
    status = decode_around(b, n, r->steps, err);
    for (size_t i = 0; i < g->n; i++)
        g->items[i].at_ms -= (double)(start - b->recording_from_ns) / 1e6;
    g->p99_ms = percentile_99(g);
    gap->less_is_better = true;
    if (b->bandwidth > 0)
        gap->limit = step_bytes(b, r, r->prompt + BENCH_MIXED_AROUND) / b->bandwidth * 1e3;
    add_value(gap, g->p99_ms);
    add_value(rate, (double)tokens / (g->end_ms / 1e3));
    return status;
}

static kvp_status run_start(bench *b, bench_result *r, uint64_t start, kvp_error *err)
{
    bench_measure *m = measure(r, 0, "first_token", NULL, "ms");
    kvp_status status = add_prompt(b, 0, r->prompt, 1, &b->seqs[0], err);
    if (status == KVP_OK) status = until_given(b, 0, 1, 1, err);
    if (status < 0) return status;
    m->less_is_better = true;
    if (b->bandwidth > 0) m->limit = (double)b->weight_bytes / b->bandwidth * 1e3;
    add_value(m, (double)(b->given_ns[0] - start) / 1e6);
    return status;
}

/* --- a case --- */

int bench_open_pool(bench *b, uint64_t blocks)
{
    session *s = &b->session;
    kvp_error err = {.size = sizeof err};
    kvp_pool_options pool = {.size = sizeof pool, .block_tokens = (uint32_t)b->set.block,
                             .blocks = blocks, .k_format = b->set.kv, .v_format = b->set.kv,
                             .device = b->set.device};
    /* The blocks are counted to the last one: none to keep free. */
    kvp_batch_options batch = {.size = sizeof batch, .threads = (int32_t)b->set.threads,
                               .watermark = KVP_WATERMARK_NONE};
    if (kvp_pool_create(s->model, &pool, &s->pool, &err) < 0 ||
        kvp_batch_create(s->pool, &batch, &s->batch, &err) < 0)
        return fail_with(&err);
    interrupt_wakes(s->batch);
    return EXIT_DONE;
}

/* The whole way each time, which the other cases have behind them. */
static int start_anew(bench *b, bench_result *r)
{
    kvp_error err = {.size = sizeof err};
    uint64_t block = b->block_tokens;
    for (uint64_t run = 1; run <= b->repeats; run++) {
        uint64_t start = clock_ns();
        int code = session_open_model(&b->session, b->path, &b->set);
        if (code == EXIT_DONE) code = bench_open_pool(b, bench_case_tokens(r, block) / block + 1);
        if (code != EXIT_DONE) return code;
        announce(b, r, run, r->prompt);
        if (run_start(b, r, start, &err) < 0) return fail_with(&err);
        note_blocks(b, r);
        destroy_all(b->seqs);
        session_close(&b->session);
        memset(b->given, 0, sizeof b->given);
    }
    return EXIT_DONE;
}

static kvp_status run_once(bench *b, bench_result *r, uint64_t run, kvp_error *err)
{
    kvp_status status;
    if (r->spec->kind == BENCH_PREFILL) status = run_prefill(b, r, run, err);
    else if (r->spec->kind == BENCH_MIXED) status = run_mixed(b, r, run, err);
    else status = run_decode(b, r, run, err);
    if (status < 0) return status;
    note_blocks(b, r);
    return clear_run(b, err);
}

static kvp_status run_all(bench *b, bench_result *r, kvp_error *err)
{
    /* Of prefill a run that is not counted touches weights and blocks first. */
    bool prefill = r->spec->kind == BENCH_PREFILL;
    kvp_status status = prefill ? run_once(b, r, 0, err) : read_prompts(b, r, err);
    for (uint64_t run = 1; run <= b->repeats && status == KVP_OK; run++)
        status = run_once(b, r, run, err);
    destroy_all(b->prompts);
    return status;
}

int bench_run_case(bench *b, bench_result *r)
{
    kvp_error err = {.size = sizeof err};
    if (r->spec->kind == BENCH_START) {
        int code = start_anew(b, r);
        if (code != EXIT_DONE) return code;
    } else if (run_all(b, r, &err) < 0) {
        return fail_with(&err);
    } else {
        kvp_pool_reset_prefix(b->session.pool, NULL);
    }
    if (r->spec->kind == BENCH_PREFILL) {
        r->prompt_rate = bench_median(&r->measures[0]);
        r->first_ms = (double)r->prompt / r->prompt_rate * 1e3;
    }
    r->done = true;
    return EXIT_DONE;
}
