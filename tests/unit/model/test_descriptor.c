/*
 * What the descriptor means: the naive forward pass over it gives transformers' logits, for every
 * architecture and variant. The library's own pass is held to the same files in tests/api.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "model/model.h"
#include "support/golden.h"
#include "support/heap.h"
#include "support/naive.h"

static void check(const char *name)
{
    static kvp__model m;
    golden g;
    heap h;
    kvp__source source;
    kvp_error err = {.size = sizeof err};
    golden_load(&g, name);
    heap_init(&h);
    kvp__source_memory(&source, g.file, g.file_bytes);
    if (kvp__model_load(&m, &h.hooks, &source, &err) != KVP_OK) fail_msg("%s: %s", name, err.text);
    assert_int_equal(m.arch.vocabulary, g.vocabulary);
    size_t n = (size_t)g.tokens * g.vocabulary;
    double *logits = calloc(n, sizeof *logits), worst = 0, top = 0;
    assert_non_null(logits);
    naive_logits(&m, g.ids, g.tokens, logits);
    for (size_t i = 0; i < n; i++) {
        double off = fabs(logits[i] - (double)g.logits[i]);
        if (!(off <= worst)) worst = off;
        top = fmax(top, fabs((double)g.logits[i]));
    }
    print_message("%s: %.1e\n", name, worst / top);
    assert_true(worst <= 3e-6 * top);
    free(logits);
    kvp__model_unload(&m);
    golden_free(&g);
}

static void test_against_transformers(void **state)
{
    (void)state;
    for (const char *const *name = golden_names; *name; name++) check(*name);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_against_transformers)};
    return cmocka_run_group_tests_name("model/descriptor", tests, NULL, NULL);
}
