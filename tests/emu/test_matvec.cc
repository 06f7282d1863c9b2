/*
 * matvec_* against sums in double precision, within what staging rows as integers of 16 bits may
 * lose; the weights' bytes are counted. dequant_* exactly.
 */
#include "tests/emu/small.h"

/* A quantised matrix, and what it means. */
struct matrix {
    uint32_t type, n_out, n_in;
    device<unsigned char> values;
    device<uint16_t> scales;

    matrix(uint32_t t, uint32_t out, uint32_t in, random_source &r)
        : type(t), n_out(out), n_in(in),
          values((size_t)out * in / (t == KVP__EL_Q4_0 ? 2 : 1)), scales((size_t)out * in / 32)
    {
        for (size_t i = 0; i < values.n; i++) values[i] = (unsigned char)r.bits();
        for (size_t i = 0; i < scales.n; i++)
            scales[i] = kvp__f32_to_f16(r.uniform(-0.02f, 0.02f));
    }
    double at(uint32_t o, uint32_t i) const
    {
        size_t k = (size_t)o * n_in + i;
        int q = static_cast<int8_t>(values.p[type == KVP__EL_Q8_0 ? k : 0]);
        if (type == KVP__EL_Q4_0) {
            unsigned char pair = values.p[k / 32 * 16 + k % 16];
            q = (k % 32 < 16 ? pair & 15 : pair >> 4) - 8;
        }
        return q * (double)kvp__f16_to_f32(scales.p[k / 32]);
    }
    size_t bytes() const { return values.n + scales.n * 2; }
    const char *kernel() const { return type == KVP__EL_Q8_0 ? "matvec_q8_0" : "matvec_q4_0"; }
    kvp__quant_planes planes() const { return {values.p, scales.p}; }
};

/* The product of a row, and the most it may be off: half a step of 1 / 32639 of the largest of each
 * 32 inputs in each of them, and floats' rounding. */
static double product(const matrix &m, const elements &x, size_t row, uint32_t o, double *bound)
{
    double sum = 0, lost = 0, all = 0;
    for (uint32_t b = 0; b < m.n_in; b += 32) {
        double most = 0, weights = 0;
        for (uint32_t i = b; i < b + 32; i++) {
            double v = x.get(row * m.n_in + i), w = m.at(o, i);
            sum += v * w;
            all += fabs(v * w);
            most = fmax(most, fabs(v));
            weights += fabs(w);
        }
        lost += most * weights / 32639 * 0.51;
    }
    *bound = lost + 1e-6 * all + 1e-30;
    return sum;
}

static void fill_rows(elements &x, random_source &r, float size)
{
    for (size_t i = 0; i < x.n; i++)
        x.set(i, r.below(50) ? r.normal() * size : r.normal() * size * 30); /* with outliers */
}

static void check_matvec(uint32_t type, uint32_t n_out, uint32_t n_in, uint32_t rows,
                         uint32_t x_type, uint32_t sms, float size)
{
    random_source r(n_out * 31 + n_in * 7 + rows + type);
    matrix m(type, n_out, n_in, r);
    elements x(x_type, (size_t)rows * n_in);
    fill_rows(x, r, size);
    const uint32_t y_row = n_out + 3; /* part of a wider row of results */
    device<float> y((size_t)(rows + 1) * y_row);
    one_step step(rows, 0);
    kvp__matvec_args a = {step, m.planes(), x.p(), y.p, n_in, n_out, x_type, y_row, 0, 0};
    emu_stats_reset();
    launch(m.kernel(), kvp__launch_matvec(n_out, sms), &a);
    emu_stats stats = emu_stats_get();
    if (stats.launches && !stats.plain) /* counted, and by load16, which the values are loaded with */
        assert_int_equal(stats.loaded, m.values.n * ((rows + 7) / 8));

    for (uint32_t row = 0; row < rows; row++) {
        for (uint32_t o = 0; o < n_out; o++) {
            double bound, wanted = product(m, x, row, o, &bound);
            assert_near(y[(size_t)row * y_row + o], wanted, bound);
        }
        y.is_untouched((size_t)row * y_row + n_out, (size_t)(row + 1) * y_row);
    }
    y.is_untouched((size_t)rows * y_row, y.n);
}

