/*
 * Batches: the loop, events, the fd, and the own-model way.
 */
#include "api/api.h"

#include <string.h>

kvp_status kvp__enter_batch(const kvp_batch *handle, kvp__loop **out)
{
    void *object = NULL;
    kvp_status s = kvp__domain_enter(handle, KVP__KIND_BATCH, &object);
    *out = object;
    return s;
}

/* `l` is the live object, and this thread is inside its domain. */
#define ENTER(handle, l)                                   \
    kvp__loop *l;                                        \
    kvp_status entered_ = kvp__enter_batch(handle, &l);     \
    if (entered_ != KVP_OK) return entered_

kvp_status kvp_batch_create(kvp_pool *pool, const kvp_batch_options *options, kvp_batch **out,
                            kvp_error *err)
{
    kvp__cache *c;
    kvp_status s = kvp__enter_pool(pool, &c);
    if (s != KVP_OK) return kvp__refused(err, s, "pool");
    kvp_batch_options o;
    kvp__loop *l;
    s = kvp__options_in(&o, sizeof o, options, "batch options", err);
    if (s == KVP_OK && !out) s = kvp__fail(err, KVP_ERR_INVALID_ARG, "out: NULL");
    if (s == KVP_OK) s = kvp__loop_create(&l, c, &o, err);
    if (s == KVP_OK) *out = (kvp_batch *)l->shell;
    return kvp__leave(c, s);
}

void kvp_batch_destroy(kvp_batch *batch) { kvp__domain_destroy_handle(batch, KVP__KIND_BATCH); }

/* A sequence beside the batch whose domain the caller is inside. */
static kvp_status member(const kvp__loop *l, const kvp_seq *seq, kvp__sequence **out)
{
    kvp__domain *d = &l->cache->domain;
    void *object = NULL;
    kvp_status s = kvp__domain_object(d, seq, KVP__KIND_SEQ, &object);
    *out = object;
    if (s == KVP_ERR_MISMATCH)
        return kvp__fail(&d->error, s, "the sequence is of another pool");
    return s == KVP_OK ? s : kvp__bad_handle(&d->error, "sequence");
}

kvp_status kvp_batch_add(kvp_batch *batch, kvp_seq *seq)
{
    ENTER(batch, l);
    kvp__sequence *q;
    kvp_status s = member(l, seq, &q);
    if (s == KVP_OK) s = kvp__loop_add(l, q, &l->cache->domain.error);
    return kvp__leave(l->cache, s);
}

kvp_status kvp_batch_remove(kvp_batch *batch, kvp_seq *seq)
{
    ENTER(batch, l);
    kvp__sequence *q;
    kvp_status s = member(l, seq, &q);
    if (s == KVP_OK) s = kvp__loop_remove(l, q, &l->cache->domain.error);
    return kvp__leave(l->cache, s);
}

kvp_status kvp_step(kvp_batch *batch)
{
    ENTER(batch, l);
    return kvp__leave(l->cache, kvp__loop_step(l, &l->cache->domain.error));
}

kvp_status kvp_next_event(kvp_batch *batch, kvp_event *out)
{
    ENTER(batch, l);
    kvp__cache *c = l->cache;
    uint32_t size = 0;
    if (out) memcpy(&size, out, sizeof size);
    if (size < 8)
        return kvp__leave(c, kvp__fail(&c->domain.error, KVP_ERR_INVALID_ARG, "event: size is not set"));
    kvp_event e;
    kvp_status s = kvp__loop_next_event(l, &e);
    if (s == KVP_OK) s = kvp__result_out(out, &e, sizeof e, "event", &c->domain.error);
    return kvp__leave(c, s);
}

kvp_status kvp_batch_fd(kvp_batch *batch, int32_t *fd)
{
    ENTER(batch, l);
    kvp__cache *c = l->cache;
    if (!fd) return kvp__leave(c, kvp__fail(&c->domain.error, KVP_ERR_INVALID_ARG, "fd: NULL"));
    return kvp__leave(c, kvp__bell_fd(&l->bell, fd, &c->domain.error));
}

