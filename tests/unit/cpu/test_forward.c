/*
 * A step on tiny random models: against a naive forward pass in double precision that shares no code
 * with the library, for every setting a descriptor has; and its promise that a sequence's logits have
 * the same bits whatever else is in the step, however its prompt was cut, on any number of threads, at
 * any level, for any block size.
 */
#include "cpu/cpu.h"
#include "device/device.h"

#include "base/half.h"

#include <fenv.h>
#include <math.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static kvp__hooks hooks;
static const kvp__device *cpu;

static int setup(void **state)
{
    (void)state;
    uint32_t ordinal;
    cpu = kvp__device_find(NULL, &ordinal);
    return cpu && kvp__hooks_fill(&hooks, NULL, NULL) == KVP_OK ? 0 : -1;
}

static uint64_t rng = 0x2545f4914f6cdd1du;

static uint32_t rnd(uint32_t n)
{
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return (uint32_t)((rng >> 20) % n);
}

static float gauss(void)
{
    float s = 0;
    for (int i = 0; i < 6; i++) s += (float)rnd(1u << 20) * 0x1p-20f - 0.5f;
    return s * 1.4142f;
}

/* --- a tiny model --- */

typedef struct settings {
    uint32_t layers, width, feed_forward, query_heads, kv_heads, key_dim, value_dim, vocabulary;
    uint32_t window;        /* of every layer but each third */
    kvp__type type;         /* of matrices: F32, F16 or Q8_0 */
    bool biases, head_norms, post_norms, tied, gelu;
    kvp__rope_kind rope;
    uint32_t rope_dim;
    float embedding_scale, softcap, logit_softcap;
    uint32_t activations;
} settings;

enum { MAX_LAYERS = 4, MAX_TENSORS = 80 };

typedef struct tiny {
    settings s;
    kvp__model m;
    kvp__layer layers[MAX_LAYERS];
    kvp__tensor tensors[MAX_TENSORS];
    float *floats[MAX_TENSORS]; /* what each tensor's bytes stand for */
    double inv_freq[2][64];
    uint8_t *data;
    uint64_t used;
    int fail_reads_after;       /* negative: never */
} tiny;

static int read_data(void *user, uint64_t offset, void *buffer, size_t bytes)
{
    tiny *t = user;
    if (t->fail_reads_after == 0) return -1;
    if (t->fail_reads_after > 0) t->fail_reads_after--;
    if (offset > t->used || bytes > t->used - offset) return -1;
    memcpy(buffer, t->data + offset, bytes);
    return 0;
}

static void encode(kvp__type type, float *x, uint64_t n, uint8_t *out)
{
    for (uint64_t i = 0; i < n && type == KVP__F32; i++) memcpy(out + 4 * i, &x[i], 4);
    for (uint64_t i = 0; i < n && type == KVP__F16; i++) {
        uint16_t h = kvp__f32_to_f16(x[i]);
        memcpy(out + 2 * i, &h, 2);
        x[i] = kvp__f16_to_f32(h);
    }
    for (uint64_t b = 0; b < n / 32 && type == KVP__Q8_0; b++) {
        float top = 0;
        for (int i = 0; i < 32; i++) top = fmaxf(top, fabsf(x[b * 32 + i]));
        uint16_t d = kvp__f32_to_f16(top / 127);
        float scale = kvp__f16_to_f32(d);
        memcpy(out + 34 * b, &d, 2);
        for (int i = 0; i < 32; i++) {
            float q = scale > 0 ? roundf(x[b * 32 + i] / scale) : 0;
            q = fminf(fmaxf(q, -127), 127);
            ((int8_t *)out)[34 * b + 2 + i] = (int8_t)q;
            x[b * 32 + i] = q * scale;
        }
    }
}

static const kvp__tensor *tensor(tiny *t, kvp__type type, uint32_t in, uint32_t out, float scale,
                                 float base)
{
    uint64_t n = (uint64_t)in * (out ? out : 1), i = t->m.n_tensors++;
    assert_true(i < MAX_TENSORS);
    float *x = t->floats[i] = malloc(n * sizeof *x);
    for (uint64_t e = 0; e < n; e++) x[e] = base + gauss() * scale;
    kvp__tensor *to = &t->tensors[i];
    to->name = "tensor";
    to->type = type;
    to->n_dims = out ? 2 : 1;
    to->dims[0] = in;
    to->dims[1] = out ? out : 1;
    to->dims[2] = to->dims[3] = 1;
    to->offset = t->used;
    to->bytes = type == KVP__F32 ? n * 4 : type == KVP__F16 ? n * 2 : n / 32 * 34;
    t->data = realloc(t->data, t->used + to->bytes);
    encode(type, x, n, t->data + t->used);
    t->used += to->bytes;
    return to;
}

static const float *values(const tiny *t, const kvp__tensor *of)
{
    return of ? t->floats[of - t->tensors] : NULL;
}

