/*
 * A step as a program of phases (base/team.h), one for every architecture: the descriptor says which
 * biases, norms and activations there are, and what is absent is skipped.
 *
 *     copies
 *     embed      token rows, and the sines and cosines of their positions
 *     per layer  qkv -> rotate, store K and V -> attend -> output matrix -> gate, up, activate -> down
 *     head       the output matrix for the rows that are read, 16 at a time, then `post` for each
 *
 * Behind the last layer's K and V only the rows that are read matter. If that leaves out many, they move
 * together (a phase of its own), and what follows is a step of so many rows: row i is output i.
 *
 * Invariant: a chunk reads what earlier phases wrote and writes what no other chunk of its phase reads
 * or writes, and each row's arithmetic is that row's alone; so neither the cut into chunks nor the
 * order shows in the bits. For this the residual stream lives in two buffers: a stage that adds the
 * last matrix's result reads one and writes the other, and may be computed by several chunks at
 * once, of which the first part stores.
 *
 * How a matrix stage is cut (cut_stage): with many rows, a chunk takes a block of rows through norm,
 * quantisation and all outputs, so that rows do not move between cores; with very few, every chunk
 * prepares the rows for itself and takes a share of the outputs, because a barrier costs more than
 * the repetition; between, rows are prepared in a phase of their own.
 *
 * Storing K and V is a phase before attending: attention reads keys as they are stored, also those
 * of this step. Nothing here allocates: the workspace for the largest step is taken at creation.
 */
#include "cpu/cpu.h"

#include "base/fmath.h"
#include "cpu/pack.h"

#include <string.h>

#define FEW_ROWS 4u            /* prepared by every chunk for itself */
#define LEAST_BLOCK 32u        /* rows */
#define MOST_BLOCK 64u
#define MOST_SHARED 256u
#define HEAD_ROWS 16u          /* rows of logits at a time */
#define ROW_CHUNK 8u           /* rows of a chunk in row-wise phases, at most */
#define CHUNKS_PER_THREAD 4u
#define PHASES_PER_LAYER 10u
#define TEAM_MACS (512u << 20) /* multiply-adds of a chunk at most, with a team, */
#define INLINE_MACS (32u << 20) /* inline, where the host's time budget counts, */
#define FEW_MACS (6u << 20)    /* and per row where the weights come from memory for few rows */

typedef enum stage { QKV, ATT_OUT, GATE_UP, DOWN, HEAD, N_STAGES } stage;

/* How a stage's rows and outputs are cut into chunks. */
typedef struct cut {
    uint32_t rows, blocks; /* rows of a block */
    uint32_t parts;        /* of the outputs */
    bool shared;           /* rows are prepared in a phase before */
} cut;

/* What phases know: the runner and which layer, or which tile of the head. */
typedef struct place {
    struct kvp__runner *runner;
    uint32_t index;
} place;

struct kvp__runner {
    kvp__hooks hooks;
    const kvp__model *model;
    const kvp__arch *arch;       /* NULL: own model, attention alone */
    const kvp__weights *weights;
    const kvp__kernels *kernels;
    kvp__store *store;
    kvp__team *team;
    uint32_t threads;            /* 1 if inline */
    uint32_t max_rows, max_seqs, max_outputs, max_positions, block_tokens;

    void *workspace;
    uint64_t workspace_bytes;
    float *stream[2];            /* [row][width]: the residual stream before attention and before
                                    the feed-forward part */
    float *result;               /* [row][width]: of the last matrix, not added yet */
    float *normed;               /* [row][width] */
    float *q, *k, *v, *attended; /* [row][heads][dim] */
    float *gate, *up;            /* [row][feed_forward] */
    float *logits;               /* [HEAD_ROWS][vocabulary] */
    float *cosine[2], *sine[2];  /* of each rope: [row][dim] */
    void *quantised;             /* of whatever rows were prepared last */
    uint32_t *row_seq;           /* the sequence of each row */
    kvp__items items[KVP__MAX_GROUPS];
    kvp__work rest;              /* what is left behind the last layer's K and V, if `narrows`: */
    kvp__work_seq *rest_seqs;    /* [max_outputs], of one row each */
    kvp__items rest_items;
    bool narrows;
    kvp__partials partials;
    kvp__attention *attention;   /* of each layer */
    kvp__phase *phases;
    uint32_t n_phases, max_phases;
    place *layers, *tiles;
    void *scratch;               /* for the calling thread */

    const kvp__work *work;
    cut cuts[N_STAGES];
    cut rest_cuts[N_STAGES];     /* of the last layer, if the step narrows */
    kvp__program program;
    bool launched;
};

static uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }
static uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

/* Whether a stage of a layer has the rows that are read alone, one after the other. */
static bool is_narrow(const kvp__runner *r, stage s, uint32_t layer)
{
    return r->narrows && (s == HEAD || (s != QKV && layer + 1 == r->arch->n_layers));
}

static uint32_t rows_of(const kvp__runner *r, stage s, uint32_t layer)
{
    return s == HEAD || is_narrow(r, s, layer) ? r->work->n_outputs : r->work->n_rows;
}

static const cut *cut_of(const kvp__runner *r, stage s, uint32_t layer)
{
    return s != HEAD && is_narrow(r, s, layer) ? &r->rest_cuts[s] : &r->cuts[s];
}

/* --- matrices of a stage --- */

typedef struct product {
    const kvp__mat *w;
    float *y;
    size_t y_row;
} product;

