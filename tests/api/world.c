/*
 * See world.h.
 */
#include "world.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { PATIENCE = 200000, MAX_FILES = 256 };

static uint8_t *files[MAX_FILES];
static int n_files;

kvp_model *world_model(const gw_model *o)
{
    static const gw_model plain;
    size_t bytes;
    uint8_t *file = gw_tiny(o ? o : &plain, &bytes);
    kvp_error err = {.size = sizeof err};
    kvp_model *m = NULL;
    kvp_status s = kvp_model_open_memory(file, bytes, NULL, &m, &err);
    if (s != KVP_OK) fail_msg("open: %s", err.text);
    assert_true(n_files < MAX_FILES);
    files[n_files++] = file;
    return m;
}

void world_forget(void)
{
    while (n_files) free(files[--n_files]);
}

void world_tokens(int32_t *out, size_t n, uint64_t salt, uint32_t vocabulary)
{
    uint64_t state = salt * 0x9e3779b97f4a7c15u + 1;
    for (size_t i = 0; i < n; i++) out[i] = (int32_t)(gw_rand(&state) % vocabulary);
}

uint32_t world_vocabulary(kvp_model *m)
{
    kvp_model_info i = {.size = sizeof i};
    assert_int_equal(kvp_model_get_info(m, &i), KVP_OK);
    return i.vocabulary;
}

kvp_pool *world_pool(kvp_model *m, uint64_t blocks, uint32_t block_tokens)
{
    kvp_pool_options o = {.size = sizeof o, .blocks = blocks, .block_tokens = block_tokens};
    kvp_error err = {.size = sizeof err};
    kvp_pool *p = NULL;
    if (kvp_pool_create(m, &o, &p, &err) != KVP_OK) fail_msg("pool: %s", err.text);
    return p;
}

kvp_batch *world_batch(kvp_pool *p, const kvp_batch_options *o)
{
    kvp_batch_options own = {.size = sizeof own};
    if (o) own = *o;
    if (!own.threads && !own.team) own.threads = KVP_THREADS_INLINE;
    if (!own.inline_budget_ns) own.inline_budget_ns = UINT64_MAX / 4;
    kvp_error err = {.size = sizeof err};
    kvp_batch *b = NULL;
    if (kvp_batch_create(p, &own, &b, &err) != KVP_OK) fail_msg("batch: %s", err.text);
    return b;
}

kvp_seq *world_seq(kvp_pool *p, const int32_t *tokens, size_t n, uint64_t tag, uint32_t mode,
                   uint64_t max_tokens)
{
    kvp_sampling sampling = {.size = sizeof sampling, .mode = mode};
    kvp_seq_options o = {.size = sizeof o, .tag = tag, .max_tokens = max_tokens,
                         .sampling = &sampling, .eos = KVP_EOS_IGNORE};
    kvp_error err = {.size = sizeof err};
    kvp_seq *s = NULL;
    if (kvp_seq_create(p, &o, &s, &err) != KVP_OK) fail_msg("sequence: %s", err.text);
    if (n) assert_int_equal(kvp_seq_append(s, tokens, n), KVP_OK);
    return s;
}

static void note(world_out *out, const kvp_event *e)
{
    if (!out || e->tag >= WORLD_MAX_TAGS) return;
    world_out *o = &out[e->tag];
    switch (e->kind) {
    case KVP_EVENT_TOKEN:
        if (o->tokens < WORLD_MAX_OUT) o->ids[o->tokens] = e->token;
        o->tokens++;
        break;
    case KVP_EVENT_LOGITS: o->logits++; break;
    case KVP_EVENT_ENDED:
        o->endings++;
        o->ending = e->ending;
        o->status = e->status;
        o->usage = *e->usage;
        break;
    default: break;
    }
}

kvp_status world_step(kvp_batch *b, world_out *out)
{
    kvp_status s = kvp_step(b);
    kvp_event e = {.size = sizeof e};
    while (kvp_next_event(b, &e) == KVP_OK) note(out, &e);
    return s;
}

