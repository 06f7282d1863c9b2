/*
 * Where attention kernels go wrong: rows that see nothing, empty parts, garbage behind the last
 * key, blocks beyond 32 bits, scores beyond any exponential, parts that were never written, a row
 * list in any order, results at odd addresses; and whether anything depends on the order in which
 * threads run or copies arrive.
 */
#include "tests/emu/attention_world.h"

static void check(world &w)
{
    w.run();
    w.check();
}

/* --- order --- */

template <class F> static void under_schedules_and_copies(F f)
{
    for (int copies = 0; copies < EMU_COPIES; copies++)
        for (int schedule = 0; schedule < EMU_SCHEDULES; schedule++)
            for (uint64_t seed = 1; seed <= (all_cases() ? 5 : 1); seed++) {
                emu_options o = {};
                o.schedule = static_cast<emu_schedule>(schedule);
                o.copies = static_cast<emu_copies>(copies);
                o.seed = seed;
                emu_set(&o);
                f();
            }
    emu_options o = {};
    emu_set(&o);
}

/* Not a bit depends on it. */
static void results_do_not_depend_on_the_schedule(void **)
{
    for (uint32_t dim : {64u, 96u, 128u, 256u})
        for (uint32_t rows : {1u, 5u, 12u, 30u}) {
            shape s;
            s.dim = dim;
            s.kv_heads = 1;
            s.type = 1 + rows % 2;
            s.sms = 2;
            world w(s, {{400 + rows, rows}, {70 + rows, rows}, {rows, rows}}, dim + rows);
            check(w);
            std::vector<unsigned char> first = w.results();
            under_schedules_and_copies([&] {
                w.run();
                assert_true(w.results() == first);
            });
        }
    shape s;
    s.dim = s.value_dim = 33;
    s.sms = 20;
    world w(s, {{400, 1}, {50, 20}}, 3);
    check(w);
    std::vector<unsigned char> first = w.results();
    under_schedules_and_copies([&] {
        w.run();
        assert_true(w.results() == first);
    });
}

/* With parts of a fixed length a row's bits are its own, whoever else is in the step. */
static void fixed_parts_give_the_same_bits_in_any_company(void **)
{
    shape s;
    s.split = 128;
    world alone(s, {{700, 1}}, 11);
    check(alone);
    world among(s, {{700, 1}, {300, 1}, {200, 50}, {90, 3}}, 11);
    for (uint32_t t = 0; t < 700; t++)
        for (uint32_t h = 0; h < s.kv_heads; h++) {
            memcpy(among.key(0, t, h), alone.key(0, t, h), s.dim * 2);
            memcpy(among.value(0, t, h), alone.value(0, t, h), s.dim * 2);
        }
    memcpy(among.q->p(), alone.q->p(), alone.q->n * 2);
    check(among);
    for (uint32_t h = 0; h < alone.heads; h++)
        for (uint32_t d = 0; d < s.dim; d++)
            assert_true(alone.result(0, h, d) == among.result(0, h, d));
}

/* --- items by hand --- */

/* A world whose items are given, of one tile; parts of token i of item n go to slots from first[n]
 * on. */
struct by_hand {
    world w;
    std::vector<kvp__cuda_item> items;
    std::vector<kvp__cuda_merge> merges;
    std::vector<uint32_t> slots;
    uint32_t n_slots = 0;

