/* See vec_probe.h. Compiled for the level by itself, whatever the flags. */
#include "vec_probe.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#elif !defined(KVP__NO_ASM)
#pragma GCC target("avx2,fma,f16c")
#endif
#define KVP__LEVEL 2
#define PROBE probe_avx2
#include "vec_probe_body.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
