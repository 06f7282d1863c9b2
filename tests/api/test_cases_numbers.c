/*
 * Cases of the field about numbers, through the public interface: garbage in unused slots, large
 * counts, window edges, determinism.
 */
#include "world.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static kvp_model *model;

static int open_model(void **state)
{
    (void)state;
    model = world_model(&(gw_model){.context = 70016});
    return 0;
}

static int close_model(void **state)
{
    (void)state;
    kvp_model_destroy(model);
    world_forget();
    return 0;
}

/* A pool on memory that is full of `fill`. */
static kvp_pool *pool_on(kvp_model *m, uint64_t blocks, uint32_t block_tokens, uint32_t format,
                         uint8_t fill, void **memory)
{
    kvp_pool_options o = {.size = sizeof o, .blocks = blocks, .block_tokens = block_tokens,
                          .k_format = format, .v_format = format};
    uint64_t bytes = 0, align = 0;
    assert_int_equal(kvp_pool_slab_size(m, &o, &bytes, &align, NULL), KVP_OK);
    *memory = aligned_alloc(align, (bytes + align - 1) / align * align);
    assert_non_null(*memory);
    memset(*memory, fill, bytes);
    o.slab = *memory;
    o.slab_bytes = bytes - 1;
    kvp_pool *p = NULL;
    assert_int_equal(kvp_pool_create(m, &o, &p, NULL), KVP_ERR_INVALID_ARG);
    o.slab_bytes = bytes;
    assert_int_equal(kvp_pool_create(m, &o, &p, NULL), KVP_OK);
    return p;
}

/* B93: every unused slot holds NaN (0xff bytes are NaN in every format); prefill and decode have the
 * bits of a pool full of zeros. */
static void case_b93(void **state)
{
    (void)state;
    int32_t tokens[45];
    world_tokens(tokens, 45, 1, 64);
    static const uint32_t formats[] = {KVP_KV_F16, KVP_KV_BF16, KVP_KV_F32};
    static const uint32_t sizes[] = {1, 4, 16, 64};
    for (int f = 0; f < 3; f++) {
        for (int z = 0; z < 4; z++) {
            float rows[2][2][64];
            for (int fill = 0; fill < 2; fill++) {
                void *memory;
                kvp_pool *p = pool_on(model, 64, sizes[z], formats[f], fill ? 0xff : 0, &memory);
                kvp_batch *b = world_batch(p, NULL);
                kvp_seq *s = world_seq(p, tokens, 5, 0, KVP_SAMPLE_HOST, 0);
                assert_int_equal(kvp_batch_add(b, s), KVP_OK);
                const float *logits;
                world_run(b, NULL);
                assert_int_equal(kvp_seq_get_logits(s, &logits, NULL), KVP_OK);
                memcpy(rows[fill][0], logits, sizeof rows[fill][0]);
                for (int i = 5; i < 45; i++) {
                    assert_int_equal(kvp_seq_append(s, &tokens[i], 1), KVP_OK);
                    world_run(b, NULL);
                }
                assert_int_equal(kvp_seq_get_logits(s, &logits, NULL), KVP_OK);
                memcpy(rows[fill][1], logits, sizeof rows[fill][1]);
                kvp_seq_destroy(s);
                kvp_batch_destroy(b);
                kvp_pool_destroy(p);
                free(memory);
            }
            for (int i = 0; i < 64; i++) assert_true(rows[1][1][i] - rows[1][1][i] == 0);
            assert_memory_equal(rows[0], rows[1], sizeof rows[0]);
        }
    }
}

/* B83: what a truncated sequence left behind is not seen by anybody. */
static void case_b83(void **state)
{
    (void)state;
    int32_t tokens[100];
    world_tokens(tokens, 100, 1, 64);
    kvp_pool *p = world_pool(model, 16, 16);
    kvp_batch *b = world_batch(p, NULL);
    kvp_seq *s = world_seq(p, tokens, 100, 0, KVP_SAMPLE_HOST, 0);
    assert_int_equal(kvp_batch_add(b, s), KVP_OK);
    world_run(b, NULL);
    assert_int_equal(kvp_seq_truncate(s, 10), KVP_OK);
    assert_int_equal(kvp_seq_append(s, tokens + 50, 3), KVP_OK);
    world_run(b, NULL);
    world_expect_oracle(model, s);
    kvp_seq_destroy(s);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
}

