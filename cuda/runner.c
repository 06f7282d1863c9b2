/*
 * A runner: its memory, made and given back; the states of a step; what happens on the driver's
 * thread.
 *
 * A step's life is one number, r->state. launch makes it RUNNING; the host function behind the last
 * copy makes it POSTING, ENDING and IDLE; poll, which finds the stream broken, makes a RUNNING step
 * LOST, and a host function that comes too late finds that and touches nothing. So of the two sides
 * that may look at the work at the same time exactly one does.
 *
 * All of a runner's memory on the card is one piece, walked twice: to count it, and to lay it out.
 * No call of the driver's here is made by a step but those that put something on the stream or ask
 * for its state.
 */
#include "cuda/runner.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>

#define MOST_PATCHES 4096u           /* of an upload; more are sent as whole tables */
#define DEQUANTISED_BYTES (64u << 20)
#define USUAL_SMS 132u               /* workspace_bytes answers for these: no card is asked */
#define USUAL_BLOCK 16u
#define LARGE_SHARED (48u << 10)     /* more has to be asked for */

static const kvp__arch *arch_of(const kvp__model *m)
{
    return m->arch.n_layers ? &m->arch : NULL;
}

/* --- memory on the card --- */

typedef struct arena {
    kvp__cu_ptr memory; /* 0: counting */
    uint64_t used;
    bool overflow;
} arena;

static kvp__cu_ptr take(arena *a, uint64_t count, uint64_t size)
{
    uint64_t bytes, end;
    if (!kvp__mul(count, size, &bytes) || !kvp__add(a->used, bytes, &end) ||
        end > UINT64_MAX - KVP__CUDA_ALIGN) {
        a->overflow = true;
        return 0;
    }
    kvp__cu_ptr p = a->memory + a->used;
    a->used = kvp__round_up(end, KVP__CUDA_ALIGN);
    return p;
}

static uint32_t head_rows(const kvp__runner *r)
{
    return r->max_outputs < KVP__CUDA_HEAD_ROWS ? r->max_outputs : KVP__CUDA_HEAD_ROWS;
}

/* Outputs of the widest stage whose products lie side by side. */
static uint64_t widest_products(const kvp__arch *a)
{
    uint64_t kv_heads = 0;
    for (uint32_t l = 0; l < a->n_layers; l++)
        kv_heads = kvp__max64(kv_heads, a->layers[l].kv_heads);
    uint64_t qkv = (uint64_t)a->query_heads * a->key_dim + kv_heads * (a->key_dim + a->value_dim);
    return kvp__max64(qkv, 2ull * a->feed_forward);
}

/* The largest matrix that is kept quantised, at 16 bits; a row of it at least. */
static uint64_t dequantised_bytes(const kvp__model *m)
{
    uint64_t most = 0, row = 0;
    for (uint64_t i = 0; i < m->n_tensors; i++) {
        const kvp__tensor *t = &m->tensors[i];
        uint64_t bytes;
        if ((t->type != KVP__Q8_0 && t->type != KVP__Q4_0) || t->n_dims != 2) continue;
        row = kvp__max64(row, 2 * t->dims[0]);
        /* Matrices of one stage may lie in one: three at most. */
        if (!kvp__mul(t->dims[0] * 6, t->dims[1], &bytes)) bytes = UINT64_MAX;
        most = kvp__max64(most, bytes);
    }
    return kvp__max64(row, kvp__min64(most, DEQUANTISED_BYTES));
}

