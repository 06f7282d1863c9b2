/*
 * What it costs to plan, commit and go on with a step of 256 running sequences (block size 16,
 * about 2,000 tokens each), on the pure rooms alone: no device, one thread, medians. One JSON line
 * per figure.
 */
#define _GNU_SOURCE
#include "sched/sched.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SEQUENCES = 256, PROMPT = 2000, STEPS = 1200, BLOCKS = 60000 };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void must(kvp_status st, const char *what)
{
    if (st == KVP_OK) return;
    fprintf(stderr, "bench_sched: %s: %s\n", what, kvp_status_name(st));
    exit(1);
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void report(const char *name, double *samples, int n)
{
    qsort(samples, (size_t)n, sizeof *samples, ascending);
    printf("{\"case\":\"%s\",\"value\":%.1f,\"unit\":\"us\"}\n", name, samples[n / 2]);
}

static kvp__hooks hooks;
static kvp__pool pool;
static kvp__prefix prefix;
static kvp__sched_holders holders;
static kvp__sched sched;
static kvp__seq seqs[SEQUENCES];
static kvp__sched_entry entries[SEQUENCES];

static void set_up(void)
{
    must(kvp__hooks_fill(&hooks, NULL, NULL), "hooks");
    must(kvp__pool_init(&pool, &hooks, 1, BLOCKS, 16, NULL), "pool");
    kvp__prefix_options po = { .key = { 1, 2 } };
    must(kvp__prefix_init(&prefix, &pool, &po, NULL), "prefix");
    kvp__sched_options so = { .token_budget = 8192, .max_sequences = SEQUENCES, .watermark = 30,
                              .prefill_share = 500, .chunk_tokens = 8192 };
    must(kvp__sched_init(&sched, &hooks, &so, &pool, &prefix, &holders, NULL), "sched");
    static int32_t prompt[PROMPT];
    for (int i = 0; i < SEQUENCES; i++) {
        uint32_t root;
        must(kvp__prefix_root_intern(&prefix, NULL, 0, NULL, 0, &root, NULL), "root");
        kvp__seq_init(&seqs[i], &pool, &prefix, root);
        for (int k = 0; k < PROMPT; k++) prompt[k] = i + k * 7;
        must(kvp__seq_append(&seqs[i], prompt, (uint32_t)(PROMPT - i % 16), NULL), "append");
        kvp__sched_entry_init(&entries[i], &holders, &seqs[i], 0);
        must(kvp__sched_add(&sched, &entries[i], PROMPT + STEPS + 100, NULL), "add");
    }
}

static void go_on(const kvp__sched_step *step)
{
    for (uint32_t k = 0; k < step->n_items; k++)
        if (step->items[k].decide)
            must(kvp__sched_token(&sched, step->items[k].entry, (int32_t)(k * 31 + step->n_rows),
                                  NULL), "token");
}

int main(void)
{
    static double plan[STEPS], commit[STEPS], token[STEPS];
    set_up();
    while (sched.waiting.count || sched.prefill.count) {
        const kvp__sched_step *step = kvp__sched_plan(&sched);
        kvp__sched_commit(&sched);
        go_on(step);
    }
    for (int i = 0; i < STEPS; i++) {
        double t0 = now();
        const kvp__sched_step *step = kvp__sched_plan(&sched);
        double t1 = now();
        if (step->n_rows != SEQUENCES) must(KVP_ERR_INTERNAL, "not every sequence has a row");
        double t2 = now();
        kvp__sched_commit(&sched);
        double t3 = now();
        go_on(step);
        double t4 = now();
        plan[i] = t1 - t0;
        commit[i] = t3 - t2;
        token[i] = t4 - t3;
    }
    report("plan_step_256", plan, STEPS);
    report("commit_step_256", commit, STEPS);
    report("append_tokens_256", token, STEPS);
    for (int i = 0; i < SEQUENCES; i++) {
        kvp__sched_remove(&sched, &entries[i]);
        kvp__sched_entry_fini(&entries[i]);
        kvp__seq_fini(&seqs[i]);
    }
    kvp__sched_fini(&sched);
    kvp__prefix_fini(&prefix);
    kvp__pool_fini(&pool);
    return 0;
}
