/*
 * Kernels for the emulator's own test: each shows one facility and, by `mode`, makes the mistakes
 * that the emulator must report.
 */
#include "cuda/kernels/device.h"
#include "tests/emu/probe.h"

/* Each thread takes what another has put into shared memory; twice, so that it is overwritten too.
 * */
KVP_KERNEL(probe_pass, probe_args, 1024)
{
    KVP_SMEM(s);
    float *x = (float *)(void *)s;
    const float *in = (const float *)a.in;
    float *out = (float *)a.out;
    unsigned t = threadIdx.x, n = blockDim.x, from = (t + a.n) % n;
    unsigned at = blockIdx.x * n + t;
    if (a.mode == PROBE_OUTSIDE_SHARED && t == 5) x[n] = 1.0f;
    if (a.mode == PROBE_BEFORE_SHARED && t == 5) x[-1] = 1.0f;
    if (a.mode == PROBE_OUTSIDE_GLOBAL) at++;
    x[t] = in[at];
    if (a.mode != PROBE_NO_BARRIER) __syncthreads();
    float y = x[from];
    if (a.mode != PROBE_NO_SECOND_BARRIER) __syncthreads();
    x[t] = 2.0f * y;
    __syncthreads();
    out[at] = y + x[from];
}

/* All read one number; thread `n`, which has read it too, then changes it. */
KVP_KERNEL(probe_broadcast, probe_args, 128)
{
    KVP_SMEM(s);
    uint32_t *x = (uint32_t *)(void *)s;
    if (threadIdx.x == 0) *x = 7;
    __syncthreads();
    uint32_t y = *x;
    if (a.mode == PROBE_NO_SECOND_BARRIER) y = kvp::shfl(y, 3); /* they meet, but in no barrier */
    else if (a.mode != PROBE_NO_BARRIER) __syncthreads();
    if (threadIdx.x == a.n) *x = y + 1;
    ((uint32_t *)a.out)[threadIdx.x] = y;
}

/* Lanes of a warp take what others have put there. */
KVP_KERNEL(probe_warp, probe_args, 1024)
{
    KVP_SMEM(s);
    float *x = (float *)(void *)s + threadIdx.x / 32 * 32;
    unsigned lane = threadIdx.x % 32;
    x[lane] = ((const float *)a.in)[threadIdx.x];
    if (a.mode != PROBE_NO_BARRIER) __syncwarp();
    ((float *)a.out)[threadIdx.x] = x[(lane + a.n) % 32];
}

/* Threads write neighbouring bytes, shared, and halves, global; then whole words are read. */
KVP_KERNEL(probe_bytes, probe_args, 64)
{
    KVP_SMEM(s);
    unsigned t = threadIdx.x;
    uint16_t *halves = (uint16_t *)a.out;
    s[t] = (unsigned char)t;
    halves[t] = (uint16_t)(3 * t);
    if (a.mode != PROBE_NO_BARRIER) __syncthreads();
    if (a.mode == PROBE_WRITTEN_BEFORE) { /* words, of which others read a byte */
        if (t < 16) ((uint32_t *)(void *)s)[t] = t;
        else if (t < 32) halves[t] = s[4 * (t - 16) + 1];
        __syncthreads();
    }
    uint32_t sum = ((const uint32_t *)(const void *)s)[t / 4] + ((const uint32_t *)a.out)[t / 2];
    if (a.mode != PROBE_NO_SECOND_BARRIER) __syncthreads();
    ((uint32_t *)a.out)[t] = sum;
}

/* Shuffles and votes; ten numbers for each lane. */
KVP_KERNEL(probe_lanes, probe_args, 32)
{
    unsigned lane = threadIdx.x;
    uint32_t v = ((const uint32_t *)a.in)[lane], *out = (uint32_t *)a.out + lane * 10;
    int by = (int)a.n;
    out[0] = kvp::shfl(v, by);
    out[1] = kvp::shfl_xor(v, by);
    out[2] = kvp::shfl_up(v, (unsigned)by);
    out[3] = kvp::shfl_down(v, (unsigned)by);
    out[4] = kvp::ballot((v & 1u) != 0);
    out[5] = kvp::any(v == a.n);
    out[6] = kvp::all(v >= a.n);
    out[7] = (uint32_t)kvp::shfl((int)v, (int)(lane ^ 5u));
    out[8] = (uint32_t)(kvp::shfl_xor((double)v * 4294967296.0, 3) / 4294967296.0);
    out[9] = (uint32_t)kvp::shfl_down((float)(v & 0xffffu), 1u);
}

