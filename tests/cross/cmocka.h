/*
 * The little of CMocka's interface that our tests use, for targets that have no CMocka (the NEON
 * level under emulation). Header only; results in TAP. Native runs use the real one.
 *
 * A failed assertion leaves the test by longjmp, as CMocka does; a test that crashes ends the
 * program, and the runner counts what is missing from the plan.
 */
#ifndef KVPAGE_TESTS_CROSS_CMOCKA_H
#define KVPAGE_TESTS_CROSS_CMOCKA_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void (*CMUnitTestFunction)(void **state);
typedef int (*CMFixtureFunction)(void **state);

struct CMUnitTest {
    const char *name;
    CMUnitTestFunction test_func;
    CMFixtureFunction setup_func, teardown_func;
    void *initial_state;
};

#define cmocka_unit_test(f) {#f, f, NULL, NULL, NULL}
#define cmocka_unit_test_setup(f, s) {#f, f, s, NULL, NULL}
#define cmocka_unit_test_teardown(f, t) {#f, f, NULL, t, NULL}
#define cmocka_unit_test_setup_teardown(f, s, t) {#f, f, s, t, NULL}
#define cmocka_unit_test_prestate(f, p) {#f, f, NULL, NULL, p}
#define cmocka_unit_test_prestate_setup_teardown(f, s, t, p) {#f, f, s, t, p}

enum { CROSS_FAILED = 1, CROSS_SKIPPED = 2 };

/* One definition for all objects of a program. */
__attribute__((weak)) jmp_buf cross_leave;

#define print_message printf
#define print_error printf

__attribute__((noreturn, format(printf, 3, 4), unused)) static void
cross_fail(const char *file, int line, const char *format, ...)
{
    va_list args;
    printf("# %s:%d: ", file, line);
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf("\n");
    longjmp(cross_leave, CROSS_FAILED);
}

#define CROSS_CHECK(ok, ...) \
    do { if (!(ok)) cross_fail(__FILE__, __LINE__, __VA_ARGS__); } while (0)
#define CROSS_COMPARE(a, op, b)                                                                   \
    do {                                                                                          \
        const long long cross_a = (long long)(a), cross_b = (long long)(b);                       \
        CROSS_CHECK(cross_a op cross_b, "%s " #op " %s: %lld, %lld", #a, #b, cross_a, cross_b);   \
    } while (0)

#define assert_true(c) CROSS_CHECK((c), "%s", #c)
#define assert_false(c) CROSS_CHECK(!(c), "not: %s", #c)
#define assert_int_equal(a, b) CROSS_COMPARE(a, ==, b)
#define assert_int_not_equal(a, b) CROSS_COMPARE(a, !=, b)
#define assert_null(p) CROSS_CHECK((p) == NULL, "%s is not NULL", #p)
#define assert_non_null(p) CROSS_CHECK((p) != NULL, "%s is NULL", #p)
#define assert_ptr_equal(a, b) CROSS_CHECK((const void *)(a) == (const void *)(b), "%s, %s", #a, #b)
#define assert_ptr_not_equal(a, b) \
    CROSS_CHECK((const void *)(a) != (const void *)(b), "%s, %s", #a, #b)
#define assert_string_equal(a, b) CROSS_CHECK(strcmp((a), (b)) == 0, "\"%s\", \"%s\"", (a), (b))
#define assert_string_not_equal(a, b) CROSS_CHECK(strcmp((a), (b)) != 0, "\"%s\" twice", (a))
#define assert_memory_equal(a, b, n) \
    CROSS_CHECK(memcmp((a), (b), (n)) == 0, "%s and %s differ", #a, #b)
#define assert_memory_not_equal(a, b, n) \
    CROSS_CHECK(memcmp((a), (b), (n)) != 0, "%s and %s are the same", #a, #b)
#define assert_in_range(v, lo, hi)                                                                \
    CROSS_CHECK((uintmax_t)(v) >= (uintmax_t)(lo) && (uintmax_t)(v) <= (uintmax_t)(hi),           \
                "%s is out of range", #v)
#define assert_float_equal(a, b, e) CROSS_CHECK(                                                  \
    __builtin_fabs((double)(a) - (double)(b)) <= (double)(e), "%g, %g", (double)(a), (double)(b))
#define assert_return_code(rc, error) CROSS_CHECK((rc) >= 0, "%s: errno %d", #rc, (int)(error))
#define fail() cross_fail(__FILE__, __LINE__, "failed")
#define fail_msg(...) cross_fail(__FILE__, __LINE__, __VA_ARGS__)
#define skip() longjmp(cross_leave, CROSS_SKIPPED)

__attribute__((unused)) static int cross_run(const struct CMUnitTest *tests, size_t n,
                                             CMFixtureFunction setup, CMFixtureFunction teardown)
{
    void *group = NULL;
    volatile int failed = 0;
    printf("1..%zu\n", n);
    if (setup && setup(&group)) {
        printf("not ok 0 - group setup\n");
        return 1;
    }
    for (volatile size_t i = 0; i < n; i++) {
        const struct CMUnitTest *t = &tests[i];
        void *state = t->initial_state ? t->initial_state : group;
        void **volatile s = &state;
        int how = t->setup_func && t->setup_func(s) ? CROSS_FAILED : 0;
        if (!how) {
            how = setjmp(cross_leave);
            if (!how) t->test_func(s);
        }
        if (t->teardown_func && t->teardown_func(s) && !how) how = CROSS_FAILED;
        failed += how == CROSS_FAILED;
        printf("%s %zu - %s%s\n", how ? "not ok" : "ok", i + 1,
               how == CROSS_SKIPPED ? "# SKIP " : "", t->name);
        fflush(stdout);
    }
    if (teardown && teardown(&group)) failed++;
    return failed;
}

#define cmocka_run_group_tests(tests, setup, teardown) \
    cross_run(tests, sizeof(tests) / sizeof((tests)[0]), setup, teardown)
#define cmocka_run_group_tests_name(name, tests, setup, teardown) \
    (printf("# %s\n", name), cmocka_run_group_tests(tests, setup, teardown))

#endif
