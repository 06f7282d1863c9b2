/*
 * copy_blocks and patch: byte for byte what was asked for, and nothing else.
 */
#include "tests/emu/small.h"

struct group_shape {
    uint32_t layers, kv_heads, k_token, v_token, block_tokens;
    uint64_t unaligned; /* added to strides that need not be multiples of 16 */
};

struct pool {
    static const uint32_t BLOCKS = 7, GROUPS = 2;
    std::vector<kvp__cuda_copy_group> groups;
    std::vector<uint32_t> tokens;
    uint64_t bytes;

    explicit pool(const group_shape (&shapes)[GROUPS]) : bytes(0)
    {
        for (const group_shape &s : shapes) {
            kvp__cuda_copy_group g = {};
            g.layers = s.layers;
            g.kv_heads = s.kv_heads;
            g.k_token = s.k_token;
            g.v_token = s.v_token;
            g.k_head = (uint64_t)s.k_token * s.block_tokens + s.unaligned;
            g.v_head = (uint64_t)s.v_token * s.block_tokens + s.unaligned;
            g.k_part = s.kv_heads * g.k_head + s.unaligned;
            g.layer = g.k_part + s.kv_heads * g.v_head + s.unaligned;
            g.pitch = s.layers * g.layer + 64 + s.unaligned;
            g.base = bytes;
            bytes += BLOCKS * g.pitch;
            groups.push_back(g);
            tokens.push_back(s.block_tokens);
        }
    }
};

/* The definition, on a copy of the pool. */
static void copy_by_hand(std::vector<unsigned char> &slab, const pool &p, const kvp__cuda_copy &c)
{
    const kvp__cuda_copy_group &g = p.groups[c.group];
    for (uint32_t layer = 0; layer < g.layers; layer++)
        for (uint32_t h = 0; h < g.kv_heads; h++) {
            uint64_t to = g.base + c.dst * g.pitch + layer * g.layer;
            uint64_t from = g.base + c.src * g.pitch + layer * g.layer;
            memcpy(&slab[to + h * g.k_head], &slab[from + h * g.k_head], c.tokens * g.k_token);
            memcpy(&slab[to + g.k_part + h * g.v_head], &slab[from + g.k_part + h * g.v_head],
                   c.tokens * g.v_token);
        }
}

static void check_copies(const group_shape (&shapes)[2], uint64_t seed)
{
    pool p(shapes);
    random_source r(seed);
    device<unsigned char> slab(p.bytes);
    for (size_t i = 0; i < slab.n; i++) slab[i] = (unsigned char)r.bits();
    device<kvp__cuda_copy_group> groups(p.groups);
    std::vector<kvp__cuda_copy> list;
    uint32_t first = r.below(2);
    for (uint32_t i = 0; i < 5; i++) { /* the last two are beyond the step */
        uint32_t group = i < 2 ? first : 1 - first; /* to both free blocks of one group */
        list.push_back({group, i, 5 + i % 2, r.below(p.tokens[group] + 1)});
    }
    device<kvp__cuda_copy> copies(list);
    one_step step(0);
    step->n_copies = 3;
    std::vector<unsigned char> wanted = slab.copy();
    for (uint32_t i = 0; i < 3; i++) copy_by_hand(wanted, p, list[i]);
    kvp__copy_args a = {step, copies.p, groups.p, slab.p};
    uint32_t layers = shapes[0].layers > shapes[1].layers ? shapes[0].layers : shapes[1].layers;
    launch("copy_blocks", kvp__launch_copy_blocks(5, layers), &a);
    assert_memory_equal(slab.p, &wanted[0], slab.n);
}