static uint32_t products_of(const kvp__runner *r, stage s, uint32_t layer, product p[3])
{
    const kvp__cpu_layer *l = &r->weights->layers[layer];
    const kvp__arch *a = r->arch;
    switch (s) {
    case QKV:
        p[0] = (product){&l->q, r->q, l->q.n_out};
        p[1] = (product){&l->k, r->k, l->k.n_out};
        p[2] = (product){&l->v, r->v, l->v.n_out};
        return 3;
    case ATT_OUT: p[0] = (product){&l->o, r->result, a->width}; return 1;
    case GATE_UP:
        p[0] = (product){&l->gate, r->gate, a->feed_forward};
        p[1] = (product){&l->up, r->up, a->feed_forward};
        return 2;
    case DOWN: p[0] = (product){&l->down, r->result, a->width}; return 1;
    default: p[0] = (product){&r->weights->output, r->logits, a->vocabulary}; return 1;
    }
}

static bool wants_quantised(const kvp__runner *r, const product *p, uint32_t n)
{
    if (r->model->activations == KVP_ACTIVATIONS_F32) return false;
    for (uint32_t i = 0; i < n; i++)
        if (p[i].w->type != KVP__F32 && p[i].w->type != KVP__F16 && p[i].w->type != KVP__BF16)
            return true;
    return false;
}

/* Panels [first, first + count) of all matrices side by side, cut to matrix i; gate and up are
 * taken in step, so that a chunk has both of an output. */
static kvp__span panels_of(kvp__span all, uint32_t before, const kvp__mat *w)
{
    uint32_t end = all.first + all.count, panels = kvp__mat_panels(w);
    uint32_t from = larger(all.first, before), to = smaller(end, before + panels);
    return (kvp__span){from - before, to > from ? to - from : 0};
}

/* --- preparing rows --- */

/* Where a stage's input rows come from. */
typedef struct source {
    const float *from;      /* the residual stream, or what is multiplied as it is */
    float *to;              /* the stream with the last result added; NULL: not kept */
    bool add;               /* the last result, */
    const float *bias;      /* after this is added to it */
    const float *post;      /* and this norm applied */
    const float *norm;      /* NULL: rows are taken as they are */
    uint32_t n;             /* floats of a row */
} source;

static source source_of(const kvp__runner *r, stage s, uint32_t layer)
{
    const kvp__weights *w = r->weights;
    const kvp__cpu_layer *l = &w->layers[layer];
    const kvp__arch *a = r->arch;
    switch (s) {
    case QKV:
        if (layer == 0)
            return (source){r->stream[0], NULL, false, NULL, NULL, l->attn_norm, a->width};
        return (source){r->stream[1], r->stream[0], true, NULL, l[-1].post_ffn_norm, l->attn_norm,
                        a->width};
    case ATT_OUT:
        return (source){r->attended, NULL, false, NULL, NULL, NULL, a->query_heads * a->value_dim};
    case GATE_UP:
        return (source){r->stream[0], r->stream[1], true, l->o_bias, l->post_attn_norm, l->ffn_norm,
                        a->width};
    case DOWN: return (source){r->gate, NULL, false, NULL, NULL, NULL, a->feed_forward};
    default:
        return (source){r->stream[1], NULL, true, NULL, w->layers[a->n_layers - 1].post_ffn_norm,
                        w->output_norm, a->width};
    }
}

/* The residual addition and the norm of one row. */
static void norm_row(const kvp__runner *r, const source *s, uint32_t row, float *out, bool keep)
{
    const kvp__kernels *k = r->kernels;
    const float *x = s->from + (size_t)row * s->n;
    if (s->add) {
        memcpy(out, r->result + (size_t)row * s->n, s->n * sizeof *out);
        if (s->bias) k->accumulate(out, s->bias, s->n);
        if (s->post) k->rms_norm(out, s->post, s->n, r->arch->norm_eps, out);
        k->accumulate(out, x, s->n);
        if (keep && s->to) memcpy(s->to + (size_t)row * s->n, out, s->n * sizeof *out);
        x = out;
    }
    k->rms_norm(x, s->norm, s->n, r->arch->norm_eps, out);
}

/* Rows first to first + n of the step (of the outputs, in the head) as activations in `a`, whose
 * row `base` is the first. `normed` is where their floats go. */
static void prepare_rows(const kvp__runner *r, stage s, uint32_t layer, uint32_t first, uint32_t n,
                         kvp__act *a, uint32_t base, bool quantise, bool keep)
{
    source src = source_of(r, s, layer);
    if (src.norm)
        for (uint32_t i = 0; i < n; i++) {
            uint32_t row = s == HEAD && !r->narrows ? r->work->outputs[first + i] : first + i;
            float *out = (float *)(uintptr_t)a->x + (base + i) * a->x_row;
            norm_row(r, &src, row, out, keep);
        }
    if (quantise) r->kernels->quantize(a, base, n);
}

/* The activations of a chunk: in scratch, row 0 the block's first; or shared, row 0 the step's. */
static void place_rows(const kvp__runner *r, stage s, uint32_t layer, const cut *c, uint32_t first,
                       uint32_t n, bool quantise, void *scratch, kvp__act *a)
{
    source src = source_of(r, s, layer);
    memset(a, 0, sizeof *a);
    if (c->shared) {
        if (quantise) kvp__act_place(a, r->quantised, rows_of(r, s, layer), src.n);
        a->x = src.norm ? r->normed : src.from;
    } else {
        if (quantise) kvp__act_place(a, scratch, n, src.n);
        uint64_t used = quantise ? kvp__act_bytes(c->rows, src.n) : 0;
        a->x = src.norm ? (float *)(void *)((char *)scratch + used)
                        : src.from + (size_t)first * src.n;
    }
    a->n_in = src.n;
    a->x_row = src.n;
}

