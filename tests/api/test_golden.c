/*
 * The right numbers: a tiny random model of every architecture against transformers, with F32
 * weights, activations and KV, at every position; and again in pieces over shared prefixes, which has
 * to give the same bits.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "positions.h"
#include "support/golden.h"

typedef struct result {
    float *logits;
    size_t vocabulary;
    uint32_t rows;
} result;

static void keep(void *user, uint32_t text, uint32_t position, const float *logits, size_t count)
{
    result *r = user;
    (void)text;
    assert_int_equal(count, r->vocabulary);
    memcpy(r->logits + position * count, logits, count * sizeof *logits);
    r->rows++;
}

static void run(kvp_model *m, const golden *g, uint32_t segment, result *r)
{
    positions_text text = {g->ids, g->tokens};
    positions p = {.model = m, .texts = &text, .n_texts = 1, .segment = segment,
                   .kv_format = KVP_KV_F32, .threads = KVP_THREADS_INLINE, .row = keep, .user = r};
    r->vocabulary = g->vocabulary;
    r->rows = 0;
    r->logits = calloc((size_t)g->tokens * g->vocabulary, sizeof *r->logits);
    assert_non_null(r->logits);
    positions_run(&p);
    assert_int_equal(r->rows, g->tokens);
}

static double distance(const golden *g, const float *logits)
{
    double worst = 0, top = 0;
    for (size_t i = 0; i < (size_t)g->tokens * g->vocabulary; i++) {
        double off = fabs((double)logits[i] - (double)g->logits[i]);
        if (!(off <= worst)) worst = off;
        top = fmax(top, fabs((double)g->logits[i]));
    }
    return worst / top;
}

static void test_model(void **state)
{
    const char *name = *state;
    kvp_model_options mo = {.size = sizeof mo, .activations = KVP_ACTIVATIONS_F32};
    kvp_error err = {.size = sizeof err};
    kvp_model *m = NULL;
    golden g;
    result whole, pieces;
    golden_load(&g, name);
    if (kvp_model_open_memory(g.file, g.file_bytes, &mo, &m, &err) != KVP_OK)
        fail_msg("%s: %s", name, err.text);
    run(m, &g, 0, &whole);
    run(m, &g, 7, &pieces);
    kvp_model_destroy(m);
    double off = distance(&g, whole.logits);
    print_message("# %s: %.1e\n", name, off);
    assert_true(off <= 1e-4);
    assert_memory_equal(whole.logits, pieces.logits,
                        (size_t)g.tokens * g.vocabulary * sizeof *whole.logits);
    free(whole.logits);
    free(pieces.logits);
    golden_free(&g);
}

int main(void)
{
    struct CMUnitTest tests[32];
    size_t n = 0;
    for (; golden_names[n]; n++) {
        union {
            const char *name;
            void *state;
        } each = {golden_names[n]}; /* only read */
        tests[n] = (struct CMUnitTest){golden_names[n], test_model, NULL, NULL, each.state};
    }
    return _cmocka_run_group_tests("api/golden", tests, n, NULL, NULL);
}