static void take_forward(arena *m, kvp__runner *r)
{
    const kvp__arch *a = r->arch;
    uint64_t rows = r->max_rows, outputs = r->max_outputs;
    r->x = take(m, rows, 4ull * a->width);
    r->delta = take(m, rows, 4ull * a->width);
    r->normed = take(m, rows, 2ull * a->width);
    r->products = take(m, rows, 4ull * widest_products(a));
    r->attended = take(m, rows, 2ull * a->query_heads * a->value_dim);
    r->hidden = take(m, rows, 2ull * a->feed_forward);
    r->logits_at = kvp__round_up(outputs * sizeof(kvp__cuda_drawn), KVP__CUDA_ALIGN);
    r->results_bytes = r->logits_at + head_rows(r) * 4ull * a->vocabulary;
    r->results = take(m, r->results_bytes, 1);
    r->sample_scratch = take(m, head_rows(r), KVP__CUDA_SAMPLE_SCRATCH(a->vocabulary));
    r->dequantised_bytes = dequantised_bytes(r->model);
    r->dequantised = take(m, r->dequantised_bytes, 1);
    r->blas_room = take(m, KVP__CUDA_BLAS_BYTES, 1);
    for (uint32_t i = 0; i < a->n_ropes; i++)
        r->inv_freq[i] = take(m, kvp__max64(a->ropes[i].dim / 2, 1), sizeof(double));
}

static void take_all(arena *m, kvp__runner *r)
{
    const kvp__geometry *g = &r->model->geometry;
    uint64_t q = 0, parts = 0, lse = 0;
    for (uint32_t i = 0; i < g->n_groups; i++) {
        const kvp_layer_group *lg = &g->groups[i];
        if (lg->layers == 0 || lg->kv_heads == 0) continue;
        uint64_t slots = r->plans[i].max_slots;
        q = kvp__max64(q, 4ull * lg->query_heads * lg->key_dim);
        parts = kvp__max64(parts, slots * lg->query_heads * lg->value_dim);
        lse = kvp__max64(lse, slots * lg->query_heads);
        if (lg->layers > r->most_layers) r->most_layers = lg->layers;
    }
    if (r->arch) take_forward(m, r);
    r->q = take(m, r->max_rows, q);
    r->part_out = take(m, parts, sizeof(float));
    r->part_lse = take(m, lse, sizeof(float));
    r->copy_groups = take(m, g->n_groups, sizeof(kvp__cuda_copy_group));
    r->shadow_bytes = 4ull * g->n_groups * r->max_seqs * r->table_stride;
    r->tables = take(m, r->shadow_bytes, 1);
    kvp__cuda_shape most;
    kvp__cuda_upload u;
    kvp__cuda_most(r, r->max_rows, r->max_seqs, r->max_outputs, &most);
    kvp__cuda_place_upload(&u, &most, g->n_groups);
    r->upload_bytes = kvp__round_up(u.bytes, KVP__CUDA_ALIGN);
    r->upload_at = take(m, r->upload_bytes, 1);
}

/* Of everything that sizes follow from. */
static kvp_status set_limits(kvp__runner *r, const kvp__cuda_limits *l, uint32_t max_outputs,
                             const kvp__layout *layout, kvp_error *err)
{
    const kvp__geometry *g = &r->model->geometry;
    r->max_rows = l->max_rows;
    r->max_seqs = l->max_seqs;
    r->max_outputs = max_outputs;
    r->max_positions = l->max_positions;
    r->v_format = layout->v_format;
    r->table_stride = (uint32_t)kvp__ceil_div(kvp__max64(l->max_positions, 1),
                                              layout->block_tokens);
    r->block_shift = (uint32_t)__builtin_ctz(layout->block_tokens);
    uint64_t entries = (uint64_t)g->n_groups * l->max_seqs * r->table_stride;
    if (entries > UINT32_MAX)
        return kvp__fail(err, KVP_ERR_TOO_LARGE, "block tables of %u sequences of %u tokens have "
                         "more than 2^32 entries", (unsigned)l->max_seqs,
                         (unsigned)l->max_positions);
    r->max_patches = (uint32_t)kvp__min64(entries, MOST_PATCHES);
    for (uint32_t i = 0; i < g->n_groups; i++) {
        if (!g->groups[i].layers) continue;
        kvp_status s = kvp__cuda_plan_place(&r->plans[i], &g->groups[i], i, layout, l, err);
        if (s != KVP_OK) return s;
    }
    return KVP_OK;
}

