/*
 * Attention against its definition in double precision: every head size, group, block size, type
 * and tile, windows, soft caps and sinks, chunks of prompts, decoding, drafts and shared prefixes,
 * cut as the plan cuts them. And what a kernel may cost: bytes loaded, banks that collide.
 */
#include "tests/emu/attention_world.h"

static void check(world &w)
{
    w.run();
    w.check();
}

static void check_both(const shape &s, const std::vector<sequence> &seqs, uint64_t seed)
{
    world w(s, seqs, seed);
    check(w);
    w.all_parts = true;
    check(w);
}

/* --- shapes --- */

static const uint32_t dims[] = {64, 80, 96, 112, 128, 192, 256};
static const uint32_t groups[] = {1, 5, 6, 7, 12};
static const uint32_t blocks[] = {1, 16, 64, 256};

/* Tokens of a sequence such that its rows take tile t. */
static uint32_t tokens_for(uint32_t group, uint32_t t)
{
    return t == 0 ? 1 : (KVP__ATTEND_ROWS(t - 1) + group) / group;
}

static void every_head_size_in_every_tile(void **)
{
    uint32_t n = 0;
    for (uint32_t dim : dims)
        for (uint32_t type : {KVP__EL_F16, KVP__EL_BF16})
            for (uint32_t t = 0; t < KVP__ATTEND_TILES; t++, n++) {
                shape s;
                s.dim = dim;
                s.type = type;
                s.group = groups[n % 5];
                s.block = blocks[n % 4];
                s.out_type = 1 + n % 3;
                s.window = n % 7 == 3 ? 50 : 0;
                s.softcap = n % 6 == 2 ? 3.0f : 0;
                s.sinks = n % 4 == 1;
                uint32_t rows = tokens_for(s.group, t);
                check_both(s, {{100 + rows, rows}, {rows, rows}, {64, rows < 64 ? rows : 64}}, n);
            }
}

static void every_group_over_every_block_size(void **)
{
    uint32_t n = 0;
    for (uint32_t group : groups)
        for (uint32_t block : blocks)
            for (uint32_t rows : {1u, 23u}) {
                shape s;
                s.group = group;
                s.block = block;
                s.type = 1 + n % 2;
                s.out_type = 1 + n++ / 2 % 3;
                check_both(s, {{300, rows}, {rows, rows}, {rows + 1, rows}, {129, rows}}, n);
            }
}

static void windows_caps_and_sinks(void **)
{
    uint32_t n = 0;
    for (uint32_t window : {1u, 2u, 64u, 100u, 1000u})
        for (float cap : {0.0f, 1.0f, 50.0f})
            for (bool sinks : {false, true})
                for (uint32_t rows : {1u, 40u}) {
                    shape s;
                    s.window = window;
                    s.softcap = cap;
                    s.sinks = sinks;
                    s.q_size = cap == 1.0f ? 4 : 1;
                    s.type = 1 + n++ % 2;
                    check_both(s, {{333, rows}, {40, rows}, {201, rows}}, n);
                }
}

static void small_heads_run_in_the_class_of_64(void **)
{
    for (uint32_t dim : {8u, 16u, 32u, 40u, 72u, 104u, 136u, 248u}) {
        shape s;
        s.dim = dim;
        check_both(s, {{77, 1}, {90, 30}}, dim);
    }
}

/* --- steps --- */

static void a_prompt_in_one_chunk_and_in_several(void **)
{
    for (uint32_t rows : {200u, 64u, 63u}) {
        shape s;
        s.dim = 128;
        s.kv_heads = 1;
        check_both(s, {{200, rows}}, rows);
    }
}

static void decoding_mixed_with_prompts_and_drafts(void **)
{
    shape s;
    s.dim = 128;
    check_both(s, {{500, 1}, {130, 120}, {64, 1}, {301, 5}, {1, 1}, {65, 1}, {70, 70}}, 3);
    s.type = KVP__EL_BF16;
    s.window = 90;
    s.sinks = true;
    check_both(s, {{500, 1}, {130, 120}, {64, 1}, {301, 5}, {1, 1}, {65, 1}, {70, 70}}, 4);
}

/* Long sequences are cut, and their parts merged. */
static void long_sequences_are_cut_and_merged(void **)
{
    shape s;
    s.sms = 30;
    world w(s, {{3000, 1}}, 5);
    check(w);
    assert_true(w.n_items() > 20 && w.plan.n_merges == 1);
    s.sinks = true;
    world v(s, {{3000, 1}, {1000, 1}, {1200, 2}}, 6);
    check(v);
    assert_true(v.plan.n_merges >= 3);
    world u(s, {{2000, 30}}, 7); /* of a chunk's rows, some see nothing of the last part */
    check(u);
    assert_int_equal(u.plan.n_merges, 30);
}

static void sequences_over_one_prefix(void **)
{
    for (uint32_t block : {1u, 16u, 256u})
        for (uint32_t rows : {1u, 3u}) {
            shape s;
            s.block = block;
            s.sinks = block == 16;
            std::vector<sequence> seqs = {{800, rows}};
            for (uint32_t i = 1; i < 12; i++) seqs.push_back({790 + 20 * i, rows, 768});
            seqs.push_back({400, 1});
            world w(s, seqs, block + rows);
            uint32_t shared = 0;
            for (uint32_t u = 0; u < w.plan.n_units; u++) shared += w.plan.units[u].shared;
            assert_true(shared > 0);
            check(w);
        }
    shape s; /* a window's rows, each with a beginning of its own in what they share */
    s.window = 600;
    std::vector<sequence> seqs = {{700, 1}};
    for (uint32_t i = 1; i < 8; i++) seqs.push_back({700 + 5 * i, 1, 640});
    world w(s, seqs, 8);
    assert_true(w.plan.units[0].shared);
    check(w);
}