static void fill_layer(tiny *t, kvp__layer *l, uint32_t index)
{
    const settings *s = &t->s;
    uint32_t q = s->query_heads * s->key_dim, k = s->kv_heads * s->key_dim;
    uint32_t v = s->kv_heads * s->value_dim, o = s->query_heads * s->value_dim;
    float w = 1.0f / sqrtf((float)s->width);
    l->attn_norm = tensor(t, KVP__F32, s->width, 0, 0.2f, 1);
    l->ffn_norm = tensor(t, KVP__F32, s->width, 0, 0.2f, 1);
    l->q = tensor(t, s->type, s->width, q, 2 * w, 0);
    l->k = tensor(t, s->type, s->width, k, 2 * w, 0);
    l->v = tensor(t, s->type, s->width, v, w, 0);
    l->o = tensor(t, s->type, o, s->width, 1.0f / sqrtf((float)o), 0);
    l->gate = tensor(t, s->type, s->width, s->feed_forward, w, 0);
    l->up = tensor(t, s->type, s->width, s->feed_forward, w, 0);
    l->down = tensor(t, s->type, s->feed_forward, s->width,
                     1.0f / sqrtf((float)s->feed_forward), 0);
    if (s->biases) {
        l->q_bias = tensor(t, KVP__F32, q, 0, 0.3f, 0);
        l->k_bias = tensor(t, KVP__F16, k, 0, 0.3f, 0);
        l->v_bias = tensor(t, KVP__F32, v, 0, 0.3f, 0);
        l->o_bias = tensor(t, KVP__F32, s->width, 0, 0.3f, 0);
    }
    if (s->head_norms) {
        l->q_norm = tensor(t, KVP__F32, s->key_dim, 0, 0.2f, 1);
        l->k_norm = tensor(t, KVP__F32, s->key_dim, 0, 0.2f, 1);
    }
    if (s->post_norms) {
        l->post_attn_norm = tensor(t, KVP__F32, s->width, 0, 0.2f, 1);
        l->post_ffn_norm = tensor(t, KVP__F32, s->width, 0, 0.2f, 1);
    }
    l->kv_heads = s->kv_heads;
    l->window = index % 3 == 2 ? 0 : s->window;
    l->rope = s->window && l->window == 0; /* layers that see everything have their own rope */
}

static void fill_geometry(tiny *t)
{
    const settings *s = &t->s;
    kvp_layer_group g[2];
    uint8_t of[MAX_LAYERS];
    memset(g, 0, sizeof g);
    for (uint32_t l = 0; l < s->layers; l++) {
        of[l] = s->window && t->layers[l].window == 0;
        g[of[l]] = (kvp_layer_group){g[of[l]].layers + 1, s->kv_heads, s->key_dim, s->value_dim,
                                     t->layers[l].window, s->query_heads};
    }
    kvp_geometry in;
    memset(&in, 0, sizeof in);
    in.size = sizeof in;
    in.n_groups = g[1].layers ? 2 : 1;
    in.groups = g;
    in.layer_groups = of;
    in.vocabulary = s->vocabulary;
    assert_int_equal(kvp__geometry_fill(&t->m.geometry, &in, NULL), KVP_OK);
}

static tiny *tiny_make(const settings *s)
{
    tiny *t = calloc(1, sizeof *t);
    kvp__arch *a = &t->m.arch;
    t->s = *s;
    t->fail_reads_after = -1;
    t->m.hooks = hooks;
    t->m.tensors = t->tensors;
    t->m.activations = s->activations;
    a->n_layers = s->layers;
    a->width = s->width;
    a->feed_forward = s->feed_forward;
    a->query_heads = s->query_heads;
    a->key_dim = s->key_dim;
    a->value_dim = s->value_dim;
    a->vocabulary = s->vocabulary;
    a->norm_eps = 1e-5f;
    a->embedding_scale = s->embedding_scale != 0 ? s->embedding_scale : 1;
    a->attention_scale = 1.0f / sqrtf((float)s->key_dim);
    a->attention_softcap = s->softcap;
    a->logit_softcap = s->logit_softcap;
    a->activation = s->gelu ? KVP__GELU_TANH : KVP__SILU;
    a->layers = t->layers;
    a->n_ropes = 2;
    for (uint32_t r = 0; r < 2; r++) {
        for (uint32_t i = 0; i < s->rope_dim / 2; i++)
            t->inv_freq[r][i] = pow(r ? 1e6 : 1e4, -2.0 * i / s->rope_dim);
        a->ropes[r] = (kvp__rope){s->rope, s->rope_dim, r ? 1.25f : 1.0f, t->inv_freq[r]};
    }
    a->token_embedding = tensor(t, s->type, s->width, s->vocabulary, 1, 0);
    for (uint32_t l = 0; l < s->layers; l++) fill_layer(t, &t->layers[l], l);
    a->output_norm = tensor(t, KVP__F32, s->width, 0, 0.2f, 1);
    a->output = s->tied ? a->token_embedding
                        : tensor(t, s->type, s->width, s->vocabulary, 0.3f, 0);
    fill_geometry(t);
    t->m.source = (kvp__source){.user = t, .bytes = t->used, .read = read_data};
    return t;
}

static void tiny_free(tiny *t)
{
    for (uint64_t i = 0; i < t->m.n_tensors; i++) free(t->floats[i]);
    free(t->data);
    free(t);
}

/* --- the oracle --- */

static void mat_vec(const float *w, uint32_t out, uint32_t in, const double *x, double *y)
{
    for (uint32_t o = 0; o < out; o++) {
        y[o] = 0;
        for (uint32_t i = 0; i < in; i++) y[o] += (double)w[(size_t)o * in + i] * x[i];
    }
}

static void rms(const double *x, const float *w, uint32_t n, double *y)
{
    double ss = 0;
    for (uint32_t i = 0; i < n; i++) ss += x[i] * x[i];
    double f = 1 / sqrt(ss / n + 1e-5);
    for (uint32_t i = 0; i < n; i++) y[i] = x[i] * f * (double)w[i];
}

static void plus(double *y, const float *b, uint32_t n)
{
    for (uint32_t i = 0; b && i < n; i++) y[i] += (double)b[i];
}

static void turn(const tiny *t, uint32_t rope, double *x, uint32_t heads, uint32_t p)
{
    const kvp__rope *r = &t->m.arch.ropes[rope];
    for (uint32_t h = 0; h < heads && r->kind != KVP__ROPE_NONE; h++, x += t->s.key_dim)
        for (uint32_t i = 0; i < r->dim / 2; i++) {
            uint32_t a = r->kind == KVP__ROPE_PAIRS ? 2 * i : i;
            uint32_t b = r->kind == KVP__ROPE_PAIRS ? 2 * i + 1 : i + r->dim / 2;
            double c = cos(p * r->inv_freq[i]) * (double)r->magnitude;
            double s = sin(p * r->inv_freq[i]) * (double)r->magnitude, u = x[a], v = x[b];
            x[a] = u * c - v * s;
            x[b] = v * c + u * s;
        }
}