uint64_t kvp__cuda_workspace_bytes(const kvp__model *m, uint32_t max_rows, uint32_t max_seqs,
                                   uint32_t max_positions)
{
    kvp__runner r;
    kvp__layout layout;
    kvp__cuda_limits l = {.max_rows = max_rows, .max_seqs = max_seqs,
                          .max_positions = max_positions, .sms = USUAL_SMS};
    memset(&r, 0, sizeof r);
    r.model = m;
    r.arch = arch_of(m);
    r.card.sms = l.sms;
    if (kvp__layout_make(&layout, &m->geometry, USUAL_BLOCK, KVP_KV_F16, KVP_KV_F16, 1, NULL) < 0 ||
        set_limits(&r, &l, max_seqs < max_rows ? max_seqs : max_rows, &layout, NULL) < 0)
        return UINT64_MAX;
    arena count = {0};
    take_all(&count, &r);
    return count.overflow ? UINT64_MAX : count.used;
}

/* --- memory of the host's, pinned and not --- */

static void *take_room(arena *m, uint64_t count, uint64_t size)
{
    return (void *)(uintptr_t)take(m, count, size);
}

static void take_host(arena *m, kvp__runner *r)
{
    r->order = take_room(m, r->max_outputs, sizeof *r->order);
    r->patches = take_room(m, r->max_patches, sizeof *r->patches);
    r->tiles = take_room(m, r->max_outputs / KVP__CUDA_HEAD_ROWS + 2, sizeof *r->tiles);
    r->modules = take_room(m, r->card.found->n_images, sizeof *r->modules);
    if (r->arch) r->scratch = take_room(m, KVP__SCRATCH_BYTES, 1);
    for (uint32_t g = 0; g < r->model->geometry.n_groups; g++) {
        kvp__cuda_plan *p = &r->plans[g];
        void *upload = take_room(m, p->upload_bytes, 1);
        void *scratch = take_room(m, p->scratch_bytes, 1);
        if (m->memory && p->max_rows) kvp__cuda_plan_use(p, upload, scratch);
    }
}

static kvp_status make_room(kvp__runner *r, kvp_error *err)
{
    arena m = {0};
    take_host(&m, r);
    r->room = m.overflow || m.used > SIZE_MAX ? NULL : kvp__alloc(&r->hooks, (size_t)m.used);
    if (!r->room)
        return kvp__fail_need(err, KVP_ERR_NO_MEMORY, m.used, 0,
                              "no memory for a batch's lists of %llu bytes",
                              (unsigned long long)m.used);
    r->room_bytes = (size_t)m.used;
    m = (arena){.memory = (uintptr_t)r->room};
    take_host(&m, r);
    return KVP_OK;
}

static kvp_status pin(kvp__runner *r, uint64_t bytes, void *out, kvp_error *err)
{
    void *p = NULL;
    kvp__cu_result e = r->card.cu->cuMemHostAlloc(&p, (size_t)bytes, 0);
    if (e == KVP__CU_OUT_OF_MEMORY)
        return kvp__fail_need(err, KVP_ERR_NO_MEMORY, bytes, 0,
                              "device cuda:%u: no pinned memory: %llu bytes were asked",
                              (unsigned)r->card.ordinal, (unsigned long long)bytes);
    if (e) return kvp__cuda_fail(&r->card, err, e, "pinned memory");
    memset(p, 0, (size_t)bytes);
    memcpy(out, &p, sizeof p);
    return KVP_OK;
}

static kvp_status pin_all(kvp__runner *r, kvp_error *err)
{
    r->n_uploads = r->arch ? 1 : KVP__CUDA_UPLOADS;
    kvp_status s = pin(r, r->upload_bytes * r->n_uploads, &r->uploads, err);
    if (s == KVP_OK && r->arch) s = pin(r, r->results_bytes, &r->results_host, err);
    if (s == KVP_OK) s = pin(r, r->shadow_bytes, &r->shadow, err);
    if (s != KVP_OK) return s;
    kvp__cuda_forget_tables(r);
    return KVP_OK;
}

/* --- kernels --- */

static kvp_status load_modules(kvp__runner *r, kvp_error *err)
{
    for (; r->n_modules < r->card.found->n_images; r->n_modules++) {
        kvp__cu_result e = r->card.cu->cuModuleLoadData(&r->modules[r->n_modules],
                                                        r->card.found->images[r->n_modules].data);
        if (e) return kvp__cuda_fail(&r->card, err, e, "loading its kernels");
    }
    return KVP_OK;
}

