/*
 * The emulator itself: what it computes against plain definitions, under every schedule and timing
 * of copies; and each mistake that it must report, by its message. Races are asked for in the build
 * whose kernels report loads and stores; the other build shows that it finds what it can without.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
extern "C" {
#include <cmocka.h>
}
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <thread>
#include <vector>

#include "lib/base/half.h"
#include "tests/emu/emu.h"
#include "tests/emu/probe.h"

#if defined(__SANITIZE_ADDRESS__)
#define UNDER_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define UNDER_ASAN 1
#endif
#endif
#ifndef UNDER_ASAN
#define UNDER_ASAN 0
#endif

/* --- helpers --- */

static uint32_t random32(uint64_t *state)
{
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(*state >> 33);
}

/* Memory of the emulator that is freed, and found unharmed, at the end of a test. */
template <class T> struct buffer {
    T *p;
    size_t n;
    explicit buffer(size_t count) : p(static_cast<T *>(emu_alloc(count * sizeof(T)))), n(count)
    {
        assert_non_null(p);
    }
    ~buffer() { assert_int_equal(emu_free(p), 0); }
    T &operator[](size_t i) { return p[i]; }
    void clear() { memset(p, 0, n * sizeof(T)); }
};

static void set(int schedule, int copies, uint64_t seed)
{
    emu_options o = {};
    o.schedule = static_cast<emu_schedule>(schedule);
    o.copies = static_cast<emu_copies>(copies);
    o.seed = seed;
    o.seconds = 60;
    emu_set(&o);
}

static const char *launch(const char *kernel, uint32_t blocks, uint32_t threads, size_t shared,
                          const void *in, void *out, uint32_t n, uint32_t mode = PROBE_RIGHT)
{
    probe_args a = {in, out, n, mode};
    return emu_launch(kernel, blocks, 1, 1, threads, shared, &a);
}

static void expect_ok(const char *message)
{
    if (message) fail_msg("%s", message);
}

static void expect(const char *message, const char *part)
{
    if (!message) fail_msg("nothing was reported; wanted: %s", part);
    if (!strstr(message, part)) fail_msg("wanted \"%s\" in: %s", part, message);
}

/* Every schedule, the random one with several seeds, times every timing of copies. */
template <class F> static void every_way(F f)
{
    for (int schedule = 0; schedule < EMU_SCHEDULES; schedule++)
        for (int copies = 0; copies < EMU_COPIES; copies++)
            for (uint64_t seed = 1; seed <= (schedule == EMU_RANDOM ? 4 : 1); seed++) {
                set(schedule, copies, seed);
                f();
            }
    set(EMU_FORWARD, EMU_AT_ISSUE, 0);
}

/* A mistake is reported under every schedule in the race build. Without it, under at least one it
 * is seen in the values: `f` gives whether they were wrong. */
template <class F> static void always_a_race(const char *part, F run)
{
    int wrong = 0;
    every_way([&] {
        bool bad = false;
        const char *m = run(&bad);
        if (emu_race_build()) {
            expect(m, "race: ");
            expect(m, part);
        } else {
            expect_ok(m);
            wrong += bad;
        }
    });
    if (!emu_race_build()) assert_true(wrong > 0);
}

/* --- barriers, shared memory --- */

struct pass {
    buffer<float> in{256}, out{256};
    pass()
    {
        for (size_t i = 0; i < in.n; i++) in[i] = (float)(i * i % 1009);
    }
    const char *run(uint32_t mode, bool *wrong)
    {
        const char *m = launch("probe_pass", 2, 128, 512, in.p, out.p, 33, mode);
        *wrong = false;
        for (size_t i = 0; i < 256 && !m; i++) {
            size_t block = i / 128 * 128, one = block + (i % 128 + 33) % 128,
                   two = block + (i % 128 + 66) % 128;
            if (out[i] != in[one] + 2.0f * in[two]) *wrong = true;
        }
        return m;
    }
};

static void barriers_order_shared_memory(void **)
{
    pass p;
    every_way([&] {
        bool wrong;
        expect_ok(p.run(PROBE_RIGHT, &wrong));
        assert_false(wrong);
    });
}

static void a_missing_barrier_is_found(void **)
{
    pass p;
    always_a_race("no barrier lies between",
                  [&](bool *wrong) { return p.run(PROBE_NO_BARRIER, wrong); });
    always_a_race("no barrier lies between",
                  [&](bool *wrong) { return p.run(PROBE_NO_SECOND_BARRIER, wrong); });
    if (!emu_race_build()) return;
    bool wrong;
    const char *m = p.run(PROBE_NO_SECOND_BARRIER, &wrong);
    expect(m, "probe_pass, block (0, 0, 0): race: thread ");
    expect(m, "(probe.cu:");
}