static uint64_t scratch_bytes(const kvp__runner *r, stage s, uint32_t rows)
{
    source src = source_of(r, s, 0);
    uint64_t quantised = src.n % 32 == 0 ? kvp__act_bytes(rows, src.n) : 0;
    return quantised + (src.norm ? (uint64_t)rows * src.n * sizeof(float) : 0);
}

/* --- row-wise work --- */

static void rope_row(const kvp__runner *r, uint32_t rope, uint32_t row)
{
    const kvp__rope *p = &r->arch->ropes[rope];
    float *cosine = r->cosine[rope] + (size_t)row * p->dim;
    float *sine = r->sine[rope] + (size_t)row * p->dim;
    uint32_t half = p->dim / 2, near = p->kind == KVP__ROPE_PAIRS ? 2 : 1;
    uint32_t far = p->kind == KVP__ROPE_PAIRS ? 1 : half;
    for (uint32_t i = 0; i < half; i++) {
        double s, c;
        kvp__sincos((double)r->work->positions[row] * p->inv_freq[i], &s, &c);
        float fc = (float)c * p->magnitude, fs = (float)s * p->magnitude;
        cosine[i * near] = cosine[i * near + far] = fc;
        sine[i * near] = -fs;
        sine[i * near + far] = fs;
    }
}

static void embed_rows(void *user, uint32_t chunk, void *scratch)
{
    const kvp__runner *r = ((place *)user)->runner;
    const kvp__arch *a = r->arch;
    (void)scratch;
    uint32_t end = smaller(chunk * ROW_CHUNK + ROW_CHUNK, r->work->n_rows);
    for (uint32_t row = chunk * ROW_CHUNK; row < end; row++) {
        float *x = r->stream[0] + (size_t)row * a->width;
        kvp__pack_row(&r->weights->embedding, (uint32_t)r->work->tokens[row], x);
        if (a->embedding_scale != 1.0f)
            for (uint32_t i = 0; i < a->width; i++) x[i] *= a->embedding_scale;
        for (uint32_t p = 0; p < a->n_ropes; p++)
            if (a->ropes[p].kind != KVP__ROPE_NONE) rope_row(r, p, row);
    }
}

static void add_biases(const kvp__runner *r, const kvp__cpu_layer *w, uint32_t row)
{
    if (w->q_bias) r->kernels->accumulate(r->q + (size_t)row * w->q.n_out, w->q_bias, w->q.n_out);
    if (w->k_bias) r->kernels->accumulate(r->k + (size_t)row * w->k.n_out, w->k_bias, w->k.n_out);
    if (w->v_bias) r->kernels->accumulate(r->v + (size_t)row * w->v.n_out, w->v_bias, w->v.n_out);
}

static void norm_heads(const kvp__runner *r, float *x, uint32_t heads, const float *weight)
{
    uint32_t dim = r->arch->key_dim;
    if (!weight) return;
    for (uint32_t h = 0; h < heads; h++)
        r->kernels->rms_norm(x + h * dim, weight, dim, r->arch->norm_eps, x + h * dim);
}

/* Biases, norms of heads, rotation, and K and V into their block. */
static void finish_qkv(const kvp__runner *r, uint32_t layer, uint32_t first, uint32_t n)
{
    const kvp__arch *a = r->arch;
    const kvp__layer *l = &a->layers[layer];
    const kvp__cpu_layer *w = &r->weights->layers[layer];
    const kvp__geometry *g = &r->model->geometry;
    const kvp__rope *rope = &a->ropes[l->rope];
    uint32_t group = g->layer_group[layer], block = r->store->layout.block_tokens;
    for (uint32_t row = first; row < first + n; row++) {
        float *q = r->q + (size_t)row * w->q.n_out, *k = r->k + (size_t)row * w->k.n_out;
        float *v = r->v + (size_t)row * w->v.n_out;
        add_biases(r, w, row);
        norm_heads(r, q, a->query_heads, w->q_norm);
        norm_heads(r, k, l->kv_heads, w->k_norm);
        if (rope->kind != KVP__ROPE_NONE) {
            const float *c = r->cosine[l->rope] + (size_t)row * rope->dim;
            const float *s = r->sine[l->rope] + (size_t)row * rope->dim;
            r->kernels->rotate(q, a->query_heads, a->key_dim, rope->kind, rope->dim, c, s);
            r->kernels->rotate(k, l->kv_heads, a->key_dim, rope->kind, rope->dim, c, s);
        }
        const kvp__work_seq *seq = &r->work->seqs[r->row_seq[row]];
        uint32_t position = seq->first_pos + (row - seq->first_row);
        kvp__store_token(r->store, r->kernels, group, g->layer_index[layer],
                         seq->tables[group][position / block], position % block, k, a->key_dim, v,
                         a->value_dim);
    }
}

static uint32_t row_chunk(const kvp__runner *r, uint32_t rows)
{
    uint32_t n = rows / (r->threads * 2);
    return n < 1 ? 1 : smaller(n, ROW_CHUNK);
}

static uint32_t chunks_of(uint32_t rows, uint32_t each) { return (rows + each - 1) / each; }

