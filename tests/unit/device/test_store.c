/*
 * B105 on the device: blocks whose place in the slab is beyond 32 bits are written and read where they
 * are. The slab is committed as far as it is touched, so its size costs nothing.
 */
#include "device/device.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

enum { HEADS = 8, DIM = 128, BLOCK = 16, LAST = 65536 };

static void case_b105_store(void **state)
{
    (void)state;
    uint32_t ordinal;
    const kvp__device *d = kvp__device_find("cpu", &ordinal);
    kvp_layer_group groups = {.layers = 1, .kv_heads = HEADS, .key_dim = DIM, .value_dim = DIM};
    kvp_geometry in = {.size = sizeof in, .n_groups = 1, .groups = &groups};
    static kvp__geometry g;
    kvp__layout l;
    kvp__hooks hooks;
    kvp__store *s = NULL;
    assert_int_equal(kvp__hooks_fill(&hooks, NULL, NULL), KVP_OK);
    assert_int_equal(kvp__geometry_fill(&g, &in, NULL), KVP_OK);
    assert_int_equal(kvp__layout_make(&l, &g, BLOCK, KVP_KV_F16, KVP_KV_F16, LAST + 1, NULL), KVP_OK);
    assert_true(kvp__layout_block(&l, 0, LAST) > UINT32_MAX);
    assert_int_equal(d->store_create(&hooks, &l, NULL, ordinal, &s, NULL), KVP_OK);
    static float k[HEADS * DIM], v[HEADS * DIM];
    d->poison(s, 0, LAST, 0);
    for (uint32_t id = LAST - 1; id <= LAST; id++)
        for (uint32_t t = 0; t < BLOCK; t++) {
            d->peek(s, 0, 0, id, t, k, v);
            for (int i = 0; i < HEADS * DIM; i++) {
                assert_int_equal(k[i] != k[i], id == LAST);
                assert_int_equal(v[i] != v[i], id == LAST);
            }
        }
    /* 32-bit arithmetic would have hit one of these. */
    static const uint32_t near[] = {0, 1, 32767, 32768};
    for (int n = 0; n < 4; n++) {
        d->peek(s, 0, 0, near[n], 0, k, v);
        for (int i = 0; i < HEADS * DIM; i++) assert_true(k[i] == 0 && v[i] == 0);
    }
    d->store_destroy(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(case_b105_store)};
    return cmocka_run_group_tests_name("device/store", tests, NULL, NULL);
}
