/*
 * Placing a model's weights: every tensor is read in pieces of some panels, repacked (pack.h) into
 * its final place, and forgotten, so that loading needs little more memory than the packed weights.
 *
 * Invariant: the walk over the model that counts bytes is the walk that lays them out and the walk that
 * reads them, so the figure `plan` prints is the figure that is allocated. A tied embedding is one
 * tensor and is placed once.
 *
 * Reading is done by the calling thread alone, since a host's reader need not be thread-safe;
 * repacking by a team that exists during the call.
 */
#include "cpu/cpu.h"

#include "base/half.h"
#include "cpu/image.h"
#include "cpu/pack.h"

#include <string.h>
#include <unistd.h>

#define PIECE_BYTES (4u << 20) /* of a tensor, read at once */

/* --- the walk --- */

/* One tensor and where it goes: a matrix or a vector. */
typedef struct target {
    const kvp__tensor *tensor;
    kvp__mat *mat;
    const float **vector;
} target;

typedef struct walk {
    uint8_t *memory; /* NULL: counting only */
    uint64_t used;
    uint64_t file_bytes;
    bool failed; /* a shape or type that kernels do not take; `bad` names it */
    const kvp__tensor *bad;
} walk;

static bool loadable_vector(const kvp__tensor *t)
{
    return t->n_dims == 1 && (t->type == KVP__F32 || t->type == KVP__F16 || t->type == KVP__BF16);
}

static void walk_one(walk *w, const target *t)
{
    if (!t->tensor || w->failed) return;
    uint64_t bytes = 0;
    kvp__mat m;
    if (t->mat) {
        if (t->tensor->n_dims == 2 && t->tensor->dims[0] <= UINT32_MAX &&
            t->tensor->dims[1] <= UINT32_MAX)
            bytes = kvp__mat_describe(&m, t->tensor->type, (uint32_t)t->tensor->dims[1],
                                      (uint32_t)t->tensor->dims[0]);
    } else if (loadable_vector(t->tensor) && t->tensor->dims[0] <= UINT32_MAX) {
        bytes = t->tensor->dims[0] * sizeof(float);
    }
    uint64_t end;
    if (bytes == 0 || !kvp__add(w->used, bytes + KVP__CACHE_LINE, &end)) {
        w->failed = true;
        w->bad = t->tensor;
        return;
    }
    if (w->memory && t->mat) {
        m.panels = w->memory + w->used;
        *t->mat = m;
    } else if (w->memory) {
        *t->vector = (const float *)(const void *)(w->memory + w->used);
    }
    w->used = kvp__round_up(w->used + bytes, KVP__CACHE_LINE);
    w->file_bytes += t->tensor->bytes;
}

#define LAYER_TARGETS 17

static void layer_targets(const kvp__layer *l, kvp__cpu_layer *to, target t[LAYER_TARGETS])
{
    const target all[LAYER_TARGETS] = {
        {l->attn_norm, NULL, &to->attn_norm},
        {l->q, &to->q, NULL},
        {l->k, &to->k, NULL},
        {l->v, &to->v, NULL},
        {l->q_bias, NULL, &to->q_bias},
        {l->k_bias, NULL, &to->k_bias},
        {l->v_bias, NULL, &to->v_bias},
        {l->q_norm, NULL, &to->q_norm},
        {l->k_norm, NULL, &to->k_norm},
        {l->o, &to->o, NULL},
        {l->o_bias, NULL, &to->o_bias},
        {l->post_attn_norm, NULL, &to->post_attn_norm},
        {l->ffn_norm, NULL, &to->ffn_norm},
        {l->gate, &to->gate, NULL},
        {l->up, &to->up, NULL},
        {l->down, &to->down, NULL},
        {l->post_ffn_norm, NULL, &to->post_ffn_norm},
    };
    memcpy(t, all, sizeof all);
}

/* Visits every tensor in the order it is used in. */
static void walk_model(walk *w, const kvp__model *m, kvp__weights *to,
                       void (*visit)(void *user, walk *w, const target *t), void *user)
{
    const kvp__arch *a = &m->arch;
    kvp__cpu_layer dummy;
    target t = {a->token_embedding, &to->embedding, NULL};
    visit(user, w, &t);
    for (uint32_t l = 0; l < a->n_layers; l++) {
        target of_layer[LAYER_TARGETS];
        layer_targets(&a->layers[l], to->layers ? &to->layers[l] : &dummy, of_layer);
        for (uint32_t i = 0; i < LAYER_TARGETS; i++) visit(user, w, &of_layer[i]);
    }
    t = (target){a->output_norm, NULL, &to->output_norm};
    visit(user, w, &t);
    t = (target){a->output == a->token_embedding ? NULL : a->output, &to->output, NULL};
    visit(user, w, &t);
}

static void visit_layout(void *user, walk *w, const target *t)
{
    (void)user;
    walk_one(w, t);
}

