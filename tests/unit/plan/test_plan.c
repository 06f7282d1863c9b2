/*
 * Plan: the sizes every account of KV caches agrees on, the layout of blocks, and bad geometry.
 */
#include "plan/plan.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <cmocka.h>

static kvp__geometry make(const kvp_layer_group *groups, uint32_t n)
{
    kvp_geometry in;
    memset(&in, 0, sizeof in);
    in.size = sizeof in;
    in.n_groups = n;
    in.groups = groups;
    kvp__geometry g;
    assert_int_equal(kvp__geometry_fill(&g, &in, NULL), KVP_OK);
    return g;
}

static kvp_plan_result plan(const kvp_layer_group *groups, uint32_t n, uint64_t tokens,
                            uint64_t sequences)
{
    kvp__geometry g = make(groups, n);
    kvp_plan_options o;
    memset(&o, 0, sizeof o);
    o.size = sizeof o;
    o.tokens = tokens;
    o.sequences = sequences;
    kvp_plan_result r;
    assert_int_equal(kvp__plan(&g, &o, &r, NULL), KVP_OK);
    return r;
}

#define KIB 1024ull
#define MIB (1024ull * KIB)
#define GIB (1024ull * MIB)

static void known_sizes(void **s)
{
    (void)s;
    static const struct {
        const char *what;
        kvp_layer_group group;
        uint64_t tokens, sequences, per_token, bytes;
    } t[] = {
        {"Llama 3.1 8B, 16K", {32, 8, 128, 128, 0, 32}, 16384, 1, 131072, 2 * GIB},
        {"Llama 3.1 8B, 128K", {32, 8, 128, 128, 0, 32}, 131072, 1, 131072, 16 * GIB},
        {"Llama 3.1 8B, 8 x 16K", {32, 8, 128, 128, 0, 32}, 16384, 8, 131072, 16 * GIB},
        {"no GQA", {32, 32, 128, 128, 0, 32}, 16384, 1, 512 * KIB, 8 * GIB},
        {"Llama 3.1 70B, 128K", {80, 8, 128, 128, 0, 64}, 131072, 1, 320 * KIB, 40 * GIB},
        {"DeepSeek-V3 (MLA)", {61, 1, 576, KVP_DIM_NONE, 0, 128}, 1, 1, 70272, 70272},
        {"32 heads, 4096, batch 1", {32, 32, 128, 128, 0, 32}, 4096, 1, 512 * KIB, 2147483648ull},
        {"32 heads, 4096, batch 8", {32, 32, 128, 128, 0, 32}, 4096, 8, 512 * KIB, 16 * GIB},
        {"8 heads, 4096", {32, 8, 128, 128, 0, 32}, 4096, 1, 128 * KIB, 512 * MIB},
        {"1 head (MQA), 4096", {32, 1, 128, 128, 0, 32}, 4096, 1, 16 * KIB, 64 * MIB},
    };
    for (unsigned i = 0; i < KVP__COUNT(t); i++) {
        kvp_plan_result r = plan(&t[i].group, 1, t[i].tokens, t[i].sequences);
        if (r.kv_bytes_per_token != t[i].per_token || r.kv_bytes_ideal != t[i].bytes)
            fail_msg("%s: %llu a token, %llu in all", t[i].what,
                     (unsigned long long)r.kv_bytes_per_token, (unsigned long long)r.kv_bytes_ideal);
        assert_true(r.kv_bytes >= r.kv_bytes_ideal);
        if (t[i].tokens % 16 == 0) /* padding is the skew alone */
            assert_true(r.kv_bytes <= r.kv_bytes_ideal + r.kv_bytes_ideal / 100);
    }
}

static void window_layers_and_fit(void **s)
{
    (void)s;
    static const kvp_layer_group g[2] = {{22, 1, 256, 256, 512, 4}, {4, 1, 256, 256, 0, 4}};
    kvp_plan_result r = plan(g, 2, 4096, 3);
    assert_int_equal(r.kv_bytes_per_token, 26 * 1024);
    assert_int_equal(r.kv_bytes_ideal, 3ull * 4096 * 26 * 1024);
    assert_int_equal(r.kv_bytes_windowed, 3ull * (22 * 512 + 4 * 4096) * 1024);
    assert_int_equal(r.blocks_per_sequence, 256);
    assert_int_equal(r.blocks, 768);

    kvp__geometry geo = make(g, 2);
    kvp_plan_options o;
    memset(&o, 0, sizeof o);
    o.size = sizeof o;
    o.tokens = 4096;
    o.memory_bytes = 5 * 256 * r.block_bytes + r.block_bytes;
    assert_int_equal(kvp__plan(&geo, &o, &r, NULL), KVP_OK);
    assert_int_equal(r.blocks_fit, 5 * 256 + 1);
    assert_int_equal(r.sequences_fit, 5);
}

