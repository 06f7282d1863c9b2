/*
 * The invariant walker over pool, prefix and sequences. See seq.h; each room recounts its own part,
 * this one says who holds what.
 */
#include "seq/seq.h"

#include <string.h>

static kvp_status wrong(kvp_error *err, const char *what, uint32_t k, uint32_t id)
{
    return kvp__fail(err, KVP_ERR_INTERNAL, "a sequence's block %u (id %u): %s", k, id, what);
}

void kvp__check_begin(kvp__pool *pool)
{
    kvp__pool_check_begin(pool);
    if (pool->index) kvp__prefix_check_begin(pool->index);
}

/* The lengths agree with one another. */
static const char *wrong_lengths(const kvp__seq *s)
{
    uint32_t b = s->pool->block_tokens;
    if (s->computed > s->length || s->reserved > s->length || s->computed > s->reserved)
        return "computed, reserved and length are out of order";
    if (s->n_blocks != kvp__ceil_div(s->reserved, b)) return "more or fewer than reserved";
    if (s->prefix && s->n_published != s->computed / b) return "computed, but not published";
    if (s->pin > s->length) return "pinned beyond the end";
    if (s->pin_blocks != kvp__ceil_div(s->pin < s->computed ? s->pin : s->computed, b))
        return "number of pinned blocks";
    if (s->length && (!s->buffer || s->buffer->used < s->length)) return "tokens missing";
    if (s->copy_kind != KVP__COPY_NONE && s->copy_block >= s->n_blocks)
        return "a copy into no block";
    return NULL;
}

/* The block's node, if it is one, says the same as the sequence's own tokens. */
static const char *wrong_node(const kvp__seq *s, uint32_t k)
{
    const kvp__prefix *x = s->prefix;
    uint32_t b = s->pool->block_tokens, id = s->tables[0][k];
    const kvp__node *nd = &x->nodes[id];
    if (k < s->n_published && nd->n != b) return "not a full node";
    if (nd->n == 0) return NULL;
    uint32_t parent = k ? s->tables[0][k - 1] : kvp__prefix_under_root(x, s->root);
    if (nd->parent != parent) return "its node is under another parent";
    uint32_t live = s->computed - k * b < nd->n ? s->computed - k * b : nd->n;
    if (memcmp(x->tokens + (size_t)id * b, s->tokens + (size_t)k * b, live * sizeof(int32_t)) != 0)
        return "its node has other tokens";
    for (uint32_t g = 0; g < s->pool->n_groups; g++)
        if (s->tables[g][k] != kvp__prefix_block(x, id, g)) return "blocks of different nodes";
    return NULL;
}

static kvp_status mark_holders(const kvp__seq *s, uint32_t g, kvp_error *err)
{
    kvp__pool_group *gr = &s->pool->groups[g];
    for (uint32_t k = 0; k < s->n_blocks; k++) {
        uint32_t id = s->tables[g][k];
        if (id >= s->pool->n_blocks) return wrong(err, "no such block", k, id);
        gr->blocks[id].mark++;
        if (g == 0 && k < s->pin_blocks) gr->blocks[id].marks++;
    }
    if (s->copy_kind == KVP__COPY_NONE) return KVP_OK;
    if (s->copy_src[g] >= s->pool->n_blocks)
        return wrong(err, "copied from no block", s->copy_block, s->copy_src[g]);
    gr->blocks[s->copy_src[g]].mark++;
    gr->blocks[s->copy_src[g]].marks += 0x10000;
    return KVP_OK;
}

kvp_status kvp__check_seq(const kvp__seq *s, kvp_error *err)
{
    const char *what = wrong_lengths(s);
    if (what) return wrong(err, what, s->n_blocks, KVP__NONE);
    for (uint32_t g = 0; g < s->pool->n_groups; g++) {
        kvp_status status = mark_holders(s, g, err);
        if (status != KVP_OK) return status;
    }
    if (!s->prefix) return KVP_OK;
    s->prefix->roots[s->root].mark++;
    for (uint32_t k = 0; k < s->n_blocks && (uint64_t)k * s->pool->block_tokens < s->computed; k++)
        if ((what = wrong_node(s, k)) != NULL) return wrong(err, what, k, s->tables[0][k]);
    return KVP_OK;
}

kvp_status kvp__check_end(kvp__pool *pool, kvp__prefix *prefix, kvp_error *err)
{
    kvp_status s = kvp__pool_check_end(pool, err);
    if (s == KVP_OK && prefix) s = kvp__prefix_check_end(prefix, err);
    return s;
}