static void syncwarp_orders_a_warp(void **)
{
    buffer<float> in(64), out(64);
    for (size_t i = 0; i < 64; i++) in[i] = (float)i;
    auto run = [&](uint32_t mode, bool *wrong) {
        const char *m = launch("probe_warp", 1, 64, 256, in.p, out.p, 7, mode);
        *wrong = false;
        for (size_t i = 0; i < 64 && !m; i++)
            if (out[i] != (float)(i / 32 * 32 + (i + 7) % 32)) *wrong = true;
        return m;
    };
    every_way([&] {
        bool wrong;
        expect_ok(run(PROBE_RIGHT, &wrong));
        assert_false(wrong);
    });
    always_a_race("no barrier lies between",
                  [&](bool *wrong) { return run(PROBE_NO_BARRIER, wrong); });
}

static void bytes_have_their_own_past(void **)
{
    buffer<uint32_t> out(64);
    auto run = [&](uint32_t mode, bool *wrong) {
        out.clear();
        const char *m = launch("probe_bytes", 1, 64, 64, nullptr, out.p, 0, mode);
        *wrong = false;
        for (uint32_t t = 0; t < 64 && !m; t++) {
            uint32_t first = t / 4 * 4, half = t / 2 * 2;
            uint32_t word = first | (first + 1) << 8 | (first + 2) << 16 | (first + 3) << 24;
            if (out[t] != word + (3 * half | 3 * (half + 1) << 16)) *wrong = true;
        }
        return m;
    };
    every_way([&] {
        bool wrong;
        expect_ok(run(PROBE_RIGHT, &wrong));
        assert_false(wrong);
    });
    always_a_race("no barrier lies between", [&](bool *w) { return run(PROBE_NO_BARRIER, w); });
    if (emu_race_build())
        always_a_race("global memory", [&](bool *w) { return run(PROBE_NO_SECOND_BARRIER, w); });
    if (emu_race_build())
        always_a_race("shared memory", [&](bool *w) { return run(PROBE_WRITTEN_BEFORE, w); });
}

/* The one who writes may be the one who read first, or last, or one of the others. */
static void many_readers_and_a_writer(void **)
{
    buffer<uint32_t> out(128);
    for (uint32_t writer : {0u, 1u, 64u, 126u, 127u})
        every_way([&] {
            expect_ok(launch("probe_broadcast", 1, 128, 4, nullptr, out.p, writer));
            for (unsigned t = 0; t < 128; t++) assert_int_equal(out[t], 7);
            const char *m =
                launch("probe_broadcast", 1, 128, 4, nullptr, out.p, writer, PROBE_NO_BARRIER);
            if (emu_race_build()) expect(m, "race: ");
            else expect_ok(m);
            /* All have read before the write, and yet nothing orders them. */
            m = launch("probe_broadcast", 1, 32, 4, nullptr, out.p, writer % 32,
                       PROBE_NO_SECOND_BARRIER);
            if (emu_race_build()) expect(m, "has read; no barrier lies between");
            else expect_ok(m);
        });
}

/* The end is exact to the byte, and a multiple of nothing. */
static void shared_memory_ends_where_it_ends(void **)
{
    if (UNDER_ASAN) skip();
    pass p;
    bool wrong;
    every_way([&] {
        expect(p.run(PROBE_OUTSIDE_SHARED, &wrong), "shared memory at offset 512 of 512 bytes");
        const char *m = p.run(PROBE_BEFORE_SHARED, &wrong);
        expect(m, emu_race_build() ? "shared memory at offset -4 of 512"
                                   : "written before its beginning");
        m = launch("probe_pass", 1, 128, 508, p.in.p, p.out.p, 1);
        expect(m, "shared memory");
        expect(m, "offset 508 of 508");
    });
}

static void shared_memory_is_nan_before_each_block(void **)
{
    buffer<float> in(64), out(64);
    in.clear();
    set(EMU_FORWARD, EMU_AT_WAIT, 0);
    if (emu_race_build()) return; /* what it does to see this is a race */
    for (int round = 0; round < 2; round++) {
        expect_ok(launch("probe_warp", 1, 64, 256, in.p, out.p, 1, PROBE_NO_BARRIER));
        assert_true(isnan(out[0]));
    }
    set(EMU_FORWARD, EMU_AT_ISSUE, 0);
}

/* --- global memory --- */

static void global_memory_ends_where_it_ends(void **)
{
    if (UNDER_ASAN) skip();
    pass p;
    bool wrong;
    const char *m = p.run(PROBE_OUTSIDE_GLOBAL, &wrong);
    expect(m, "thread 127: access to global memory at offset 1024 of an allocation of 1024 bytes");
    expect(m, "(probe.cu:");
    for (size_t bytes : {1, 255, 256, 4095, 4096, 4097, 70000}) {
        char *q = static_cast<char *>(emu_alloc(bytes));
        assert_int_equal((uintptr_t)q % 256, 0);
        assert_true(emu_valid(q, bytes));
        assert_false(emu_valid(q, bytes + 1));
        assert_false(emu_valid(q - 1, 1));
        assert_false(emu_valid(q + bytes, 1));
        for (size_t i = 0; i < bytes; i++) assert_int_equal((unsigned char)q[i], 0xff);
        if (bytes % 256) q[bytes] = 0;
        assert_int_equal(emu_free(q), bytes % 256 ? -1 : 0);
        assert_false(emu_valid(q, 1));
        assert_int_equal(emu_free(q), -1);
    }
    const size_t far = (size_t)6 << 30; /* costs what is touched */
    char *q = static_cast<char *>(emu_alloc_sparse(far));
    q[far - 1] = 1;
    assert_true(emu_valid(q, far));
    assert_int_equal(emu_free(q), 0);
    assert_null(emu_alloc((size_t)1 << 50));
}