static void plan_equals_layout(void **s)
{
    (void)s;
    static const kvp_layer_group g[2] = {{5, 2, 80, 72, 8, 4}, {3, 3, 17, 5, 0, 3}};
    kvp__geometry geo = make(g, 2);
    for (uint32_t b = 1; b <= 256; b *= 2)
        for (uint32_t k = KVP_KV_F16; k <= KVP_KV_F32; k++) {
            kvp_plan_options o;
            memset(&o, 0, sizeof o);
            o.size = sizeof o;
            o.block_tokens = b;
            o.k_format = k;
            o.tokens = 1000;
            kvp_plan_result r;
            kvp__layout l;
            assert_int_equal(kvp__plan(&geo, &o, &r, NULL), KVP_OK);
            assert_int_equal(kvp__layout_make(&l, &geo, b, k, KVP_KV_F16, r.blocks, NULL), KVP_OK);
            assert_int_equal(l.bytes, r.kv_bytes);
            assert_int_equal(l.block_bytes, r.block_bytes);
        }
}

static void parts_of_a_block_do_not_overlap(void **s)
{
    (void)s;
    static const kvp_layer_group g[1] = {{7, 3, 33, 65, 0, 3}};
    kvp__geometry geo = make(g, 1);
    for (uint32_t b = 1; b <= 256; b *= 2) {
        kvp__layout l;
        assert_int_equal(kvp__layout_make(&l, &geo, b, KVP_KV_F16, KVP_KV_F32, 10, NULL), KVP_OK);
        const kvp__group_layout *p = &l.groups[0];
        assert_int_equal(l.tile, b < 16 ? b : 16);
        assert_int_equal(p->k_head, 33 * b * 2);
        assert_int_equal(p->v_head, 65 * b * 4);
        assert_true(p->k_part >= 3 * p->k_head && p->k_part % 64 == 0);
        assert_true(p->v_part >= 3 * p->v_head && p->v_part % 64 == 0);
        assert_int_equal(p->layer, p->k_part + p->v_part);
        assert_int_equal(p->extent, 7 * p->layer);
        assert_true(p->pitch >= p->extent && p->pitch % 64 == 0);
        assert_int_equal(l.bytes, 10 * p->pitch);
    }
}

static void power_of_two_pitches_are_skewed(void **s)
{
    (void)s;
    static const kvp_layer_group g[1] = {{32, 8, 128, 128, 0, 32}};
    kvp__geometry geo = make(g, 1);
    kvp__layout l;
    assert_int_equal(kvp__layout_make(&l, &geo, 16, KVP_KV_F16, KVP_KV_F16, 4, NULL), KVP_OK);
    assert_int_equal(l.groups[0].extent, 2 * MIB);
    assert_true(l.groups[0].pitch / 64 % 2 == 1);
}

static void case_b105(void **s)
{
    (void)s;
    static const kvp_layer_group g[1] = {{1, 8, 128, 128, 0, 8}};
    kvp__geometry geo = make(g, 1);
    kvp__layout l;
    assert_int_equal(kvp__layout_make(&l, &geo, 16, KVP_KV_F16, KVP_KV_F16, 70000, NULL), KVP_OK);
    assert_int_equal(l.groups[0].extent, 2 * 32768);
    uint64_t pitch = l.groups[0].pitch;
    assert_true(kvp__layout_block(&l, 0, 65535) == 65535ull * pitch);
    assert_true(kvp__layout_block(&l, 0, 65536) == 65536ull * pitch);
    assert_true(kvp__layout_block(&l, 0, 65536) > 1ull << 32);
    l.groups[0].pitch = 32768; /* in elements, as the report counts */
    assert_true(kvp__layout_block(&l, 0, 65535) == 2147450880ull);
    assert_true(kvp__layout_block(&l, 0, 65536) == 2147483648ull);
}

static void case_b148(void **s)
{
    (void)s;
    static const kvp_layer_group scalar[1] = {{4, 2, 64, 64, 0, 8}};
    assert_int_equal(plan(scalar, 1, 100, 1).kv_bytes_per_token, 4 * 2 * 2 * 64 * 2);

    /* [2, 2, 4, 0] */
    static const kvp_layer_group mixed[3] = {
        {2, 2, 64, 64, 0, 8}, {1, 4, 64, 64, 0, 8}, {1, 0, 64, 64, 0, 8}};
    assert_int_equal(plan(mixed, 3, 100, 1).kv_bytes_per_token, 2 * (2 + 2 + 4) * 64 * 2);
    kvp__geometry geo = make(mixed, 3);
    kvp__layout l;
    kvp_error err;
    memset(&err, 0, sizeof err);
    err.size = sizeof err;
    assert_int_equal(kvp__layout_make(&l, &geo, 16, KVP_KV_F16, KVP_KV_F16, 1, &err),
                     KVP_ERR_UNSUPPORTED);
    assert_non_null(strstr(err.text, "group 2"));
}

