/*
 * Sequences.
 */
#include "api/api.h"

#include <string.h>

kvp__sequence *kvp__sequence_of(const kvp_seq *handle)
{
    kvp__shell *shell = kvp__shell_of(handle, KVP__KIND_SEQ);
    return shell ? shell->object : NULL;
}

/* Begins a call on a sequence: `s` is the live object, and this thread is inside its domain. */
#define ENTER(handle, s)                                        \
    kvp__sequence *s = kvp__sequence_of(handle);                \
    if (!s) return KVP_ERR_INVALID_HANDLE;                      \
    kvp_status entered_ = kvp__domain_enter(&s->cache->domain); \
    if (entered_ != KVP_OK) return entered_

static kvp_status leave(kvp__cache *c, kvp_status status)
{
    kvp__domain_leave(&c->domain);
    return status;
}

/* For calls that make a handle: the error goes into the caller's struct and the domain's record. */
static kvp_status leave_with(kvp__cache *c, kvp_status status, kvp_error *err)
{
    if (status != KVP_OK && err) {
        uint32_t size = err->size ? err->size : sizeof *err;
        err->size = size;
        (void)kvp__struct_out(err, &c->domain.error, sizeof c->domain.error);
    }
    return leave(c, status);
}

kvp_status kvp_seq_create(kvp_pool *pool, const kvp_seq_options *options, kvp_seq **out,
                          kvp_error *err)
{
    kvp__cache *c = kvp__cache_of(pool);
    if (!c) return kvp__bad_handle(err, "pool");
    kvp_status st = kvp__domain_enter(&c->domain);
    if (st != KVP_OK) return kvp__refused(err, st);
    kvp_seq_options o;
    kvp__sequence *s;
    st = kvp__options_in(&o, sizeof o, options, "sequence options", &c->domain.error);
    if (st == KVP_OK && !out) st = kvp__fail(&c->domain.error, KVP_ERR_INVALID_ARG, "out: NULL");
    if (st == KVP_OK) st = kvp__sequence_create(&s, c, &o, &c->domain.error);
    if (st == KVP_OK) *out = (kvp_seq *)s->shell;
    return leave_with(c, st, err);
}

void kvp_seq_destroy(kvp_seq *seq)
{
    kvp__shell *shell = kvp__shell_of(seq, KVP__KIND_SEQ);
    if (!shell) return;
    kvp__domain *d = &((kvp__sequence *)shell->object)->cache->domain;
    if (kvp__origin_is_ours(d->origin, d->generation) && kvp__shell_kill(shell, KVP__KIND_SEQ))
        kvp__domain_settle_handle(d, shell);
}

kvp_status kvp_seq_fork(kvp_seq *seq, uint64_t length, const kvp_seq_options *options,
                        kvp_seq **out, kvp_error *err)
{
    kvp__sequence *parent = kvp__sequence_of(seq);
    if (!parent) return kvp__bad_handle(err, "sequence");
    kvp__cache *c = parent->cache;
    kvp_status st = kvp__domain_enter(&c->domain);
    if (st != KVP_OK) return kvp__refused(err, st);
    kvp_seq_options o;
    kvp__sequence *s;
    st = kvp__options_in(&o, sizeof o, options, "sequence options", &c->domain.error);
    if (st == KVP_OK && !out) st = kvp__fail(&c->domain.error, KVP_ERR_INVALID_ARG, "out: NULL");
    if (st == KVP_OK) st = kvp__sequence_fork(&s, parent, length, &o, &c->domain.error);
    if (st == KVP_OK) *out = (kvp_seq *)s->shell;
    return leave_with(c, st, err);
}

kvp_status kvp_seq_append(kvp_seq *seq, const int32_t *tokens, size_t count)
{
    ENTER(seq, s);
    return leave(s->cache, kvp__sequence_append(s, tokens, count, &s->cache->domain.error));
}

kvp_status kvp_seq_append_text(kvp_seq *seq, const char *text, size_t bytes, uint32_t flags)
{
    ENTER(seq, s);
    return leave(s->cache,
                 kvp__sequence_append_text(s, text, bytes, flags, &s->cache->domain.error));
}