kvp_status kvp_batch_deadline(const kvp_batch *batch, uint64_t *ns)
{
    ENTER(batch, l);
    kvp__cache *c = l->cache;
    if (!ns) return kvp__leave(c, kvp__fail(&c->domain.error, KVP_ERR_INVALID_ARG, "ns: NULL"));
    *ns = kvp__loop_deadline(l);
    return kvp__leave(c, KVP_OK);
}

kvp_status kvp_batch_timeout_ms(const kvp_batch *batch, int32_t *ms)
{
    ENTER(batch, l);
    kvp__cache *c = l->cache;
    if (!ms) return kvp__leave(c, kvp__fail(&c->domain.error, KVP_ERR_INVALID_ARG, "ms: NULL"));
    *ms = kvp__loop_timeout_ms(l);
    return kvp__leave(c, KVP_OK);
}

kvp_status kvp_wakeup(kvp_batch *batch)
{
    kvp__shell *shell = kvp__shell_pin(batch, KVP__KIND_BATCH);
    if (!shell) return KVP_ERR_INVALID_HANDLE;
    kvp__loop *l = shell->object;
    const kvp__domain *d = &l->cache->domain;
    bool ours = kvp__origin_is_ours(d->origin, d->generation);
    if (ours) kvp__bell_ring(&l->bell);
    kvp__shell_unpin(shell);
    return ours ? KVP_OK : KVP_ERR_FORKED;
}

kvp_status kvp_wait(kvp_batch *batch, int32_t timeout_ms)
{
    ENTER(batch, l);
    int32_t fd;
    kvp_status s = kvp__loop_wait_for(l, &timeout_ms, &fd, &l->cache->domain.error);
    (void)kvp__leave(l->cache, s);
    return s == KVP_OK ? kvp__bell_wait(fd, timeout_ms) : s;
}

kvp_status kvp_batch_get_stats(const kvp_batch *batch, kvp_batch_stats *out)
{
    kvp__shell *shell = kvp__shell_pin(batch, KVP__KIND_BATCH);
    if (!shell) return KVP_ERR_INVALID_HANDLE;
    kvp_batch_stats stats;
    kvp__loop_get_stats(shell->object, &stats);
    kvp__shell_unpin(shell);
    return kvp__result_out(out, &stats, sizeof stats, "batch stats", NULL);
}

/* --- own model --- */

kvp_status kvp_batch_get_view(const kvp_batch *batch, kvp_view *out)
{
    ENTER(batch, l);
    kvp__cache *c = l->cache;
    kvp_view v;
    kvp_status s = kvp__own_view(l, &v, &c->domain.error);
    if (s == KVP_OK) s = kvp__result_out(out, &v, sizeof v, "view", &c->domain.error);
    return kvp__leave(c, s);
}

kvp_status kvp_batch_get_view_group(const kvp_batch *batch, uint32_t group, kvp_view_group *out)
{
    ENTER(batch, l);
    kvp__cache *c = l->cache;
    kvp_view_group v;
    kvp_status s = kvp__own_view_group(l, group, &v, &c->domain.error);
    if (s == KVP_OK) s = kvp__result_out(out, &v, sizeof v, "view group", &c->domain.error);
    return kvp__leave(c, s);
}

kvp_status kvp_attention(kvp_batch *batch, uint32_t layer, const kvp_attention_args *args)
{
    ENTER(batch, l);
    kvp__cache *c = l->cache;
    if (!args) return kvp__leave(c, kvp__fail(&c->domain.error, KVP_ERR_INVALID_ARG, "args: NULL"));
    kvp_attention_args a;
    kvp_status s = kvp__options_in(&a, sizeof a, args, "attention", &c->domain.error);
    if (s == KVP_OK) s = kvp__own_attention(l, layer, &a, &c->domain.error);
    return kvp__leave(c, s);
}

kvp_status kvp_commit(kvp_batch *batch, const int32_t *tokens, size_t count)
{
    ENTER(batch, l);
    return kvp__leave(l->cache, kvp__own_commit(l, tokens, count, &l->cache->domain.error));
}

kvp_status kvp_abort(kvp_batch *batch)
{
    ENTER(batch, l);
    return kvp__leave(l->cache, kvp__own_abort(l, &l->cache->domain.error));
}
