/*
 * The CUDA device's host code on the emulated driver, with the real kernels: steps on tiny models
 * beside the CPU device, what a step puts on the stream, and what happens when something fails.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

extern "C" {
#include <cmocka.h>
}

#include "support/device_rig.h"
#include "tests/emu/driver.h"

#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

static const double NEAR = 2e-2;

/* --- helpers --- */

static void expect_clean()
{
    assert_string_equal(emu_driver_message(), "");
    assert_string_equal(emu_driver_leaks(), "");
    assert_int_equal(rig_live(), 0);
}

static gw_model tiny(const char *arch, uint32_t type)
{
    gw_model m;
    memset(&m, 0, sizeof m);
    m.arch = arch;
    m.type = type;
    m.head_dim = 16;
    m.seed = 7;
    return m;
}

static rig_options plain(const gw_model *m)
{
    rig_options o;
    memset(&o, 0, sizeof o);
    o.model = m;
    return o;
}

static rig *open_or_fail(const rig_options *o)
{
    kvp_error err;
    memset(&err, 0, sizeof err);
    err.size = sizeof err;
    rig *r = rig_open(o, &err);
    if (!r) fail_msg("%s", err.text);
    return r;
}

static void near_enough(double difference, const char *what, double limit = NEAR)
{
    if (!(difference <= limit)) fail_msg("%s: %g", what, difference);
}

static int32_t best(const float *logits, uint32_t n)
{
    int32_t at = 0;
    for (uint32_t i = 1; i < n; i++)
        if (logits[i] > logits[at]) at = (int32_t)i;
    return at;
}

/* Prompts in two chunks, then a few tokens each, greedily; different lengths side by side. */
static void generate(rig *r, const char *what, uint32_t seqs, uint32_t tokens, double limit = NEAR)
{
    std::vector<rig_part> parts(seqs);
    std::vector<uint32_t> numbers(seqs);
    for (uint32_t i = 0; i < seqs; i++) numbers[i] = rig_seq(r, 9 + 5 * i);
    for (uint32_t i = 0; i < seqs; i++) parts[i] = {numbers[i], 4 + i, 0};
    near_enough(rig_step(r, parts.data(), seqs), what, limit);
    for (uint32_t i = 0; i < seqs; i++) parts[i] = {numbers[i], 5 + 4 * i, 2};
    near_enough(rig_step(r, parts.data(), seqs), what, limit);
    for (uint32_t t = 0; t < tokens; t++) {
        uint32_t each = parts[0].outputs;
        for (uint32_t i = 0; i < seqs; i++)
            rig_append(r, numbers[i], best(rig_logits(r, i * each + each - 1), rig_vocabulary(r)));
        for (uint32_t i = 0; i < seqs; i++) parts[i] = {numbers[i], 1, 1};
        near_enough(rig_step(r, parts.data(), seqs), what, limit);
    }
    for (uint32_t i = 0; i < seqs; i++) near_enough(rig_compare_kv(r, numbers[i]), what, limit);
    for (uint32_t i = 0; i < seqs; i++) rig_end(r, numbers[i]);
}

static void install(emu_timing timing = EMU_AT_ONCE, uint64_t seed = 0)
{
    emu_driver_options o;
    memset(&o, 0, sizeof o);
    o.timing = timing;
    o.seed = seed;
    emu_install(&o);
}

/* --- models --- */

static void models_agree_with_the_cpu(void **)
{
    static const struct {
        const char *what, *arch;
        uint32_t type, head_dim, kv_heads, window;
        int untied;
    } cases[] = {
        {"llama F32", "llama", 0, 16, 2, 0, 0},     {"llama F16 untied", "llama", 1, 64, 1, 0, 1},
        {"llama BF16", "llama", 30, 16, 4, 0, 0},   {"qwen2 Q8_0", "qwen2", 8, 32, 2, 0, 0},
        {"llama Q4_0", "llama", 2, 64, 1, 0, 1},    {"qwen3 Q4_K", "qwen3", 12, 128, 2, 0, 0},
        {"gemma3 F16", "gemma3", 1, 16, 1, 16, 0},  {"gemma3 Q8_0", "gemma3", 8, 256, 1, 16, 0},
        {"qwen2 Q6_K", "qwen2", 14, 80, 2, 0, 0},
    };
    for (auto &c : cases) {
        install();
        gw_model m = tiny(c.arch, c.type);
        m.head_dim = c.head_dim;
        m.kv_heads = c.kv_heads;
        m.window = c.window;
        m.untied = c.untied;
        m.layers = c.window ? 6 : 2; /* gemma's sixth layer sees everything */
        rig_options o = plain(&m);
        rig *r = open_or_fail(&o);
        bool coarse = c.type == 30 || strcmp(c.arch, "gemma3") == 0; /* BF16: eight bits */
        generate(r, c.what, 3, 4, coarse ? 5e-2 : NEAR);
        rig_close(r);
        expect_clean();
        emu_uninstall();
    }
}

static void every_kv_format_and_block_size(void **)
{
    static const uint32_t formats[][2] = {{KVP_KV_F16, KVP_KV_F16}, {KVP_KV_BF16, KVP_KV_BF16},
                                          {KVP_KV_F32, KVP_KV_F32}, {KVP_KV_BF16, KVP_KV_F16},
                                          {KVP_KV_F32, KVP_KV_F16}};
    static const uint32_t blocks[] = {1, 4, 64, 256, 16};
    for (uint32_t i = 0; i < 5; i++) {
        install();
        gw_model m = tiny("llama", 0);
        rig_options o = plain(&m);
        o.k_format = formats[i][0];
        o.v_format = formats[i][1];
        o.block_tokens = blocks[i];
        rig *r = open_or_fail(&o);
        generate(r, "formats", 2, 3);
        rig_close(r);
        expect_clean();
        emu_uninstall();
    }
}

/* --- how a step is put on the stream --- */

/* So many sequences with a prompt each, computed. */
static std::vector<uint32_t> prompts(rig *r, uint32_t n, uint32_t length)
{
    std::vector<uint32_t> seqs;
    for (uint32_t i = 0; i < n; i++) {
        seqs.push_back(rig_seq(r, length + i));
        rig_part p = {seqs[i], length + i, 1};
        near_enough(rig_step(r, &p, 1), "prompt");
    }
    return seqs;
}

static std::vector<rig_part> decode(rig *r, const std::vector<uint32_t> &seqs, int32_t token)
{
    std::vector<rig_part> parts;
    for (uint32_t s : seqs) {
        rig_append(r, s, token);
        parts.push_back({s, 1, 1});
    }
    return parts;
}