static void run_finish_qkv(void *user, uint32_t chunk, void *scratch)
{
    const place *p = user;
    const kvp__runner *r = p->runner;
    (void)scratch;
    uint32_t each = row_chunk(r, r->work->n_rows), first = chunk * each;
    finish_qkv(r, p->index, first, smaller(each, r->work->n_rows - first));
}

/* --- matrix stages --- */

static void multiply(const kvp__runner *r, stage s, uint32_t layer, const kvp__act *a, uint32_t base,
                     uint32_t first, uint32_t n, kvp__span panels)
{
    product p[3];
    uint32_t n_products = products_of(r, s, layer, p), before = 0;
    for (uint32_t i = 0; i < n_products; i++) {
        kvp__span mine = panels_of(panels, before, p[i].w);
        /* Row `base` of the activations is row `first` of the output. */
        float *y = p[i].y + (ptrdiff_t)((int64_t)first - base) * (ptrdiff_t)p[i].y_row;
        if (mine.count)
            r->kernels->matmul(p[i].w, a, (kvp__span){base, n}, mine, y, p[i].y_row, false);
        if (s != GATE_UP) before += kvp__mat_panels(p[i].w);
    }
    if (s != GATE_UP) return;
    uint32_t from = panels.first * KVP__LANES;
    uint32_t to = smaller(from + panels.count * KVP__LANES, r->arch->feed_forward);
    for (uint32_t row = first; row < first + n; row++) {
        size_t at = (size_t)row * r->arch->feed_forward + from;
        r->kernels->activate(r->arch->activation, r->gate + at, r->up + at, to - from);
    }
}

static uint32_t panels_in(const kvp__runner *r, stage s, uint32_t layer)
{
    product p[3];
    uint32_t n = products_of(r, s, layer, p), panels = 0;
    for (uint32_t i = 0; i < n && (i == 0 || s != GATE_UP); i++) panels += kvp__mat_panels(p[i].w);
    return panels;
}

static kvp__span part_of(uint32_t panels, uint32_t part, uint32_t parts)
{
    uint32_t from = (uint32_t)((uint64_t)panels * part / parts);
    uint32_t to = (uint32_t)((uint64_t)panels * (part + 1) / parts);
    return (kvp__span){from, to - from};
}

static void run_stage(const place *p, stage s, uint32_t chunk, void *scratch)
{
    const kvp__runner *r = p->runner;
    const cut *c = cut_of(r, s, p->index);
    uint32_t layer = p->index, part = chunk / c->blocks, first = chunk % c->blocks * c->rows;
    uint32_t n = smaller(c->rows, rows_of(r, s, layer) - first);
    product products[3];
    bool quantise = wants_quantised(r, products, products_of(r, s, layer, products));
    kvp__act a;
    place_rows(r, s, layer, c, first, n, quantise, scratch, &a);
    uint32_t base = c->shared ? first : 0;
    if (!c->shared) prepare_rows(r, s, layer, first, n, &a, 0, quantise, part == 0);
    multiply(r, s, layer, &a, base, first, n, part_of(panels_in(r, s, layer), part, c->parts));
    if (s == QKV && c->parts == 1) finish_qkv(r, layer, first, n);
}

static void run_prepare(const place *p, stage s, uint32_t chunk, void *scratch)
{
    const kvp__runner *r = p->runner;
    uint32_t rows = rows_of(r, s, p->index);
    uint32_t each = row_chunk(r, rows), first = chunk * each;
    product products[3];
    bool quantise = wants_quantised(r, products, products_of(r, s, p->index, products));
    kvp__act a;
    place_rows(r, s, p->index, cut_of(r, s, p->index), first, each, quantise, scratch, &a);
    prepare_rows(r, s, p->index, first, smaller(each, rows - first), &a, first, quantise, true);
}

#define STAGE(name, s)                                                                             \
    static void run_##name(void *user, uint32_t chunk, void *scratch)                              \
    {                                                                                              \
        run_stage(user, s, chunk, scratch);                                                        \
    }                                                                                              \
    static void prepare_##name(void *user, uint32_t chunk, void *scratch)                          \
    {                                                                                              \
        run_prepare(user, s, chunk, scratch);                                                      \
    }
STAGE(qkv, QKV)
STAGE(att_out, ATT_OUT)
STAGE(gate_up, GATE_UP)
STAGE(down, DOWN)

static void prepare_head(void *user, uint32_t chunk, void *scratch)
{
    run_prepare(user, HEAD, chunk, scratch);
}

static void run_head(void *user, uint32_t chunk, void *scratch)
{
    const place *p = user;
    const kvp__runner *r = p->runner;
    const cut *c = &r->cuts[HEAD];
    uint32_t first = p->index * HEAD_ROWS, n = smaller(HEAD_ROWS, r->work->n_outputs - first);
    product products[3];
    bool quantise = wants_quantised(r, products, products_of(r, HEAD, 0, products));
    kvp__act a;
    place_rows(r, HEAD, 0, c, 0, n, quantise, scratch, &a);
    multiply(r, HEAD, 0, &a, first, 0, n, part_of(panels_in(r, HEAD, 0), chunk, c->parts));
}

static void run_post(void *user, uint32_t chunk, void *scratch)
{
    const place *p = user;
    const kvp__runner *r = p->runner;
    float *logits = r->logits + (size_t)chunk * r->arch->vocabulary;
    if (r->arch->logit_softcap != 0)
        r->kernels->softcap(logits, r->arch->vocabulary, r->arch->logit_softcap);
    r->work->post(r->work->user, p->index * HEAD_ROWS + chunk, logits, scratch);
}

