/*
 * Same tokens, same bits: random schedules through the public interface, against each sequence
 * alone in a fresh pool.
 *
 * A schedule is a model at some instruction-set level, a pool of some block size that is mostly too
 * small, a batch of some budgets and threads, and a host that adds, forks, cuts, pauses, cancels,
 * pins and destroys at random. Whenever logits come out, the tokens they belong to and the logits
 * are written down; tokens that the library chose are written down too. In the end the same tokens
 * are run alone - one sequence, no cache, blocks of 16, inline, at this machine's best level - and
 * every bit is compared. So the levels are compared with each other as well.
 *
 * Results of lone runs are kept by their tokens, since schedules draw from few texts.
 */
#include "support/fixed_run.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum {
    SCHEDULES = 1000,
    SANITIZED_SCHEDULES = 150,
    EMULATED_SCHEDULES = 40,
    MAX_SEQS = 10,
    MAX_LENGTH = 96,
    MAX_NOTES = 512,
    VOCABULARY = 64,
    LEVELS = 5,
};

/* --- models: every one at every level --- */

static kvp_model *models[LEVELS][FIXED_MODELS];
static uint8_t *files[LEVELS][FIXED_MODELS];
static int n_levels; /* the last one is the best */

static int open_models(void **state)
{
    (void)state;
    for (uint32_t cap = KVP_CPU_GENERIC; cap <= KVP_CPU_AMX; cap++) {
        for (int i = 0; i < FIXED_MODELS; i++) {
            kvp_error err = { .size = sizeof err };
            models[n_levels][i] = fixed_open(i, cap, &files[n_levels][i], &err);
            if (!models[n_levels][i]) fail_msg("%s: %s", fixed_models[i].name, err.text);
        }
        if (fixed_level(models[n_levels][0]) == cap) {
            n_levels++;
            continue;
        }
        for (int i = 0; i < FIXED_MODELS; i++) {
            kvp_model_destroy(models[n_levels][i]);
            free(files[n_levels][i]);
        }
    }
    return n_levels ? 0 : 1;
}

static int close_models(void **state)
{
    (void)state;
    for (int l = 0; l < n_levels; l++)
        for (int i = 0; i < FIXED_MODELS; i++) {
            kvp_model_destroy(models[l][i]);
            free(files[l][i]);
        }
    return 0;
}

/* --- what is known from lone runs: (model, tokens) -> logits --- */

typedef struct known {
    uint64_t key; /* 0: empty */
    float logits[VOCABULARY];
} known;

enum { KNOWN = 1 << 17 };
static known *knowledge;
static uint32_t n_known;

static uint64_t key_of(int model, const int32_t *tokens, uint32_t n)
{
    uint64_t h = ((uint64_t)model + 1) * 0xd6e8feb86659fd93u;
    for (uint32_t i = 0; i < n; i++) {
        h = (h ^ (uint64_t)tokens[i]) * 0x9e3779b97f4a7c15u;
        h ^= h >> 29;
    }
    return h | 1;
}

static known *find_known(uint64_t key)
{
    known *k = &knowledge[key >> 20 & (KNOWN - 1)];
    while (k->key && k->key != key) k = k == &knowledge[KNOWN - 1] ? knowledge : k + 1;
    return k;
}

/* --- a schedule --- */

typedef struct note {
    uint32_t n;            /* the first n tokens ... */
    int32_t tokens[MAX_LENGTH];
    float *logits;         /* ... gave these; NULL: */
    int32_t chosen;        /* the library chose this one, greedily */
} note;

typedef struct member {
    kvp_seq *seq;
    bool in_batch;
    bool by_host;
    bool wanted;           /* logits wait for a token */
    uint32_t rounds;       /* more that the host wants of it */
} member;

typedef struct schedule {
    uint64_t seed, random;
    int model, level;
    uint32_t capacity;     /* tokens the pool holds */
    kvp_pool *pool;
    kvp_batch *batch;
    member members[MAX_SEQS];
    note *notes;
    uint32_t n_notes;
} schedule;

