/*
 * Pools, and the last error of a domain.
 */
#include "api/api.h"

#include <string.h>

kvp_status kvp__enter_pool(const kvp_pool *handle, kvp__cache **out)
{
    void *object = NULL;
    kvp_status s = kvp__domain_enter(handle, KVP__KIND_POOL, &object);
    *out = object;
    return s;
}

/* `c` is the live object, and this thread is inside its domain. */
#define ENTER(handle, c)                                   \
    kvp__cache *c;                                        \
    kvp_status entered_ = kvp__enter_pool(handle, &c);     \
    if (entered_ != KVP_OK) return entered_

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
    kvp__cache_shape shape;
    s = kvp__cache_options(m, &o, &shape, err);
    if (s != KVP_OK) return s;
    *bytes = shape.layout.bytes;
    *align = shape.device->slab_align;
    return KVP_OK;
}

void kvp_pool_destroy(kvp_pool *pool) { kvp__domain_destroy_handle(pool, KVP__KIND_POOL); }

kvp_status kvp_pool_get_stats(const kvp_pool *pool, kvp_pool_stats *out)
{
    kvp__shell *shell = kvp__shell_pin(pool, KVP__KIND_POOL);
    if (!shell) return KVP_ERR_INVALID_HANDLE;
    kvp_pool_stats stats;
    kvp__cache_get_stats(shell->object, &stats);
    kvp__shell_unpin(shell);
    return kvp__result_out(out, &stats, sizeof stats, "pool stats", NULL);
}

kvp_status kvp_pool_check(kvp_pool *pool)
{
    ENTER(pool, c);
    return kvp__leave(c, kvp__cache_check(c, &c->domain.error));
}

kvp_status kvp_pool_reset_prefix(kvp_pool *pool, uint64_t *held)
{
    ENTER(pool, c);
    return kvp__leave(c, kvp__cache_reset(c, held, &c->domain.error));
}

kvp_status kvp_pool_lookup(kvp_pool *pool, const void *salt, size_t salt_bytes,
                           const int32_t *tokens, size_t count, uint64_t *cached)
{
    ENTER(pool, c);
    kvp_error *err = &c->domain.error;
    if (!cached || (salt_bytes && !salt))
        return kvp__leave(c, kvp__fail(err, KVP_ERR_INVALID_ARG, "salt or cached: NULL"));
    return kvp__leave(c, kvp__cache_lookup(c, salt, salt_bytes, tokens, count, cached, err));
}

/* --- the last error, which any thread may ask for --- */

/* `s`: how the domain of `c`, by a handle that is a `what`, was entered. */
static void last_error(kvp_status s, kvp__cache *c, const char *what, kvp_error *out)
{
    kvp_error e = {.size = sizeof e};
    if (s == KVP_OK) {
        e = c->domain.error;
        kvp__domain_leave(&c->domain);
    } else {
        (void)kvp__refused(&e, s, what);
    }
    if (out) (void)kvp__struct_out(out, &e, sizeof e);
}

void kvp_pool_last_error(const kvp_pool *pool, kvp_error *out)
{
    kvp__cache *c;
    kvp_status s = kvp__enter_pool(pool, &c);
    last_error(s, c, "pool", out);
}

void kvp_seq_last_error(const kvp_seq *seq, kvp_error *out)
{
    kvp__sequence *q;
    kvp_status s = kvp__enter_seq(seq, &q);
    last_error(s, q ? q->cache : NULL, "sequence", out);
}

void kvp_batch_last_error(const kvp_batch *batch, kvp_error *out)
{
    kvp__loop *l;
    kvp_status s = kvp__enter_batch(batch, &l);
    last_error(s, l ? l->cache : NULL, "batch", out);
}