static void a_step_is_one_upload_one_download_and_never_waits(void **)
{
    install();
    gw_model m = tiny("llama", 8);
    rig_options o = plain(&m);
    o.no_cpu = true;
    rig *r = open_or_fail(&o);
    std::vector<uint32_t> seqs = prompts(r, 4, 12);
    for (int32_t t = 0; t < 6; t++) {
        emu_driver_counts before = emu_driver_counted();
        uint64_t launches = emu_driver_calls("cuLaunchKernel"), graphs = before.graph_launches;
        auto parts = decode(r, seqs, t);
        (void)rig_step(r, parts.data(), 4);
        emu_driver_counts after = emu_driver_counted();
        assert_int_equal(after.uploads - before.uploads, 1);
        assert_int_equal(after.downloads - before.downloads, 1);
        assert_int_equal(after.waits, before.waits + (t == 1 ? 0 : 0));
        assert_int_equal(after.pageable, before.pageable);
        assert_int_equal(after.host_functions - before.host_functions, 1);
        /* Once as it is, once recorded, from then on replayed. */
        assert_int_equal(after.graph_launches - graphs, t > 0);
        if (t > 1) assert_int_equal(emu_driver_calls("cuLaunchKernel"), launches);
        assert_true(after.upload_bytes - before.upload_bytes < 16384 + 65536);
    }
    rig_close(r);
    expect_clean();
    emu_uninstall();
}

/* A graph's surplus blocks and rows must not be seen, whatever ran before. */
static void a_small_step_after_a_large_one(void **)
{
    install();
    gw_model m = tiny("gemma3", 1);
    m.window = 16;
    m.layers = 6;
    rig_options o = plain(&m);
    rig *r = open_or_fail(&o);
    std::vector<uint32_t> seqs = prompts(r, 8, 20);
    static const uint32_t sizes[] = {8, 8, 8, 5, 7, 1, 1, 1, 8, 6, 2, 2, 2, 3, 3, 3, 8};
    int32_t token = 3;
    for (uint32_t n : sizes) {
        std::vector<uint32_t> some(seqs.begin() + (8 - n) / 2, seqs.begin() + (8 - n) / 2 + n);
        auto parts = decode(r, some, token++);
        near_enough(rig_step(r, parts.data(), n), "decode", 5e-2);
        rig_poison(r);
    }
    assert_true(emu_driver_counted().graph_launches >= 8);
    rig_close(r);
    expect_clean();
    emu_uninstall();
}

/* Prompts beside decodes, in any cut. */
static void mixed_steps(void **)
{
    install(EMU_THREAD, 3);
    gw_model m = tiny("qwen3", 0);
    rig_options o = plain(&m);
    o.block_tokens = 8;
    rig *r = open_or_fail(&o);
    std::vector<uint32_t> seqs = prompts(r, 3, 10);
    uint32_t late = rig_seq(r, 60);
    static const uint32_t cuts[] = {1, 17, 33, 9};
    for (uint32_t c : cuts) {
        auto parts = decode(r, seqs, (int32_t)c);
        parts.insert(parts.begin() + 1, {late, c, c == 9 ? 3u : 0u});
        near_enough(rig_step(r, parts.data(), 4), "mixed");
    }
    near_enough(rig_compare_kv(r, late), "mixed");
    /* A step whose results nobody reads. */
    rig_append(r, late, 5);
    rig_part p = {late, 1, 0};
    (void)rig_step(r, &p, 1);
    near_enough(rig_compare_kv(r, late), "mixed");
    rig_close(r);
    expect_clean();
    emu_uninstall();
}

static void forks_copy_on_write_and_share(void **)
{
    install();
    gw_model m = tiny("llama", 0);
    rig_options o = plain(&m);
    rig *r = open_or_fail(&o);
    std::vector<uint32_t> seqs = prompts(r, 1, 37);
    rig_poison(r);
    seqs.push_back(rig_fork(r, seqs[0], 37));
    seqs.push_back(rig_fork(r, seqs[0], 32));
    seqs.push_back(rig_fork(r, seqs[0], 5));
    for (int32_t t = 0; t < 5; t++) {
        std::vector<rig_part> parts;
        for (uint32_t i = 0; i < 4; i++) {
            rig_append(r, seqs[i], t * 7 + (int32_t)i);
            parts.push_back({seqs[i], 1, 1});
        }
        near_enough(rig_step(r, parts.data(), 4), "fork");
    }
    for (uint32_t s : seqs) near_enough(rig_compare_kv(r, s), "fork");
    rig_close(r);
    expect_clean();
    emu_uninstall();
}

/* A prefix that several attend to together, and apart to the rest, then replayed. */
static void a_shared_prefix(void **)
{
    install();
    gw_model m = tiny("llama", 0);
    m.heads = 8;
    rig_options o = plain(&m);
    o.max_rows = 256;
    o.blocks = 64;
    rig *r = open_or_fail(&o);
    std::vector<uint32_t> seqs = prompts(r, 1, 203);
    for (int i = 0; i < 5; i++) seqs.push_back(rig_fork(r, seqs[0], 200));
    rig_poison(r);
    uint64_t merges = emu_driver_ran("merge");
    for (int32_t t = 0; t < 4; t++) {
        auto parts = decode(r, seqs, 0);
        for (size_t i = 1; i < seqs.size(); i++) rig_append(r, seqs[i], t + (int32_t)i);
        near_enough(rig_step(r, parts.data(), (uint32_t)parts.size()), "shared");
    }
    assert_true(emu_driver_ran("merge") >= merges + 4 * 2);
    assert_true(emu_driver_ran("attention_f16_d64_r32") > 0);
    assert_true(emu_driver_counted().graph_launches > 0);
    for (uint32_t s : seqs) near_enough(rig_compare_kv(r, s), "shared");
    rig_close(r);
    expect_clean();
    emu_uninstall();
}

/* More entries change than an upload takes. */
static void tables_are_sent_whole(void **)
{
    install();
    gw_model m = tiny("llama", 0);
    m.layers = 1;
    m.context = 512;
    rig_options o = plain(&m);
    o.block_tokens = 1;
    o.blocks = 600;
    o.max_positions = 512;
    o.max_rows = 256;
    rig *r = open_or_fail(&o);
    std::vector<uint32_t> seqs;
    seqs.push_back(rig_seq(r, 402));
    rig_part prompt[2] = {{seqs[0], 201, 0}, {seqs[0], 201, 1}};
    (void)rig_step(r, &prompt[0], 1);
    near_enough(rig_step(r, &prompt[1], 1), "prompt");
    for (uint32_t i = 0; i < 11; i++) seqs.push_back(rig_fork(r, seqs[0], 402 - i));
    uint64_t uploads = emu_driver_counted().uploads;
    for (int32_t t = 0; t < 3; t++) {
        auto parts = decode(r, seqs, t);
        near_enough(rig_step(r, parts.data(), (uint32_t)parts.size()), "whole tables");
        assert_int_equal(emu_driver_counted().uploads - uploads, t + 2);
    }
    rig_close(r);
    expect_clean();
    emu_uninstall();
}

/* Sequences that come, go and change places: tables are patched. */
static void tables_follow(void **)
{
    install();
    gw_model m = tiny("llama", 0);
    rig_options o = plain(&m);
    o.block_tokens = 1;
    o.blocks = 1024;
    rig *r = open_or_fail(&o);
    std::vector<uint32_t> seqs = prompts(r, 6, 30);
    for (int32_t t = 0; t < 8; t++) {
        std::vector<uint32_t> order = seqs;
        for (size_t i = 0; i < order.size(); i++)
            order[i] = seqs[(i + (size_t)t * 5) % seqs.size()];
        if (t == 4) {
            rig_end(r, seqs[2]);
            seqs.erase(seqs.begin() + 2);
            order = seqs;
        }
        auto parts = decode(r, order, t + 1);
        near_enough(rig_step(r, parts.data(), (uint32_t)parts.size()), "tables");
    }
    rig_close(r);
    expect_clean();
    emu_uninstall();
}