/* A kernel is in one of the modules. */
static kvp_status find_kernel(kvp__runner *r, const char *name, uint32_t shared,
                              kvp__cu_function *out, kvp_error *err)
{
    kvp__cu_result e = KVP__CU_NOT_FOUND;
    for (uint32_t i = 0; i < r->n_modules && e == KVP__CU_NOT_FOUND; i++)
        e = r->card.cu->cuModuleGetFunction(out, r->modules[i], name);
    if (!e && shared > LARGE_SHARED)
        e = r->card.cu->cuFuncSetAttribute(*out, KVP__CU_FUNC_MAX_DYNAMIC_SMEM, (int)shared);
    return e ? kvp__cuda_fail(&r->card, err, e, name) : KVP_OK;
}

static uint32_t shared_of(const kvp__runner *r, uint32_t kernel)
{
    if (kernel == KVP__CUDA_rms_norm && r->arch) return kvp__launch_norm(1, r->arch->width).shared;
    return 0; /* the others need less than what there is without asking */
}

static kvp_status find_attention(kvp__runner *r, uint32_t group, kvp_error *err)
{
    const kvp__cuda_plan *p = &r->plans[group];
    kvp_status s = KVP_OK;
    for (uint32_t t = p->small; t <= p->largest && s == KVP_OK; t++) {
        char name[KVP__KERNEL_NAME];
        uint32_t shared = p->d ? KVP__ATTEND_SHARED(p->d, t)
                               : kvp__launch_attention_any(1, 1, p->key_dim, p->value_dim).shared;
        s = find_kernel(r, kvp__cuda_plan_kernel(p, t, name), shared, &r->attend[group][t], err);
    }
    return s;
}

static kvp_status find_kernels(kvp__runner *r, kvp_error *err)
{
    static const char *const names[] = {
#define NAME(name) #name,
        KVP__CUDA_KERNELS(NAME)
#undef NAME
    };
    kvp_status s = load_modules(r, err);
    for (uint32_t k = 0; k < KVP__CUDA_N_KERNELS && s == KVP_OK; k++)
        s = find_kernel(r, names[k], shared_of(r, k), &r->kernels[k], err);
    for (uint32_t g = 0; g < r->model->geometry.n_groups && s == KVP_OK; g++)
        if (r->model->geometry.groups[g].layers) s = find_attention(r, g, err);
    return s;
}

/* --- creation --- */

static kvp_status blas_failed(const kvp__runner *r, kvp__cu_result e, kvp_error *err)
{
    return kvp__fail(err, e == 3 ? KVP_ERR_NO_MEMORY : KVP_ERR_NO_DEVICE,
                     "device cuda:%u: cuBLAS does not start: its status is %d",
                     (unsigned)r->card.ordinal, e);
}

static kvp_status make_streams(kvp__runner *r, void *of_host, kvp_error *err)
{
    const kvp__cuda_api *cu = r->card.cu;
    kvp__cu_result e = KVP__CU_SUCCESS;
    /* A host's own model may put its work on the default stream: ours then waits for that. */
    if (!of_host) e = cu->cuStreamCreate(&r->own, r->arch ? KVP__CU_STREAM_NON_BLOCKING : 0);
    if (!e && r->arch) e = cu->cuStreamCreate(&r->recording, KVP__CU_STREAM_NON_BLOCKING);
    for (uint32_t i = 0; i < r->n_uploads && !r->arch && !e; i++)
        e = cu->cuEventCreate(&r->sent[i], KVP__CU_EVENT_NO_TIMING);
    if (e) return kvp__cuda_fail(&r->card, err, e, "a stream");
    r->of_host = of_host != NULL;
    r->stream = of_host ? of_host : r->own;
    if (!r->arch) return KVP_OK;
    e = r->card.blas->cublasCreate(&r->blas);
    return e ? blas_failed(r, e, err) : KVP_OK;
}