static void memory_that_is_none(void **)
{
    if (UNDER_ASAN) skip();
    buffer<uint32_t> out(64);
    every_way([&] {
        expect(launch("probe_lost", 1, 64, 0, nullptr, out.p, 0, PROBE_NULL), "which is no memory");
    });
    expect(launch("probe_lost", 1, 64, 0, nullptr, out.p, 0, PROBE_DEEP), "its stack is full");
    expect_ok(launch("probe_lost", 1, 64, 0, nullptr, out.p, 0, PROBE_RIGHT));
    uint32_t *freed = static_cast<uint32_t *>(emu_alloc(256));
    assert_int_equal(emu_free(freed), 0);
    expect(launch("probe_lost", 1, 64, 0, nullptr, freed, 0, PROBE_RIGHT), "thread ");
}

static void loads_of_16_bytes(void **)
{
    buffer<uint32_t> in(4 * 192), out(4 * 192);
    for (size_t i = 0; i < in.n; i++) in[i] = (uint32_t)(i * i);
    emu_stats_reset();
    expect_ok(launch("probe_load", 3, 64, 0, in.p, out.p, 0));
    for (size_t i = 0; i < 192; i++)
        assert_int_equal(out[i], in[4 * i] + in[4 * i + 1] + in[4 * i + 2] + in[4 * i + 3]);
    assert_int_equal(emu_stats_get().loaded, 192 * 16);
    expect(launch("probe_load", 3, 64, 0, in.p, out.p, 0, PROBE_MISALIGNED_GLOBAL),
           "load16, probe.cu:");
    expect(launch("probe_load", 3, 64, 0, in.p, out.p, 0, PROBE_MISALIGNED_GLOBAL), "misaligned");
    expect(launch("probe_load", 3, 64, 0, in.p, out.p, 0, PROBE_OUTSIDE_GLOBAL),
           "offset 3072 of an allocation of 3072 bytes");
    if (emu_race_build())
        expect(launch("probe_load", 3, 64, 0, in.p, out.p, 0, PROBE_WRITTEN_BEFORE),
               "load16 is for what the grid does not write");
}

static void blocks_of_a_grid_race(void **)
{
    buffer<uint32_t> out(2 + 64 * 5);
    every_way([&] {
        out.clear();
        const char *m = launch("probe_order", 5, 64, 0, nullptr, out.p, 0, PROBE_WRITTEN_BEFORE);
        if (emu_race_build()) {
            expect(m, "race: thread 0 writes global memory at offset 1284");
            expect(m, " of block ");
        } else {
            expect_ok(m);
        }
        /* Another grid may do it: they run one after the other. */
        out.clear();
        expect_ok(launch("probe_order", 1, 64, 0, nullptr, out.p, 0, PROBE_WRITTEN_BEFORE));
        out.clear();
        expect_ok(launch("probe_order", 1, 64, 0, nullptr, out.p, 0, PROBE_WRITTEN_BEFORE));
    });
}

/* --- lanes together --- */

static void shuffles_and_votes(void **)
{
    buffer<uint32_t> in(32), out(320);
    uint64_t state = 7;
    every_way([&] {
        for (uint32_t by : {0u, 1u, 3u, 16u, 17u, 31u}) {
            uint32_t bits = 0;
            bool any = false, all = true;
            for (unsigned i = 0; i < 32; i++) {
                in[i] = random32(&state) % 40;
                bits |= (in[i] & 1) << i;
                any |= in[i] == by;
                all &= in[i] >= by;
            }
            expect_ok(launch("probe_lanes", 1, 32, 0, in.p, out.p, by));
            for (unsigned i = 0; i < 32; i++) {
                const uint32_t *o = &out[i * 10];
                assert_int_equal(o[0], in[by]);
                assert_int_equal(o[1], in[i ^ by]);
                assert_int_equal(o[2], in[i >= by ? i - by : i]);
                assert_int_equal(o[3], in[i + by < 32 ? i + by : i]);
                assert_int_equal(o[4], bits);
                assert_int_equal(o[5], any);
                assert_int_equal(o[6], all);
                assert_int_equal(o[7], in[i ^ 5]);
                assert_int_equal(o[8], in[i ^ 3]);
                assert_int_equal(o[9], in[i + 1 < 32 ? i + 1 : i]);
            }
        }
    });
}

