/*
 * From KV geometry to bytes. See plan.h for the layout of a block.
 *
 * Every product is checked against 64 bits, since the figures come from a host or a file. The same
 * code gives the layout that a pool allocates and the figures that a planner prints, so the two
 * cannot drift apart.
 */
#include "plan/plan.h"

#include <string.h>

#define MAX_KERNEL_DIM 256u     /* head sizes that kernels take */
#define MAX_PLAN_DIM (1u << 20) /* head sizes that can be planned */
#define MAX_HEADS (1u << 16)
#define SKEW_FROM (16u << 10)

/* --- geometry --- */

static kvp_status check_group(const kvp_layer_group *g, uint32_t i, kvp_error *err)
{
    if (g->kv_heads > MAX_HEADS || g->query_heads > MAX_HEADS)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "group %u: %u KV heads and %u query heads are "
                         "more than %u", i, g->kv_heads, g->query_heads, MAX_HEADS);
    if (g->kv_heads && (g->key_dim == 0 || g->key_dim > MAX_PLAN_DIM))
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "group %u: key_dim %u is not 1 to %u", i,
                         g->key_dim, MAX_PLAN_DIM);
    if (g->value_dim > MAX_PLAN_DIM && g->value_dim != KVP_DIM_NONE)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "group %u: value_dim %u is above %u", i,
                         g->value_dim, MAX_PLAN_DIM);
    if (g->kv_heads && g->query_heads % g->kv_heads)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "group %u: %u query heads are not a multiple of "
                         "%u KV heads", i, g->query_heads, g->kv_heads);
    return KVP_OK;
}

static kvp_status read_groups(kvp__geometry *out, const kvp_geometry *in, kvp_error *err)
{
    uint32_t stride = in->group_stride ? in->group_stride : (uint32_t)sizeof(kvp_layer_group);
    if (stride < sizeof(kvp_layer_group))
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "geometry: group_stride %u is below %zu", stride,
                         sizeof(kvp_layer_group));
    for (uint32_t i = 0; i < in->n_groups; i++) {
        kvp_layer_group *g = &out->groups[i];
        memcpy(g, (const char *)in->groups + (size_t)i * stride, sizeof *g);
        if (g->kv_heads && g->query_heads == 0) g->query_heads = g->kv_heads;
        if (g->kv_heads && g->value_dim == 0) g->value_dim = g->key_dim;
        kvp_status s = check_group(g, i, err);
        if (s < 0) return s;
    }
    return KVP_OK;
}

static kvp_status place_layers(kvp__geometry *out, const kvp_geometry *in, kvp_error *err)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < out->n_groups; i++) sum += out->groups[i].layers;
    if (in->n_layers && in->n_layers != sum)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "geometry: the groups have %llu layers, n_layers "
                         "is %u", (unsigned long long)sum, in->n_layers);
    if (sum == 0)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "geometry: no layers");
    if (sum > KVP__MAX_LAYERS)
        return kvp__fail(err, KVP_ERR_UNSUPPORTED, "geometry: %llu layers are more than %u",
                         (unsigned long long)sum, KVP__MAX_LAYERS);
    out->n_layers = (uint32_t)sum;
    uint32_t seen[KVP__MAX_GROUPS] = {0}, next = 0;
    for (uint32_t l = 0; l < out->n_layers; l++) {
        while (!in->layer_groups && seen[next] == out->groups[next].layers) next++;
        uint32_t g = in->layer_groups ? in->layer_groups[l] : next;
        if (g >= out->n_groups)
            return kvp__fail(err, KVP_ERR_INVALID_ARG, "geometry: layer %u is in group %u of %u", l,
                             g, out->n_groups);
        out->layer_group[l] = (uint8_t)g;
        out->layer_index[l] = (uint16_t)seen[g]++;
        if (seen[g] > out->groups[g].layers)
            return kvp__fail(err, KVP_ERR_INVALID_ARG, "geometry: layer_groups puts more than %u "
                             "layers into group %u", out->groups[g].layers, g);
    }
    return KVP_OK;
}