/* --- outputs --- */

static rig_sampling sampling(float temperature, int32_t top_k, float top_p, float min_p,
                             uint64_t seed)
{
    rig_sampling s;
    memset(&s, 0, sizeof s);
    s.on = true;
    s.options.size = sizeof s.options;
    s.options.temperature = temperature;
    s.options.top_k = top_k;
    s.options.top_p = top_p;
    s.options.min_p = min_p;
    s.seed = seed;
    return s;
}

static void the_device_chooses_what_the_host_would(void **)
{
    install();
    gw_model m = tiny("llama", 0);
    m.vocabulary = 300;
    rig_options o = plain(&m);
    rig *r = open_or_fail(&o);
    std::vector<uint32_t> seqs = prompts(r, 6, 10);
    rig_sampling s[6] = {sampling(0, 0, 0, 0, 0),       sampling(1, 0, 0, 0, 11),
                         sampling(0.7f, 5, 0, 0, 12),   sampling(1.5f, 0, 0.8f, 0, 13),
                         sampling(1, 40, 0.9f, 0.1f, 14), sampling(1, 0, 0, 0, 15)};
    s[5].options.repetition_penalty = 1.3f; /* the host's: it looks at tokens */
    for (int32_t t = 0; t < 6; t++) {
        rig_sampling none;
        memset(&none, 0, sizeof none);
        for (uint32_t i = 0; i < 6; i++) rig_set_sampling(r, seqs[i], &none);
        auto parts = decode(r, seqs, t);
        near_enough(rig_step(r, parts.data(), 6), "logits");
        int32_t expected[6];
        for (uint32_t i = 0; i < 6; i++)
            expected[i] = rig_sample(&s[i], rig_logits(r, i), 300, rig_position(r, i));
        rig_rewind(r, parts.data(), 6);
        for (uint32_t i = 0; i < 6; i++) rig_set_sampling(r, seqs[i], &s[i]);
        near_enough(rig_step(r, parts.data(), 6), "logits");
        for (uint32_t i = 0; i < 5; i++) assert_int_equal(rig_chosen(r, i, NULL), expected[i]);
        assert_int_equal(rig_chosen(r, 5, NULL), -2);
        assert_non_null(rig_logits(r, 5));
    }
    rig_close(r);
    expect_clean();
    emu_uninstall();
}

/* More outputs than a tile of logits, of which the host reads none, few, or more than a tile. */
static void many_outputs(void **)
{
    install();
    gw_model m = tiny("gemma3", 1);
    m.layers = 1;
    rig_options o = plain(&m);
    o.max_rows = 256;
    rig *r = open_or_fail(&o);
    uint32_t a = rig_seq(r, 90), b = rig_seq(r, 70), c = rig_seq(r, 40);
    rig_sampling greedy = sampling(0, 0, 0, 0, 0), none;
    memset(&none, 0, sizeof none);
    rig_part parts[3] = {{a, 90, 90}, {b, 70, 1}, {c, 40, 40}};
    for (int which = 0; which < 4; which++) {
        rig_set_sampling(r, a, which & 1 ? &greedy : &none);
        rig_set_sampling(r, b, &none);
        rig_set_sampling(r, c, which & 2 ? &greedy : &none);
        uint64_t downloads = emu_driver_counted().downloads;
        near_enough(rig_step(r, parts, 3), "many", 5e-2);
        rig_rewind(r, parts, 3);
        uint64_t made = emu_driver_counted().downloads - downloads;
        if (which & 1) assert_int_equal(made, 1);
        for (uint32_t i = 0; i < 131; i++) {
            bool of_host = i < 90 ? !(which & 1) : i == 90 || !(which & 2);
            assert_int_equal(rig_logits(r, i) != NULL, of_host);
            if (!of_host) assert_true(rig_chosen(r, i, NULL) >= 0);
        }
    }
    rig_close(r);
    expect_clean();
    emu_uninstall();
}

/* --- when things end otherwise --- */

static void wait_for_end(rig *r)
{
    while (rig_poll(r) == KVP_AGAIN) sched_yield();
}

static void a_cancelled_step_ends_without_results(void **)
{
    install(EMU_LATE);
    gw_model m = tiny("llama", 0);
    rig_options o = plain(&m);
    o.no_cpu = true;
    rig *r = open_or_fail(&o);
    rig_part p = {rig_seq(r, 20), 20, 20};
    rig_prepare(r, &p, 1);
    assert_int_equal(rig_launch(r), KVP_OK);
    assert_int_equal(rig_poll(r), KVP_AGAIN);
    rig_cancel(r);
    wait_for_end(r);
    assert_int_equal(rig_poll(r), KVP_OK);
    assert_int_equal(rig_done(r), 1);
    assert_int_equal(rig_posts(r), 0);
    rig_rewind(r, &p, 1);
    (void)rig_step(r, &p, 1); /* and the next one is whole */
    rig_close(r);
    expect_clean();
    emu_uninstall();
}

/* A thread that flushes denormals calls the host functions: the library's functions run without. */
static void the_threads_floating_point_state_is_set_aside(void **)
{
#ifdef __x86_64__
    install(EMU_LATE);
    gw_model m = tiny("llama", 0);
    rig_options o = plain(&m);
    rig *r = open_or_fail(&o);
    rig_part p = {rig_seq(r, 20), 20, 2};
    uint32_t before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before | 0x8040);
    double d = rig_step(r, &p, 1);
    uint32_t after = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before);
    assert_int_equal(after & 0x8040, 0x8040);
    near_enough(d, "flushing");
    rig_close(r);
    expect_clean();
    emu_uninstall();
#endif
}

static void a_lost_device_is_found_at_the_next_look(void **)
{
    install(EMU_LATE);
    gw_model m = tiny("llama", 0);
    rig_options o = plain(&m);
    o.no_cpu = true;
    rig *r = open_or_fail(&o);
    rig_part p = {rig_seq(r, 20), 10, 1};
    rig_prepare(r, &p, 1);
    assert_int_equal(rig_launch(r), KVP_OK);
    assert_int_equal(rig_poll(r), KVP_AGAIN);
    emu_driver_lose(KVP__CU_ILLEGAL_ADDRESS);
    assert_int_equal(rig_poll(r), KVP_ERR_DEVICE_LOST);
    assert_int_equal(rig_poll(r), KVP_ERR_DEVICE_LOST);
    assert_int_equal(rig_launch(r), KVP_ERR_DEVICE_LOST);
    assert_int_equal(rig_done(r), 0);
    assert_int_equal(rig_posts(r), 0);
    rig_close(r);
    assert_string_equal(emu_driver_leaks(), "");
    assert_int_equal(rig_live(), 0);
    emu_uninstall();
}

