/*
 * Placing a model's weights on a card: every tensor is read in pieces of some rows, laid out in one
 * of two pinned buffers by a team that exists during the call, and copied while the next piece is
 * read.
 *
 * What a tensor becomes: Q8_0 and Q4_0 matrices stay quantised, taken apart into values and scales
 * (kernels/args.h); every other matrix is rounded to the model's 16-bit type; vectors are floats.
 * The projections of the same rows lie in one matrix as far as their types agree, so that a stage
 * of a layer is one product.
 *
 * Invariant: the walk that counts bytes is the walk that lays them out, and it runs before anything
 * is taken, so that a model too large is refused at once, with what it needs and what is free. A
 * tied embedding is held once.
 */
#include "cuda/cuda.h"

#include "base/half.h"
#include "model/floats.h"

#include <string.h>

#define PIECE_BYTES (8u << 20) /* of a tensor, read at once */
#define SOME 2048u             /* values converted at a time, whole blocks of any type */
#define ROWS_A_CHUNK 16u

/* --- the walk --- */

typedef struct walk {
    kvp__cu_ptr memory; /* 0: counting */
    uint64_t used;
    uint64_t file_bytes;
    const kvp__tensor *bad; /* a shape or type that cannot be placed */
} walk;

static uint64_t take(walk *w, uint64_t bytes)
{
    uint64_t at = w->used, end;
    if (!kvp__add(at, bytes, &end) || end > UINT64_MAX - KVP__CUDA_ALIGN) return UINT64_MAX;
    w->used = kvp__round_up(end, KVP__CUDA_ALIGN);
    return at;
}

static uint32_t element_of(uint32_t tensor_type, uint32_t half)
{
    if (tensor_type == KVP__Q8_0) return KVP__EL_Q8_0;
    return tensor_type == KVP__Q4_0 ? KVP__EL_Q4_0 : half;
}

/* Bytes of a row of values, and of its scales. */
static uint64_t value_bytes(uint32_t type, uint64_t n_in)
{
    return type == KVP__EL_Q8_0 ? n_in : type == KVP__EL_Q4_0 ? n_in / 2 : n_in * 2;
}

static uint64_t scale_bytes(uint32_t type, uint64_t n_in)
{
    return type == KVP__EL_Q8_0 || type == KVP__EL_Q4_0 ? n_in / 32 * 2 : 0;
}

/* Scales follow the values of their matrix, at the next multiple of KVP__CUDA_ALIGN. */
static bool lay_mat(walk *w, kvp__cuda_mat *m)
{
    uint64_t values = UINT64_MAX, scales = 0, at, scales_at = 0;
    (void)kvp__mul(value_bytes(m->type, m->n_in), m->n_out, &values);
    (void)kvp__mul(scale_bytes(m->type, m->n_in), m->n_out, &scales); /* fewer */
    at = take(w, values);
    if (scales) scales_at = take(w, scales);
    if (at == UINT64_MAX || scales_at == UINT64_MAX) return false;
    m->values = w->memory + at;
    m->scales = scales ? w->memory + scales_at : 0;
    return true;
}

static bool is_matrix(const kvp__tensor *t)
{
    return t->n_dims == 2 && t->dims[0] <= INT32_MAX && t->dims[1] <= INT32_MAX &&
           kvp__row_bytes(t->type, t->dims[0]) != 0 && t->dims[1] != 0;
}

/* Tensors with the same inputs; NULL ones end the list. */
static void lay_stack(walk *w, kvp__cuda_stack *s, const kvp__tensor *const t[3], uint32_t half)
{
    memset(s, 0, sizeof *s);
    for (uint32_t i = 0; i < 3 && t[i] && !w->bad; i++) {
        uint64_t n_out = s->n_out + (is_matrix(t[i]) ? t[i]->dims[1] : 0);
        if (!is_matrix(t[i]) || n_out > INT32_MAX || (i && t[i]->dims[0] != s->n_in)) {
            w->bad = t[i];
            return;
        }
        uint32_t type = element_of(t[i]->type, half);
        s->n_in = (uint32_t)t[i]->dims[0];
        s->n_out = (uint32_t)n_out;
        if (s->n == 0 || s->part[s->n - 1].type != type)
            s->part[s->n++] = (kvp__cuda_mat){.type = type, .n_in = s->n_in};
        s->part[s->n - 1].n_out += (uint32_t)t[i]->dims[1];
        w->file_bytes += t[i]->bytes;
    }
    for (uint32_t i = 0; i < s->n && !w->bad; i++)
        if (!lay_mat(w, &s->part[i])) w->bad = t[0];
}