static void layers_find_their_groups(void **s)
{
    (void)s;
    static const kvp_layer_group g[2] = {{2, 1, 8, 8, 4, 2}, {1, 1, 8, 8, 0, 2}};
    static const uint8_t of[3] = {0, 1, 0};
    kvp_geometry in;
    memset(&in, 0, sizeof in);
    in.size = sizeof in;
    in.n_groups = 2;
    in.groups = g;
    in.n_layers = 3;
    in.layer_groups = of;
    kvp__geometry out;
    assert_int_equal(kvp__geometry_fill(&out, &in, NULL), KVP_OK);
    assert_int_equal(out.n_layers, 3);
    assert_int_equal(out.layer_group[1], 1);
    assert_int_equal(out.layer_index[1], 0);
    assert_int_equal(out.layer_index[2], 1);

    in.layer_groups = NULL;
    assert_int_equal(kvp__geometry_fill(&out, &in, NULL), KVP_OK);
    assert_int_equal(out.layer_group[1], 0);
    assert_int_equal(out.layer_group[2], 1);
}

static void bad_geometry_is_refused(void **s)
{
    (void)s;
    static const kvp_layer_group good = {2, 2, 8, 8, 0, 4};
    static const uint8_t third[2] = {0, 1}, many[2] = {0, 0};
    kvp_layer_group g[2];
    kvp_geometry in;
    kvp__geometry out, before;
    memset(&out, 0x5a, sizeof out);
    before = out;
    for (int i = 0; i < 11; i++) {
        memset(&in, 0, sizeof in);
        in.size = sizeof in;
        in.n_groups = 1;
        in.groups = g;
        g[0] = g[1] = good;
        kvp_status want = KVP_ERR_INVALID_ARG;
        switch (i) {
        case 0: in.n_groups = 0; break;
        case 1: in.n_groups = 17, want = KVP_ERR_UNSUPPORTED; break;
        case 2: in.groups = NULL; break;
        case 3: g[0].key_dim = 0; break;
        case 4: g[0].query_heads = 5; break;
        case 5: in.n_layers = 3; break;
        case 6: in.layer_groups = third; break;
        case 7: g[0].layers = 1, g[1].layers = 1, in.n_groups = 2, in.layer_groups = many; break;
        case 8: g[0].layers = 1025, want = KVP_ERR_UNSUPPORTED; break;
        case 9: g[0].layers = 0; break;
        case 10: in.group_stride = 8; break;
        }
        kvp_error err;
        memset(&err, 0, sizeof err);
        err.size = sizeof err;
        assert_int_equal(kvp__geometry_fill(&out, &in, &err), want);
        assert_true(err.text[0] != 0);
        assert_memory_equal(&out, &before, sizeof out);
    }
}

static void bad_plans_are_refused(void **s)
{
    (void)s;
    static const kvp_layer_group g[1] = {{32, 8, 128, 128, 0, 32}};
    kvp__geometry geo = make(g, 1);
    kvp_plan_options o;
    kvp_plan_result r;
    memset(&r, 0x5a, sizeof r);
    kvp_plan_result before = r;
    memset(&o, 0, sizeof o);
    o.size = sizeof o;
    o.block_tokens = 24;
    assert_int_equal(kvp__plan(&geo, &o, &r, NULL), KVP_ERR_INVALID_ARG);
    o.block_tokens = 512;
    assert_int_equal(kvp__plan(&geo, &o, &r, NULL), KVP_ERR_INVALID_ARG);
    o.block_tokens = 16;
    o.k_format = 9;
    assert_int_equal(kvp__plan(&geo, &o, &r, NULL), KVP_ERR_INVALID_ARG);
    o.k_format = 0;
    o.tokens = UINT64_MAX / 4;
    assert_int_equal(kvp__plan(&geo, &o, &r, NULL), KVP_ERR_TOO_LARGE);
    o.tokens = 1u << 20;
    o.sequences = UINT64_MAX / 100;
    assert_int_equal(kvp__plan(&geo, &o, &r, NULL), KVP_ERR_TOO_LARGE);
    assert_memory_equal(&r, &before, sizeof r);

    kvp__layout l;
    assert_int_equal(kvp__layout_make(&l, &geo, 3, KVP_KV_F16, KVP_KV_F16, 1, NULL),
                     KVP_ERR_INVALID_ARG);
    assert_int_equal(kvp__layout_make(&l, &geo, 16, 0, KVP_KV_F16, 1, NULL), KVP_ERR_INVALID_ARG);
    assert_int_equal(kvp__layout_make(&l, &geo, 16, KVP_KV_F16, KVP_KV_F16, UINT64_MAX / 8, NULL),
                     KVP_ERR_TOO_LARGE);
    static const kvp_layer_group wide[1] = {{1, 1, 257, 8, 0, 1}};
    kvp__geometry w = make(wide, 1);
    assert_int_equal(kvp__layout_make(&l, &w, 16, KVP_KV_F16, KVP_KV_F16, 1, NULL),
                     KVP_ERR_UNSUPPORTED);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_sizes),
        cmocka_unit_test(window_layers_and_fit),
        cmocka_unit_test(plan_equals_layout),
        cmocka_unit_test(parts_of_a_block_do_not_overlap),
        cmocka_unit_test(power_of_two_pitches_are_skewed),
        cmocka_unit_test(case_b105),
        cmocka_unit_test(case_b148),
        cmocka_unit_test(layers_find_their_groups),
        cmocka_unit_test(bad_geometry_is_refused),
        cmocka_unit_test(bad_plans_are_refused),
    };
    return cmocka_run_group_tests_name("plan", tests, NULL, NULL);
}