/* Whatever call of a step fails: a status, no `done`, and nothing that is put on the stream later.
 * */
static void every_call_of_a_step_can_fail(void **)
{
    static const char *const names[] = {"cuMemcpyHtoDAsync", "cuLaunchKernel", "cublasGemmEx",
                                        "cuMemcpyDtoHAsync", "cuLaunchHostFunc",
                                        "cuCtxPushCurrent"};
    gw_model m = tiny("llama", 0);
    rig_options o = plain(&m);
    o.no_cpu = true;
    for (const char *name : names) {
        for (uint64_t n = 1; n < 100; n++) {
            install(EMU_LATE);
            rig *r = open_or_fail(&o);
            rig_part p = {rig_seq(r, 20), 20, 1};
            rig_prepare(r, &p, 1);
            emu_driver_fail(name, n, KVP__CU_LAUNCH_FAILED);
            kvp_status s = rig_launch(r);
            bool failed = emu_driver_failed();
            emu_driver_fail(NULL, 0, 0);
            if (failed) {
                assert_true(s < 0);
                assert_int_equal(rig_done(r), 0);
                assert_int_equal(rig_posts(r), 0);
                assert_int_equal(emu_driver_pending(), 0);
            } else {
                assert_int_equal(s, KVP_OK);
                wait_for_end(r);
                assert_int_equal(rig_done(r), 1);
            }
            rig_close(r);
            assert_string_equal(emu_driver_leaks(), "");
            assert_int_equal(rig_live(), 0);
            emu_uninstall();
            if (!failed) break;
            bool blas = strncmp(name, "cublas", 6) == 0;
            assert_int_equal(s, blas ? KVP_ERR_INTERNAL : KVP_ERR_DEVICE_LOST);
            assert_true(n < 99);
        }
    }
}

/* Steps go on launch by launch where recording fails, and it is said once. */
static void a_failed_recording_is_no_error(void **)
{
    static const char *const names[] = {"cuStreamBeginCapture", "cuStreamEndCapture",
                                        "cuGraphInstantiateWithFlags"};
    gw_model m = tiny("llama", 0);
    rig_options o = plain(&m);
    for (const char *name : names) {
        install();
        rig *r = open_or_fail(&o);
        std::vector<uint32_t> seqs = prompts(r, 2, 10);
        emu_driver_fail(name, 1, KVP__CU_OUT_OF_MEMORY);
        for (int32_t t = 0; t < 4; t++) {
            auto parts = decode(r, seqs, t);
            near_enough(rig_step(r, parts.data(), 2), name);
        }
        assert_true(emu_driver_failed());
        assert_int_equal(emu_driver_counted().graph_launches, 0);
        assert_non_null(strstr(rig_log(), "not recorded"));
        rig_close(r);
        assert_string_equal(emu_driver_leaks(), "");
        assert_int_equal(rig_live(), 0);
        emu_uninstall();
    }
}

/* Every call that making things needs refuses once: a status and a line, and nothing is left. */
static void every_call_of_opening_can_fail(void **)
{
    gw_model m = tiny("llama", 8);
    m.layers = 1;
    rig_options o = plain(&m);
    o.no_cpu = true;
    uint64_t n = 1;
    for (;; n++) {
        install();
        emu_driver_fail(NULL, n, KVP__CU_OUT_OF_MEMORY);
        kvp_error err;
        memset(&err, 0, sizeof err);
        err.size = sizeof err;
        rig *r = rig_open(&o, &err);
        bool failed = emu_driver_failed();
        emu_driver_fail(NULL, 0, 0);
        if (r) rig_close(r);
        else {
            assert_true(err.status < 0);
            assert_true(err.text[0] != 0);
            assert_null(strchr(err.text, '\n'));
        }
        assert_string_equal(emu_driver_leaks(), "");
        assert_int_equal(rig_live(), 0);
        emu_uninstall();
        if (!failed) break;
    }
    assert_true(n > 40);
}

static void too_little_memory_says_how_much(void **)
{
    static const char *const what[] = {"weights", "KV blocks", "workspace"};
    gw_model m = tiny("llama", 1);
    rig_options o = plain(&m);
    o.no_cpu = true;
    install();
    rig *r = open_or_fail(&o);
    uint64_t all = emu_driver_counted().memory;
    rig_close(r);
    emu_uninstall();
    for (int i = 0; i < 3; i++) {
        emu_driver_options e;
        memset(&e, 0, sizeof e);
        e.memory = i == 0 ? 65536 : i == 1 ? 1 << 20 : all - 256;
        emu_install(&e);
        kvp_error err;
        memset(&err, 0, sizeof err);
        err.size = sizeof err;
        assert_null(rig_open(&o, &err));
        assert_int_equal(err.status, KVP_ERR_NO_MEMORY);
        assert_non_null(strstr(err.text, what[i]));
        assert_true(err.needed > err.available);
        assert_true(err.available <= e.memory);
        assert_string_equal(emu_driver_leaks(), "");
        emu_uninstall();
    }
}

static void cards_that_cannot_be_used_say_why(void **)
{
    static const struct {
        int32_t devices, major, minor;
        const char *why;
    } cases[] = {{-1, 0, 0, "no card"}, {1, 7, 5, "7.5"}};
    gw_model m = tiny("llama", 1);
    rig_options o = plain(&m);
    o.no_cpu = true;
    for (auto &c : cases) {
        emu_driver_options e;
        memset(&e, 0, sizeof e);
        e.devices = c.devices;
        e.major = c.major;
        e.minor = c.minor;
        emu_install(&e);
        kvp_error err;
        memset(&err, 0, sizeof err);
        err.size = sizeof err;
        assert_null(rig_open(&o, &err));
        assert_int_equal(err.status, KVP_ERR_NO_DEVICE);
        assert_non_null(strstr(err.text, c.why));
        emu_uninstall();
    }
}

static void placing_tells_how_far_it_is_and_can_be_cancelled(void **)
{
    gw_model m = tiny("qwen2", 8);
    uint32_t calls, of_all = 1;
    bool rose;
    install();
    assert_int_equal(rig_place(&m, 0, 0, &of_all, &rose, NULL), KVP_OK);
    assert_true(rose && of_all > 20);
    expect_clean();
    for (uint32_t n = 1; n <= of_all; n++) {
        kvp_error err;
        memset(&err, 0, sizeof err);
        err.size = sizeof err;
        assert_int_equal(rig_place(&m, n, 0, &calls, &rose, &err), KVP_ERR_CANCELLED);
        assert_int_equal(calls, n);
        assert_non_null(strstr(err.text, "cancelled"));
        expect_clean();
        memset(err.text, 0, sizeof err.text);
        if (n == of_all) break;
        assert_int_equal(rig_place(&m, 0, n, &calls, &rose, &err), KVP_ERR_IO);
        assert_non_null(strstr(err.text, "tensor"));
        expect_clean();
    }
    emu_uninstall();
}

