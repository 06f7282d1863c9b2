/*
 * Sequences.
 */
#include "api/api.h"

#include <string.h>

kvp_status kvp__enter_seq(const kvp_seq *handle, kvp__sequence **out)
{
    void *object = NULL;
    kvp_status s = kvp__domain_enter(handle, KVP__KIND_SEQ, &object);
    *out = object;
    return s;
}

/* `s` is the live object, and this thread is inside its domain. */
#define ENTER(handle, s)                                   \
    kvp__sequence *s;                                        \
    kvp_status entered_ = kvp__enter_seq(handle, &s);     \
    if (entered_ != KVP_OK) return entered_

/* For calls that make a handle: the error goes into the caller's struct and the domain's record. */
static kvp_status leave_with(kvp__cache *c, kvp_status status, kvp_error *err)
{
    if (status != KVP_OK && err)
        (void)kvp__struct_out(err, &c->domain.error, sizeof c->domain.error);
    return kvp__leave(c, status);
}

kvp_status kvp_seq_create(kvp_pool *pool, const kvp_seq_options *options, kvp_seq **out,
                          kvp_error *err)
{
    kvp__cache *c;
    kvp_status st = kvp__enter_pool(pool, &c);
    if (st != KVP_OK) return kvp__refused(err, st, "pool");
    kvp_seq_options o;
    kvp__sequence *s;
    st = kvp__options_in(&o, sizeof o, options, "sequence options", &c->domain.error);
    if (st == KVP_OK && !out) st = kvp__fail(&c->domain.error, KVP_ERR_INVALID_ARG, "out: NULL");
    if (st == KVP_OK) st = kvp__sequence_create(&s, c, &o, &c->domain.error);
    if (st == KVP_OK) *out = (kvp_seq *)s->shell;
    return leave_with(c, st, err);
}

void kvp_seq_destroy(kvp_seq *seq) { kvp__domain_destroy_handle(seq, KVP__KIND_SEQ); }

kvp_status kvp_seq_fork(kvp_seq *seq, uint64_t length, const kvp_seq_options *options,
                        kvp_seq **out, kvp_error *err)
{
    kvp__sequence *parent;
    kvp_status st = kvp__enter_seq(seq, &parent);
    if (st != KVP_OK) return kvp__refused(err, st, "sequence");
    kvp__cache *c = parent->cache;
    kvp_seq_options o;
    kvp__sequence *s;
    st = kvp__options_in(&o, sizeof o, options, "sequence options", &c->domain.error);
    if (!options) o.tag = parent->tag;
    if (st == KVP_OK && !out) st = kvp__fail(&c->domain.error, KVP_ERR_INVALID_ARG, "out: NULL");
    if (st == KVP_OK) st = kvp__sequence_fork(&s, parent, length, &o, &c->domain.error);
    if (st == KVP_OK) *out = (kvp_seq *)s->shell;
    return leave_with(c, st, err);
}

kvp_status kvp_seq_append(kvp_seq *seq, const int32_t *tokens, size_t count)
{
    ENTER(seq, s);
    return kvp__leave(s->cache, kvp__sequence_append(s, tokens, count, &s->cache->domain.error));
}

kvp_status kvp_seq_append_text(kvp_seq *seq, const char *text, size_t bytes, uint32_t flags)
{
    ENTER(seq, s);
    return kvp__leave(s->cache,
                 kvp__sequence_append_text(s, text, bytes, flags, &s->cache->domain.error));
}

kvp_status kvp_seq_append_chat(kvp_seq *seq, const kvp_chat_message *messages, size_t n_messages,
                               size_t stride, uint32_t flags)
{
    ENTER(seq, s);
    return kvp__leave(s->cache, kvp__sequence_append_chat(s, messages, n_messages, stride, flags,
                                                     &s->cache->domain.error));
}

kvp_status kvp_seq_set_sampling(kvp_seq *seq, const kvp_sampling *sampling)
{
    ENTER(seq, s);
    return kvp__leave(s->cache, kvp__sequence_set_sampling(s, sampling, &s->cache->domain.error));
}

kvp_status kvp_seq_set_max_tokens(kvp_seq *seq, uint64_t max_tokens)
{
    ENTER(seq, s);
    return kvp__leave(s->cache, kvp__sequence_set_max_tokens(s, max_tokens, &s->cache->domain.error));
}

kvp_status kvp_seq_truncate(kvp_seq *seq, uint64_t length)
{
    ENTER(seq, s);
    return kvp__leave(s->cache, kvp__sequence_truncate(s, length, &s->cache->domain.error));
}

kvp_status kvp_seq_pin(kvp_seq *seq, uint64_t length)
{
    ENTER(seq, s);
    return kvp__leave(s->cache, kvp__sequence_pin(s, length, &s->cache->domain.error));
}

kvp_status kvp_seq_get_info(const kvp_seq *seq, kvp_seq_info *out)
{
    ENTER(seq, s);
    kvp_seq_info info;
    kvp__sequence_get_info(s, &info);
    return kvp__leave(s->cache, kvp__result_out(out, &info, sizeof info, "sequence info",
                                           &s->cache->domain.error));
}

kvp_status kvp_seq_get_tokens(const kvp_seq *seq, uint64_t from, int32_t *out, size_t capacity,
                              size_t *count)
{
    ENTER(seq, s);
    kvp_error *err = &s->cache->domain.error;
    if (!count || (capacity && !out))
        return kvp__leave(s->cache, kvp__fail(err, KVP_ERR_INVALID_ARG, "out or count: NULL"));
    if (from > s->seq.length)
        return kvp__leave(s->cache, kvp__fail(err, KVP_ERR_INVALID_ARG, "from: %llu is beyond the end",
                                         (unsigned long long)from));
    size_t n = (size_t)(s->seq.length - from);
    *count = n;
    if (n > capacity)
        return kvp__leave(s->cache, kvp__fail_need(err, KVP_ERR_BUFFER, n, capacity,
                                              "%zu tokens do not fit %zu", n, capacity));
    if (n) memcpy(out, s->seq.tokens + from, n * sizeof *out);
    return kvp__leave(s->cache, KVP_OK);
}

kvp_status kvp_seq_get_logits(const kvp_seq *seq, const float **out, size_t *count)
{
    ENTER(seq, s);
    kvp_error *err = &s->cache->domain.error;
    if (!out) return kvp__leave(s->cache, kvp__fail(err, KVP_ERR_INVALID_ARG, "out: NULL"));
    if (!s->logits_pending)
        return kvp__leave(s->cache, kvp__fail(err, KVP_ERR_STATE, "no logits are pending"));
    *out = s->logits->row;
    if (count) *count = kvp__cache_vocabulary(s->cache);
    return kvp__leave(s->cache, KVP_OK);
}

kvp_status kvp_seq_pause(kvp_seq *seq)
{
    ENTER(seq, s);
    return kvp__leave(s->cache, kvp__loop_pause(s, true, &s->cache->domain.error));
}

kvp_status kvp_seq_resume(kvp_seq *seq)
{
    ENTER(seq, s);
    return kvp__leave(s->cache, kvp__loop_pause(s, false, &s->cache->domain.error));
}

static void ask_cancel(void *object)
{
    kvp__sequence *s = object;
    atomic_store(&s->cancel_asked, 1);
}

kvp_status kvp_seq_cancel(kvp_seq *seq)
{
    return kvp__domain_ask(seq, KVP__KIND_SEQ, ask_cancel);
}
