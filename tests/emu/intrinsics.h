/*
 * What kernels are written in, on the emulator: see cuda/kernels/device.h. What one thread does
 * alone is done here; what concerns other threads or the memory's state calls the emulator, with
 * the place in the source, so that a failure can say where.
 */
#ifndef KVP_TESTS_EMU_INTRINSICS_H
#define KVP_TESTS_EMU_INTRINSICS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(8) int2 { int32_t x, y; };
struct alignas(16) int4 { int32_t x, y, z, w; };

static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    return {x, y, z, w};
}
static inline int2 make_int2(int32_t x, int32_t y) { return {x, y}; }
static inline int4 make_int4(int32_t x, int32_t y, int32_t z, int32_t w) { return {x, y, z, w}; }

#define EMU_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define EMU_TLS __attribute__((tls_model("initial-exec")))

namespace emu {

struct index3 { uint32_t x, y, z; };
struct lane_view { index3 thread; };
struct block_view {
    index3 index, threads, grid;
    unsigned char *shared;
};
extern __thread lane_view *current EMU_TLS; /* the thread that runs */
extern __thread block_view block EMU_TLS;

/* Kernels register themselves before main. */
struct kernel_entry {
    const char *name;
    size_t args_bytes;
    uint32_t threads;
    void (*run)(const void *args);
    kernel_entry *next;
    kernel_entry(const char *n, size_t bytes, uint32_t most, void (*f)(const void *));
};

void syncwarp(uint32_t mask, const char *file, int line);
void syncthreads(const char *file, int line);
void named_barrier(int id, int threads, const char *file, int line);

enum shuffle { SHUFFLE_TO, SHUFFLE_XOR, SHUFFLE_UP, SHUFFLE_DOWN };
uint64_t shuffle_bits(shuffle how, uint32_t mask, uint64_t v, int by, const char *file, int line);
uint32_t vote(uint32_t mask, bool p, const char *file, int line); /* who says yes */

void copy16(void *s, const void *g, bool on, const char *file, int line);
void copy_commit();
void copy_wait(int pending);
void ldmatrix(uint32_t *r, const void *s, bool transposed, const char *file, int line);
void mma(float *c, const uint32_t *a, uint32_t b0, uint32_t b1, bool bf16, const char *file,
         int line);
uint4 load16(const void *g, const char *file, int line);
uint32_t atomic_add(uint32_t *p, uint32_t v, const char *file, int line);
float atomic_add(float *p, float v, const char *file, int line);

template <class T>
inline T shuffle_value(shuffle how, uint32_t mask, T v, int by, const char *file, int line)
{
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "four or eight bytes");
    uint64_t bits = 0;
    memcpy(&bits, &v, sizeof v);
    bits = shuffle_bits(how, mask, bits, by, file, line);
    memcpy(&v, &bits, sizeof v);
    return v;
}

inline float from_bits(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}

inline uint32_t to_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

/* Denormals are zero, as .ftz makes them of operands and results. */
inline float flushed(float x)
{
    return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x;
}

} // namespace emu

#define KVP_DEV inline __attribute__((always_inline))
#define KVP_UNROLL /* unrolled, attention takes four times as long to compile and no less to run */
#define KVP_SMEM(name) unsigned char *const name = ::emu::block.shared
#define KVP_KERNEL(name, args_type, threads)                                                       \
    static void name##_body(const args_type &a);                                                   \
    static void name##_run(const void *p) { name##_body(*static_cast<const args_type *>(p)); }     \
    static ::emu::kernel_entry name##_entry(#name, sizeof(args_type), threads, name##_run);        \
    static void name##_body([[maybe_unused]] const args_type &a)
#define KVP_KERNEL_BLOCKS(name, args_type, threads, blocks) KVP_KERNEL(name, args_type, threads)

/* One variable of each thread is what a compiler for CPUs would make of it. */
#define __shared__ static_shared_memory_is_not_allowed__use_KVP_SMEM

