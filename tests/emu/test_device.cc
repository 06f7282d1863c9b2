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

/* Sequences that come, go and change places: tables are patched, or sent whole. */
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
        for (size_t i = 0; i < order.size(); i++) order[i] = seqs[(i + (size_t)t * 5) % seqs.size()];
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

static rig_sampling sampling(float temperature, int32_t top_k, float top_p, float min_p, uint64_t seed)
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
                                        "cuMemcpyDtoHAsync", "cuLaunchHostFunc", "cuCtxPushCurrent"};
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
            if (n == 1 && name[2] != 'C') assert_int_equal(s, name[2] == 'b' ? KVP_ERR_INTERNAL : KVP_ERR_DEVICE_LOST);
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
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