static void a_card_describes_itself(void **)
{
    kvp_device_info i;
    memset(&i, 0, sizeof i);
    install();
    rig_describe(0, &i);
    assert_int_equal(i.usable, 1);
    assert_string_equal(i.name, "cuda:0");
    assert_non_null(strstr(i.description, "9.0"));
    assert_true(i.memory_bytes > 0);
    assert_int_equal(rig_count(), 1);
    rig_describe(3, &i);
    assert_int_equal(i.usable, 0);
    assert_string_equal(i.name, "cuda:3");
    assert_non_null(strstr(i.description, "there is 1 CUDA card"));
    emu_driver_fail("cuDeviceTotalMem", 1, KVP__CU_INVALID_VALUE);
    rig_describe(0, &i);
    assert_int_equal(i.usable, 0);
    assert_non_null(strstr(i.description, "does not answer"));
    emu_driver_fail("cuInit", 1, 803);
    rig_describe(0, &i);
    assert_int_equal(i.usable, 0);
    assert_non_null(strstr(i.description, "does not start"));
    /* What has been found, without a part of it. */
    kvp__cuda_found whole = *kvp__cuda_load(), part = whole;
    part.blas = NULL;
    snprintf(part.missing, sizeof part.missing, "cuBLAS is not installed");
    kvp__cuda_use(&part);
    rig_describe(0, &i);
    assert_int_equal(i.usable, 0);
    assert_non_null(strstr(i.description, "cuBLAS is not installed"));
    part = whole;
    part.n_images = 0;
    kvp__cuda_use(&part);
    rig_describe(0, &i);
    assert_int_equal(i.usable, 0);
    assert_non_null(strstr(i.description, "without CUDA kernels"));
    memset(&part, 0, sizeof part);
    snprintf(part.missing, sizeof part.missing, "no CUDA driver");
    kvp__cuda_use(&part);
    rig_describe(0, &i);
    assert_int_equal(i.usable, 0);
    assert_string_equal(i.description, "no CUDA driver");
    emu_uninstall();
}

/* Matrices of one stage that cannot lie in one. */
static void a_model_of_mixed_types(void **)
{
    install();
    gw_model m = tiny("llama", 8);
    m.head_dim = 32;
    rig_options o = plain(&m);
    o.mixed = true;
    rig *r = open_or_fail(&o);
    generate(r, "mixed types", 3, 3);
    rig_close(r);
    expect_clean();
    emu_uninstall();
}

/* The host refuses the n-th allocation, for every n. */
static void every_allocation_can_be_refused(void **)
{
    gw_model m = tiny("llama", 8);
    m.layers = 1;
    rig_options o = plain(&m);
    o.no_cpu = true;
    bool refused = true;
    for (o.refuse = 1; refused; o.refuse++) {
        kvp_error err;
        memset(&err, 0, sizeof err);
        err.size = sizeof err;
        install();
        rig *r = rig_open(&o, &err);
        refused = rig_refused();
        assert_true((r == NULL) == refused);
        if (!r) assert_int_equal(err.status, KVP_ERR_NO_MEMORY);
        rig_close(r);
        expect_clean();
        emu_uninstall();
    }
    assert_true(o.refuse > 5);
}

/* `done` is waited for: after poll nobody is in the host's functions. */
static void a_done_that_takes_its_time(void **)
{
    install(EMU_THREAD);
    gw_model m = tiny("llama", 0);
    rig_options o = plain(&m);
    o.no_cpu = true;
    o.slow_done_us = 30000;
    rig *r = open_or_fail(&o);
    rig_part p = {rig_seq(r, 20), 5, 1};
    for (int i = 0; i < 3; i++) (void)rig_step(r, &p, 1);
    rig_close(r);
    expect_clean();
    emu_uninstall();
}

/* What is said beforehand is what is taken. */
static void memory_is_what_was_said(void **)
{
    install();
    gw_model m = tiny("gemma3", 8);
    m.window = 16;
    m.layers = 6;
    rig_options o = plain(&m);
    o.max_rows = o.max_seqs = 16;
    o.no_cpu = true;
    rig *r = open_or_fail(&o);
    uint64_t said = rig_workspace(r) + rig_packed(r);
    uint64_t slab = emu_driver_counted().memory - said;
    assert_true(slab > 0 && slab % 256 == 0);
    assert_int_equal(slab, rig_slab_bytes(r));
    rig_close(r);
    expect_clean();
    emu_uninstall();
}

/* --- a host's own model --- */

/* The host's side of the card: its context, memory, stream. */
struct host {
    const kvp__cuda_api *cu;
    kvp__cu_context context;
    kvp__cu_stream stream;
    std::vector<kvp__cu_ptr> taken;

    host()
    {
        kvp__cu_context made;
        cu = kvp__cuda_load()->cuda;
        assert_int_equal(cu->cuInit(0), 0);
        assert_int_equal(cu->cuDevicePrimaryCtxRetain(&made, 0), 0);
        context = made;
        assert_int_equal(cu->cuCtxPushCurrent(context), 0);
        assert_int_equal(cu->cuStreamCreate(&stream, KVP__CU_STREAM_NON_BLOCKING), 0);
    }
    kvp__cu_ptr take(uint64_t bytes)
    {
        kvp__cu_ptr p = 0;
        assert_int_equal(cu->cuMemAlloc(&p, bytes), 0);
        taken.push_back(p);
        return p;
    }
    void end()
    {
        kvp__cu_context top;
        for (kvp__cu_ptr p : taken) assert_int_equal(cu->cuMemFree(p), 0);
        assert_int_equal(cu->cuStreamDestroy(stream), 0);
        assert_int_equal(cu->cuCtxPopCurrent(&top), 0);
        assert_ptr_equal(top, context); /* as it was before the library was called */
        assert_int_equal(cu->cuDevicePrimaryCtxRelease(0), 0);
    }
};

static host *the_host;

static uint64_t slab_of_host(uint64_t bytes) { return the_host->take(bytes); }

static uint16_t half_of(uint32_t type, float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    if (type == KVP_KV_BF16) return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
    _Float16 h = (_Float16)f;
    uint16_t out;
    memcpy(&out, &h, 2);
    return out;
}

static float float_of(uint32_t type, const uint8_t *p, size_t i)
{
    float f;
    uint16_t h;
    if (type == KVP_KV_F32) {
        memcpy(&f, p + 4 * i, 4);
        return f;
    }
    memcpy(&h, p + 2 * i, 2);
    if (type == KVP_KV_BF16) {
        uint32_t u = (uint32_t)h << 16;
        memcpy(&f, &u, 4);
        return f;
    }
    _Float16 g;
    memcpy(&g, &h, 2);
    return (float)g;
}

enum { LAYERS = 3, HEADS = 4, KV_HEADS = 2, DIM = 64, MOST_ROWS = 64 };

/* Q, K, V and the output of a layer, on the card with gaps between rows, and here. */
struct layer_arrays {
    uint32_t type;
    kvp__cu_ptr card[4];
    std::vector<float> values[4];
    int64_t row[4];
    size_t size() const { return type == KVP_KV_F32 ? 4 : 2; }
};

