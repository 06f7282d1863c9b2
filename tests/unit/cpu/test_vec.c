/*
 * The vocabulary of the kernels: every operation at every level against plain C, bit for bit, and
 * the functions built from them against double precision.
 */
#define _DEFAULT_SOURCE
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include "base/half.h"
#include "cpu/kernels.h"

#include "gguf_oracle.h"
#include "vec_probe.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cmocka.h>

/* Levels other than plain C that this machine runs. */
static uint32_t others(const probe *out[3])
{
    uint32_t n = 0;
#if defined(__x86_64__)
    if (kvp__cpu_level(KVP_CPU_AVX2) == KVP_CPU_AVX2) out[n++] = &probe_avx2;
    if (kvp__cpu_level(KVP_CPU_AVX512) == KVP_CPU_AVX512) out[n++] = &probe_avx512;
#elif defined(__aarch64__)
    out[n++] = &probe_neon;
#endif
    return n;
}

static uint64_t seed = 99;

static uint32_t bits32(void)
{
    return (uint32_t)(int64_t)(oracle_random(&seed) * 2147483647.0);
}

/* Common sizes mostly, and everything that is special. */
static float any_float(void)
{
    static const uint32_t special[] = {
        0, 0x80000000u, 1, 0x807fffffu, 0x00800000u, 0x7f800000u, 0xff800000u, 0x7fc00000u,
        0x477fe000u, 0x477fefffu, 0x477ff000u, 0xc77ff000u, 0x3f000000u, 0x40200000u, 0xbfc00000u,
        0x33000000u, 0x33000001u, 0x387fffffu, 0x4b000001u, 0x7f7fffffu, 0x3f808000u, 0x3f818000u,
    };
    uint32_t r = bits32();
    switch (r % 4) {
    case 0: return kvp__bits_float(special[r / 4 % KVP__COUNT(special)]);
    case 1: return kvp__bits_float(bits32());
    default: return (float)(oracle_random(&seed) * 300.0);
    }
}

static void same_floats(const float *a, const float *b, uint32_t n, const char *what, int which)
{
    for (uint32_t k = 0; k < n; k++)
        if (!(a[k] != a[k] && b[k] != b[k]) && kvp__float_bits(a[k]) != kvp__float_bits(b[k]))
            fail_msg("%s %d lane %u: %a, not %a", what, which, k, (double)b[k], (double)a[k]);
}

static bool is_nan_half(uint16_t h, bool brain)
{
    return brain ? (h & 0x7fff) > 0x7f80 : (h & 0x7fff) > 0x7c00;
}

static void every_operation_has_the_same_bits(void **state)
{
    (void)state;
    const probe *level[3];
    uint32_t n_levels = others(level);
    for (int round = 0; round < 3000; round++) {
        float a[16], b[16], c[16];
        int32_t i[16], j[16], k[16];
        uint8_t w[64];
        int8_t x[4];
        for (int t = 0; t < 16; t++) {
            a[t] = any_float(), b[t] = round % 3 ? any_float() : a[t], c[t] = any_float();
            i[t] = (int32_t)bits32(), j[t] = round % 5 ? (int32_t)bits32() : i[t];
            k[t] = (int32_t)bits32() / 16;
            /* the sum of two products of -32768 is the one case without an answer */
            if (i[t] == INT32_MIN) i[t] = 0;
        }
        for (int t = 0; t < 64; t++) w[t] = round % 7 ? (uint8_t)bits32() : (uint8_t)(round & 8 ? 0x80 : 0xff);
        for (int t = 0; t < 4; t++) {
            x[t] = round % 7 ? (int8_t)bits32() : (int8_t)(round & 16 ? 127 : -127);
            if (x[t] == -128) x[t] = -127;
        }
        uint32_t n = (uint32_t)round % 17;
        static probe_result want, got;
        memset(&want, 0, sizeof want);
        probe_generic.all(a, b, c, i, j, k, w, x, n, &want);
        for (uint32_t l = 0; l < n_levels; l++) {
            memset(&got, 0, sizeof got);
            level[l]->all(a, b, c, i, j, k, w, x, n, &got);
            for (int t = 0; t < PROBE_FLOATS; t++)
                same_floats(want.f[t], got.f[t], 16, "float operation", t);
            for (int t = 0; t < PROBE_INTS; t++)
                if (memcmp(want.i[t], got.i[t], sizeof want.i[t]))
                    fail_msg("integer operation %d at level %u differs", t, level[l]->level);
            for (int t = 0; t < 4; t++)
                for (int m = 0; m < 16; m++)
                    if (want.h[t][m] != got.h[t][m] &&
                        !(is_nan_half(want.h[t][m], t % 3) && is_nan_half(got.h[t][m], t % 3)))
                        fail_msg("half operation %d lane %d: %04x, not %04x", t, m, got.h[t][m],
                                 want.h[t][m]);
        }
    }
}

