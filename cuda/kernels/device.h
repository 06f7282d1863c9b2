/*
 * What kernels are written in: C++ and the few operations below, which have two implementations. nvcc
 * takes ptx.h, PTX behind each; any other C++ compiler takes the emulator's (tests/emu), in which
 * every CUDA thread is a fiber of the CPU. ptx.h is the only code of the kernels that tests on a
 * machine without a GPU cannot prove, so it stays small, and a script follows each operand from
 * parameter to instruction.
 *
 *     KVP_KERNEL(name, args_type, threads) { ... a.member ... }   a kernel: one struct, by value
 *     KVP_KERNEL_BLOCKS(name, args_type, threads, blocks) { ... }   the same; so many blocks at least
 *                                 are to fit on an SM
 *     KVP_DEV                     a function of device code, inlined
 *     KVP_SMEM(name)              the block's shared memory, all dynamic, aligned to 128 bytes; static
 *                                 __shared__ arrays are not allowed: the emulator cannot see them
 *     KVP_UNROLL                  before a loop
 *     threadIdx, blockIdx, blockDim, gridDim, __syncthreads(), __syncwarp(), float2, float4, uint2, uint4
 *
 * and in namespace kvp (pointers: `s` shared, `g` global):
 *     cp_async16(s, g, bool on)   16 bytes, aligned; off: zeros, and g is not read
 *     cp_commit(), cp_wait<N>()   groups; until at most N are pending
 *     ldsm4(r, s), ldsm4t(r, s)   ldmatrix.x4, plain and transposed: uint32_t (&r)[4]
 *     mma_f16(c, a, b0, b1), mma_bf16(...)   m16n8k16, float (&c)[4], const uint32_t (&a)[4]
 *     ex2, lg2, rcp, tanh_fast    approximate, flush to zero, as the PTX instructions of these names
 *     pack_f16(lo, hi), unpack_f16(u), pack_bf16, unpack_bf16   two halves in a uint32_t <-> float2
 *     f16_float(h), float_f16(f), bf16_float(h), float_bf16(f)  one, as uint16_t
 *     shfl(v, lane), shfl_xor(v, mask), shfl_up(v, n), shfl_down(v, n)   float, uint32_t, int, double;
 *                                 all 32 lanes
 *     ballot(bool), any(bool), all(bool)   all 32 lanes
 *     bar_sync(id, threads)       a named barrier, 1 to 15
 *     atomic_add(p, v)            uint32_t or float, shared or global; the old value
 *     load16(g)                   uint4, not cached in L1, for data read once; aligned
 *     add_rn, mul_rn, fma_rn, div_rn   float and double, never contracted, never flushed
 *     dp4a(a, b, c)               four signed bytes each
 */
#ifndef KVP_CUDA_KERNELS_DEVICE_H
#define KVP_CUDA_KERNELS_DEVICE_H

#include "cuda/kernels/args.h"

#ifdef __CUDACC__
#include "cuda/kernels/ptx.h"
#else
#include "tests/emu/intrinsics.h"
#endif

#endif