#define threadIdx (::emu::current->thread)
#define blockIdx (::emu::block.index)
#define blockDim (::emu::block.threads)
#define gridDim (::emu::block.grid)

inline void __syncthreads(EMU_PLACE) { ::emu::syncthreads(file, line); }
inline void __syncwarp(uint32_t mask = 0xffffffffu, EMU_PLACE)
{
    ::emu::syncwarp(mask, file, line);
}

template <class T> inline T __shfl_sync(uint32_t mask, T v, int lane, EMU_PLACE)
{
    return ::emu::shuffle_value(::emu::SHUFFLE_TO, mask, v, lane, file, line);
}
template <class T> inline T __shfl_xor_sync(uint32_t mask, T v, int x, EMU_PLACE)
{
    return ::emu::shuffle_value(::emu::SHUFFLE_XOR, mask, v, x, file, line);
}
inline uint32_t __ballot_sync(uint32_t mask, bool p, EMU_PLACE)
{
    return ::emu::vote(mask, p, file, line);
}

namespace kvp {

KVP_DEV void cp_async16(void *s, const void *g, bool on, EMU_PLACE)
{
    ::emu::copy16(s, g, on, file, line);
}
KVP_DEV void cp_commit() { ::emu::copy_commit(); }
template <int N> KVP_DEV void cp_wait()
{
    static_assert(N >= 0, "a count of groups");
    ::emu::copy_wait(N);
}

KVP_DEV void ldsm4(uint32_t (&r)[4], const void *s, EMU_PLACE)
{
    ::emu::ldmatrix(r, s, false, file, line);
}
KVP_DEV void ldsm4t(uint32_t (&r)[4], const void *s, EMU_PLACE)
{
    ::emu::ldmatrix(r, s, true, file, line);
}
KVP_DEV void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMU_PLACE)
{
    ::emu::mma(c, a, b0, b1, false, file, line);
}
KVP_DEV void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMU_PLACE)
{
    ::emu::mma(c, a, b0, b1, true, file, line);
}
KVP_DEV uint4 load16(const void *g, EMU_PLACE) { return ::emu::load16(g, file, line); }

KVP_DEV float ex2(float x) { return ::emu::flushed(exp2f(::emu::flushed(x))); }
KVP_DEV float lg2(float x) { return log2f(::emu::flushed(x)); }
KVP_DEV float rcp(float x) { return ::emu::flushed(1.0f / ::emu::flushed(x)); }
KVP_DEV float tanh_fast(float x) { return tanhf(x); }

/* Half floats: the exponent is moved by a multiplication, which makes denormals right too. */
KVP_DEV float f16_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, u = (uint32_t)(h & 0x7fffu) << 13;
    float f = ::emu::from_bits(u) * 0x1p112f;
    if (u >= 0x0f800000u) f = ::emu::from_bits(u | 0x7f800000u); /* infinity, NaN */
    return ::emu::from_bits(::emu::to_bits(f) | sign);
}

/* The sum with a power of two, chosen so that its last bit is the half's last bit, rounds as the
 * half must; below the half's normal numbers that power stays the same. */