static const uint32_t TYPES[] = {KVP__EL_Q8_0, KVP__EL_Q4_0};

static void products_of_every_number_of_rows(void **)
{
    for (uint32_t type : TYPES)
        for (uint32_t rows = 1; rows <= 9; rows++)
            for (uint32_t x_type : {KVP__EL_F16, KVP__EL_BF16, KVP__EL_F32})
                check_matvec(type, 35, 576, rows, x_type, 132, 1.0f);
    for (uint32_t type : TYPES) check_matvec(type, 17, 96, 19, KVP__EL_F16, 132, 1.0f);
}

static void products_of_odd_shapes(void **)
{
    const uint32_t outputs[] = {1, 2, 15, 16, 17, 33, 100},
                   inputs[] = {32, 64, 96, 480, 512, 544, 1056};
    for (uint32_t type : TYPES)
        for (uint32_t o : outputs)
            for (uint32_t i : inputs)
                for (uint32_t rows : {1u, 3u, 8u})
                    check_matvec(type, o, i, rows, KVP__EL_F16, 132, 1.0f);
}

/* Rows longer than what is staged at a time: 16384 inputs of one row, 2048 of eight. */
static void products_of_long_rows(void **)
{
    for (uint32_t type : TYPES) {
        check_matvec(type, 5, 16384 + 32, 1, KVP__EL_F16, 132, 1.0f);
        check_matvec(type, 5, 16384 - 32, 2, KVP__EL_F16, 132, 1.0f);
        check_matvec(type, 34, 4096, 4, KVP__EL_F16, 1, 1.0f);
        check_matvec(type, 34, 4128, 4, KVP__EL_BF16, 1, 1.0f);
        check_matvec(type, 18, 6176, 8, KVP__EL_F16, 132, 1.0f);
        check_matvec(type, 50, 4100 / 32 * 32, 7, KVP__EL_F32, 1, 1.0f);
    }
}

/* One SM: two blocks go over all outputs. */
static void products_by_few_blocks(void **)
{
    for (uint32_t type : TYPES)
        for (uint32_t rows : {1u, 2u, 8u, 10u})
            check_matvec(type, 150, 320, rows, KVP__EL_F16, 1, 1.0f);
}

static void products_of_small_and_large_rows(void **)
{
    for (uint32_t type : TYPES)
        for (float size : {1e-12f, 1e-3f, 1e3f, 1e12f})
            check_matvec(type, 20, 160, 2, KVP__EL_F32, 132, size);
}

static void products_under_every_schedule(void **)
{
    for (uint32_t type : TYPES)
        under_schedules([=] {
            check_matvec(type, 35, 4160, 8, KVP__EL_F16, 1, 1.0f);
            check_matvec(type, 35, 544, 1, KVP__EL_F16, 132, 1.0f);
        });
}

/* A row gives the same bits beside any other rows. */
static void a_rows_product_is_its_own(void **)
{
    const uint32_t n_out = 40, n_in = 4160;
    for (uint32_t type : TYPES) {
        random_source r(type);
        matrix m(type, n_out, n_in, r);
        elements x(KVP__EL_F16, 8 * (size_t)n_in), one(KVP__EL_F16, n_in);
        fill_rows(x, r, 1.0f);
        memcpy(one.bytes.p, x.bytes.p + 2 * (size_t)n_in * 2, n_in * 2);
        device<float> alone(n_out), beside(8 * n_out);
        one_step single(1);
        kvp__matvec_args a = {single, m.planes(),  one.p(), alone.p, n_in,
                              n_out,  KVP__EL_F16, n_out,   0,       0};
        launch(m.kernel(), kvp__launch_matvec(n_out, 132), &a);
        for (uint32_t rows : {3u, 4u, 5u, 8u}) {
            one_step many(rows);
            a.step = many;
            a.x = x.p();
            a.y = beside.p;
            launch(m.kernel(), kvp__launch_matvec(n_out, 132), &a);
            assert_memory_equal(beside.p + 2 * n_out, alone.p, n_out * sizeof(float));
        }
    }
}

