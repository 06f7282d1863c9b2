/*
 * CMocka's interface for machines with a card, where nothing can be installed: that of tests/cross, and
 * some of a program's tests: those named in KVPAGE_ONLY, separated by commas; all without it. A name
 * that no test has is a failure, so that a list does not go stale.
 */
#ifndef KVPAGE_TESTS_GPU_CMOCKA_H
#define KVPAGE_TESTS_GPU_CMOCKA_H

#include "tests/cross/cmocka.h"

__attribute__((unused)) static int gpu_run(const struct CMUnitTest *tests, size_t n,
                                           CMFixtureFunction setup, CMFixtureFunction teardown)
{
    struct CMUnitTest some[256];
    size_t count = 0;
    const char *only = getenv("KVPAGE_ONLY");
    if (!only) return cross_run(tests, n, setup, teardown);
    while (*only) {
        size_t i = 0, length = strcspn(only, ",");
        while (i < n && (strlen(tests[i].name) != length || strncmp(tests[i].name, only, length)))
            i++;
        if (i == n || count == 256) {
            printf("1..1\nnot ok 1 - %s\n# no such test\n", only);
            return 1;
        }
        some[count++] = tests[i];
        only += length + (only[length] == ',');
    }
    return cross_run(some, count, setup, teardown);
}

#undef cmocka_run_group_tests
#define cmocka_run_group_tests(tests, setup, teardown)                                             \
    gpu_run(tests, sizeof(tests) / sizeof((tests)[0]), setup, teardown)

#endif