static void parts_of_a_warp_meet_by_masks(void **)
{
    buffer<uint32_t> out(32);
    every_way([&] {
        expect_ok(launch("probe_masks", 1, 32, 0, nullptr, out.p, 0));
        uint32_t sum[32], votes = 0;
        for (uint32_t i = 0; i < 16; i++) {
            auto first = [](uint32_t lane) { return (lane ^ 1) * (lane ^ 1); };
            sum[i] = first(i) + first(i ^ 2);
        }
        for (uint32_t i = 16; i < 32; i++) votes |= (uint32_t)((i * i & 3) == 1) << i;
        for (uint32_t i = 0; i < 32; i++)
            assert_int_equal(out[i], i < 16 ? votes : sum[i ^ 31]);
    });
    expect(launch("probe_masks", 1, 32, 0, nullptr, out.p, 0, PROBE_NOT_IN_MASK),
           "lane 0 is not in its own mask 0x0000fffe");
    expect(launch("probe_masks", 1, 32, 0, nullptr, out.p, 0, PROBE_SOURCE_NOT_IN_MASK),
           "reads lane 16, which is not in the mask 0x0000ffff");
}

static void named_barriers(void **)
{
    buffer<float> out(128);
    auto run = [&](uint32_t mode, bool *wrong) {
        const char *m = launch("probe_named", 1, 128, 256, nullptr, out.p, 5, mode);
        *wrong = false;
        for (unsigned t = 64; t < 128 && !m; t++) {
            float sum = 0;
            for (unsigned i = 0; i < 5; i++) sum += (float)(i * 64 + 127 - t);
            if (out[t] != sum) *wrong = true;
        }
        return m;
    };
    bool wrong;
    every_way([&] {
        expect_ok(run(PROBE_RIGHT, &wrong));
        assert_false(wrong);
        expect(run(PROBE_NO_SUCH_BARRIER, &wrong), "there is no barrier 16");
        expect(run(PROBE_COUNTS_DIFFER, &wrong), "threads, but at probe.cu:");
        const char *m = run(PROBE_NOBODY_COMES, &wrong);
        expect(m, "deadlock: 128 threads never leave");
        expect(m, "bar_sync 1, probe.cu:");
        expect(m, "__syncthreads, probe.cu:");
    });
    always_a_race("no barrier lies between",
                  [&](bool *w) { return run(PROBE_NO_BARRIER, w); });
    /* A barrier orders those who were there, and nobody else. */
    if (emu_race_build())
        always_a_race("no barrier lies between", [&](bool *w) { return run(PROBE_WARPS_PART, w); });
}

static void threads_that_do_not_meet(void **)
{
    buffer<uint32_t> out(128);
    every_way([&] {
        const char *m = launch("probe_meet", 1, 128, 0, nullptr, out.p, 0, PROBE_LANES_PART);
        expect(m, "divergence: thread ");
        expect(m, "__syncwarp, probe.cu:");
        expect(m, "shfl, probe.cu:");
        m = launch("probe_meet", 1, 128, 0, nullptr, out.p, 0, PROBE_WARPS_PART);
        expect(m, "divergence: warp ");
        expect(m, "__syncthreads, probe.cu:");
        for (uint32_t lane : {0u, 5u, 31u}) { /* before the others have come, between, after */
            char text[80];
            snprintf(text, sizeof text, "lane %u of warp 1 takes part but has left", lane);
            m = launch("probe_meet", 1, 128, 0, nullptr, out.p, 32 + lane, PROBE_LANE_LEAVES);
            expect(m, text);
        }
        m = launch("probe_meet", 1, 128, 0, nullptr, out.p, 0, PROBE_WARP_LEAVES);
        expect(m, "__syncthreads, probe.cu:");
        expect(m, "has left the kernel");
        m = launch("probe_meet", 1, 128, 0, nullptr, out.p, 0, PROBE_NOBODY_COMES);
        expect(m, "deadlock: 32 threads never leave; thread 0 (warp 0, lane 0) waits at bar_sync");
        expect_ok(launch("probe_meet", 1, 128, 0, nullptr, out.p, 0));
        for (unsigned t = 0; t < 128; t++) assert_int_equal(out[t], t);
    });
}

static void what_does_not_end_is_ended(void **)
{
    buffer<uint32_t> out(64);
    every_way([&] {
        emu_options o = emu_get();
        o.collective_limit = 1000;
        emu_set(&o);
        expect(launch("probe_lost", 1, 64, 0, nullptr, out.p, 0, PROBE_ENDLESS_COLLECTIVES),
               "collectives and not ended");
    });
    out.clear();
    emu_options o = emu_get();
    o.seconds = 1;
    emu_set(&o);
    expect(launch("probe_lost", 1, 64, 0, nullptr, out.p, 0, PROBE_ENDLESS_LOOP),
           "taken 1 seconds of CPU and not ended");
    if (!emu_race_build())
        expect(launch("probe_lost", 1, 64, 0, nullptr, out.p, 0, PROBE_ENDLESS_ATOMICS), "thread ");
    every_way([&] {
        out.clear();
        expect_ok(launch("probe_wait", 1, 64, 0, nullptr, out.p, 0));
        assert_int_equal(out[0], 2);
    });
}

/* --- copies --- */

