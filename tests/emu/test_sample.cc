/*
 * sample against kvp__sample of model/sampler.c: the same token for the same logits, whatever the
 * settings. The device's row and the host's are the same bits; a token that differs is a fault in
 * the order or the rounding of some sum, since nothing here is compared within a tolerance.
 */
#include "tests/emu/small.h"

extern "C" {
#include "cpu/kernels.h"
#include "model/sampler.h"
}

struct settings {
    float temperature, top_p, min_p;
    uint32_t top_k;
    uint64_t seed, position;
};

static kvp__cuda_draw draw_of(const settings &s)
{
    return {s.seed, s.position, s.temperature, s.top_p, s.min_p, s.top_k, 1, 0};
}

/* What the host would choose; -1 if it refuses the logits. */
static int32_t chosen_by_host(std::vector<float> logits, const settings &s)
{
    kvp__sampler sampler = {};
    sampler.mode = KVP_SAMPLE_LIBRARY;
    sampler.temperature = s.temperature;
    sampler.top_p = s.top_p;
    sampler.min_p = s.min_p;
    sampler.top_k = s.top_k;
    sampler.repetition = 1;
    uint32_t n = (uint32_t)logits.size();
    std::vector<uint64_t> scratch(kvp__sample_scratch_bytes(n) / 8 + 1);
    kvp__sampled out = {};
    kvp_status status = kvp__sample(&sampler, &logits[0], n, s.seed, s.position, nullptr, 0,
                                    &scratch[0], &out, nullptr);
    return status == KVP_OK ? out.token : -1;
}

static std::vector<kvp__cuda_drawn> chosen_by_device(const std::vector<float> &logits,
                                                     uint32_t vocabulary,
                                                     const std::vector<settings> &s)
{
    uint32_t rows = (uint32_t)s.size();
    device<float> x(logits);
    device<kvp__cuda_draw> draws(rows);
    device<kvp__cuda_drawn> drawn(rows);
    device<unsigned char> scratch(rows * KVP__CUDA_SAMPLE_SCRATCH(vocabulary));
    for (uint32_t i = 0; i < rows; i++) draws[i] = draw_of(s[i]);
    one_step step(0, rows);
    kvp__sample_args a = {step, x.p, draws.p, drawn.p, scratch.p, 0, vocabulary, 0.0f, 0};
    launch("sample", kvp__launch_sample(rows), &a);
    assert_memory_equal(x.p, &logits[0], logits.size() * sizeof(float)); /* no softcap: untouched */
    return drawn.copy();
}

static void same_tokens(const std::vector<float> &logits, uint32_t vocabulary,
                        const std::vector<settings> &s, const char *what)
{
    std::vector<kvp__cuda_drawn> got = chosen_by_device(logits, vocabulary, s);
    for (size_t i = 0; i < s.size(); i++) {
        std::vector<float> row(logits.begin() + i * vocabulary,
                               logits.begin() + (i + 1) * vocabulary);
        int32_t wanted = chosen_by_host(row, s[i]);
        if (got[i].token != wanted)
            fail_msg(
                "%s, %u logits, temperature %g, top_k %u, top_p %.8g, min_p %g, seed %llu: token "
                "%d, the host's is %d",
                what, vocabulary, s[i].temperature, s[i].top_k, s[i].top_p, s[i].min_p,
                (unsigned long long)s[i].seed, got[i].token, wanted);
    }
}

/* --- rows of logits --- */

enum kind {
    NORMAL,
    WIDE,
    PEAKED,
    FLAT,
    FEW_VALUES,
    QUARTERS,
    WITH_MINUS_INFINITY,
    ONE_LEFT,
    RISING,
    FALLING,
    HUGE_ONES,
    TINY_ONES,
    ZEROS_OF_BOTH_SIGNS,
    FAR_DOWN,
    KINDS
};
static const char *const KIND_NAMES[] = {
    "normal", "wide", "peaked", "flat", "few values", "quarters", "with -infinity", "one left",
    "rising", "falling", "huge", "tiny", "zeros", "far down"};

