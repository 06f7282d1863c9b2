/*
 * Whole models on the emulated device, through kvpage.h alone, as a host runs them: by the batch's
 * fd and its timeout. What comes out is held against the CPU device. Logits differ, since the GPU
 * computes with 16 bits; so tokens are the same up to the first place where the CPU's two likeliest
 * are nearly equal, and from there a sequence is not looked at any more (how often that happens is
 * counted, and may not be often).
 */
#include "tests/emu/driver.h"

#include <kvpage.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
extern "C" {
#include <cmocka.h>
#include "support/gguf_writer.h"
}

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include <poll.h>
#include <time.h>

namespace {

typedef std::vector<int32_t> tokens;

const float CLOSE = 2e-2f; /* of logits: max |a - b| / max |b| */
const uint64_t PATIENCE_NS = 120000000000u;

uint64_t now_ns()
{
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* --- a host --- */

const char *const timing_names[] = {"at once", "late", "on a thread"};

struct Host {
    emu_timing timing = EMU_AT_ONCE;
    const char *device = "cuda";
    uint32_t activations = 0;
    void *file = nullptr;
    kvp_model *model = nullptr;
    kvp_pool *pool = nullptr;
    kvp_batch *batch = nullptr;
    kvp_error err = {};

    kvp_status try_open(const gw_model &m, uint64_t blocks, const kvp_batch_options *options)
    {
        size_t bytes;
        kvp_model_options mo = {};
        mo.size = sizeof mo;
        mo.activations = activations;
        file = gw_tiny(&m, &bytes);
        err.size = sizeof err;
        kvp_status s = kvp_model_open_memory(file, bytes, &mo, &model, &err);
        return s == KVP_OK ? open_pool(blocks, options) : s;
    }

    kvp_status open_pool(uint64_t blocks, const kvp_batch_options *options)
    {
        kvp_pool_options p = {};
        p.size = sizeof p;
        p.device = device;
        p.blocks = blocks;
        err.size = sizeof err;
        kvp_status s = kvp_pool_create(model, &p, &pool, &err);
        return s == KVP_OK ? kvp_batch_create(pool, options, &batch, &err) : s;
    }

    void open(const gw_model &m, uint64_t blocks, uint32_t budget = 0)
    {
        kvp_batch_options o = {};
        o.size = sizeof o;
        o.token_budget = budget;
        o.max_sequences = 16;
        if (try_open(m, blocks, &o) != KVP_OK) fail_msg("%s: %s", device, err.text);
    }

    void close()
    {
        kvp_batch_destroy(batch);
        kvp_pool_destroy(pool);
        kvp_model_destroy(model);
        free(file);
        batch = nullptr;
        pool = nullptr;
        model = nullptr;
        file = nullptr;
    }

    bool on_gpu() const { return strcmp(device, "cpu") != 0; }

    /* Sleeps as poll does; where operations run in queries alone there is nothing to sleep for. */
    void sleep()
    {
        int32_t fd, timeout;
        assert_int_equal(kvp_batch_fd(batch, &fd), KVP_OK);
        assert_int_equal(kvp_batch_timeout_ms(batch, &timeout), KVP_OK);
        if (timing == EMU_LATE && on_gpu()) return;
        pollfd p = {fd, POLLIN, 0};
        int n = poll(&p, 1, timeout < 0 ? 10000 : timeout);
        if (timeout < 0 && n == 0) fail_msg("nothing made the fd readable");
    }
};

/* What a sequence is to do, and what came of it. */
struct User {
    tokens prompt;
    uint64_t length = 12;      /* tokens to generate */
    kvp_sampling sampling = {};
    bool forced = false;       /* the host appends `force`, and keeps the logits */
    tokens force;
    int fork_of = -1;          /* an earlier user, whose prompt is cut at fork_at */
    uint64_t fork_at = 0;

    tokens out;
    std::vector<float> gaps;   /* of the two likeliest, if asked for */
    std::vector<std::vector<float>> logits;
    kvp_usage usage = {};
    uint32_t ending = 0;
    kvp_seq *seq = nullptr;
};

void make_sequence(Host &h, std::vector<User> &users, size_t i)
{
    User &u = users[i];
    kvp_seq_options o = {};
    o.size = sizeof o;
    o.tag = i;
    o.max_tokens = u.forced ? 0 : u.length;
    o.eos = KVP_EOS_IGNORE;
    o.sampling = &u.sampling;
    u.sampling.size = sizeof u.sampling;
    if (u.forced) u.sampling.mode = KVP_SAMPLE_HOST;
    if (u.fork_of >= 0)
        assert_int_equal(kvp_seq_fork(users[(size_t)u.fork_of].seq, u.fork_at, &o, &u.seq, &h.err),
                         KVP_OK);
    else
        assert_int_equal(kvp_seq_create(h.pool, &o, &u.seq, &h.err), KVP_OK);
    if (!u.prompt.empty())
        assert_int_equal(kvp_seq_append(u.seq, u.prompt.data(), u.prompt.size()), KVP_OK);
}

void take_logits(User &u)
{
    const float *row;
    size_t n;
    assert_int_equal(kvp_seq_get_logits(u.seq, &row, &n), KVP_OK);
    u.logits.emplace_back(row, row + n);
    size_t i = u.logits.size() - 1;
    if (i < u.force.size())
        assert_int_equal(kvp_seq_append(u.seq, &u.force[i], 1), KVP_OK);
    else
        assert_int_equal(kvp_seq_cancel(u.seq), KVP_OK);
}

void take_events(Host &h, std::vector<User> &users, size_t &ended)
{
    kvp_event e = {};
    e.size = sizeof e;
    while (kvp_next_event(h.batch, &e) == KVP_OK) {
        User &u = users[e.tag];
        if (e.kind == KVP_EVENT_TOKEN) {
            u.out.push_back(e.token);
            if (e.n_top >= 2) u.gaps.push_back(e.top_logprobs[0] - e.top_logprobs[1]);
        } else if (e.kind == KVP_EVENT_LOGITS) {
            take_logits(u);
        } else if (e.kind == KVP_EVENT_ENDED) {
            u.ending = e.ending;
            u.usage = *e.usage;
            if (e.ending == KVP_END_FAILED) fail_msg("%s", kvp_status_text(e.status));
            ended++;
        }
    }
}

/* Those from `first` on, to their ends. */
void run(Host &h, std::vector<User> &users, size_t first = 0)
{
    size_t ended = 0;
    uint64_t start = now_ns();
    for (size_t i = first; i < users.size(); i++) {
        make_sequence(h, users, i);
        assert_int_equal(kvp_batch_add(h.batch, users[i].seq), KVP_OK);
    }
    while (ended < users.size() - first) {
        kvp_status s = kvp_step(h.batch);
        if (s < 0) {
            kvp_batch_last_error(h.batch, &h.err);
            fail_msg("%s: %s (%s)", h.device, h.err.text, emu_driver_message());
        }
        take_events(h, users, ended);
        if (s == KVP_AGAIN) h.sleep();
        if (now_ns() - start > PATIENCE_NS) fail_msg("no end in sight");
    }
    assert_int_equal(kvp_pool_check(h.pool), KVP_OK);
}

void drop(std::vector<User> &users)
{
    for (User &u : users) kvp_seq_destroy(u.seq);
}

tokens some_tokens(size_t n, uint64_t seed, uint32_t vocabulary = 64)
{
    tokens t(n);
    for (int32_t &x : t) x = (int32_t)(gw_rand(&seed) % vocabulary);
    return t;
}

gw_model tiny_model()
{
    gw_model m = {};
    m.head_dim = 64;
    m.width = 64;
    m.context = 512;
    m.tokenizer = 1;
    m.seed = 21;
    return m;
}

void install(Host &h, emu_timing timing)
{
    emu_driver_options o = {};
    o.timing = h.timing = timing;
    o.late_operations = 3;
    emu_install(&o);
}

void uninstall()
{
    assert_string_equal(emu_driver_message(), "");
    assert_string_equal(emu_driver_leaks(), "");
    emu_uninstall();
}

/* --- comparing --- */

float largest(const std::vector<float> &x)
{
    float m = 0;
    for (float v : x) m = std::max(m, std::fabs(v));
    return m;
}

float distance(const std::vector<float> &a, const std::vector<float> &b)
{
    float m = 0;
    assert_int_equal(a.size(), b.size());
    for (size_t i = 0; i < a.size(); i++) {
        if (!(std::fabs(a[i] - b[i]) <= 3e38f)) return INFINITY; /* NaN too */
        m = std::max(m, std::fabs(a[i] - b[i]));
    }
    return m / largest(b);
}

/* Of all users, how many came to a near-tie and went on by themselves. `cpu` has gaps. */
size_t same_but_for_near_ties(const std::vector<User> &gpu, const std::vector<User> &cpu)
{
    size_t ties = 0;
    for (size_t i = 0; i < gpu.size(); i++) {
        const tokens &a = gpu[i].out, &b = cpu[i].out;
        assert_int_equal(a.size(), b.size());
        size_t at = (size_t)(std::mismatch(a.begin(), a.end(), b.begin()).first - a.begin());
        if (at == a.size()) continue;
        /* Logits of these models are of order one to ten. */
        if (cpu[i].gaps.at(at) > 0.1f)
            fail_msg("user %zu, token %zu: %d, on the CPU %d by %g", i, at, a[at], b[at],
                     (double)cpu[i].gaps[at]);
        ties++;
    }
    return ties;
}

std::vector<User> greedy_users()
{
    std::vector<User> users(6);
    const size_t prompts[] = {1, 5, 16, 17, 40, 77};
    for (size_t i = 0; i < users.size(); i++) {
        users[i].prompt = some_tokens(prompts[i], i + 1);
        users[i].length = 10 + i;
    }
    return users;
}

/* The same on the CPU, with the gaps. Its 8-bit activations would be a difference of their own. */
std::vector<User> on_cpu(const gw_model &m, std::vector<User> users, uint32_t budget = 0)
{
    Host h;
    h.device = "cpu";
    h.activations = KVP_ACTIVATIONS_F32;
    for (User &u : users)
        if (!u.forced) u.sampling.top_logprobs = 2;
    h.open(m, 256, budget);
    run(h, users);
    drop(users);
    h.close();
    return users;
}

/* --- the same text --- */

void greedy_tokens_are_the_cpus(void **)
{
    const gw_model m = tiny_model();
    const std::vector<User> want = on_cpu(m, greedy_users(), 24);
    std::vector<User> first;
    for (emu_timing timing : {EMU_AT_ONCE, EMU_LATE, EMU_THREAD}) {
        Host h;
        std::vector<User> users = greedy_users();
        install(h, timing);
        h.open(m, 64, 24); /* chunks of prompts beside tokens of others */
        run(h, users);
        assert_true(same_but_for_near_ties(users, want) <= 1);
        /* When operations run changes nothing at all. */
        if (timing == EMU_AT_ONCE) first = users;
        for (size_t i = 0; i < users.size(); i++) assert_true(users[i].out == first[i].out);
        drop(users);
        h.close();
        uninstall();
    }
}

void logits_are_close(void **)
{
    static const char *const archs[] = {"llama", "qwen2", "qwen3", "gemma3"};
    for (const char *arch : archs)
        for (uint32_t type : {0u, 1u, 8u, 2u}) { /* F32, F16, Q8_0, Q4_0 */
            gw_model m = tiny_model();
            m.arch = arch;
            m.type = type;
            std::vector<User> users(2);
            for (size_t i = 0; i < users.size(); i++) {
                users[i].prompt = some_tokens(30 + 7 * i, 50 + i);
                users[i].forced = true;
                users[i].force = some_tokens(4, 60 + i);
            }
            const std::vector<User> want = on_cpu(m, users);
            Host h;
            install(h, EMU_AT_ONCE);
            h.open(m, 32);
            run(h, users);
            for (size_t i = 0; i < users.size(); i++)
                for (size_t k = 0; k < want[i].logits.size(); k++) {
                    float d = distance(users[i].logits.at(k), want[i].logits[k]);
                    if (!(d <= CLOSE))
                        fail_msg("%s, type %u, user %zu, row %zu: %g", arch, type, i, k, (double)d);
                }
            drop(users);
            h.close();
            uninstall();
        }
}

/* The token that the device draws is the one the host would have drawn from the same logits: with
 * log-probabilities asked for, kvp__sample chooses. */
void drawn_tokens_are_those_of_the_logits(void **)
{
    const gw_model m = tiny_model();
    for (int which = 0; which < 5; which++) {
        tokens got[2];
        for (int host = 0; host < 2; host++) {
            Host h;
            std::vector<User> users(1);
            kvp_sampling &s = users[0].sampling;
            install(h, EMU_AT_ONCE);
            h.open(m, 32);
            users[0].prompt = some_tokens(9, 5);
            users[0].length = 40;
            s.temperature = which == 0 ? 0 : 1.5f;
            s.seed = 77;
            if (which == 2) s.top_k = 5;
            if (which == 3) s.top_p = 0.7f;
            if (which == 4) s.min_p = 0.1f;
            s.logprobs = (uint32_t)host;
            run(h, users);
            got[host] = users[0].out;
            drop(users);
            h.close();
            uninstall();
        }
        assert_int_equal(got[0].size(), 40);
        assert_true(got[0] == got[1]);
    }
}

/* --- the cache --- */

/* Prompts that begin alike, found in the cache and as forks, cut inside blocks and at their ends.
 * */
void shared_prefixes_and_copies(void **)
{
    const gw_model m = tiny_model();
    std::vector<User> users(7);
    users[0].prompt = some_tokens(70, 9);
    for (size_t i = 1; i < users.size(); i++) users[i].prompt = some_tokens(3 + i, 90 + i);
    users[1].prompt.insert(users[1].prompt.begin(), users[0].prompt.begin(),
                           users[0].prompt.begin() + 50);
    users[2].prompt = users[0].prompt;
    for (size_t i = 3; i < users.size(); i++) {
        users[i].fork_of = 0;
        users[i].fork_at = i == 3 ? 70 : i == 4 ? 64 : i == 5 ? 33 : 1;
    }
    std::vector<User> cpu = users;
    Host h, c;
    c.device = "cpu";
    for (User &u : cpu) u.sampling.top_logprobs = 2;
    install(h, EMU_AT_ONCE);
    h.open(m, 64);
    c.open(m, 64);
    for (Host *host : {&h, &c}) {
        std::vector<User> &all = host == &h ? users : cpu;
        std::vector<User> lone(all.begin(), all.begin() + 1);
        run(*host, lone);
        all[0] = lone[0];
        run(*host, all, 1);
    }
    assert_true(same_but_for_near_ties(users, cpu) <= 1);
    kvp_pool_stats got = {}, want = {};
    got.size = want.size = sizeof got;
    assert_int_equal(kvp_pool_get_stats(h.pool, &got), KVP_OK);
    assert_int_equal(kvp_pool_get_stats(c.pool, &want), KVP_OK);
    assert_true(got.blocks_copied > 0);
    assert_int_equal(got.blocks_copied, want.blocks_copied);
    assert_int_equal(got.tokens_cached, want.tokens_cached);
    assert_int_equal(users[1].usage.cached, 50);
    assert_true(emu_driver_ran("copy_blocks") > 0);
    drop(users);
    drop(cpu);
    h.close();
    c.close();
    uninstall();
}

void preempted_and_resumed(void **)
{
    const gw_model m = tiny_model();
    std::vector<User> users(4);
    for (size_t i = 0; i < users.size(); i++) {
        users[i].prompt = some_tokens(24 + i, 30 + i);
        users[i].length = 40;
    }
    const std::vector<User> want = on_cpu(m, users);
    for (emu_timing timing : {EMU_AT_ONCE, EMU_LATE}) {
        std::vector<User> few = users;
        Host h;
        install(h, timing);
        h.open(m, 11); /* of 16 tokens: two of them, and not to their ends */
        run(h, few);
        kvp_pool_stats stats = {};
        stats.size = sizeof stats;
        assert_int_equal(kvp_pool_get_stats(h.pool, &stats), KVP_OK);
        assert_true(stats.preemptions > 0);
        assert_true(same_but_for_near_ties(few, want) <= 1);
        drop(few);
        h.close();
        uninstall();
    }
}

/* --- under a step in flight --- */

void a_host_changes_its_mind(void **)
{
    const gw_model m = tiny_model();
    Host h;
    std::vector<User> users(4);
    for (size_t i = 0; i < users.size(); i++) users[i].prompt = some_tokens(20 + i, 40 + i);
    const std::vector<User> want = on_cpu(m, users);
    install(h, EMU_THREAD);
    h.open(m, 64);
    for (size_t i = 0; i < users.size(); i++) {
        make_sequence(h, users, i);
        assert_int_equal(kvp_batch_add(h.batch, users[i].seq), KVP_OK);
    }
    emu_driver_hold(true);
    assert_int_equal(kvp_step(h.batch), KVP_AGAIN);
    for (int i = 0; i < 20; i++) assert_int_equal(kvp_step(h.batch), KVP_AGAIN);
    kvp_seq_destroy(users[0].seq);
    assert_int_equal(kvp_seq_cancel(users[1].seq), KVP_OK);
    assert_int_equal(kvp_seq_truncate(users[2].seq, 5), KVP_OK);
    assert_int_equal(kvp_pool_check(h.pool), KVP_OK);
    emu_driver_hold(false);
    size_t ended = 0;
    uint64_t start = now_ns();
    while (ended < 2) {
        kvp_status s = kvp_step(h.batch);
        assert_true(s >= 0);
        take_events(h, users, ended);
        if (s == KVP_AGAIN) h.sleep();
        if (now_ns() - start > PATIENCE_NS) fail_msg("no end in sight");
    }
    assert_int_equal(users[1].ending, KVP_END_CANCELLED);
    assert_true(users[1].out.empty());
    assert_true(users[2].out.empty());
    std::vector<User> last = {users[3]}, last_want = {want[3]};
    assert_true(same_but_for_near_ties(last, last_want) <= 1);
    users[0].seq = nullptr;
    /* And the batch under a step. */
    assert_int_equal(kvp_batch_add(h.batch, users[1].seq), KVP_OK);
    assert_true(kvp_step(h.batch) >= 0);
    kvp_batch_destroy(h.batch);
    h.batch = nullptr;
    assert_int_equal(kvp_pool_check(h.pool), KVP_OK);
    drop(users);
    h.close();
    uninstall();
}

/* Steps put work on the stream and never wait for it; one copy goes up and one comes down. */
void a_step_waits_for_nothing(void **)
{
    const gw_model m = tiny_model();
    Host h;
    std::vector<User> warm(3), users(3);
    install(h, EMU_THREAD);
    h.open(m, 64);
    for (size_t i = 0; i < users.size(); i++) warm[i].prompt = users[i].prompt = some_tokens(8, i);
    run(h, warm);
    kvp_batch_stats before = {}, after = {};
    before.size = after.size = sizeof before;
    kvp_batch_get_stats(h.batch, &before);
    emu_driver_counts a = emu_driver_counted();
    run(h, users);
    emu_driver_counts b = emu_driver_counted();
    kvp_batch_get_stats(h.batch, &after);
    uint64_t steps = after.steps - before.steps;
    assert_true(steps >= 12);
    assert_int_equal(b.waits, a.waits);
    assert_int_equal(b.pageable, a.pageable);
    assert_int_equal(b.memory, a.memory);
    assert_int_equal(b.uploads - a.uploads, steps);
    assert_int_equal(b.downloads - a.downloads, steps);
    assert_int_equal(b.host_functions - a.host_functions, steps);
    drop(warm);
    drop(users);
    h.close();
    uninstall();
}

/* --- what is missing, or lost --- */

void a_lost_device(void **)
{
    for (int when = 0; when < 2; when++) {
        Host h;
        std::vector<User> users(2);
        install(h, EMU_THREAD);
        h.open(tiny_model(), 64);
        for (size_t i = 0; i < users.size(); i++) {
            users[i].prompt = some_tokens(20, i);
            make_sequence(h, users, i);
            assert_int_equal(kvp_batch_add(h.batch, users[i].seq), KVP_OK);
        }
        if (when == 0) { /* in flight */
            emu_driver_hold(true);
            assert_int_equal(kvp_step(h.batch), KVP_AGAIN);
        }
        emu_driver_lose(KVP__CU_ILLEGAL_ADDRESS);
        int32_t timeout;
        uint64_t start = now_ns();
        kvp_status s = KVP_AGAIN;
        if (when == 0) {
            assert_int_equal(kvp_batch_timeout_ms(h.batch, &timeout), KVP_OK);
            assert_true(timeout >= 0 && timeout <= 100);
            h.sleep();
        }
        s = kvp_step(h.batch);
        assert_int_equal(s, KVP_ERR_DEVICE_LOST);
        assert_true(now_ns() - start < 1000000000u);
        kvp_batch_last_error(h.batch, &h.err);
        assert_string_equal(h.err.text, when == 0 ? "the device stopped working: a step: "
                                                    "CUDA_ERROR_ILLEGAL_ADDRESS (700)"
                                                  : "the device took no step: a copy of a step: "
                                                    "CUDA_ERROR_ILLEGAL_ADDRESS (700)");
        for (User &u : users) {
            kvp_seq_info info = {};
            info.size = sizeof info;
            assert_int_equal(kvp_seq_get_info(u.seq, &info), KVP_OK);
            assert_int_equal(info.length, 20);
            assert_int_equal(info.computed, 0);
        }
        assert_int_equal(kvp_pool_check(h.pool), KVP_OK);
        /* The same model goes on where it can. */
        std::vector<User> rest(1);
        Host c;
        c.device = "cpu";
        c.model = h.model;
        assert_int_equal(c.open_pool(64, nullptr), KVP_OK);
        rest[0].prompt = users[0].prompt;
        run(c, rest);
        assert_int_equal(rest[0].out.size(), 12);
        drop(rest);
        kvp_batch_destroy(c.batch);
        kvp_pool_destroy(c.pool);
        emu_driver_hold(false);
        drop(users);
        h.close();
        assert_string_equal(emu_driver_leaks(), "");
        emu_uninstall();
    }
}

/* A line that names what is missing; the model stays as it was, and the CPU takes it. */
void expect_no_device(const emu_driver_options &o, const char *device, const char *named)
{
    Host h;
    h.device = device;
    emu_install(&o);
    kvp_status s = h.try_open(tiny_model(), 16, nullptr);
    if (s != KVP_ERR_NO_DEVICE || !strstr(h.err.text, named))
        fail_msg("%s: %s, %s", device, kvp_status_name(s), h.err.text);
    kvp_device_info info = {};
    bool listed = false;
    info.size = sizeof info;
    for (uint32_t i = 0; kvp_device_get(i, &info) == KVP_OK; i++)
        listed = listed || (!strncmp(info.name, "cuda", 4) && info.description[0]);
    assert_true(listed);
    h.device = "cpu";
    assert_int_equal(h.open_pool(16, nullptr), KVP_OK);
    h.close();
    uninstall();
}

void devices_that_are_not_there(void **)
{
    emu_driver_options none = {}, old = {}, two = {};
    none.devices = -1;
    old.major = 7;
    old.minor = 5;
    two.devices = 2;
    expect_no_device(none, "cuda", "sees no card");
    expect_no_device(old, "cuda:0", "compute capability 7.5");
    expect_no_device(two, "cuda:2", "there are 2");
}

void memory_that_does_not_suffice(void **)
{
    emu_driver_options o = {};
    o.memory = 64u << 20;
    Host h;
    emu_install(&o);
    kvp_status s = h.try_open(tiny_model(), 100000, nullptr);
    assert_int_equal(s, KVP_ERR_NO_MEMORY);
    assert_true(h.err.needed > h.err.available);
    assert_true(h.err.available > 0 && h.err.available <= o.memory);
    assert_null(h.pool);
    /* What fits can be had afterwards. */
    kvp_batch_options small = {};
    small.size = sizeof small;
    small.token_budget = 16;
    small.max_sequences = 2;
    std::vector<User> users(1);
    users[0].prompt = some_tokens(5, 1);
    if (h.open_pool(8, &small) != KVP_OK) fail_msg("%s", h.err.text);
    run(h, users);
    assert_int_equal(users[0].out.size(), 12);
    drop(users);
    h.close();
    uninstall();
}

/* Every allocation fails once: an error, nothing kept, and the next attempt succeeds. */
void every_allocation_refused_once(void **)
{
    for (uint64_t n = 1;; n++) {
        Host h;
        install(h, EMU_AT_ONCE);
        emu_driver_fail("cuMemAlloc", n, KVP__CU_OUT_OF_MEMORY);
        kvp_status s = h.try_open(tiny_model(), 16, nullptr);
        bool failed = emu_driver_failed();
        emu_driver_fail("cuMemAlloc", 0, 0);
        if (failed) {
            assert_int_equal(s, KVP_ERR_NO_MEMORY);
            assert_null(h.batch);
            if (h.pool)
                s = kvp_batch_create(h.pool, nullptr, &h.batch, &h.err);
            else
                s = h.open_pool(16, nullptr);
        }
        if (s != KVP_OK) fail_msg("after refusal %llu: %s", (unsigned long long)n, h.err.text);
        h.close();
        assert_string_equal(emu_driver_leaks(), "");
        emu_uninstall();
        if (!failed) {
            assert_true(n > 3);
            return;
        }
    }
}

/* --- several devices --- */

void two_devices_and_the_cpu(void **)
{
    emu_driver_options o = {};
    o.devices = 2;
    emu_install(&o);
    std::vector<User> all[3];
    Host h;
    h.device = "cuda:1";
    h.open(tiny_model(), 32);
    const char *const names[] = {"cuda:1", "cuda:0", "cpu"};
    for (int i = 0; i < 3; i++) {
        Host d;
        d.device = names[i];
        d.model = h.model;
        assert_int_equal(d.open_pool(32, nullptr), KVP_OK);
        all[i] = std::vector<User>(2);
        all[i][0].prompt = some_tokens(12, 3);
        all[i][1].prompt = some_tokens(25, 4);
        for (User &u : all[i]) u.sampling.top_logprobs = 2;
        run(d, all[i]);
        drop(all[i]);
        kvp_batch_destroy(d.batch);
        kvp_pool_destroy(d.pool);
    }
    for (int i = 0; i < 2; i++) assert_true(all[0][(size_t)i].out == all[1][(size_t)i].out);
    assert_true(same_but_for_near_ties(all[0], all[2]) <= 1);
    h.close();
    uninstall();
}

/* --- a host that brings its own --- */

/* What a host with CUDA has: a context, a stream, memory. */
struct Cuda {
    const kvp__cuda_api *cu;
    kvp__cu_context context;
    kvp__cu_stream stream;

    Cuda()
    {
        cu = kvp__cuda_load()->cuda;
        assert_int_equal(cu->cuInit(0), 0);
        assert_int_equal(cu->cuDevicePrimaryCtxRetain(&context, 0), 0);
        assert_int_equal(cu->cuCtxPushCurrent(context), 0);
        assert_int_equal(cu->cuStreamCreate(&stream, KVP__CU_STREAM_NON_BLOCKING), 0);
    }

    ~Cuda()
    {
        cu->cuStreamDestroy(stream);
        cu->cuCtxPopCurrent(nullptr);
        cu->cuDevicePrimaryCtxRelease(0);
    }

    void *take(size_t bytes)
    {
        kvp__cu_ptr p;
        assert_int_equal(cu->cuMemAlloc(&p, bytes), 0);
        return (void *)(uintptr_t)p;
    }

    void give(void *p) { assert_int_equal(cu->cuMemFree((kvp__cu_ptr)(uintptr_t)p), 0); }

    void finish() { assert_int_equal(cu->cuStreamSynchronize(stream), 0); }
};

void what_the_library_was_built_with(void **)
{
    assert_int_equal(kvp_feature("cpu"), 1);
    emu_install(nullptr);
    assert_int_equal(kvp_feature("cuda"), 1);
    kvp__cuda_found bare = *kvp__cuda_load();
    bare.n_images = 0;
    kvp__cuda_use(&bare);
    assert_int_equal(kvp_feature("cuda"), 0);
    emu_uninstall();
}

int released;
void count_release(void *, void *) { released++; }

void a_slab_and_a_stream_of_the_hosts(void **)
{
    const gw_model m = tiny_model();
    Host h, want;
    std::vector<User> users(2), theirs(2);
    for (size_t i = 0; i < 2; i++) users[i].prompt = theirs[i].prompt = some_tokens(18 + i, i);
    install(h, EMU_LATE);
    want.timing = h.timing;
    want.open(m, 32);
    run(want, theirs);
    drop(theirs);
    {
        Cuda cuda;
        kvp_pool_options p = {};
        kvp_batch_options o = {};
        uint64_t bytes, align;
        p.size = sizeof p;
        p.device = "cuda";
        p.blocks = 32;
        o.size = sizeof o;
        o.stream = cuda.stream;
        assert_int_equal(kvp_pool_slab_size(want.model, &p, &bytes, &align, &h.err), KVP_OK);
        p.slab = cuda.take(bytes);
        p.slab_bytes = bytes;
        p.slab_released = count_release;
        released = 0;
        assert_true((uintptr_t)p.slab % align == 0);
        assert_int_equal(kvp_pool_create(want.model, &p, &h.pool, &h.err), KVP_OK);
        assert_int_equal(kvp_batch_create(h.pool, &o, &h.batch, &h.err), KVP_OK);
        /* All that a step consists of is on the host's stream: who waits for that waits for it. */
        kvp_seq_options so = {};
        kvp_seq *seq;
        so.size = sizeof so;
        so.max_tokens = 1;
        assert_int_equal(kvp_seq_create(h.pool, &so, &seq, nullptr), KVP_OK);
        assert_int_equal(kvp_seq_append(seq, users[0].prompt.data(), 3), KVP_OK);
        assert_int_equal(kvp_batch_add(h.batch, seq), KVP_OK);
        assert_int_equal(kvp_step(h.batch), KVP_AGAIN);
        assert_true(emu_driver_pending() > 0);
        cuda.finish();
        assert_int_equal(emu_driver_pending(), 0);
        assert_int_equal(kvp_step(h.batch), KVP_EVENTS);
        kvp_seq_destroy(seq);
        run(h, users);
        for (size_t i = 0; i < 2; i++) assert_true(users[i].out == theirs[i].out);
        drop(users);
        h.close();
        assert_int_equal(released, 1);
        cuda.finish(); /* it is still the host's */
        cuda.give(p.slab);
    }
    want.close();
    uninstall();
}

/* While the host records its stream, nothing is asked of it: a step that runs goes on running, one that
 * would begin is refused and comes later, and the recording stays good. An answer of the driver's that is
 * about something else ends nothing either. */
void a_recorded_stream_is_left_alone(void **)
{
    const gw_model m = tiny_model();
    Host h;
    install(h, EMU_LATE);
    {
        Cuda cuda;
        kvp_batch_options o = {};
        o.size = sizeof o;
        o.stream = cuda.stream;
        assert_int_equal(h.try_open(m, 32, &o), KVP_OK);
        for (int i = 0; i < 3; i++) {
            kvp_seq_options so = {};
            kvp_seq *seq;
            kvp__cu_graph graph = nullptr;
            tokens prompt = some_tokens(18, i);
            so.size = sizeof so;
            so.max_tokens = 4;
            assert_int_equal(kvp_seq_create(h.pool, &so, &seq, nullptr), KVP_OK);
            assert_int_equal(kvp_seq_append(seq, prompt.data(), prompt.size()), KVP_OK);
            assert_int_equal(kvp_batch_add(h.batch, seq), KVP_OK);
            if (i != 1) assert_int_equal(kvp_step(h.batch), KVP_AGAIN);
            if (i == 2) {
                emu_driver_fail("cuStreamQuery", 1, 906);
                assert_int_equal(kvp_step(h.batch), KVP_AGAIN);
            } else {
                const int mode = KVP__CU_CAPTURE_THREAD_LOCAL;
                assert_int_equal(cuda.cu->cuStreamBeginCapture(cuda.stream, mode), 0);
                kvp_status wanted = i == 0 ? KVP_AGAIN : KVP_ERR_UNSUPPORTED;
                assert_int_equal(kvp_step(h.batch), wanted);
                assert_int_equal(kvp_step(h.batch), wanted);
                assert_int_equal(cuda.cu->cuStreamEndCapture(cuda.stream, &graph), 0);
                assert_int_equal(cuda.cu->cuGraphDestroy(graph), 0);
            }
            uint32_t given = 0;
            kvp_event e = {};
            kvp_status s;
            e.size = sizeof e;
            do {
                s = kvp_step(h.batch);
                while (kvp_next_event(h.batch, &e) == KVP_OK) given += e.kind == KVP_EVENT_TOKEN;
            } while (s >= 0 && s != KVP_DONE);
            assert_int_equal(s, KVP_DONE);
            assert_int_equal(given, 4);
            kvp_seq_destroy(seq);
        }
        h.close();
    }
    uninstall();
}

/* --- an own model --- */

enum { OWN_LAYERS = 2, OWN_HEADS = 6, OWN_KV = 2, OWN_DIM = 64, OWN_ROWS = 20 };

typedef std::map<std::tuple<uint64_t, uint32_t, uint32_t>, std::vector<float>> own_results;

uint16_t to_16(float x, uint32_t type)
{
    if (type == KVP_KV_F16) {
        _Float16 h = (_Float16)x;
        uint16_t bits;
        memcpy(&bits, &h, 2);
        return bits;
    }
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float from_16(uint16_t bits, uint32_t type)
{
    if (type == KVP_KV_F16) {
        _Float16 h;
        memcpy(&h, &bits, 2);
        return (float)h;
    }
    uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
}

/* One of the four arrays of a step: floats, the same in the type that attention is given, and on a
 * GPU in its memory. */
struct Array {
    uint32_t type;
    std::vector<float> values;
    std::vector<uint8_t> packed;
    void *device = nullptr;

    void *where() { return device ? device : packed.data(); }
    void *memory() const
    {
        return emu_driver_memory((kvp__cu_ptr)(uintptr_t)device, packed.size());
    }

    Array(uint32_t t, size_t n) : type(t), values(n), packed(n * (t == KVP_KV_F32 ? 4 : 2)) {}

    void pack()
    {
        for (size_t i = 0; i < values.size(); i++) {
            if (type == KVP_KV_F32) memcpy(&packed[i * 4], &values[i], 4);
            else {
                uint16_t h = to_16(values[i], type);
                memcpy(&packed[i * 2], &h, 2);
            }
        }
        if (device) memcpy(memory(), packed.data(), packed.size());
    }

    void unpack()
    {
        if (device) memcpy(packed.data(), memory(), packed.size());
        for (size_t i = 0; i < values.size(); i++) {
            if (type == KVP_KV_F32) memcpy(&values[i], &packed[i * 4], 4);
            else {
                uint16_t h;
                memcpy(&h, &packed[i * 2], 2);
                values[i] = from_16(h, type);
            }
        }
    }
};

/* Queries, keys and values depend on token, position and layer alone. */
void fill(std::vector<float> &x, const kvp_view &v, uint32_t layer, uint32_t what, size_t each)
{
    for (uint32_t r = 0; r < v.n_rows; r++) {
        uint64_t s = ((uint64_t)v.tokens[r] * 1000 + v.positions[r]) * 64 + layer * 4 + what + 1;
        for (size_t i = 0; i < each; i++) x[r * each + i] = gw_uniform(&s) * 1.7f;
    }
}

/* A layer's arrays, which stay where they are, and the graph that attends to them. */
struct Layer {
    std::vector<Array> arrays; /* q, k, v, out: of the largest step */
    kvp__cu_graph_exec exec = nullptr;
    uint32_t most = 0; /* rows that it may be launched for */
};

struct Own {
    kvp_model *model;
    kvp_pool *pool;
    kvp_batch *batch;
    Cuda *cuda;    /* NULL: on the CPU */
    uint32_t type;
    bool graphs;   /* attention of steps that only generate is captured, and then replayed */
    uint32_t captured, replayed;
    Layer layers[OWN_LAYERS];
    own_results out;

    void take_arrays()
    {
        const size_t heads[] = {OWN_HEADS, OWN_KV, OWN_KV, OWN_HEADS};
        for (Layer &l : layers)
            for (size_t n : heads) {
                l.arrays.emplace_back(type, OWN_ROWS * n * OWN_DIM);
                if (cuda) l.arrays.back().device = cuda->take(l.arrays.back().packed.size());
            }
    }

    void give_arrays()
    {
        for (Layer &l : layers) {
            if (l.exec) assert_int_equal(cuda->cu->cuGraphExecDestroy(l.exec), 0);
            for (Array &a : l.arrays)
                if (cuda) cuda->give(a.device);
        }
    }

    void call(uint32_t layer)
    {
        kvp_attention_args a = {};
        kvp_error err = {};
        std::vector<Array> &x = layers[layer].arrays;
        a.size = sizeof a;
        err.size = sizeof err;
        a.type = type;
        a.q = x[0].where();
        a.k = x[1].where();
        a.v = x[2].where();
        a.out = x[3].where();
        if (kvp_attention(batch, layer, &a) == KVP_OK) return;
        kvp_batch_last_error(batch, &err);
        fail_msg("%s", err.text);
    }

    void capture(const kvp_view &v, uint32_t layer)
    {
        const kvp__cuda_api *cu = cuda->cu;
        Layer &l = layers[layer];
        kvp__cu_graph graph;
        if (l.exec) assert_int_equal(cu->cuGraphExecDestroy(l.exec), 0);
        assert_int_equal(cu->cuStreamBeginCapture(cuda->stream, KVP__CU_CAPTURE_THREAD_LOCAL), 0);
        call(layer);
        assert_int_equal(cu->cuStreamEndCapture(cuda->stream, &graph), 0);
        assert_int_equal(cu->cuGraphInstantiateWithFlags(&l.exec, graph, 0), 0);
        assert_int_equal(cu->cuGraphDestroy(graph), 0);
        for (l.most = 1; l.most < v.n_rows;) l.most *= 2;
        captured++;
    }

    void attend(const kvp_view &v, uint32_t layer)
    {
        Layer &l = layers[layer];
        fill(l.arrays[0].values, v, layer, 0, OWN_HEADS * OWN_DIM);
        fill(l.arrays[1].values, v, layer, 1, OWN_KV * OWN_DIM);
        fill(l.arrays[2].values, v, layer, 2, OWN_KV * OWN_DIM);
        for (size_t i = 0; i < 3; i++) l.arrays[i].pack();
        if (!graphs || v.n_rows != v.n_sequences) {
            call(layer);
        } else {
            if (v.n_rows > l.most) capture(v, layer);
            else replayed++;
            assert_int_equal(cuda->cu->cuGraphLaunch(l.exec, cuda->stream), 0);
        }
        if (cuda) cuda->finish();
        l.arrays[3].unpack();
        for (uint32_t r = 0; r < v.n_rows; r++) {
            const float *row = &l.arrays[3].values[(size_t)r * OWN_HEADS * OWN_DIM];
            out[{v.tags[v.row_sequence[r]], v.positions[r], layer}].assign(
                row, row + OWN_HEADS * OWN_DIM);
        }
    }

    void step(const kvp_view &v)
    {
        tokens chosen(v.n_outputs);
        for (uint32_t l = 0; l < OWN_LAYERS; l++) attend(v, OWN_LAYERS - 1 - l);
        for (uint32_t i = 0; i < v.n_outputs; i++) {
            uint32_t r = v.outputs[i];
            chosen[i] = (v.tokens[r] * 31 + (int32_t)v.positions[r] * 7) % 1000;
        }
        assert_int_equal(kvp_commit(batch, chosen.data(), chosen.size()), KVP_OK);
    }
};

/* Two sequences and a fork in the middle of a block; the second group has a window. */
own_results own_run(Cuda *cuda, uint32_t type, bool graphs)
{
    kvp_layer_group groups[2] = {};
    for (kvp_layer_group &g : groups) {
        g.layers = 1;
        g.kv_heads = OWN_KV;
        g.query_heads = OWN_HEADS;
        g.key_dim = g.value_dim = OWN_DIM;
    }
    groups[1].window = 12;
    kvp_geometry g = {};
    g.size = sizeof g;
    g.n_groups = 2;
    g.groups = groups;
    kvp_pool_options p = {};
    p.size = sizeof p;
    p.blocks = 32;
    p.device = cuda ? "cuda" : "cpu";
    if (type == KVP_KV_BF16) p.k_format = p.v_format = KVP_KV_BF16;
    kvp_batch_options b = {};
    b.size = sizeof b;
    b.token_budget = OWN_ROWS;
    b.stream = cuda ? cuda->stream : nullptr;
    Own own = {};
    own.cuda = cuda;
    own.type = cuda ? type : (uint32_t)KVP_KV_F32;
    own.graphs = graphs;
    kvp_error err = {};
    err.size = sizeof err;
    kvp_seq *seqs[3] = {};
    own.take_arrays();
    assert_int_equal(kvp_model_create(&g, nullptr, &own.model, nullptr), KVP_OK);
    if (kvp_pool_create(own.model, &p, &own.pool, &err) != KVP_OK) fail_msg("%s", err.text);
    if (kvp_batch_create(own.pool, &b, &own.batch, &err) != KVP_OK) fail_msg("%s", err.text);
    for (uint64_t i = 0; i < 2; i++) {
        kvp_seq_options o = {};
        o.size = sizeof o;
        o.tag = i;
        o.max_tokens = 8;
        tokens prompt = some_tokens(27 + 11 * i, i + 70, 1000);
        assert_int_equal(kvp_seq_create(own.pool, &o, &seqs[i], nullptr), KVP_OK);
        assert_int_equal(kvp_seq_append(seqs[i], prompt.data(), prompt.size()), KVP_OK);
        assert_int_equal(kvp_batch_add(own.batch, seqs[i]), KVP_OK);
    }
    for (int forked = 0;;) {
        kvp_status s = kvp_step(own.batch);
        kvp_event e = {};
        kvp_view v = {};
        e.size = sizeof e;
        v.size = sizeof v;
        while (kvp_next_event(own.batch, &e) == KVP_OK) continue;
        if (s == KVP_PLANNED) {
            assert_int_equal(kvp_batch_get_view(own.batch, &v), KVP_OK);
            own.step(v);
            continue;
        }
        if (s < 0) {
            kvp_batch_last_error(own.batch, &err);
            fail_msg("%s", err.text);
        }
        if (s != KVP_DONE) continue;
        if (forked) break;
        kvp_seq_options o = {};
        o.size = sizeof o;
        o.tag = 2;
        tokens more = some_tokens(5, 99, 1000);
        assert_int_equal(kvp_seq_fork(seqs[0], 21, &o, &seqs[2], nullptr), KVP_OK);
        assert_int_equal(kvp_seq_append(seqs[2], more.data(), more.size()), KVP_OK);
        assert_int_equal(kvp_batch_add(own.batch, seqs[2]), KVP_OK);
        forked = 1;
    }
    for (kvp_seq *seq : seqs) kvp_seq_destroy(seq);
    kvp_batch_destroy(own.batch);
    kvp_pool_destroy(own.pool);
    kvp_model_destroy(own.model);
    own.give_arrays();
    if (graphs) assert_true(own.captured >= OWN_LAYERS && own.replayed >= 4 * OWN_LAYERS);
    return own.out;
}

void an_own_model_attends_to_device_memory(void **)
{
    for (uint32_t type : {KVP_KV_F32, KVP_KV_F16, KVP_KV_BF16}) {
        const own_results want = own_run(nullptr, type, false);
        assert_true(want.size() > 2 * (27 + 38));
        for (int graphs = 0; graphs < 2; graphs++) {
            Host h;
            install(h, graphs ? EMU_AT_ONCE : EMU_THREAD);
            {
                Cuda cuda;
                const own_results got = own_run(&cuda, type, graphs != 0);
                assert_int_equal(got.size(), want.size());
                for (const auto &[at, row] : want) {
                    float d = distance(got.at(at), row);
                    if (!(d <= CLOSE))
                        fail_msg("type %u, sequence %llu, position %u, layer %u: %g", type,
                                 (unsigned long long)std::get<0>(at), std::get<1>(at),
                                 std::get<2>(at), (double)d);
                }
            }
            uninstall();
        }
    }
}

/* --- a real model --- */

void smollm2(void **)
{
    const char *path = getenv("KVPAGE_TEST_SMOLLM2");
    if (!path || !*path) skip();
    static const char text[] = "The capital of France is";
    std::vector<std::vector<float>> logits[2];
    tokens forced;
    for (int gpu = 0; gpu < 2; gpu++) {
        Host h;
        install(h, EMU_AT_ONCE);
        h.device = gpu ? "cuda" : "cpu";
        h.err.size = sizeof h.err;
        kvp_batch_options o = {};
        o.size = sizeof o;
        o.token_budget = 16;
        o.max_sequences = 2;
        kvp_model_options mo = {};
        mo.size = sizeof mo;
        mo.activations = KVP_ACTIVATIONS_F32;
        assert_int_equal(kvp_model_open(path, &mo, &h.model, &h.err), KVP_OK);
        if (h.open_pool(8, &o) != KVP_OK) fail_msg("%s", h.err.text);
        std::vector<User> users(1);
        size_t n = 0;
        tokens prompt(64);
        assert_int_equal(kvp_tokenize(h.model, text, strlen(text), KVP_TOKENIZE_SPECIAL_START,
                                      prompt.data(), prompt.size(), &n, nullptr), KVP_OK);
        prompt.resize(n);
        if (!gpu) { /* what the CPU says goes on */
            users[0].prompt = prompt;
            users[0].length = 5;
            run(h, users);
            forced = users[0].out;
            drop(users);
            users = std::vector<User>(1);
        }
        users[0].prompt = prompt;
        users[0].forced = true;
        users[0].force = forced;
        run(h, users);
        logits[gpu] = users[0].logits;
        drop(users);
        h.close();
        uninstall();
    }
    assert_int_equal(logits[1].size(), forced.size() + 1);
    for (size_t i = 0; i < logits[0].size(); i++) {
        float d = distance(logits[1][i], logits[0][i]);
        if (!(d <= CLOSE)) fail_msg("row %zu: %g", i, (double)d);
        int32_t best = (int32_t)(std::max_element(logits[1][i].begin(), logits[1][i].end()) -
                                 logits[1][i].begin());
        if (i < forced.size()) assert_int_equal(best, forced[i]);
    }
}

}

int main()
{
    const CMUnitTest tests[] = {
        cmocka_unit_test(greedy_tokens_are_the_cpus),
        cmocka_unit_test(logits_are_close),
        cmocka_unit_test(drawn_tokens_are_those_of_the_logits),
        cmocka_unit_test(shared_prefixes_and_copies),
        cmocka_unit_test(preempted_and_resumed),
        cmocka_unit_test(a_host_changes_its_mind),
        cmocka_unit_test(a_step_waits_for_nothing),
        cmocka_unit_test(a_lost_device),
        cmocka_unit_test(devices_that_are_not_there),
        cmocka_unit_test(memory_that_does_not_suffice),
        cmocka_unit_test(every_allocation_refused_once),
        cmocka_unit_test(two_devices_and_the_cpu),
        cmocka_unit_test(what_the_library_was_built_with),
        cmocka_unit_test(a_slab_and_a_stream_of_the_hosts),
        cmocka_unit_test(a_recorded_stream_is_left_alone),
        cmocka_unit_test(an_own_model_attends_to_device_memory),
        cmocka_unit_test(smollm2),
    };
    return cmocka_run_group_tests_name("emu/engine", tests, nullptr, nullptr);
}