/* What does not change: how groups are copied, frequencies of rotation. */
static kvp_status send_constants(kvp__runner *r, kvp_error *err)
{
    const kvp__layout *l = &r->store->layout;
    kvp__cuda_copy_group groups[KVP__MAX_GROUPS];
    for (uint32_t i = 0; i < l->n_groups; i++) {
        const kvp__group_layout *g = &l->groups[i];
        groups[i] = (kvp__cuda_copy_group){
            .base = g->base, .pitch = g->pitch, .layer = g->layer, .k_part = g->k_part,
            .k_head = g->k_head, .v_head = g->v_head, .layers = g->layers, .kv_heads = g->kv_heads,
            .k_token = g->key_dim * g->k_size, .v_token = g->value_dim * g->v_size};
    }
    kvp_status s = kvp__cuda_send(&r->card, r->copy_groups, groups, l->n_groups * sizeof *groups,
                                  err);
    for (uint32_t i = 0; r->arch && i < r->arch->n_ropes && s == KVP_OK; i++) {
        const kvp__rope *p = &r->arch->ropes[i];
        if (p->kind == KVP__ROPE_NONE || p->dim < 2) continue;
        s = kvp__cuda_send(&r->card, r->inv_freq[i], p->inv_freq, p->dim / 2 * sizeof *p->inv_freq,
                           err);
    }
    return s;
}

static kvp_status fill(kvp__runner *r, const kvp__runner_options *o, kvp_error *err)
{
    kvp_status s = make_room(r, err);
    if (s == KVP_OK) s = find_kernels(r, err);
    arena count = {0};
    take_all(&count, r);
    if (count.overflow) count.used = UINT64_MAX; /* which no card has */
    if (s == KVP_OK)
        s = kvp__cuda_take(&r->card, count.used, "a batch's workspace", &r->memory, err);
    if (s != KVP_OK) return s;
    r->memory_bytes = count.used;
    arena to = {.memory = r->memory};
    take_all(&to, r);
    s = pin_all(r, err);
    if (s == KVP_OK) s = make_streams(r, o->stream, err);
    if (s == KVP_OK) s = send_constants(r, err);
    return s;
}

kvp_status kvp__cuda_runner_create(const kvp__runner_options *o, kvp__runner **out, kvp_error *err)
{
    kvp__runner *r = kvp__alloc_zero(o->hooks, sizeof *r);
    if (!r) return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for a batch's runner");
    r->hooks = *o->hooks;
    r->model = o->model;
    r->arch = o->weights ? arch_of(o->model) : NULL;
    r->weights = o->weights;
    r->store = o->store;
    r->type = o->weights ? o->weights->type : KVP__EL_F16;
    kvp_status s = kvp__cuda_open(&r->card, o->store->card.ordinal, err);
    if (s == KVP_OK) s = kvp__cuda_enter(&r->card, err);
    if (s == KVP_OK) {
        kvp__cuda_limits l = {.max_rows = o->max_rows, .max_seqs = o->max_seqs,
                              .max_positions = o->max_positions, .sms = r->card.sms};
        s = set_limits(r, &l, o->max_outputs, &o->store->layout, err);
        if (s == KVP_OK) s = fill(r, o, err);
        kvp__cuda_leave(&r->card);
    }
    if (s != KVP_OK) {
        kvp__cuda_runner_destroy(r);
        return s;
    }
    *out = r;
    return KVP_OK;
}

/* Whether the host is recording its stream, which must then be left alone: to ask or wait for it would
 * spoil the recording and say nothing of the work before it. */
static bool is_captured(kvp__runner *r)
{
    int capturing = KVP__CU_CAPTURE_NONE;
    return r->of_host && !r->card.cu->cuStreamIsCapturing(r->stream, &capturing) &&
           capturing != KVP__CU_CAPTURE_NONE;
}