kvp_status kvp__geometry_fill(kvp__geometry *out, const kvp_geometry *in, kvp_error *err)
{
    if (in->n_groups == 0 || !in->groups)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "geometry: no groups");
    if (in->n_groups > KVP__MAX_GROUPS)
        return kvp__fail(err, KVP_ERR_UNSUPPORTED, "geometry: %u groups are more than %u",
                         in->n_groups, KVP__MAX_GROUPS);
    kvp__geometry g;
    memset(&g, 0, sizeof g);
    g.n_groups = in->n_groups;
    g.vocabulary = in->vocabulary;
    g.context = in->context;
    kvp_status s = read_groups(&g, in, err);
    if (s >= 0) s = place_layers(&g, in, err);
    if (s >= 0) *out = g;
    return s;
}

/* --- layout --- */

static uint32_t format_bytes(uint32_t format)
{
    switch (format) {
    case KVP_KV_F16:
    case KVP_KV_BF16: return 2;
    case KVP_KV_F32: return 4;
    default: return 0;
    }
}

static kvp_status check_block(uint32_t block_tokens, uint32_t k_format, uint32_t v_format,
                              kvp_error *err)
{
    if (!kvp__is_pow2(block_tokens) || block_tokens > 256)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "block_tokens %u is not a power of two from 1 to "
                         "256", block_tokens);
    if (!format_bytes(k_format) || !format_bytes(v_format))
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "KV formats %u and %u: not KVP_KV_ values",
                         k_format, v_format);
    return KVP_OK;
}

/* False on overflow. A group without KV heads takes nothing. */
static bool group_layout(kvp__group_layout *out, const kvp_layer_group *g, uint32_t block_tokens,
                         uint32_t k_size, uint32_t v_size)
{
    kvp__group_layout l;
    memset(&l, 0, sizeof l);
    l.layers = g->layers;
    l.kv_heads = g->kv_heads;
    l.key_dim = g->key_dim;
    l.value_dim = g->value_dim == KVP_DIM_NONE ? 0 : g->value_dim;
    l.k_size = k_size;
    l.v_size = v_size;
    /* Tiles fill a head's part without gaps: tiles * T is block_tokens. All below 2^44. */
    l.k_head = (uint64_t)l.key_dim * block_tokens * k_size;
    l.v_head = (uint64_t)l.value_dim * block_tokens * v_size;
    l.k_part = kvp__round_up(l.k_head * l.kv_heads, KVP__CACHE_LINE);
    l.v_part = kvp__round_up(l.v_head * l.kv_heads, KVP__CACHE_LINE);
    l.layer = l.k_part + l.v_part;
    if (!kvp__mul(l.layer, l.layers, &l.extent)) return false;
    l.pitch = l.extent;
    if (l.pitch >= SKEW_FROM && l.pitch % 1024 == 0) l.pitch += KVP__CACHE_LINE;
    *out = l;
    return true;
}

static kvp_status check_kernel_shape(const kvp_layer_group *g, uint32_t i, kvp_error *err)
{
    if (g->layers == 0) return KVP_OK;
    if (g->kv_heads == 0)
        return kvp__fail(err, KVP_ERR_UNSUPPORTED, "group %u has no KV heads: it can be planned, not "
                         "run", i);
    if (g->value_dim == KVP_DIM_NONE)
        return kvp__fail(err, KVP_ERR_UNSUPPORTED, "group %u holds its values inside the keys: it "
                         "can be planned, not run", i);
    if (g->key_dim > MAX_KERNEL_DIM || g->value_dim > MAX_KERNEL_DIM)
        return kvp__fail(err, KVP_ERR_UNSUPPORTED, "group %u: head sizes %u and %u are above %u", i,
                         g->key_dim, g->value_dim, MAX_KERNEL_DIM);
    return KVP_OK;
}