static void heads_norm(double *x, const float *w, uint32_t heads, uint32_t dim)
{
    for (uint32_t h = 0; w && h < heads; h++) rms(x + h * dim, w, dim, x + h * dim);
}

static void attend_naive(const tiny *t, const kvp__layer *l, const double *q, const double *k,
                         const double *v, uint32_t p, double *out)
{
    const settings *s = &t->s;
    double *e = malloc((p + 1) * sizeof *e);
    uint32_t lo = l->window && p + 1 > l->window ? p + 1 - l->window : 0;
    for (uint32_t h = 0; h < s->query_heads; h++) {
        uint32_t g = h / (s->query_heads / s->kv_heads);
        double sum = 0, *o = out + h * s->value_dim;
        for (uint32_t i = lo; i <= p; i++) {
            double dot = 0;
            for (uint32_t d = 0; d < s->key_dim; d++)
                dot += q[h * s->key_dim + d] * k[((size_t)i * s->kv_heads + g) * s->key_dim + d];
            dot *= (double)t->m.arch.attention_scale;
            if (s->softcap != 0) dot = (double)s->softcap * tanh(dot / (double)s->softcap);
            e[i] = exp(dot);
            sum += e[i];
        }
        for (uint32_t d = 0; d < s->value_dim; d++) {
            o[d] = 0;
            for (uint32_t i = lo; i <= p; i++)
                o[d] += e[i] / sum * v[((size_t)i * s->kv_heads + g) * s->value_dim + d];
        }
    }
    free(e);
}

/* Logits of all positions, [n][vocabulary]. */
static double *oracle(const tiny *t, const int32_t *tokens, uint32_t n)
{
    const settings *s = &t->s;
    uint32_t W = s->width, F = s->feed_forward, Q = s->query_heads * s->key_dim;
    uint32_t K = s->kv_heads * s->key_dim, V = s->kv_heads * s->value_dim;
    uint32_t O = s->query_heads * s->value_dim;
    double *x = calloc((size_t)n * W, sizeof *x), *y = calloc(W, sizeof *y);
    double *k = calloc((size_t)n * K, sizeof *k), *v = calloc((size_t)n * V, sizeof *v);
    double *q = calloc(Q, sizeof *q), *o = calloc(O, sizeof *o), *z = calloc(W, sizeof *z);
    double *g = calloc(F, sizeof *g), *u = calloc(F, sizeof *u);
    double *logits = calloc((size_t)n * s->vocabulary, sizeof *logits);
    const float *emb = values(t, t->m.arch.token_embedding);
    for (uint32_t p = 0; p < n; p++)
        for (uint32_t i = 0; i < W; i++)
            x[(size_t)p * W + i] = (double)emb[(size_t)tokens[p] * W + i] *
                                   (double)t->m.arch.embedding_scale;
    for (uint32_t li = 0; li < s->layers; li++) {
        const kvp__layer *l = &t->layers[li];
        for (uint32_t p = 0; p < n; p++) {
            double *xp = x + (size_t)p * W, *kp = k + (size_t)p * K, *vp = v + (size_t)p * V;
            rms(xp, values(t, l->attn_norm), W, y);
            mat_vec(values(t, l->q), Q, W, y, q);
            mat_vec(values(t, l->k), K, W, y, kp);
            mat_vec(values(t, l->v), V, W, y, vp);
            plus(q, values(t, l->q_bias), Q);
            plus(kp, values(t, l->k_bias), K);
            plus(vp, values(t, l->v_bias), V);
            heads_norm(q, values(t, l->q_norm), s->query_heads, s->key_dim);
            heads_norm(kp, values(t, l->k_norm), s->kv_heads, s->key_dim);
            turn(t, l->rope, q, s->query_heads, p);
            turn(t, l->rope, kp, s->kv_heads, p);
            attend_naive(t, l, q, k, v, p, o);
            mat_vec(values(t, l->o), W, O, o, y);
            plus(y, values(t, l->o_bias), W);
            if (l->post_attn_norm) rms(y, values(t, l->post_attn_norm), W, y);
            for (uint32_t i = 0; i < W; i++) xp[i] += y[i];
            rms(xp, values(t, l->ffn_norm), W, y);
            mat_vec(values(t, l->gate), F, W, y, g);
            mat_vec(values(t, l->up), F, W, y, u);
            for (uint32_t i = 0; i < F; i++) {
                double a = s->gelu ? 0.5 * g[i] * (1 + tanh(0.7978845608028654 *
                                                            (g[i] + 0.044715 * g[i] * g[i] * g[i])))
                                   : g[i] / (1 + exp(-g[i]));
                u[i] *= a;
            }
            mat_vec(values(t, l->down), W, F, u, z);
            if (l->post_ffn_norm) rms(z, values(t, l->post_ffn_norm), W, z);
            for (uint32_t i = 0; i < W; i++) xp[i] += z[i];
        }
    }
    for (uint32_t p = 0; p < n; p++) {
        double *to = logits + (size_t)p * s->vocabulary;
        rms(x + (size_t)p * W, values(t, t->m.arch.output_norm), W, y);
        mat_vec(values(t, t->m.arch.output), s->vocabulary, W, y, to);
        for (uint32_t i = 0; i < s->vocabulary && s->logit_softcap != 0; i++)
            to[i] = (double)s->logit_softcap * tanh(to[i] / (double)s->logit_softcap);
    }
    free(x), free(y), free(k), free(v), free(q), free(o), free(z), free(g), free(u);
    return logits;
}

/* --- running steps --- */

enum { MAX_SEQS = 5, MAX_BLOCKS = 400 };

typedef struct how {
    int32_t threads;   /* 0: inline */
    uint32_t block, k_format, v_format, level;
    uint32_t max_rows;
} how;

typedef struct rig {
    const tiny *t;
    how h;
    kvp__weights *weights;
    kvp__store *store;
    kvp__team *team;
    kvp__runner *runner;
    kvp__layout layout;
    kvp__model model; /* a copy with its own level cap */
    uint32_t next_block;
    uint32_t tables[MAX_SEQS][2][MAX_BLOCKS];
    uint32_t length[MAX_SEQS];
    /* of the step under way */
    float *logits;
    uint32_t posts;
    _Atomic uint32_t done;
} rig;

