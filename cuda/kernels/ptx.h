/*
 * What kernels are written in, on the GPU: see device.h. Each function is one asm statement or one
 * intrinsic of CUDA, so that there is nothing in it to be wrong but the instruction and the order
 * of its operands. Those are what no test without a GPU can prove; tests/tools/ptx-lint.py follows
 * each operand from parameter to instruction and compares with a table of its own.
 *
 * What touches memory, or must stay where it was written among other lanes, is volatile and
 * clobbers memory; arithmetic is neither, so that the compiler may move it. The exception is
 * load16, which reads what no thread of the grid writes: it may be moved freely.
 */
#ifndef KVP_CUDA_KERNELS_PTX_H
#define KVP_CUDA_KERNELS_PTX_H

#define KVP_DEV __device__ __forceinline__
#define KVP_KERNEL(name, args_type, threads)                                                       \
    extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ args_type a)
/* The same where at least so many blocks are to fit on an SM, which bounds the registers. */
#define KVP_KERNEL_BLOCKS(name, args_type, threads, blocks)                                        \
    extern "C" __global__ void __launch_bounds__(threads, blocks)                                  \
        name(const __grid_constant__ args_type a)
#define KVP_SMEM(name) extern __shared__ __align__(128) unsigned char name[]
#define KVP_UNROLL _Pragma("unroll")

namespace kvp {

/* Addresses of shared memory are 32 bits wide in its instructions. */
KVP_DEV uint32_t shared_address(const void *s)
{
    return (uint32_t)__cvta_generic_to_shared(s);
}

/* --- copies from global to shared memory, and matrices from shared memory --- */

KVP_DEV void cp_async16(void *s, const void *g, bool on)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(s)), "l"(g), "r"(on ? 16u : 0u)
                 : "memory");
}

KVP_DEV void cp_commit()
{
    asm volatile("cp.async.commit_group;" : : : "memory");
}

template <int N> KVP_DEV void cp_wait()
{
    asm volatile("cp.async.wait_group %0;" : : "n"(N) : "memory");
}

KVP_DEV void ldsm4(uint32_t (&r)[4], const void *s)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(s))
                 : "memory");
}

KVP_DEV void ldsm4t(uint32_t (&r)[4], const void *s)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(s))
                 : "memory");
}

KVP_DEV uint4 load16(const void *g)
{
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(g));
    return v;
}

/* --- products of fragments: c += a b --- */

KVP_DEV void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

KVP_DEV void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* --- approximate functions --- */

KVP_DEV float ex2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

KVP_DEV float lg2(float x)
{
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

KVP_DEV float rcp(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

KVP_DEV float tanh_fast(float x)
{
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* --- conversions; the instruction's first source is the high half --- */

KVP_DEV uint32_t pack_f16(float lo, float hi)
{
    uint32_t u;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(u) : "f"(hi), "f"(lo));
    return u;
}

KVP_DEV uint32_t pack_bf16(float lo, float hi)
{
    uint32_t u;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(u) : "f"(hi), "f"(lo));
    return u;
}

KVP_DEV float f16_float(uint16_t h)
{
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

KVP_DEV uint16_t float_f16(float f)
{
    uint16_t h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

KVP_DEV float bf16_float(uint16_t h)
{
    return __uint_as_float((uint32_t)h << 16);
}

KVP_DEV uint16_t float_bf16(float f)
{
    uint16_t h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

KVP_DEV float2 unpack_f16(uint32_t u)
{
    return make_float2(f16_float((uint16_t)(u & 0xffffu)), f16_float((uint16_t)(u >> 16)));
}

KVP_DEV float2 unpack_bf16(uint32_t u)
{
    return make_float2(bf16_float((uint16_t)(u & 0xffffu)), bf16_float((uint16_t)(u >> 16)));
}

/* --- among the lanes of a warp, and among warps --- */

template <class T> KVP_DEV T shfl(T v, int lane)
{
    return __shfl_sync(0xffffffffu, v, lane);
}

template <class T> KVP_DEV T shfl_xor(T v, int mask)
{
    return __shfl_xor_sync(0xffffffffu, v, mask);
}

template <class T> KVP_DEV T shfl_up(T v, unsigned n)
{
    return __shfl_up_sync(0xffffffffu, v, n);
}

template <class T> KVP_DEV T shfl_down(T v, unsigned n)
{
    return __shfl_down_sync(0xffffffffu, v, n);
}

KVP_DEV uint32_t ballot(bool p)
{
    return __ballot_sync(0xffffffffu, p);
}

KVP_DEV bool any(bool p)
{
    return __any_sync(0xffffffffu, p) != 0;
}

KVP_DEV bool all(bool p)
{
    return __all_sync(0xffffffffu, p) != 0;
}

KVP_DEV void bar_sync(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

KVP_DEV uint32_t atomic_add(uint32_t *p, uint32_t v)
{
    return atomicAdd(p, v);
}

KVP_DEV float atomic_add(float *p, float v)
{
    return atomicAdd(p, v);
}

/* --- arithmetic with one rounding --- */

KVP_DEV float add_rn(float a, float b)
{
    return __fadd_rn(a, b);
}

KVP_DEV double add_rn(double a, double b)
{
    return __dadd_rn(a, b);
}

KVP_DEV float mul_rn(float a, float b)
{
    return __fmul_rn(a, b);
}

KVP_DEV double mul_rn(double a, double b)
{
    return __dmul_rn(a, b);
}

KVP_DEV float fma_rn(float a, float b, float c)
{
    return __fmaf_rn(a, b, c);
}

KVP_DEV double fma_rn(double a, double b, double c)
{
    return __fma_rn(a, b, c);
}

KVP_DEV float div_rn(float a, float b)
{
    return __fdiv_rn(a, b);
}

KVP_DEV double div_rn(double a, double b)
{
    return __ddiv_rn(a, b);
}

KVP_DEV int dp4a(int a, int b, int c)
{
    return __dp4a(a, b, c);
}

} // namespace kvp

#endif