static void copies_live_tokens_of_every_layer_and_head(void **)
{
    const group_shape shapes[][2] = {
        {{2, 2, 128, 128, 16, 0}, {1, 1, 64, 96, 16, 0}},
        {{3, 1, 256, 256, 64, 0}, {1, 4, 512, 512, 1, 0}},
        {{1, 8, 160, 160, 4, 0}, {4, 2, 36, 20, 8, 4}}, /* pieces of 4 bytes */
        {{2, 3, 4, 4, 1, 0}, {2, 3, 12, 8, 2, 8}},
        {{1, 1, 16, 16, 256, 4},
         {2, 2, 48, 0, 16, 0}}, /* aligned tokens, strides that are not; no V */
        {{1, 2, 1024, 1024, 32, 0}, {1, 3, 1024, 512, 32, 0}},
    };
    for (const auto &s : shapes)
        for (uint64_t seed = 1; seed <= (all_cases() ? 30 : 4); seed++) check_copies(s, seed);
    under_schedules([&] { check_copies(shapes[2], 77); });
}

/* Blocks 4 GB apart and more. */
static void copies_far_blocks(void **)
{
    const uint64_t pitch = 5ull << 20;
    const uint32_t blocks = 3000;
    unsigned char *slab = static_cast<unsigned char *>(emu_alloc_sparse(pitch * blocks));
    assert_non_null(slab);
    kvp__cuda_copy_group g = {};
    g.pitch = pitch;
    g.layer = 2u << 20;
    g.k_part = 1u << 20;
    g.k_head = g.v_head = 4096;
    g.layers = 2;
    g.kv_heads = 1;
    g.k_token = g.v_token = 256;
    for (uint32_t layer = 0; layer < 2; layer++)
        for (uint32_t i = 0; i < 2560; i++)
            slab[2 * pitch + layer * g.layer + g.k_part + i] = (unsigned char)(i * 7 + layer + 1);
    device<kvp__cuda_copy_group> groups(std::vector<kvp__cuda_copy_group>{g});
    device<kvp__cuda_copy> copies(std::vector<kvp__cuda_copy>{{0, 2, blocks - 1, 10}});
    one_step step(0);
    step->n_copies = 1;
    kvp__copy_args a = {step, copies.p, groups.p, slab};
    launch("copy_blocks", kvp__launch_copy_blocks(1, 2), &a);
    for (uint32_t layer = 0; layer < 2; layer++)
        assert_memory_equal(slab + (blocks - 1) * pitch + layer * g.layer + g.k_part,
                            slab + 2 * pitch + layer * g.layer + g.k_part, 2560);
    assert_int_equal(slab[(blocks - 1) * pitch + g.k_part + 2560], 0);
    assert_int_equal(emu_free(slab), 0);
}

static void patch_writes_entries_of_the_step_alone(void **)
{
    const uint32_t n = 1000, most = 700, live = 300;
    random_source r(4);
    std::vector<uint32_t> index(n);
    for (uint32_t i = 0; i < n; i++) index[i] = i;
    for (uint32_t i = n; i-- > 1;) { /* in any order, none twice */
        uint32_t j = r.below(i + 1), t = index[i];
        index[i] = index[j];
        index[j] = t;
    }
    device<kvp__cuda_patch> patches(most);
    device<uint32_t> tables(n);
    std::vector<uint32_t> wanted = tables.copy();
    for (uint32_t i = 0; i < most; i++) {
        patches[i] = {index[i], r.bits() >> 8};
        if (i < live) wanted[index[i]] = patches[i].value;
    }
    one_step step(0);
    step->n_patches = live;
    kvp__patch_args a = {step, patches.p, tables.p};
    launch("patch", kvp__launch_patch(most), &a);
    assert_memory_equal(tables.p, &wanted[0], n * sizeof(uint32_t));
    step->n_patches = 0;
    tables.poison();
    launch("patch", kvp__launch_patch(most), &a);
    tables.is_untouched(0, n);
}

int main()
{
    const CMUnitTest tests[] = {
        cmocka_unit_test(copies_live_tokens_of_every_layer_and_head),
        cmocka_unit_test(copies_far_blocks),
        cmocka_unit_test(patch_writes_entries_of_the_step_alone),
    };
    return cmocka_run_group_tests_name("blocks", tests, nullptr, nullptr);
}