static void rig_open(rig *r, const tiny *t, how h)
{
    memset(r, 0, sizeof *r);
    r->t = t;
    r->h = h;
    r->model = t->m;
    r->model.cpu_level = h.level;
    kvp__place place = {.threads = KVP_THREADS_INLINE};
    assert_int_equal(cpu->place(&r->model, &place, &r->weights, NULL), KVP_OK);
    assert_int_equal(kvp__layout_make(&r->layout, &r->model.geometry, h.block, h.k_format,
                                      h.v_format, MAX_BLOCKS, NULL), KVP_OK);
    assert_int_equal(cpu->store_create(&hooks, &r->layout, NULL, 0, &r->store, NULL), KVP_OK);
    for (uint32_t g = 0; g < r->layout.n_groups; g++)
        for (uint32_t b = 0; b < MAX_BLOCKS; b++) cpu->poison(r->store, g, b, 0);
    if (h.threads)
        assert_int_equal(kvp__team_create(&r->team, &hooks, h.threads, KVP__SCRATCH_BYTES, NULL),
                         KVP_OK);
    kvp__runner_options o = {&hooks, &r->model, r->weights, r->store, r->team, NULL,
                             h.max_rows ? h.max_rows : 200, MAX_SEQS, 200, 2000};
    assert_int_equal(cpu->runner_create(&o, &r->runner, NULL), KVP_OK);
    r->next_block = 1;
}

static void rig_close(rig *r)
{
    cpu->runner_destroy(r->runner);
    cpu->store_destroy(r->store);
    cpu->unplace(r->weights);
    if (r->team) kvp__team_release(r->team);
}

/* Block ids scattered over the pool, other ones for each group. */
static uint32_t new_block(rig *r) { return r->next_block = (r->next_block * 3u) % 401u; }

static void grow(rig *r, uint32_t seq, uint32_t length)
{
    uint32_t have = (r->length[seq] + r->h.block - 1) / r->h.block;
    uint32_t want = (length + r->h.block - 1) / r->h.block;
    for (; have < want; have++)
        for (uint32_t g = 0; g < r->layout.n_groups; g++) r->tables[seq][g][have] = new_block(r) - 1;
}

static void take_logits(void *user, uint32_t i, float *logits, void *scratch)
{
    rig *r = user;
    uint32_t n = r->t->s.vocabulary;
    assert_non_null(scratch);
    memcpy(r->logits + (size_t)i * n, logits, n * sizeof *logits);
    __atomic_fetch_add(&r->posts, 1, __ATOMIC_RELAXED);
}

static void step_over(void *user) { atomic_store(&((rig *)user)->done, 1); }

typedef struct share {
    uint32_t seq;
    const int32_t *tokens;
    uint32_t n;
} share;

/* One step; logits of every row, in order. */
static void step(rig *r, const share *shares, uint32_t n_shares, float *logits)
{
    static int32_t tokens[200];
    static uint32_t positions[200], outputs[200];
    kvp__work_seq seqs[MAX_SEQS];
    memset(seqs, 0, sizeof seqs);
    uint32_t rows = 0;
    for (uint32_t i = 0; i < n_shares; i++) {
        const share *sh = &shares[i];
        grow(r, sh->seq, r->length[sh->seq] + sh->n);
        seqs[i].first_row = rows;
        seqs[i].n_rows = sh->n;
        seqs[i].first_pos = r->length[sh->seq];
        r->length[sh->seq] += sh->n;
        seqs[i].n_blocks = (r->length[sh->seq] + r->h.block - 1) / r->h.block;
        for (uint32_t g = 0; g < r->layout.n_groups; g++)
            seqs[i].tables[g] = r->tables[sh->seq][g];
        for (uint32_t k = 0; k < sh->n; k++, rows++) {
            tokens[rows] = sh->tokens[k];
            positions[rows] = seqs[i].first_pos + k;
            outputs[rows] = rows;
        }
    }
    kvp__work w;
    memset(&w, 0, sizeof w);
    w.n_rows = w.n_outputs = rows;
    w.n_seqs = n_shares;
    w.tokens = tokens;
    w.positions = positions;
    w.outputs = outputs;
    w.seqs = seqs;
    w.post = take_logits;
    w.done = step_over;
    w.user = r;
    r->logits = logits;
    r->posts = 0;
    atomic_store(&r->done, 0);
    assert_int_equal(cpu->prepare(r->runner, &w), KVP_OK);
    assert_int_equal(cpu->launch(r->runner), KVP_OK);
    while (cpu->poll(r->runner) == KVP_AGAIN) {
        cpu->advance(r->runner, kvp__now(&hooks) + 100000);
        sched_yield();
    }
    assert_int_equal(atomic_load(&r->done), 1);
    assert_int_equal(r->posts, rows);
}

static const settings plain = {3, 64, 96, 4, 2, 16, 16, 70, 0, KVP__F32, false, false, false, false,
                               false, KVP__ROPE_PAIRS, 16, 0, 0, 0, KVP_ACTIVATIONS_F32};

/* --- right --- */

static void check_against_oracle(settings s, const char *what)
{
    tiny *t = tiny_make(&s);
    rig *r = malloc(sizeof *r);
    enum { N = 40 };
    int32_t tokens[N];
    for (int i = 0; i < N; i++) tokens[i] = (int32_t)rnd(s.vocabulary);
    float *got = malloc((size_t)N * s.vocabulary * sizeof *got);
    double *want = oracle(t, tokens, N), top = 0, err = 0;
    rig_open(r, t, (how){0, 16, KVP_KV_F32, KVP_KV_F32, 0, 0});
    step(r, &(share){0, tokens, N}, 1, got);
    for (size_t i = 0; i < (size_t)N * s.vocabulary; i++) {
        top = fmax(top, fabs(want[i]));
        double d = fabs((double)got[i] - want[i]);
        if (!(d <= err)) err = d;
    }
    if (!(err <= 2e-5 * top)) fail_msg("%s: error %g of %g", what, err, top);
    rig_close(r);
    free(r);
    free(got);
    free(want);
    tiny_free(t);
}