static void give_back(kvp__runner *r)
{
    const kvp__cuda_api *cu = r->card.cu;
    if (is_captured(r)) {
        kvp__log(&r->hooks, KVP_LOG_ERROR, "device cuda:%u: a batch was destroyed while its stream "
                 "was recorded: its memory on the card is not given back",
                 (unsigned)r->card.ordinal);
        return;
    }
    /* A host's own model may have attention under way, and a lost step its end. */
    if (r->stream) (void)cu->cuStreamSynchronize(r->stream);
    kvp__cuda_forget_graphs(r);
    if (r->blas) (void)r->card.blas->cublasDestroy(r->blas);
    for (uint32_t i = 0; i < KVP__CUDA_UPLOADS; i++)
        if (r->sent[i]) (void)cu->cuEventDestroy(r->sent[i]);
    if (r->own) (void)cu->cuStreamDestroy(r->own);
    if (r->recording) (void)cu->cuStreamDestroy(r->recording);
    for (uint32_t i = 0; i < r->n_modules; i++) (void)cu->cuModuleUnload(r->modules[i]);
    if (r->memory) (void)cu->cuMemFree(r->memory);
    if (r->uploads) (void)cu->cuMemFreeHost(r->uploads);
    if (r->results_host) (void)cu->cuMemFreeHost(r->results_host);
    if (r->shadow) (void)cu->cuMemFreeHost(r->shadow);
}

void kvp__cuda_runner_destroy(kvp__runner *r)
{
    if (!r) return;
    kvp__hooks h = r->hooks;
    if (r->card.context && kvp__cuda_enter(&r->card, NULL) == KVP_OK) {
        give_back(r);
        kvp__cuda_leave(&r->card);
    }
    kvp__cuda_close(&r->card);
    kvp__free(&h, r->room, r->room_bytes);
    kvp__free(&h, r, sizeof *r);
}

/* --- on the driver's thread --- */

static void post_rows(const kvp__cuda_tile *t)
{
    const kvp__runner *r = t->runner;
    const kvp__work *w = r->work;
    uint64_t row = r->arch->vocabulary;
    float *logits = (float *)(void *)(r->results_host + r->logits_at);
    for (uint32_t i = t->host_first; i < t->host_first + t->n_host; i++)
        w->post(w->user, r->order[i], logits + (i - t->first) * row, r->scratch);
}

static void tell_chosen(const kvp__runner *r)
{
    const kvp__work *w = r->work;
    const kvp__cuda_drawn *drawn = (const kvp__cuda_drawn *)(const void *)r->results_host;
    for (uint32_t i = 0; i < w->n_outputs; i++) {
        if (i >= r->host_first && i < r->host_first + r->n_host) continue;
        w->chosen(w->user, r->order[i], drawn[i].token, drawn[i].bad);
    }
}

void kvp__cuda_on_tile(void *user)
{
    const kvp__cuda_tile *t = user;
    kvp__runner *r = t->runner;
    uint32_t running = KVP__CUDA_RUNNING;
    if (!atomic_compare_exchange_strong(&r->state, &running, KVP__CUDA_POSTING)) return;
    bool wanted = !atomic_load(&r->cancelled);
    /* The driver's thread may have the floating-point state of whoever made it. */
    kvp__fp_state fp = kvp__fp_enter();
    if (wanted) post_rows(t);
    if (wanted && t->last) tell_chosen(r);
    kvp__fp_leave(fp);
    if (!t->last) {
        atomic_store(&r->state, KVP__CUDA_RUNNING);
        return;
    }
    const kvp__work *w = r->work;
    atomic_store(&r->state, KVP__CUDA_ENDING);
    if (w->done) w->done(w->user);
    atomic_store(&r->state, KVP__CUDA_IDLE);
}

/* --- a step --- */

kvp_status kvp__cuda_prepare(kvp__runner *r, const kvp__work *work)
{
    if (atomic_load(&r->lost)) return KVP_ERR_DEVICE_LOST;
    if (r->unsent) kvp__cuda_forget_tables(r);
    r->work = work;
    r->unsent = true;
    kvp__cuda_prepare_step(r);
    return KVP_OK;
}

static kvp_status refuse_capture(kvp__runner *r)
{
    int capturing = 0;
    if (!r->of_host) return KVP_OK;
    kvp__cu_result e = r->card.cu->cuStreamIsCapturing(r->stream, &capturing);
    if (e) return kvp__cuda_fail(&r->card, NULL, e, "the host's stream");
    if (capturing == KVP__CU_CAPTURE_NONE) return KVP_OK;
    snprintf(r->words, sizeof r->words, "the host is recording its stream");
    return KVP_ERR_UNSUPPORTED;
}