/* Halves of a warp go their own ways and meet again. */
KVP_KERNEL(probe_masks, probe_args, 32)
{
    unsigned lane = threadIdx.x;
    uint32_t v = lane * lane, *out = (uint32_t *)a.out, r;
    if (lane < 16) {
        uint32_t mask = a.mode == PROBE_NOT_IN_MASK ? 0xfffeu : 0xffffu;
        r = __shfl_xor_sync(mask, v, a.mode == PROBE_SOURCE_NOT_IN_MASK ? 16 : 1);
        r += __shfl_xor_sync(0xffffu, r, 2);
    } else {
        __syncwarp(0xffff0000u);
        r = __ballot_sync(0xffff0000u, (v & 3u) == 1u);
    }
    out[lane] = kvp::shfl_xor(r, 31);
}

/* Two warps produce for two others; a barrier for each direction. */
KVP_KERNEL(probe_named, probe_args, 128)
{
    KVP_SMEM(s);
    float *x = (float *)(void *)s;
    unsigned t = threadIdx.x;
    float sum = 0.0f;
    if (a.mode == PROBE_NO_SUCH_BARRIER) kvp::bar_sync(16, 128);
    if (a.mode == PROBE_COUNTS_DIFFER) kvp::bar_sync(3, t < 64 ? 128 : 96);
    if (a.mode == PROBE_NOBODY_COMES && t >= 64) __syncthreads();
    if (a.mode == PROBE_WARPS_PART) { /* each half has its barrier, and they exchange */
        x[t % 64] = 0.0f;
        kvp::bar_sync(1 + (int)t / 64, 64);
    }
    for (uint32_t i = 0; i < a.n; i++) {
        if (t < 64) {
            x[t] = (float)(i * 64 + t);
            kvp::bar_sync(1, 128);
            if (a.mode != PROBE_NO_SECOND_BARRIER) kvp::bar_sync(2, 128);
        } else {
            if (a.mode == PROBE_NO_BARRIER) sum += x[127 - t];
            kvp::bar_sync(1, 128);
            if (a.mode != PROBE_NO_BARRIER) sum += x[127 - t];
            kvp::bar_sync(2, 128);
        }
    }
    ((float *)a.out)[t] = sum;
}

/* Three stages of cp.async; thread t reads what thread t ^ 33 copied. Every fifth piece is off. */
KVP_KERNEL(probe_copy, probe_args, 64)
{
    KVP_SMEM(s);
    unsigned t = threadIdx.x;
    uint4 *stages = (uint4 *)(void *)s;
    const unsigned char *g = (const unsigned char *)a.in;
    unsigned shift = 0;
    if (a.mode == PROBE_MISALIGNED_GLOBAL) g += 8;
    if (a.mode == PROBE_MISALIGNED_SHARED) shift = 4;
    if (a.mode == PROBE_OUTSIDE_SHARED) shift = 3072;
    if (a.mode == PROBE_OUTSIDE_GLOBAL) g += a.n * 64 * 16;
    uint32_t sum = 0;
    for (uint32_t i = 0; i < a.n + 2; i++) {
        if (i < a.n) {
            unsigned at = i * 64 + t;
            kvp::cp_async16(s + shift + (i % 3 * 64 + t) * 16, g + at * 16, at % 5 != 0);
        }
        kvp::cp_commit();
        if (i < 2) continue;
        if (a.mode != PROBE_NO_WAIT) kvp::cp_wait<2>();
        if (a.mode != PROBE_NO_BARRIER) __syncthreads();
        unsigned stage = (a.mode == PROBE_WAITS_TOO_LITTLE ? i - 1 : i - 2) % 3;
        uint4 v = stages[stage * 64 + (t ^ 33u)];
        sum = sum * 31 + v.x + v.w;
        if (a.mode != PROBE_NO_SECOND_BARRIER) __syncthreads();
    }
    ((uint32_t *)a.out)[t] = sum;
}

/* Four matrices, rows `n` bytes apart. */
KVP_KERNEL(probe_ldmatrix, probe_args, 32)
{
    KVP_SMEM(s);
    unsigned lane = threadIdx.x;
    uint32_t r[4];
    for (unsigned i = 0; i < 8; i++)
        ((uint16_t *)(void *)(s + lane * a.n))[i] = ((const uint16_t *)a.in)[lane * 8 + i];
    if (a.mode != PROBE_NO_BARRIER) __syncwarp();
    unsigned char *row = s + lane * a.n;
    if (a.mode == PROBE_MISALIGNED_SHARED) row += 8;
    if (a.mode == PROBE_OUTSIDE_SHARED) row += a.n;
    if (a.mode == PROBE_TRANSPOSED) kvp::ldsm4t(r, row);
    else kvp::ldsm4(r, row);
    for (unsigned i = 0; i < 4; i++) ((uint32_t *)a.out)[i * 32 + lane] = r[i];
}