static void copies_arrive(void **)
{
    const uint32_t steps = 5;
    buffer<uint32_t> in(steps * 64 * 4), out(64);
    for (size_t i = 0; i < in.n; i++) in[i] = (uint32_t)(i * 2654435761u);
    auto run = [&](uint32_t mode, bool *wrong) {
        const char *m = launch("probe_copy", 1, 64, 3 * 1024, in.p, out.p, steps, mode);
        *wrong = false;
        for (unsigned t = 0; t < 64 && !m; t++) {
            uint32_t sum = 0;
            for (uint32_t i = 0; i < steps; i++) {
                uint32_t at = i * 64 + (t ^ 33);
                sum = sum * 31 + (at % 5 ? in[4 * at] + in[4 * at + 3] : 0);
            }
            if (out[t] != sum) *wrong = true;
        }
        return m;
    };
    bool wrong;
    every_way([&] {
        emu_stats_reset();
        expect_ok(run(PROBE_RIGHT, &wrong));
        assert_false(wrong);
        assert_int_equal(emu_stats_get().loaded, steps * 64 / 5 * 4 * 16);
        expect(run(PROBE_MISALIGNED_SHARED, &wrong), "cp.async, probe.cu:");
        expect(run(PROBE_MISALIGNED_SHARED, &wrong), "misaligned: shared offset");
        expect(run(PROBE_MISALIGNED_GLOBAL, &wrong), "misaligned: global address");
        expect(run(PROBE_OUTSIDE_SHARED, &wrong), "is not in the 3072 bytes of shared memory");
        expect(run(PROBE_OUTSIDE_GLOBAL, &wrong), " of an allocation of 5120 bytes");
    });
    always_a_race("in flight", [&](bool *w) { return run(PROBE_NO_WAIT, w); });
    always_a_race("in flight", [&](bool *w) { return run(PROBE_WAITS_TOO_LITTLE, w); });
    /* Of two groups one is waited for; the other, which is read, is the last that anybody copies. */
    if (emu_race_build())
        every_way([&] {
            expect(launch("probe_copy", 1, 64, 3 * 1024, in.p, out.p, 2, PROBE_WAITS_TOO_LITTLE),
                   "in flight");
        });
    always_a_race("", [&](bool *w) { return run(PROBE_NO_BARRIER, w); });
    /* Values show this one only where a thread runs ahead of the one that it steals from. */
    if (emu_race_build())
        always_a_race("", [&](bool *w) { return run(PROBE_NO_SECOND_BARRIER, w); });
}

/* --- matrices --- */

static void matrices_are_loaded(void **)
{
    buffer<uint16_t> in(256), out(256);
    for (size_t i = 0; i < 256; i++) in[i] = (uint16_t)i;
    auto run = [&](uint32_t pitch, uint32_t mode, uint64_t *conflicts) {
        emu_stats_reset();
        const char *m = launch("probe_ldmatrix", 1, 32, 32 * pitch, in.p, out.p, pitch, mode);
        *conflicts = emu_stats_get().ldmatrix_conflicts;
        return m;
    };
    uint64_t conflicts;
    every_way([&] {
        expect_ok(run(16, PROBE_RIGHT, &conflicts));
        assert_int_equal(conflicts, 0);
        for (unsigned i = 0; i < 256; i++) assert_int_equal(out[i], i);
        expect_ok(run(16, PROBE_TRANSPOSED, &conflicts));
        for (unsigned i = 0; i < 256; i++)
            assert_int_equal(out[i], i / 64 * 64 + i % 8 * 8 + i % 64 / 8);
        expect_ok(run(128, PROBE_RIGHT, &conflicts)); /* all rows in the same four banks */
        assert_int_equal(conflicts, 4 * 7);
        expect_ok(run(32, PROBE_RIGHT, &conflicts));
        assert_int_equal(conflicts, 4 * 1);
        expect_ok(run(144, PROBE_TRANSPOSED, &conflicts));
        assert_int_equal(conflicts, 0);
        expect(run(16, PROBE_MISALIGNED_SHARED, &conflicts), "ldmatrix, probe.cu:");
        expect(run(16, PROBE_MISALIGNED_SHARED, &conflicts), "misaligned");
        expect(run(16, PROBE_OUTSIDE_SHARED, &conflicts),
               "offset 512 is not in the 512 bytes of shared memory");
    });
    if (emu_race_build())
        every_way([&] { expect(run(16, PROBE_NO_BARRIER, &conflicts), "race: "); });
}

/* A B of random halves with c, against float64. A term is exact in float; what is left is the
 * rounding of sixteen sums, each at most half a unit of the largest. */
