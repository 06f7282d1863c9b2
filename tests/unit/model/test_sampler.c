/*
 * The sampler against a naive one in double precision that sorts everything, against known answers
 * of its generator, and by the frequencies that it draws; what it refuses, and that it leaves the
 * logits as they were.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/half.h"
#include "model/sampler.h"
#include "support/gguf_writer.h"

#define MAX_N 5000

static uint64_t memory[24576];

static kvp_sampling defaults(void)
{
    kvp_sampling s;
    memset(&s, 0, sizeof s);
    s.size = sizeof s;
    return s;
}

static kvp__sampler filled(const kvp_sampling *in)
{
    kvp__sampler s;
    kvp_error err = {.size = sizeof err};
    if (kvp__sampler_fill(&s, in, 0, &err) != KVP_OK) fail_msg("%s", err.text);
    return s;
}

static double uniform(uint64_t seed, uint64_t position)
{
    uint32_t r[4];
    kvp__random(seed, position, 0, r);
    return ((double)r[0] * 2097152.0 + (r[1] >> 11)) / 9007199254740992.0;
}

/* Samples, and checks that the logits are untouched. */
static kvp__sampled sample(const kvp__sampler *s, float *logits, uint32_t n, uint64_t seed,
                           uint64_t position, const int32_t *recent, uint32_t n_recent)
{
    static float copy[MAX_N];
    kvp__sampled out;
    kvp_error err = {.size = sizeof err};
    assert_true(n <= MAX_N && kvp__sample_scratch_bytes(n) <= sizeof memory);
    memcpy(copy, logits, n * sizeof *copy);
    memset(memory, 0xa5, sizeof memory);
    if (kvp__sample(s, logits, n, seed, position, recent, n_recent, memory, &out, &err) != KVP_OK)
        fail_msg("%s", err.text);
    assert_memory_equal(copy, logits, n * sizeof *copy);
    return out;
}

/* --- the generator --- */

static void test_generator_known_answers(void **state)
{
    (void)state;
    /* The published vectors of Philox 4x32-10: counter, key, result. */
    static const uint64_t in[][3] = {{0, 0, 0},
                                     {UINT64_MAX, UINT64_MAX, UINT64_MAX},
                                     {0x85a308d3243f6a88u, 0x0370734413198a2eu,
                                      0x299f31d0a4093822u}};
    static const uint32_t wanted[][4] = {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
                                         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
                                         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}};
    for (size_t i = 0; i < KVP__COUNT(in); i++) {
        uint32_t out[4];
        kvp__random(in[i][2], in[i][0], in[i][1], out);
        assert_memory_equal(out, wanted[i], sizeof out);
    }
}

static void test_fork_seeds(void **state)
{
    (void)state;
    uint64_t seen[2000];
    for (uint32_t i = 0; i < 2000; i++) {
        seen[i] = kvp__seed_fork(i / 50, i % 50);
        assert_true(seen[i] != 0);
        assert_true(seen[i] == kvp__seed_fork(i / 50, i % 50));
        for (uint32_t k = 0; k < i; k++) assert_true(seen[k] != seen[i]);
    }
}

/* --- settings --- */

static void refuse(const kvp_sampling *s, uint32_t vocabulary, const char *field)
{
    kvp__sampler out;
    kvp_error err = {.size = sizeof err};
    memset(&out, 0x5a, sizeof out);
    assert_int_equal(kvp__sampler_fill(&out, s, vocabulary, &err), KVP_ERR_INVALID_ARG);
    if (!strstr(err.text, field)) fail_msg("'%s' lacks '%s'", err.text, field);
    assert_int_equal(((unsigned char *)&out)[0], 0x5a);
}