static void run_attention(void *user, uint32_t chunk, void *scratch)
{
    const place *p = user;
    kvp__item_run(&p->runner->attention[p->index], chunk, scratch);
}

/* Outputs are in the order of rows, so no row is overwritten before it has moved. */
static void run_narrow(void *user, uint32_t chunk, void *scratch)
{
    const kvp__runner *r = ((place *)user)->runner;
    size_t width = r->arch->width, q = (size_t)r->arch->query_heads * r->arch->key_dim;
    (void)chunk;
    (void)scratch;
    for (uint32_t i = 0; i < r->work->n_outputs; i++) {
        size_t row = r->work->outputs[i];
        if (row == i) continue;
        memcpy(r->stream[0] + i * width, r->stream[0] + row * width, width * sizeof(float));
        memcpy(r->q + i * q, r->q + row * q, q * sizeof(float));
    }
}

static void run_copy(void *user, uint32_t chunk, void *scratch)
{
    const kvp__runner *r = ((place *)user)->runner;
    (void)scratch;
    kvp__store_copy(r->store, &r->work->copies[chunk]);
}

/* --- cutting --- */

static uint64_t macs_of(const kvp__runner *r, stage s)
{
    product p[3];
    uint64_t macs = 0;
    for (uint32_t i = 0, n = products_of(r, s, 0, p); i < n; i++)
        macs += (uint64_t)p[i].w->n_out * p[i].w->n_in;
    return macs;
}

/* Enough parts that none takes too long, and at least `least`; no more than there are panels. */
static uint32_t parts_for(const kvp__runner *r, stage s, uint64_t macs, uint64_t most, uint32_t least)
{
    uint64_t parts = kvp__max64(macs / most + 1, least);
    return (uint32_t)kvp__min64(parts, panels_in(r, s, 0));
}

static cut cut_stage(const kvp__runner *r, stage s, uint32_t rows)
{
    uint64_t macs = macs_of(r, s), most = r->team ? TEAM_MACS : INLINE_MACS;
    uint32_t wanted = CHUNKS_PER_THREAD * r->threads;
    cut c = {rows, 1, 1, false};
    if (s != HEAD && rows <= FEW_ROWS && scratch_bytes(r, s, rows) <= KVP__SCRATCH_BYTES) {
        c.parts = parts_for(r, s, macs, FEW_MACS, larger(wanted - r->threads, 1));
        return c;
    }
    uint64_t affordable = kvp__min64(most / macs, MOST_BLOCK) & ~15ull;
    uint32_t block = (uint32_t)kvp__min64(kvp__round_up(rows / wanted, 16), affordable);
    if (s != HEAD && chunks_of(rows, larger(block, 1)) >= wanted / 2 && block >= LEAST_BLOCK &&
        scratch_bytes(r, s, block) <= KVP__SCRATCH_BYTES) {
        c.rows = block;
        c.blocks = chunks_of(rows, block);
        return c;
    }
    c.shared = true;
    c.rows = smaller(rows, MOST_SHARED);
    c.blocks = chunks_of(rows, c.rows);
    c.parts = parts_for(r, s, c.rows * macs, most, chunks_of(wanted, c.blocks));
    return c;
}

/* --- the program --- */

static void add_phase(kvp__runner *r, void (*run)(void *, uint32_t, void *), place *p, uint32_t n)
{
    if (n) r->phases[r->n_phases++] = (kvp__phase){run, p, n};
}

static void add_stage(kvp__runner *r, stage s, place *p, void (*prepare)(void *, uint32_t, void *),
                      void (*run)(void *, uint32_t, void *))
{
    const cut *c = cut_of(r, s, p->index);
    uint32_t rows = rows_of(r, s, p->index);
    if (c->shared) add_phase(r, prepare, p, chunks_of(rows, row_chunk(r, rows)));
    add_phase(r, run, p, c->blocks * c->parts);
}

static void add_layer(kvp__runner *r, uint32_t layer)
{
    place *p = &r->layers[layer];
    uint32_t rows = r->work->n_rows;
    add_stage(r, QKV, p, prepare_qkv, run_qkv);
    if (r->cuts[QKV].parts > 1)
        add_phase(r, run_finish_qkv, p, chunks_of(rows, row_chunk(r, rows)));
    if (rows_of(r, ATT_OUT, layer) == 0) return;
    if (is_narrow(r, ATT_OUT, layer)) add_phase(r, run_narrow, p, 1);
    add_phase(r, run_attention, p, r->attention[layer].items->n);
    add_stage(r, ATT_OUT, p, prepare_att_out, run_att_out);
    add_stage(r, GATE_UP, p, prepare_gate_up, run_gate_up);
    add_stage(r, DOWN, p, prepare_down, run_down);
}

static void add_head(kvp__runner *r)
{
    uint32_t outputs = r->work->n_outputs;
    if (!outputs) return;
    add_phase(r, prepare_head, &r->tiles[0], chunks_of(outputs, row_chunk(r, outputs)));
    for (uint32_t t = 0; t * HEAD_ROWS < outputs; t++) {
        add_phase(r, run_head, &r->tiles[t], r->cuts[HEAD].parts);
        add_phase(r, run_post, &r->tiles[t], smaller(HEAD_ROWS, outputs - t * HEAD_ROWS));
    }
}

static void find_rows(kvp__runner *r, const kvp__work *work)
{
    for (uint32_t s = 0; s < work->n_seqs; s++)
        for (uint32_t i = 0; i < work->seqs[s].n_rows; i++)
            r->row_seq[work->seqs[s].first_row + i] = s;
}