static void every_setting_is_right(void **state)
{
    (void)state;
    settings s = plain;
    check_against_oracle(s, "plain");
    s.rope = KVP__ROPE_HALVES, s.rope_dim = 8;
    check_against_oracle(s, "half rotation of half a head");
    s.rope = KVP__ROPE_NONE;
    check_against_oracle(s, "no rope");
    s = plain, s.biases = true;
    check_against_oracle(s, "biases");
    s = plain, s.head_norms = true;
    check_against_oracle(s, "head norms");
    s = plain, s.post_norms = s.gelu = s.tied = true, s.embedding_scale = 8;
    check_against_oracle(s, "post norms, gelu, tied, scaled embedding");
    s = plain, s.window = 7;
    check_against_oracle(s, "windows and two ropes");
    s = plain, s.softcap = 3, s.logit_softcap = 5;
    check_against_oracle(s, "soft caps");
    s = plain, s.key_dim = 24, s.value_dim = 10, s.width = 50, s.feed_forward = 37, s.rope_dim = 24;
    check_against_oracle(s, "odd sizes");
    s = plain, s.query_heads = s.kv_heads = 1, s.vocabulary = 5;
    check_against_oracle(s, "one head");
    s = plain, s.type = KVP__F16;
    check_against_oracle(s, "F16 weights");
    s = plain, s.type = KVP__Q8_0;
    check_against_oracle(s, "Q8_0 weights, 32-bit products");
    s = (settings){4, 64, 96, 6, 3, 32, 32, 70, 9, KVP__Q8_0, true, true, true, true, true,
                   KVP__ROPE_HALVES, 32, 2, 9, 7, KVP_ACTIVATIONS_F32};
    check_against_oracle(s, "everything");
}

static void int8_activations_are_close(void **state)
{
    (void)state;
    settings s = plain;
    s.type = KVP__Q8_0;
    s.activations = KVP_ACTIVATIONS_INT8;
    tiny *t = tiny_make(&s);
    rig *r = malloc(sizeof *r);
    int32_t tokens[20];
    for (int i = 0; i < 20; i++) tokens[i] = (int32_t)rnd(s.vocabulary);
    float *got = malloc((size_t)20 * s.vocabulary * sizeof *got);
    double *want = oracle(t, tokens, 20), diff = 0, norm = 0;
    rig_open(r, t, (how){0, 16, KVP_KV_F32, KVP_KV_F32, 0, 0});
    step(r, &(share){0, tokens, 20}, 1, got);
    for (size_t i = 0; i < (size_t)20 * s.vocabulary; i++) {
        diff += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        norm += want[i] * want[i];
    }
    double error = sqrt(diff / norm);
    assert_true(error > 1e-6 && error < 0.03); /* it is 8-bit, and not more than that */
    rig_close(r);
    free(r);
    free(got);
    free(want);
    tiny_free(t);
}

/* --- the same bits --- */

static const settings real_kind = {3, 96, 160, 6, 2, 32, 32, 90, 20, KVP__Q8_0, true, true, true,
                                   true, false, KVP__ROPE_HALVES, 32, 0, 0, 0,
                                   KVP_ACTIVATIONS_INT8};

enum { LENGTH = 75 };

static void alone(const tiny *t, const int32_t *tokens, how h, float *out)
{
    rig *r = malloc(sizeof *r);
    rig_open(r, t, h);
    step(r, &(share){0, tokens, LENGTH}, 1, out);
    rig_close(r);
    free(r);
}

static void fill_tokens(int32_t tokens[MAX_SEQS][LENGTH], uint32_t vocabulary)
{
    for (int s = 0; s < MAX_SEQS; s++)
        for (int i = 0; i < LENGTH; i++) tokens[s][i] = (int32_t)rnd(vocabulary);
}

/* Random steps until every sequence is at its end. */
static void random_schedule(rig *r, int32_t tokens[MAX_SEQS][LENGTH], float *want[MAX_SEQS])
{
    uint32_t vocabulary = r->t->s.vocabulary;
    float *got = malloc((size_t)200 * vocabulary * sizeof *got);
    for (;;) {
        share sh[MAX_SEQS];
        uint32_t from[MAX_SEQS], n = 0, rows = 0;
        for (uint32_t s = 0; s < MAX_SEQS; s++) {
            uint32_t left = LENGTH - r->length[s], k = rnd(3) ? 1 : 1 + rnd(30);
            if (!left || rnd(3) == 0) continue;
            if (k > left) k = left;
            from[n] = r->length[s];
            sh[n++] = (share){s, tokens[s] + r->length[s], k};
            rows += k;
        }
        if (n) step(r, sh, n, got);
        const float *at = got;
        for (uint32_t i = 0; i < n; i++) {
            assert_memory_equal(at, want[sh[i].seq] + (size_t)from[i] * vocabulary,
                                sh[i].n * vocabulary * sizeof *at);
            at += (size_t)sh[i].n * vocabulary;
        }
        uint32_t ended = 0;
        for (uint32_t s = 0; s < MAX_SEQS; s++) ended += r->length[s] == LENGTH;
        if (ended == MAX_SEQS) break;
    }
    free(got);
}

