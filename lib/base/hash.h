/*
 * Keyed 128-bit hash: SipHash (Aumasson and Bernstein, 2012) with one compression and three
 * finalisation rounds and the 128-bit output of its reference. Used as a filter in front of a
 * comparison of the tokens themselves, so a collision costs time, never a wrong answer; the key keeps
 * a guest from making collisions on purpose.
 */
#ifndef KVP_BASE_HASH_H
#define KVP_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

typedef struct kvp__hash128 {
    uint64_t lo, hi;
} kvp__hash128;

typedef struct kvp__hash_key {
    uint64_t k0, k1;
} kvp__hash_key;

kvp__hash128 kvp__hash(kvp__hash_key key, const void *data, size_t bytes);

/* A secret from the system's generator (or, where that says no, from addresses and the clock). */
kvp__hash_key kvp__hash_secret(void);

#endif