    by_hand(const shape &s, const std::vector<sequence> &seqs, uint64_t seed) : w(s, seqs, seed)
    {
    }
    void item(uint32_t seq, uint32_t token, uint32_t tokens, uint32_t first_row, uint32_t begin,
              uint32_t end, int32_t slot)
    {
        items.push_back({seq, token, tokens, first_row, begin, end, slot, 0});
        if (slot >= 0 && (uint32_t)slot + tokens > n_slots) n_slots = (uint32_t)slot + tokens;
    }
    void merge(uint32_t row, const std::vector<uint32_t> &of)
    {
        merges.push_back({row, (uint32_t)slots.size(), (uint32_t)of.size()});
        slots.insert(slots.end(), of.begin(), of.end());
    }
    void run(uint32_t tile)
    {
        for (uint32_t t = 0; t < KVP__ATTEND_TILES; t++) w.plan.n_items[t] = 0;
        w.plan.n_items[tile] = (uint32_t)items.size();
        w.plan.items = items.data();
        w.plan.merges = merges.data();
        w.plan.n_merges = (uint32_t)merges.size();
        w.plan.slots = slots.data();
        w.plan.n_slots = n_slots > slots.size() ? n_slots : (uint32_t)slots.size();
        slots.resize(w.plan.n_slots);
        w.plan.slots = slots.data();
        for (uint32_t row = 0; row < w.rows; row++) w.plan.rows[row] = row;
        w.run();
    }
};

static const uint32_t all_tiles[] = {0, 1, 2, 3};

/* Every kernel, and the fallback in its place. */
template <class F> static void with_every_kernel(F f)
{
    for (uint32_t dim : {64u, 96u, 128u, 256u})
        for (uint32_t tile : all_tiles)
            for (bool any : {false, true})
                if (tile <= KVP__ATTEND_MOST_TILE(dim) && !(any && dim != 64)) f(dim, tile, any);
}

/* A tile of rows may begin and end inside a token: 7 tokens of 5 heads are 35 rows. */
static void tiles_may_cut_tokens(void **)
{
    with_every_kernel([](uint32_t dim, uint32_t tile, bool any) {
        shape s;
        s.dim = dim;
        s.group = 5;
        by_hand b(s, {{90, 7}, {40, 20}}, tile);
        b.w.any_kernel = any;
        for (uint32_t r = 0; r < 35; r += KVP__ATTEND_ROWS(tile)) b.item(0, 0, 7, r, 0, 90, -1);
        for (uint32_t r = 0; r < 100; r += KVP__ATTEND_ROWS(tile)) b.item(1, 7, 20, r, 0, 40, -1);
        b.run(tile);
        b.w.check();
    });
}

/* Parts behind what a row sees, before its window, and of no keys at all are empty; they change
 * nothing. */
static void rows_that_see_nothing_are_empty(void **)
{
    with_every_kernel([](uint32_t dim, uint32_t tile, bool any) {
        for (bool sinks : {false, true}) {
            shape s;
            s.dim = dim;
            s.group = 4;
            s.window = 100;
            s.sinks = sinks;
            s.block = 32;
            /* Rows 0 to 3 see keys from 161 to 260, to 263: nothing before 161. */
            by_hand b(s, {{264, 4}}, dim);
            b.w.any_kernel = any;
            b.item(0, 0, 4, 0, 161, 192, 0);
            b.item(0, 0, 4, 0, 192, 256, 4);
            b.item(0, 0, 4, 0, 256, 264, 8);
            b.item(0, 0, 4, 0, 261, 264, 12); /* of which row 0 sees nothing */
            b.item(0, 0, 4, 0, 263, 263, 16); /* of which nobody does */
            for (uint32_t row = 0; row < 4; row++) b.merge(row, {16 + row, row, 4 + row, 8 + row});
            b.run(tile);
            b.w.check();
            for (uint32_t h = 0; h < b.w.heads; h++) {
                for (uint32_t slot : {12u, 16u, 17u, 18u, 19u}) {
                    size_t at = (size_t)slot * b.w.heads + h;
                    assert_true((*b.w.part_lse)[at] == -INFINITY);
                    for (uint32_t d = 0; d < dim; d++)
                        assert_true((*b.w.part_out)[at * dim + d] == 0);
                }
                assert_true((*b.w.part_lse)[(size_t)13 * b.w.heads + h] > -INFINITY);
            }
        }
    });
}