static struct {
    uint64_t logits, tokens, preemptions, cached, reattached, copied, forks, cuts, evicted;
} totals;

static uint32_t pick(schedule *s, uint32_t below)
{
    return (uint32_t)(gw_rand(&s->random) % below);
}

static void must(schedule *s, kvp_status st, const char *what)
{
    if (st >= 0) return;
    kvp_error err = { .size = sizeof err };
    kvp_pool_last_error(s->pool, &err);
    fail_msg("schedule %llu: %s: %s (%s)", (unsigned long long)s->seed, what, kvp_status_name(st),
             err.text);
}

static uint32_t length_of(schedule *s, const member *m)
{
    kvp_seq_info i = { .size = sizeof i };
    must(s, kvp_seq_get_info(m->seq, &i), "info");
    return (uint32_t)i.length;
}

static uint32_t state_of(schedule *s, const member *m)
{
    kvp_seq_info i = { .size = sizeof i };
    must(s, kvp_seq_get_info(m->seq, &i), "info");
    return i.state;
}

static note *new_note(schedule *s, const member *m, uint32_t n)
{
    if (s->n_notes == MAX_NOTES) fail_msg("more notes than room for them");
    note *t = &s->notes[s->n_notes++];
    int32_t all[MAX_LENGTH];
    size_t count = 0;
    must(s, kvp_seq_get_tokens(m->seq, 0, all, MAX_LENGTH, &count), "tokens");
    assert_true(n <= count);
    t->n = n;
    memcpy(t->tokens, all, n * sizeof *all);
    t->logits = NULL;
    return t;
}

static void text(int32_t *out, uint32_t n, uint32_t which)
{
    uint64_t state = 1000 + which;
    for (uint32_t i = 0; i < n; i++) out[i] = (int32_t)(gw_rand(&state) % VOCABULARY);
}

/* Room for n more tokens, one left for what may be generated. */
static uint32_t room_for(schedule *s, const member *m, uint32_t n)
{
    uint32_t length = length_of(s, m), context = MAX_LENGTH - 2;
    uint32_t most = s->capacity < context ? s->capacity : context;
    uint32_t room = most > length + 1 ? most - length - 1 : 0;
    return n < room ? n : room;
}

static bool append(schedule *s, member *m, uint32_t which, uint32_t n)
{
    int32_t tokens[MAX_LENGTH];
    n = room_for(s, m, n);
    if (n == 0) return false;
    text(tokens, n, which);
    must(s, kvp_seq_append(m->seq, tokens, n), "append");
    m->wanted = false;
    return true;
}

static member *vacant(schedule *s)
{
    for (int i = 0; i < MAX_SEQS; i++)
        if (!s->members[i].seq) return &s->members[i];
    return NULL;
}

static void add(schedule *s, member *m)
{
    if (m->in_batch || length_of(s, m) == 0 || length_of(s, m) > s->capacity) return;
    must(s, kvp_batch_add(s->batch, m->seq), "add");
    m->in_batch = true;
    m->wanted = false;
}

static kvp_seq_options options_for(schedule *s, const member *m, kvp_sampling *sampling)
{
    *sampling = (kvp_sampling){ .size = sizeof *sampling,
                                .mode = m->by_host ? KVP_SAMPLE_HOST : KVP_SAMPLE_LIBRARY };
    return (kvp_seq_options){ .size = sizeof(kvp_seq_options), .eos = KVP_EOS_IGNORE,
                              .tag = (uint64_t)(m - s->members), .sampling = sampling,
                              .max_tokens = 1 + pick(s, 24), .context = MAX_LENGTH - 2,
                              .priority = (int32_t)pick(s, 3) };
}

