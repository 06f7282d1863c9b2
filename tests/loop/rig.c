#define _GNU_SOURCE
#include "rig.h"

#include "support/gguf_writer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <cmocka.h>

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

void rig_open(rig *r, int32_t threads)
{
    gw_model tiny = {.head_dim = 16, .context = 4096, .tokenizer = 1, .seed = 11};
    kvp_pool_options pool = {.size = sizeof pool, .blocks = 512};
    kvp_batch_options batch = {.size = sizeof batch, .threads = threads ? threads : 1};
    size_t bytes;
    kvp_error err = {.size = sizeof err};
    memset(r, 0, sizeof *r);
    r->file = gw_tiny(&tiny, &bytes);
    if (kvp_model_open_memory(r->file, bytes, NULL, &r->model, &err) < 0 ||
        kvp_pool_create(r->model, &pool, &r->pool, &err) < 0 ||
        kvp_batch_create(r->pool, &batch, &r->batch, &err) < 0)
        fail_msg("%s", err.text);
}

void rig_close(rig *r)
{
    kvp_batch_destroy(r->batch);
    kvp_pool_destroy(r->pool);
    kvp_model_destroy(r->model);
    free(r->file);
}

kvp_seq *rig_seq(rig *r, uint64_t tag, size_t prompt, const kvp_seq_options *options)
{
    kvp_seq_options o = {.size = sizeof o, .max_tokens = 8, .eos = KVP_EOS_IGNORE};
    int32_t tokens[2048];
    kvp_seq *seq = NULL;
    if (options) o = *options;
    o.tag = tag;
    assert_true(prompt <= 2048);
    for (size_t i = 0; i < prompt; i++)
        tokens[i] = (int32_t)((i * 7 + tag * 13 + i * tag) % RIG_VOCABULARY);
    assert_int_equal(kvp_seq_create(r->pool, &o, &seq, NULL), KVP_OK);
    if (prompt) assert_int_equal(kvp_seq_append(seq, tokens, prompt), KVP_OK);
    return seq;
}

kvp_seq *rig_add(rig *r, uint64_t tag, size_t prompt, uint64_t max_tokens)
{
    kvp_seq_options o = {.size = sizeof o, .max_tokens = max_tokens, .eos = KVP_EOS_IGNORE};
    kvp_seq *seq = rig_seq(r, tag, prompt, &o);
    assert_int_equal(kvp_batch_add(r->batch, seq), KVP_OK);
    return seq;
}

size_t rig_take(rig *r, unsigned *endings, unsigned *tokens)
{
    kvp_event e = {.size = sizeof e};
    size_t n = 0;
    for (; kvp_next_event(r->batch, &e) == KVP_OK; n++) {
        if (endings && e.kind == KVP_EVENT_ENDED) endings[e.tag]++;
        if (tokens && e.kind == KVP_EVENT_TOKEN) tokens[e.tag]++;
    }
    return n;
}

void rig_finish(rig *r, unsigned *endings, unsigned *tokens)
{
    uint64_t start = rig_now();
    for (;;) {
        kvp_status status = kvp_step(r->batch);
        rig_take(r, endings, tokens);
        if (status == KVP_DONE) return;
        assert_true(status >= 0);
        if (status == KVP_AGAIN) kvp_wait(r->batch, 1000);
        if (rig_now() - start > RIG_PATIENCE_MS * 1000000ull) fail_msg("no end in sight");
    }
}

void rig_settle(rig *r)
{
    uint64_t start = rig_now();
    for (;;) {
        int32_t timeout;
        kvp_batch_stats b = {.size = sizeof b};
        assert_true(kvp_step(r->batch) >= 0);
        assert_int_equal(kvp_batch_timeout_ms(r->batch, &timeout), KVP_OK);
        if (rig_now() - start > RIG_PATIENCE_MS * 1000000ull) fail_msg("it never settles");
        if (timeout == 0 || rig_readable(r)) continue;
        kvp_batch_get_stats(r->batch, &b);
        if (b.running == 0) return;
        kvp_wait(r->batch, 20);
    }
}

int rig_fd(rig *r)
{
    int32_t fd = -1;
    assert_int_equal(kvp_batch_fd(r->batch, &fd), KVP_OK);
    return fd;
}

bool rig_readable(rig *r)
{
    struct pollfd p = {.fd = rig_fd(r), .events = POLLIN};
    return poll(&p, 1, 0) == 1 && (p.revents & POLLIN);
}

uint64_t rig_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