static void test_settings(void **state)
{
    (void)state;
    kvp__sampler f;
    assert_int_equal(kvp__sampler_fill(&f, NULL, 10, NULL), KVP_OK);
    assert_int_equal(f.mode, KVP_SAMPLE_LIBRARY);
    assert_true(f.temperature == 0 && f.top_p == 1 && f.min_p == 0 && f.repetition == 1);
    assert_int_equal(f.top_k, 0);
    assert_int_equal(f.penalty_window, 64);
    kvp_sampling s = defaults();
    s.temperature = 1e-9f;
    s.seed = 7;
    f = filled(&s);
    assert_true(f.temperature == 0 && f.seed == 7);

#define REFUSE(field, value)                                                                      \
    do {                                                                                          \
        s = defaults();                                                                           \
        s.field = value;                                                                          \
        refuse(&s, 10, #field);                                                                   \
    } while (0)
    REFUSE(mode, 3);
    REFUSE(temperature, -0.1f);
    REFUSE(temperature, 101);
    REFUSE(temperature, NAN);
    REFUSE(temperature, INFINITY);
    REFUSE(top_p, 1.01f);
    REFUSE(top_p, -1);
    REFUSE(top_p, NAN);
    REFUSE(min_p, 2);
    REFUSE(min_p, NAN);
    REFUSE(top_k, -1);
    REFUSE(repetition_penalty, -1);
    REFUSE(repetition_penalty, NAN);
    REFUSE(presence_penalty, NAN);
    REFUSE(presence_penalty, INFINITY);
    REFUSE(frequency_penalty, -INFINITY);
    REFUSE(penalty_window, 8193);
    REFUSE(top_logprobs, 21);
    REFUSE(logprobs, 2);
    REFUSE(n_bias, 1);
    kvp_logit_bias bias[1025];
    memset(bias, 0, sizeof bias);
    s = defaults();
    s.bias = bias;
    s.n_bias = 1025;
    refuse(&s, 10, "n_bias");
    s.n_bias = 2;
    bias[1].token = 10;
    refuse(&s, 10, "bias[1].token");
    bias[1].token = -1;
    refuse(&s, 0, "bias[1].token");
    bias[1].token = 9;
    bias[1].bias = NAN;
    refuse(&s, 10, "bias[1].bias");
    bias[1].bias = INFINITY;
    refuse(&s, 10, "bias[1].bias");
    bias[1].bias = -INFINITY;
    f = filled(&s);
    assert_int_equal(f.n_bias, 2);
    assert_ptr_equal(f.bias, bias);
}

/* --- greedy, biases, penalties --- */

static void test_greedy(void **state)
{
    (void)state;
    static float x[MAX_N];
    kvp__sampler s = filled(NULL);
    uint64_t rng = 3;
    for (uint32_t n = 1; n < 200; n++) {
        for (uint32_t i = 0; i < n; i++) x[i] = (float)(gw_rand(&rng) % 7) - 9;
        uint32_t best = 0;
        for (uint32_t i = 1; i < n; i++)
            if (x[i] > x[best]) best = i;
        kvp__sampled out = sample(&s, x, n, n, n, NULL, 0);
        assert_int_equal(out.token, best); /* the lowest id of equals */
        assert_true(out.logprob == 0 && out.n_top == 0);
    }
    x[0] = -0.0f;
    x[1] = 0.0f;
    assert_int_equal(sample(&s, x, 2, 1, 1, NULL, 0).token, 0);
}

static void test_bias(void **state)
{
    (void)state;
    float x[6] = {1, 2, 3, 4, 5, -3e38f};
    kvp_logit_bias bias[] = {{4, -INFINITY}, {0, 1.5f}, {0, 1}, {3, -0.5f}};
    kvp_sampling in = defaults();
    in.bias = bias;
    in.n_bias = 1;
    kvp__sampler s = filled(&in);
    assert_int_equal(sample(&s, x, 6, 1, 1, NULL, 0).token, 3);
    in.n_bias = 4; /* two for one token add up: 1 + 2.5 = 3.5 = 4 - 0.5 */
    s = filled(&in);
    assert_int_equal(sample(&s, x, 6, 1, 1, NULL, 0).token, 0);

    kvp_logit_bias all[6];
    for (int i = 0; i < 6; i++) all[i] = (kvp_logit_bias){i, -INFINITY};
    in.bias = all;
    in.n_bias = 6;
    s = filled(&in);
    kvp__sampled out = {.token = 77};
    kvp_error err = {.size = sizeof err};
    float copy[6];
    memcpy(copy, x, sizeof x);
    assert_int_equal(kvp__sample(&s, x, 6, 1, 1, NULL, 0, memory, &out, &err), KVP_ERR_INVALID_ARG);
    assert_int_equal(out.token, 77);
    assert_memory_equal(copy, x, sizeof x);
    /* A huge bias saturates, it does not become infinite. */
    all[2].bias = 3e38f;
    x[2] = 3e38f;
    in.temperature = 1;
    s = filled(&in);
    assert_int_equal(sample(&s, x, 6, 1, 1, NULL, 0).token, 2);
}

static void test_penalties(void **state)
{
    (void)state;
    static float x[MAX_N], y[MAX_N];
    uint64_t rng = 8;
    for (int round = 0; round < 300; round++) {
        uint32_t n = 5 + (uint32_t)(gw_rand(&rng) % 40), n_recent = (uint32_t)(gw_rand(&rng) % 90);
        int32_t recent[96];
        kvp_sampling in = defaults();
        in.repetition_penalty = 1 + (float)(gw_rand(&rng) % 3) * 0.5f;
        in.presence_penalty = (float)(gw_rand(&rng) % 3) * 0.25f;
        in.frequency_penalty = (float)(gw_rand(&rng) % 3) * 0.125f;
        in.penalty_window = (uint32_t)(gw_rand(&rng) % 3) * 20;
        for (uint32_t i = 0; i < n; i++) x[i] = gw_uniform(&rng) * 4;
        for (uint32_t i = 0; i < n_recent; i++)
            recent[i] = (int32_t)(gw_rand(&rng) % (n + 2)) - 1; /* some outside */
        uint32_t window = in.penalty_window ? in.penalty_window : 64;
        uint32_t from = n_recent > window ? n_recent - window : 0, best = 0;
        for (uint32_t id = 0; id < n; id++) {
            uint32_t count = 0;
            for (uint32_t i = from; i < n_recent; i++) count += recent[i] == (int32_t)id;
            float v = x[id];
            if (count) {
                v = v > 0 ? v / in.repetition_penalty : v * in.repetition_penalty;
                v -= in.presence_penalty;
                v -= (float)count * in.frequency_penalty; /* these are exact */
            }
            y[id] = v;
        }
        double clear = 1;
        for (uint32_t id = 1; id < n; id++)
            if (y[id] > y[best]) best = id;
        for (uint32_t id = 0; id < n; id++)
            if (id != best) clear = fmin(clear, (double)y[best] - (double)y[id]);
        kvp__sampler s = filled(&in);
        int32_t token = sample(&s, x, n, 1, 1, recent, n_recent).token;
        if (clear > 1e-5) assert_int_equal(token, best);
    }
}

static void test_broken_logits(void **state)
{
    (void)state;
    static const struct {
        float bad;
        const char *word;
    } cases[] = {{NAN, "not a number"}, {INFINITY, "infinite"}};
    kvp_sampling in = defaults();
    for (int greedy = 0; greedy < 2; greedy++) {
        in.temperature = greedy ? 0 : 1;
        in.top_k = 3;
        kvp__sampler s = filled(&in);
        for (size_t k = 0; k < KVP__COUNT(cases); k++) {
            for (uint32_t at = 0; at < 37; at++) {
                float x[37] = {0};
                kvp__sampled out = {.token = 77};
                kvp_error err = {.size = sizeof err};
                char name[32];
                x[at] = cases[k].bad;
                assert_int_equal(kvp__sample(&s, x, 37, 1, 1, NULL, 0, memory, &out, &err),
                                 KVP_ERR_INTERNAL);
                snprintf(name, sizeof name, "token %u ", (unsigned)at);
                assert_non_null(strstr(err.text, name));
                assert_non_null(strstr(err.text, cases[k].word));
                assert_int_equal(out.token, 77);
            }
        }
        float x[5] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY};
        kvp__sampled out;
        assert_int_equal(kvp__sample(&s, x, 5, 1, 1, NULL, 0, memory, &out, NULL),
                         KVP_ERR_INTERNAL);
        x[3] = -1e30f; /* one that is possible is chosen */
        assert_int_equal(sample(&s, x, 5, 1, 1, NULL, 0).token, 3);
    }
}

