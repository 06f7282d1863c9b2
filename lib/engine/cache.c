/*
 * Pools: the blocks, the index and the store behind a kvp_pool handle, and the settling of what was
 * destroyed or cancelled in its domain. See engine.h.
 */
#include "engine/engine.h"

#include <string.h>

#define DEFAULT_TOKENS 8192u

static kvp_status check_choice(const char *what, uint32_t value, uint32_t last, kvp_error *err)
{
    if (value <= last) return KVP_OK;
    return kvp__fail(err, KVP_ERR_INVALID_ARG, "%s: %u is not one of its values", what,
                     (unsigned)value);
}

static kvp_status choose_blocks(kvp_pool_options *o, const kvp__layout *one,
                                const kvp__geometry *g, kvp_error *err)
{
    if (o->blocks) return KVP_OK;
    if (o->bytes) {
        o->blocks = o->bytes / one->block_bytes;
        if (o->blocks) return KVP_OK;
        return kvp__fail_need(err, KVP_ERR_INVALID_ARG, one->block_bytes, o->bytes,
                              "bytes: %llu are less than a block of %llu bytes",
                              (unsigned long long)o->bytes, (unsigned long long)one->block_bytes);
    }
    o->blocks = kvp__ceil_div(kvp__max64(g->context, DEFAULT_TOKENS), o->block_tokens);
    return KVP_OK;
}

kvp_status kvp__cache_options(const kvp__opened *m, kvp_pool_options *o, kvp__cache_shape *out,
                              kvp_error *err)
{
    kvp__layout *layout = &out->layout;
    out->device = kvp__device_find(o->device, &out->ordinal);
    if (!out->device)
        return kvp__fail(err, KVP_ERR_NO_DEVICE, "device \"%s\": there is none of that name",
                         o->device);
    if (!o->block_tokens) o->block_tokens = KVP__DEFAULT_BLOCK;
    if (!o->k_format) o->k_format = KVP_KV_F16;
    if (!o->v_format) o->v_format = KVP_KV_F16;
    if (!o->prefix_cache) o->prefix_cache = KVP_PREFIX_CACHE_ON;
    kvp_status s = check_choice("k_format", o->k_format, KVP_KV_F32, err);
    if (s == KVP_OK) s = check_choice("v_format", o->v_format, KVP_KV_F32, err);
    if (s == KVP_OK) s = check_choice("prefix_cache", o->prefix_cache, KVP_PREFIX_CACHE_OFF, err);
    const kvp__geometry *g = &m->model.geometry;
    /* Before the device is asked anything: a forked child must not touch its parent's. */
    if (s == KVP_OK) s = kvp__opened_check_ours(m, out->device, out->ordinal, err);
    if (s == KVP_OK)
        s = out->device->supports(g, o->block_tokens, o->k_format, o->v_format, out->ordinal, err);
    if (s == KVP_OK)
        s = kvp__layout_make(layout, g, o->block_tokens, o->k_format, o->v_format, 1, err);
    if (s == KVP_OK) s = choose_blocks(o, layout, g, err);
    if (s == KVP_OK && o->blocks > KVP__MAX_BLOCKS)
        s = kvp__fail(err, KVP_ERR_TOO_LARGE, "blocks: %llu are more than %u",
                      (unsigned long long)o->blocks, KVP__MAX_BLOCKS);
    if (s == KVP_OK)
        s = kvp__layout_make(layout, g, o->block_tokens, o->k_format, o->v_format, o->blocks, err);
    return s;
}

static kvp_status check_slab(const kvp_pool_options *o, const kvp__cache_shape *shape,
                             kvp_error *err)
{
    const kvp__layout *layout = &shape->layout;
    if (!o->slab) return KVP_OK;
    if (!o->blocks || o->slab_bytes < layout->bytes)
        return kvp__fail_need(err, KVP_ERR_INVALID_ARG, layout->bytes, o->slab_bytes,
                              "slab_bytes: %llu for %llu blocks take %llu",
                              (unsigned long long)o->slab_bytes, (unsigned long long)o->blocks,
                              (unsigned long long)layout->bytes);
    if ((uintptr_t)o->slab % shape->device->slab_align)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "slab: not aligned to %llu bytes",
                         (unsigned long long)shape->device->slab_align);
    return KVP_OK;
}

