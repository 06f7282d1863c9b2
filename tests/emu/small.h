/*
 * What the tests of the small kernels share: memory of exact size around which everything is NaN,
 * random numbers, 16-bit floats as floats, and launches that must succeed. Anything that a kernel
 * should not have touched is found by its bytes, which emu_alloc sets to 0xff.
 */
#ifndef TESTS_EMU_SMALL_H
#define TESTS_EMU_SMALL_H

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

#include <vector>

#include "cuda/kernels/launch.h"
#include "lib/base/half.h"
#include "tests/emu/emu.h"

/* KVPAGE_EMU_ALL: everything, which takes long. */
static inline bool all_cases() { return getenv("KVPAGE_EMU_ALL") != nullptr; }

/* --- numbers --- */

struct random_source {
    uint64_t state;
    explicit random_source(uint64_t seed) : state(seed * 0x9e3779b97f4a7c15u + 1) {}
    uint32_t bits()
    {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return static_cast<uint32_t>((state >> 32) ^ (state >> 18));
    }
    uint32_t below(uint32_t n) { return static_cast<uint32_t>((uint64_t)bits() * n >> 32); }
    double unit() { return (bits() + 0.5) / 4294967296.0; }
    float uniform(float from, float to) { return (float)(from + unit() * (to - from)); }
    float normal() { return (float)(sqrt(-2 * log(unit())) * cos(6.283185307179586 * unit())); }
};

static inline size_t size_of_el(uint32_t type)
{
    return type == KVP__EL_F32 ? 4 : 2;
}

/* Element i of `base` as the type says. */
static inline float get(const void *base, uint32_t type, size_t i)
{
    if (type == KVP__EL_F32) return static_cast<const float *>(base)[i];
    uint16_t h = static_cast<const uint16_t *>(base)[i];
    return type == KVP__EL_BF16 ? kvp__bf16_to_f32(h) : kvp__f16_to_f32(h);
}

static inline void put(void *base, uint32_t type, size_t i, float v)
{
    if (type == KVP__EL_F32) static_cast<float *>(base)[i] = v;
    else
        static_cast<uint16_t *>(base)[i] =
            type == KVP__EL_BF16 ? kvp__f32_to_bf16(v) : kvp__f32_to_f16(v);
}

/* Half a unit in the last place of a value of this type, and `slack` times the value for the
 * arithmetic before. */
static inline double half_unit(uint32_t type, double v, double slack)
{
    double unit = type == KVP__EL_F32 ? 0x1p-24 : type == KVP__EL_BF16 ? 0x1p-8 : 0x1p-11;
    double least = type == KVP__EL_F16 ? 0x1p-25 : 0;
    return fmax(fabs(v) * unit, least) * 1.0001 + fabs(v) * slack;
}

#define assert_near(got, wanted, bound)                                                            \
    do {                                                                                           \
        double got_ = (got), wanted_ = (wanted), bound_ = (bound);                                 \
        if (!(fabs(got_ - wanted_) <= bound_))                                                     \
            fail_msg("got %.9g, wanted %.9g within %.3g", got_, wanted_, bound_);                  \
    } while (0)

/* --- memory --- */

template <class T> struct device {
    T *p;
    size_t n;
    explicit device(size_t count) : p(nullptr), n(count)
    {
        p = static_cast<T *>(emu_alloc(count * sizeof(T)));
        assert_non_null(p);
    }
    device(const std::vector<T> &from) : device(from.size()) { memcpy(p, &from[0], n * sizeof(T)); }
    device(const device &) = delete;
    ~device() { assert_int_equal(emu_free(p), 0); }
    T &operator[](size_t i) { return p[i]; }
    void poison() { memset(static_cast<void *>(p), 0xff, n * sizeof(T)); }
    std::vector<T> copy() const { return std::vector<T>(p, p + n); }
    void is_untouched(size_t from, size_t to) const
    {
        const unsigned char *b = reinterpret_cast<const unsigned char *>(p);
        for (size_t i = from * sizeof(T); i < to * sizeof(T); i++)
            if (b[i] != 0xff) fail_msg("byte %zu was written, of %zu", i, n * sizeof(T));
    }
};

/* Elements of a type known at run time. */
struct elements {
    uint32_t type;
    size_t n;
    device<unsigned char> bytes;
    elements(uint32_t t, size_t count) : type(t), n(count), bytes(count * size_of_el(t)) {}
    void *p() { return bytes.p; }
    void set(size_t i, float v) { put(bytes.p, type, i, v); }
    float get(size_t i) const { return ::get(bytes.p, type, i); }
    void is_untouched(size_t from, size_t to) const
    {
        bytes.is_untouched(from * size_of_el(type), to * size_of_el(type));
    }
};

/* --- launches --- */

struct one_step {
    device<kvp__cuda_step> s;
    one_step(uint32_t rows, uint32_t outputs = 0) : s(1)
    {
        memset(s.p, 0, sizeof *s.p);
        s[0].n_rows = rows;
        s[0].n_outputs = outputs;
    }
    operator const kvp__cuda_step *() const { return s.p; }
    kvp__cuda_step *operator->() { return s.p; }
};

static inline void launch(const char *kernel, kvp__launch l, const void *args)
{
    const char *wrong = emu_launch(kernel, l.x, l.y, 1, l.threads, l.shared, args);
    if (wrong) fail_msg("%s: %s", kernel, wrong);
}

/* Calls f under every schedule, three seeds of the random one. */
template <class F> static void under_schedules(F f)
{
    for (int schedule = 0; schedule < EMU_SCHEDULES; schedule++)
        for (uint64_t seed = 1; seed <= (schedule == EMU_RANDOM ? 3 : 1); seed++) {
            emu_options o = {};
            o.schedule = static_cast<emu_schedule>(schedule);
            o.seed = seed;
            emu_set(&o);
            f();
        }
    emu_options o = {};
    emu_set(&o);
}

#endif
