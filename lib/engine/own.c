/*
 * The own-model way: the planned step as a view, attention per layer, commit and abort. See
 * engine.h and the last part of the public header.
 */
#include "engine/engine.h"

#include <string.h>

static kvp_status need_plan(const kvp__loop *l, kvp_error *err)
{
    if (l->flight == KVP__FLIGHT_HOST) return KVP_OK;
    return kvp__fail(err, KVP_ERR_STATE, "no step is planned");
}

kvp_status kvp__own_view(const kvp__loop *l, kvp_view *out, kvp_error *err)
{
    kvp_status s = need_plan(l, err);
    if (s != KVP_OK) return s;
    const kvp__work *w = &l->work;
    for (uint32_t i = 0; i < w->n_seqs; i++) {
        l->view_handles[i] = (kvp_seq *)l->riders[i]->shell;
        l->view_tags[i] = l->riders[i]->tag;
        l->view_lengths[i] = w->seqs[i].first_pos + w->seqs[i].n_rows;
    }
    *out = (kvp_view){.size = sizeof *out, .n_rows = w->n_rows, .n_sequences = w->n_seqs,
                      .n_outputs = w->n_outputs, .tokens = w->tokens, .positions = w->positions,
                      .row_sequence = l->row_sequence, .outputs = w->outputs,
                      .sequences = l->view_handles, .tags = l->view_tags,
                      .lengths = l->view_lengths};
    return KVP_OK;
}

kvp_status kvp__own_view_group(const kvp__loop *l, uint32_t group, kvp_view_group *out,
                               kvp_error *err)
{
    kvp_status s = need_plan(l, err);
    if (s != KVP_OK) return s;
    const kvp__layout *layout = &l->cache->layout;
    if (group >= layout->n_groups)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "group: %u of %u", (unsigned)group,
                         (unsigned)layout->n_groups);
    int64_t *slots = l->slots + (size_t)group * l->max_rows;
    for (uint32_t r = 0; r < l->work.n_rows; r++) {
        const uint32_t *table = l->seqs[l->row_sequence[r]].tables[group];
        uint32_t pos = l->positions[r], b = layout->block_tokens;
        slots[r] = (int64_t)table[pos / b] * b + pos % b;
    }
    size_t first = (size_t)group * l->max_sequences * l->table_stride;
    *out = (kvp_view_group){.size = sizeof *out, .table_stride = l->table_stride,
                            .tables = l->tables + first, .slots = slots};
    return KVP_OK;
}

/* A stride the host gave, or the packed one; it must keep elements of `size` bytes aligned. */
static bool stride_in(int64_t given, int64_t packed, int64_t size, int64_t *out)
{
    *out = given ? given : packed;
    return *out % size == 0;
}

static kvp_status translate(kvp__attend *out, const kvp_layer_group *g, uint32_t layer,
                            const kvp_attention_args *a, kvp_error *err)
{
    const struct {
        const char *name;
        const void *p;
    } arrays[] = {{"q", a->q}, {"k", a->k}, {"v", a->v}, {"out", a->out}};
    uint32_t type = a->type ? a->type : KVP_KV_F32;
    if (type > KVP_KV_F32)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "type: %u is not KVP_KV_...", (unsigned)type);
    int64_t f = type == KVP_KV_F32 ? 4 : 2;
    for (size_t i = 0; i < KVP__COUNT(arrays); i++)
        if (!arrays[i].p || (uintptr_t)arrays[i].p % (uintptr_t)f)
            return kvp__fail(err, KVP_ERR_INVALID_ARG, "%s: NULL or not aligned", arrays[i].name);
    if (!(a->scale >= 0 && a->scale <= 3.0e38f) || !(a->softcap >= 0 && a->softcap <= 3.0e38f))
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "scale or softcap: negative or not a number");
    int64_t k_row = f * g->kv_heads * g->key_dim;
    int64_t q_row = f * g->query_heads * g->key_dim, v_row = f * g->kv_heads * g->value_dim;
    int64_t out_row = f * g->query_heads * g->value_dim;
    *out = (kvp__attend){.layer = layer, .type = type, .softcap = a->softcap, .q = a->q, .k = a->k,
                         .v = a->v, .out = a->out};
    out->scale = a->scale != 0 ? a->scale : 1.0f / __builtin_sqrtf((float)g->key_dim);
    bool ok = stride_in(a->q_row_stride, q_row, f, &out->q_row) &&
              stride_in(a->q_head_stride, f * g->key_dim, f, &out->q_head) &&
              stride_in(a->k_row_stride, k_row, f, &out->k_row) &&
              stride_in(a->k_head_stride, f * g->key_dim, f, &out->k_head) &&
              stride_in(a->v_row_stride, v_row, f, &out->v_row) &&
              stride_in(a->v_head_stride, f * g->value_dim, f, &out->v_head) &&
              stride_in(a->out_row_stride, out_row, f, &out->out_row) &&
              stride_in(a->out_head_stride, f * g->value_dim, f, &out->out_head);
    if (ok) return KVP_OK;
    return kvp__fail(err, KVP_ERR_INVALID_ARG, "a stride is not a multiple of %d bytes", (int)f);
}