/* The same where the result is final: zeros, not what 0 / 0 is. */
static void a_final_row_that_sees_nothing_is_zero(void **)
{
    with_every_kernel([](uint32_t dim, uint32_t tile, bool any) {
        for (uint32_t out_type : {KVP__EL_F16, KVP__EL_BF16, KVP__EL_F32})
            for (bool sinks : {false, true}) {
                shape s;
                s.dim = dim;
                s.sinks = sinks;
                s.out_type = out_type;
                by_hand b(s, {{70, 2}}, dim);
                b.w.any_kernel = any;
                b.item(0, 0, 1, 0, 69, 70, -1); /* row 0 is at 68 */
                b.item(0, 1, 1, 0, 5, 5, -1);
                b.run(tile);
                for (uint32_t row = 0; row < 2; row++)
                    for (uint32_t h = 0; h < b.w.heads; h++)
                        for (uint32_t d = 0; d < dim; d++)
                            assert_true(b.w.result(row, h, d) == 0);
            }
    });
}

/* The row list names the rows, items the list: rows of three sequences attend to one's blocks. */
static void rows_are_found_through_the_list(void **)
{
    with_every_kernel([](uint32_t dim, uint32_t tile, bool any) {
        shape s;
        s.dim = dim;
        s.group = 3;
        s.block = 16;
        by_hand b(s, {{100, 1}, {90, 2, 80}, {85, 1, 80}}, dim + tile);
        b.w.any_kernel = any;
        b.item(0, 0, 4, 0, 0, 64, 0);
        b.item(0, 0, 4, 0, 64, 80, 4);
        b.item(0, 0, 1, 0, 80, 100, 8);
        b.item(1, 1, 2, 0, 80, 90, 9);
        b.item(2, 3, 1, 0, 80, 85, 11);
        for (uint32_t row = 0; row < 4; row++) b.merge(row, {row, 4 + row, 8 + row});
        b.run(tile);
        b.w.check();
        b.w.plan.rows[0] = 3; /* the same list backwards */
        b.w.plan.rows[1] = 2;
        b.w.plan.rows[2] = 1;
        b.w.plan.rows[3] = 0;
        b.items[2] = {2, 0, 1, 0, 80, 85, 8, 0};
        b.items[3] = {1, 1, 2, 0, 80, 90, 9, 0};
        b.items[4] = {0, 3, 1, 0, 80, 100, 11, 0};
        for (uint32_t row = 0; row < 4; row++) {
            b.slots[row * 3] = 3 - row;
            b.slots[row * 3 + 1] = 7 - row;
            b.slots[row * 3 + 2] = 11 - row;
        }
        b.w.run();
        b.w.check();
    });
}

/* --- memory --- */

/* Blocks whose places need more than 31 and more than 32 bits. */
static void blocks_may_lie_anywhere(void **)
{
    for (uint64_t pitch : {(uint64_t)1 << 30, ((uint64_t)3 << 30) + 512, ((uint64_t)1 << 33) + 64})
        for (uint32_t dim : {64u, 128u, 256u}) {
            shape s;
            s.dim = dim;
            s.kv_heads = 1;
            s.far = pitch;
            world w(s, {{60, 1}, {40, 9}}, dim);
            check(w);
            w.any_kernel = true;
            check(w);
        }
}

/* Keys in front of a window lie in blocks that may be another's by now; the plan does not know, the
 * kernel must not read: here they are NaN, and their block's id leads nowhere. */
static void what_is_before_the_window_is_not_read(void **)
{
    for (uint32_t rows : {1u, 3u, 40u}) {
        shape s;
        s.window = 40;
        s.block = 8;
        world w(s, {{203, rows}, {170, rows}}, rows);
        for (uint32_t i = 0; i < 2; i++) {
            uint32_t first = w.seqs[i].keys - rows;
            for (uint32_t b = 0; b < (first + 1 - s.window) / s.block; b++)
                w.tables[i][b] = 0x7ffffff0;
        }
        check(w);
        w.any_kernel = true;
        check(w);
    }
}