static layer_arrays arrays(host &h, uint32_t type)
{
    layer_arrays a;
    static const uint32_t heads[4] = {HEADS, KV_HEADS, KV_HEADS, HEADS};
    a.type = type;
    for (int i = 0; i < 4; i++) {
        a.row[i] = (int64_t)((heads[i] * DIM + 16) * a.size());
        a.card[i] = h.take((uint64_t)a.row[i] * MOST_ROWS);
        a.values[i].resize(heads[i] * DIM * MOST_ROWS);
    }
    return a;
}

/* Other values, rounded to the type, for `rows` rows. */
static void fill_arrays(layer_arrays &a, uint32_t rows, uint64_t *rng)
{
    for (int i = 0; i < 3; i++) {
        size_t width = a.values[i].size() / MOST_ROWS;
        uint8_t *to = (uint8_t *)emu_driver_memory(a.card[i], (uint64_t)a.row[i] * MOST_ROWS);
        for (size_t r = 0; r < rows; r++)
            for (size_t e = 0; e < width; e++) {
                *rng = *rng * 6364136223846793005u + 1442695040888963407u;
                float f = (float)(int32_t)(*rng >> 32) * 0x1p-31f;
                uint8_t *at = to + (size_t)a.row[i] * r + e * a.size();
                uint16_t half = half_of(a.type, f);
                if (a.type == KVP_KV_F32) memcpy(at, &f, 4);
                else memcpy(at, &half, 2);
                a.values[i][r * width + e] = float_of(a.type, at, 0);
            }
    }
}

static rig_attend call_of(const layer_arrays &a, uint32_t layer)
{
    rig_attend c;
    memset(&c, 0, sizeof c);
    c.layer = layer;
    c.type = a.type;
    c.q = a.card[0], c.k = a.card[1], c.v = a.card[2], c.out = a.card[3];
    c.q_row = a.row[0], c.k_row = a.row[1], c.v_row = a.row[2], c.out_row = a.row[3];
    c.q_head = c.k_head = c.v_head = c.out_head = (int64_t)(DIM * a.size());
    c.scale = 0.125f;
    c.softcap = layer == 2 ? 20.0f : 0.0f;
    return c;
}

/* The output on the card beside the CPU's, which is asked now. */
static void compare(rig *r, layer_arrays &a, uint32_t layer, uint32_t rows, const char *what)
{
    std::vector<float> out(HEADS * DIM * MOST_ROWS);
    rig_attention_cpu(r, layer, a.values[0].data(), a.values[1].data(), a.values[2].data(),
                      out.data(), 0.125f, layer == 2 ? 20.0f : 0.0f);
    uint64_t bytes = (uint64_t)a.row[3] * MOST_ROWS;
    const uint8_t *got = (const uint8_t *)emu_driver_memory(a.card[3], bytes);
    double most = 0, top = 0;
    for (uint32_t i = 0; i < rows; i++)
        for (uint32_t e = 0; e < HEADS * DIM; e++) {
            double b = (double)out[i * HEADS * DIM + e];
            double d = fabs((double)float_of(a.type, got + (size_t)a.row[3] * i, e) - b);
            if (!(d <= most)) most = d;
            top = fmax(top, fabs(b));
        }
    near_enough(most / top, what, a.type == KVP_KV_BF16 ? 3e-2 : 1e-2);
}

static rig_options own_model(kvp_geometry *g, kvp_layer_group groups[2])
{
    rig_options o;
    memset(g, 0, sizeof *g);
    memset(&o, 0, sizeof o);
    groups[0] = {2, KV_HEADS, DIM, DIM, 0, HEADS};
    groups[1] = {1, KV_HEADS, DIM, DIM, 20, HEADS};
    g->size = sizeof *g;
    g->n_groups = 2;
    g->groups = groups;
    o.geometry = g;
    return o;
}

static void attention_for_a_hosts_own_model(void **)
{
    static const uint32_t types[] = {KVP_KV_F32, KVP_KV_F16, KVP_KV_BF16};
    for (uint32_t type : types)
        for (int given = 0; given < 2; given++) {
            install(given ? EMU_LATE : EMU_AT_ONCE);
            host h;
            kvp_geometry g;
            kvp_layer_group groups[2];
            rig_options o = own_model(&g, groups);
            o.k_format = o.v_format = type == KVP_KV_BF16 ? KVP_KV_BF16 : KVP_KV_F16;
            if (given) {
                the_host = &h;
                o.stream = h.stream;
                o.slab = slab_of_host;
            }
            rig *r = open_or_fail(&o);
            std::vector<layer_arrays> layers;
            for (int l = 0; l < LAYERS; l++) layers.push_back(arrays(h, type));
            uint64_t rng = 5;
            uint32_t a = rig_seq(r, 60), b = rig_seq(r, 40);
            const rig_part steps[][2] = {{{a, 30, 1}, {b, 7, 1}},  {{a, 1, 1}, {b, 20, 1}},
                                         {{a, 1, 1}, {b, 1, 1}},   {{b, 1, 1}, {a, 1, 1}},
                                         {{a, 20, 1}, {b, 3, 1}}};
            for (auto &parts : steps) {
                uint32_t rows = parts[0].rows + parts[1].rows;
                for (auto &l : layers) fill_arrays(l, rows, &rng);
                assert_int_equal(rig_begin(r, parts, 2, NULL), KVP_OK);
                for (uint32_t l = 0; l < LAYERS; l++) {
                    rig_attend c = call_of(layers[l], l);
                    assert_int_equal(rig_attention(r, &c, NULL), KVP_OK);
                }
                if (given) assert_int_equal(h.cu->cuStreamSynchronize(h.stream), 0);
                for (uint32_t l = 0; l < LAYERS; l++) compare(r, layers[l], l, rows, "own model");
            }
            rig_close(r);
            h.end();
            expect_clean();
            emu_uninstall();
        }
}

/* A stream of the host's that is being recorded takes no step of a model. */
static void a_step_on_a_stream_of_the_hosts(void **)
{
    install(EMU_THREAD);
    host h;
    gw_model m = tiny("llama", 0);
    rig_options o = plain(&m);
    o.stream = h.stream;
    rig *r = open_or_fail(&o);
    std::vector<uint32_t> seqs = prompts(r, 3, 10);
    for (int32_t t = 0; t < 4; t++) {
        auto parts = decode(r, seqs, t);
        near_enough(rig_step(r, parts.data(), 3), "on a stream of the host's");
    }
    assert_true(emu_driver_counted().graph_launches > 0);
    auto parts = decode(r, seqs, 9);
    kvp__cu_graph graph;
    assert_int_equal(h.cu->cuStreamBeginCapture(h.stream, KVP__CU_CAPTURE_THREAD_LOCAL), 0);
    rig_prepare(r, parts.data(), 3);
    assert_int_equal(rig_launch(r), KVP_ERR_UNSUPPORTED);
    assert_int_equal(rig_poll(r), KVP_OK);
    assert_int_equal(rig_done(r), 0);
    assert_int_equal(h.cu->cuStreamEndCapture(h.stream, &graph), 0);
    assert_int_equal(h.cu->cuGraphDestroy(graph), 0);
    rig_rewind(r, parts.data(), 3);
    near_enough(rig_step(r, parts.data(), 3), "afterwards");
    rig_close(r);
    h.end();
    expect_clean();
    emu_uninstall();
}

