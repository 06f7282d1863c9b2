/*
 * embed, rms_norm and activate against definitions in double precision; what is beyond the step's
 * rows stays as it was.
 */
#include "tests/emu/small.h"

/* --- embed --- */

static float quantised_value(uint32_t type, const std::vector<unsigned char> &table, size_t scales,
                             size_t at)
{
    uint16_t scale;
    memcpy(&scale, &table[scales + at / 32 * 2], 2);
    int q;
    if (type == KVP__EL_Q8_0) q = static_cast<int8_t>(table[at]);
    else {
        unsigned char pair = table[at / 32 * 16 + at % 16];
        q = (at % 32 < 16 ? pair & 15 : pair >> 4) - 8;
    }
    return (float)q * kvp__f16_to_f32(scale);
}

static std::vector<unsigned char> quantised_table(random_source &r, uint32_t type, size_t n,
                                                  size_t scales)
{
    std::vector<unsigned char> t(scales + n / 32 * 2, 0xff);
    for (size_t i = 0; i < (type == KVP__EL_Q4_0 ? n / 2 : n); i++) t[i] = (unsigned char)r.bits();
    for (size_t i = 0; i < n / 32; i++) {
        uint16_t h = kvp__f32_to_f16(r.uniform(0.001f, 0.1f));
        memcpy(&t[scales + i * 2], &h, 2);
    }
    return t;
}

static void check_embed(uint32_t type, uint32_t width, float scale)
{
    const uint32_t vocabulary = 11, grid = 9, rows = 7;
    random_source r(width * 8 + type);
    bool quantised = type == KVP__EL_Q8_0 || type == KVP__EL_Q4_0;
    size_t n = (size_t)vocabulary * width;
    size_t begin = quantised ? KVP__QUANT_SCALES_AT(type, vocabulary, width) : 0;
    std::vector<unsigned char> content(n * 4);
    if (quantised) content = quantised_table(r, type, n, begin);
    else {
        content.resize(n * size_of_el(type));
        for (size_t i = 0; i < n; i++) put(&content[0], type, i, r.normal());
    }
    device<unsigned char> table(content);
    device<int32_t> tokens({0, 10, 3, -1, 11, 7, 0x7fffffff, 1, 2});
    device<float> x((size_t)grid * width);
    one_step step(rows);
    kvp__embed_args a = {step, table.p, tokens.p, x.p, type, width, vocabulary, scale};
    launch("embed", kvp__launch_embed(grid), &a);
    for (uint32_t row = 0; row < rows; row++)
        for (uint32_t i = 0; i < width; i++) {
            uint32_t token = (uint32_t)tokens[row];
            float wanted = 0;
            size_t at = (size_t)token * width + i;
            if (token < vocabulary)
                wanted = quantised ? quantised_value(type, content, begin, at)
                                   : get(&content[0], type, at);
            assert_true(x[(size_t)row * width + i] == wanted * scale);
        }
    x.is_untouched((size_t)rows * width, x.n);
}

static void embed_gathers_rows_of_every_type(void **)
{
    const uint32_t widths[] = {1, 2, 3, 5, 6, 31, 64, 66, 576, 1030};
    for (uint32_t w : widths)
        for (uint32_t type : {KVP__EL_F16, KVP__EL_BF16, KVP__EL_F32})
            for (float scale : {1.0f, 24.5f}) check_embed(type, w, scale);
    for (uint32_t w : {32u, 64u, 96u, 576u, 1056u})
        for (uint32_t type : {KVP__EL_Q8_0, KVP__EL_Q4_0})
            for (float scale : {1.0f, 24.5f}) check_embed(type, w, scale);
}

