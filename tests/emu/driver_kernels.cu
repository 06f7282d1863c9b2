/*
 * Kernels for the tests of the emulated driver, test_driver.cc.
 */
#include "cuda/kernels/device.h"

#include "tests/emu/driver_kernels.h"

/* p[i] = p[i] * factor + term. grid (ceil(n / threads)). */
KVP_KERNEL(driver_affine, driver_affine_args, 64)
{
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.n) a.p[i] = a.p[i] * a.factor + a.term;
}

/* p[i] = the last of `words` words of shared memory, which thread 0 sets to factor. */
KVP_KERNEL(driver_shared, driver_affine_args, 64)
{
    KVP_SMEM(raw);
    auto *last = reinterpret_cast<float *>(raw) + a.words - 1;
    if (threadIdx.x == 0) *last = a.factor;
    __syncthreads();
    if (threadIdx.x < a.n) a.p[threadIdx.x] = *last;
}

/* Half of a warp waits at a barrier that the other half never comes to. */
KVP_KERNEL(driver_stuck, driver_affine_args, 32)
{
    if (threadIdx.x < 16)
        __syncthreads();
    else
        __syncwarp();
}
