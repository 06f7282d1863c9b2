/*
 * Rows as floats: every type against the CPU's panels, bit for bit, and against values written down
 * from the definition in double precision.
 */
#include "model/floats.h"

#include "base/half.h"
#include "cpu/pack.h"

#include "support/gguf_writer.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static const uint32_t all[] = {KVP__F32,  KVP__F16,  KVP__BF16, KVP__Q4_0, KVP__Q4_1, KVP__Q5_0, KVP__Q5_1,
                               KVP__Q8_0, KVP__Q2_K, KVP__Q3_K, KVP__Q4_K, KVP__Q5_K, KVP__Q6_K};

enum { N = 768, ROWS = 37 };

/* Any bytes at all: every pattern of quants and of small scales; heads that are numbers. */
static void random_rows(uint32_t type, uint8_t *rows, uint64_t bytes, uint64_t *rng)
{
    kvp__type_info info = kvp__type_get(type);
    for (uint64_t i = 0; i < bytes; i++) rows[i] = (uint8_t)(gw_rand(rng) >> 17);
    for (uint64_t b = 0; b + info.bytes <= bytes; b += info.bytes)
        for (uint32_t i = 0; i + 1 < info.bytes; i++)
            if ((rows[b + i + 1] & 0x7c) == 0x7c) rows[b + i + 1] ^= 0x40; /* no infinity, no NaN */
}

static void every_type_is_what_the_panels_hold(void **state)
{
    (void)state;
    uint64_t rng = 11;
    for (size_t t = 0; t < KVP__COUNT(all); t++) {
        uint32_t type = all[t];
        uint64_t row_bytes = kvp__row_bytes(type, N);
        uint8_t *rows = malloc(row_bytes * ROWS);
        random_rows(type, rows, row_bytes * ROWS, &rng);
        kvp__mat m;
        uint8_t *panels = aligned_alloc(64, (size_t)kvp__round_up(
            kvp__mat_describe(&m, type, ROWS, N), 64));
        m.panels = panels;
        for (uint32_t p = 0; p * KVP__LANES < ROWS; p++)
            kvp__pack_panel(type, N, rows + p * KVP__LANES * row_bytes,
                            ROWS - p * KVP__LANES < KVP__LANES ? ROWS - p * KVP__LANES : KVP__LANES,
                            panels + p * m.panel_bytes);
        for (uint32_t r = 0; r < ROWS; r++) {
            float ours[N], theirs[N];
            kvp__row_floats(type, rows + r * row_bytes, N, ours);
            kvp__pack_row(&m, r, theirs);
            for (uint32_t i = 0; i < N; i++)
                if (memcmp(&ours[i], &theirs[i], 4) != 0 && !(ours[i] == 0 && theirs[i] == 0))
                    fail_msg("%s: row %u, value %u: %a, not %a", kvp__type_get(type).name, r, i,
                             (double)ours[i], (double)theirs[i]);
        }
        free(rows);
        free(panels);
    }
}

/* One block with a scale of 0.5 (and a minimum of 2): values that can be written down. */
static void blocks_mean_what_they_say(void **state)
{
    (void)state;
    uint8_t b[210] = {0};
    float out[256];
    uint16_t half = kvp__f32_to_f16(0.5f), two = kvp__f32_to_f16(2.0f);

    memcpy(b, &half, 2);
    b[2] = 0xf9; /* value 0: 9 - 8, value 16: 15 - 8 */
    kvp__row_floats(KVP__Q4_0, b, 32, out);
    assert_true(out[0] == 0.5f && out[16] == 3.5f && out[1] == -4.0f);

    memset(b, 0, sizeof b);
    memcpy(b, &half, 2);
    memcpy(b + 2, &two, 2);
    b[4] = 0x31;
    kvp__row_floats(KVP__Q4_1, b, 32, out);
    assert_true(out[0] == 2.5f && out[16] == 3.5f && out[1] == 2.0f);

    memset(b, 0, sizeof b);
    memcpy(b, &half, 2);
    b[2] = 1; /* the fifth bit of value 0 */
    b[6] = 2;
    kvp__row_floats(KVP__Q5_0, b, 32, out);
    assert_true(out[0] == 1.0f && out[1] == -8.0f);

    memset(b, 0, sizeof b);
    memcpy(b, &half, 2);
    memcpy(b + 2, &two, 2);
    b[4 + 3] = 0x80; /* of value 31 */
    kvp__row_floats(KVP__Q5_1, b, 32, out);
    assert_true(out[31] == 10.0f && out[0] == 2.0f);

    memset(b, 0, sizeof b);
    memcpy(b, &half, 2);
    b[2 + 5] = 0xff;
    kvp__row_floats(KVP__Q8_0, b, 32, out);
    assert_true(out[5] == -0.5f && out[4] == 0.0f);

    memset(b, 0, sizeof b);
    b[0] = 0x13; /* part 0: scale 3, minimum 1 */
    b[16] = 2;
    memcpy(b + 80, &half, 2);
    memcpy(b + 82, &two, 2);
    kvp__row_floats(KVP__Q2_K, b, 256, out);
    assert_true(out[0] == 1.0f && out[1] == -2.0f && out[16] == 0.0f);

    memset(b, 0, sizeof b);
    memcpy(b, &half, 2);
    memcpy(b + 2, &two, 2);
    b[4] = 5, b[8] = 1; /* part 0: scale 5, minimum 1 */
    b[16] = 3;
    kvp__row_floats(KVP__Q4_K, b, 256, out);
    assert_true(out[0] == 5.5f && out[1] == -2.0f && out[32] == 0.0f);

    memset(b, 0, sizeof b);
    b[208 - 16] = 4; /* part 0: scale 4 */
    b[0] = 1, b[128] = 2; /* value 0: 1 + 32 - 32 */
    memcpy(b + 208, &half, 2);
    kvp__row_floats(KVP__Q6_K, b, 256, out);
    assert_true(out[0] == 2.0f && out[1] == -64.0f && out[16] == 0.0f);
}

static void halves_are_exact(void **state)
{
    (void)state;
    for (uint32_t u = 0; u < 0x10000; u++) {
        uint16_t h = (uint16_t)u;
        float f, b;
        kvp__row_floats(KVP__F16, &h, 1, &f);
        kvp__row_floats(KVP__BF16, &h, 1, &b);
        double e = (u >> 10 & 31) ? ldexp(1.0 + (u & 1023) / 1024.0, (int)(u >> 10 & 31) - 15)
                                  : ldexp((u & 1023) / 1024.0, -14);
        if ((u >> 10 & 31) != 31) assert_true((double)f == (u & 0x8000 ? -e : e));
        uint32_t bits = u << 16, got;
        memcpy(&got, &b, 4);
        assert_int_equal(got, bits);
    }
}

static void bytes_of_a_row(void **state)
{
    (void)state;
    assert_int_equal(kvp__row_bytes(KVP__F32, 3), 12);
    assert_int_equal(kvp__row_bytes(KVP__Q8_0, 64), 68);
    assert_int_equal(kvp__row_bytes(KVP__Q6_K, 512), 420);
    assert_int_equal(kvp__row_bytes(KVP__Q8_0, 33), 0);
    assert_int_equal(kvp__row_bytes(KVP__Q4_0, 0), 0);
    assert_int_equal(kvp__row_bytes(9, 64), 0);
    assert_int_equal(kvp__row_bytes(KVP__F32, UINT64_MAX), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_type_is_what_the_panels_hold),
        cmocka_unit_test(blocks_mean_what_they_say),
        cmocka_unit_test(halves_are_exact),
        cmocka_unit_test(bytes_of_a_row),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