static void lay_vector(walk *w, kvp__cu_ptr *to, const kvp__tensor *t)
{
    *to = 0;
    if (!t || w->bad) return;
    bool ok = t->n_dims == 1 && t->dims[0] && t->dims[0] <= INT32_MAX &&
              (t->type == KVP__F32 || t->type == KVP__F16 || t->type == KVP__BF16);
    uint64_t at = ok ? take(w, t->dims[0] * sizeof(float)) : UINT64_MAX;
    if (at == UINT64_MAX) {
        w->bad = t;
        return;
    }
    *to = w->memory + at;
    w->file_bytes += t->bytes;
}

/* Every tensor in the order in which it is used, laid out or loaded. */
typedef struct visitor {
    void (*stack)(void *user, kvp__cuda_stack *s, const kvp__tensor *const t[3]);
    void (*vector)(void *user, kvp__cu_ptr *to, const kvp__tensor *t);
    void *user;
} visitor;

static void visit_stack(const visitor *v, kvp__cuda_stack *s, const kvp__tensor *a,
                        const kvp__tensor *b, const kvp__tensor *c)
{
    const kvp__tensor *t[3] = {a, b, c};
    v->stack(v->user, s, t);
}

static void visit_layer(const visitor *v, const kvp__layer *l, kvp__cuda_layer *to)
{
    v->vector(v->user, &to->attn_norm, l->attn_norm);
    visit_stack(v, &to->qkv, l->q, l->k, l->v);
    v->vector(v->user, &to->q_bias, l->q_bias);
    v->vector(v->user, &to->k_bias, l->k_bias);
    v->vector(v->user, &to->v_bias, l->v_bias);
    v->vector(v->user, &to->q_norm, l->q_norm);
    v->vector(v->user, &to->k_norm, l->k_norm);
    visit_stack(v, &to->o, l->o, NULL, NULL);
    v->vector(v->user, &to->o_bias, l->o_bias);
    v->vector(v->user, &to->post_attn_norm, l->post_attn_norm);
    v->vector(v->user, &to->ffn_norm, l->ffn_norm);
    visit_stack(v, &to->gate_up, l->gate, l->up, NULL);
    visit_stack(v, &to->down, l->down, NULL, NULL);
    v->vector(v->user, &to->post_ffn_norm, l->post_ffn_norm);
}

static void visit_model(const visitor *v, const kvp__model *m, kvp__weights *to)
{
    const kvp__arch *a = &m->arch;
    kvp__cuda_layer one;
    visit_stack(v, &to->embedding, a->token_embedding, NULL, NULL);
    for (uint32_t l = 0; l < a->n_layers; l++)
        visit_layer(v, &a->layers[l], to->layers ? &to->layers[l] : &one);
    v->vector(v->user, &to->output_norm, a->output_norm);
    if (a->output != a->token_embedding) visit_stack(v, &to->output, a->output, NULL, NULL);
}

typedef struct laying {
    walk walk;
    uint32_t half;
} laying;

static void lay_one_stack(void *user, kvp__cuda_stack *s, const kvp__tensor *const t[3])
{
    laying *l = user;
    lay_stack(&l->walk, s, t, l->half);
}

static void lay_one_vector(void *user, kvp__cu_ptr *to, const kvp__tensor *t)
{
    lay_vector(&((laying *)user)->walk, to, t);
}

static void lay(walk *w, const kvp__model *m, kvp__weights *to)
{
    laying l = {*w, to->type};
    visitor v = {lay_one_stack, lay_one_vector, &l};
    visit_model(&v, m, to);
    if (m->arch.output == m->arch.token_embedding) to->output = to->embedding;
    *w = l.walk;
}

/* BF16 where the model was made in it, or where activations are known to leave the range of F16. */
static uint32_t half_type(const kvp__model *m)
{
    bool bf16 = m->arch.embedding_scale != 1.0f;
    for (uint64_t i = 0; i < m->n_tensors; i++) bf16 |= m->tensors[i].type == KVP__BF16;
    return bf16 ? KVP__EL_BF16 : KVP__EL_F16;
}

uint64_t kvp__cuda_packed_bytes(const kvp__model *m)
{
    kvp__weights none;
    walk w = {0};
    memset(&none, 0, sizeof none);
    none.type = half_type(m);
    if (m->arch.n_layers == 0) return 0;
    lay(&w, m, &none);
    return w.bad ? 0 : w.used;
}

