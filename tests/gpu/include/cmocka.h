/*
 * CMocka's interface for machines with a card, where nothing can be installed: that of tests/cross,
 * and some of a program's tests: those named in KVPAGE_ONLY, separated by commas, or all but those
 * named in KVPAGE_NOT. A name that no test has is a failure, so that a list does not go stale.
 */
#ifndef KVPAGE_TESTS_GPU_CMOCKA_H
#define KVPAGE_TESTS_GPU_CMOCKA_H

#include "tests/cross/cmocka.h"

/* Marks the tests that the list names; 0: a name is that of none. */
__attribute__((unused)) static int gpu_choose(const struct CMUnitTest *tests, size_t n,
                                              const char *list, char *chosen)
{
    while (*list) {
        size_t i = 0, length = strcspn(list, ",");
        while (i < n && (strlen(tests[i].name) != length || strncmp(tests[i].name, list, length)))
            i++;
        if (i == n) {
            printf("1..1\nnot ok 1 - %s\n# no such test\n", list);
            return 0;
        }
        chosen[i] = 1;
        list += length + (list[length] == ',');
    }
    return 1;
}

__attribute__((unused)) static int gpu_run(const struct CMUnitTest *tests, size_t n,
                                           CMFixtureFunction setup, CMFixtureFunction teardown)
{
    struct CMUnitTest some[256];
    char chosen[256] = {0};
    size_t count = 0;
    const char *only = getenv("KVPAGE_ONLY"), *others = getenv("KVPAGE_NOT");
    const char *list = only ? only : others ? others : "";
    if (n > 256 || !gpu_choose(tests, n, list, chosen)) return 1;
    for (size_t i = 0; i < n; i++)
        if (chosen[i] == (only != NULL)) some[count++] = tests[i];
    return cross_run(some, count, setup, teardown);
}

#undef cmocka_run_group_tests
#define cmocka_run_group_tests(tests, setup, teardown)                                             \
    gpu_run(tests, sizeof(tests) / sizeof((tests)[0]), setup, teardown)

#endif