/* --- the end of things --- */

static void finish(kvp__domain *d)
{
    kvp__cache *c = (kvp__cache *)d;
    kvp__origin *origin = &c->model->origin;
    if (c->caching) kvp__prefix_fini(&c->prefix);
    kvp__pool_fini(&c->pool);
    if (c->store) c->device->store_destroy(c->store);
    if (c->slab_released) c->slab_released(c->slab_user, c->slab);
    kvp__free(&origin->hooks, c, sizeof *c);
    kvp__origin_release(origin);
}

static void settle_cancels(kvp__cache *c)
{
    for (kvp__sequence *s = c->sequences; s; s = s->next)
        if (atomic_exchange(&s->cancel_asked, 0) && s->entry.in_batch)
            kvp__loop_end(c->loop, s, KVP_END_CANCELLED, KVP_OK, -1);
}

static void settle(kvp__domain *d, kvp__shell *killed)
{
    kvp__cache *c = (kvp__cache *)d;
    if (!killed) {
        settle_cancels(c);
        return;
    }
    void *object = killed->object;
    kvp__shell_give_back(killed);
    if (object == c)
        c->shell = NULL;
    else if (c->loop && object == c->loop)
        kvp__loop_destroy(object);
    else
        kvp__sequence_destroy(object);
    kvp__domain_release(d);
}

/* --- creation --- */

static kvp_status fill(kvp__cache *c, const kvp_pool_options *o, kvp_error *err)
{
    const kvp__hooks *h = &c->model->origin.hooks;
    kvp_status s = c->device->store_create(h, &c->layout, o->slab, c->ordinal, &c->store, err);
    if (s == KVP_OK)
        s = kvp__pool_init(&c->pool, h, c->layout.n_groups, c->layout.blocks,
                           c->layout.block_tokens, err);
    if (s == KVP_OK && o->prefix_cache == KVP_PREFIX_CACHE_ON) {
        kvp__prefix_options po = {.key = kvp__hash_secret()};
        s = kvp__prefix_init(&c->prefix, &c->pool, &po, err);
        c->caching = s == KVP_OK;
    }
    if (s != KVP_OK) return s;
    c->shell = kvp__shell_make(&c->model->origin, KVP__KIND_POOL, c, &c->domain);
    return c->shell ? KVP_OK : kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for a pool's handle");
}

kvp_status kvp__cache_create(kvp__cache **out, kvp__opened *m, const kvp_pool_options *options,
                             kvp_error *err)
{
    kvp_pool_options o = *options;
    kvp__cache_shape shape;
    kvp_status s = kvp__cache_options(m, &o, &shape, err);
    if (s == KVP_OK) s = check_slab(&o, &shape, err);
    if (s == KVP_OK && !m->own_model) {
        kvp__place how = {.ordinal = shape.ordinal};
        s = kvp__opened_place(m, shape.device, &how, true, err);
    }
    if (s != KVP_OK) return s;
    kvp__cache *c = kvp__alloc_zero(&m->origin.hooks, sizeof *c);
    if (!c) return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for a pool");
    kvp__origin_acquire(&m->origin);
    kvp__domain_init(&c->domain, &m->origin, settle, finish);
    c->model = m;
    c->device = shape.device;
    c->ordinal = shape.ordinal;
    c->layout = shape.layout;
    c->seeds = kvp__hash_secret();
    s = fill(c, &o, err);
    if (s != KVP_OK) {
        kvp__domain_release(&c->domain);
        return s;
    }
    c->slab = o.slab;
    c->slab_user = o.slab_user;
    c->slab_released = o.slab ? o.slab_released : NULL;
    *out = c;
    return KVP_OK;
}

/* --- questions --- */