/* NaN in what a row sees is not lost. Nor does it go to others in the fallback; in a tile it does,
 * to rows of the same sequence before it. */
static void nan_goes_exactly_where_it_is_seen(void **)
{
    for (uint32_t rows : {8u, 40u})
        for (bool any : {false, true}) {
            shape s;
            s.kv_heads = 1;
            world w(s, {{100, rows}}, rows);
            uint32_t bad = 100 - rows + 4; /* rows 0 to 3 do not see it */
            for (uint32_t d = 0; d < s.dim; d++) put(w.value(0, bad, 0), s.type, d, NAN);
            w.any_kernel = any;
            w.run();
            for (uint32_t row = 0; row < rows; row++)
                for (uint32_t h = 0; h < w.heads; h++)
                    for (uint32_t d = 0; d < s.dim; d++)
                        if (any || row >= 4)
                            assert_true(isnan(w.result(row, h, d)) == (row >= 4));
        }
}

/* A host's rows of output: any distance, aligned to an element alone. */
static void results_go_to_any_address(void **)
{
    for (uint32_t gap : {1u, 2u, 3u, 4u, 8u})
        for (uint32_t type : {KVP__EL_F16, KVP__EL_BF16, KVP__EL_F32})
            for (uint32_t rows : {1u, 40u}) {
                shape s;
                s.out_gap = gap;
                s.out_type = type;
                s.sms = 1;
                world w(s, {{90, rows}, {333, 1}}, gap);
                check(w);
                w.check_gaps();
                w.all_parts = true;
                check(w);
                w.check_gaps();
            }
}

/* A launch for many more items and merges than there are. */
static void surplus_blocks_leave(void **)
{
    for (uint32_t rows : {1u, 30u}) {
        shape s;
        world w(s, {{90, rows}, {333, 1}}, rows);
        w.surplus = 50;
        check(w);
        w.all_parts = true;
        check(w);
    }
}

/* --- numbers --- */

/* Scores around plus and minus 100,000, growing and falling with the key: the greatest wins. */
static void scores_may_be_huge(void **)
{
    for (uint32_t rows : {1u, 6u, 12u, 40u})
        for (uint32_t type : {KVP__EL_F16, KVP__EL_BF16})
            for (int way = 0; way < 4; way++) {
                shape s;
                s.type = type;
                s.kv_heads = 1;
                s.scale = 1;
                s.sms = 3;
                world w(s, {{300, rows}}, rows);
                for (size_t i = 0; i < w.q->n; i++)
                    w.q->set(i, i % s.dim == 0 ? (way & 1 ? -100.0f : 100.0f) : 0);
                for (uint32_t t = 0; t < 300; t++)
                    for (uint32_t d = 0; d < s.dim; d++) {
                        float score = way & 2 ? 1000.0f - 4 * (float)t : -1000.0f + 4 * (float)t;
                        put(w.key(0, t, 0), type, d, d == 0 ? score : 7);
                    }
                w.run();
                bars b = bars_of(type);
                b.lse = 0.02; /* of 144,000 */
                w.check(b);
                w.any_kernel = true;
                w.run();
                w.check(b);
            }
}

/* Equal scores, however great, weigh alike. */
static void equal_scores_weigh_alike(void **)
{
    for (float size : {-100.0f, -1.0f, 0.0f, 1.0f, 100.0f})
        for (uint32_t rows : {1u, 30u}) {
            shape s;
            s.kv_heads = 1;
            s.scale = 10;
            world w(s, {{150, rows}}, rows);
            for (size_t i = 0; i < w.q->n; i++) w.q->set(i, i % s.dim == 0 ? size : 0);
            for (uint32_t t = 0; t < 150; t++) put(w.key(0, t, 0), s.type, 0, 100);
            w.run();
            bars b = bars_of(s.type);
            b.lse = 0.02;
            w.check(b);
        }
}