static void schedules_do_not_show(void **state)
{
    (void)state;
    static const uint32_t levels[] = {0, KVP_CPU_GENERIC, KVP_CPU_AVX2, KVP_CPU_AVX512,
                                      KVP_CPU_NEON};
    static int32_t tokens[MAX_SEQS][LENGTH];
    for (int f = 0; f < 3; f++) {
        settings s = real_kind;
        s.post_norms = f == 1;
        s.type = f == 2 ? KVP__F16 : KVP__Q8_0;
        uint32_t kf = f == 1 ? KVP_KV_BF16 : KVP_KV_F16;
        tiny *t = tiny_make(&s);
        float *want[MAX_SEQS];
        fill_tokens(tokens, s.vocabulary);
        for (int i = 0; i < MAX_SEQS; i++) {
            want[i] = malloc((size_t)LENGTH * s.vocabulary * sizeof(float));
            alone(t, tokens[i], (how){0, 16, kf, KVP_KV_F16, 0, 0}, want[i]);
        }
        for (uint32_t i = 0; i < 12; i++) {
            rig *r = malloc(sizeof *r);
            uint32_t level = levels[i % KVP__COUNT(levels)];
            rig_open(r, t, (how){(int32_t)(i % 4), 4u << (i + i / 4) % 5, kf, KVP_KV_F16, level, 0});
            random_schedule(r, tokens, want);
            rig_close(r);
            free(r);
        }
        for (int i = 0; i < MAX_SEQS; i++) free(want[i]);
        tiny_free(t);
    }
}

/* Wide enough that stages are cut into blocks of rows and into parts, in each of the three ways. */
static void cuts_do_not_show(void **state)
{
    (void)state;
    settings s = real_kind;
    s.layers = 1;
    s.window = 0;
    tiny *t = tiny_make(&s);
    enum { N = 200 };
    static int32_t tokens[N];
    for (int i = 0; i < N; i++) tokens[i] = (int32_t)rnd(s.vocabulary);
    float *want = malloc((size_t)N * s.vocabulary * sizeof *want), *got = malloc(
        (size_t)N * s.vocabulary * sizeof *got);
    static const uint32_t pieces[] = {200, 1, 2, 4, 5, 16, 17, 64, 100};
    for (int32_t threads = 0; threads <= 3; threads++)
        for (unsigned p = 0; p < KVP__COUNT(pieces); p++) {
            rig *r = malloc(sizeof *r);
            rig_open(r, t, (how){threads, 16, KVP_KV_F16, KVP_KV_F16, 0, 0});
            float *to = threads || p ? got : want;
            for (uint32_t at = 0, n; at < N; at += n) {
                n = pieces[p] < N - at ? pieces[p] : N - at;
                step(r, &(share){0, tokens + at, n}, 1, to + (size_t)at * s.vocabulary);
            }
            assert_memory_equal(to, want, (size_t)N * s.vocabulary * sizeof *want);
            rig_close(r);
            free(r);
        }
    free(want);
    free(got);
    tiny_free(t);
}

static void odd_float_state(bool on)
{
    fesetround(on ? FE_UPWARD : FE_TONEAREST);
#if defined(__x86_64__)
    unsigned u = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(on ? u | 0x8040u : u & ~0x8040u); /* and denormals flushed */
#endif
}

static void the_hosts_float_state_does_not_show(void **state)
{
    (void)state;
    settings s = real_kind;
    tiny *t = tiny_make(&s);
    static int32_t tokens[MAX_SEQS][LENGTH];
    fill_tokens(tokens, s.vocabulary);
    size_t bytes = (size_t)LENGTH * s.vocabulary * sizeof(float);
    float *want = malloc(bytes), *got = malloc(bytes);
    alone(t, tokens[0], (how){0, 16, KVP_KV_F16, KVP_KV_F16, 0, 0}, want);
    for (int32_t threads = 0; threads < 2; threads++) {
        odd_float_state(true);
        alone(t, tokens[0], (how){threads, 16, KVP_KV_F16, KVP_KV_F16, 0, 0}, got);
        odd_float_state(false);
        assert_memory_equal(got, want, bytes);
    }
    free(want);
    free(got);
    tiny_free(t);
}

/* --- outputs, copies, cancel --- */

/* In any order, of many rows or few: the bits of each row with all of them wanted. */
static void only_wanted_rows_are_posted(void **state)
{
    (void)state;
    static const struct {
        uint32_t n, rows[16];
    } wanted[] = {{0, {0}}, {3, {29, 0, 17}}, {3, {0, 17, 29}}, {1, {29}}, {1, {0}}, {2, {28, 29}},
                  {14, {0, 1, 2, 3, 5, 8, 9, 13, 20, 21, 25, 26, 27, 29}},
                  {16, {0, 1, 2, 3, 5, 8, 9, 13, 15, 17, 20, 21, 25, 26, 27, 29}}};
    for (int family = 0; family < 2; family++)
        for (int32_t threads = 0; threads < 3; threads++) {
            settings s = family ? real_kind : plain;
            tiny *t = tiny_make(&s);
            rig *r = malloc(sizeof *r);
            enum { N = 30 };
            int32_t tokens[N];
            uint32_t positions[N];
            for (int i = 0; i < N; i++)
                tokens[i] = (int32_t)rnd(s.vocabulary), positions[i] = (uint32_t)i;
            size_t row = s.vocabulary * sizeof(float);
            float *all = malloc(N * row), *some = malloc(16 * row);
            rig_open(r, t, (how){threads, 16, KVP_KV_F16, KVP_KV_F16, 0, 0});
            step(r, &(share){0, tokens, N}, 1, all);
            kvp__work_seq seq;
            memset(&seq, 0, sizeof seq);
            seq.n_rows = N;
            seq.n_blocks = 2;
            for (int g = 0; g < 2; g++) seq.tables[g] = r->tables[0][g];
            for (unsigned k = 0; k < KVP__COUNT(wanted); k++) {
                kvp__work w;
                memset(&w, 0, sizeof w);
                w.n_rows = N;
                w.n_seqs = 1;
                w.n_outputs = wanted[k].n;
                w.tokens = tokens;
                w.positions = positions;
                w.outputs = wanted[k].rows;
                w.seqs = &seq;
                w.post = take_logits;
                w.done = step_over;
                w.user = r;
                r->logits = some;
                r->posts = 0;
                memset(some, 0xee, 16 * row);
                assert_int_equal(cpu->prepare(r->runner, &w), KVP_OK);
                assert_int_equal(cpu->launch(r->runner), KVP_OK);
                while (cpu->poll(r->runner) == KVP_AGAIN)
                    if (threads) sched_yield();
                    else cpu->advance(r->runner, UINT64_MAX);
                assert_int_equal(r->posts, w.n_outputs);
                for (uint32_t i = 0; i < w.n_outputs; i++)
                    assert_memory_equal((char *)some + i * row,
                                        (char *)all + wanted[k].rows[i] * row, row);
            }
            rig_close(r);
            free(r);
            free(all);
            free(some);
            tiny_free(t);
        }
}