static float logit_of(kind k, random_source &r, uint32_t i, uint32_t n)
{
    switch (k) {
    case NORMAL: return r.normal() * 2;
    case WIDE: return r.normal() * 9;
    case PEAKED: return i == n / 3 ? 25.0f : i == n / 2 ? 24.5f : r.normal() * 2;
    case FLAT: return 1.5f;
    case FEW_VALUES: return (float)r.below(3) - 1;
    case QUARTERS: return (float)((int)r.below(64) - 32) * 0.25f;
    case WITH_MINUS_INFINITY: return r.below(3) ? r.normal() : -INFINITY;
    case ONE_LEFT: return i == n - 1 ? -3.0f : -INFINITY;
    case RISING: return (float)i * 0.001f - 3;
    case FALLING: return -(float)i * 0.0007f;
    case HUGE_ONES: return r.normal() * 1e37f;
    case TINY_ONES: return r.normal() * 1e-39f;
    case ZEROS_OF_BOTH_SIGNS: return r.below(2) ? 0.0f : -0.0f;
    default: return r.normal() - 1000;
    }
}

static settings random_settings(random_source &r, uint32_t n)
{
    static const float temperatures[] = {0, 1e-6f, 0.05f, 0.3f, 0.7f, 1, 1.3f, 5, 100};
    static const float top_ps[] = {1,    1,     1,      0.95f,   0.9f,      0.5f,
                                   0.1f, 1e-6f, 0.999f, 0.9999f, 0.9999999f};
    static const float min_ps[] = {0, 0, 0, 0.05f, 0.3f, 1};
    const uint32_t top_ks[] = {0, 0, 0, 1, 2, 5, 40, 200, n - 1, n, n + 7, n / 2};
    settings s;
    s.temperature = temperatures[r.below(9)];
    s.top_p = r.below(4) ? top_ps[r.below(11)] : r.uniform(0.01f, 0.99f);
    s.min_p = min_ps[r.below(6)];
    s.top_k = top_ks[r.below(12)];
    s.seed = (uint64_t)r.bits() << 32 | r.bits();
    s.position = r.bits();
    return s;
}

static uint32_t compare_rows(uint32_t vocabulary, uint32_t rows, uint64_t seed)
{
    random_source r(seed * 1000003 + vocabulary);
    std::vector<float> logits((size_t)rows * vocabulary);
    std::vector<settings> s(rows);
    kind k = static_cast<kind>(seed % KINDS);
    for (uint32_t row = 0; row < rows; row++) {
        s[row] = random_settings(r, vocabulary);
        for (uint32_t i = 0; i < vocabulary; i++)
            logits[(size_t)row * vocabulary + i] = logit_of(k, r, i, vocabulary);
    }
    same_tokens(logits, vocabulary, s, KIND_NAMES[k]);
    return rows;
}

/* Races do not depend on the numbers: fewer rows where they are looked for. */
static bool few_rows() { return emu_race_build() && !all_cases(); }

static void the_hosts_token_in_small_vocabularies(void **)
{
    const uint32_t sizes[] = {1, 2, 3, 5, 17, 63, 64, 65, 127, 129, 500, 1000};
    uint32_t rows = 0;
    for (uint64_t seed = 0; seed < KINDS * (all_cases() ? 60 : few_rows() ? 1 : 2); seed++)
        for (uint32_t n : sizes) rows += compare_rows(n, few_rows() ? 3 : 8, seed);
    assert_true(rows >= (few_rows() ? 500 : 2500));
}

static void the_hosts_token_in_large_vocabularies(void **)
{
    uint32_t times = all_cases() ? 20 : 1;
    for (uint64_t seed = 0; seed < KINDS * times; seed++) {
        compare_rows(4099, 6, seed);
        compare_rows(32000, 3, seed);
    }
    for (uint64_t seed = 0; seed < KINDS * times; seed += all_cases() ? 1 : 3) {
        compare_rows(128256, 2, seed);
        compare_rows(70001, 2, seed + 1);
    }
    for (uint64_t seed = 0; seed < (all_cases() ? 3 * KINDS : 2); seed++)
        compare_rows(300000, 2, seed);
}