/* Scores far beyond the cap come to it. */
static void a_cap_holds_huge_scores(void **)
{
    for (uint32_t rows : {1u, 30u}) {
        shape s;
        s.softcap = 30;
        s.q_size = 3000;
        world w(s, {{150, rows}}, rows);
        check(w);
        w.any_kernel = true;
        check(w);
    }
}

/* A sink that outweighs everything, and one that weighs nothing. */
static void sinks_of_any_size(void **)
{
    for (float size : {-INFINITY, -1e5f, -30.0f, 30.0f, 1e5f})
        for (uint32_t keys : {90u, 900u}) { /* whole, and in parts */
            shape s;
            s.sinks = true;
            s.sms = 20;
            world w(s, {{keys, 1}}, 5);
            assert_int_equal(w.plan.n_merges, keys == 900);
            for (uint32_t h = 0; h < w.heads; h++) (*w.sinks)[h] = size;
            w.run();
            bars b = bars_of(s.type);
            b.lse = fabsf(size) == 1e5f ? 0.02 : 2e-5;
            w.check(b);
        }
}

/* --- merge --- */

struct merge_case {
    uint32_t dim, out_type;
    bool sinks, with_lse;
};

/* Rows of 0, 1, 2, 31, 32, 33 and 70 parts of any size, some of them empty, none twice, and slots
 * that nobody names full of NaN. */
static void check_merge(const merge_case &c)
{
    const uint32_t heads = 3, counts[] = {0, 1, 2, 31, 32, 33, 70, 1, 4}, n = 9, group = 5;
    random_source r(c.dim + c.out_type);
    uint32_t total = 0;
    for (uint32_t k : counts) total += k;
    device<float> part((size_t)(2 * total + 1) * heads * c.dim);
    device<float> lse((size_t)(2 * total + 1) * heads);
    device<uint32_t> slots(total);
    device<kvp__cuda_merge> merges(n);
    device<float> out_lse(n * heads), sinks(heads);
    elements out(c.out_type, (size_t)n * heads * c.dim);
    for (uint32_t h = 0; h < heads; h++) sinks[h] = h == 1 ? -INFINITY : r.normal();
    for (uint32_t i = 0; i < total; i++) {
        slots[i] = 2 * ((i * 7) % total) + 1;
        for (uint32_t h = 0; h < heads; h++) {
            size_t at = (size_t)slots[i] * heads + h;
            bool empty = r.below(5) == 0;
            lse[at] = empty ? -INFINITY : 10 * r.normal();
            for (uint32_t d = 0; d < c.dim; d++) part[at * c.dim + d] = empty ? 0 : r.normal();
        }
    }
    uint32_t next = 0;
    for (uint32_t i = 0; i < n; i++) {
        merges[i] = {n - 1 - i, next, counts[i]};
        next += counts[i];
    }
    for (uint32_t h = 0; h < heads; h++) { /* a row with one part, which saw nothing */
        size_t at = (size_t)slots[total - 5] * heads + h;
        lse[at] = -INFINITY;
        for (uint32_t d = 0; d < c.dim; d++) part[at * c.dim + d] = 0;
    }
    one_step step(n);
    step.s[0].n_merges[group] = n;
    kvp__merge_args a = {step, merges.p, slots.p, part.p, lse.p, c.sinks ? sinks.p : nullptr,
                         out.p(), c.with_lse ? out_lse.p : nullptr, (int64_t)(heads * c.dim),
                         (int64_t)c.dim, group, heads, c.dim, c.out_type};
    launch("merge", kvp__launch_merge(n + 2, heads), &a);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t h = 0; h < heads; h++) {
            double sum = c.sinks ? exp((double)sinks[h]) : 0;
            std::vector<double> wanted(c.dim);
            for (uint32_t k = 0; k < counts[i]; k++) {
                size_t at = (size_t)slots[merges[i].first + k] * heads + h;
                double weight = exp2((double)lse[at]);
                sum += weight;
                for (uint32_t d = 0; d < c.dim; d++) wanted[d] += weight * part[at * c.dim + d];
            }
            size_t row = (size_t)merges[i].row * heads + h;
            for (uint32_t d = 0; d < c.dim; d++) {
                double w = sum == 0 ? 0 : wanted[d] / sum;
                assert_near(out.get(row * c.dim + d), w, half_unit(c.out_type, w, 0) + 3e-6);
                if (counts[i] == 1 && !c.sinks && c.out_type == KVP__EL_F32) /* a copy */
                    assert_true(out.get(row * c.dim + d) ==
                                part[((size_t)slots[merges[i].first] * heads + h) * c.dim + d]);
            }
            if (!c.with_lse) continue;
            if (sum == 0) assert_true(out_lse[row] == -INFINITY);
            else assert_near(out_lse[row], log2(sum), 2e-5);
        }
}

