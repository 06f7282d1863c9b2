/*
 * Pools, and the last error of a domain.
 */
#include "api/api.h"

#include <string.h>

kvp__cache *kvp__cache_of(const kvp_pool *handle)
{
    kvp__shell *shell = kvp__shell_of(handle, KVP__KIND_POOL);
    return shell ? shell->object : NULL;
}

kvp_status kvp_pool_create(kvp_model *model, const kvp_pool_options *options, kvp_pool **out,
                           kvp_error *err)
{
    kvp__opened *m = kvp__opened_of(model);
    if (!m) return kvp__bad_handle(err, "model");
    kvp_pool_options o;
    kvp_status s = kvp__options_in(&o, sizeof o, options, "pool options", err);
    if (s != KVP_OK) return s;
    if (!out) return kvp__fail(err, KVP_ERR_INVALID_ARG, "out: NULL");
    kvp__cache *c;
    s = kvp__cache_create(&c, m, &o, err);
    if (s == KVP_OK) *out = (kvp_pool *)c->shell;
    return s;
}

kvp_status kvp_pool_slab_size(const kvp_model *model, const kvp_pool_options *options,
                              uint64_t *bytes, uint64_t *align, kvp_error *err)
{
    kvp__opened *m = kvp__opened_of(model);
    if (!m) return kvp__bad_handle(err, "model");
    kvp_pool_options o;
    kvp_status s = kvp__options_in(&o, sizeof o, options, "pool options", err);
    if (s != KVP_OK) return s;
    if (!bytes || !align) return kvp__fail(err, KVP_ERR_INVALID_ARG, "bytes or align: NULL");
    if (!o.blocks) return kvp__fail(err, KVP_ERR_INVALID_ARG, "blocks: must be given for a slab");
    kvp__layout layout;
    s = kvp__cache_options(m, &o, &layout, err);
    if (s != KVP_OK) return s;
    *bytes = layout.bytes;
    *align = m->device->slab_align;
    return KVP_OK;
}

void kvp_pool_destroy(kvp_pool *pool)
{
    kvp__shell *shell = kvp__shell_of(pool, KVP__KIND_POOL);
    if (!shell) return;
    kvp__domain *d = shell->object;
    if (kvp__origin_is_ours(d->origin, d->generation) && kvp__shell_kill(shell, KVP__KIND_POOL))
        kvp__domain_settle_handle(d, shell);
}

kvp_status kvp_pool_get_stats(const kvp_pool *pool, kvp_pool_stats *out)
{
    const kvp__cache *c = kvp__cache_of(pool);
    if (!c) return KVP_ERR_INVALID_HANDLE;
    kvp_pool_stats stats;
    kvp__cache_get_stats(c, &stats);
    return kvp__result_out(out, &stats, sizeof stats, "pool stats", NULL);
}

kvp_status kvp_pool_check(kvp_pool *pool)
{
    kvp__cache *c = kvp__cache_of(pool);
    if (!c) return KVP_ERR_INVALID_HANDLE;
    kvp_status s = kvp__domain_enter(&c->domain);
    if (s != KVP_OK) return s;
    s = kvp__cache_check(c, &c->domain.error);
    kvp__domain_leave(&c->domain);
    return s;
}

kvp_status kvp_pool_reset_prefix(kvp_pool *pool, uint64_t *held)
{
    kvp__cache *c = kvp__cache_of(pool);
    if (!c) return KVP_ERR_INVALID_HANDLE;
    kvp_status s = kvp__domain_enter(&c->domain);
    if (s != KVP_OK) return s;
    s = kvp__cache_reset(c, held, &c->domain.error);
    kvp__domain_leave(&c->domain);
    return s;
}

kvp_status kvp_pool_lookup(kvp_pool *pool, const void *salt, size_t salt_bytes,
                           const int32_t *tokens, size_t count, uint64_t *cached)
{
    kvp__cache *c = kvp__cache_of(pool);
    if (!c) return KVP_ERR_INVALID_HANDLE;
    kvp_status s = kvp__domain_enter(&c->domain);
    if (s != KVP_OK) return s;
    if (!cached || (salt_bytes && !salt))
        s = kvp__fail(&c->domain.error, KVP_ERR_INVALID_ARG, "salt or cached: NULL");
    else
        s = kvp__cache_lookup(c, salt, salt_bytes, tokens, count, cached, &c->domain.error);
    kvp__domain_leave(&c->domain);
    return s;
}

/* --- the last error, which any thread may ask for --- */

static void last_error(kvp__domain *d, kvp_error *out)
{
    if (!out) return;
    kvp_error e;
    memset(&e, 0, sizeof e);
    kvp_status s = d ? kvp__domain_enter(d) : KVP_ERR_INVALID_HANDLE;
    if (s == KVP_OK) {
        e = d->error;
        kvp__domain_leave(d);
    } else {
        e.size = sizeof e;
        (void)kvp__refused(&e, s);
    }
    (void)kvp__struct_out(out, &e, sizeof e);
}

void kvp_pool_last_error(const kvp_pool *pool, kvp_error *out)
{
    kvp__cache *c = kvp__cache_of(pool);
    last_error(c ? &c->domain : NULL, out);
}

void kvp_seq_last_error(const kvp_seq *seq, kvp_error *out)
{
    kvp__sequence *s = kvp__sequence_of(seq);
    last_error(s ? &s->cache->domain : NULL, out);
}

void kvp_batch_last_error(const kvp_batch *batch, kvp_error *out)
{
    kvp__loop *l = kvp__loop_of(batch);
    last_error(l ? &l->cache->domain : NULL, out);
}