kvp_status world_run(kvp_batch *b, world_out *out)
{
    for (int i = 0; i < PATIENCE; i++) {
        kvp_status s = world_step(b, out);
        if (s == KVP_DONE || s == KVP_STALLED) return s;
        if (s < 0) fail_msg("step: %s", kvp_status_name(s));
        if (s == KVP_AGAIN) assert_int_equal(kvp_wait(b, 1000), KVP_OK);
    }
    fail_msg("the batch does not come to an end");
    return KVP_ERR_INTERNAL;
}

void world_until(kvp_batch *b, world_out *out, uint64_t tag, uint32_t tokens)
{
    for (int i = 0; i < PATIENCE && out[tag].tokens < tokens && !out[tag].endings; i++) {
        kvp_status s = world_step(b, out);
        if (s < 0) fail_msg("step: %s", kvp_status_name(s));
        if (s == KVP_AGAIN) assert_int_equal(kvp_wait(b, 1000), KVP_OK);
    }
    assert_true(out[tag].tokens >= tokens || out[tag].endings);
}

float *world_oracle_kv(kvp_model *m, const int32_t *tokens, size_t n, uint32_t format)
{
    kvp_pool_options po = {.size = sizeof po, .blocks = n / 16 + 2, .k_format = format,
                           .v_format = format};
    kvp_pool *p = NULL;
    assert_int_equal(kvp_pool_create(m, &po, &p, NULL), KVP_OK);
    kvp_batch *b = world_batch(p, NULL);
    kvp_seq *s = world_seq(p, tokens, n, 0, KVP_SAMPLE_HOST, 0);
    assert_int_equal(kvp_batch_add(b, s), KVP_OK);
    world_run(b, NULL);
    const float *logits = NULL;
    size_t count = 0;
    assert_int_equal(kvp_seq_get_logits(s, &logits, &count), KVP_OK);
    float *copy = malloc(count * sizeof *copy);
    assert_non_null(copy);
    memcpy(copy, logits, count * sizeof *copy);
    kvp_seq_destroy(s);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
    return copy;
}

float *world_oracle(kvp_model *m, const int32_t *tokens, size_t n)
{
    return world_oracle_kv(m, tokens, n, KVP_KV_F16);
}

void world_greedy(kvp_model *m, const int32_t *prompt, size_t n, int32_t *out, size_t count)
{
    world_out *o = calloc(1, sizeof *o);
    assert_non_null(o);
    kvp_pool *p = world_pool(m, (n + count) / 16 + 2, 16);
    kvp_batch *b = world_batch(p, NULL);
    kvp_seq *s = world_seq(p, prompt, n, 0, KVP_SAMPLE_LIBRARY, count);
    assert_int_equal(kvp_batch_add(b, s), KVP_OK);
    world_run(b, o);
    assert_int_equal(o->tokens, count);
    memcpy(out, o->ids, count * sizeof *out);
    kvp_seq_destroy(s);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
    free(o);
}

void world_expect_oracle(kvp_model *m, kvp_seq *s)
{
    size_t n = 0;
    (void)kvp_seq_get_tokens(s, 0, NULL, 0, &n);
    int32_t *tokens = malloc((n + 1) * sizeof *tokens);
    assert_non_null(tokens);
    assert_int_equal(kvp_seq_get_tokens(s, 0, tokens, n, &n), KVP_OK);
    const float *logits = NULL;
    size_t count = 0;
    assert_int_equal(kvp_seq_get_logits(s, &logits, &count), KVP_OK);
    float *alone = world_oracle(m, tokens, n);
    assert_memory_equal(logits, alone, count * sizeof *alone);
    free(alone);
    free(tokens);
}

kvp_pool_stats world_stats(kvp_pool *p)
{
    kvp_pool_stats st = {.size = sizeof st};
    assert_int_equal(kvp_pool_get_stats(p, &st), KVP_OK);
    return st;
}

kvp_seq_info world_info(kvp_seq *s)
{
    kvp_seq_info i = {.size = sizeof i};
    assert_int_equal(kvp_seq_get_info(s, &i), KVP_OK);
    return i;
}

void world_account(kvp_pool *p)
{
    kvp_pool_stats st = world_stats(p);
    assert_int_equal(st.used + st.idle + st.free, st.blocks);
    kvp_status s = kvp_pool_check(p);
    if (s == KVP_OK) return;
    kvp_error e = {.size = sizeof e};
    kvp_pool_last_error(p, &e);
    fail_msg("check: %s", e.text);
}