/* --- reading and laying out --- */

typedef struct loader {
    const kvp__model *model;
    const kvp__place *how;
    const kvp__cuda *card;
    kvp_error *err;
    kvp_status status;
    uint64_t done, total;
    uint64_t piece_bytes;  /* of one buffer */
    uint8_t *piece;        /* as the file has it */
    uint8_t *pinned[2];    /* as the card gets it */
    uint32_t turn;
    kvp__cu_stream stream;
    kvp__team *team;       /* NULL: the calling thread converts */
} loader;

/* Rows of one piece. */
typedef struct convert_job {
    const uint8_t *from;
    uint8_t *values, *scales;
    uint64_t row_bytes;
    uint32_t tensor_type, type; /* of the file, KVP__EL_... */
    uint32_t n_in, n_rows;
} convert_job;

static uint16_t round_half(uint32_t type, float f)
{
    return type == KVP__EL_F16 ? kvp__f32_to_f16(f) : kvp__f32_to_bf16(f);
}

static void convert_floats(const convert_job *j, const uint8_t *from, uint8_t *to)
{
    float some[SOME];
    kvp__type_info info = kvp__type_get(j->tensor_type);
    for (uint32_t i = 0; i < j->n_in; i += SOME) {
        uint32_t n = j->n_in - i < SOME ? j->n_in - i : SOME;
        kvp__row_floats(j->tensor_type, from + (uint64_t)(i / info.block) * info.bytes, n, some);
        for (uint32_t e = 0; e < n; e++, to += 2) {
            uint16_t h = round_half(j->type, some[e]);
            memcpy(to, &h, sizeof h);
        }
    }
}

/* The file's blocks are a scale of two bytes and then the values. */
static void take_apart(const convert_job *j, const uint8_t *from, uint8_t *values, uint8_t *scales)
{
    uint32_t bytes = kvp__type_get(j->tensor_type).bytes - 2;
    for (uint32_t b = 0; b < j->n_in / 32; b++, from += bytes + 2, values += bytes, scales += 2) {
        memcpy(scales, from, 2);
        memcpy(values, from + 2, bytes);
    }
}

static void convert_chunk(void *user, uint32_t chunk, void *scratch)
{
    const convert_job *j = user;
    uint32_t first = chunk * ROWS_A_CHUNK;
    uint32_t end = j->n_rows - first < ROWS_A_CHUNK ? j->n_rows : first + ROWS_A_CHUNK;
    uint64_t each = value_bytes(j->type, j->n_in), of_scales = scale_bytes(j->type, j->n_in);
    (void)scratch;
    for (uint32_t r = first; r < end; r++) {
        const uint8_t *from = j->from + r * j->row_bytes;
        if (of_scales) take_apart(j, from, j->values + r * each, j->scales + r * of_scales);
        else convert_floats(j, from, j->values + r * each);
    }
}

static void convert(loader *ld, convert_job *j)
{
    kvp__phase phase = {convert_chunk, j, (j->n_rows + ROWS_A_CHUNK - 1) / ROWS_A_CHUNK};
    kvp__program program;
    kvp__program_init(&program, &phase, 1, NULL, NULL);
    if (ld->team) kvp__team_start(ld->team, &program);
    (void)kvp__program_advance(&program, &ld->model->hooks, 0, true, NULL);
}

static bool failed(loader *ld, kvp__cu_result e, const char *what)
{
    if (e) ld->status = kvp__cuda_fail(ld->card, ld->err, e, what);
    return e != 0;
}

static bool read_piece(loader *ld, const kvp__tensor *t, uint64_t offset, uint64_t bytes)
{
    const kvp__source *s = &ld->model->source;
    if (s->read(s->user, t->offset + offset, ld->piece, (size_t)bytes) == 0) return true;
    ld->status = kvp__fail(ld->err, KVP_ERR_IO, "tensor %s: %llu bytes at %llu could not be read",
                           t->name, (unsigned long long)bytes,
                           (unsigned long long)(t->offset + offset));
    return false;
}

/* Puts the buffer that was filled on the stream, after the other one has gone. */
static bool send(loader *ld, kvp__cu_ptr to, const void *from, uint64_t bytes)
{
    return !failed(ld, ld->card->cu->cuMemcpyHtoDAsync(to, from, (size_t)bytes, ld->stream),
                   "a copy of weights");
}

static bool other_has_gone(loader *ld)
{
    return !failed(ld, ld->card->cu->cuStreamSynchronize(ld->stream), "a copy of weights");
}