static void arrive(schedule *s)
{
    member *m = vacant(s);
    if (!m) return;
    *m = (member){ .by_host = pick(s, 3) > 0, .rounds = pick(s, 10) };
    kvp_sampling sampling;
    kvp_seq_options o = options_for(s, m, &sampling);
    must(s, kvp_seq_create(s->pool, &o, &m->seq, NULL), "create");
    uint32_t most = s->capacity < MAX_LENGTH - 20 ? s->capacity : MAX_LENGTH - 20;
    append(s, m, pick(s, 3), 1 + pick(s, pick(s, 3) ? most / 4 + 1 : most));
    if (pick(s, 3) == 0) append(s, m, 3 + pick(s, 3), 1 + pick(s, 6));
    add(s, m);
}

static void leave(schedule *s, member *m)
{
    (void)s;
    kvp_seq_destroy(m->seq);
    m->seq = NULL;
    m->in_batch = false;
}

static void fork_of(schedule *s, member *m)
{
    member *child = vacant(s);
    if (!child) return;
    *child = (member){ .by_host = pick(s, 3) > 0, .rounds = pick(s, 6) };
    kvp_sampling sampling;
    kvp_seq_options o = options_for(s, child, &sampling);
    must(s, kvp_seq_fork(m->seq, pick(s, length_of(s, m) + 1), &o, &child->seq, NULL), "fork");
    if (pick(s, 2)) append(s, child, 6 + pick(s, 2), 1 + pick(s, 4));
    totals.forks++;
    add(s, child);
}

static void cut(schedule *s, member *m)
{
    must(s, kvp_seq_truncate(m->seq, pick(s, length_of(s, m) + 1)), "truncate");
    m->wanted = false;
    totals.cuts++;
}

static void pin(schedule *s, member *m)
{
    must(s, kvp_seq_pin(m->seq, pick(s, 2) ? pick(s, length_of(s, m) + 1) : 0), "pin");
}

static void something(schedule *s)
{
    member *m = &s->members[pick(s, MAX_SEQS)];
    if (!m->seq) {
        if (pick(s, 3) == 0) arrive(s);
        return;
    }
    switch (pick(s, 12)) {
    case 0: must(s, kvp_seq_cancel(m->seq), "cancel"); break;
    case 1: leave(s, m); break;
    case 2:
    case 3:
    case 4: fork_of(s, m); break;
    case 5:
    case 6: cut(s, m); break;
    case 7:
        if (state_of(s, m) != KVP_SEQ_PARKED) must(s, kvp_seq_pause(m->seq), "pause");
        break;
    case 8:
    case 9:
        if (state_of(s, m) != KVP_SEQ_PARKED) must(s, kvp_seq_resume(m->seq), "resume");
        break;
    case 10: pin(s, m); break;
    default: add(s, m);
    }
}

/* --- events --- */