static void test_logprobs(void **state)
{
    (void)state;
    static float x[MAX_N];
    uint64_t rng = 21;
    for (int round = 0; round < 60; round++) {
        uint32_t n = 1 + (uint32_t)(gw_rand(&rng) % 3000);
        kvp_sampling in = defaults();
        kvp_logit_bias bias = {0, 50};
        int32_t recent[1] = {0};
        in.temperature = round % 3 ? 0.7f : 0;
        in.logprobs = round % 2;
        in.top_logprobs = (uint32_t)(gw_rand(&rng) % 21);
        in.presence_penalty = 1; /* neither this nor the bias may be seen in the figures */
        in.bias = &bias;
        in.n_bias = 1;
        for (uint32_t i = 0; i < n; i++) x[i] = gw_uniform(&rng) * 20;
        if (round % 5 == 0)
            for (uint32_t i = 0; i < n; i++) x[i] = i % 3 ? -INFINITY : rintf(x[i]);
        x[n / 2] = 1;
        double max = -1e30, sum = 0;
        for (uint32_t i = 0; i < n; i++) max = fmax(max, (double)x[i]);
        for (uint32_t i = 0; i < n; i++) sum += exp((double)x[i] - max);
        kvp__sampler s = filled(&in);
        kvp__sampled out = sample(&s, x, n, (uint64_t)round, 5, recent, 1);
        double wanted = (double)x[out.token] - max - log(sum);
        if (in.logprobs || in.top_logprobs)
            assert_true(fabs((double)out.logprob - wanted) < 1e-5 * (1 + fabs(wanted)));
        else
            assert_true(out.logprob == 0);
        assert_int_equal(out.n_top, in.top_logprobs < n ? in.top_logprobs : n);
        for (uint32_t k = 0; k < out.n_top; k++) {
            uint32_t id = (uint32_t)out.top_tokens[k], before = 0;
            for (uint32_t i = 0; i < n; i++)
                before += x[i] > x[id] || (x[i] == x[id] && i < id);
            assert_int_equal(before, k);
            wanted = (double)x[id] - max - log(sum);
            if (isinf(wanted)) assert_true(isinf(out.top_logprobs[k]) && out.top_logprobs[k] < 0);
            else
                assert_true(fabs((double)out.top_logprobs[k] - wanted) < 1e-5 * (1 + fabs(wanted)));
        }
    }
}