static void models_and_shapes_that_cannot_be_placed(void **)
{
    kvp_error err;
    memset(&err, 0, sizeof err);
    err.size = sizeof err;
    install();
    assert_int_equal(rig_place_odd(RIG_GEOMETRY, &err), KVP_ERR_UNSUPPORTED);
    assert_non_null(strstr(err.text, "geometry"));
    static const rig_oddity odd[] = {RIG_HUGE, RIG_VECTOR, RIG_INPUTS};
    for (rig_oddity which : odd) {
        memset(err.text, 0, sizeof err.text);
        assert_int_equal(rig_place_odd(which, &err), KVP_ERR_UNSUPPORTED);
        assert_non_null(strstr(err.text, "tensor blk.0."));
    }
    assert_int_equal(rig_place_odd(RIG_HUGE_WORKSPACE, &err), KVP_ERR_TOO_LARGE);
    assert_int_equal(rig_place_odd(RIG_PACKED_FILE, NULL), KVP_OK);
    assert_non_null(strstr(rig_log(), "weights.packed: only the CPU"));
    expect_clean();
    emu_uninstall();

    kvp_geometry g;
    kvp_layer_group groups[2];
    rig_options o = own_model(&g, groups);
    o.no_cpu = true;
    install();
    groups[1].key_dim = groups[1].value_dim = 33;
    assert_null(rig_open(&o, &err));
    assert_int_equal(err.status, KVP_ERR_UNSUPPORTED);
    assert_non_null(strstr(err.text, "group 1: head sizes 33 and 33"));
    groups[1].key_dim = groups[1].value_dim = DIM;
    o.max_seqs = 4096;
    o.max_positions = 1u << 30;
    assert_null(rig_open(&o, &err));
    assert_int_equal(err.status, KVP_ERR_TOO_LARGE);
    expect_clean();

    gw_model m = tiny("llama", 1);
    o = plain(&m);
    o.no_cpu = true;
    static const struct {
        const char *name;
        kvp__cu_result error;
        kvp_status status;
    } fails[] = {{"cuModuleLoadData", KVP__CU_NO_BINARY, KVP_ERR_UNSUPPORTED},
                 {"cuDevicePrimaryCtxRetain", 999, KVP_ERR_NO_DEVICE},
                 {"cuModuleGetFunction", KVP__CU_NOT_FOUND, KVP_ERR_INTERNAL}};
    for (auto &f : fails)
        for (uint64_t n = 1; n < 3; n++) {
            emu_driver_fail(f.name, n, f.error);
            rig *r = rig_open(&o, &err);
            emu_driver_fail(NULL, 0, 0);
            /* A kernel is looked for in one module after another. */
            if (r) assert_string_equal(f.name, "cuModuleGetFunction");
            else assert_int_equal(err.status, f.status);
            rig_close(r);
            assert_string_equal(emu_driver_leaks(), "");
            assert_int_equal(rig_live(), 0);
        }
    emu_uninstall();
}

/* More entries of tables than an upload takes: they are sent whole, and waited for. */
static void whole_tables_of_a_hosts_own_model(void **)
{
    install(EMU_THREAD);
    host h;
    kvp_geometry g;
    kvp_layer_group groups[2];
    rig_options o = own_model(&g, groups);
    o.stream = h.stream;
    o.no_cpu = true;
    o.block_tokens = 1;
    o.blocks = 6000;
    o.max_positions = 512;
    rig *r = open_or_fail(&o);
    std::vector<rig_part> parts;
    for (int i = 0; i < 10; i++) {
        parts.push_back({rig_seq(r, 510), 1, 1});
        rig_pretend(r, parts.back().seq, 400);
    }
    assert_int_equal(rig_begin(r, parts.data(), 10, NULL), KVP_OK);
    assert_int_equal(h.cu->cuStreamSynchronize(h.stream), 0);
    assert_int_equal(emu_driver_counted().uploads, 1 + 1 + 2); /* constants; the step; two groups */
    assert_int_equal(rig_begin(r, parts.data(), 10, NULL), KVP_OK);
    assert_int_equal(h.cu->cuStreamSynchronize(h.stream), 0);
    assert_int_equal(emu_driver_counted().uploads, 5);
    rig_close(r);
    h.end();
    expect_clean();
    emu_uninstall();
}

static void a_card_lost_under_a_hosts_own_model(void **)
{
    static const char *const names[] = {"cuMemcpyHtoDAsync", "cuLaunchKernel", "cuEventRecord"};
    for (const char *name : names) {
        install();
        host h;
        kvp_geometry g;
        kvp_layer_group groups[2];
        rig_options o = own_model(&g, groups);
        o.stream = h.stream;
        o.no_cpu = true;
        rig *r = open_or_fail(&o);
        layer_arrays a = arrays(h, KVP_KV_F16);
        rig_part p = {rig_seq(r, 60), 3, 1};
        rig_attend c = call_of(a, 0);
        kvp_error err;
        memset(&err, 0, sizeof err);
        err.size = sizeof err;
        assert_int_equal(rig_begin(r, &p, 1, NULL), KVP_OK);
        assert_int_equal(rig_attention(r, &c, NULL), KVP_OK);
        emu_driver_fail(name, 1, KVP__CU_ILLEGAL_ADDRESS);
        kvp_status s = rig_begin(r, &p, 1, &err);
        if (s == KVP_OK) s = rig_attention(r, &c, &err);
        assert_int_equal(s, KVP_ERR_DEVICE_LOST);
        assert_non_null(strstr(err.text, "cuda:0"));
        assert_int_equal(rig_begin(r, &p, 1, &err), KVP_ERR_DEVICE_LOST);
        assert_int_equal(rig_attention(r, &c, &err), KVP_ERR_DEVICE_LOST);
        assert_int_equal(rig_poll(r), KVP_ERR_DEVICE_LOST);
        rig_close(r);
        h.end();
        assert_string_equal(emu_driver_leaks(), "");
        emu_uninstall();
    }
}