static void merge_takes_any_number_of_parts(void **)
{
    for (uint32_t dim : {1u, 4u, 33u, 64u, 128u, 132u, 256u})
        for (uint32_t type : {KVP__EL_F16, KVP__EL_BF16, KVP__EL_F32})
            for (bool sinks : {false, true}) check_merge({dim, type, sinks, type != KVP__EL_F16});
    under_schedules([] { check_merge({128, KVP__EL_F32, true, true}); });
}

/* --- a step after a larger one --- */

/* In the buffers of a large step, a small one does not see what is left there. */
static void a_small_step_after_a_large_one(void **)
{
    shape s;
    s.sms = 20;
    by_hand b(s, {{900, 1}, {300, 30}, {500, 1}}, 9);
    b.w.run();
    b.w.check();
    std::vector<kvp__cuda_item> items(b.w.plan.items, b.w.plan.items + b.w.n_items());
    uint32_t whole = 0;
    for (kvp__cuda_item &x : items) whole += x.kv_end - x.kv_begin;
    assert_true(whole > 1000 && b.w.plan.n_merges > 0);
    kvp__work_seq seq = b.w.work_seq(0);
    kvp__work work = {};
    work.n_rows = work.n_seqs = 1;
    work.seqs = &seq;
    kvp__cuda_plan_make(&b.w.plan, &work);
    assert_int_equal(b.w.plan.n_rows, 1);
    assert_int_equal(b.w.plan.n_merges, 1);
    b.w.rows = 1;
    b.w.surplus = 20;
    b.w.run();
    b.w.check();
}

int main()
{
    const CMUnitTest tests[] = {
        cmocka_unit_test(results_do_not_depend_on_the_schedule),
        cmocka_unit_test(fixed_parts_give_the_same_bits_in_any_company),
        cmocka_unit_test(tiles_may_cut_tokens),
        cmocka_unit_test(rows_that_see_nothing_are_empty),
        cmocka_unit_test(a_final_row_that_sees_nothing_is_zero),
        cmocka_unit_test(rows_are_found_through_the_list),
        cmocka_unit_test(blocks_may_lie_anywhere),
        cmocka_unit_test(what_is_before_the_window_is_not_read),
        cmocka_unit_test(nan_goes_exactly_where_it_is_seen),
        cmocka_unit_test(results_go_to_any_address),
        cmocka_unit_test(surplus_blocks_leave),
        cmocka_unit_test(scores_may_be_huge),
        cmocka_unit_test(equal_scores_weigh_alike),
        cmocka_unit_test(a_cap_holds_huge_scores),
        cmocka_unit_test(sinks_of_any_size),
        cmocka_unit_test(merge_takes_any_number_of_parts),
        cmocka_unit_test(a_small_step_after_a_large_one),
    };
    return cmocka_run_group_tests_name("attention_traps", tests, nullptr, nullptr);
}
