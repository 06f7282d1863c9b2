/*
 * The engine's speed on a real model, through the public header alone.
 *
 *     bench_engine MODEL [--threads N] [--rounds N] [case...]    medians: of these cases, or of
 *                                                                those that `make bench` runs
 *     bench_engine MODEL [--threads N] --serve                   one case per line of stdin
 *     bench_engine MODEL --facts                                 what limits are computed from
 *
 * --level N caps the instruction-set level, KVP_CPU_...; --packed FILE keeps the packed weights there.
 *
 * Each measurement is one JSON line. --serve is for tests/bench/peers, which runs other engines'
 * programs with the same habits in turns with this one. The cases:
 *
 *     prefill-512  512 new tokens to the first generated one
 *     decode       48 greedy tokens of one sequence after a prompt of 16
 *     decode-7900  24 greedy tokens of one sequence after a prompt of 7,900
 *     16x128       16 sequences with prompts of 128; 24 greedy steps of all, the prompts not timed
 *     32x512       32 sequences with prompts of 512, each its own; likewise
 *     32-shared    32 sequences over one prompt of 2,048 and one token of their own; likewise
 *     mixed        8 sequences decode, and a prompt of 8,000 comes in: until it has its first token
 *                  the tokens per second of both together, and the 99th percentile of the gaps
 *                  between tokens of the 8
 *     mixed-short  the same with a prompt of 1,000
 *     forks        63 forks of a computed sequence of 6,000 tokens, in microseconds
 *     start        64 new tokens to the first generated one, once: the process is what is timed
 *     memory       what a process takes beyond packed weights and KV: ask for it alone, since
 *                  it counts from the start of the process
 *
 * decode-7900, 32x512 and 32-shared keep their prompts over the rounds, in the prefix cache: only
 * what is not timed becomes shorter by that. The pool is as large as the case needs.
 */
#include <kvpage.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#define MAX_SEQS 32
#define MAX_PROMPT 8000
#define MAX_ROUNDS 64
#define MAX_GAPS 16384
#define DECODE_TOKENS 48
#define MULTI_STEPS 24
#define WARM_STEPS 2
#define DEPTH 7900
#define SHARED 2048
#define MIXED_SEQS 8
#define FORKED 6000
#define FORKS 63
#define FORK_TIMES 9
#define MIXED_PROMPT 128

static kvp_model *model;
static kvp_pool *pool;
static kvp_batch *batch;
static int32_t threads;
static const char *packed;    /* the packed file; NULL: none */
static uint32_t level;        /* the instruction-set level is capped at; 0: not */
static uint32_t pool_tokens;  /* what the pool holds; 0: there is none */
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

static void open_model(const char *path)
{
    kvp_error err;
    kvp_error_init(&err, sizeof err);
    kvp_model_options options;
    kvp_model_options_init(&options, sizeof options);
    options.cpu_level = level;
    kvp_status s = kvp_model_open(path, &options, &model, &err);
    if (s) die(path, s, err.text);
}

static void place(void)
{
    kvp_error err;
    kvp_error_init(&err, sizeof err);
    kvp_place_options options;
    kvp_place_options_init(&options, sizeof options);
    options.threads = threads;
    options.packed_file = packed;
    kvp_status s = kvp_model_place(model, &options, &err);
    if (s) die("place", s, err.text);
}

static void close_pool(void)
{
    kvp_batch_destroy(batch);
    kvp_pool_destroy(pool);
    batch = NULL;
    pool = NULL;
    pool_tokens = 0;
}

/* A pool for so many tokens, with what admission keeps free and a tail of generated tokens that
 * earlier rounds left behind; the one that is there if it fits. */
static void need_pool(uint32_t tokens)
{
    if (tokens == pool_tokens) return;
    close_pool();
    kvp_error err;
    kvp_error_init(&err, sizeof err);
    kvp_pool_options po;
    kvp_pool_options_init(&po, sizeof po);
    po.block_tokens = 16;
    po.blocks = tokens / 16 + tokens / 128 + 64;
    kvp_status s = kvp_pool_create(model, &po, &pool, &err);
    if (s) die("pool", s, err.text);
    kvp_batch_options bo;
    kvp_batch_options_init(&bo, sizeof bo);
    bo.threads = threads;
    s = kvp_batch_create(pool, &bo, &batch, &err);
    if (s) die("batch", s, err.text);
    pool_tokens = tokens;
}