/* Where masses of buckets do not fit into 53 bits, so that the order of their additions shows: p
 * next to 1, and logits whose bits fall into few buckets while their weights differ by much. */
static void the_hosts_token_where_order_shows(void **)
{
    uint32_t times = all_cases() ? 400 : few_rows() ? 5 : 25;
    for (uint32_t n : {300u, 5000u, 40000u}) {
        random_source r(n);
        for (uint32_t t = 0; t < (n > 10000 ? times / 5 : times); t++) {
            const uint32_t rows = 4;
            std::vector<float> logits((size_t)rows * n);
            std::vector<settings> s(rows);
            for (float &x : logits) x = r.uniform(33, 63.9f); /* two or three buckets */
            for (settings &e : s) {
                e = random_settings(r, n);
                e.temperature = r.uniform(0.3f, 1.5f);
                e.top_p = 1 - exp2f(-r.uniform(8, 24));
                e.min_p = 0;
                if (e.top_k < 50) e.top_k = 0;
            }
            same_tokens(logits, n, s, "two buckets");
        }
    }
}

/* Draws at the ends of what is kept: every position of a generator that is asked many times. */
static void draws_follow_the_weights(void **)
{
    const uint32_t n = 70, rows = 64;
    random_source r(2);
    std::vector<float> one(n), logits;
    for (float &x : one) x = r.normal() * 3;
    for (uint32_t i = 0; i < rows; i++) logits.insert(logits.end(), one.begin(), one.end());
    for (float top_p : {1.0f, 0.8f}) {
        std::vector<settings> s(rows);
        for (uint32_t i = 0; i < rows; i++) s[i] = {1.0f, top_p, 0, 0, 42, i};
        same_tokens(logits, n, s, "the same logits");
    }
}

/* --- on the edge --- */

/* A row in which one token more is kept if what lies below the cut weighs only a little more. Two
 * logits down there are tuned, the second more finely than the first can be, until the host is as
 * near to its edge as floats allow: there a sum that is rounded otherwise shows. The draw is for
 * the last token that is kept. Nothing but the host's answers is needed. */
struct edge {
    std::vector<float> logits;
    settings s;

    edge(const std::vector<float> &row, float temperature, float top_p)
        : logits(row), s{temperature, top_p, 0, 0, 1, 171000484} /* it draws 1 - 3e-10 */
    {
    }
    int32_t token_with(uint32_t id, float x)
    {
        logits[id] = x;
        return chosen_by_host(logits, s);
    }
    /* Makes logit `id` the largest that leaves the token as it is with `low`. False if it is the
     * same with `high`. */
    bool tune(uint32_t id, float low, float high)
    {
        int32_t token = token_with(id, low);
        if (token_with(id, high) == token) return false;
        for (;;) {
            float middle = low + (high - low) / 2;
            if (!(middle > low && middle < high)) break;
            if (token_with(id, middle) == token) low = middle;
            else high = middle;
        }
        logits[id] = low;
        return true;
    }
    /* Both sides of it. */
    void check(uint32_t id)
    {
        std::vector<float> rows;
        float x = nextafterf(logits[id], -INFINITY);
        for (int i = 0; i < 4; i++, x = nextafterf(x, INFINITY)) {
            logits[id] = x;
            rows.insert(rows.end(), logits.begin(), logits.end());
        }
        same_tokens(rows, (uint32_t)logits.size(), std::vector<settings>(4, s), "on the edge");
    }
};

/* Tokens that are kept in any case; in a block of their own, one in question and one below it. */
static bool check_one_in_question(random_source &r, uint32_t n_sure, float temperature, float top_p)
{
    const float top = 60;
    float mass = logf((float)n_sure) * temperature;
    float share = (float)(log((1.0 - top_p) / top_p) * temperature);
    if (mass + share > 0) return false; /* it would weigh more than one that is sure */
    uint32_t last = (n_sure + 63) / 64 * 64;
    std::vector<float> row(last + 64, -INFINITY);
    for (uint32_t i = 0; i < n_sure; i++)
        row[i] = top - r.uniform(0, r.below(2) ? 0.5f : -0.95f * (mass + share) + 1e-3f);
    row[r.below(n_sure)] = top;
    edge e(row, temperature, top_p);
    if (!e.tune(last, top + share - 3 * temperature, top + share + mass)) return false;
    float own = e.logits[last];
    if (!e.tune(last + 1, own - 60 * temperature, own - 8 * temperature)) return false;
    e.check(last + 1);
    return true;
}