static void random_steps(void **)
{
    uint32_t rounds = all_cases() ? 600 : 40;
    for (uint32_t i = 0; i < rounds; i++) {
        random_source r(i + 99);
        shape s;
        s.kv_heads = 1 + r.below(3);
        s.group = groups[r.below(5)];
        s.dim = dims[r.below(7)];
        s.block = 1u << r.below(9);
        s.type = 1 + r.below(2);
        s.out_type = 1 + r.below(3);
        s.window = r.below(3) ? 0 : 1 + r.below(200);
        s.softcap = r.below(3) ? 0 : r.uniform(0.5f, 40);
        s.sinks = r.below(2);
        s.sms = 1 + r.below(20);
        s.split = r.below(4) ? 0 : 64 * (1 + r.below(3));
        std::vector<sequence> seqs;
        for (uint32_t n = 1 + r.below(6); n; n--) {
            uint32_t rows = r.below(2) ? 1 : 1 + r.below(40);
            seqs.push_back({rows + r.below(300), rows});
            if (seqs.size() > 1 && !s.window && seqs[0].keys - seqs[0].rows > 80 && r.below(2)) {
                seqs.back().shared = seqs[0].keys - seqs[0].rows;
                seqs.back().keys = seqs.back().shared + rows + r.below(40);
            }
        }
        check_both(s, seqs, i);
    }
}

/* --- the fallback --- */

static void the_fallback_takes_every_shape(void **)
{
    uint32_t n = 0;
    for (uint32_t k : {KVP__EL_F16, KVP__EL_BF16, KVP__EL_F32})
        for (uint32_t v : {KVP__EL_F16, KVP__EL_BF16, KVP__EL_F32})
            for (uint32_t dim : {1u, 20u, 64u, 129u}) {
                shape s;
                s.type = k;
                s.v_type = v;
                s.dim = dim;
                s.value_dim = n % 2 ? 33 : 20;
                s.group = groups[n % 5];
                s.block = blocks[n % 4];
                s.window = n % 3 == 1 ? 20 : 0;
                s.softcap = n % 4 == 1 ? 2.0f : 0;
                s.sinks = n % 5 == 1;
                s.sms = 40;
                world w(s, {{70, 1}, {20, 20}, {600, 1}, {33, 2}}, n++);
                assert_int_equal(w.plan.d, 0);
                check(w);
            }
}

/* The truth on a card: it takes the items of all tiles. */
static void the_fallback_agrees_with_the_tiles(void **)
{
    for (uint32_t type : {KVP__EL_F16, KVP__EL_BF16}) {
        shape s;
        s.type = type;
        s.group = 5;
        s.sinks = true;
        world w(s, {{500, 1}, {130, 60}, {64, 1}, {301, 5}}, type);
        w.any_kernel = true;
        check(w);
        w.all_parts = true;
        check(w);
    }
}

/* --- costs --- */

static void decoding_loads_each_key_once_without_conflicts(void **)
{
    for (uint32_t dim : dims)
        for (uint32_t keys : {1999u, 64u * 20}) {
            shape s;
            s.dim = dim;
            s.sms = 1;
            world w(s, {{keys, 1}, {keys - 77, 1}}, dim);
            emu_stats_reset();
            check(w);
            emu_stats stats = emu_stats_get();
            assert_true(stats.loaded >= w.ideal_bytes());
            assert_true((double)stats.loaded <= 1.1 * (double)w.ideal_bytes());
            assert_int_equal(stats.ldmatrix_conflicts, 0);
        }
}

static void no_tile_has_bank_conflicts(void **)
{
    for (uint32_t dim : dims)
        for (uint32_t t = 0; t < KVP__ATTEND_TILES; t++) {
            shape s;
            s.dim = dim;
            uint32_t rows = tokens_for(s.group, t);
            world w(s, {{150 + rows, rows}}, dim + t);
            emu_stats_reset();
            check(w);
            assert_true(emu_stats_get().ldmatrix > 0);
            assert_int_equal(emu_stats_get().ldmatrix_conflicts, 0);
        }
}

int main()
{
    const CMUnitTest tests[] = {
        cmocka_unit_test(every_head_size_in_every_tile),
        cmocka_unit_test(every_group_over_every_block_size),
        cmocka_unit_test(windows_caps_and_sinks),
        cmocka_unit_test(small_heads_run_in_the_class_of_64),
        cmocka_unit_test(a_prompt_in_one_chunk_and_in_several),
        cmocka_unit_test(decoding_mixed_with_prompts_and_drafts),
        cmocka_unit_test(long_sequences_are_cut_and_merged),
        cmocka_unit_test(sequences_over_one_prefix),
        cmocka_unit_test(random_steps),
        cmocka_unit_test(the_fallback_takes_every_shape),
        cmocka_unit_test(the_fallback_agrees_with_the_tiles),
        cmocka_unit_test(decoding_loads_each_key_once_without_conflicts),
        cmocka_unit_test(no_tile_has_bank_conflicts),
    };
    return cmocka_run_group_tests_name("attention", tests, nullptr, nullptr);
}