/* C += A B, n times; fragments gathered by the PTX manual's formulas from row-major matrices. */
KVP_KERNEL(probe_mma, probe_args, 32)
{
    unsigned lane = threadIdx.x, g = lane / 4, t = lane % 4;
    const uint16_t *m = (const uint16_t *)a.in, *b = m + 256;
    float *c = (float *)a.out, f[4];
    uint32_t fa[4], fb[2];
    for (unsigned i = 0; i < 4; i++) {
        unsigned row = g + i % 2 * 8, column = 2 * t + i / 2 * 8;
        fa[i] = m[row * 16 + column] | (uint32_t)m[row * 16 + column + 1] << 16;
        f[i] = c[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
    }
    for (unsigned i = 0; i < 2; i++) {
        unsigned k = 2 * t + 8 * i;
        fb[i] = b[k * 8 + g] | (uint32_t)b[(k + 1) * 8 + g] << 16;
    }
    for (uint32_t i = 0; i < a.n; i++) {
        if (a.mode == PROBE_BF16) kvp::mma_bf16(f, fa, fb[0], fb[1]);
        else kvp::mma_f16(f, fa, fb[0], fb[1]);
    }
    for (unsigned i = 0; i < 4; i++) c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = f[i];
}

/* Halves of both types to float, n of them from 0. */
KVP_KERNEL(probe_to_float, probe_args, 1024)
{
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.n) return;
    uint32_t two = i | (i ^ 0x8001u) << 16;
    float2 h = kvp::unpack_f16(two), b = kvp::unpack_bf16(two);
    float *out = (float *)a.out + 6 * i;
    out[0] = kvp::f16_float((uint16_t)i);
    out[1] = h.x;
    out[2] = h.y;
    out[3] = kvp::bf16_float((uint16_t)i);
    out[4] = b.x;
    out[5] = b.y;
}

/* Floats to halves. */
KVP_KERNEL(probe_to_half, probe_args, 1024)
{
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.n) return;
    float x = ((const float *)a.in)[i];
    uint32_t *out = (uint32_t *)a.out + 4 * i;
    out[0] = kvp::float_f16(x);
    out[1] = kvp::pack_f16(-x, x);
    out[2] = kvp::float_bf16(x);
    out[3] = kvp::pack_bf16(-x, x);
}

/* Functions of one number, and of three. */
KVP_KERNEL(probe_math, probe_args, 32)
{
    const float *x = (const float *)a.in + 3 * threadIdx.x;
    float *out = (float *)a.out + 12 * threadIdx.x;
    double p = x[0], q = x[1], r = x[2];
    out[0] = kvp::ex2(x[0]);
    out[1] = kvp::lg2(x[0]);
    out[2] = kvp::rcp(x[0]);
    out[3] = kvp::tanh_fast(x[0]);
    out[4] = kvp::add_rn(x[0], x[1]);
    out[5] = kvp::mul_rn(x[0], x[1]);
    out[6] = kvp::fma_rn(x[0], x[1], x[2]);
    out[7] = kvp::div_rn(x[0], x[1]);
    out[8] = (float)kvp::add_rn(p, kvp::mul_rn(q, r));
    out[9] = (float)kvp::fma_rn(p, q, r);
    out[10] = (float)kvp::div_rn(p, q);
    int bytes = (int)(threadIdx.x * 0x01f3a57bu), others = (int)(threadIdx.x * 0x9e3779b9u);
    out[11] = (float)kvp::dp4a(bytes, others, -7);
}

/* A count and a sum, shared and global, by all threads of all blocks. */
KVP_KERNEL(probe_atomic, probe_args, 256)
{
    KVP_SMEM(s);
    uint32_t *count = (uint32_t *)(void *)s;
    float *sum = (float *)(void *)(s + 4);
    if (threadIdx.x == 0) {
        *count = 0;
        *sum = 0.0f;
    }
    __syncthreads();
    uint32_t mine = kvp::atomic_add(count, 1u);
    kvp::atomic_add(sum, (float)mine);
    if (a.mode == PROBE_PLAIN_AND_ATOMIC && threadIdx.x == 70) *count = 3;
    if (a.mode == PROBE_MISALIGNED_SHARED) kvp::atomic_add((uint32_t *)(void *)(s + 2), 1u);
    __syncthreads();
    if (threadIdx.x == 0) {
        kvp::atomic_add((uint32_t *)a.out, *count);
        kvp::atomic_add((float *)a.out + 1, *sum);
    }
}