/* A fork inside a block: the copy is done before the step's rows are stored. */
static void copies_come_first(void **state)
{
    (void)state;
    settings s = plain;
    tiny *t = tiny_make(&s);
    rig *r = malloc(sizeof *r);
    int32_t tokens[24];
    for (int i = 0; i < 24; i++) tokens[i] = (int32_t)rnd(s.vocabulary);
    float *want = malloc((size_t)24 * s.vocabulary * sizeof *want);
    float *got = malloc((size_t)24 * s.vocabulary * sizeof *got);
    rig_open(r, t, (how){2, 16, KVP_KV_F16, KVP_KV_F16, 0, 0});
    step(r, &(share){0, tokens, 24}, 1, want);

    uint32_t forked[2] = {r->tables[0][0][0], new_block(r) - 1}, position = 23, output = 0;
    kvp__copy copy = {0, r->tables[0][0][1], forked[1], 7};
    kvp__work_seq seq;
    memset(&seq, 0, sizeof seq);
    seq.n_rows = 1;
    seq.first_pos = 23;
    seq.n_blocks = 2;
    seq.tables[0] = forked;
    kvp__work w;
    memset(&w, 0, sizeof w);
    w.n_rows = w.n_seqs = w.n_outputs = w.n_copies = 1;
    w.tokens = tokens + 23;
    w.positions = &position;
    w.outputs = &output;
    w.seqs = &seq;
    w.copies = &copy;
    w.post = take_logits;
    w.user = r;
    r->logits = got;
    assert_int_equal(cpu->prepare(r->runner, &w), KVP_OK);
    assert_int_equal(cpu->launch(r->runner), KVP_OK);
    while (cpu->poll(r->runner) == KVP_AGAIN) sched_yield();
    assert_memory_equal(got, want + (size_t)23 * s.vocabulary, s.vocabulary * sizeof *got);
    rig_close(r);
    free(r);
    free(want);
    free(got);
    tiny_free(t);
}

static void cancelled_steps_end(void **state)
{
    (void)state;
    settings s = real_kind;
    tiny *t = tiny_make(&s);
    rig *r = malloc(sizeof *r);
    enum { N = 100 };
    int32_t tokens[N];
    uint32_t positions[N], output = N - 1;
    for (int i = 0; i < N; i++) tokens[i] = (int32_t)rnd(s.vocabulary), positions[i] = (uint32_t)i;
    float *got = malloc(s.vocabulary * sizeof *got);
    rig_open(r, t, (how){0, 16, KVP_KV_F16, KVP_KV_F16, 0, 0});
    grow(r, 0, N);
    kvp__work_seq seq;
    memset(&seq, 0, sizeof seq);
    seq.n_rows = N;
    seq.n_blocks = 7;
    for (int g = 0; g < 2; g++) seq.tables[g] = r->tables[0][g];
    kvp__work w;
    memset(&w, 0, sizeof w);
    w.n_rows = N;
    w.n_seqs = w.n_outputs = 1;
    w.tokens = tokens;
    w.positions = positions;
    w.outputs = &output;
    w.seqs = &seq;
    w.post = take_logits;
    w.done = step_over;
    w.user = r;
    r->logits = got;
    assert_int_equal(cpu->prepare(r->runner, &w), KVP_OK);
    assert_int_equal(cpu->launch(r->runner), KVP_OK);
    cpu->advance(r->runner, 1); /* one chunk */
    assert_int_equal(cpu->poll(r->runner), KVP_AGAIN);
    assert_int_equal(atomic_load(&r->done), 0);
    cpu->cancel(r->runner);
    cpu->advance(r->runner, 0);
    assert_int_equal(cpu->poll(r->runner), KVP_OK);
    assert_int_equal(atomic_load(&r->done), 1);
    assert_int_equal(r->posts, 0);
    rig_close(r);
    free(r);
    free(got);
    tiny_free(t);
}

/* --- placing --- */

static int32_t progress_left;
static int32_t count_down(void *user, uint64_t done, uint64_t total)
{
    (void)user;
    assert_true(done <= total);
    return progress_left-- == 0;
}

static void placing(void **state)
{
    (void)state;
    settings s = real_kind;
    tiny *t = tiny_make(&s);
    kvp__weights *one = NULL, *two = NULL, *none = NULL;
    kvp_error err;
    memset(&err, 0, sizeof err);
    err.size = sizeof err;
    kvp__place inline_place = {.threads = KVP_THREADS_INLINE};
    kvp__place with_two = {.threads = 2, .progress = count_down};
    progress_left = -1;
    assert_int_equal(cpu->place(&t->m, &inline_place, &one, NULL), KVP_OK);
    assert_int_equal(cpu->place(&t->m, &with_two, &two, NULL), KVP_OK);
    assert_int_equal(one->bytes, cpu->packed_bytes(&t->m));
    assert_int_equal(two->bytes, one->bytes);
    assert_memory_equal(one->memory, two->memory, one->bytes);
    cpu->unplace(one);
    cpu->unplace(two);

    for (progress_left = 0; progress_left < 5;) {
        int32_t before = progress_left;
        assert_int_equal(cpu->place(&t->m, &with_two, &none, &err), KVP_ERR_CANCELLED);
        progress_left = before + 1;
    }
    progress_left = -1;
    for (int n = 0; n < 8; n++) {
        t->fail_reads_after = n;
        assert_int_equal(cpu->place(&t->m, &inline_place, &none, &err), KVP_ERR_IO);
        assert_non_null(strstr(err.text, "tensor"));
    }
    t->fail_reads_after = -1;
    assert_null(none);
    t->tensors[3].type = 99;
    assert_int_equal(cpu->place(&t->m, &inline_place, &none, &err), KVP_ERR_UNSUPPORTED);
    tiny_free(t);
}

