/* See vec_probe.h. Compiled for the level by itself, whatever the flags. */
#include "vec_probe.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))), apply_to = function)
#elif !defined(KVP__NO_ASM)
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#endif
#define KVP__LEVEL 3
#define PROBE probe_avx512
#include "vec_probe_body.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
