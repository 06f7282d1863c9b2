/*
 * Kernels for the emulator's own test: each shows one facility, or makes one mistake.
 */
#include "cuda/kernels/device.h"
#include "tests/emu/probe.h"

KVP_KERNEL(probe_pass, probe_args, 1024)
{
    KVP_SMEM(s);
    float *x = (float *)(void *)s;
    unsigned t = threadIdx.x, n = blockDim.x;
    x[t] = a.in[blockIdx.x * n + t];
    __syncthreads();
    a.out[blockIdx.x * n + t] = x[(t + a.n) % n];
}

KVP_KERNEL(probe_mma, probe_args, 32)
{
    uint32_t m[4] = {0x3c003c00, 0x3c003c00, 0x3c003c00, 0x3c003c00};
    float c[4] = {0, 0, 0, 0};
    for (uint32_t i = 0; i < a.n; i++) kvp::mma_f16(c, m, m[0], m[1]);
    for (int i = 0; i < 4; i++) a.out[threadIdx.x * 4 + i] = c[i];
}

KVP_KERNEL(probe_sync, probe_args, 1024)
{
    for (uint32_t i = 0; i < a.n; i++) __syncwarp();
}
