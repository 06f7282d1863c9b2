/*
 * A step's kernels and products, put on a stream: one walk for every architecture, whose descriptor
 * says which biases, norms and activations there are.
 *
 * Nothing here looks at the work. What is launched follows from the step's shape (runner.h), what
 * it is launched on lies in the upload, so that the same walk is run for a step and recorded for a
 * bucket.
 *
 * Invariant: nothing waits and nothing is taken. The first error stays in r->error, and nothing is
 * put on the stream after it.
 *
 * Bytes: a step reads every matrix once (dequantised ones are written and read once more, at 16
 * bits) and moves 14 to 20 bytes per element of the residual stream and layer besides.
 */
#include "cuda/runner.h"

static const kvp__cuda_step *step_at(const kvp__runner *r) { return kvp__cuda_sent(r, 0); }
static void *at(kvp__cu_ptr p) { return (void *)(uintptr_t)p; }
static const float *floats(kvp__cu_ptr p) { return (const float *)(uintptr_t)p; }

void kvp__cuda_note(kvp__runner *r, kvp__cu_result e, const char *what, bool blas)
{
    if (!e || r->error) return;
    r->error = e;
    r->what = what;
    r->blas_error = blas;
}

void kvp__cuda_use_stream(kvp__runner *r, kvp__cu_stream stream)
{
    const kvp__blas_api *b = r->card.blas;
    r->queue = stream;
    if (r->error || r->blas_queue == stream) return;
    kvp__cuda_note(r, b->cublasSetStream(r->blas, stream), "cuBLAS's stream", true);
    /* Which forgets the room that was given to it. */
    if (!r->error)
        kvp__cuda_note(r, b->cublasSetWorkspace(r->blas, at(r->blas_room), KVP__CUDA_BLAS_BYTES),
                       "cuBLAS's room", true);
    r->blas_queue = r->error ? NULL : stream;
}

void kvp__cuda_run(kvp__runner *r, kvp__cu_function f, kvp__launch l, const void *args,
                   const char *what)
{
    void *parameters[1] = {(void *)(uintptr_t)args};
    if (r->error || l.x == 0 || l.y == 0) return;
    kvp__cu_result e = r->card.cu->cuLaunchKernel(f, l.x, l.y, 1, l.threads, 1, 1, l.shared,
                                                  r->queue, parameters, NULL);
    kvp__cuda_note(r, e, what, false);
}