/* 16 bytes for each thread. */
KVP_KERNEL(probe_load, probe_args, 1024)
{
    unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned char *g = (const unsigned char *)a.in;
    if (a.mode == PROBE_MISALIGNED_GLOBAL) g += 4;
    if (a.mode == PROBE_OUTSIDE_GLOBAL) g += 16;
    if (a.mode == PROBE_WRITTEN_BEFORE) {
        ((float *)a.out)[at * 4] = 1.0f;
        __syncthreads();
        g = (const unsigned char *)a.out;
    }
    uint4 v = kvp::load16(g + (size_t)at * 16);
    ((uint32_t *)a.out)[at] = v.x + v.y + v.z + v.w;
}

/* Threads that do not meet where they should, or at all. */
KVP_KERNEL(probe_meet, probe_args, 128)
{
    unsigned t = threadIdx.x, lane = t % 32;
    if (a.mode == PROBE_LANES_PART) {
        if (lane < 8) __syncwarp();
        else kvp::shfl(lane, 3);
    }
    if (a.mode == PROBE_WARPS_PART) {
        if (t < 64) __syncthreads();
        else __syncthreads();
    }
    if (a.mode == PROBE_LANE_LEAVES) {
        if (t == a.n) return;
        kvp::ballot(true);
    }
    if (a.mode == PROBE_WARP_LEAVES) {
        if (t >= 96) return;
        __syncthreads();
    }
    if (a.mode == PROBE_NOBODY_COMES && t < 32) kvp::bar_sync(4, 64);
    ((uint32_t *)a.out)[t] = t;
}

#ifndef __CUDACC__
static uint32_t deeper(uint32_t n)
{
    volatile uint32_t here[512];
    for (uint32_t i = 0; i < 512; i += 64) here[i] = n;
    return n ? deeper(n - 1) + here[n % 8 * 64] : 0;
}

/* Threads that do not end, and accesses to what is no memory: the GPU is not asked to do this. */
KVP_KERNEL(probe_lost, probe_args, 64)
{
    uint32_t *out = (uint32_t *)a.out;
    volatile uint32_t *forever = (volatile uint32_t *)a.out;
    switch (a.mode) {
    case PROBE_ENDLESS_COLLECTIVES:
        while (kvp::any(true)) {
        }
        break;
    case PROBE_ENDLESS_ATOMICS:
        while (kvp::atomic_add(out, 0u) != 1) {
        }
        break;
    case PROBE_ENDLESS_LOOP:
        while (*forever == 0) {
        }
        break;
    case PROBE_NULL: *(volatile uint32_t *)(uintptr_t)(a.n + 64) = 1; break;
    case PROBE_DEEP: out[threadIdx.x] = deeper(1000000); break;
    default: out[threadIdx.x] = deeper(8);
    }
}

/* A thread that waits for another by atomics gets its turn. */
KVP_KERNEL(probe_wait, probe_args, 64)
{
    uint32_t *turn = (uint32_t *)a.out;
    unsigned warp = threadIdx.x / 32;
    if (threadIdx.x % 32) return;
    while (kvp::atomic_add(turn, 0u) != 1 - warp) {
    }
    kvp::atomic_add(turn, 1u);
}
#endif

/* In which order blocks, warps and lanes come; and blocks that write the same place. */
KVP_KERNEL(probe_order, probe_args, 64)
{
    uint32_t *out = (uint32_t *)a.out;
    uint32_t at = kvp::atomic_add(out, 1u);
    out[1 + at] = blockIdx.x * 64 + threadIdx.x;
    if (a.mode == PROBE_WRITTEN_BEFORE && threadIdx.x == 0) out[1 + 64 * gridDim.x] = blockIdx.x;
}

/* Words `n` apart. */
KVP_KERNEL(probe_banks, probe_args, 32)
{
    KVP_SMEM(s);
    uint32_t *x = (uint32_t *)(void *)s;
    x[threadIdx.x * a.n] = threadIdx.x;
    __syncwarp();
    ((uint32_t *)a.out)[threadIdx.x] = x[(31 - threadIdx.x) * a.n];
}

KVP_KERNEL(probe_sync, probe_args, 1024)
{
    for (uint32_t i = 0; i < a.n; i++) __syncwarp();
}
