/*
 * Fuzz target of the public interface: the input is a program of calls on one small pool, some of
 * them wrong. After every call the pool recounts itself; at the end everything that was asked for must
 * have come back, and every add must have had its one ending.
 *
 * Byte by byte: an opcode, then its operands. Whatever is missing at the end of the input is 0.
 */
#define _GNU_SOURCE
#include "support/gguf_writer.h"

#include <kvpage.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SEQS = 8, MAX_CALLS = 200, VOCABULARY = 64 };

typedef struct input {
    const uint8_t *p;
    size_t left;
} input;

static uint8_t next(input *in)
{
    if (!in->left) return 0;
    in->left--;
    return *in->p++;
}

static int64_t pieces;

static void *count_alloc(void *user, size_t size, size_t align)
{
    (void)user;
    void *p = NULL;
    if (posix_memalign(&p, align, size)) return NULL;
    pieces++;
    return p;
}

static void count_free(void *user, void *p, size_t size, size_t align)
{
    (void)user, (void)size, (void)align;
    pieces--;
    free(p);
}

static uint64_t tick(void *user)
{
    (void)user;
    static uint64_t now;
    return now += 1000;
}

typedef struct world {
    kvp_pool *pool;
    kvp_batch *batch;
    kvp_seq *seqs[SEQS];
    int adds[SEQS], endings[SEQS]; /* of the sequence that is in this place now */
} world;

static void need(int truth)
{
    if (!truth) __builtin_trap();
}

static kvp_seq_options options_from(input *in, kvp_sampling *sampling, uint64_t place)
{
    uint8_t bits = next(in);
    *sampling = (kvp_sampling){.size = sizeof *sampling,
                               .mode = bits & 1 ? KVP_SAMPLE_HOST : KVP_SAMPLE_LIBRARY,
                               .temperature = bits & 2 ? 0.8f : 0, .top_k = bits & 4 ? 5 : 0,
                               .repetition_penalty = bits & 8 ? 1.1f : 0,
                               .top_logprobs = bits & 16 ? 3 : 0, .seed = 1};
    return (kvp_seq_options){.size = sizeof(kvp_seq_options), .sampling = sampling, .tag = place,
                             .priority = (int8_t)next(in) / 64, .max_tokens = next(in) % 32,
                             .salt = "salt", .salt_bytes = bits & 32 ? 1 + (bits >> 6) : 0,
                             .ring = 1 + next(in) % 8, .eos = KVP_EOS_IGNORE,
                             .event_mask = bits & 64 ? 7 : 0};
}

static void take_events(world *w, int most)
{
    kvp_event e = {.size = sizeof e};
    while (most-- > 0 && kvp_next_event(w->batch, &e) == KVP_OK) {
        need(e.tag < SEQS && e.seq == w->seqs[e.tag]);
        if (e.kind == KVP_EVENT_ENDED) w->endings[e.tag]++;
        need(w->endings[e.tag] <= w->adds[e.tag]);
    }
}

static void put(world *w, uint32_t i, kvp_seq *s)
{
    kvp_seq_destroy(w->seqs[i]);
    w->seqs[i] = s;
    w->adds[i] = w->endings[i] = 0;
}

static void append(world *w, input *in, uint32_t i)
{
    int32_t tokens[32];
    size_t n = next(in) % 32;
    uint8_t kind = next(in);
    for (size_t k = 0; k < n; k++) /* mostly the same few, so that prefixes meet */
        tokens[k] = kind < 200 ? (int32_t)(kind % 4 + k) % VOCABULARY : (int8_t)next(in);
    (void)kvp_seq_append(w->seqs[i], tokens, n);
}

