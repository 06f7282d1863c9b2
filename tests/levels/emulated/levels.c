/*
 * Stands in for lib/cpu/levels.c where AVX-512 and AMX are emulated (immintrin.h, cpu/tile_amx.h): the machine is taken to
 * have it. This machine's own levels are plain C and AVX2, which the emulation needs.
 */
#include "cpu/kernels.h"

uint32_t kvp__cpu_level(uint32_t cap)
{
    if (cap == 0) return KVP_CPU_AMX;
    return cap == KVP_CPU_NEON ? KVP_CPU_GENERIC : cap;
}

const kvp__kernels *kvp__kernels_get(uint32_t level)
{
    switch (level) {
    case KVP_CPU_GENERIC: return &kvp__kernels_generic;
    case KVP_CPU_AVX2: return &kvp__kernels_avx2;
    case KVP_CPU_AVX512: return &kvp__kernels_avx512;
    case KVP_CPU_AMX: return &kvp__kernels_amx;
    default: return NULL;
    }
}