/* --- drawing, against the naive one --- */

static const float *sorting;

static int by_logit(const void *a, const void *b)
{
    uint32_t i = *(const uint32_t *)a, k = *(const uint32_t *)b;
    if (sorting[i] != sorting[k]) return sorting[i] > sorting[k] ? -1 : 1;
    return i < k ? -1 : 1;
}

/* The token, and how far the decisions were from going the other way. */
static uint32_t draw_naively(const kvp_sampling *in, const float *x, uint32_t n, double u,
                             double *margin)
{
    static uint32_t order[MAX_N];
    static double p[MAX_N];
    static bool kept[MAX_N];
    double total = 0, used = 0;
    for (uint32_t i = 0; i < n; i++) order[i] = i;
    sorting = x;
    qsort(order, n, sizeof *order, by_logit);
    for (uint32_t i = 0; i < n; i++)
        p[i] = exp(((double)x[i] - (double)x[order[0]]) / (double)in->temperature);
    uint32_t keep = in->top_k && (uint32_t)in->top_k < n ? (uint32_t)in->top_k : n;
    for (uint32_t i = 0; i < keep; i++) total += p[order[i]];
    *margin = 1;
    if (in->top_p > 0 && in->top_p < 1) {
        uint32_t i = 0;
        while (i < keep) {
            used += p[order[i++]] / total;
            *margin = fmin(*margin, fabs(used - (double)in->top_p));
            if (used >= (double)in->top_p) break;
        }
        keep = i;
    }
    while (in->min_p > 0 && keep > 1 && p[order[keep - 1]] < (double)in->min_p) {
        *margin = fmin(*margin, fabs(p[order[keep - 1]] - (double)in->min_p));
        keep--;
    }
    if (in->min_p > 0) *margin = fmin(*margin, fabs(p[order[keep - 1]] - (double)in->min_p));
    memset(kept, 0, sizeof kept);
    total = 0;
    for (uint32_t i = 0; i < keep; i++) {
        kept[order[i]] = true;
        total += p[order[i]];
    }
    double left = u * total;
    for (uint32_t i = 0; i < n; i++) {
        if (!kept[i]) continue;
        *margin = fmin(*margin, fabs(left) / total);
        if (left < p[i]) {
            *margin = fmin(*margin, (p[i] - left) / total);
            return i;
        }
        left -= p[i];
    }
    *margin = 0;
    return order[0];
}