static int32_t likeliest(const float *logits)
{
    int32_t best = 0;
    for (int32_t i = 1; i < VOCABULARY; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

static void on_logits(schedule *s, member *m)
{
    const float *logits;
    size_t n;
    must(s, kvp_seq_get_logits(m->seq, &logits, &n), "logits");
    assert_int_equal(n, VOCABULARY);
    note *t = new_note(s, m, length_of(s, m));
    t->logits = malloc(sizeof(float) * VOCABULARY);
    assert_non_null(t->logits);
    memcpy(t->logits, logits, sizeof(float) * VOCABULARY);
    t->chosen = likeliest(logits);
    m->wanted = true;
    totals.logits++;
}

static void on_token(schedule *s, member *m, const kvp_event *e)
{
    note *t = new_note(s, m, (uint32_t)e->position);
    t->chosen = e->token;
    totals.tokens++;
}

static void on_ending(schedule *s, member *m, const kvp_event *e)
{
    assert_int_not_equal(e->ending, KVP_END_FAILED);
    m->in_batch = m->wanted = false;
    totals.cached += e->usage->cached;
    totals.reattached += e->usage->reattached;
    totals.copied += e->usage->copied;
    totals.preemptions += e->usage->preemptions;
    (void)s;
}

/* The host's next token: the likeliest, or something else, or a whole turn. */
static void answer(schedule *s, member *m)
{
    if (state_of(s, m) != KVP_SEQ_HOST) return; /* or it was cut to what was computed already */
    if (m->rounds == 0 || room_for(s, m, 1) == 0) {
        must(s, kvp_seq_cancel(m->seq), "cancel");
        return;
    }
    m->rounds--;
    if (!m->wanted || pick(s, 4) == 0) {
        append(s, m, 8 + pick(s, 2), 1 + pick(s, 7));
        return;
    }
    const float *logits;
    size_t n;
    must(s, kvp_seq_get_logits(m->seq, &logits, &n), "logits");
    int32_t token = likeliest(logits);
    must(s, kvp_seq_append(m->seq, &token, 1), "append");
    m->wanted = false;
}

static void take_events(schedule *s)
{
    kvp_event e = { .size = sizeof e };
    while (kvp_next_event(s->batch, &e) == KVP_OK) {
        member *m = &s->members[e.tag];
        assert_ptr_equal(m->seq, e.seq);
        if (e.kind == KVP_EVENT_LOGITS) on_logits(s, m);
        if (e.kind == KVP_EVENT_TOKEN) on_token(s, m, &e);
        if (e.kind == KVP_EVENT_ENDED) on_ending(s, m, &e);
    }
}

static kvp_status step(schedule *s)
{
    kvp_status st = kvp_step(s->batch);
    must(s, st, "step");
    take_events(s);
    if (st == KVP_AGAIN) must(s, kvp_wait(s->batch, 1000), "wait");
    for (int i = 0; i < MAX_SEQS; i++)
        if (s->members[i].seq && pick(s, 8)) answer(s, &s->members[i]);
    return st;
}

/* --- the lone run --- */

static void compare(schedule *s, const note *t)
{
    const known *k = find_known(key_of(s->model, t->tokens, t->n));
    assert_true(k->key != 0);
    if (t->logits && memcmp(k->logits, t->logits, sizeof k->logits) != 0)
        fail_msg("schedule %llu (%s, level %d): logits after %u tokens are not those of the tokens "
                 "alone", (unsigned long long)s->seed, fixed_models[s->model].name, s->level, t->n);
    if (t->chosen != likeliest(k->logits))
        fail_msg("schedule %llu (%s, level %d): token %d after %u tokens, alone %d",
                 (unsigned long long)s->seed, fixed_models[s->model].name, s->level, t->chosen,
                 t->n, likeliest(k->logits));
}

static void learn_next(schedule *s, kvp_batch *b, kvp_seq *q, const int32_t *tokens, uint32_t n)
{
    known *k = find_known(key_of(s->model, tokens, n));
    for (int i = 0; i < 10000; i++) {
        kvp_event e = { .size = sizeof e };
        must(s, kvp_step(b), "lone step");
        while (kvp_next_event(b, &e) == KVP_OK)
            if (e.kind == KVP_EVENT_LOGITS) {
                const float *logits;
                size_t count;
                must(s, kvp_seq_get_logits(q, &logits, &count), "lone logits");
                k->key = key_of(s->model, tokens, n);
                memcpy(k->logits, logits, sizeof k->logits);
                if (++n_known > KNOWN / 2) fail_msg("more lone runs than room for them");
                return;
            }
    }
    fail_msg("the lone run does not end");
}

/* Whether `part` is a beginning of `whole`. */
static bool begins(const note *part, const note *whole)
{
    return part->n <= whole->n &&
           memcmp(part->tokens, whole->tokens, part->n * sizeof *part->tokens) == 0;
}

static int longest_first(const void *a, const void *b)
{
    const note *x = a, *y = b;
    return x->n < y->n ? 1 : x->n > y->n ? -1 : 0;
}

/* Runs the tokens of note `first` alone, and learns the logits at every place that it or a shorter
 * note with the same beginning asks for. */
static void learn(schedule *s, uint32_t first)
{
    const note *whole = &s->notes[first];
    kvp_pool_options po = { .size = sizeof po, .blocks = MAX_LENGTH / 16 + 2,
                            .prefix_cache = KVP_PREFIX_CACHE_OFF };
    kvp_batch_options bo = { .size = sizeof bo, .threads = KVP_THREADS_INLINE,
                             .inline_budget_ns = UINT64_MAX / 4 };
    kvp_sampling sampling = { .size = sizeof sampling, .mode = KVP_SAMPLE_HOST };
    kvp_seq_options so = { .size = sizeof so, .sampling = &sampling };
    kvp_pool *p = NULL;
    kvp_batch *b = NULL;
    kvp_seq *q = NULL;
    must(s, kvp_pool_create(models[n_levels - 1][s->model], &po, &p, NULL), "lone pool");
    must(s, kvp_batch_create(p, &bo, &b, NULL), "lone batch");
    must(s, kvp_seq_create(p, &so, &q, NULL), "lone sequence");
    uint32_t have = 0;
    for (uint32_t i = s->n_notes; i-- > first;) { /* shortest first */
        const note *t = &s->notes[i];
        if (t->n == have || !begins(t, whole)) continue;
        if (i != first && find_known(key_of(s->model, t->tokens, t->n))->key) continue;
        must(s, kvp_seq_append(q, whole->tokens + have, t->n - have), "lone append");
        if (have == 0) must(s, kvp_batch_add(b, q), "lone add");
        have = t->n;
        learn_next(s, b, q, whole->tokens, have);
    }
    kvp_seq_destroy(q);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
}

static void compare_all(schedule *s)
{
    qsort(s->notes, s->n_notes, sizeof *s->notes, longest_first);
    for (uint32_t i = 0; i < s->n_notes; i++) {
        const note *t = &s->notes[i];
        if (!find_known(key_of(s->model, t->tokens, t->n))->key) learn(s, i);
        compare(s, t);
        free(t->logits);
    }
    s->n_notes = 0;
}

/* --- --- */

static void open_schedule(schedule *s)
{
    static const int32_t threads[] = { KVP_THREADS_INLINE, KVP_THREADS_INLINE, 1, 2, 3 };
    s->model = (int)pick(s, FIXED_MODELS);
    s->level = (int)pick(s, (uint32_t)n_levels);
    if (s->level == 0 && pick(s, 2)) s->level = n_levels - 1; /* plain C is slow */
    uint32_t b = 1u << pick(s, 9), needed = (MAX_LENGTH + b - 1) / b;
    kvp_pool_options po = { .size = sizeof po, .block_tokens = b,
                            .blocks = (needed + 2) / 3 + pick(s, needed / 2 + 2),
                            .prefix_cache = pick(s, 5) ? KVP_PREFIX_CACHE_ON
                                                       : KVP_PREFIX_CACHE_OFF };
    s->capacity = (uint32_t)po.blocks * b;
    must(s, kvp_pool_create(models[s->level][s->model], &po, &s->pool, NULL), "pool");
    kvp_batch_options bo = {
        .size = sizeof bo, .token_budget = 1 + pick(s, pick(s, 2) ? 12 : 150),
        .max_sequences = 1 + pick(s, 6), .threads = threads[pick(s, 5)],
        .watermark = pick(s, 2) ? KVP_WATERMARK_NONE : 1 + pick(s, 200),
        .prefill_share = pick(s, 3) ? 1 + pick(s, 1000) : KVP_PREFILL_SHARE_NONE,
        .chunk_tokens = 1 + pick(s, pick(s, 2) ? 8 : 130),
        .inline_budget_ns = pick(s, 3) ? UINT64_MAX / 4 : 1 + pick(s, 30000) };
    must(s, kvp_batch_create(s->pool, &bo, &s->batch, NULL), "batch");
}

/* Nothing is held back any more: every sequence goes on to its end. */
static void wind_up(schedule *s)
{
    for (int i = 0; i < MAX_SEQS; i++) {
        member *m = &s->members[i];
        if (!m->seq) continue;
        must(s, kvp_seq_pin(m->seq, 0), "unpin");
        if (state_of(s, m) == KVP_SEQ_PARKED) continue;
        must(s, kvp_seq_resume(m->seq), "resume");
    }
    for (int i = 0;; i++) {
        if (i == 200000) fail_msg("schedule %llu does not end", (unsigned long long)s->seed);
        kvp_status st = step(s);
        assert_int_not_equal(st, KVP_STALLED);
        bool left = false;
        for (int k = 0; k < MAX_SEQS; k++) left = left || s->members[k].in_batch;
        if (!left) return;
    }
}

static void one_schedule(uint64_t seed, note *notes)
{
    schedule *s = calloc(1, sizeof *s);
    assert_non_null(s);
    s->seed = seed;
    s->random = seed * 0x9e3779b97f4a7c15u + 5;
    s->notes = notes;
    open_schedule(s);
    for (uint32_t i = 0, n = 2 + pick(s, 3); i < n; i++) arrive(s);
    for (uint32_t i = 0, n = pick(s, 25); i < n; i++) {
        step(s);
        if (pick(s, 3) == 0) something(s);
        if (s->n_notes > MAX_NOTES / 2) break;
    }
    wind_up(s);
    must(s, kvp_pool_check(s->pool), "check");
    kvp_pool_stats st = { .size = sizeof st };
    must(s, kvp_pool_get_stats(s->pool, &st), "stats");
    totals.evicted += st.blocks_evicted;
    for (int i = 0; i < MAX_SEQS; i++)
        if (s->members[i].seq) leave(s, &s->members[i]);
    kvp_batch_destroy(s->batch);
    must(s, kvp_pool_get_stats(s->pool, &st), "stats");
    assert_int_equal(st.used, 0);
    compare_all(s);
    kvp_pool_destroy(s->pool);
    free(s);
}

static void random_schedules_give_the_bits_of_each_alone(void **state)
{
    (void)state;
    bool emulated = getenv("KVPAGE_EMULATED") != NULL;
    uint64_t n = emulated                     ? EMULATED_SCHEDULES
                 : getenv("KVPAGE_SANITIZED") ? SANITIZED_SCHEDULES
                                              : SCHEDULES;
    note *notes = calloc(MAX_NOTES, sizeof *notes);
    knowledge = calloc(KNOWN, sizeof *knowledge);
    assert_true(notes && knowledge);
    for (uint64_t seed = 1; seed <= n; seed++) one_schedule(seed, notes);
    print_message("%llu schedules: %llu rows of logits and %llu tokens compared; %llu lone runs "
                  "learnt; tokens: %llu cached, %llu found again, %llu copied; %llu preemptions, "
                  "%llu evictions, %llu forks, %llu cuts\n",
                  (unsigned long long)n, (unsigned long long)totals.logits,
                  (unsigned long long)totals.tokens, (unsigned long long)n_known,
                  (unsigned long long)totals.cached, (unsigned long long)totals.reattached,
                  (unsigned long long)totals.copied, (unsigned long long)totals.preemptions,
                  (unsigned long long)totals.evicted, (unsigned long long)totals.forks,
                  (unsigned long long)totals.cuts);
    assert_true(totals.logits && totals.tokens && totals.cached && totals.copied && totals.forks);
    if (!emulated) assert_true(totals.preemptions && totals.reattached && totals.evicted);
    free(notes);
    free(knowledge);
}

static void a_fixed_run_has_the_hash_that_is_written_down(void **state)
{
    (void)state;
    for (int l = 0; l < n_levels; l++)
        for (int i = 0; i < FIXED_MODELS; i++) {
            uint64_t hash = fixed_run(models[l][i]);
            if (hash != fixed_models[i].hash)
                fail_msg("%s, level %u: 0x%016llx", fixed_models[i].name,
                         (unsigned)fixed_level(models[l][i]), (unsigned long long)hash);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_fixed_run_has_the_hash_that_is_written_down),
        cmocka_unit_test(random_schedules_give_the_bits_of_each_alone),
    };
    return cmocka_run_group_tests_name("schedules", tests, open_models, close_models);
}