/* Plain C itself, against what the operations are said to be. */
static void plain_c_means_what_it_says(void **state)
{
    (void)state;
    static probe_result r;
    float a[16], b[16], c[16];
    int32_t i[16], j[16], k[16];
    uint8_t w[64];
    int8_t x[4] = {127, -127, 3, -90};
    for (int t = 0; t < 16; t++) {
        a[t] = (float)t - 7.5f, b[t] = 3.0f, c[t] = (float)(t * t);
        i[t] = t * 100003 - 800000, j[t] = 77777 - t, k[t] = 5 * t;
    }
    a[9] = (float)NAN;
    for (int t = 0; t < 64; t++) w[t] = (uint8_t)(t * 37);
    probe_generic.all(a, b, c, i, j, k, w, x, 5, &r);
    assert_true(r.f[6][9] == 3.0f && r.f[7][9] == 3.0f); /* the second operand beside a NaN */
    assert_true(isnan(r.f[20][9]));                      /* but a clamp keeps it */
    assert_true(r.f[10][8] == 0.0f && r.f[10][7] == 0.0f && r.f[10][10] == 2.0f);
    assert_true(signbit(r.f[10][7]));                    /* -0.5 rounds to minus zero */
    assert_true(r.f[13][0] == a[1] && r.f[13][5] == a[4]);
    assert_true(r.f[19][4] == a[4] && r.f[19][5] == b[5]);
    assert_true(r.f[21][4] == a[4] && r.f[21][5] == 0.0f);
    for (int t = 0; t < 16; t++) {
        int unsigned_dot = 0, signed_dot = 0;
        for (int q = 0; q < 4; q++) {
            unsigned_dot += (w[4 * t + q] & 127) * x[q];
            signed_dot += (int8_t)w[4 * t + q] * x[q];
        }
        assert_int_equal(r.i[29][t], k[t] + unsigned_dot);
        assert_int_equal(r.i[30][t], k[t] + 5 * unsigned_dot);
        assert_int_equal(r.i[31][t], k[t] + signed_dot);
        assert_int_equal(r.i[21][t], k[t] + (int16_t)i[t] * (int16_t)j[t] + (i[t] >> 16) * (j[t] >> 16));
        assert_int_equal(r.h[0][t], kvp__f32_to_f16(a[t]));
    }
}

static void halves_widen_exactly(void **state)
{
    (void)state;
    const probe *level[3];
    uint32_t n_levels = others(level);
    for (uint32_t h = 0; h < 65536; h += 16) {
        uint16_t in[16];
        float want[16], got[16];
        for (uint32_t k = 0; k < 16; k++) {
            in[k] = (uint16_t)(h + k);
            want[k] = kvp__f16_to_f32(in[k]);
        }
        probe_generic.load_f16(in, got);
        same_floats(want, got, 16, "half", (int)h);
        for (uint32_t l = 0; l < n_levels; l++) {
            level[l]->load_f16(in, got);
            same_floats(want, got, 16, "half", (int)h);
        }
    }
}

typedef void function(const float *x, float *out);

/* The largest error in units in the last place of the result, over [from, to], and equal bits at
 * every level. */
