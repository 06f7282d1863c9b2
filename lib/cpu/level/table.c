/*
 * The table of one level's kernels. See kernels.h.
 */
#include "cpu/kernels.h"

#if KVP__LEVEL == KVP_CPU_AMX
#define BESIDE(name) .name = kvp__##name##_avx512,
#else
#define BESIDE(name) .name = KVP__AT(name),
#endif

const kvp__kernels KVP__AT(kernels) = {
    .level = KVP__LEVEL,
    .matmul = KVP__AT(matmul),
    KVP__KERNELS_BESIDE(BESIDE)
};