/* A table of 10 GB, of which one row is there. */
static void embed_reads_rows_beyond_32_bits(void **)
{
    const uint32_t vocabulary = 320000, width = 16384;
    uint16_t *table = static_cast<uint16_t *>(emu_alloc_sparse((size_t)vocabulary * width * 2));
    assert_non_null(table);
    uint16_t *last = table + (size_t)(vocabulary - 1) * width;
    for (uint32_t i = 0; i < width; i++) last[i] = kvp__f32_to_f16((float)(i % 1000) + 1);
    device<int32_t> tokens(std::vector<int32_t>{(int32_t)vocabulary - 1});
    device<float> x(width);
    one_step step(1);
    kvp__embed_args a = {step, table, tokens.p, x.p, KVP__EL_F16, width, vocabulary, 1.0f};
    launch("embed", kvp__launch_embed(1), &a);
    for (uint32_t i = 0; i < width; i++) assert_true(x[i] == (float)(i % 1000) + 1);
    assert_int_equal(emu_free(table), 0);
}

/* --- rms_norm --- */

struct norm_case {
    uint32_t width, out_type;
    bool delta, bias, post, rows;
    float size, eps;
};

static std::vector<double> normed(const std::vector<double> &v, const float *weight, double eps)
{
    double squares = 0;
    for (double x : v) squares += x * x;
    double factor = 1 / sqrt(squares / (double)v.size() + eps);
    std::vector<double> out(v.size());
    for (size_t i = 0; i < v.size(); i++) out[i] = v[i] * factor * weight[i];
    return out;
}

static void fill(device<float> &to, random_source &r, float size)
{
    for (size_t i = 0; i < to.n; i++) to[i] = r.normal() * size;
}

static void check_norm(const norm_case &c)
{
    const uint32_t rows = 5, grid = 7, outputs = 3;
    random_source r(c.width * 64 + c.delta * 16 + c.bias * 8 + c.post * 4 + c.rows * 2 +
                    c.out_type);
    device<float> x((size_t)rows * c.width), delta((size_t)rows * c.width), bias(c.width);
    device<float> post(c.width), weight(c.width);
    device<uint32_t> index({4, 0, 3, 99, 99, 99, 99});
    elements out(c.out_type, (size_t)grid * c.width);
    for (device<float> *f : {&x, &delta, &bias, &post, &weight}) fill(*f, r, c.size);
    std::vector<float> before = x.copy();
    one_step step(rows, outputs);
    kvp__norm_args a = {};
    a.step = step;
    a.x = x.p;
    a.delta = c.delta ? delta.p : nullptr;
    a.bias = c.bias ? bias.p : nullptr;
    a.post = c.post ? post.p : nullptr;
    a.weight = weight.p;
    a.rows = c.rows ? index.p : nullptr;
    a.out = out.p();
    a.width = c.width;
    a.out_type = c.out_type;
    a.eps = c.eps;
    launch("rms_norm", kvp__launch_norm(grid, c.width), &a);

    uint32_t n = c.rows ? outputs : rows;
    for (uint32_t i = 0; i < n; i++) {
        size_t row = (c.rows ? index[i] : i) * (size_t)c.width;
        std::vector<double> v(c.width), d(c.width);
        double greatest = 0;
        for (uint32_t j = 0; j < c.width; j++)
            d[j] = c.delta ? (double)delta[row + j] + (c.bias ? (double)bias[j] : 0) : 0;
        if (c.delta && c.post) d = normed(d, post.p, c.eps);
        for (uint32_t j = 0; j < c.width; j++) {
            v[j] = before[row + j] + d[j];
            greatest = fmax(greatest, fmax(fabs(v[j]), fabs(d[j])));
            if (c.delta && !c.rows) assert_near(x[row + j], v[j], 1e-6 * (fabs(v[j]) + fabs(d[j])));
            else assert_true(x[row + j] == before[row + j]);
        }
        std::vector<double> wanted = normed(v, weight.p, c.eps);
        double squares = 0;
        for (double e : v) squares += e * e;
        double factor = 1 / sqrt(squares / c.width + c.eps);
        for (uint32_t j = 0; j < c.width; j++) {
            double lost = 4e-7 * (fabs(v[j]) + fabs(d[j])) * factor * fabs(weight[j]);
            assert_near(out.get((size_t)i * c.width + j), wanted[j],
                        half_unit(c.out_type, wanted[j], 1e-6) + lost);
        }
    }
    out.is_untouched((size_t)n * c.width, out.n);
}

