/*
 * SipHash-1-3 with 128 bits of output, from its description. One compression round, because the
 * prefix index hashes every block of every prompt; it is a filter, not a signature (see hash.h).
 */
#define _GNU_SOURCE
#include "base/hash.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

static inline uint64_t rotl(uint64_t x, int n) { return (x << n) | (x >> (64 - n)); }

static inline uint64_t load64(const unsigned char *p)
{
    uint64_t v;
    memcpy(&v, p, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    v = __builtin_bswap64(v);
#endif
    return v;
}

typedef struct sip {
    uint64_t a, b, c, d;
} sip;

static inline void sip_round(sip *s)
{
    s->a += s->b;
    s->b = rotl(s->b, 13) ^ s->a;
    s->a = rotl(s->a, 32);
    s->c += s->d;
    s->d = rotl(s->d, 16) ^ s->c;
    s->a += s->d;
    s->d = rotl(s->d, 21) ^ s->a;
    s->c += s->b;
    s->b = rotl(s->b, 17) ^ s->c;
    s->c = rotl(s->c, 32);
}

static inline void sip_word(sip *s, uint64_t w)
{
    s->d ^= w;
    sip_round(s);
    s->a ^= w;
}

static inline uint64_t sip_final(sip *s)
{
    for (int i = 0; i < 3; i++) sip_round(s);
    return s->a ^ s->b ^ s->c ^ s->d;
}

kvp__hash128 kvp__hash(kvp__hash_key key, const void *data, size_t bytes)
{
    const unsigned char *p = data;
    sip s = {
        .a = key.k0 ^ 0x736f6d6570736575u,
        .b = key.k1 ^ 0x646f72616e646f6du ^ 0xee,
        .c = key.k0 ^ 0x6c7967656e657261u,
        .d = key.k1 ^ 0x7465646279746573u,
    };
    size_t rest = bytes;
    for (; rest >= 8; rest -= 8, p += 8) sip_word(&s, load64(p));

    uint64_t last = (uint64_t)bytes << 56;
    for (size_t i = 0; i < rest; i++) last |= (uint64_t)p[i] << (8 * i);
    sip_word(&s, last);

    kvp__hash128 h;
    s.c ^= 0xee;
    h.lo = sip_final(&s);
    s.b ^= 0xdd;
    h.hi = sip_final(&s);
    return h;
}

/* Where the system gives no random bytes the key is only hard to guess, not secret; hits are proved
 * by comparison in any case. */
static uint64_t weak_entropy(const void *salt)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    uint64_t x = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
    return (x ^ (uint64_t)(uintptr_t)salt) * 0x9e3779b97f4a7c15u;
}

kvp__hash_key kvp__hash_secret(void)
{
    kvp__hash_key k;
    if (getrandom(&k, sizeof k, GRND_NONBLOCK) == (ssize_t)sizeof k) return k;
    k.k0 = weak_entropy(&k);
    k.k1 = weak_entropy(&errno) ^ rotl(k.k0, 29);
    return k;
}