/* Recorded in one decode step, replayed in later ones, of fewer rows too. */
static void attention_in_a_graph_of_the_hosts(void **)
{
    install(EMU_LATE);
    host h;
    kvp_geometry g;
    kvp_layer_group groups[2];
    rig_options o = own_model(&g, groups);
    o.stream = h.stream;
    rig *r = open_or_fail(&o);
    std::vector<layer_arrays> layers;
    for (int l = 0; l < LAYERS; l++) layers.push_back(arrays(h, KVP_KV_F16));
    uint64_t rng = 6;
    std::vector<rig_part> parts;
    for (uint32_t i = 0; i < 4; i++) parts.push_back({rig_seq(r, 60), 6 + 5 * i, 1});
    kvp__cu_graph graph;
    kvp__cu_graph_exec exec = NULL;
    for (int step = 0; step < 6; step++) {
        uint32_t n = step == 3 ? 3 : 4, rows = 0;
        for (uint32_t i = 0; i < n; i++) rows += parts[i].rows;
        for (auto &l : layers) fill_arrays(l, rows, &rng);
        assert_int_equal(rig_begin(r, parts.data(), n, NULL), KVP_OK);
        if (step <= 1)
            assert_int_equal(h.cu->cuStreamBeginCapture(h.stream, KVP__CU_CAPTURE_THREAD_LOCAL), 0);
        for (uint32_t l = 0; l < LAYERS && step <= 1; l++) {
            rig_attend c = call_of(layers[l], l);
            kvp_error err;
            memset(&err, 0, sizeof err);
            err.size = sizeof err;
            kvp_status s = rig_attention(r, &c, &err);
            assert_int_equal(s, step == 0 ? KVP_ERR_UNSUPPORTED : KVP_PLANNED);
            if (step == 0) assert_non_null(strstr(err.text, "one row"));
        }
        if (step <= 1) assert_int_equal(h.cu->cuStreamEndCapture(h.stream, &graph), 0);
        if (step == 0) { /* a prompt is put on the stream as it is */
            assert_int_equal(h.cu->cuGraphDestroy(graph), 0);
            for (uint32_t l = 0; l < LAYERS; l++) {
                rig_attend c = call_of(layers[l], l);
                assert_int_equal(rig_attention(r, &c, NULL), KVP_OK);
            }
        } else {
            if (!exec) {
                assert_int_equal(h.cu->cuGraphInstantiateWithFlags(&exec, graph, 0), 0);
                assert_int_equal(h.cu->cuGraphDestroy(graph), 0);
            }
            assert_int_equal(h.cu->cuGraphLaunch(exec, h.stream), 0);
        }
        assert_int_equal(h.cu->cuStreamSynchronize(h.stream), 0);
        for (uint32_t l = 0; l < LAYERS; l++) compare(r, layers[l], l, rows, "replayed");
        for (auto &p : parts) p.rows = 1;
    }
    assert_int_equal(h.cu->cuStreamBeginCapture(h.stream, KVP__CU_CAPTURE_THREAD_LOCAL), 0);
    assert_int_equal(rig_begin(r, parts.data(), 4, NULL), KVP_ERR_UNSUPPORTED);
    assert_int_equal(h.cu->cuStreamEndCapture(h.stream, &graph), 0);
    assert_int_equal(h.cu->cuGraphDestroy(graph), 0);
    assert_int_equal(h.cu->cuGraphExecDestroy(exec), 0);
    rig_close(r);
    h.end();
    expect_clean();
    emu_uninstall();
}

/* Begun again and again before the card has got on: no buffer is overwritten too early. */
static void a_host_may_be_steps_ahead(void **)
{
    install(EMU_THREAD);
    host h;
    kvp_geometry g;
    kvp_layer_group groups[2];
    rig_options o = own_model(&g, groups);
    o.stream = h.stream;
    rig *r = open_or_fail(&o);
    const uint32_t steps = 8;
    std::vector<layer_arrays> layers;
    for (uint32_t i = 0; i < steps; i++) layers.push_back(arrays(h, KVP_KV_F16));
    uint64_t rng = 7, waits = 0;
    rig_part p = {rig_seq(r, 60), 3, 1};
    for (uint32_t i = 0; i < steps; i++) fill_arrays(layers[i], 3, &rng);
    waits = emu_driver_counted().waits;
    for (uint32_t i = 0; i < steps; i++) {
        assert_int_equal(rig_begin(r, &p, 1, NULL), KVP_OK);
        rig_attend c = call_of(layers[i], 0);
        assert_int_equal(rig_attention(r, &c, NULL), KVP_OK);
        std::vector<float> out(HEADS * DIM * MOST_ROWS);
        layer_arrays &a = layers[i];
        rig_attention_cpu(r, 0, a.values[0].data(), a.values[1].data(), a.values[2].data(),
                          out.data(), 0.125f, 0);
        a.values[3] = out;
    }
    assert_int_equal(emu_driver_counted().waits, waits);
    assert_int_equal(h.cu->cuStreamSynchronize(h.stream), 0);
    for (uint32_t i = 0; i < steps; i++) {
        const layer_arrays &a = layers[i];
        const uint8_t *got = (const uint8_t *)emu_driver_memory(a.card[3], (uint64_t)a.row[3] * 3);
        for (uint32_t e = 0; e < HEADS * DIM; e++)
            assert_true(fabsf(float_of(a.type, got, e) - a.values[3][e]) < 1e-2f);
    }
    rig_close(r);
    h.end();
    expect_clean();
    emu_uninstall();
}

/* After a test that failed, too. */
static int restore(void **)
{
    emu_uninstall();
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(models_agree_with_the_cpu, restore),
        cmocka_unit_test_teardown(every_kv_format_and_block_size, restore),
        cmocka_unit_test_teardown(a_step_is_one_upload_one_download_and_never_waits, restore),
        cmocka_unit_test_teardown(a_small_step_after_a_large_one, restore),
        cmocka_unit_test_teardown(mixed_steps, restore),
        cmocka_unit_test_teardown(forks_copy_on_write_and_share, restore),
        cmocka_unit_test_teardown(tables_follow, restore),
        cmocka_unit_test_teardown(the_device_chooses_what_the_host_would, restore),
        cmocka_unit_test_teardown(many_outputs, restore),
        cmocka_unit_test_teardown(a_cancelled_step_ends_without_results, restore),
        cmocka_unit_test_teardown(a_lost_device_is_found_at_the_next_look, restore),
        cmocka_unit_test_teardown(every_call_of_a_step_can_fail, restore),
        cmocka_unit_test_teardown(a_failed_recording_is_no_error, restore),
        cmocka_unit_test_teardown(every_call_of_opening_can_fail, restore),
        cmocka_unit_test_teardown(too_little_memory_says_how_much, restore),
        cmocka_unit_test_teardown(cards_that_cannot_be_used_say_why, restore),
        cmocka_unit_test_teardown(attention_for_a_hosts_own_model, restore),
        cmocka_unit_test_teardown(attention_in_a_graph_of_the_hosts, restore),
        cmocka_unit_test_teardown(a_host_may_be_steps_ahead, restore),
        cmocka_unit_test_teardown(a_model_of_mixed_types, restore),
        cmocka_unit_test_teardown(models_and_shapes_that_cannot_be_placed, restore),
        cmocka_unit_test_teardown(every_allocation_can_be_refused, restore),
        cmocka_unit_test_teardown(a_done_that_takes_its_time, restore),
        cmocka_unit_test_teardown(whole_tables_of_a_hosts_own_model, restore),
        cmocka_unit_test_teardown(the_threads_floating_point_state_is_set_aside, restore),
        cmocka_unit_test_teardown(a_shared_prefix, restore),
        cmocka_unit_test_teardown(tables_are_sent_whole, restore),
        cmocka_unit_test_teardown(placing_tells_how_far_it_is_and_can_be_cancelled, restore),
        cmocka_unit_test_teardown(a_card_describes_itself, restore),
        cmocka_unit_test_teardown(memory_is_what_was_said, restore),
        cmocka_unit_test_teardown(a_step_on_a_stream_of_the_hosts, restore),
        cmocka_unit_test_teardown(a_card_lost_under_a_hosts_own_model, restore),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