kvp_status kvp__own_attention(kvp__loop *l, uint32_t layer, const kvp_attention_args *a,
                              kvp_error *err)
{
    kvp_status s = need_plan(l, err);
    if (s != KVP_OK) return s;
    const kvp__geometry *g = &l->cache->model->model.geometry;
    if (layer >= g->n_layers)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "layer: %u of %u", (unsigned)layer,
                         (unsigned)g->n_layers);
    if (l->layers_done[layer] & KVP__LAYER_DONE)
        return kvp__fail(err, KVP_ERR_STATE, "layer %u was done in this step", (unsigned)layer);
    kvp__attend attend;
    s = translate(&attend, &g->groups[g->layer_group[layer]], layer, a, err);
    if (s != KVP_OK) return s;
    s = l->cache->device->attend(l->runner, &l->work, &attend, err);
    if (s == KVP_ERR_DEVICE_LOST) kvp__loop_fail(l, s, "the device stopped working", NULL);
    if (s < 0) return s;
    l->layers_done[layer] |= KVP__LAYER_DONE | (s == KVP_PLANNED ? KVP__LAYER_RECORDED : 0);
    return KVP_OK;
}

static kvp_status check_commit(const kvp__loop *l, const int32_t *tokens, size_t count,
                               kvp_error *err)
{
    const kvp__cache *c = l->cache;
    for (uint32_t i = 0; i < c->model->model.geometry.n_layers; i++)
        if (!l->layers_done[i])
            return kvp__fail(err, KVP_ERR_STATE, "layer %u has not been attended", (unsigned)i);
    if (!tokens && count == 0) return KVP_OK;
    if (!tokens || count != l->work.n_outputs)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "count: %zu tokens for %u output rows", count,
                         (unsigned)l->work.n_outputs);
    for (size_t i = 0; i < count; i++) {
        if (tokens[i] == -1) continue;
        kvp_error e = {.size = sizeof e};
        kvp_status s = kvp__cache_check_tokens(c, &tokens[i], 1, &e);
        if (s != KVP_OK)
            return kvp__fail(err, s, "tokens[%zu]: %d is outside the vocabulary", i,
                             (int)tokens[i]);
    }
    return KVP_OK;
}

kvp_status kvp__own_commit(kvp__loop *l, const int32_t *tokens, size_t count, kvp_error *err)
{
    kvp_status s = need_plan(l, err);
    if (s == KVP_OK) s = check_commit(l, tokens, count, err);
    if (s != KVP_OK) return s;
    kvp__loop_take_in(l, tokens);
    kvp__bell_ring(&l->bell);
    return KVP_OK;
}

kvp_status kvp__own_abort(kvp__loop *l, kvp_error *err)
{
    kvp_status s = need_plan(l, err);
    if (s != KVP_OK) return s;
    kvp__loop_drop_flight(l);
    kvp__bell_ring(&l->bell);
    return KVP_OK;
}