uint64_t kvp__cpu_packed_bytes(const kvp__model *m)
{
    kvp__weights none;
    walk w = {NULL, 0, 0, false, NULL};
    memset(&none, 0, sizeof none);
    if (m->arch.n_layers == 0) return 0;
    walk_model(&w, m, &none, visit_layout, NULL);
    return w.failed ? 0 : w.used;
}

/* --- reading and packing --- */

typedef struct loader {
    const kvp__model *model;
    const kvp__place *how;
    kvp_error *err;
    kvp_status status;
    uint64_t done, total;
    uint8_t *piece; /* PIECE_BYTES, or what 16 rows take */
    uint64_t piece_bytes;
    kvp__team *team; /* NULL: the calling thread packs */
    void *scratch;
} loader;

/* The panels of one piece. */
typedef struct pack_job {
    const kvp__mat *mat;
    const uint8_t *rows;
    uint64_t row_bytes;
    uint32_t first_panel;
} pack_job;

static void pack_one(void *user, uint32_t chunk, void *scratch)
{
    (void)scratch;
    const pack_job *j = user;
    uint32_t panel = j->first_panel + chunk;
    uint32_t left = j->mat->n_out - panel * KVP__LANES;
    kvp__pack_panel(j->mat->type, j->mat->n_in, j->rows + chunk * KVP__LANES * j->row_bytes,
                    left < KVP__LANES ? left : KVP__LANES,
                    (uint8_t *)(uintptr_t)j->mat->panels + panel * j->mat->panel_bytes);
}