static void norm_of_every_combination(void **)
{
    const uint32_t widths[] = {1, 2, 3, 4, 5, 31, 64, 100, 576, 1023, 1024, 1026, 2305};
    for (uint32_t w : widths)
        for (uint32_t bits = 0; bits < 16; bits++)
            for (uint32_t type : {KVP__EL_F16, KVP__EL_BF16})
                check_norm({w, type, (bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0,
                            (bits & 8) != 0, 1.0f, 1e-5f});
    for (uint32_t w : {4096u, 8192u, 5333u}) {
        check_norm({w, KVP__EL_F16, true, true, true, false, 1.0f, 1e-6f});
        check_norm({w, KVP__EL_BF16, true, false, false, false, 1.0f, 1e-6f});
    }
    check_norm({64, KVP__EL_BF16, true, true, true, false, 3000.0f, 1e-5f});
    check_norm({64, KVP__EL_F16, true, true, true, false, 1e-3f, 1e-5f});
    under_schedules([] { check_norm({100, KVP__EL_F16, true, true, true, true, 1.0f, 1e-5f}); });
}

/* Zeros stay zeros without eps too; one NaN in a row is that row's alone. */
static void norm_of_zeros_and_of_nan(void **)
{
    const uint32_t width = 70;
    device<float> x(3 * width), weight(width);
    random_source r(1);
    fill(weight, r, 1.0f);
    for (uint32_t i = 0; i < width; i++) {
        x[i] = 0;
        x[width + i] = x[2 * width + i] = 1;
    }
    x[width + 69] = NAN;
    elements out(KVP__EL_F16, 3 * width);
    one_step step(3);
    kvp__norm_args a = {};
    a.step = step;
    a.x = x.p;
    a.weight = weight.p;
    a.out = out.p();
    a.width = width;
    a.out_type = KVP__EL_F16;
    launch("rms_norm", kvp__launch_norm(3, width), &a);
    for (uint32_t i = 0; i < width; i++) {
        assert_true(out.get(i) == 0);
        assert_true(isnan(out.get(width + i)));
        assert_near(out.get(2 * width + i), weight[i], half_unit(KVP__EL_F16, weight[i], 1e-6));
    }
}

/* The same row in another step, at another place: the same bits. */
static void norm_of_a_row_is_its_own(void **)
{
    const uint32_t width = 1300;
    random_source r(5);
    device<float> many(6 * width), one(width), weight(width);
    fill(many, r, 1.0f);
    fill(weight, r, 1.0f);
    memcpy(one.p, many.p + 4 * width, width * sizeof(float));
    elements first(KVP__EL_F16, 6 * width), second(KVP__EL_F16, width);
    kvp__norm_args a = {};
    one_step six(6), single(1);
    a.step = six;
    a.x = many.p;
    a.weight = weight.p;
    a.out = first.p();
    a.width = width;
    a.out_type = KVP__EL_F16;
    a.eps = 1e-5f;
    launch("rms_norm", kvp__launch_norm(6, width), &a);
    a.step = single;
    a.x = one.p;
    a.out = second.p();
    launch("rms_norm", kvp__launch_norm(1, width), &a);
    assert_memory_equal(first.bytes.p + 4 * width * 2, second.bytes.p, width * 2);
}

/* --- activate --- */

static double activated(uint32_t kind, double x)
{
    if (kind == 0) return x / (1 + exp(-x));
    return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}

/* 1 + tanh loses everything for large negative x: there the limit is 0. */
static double activated_exactly(uint32_t kind, double x)
{
    if (kind == 0 || x > -3) return activated(kind, x);
    double u = 0.7978845608028654 * (x + 0.044715 * x * x * x);
    return x * exp(2 * u) / (1 + exp(2 * u));
}

static void check_activate(uint32_t kind, uint32_t type, uint32_t n, float size)
{
    const uint32_t rows = 3, grid = 4;
    random_source r(n * 4 + kind * 2 + type);
    device<float> gate_up((size_t)rows * 2 * n);
    for (size_t i = 0; i < gate_up.n; i++) gate_up[i] = r.normal() * size;
    const float special[] = {0.0f, -0.0f, -1e4f, 1e3f, -100.0f, -20.0f, 20.0f, 1e-20f, -88.5f};
    for (size_t i = 0; i < sizeof special / sizeof special[0] && i < n; i++)
        gate_up[i] = special[i];
    elements out(type, (size_t)grid * n);
    one_step step(rows);
    kvp__activate_args a = {step, gate_up.p, out.p(), n, type, kind, 0};
    launch("activate", kvp__launch_activate(grid, n), &a);
    for (uint32_t row = 0; row < rows; row++)
        for (uint32_t i = 0; i < n; i++) {
            double x = gate_up[(size_t)row * 2 * n + i], up = gate_up[(size_t)row * 2 * n + n + i];
            double wanted = activated_exactly(kind, x) * up;
            assert_near(out.get((size_t)row * n + i), wanted,
                        half_unit(type, wanted, 2e-6 + 3e-7 * fabs(x)) + 1e-30);
        }
    out.is_untouched((size_t)rows * n, out.n);
}

static void activate_of_every_kind(void **)
{
    for (uint32_t n : {1u, 2u, 3u, 4u, 7u, 9u, 1023u, 1024u, 1025u, 2050u, 4100u})
        for (uint32_t kind : {0u, 1u})
            for (uint32_t type : {KVP__EL_F16, KVP__EL_BF16})
                for (float size : {0.5f, 4.0f}) check_activate(kind, type, n, size);
    under_schedules([] { check_activate(0, KVP__EL_F16, 1026, 2.0f); });
}

/* A product beyond what a half holds stays finite, or one outlier would end a sequence. */
static void activate_stays_within_halves(void **)
{
    device<float> gate_up({300, 300, 1e30f, 1, 1000, -1000, 1e30f, 1});
    elements out(KVP__EL_F16, 4);
    one_step step(1);
    kvp__activate_args a = {step, gate_up.p, out.p(), 4, KVP__EL_F16, 0, 0};
    launch("activate", kvp__launch_activate(1, 4), &a);
    assert_true(out.get(0) == 65504.0f && out.get(1) == -65504.0f && out.get(2) == 65504.0f);
    assert_true(out.get(3) > 0.73f && out.get(3) < 0.74f);
}

static void activate_keeps_nan(void **)
{
    device<float> gate_up({NAN, 1, 1, NAN, 1, 1, 2, 3});
    gate_up[4] = NAN;
    elements out(KVP__EL_F16, 4);
    one_step step(1);
    kvp__activate_args a = {step, gate_up.p, out.p(), 4, KVP__EL_F16, 1, 0};
    launch("activate", kvp__launch_activate(1, 4), &a);
    assert_true(isnan(out.get(0)) && isnan(out.get(3)));
    assert_near(out.get(2), 2 * activated(1, 1.0), 1e-3);
}

int main()
{
    const CMUnitTest tests[] = {
        cmocka_unit_test(embed_gathers_rows_of_every_type),
        cmocka_unit_test(embed_reads_rows_beyond_32_bits),
        cmocka_unit_test(norm_of_every_combination),
        cmocka_unit_test(norm_of_zeros_and_of_nan),
        cmocka_unit_test(norm_of_a_row_is_its_own),
        cmocka_unit_test(activate_of_every_kind),
        cmocka_unit_test(activate_stays_within_halves),
        cmocka_unit_test(activate_keeps_nan),
    };
    return cmocka_run_group_tests_name("rows", tests, nullptr, nullptr);
}