/* The tensor as rows `first` and on of the matrix. */
static void load_matrix(loader *ld, const kvp__tensor *t, const kvp__cuda_mat *m, uint64_t first)
{
    uint64_t row_bytes = kvp__row_bytes(t->type, m->n_in), each = value_bytes(m->type, m->n_in);
    uint64_t of_scales = scale_bytes(m->type, m->n_in), rows = t->dims[1];
    uint64_t at_once = ld->piece_bytes / kvp__max64(row_bytes, each + of_scales);
    for (uint64_t r = 0; r < rows; r += at_once) {
        uint64_t n = kvp__min64(at_once, rows - r);
        uint8_t *values = ld->pinned[ld->turn ^= 1];
        convert_job j = {ld->piece, values, values + n * each, row_bytes, t->type, m->type, m->n_in,
                         (uint32_t)n};
        if (!read_piece(ld, t, r * row_bytes, n * row_bytes)) return;
        convert(ld, &j);
        if (!other_has_gone(ld) || !send(ld, m->values + (first + r) * each, values, n * each))
            return;
        if (of_scales && !send(ld, m->scales + (first + r) * of_scales, j.scales, n * of_scales))
            return;
    }
}

static void load_vector(loader *ld, const kvp__tensor *t, kvp__cu_ptr to)
{
    uint64_t size = kvp__row_bytes(t->type, 1), at_once = ld->piece_bytes / sizeof(float);
    for (uint64_t i = 0; i < t->dims[0]; i += at_once) {
        uint64_t n = kvp__min64(at_once, t->dims[0] - i);
        float *values = (float *)(void *)ld->pinned[ld->turn ^= 1];
        if (!read_piece(ld, t, i * size, n * size)) return;
        kvp__row_floats(t->type, ld->piece, n, values);
        if (!other_has_gone(ld) || !send(ld, to + i * sizeof(float), values, n * sizeof(float)))
            return;
    }
}

/* False: stop. */
static bool go_on(loader *ld, const kvp__tensor *t)
{
    if (ld->status < 0) return false;
    if (ld->how->progress && ld->how->progress(ld->how->user, ld->done, ld->total) != 0) {
        ld->status = kvp__fail(ld->err, KVP_ERR_CANCELLED, "placing was cancelled%s%s",
                               t ? " at tensor " : "", t ? t->name : "");
        return false;
    }
    if (t) ld->done += t->bytes;
    return true;
}

static void load_one_stack(void *user, kvp__cuda_stack *s, const kvp__tensor *const t[3])
{
    loader *ld = user;
    uint64_t first = 0;
    for (uint32_t i = 0, part = 0; i < 3 && t[i] && go_on(ld, t[i]); i++) {
        if (first == s->part[part].n_out) {
            part++;
            first = 0;
        }
        load_matrix(ld, t[i], &s->part[part], first);
        first += t[i]->dims[1];
    }
}

static void load_one_vector(void *user, kvp__cu_ptr *to, const kvp__tensor *t)
{
    if (t && go_on(user, t)) load_vector(user, t, *to);
}

/* A row has to fit into a piece, however long it is. */
static uint64_t longest_row(const kvp__model *m)
{
    uint64_t most = 0;
    for (uint64_t i = 0; i < m->n_tensors; i++) {
        const kvp__tensor *t = &m->tensors[i];
        uint64_t bytes = kvp__row_bytes(t->type, t->dims[0]);
        most = kvp__max64(most, kvp__max64(bytes, t->dims[0] * 2));
    }
    return most;
}

static kvp_status start_loader(loader *ld)
{
    const kvp__hooks *h = &ld->model->hooks;
    ld->piece_bytes = kvp__max64(PIECE_BYTES, longest_row(ld->model));
    ld->piece = kvp__alloc(h, ld->piece_bytes);
    if (!ld->piece)
        return kvp__fail_need(ld->err, KVP_ERR_NO_MEMORY, ld->piece_bytes, 0,
                              "no memory to read weights into");
    for (int i = 0; i < 2; i++) {
        void *p = NULL;
        kvp__cu_result e = ld->card->cu->cuMemHostAlloc(&p, (size_t)ld->piece_bytes, 0);
        if (e) return kvp__cuda_fail(ld->card, ld->err, e, "pinned memory to send weights from");
        ld->pinned[i] = p;
    }
    kvp__cu_result e = ld->card->cu->cuStreamCreate(&ld->stream, KVP__CU_STREAM_NON_BLOCKING);
    if (e) return kvp__cuda_fail(ld->card, ld->err, e, "a stream");
    if (ld->how->threads == KVP_THREADS_INLINE) return KVP_OK;
    return kvp__team_create(&ld->team, h, ld->how->threads, KVP__CACHE_LINE, ld->err);
}