static void products_of_fragments(void **)
{
    buffer<uint16_t> m(384);
    buffer<float> c(128);
    uint64_t state = 3;
    double worst = 0;
    for (int round = 0; round < 200; round++) {
        bool bf16 = round & 1;
        float before[128];
        set(round % EMU_SCHEDULES, 0, (uint64_t)round);
        for (size_t i = 0; i < 384; i++) {
            float f = (float)((int32_t)random32(&state) - (1 << 30)) * 0x1p-30f * 4.0f;
            m[i] = bf16 ? kvp__f32_to_bf16(f) : kvp__f32_to_f16(f);
        }
        for (size_t i = 0; i < 128; i++)
            before[i] = c[i] = (float)(random32(&state) & 0xffff) / 4096;
        expect_ok(launch("probe_mma", 1, 32, 0, m.p, c.p, 1, bf16 ? PROBE_BF16 : PROBE_RIGHT));
        for (unsigned row = 0; row < 16; row++)
            for (unsigned n = 0; n < 8; n++) {
                double sum = before[row * 8 + n], size = fabs(sum);
                for (unsigned k = 0; k < 16; k++) {
                    uint16_t x = m[row * 16 + k], y = m[256 + k * 8 + n];
                    double p = bf16 ? (double)kvp__bf16_to_f32(x) * kvp__bf16_to_f32(y)
                                    : (double)kvp__f16_to_f32(x) * kvp__f16_to_f32(y);
                    sum += p;
                    size += fabs(p);
                }
                double error = fabs(c[row * 8 + n] - sum);
                assert_true(error <= 16 * 0x1p-24 * size);
                if (error / size > worst) worst = error / size;
            }
    }
    set(EMU_FORWARD, 0, 0);
    print_message("mma against float64: at most %.1e of the sum of magnitudes\n", worst);
    /* Infinity, NaN and denormals go through. */
    memset(m.p, 0, 384 * 2);
    memset(c.p, 0, 128 * 4);
    m[0] = 0x7c00;
    m[16] = 0x7e00;
    m[32] = 0x0001;
    m[256] = 0x3c00;
    expect_ok(launch("probe_mma", 1, 32, 0, m.p, c.p, 1));
    assert_true(isinf(c[0]));
    assert_true(isnan(c[8]));
    assert_true(c[16] == 0x1p-24f);
}

/* --- arithmetic --- */

static bool same_float(float a, float b)
{
    return (isnan(a) && isnan(b)) || kvp__float_bits(a) == kvp__float_bits(b);
}

static void every_half_is_converted(void **)
{
    const uint32_t n = 65536;
    buffer<float> out(6 * n);
    expect_ok(launch("probe_to_float", n / 1024, 1024, 0, nullptr, out.p, n));
    for (uint32_t i = 0; i < n; i++) {
        uint16_t h = (uint16_t)i, g = (uint16_t)(i ^ 0x8001u);
        const float *o = &out[6 * i];
        assert_true(same_float(o[0], kvp__f16_to_f32(h)) && same_float(o[1], kvp__f16_to_f32(h)));
        assert_true(same_float(o[2], kvp__f16_to_f32(g)) && same_float(o[5], kvp__bf16_to_f32(g)));
        assert_true(same_float(o[3], kvp__bf16_to_f32(h)) && same_float(o[4], kvp__bf16_to_f32(h)));
    }
}

static bool nan_f16(uint32_t h) { return (h & 0x7fffu) > 0x7c00u; }
static bool nan_bf16(uint32_t h) { return (h & 0x7fffu) > 0x7f80u; }

static void check_halves(buffer<float> &in, buffer<uint32_t> &out)
{
    uint32_t n = (uint32_t)in.n;
    expect_ok(launch("probe_to_half", (n + 1023) / 1024, 1024, 0, in.p, out.p, n));
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t *o = &out[4 * i];
        uint16_t h = kvp__f32_to_f16(in[i]), minus = kvp__f32_to_f16(-in[i]);
        uint16_t b = kvp__f32_to_bf16(in[i]), bminus = kvp__f32_to_bf16(-in[i]);
        if (nan_f16(h)) {
            assert_true(nan_f16(o[0]) && nan_f16(o[1]) && nan_f16(o[1] >> 16));
            assert_true(nan_bf16(o[2]) && nan_bf16(o[3]) && nan_bf16(o[3] >> 16));
            continue;
        }
        assert_int_equal(o[0], h);
        assert_int_equal(o[1], minus | (uint32_t)h << 16);
        assert_int_equal(o[2], b);
        assert_int_equal(o[3], bminus | (uint32_t)b << 16);
    }
}

/* Every value of a half, the middle between it and the next, and what lies beside both; and floats
 * of random bits. */
static void floats_become_halves(void **)
{
    const uint32_t n = 1 << 17;
    buffer<float> in(n);
    buffer<uint32_t> out(4 * n);
    for (int step = -1; step <= 1; step++) {
        for (uint32_t i = 0; i < 65536; i++) {
            uint32_t u = kvp__float_bits(kvp__f16_to_f32((uint16_t)i));
            uint32_t next = kvp__float_bits(kvp__f16_to_f32((uint16_t)(i + 1)));
            double middle = ((double)kvp__bits_float(u) + kvp__bits_float(next)) / 2;
            in[2 * i] = kvp__bits_float(u + (uint32_t)step);
            in[2 * i + 1] = kvp__bits_float(kvp__float_bits((float)middle) + (uint32_t)step);
        }
        check_halves(in, out);
        for (uint32_t i = 0; i < 65536; i++) {
            in[2 * i] = kvp__bits_float((i << 16) + (uint32_t)step);
            in[2 * i + 1] = kvp__bits_float((i << 16) + 0x8000u + (uint32_t)step);
        }
        check_halves(in, out);
    }
    uint64_t state = 1;
    for (uint32_t i = 0; i < n; i++)
        in[i] = kvp__bits_float(random32(&state) ^ random32(&state) << 8);
    check_halves(in, out);
}

