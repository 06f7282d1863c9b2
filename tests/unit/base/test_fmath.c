/*
 * kvp__exp, kvp__ln, kvp__pow and kvp__sincos against long double references of the C library, over the
 * ranges that fmath.h names, and at the edges.
 */
#include "base/fmath.h"

#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

static uint64_t state = 88172645463325252u;

static double uniform(double lo, double hi)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return lo + (hi - lo) * ((double)(state >> 11) * 0x1p-53);
}

static void assert_close(double got, long double want, long double tolerance)
{
    long double diff = fabsl((long double)got - want);
    if (!(diff <= tolerance)) fail_msg("got %.17g, want %.20Lg", got, want);
}

static void exp_is_accurate(void **s)
{
    (void)s;
    for (int i = 0; i < 200000; i++) {
        double x = i % 2 ? uniform(-700, 700) : uniform(-2, 2);
        long double want = expl((long double)x);
        assert_close(kvp__exp(x), want, 1e-15L * want);
    }
    assert_close(kvp__exp(-740.0), expl(-740.0L), 1e-323L);
}

static void exp_at_the_edges(void **s)
{
    (void)s;
    assert_true(kvp__exp(0.0) == 1.0);
    assert_true(kvp__exp(-0.0) == 1.0);
    assert_true(kvp__exp(-800.0) == 0.0);
    assert_true(kvp__exp(-INFINITY) == 0.0);
    assert_true(isinf(kvp__exp(710.0)));
    assert_true(isinf(kvp__exp(INFINITY)));
    assert_true(isfinite(kvp__exp(709.78)));
    assert_true(isnan(kvp__exp(NAN)));
}

static void ln_is_accurate(void **s)
{
    (void)s;
    for (int i = 0; i < 200000; i++) {
        double x = i % 2 ? uniform(0.5, 2.0) : ldexp(uniform(0.5, 1.0), (int)uniform(-1070, 1000));
        long double want = logl((long double)x);
        assert_close(kvp__ln(x), want, 1e-15L * fabsl(want));
    }
}

static void ln_at_the_edges(void **s)
{
    (void)s;
    assert_true(kvp__ln(1.0) == 0.0);
    assert_true(kvp__ln(0.0) == -INFINITY);
    assert_true(kvp__ln(INFINITY) == INFINITY);
    assert_true(isnan(kvp__ln(-1.0)));
    assert_true(isnan(kvp__ln(NAN)));
}

static void pow_makes_rope_frequencies(void **s)
{
    (void)s;
    static const double bases[] = {1e4, 1e5, 5e5, 1e6, 1e7};
    for (unsigned b = 0; b < 5; b++)
        for (int i = 0; i < 128; i++) {
            double e = -2.0 * i / 256.0;
            long double want = powl((long double)bases[b], (long double)e);
            assert_close(kvp__pow(bases[b], e), want, 4e-15L * want);
        }
}

static void sincos_is_accurate(void **s)
{
    (void)s;
    for (int i = 0; i < 300000; i++) {
        double top = i % 3 == 0 ? 1.0 : i % 3 == 1 ? 1e5 : 0x1p30, si, co;
        double x = uniform(-top, top);
        if (i % 7 == 0) x = nearbyint(x);
        kvp__sincos(x, &si, &co);
        assert_close(si, sinl((long double)x), 1e-15L);
        assert_close(co, cosl((long double)x), 1e-15L);
    }
    for (int k = 0; k < 100000; k++) { /* next to the zeros, where cancellation is worst */
        double x = (double)k * 1.5707963267948966, si, co;
        kvp__sincos(x, &si, &co);
        assert_close(si, sinl((long double)x), 1e-15L);
        assert_close(co, cosl((long double)x), 1e-15L);
    }
}

static void sincos_at_zero(void **s)
{
    (void)s;
    double si, co;
    kvp__sincos(0.0, &si, &co);
    assert_true(si == 0.0 && co == 1.0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exp_is_accurate),  cmocka_unit_test(exp_at_the_edges),
        cmocka_unit_test(ln_is_accurate),   cmocka_unit_test(ln_at_the_edges),
        cmocka_unit_test(pow_makes_rope_frequencies),
        cmocka_unit_test(sincos_is_accurate), cmocka_unit_test(sincos_at_zero),
    };
    return cmocka_run_group_tests_name("fmath", tests, NULL, NULL);
}