/* The rows that are read, of a step with more. */
static void products_of_outputs_alone(void **)
{
    const uint32_t n_out = 20, n_in = 64;
    random_source r(1);
    matrix m(KVP__EL_Q8_0, n_out, n_in, r);
    elements x(KVP__EL_F16, 2 * (size_t)n_in);
    fill_rows(x, r, 1.0f);
    device<float> y(5 * n_out);
    one_step step(5, 2);
    kvp__matvec_args a = {step, m.planes(), x.p(), y.p, n_in, n_out, KVP__EL_F16, n_out, 1, 0};
    launch("matvec_q8_0", kvp__launch_matvec(n_out, 132), &a);
    double bound, wanted = product(m, x, 1, 7, &bound);
    assert_near(y[n_out + 7], wanted, bound);
    y.is_untouched(2 * n_out, y.n);
    y.poison();
    step->n_outputs = 0;
    launch("matvec_q8_0", kvp__launch_matvec(n_out, 132), &a);
    y.is_untouched(0, y.n);
}

/* What is broken stays so, in its row alone; zeros give zero. */
static void products_of_nan_infinity_and_zero(void **)
{
    const uint32_t n_out = 18, n_in = 96;
    for (uint32_t type : TYPES) {
        random_source r(2);
        matrix m(type, n_out, n_in, r);
        elements x(KVP__EL_F16, 4 * (size_t)n_in);
        for (size_t i = 0; i < x.n; i++) x.set(i, i < 3 * n_in ? r.normal() : 0.0f);
        x.set(40, NAN);
        x.set(n_in + 95, INFINITY);
        device<float> y(4 * n_out);
        one_step step(4);
        kvp__matvec_args a = {step, m.planes(), x.p(), y.p, n_in, n_out, KVP__EL_F16, n_out, 0, 0};
        launch(m.kernel(), kvp__launch_matvec(n_out, 132), &a);
        for (uint32_t o = 0; o < n_out; o++) {
            double bound, wanted = product(m, x, 2, o, &bound);
            assert_false(isfinite(y[o]) || isfinite(y[n_out + o]));
            assert_near(y[2 * n_out + o], wanted, bound);
            assert_true(y[3 * n_out + o] == 0);
        }
    }
}

/* In the race build every load is seen: weights once, and x once per block. */
static void bytes_loaded(void **)
{
    if (!emu_race_build()) return;
    const uint32_t n_out = 256, n_in = 2048;
    for (uint32_t type : TYPES)
        for (uint32_t rows : {1u, 4u, 8u}) {
            random_source r(rows);
            matrix m(type, n_out, n_in, r);
            elements x(KVP__EL_F16, (size_t)rows * n_in);
            fill_rows(x, r, 1.0f);
            device<float> y((size_t)rows * n_out);
            one_step step(rows);
            kvp__matvec_args a = {step,  m.planes(),  x.p(), y.p, n_in,
                                  n_out, KVP__EL_F16, n_out, 0,   0};
            kvp__launch l = kvp__launch_matvec(n_out, 1);
            emu_stats_reset();
            launch(m.kernel(), l, &a);
            uint64_t most = m.bytes() * 102 / 100 + (uint64_t)l.x * rows * n_in * 2;
            emu_stats stats = emu_stats_get();
            assert_true(stats.plain && stats.loaded >= m.bytes());
            assert_true(stats.loaded <= most);
        }
}

/* --- dequant --- */