/* Is it worth it, and are outputs in the order of rows? What is left then is a sequence of one row for
 * each output. */
static void narrow(kvp__runner *r, const kvp__work *work)
{
    uint32_t last = r->arch->n_layers - 1, group = r->model->geometry.layer_group[last];
    kvp__attention *a = &r->attention[last];
    r->narrows = work->n_outputs < work->n_rows / 2;
    for (uint32_t i = 1; i < work->n_outputs; i++)
        r->narrows = r->narrows && work->outputs[i - 1] < work->outputs[i];
    a->work = work;
    a->items = &r->items[group];
    if (!r->narrows) return;
    for (uint32_t i = 0; i < work->n_outputs; i++) {
        uint32_t row = work->outputs[i];
        kvp__work_seq *s = &r->rest_seqs[i];
        *s = work->seqs[r->row_seq[row]];
        s->first_pos += row - s->first_row;
        s->first_row = i;
        s->n_rows = 1;
    }
    r->rest = (kvp__work){.n_rows = work->n_outputs, .n_seqs = work->n_outputs,
                          .seqs = r->rest_seqs};
    kvp__items_make(&r->rest_items, &r->rest, r->threads);
    for (stage s = ATT_OUT; s < HEAD; s++)
        r->rest_cuts[s] = cut_stage(r, s, larger(work->n_outputs, 1));
    a->work = &r->rest;
    a->items = &r->rest_items;
}

static void build_program(kvp__runner *r, const kvp__work *work)
{
    r->work = work;
    r->n_phases = 0;
    find_rows(r, work);
    for (uint32_t g = 0; g < r->model->geometry.n_groups; g++)
        kvp__items_make(&r->items[g], work, r->threads);
    for (stage s = QKV; s < HEAD; s++) r->cuts[s] = cut_stage(r, s, work->n_rows);
    r->cuts[HEAD] = cut_stage(r, HEAD, smaller(larger(work->n_outputs, 1), HEAD_ROWS));
    for (uint32_t l = 0; l < r->arch->n_layers; l++) r->attention[l].work = work;
    narrow(r, work);
    add_phase(r, run_copy, &r->layers[0], work->n_copies);
    add_phase(r, embed_rows, &r->layers[0], chunks_of(work->n_rows, ROW_CHUNK));
    for (uint32_t l = 0; l < r->arch->n_layers; l++) add_layer(r, l);
    add_head(r);
}

static void step_done(void *user)
{
    const kvp__work *w = user;
    if (w->done) w->done(w->user);
}

static void start(kvp__runner *r, void (*done)(void *), void *user)
{
    kvp__program_init(&r->program, r->phases, r->n_phases, done, user);
    r->program.work = r->work->n_rows;
    r->launched = true;
    if (r->team) kvp__team_start(r->team, &r->program);
}

kvp_status kvp__cpu_prepare(kvp__runner *r, const kvp__work *work)
{
    build_program(r, work);
    return KVP_OK;
}

kvp_status kvp__cpu_launch(kvp__runner *r)
{
    start(r, step_done, (void *)(uintptr_t)r->work);
    return KVP_OK;
}

void kvp__cpu_advance(kvp__runner *r, uint64_t until)
{
    if (!r->team && r->launched && !kvp__program_over(&r->program))
        (void)kvp__program_advance(&r->program, &r->hooks, until, true, r->scratch);
}

void kvp__cpu_cancel(kvp__runner *r)
{
    if (r->launched) kvp__program_cancel(&r->program);
}

kvp_status kvp__cpu_poll(const kvp__runner *r)
{
    return !r->launched || kvp__program_over(&r->program) ? KVP_OK : KVP_AGAIN;
}

/* --- own model --- */

typedef struct host_layer {
    kvp__runner *runner;
    const kvp__attend *given;
    uint32_t group, index;
} host_layer;

static const float *host_row(const float *p, uint32_t row, int64_t stride)
{
    return (const float *)(const void *)((const char *)p + (int64_t)row * stride);
}

/* Heads may be any number of bytes apart, so they go through one contiguous row of scratch. */
static void run_host_store(void *user, uint32_t chunk, void *scratch)
{
    const host_layer *h = user;
    const kvp__runner *r = h->runner;
    const kvp__group_layout *g = &r->store->layout.groups[h->group];
    uint32_t block = r->store->layout.block_tokens;
    float *k = scratch, *v = k + (size_t)g->kv_heads * g->key_dim;
    uint32_t end = smaller(chunk * ROW_CHUNK + ROW_CHUNK, r->work->n_rows);
    for (uint32_t row = chunk * ROW_CHUNK; row < end; row++) {
        const float *k_row = host_row(h->given->k, row, h->given->k_row);
        const float *v_row = host_row(h->given->v, row, h->given->v_row);
        const kvp__work_seq *seq = &r->work->seqs[r->row_seq[row]];
        uint32_t position = seq->first_pos + (row - seq->first_row);
        for (uint32_t n = 0; n < g->kv_heads; n++) {
            memcpy(k + n * g->key_dim, host_row(k_row, n, h->given->k_head),
                   g->key_dim * sizeof *k);
            memcpy(v + n * g->value_dim, host_row(v_row, n, h->given->v_head),
                   g->value_dim * sizeof *v);
        }
        kvp__store_token(r->store, r->kernels, h->group, h->index,
                         seq->tables[h->group][position / block], position % block, k, g->key_dim,
                         v, g->value_dim);
    }
}