void kvp__cache_get_stats(const kvp__cache *c, kvp_pool_stats *out)
{
    const kvp__pool *p = &c->pool;
    const kvp__pool_counters *n = &p->counters;
    memset(out, 0, sizeof *out);
    out->block_tokens = c->layout.block_tokens;
    out->block_bytes = c->layout.block_bytes;
    out->blocks = p->n_blocks;
    out->idle = KVP__PEEK(p->groups[0].n_idle);
    out->free = KVP__PEEK(p->groups[0].n_free);
    out->used = out->blocks - kvp__min64(out->blocks, out->idle + out->free);
    out->sequences = atomic_load_explicit(&c->n_sequences, memory_order_relaxed);
    out->pinned = KVP__PEEK(p->n_pinned);
    out->used_peak = KVP__PEEK(c->used_peak);
    out->blocks_taken = KVP__PEEK(n->blocks_taken);
    out->blocks_evicted = KVP__PEEK(n->blocks_evicted);
    out->blocks_copied = KVP__PEEK(n->blocks_copied);
    out->tokens_copied = KVP__PEEK(n->tokens_copied);
    out->tokens_prompt = KVP__PEEK(n->tokens_prompt);
    out->tokens_cached = KVP__PEEK(n->tokens_cached);
    out->tokens_reattached = KVP__PEEK(n->tokens_reattached);
    out->tokens_computed = KVP__PEEK(n->tokens_computed);
    out->preemptions = KVP__PEEK(n->preemptions);
    out->reclaims = KVP__PEEK(n->reclaims);
}

kvp_status kvp__cache_check(kvp__cache *c, kvp_error *err)
{
    kvp__check_begin(&c->pool);
    kvp_status s = KVP_OK;
    for (kvp__sequence *q = c->sequences; q && s == KVP_OK; q = q->next)
        s = kvp__check_seq(&q->seq, err);
    if (s == KVP_OK) s = kvp__check_end(&c->pool, kvp__cache_prefix(c), err);
    if (s == KVP_OK && c->loop) s = kvp__sched_check(&c->loop->sched, err);
    return s;
}

kvp_status kvp__cache_reset(kvp__cache *c, uint64_t *held, kvp_error *err)
{
    uint64_t n = 0;
    for (const kvp__sequence *q = c->sequences; q; q = q->next) n += q->seq.n_blocks != 0;
    if (held) *held = n;
    if (n)
        return kvp__fail_need(err, KVP_ERR_BUSY, n, 0, "%llu sequences hold KV",
                              (unsigned long long)n);
    return c->caching ? kvp__prefix_reset(&c->prefix, err) : KVP_OK;
}

kvp_status kvp__cache_lookup(kvp__cache *c, const void *salt, size_t salt_bytes,
                             const int32_t *tokens, size_t count, uint64_t *cached,
                             kvp_error *err)
{
    kvp_status s = kvp__cache_check_tokens(c, tokens, count, err);
    if (s != KVP_OK) return s;
    *cached = 0;
    if (!c->caching || count == 0 || salt_bytes > 256) return KVP_OK;
    uint32_t root = kvp__prefix_root_find(&c->prefix, salt, (uint32_t)salt_bytes,
                                          c->model->model.key, c->model->model.key_bytes);
    kvp__hit hit = kvp__prefix_lookup(&c->prefix, root, tokens,
                                      (uint32_t)kvp__min64(count, KVP__MAX_TOKENS));
    *cached = kvp__hit_tokens(&c->prefix, &hit);
    return KVP_OK;
}

kvp_status kvp__cache_check_tokens(const kvp__cache *c, const int32_t *tokens, size_t count,
                                   kvp_error *err)
{
    if (count && !tokens) return kvp__fail(err, KVP_ERR_INVALID_ARG, "tokens: NULL");
    uint32_t limit = kvp__cache_vocabulary(c);
    if (!limit) limit = INT32_MAX;
    for (size_t i = 0; i < count; i++)
        if (tokens[i] < 0 || (uint32_t)tokens[i] >= limit)
            return kvp__fail(err, KVP_ERR_INVALID_TOKEN,
                             "token %d at index %zu is not from 0 to %u", (int)tokens[i], i,
                             (unsigned)limit - 1);
    return KVP_OK;
}