KVP_DEV uint16_t float_f16(float f)
{
    uint32_t u = ::emu::to_bits(f), sign = u >> 16 & 0x8000u, m = u & 0x7fffffffu;
    if (m > 0x7f800000u) return 0x7fffu;
    if (m >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    uint32_t e = m & 0x7f800000u;
    if (e < 0x38800000u) e = 0x38800000u; /* 2^-14 */
    float big = ::emu::from_bits(e + (13u << 23)), r = ::emu::from_bits(m) + big;
    uint32_t units = ::emu::to_bits(r) - ::emu::to_bits(big); /* of 2^(exponent - 10) */
    return (uint16_t)(sign | (((e - 0x38800000u) >> 13) + units));
}

KVP_DEV float bf16_float(uint16_t h) { return ::emu::from_bits((uint32_t)h << 16); }
KVP_DEV uint16_t float_bf16(float f)
{
    uint32_t u = ::emu::to_bits(f), low = u & 0xffffu, h = u >> 16;
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    if (low > 0x8000u || (low == 0x8000u && (h & 1u))) h++;
    return (uint16_t)h;
}

KVP_DEV uint32_t pack_f16(float lo, float hi)
{
    return (uint32_t)float_f16(lo) | (uint32_t)float_f16(hi) << 16;
}
KVP_DEV float2 unpack_f16(uint32_t u)
{
    return {f16_float((uint16_t)u), f16_float((uint16_t)(u >> 16))};
}
KVP_DEV uint32_t pack_bf16(float lo, float hi)
{
    return (uint32_t)float_bf16(lo) | (uint32_t)float_bf16(hi) << 16;
}
KVP_DEV float2 unpack_bf16(uint32_t u)
{
    return {bf16_float((uint16_t)u), bf16_float((uint16_t)(u >> 16))};
}

template <class T> KVP_DEV T shfl(T v, int lane, EMU_PLACE)
{
    return ::emu::shuffle_value(::emu::SHUFFLE_TO, 0xffffffffu, v, lane, file, line);
}
template <class T> KVP_DEV T shfl_xor(T v, int mask, EMU_PLACE)
{
    return ::emu::shuffle_value(::emu::SHUFFLE_XOR, 0xffffffffu, v, mask, file, line);
}
template <class T> KVP_DEV T shfl_up(T v, unsigned n, EMU_PLACE)
{
    return ::emu::shuffle_value(::emu::SHUFFLE_UP, 0xffffffffu, v, (int)n, file, line);
}
template <class T> KVP_DEV T shfl_down(T v, unsigned n, EMU_PLACE)
{
    return ::emu::shuffle_value(::emu::SHUFFLE_DOWN, 0xffffffffu, v, (int)n, file, line);
}
KVP_DEV uint32_t ballot(bool p, EMU_PLACE) { return ::emu::vote(0xffffffffu, p, file, line); }
KVP_DEV bool any(bool p, EMU_PLACE) { return ::emu::vote(0xffffffffu, p, file, line) != 0; }
KVP_DEV bool all(bool p, EMU_PLACE)
{
    return ::emu::vote(0xffffffffu, p, file, line) == 0xffffffffu;
}

KVP_DEV void bar_sync(int id, int threads, EMU_PLACE)
{
    ::emu::named_barrier(id, threads, file, line);
}
KVP_DEV uint32_t atomic_add(uint32_t *p, uint32_t v, EMU_PLACE)
{
    return ::emu::atomic_add(p, v, file, line);
}
KVP_DEV float atomic_add(float *p, float v, EMU_PLACE)
{
    return ::emu::atomic_add(p, v, file, line);
}

/* Kernels are compiled with -ffp-contract=off here. */
KVP_DEV float add_rn(float a, float b) { return a + b; }
KVP_DEV double add_rn(double a, double b) { return a + b; }
KVP_DEV float mul_rn(float a, float b) { return a * b; }
KVP_DEV double mul_rn(double a, double b) { return a * b; }
KVP_DEV float fma_rn(float a, float b, float c) { return fmaf(a, b, c); }
KVP_DEV double fma_rn(double a, double b, double c) { return fma(a, b, c); }
KVP_DEV float div_rn(float a, float b) { return a / b; }
KVP_DEV double div_rn(double a, double b) { return a / b; }

KVP_DEV int dp4a(int a, int b, int c)
{
    uint32_t sum = (uint32_t)c;
    for (int i = 0; i < 32; i += 8)
        sum += (uint32_t)((int8_t)((uint32_t)a >> i) * (int8_t)((uint32_t)b >> i));
    return (int)sum;
}

} // namespace kvp

#endif
