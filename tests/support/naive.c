/* See naive.h. */
#include "naive.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct naive {
    const kvp__model *m;
    const kvp__arch *a;
    uint32_t n;
    double *x;              /* [n][width]: the residual stream */
    double *h, *q, *k, *v;  /* [n][...] */
    double *mixed, *up;
} naive;

static double *take(size_t count)
{
    double *p = calloc(count, sizeof *p);
    if (!p) exit(99);
    return p;
}

static float *floats(const kvp__model *m, const kvp__tensor *t)
{
    float *out = malloc((size_t)t->bytes);
    if (!out || t->type != KVP__F32 ||
        m->source.read(m->source.user, t->offset, out, (size_t)t->bytes) != 0)
        exit(99);
    return out;
}

/* out[r] = W in[r] + bias */
static void project(const naive *s, const kvp__tensor *w, const kvp__tensor *bias, const double *in,
                    double *out)
{
    size_t inputs = (size_t)w->dims[0], outputs = (size_t)w->dims[1];
    float *weights = floats(s->m, w), *b = bias ? floats(s->m, bias) : NULL;
    for (size_t r = 0; r < s->n; r++) {
        for (size_t o = 0; o < outputs; o++) {
            double sum = b ? (double)b[o] : 0;
            for (size_t i = 0; i < inputs; i++)
                sum += (double)weights[o * inputs + i] * in[r * inputs + i];
            out[r * outputs + o] = sum;
        }
    }
    free(weights);
    free(b);
}

/* RMS norm of `count` vectors; no tensor: a copy. */
static void norm(const naive *s, const kvp__tensor *w, size_t count, size_t dim, const double *in,
                 double *out)
{
    if (!w) {
        if (in != out) memcpy(out, in, count * dim * sizeof *out);
        return;
    }
    float *weights = floats(s->m, w);
    for (size_t r = 0; r < count; r++) {
        double sum = 0;
        for (size_t i = 0; i < dim; i++) sum += in[r * dim + i] * in[r * dim + i];
        double scale = 1 / sqrt(sum / (double)dim + (double)s->a->norm_eps);
        for (size_t i = 0; i < dim; i++) out[r * dim + i] = in[r * dim + i] * scale * (double)weights[i];
    }
    free(weights);
}

static void rotate(const kvp__rope *rope, uint32_t position, double *head)
{
    for (uint32_t i = 0; i < rope->dim / 2; i++) {
        bool pairs = rope->kind == KVP__ROPE_PAIRS;
        double *x = head + (pairs ? 2 * i : i), *y = pairs ? x + 1 : x + rope->dim / 2;
        double angle = position * rope->inv_freq[i], m = (double)rope->magnitude;
        double c = cos(angle) * m, d = sin(angle) * m, old = *x;
        *x = old * c - *y * d;
        *y = old * d + *y * c;
    }
}

static void attend_head(const naive *s, const kvp__layer *l, uint32_t row, uint32_t head)
{
    const kvp__arch *a = s->a;
    uint32_t kv = head / (a->query_heads / l->kv_heads);
    uint32_t first = l->window && row + 1 > l->window ? row + 1 - l->window : 0;
    const double *q = s->q + ((size_t)row * a->query_heads + head) * a->key_dim;
    double *out = s->mixed + ((size_t)row * a->query_heads + head) * a->value_dim;
    double *score = take(row + 1), top = -INFINITY, sum = 0;
    for (uint32_t t = first; t <= row; t++) {
        const double *k = s->k + ((size_t)t * l->kv_heads + kv) * a->key_dim;
        for (uint32_t i = 0; i < a->key_dim; i++) score[t] += q[i] * k[i];
        score[t] *= (double)a->attention_scale;
        double cap = (double)a->attention_softcap;
        if (cap > 0) score[t] = cap * tanh(score[t] / cap);
        top = fmax(top, score[t]);
    }
    for (uint32_t t = first; t <= row; t++) sum += score[t] = exp(score[t] - top);
    memset(out, 0, a->value_dim * sizeof *out);
    for (uint32_t t = first; t <= row; t++) {
        const double *v = s->v + ((size_t)t * l->kv_heads + kv) * a->value_dim;
        for (uint32_t i = 0; i < a->value_dim; i++) out[i] += score[t] / sum * v[i];
    }
    free(score);
}

