/*
 * The engine's speed on a real model, through the public header alone.
 *
 *     bench_engine MODEL [--threads N] [--rounds N] [case...]    medians of all cases, or of these
 *     bench_engine MODEL [--threads N] --serve                   one case per line of stdin
 *
 * Each measurement is one JSON line. --serve is for tests/bench/peers, which runs another engine's
 * program with the same habits in turns with this one. The cases:
 *
 *     prefill-512  512 new tokens to the first generated one
 *     decode       48 greedy tokens of one sequence after a prompt of 16
 *     16x128       16 sequences with prompts of 128; 24 greedy steps of all, the prompts not timed
 *     32-shared    32 sequences over one prompt of 2,048 and one token of their own; likewise
 *     memory       what a process takes beyond packed weights and KV: ask for it alone, since
 *                  it counts from the start of the process
 */
#include <kvpage.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#define MAX_SEQS 32
#define MAX_PROMPT 2049
#define MAX_ROUNDS 64
#define DECODE_TOKENS 48
#define MULTI_STEPS 24
#define WARM_STEPS 2

static kvp_model *model;
static kvp_pool *pool;
static kvp_batch *batch;
static uint32_t round_number; /* so that no prompt is in the cache from the round before */

static void die(const char *what, kvp_status status, const char *detail)
{
    fprintf(stderr, "bench_engine: %s: %s: %s\n", what, kvp_status_name(status), detail);
    exit(1);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void setup(const char *path, int threads)
{
    kvp_error err;
    kvp_error_init(&err, sizeof err);
    kvp_status s = kvp_model_open(path, NULL, &model, &err);
    if (s) die(path, s, err.text);
    kvp_place_options place;
    kvp_place_options_init(&place, sizeof place);
    place.threads = threads;
    s = kvp_model_place(model, &place, &err);
    if (s) die("place", s, err.text);
    kvp_pool_options po;
    kvp_pool_options_init(&po, sizeof po);
    po.blocks = 1024;
    s = kvp_pool_create(model, &po, &pool, &err);
    if (s) die("pool", s, err.text);
    kvp_batch_options bo;
    kvp_batch_options_init(&bo, sizeof bo);
    bo.threads = threads;
    s = kvp_batch_create(pool, &bo, &batch, &err);
    if (s) die("batch", s, err.text);
}

/* One run of some sequences: how many tokens each has given, and when. */
typedef struct run {
    uint32_t n;
    kvp_seq *seqs[MAX_SEQS];
    uint64_t given[MAX_SEQS];
} run;

static int32_t token_at(uint64_t i) { return (int32_t)(1000 + i * 7919 % 40000); }

static void add(run *r, const int32_t *tokens, size_t count)
{
    kvp_error err;
    kvp_error_init(&err, sizeof err);
    kvp_seq_options so;
    kvp_seq_options_init(&so, sizeof so);
    so.tag = r->n;
    so.eos = KVP_EOS_IGNORE;
    kvp_status s = kvp_seq_create(pool, &so, &r->seqs[r->n], &err);
    if (s) die("sequence", s, err.text);
    s = kvp_seq_append(r->seqs[r->n], tokens, count);
    if (!s) s = kvp_batch_add(batch, r->seqs[r->n]);
    if (s) {
        kvp_seq_last_error(r->seqs[r->n], &err);
        die("append or add", s, err.text);
    }
    r->n++;
}

static uint64_t fewest(const run *r)
{
    uint64_t least = UINT64_MAX;
    for (uint32_t i = 0; i < r->n; i++)
        if (r->given[i] < least) least = r->given[i];
    return least;
}

/* Steps until every sequence has given `least` tokens; how many all gave together meanwhile. */
static uint64_t step_until(run *r, uint64_t least)
{
    uint64_t total = 0;
    while (fewest(r) < least) {
        kvp_status s = kvp_step(batch);
        kvp_event e;
        kvp_event_init(&e, sizeof e);
        while (kvp_next_event(batch, &e) == KVP_OK) {
            if (e.kind == KVP_EVENT_ENDED) die("an ending", e.status, "too early");
            if (e.kind != KVP_EVENT_TOKEN) continue;
            r->given[e.tag]++;
            total++;
        }
        if (s == KVP_AGAIN) s = kvp_wait(batch, -1);
        if (s < 0 || s == KVP_DONE || s == KVP_STALLED) die("step", s, "unexpected");
    }
    return total;
}

static void finish(run *r)
{
    for (uint32_t i = 0; i < r->n; i++) {
        kvp_batch_remove(batch, r->seqs[i]);
        kvp_seq_destroy(r->seqs[i]);
    }
    kvp_status s;
    while ((s = kvp_step(batch)) != KVP_DONE) {
        if (s < 0) die("step", s, "at the end");
        if (s == KVP_AGAIN) kvp_wait(batch, -1);
    }
}

/* Timed: `least` tokens more of each after all have given `warm`. */
static double measure(run *r, uint64_t warm, uint64_t least)
{
    step_until(r, warm);
    double start = now();
    uint64_t target = 0;
    for (uint32_t i = 0; i < r->n; i++)
        if (r->given[i] > target) target = r->given[i];
    uint64_t tokens = step_until(r, target + least);
    return (double)tokens / (now() - start);
}

static void prompt_of(int32_t *out, size_t n, uint32_t which)
{
    for (size_t i = 0; i < n; i++) out[i] = token_at(i * 31 + which * 101 + round_number * 1009);
}

static double prefill_512(void)
{
    int32_t tokens[512];
    run r = {0};
    prompt_of(tokens, 512, 0);
    double start = now();
    add(&r, tokens, 512);
    step_until(&r, 1);
    double rate = 512 / (now() - start);
    finish(&r);
    return rate;
}

static double decode(void)
{
    int32_t tokens[16];
    run r = {0};
    prompt_of(tokens, 16, 0);
    add(&r, tokens, 16);
    double rate = measure(&r, 1, DECODE_TOKENS);
    finish(&r);
    return rate;
}

static double sixteen(void)
{
    int32_t tokens[128];
    run r = {0};
    for (uint32_t i = 0; i < 16; i++) {
        prompt_of(tokens, 128, i);
        add(&r, tokens, 128);
    }
    double rate = measure(&r, WARM_STEPS, MULTI_STEPS);
    finish(&r);
    return rate;
}

/* The prompt stays in the cache over the rounds; with it, how many blocks 32 sequences took. */
static int64_t shared_blocks_over;

static double shared_32(void)
{
    static int32_t tokens[MAX_PROMPT];
    run r = {0};
    uint64_t own = 0;
    for (uint32_t i = 0; i < 2048; i++) tokens[i] = token_at(i);
    for (uint32_t i = 0; i < 32; i++) {
        tokens[2048] = token_at(i * 50 + round_number * 13 + 1);
        add(&r, tokens, MAX_PROMPT);
    }
    double rate = measure(&r, WARM_STEPS, MULTI_STEPS);
    kvp_pool_stats stats;
    kvp_pool_stats_init(&stats, sizeof stats);
    kvp_pool_get_stats(pool, &stats);
    for (uint32_t i = 0; i < r.n; i++) {
        kvp_seq_info info;
        kvp_seq_info_init(&info, sizeof info);
        kvp_seq_get_info(r.seqs[i], &info);
        own += info.computed - 2048;
    }
    uint64_t ideal = (2048 + own + stats.block_tokens - 1) / stats.block_tokens;
    shared_blocks_over = (int64_t)stats.used - (int64_t)ideal;
    finish(&r);
    return rate;
}

/* Bytes beyond weights and KV at the process's largest, after a prefill and some steps of many. */
static double memory_beyond(void)
{
    prefill_512();
    round_number++;
    sixteen();
    struct rusage usage;
    kvp_pool_stats stats;
    kvp_model_info info;
    kvp_pool_stats_init(&stats, sizeof stats);
    kvp_model_info_init(&info, sizeof info);
    kvp_pool_get_stats(pool, &stats);
    kvp_model_get_info(model, &info);
    getrusage(RUSAGE_SELF, &usage);
    /* Idle blocks were written once and stay committed. */
    uint64_t kv = (stats.used + stats.idle) * stats.block_bytes;
    return (double)usage.ru_maxrss * 1024 - (double)info.packed_bytes - (double)kv;
}

static const struct bench_case {
    const char *name, *unit;
    double (*run)(void);
} cases[] = {
    {"prefill-512", "tokens/s", prefill_512},
    {"decode", "tokens/s", decode},
    {"16x128", "tokens/s", sixteen},
    {"32-shared", "tokens/s", shared_32},
    {"memory", "bytes", memory_beyond},
};
#define N_CASES (sizeof cases / sizeof cases[0])

static const struct bench_case *find(const char *name)
{
    for (size_t i = 0; i < N_CASES; i++)
        if (!strcmp(cases[i].name, name)) return &cases[i];
    fprintf(stderr, "bench_engine: no case %s\n", name);
    exit(2);
}

static void print(const struct bench_case *c, double value)
{
    printf("{\"case\":\"%s\",\"value\":%.1f,\"unit\":\"%s\"", c->name, value, c->unit);
    if (c->run == shared_32)
        printf(",\"blocks_over_ideal\":%lld,\"sequences\":32", (long long)shared_blocks_over);
    printf("}\n");
    fflush(stdout);
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void report(const struct bench_case *c, uint32_t rounds)
{
    double values[MAX_ROUNDS];
    if (c->run != memory_beyond) {
        c->run(); /* warms caches and clocks */
        round_number++;
    } else {
        rounds = 1;
    }
    for (uint32_t i = 0; i < rounds; i++, round_number++) values[i] = c->run();
    qsort(values, rounds, sizeof values[0], ascending);
    print(c, values[rounds / 2]);
}

static void serve(void)
{
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        const struct bench_case *c = find(line);
        print(c, c->run());
        round_number++;
    }
}

int main(int argc, char **argv)
{
    const char *path = NULL, *wanted[N_CASES];
    size_t n_wanted = 0;
    int threads = 0, rounds = 5, serving = 0;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--threads") && i + 1 < argc) threads = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--rounds") && i + 1 < argc) rounds = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--serve")) serving = 1;
        else if (!path) path = argv[i];
        else if (n_wanted < N_CASES) wanted[n_wanted++] = argv[i];
    }
    if (!path || rounds < 1 || rounds > MAX_ROUNDS) {
        fprintf(stderr, "usage: bench_engine MODEL [--threads N] [--rounds N | --serve] [case...]\n");
        return 2;
    }
    setup(path, threads);
    if (serving) {
        serve();
    } else if (n_wanted) {
        for (size_t i = 0; i < n_wanted; i++) report(find(wanted[i]), (uint32_t)rounds);
    } else {
        for (size_t i = 0; i + 1 < N_CASES; i++) report(&cases[i], (uint32_t)rounds);
    }
    kvp_batch_destroy(batch);
    kvp_pool_destroy(pool);
    kvp_model_destroy(model);
    return 0;
}
