/*
 * Which instruction-set levels this build has, and which of them this machine runs.
 *
 * A level counts as present only if the system keeps its registers over a context switch, which
 * XGETBV tells. Nothing is remembered: the answer is a pure function of the machine, and it is asked
 * for when something is created, not in a step.
 */
#define _GNU_SOURCE
#include "cpu/kernels.h"

#if defined(__x86_64__)

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

static uint64_t enabled_state(void)
{
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static bool all_set(uint64_t value, uint64_t bits) { return (value & bits) == bits; }

static uint32_t best_level(void)
{
    const uint64_t avx_state = 0x6, avx512_state = 0xe6, amx_state = 0x60000;
    const uint32_t amx = 1u << 24 | 1u << 25; /* tiles, and products of bytes */
    const uint32_t basic = bit_FMA | bit_F16C | bit_AVX | bit_OSXSAVE;
    const uint32_t wide = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !all_set(c, basic)) return KVP_CPU_GENERIC;
    uint64_t state = enabled_state();
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2) || !all_set(state, avx_state))
        return KVP_CPU_GENERIC;
    if (!all_set(b, wide) || !(c & bit_AVX512VNNI) || !all_set(state, avx512_state))
        return KVP_CPU_AVX2;
    return all_set(d, amx) && all_set(state, amx_state) ? KVP_CPU_AMX : KVP_CPU_AVX512;
}

/* Tiles are eight kilobytes more of a thread's state, which a process has to ask for. */
static bool may_use_tiles(void)
{
#if defined(__linux__)
    const long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}

#elif defined(__aarch64__)

#if defined(__linux__)
#include <sys/auxv.h>
#define HAS_DOT() ((getauxval(AT_HWCAP) & (1ul << 20)) != 0) /* HWCAP_ASIMDDP */
#elif defined(__APPLE__)
#define HAS_DOT() 1
#else
#define HAS_DOT() 0
#endif

static uint32_t best_level(void) { return KVP_CPU_NEON; }
static bool may_use_tiles(void) { return false; }

#else

static uint32_t best_level(void) { return KVP_CPU_GENERIC; }
static bool may_use_tiles(void) { return false; }

#endif

uint32_t kvp__cpu_level(uint32_t cap)
{
    uint32_t best = best_level();
    if (cap == 0) cap = best;
    if (best == KVP_CPU_NEON || cap == KVP_CPU_NEON) return best == cap ? best : KVP_CPU_GENERIC;
    uint32_t level = cap < best ? cap : best; /* those of x86-64 are in order */
    return level == KVP_CPU_AMX && !may_use_tiles() ? KVP_CPU_AVX512 : level;
}

const kvp__kernels *kvp__kernels_get(uint32_t level)
{
    switch (level) {
    case KVP_CPU_GENERIC: return &kvp__kernels_generic;
#if defined(__x86_64__)
    case KVP_CPU_AVX2: return &kvp__kernels_avx2;
    case KVP_CPU_AVX512: return &kvp__kernels_avx512;
    case KVP_CPU_AMX: return &kvp__kernels_amx;
#elif defined(__aarch64__)
    case KVP_CPU_NEON: return HAS_DOT() ? &kvp__kernels_neon_dot : &kvp__kernels_neon;
    case KVP__CPU_NEON_DOT: return HAS_DOT() ? &kvp__kernels_neon_dot : NULL;
#endif
    default: return NULL;
    }
}