/* B107: more blocks, and more keys, than 16 bits count. The last rows equal those of a pool with
 * large blocks. */
static void case_b107(void **state)
{
    (void)state;
    kvp_model *tiny = world_model(&(gw_model){.context = 70016, .layers = 1, .heads = 1,
                                              .kv_heads = 1});
    enum { N = 70000 };
    int32_t *tokens = malloc(N * sizeof *tokens);
    assert_non_null(tokens);
    world_tokens(tokens, N, 1, 64);
    float rows[2][64];
    for (int i = 0; i < 2; i++) {
        kvp_pool *p = world_pool(tiny, i ? 70016 / 256 + 1 : 70016, i ? 256 : 1);
        kvp_batch *b = world_batch(p, &(kvp_batch_options){.size = sizeof(kvp_batch_options),
                                                           .token_budget = 8192,
                                                           .chunk_tokens = i ? 5000 : 8192});
        kvp_seq *s = world_seq(p, tokens, N, 0, KVP_SAMPLE_HOST, 0);
        assert_int_equal(kvp_batch_add(b, s), KVP_OK);
        world_run(b, NULL);
        const float *logits;
        assert_int_equal(kvp_seq_get_logits(s, &logits, NULL), KVP_OK);
        memcpy(rows[i], logits, sizeof rows[i]);
        world_account(p);
        kvp_seq_destroy(s);
        kvp_batch_destroy(b);
        kvp_pool_destroy(p);
    }
    assert_memory_equal(rows[0], rows[1], sizeof rows[0]);
    free(tokens);
    kvp_model_destroy(tiny);
}

/* B107: as many sequences as a batch takes. */
static void case_b107_sequences(void **state)
{
    (void)state;
    enum { N = 2000 };
    kvp_pool *p = world_pool(model, N, 16);
    kvp_batch *b = world_batch(p, &(kvp_batch_options){.size = sizeof(kvp_batch_options),
                                                       .token_budget = 8192,
                                                       .max_sequences = 4096,
                                                       .watermark = KVP_WATERMARK_NONE});
    static world_out out[N];
    memset(out, 0, sizeof out);
    kvp_seq **s = calloc(N, sizeof *s);
    assert_non_null(s);
    int32_t tokens[4], want[3];
    for (uint64_t i = 0; i < N; i++) {
        world_tokens(tokens, 4, i, 64);
        s[i] = world_seq(p, tokens, 4, i, KVP_SAMPLE_LIBRARY, 3);
        assert_int_equal(kvp_batch_add(b, s[i]), KVP_OK);
    }
    world_run(b, out);
    for (uint64_t i = 0; i < N; i++) assert_int_equal(out[i].tokens, 3);
    for (uint64_t i = 0; i < N; i += 97) {
        world_tokens(tokens, 4, i, 64);
        world_greedy(model, tokens, 4, want, 3);
        assert_memory_equal(out[i].ids, want, sizeof want);
    }
    for (uint64_t i = 0; i < N; i++) kvp_seq_destroy(s[i]);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
    free(s);
}