static double worst(function *f, function *const *same, uint32_t n_same, double (*truth)(double),
                    double from, double to)
{
    double most = 0;
    for (int round = 0; round < 20000; round++) {
        float x[16], y[16], z[16];
        for (int k = 0; k < 16; k++)
            x[k] = (float)(from + (to - from) * (0.5 + 0.5 * oracle_random(&seed)));
        f(x, y);
        for (uint32_t l = 0; l < n_same; l++) {
            same[l](x, z);
            same_floats(y, z, 16, "function at level", (int)l);
        }
        for (int k = 0; k < 16; k++) {
            double want = truth((double)x[k]);
            int exponent;
            frexp(want, &exponent);
            double unit = ldexp(1.0, (exponent < -125 ? -125 : exponent) - 24);
            most = fmax(most, fabs((double)y[k] - want) / unit);
        }
    }
    return most;
}

static double logistic(double x) { return 1.0 / (1.0 + exp(-x)); }

static void functions_are_accurate(void **state)
{
    (void)state;
    const probe *level[3];
    uint32_t n = others(level);
    function *e[3], *t[3], *s[3];
    for (uint32_t l = 0; l < n; l++) {
        e[l] = level[l]->exp;
        t[l] = level[l]->tanh;
        s[l] = level[l]->sigmoid;
    }
    assert_true(worst(probe_generic.exp, e, n, exp, -1, 1) < 1.5);
    assert_true(worst(probe_generic.exp, e, n, exp, -103.9, 88.7) < 1.5);
    assert_true(worst(probe_generic.tanh, t, n, tanh, -1, 1) < 2.5);
    assert_true(worst(probe_generic.tanh, t, n, tanh, -1e-3, 1e-3) < 1.5);
    assert_true(worst(probe_generic.tanh, t, n, tanh, -20, 20) < 2.5);
    assert_true(worst(probe_generic.sigmoid, s, n, logistic, -80, 80) < 4);
}

static void functions_end_well(void **state)
{
    (void)state;
    const probe *level[4] = {&probe_generic};
    uint32_t n = 1 + others(level + 1);
    float x[16] = {0, -0.0f, (float)INFINITY, -(float)INFINITY, (float)NAN, 89, -104, 1e30f, -1e30f,
                   88.72f, -87.5f, 1e-45f, 100, -103, 40, -40};
    for (uint32_t l = 0; l < n; l++) {
        float y[16];
        level[l]->exp(x, y);
        assert_true(y[0] == 1 && y[1] == 1 && isinf(y[2]) && y[3] == 0 && isnan(y[4]));
        assert_true(isinf(y[5]) && y[6] == 0 && isinf(y[7]) && y[8] == 0 && !isinf(y[9]));
        assert_true(y[11] == 1 && isinf(y[12]) && y[13] > 0);
        level[l]->tanh(x, y);
        assert_true(y[0] == 0 && y[1] == 0 && y[2] == 1 && y[3] == -1);
        assert_true(isnan(y[4]) && y[5] == 1 && y[6] == -1 && y[11] == 1e-45f);
        level[l]->sigmoid(x, y);
        assert_true(y[0] == 0.5f && y[2] == 1 && y[3] == 0 && isnan(y[4]) && y[8] == 0);
    }
}

/* The first n lanes touch no memory beyond them: it may belong to nobody. */
static void tails_stay_in_their_memory(void **state)
{
    (void)state;
    const probe *level[4] = {&probe_generic};
    uint32_t n_levels = 1 + others(level + 1);
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uint8_t *two = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(two != MAP_FAILED);
    assert_int_equal(mprotect(two + page, page, PROT_NONE), 0);
    for (uint32_t l = 0; l < n_levels; l++)
        for (uint32_t n = 0; n <= 16; n++) {
            float in[16], out[16], *p = (float *)(void *)(two + page) - n;
            for (int k = 0; k < 16; k++) in[k] = (float)k + 1;
            level[l]->store_n(p, n, in);
            level[l]->load_n(p, n, out);
            for (uint32_t k = 0; k < 16; k++) assert_true(out[k] == (k < n ? in[k] : 0));
        }
    munmap(two, 2 * page);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_operation_has_the_same_bits),
        cmocka_unit_test(plain_c_means_what_it_says),
        cmocka_unit_test(halves_widen_exactly),
        cmocka_unit_test(functions_are_accurate),
        cmocka_unit_test(functions_end_well),
        cmocka_unit_test(tails_stay_in_their_memory),
    };
    return cmocka_run_group_tests_name("vec", tests, NULL, NULL);
}