#define RUN(r, name, launch, args)                                                                 \
    kvp__cuda_run(r, (r)->kernels[KVP__CUDA_##name], launch, args, #name)

/* --- matrices --- */

static bool is_quantised(const kvp__cuda_mat *m)
{
    return m->type == KVP__EL_Q8_0 || m->type == KVP__EL_Q4_0;
}

static kvp__quant_planes planes_of(const kvp__cuda_mat *m)
{
    return (kvp__quant_planes){at(m->values), at(m->scales)};
}

/* y[row][n_out] of `rows` rows. Matrices and rows lie by rows; cuBLAS counts by columns, to which
 * both are transposed. */
static void put_gemm(kvp__runner *r, kvp__cu_ptr w, uint32_t n_out, uint32_t n_in, kvp__cu_ptr x,
                     uint32_t rows, kvp__cu_ptr y, uint32_t y_row)
{
    static const float one = 1.0f, zero = 0.0f;
    int type = r->type == KVP__EL_F16 ? KVP__BLAS_R_16F : KVP__BLAS_R_16BF;
    if (r->error || rows == 0) return;
    kvp__cu_result e = r->card.blas->cublasGemmEx(
        r->blas, KVP__BLAS_T, KVP__BLAS_N, (int)n_out, (int)rows, (int)n_in, &one, at(w), type,
        (int)n_in, at(x), type, (int)n_in, &zero, at(y), KVP__BLAS_R_32F, (int)y_row,
        KVP__BLAS_COMPUTE_32F, KVP__BLAS_ALGO_DEFAULT);
    kvp__cuda_note(r, e, "a product", true);
}

static void put_matvec(kvp__runner *r, const kvp__cuda_mat *m, kvp__cu_ptr x, bool of_outputs,
                       kvp__cu_ptr y, uint32_t y_row)
{
    kvp__matvec_args a = {.step = step_at(r), .w = planes_of(m), .x = at(x), .y = at(y),
                          .n_in = m->n_in, .n_out = m->n_out, .x_type = r->type, .y_row = y_row,
                          .of_outputs = of_outputs};
    kvp__launch l = kvp__launch_matvec(m->n_out, r->card.sms);
    if (m->type == KVP__EL_Q8_0) RUN(r, matvec_q8_0, l, &a);
    else RUN(r, matvec_q4_0, l, &a);
}

/* Many rows of a quantised matrix: as much of it as there is room for is made 16-bit at a time. */
static void put_dequantised(kvp__runner *r, const kvp__cuda_mat *m, kvp__cu_ptr x, uint32_t rows,
                            kvp__cu_ptr y, uint32_t y_row)
{
    uint32_t at_once = (uint32_t)kvp__min64(m->n_out, r->dequantised_bytes / (2ull * m->n_in));
    for (uint32_t first = 0; first < m->n_out; first += at_once) {
        uint32_t n = m->n_out - first < at_once ? m->n_out - first : at_once;
        kvp__dequant_args a = {.w = planes_of(m), .out = at(r->dequantised), .n_in = m->n_in,
                               .first = first, .n_rows = n, .out_type = r->type};
        kvp__launch l = kvp__launch_dequant(n, m->n_in);
        if (m->type == KVP__EL_Q8_0) RUN(r, dequant_q8_0, l, &a);
        else RUN(r, dequant_q4_0, l, &a);
        put_gemm(r, r->dequantised, n, m->n_in, x, rows, y + first * 4ull, y_row);
    }
}

/* All products of a stack; `few`: the rows are so few that quantised matrices stay as they are. */
static void put_stack(kvp__runner *r, const kvp__cuda_stack *s, kvp__cu_ptr x, uint32_t rows,
                      bool of_outputs, kvp__cu_ptr y)
{
    bool few = (of_outputs ? r->shape.outputs : r->shape.rows) <= KVP__CUDA_FEW_ROWS;
    for (uint32_t i = 0; i < s->n; i++) {
        const kvp__cuda_mat *m = &s->part[i];
        if (!is_quantised(m)) put_gemm(r, m->values, m->n_out, m->n_in, x, rows, y, s->n_out);
        else if (few) put_matvec(r, m, x, of_outputs, y, s->n_out);
        else put_dequantised(r, m, x, rows, y, s->n_out);
        y += m->n_out * 4ull;
    }
}

/* --- the parts of a layer --- */

static void put_norm(kvp__runner *r, kvp__cu_ptr delta, kvp__cu_ptr bias, kvp__cu_ptr post,
                     kvp__cu_ptr weight, bool of_outputs)
{
    kvp__norm_args a = {.step = step_at(r), .x = at(r->x), .delta = floats(delta),
                        .bias = floats(bias), .post = floats(post), .weight = floats(weight),
                        .rows = of_outputs ? kvp__cuda_sent(r, r->upload.outputs) : NULL,
                        .out = at(r->normed), .width = r->arch->width, .out_type = r->type,
                        .eps = r->arch->norm_eps};
    uint32_t rows = of_outputs ? r->shape.outputs : r->shape.rows;
    RUN(r, rms_norm, kvp__launch_norm(rows, r->arch->width), &a);
}

void kvp__cuda_fill_kv(const kvp__runner *r, uint32_t layer, kvp__kv_place *kv)
{
    const kvp__geometry *g = &r->model->geometry;
    const kvp__group_layout *l = &r->store->layout.groups[g->layer_group[layer]];
    uint64_t begin = g->layer_index[layer] * l->layer;
    *kv = (kvp__kv_place){.slab = at(r->store->slab), .base = l->base, .pitch = l->pitch,
                          .k_layer = begin, .v_layer = begin + l->k_part, .k_head = l->k_head,
                          .v_head = l->v_head};
}

/* Q into its buffer, K and V into their blocks, out of the stage's products. */
static void put_append(kvp__runner *r, uint32_t layer)
{
    const kvp__arch *m = r->arch;
    const kvp__cuda_layer *w = &r->weights->layers[layer];
    const kvp__rope *rope = &m->ropes[m->layers[layer].rope];
    uint32_t group = r->model->geometry.layer_group[layer];
    uint32_t heads = m->layers[layer].kv_heads, q_n = m->query_heads * m->key_dim;
    kvp__cu_ptr k = r->products + q_n * 4ull, v = k + heads * m->key_dim * 4ull;
    kvp__append_args a = {
        .step = step_at(r), .q = at(r->products), .k = at(k), .v = at(v), .q_row = w->qkv.n_out,
        .q_head = m->key_dim, .k_row = w->qkv.n_out, .k_head = m->key_dim, .v_row = w->qkv.n_out,
        .v_head = m->value_dim, .q_bias = floats(w->q_bias), .k_bias = floats(w->k_bias),
        .v_bias = floats(w->v_bias), .q_norm = floats(w->q_norm), .k_norm = floats(w->k_norm),
        .inv_freq = at(r->inv_freq[m->layers[layer].rope]),
        .positions = kvp__cuda_sent(r, r->upload.positions),
        .row_seq = kvp__cuda_sent(r, r->upload.row_seq), .tables = at(kvp__cuda_table(r, group)),
        .q_out = at(r->q), .table_stride = r->table_stride, .block_shift = r->block_shift,
        .in_type = KVP__EL_F32, .k_type = r->store->layout.k_format,
        .v_type = r->store->layout.v_format, .query_heads = m->query_heads, .kv_heads = heads,
        .key_dim = m->key_dim, .value_dim = m->value_dim, .rope_kind = rope->kind,
        .rope_dim = rope->kind == KVP__ROPE_NONE ? 0 : rope->dim, .rope_magnitude = rope->magnitude,
        .eps = m->norm_eps};
    kvp__cuda_fill_kv(r, layer, &a.kv);
    RUN(r, append, kvp__launch_append(r->shape.rows, &a), &a);
}

static void put_merge(kvp__runner *r, uint32_t group, const kvp__attention_args *a)
{
    kvp__merge_args m = {
        .step = a->step, .merges = kvp__cuda_sent(r, r->upload.groups[group].merges),
        .slots = kvp__cuda_sent(r, r->upload.groups[group].slots), .part_out = a->part_out,
        .part_lse = a->part_lse, .sinks = a->sinks, .out = a->out, .out_row = a->out_row,
        .out_head = a->out_head, .group = group, .query_heads = a->query_heads,
        .value_dim = a->value_dim, .out_type = a->out_type};
    RUN(r, merge, kvp__launch_merge(r->shape.groups[group].merges, a->query_heads), &m);
}

void kvp__cuda_put_attention(kvp__runner *r, uint32_t layer, kvp__attention_args *a)
{
    uint32_t group = r->model->geometry.layer_group[layer], d = r->plans[group].d;
    const kvp_layer_group *g = &r->model->geometry.groups[group];
    const kvp__cuda_counts *n = &r->shape.groups[group];
    a->step = step_at(r);
    a->items = kvp__cuda_sent(r, r->upload.groups[group].items);
    a->rows = kvp__cuda_sent(r, r->upload.groups[group].rows);
    a->positions = kvp__cuda_sent(r, r->upload.positions);
    a->tables = at(kvp__cuda_table(r, group));
    a->q = at(r->q);
    a->part_out = at(r->part_out);
    a->part_lse = at(r->part_lse);
    a->group = group;
    a->table_stride = r->table_stride;
    a->block_shift = r->block_shift;
    a->query_heads = g->query_heads;
    a->kv_heads = g->kv_heads;
    a->key_dim = g->key_dim;
    a->value_dim = g->value_dim;
    a->window = g->window;
    a->k_type = r->store->layout.k_format;
    a->v_type = r->store->layout.v_format;
    kvp__cuda_fill_kv(r, layer, &a->kv);
    for (uint32_t t = 0; t < KVP__ATTEND_TILES; t++) {
        a->tile = t;
        kvp__launch l = d ? kvp__launch_attention(d, t, n->items[t], g->kv_heads)
                          : kvp__launch_attention_any(n->items[t], g->kv_heads, g->key_dim,
                                                      g->value_dim);
        kvp__cuda_run(r, r->attend[group][t], l, a, "attention");
    }
    put_merge(r, group, a);
}

static void put_attention(kvp__runner *r, uint32_t layer)
{
    const kvp__arch *m = r->arch;
    kvp__attention_args a = {.out = at(r->attended), .out_head = m->value_dim,
                             .out_row = (int64_t)m->query_heads * m->value_dim, .out_type = r->type,
                             .scale = m->attention_scale, .softcap = m->attention_softcap};
    kvp__cuda_put_attention(r, layer, &a);
}

static void put_activate(kvp__runner *r)
{
    kvp__activate_args a = {.step = step_at(r), .gate_up = floats(r->products),
                            .out = at(r->hidden), .n = r->arch->feed_forward, .out_type = r->type,
                            .activation = r->arch->activation};
    RUN(r, activate, kvp__launch_activate(r->shape.rows, a.n), &a);
}

static void put_layer(kvp__runner *r, uint32_t layer)
{
    const kvp__cuda_layer *w = &r->weights->layers[layer];
    uint32_t rows = r->shape.rows;
    put_norm(r, layer ? r->delta : 0, 0, layer ? w[-1].post_ffn_norm : 0, w->attn_norm, false);
    put_stack(r, &w->qkv, r->normed, rows, false, r->products);
    put_append(r, layer);
    if (r->shape.outputs == 0 && layer + 1 == r->arch->n_layers) return; /* nobody reads the rest */
    put_attention(r, layer);
    put_stack(r, &w->o, r->attended, rows, false, r->delta);
    put_norm(r, r->delta, w->o_bias, w->post_attn_norm, w->ffn_norm, false);
    put_stack(r, &w->gate_up, r->normed, rows, false, r->products);
    put_activate(r);
    put_stack(r, &w->down, r->hidden, rows, false, r->delta);
}

/* --- before and after the layers --- */

void kvp__cuda_put_tables(kvp__runner *r)
{
    kvp__patch_args p = {.step = step_at(r), .patches = kvp__cuda_sent(r, r->upload.patches),
                         .tables = at(r->tables)};
    kvp__copy_args c = {.step = step_at(r), .copies = kvp__cuda_sent(r, r->upload.copies),
                        .groups = at(r->copy_groups), .slab = at(r->store->slab)};
    RUN(r, patch, kvp__launch_patch(r->shape.patches), &p);
    RUN(r, copy_blocks, kvp__launch_copy_blocks(r->shape.copies, r->most_layers), &c);
}

static void put_embed(kvp__runner *r)
{
    const kvp__cuda_mat *m = &r->weights->embedding.part[0];
    kvp__embed_args a = {.step = step_at(r), .table = at(m->values),
                         .tokens = kvp__cuda_sent(r, r->upload.tokens), .x = at(r->x),
                         .type = m->type, .width = m->n_in, .vocabulary = m->n_out,
                         .scale = r->arch->embedding_scale};
    RUN(r, embed, kvp__launch_embed(r->shape.rows), &a);
}

/* A tile's logits, and the tokens that are chosen from them. If the host reads some and this is not
 * the last tile, they are sent and handed over before the next tile takes their place. */
static void put_tile(kvp__runner *r, const kvp__cuda_tile *t)
{
    const kvp__arch *m = r->arch;
    kvp__cu_ptr logits = r->results + r->logits_at;
    kvp__cu_ptr x = r->normed + (uint64_t)t->first * m->width * 2;
    kvp__sample_args a = {.step = step_at(r), .logits = at(logits),
                          .draws = kvp__cuda_sent(r, r->upload.draws), .drawn = at(r->results),
                          .scratch = at(r->sample_scratch), .first = t->first,
                          .vocabulary = m->vocabulary, .softcap = m->logit_softcap};
    put_stack(r, &r->weights->output, x, t->n, true, logits);
    RUN(r, sample, kvp__launch_sample(t->n), &a);
    if (!t->last && t->n_host) kvp__cuda_put_results(r, t);
}

void kvp__cuda_put_results(kvp__runner *r, const kvp__cuda_tile *t)
{
    uint64_t row = r->arch ? r->arch->vocabulary * 4ull : 0;
    uint64_t from = r->logits_at + (t->host_first - t->first) * row, bytes = t->n_host * row;
    if (t->last) { /* what the host reads of the last tile is at its beginning */
        bytes += t->n_host ? r->logits_at : r->shape.outputs * sizeof(kvp__cuda_drawn);
        from = 0;
    }
    const kvp__cuda_api *cu = r->card.cu;
    if (!r->error && bytes)
        kvp__cuda_note(r, cu->cuMemcpyDtoHAsync(r->results_host + from, r->results + from,
                                                (size_t)bytes, r->queue), "a copy of results",
                       false);
    if (!r->error)
        kvp__cuda_note(r, cu->cuLaunchHostFunc(r->queue, kvp__cuda_on_tile, (void *)(uintptr_t)t),
                       "a host function", false);
}

void kvp__cuda_put_forward(kvp__runner *r)
{
    uint32_t layers = r->arch->n_layers;
    kvp__cuda_put_tables(r);
    put_embed(r);
    for (uint32_t l = 0; l < layers; l++) put_layer(r, l);
    if (r->n_tiles == 0) return;
    put_norm(r, r->delta, 0, r->weights->layers[layers - 1].post_ffn_norm, r->weights->output_norm,
             true);
    for (uint32_t t = 0; t < r->n_tiles; t++) put_tile(r, &r->tiles[t]);
}