static void pack_piece(loader *ld, pack_job *j, uint32_t panels)
{
    kvp__phase phase = {pack_one, j, panels};
    kvp__program program;
    kvp__program_init(&program, &phase, 1, NULL, NULL);
    if (ld->team) kvp__team_start(ld->team, &program);
    (void)kvp__program_advance(&program, &ld->model->hooks, 0, true, ld->scratch);
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

static void load_mat(loader *ld, const target *t)
{
    const kvp__mat *m = t->mat;
    kvp__type_info info = kvp__type_get(m->type);
    uint64_t row_bytes = (uint64_t)m->n_in / info.block * info.bytes;
    uint32_t panels = kvp__mat_panels(m), at_once = (uint32_t)kvp__max64(
        1, ld->piece_bytes / (row_bytes * KVP__LANES));
    for (uint32_t p = 0; p < panels; p += at_once) {
        uint32_t n = panels - p < at_once ? panels - p : at_once;
        uint64_t first = (uint64_t)p * KVP__LANES;
        uint64_t rows = kvp__min64((uint64_t)n * KVP__LANES, m->n_out - first);
        if (!read_piece(ld, t->tensor, first * row_bytes, rows * row_bytes)) return;
        pack_job j = {m, ld->piece, row_bytes, p};
        pack_piece(ld, &j, n);
    }
}

static void load_vector(loader *ld, const target *t)
{
    float *to = (float *)(uintptr_t)*t->vector;
    uint32_t size = t->tensor->type == KVP__F32 ? 4 : 2;
    uint64_t n = t->tensor->dims[0], at_once = ld->piece_bytes / size;
    for (uint64_t i = 0; i < n; i += at_once) {
        uint64_t k = kvp__min64(at_once, n - i);
        if (!read_piece(ld, t->tensor, i * size, k * size)) return;
        const uint16_t *h = (const uint16_t *)(const void *)ld->piece;
        if (size == 4) {
            memcpy(to + i, ld->piece, (size_t)k * sizeof *to);
            continue;
        }
        for (uint64_t e = 0; e < k; e++)
            to[i + e] = t->tensor->type == KVP__F16 ? kvp__f16_to_f32(h[e]) : kvp__bf16_to_f32(h[e]);
    }
}

static void visit_load(void *user, walk *w, const target *t)
{
    (void)w;
    loader *ld = user;
    if (!t->tensor || ld->status < 0) return;
    if (ld->how->progress && ld->how->progress(ld->how->user, ld->done, ld->total) != 0) {
        ld->status = kvp__fail(ld->err, KVP_ERR_CANCELLED, "placing was cancelled at tensor %s",
                               t->tensor->name);
        return;
    }
    if (t->mat) load_mat(ld, t);
    else load_vector(ld, t);
    ld->done += t->tensor->bytes;
}

/* The rows of a panel have to fit into a piece, however long they are. */
static void visit_piece(void *user, walk *w, const target *t)
{
    uint64_t *most = user;
    (void)w;
    if (!t->tensor || !t->mat) return;
    kvp__type_info info = kvp__type_get(t->tensor->type);
    uint64_t bytes = t->tensor->dims[0] / info.block * info.bytes * KVP__LANES;
    if (bytes > *most) *most = bytes;
}

static kvp_status start_loader(loader *ld, walk *w, kvp__weights *to)
{
    const kvp__hooks *h = &ld->model->hooks;
    ld->piece_bytes = PIECE_BYTES;
    walk_model(w, ld->model, to, visit_piece, &ld->piece_bytes);
    ld->piece = kvp__alloc(h, ld->piece_bytes);
    return ld->piece ? KVP_OK
                     : kvp__fail_need(ld->err, KVP_ERR_NO_MEMORY, ld->piece_bytes, 0,
                                      "no memory to read weights into");
}

static kvp_status pack_all(loader *ld, walk *w, kvp__weights *to)
{
    ld->status = start_loader(ld, w, to);
    if (ld->status >= 0) walk_model(w, ld->model, to, visit_load, ld);
    if (ld->status >= 0 && ld->how->progress &&
        ld->how->progress(ld->how->user, ld->done, ld->total) != 0)
        ld->status = kvp__fail(ld->err, KVP_ERR_CANCELLED, "placing was cancelled");
    kvp__free(&ld->model->hooks, ld->piece, ld->piece_bytes);
    return ld->status;
}

/* Why a packed file is of no use, or was not written, is not the host's error. */
static void log_image(const kvp__model *m, const kvp__place *how, const char *what,
                      const kvp_error *why)
{
    kvp__log(&m->hooks, KVP_LOG_WARN, "packed file %.160s is not %s: %.120s", how->packed_file, what,
             why->text);
}

/* From the packed file if there is a good one, else packed. */
static kvp_status load_all(const kvp__model *m, const kvp__place *how, walk *w, kvp__weights *to,
                           kvp_error *err)
{
    loader ld = {.model = m, .how = how, .err = err, .total = w->file_bytes};
    kvp_error why = {.size = sizeof why};
    kvp_status s = KVP_OK;
    if (how->threads != KVP_THREADS_INLINE)
        s = kvp__team_create(&ld.team, &m->hooks, how->threads, KVP__CACHE_LINE, err);
    if (s < 0) return s;
    bool there = how->packed_file && access(how->packed_file, F_OK) == 0;
    s = there ? kvp__image_read(m, how, ld.team, to->memory, to->bytes, &why) : KVP_ERR_IO;
    if (s == KVP_ERR_CANCELLED) {
        s = kvp__fail(err, s, "%s", why.text);
    } else if (s != KVP_OK) {
        if (there) {
            log_image(m, how, "read", &why);
            memset(to->memory, 0, (size_t)to->bytes); /* the image's gaps are zero */
        }
        s = pack_all(&ld, w, to);
        if (s == KVP_OK && how->packed_file &&
            kvp__image_write(m, how, to->memory, to->bytes, &why) != KVP_OK)
            log_image(m, how, "written", &why);
    }
    if (ld.team) (void)kvp__team_release(ld.team);
    return s;
}

kvp_status kvp__cpu_place(const kvp__model *m, const kvp__place *how, kvp__weights **out,
                          kvp_error *err)
{
    if (m->arch.n_layers == 0)
        return kvp__fail(err, KVP_ERR_UNSUPPORTED, "the model is a geometry: it has no weights");
    kvp__weights *w = kvp__alloc_zero(&m->hooks, sizeof *w);
    if (!w) return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for the weights' table");
    w->hooks = m->hooks;
    w->n_layers = m->arch.n_layers;
    w->layers = kvp__alloc_array(&m->hooks, w->n_layers, sizeof *w->layers);
    kvp_status s = KVP_OK;
    walk count = {NULL, 0, 0, false, NULL};
    if (!w->layers) {
        s = kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for the weights' table");
    } else {
        memset(w->layers, 0, w->n_layers * sizeof *w->layers);
        walk_model(&count, m, w, visit_layout, NULL);
        if (count.failed)
            s = kvp__fail(err, KVP_ERR_UNSUPPORTED, "tensor %s: its type or shape cannot be placed",
                          count.bad->name);
    }
    if (s >= 0) {
        w->bytes = count.used;
        w->memory = kvp__map((size_t)w->bytes);
        if (!w->memory)
            s = kvp__fail_need(err, KVP_ERR_NO_MEMORY, w->bytes, 0,
                               "no memory for %llu bytes of weights", (unsigned long long)w->bytes);
    }
    if (s >= 0) {
        walk lay = {w->memory, 0, 0, false, NULL};
        walk_model(&lay, m, w, visit_layout, NULL);
        if (m->arch.output == m->arch.token_embedding) w->output = w->embedding;
        s = load_all(m, how, &lay, w, err);
    }
    if (s < 0) {
        kvp__cpu_unplace(w);
        return s;
    }
    *out = w;
    return KVP_OK;
}

void kvp__cpu_unplace(kvp__weights *w)
{
    if (!w) return;
    kvp__hooks h = w->hooks;
    if (w->memory) kvp__unmap(w->memory, (size_t)w->bytes);
    kvp__free(&h, w->layers, w->n_layers * sizeof *w->layers);
    kvp__free(&h, w, sizeof *w);
}