static void check_dequant(uint32_t type, uint32_t n_out, uint32_t n_in, uint32_t first,
                          uint32_t rows, uint32_t out_type)
{
    random_source r(n_out + n_in);
    matrix m(type, n_out, n_in, r);
    elements out(out_type, (size_t)rows * n_in);
    kvp__dequant_args a = {m.planes(), out.p(), n_in, first, rows, out_type};
    launch(type == KVP__EL_Q8_0 ? "dequant_q8_0" : "dequant_q4_0", kvp__launch_dequant(rows, n_in),
           &a);
    for (uint32_t row = 0; row < rows; row++)
        for (uint32_t i = 0; i < n_in; i++) {
            float wanted = (float)m.at(first + row, i);
            uint16_t h =
                out_type == KVP__EL_BF16 ? kvp__f32_to_bf16(wanted) : kvp__f32_to_f16(wanted);
            uint16_t got;
            memcpy(&got, out.bytes.p + ((size_t)row * n_in + i) * 2, 2);
            assert_int_equal(got, h);
        }
}

static void weights_as_16_bits(void **)
{
    for (uint32_t type : TYPES)
        for (uint32_t out_type : {KVP__EL_F16, KVP__EL_BF16}) {
            check_dequant(type, 5, 32, 0, 5, out_type);
            check_dequant(type, 9, 96, 3, 2, out_type);
            check_dequant(type, 40, 576, 0, 40, out_type);
            check_dequant(type, 7, 4128, 6, 1, out_type);
        }
}

/* Rows whose values lie beyond 4 GB. */
static void weights_beyond_32_bits(void **)
{
    const uint32_t n_in = 16384, n_out = 300000;
    uint8_t *values = static_cast<uint8_t *>(emu_alloc_sparse((size_t)n_out * n_in));
    uint16_t *scales = static_cast<uint16_t *>(emu_alloc_sparse((size_t)n_out * n_in / 16));
    assert_non_null(values);
    assert_non_null(scales);
    size_t last = (size_t)(n_out - 1) * n_in;
    for (uint32_t i = 0; i < n_in; i++) values[last + i] = (uint8_t)(i % 200 - 100);
    for (uint32_t i = 0; i < n_in / 32; i++) scales[last / 32 + i] = kvp__f32_to_f16(0.5f);
    elements out(KVP__EL_F16, n_in), x(KVP__EL_F16, n_in);
    kvp__dequant_args a = {{values, scales}, out.p(), n_in, n_out - 1, 1, KVP__EL_F16};
    launch("dequant_q8_0", kvp__launch_dequant(1, n_in), &a);
    double sum = 0;
    for (uint32_t i = 0; i < n_in; i++) {
        float w = (float)(int)(i % 200 - 100) * 0.5f;
        assert_true(out.get(i) == w);
        x.set(i, i < 64 ? 1.0f : 0.0f);
        sum += i < 64 ? w : 0;
    }
    /* The last outputs of a product, by a view of the matrix that begins there. */
    device<float> y(1);
    one_step step(1);
    kvp__matvec_args p = {step, {values + last, scales + last / 32}, x.p(), y.p, n_in, 1,
                          KVP__EL_F16, 1, 0, 0};
    launch("matvec_q8_0", kvp__launch_matvec(1, 132), &p);
    assert_near(y[0], sum, 0.05);
    assert_int_equal(emu_free(values), 0);
    assert_int_equal(emu_free(scales), 0);
}

int main()
{
    const CMUnitTest tests[] = {
        cmocka_unit_test(products_of_every_number_of_rows),
        cmocka_unit_test(products_of_odd_shapes),
        cmocka_unit_test(products_of_long_rows),
        cmocka_unit_test(products_by_few_blocks),
        cmocka_unit_test(products_of_small_and_large_rows),
        cmocka_unit_test(products_under_every_schedule),
        cmocka_unit_test(a_rows_product_is_its_own),
        cmocka_unit_test(products_of_outputs_alone),
        cmocka_unit_test(products_of_nan_infinity_and_zero),
        cmocka_unit_test(bytes_loaded),
        cmocka_unit_test(weights_as_16_bits),
        cmocka_unit_test(weights_beyond_32_bits),
    };
    return cmocka_run_group_tests_name("matvec", tests, nullptr, nullptr);
}