/* One run of some sequences: how many tokens each has given, when the last came, and the gaps
 * between tokens of one sequence where they are kept. */
typedef struct run {
    uint32_t n;
    kvp_seq *seqs[MAX_SEQS];
    uint64_t given[MAX_SEQS];
    double last[MAX_SEQS];
    double *gaps; /* NULL: not kept */
    uint32_t n_gaps;
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

static void count_token(run *r, uint64_t which)
{
    double t = now();
    if (r->gaps && r->given[which] && r->n_gaps < MAX_GAPS)
        r->gaps[r->n_gaps++] = t - r->last[which];
    r->given[which]++;
    r->last[which] = t;
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
            count_token(r, e.tag);
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

static void fill(int32_t *out, size_t n, uint32_t which, uint32_t round)
{
    for (size_t i = 0; i < n; i++) out[i] = token_at(i * 31 + which * 101 + round * 1009);
}

/* A prompt that no round before had, or one that is the same in every round. */
static void add_new(run *r, size_t n, uint32_t which)
{
    int32_t tokens[MAX_PROMPT];
    fill(tokens, n, which, round_number);
    add(r, tokens, n);
}

static void add_kept(run *r, size_t n, uint32_t which)
{
    int32_t tokens[MAX_PROMPT];
    fill(tokens, n, which, 0);
    add(r, tokens, n);
}

static double first_token(size_t n)
{
    run r = {0};
    double start = now();
    add_new(&r, n, 0);
    step_until(&r, 1);
    double rate = (double)n / (now() - start);
    finish(&r);
    return rate;
}

static double prefill_512(void) { return first_token(512); }
static double first_of_64(void) { return first_token(64); }

static double decode(void)
{
    run r = {0};
    add_new(&r, 16, 0);
    double rate = measure(&r, 1, DECODE_TOKENS);
    finish(&r);
    return rate;
}

static double decode_deep(void)
{
    run r = {0};
    add_kept(&r, DEPTH, 0);
    double rate = measure(&r, 1, MULTI_STEPS);
    finish(&r);
    return rate;
}

static double sixteen(void)
{
    run r = {0};
    for (uint32_t i = 0; i < 16; i++) add_new(&r, 128, i);
    double rate = measure(&r, WARM_STEPS, MULTI_STEPS);
    finish(&r);
    return rate;
}

static double own_32(void)
{
    run r = {0};
    for (uint32_t i = 0; i < 32; i++) add_kept(&r, 512, i);
    double rate = measure(&r, WARM_STEPS, MULTI_STEPS);
    finish(&r);
    return rate;
}

/* The prompt stays in the cache over the rounds; with it, how many blocks 32 sequences took. */
static int64_t shared_blocks_over;

static double shared_32(void)
{
    int32_t tokens[SHARED + 1];
    run r = {0};
    uint64_t own = 0;
    for (uint32_t i = 0; i < SHARED; i++) tokens[i] = token_at(i);
    for (uint32_t i = 0; i < 32; i++) {
        tokens[SHARED] = token_at(i * 50 + round_number * 13 + 1);
        add(&r, tokens, SHARED + 1);
    }
    double rate = measure(&r, WARM_STEPS, MULTI_STEPS);
    kvp_pool_stats stats;
    kvp_pool_stats_init(&stats, sizeof stats);
    kvp_pool_get_stats(pool, &stats);
    for (uint32_t i = 0; i < r.n; i++) {
        kvp_seq_info info;
        kvp_seq_info_init(&info, sizeof info);
        kvp_seq_get_info(r.seqs[i], &info);
        own += info.computed - SHARED;
    }
    uint64_t ideal = (SHARED + own + stats.block_tokens - 1) / stats.block_tokens;
    shared_blocks_over = (int64_t)stats.used - (int64_t)ideal;
    finish(&r);
    return rate;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The smallest gap that 99 of 100 do not exceed. */
static double gap_p99(double *gaps, uint32_t n)
{
    if (n == 0) return 0;
    qsort(gaps, n, sizeof *gaps, ascending);
    return gaps[(99 * n + 99) / 100 - 1];
}

static double last_gap_ms;

/* Gaps count from the last tokens before the long prompt came. */
static double mixed_with(size_t prompt)
{
    static double gaps[MAX_GAPS];
    run r = {0};
    for (uint32_t i = 0; i < MIXED_SEQS; i++) add_new(&r, MIXED_PROMPT, i + 1);
    step_until(&r, 4);
    r.gaps = gaps;
    uint64_t before = 0, after = 0;
    for (uint32_t i = 0; i < MIXED_SEQS; i++) before += r.given[i];
    double start = now();
    add_new(&r, prompt, 0);
    step_until(&r, 1);
    double took = now() - start;
    for (uint32_t i = 0; i < r.n; i++) after += r.given[i];
    last_gap_ms = gap_p99(gaps, r.n_gaps) * 1e3;
    finish(&r);
    return (double)(prompt + after - before) / took;
}

static double mixed(void) { return mixed_with(8000); }
static double mixed_short(void) { return mixed_with(1000); }

/* Bytes beyond weights and KV at the process's largest, after a prefill and some steps of many. */
/* The fork itself; what the children write later is theirs. */
static double forks_63(void)
{
    run r = {0};
    kvp_seq *children[FORKS];
    add_new(&r, FORKED, 0);
    step_until(&r, 1);
    double took[FORK_TIMES];
    for (uint32_t n = 0; n < FORK_TIMES; n++) {
        double start = now();
        for (uint32_t i = 0; i < FORKS; i++) {
            kvp_status s = kvp_seq_fork(r.seqs[0], FORKED, NULL, &children[i], NULL);
            if (s) die("fork", s, "unexpected");
        }
        took[n] = (now() - start) * 1e6;
        for (uint32_t i = 0; i < FORKS; i++) kvp_seq_destroy(children[i]);
    }
    finish(&r);
    qsort(took, FORK_TIMES, sizeof took[0], ascending);
    return took[FORK_TIMES / 2];
}

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
    uint32_t tokens; /* the pool's size */
    int alone;       /* 1: one of those that `make bench` runs */
} cases[] = {
    {"prefill-512", "tokens/s", prefill_512, 1024, 1},
    {"decode", "tokens/s", decode, 256, 1},
    {"16x128", "tokens/s", sixteen, 16 * 192, 1},
    {"32-shared", "tokens/s", shared_32, SHARED + 32 * 64, 1},
    {"decode-7900", "tokens/s", decode_deep, 8192, 0},
    {"32x512", "tokens/s", own_32, 32 * 576, 0},
    {"mixed", "tokens/s", mixed, 8192 + MIXED_SEQS * 512, 0},
    {"mixed-short", "tokens/s", mixed_short, 8192 + MIXED_SEQS * 512, 0},
    {"start", "tokens/s", first_of_64, 256, 0},
    {"forks", "us", forks_63, 8192, 0},
    {"memory", "bytes", memory_beyond, 16 * 192, 0},
};
#define N_CASES (sizeof cases / sizeof cases[0])

static const struct bench_case *find(const char *name)
{
    for (size_t i = 0; i < N_CASES; i++)
        if (!strcmp(cases[i].name, name)) return &cases[i];
    return NULL;
}

static void print(const struct bench_case *c, double value)
{
    printf("{\"case\":\"%s\",\"value\":%.1f,\"unit\":\"%s\"", c->name, value, c->unit);
    if (c->run == shared_32)
        printf(",\"blocks_over_ideal\":%lld,\"sequences\":32", (long long)shared_blocks_over);
    if (c->run == mixed || c->run == mixed_short) printf(",\"gap_ms\":%.2f", last_gap_ms);
    printf("}\n");
    fflush(stdout);
}

static void report(const struct bench_case *c, uint32_t rounds)
{
    double values[MAX_ROUNDS];
    need_pool(c->tokens);
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
        if (!c) {
            printf("{\"case\":\"%s\",\"error\":\"not known\"}\n", line);
            fflush(stdout);
            continue;
        }
        need_pool(c->tokens);
        print(c, c->run());
        round_number++;
    }
}

/* --- what the limits are computed from --- */

static int is_float(const char *type)
{
    return !strcmp(type, "F32") || !strcmp(type, "F16") || !strcmp(type, "BF16");
}

/* Matrices that every step reads, and those of them that only a row with an output passes. */
static void print_facts(void)
{
    kvp_model_info info;
    uint64_t bytes[2] = {0}, int8[2] = {0}, floats[2] = {0};
    kvp_model_info_init(&info, sizeof info);
    kvp_model_get_info(model, &info);
    for (uint64_t i = 0; i < info.tensors; i++) {
        kvp_tensor_info t;
        kvp_tensor_info_init(&t, sizeof t);
        kvp_model_get_tensor(model, i, &t);
        int embedding = !strcmp(t.name, "token_embd.weight");
        if (t.n_dims != 2 || (embedding && !info.tied_embeddings)) continue;
        int head = embedding || !strcmp(t.name, "output.weight");
        bytes[head] += t.bytes;
        *(is_float(t.type) ? &floats[head] : &int8[head]) += t.dims[0] * t.dims[1];
    }
    printf("{\"architecture\":\"%s\",\"name\":\"%s\",\"width\":%u,\"context\":%u,"
           "\"file_bytes\":%llu,\"cpu_level\":%u,\"version\":\"%d.%d.%d\"",
           info.architecture, info.name, info.width, info.context,
           (unsigned long long)info.file_bytes, info.cpu_level, KVP_VERSION_MAJOR,
           KVP_VERSION_MINOR, KVP_VERSION_PATCH);
    for (int head = 0; head < 2; head++)
        printf(",\"%s\":{\"bytes\":%llu,\"byte_products\":%llu,\"float_products\":%llu}",
               head ? "head" : "body", (unsigned long long)bytes[head],
               (unsigned long long)int8[head], (unsigned long long)floats[head]);
    printf(",\"groups\":[");
    for (uint32_t i = 0; i < info.n_groups; i++) {
        kvp_layer_group g = {0};
        kvp_model_get_group(model, i, &g, sizeof g);
        printf("%s{\"layers\":%u,\"kv_heads\":%u,\"key_dim\":%u,\"value_dim\":%u,\"window\":%u,"
               "\"query_heads\":%u}", i ? "," : "", g.layers, g.kv_heads, g.key_dim, g.value_dim,
               g.window, g.query_heads ? g.query_heads : g.kv_heads);
    }
    printf("]}\n");
}

static const struct bench_case *asked(const char *name)
{
    const struct bench_case *c = find(name);
    if (c) return c;
    fprintf(stderr, "bench_engine: no case %s\n", name);
    exit(2);
}

int main(int argc, char **argv)
{
    const char *path = NULL, *wanted[N_CASES];
    size_t n_wanted = 0;
    int rounds = 5, serving = 0, facts = 0;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--threads") && i + 1 < argc) threads = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--packed") && i + 1 < argc) packed = argv[++i];
        else if (!strcmp(argv[i], "--level") && i + 1 < argc) level = (uint32_t)atoi(argv[++i]);
        else if (!strcmp(argv[i], "--rounds") && i + 1 < argc) rounds = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--serve")) serving = 1;
        else if (!strcmp(argv[i], "--facts")) facts = 1;
        else if (!path) path = argv[i];
        else if (n_wanted < N_CASES) wanted[n_wanted++] = argv[i];
    }
    if (!path || rounds < 1 || rounds > MAX_ROUNDS) {
        fprintf(stderr, "usage: bench_engine MODEL [--threads N] [--level N] [--packed FILE] "
                        "[--rounds N | --serve | --facts] [case...]\n");
        return 2;
    }
    open_model(path);
    if (facts) {
        print_facts();
    } else {
        place();
        if (serving) serve();
        for (size_t i = 0; i < n_wanted; i++) report(asked(wanted[i]), (uint32_t)rounds);
        for (size_t i = 0; !serving && !n_wanted && i < N_CASES; i++)
            if (cases[i].alone) report(&cases[i], (uint32_t)rounds);
    }
    close_pool();
    kvp_model_destroy(model);
    return 0;
}