static void add(const naive *s, const double *h)
{
    for (size_t i = 0; i < (size_t)s->n * s->a->width; i++) s->x[i] += h[i];
}

static void attention(const naive *s, const kvp__layer *l)
{
    const kvp__arch *a = s->a;
    const kvp__rope *rope = &a->ropes[l->rope];
    norm(s, l->attn_norm, s->n, a->width, s->x, s->h);
    project(s, l->q, l->q_bias, s->h, s->q);
    project(s, l->k, l->k_bias, s->h, s->k);
    project(s, l->v, l->v_bias, s->h, s->v);
    norm(s, l->q_norm, (size_t)s->n * a->query_heads, a->key_dim, s->q, s->q);
    norm(s, l->k_norm, (size_t)s->n * l->kv_heads, a->key_dim, s->k, s->k);
    for (uint32_t r = 0; r < s->n; r++) {
        for (uint32_t i = 0; i < a->query_heads; i++)
            rotate(rope, r, s->q + ((size_t)r * a->query_heads + i) * a->key_dim);
        for (uint32_t i = 0; i < l->kv_heads; i++)
            rotate(rope, r, s->k + ((size_t)r * l->kv_heads + i) * a->key_dim);
    }
    for (uint32_t r = 0; r < s->n; r++)
        for (uint32_t i = 0; i < a->query_heads; i++) attend_head(s, l, r, i);
    project(s, l->o, l->o_bias, s->mixed, s->h);
    norm(s, l->post_attn_norm, s->n, a->width, s->h, s->h);
    add(s, s->h);
}

static double activate(kvp__activation kind, double x)
{
    if (kind == KVP__SILU) return x / (1 + exp(-x));
    return 0.5 * x * (1 + tanh(sqrt(2 / acos(-1)) * (x + 0.044715 * x * x * x)));
}

static void feed_forward(const naive *s, const kvp__layer *l)
{
    const kvp__arch *a = s->a;
    double *gate = take((size_t)s->n * a->feed_forward);
    norm(s, l->ffn_norm, s->n, a->width, s->x, s->h);
    project(s, l->gate, NULL, s->h, gate);
    project(s, l->up, NULL, s->h, s->up);
    for (size_t i = 0; i < (size_t)s->n * a->feed_forward; i++)
        gate[i] = activate(a->activation, gate[i]) * s->up[i];
    project(s, l->down, NULL, gate, s->h);
    norm(s, l->post_ffn_norm, s->n, a->width, s->h, s->h);
    add(s, s->h);
    free(gate);
}

static void embed(const naive *s, const int32_t *tokens)
{
    size_t width = s->a->width;
    float *table = floats(s->m, s->a->token_embedding);
    for (size_t r = 0; r < s->n; r++)
        for (size_t i = 0; i < width; i++)
            s->x[r * width + i] = (double)table[(size_t)tokens[r] * width + i] *
                                  (double)s->a->embedding_scale;
    free(table);
}

void naive_logits(const kvp__model *m, const int32_t *tokens, uint32_t n, double *logits)
{
    const kvp__arch *a = &m->arch;
    naive s = {.m = m, .a = a, .n = n};
    s.x = take((size_t)n * a->width);
    s.h = take((size_t)n * a->width);
    s.q = take((size_t)n * a->query_heads * a->key_dim);
    s.k = take((size_t)n * a->query_heads * a->key_dim);
    s.v = take((size_t)n * a->query_heads * a->value_dim);
    s.mixed = take((size_t)n * a->query_heads * a->value_dim);
    s.up = take((size_t)n * a->feed_forward);
    embed(&s, tokens);
    for (uint32_t i = 0; i < a->n_layers; i++) {
        if (a->layers[i].kv_heads) attention(&s, &a->layers[i]);
        feed_forward(&s, &a->layers[i]);
    }
    norm(&s, a->output_norm, n, a->width, s.x, s.h);
    project(&s, a->output, NULL, s.h, logits);
    double cap = (double)a->logit_softcap;
    for (size_t i = 0; cap > 0 && i < (size_t)n * a->vocabulary; i++)
        logits[i] = cap * tanh(logits[i] / cap);
    double *all[] = {s.x, s.h, s.q, s.k, s.v, s.mixed, s.up};
    for (size_t i = 0; i < KVP__COUNT(all); i++) free(all[i]);
}
