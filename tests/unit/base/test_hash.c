/*
 * The hash against SipHash written out once more, with rounds as parameters; that one is held
 * against the published values of SipHash-2-4.
 */
#include "base/hash.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <string.h>

#include <cmocka.h>

static uint64_t rol(uint64_t x, unsigned n) { return x << n | x >> (64 - n); }

static void rounds(uint64_t v[4], int n)
{
    while (n-- > 0) {
        v[0] += v[1];
        v[2] += v[3];
        v[1] = rol(v[1], 13) ^ v[0];
        v[3] = rol(v[3], 16) ^ v[2];
        v[0] = rol(v[0], 32);
        v[2] += v[1];
        v[0] += v[3];
        v[1] = rol(v[1], 17) ^ v[2];
        v[3] = rol(v[3], 21) ^ v[0];
        v[2] = rol(v[2], 32);
    }
}

static void siphash(int c, int d, bool wide, uint64_t k0, uint64_t k1, const uint8_t *p, size_t n,
                    uint64_t out[2])
{
    uint64_t v[4] = {k0 ^ 0x736f6d6570736575u, k1 ^ 0x646f72616e646f6du, k0 ^ 0x6c7967656e657261u,
                     k1 ^ 0x7465646279746573u};
    if (wide) v[1] ^= 0xee;
    for (size_t i = 0; i <= n / 8; i++) {
        uint64_t m = i == n / 8 ? (uint64_t)(n & 0xff) << 56 : 0;
        for (size_t j = 0; j < 8 && i * 8 + j < n; j++) m |= (uint64_t)p[i * 8 + j] << (8 * j);
        v[3] ^= m;
        rounds(v, c);
        v[0] ^= m;
    }
    v[2] ^= wide ? 0xee : 0xff;
    rounds(v, d);
    out[0] = v[0] ^ v[1] ^ v[2] ^ v[3];
    if (!wide) return;
    v[1] ^= 0xdd;
    rounds(v, d);
    out[1] = v[0] ^ v[1] ^ v[2] ^ v[3];
}

static const uint64_t key0 = 0x0706050403020100u, key1 = 0x0f0e0d0c0b0a0908u;

static void test_oracle_is_siphash(void **state)
{
    (void)state;
    uint8_t text[15];
    uint64_t h[2];
    for (uint8_t i = 0; i < 15; i++) text[i] = i;
    siphash(2, 4, false, key0, key1, text, 15, h);
    assert_int_equal(h[0], 0xa129ca6149be45e5u);
    siphash(2, 4, true, key0, key1, text, 0, h);
    assert_int_equal(h[0], 0xe6a825ba047f81a3u);
    assert_int_equal(h[1], 0x930255c71472f66du);
}

static void test_equals_oracle(void **state)
{
    (void)state;
    uint8_t text[1100];
    for (size_t i = 0; i < sizeof text; i++) text[i] = (uint8_t)(i * 151 + i / 7);
    for (size_t n = 0; n < sizeof text; n += n < 300 ? 1 : 61) {
        uint64_t want[2];
        siphash(1, 3, true, key0 + n, key1, text, n, want);
        kvp__hash128 got = kvp__hash((kvp__hash_key){key0 + n, key1}, text, n);
        assert_int_equal(got.lo, want[0]);
        assert_int_equal(got.hi, want[1]);
    }
}

static void test_unaligned_input(void **state)
{
    (void)state;
    _Alignas(8) uint8_t text[64];
    for (size_t i = 0; i < sizeof text; i++) text[i] = (uint8_t)(i * 7);
    kvp__hash128 a = kvp__hash((kvp__hash_key){1, 2}, text, 40);
    memmove(text + 3, text, 40);
    kvp__hash128 b = kvp__hash((kvp__hash_key){1, 2}, text + 3, 40);
    assert_memory_equal(&a, &b, sizeof a);
}

static void test_secrets_differ(void **state)
{
    (void)state;
    kvp__hash_key a = kvp__hash_secret(), b = kvp__hash_secret();
    assert_true(a.k0 != b.k0 && a.k1 != b.k1 && a.k0 != a.k1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_oracle_is_siphash),
        cmocka_unit_test(test_equals_oracle),
        cmocka_unit_test(test_unaligned_input),
        cmocka_unit_test(test_secrets_differ),
    };
    return cmocka_run_group_tests_name("hash", tests, NULL, NULL);
}