static void run_now(kvp__runner *r)
{
    start(r, NULL, NULL);
    (void)kvp__program_advance(&r->program, &r->hooks, 0, true, r->scratch);
}

kvp_status kvp__cpu_begin(kvp__runner *r, const kvp__work *work, kvp_error *err)
{
    (void)err;
    kvp__work copies;
    memset(&copies, 0, sizeof copies); /* without rows: the team does not take its pace from it */
    copies.copies = work->copies;
    r->work = &copies;
    r->n_phases = 0;
    add_phase(r, run_copy, &r->layers[0], work->n_copies);
    run_now(r);
    r->work = NULL;
    return KVP_OK;
}

kvp_status kvp__cpu_attend(kvp__runner *r, const kvp__work *work, const kvp__attend *a,
                           kvp_error *err)
{
    if (a->type != KVP_KV_F32)
        return kvp__fail(err, KVP_ERR_UNSUPPORTED, "type: the CPU attends with KVP_KV_F32 alone");
    const kvp__geometry *g = &r->model->geometry;
    host_layer h = {r, a, g->layer_group[a->layer], g->layer_index[a->layer]};
    kvp__attention *at = &r->attention[a->layer];
    r->work = work;
    find_rows(r, work);
    kvp__items_make(&r->items[h.group], work, r->threads);
    at->work = work;
    at->scale = a->scale;
    at->softcap = a->softcap;
    at->q = a->q;
    at->out = a->out;
    at->q_row = a->q_row;
    at->q_head = a->q_head;
    at->out_row = a->out_row;
    at->out_head = a->out_head;
    r->n_phases = 0;
    r->phases[r->n_phases++] = (kvp__phase){run_host_store, &h, chunks_of(work->n_rows, ROW_CHUNK)};
    add_phase(r, run_attention, &r->layers[a->layer], r->items[h.group].n);
    run_now(r);
    r->work = NULL;
    return KVP_OK;
}

/* --- creation --- */

/* Counts what is laid out, or lays it out: the same walk for both. */
typedef struct arena {
    uint8_t *memory; /* NULL: counting */
    uint64_t used;
    bool overflow;
} arena;

static void *take(arena *a, uint64_t count, uint64_t size)
{
    uint64_t bytes, end;
    if (!kvp__mul(count, size, &bytes) || !kvp__add(a->used, bytes, &end) ||
        !kvp__add(end, KVP__CACHE_LINE - 1, &end)) {
        a->overflow = true;
        return NULL;
    }
    void *p = a->memory ? a->memory + a->used : NULL;
    a->used = end & ~(uint64_t)(KVP__CACHE_LINE - 1);
    return p;
}

static uint64_t most_panels_dim(const kvp__arch *a)
{
    uint64_t n = a->width, heads = (uint64_t)a->query_heads * a->value_dim;
    if (heads > n) n = heads;
    return kvp__max64(n, a->feed_forward);
}

static void take_rows(arena *m, kvp__runner *r)
{
    const kvp__arch *a = r->arch;
    uint64_t rows = r->max_rows, kv_heads = 0;
    for (uint32_t l = 0; l < a->n_layers; l++)
        kv_heads = kvp__max64(kv_heads, a->layers[l].kv_heads);
    for (int i = 0; i < 2; i++) r->stream[i] = take(m, rows, 4ull * a->width);
    r->result = take(m, rows, 4ull * a->width);
    r->normed = take(m, rows, 4ull * a->width);
    r->q = take(m, rows, 4ull * a->query_heads * a->key_dim);
    r->k = take(m, rows, 4ull * kv_heads * a->key_dim);
    r->v = take(m, rows, 4ull * kv_heads * a->value_dim);
    r->attended = take(m, rows, 4ull * a->query_heads * a->value_dim);
    r->gate = take(m, rows, 4ull * a->feed_forward);
    r->up = take(m, rows, 4ull * a->feed_forward);
    r->logits = take(m, smaller(HEAD_ROWS, r->max_outputs), 4ull * a->vocabulary);
    for (uint32_t p = 0; p < a->n_ropes; p++) {
        r->cosine[p] = take(m, rows, 4ull * a->ropes[p].dim);
        r->sine[p] = take(m, rows, 4ull * a->ropes[p].dim);
    }
    uint64_t dim = kvp__round_up(most_panels_dim(a), 32);
    r->quantised = take(m, kvp__act_bytes(r->max_rows, (uint32_t)dim), 1);
}

static void take_attention(arena *m, kvp__runner *r)
{
    const kvp__geometry *g = &r->model->geometry;
    uint64_t slots = 0, width = 0;
    for (uint32_t i = 0; i < g->n_groups; i++) {
        const kvp_layer_group *lg = &g->groups[i];
        kvp__items *it = &r->items[i];
        if (lg->layers == 0 || lg->kv_heads == 0) continue;
        kvp__items_limits limits = {r->max_rows, r->max_seqs, r->max_positions, r->threads};
        uint64_t bytes = kvp__items_place(it, lg, i, r->block_tokens, &limits, NULL);
        void *memory = take(m, bytes, 1);
        if (memory) (void)kvp__items_place(it, lg, i, r->block_tokens, &limits, memory);
        slots = kvp__max64(slots, it->max_slots);
        width = kvp__max64(width, kvp__round_up(lg->value_dim, KVP__LANES));
    }
    if (r->arch) {
        kvp__items_limits limits = {r->max_outputs, r->max_outputs, r->max_positions, r->threads};
        uint32_t group = g->layer_group[g->n_layers - 1];
        const kvp_layer_group *lg = &g->groups[group];
        uint64_t bytes =
            kvp__items_place(&r->rest_items, lg, group, r->block_tokens, &limits, NULL);
        void *memory = take(m, bytes, 1);
        if (memory)
            (void)kvp__items_place(&r->rest_items, lg, group, r->block_tokens, &limits, memory);
        r->rest_seqs = take(m, r->max_outputs, sizeof *r->rest_seqs);
        slots = kvp__max64(slots, r->rest_items.max_slots);
    }
    r->partials.acc = take(m, slots, width * sizeof(float));
    r->partials.max = take(m, slots, sizeof(float));
    r->partials.sum = take(m, slots, sizeof(float));
}