/* B113: alone, and among 1, 3, 7 and 43 others that come at random moments: equal bits. */
static void case_b113(void **state)
{
    (void)state;
    int32_t prompt[37], want[20];
    world_tokens(prompt, 37, 1, 64);
    world_greedy(model, prompt, 37, want, 20);
    static const uint64_t others[] = {1, 3, 7, 43};
    static world_out out[44];
    for (int k = 0; k < 4; k++) {
        for (int round = 0; round < 2; round++) {
            uint64_t rng = (uint64_t)(k * 10 + round + 1);
            memset(out, 0, sizeof out);
            kvp_pool *p = world_pool(model, 300, 16);
            kvp_batch *b = world_batch(p, &(kvp_batch_options){.size = sizeof(kvp_batch_options),
                                                               .threads = round ? 2 : 0,
                                                               .token_budget = 64});
            kvp_seq *s[44];
            s[0] = world_seq(p, prompt, 37, 0, KVP_SAMPLE_LIBRARY, 20);
            uint64_t there = 0;
            bool added = false;
            for (int i = 0; i < 10000; i++) {
                if (there < others[k] && gw_rand(&rng) % 2) {
                    int32_t own[60];
                    size_t n = 1 + gw_rand(&rng) % 60;
                    world_tokens(own, n, 100 + there, 64);
                    there++;
                    s[there] = world_seq(p, own, n, there, KVP_SAMPLE_LIBRARY, 10);
                    assert_int_equal(kvp_batch_add(b, s[there]), KVP_OK);
                }
                if (!added && gw_rand(&rng) % 3 == 0) {
                    assert_int_equal(kvp_batch_add(b, s[0]), KVP_OK);
                    added = true;
                }
                kvp_status st = world_step(b, out);
                assert_true(st >= 0);
                if (st == KVP_AGAIN) assert_int_equal(kvp_wait(b, 1000), KVP_OK);
                if (st == KVP_DONE && added && there == others[k]) break;
            }
            assert_memory_equal(out[0].ids, want, sizeof want);
            for (uint64_t i = 0; i <= there; i++) kvp_seq_destroy(s[i]);
            kvp_batch_destroy(b);
            kvp_pool_destroy(p);
        }
    }
}

/* With a seed, a token is drawn by its position alone: not by how the prompt was cut, whether it was
 * found in the cache, nor by who else is there. */
static void own_seeded_draws(void **state)
{
    (void)state;
    enum { PROMPT = 50, DRAWN = 24 };
    int32_t tokens[PROMPT], want[DRAWN];
    world_tokens(tokens, PROMPT, 5, 64);
    static const uint32_t chunks[] = {64, 1, 7, 33, 64};
    bool first = true;
    for (unsigned k = 0; k < sizeof chunks / sizeof *chunks; k++) {
        kvp_pool *p = world_pool(model, 64, 16);
        kvp_batch *b = world_batch(p, &(kvp_batch_options){.size = sizeof(kvp_batch_options),
                                                           .token_budget = 64,
                                                           .chunk_tokens = chunks[k]});
        for (int turn = 0; turn < 2; turn++) { /* the second finds the prompt in the cache */
            kvp_sampling sampling = {.size = sizeof sampling, .mode = KVP_SAMPLE_LIBRARY,
                                     .temperature = 3.0f, .seed = 99};
            kvp_seq_options o = {.size = sizeof o, .max_tokens = DRAWN, .sampling = &sampling,
                                 .eos = KVP_EOS_IGNORE};
            static world_out out[2];
            memset(out, 0, sizeof out);
            kvp_seq *s = NULL, *other = world_seq(p, tokens + k, 20, 1, KVP_SAMPLE_LIBRARY, k + 1);
            assert_int_equal(kvp_seq_create(p, &o, &s, NULL), KVP_OK);
            assert_int_equal(kvp_seq_append(s, tokens, PROMPT), KVP_OK);
            assert_int_equal(kvp_batch_add(b, s), KVP_OK);
            if (k % 2) assert_int_equal(kvp_batch_add(b, other), KVP_OK);
            world_run(b, out);
            assert_int_equal(out[0].tokens, DRAWN);
            if (turn) assert_true(out[0].usage.cached > 0);
            if (first) memcpy(want, out[0].ids, sizeof want);
            first = false;
            assert_memory_equal(out[0].ids, want, sizeof want);
            kvp_seq_destroy(s);
            kvp_seq_destroy(other);
        }
        kvp_batch_destroy(b);
        kvp_pool_destroy(p);
    }
    bool same = true; /* or nothing was drawn at all */
    for (int i = 1; i < DRAWN; i++) same = same && want[i] == want[0];
    assert_false(same);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(case_b83), cmocka_unit_test(case_b93), cmocka_unit_test(case_b107),
        cmocka_unit_test(case_b107_sequences), cmocka_unit_test(case_b113),
        cmocka_unit_test(own_seeded_draws),
    };
    return cmocka_run_group_tests_name("api/cases_numbers", tests, open_model, close_model);
}
