/*
 * What a card reads at most: every thread of the grid takes 16 bytes at a time, eight of them on
 * the way, and keeps their exclusive or. Only for nvcc: tests/gpu/gates.cc measures with it.
 */
#include "cuda/kernels/device.h"

#include "tests/gpu/ceiling.h"

KVP_KERNEL(ceiling_read, ceiling_args, 512)
{
    const uint64_t all = (uint64_t)gridDim.x * blockDim.x;
    const uint4 *p = reinterpret_cast<const uint4 *>(a.from);
    uint32_t sum = 0;
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i + 7 * all < a.pieces;
         i += 8 * all) {
        uint4 v[8];
        KVP_UNROLL
        for (int j = 0; j < 8; j++) v[j] = kvp::load16(p + i + j * all);
        KVP_UNROLL
        for (int j = 0; j < 8; j++) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    if (sum == a.never) a.out[0] = sum;
}