static void test_against_naive(void **state)
{
    (void)state;
    static float x[MAX_N];
    uint64_t rng = 99;
    uint32_t compared = 0, rounds = 3000;
    for (uint32_t round = 0; round < rounds; round++) {
        uint32_t n = 1 + (uint32_t)(gw_rand(&rng) % (round % 10 ? 90 : 4000));
        float spread = (float)(1 + gw_rand(&rng) % 12);
        for (uint32_t i = 0; i < n; i++) x[i] = gw_uniform(&rng) * spread;
        if (round % 3 == 0) /* many ties, zeros of both signs among them */
            for (uint32_t i = 0; i < n; i++) x[i] = rintf(x[i] / 2);
        if (round % 7 == 0) x[n / 3] = -INFINITY;
        if (n == 1) x[0] = 1;
        kvp_sampling in = defaults();
        in.temperature = 0.2f + (float)(gw_rand(&rng) % 20) * 0.1f;
        if (gw_rand(&rng) % 2) in.top_k = (int32_t)(gw_rand(&rng) % (n + 3));
        if (gw_rand(&rng) % 2) in.top_p = 0.05f + (float)(gw_rand(&rng) % 95) * 0.01f;
        if (gw_rand(&rng) % 3 == 0) in.min_p = (float)(gw_rand(&rng) % 100) * 0.01f;
        kvp__sampler s = filled(&in);
        double margin;
        uint32_t wanted = draw_naively(&in, x, n, uniform(round, 17), &margin);
        kvp__sampled out = sample(&s, x, n, round, 17, NULL, 0);
        if (margin < 1e-5) continue;
        compared++;
        if ((uint32_t)out.token != wanted)
            fail_msg("round %u: n %u k %d p %f m %f t %f: %d, wanted %u, margin %g", round, n,
                     in.top_k, (double)in.top_p, (double)in.min_p, (double)in.temperature,
                     out.token, wanted, margin);
    }
    assert_true(compared > rounds * 6 / 10);
}

/* Ties at the edge of top-k and top-p: the lowest ids stay. */
static void test_ties_at_the_edge(void **state)
{
    (void)state;
    float x[100];
    kvp_sampling in = defaults();
    in.temperature = 1;
    for (int i = 0; i < 100; i++) x[i] = 2;
    in.top_k = 7;
    kvp__sampler s = filled(&in);
    for (uint64_t i = 0; i < 500; i++) assert_true(sample(&s, x, 100, 4, i, NULL, 0).token < 7);
    in.top_k = 0;
    in.top_p = 0.095f; /* ten of them have 0.1, nine too little */
    s = filled(&in);
    bool last = false;
    for (uint64_t i = 0; i < 500; i++) {
        int32_t token = sample(&s, x, 100, 4, i, NULL, 0).token;
        assert_true(token < 10);
        last = last || token == 9;
    }
    assert_true(last);
    in.top_p = 1e-6f; /* one token always stays */
    in.min_p = 1;
    s = filled(&in);
    assert_int_equal(sample(&s, x, 100, 4, 1, NULL, 0).token, 0);
}

/* --- frequencies --- */

/* Pearson's statistic for `draws` draws of tokens 0 to 9; which > 0: over seeds, not positions. */
static double chi_square(const kvp_sampling *in, float *x, const double *p, uint32_t draws,
                         int over_seeds)
{
    uint32_t count[10] = {0};
    double chi = 0;
    kvp__sampler s = filled(in);
    for (uint32_t i = 0; i < draws; i++) {
        uint64_t seed = over_seeds ? 1000 + i : 42, position = over_seeds ? 9 : i;
        count[sample(&s, x, 10, seed, position, NULL, 0).token]++;
    }
    for (int i = 0; i < 10; i++) {
        if (p[i] == 0) assert_int_equal(count[i], 0);
        else chi += pow(count[i] - draws * p[i], 2) / (draws * p[i]);
    }
    return chi;
}