static void end_loader(loader *ld)
{
    const kvp__cuda_api *cu = ld->card->cu;
    if (ld->team) (void)kvp__team_release(ld->team);
    if (ld->stream) {
        kvp__cu_result e = cu->cuStreamSynchronize(ld->stream);
        if (ld->status >= 0) (void)failed(ld, e, "a copy of weights");
        (void)cu->cuStreamDestroy(ld->stream);
    }
    for (int i = 0; i < 2; i++)
        if (ld->pinned[i]) (void)cu->cuMemFreeHost(ld->pinned[i]);
    kvp__free(&ld->model->hooks, ld->piece, ld->piece_bytes);
}

/* Whether there is code for this card, before gigabytes are read for it. */
static kvp_status check_code(const kvp__cuda *c, kvp_error *err)
{
    kvp__cu_module module;
    kvp__cu_result e = c->cu->cuModuleLoadData(&module, c->found->images[0].data);
    if (e) return kvp__cuda_fail(c, err, e, "loading its kernels");
    (void)c->cu->cuModuleUnload(module);
    return KVP_OK;
}

static kvp_status load_all(const kvp__model *m, const kvp__place *how, kvp__weights *w,
                           uint64_t file_bytes, kvp_error *err)
{
    loader ld = {.model = m, .how = how, .card = &w->card, .err = err, .total = file_bytes};
    visitor v = {load_one_stack, load_one_vector, &ld};
    ld.status = start_loader(&ld);
    if (ld.status >= 0) {
        visit_model(&v, m, w);
        (void)go_on(&ld, NULL);
    }
    end_loader(&ld);
    return ld.status;
}

static kvp_status fill(kvp__weights *w, const kvp__model *m, const kvp__place *how, kvp_error *err)
{
    walk count = {0};
    lay(&count, m, w);
    if (count.bad)
        return kvp__fail(err, KVP_ERR_UNSUPPORTED, "tensor %s: its type or shape cannot be placed",
                         count.bad->name);
    w->bytes = count.used;
    kvp_status s = check_code(&w->card, err);
    if (s == KVP_OK) s = kvp__cuda_take(&w->card, w->bytes, "weights", &w->memory, err);
    if (s != KVP_OK) return s;
    walk to = {.memory = w->memory};
    lay(&to, m, w);
    return load_all(m, how, w, to.file_bytes, err);
}

kvp_status kvp__cuda_place(const kvp__model *m, const kvp__place *how, kvp__weights **out,
                           kvp_error *err)
{
    if (m->arch.n_layers == 0)
        return kvp__fail(err, KVP_ERR_UNSUPPORTED, "the model is a geometry: it has no weights");
    if (how->packed_file)
        kvp__log(&m->hooks, KVP_LOG_WARN, "packed file %.160s: only the CPU keeps one",
                 how->packed_file);
    kvp__weights *w = kvp__alloc_zero(&m->hooks, sizeof *w);
    if (!w) return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for the weights' table");
    w->hooks = m->hooks;
    w->type = half_type(m);
    w->n_layers = m->arch.n_layers;
    w->layers = kvp__alloc_array(&m->hooks, w->n_layers, sizeof *w->layers);
    kvp_status s = KVP_OK;
    if (!w->layers) s = kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for the weights' table");
    if (s == KVP_OK) s = kvp__cuda_open(&w->card, how->ordinal, err);
    if (s == KVP_OK) s = kvp__cuda_enter(&w->card, err);
    if (s == KVP_OK) {
        s = fill(w, m, how, err);
        kvp__cuda_leave(&w->card);
    }
    if (s != KVP_OK) {
        kvp__cuda_unplace(w);
        return s;
    }
    *out = w;
    return KVP_OK;
}

void kvp__cuda_unplace(kvp__weights *w)
{
    if (!w) return;
    kvp__hooks h = w->hooks;
    if (w->memory && kvp__cuda_enter(&w->card, NULL) == KVP_OK) {
        (void)w->card.cu->cuMemFree(w->memory);
        kvp__cuda_leave(&w->card);
    }
    kvp__cuda_close(&w->card);
    kvp__free(&h, w->layers, w->n_layers * sizeof *w->layers);
    kvp__free(&h, w, sizeof *w);
}