/* Thousands of tokens in one bucket, many of next to no weight, whose mass does not fit into 53
 * bits; in the next, equal ones of which some are kept. */
static bool check_equal_ones_in_question(random_source &r, float temperature)
{
    const uint32_t sure = 14016, equal = 2048;
    const float top = 63.9f, border = 56;
    std::vector<float> row(sure + equal + 64, -INFINITY);
    double mass = 0;
    for (uint32_t i = 0; i < sure; i++) {
        row[i] = i % 7 < 3 ? top - r.uniform(0, 0.1f) : border + r.uniform(0.05f, 1.0f);
        mass += exp((row[i] - top) / temperature);
    }
    float one = top + temperature * (float)log(mass * 0x1p-22 / equal);
    assert_true(one < border && one > border - 4);
    for (uint32_t i = 0; i < equal; i++) row[sure + i] = one;
    edge e(row, temperature, 1 - 0x1p-24f);
    if (!e.tune(sure + equal, one - 60 * temperature, one - 0.01f * temperature)) return false;
    if (!e.tune(sure + equal + 1, one - 60 * temperature, one - 8 * temperature)) return false;
    e.check(sure + equal + 1);
    return true;
}

static void the_hosts_token_on_the_edge(void **)
{
    const struct { uint32_t n; float top_p; } cases[] = {
        {1, 0.6f}, {2, 0.8f}, {5, 0.95f}, {30, 0.99f}, {90, 0.999f}, {500, 0.9999f}};
    random_source r(11);
    uint32_t one = 0, many = 0, times = all_cases() ? 200 : few_rows() ? 2 : 10;
    for (uint32_t i = 0; i < times; i++)
        for (const auto &c : cases)
            one += check_one_in_question(r, c.n, r.uniform(0.5f, 1.2f), c.top_p);
    for (uint32_t i = 0; i < times; i++)
        many += check_equal_ones_in_question(r, r.uniform(0.56f, 0.6f));
    assert_true(one >= times * 3);
    assert_true(many >= times / 2);
}

/* --- what is not a number, or nothing --- */

static void logits_that_are_broken(void **)
{
    const uint32_t n = 1000;
    for (float temperature : {0.0f, 1.0f}) {
        std::vector<float> logits(6 * n, 1.0f);
        logits[0 * n + 999] = NAN;
        logits[1 * n + 130] = INFINITY;
        logits[1 * n + 700] = NAN;
        logits[2 * n] = NAN;
        for (uint32_t i = 0; i < n; i++) logits[3 * n + i] = -INFINITY;
        for (uint32_t i = 0; i < n; i++) logits[4 * n + i] = i == 500 ? NAN : -INFINITY;
        logits[5 * n + 3] = 3.40282347e38f; /* the largest number is one */
        std::vector<settings> s(6, {temperature, 0.9f, 0.1f, 50, 1, 2});
        std::vector<kvp__cuda_drawn> got = chosen_by_device(logits, n, s);
        const uint32_t bad[] = {999, 130, 0, n, 500};
        for (uint32_t i = 0; i < 5; i++) {
            assert_int_equal(got[i].token, -1);
            assert_int_equal(got[i].bad, bad[i]);
        }
        assert_int_equal(got[5].token, 3);
        for (uint32_t i = 0; i < 6; i++) {
            std::vector<float> row(logits.begin() + i * n, logits.begin() + (i + 1) * n);
            assert_int_equal(got[i].token, chosen_by_host(row, s[i]));
        }
    }
}

/* --- tiles of outputs, rows nobody asked for, the soft cap --- */