static void test_frequencies(void **state)
{
    (void)state;
    float x[10] = {0.5f, -1, 2, 1.5f, -3, 0, 1, 2.5f, -0.5f, 1.75f};
    kvp_sampling in = defaults();
    in.temperature = 0.8f;
    double p[10], sum = 0;
    for (int i = 0; i < 10; i++) sum += p[i] = exp((double)x[i] / 0.8);
    for (int i = 0; i < 10; i++) p[i] /= sum;
    /* 9 degrees of freedom: above 27.9 once in a thousand times. The seeds are fixed. */
    assert_true(chi_square(&in, x, p, 40000, 0) < 27.9);
    assert_true(chi_square(&in, x, p, 40000, 1) < 27.9);
    /* The four largest alone: 3 degrees of freedom, 16.3. */
    in.top_k = 4;
    sum = 0;
    for (int i = 0; i < 10; i++) sum += p[i] = x[i] >= 1.5f ? exp((double)x[i] / 0.8) : 0;
    for (int i = 0; i < 10; i++) p[i] /= sum;
    assert_true(chi_square(&in, x, p, 40000, 0) < 16.3);
    in.top_k = 0;
    in.min_p = 0.28f; /* exp(-1 / 0.8) = 0.287: the same four */
    assert_true(chi_square(&in, x, p, 40000, 1) < 16.3);
}

/* --- the same everywhere --- */

/* Tokens and log-probabilities of a fixed run, as one number: whatever the compiler, its options and
 * the machine. */
static void test_same_bits(void **state)
{
    (void)state;
    static float x[MAX_N];
    uint64_t rng = 1, hash = 0;
    for (uint32_t round = 0; round < 400; round++) {
        for (uint32_t i = 0; i < MAX_N; i++) {
            rng = rng * 6364136223846793005u + 1442695040888963407u;
            x[i] = (float)(int64_t)((rng >> 20) % 100000) * 2e-4f - 8;
        }
        kvp_sampling in = defaults();
        in.temperature = 0.3f + (float)(round % 9) * 0.2f;
        in.top_k = (int32_t)(round % 3) * 100;
        in.top_p = (float)(round % 4) * 0.24f;
        in.min_p = (float)(round % 5) * 0.01f;
        in.top_logprobs = 20;
        kvp__sampler s = filled(&in);
        kvp__sampled out = sample(&s, x, MAX_N, round, round, NULL, 0);
        hash = hash * 31 + (uint32_t)out.token;
        hash = hash * 31 + kvp__float_bits(out.logprob);
        for (uint32_t i = 0; i < 20; i++) hash = hash * 31 + kvp__float_bits(out.top_logprobs[i]);
    }
    if (hash != 0xb97583282c1c5e78u) fail_msg("%016llx", (unsigned long long)hash);
}

/* --- size --- */

static void test_large_vocabulary(void **state)
{
    (void)state;
    uint32_t n = 262144;
    assert_true(kvp__sample_scratch_bytes(n) < 192u << 10);
    assert_true(kvp__sample_scratch_bytes(n) <= sizeof memory);
    float *x = malloc(n * sizeof *x);
    int32_t *recent = malloc(20000 * sizeof *recent);
    assert_non_null(x);
    assert_non_null(recent);
    uint64_t rng = 4;
    for (uint32_t i = 0; i < n; i++) x[i] = gw_uniform(&rng) * 8;
    for (uint32_t i = 0; i < 20000; i++) recent[i] = (int32_t)(gw_rand(&rng) % n);
    kvp_sampling in = defaults();
    in.temperature = 0.9f;
    in.top_p = 0.9f;
    in.top_k = 1000;
    in.repetition_penalty = 1.3f;
    in.penalty_window = 8192;
    in.top_logprobs = 20;
    kvp__sampler s = filled(&in);
    kvp__sampled a, b;
    float first = x[recent[19999]];
    assert_int_equal(kvp__sample(&s, x, n, 5, 6, recent, 20000, memory, &a, NULL), KVP_OK);
    assert_true(x[recent[19999]] == first);
    assert_int_equal(kvp__sample(&s, x, n, 5, 6, recent, 20000, memory, &b, NULL), KVP_OK);
    assert_int_equal(a.token, b.token);
    assert_int_equal(a.n_top, 20);
    free(x);
    free(recent);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_generator_known_answers),
        cmocka_unit_test(test_fork_seeds),
        cmocka_unit_test(test_settings),
        cmocka_unit_test(test_greedy),
        cmocka_unit_test(test_bias),
        cmocka_unit_test(test_penalties),
        cmocka_unit_test(test_broken_logits),
        cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_against_naive),
        cmocka_unit_test(test_ties_at_the_edge),
        cmocka_unit_test(test_frequencies),
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_large_vocabulary),
    };
    return cmocka_run_group_tests_name("sampler", tests, NULL, NULL);
}
