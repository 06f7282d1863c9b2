/*
 * What the cache's own work costs, without a model: one thread, warm, medians.
 *
 *     bench_cache            (arguments are ignored: every benchmark is given the model's path)
 *
 * One JSON line per figure, with the bound that docs/performance.md states. Blocks of 16 tokens,
 * one layer group, prefix cache on.
 *
 *     append         one more token of a running sequence whose block has room: append, reserve,
 *                    commit, published
 *     take, return   one block of the pool
 *     fork           of a sequence of 32,768 computed tokens, and the end of the fork
 *     lookup         of a prompt of 32,768 tokens, all of which are cached
 *     lookup-miss    the same when nothing is
 */
#define _POSIX_C_SOURCE 200809L
#include "seq/seq.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define LONG 32768u
#define BLOCK 16u
#define ROUNDS 201

static kvp__hooks hooks;
static kvp__pool pool;
static kvp__prefix prefix;

static void need(kvp_status status)
{
    if (status == KVP_OK) return;
    fprintf(stderr, "bench_cache: %s\n", kvp_status_name(status));
    exit(1);
}

static double now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void report(const char *name, double *ns, double bound)
{
    qsort(ns, ROUNDS, sizeof *ns, by_value);
    printf("{\"case\": \"%s\", \"median_ns\": %.1f, \"p10_ns\": %.1f, \"p90_ns\": %.1f, "
           "\"bound_ns\": %.0f}\n", name, ns[ROUNDS / 2], ns[ROUNDS / 10], ns[ROUNDS * 9 / 10],
           bound);
}

static void make(kvp__seq *s)
{
    uint32_t root;
    need(kvp__prefix_root_intern(&prefix, NULL, 0, NULL, 0, &root, NULL));
    kvp__seq_init(s, &pool, &prefix, root);
}

static void compute(kvp__seq *s)
{
    uint32_t rows = s->length - s->computed;
    need(kvp__seq_reserve(s, rows, NULL));
    if (kvp__seq_commit(s, rows) != rows) need(KVP_ERR_INTERNAL);
}

/* Eight at once, like a batch: each appends the tokens of its block's second to last place. */
static void bench_append(void)
{
    static double append[ROUNDS], whole[ROUNDS];
    kvp__seq s[8];
    for (int i = 0; i < 8; i++) {
        make(&s[i]);
        need(kvp__seq_reserve_capacity(&s[i], (ROUNDS + 1) * BLOCK, NULL));
    }
    for (int r = 0; r < ROUNDS; r++) {
        for (int i = 0; i < 8; i++) {
            int32_t t = 1000 * i + r;
            need(kvp__seq_append(&s[i], &t, 1, NULL));
            compute(&s[i]);
        }
        double start = now_ns();
        for (int32_t k = 0; k < (int32_t)BLOCK - 2; k++)
            for (int i = 0; i < 8; i++) {
                need(kvp__seq_append(&s[i], &k, 1, NULL));
                need(kvp__seq_reserve(&s[i], 1, NULL));
                kvp__seq_commit(&s[i], 1);
            }
        whole[r] = (now_ns() - start) / (8 * (BLOCK - 2));
        start = now_ns();
        for (int i = 0; i < 8; i++) need(kvp__seq_append(&s[i], &r, 1, NULL));
        append[r] = (now_ns() - start) / 8;
        for (int i = 0; i < 8; i++) compute(&s[i]);
    }
    report("append", whole, 20);
    report("append-token-only", append, 20);
    for (int i = 0; i < 8; i++) kvp__seq_fini(&s[i]);
}

static void bench_blocks(void)
{
    static double take[ROUNDS], back[ROUNDS];
    static uint32_t ids[1000];
    need(kvp__prefix_reset(&prefix, NULL));
    for (int r = 0; r < ROUNDS; r++) {
        double start = now_ns();
        for (int i = 0; i < 1000; i++) ids[i] = kvp__pool_take(&pool, 0);
        take[r] = (now_ns() - start) / 1000;
        start = now_ns();
        for (int i = 1000; i-- > 0;) kvp__pool_release(&pool, 0, ids[i]);
        back[r] = (now_ns() - start) / 1000;
    }
    report("take", take, 30);
    report("return", back, 30);
}

static void bench_long(void)
{
    static double fork[ROUNDS], end[ROUNDS], found[ROUNDS], missed[ROUNDS];
    static int32_t tokens[LONG], others[LONG];
    kvp__seq s, child;
    for (uint32_t i = 0; i < LONG; i++) {
        tokens[i] = (int32_t)(i * 7919 % 32000);
        others[i] = (int32_t)(i * 104729 % 32000 + 1);
    }
    make(&s);
    need(kvp__seq_append(&s, tokens, LONG, NULL));
    compute(&s);
    uint32_t served = 0, other = 0;
    for (int r = 0; r < ROUNDS; r++) {
        double start = now_ns();
        need(kvp__seq_fork(&s, LONG, &child, NULL));
        fork[r] = now_ns() - start;
        start = now_ns();
        kvp__seq_fini(&child);
        end[r] = now_ns() - start;
        start = now_ns();
        kvp__hit h = kvp__prefix_lookup(&prefix, s.root, tokens, LONG);
        found[r] = now_ns() - start;
        served = kvp__hit_tokens(&prefix, &h);
        start = now_ns();
        h = kvp__prefix_lookup(&prefix, s.root, others, LONG);
        missed[r] = now_ns() - start;
        other = kvp__hit_tokens(&prefix, &h);
    }
    if (served != LONG - 1 || other != 0) need(KVP_ERR_INTERNAL);
    report("fork-32k", fork, 20000);
    report("end-of-fork-32k", end, 20000);
    report("lookup-32k", found, 150000);
    report("lookup-32k-miss", missed, 150000);
    kvp__seq_fini(&s);
}

int main(void)
{
    kvp__prefix_options o = {.key = kvp__hash_secret()};
    need(kvp__hooks_fill(&hooks, NULL, NULL));
    need(kvp__pool_init(&pool, &hooks, 1, 65536, BLOCK, NULL));
    need(kvp__prefix_init(&prefix, &pool, &o, NULL));
    bench_append();
    bench_blocks();
    bench_long();
    kvp__prefix_fini(&prefix);
    kvp__pool_fini(&pool);
    return 0;
}