/* Three rows of logits are outputs 2 to 4 of 4; output 3 is the host's. */
static void a_tile_of_outputs(void **)
{
    const uint32_t n = 333, outputs = 4, grid = 3, first = 2;
    random_source r(8);
    device<float> logits((size_t)grid * n);
    for (size_t i = 0; i < logits.n; i++) logits[i] = r.normal();
    std::vector<float> before = logits.copy();
    device<kvp__cuda_draw> draws(outputs + 1);
    device<kvp__cuda_drawn> drawn(outputs + 1);
    device<unsigned char> scratch(grid * KVP__CUDA_SAMPLE_SCRATCH(n));
    for (uint32_t i = 0; i <= outputs; i++) draws[i] = draw_of({0.8f, 0.9f, 0, 20, 7 + i, i});
    draws[3].wanted = 0;
    one_step step(0, outputs);
    kvp__sample_args a = {step, logits.p, draws.p, drawn.p, scratch.p, first, n, 0.0f, 0};
    launch("sample", kvp__launch_sample(grid), &a);
    std::vector<float> row(before.begin(), before.begin() + n);
    assert_int_equal(drawn[2].token, chosen_by_host(row, {0.8f, 0.9f, 0, 20, 9, 2}));
    drawn.is_untouched(0, 2);
    drawn.is_untouched(3, outputs + 1);
    assert_memory_equal(logits.p, &before[0], before.size() * sizeof(float));
}

static void the_soft_cap_is_the_cpus(void **)
{
    const uint32_t n = 2000, rows = 4;
    random_source r(6);
    device<float> logits((size_t)rows * n);
    for (size_t i = 0; i < logits.n; i++) logits[i] = r.normal() * (i % 3 ? 30.0f : 1.0f);
    logits[5] = 1e30f;
    logits[6] = -1e30f;
    logits[7] = 0.0f;
    logits[8] = 18.75f; /* 0.625 of the cap, where the series ends */
    std::vector<float> wanted = logits.copy();
    const kvp__kernels *cpu = kvp__kernels_get(kvp__cpu_level(0));
    cpu->softcap(&wanted[0], rows * n, 30.0f);
    device<kvp__cuda_draw> draws(rows);
    device<kvp__cuda_drawn> drawn(rows);
    device<unsigned char> scratch(rows * KVP__CUDA_SAMPLE_SCRATCH(n));
    std::vector<settings> s(rows);
    for (uint32_t i = 0; i < rows; i++) {
        s[i] = {i == 0 ? 0.0f : 0.9f, 0.95f, 0, 0, i, i};
        draws[i] = draw_of(s[i]);
    }
    draws[3].wanted = 0; /* capped all the same */
    one_step step(0, rows);
    kvp__sample_args a = {step, logits.p, draws.p, drawn.p, scratch.p, 0, n, 30.0f, 0};
    launch("sample", kvp__launch_sample(rows), &a);
    assert_memory_equal(logits.p, &wanted[0], wanted.size() * sizeof(float));
    for (uint32_t i = 0; i < 3; i++) {
        std::vector<float> row(wanted.begin() + i * n, wanted.begin() + (i + 1) * n);
        assert_int_equal(drawn[i].token, chosen_by_host(row, s[i]));
    }
    drawn.is_untouched(3, 4);
}

static void under_every_schedule(void **)
{
    under_schedules([] {
        compare_rows(700, 6, 0);
        compare_rows(700, 6, 4);
        compare_rows(2100, 4, 5);
    });
}

int main()
{
    const CMUnitTest tests[] = {
        cmocka_unit_test(the_hosts_token_in_small_vocabularies),
        cmocka_unit_test(the_hosts_token_in_large_vocabularies),
        cmocka_unit_test(the_hosts_token_where_order_shows),
        cmocka_unit_test(draws_follow_the_weights),
        cmocka_unit_test(the_hosts_token_on_the_edge),
        cmocka_unit_test(logits_that_are_broken),
        cmocka_unit_test(a_tile_of_outputs),
        cmocka_unit_test(the_soft_cap_is_the_cpus),
        cmocka_unit_test(under_every_schedule),
    };
    return cmocka_run_group_tests_name("sample", tests, nullptr, nullptr);
}