/* --- own model --- */

static void own_model_attends(void **state)
{
    (void)state;
    kvp__model m;
    memset(&m, 0, sizeof m);
    m.hooks = hooks;
    kvp_layer_group g = {2, 2, 8, 4, 0, 4};
    kvp_geometry in;
    memset(&in, 0, sizeof in);
    in.size = sizeof in;
    in.n_groups = 1;
    in.groups = &g;
    assert_int_equal(kvp__geometry_fill(&m.geometry, &in, NULL), KVP_OK);
    assert_int_equal(cpu->supports(&m.geometry, 4, KVP_KV_F32, KVP_KV_F32, 0, NULL), KVP_OK);
    kvp__layout l;
    assert_int_equal(kvp__layout_make(&l, &m.geometry, 4, KVP_KV_F32, KVP_KV_F32, 20, NULL), KVP_OK);
    enum { N = 13, PAD = 3 };
    float q[N][4][8 + PAD], k[N][2][8 + PAD], v[N][2][4 + PAD], out[N][4][4 + PAD];
    for (int i = 0; i < N; i++)
        for (int h = 0; h < 4; h++)
            for (int d = 0; d < 8; d++) {
                q[i][h][d] = gauss();
                if (h < 2) k[i][h][d] = gauss();
                if (h < 2 && d < 4) v[i][h][d] = gauss();
            }
    uint32_t table[4] = {7, 3, 19, 0};
    for (int threads = 0; threads < 3; threads++) {
        kvp__store *store;
        kvp__runner *runner;
        kvp__team *team = NULL;
        assert_int_equal(cpu->store_create(&hooks, &l, NULL, 0, &store, NULL), KVP_OK);
        if (threads)
            assert_int_equal(kvp__team_create(&team, &hooks, threads, KVP__SCRATCH_BYTES, NULL),
                             KVP_OK);
        kvp__runner_options o = {&hooks, &m, NULL, store, team, NULL, 16, 2, 2, 80};
        assert_int_equal(cpu->runner_create(&o, &runner, NULL), KVP_OK);
        kvp__work_seq seq;
        memset(&seq, 0, sizeof seq);
        seq.n_rows = N;
        seq.n_blocks = 4;
        seq.tables[0] = table;
        kvp__work w;
        memset(&w, 0, sizeof w);
        w.n_rows = N;
        w.n_seqs = 1;
        w.seqs = &seq;
        kvp__attend a = {1, KVP_KV_F32, 0.5f, 0, &q[0][0][0], &k[0][0][0], &v[0][0][0], &out[0][0][0],
                         sizeof q[0], sizeof q[0][0], sizeof k[0], sizeof k[0][0],
                         sizeof v[0], sizeof v[0][0], sizeof out[0], sizeof out[0][0]};
        memset(out, 0, sizeof out);
        assert_int_equal(cpu->attend(runner, &w, &a, NULL), KVP_OK);
        for (int i = 0; i < N; i++)
            for (int h = 0; h < 4; h++) {
                double e[N], sum = 0, want;
                for (int j = 0; j <= i; j++) {
                    double dot = 0;
                    for (int d = 0; d < 8; d++) dot += (double)q[i][h][d] * (double)k[j][h / 2][d];
                    sum += e[j] = exp(0.5 * dot);
                }
                for (int d = 0; d < 4; d++) {
                    want = 0;
                    for (int j = 0; j <= i; j++) want += e[j] / sum * (double)v[j][h / 2][d];
                    assert_true(fabs((double)out[i][h][d] - want) < 2e-6);
                }
                assert_true(out[i][h][4] == 0);
            }
        float pk[2][8], pv[2][4];
        cpu->peek(store, 0, 1, table[12 / 4], 0, &pk[0][0], &pv[0][0]);
        assert_memory_equal(pk[1], k[12][1], 8 * sizeof(float));
        assert_memory_equal(pv[1], v[12][1], 4 * sizeof(float));
        kvp__copy copy = {0, table[0], 11, 3};
        w.copies = &copy;
        w.n_copies = 1;
        assert_int_equal(cpu->begin(runner, &w, NULL), KVP_OK);
        cpu->peek(store, 0, 1, 11, 2, &pk[0][0], &pv[0][0]);
        assert_memory_equal(pk[0], k[2][0], 8 * sizeof(float));
        assert_memory_equal(pv[0], v[2][0], 4 * sizeof(float));
        cpu->runner_destroy(runner);
        cpu->store_destroy(store);
        if (team) assert_true(kvp__team_release(team));
    }
}

static void the_device_says_what_it_is(void **state)
{
    (void)state;
    kvp_device_info info;
    memset(&info, 0, sizeof info);
    cpu->describe(0, &info);
    assert_string_equal(info.name, "cpu");
    assert_int_equal(info.usable, 1);
    assert_int_equal(info.cpu_level, cpu->level(0));
    assert_true(info.threads > 0 && info.description[0]);
    assert_int_equal(cpu->count(), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_setting_is_right),
        cmocka_unit_test(int8_activations_are_close),
        cmocka_unit_test(schedules_do_not_show),
        cmocka_unit_test(cuts_do_not_show),
        cmocka_unit_test(the_hosts_float_state_does_not_show),
        cmocka_unit_test(only_wanted_rows_are_posted),
        cmocka_unit_test(copies_come_first),
        cmocka_unit_test(cancelled_steps_end),
        cmocka_unit_test(placing),
        cmocka_unit_test(own_model_attends),
        cmocka_unit_test(the_device_says_what_it_is),
    };
    return cmocka_run_group_tests_name("forward", tests, setup, NULL);
}