kvp_status kvp__layout_make(kvp__layout *out, const kvp__geometry *g, uint32_t block_tokens,
                            uint32_t k_format, uint32_t v_format, uint64_t blocks, kvp_error *err)
{
    kvp_status s = check_block(block_tokens, k_format, v_format, err);
    if (s < 0) return s;
    kvp__layout l;
    memset(&l, 0, sizeof l);
    l.n_groups = g->n_groups;
    l.block_tokens = block_tokens;
    l.tile = block_tokens < KVP__TILE ? block_tokens : KVP__TILE;
    l.k_format = k_format;
    l.v_format = v_format;
    l.blocks = blocks;
    for (uint32_t i = 0; i < g->n_groups; i++) {
        kvp__group_layout *gl = &l.groups[i];
        s = check_kernel_shape(&g->groups[i], i, err);
        if (s < 0) return s;
        uint64_t bytes;
        if (!group_layout(gl, &g->groups[i], block_tokens, format_bytes(k_format),
                          format_bytes(v_format)) ||
            !kvp__mul(gl->pitch, blocks, &bytes) ||
            !kvp__add(l.block_bytes, gl->pitch, &l.block_bytes))
            return kvp__fail(err, KVP_ERR_TOO_LARGE, "%llu blocks of group %u take more than 2^64 "
                             "bytes", (unsigned long long)blocks, i);
        gl->base = l.bytes;
        if (!kvp__add(l.bytes, bytes, &l.bytes))
            return kvp__fail(err, KVP_ERR_TOO_LARGE, "%llu blocks take more than 2^64 bytes",
                             (unsigned long long)blocks);
    }
    *out = l;
    return KVP_OK;
}

/* --- plan --- */

typedef struct sums {
    uint64_t token;    /* bytes of a token */
    uint64_t block;    /* bytes of a block, padding included */
    uint64_t windowed; /* bytes of a sequence if window layers kept only their window */
} sums;

static bool add_group(sums *t, const kvp_layer_group *g, uint32_t block_tokens, uint32_t k_size,
                      uint32_t v_size, uint64_t tokens)
{
    if (g->kv_heads == 0 || g->layers == 0) return true;
    kvp__group_layout l;
    if (!group_layout(&l, g, block_tokens, k_size, v_size)) return false;
    uint64_t head = (uint64_t)l.key_dim * k_size + (uint64_t)l.value_dim * v_size;
    uint64_t token = head * g->kv_heads, kept, bytes;
    if (!kvp__mul(token, g->layers, &token)) return false;
    kept = g->window ? kvp__min64(tokens, g->window) : tokens;
    return kvp__mul(token, kept, &bytes) && kvp__add(t->windowed, bytes, &t->windowed) &&
           kvp__add(t->token, token, &t->token) && kvp__add(t->block, l.pitch, &t->block);
}

kvp_status kvp__plan(const kvp__geometry *g, const kvp_plan_options *o, kvp_plan_result *out,
                     kvp_error *err)
{
    uint32_t block_tokens = o->block_tokens ? o->block_tokens : 16;
    uint32_t k_format = o->k_format ? o->k_format : KVP_KV_F16;
    uint32_t v_format = o->v_format ? o->v_format : KVP_KV_F16;
    uint64_t tokens = o->tokens ? o->tokens : g->context ? g->context : 4096;
    uint64_t sequences = o->sequences ? o->sequences : 1;
    kvp_status s = check_block(block_tokens, k_format, v_format, err);
    if (s < 0) return s;

    sums t = {0, 0, 0};
    bool ok = true;
    for (uint32_t i = 0; ok && i < g->n_groups; i++)
        ok = add_group(&t, &g->groups[i], block_tokens, format_bytes(k_format),
                       format_bytes(v_format), tokens);
    kvp_plan_result r;
    memset(&r, 0, sizeof r);
    r.size = sizeof r;
    r.block_tokens = block_tokens;
    r.kv_bytes_per_token = t.token;
    r.block_bytes = t.block;
    r.blocks_per_sequence = kvp__ceil_div(tokens, block_tokens);
    ok = ok && kvp__mul(r.blocks_per_sequence, sequences, &r.blocks) &&
         kvp__mul(r.blocks, t.block, &r.kv_bytes) &&
         kvp__mul(tokens, t.token, &r.kv_bytes_ideal) &&
         kvp__mul(r.kv_bytes_ideal, sequences, &r.kv_bytes_ideal) &&
         kvp__mul(t.windowed, sequences, &r.kv_bytes_windowed);
    if (!ok)
        return kvp__fail(err, KVP_ERR_TOO_LARGE, "plan: %llu sequences of %llu tokens take more than "
                         "2^64 bytes", (unsigned long long)sequences, (unsigned long long)tokens);
    if (t.block) {
        r.blocks_fit = o->memory_bytes / t.block;
        r.sequences_fit = r.blocks_fit / r.blocks_per_sequence;
    }
    *out = r;
    return KVP_OK;
}