static bool near_to(float got, double want, double relative)
{
    if (isnan(want)) return isnan(got);
    if (isinf(want) || want == 0) return got == (float)want;
    return fabs(got - want) <= relative * fabs(want) + 0x1p-126;
}

static void functions(void **)
{
    buffer<float> in(96), out(384);
    const float special[] = {0.0f,      -0.0f,     1.0f,     -1.0f,   INFINITY, -INFINITY,   NAN,
                             0x1p-140f, 0x1p-127f, 0x1p127f, -130.0f, 128.0f,   0x1.8p-126f,
                             -0x1p126f};
    uint64_t state = 9;
    for (int round = 0; round < 50; round++) {
        for (size_t i = 0; i < 96; i++) {
            float f = ((float)random32(&state) * 0x1p-31f - 0.5f) * 60.0f;
            in[i] = round == 0 && i % 3 == 0 && i / 3 < 14 ? special[i / 3] : f;
        }
        expect_ok(launch("probe_math", 1, 32, 0, in.p, out.p, 0));
        for (unsigned i = 0; i < 32; i++) {
            float x = in[3 * i], y = in[3 * i + 1], z = in[3 * i + 2];
            float flushed = fabsf(x) < 0x1p-126f ? copysignf(0, x) : x;
            const float *o = &out[12 * i];
            double reciprocal = 1.0 / (double)flushed, power = exp2((double)flushed);
            if (power >= 0x1p128) power = INFINITY;
            if (power < 0x1p-126) power = 0;
            assert_true(near_to(o[0], power, 1e-6));
            assert_true(near_to(o[1], log2((double)flushed), 1e-6));
            assert_true(near_to(o[2], fabs(reciprocal) < 0x1p-126 ? 0 : reciprocal, 1e-6));
            assert_true(near_to(o[3], tanh((double)x), 1e-6));
            assert_true(same_float(o[4], (float)((double)x + y)));
            assert_true(same_float(o[5], (float)((double)x * y)));
            assert_true(same_float(o[6], fmaf(x, y, z)));
            assert_true(same_float(o[7], (float)((double)x / y)));
            volatile double product = (double)y * z, sum = x + product;
            assert_true(same_float(o[8], (float)sum));
            assert_true(same_float(o[9], (float)fma((double)x, (double)y, (double)z)));
            assert_true(same_float(o[10], (float)((double)x / (double)y)));
            int32_t dot = -7;
            uint32_t p = i * 0x01f3a57bu, q = i * 0x9e3779b9u;
            for (int k = 0; k < 4; k++) dot += (int8_t)(p >> 8 * k) * (int8_t)(q >> 8 * k);
            assert_true(o[11] == (float)dot);
        }
    }
}

static void atomics(void **)
{
    buffer<uint32_t> out(2);
    every_way([&] {
        out.clear();
        emu_stats_reset();
        expect_ok(launch("probe_atomic", 3, 256, 8, nullptr, out.p, 0));
        float sum;
        memcpy(&sum, &out[1], 4);
        assert_int_equal(out[0], 3 * 256);
        assert_true(sum == 3 * 255 * 128);
        assert_int_equal(emu_stats_get().atomics, 3 * (512 + 2));
        out.clear();
        expect(launch("probe_atomic", 3, 256, 8, nullptr, out.p, 0, PROBE_MISALIGNED_SHARED),
               "atomic_add, probe.cu:");
        out.clear();
        const char *m =
            launch("probe_atomic", 1, 256, 8, nullptr, out.p, 0, PROBE_PLAIN_AND_ATOMIC);
        if (emu_race_build()) expect(m, "race: ");
    });
}

/* --- schedules, counters, refusals --- */

static void schedules_differ(void **)
{
    const unsigned n = 5 * 64;
    buffer<uint32_t> out(2 + n);
    auto order = [&](int schedule, uint64_t seed) {
        set(schedule, 0, seed);
        out.clear();
        expect_ok(launch("probe_order", 5, 64, 0, nullptr, out.p, 0));
        assert_int_equal(out[0], n);
        std::vector<uint32_t> v(&out[1], &out[1] + n);
        std::vector<bool> seen(n);
        for (uint32_t x : v) {
            assert_true(x < n && !seen[x]);
            seen[x] = true;
        }
        return v;
    };
    std::vector<uint32_t> forward = order(EMU_FORWARD, 0), reverse = order(EMU_REVERSE, 0);
    std::vector<uint32_t> one = order(EMU_RANDOM, 1), again = order(EMU_RANDOM, 1),
                          two = order(EMU_RANDOM, 2);
    for (unsigned i = 0; i < n; i++) {
        assert_int_equal(forward[i], i);
        assert_int_equal(reverse[i], n - 1 - i);
    }
    assert_true(one == again && one != two && one != forward && one != reverse);
    set(EMU_FORWARD, 0, 0);
}

