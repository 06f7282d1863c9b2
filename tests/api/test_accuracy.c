/*
 * Accuracy on real models: at each position of ten texts, the distance of our distribution from that
 * of transformers in float32 on the same file. The distance is the Kullback-Leibler divergence over
 * the oracle's 32 most likely tokens and one bucket for all the others. Bars: at most 1.05 times
 * llama.cpp's mean, and the first choice at most half a point less often the same; with F32
 * activations and F32 KV, a mean of 1e-5. docs/accuracy.md has the figures.
 *
 * The files are named by KVPAGE_TEST_SMOLLM2 and KVPAGE_TEST_GEMMA3; a test without its file is
 * skipped. F32, which is slow and far from its bar, runs over the first three texts only, unless
 * KVPAGE_TEST_FULL is set.
 */
#define _GNU_SOURCE
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "positions.h"
#include "support/golden.h"

enum { TOP = 32, MAX_TEXTS = 16, SEGMENT = 64, FEW_TEXTS = 3 };

typedef struct oracle {
    uint8_t *data;
    uint32_t n_texts, rows;
    positions_text texts[MAX_TEXTS];
    const int32_t *top[MAX_TEXTS];
    const float *lp[MAX_TEXTS];
    uint32_t first[MAX_TEXTS]; /* row of a text's first position */
    double *kl;
    uint32_t same, done;
} oracle;

static void read_oracle(oracle *o, const char *file, uint32_t most_texts)
{
    size_t bytes, at = 4;
    memset(o, 0, sizeof *o);
    o->data = golden_file(file, &bytes);
    assert_non_null(o->data);
    memcpy(&o->n_texts, o->data, 4);
    assert_in_range(o->n_texts, 1, MAX_TEXTS);
    for (uint32_t i = 0; i < o->n_texts; i++) {
        uint32_t n;
        memcpy(&n, o->data + at, 4);
        o->texts[i] = (positions_text){(const int32_t *)(void *)(o->data + at + 4), n};
        o->top[i] = o->texts[i].ids + n;
        o->lp[i] = (const float *)(const void *)(o->top[i] + (size_t)n * TOP);
        o->first[i] = o->rows;
        o->rows += n;
        at += 4 + (size_t)n * 4 * (1 + 2 * TOP);
    }
    assert_int_equal(at, bytes);
    if (o->n_texts > most_texts) {
        o->n_texts = most_texts;
        o->rows = o->first[most_texts];
    }
    o->kl = calloc(o->rows, sizeof *o->kl);
    assert_non_null(o->kl);
}

static double divergence(const int32_t *top, const float *lp, const float *logits, size_t count)
{
    double largest = -INFINITY, sum = 0, kl = 0, all_q = 0, all_p = 0;
    for (size_t i = 0; i < count; i++) largest = fmax(largest, (double)logits[i]);
    for (size_t i = 0; i < count; i++) sum += exp((double)logits[i] - largest);
    double norm = largest + log(sum);
    for (int k = 0; k < TOP; k++) {
        double q = (double)lp[k], p = (double)logits[top[k]] - norm;
        kl += exp(q) * (q - p);
        all_q += exp(q);
        all_p += exp(p);
    }
    double rest_q = fmax(1 - all_q, 1e-12), rest_p = fmax(1 - all_p, 1e-12);
    return kl + rest_q * log(rest_q / rest_p);
}

static void row(void *user, uint32_t text, uint32_t position, const float *logits, size_t count)
{
    oracle *o = user;
    const int32_t *top = o->top[text] + (size_t)position * TOP;
    size_t best = 0;
    for (size_t i = 1; i < count; i++)
        if (logits[i] > logits[best]) best = i;
    o->same += (int32_t)best == top[0];
    o->kl[o->first[text] + position] =
        divergence(top, o->lp[text] + (size_t)position * TOP, logits, count);
    o->done++;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef struct bar {
    const char *variable, *file;
    uint32_t activations, kv_format;
    double mean, same; /* at most, at least */
} bar;

static void check(const bar *b)
{
    const char *path = getenv(b->variable);
    kvp_model_options mo = {.size = sizeof mo, .activations = b->activations};
    kvp_error err = {.size = sizeof err};
    kvp_model *m = NULL;
    oracle o;
    double mean = 0, begin = seconds();
    if (!path || !*path) skip();
    bool few = b->activations == KVP_ACTIVATIONS_F32 && !getenv("KVPAGE_TEST_FULL");
    read_oracle(&o, b->file, few ? FEW_TEXTS : MAX_TEXTS);
    if (kvp_model_open(path, &mo, &m, &err) != KVP_OK) fail_msg("%s", err.text);
    positions p = {.model = m, .texts = o.texts, .n_texts = o.n_texts, .segment = SEGMENT,
                   .kv_format = b->kv_format, .row = row, .user = &o};
    positions_run(&p);
    kvp_model_destroy(m);
    assert_int_equal(o.done, o.rows);
    for (uint32_t i = 0; i < o.rows; i++) mean += o.kl[i] / o.rows;
    qsort(o.kl, o.rows, sizeof *o.kl, ascending);
    double same = (double)o.same / o.rows, place = 0.99 * (o.rows - 1);
    uint32_t below = (uint32_t)place;
    double p99 = o.kl[below] + (place - below) * (o.kl[below + 1] - o.kl[below]);
    print_message("# %s, %s: %u positions, mean %.3e, p99 %.3e, same first choice %.2f %%, %.1f s\n",
                  b->file, b->activations == KVP_ACTIVATIONS_F32 ? "F32" : "INT8", o.rows, mean,
                  p99, 100 * same, seconds() - begin);
    assert_true(mean <= b->mean);
    assert_true(same >= b->same);
    free(o.kl);
    free(o.data);
}

static void test_smollm2(void **state)
{
    (void)state;
    check(&(bar){"KVPAGE_TEST_SMOLLM2", "accuracy-smollm2.bin", KVP_ACTIVATIONS_INT8, KVP_KV_F16,
                 1.05 * 2.91e-3, 0.967 - 0.005});
}

static void test_smollm2_f32(void **state)
{
    (void)state;
    check(&(bar){"KVPAGE_TEST_SMOLLM2", "accuracy-smollm2.bin", KVP_ACTIVATIONS_F32, KVP_KV_F32, 1e-5,
                 0.99});
}

static void test_gemma3(void **state)
{
    (void)state;
    check(&(bar){"KVPAGE_TEST_GEMMA3", "accuracy-gemma3.bin", KVP_ACTIVATIONS_INT8, KVP_KV_F16,
                 1.05 * 4.24e-3, 0.955 - 0.005});
}

static void test_gemma3_f32(void **state)
{
    (void)state;
    check(&(bar){"KVPAGE_TEST_GEMMA3", "accuracy-gemma3.bin", KVP_ACTIVATIONS_F32, KVP_KV_F32, 1e-5,
                 0.99});
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_smollm2),
        cmocka_unit_test(test_smollm2_f32),
        cmocka_unit_test(test_gemma3),
        cmocka_unit_test(test_gemma3_f32),
    };
    return cmocka_run_group_tests_name("api/accuracy", tests, NULL, NULL);
}