static void take_all(arena *m, kvp__runner *r)
{
    uint32_t layers = r->model->geometry.n_layers;
    uint32_t tiles = chunks_of(r->max_outputs, HEAD_ROWS);
    if (r->arch) take_rows(m, r);
    take_attention(m, r);
    r->row_seq = take(m, r->max_rows, sizeof *r->row_seq);
    r->attention = take(m, layers, sizeof *r->attention);
    r->layers = take(m, layers, sizeof *r->layers);
    r->tiles = take(m, tiles + 1ull, sizeof *r->tiles);
    r->max_phases = 4 + PHASES_PER_LAYER * layers + 2 * tiles;
    r->phases = take(m, r->max_phases, sizeof *r->phases);
    r->scratch = take(m, KVP__SCRATCH_BYTES, 1);
}

static void fill_tables(kvp__runner *r)
{
    const kvp__geometry *g = &r->model->geometry;
    for (uint32_t t = 0; t <= chunks_of(r->max_outputs, HEAD_ROWS); t++)
        r->tiles[t] = (place){r, t};
    for (uint32_t l = 0; l < g->n_layers; l++) {
        kvp__attention *at = &r->attention[l];
        r->layers[l] = (place){r, l};
        memset(at, 0, sizeof *at);
        at->kernels = r->kernels;
        at->store = r->store;
        at->items = &r->items[g->layer_group[l]];
        at->partials = r->partials;
        at->index = g->layer_index[l];
        if (!r->arch) continue;
        at->scale = r->arch->attention_scale;
        at->softcap = r->arch->attention_softcap;
        at->q = r->q;
        at->out = r->attended;
        at->q_head = (int64_t)(r->arch->key_dim * sizeof(float));
        at->q_row = at->q_head * r->arch->query_heads;
        at->out_head = (int64_t)(r->arch->value_dim * sizeof(float));
        at->out_row = at->out_head * r->arch->query_heads;
    }
}

static const kvp__arch *arch_of(const kvp__model *m)
{
    return m->arch.n_layers ? &m->arch : NULL;
}

uint64_t kvp__cpu_workspace_bytes(const kvp__model *m, uint32_t max_rows, uint32_t max_seqs,
                                  uint32_t max_positions)
{
    kvp__runner r;
    memset(&r, 0, sizeof r);
    r.model = m;
    r.arch = arch_of(m);
    r.threads = kvp__cores();
    r.max_rows = max_rows;
    r.max_seqs = max_seqs;
    r.max_outputs = smaller(max_seqs, max_rows);
    r.max_positions = max_positions;
    r.block_tokens = 1;
    arena count = {NULL, 0, false};
    take_all(&count, &r);
    return count.overflow ? UINT64_MAX : count.used;
}

kvp_status kvp__cpu_runner_create(const kvp__runner_options *o, kvp__runner **out, kvp_error *err)
{
    kvp__runner *r = kvp__alloc_zero(o->hooks, sizeof *r);
    if (!r) return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for a batch's runner");
    r->hooks = *o->hooks;
    r->model = o->model;
    r->arch = o->weights ? arch_of(o->model) : NULL;
    r->weights = o->weights;
    r->kernels = kvp__kernels_get(kvp__cpu_level(o->model->cpu_level));
    r->store = o->store;
    r->team = o->team;
    r->threads = o->team ? kvp__team_threads(o->team) : 1;
    r->max_rows = o->max_rows;
    r->max_seqs = o->max_seqs;
    r->max_outputs = o->max_outputs;
    r->max_positions = o->max_positions;
    r->block_tokens = o->store->layout.block_tokens;
    arena a = {NULL, 0, false};
    take_all(&a, r);
    r->workspace_bytes = a.used;
    if (!a.overflow && a.used <= SIZE_MAX) r->workspace = kvp__map((size_t)a.used);
    if (!r->workspace) {
        kvp_status s = kvp__fail_need(err, KVP_ERR_NO_MEMORY, r->workspace_bytes, 0,
                                      "no memory for a workspace of %llu bytes",
                                      (unsigned long long)r->workspace_bytes);
        kvp__cpu_runner_destroy(r);
        return s;
    }
    a = (arena){r->workspace, 0, false};
    take_all(&a, r);
    fill_tables(r);
    if (o->team) kvp__team_acquire(o->team);
    *out = r;
    return KVP_OK;
}

void kvp__cpu_runner_destroy(kvp__runner *r)
{
    if (!r) return;
    kvp__hooks h = r->hooks;
    if (r->workspace) {
        kvp__unmap(r->workspace, (size_t)r->workspace_bytes);
        if (r->team) (void)kvp__team_release(r->team);
    }
    kvp__free(&h, r, sizeof *r);
}