static void put_words(kvp__runner *r, const char *what, kvp__cu_result e, bool blas)
{
    const char *name = NULL;
    if (blas || r->card.cu->cuGetErrorName(e, &name) || !name) name = blas ? "cuBLAS" : "error";
    snprintf(r->words, sizeof r->words, "%.48s: %.32s (%d)", what, name, e);
    kvp__log(&r->hooks, KVP_LOG_ERROR, "device cuda:%u: %s", (unsigned)r->card.ordinal, r->words);
}

const char *kvp__cuda_why(const kvp__runner *r) { return r->words[0] ? r->words : NULL; }

/* Everything that was put on the stream is passed over or over when this returns: the one place
 * where a step waits, and then it has failed. */
static kvp_status give_up(kvp__runner *r)
{
    kvp_status s = r->blas_error ? KVP_ERR_INTERNAL
                                 : kvp__cuda_fail(&r->card, NULL, r->error, r->what);
    put_words(r, r->what, r->error, r->blas_error);
    atomic_store(&r->cancelled, 1);
    (void)r->card.cu->cuStreamSynchronize(r->stream);
    atomic_store(&r->state, KVP__CUDA_IDLE);
    kvp__cuda_forget_tables(r);
    if (s == KVP_ERR_DEVICE_LOST) atomic_store(&r->lost, 1);
    return s;
}

kvp_status kvp__cuda_launch(kvp__runner *r)
{
    if (atomic_load(&r->lost)) return KVP_ERR_DEVICE_LOST;
    kvp_status s = kvp__cuda_enter(&r->card, NULL);
    if (s != KVP_OK) return s;
    s = refuse_capture(r);
    if (s == KVP_OK) {
        r->queue = r->stream;
        r->error = KVP__CU_SUCCESS;
        r->blas_error = false;
        atomic_store(&r->cancelled, 0);
        atomic_store(&r->state, KVP__CUDA_RUNNING);
        r->unsent = false;
        kvp__cuda_put_upload(r, r->uploads);
        if (r->bucket == KVP__CUDA_BUCKETS || !kvp__cuda_replay(r)) {
            kvp__cuda_use_stream(r, r->stream);
            kvp__cuda_put_forward(r);
        }
        kvp__cuda_put_results(r, &r->tiles[r->n_tiles ? r->n_tiles - 1 : 0]);
        if (r->error) s = give_up(r);
    }
    kvp__cuda_leave(&r->card);
    return s;
}

void kvp__cuda_cancel(kvp__runner *r) { atomic_store(&r->cancelled, 1); }

/* What the stream says of a step that runs. */
static kvp__cu_result ask(kvp__runner *r)
{
    kvp__cu_context ours;
    kvp__cu_result e = r->card.cu->cuCtxPushCurrent(r->card.context);
    if (e) return e;
    e = is_captured(r) ? KVP__CU_NOT_READY : r->card.cu->cuStreamQuery(r->stream);
    (void)r->card.cu->cuCtxPopCurrent(&ours);
    return e;
}

kvp_status kvp__cuda_poll(const kvp__runner *runner)
{
    kvp__runner *r = (kvp__runner *)(uintptr_t)runner;
    bool asked = false;
    for (;;) {
        uint32_t state = atomic_load(&r->state);
        if (state == KVP__CUDA_IDLE) return atomic_load(&r->lost) ? KVP_ERR_DEVICE_LOST : KVP_OK;
        if (state == KVP__CUDA_LOST) return KVP_ERR_DEVICE_LOST;
        if (state == KVP__CUDA_ENDING) {
            (void)sched_yield(); /* a few instructions */
            continue;
        }
        if (state == KVP__CUDA_POSTING || asked) return KVP_AGAIN;
        kvp__cu_result e = ask(r);
        asked = true;
        if (!kvp__cuda_is_sticky(e)) continue; /* it may have ended since */
        if (!atomic_exchange(&r->lost, 1)) put_words(r, "a step", e, false);
        (void)atomic_compare_exchange_strong(&r->state, &state, KVP__CUDA_LOST);
    }
}