static void counters(void **)
{
    buffer<uint32_t> out(32);
    emu_options o = {};
    o.banks = 1;
    emu_set(&o);
    emu_stats_reset();
    buffer<float> in(256), result(256);
    in.clear();
    expect_ok(launch("probe_pass", 2, 128, 512, in.p, result.p, 1));
    emu_stats s = emu_stats_get();
    assert_int_equal(s.launches, 1);
    assert_int_equal(s.blocks, 2);
    assert_int_equal(s.threads, 256);
    assert_int_equal(s.barriers, 6);
    assert_int_equal(s.plain, emu_race_build());
    if (emu_race_build()) {
        assert_int_equal(s.loaded, 256 * 4);
        assert_int_equal(s.stored, 256 * 4);
        assert_int_equal(s.shared_conflicts, 0);
        assert_int_equal(s.shared_passes, 8 * 4); /* a rotation has no conflicts */
    }
    emu_stats_reset();
    expect_ok(launch("probe_sync", 1, 64, 0, nullptr, nullptr, 10));
    assert_int_equal(emu_stats_get().collectives, 20);
    if (!emu_race_build()) return;
    const unsigned apart[] = {1, 2, 3, 4, 8, 32, 33}, want[] = {0, 1, 0, 3, 7, 31, 0};
    for (unsigned i = 0; i < 7; i++) {
        emu_stats_reset();
        expect_ok(launch("probe_banks", 1, 32, 32 * 4 * apart[i], nullptr, out.p, apart[i]));
        assert_int_equal(emu_stats_get().shared_conflicts, 2 * want[i]);
    }
}

static void what_a_driver_refuses(void **)
{
    buffer<float> x(2048);
    x.clear();
    expect(launch("no_such_kernel", 1, 32, 0, x.p, x.p, 0), "there is no kernel no_such_kernel");
    expect(launch("probe_pass", 0, 32, 4096, x.p, x.p, 0), "cannot be launched");
    expect(launch("probe_pass", 1, 33, 4096, x.p, x.p, 0), "whole warps");
    expect(launch("probe_pass", 1, 0, 4096, x.p, x.p, 0), "whole warps");
    expect(launch("probe_atomic", 1, 512, 4096, x.p, x.p, 0), "256 threads at most");
    expect(launch("probe_pass", 1, 32, 227 * 1024 + 1, x.p, x.p, 0), "shared memory");
    probe_args a = {x.p, x.p, 0, 0};
    expect(emu_launch("probe_pass", 1, 65536, 1, 32, 4096, &a), "cannot be launched");
    size_t bytes;
    uint32_t threads;
    assert_int_equal(emu_kernel_info("probe_atomic", &bytes, &threads), 0);
    assert_int_equal(bytes, sizeof(probe_args));
    assert_int_equal(threads, 256);
    assert_int_equal(emu_kernel_info("no_such_kernel", &bytes, &threads), -1);
    size_t n = 0;
    bool found = false;
    while (const char *name = emu_kernel(n)) {
        found |= !strcmp(name, "probe_named");
        n++;
    }
    assert_true(found && n >= 10);
}

/* Each with blocks of its own: a race in one is not seen by the other. */
static void several_threads_launch(void **)
{
    pass p[2];
    uint32_t bad[2] = {0, 0};
    auto work = [&](int i) {
        for (int round = 0; round < 50; round++) {
            bool wrong = true;
            const char *m = p[i].run(PROBE_RIGHT, &wrong);
            bad[i] += m != nullptr || wrong;
            m = launch("probe_meet", 1, 128, 0, nullptr, p[i].out.p, 37, PROBE_LANE_LEAVES);
            bad[i] += !m || !strstr(m, "lane 5 of warp 1");
        }
    };
    std::thread other(work, 1);
    work(0);
    other.join();
    assert_int_equal(bad[0] + bad[1], 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(barriers_order_shared_memory),
        cmocka_unit_test(a_missing_barrier_is_found),
        cmocka_unit_test(syncwarp_orders_a_warp),
        cmocka_unit_test(bytes_have_their_own_past),
        cmocka_unit_test(many_readers_and_a_writer),
        cmocka_unit_test(shared_memory_ends_where_it_ends),
        cmocka_unit_test(shared_memory_is_nan_before_each_block),
        cmocka_unit_test(global_memory_ends_where_it_ends),
        cmocka_unit_test(memory_that_is_none),
        cmocka_unit_test(loads_of_16_bytes),
        cmocka_unit_test(blocks_of_a_grid_race),
        cmocka_unit_test(shuffles_and_votes),
        cmocka_unit_test(parts_of_a_warp_meet_by_masks),
        cmocka_unit_test(named_barriers),
        cmocka_unit_test(threads_that_do_not_meet),
        cmocka_unit_test(what_does_not_end_is_ended),
        cmocka_unit_test(copies_arrive),
        cmocka_unit_test(matrices_are_loaded),
        cmocka_unit_test(products_of_fragments),
        cmocka_unit_test(every_half_is_converted),
        cmocka_unit_test(floats_become_halves),
        cmocka_unit_test(functions),
        cmocka_unit_test(atomics),
        cmocka_unit_test(schedules_differ),
        cmocka_unit_test(counters),
        cmocka_unit_test(what_a_driver_refuses),
        cmocka_unit_test(several_threads_launch),
    };
    return cmocka_run_group_tests(tests, nullptr, nullptr);
}