kvp_status kvp_seq_append_chat(kvp_seq *seq, const kvp_chat_message *messages, size_t n_messages,
                               size_t stride, uint32_t flags)
{
    ENTER(seq, s);
    return leave(s->cache, kvp__sequence_append_chat(s, messages, n_messages, stride, flags,
                                                     &s->cache->domain.error));
}

kvp_status kvp_seq_set_sampling(kvp_seq *seq, const kvp_sampling *sampling)
{
    ENTER(seq, s);
    return leave(s->cache, kvp__sequence_set_sampling(s, sampling, &s->cache->domain.error));
}

kvp_status kvp_seq_set_max_tokens(kvp_seq *seq, uint64_t max_tokens)
{
    ENTER(seq, s);
    return leave(s->cache, kvp__sequence_set_max_tokens(s, max_tokens, &s->cache->domain.error));
}

kvp_status kvp_seq_truncate(kvp_seq *seq, uint64_t length)
{
    ENTER(seq, s);
    return leave(s->cache, kvp__sequence_truncate(s, length, &s->cache->domain.error));
}

kvp_status kvp_seq_pin(kvp_seq *seq, uint64_t length)
{
    ENTER(seq, s);
    return leave(s->cache, kvp__sequence_pin(s, length, &s->cache->domain.error));
}

kvp_status kvp_seq_get_info(const kvp_seq *seq, kvp_seq_info *out)
{
    ENTER(seq, s);
    kvp_seq_info info;
    kvp__sequence_get_info(s, &info);
    return leave(s->cache, kvp__result_out(out, &info, sizeof info, "sequence info",
                                           &s->cache->domain.error));
}

kvp_status kvp_seq_get_tokens(const kvp_seq *seq, uint64_t from, int32_t *out, size_t capacity,
                              size_t *count)
{
    ENTER(seq, s);
    kvp_error *err = &s->cache->domain.error;
    if (!count || (capacity && !out))
        return leave(s->cache, kvp__fail(err, KVP_ERR_INVALID_ARG, "out or count: NULL"));
    if (from > s->seq.length)
        return leave(s->cache, kvp__fail(err, KVP_ERR_INVALID_ARG, "from: %llu is beyond the end",
                                         (unsigned long long)from));
    size_t n = (size_t)(s->seq.length - from);
    *count = n;
    if (n > capacity)
        return leave(s->cache, kvp__fail_need(err, KVP_ERR_BUFFER, n, capacity,
                                              "%zu tokens do not fit %zu", n, capacity));
    if (n) memcpy(out, s->seq.tokens + from, n * sizeof *out);
    return leave(s->cache, KVP_OK);
}

kvp_status kvp_seq_get_logits(const kvp_seq *seq, const float **out, size_t *count)
{
    ENTER(seq, s);
    kvp_error *err = &s->cache->domain.error;
    if (!out) return leave(s->cache, kvp__fail(err, KVP_ERR_INVALID_ARG, "out: NULL"));
    if (!s->logits_pending)
        return leave(s->cache, kvp__fail(err, KVP_ERR_STATE, "no logits are pending"));
    *out = s->logits->row;
    if (count) *count = kvp__cache_vocabulary(s->cache);
    return leave(s->cache, KVP_OK);
}

kvp_status kvp_seq_pause(kvp_seq *seq)
{
    ENTER(seq, s);
    return leave(s->cache, kvp__loop_pause(s, true, &s->cache->domain.error));
}

kvp_status kvp_seq_resume(kvp_seq *seq)
{
    ENTER(seq, s);
    return leave(s->cache, kvp__loop_pause(s, false, &s->cache->domain.error));
}

kvp_status kvp_seq_cancel(kvp_seq *seq)
{
    kvp__sequence *s = kvp__sequence_of(seq);
    if (!s) return KVP_ERR_INVALID_HANDLE;
    kvp__domain *d = &s->cache->domain;
    if (!kvp__origin_is_ours(d->origin, d->generation)) return KVP_ERR_FORKED;
    atomic_store(&s->cancel_asked, 1);
    kvp__domain_settle_asked(d);
    return KVP_OK;
}