static void call(world *w, input *in)
{
    uint8_t op = next(in);
    uint32_t i = next(in) % SEQS;
    kvp_seq *s = w->seqs[i], *made = NULL;
    kvp_sampling sampling;
    kvp_seq_options o;
    kvp_seq_info info = {.size = sizeof info};
    uint64_t at;
    switch (op % 16) {
    case 0:
        o = options_from(in, &sampling, i);
        if (kvp_seq_create(w->pool, &o, &made, NULL) == KVP_OK) put(w, i, made);
        break;
    case 1:
    case 2: append(w, in, i); break;
    case 3:
    case 4:
        if (kvp_batch_add(w->batch, s) == KVP_OK) w->adds[i]++;
        break;
    case 5:
    case 6:
    case 7:
        need(kvp_step(w->batch) >= 0);
        take_events(w, next(in) % 4 ? 100 : 1);
        break;
    case 8: {
        uint32_t to = next(in) % SEQS;
        o = options_from(in, &sampling, to);
        o.salt_bytes = 0;
        at = next(in);
        if (kvp_seq_fork(s, at % 2 ? KVP_FORK_END : at / 2, &o, &made, NULL) == KVP_OK)
            put(w, to, made);
        break;
    }
    case 9: (void)kvp_seq_truncate(s, next(in)); break;
    case 10: (void)kvp_seq_pin(s, next(in)); break;
    case 11: (void)(next(in) % 2 ? kvp_seq_pause(s) : kvp_seq_resume(s)); break;
    case 12: need(kvp_seq_cancel(s) == (s ? KVP_OK : KVP_ERR_INVALID_HANDLE)); break;
    case 13:
        if (kvp_batch_remove(w->batch, s) == KVP_OK) w->adds[i]--;
        break;
    case 14: put(w, i, NULL); break;
    default: (void)kvp_pool_reset_prefix(w->pool, &at); break;
    }
    if (w->seqs[i] && kvp_seq_get_info(w->seqs[i], &info) == KVP_OK)
        need(info.computed <= info.length && info.shared_blocks <= info.blocks);
    need(kvp_pool_check(w->pool) == KVP_OK);
}

/* Lets whoever can finish finish: nobody may be left without an ending but paused and host ones. */
static void settle(world *w)
{
    for (uint32_t i = 0; i < SEQS; i++) {
        (void)kvp_seq_pin(w->seqs[i], 0);
        (void)kvp_seq_cancel(w->seqs[i]);
    }
    for (int k = 0; k < 3; k++) {
        need(kvp_step(w->batch) >= 0);
        take_events(w, 10000);
    }
    for (uint32_t i = 0; i < SEQS; i++) need(w->endings[i] == w->adds[i]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static uint8_t *file;
    static size_t bytes;
    if (!file) file = gw_tiny(&(gw_model){.layers = 1, .heads = 1, .kv_heads = 1, .context = 128}, &bytes);
    kvp_hooks hooks = {.size = sizeof hooks, .alloc = count_alloc, .free = count_free, .clock = tick};
    kvp_model_options mo = {.size = sizeof mo, .hooks = &hooks};
    input in = {data, size};
    uint8_t shape = next(&in);
    kvp_pool_options po = {.size = sizeof po, .blocks = 2 + shape % 14,
                           .block_tokens = 1u << (shape >> 4 & 3),
                           .prefix_cache = shape & 64 ? KVP_PREFIX_CACHE_OFF : 0};
    kvp_batch_options bo = {.size = sizeof bo, .threads = KVP_THREADS_INLINE,
                            .token_budget = 1 + next(&in) % 40, .chunk_tokens = 1 + next(&in) % 20,
                            .max_sequences = 1 + next(&in) % 8,
                            .inline_budget_ns = shape & 128 ? 1 : UINT64_MAX / 4};
    kvp_model *m = NULL;
    world w = {0};
    need(kvp_model_open_memory(file, bytes, &mo, &m, NULL) == KVP_OK);
    kvp_place_options place = {.size = sizeof place, .threads = KVP_THREADS_INLINE};
    need(kvp_model_place(m, &place, NULL) == KVP_OK);
    need(kvp_pool_create(m, &po, &w.pool, NULL) == KVP_OK);
    need(kvp_batch_create(w.pool, &bo, &w.batch, NULL) == KVP_OK);
    for (int n = 0; n < MAX_CALLS && in.left; n++) call(&w, &in);
    settle(&w);
    for (uint32_t i = 0; i < SEQS; i++) put(&w, i, NULL);
    need(kvp_pool_check(w.pool) == KVP_OK);
    kvp_batch_destroy(w.batch);
    kvp_model_destroy(m);
    kvp_pool_destroy(w.pool);
    need(pieces == 0);
    return 0;
}
