/* See fixed_run.h. */
#include "support/fixed_run.h"

#include <stdlib.h>
#include <string.h>

/* Between them: every architecture, the head sizes that models have, a window, tied and untied
 * outputs, and a weight type of each family. */
const fixed_model fixed_models[FIXED_MODELS] = {
    { "llama, F32, head 8", { .seed = 1 },
      0x9fb8d1fc1293be8e },
    { "llama, Q4_0, head 64", { .type = 2, .heads = 2, .kv_heads = 1, .head_dim = 64, .width = 64,
                                .feed_forward = 96, .untied = 1, .seed = 2 },
      0x84b41307ac8957a5 },
    { "qwen3, Q8_0, head 128", { .arch = "qwen3", .type = 8, .heads = 2, .kv_heads = 1,
                                 .head_dim = 128, .width = 64, .feed_forward = 96, .seed = 3 },
      0x12bb6a1ad4170331 },
    { "gemma3, F16, head 256", { .arch = "gemma3", .type = 1, .heads = 2, .kv_heads = 1,
                                 .head_dim = 256, .width = 32, .feed_forward = 64, .window = 16,
                                 .seed = 4 },
      0x8e5ed9de53fbdf2f },
    { "qwen2, Q4_K, head 64", { .arch = "qwen2", .type = 12, .layers = 1, .heads = 4, .kv_heads = 2,
                                .head_dim = 64, .width = 256, .feed_forward = 256, .seed = 5 },
      0xd5d440135e8cdaf8 },
    { "llama, BF16, head 16", { .type = 30, .heads = 6, .kv_heads = 2, .head_dim = 16, .width = 48,
                                .feed_forward = 80, .seed = 6 },
      0xd413f49887dd37c7 },
};

kvp_model *fixed_open(int which, uint32_t level, uint8_t **file, kvp_error *err)
{
    size_t bytes;
    *file = gw_tiny(&fixed_models[which].description, &bytes);
    kvp_model_options o = { .size = sizeof o, .cpu_level = level };
    kvp_model *m = NULL;
    if (kvp_model_open_memory(*file, bytes, &o, &m, err) == KVP_OK) return m;
    free(*file);
    *file = NULL;
    return NULL;
}

uint32_t fixed_level(const kvp_model *m)
{
    kvp_model_info i = { .size = sizeof i };
    return kvp_model_get_info(m, &i) == KVP_OK ? i.cpu_level : 0;
}

static void add_to_hash(uint64_t *hash, const void *data, size_t bytes)
{
    const uint8_t *p = data;
    for (size_t i = 0; i < bytes; i++) *hash = (*hash ^ p[i]) * 0x100000001b3u;
}

static int32_t likeliest(const float *logits, size_t n)
{
    size_t best = 0;
    for (size_t i = 1; i < n; i++)
        if (logits[i] > logits[best]) best = i;
    return (int32_t)best;
}

enum { PROMPT = 43, TOKENS = 24 };

static int take_logits(kvp_seq *s, uint64_t *hash, int more)
{
    const float *logits;
    size_t n;
    if (kvp_seq_get_logits(s, &logits, &n) != KVP_OK) return 0;
    add_to_hash(hash, logits, n * sizeof *logits);
    if (!more) return kvp_seq_cancel(s) == KVP_OK;
    int32_t token = likeliest(logits, n);
    return kvp_seq_append(s, &token, 1) == KVP_OK;
}

uint64_t fixed_run(kvp_model *m)
{
    kvp_pool_options po = { .size = sizeof po, .blocks = 16 };
    kvp_batch_options bo = { .size = sizeof bo, .threads = KVP_THREADS_INLINE, .chunk_tokens = 29 };
    kvp_sampling sampling = { .size = sizeof sampling, .mode = KVP_SAMPLE_HOST };
    kvp_seq_options so = { .size = sizeof so, .sampling = &sampling };
    kvp_pool *p = NULL;
    kvp_batch *b = NULL;
    kvp_seq *s = NULL;
    kvp_model_info info = { .size = sizeof info };
    int32_t prompt[PROMPT];
    uint64_t hash = 0xcbf29ce484222325u, state = 77;
    int ok = kvp_model_get_info(m, &info) == KVP_OK &&
             kvp_pool_create(m, &po, &p, NULL) == KVP_OK &&
             kvp_batch_create(p, &bo, &b, NULL) == KVP_OK &&
             kvp_seq_create(p, &so, &s, NULL) == KVP_OK;
    for (int i = 0; ok && i < PROMPT; i++)
        prompt[i] = (int32_t)(gw_rand(&state) % info.vocabulary);
    ok = ok && kvp_seq_append(s, prompt, PROMPT) == KVP_OK && kvp_batch_add(b, s) == KVP_OK;
    for (int given = 0; ok && given <= TOKENS;) {
        kvp_event e = { .size = sizeof e };
        kvp_status st = kvp_step(b);
        ok = st >= 0;
        while (ok && kvp_next_event(b, &e) == KVP_OK)
            if (e.kind == KVP_EVENT_LOGITS) ok = take_logits(s, &hash, given++ < TOKENS);
        if (st == KVP_AGAIN) ok = ok && kvp_wait(b, 1000) == KVP_OK;
        if (st == KVP_DONE && given <= TOKENS && kvp_step(b) == KVP_DONE) ok = 0;
    }
    kvp_seq_destroy(s);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
    return ok ? hash : 0;
}
