/*
 * The descriptor: what a GGUF file says about its architecture, checked against itself and against the
 * tensors that are there. See arch.h and docs/internals/model.md.
 *
 * An architecture is a row of the table `families`, and a layer's tensors are rows of `parts`: a new
 * family is a new row, and code only where it does arithmetic that no other does. What is in the file
 * and not understood is refused by name, because ignoring it would give a model that talks and is
 * wrong.
 */
#include "model/arch.h"

#include "base/fmath.h"

#include <stdio.h>
#include <string.h>

#define MAX_HEADS 4096u      /* of a layer, and of a head's elements: their product stays small */
#define MAX_SIZE (1u << 22)  /* of the width and of the hidden layer */

typedef struct family {
    const char *name; /* general.architecture */
    kvp__rope_kind rope;
    kvp__activation activation;
    bool qkv_bias;      /* has biases; else they are optional */
    bool qk_norm;
    bool post_norms;
    bool sqrt_embedding; /* embeddings are multiplied by sqrt(width) */
    uint32_t global_every; /* with a window: every n-th layer sees everything; 0: none does */
    double local_base;     /* RoPE base of window layers, unscaled; 0: as the others */
    uint32_t per_head_scale_layers; /* at this depth scores are scaled by the width per head, not by
                                       the key's length (Gemma 3 27B; its files do not say so) */
} family;

static const family families[] = {
    {.name = "llama", .rope = KVP__ROPE_PAIRS},
    {.name = "qwen2", .rope = KVP__ROPE_HALVES, .qkv_bias = true},
    {.name = "qwen3", .rope = KVP__ROPE_HALVES, .qk_norm = true},
    {.name = "gemma3", .rope = KVP__ROPE_HALVES, .activation = KVP__GELU_TANH, .qk_norm = true,
     .post_norms = true, .sqrt_embedding = true, .global_every = 6, .local_base = 10000.0,
     .per_head_scale_layers = 62},
};

/* Sizes that a part's shape is made of. */
typedef enum extent { NOTHING, WIDTH, QUERIES, KEYS, VALUES, MIXED, HEAD, HIDDEN } extent;

/* When a layer has a part. */
typedef enum rule {
    ALWAYS,
    ATTENTION,        /* where there are KV heads */
    ATTENTION_OR_NOT, /* there, or not */
    BIAS,
    QK_NORM,
    POST_NORM
} rule;

typedef struct part {
    const char *name; /* blk.<layer>.<name> */
    size_t at;        /* of the pointer in kvp__layer */
    rule when;
    extent inputs, outputs; /* a vector has no outputs */
} part;

#define AT(field) offsetof(kvp__layer, field)
static const part parts[] = {
    {"attn_norm.weight", AT(attn_norm), ATTENTION, WIDTH, NOTHING},
    {"attn_q.weight", AT(q), ATTENTION, WIDTH, QUERIES},
    {"attn_k.weight", AT(k), ATTENTION, WIDTH, KEYS},
    {"attn_v.weight", AT(v), ATTENTION, WIDTH, VALUES},
    {"attn_output.weight", AT(o), ATTENTION, MIXED, WIDTH},
    {"attn_q.bias", AT(q_bias), BIAS, QUERIES, NOTHING},
    {"attn_k.bias", AT(k_bias), BIAS, KEYS, NOTHING},
    {"attn_v.bias", AT(v_bias), BIAS, VALUES, NOTHING},
    {"attn_output.bias", AT(o_bias), ATTENTION_OR_NOT, WIDTH, NOTHING},
    {"attn_q_norm.weight", AT(q_norm), QK_NORM, HEAD, NOTHING},
    {"attn_k_norm.weight", AT(k_norm), QK_NORM, HEAD, NOTHING},
    {"post_attention_norm.weight", AT(post_attn_norm), POST_NORM, WIDTH, NOTHING},
    {"ffn_norm.weight", AT(ffn_norm), ALWAYS, WIDTH, NOTHING},
    {"ffn_gate.weight", AT(gate), ALWAYS, WIDTH, HIDDEN},
    {"ffn_up.weight", AT(up), ALWAYS, WIDTH, HIDDEN},
    {"ffn_down.weight", AT(down), ALWAYS, HIDDEN, WIDTH},
    {"post_ffw_norm.weight", AT(post_ffn_norm), POST_NORM, WIDTH, NOTHING},
};

/* Keys under the architecture's name that would change the numbers in a way the descriptor has no
 * place for; each with the value that changes nothing. */
static const struct {
    const char *name;
    float neutral;
} foreign_keys[] = {
    {"residual_scale", 1.0f},       {"logit_scale", 1.0f},          {"embedding_scale", 1.0f},
    {"attention.clamp_kqv", 0.0f},  {"attention.max_alibi_bias", 0.0f},
};

typedef struct builder {
    kvp__model *m;
    kvp__arch *a;
    const kvp__gguf *g;
    const family *f;
    uint8_t *used; /* per tensor: some part of the descriptor points to it */
    char key[96];
    kvp_error *err;
} builder;

/* --- keys --- */

static const char *arch_key(builder *b, const char *name)
{
    snprintf(b->key, sizeof b->key, "%s.%s", b->f->name, name);
    return b->key;
}

static kvp_status wrong(builder *b, const char *what)
{
    return kvp__fail(b->err, KVP_ERR_INVALID_MODEL, "metadata key %s: %s", b->key, what);
}

/* A count from 1 to `max`. `fallback` 0: the key has to be there. */
static kvp_status count(builder *b, const char *name, uint32_t fallback, uint32_t max,
                        uint32_t *out)
{
    uint32_t v = fallback;
    kvp_status s = kvp__gguf_u32(b->g, arch_key(b, name), &v, b->err);
    if (s != KVP_OK) return s;
    if (!kvp__gguf_find(b->g, b->key) && fallback == 0) return wrong(b, "missing");
    if (v == 0 || v > max)
        return kvp__fail(b->err, KVP_ERR_INVALID_MODEL, "metadata key %s: %u is not in 1 to %u",
                         b->key, (unsigned)v, (unsigned)max);
    *out = v;
    return KVP_OK;
}

/* A finite number from `min` to `max`; *out as it is if the key is absent. */
static kvp_status number(builder *b, const char *name, double min, double max, double *out)
{
    float v = 0;
    if (!kvp__gguf_find(b->g, arch_key(b, name))) return KVP_OK;
    kvp_status s = kvp__gguf_f32(b->g, b->key, &v, b->err);
    if (s != KVP_OK) return s;
    if (!((double)v >= min && (double)v <= max)) return wrong(b, "the number is out of range");
    *out = (double)v;
    return KVP_OK;
}

/* One integer for all layers, or an array with one for each. */
typedef struct layered {
    kvp__gguf_array each; /* count 0: `all` */
    uint32_t all;
} layered;

static kvp_status layered_get(builder *b, const char *name, uint32_t fallback, layered *out)
{
    memset(out, 0, sizeof *out);
    out->all = fallback;
    const kvp__gguf_entry *e = kvp__gguf_find(b->g, arch_key(b, name));
    if (!e || e->type != KVP__GGUF_ARRAY) return kvp__gguf_u32(b->g, b->key, &out->all, b->err);
    kvp_status s = kvp__gguf_ints(b->g, b->key, &out->each, b->err);
    if (s != KVP_OK) return s;
    if (out->each.count != b->a->n_layers)
        return kvp__fail(b->err, KVP_ERR_INVALID_MODEL,
                         "metadata key %s: an array of %llu for %u layers", b->key,
                         (unsigned long long)out->each.count, (unsigned)b->a->n_layers);
    for (uint64_t i = 0; i < out->each.count; i++) {
        int64_t v = kvp__gguf_int_at(&out->each, i);
        if (v < 0 || v > UINT32_MAX) return wrong(b, "an element is out of range");
    }
    return KVP_OK;
}

static uint32_t layered_at(const layered *l, uint32_t layer)
{
    return l->each.count ? (uint32_t)kvp__gguf_int_at(&l->each, layer) : l->all;
}

/* --- dimensions --- */

static kvp_status find_family(builder *b)
{
    kvp__str name = {"", 0};
    kvp_status s = kvp__gguf_string(b->g, "general.architecture", &name, b->err);
    if (s != KVP_OK) return s;
    if (name.bytes == 0)
        return kvp__fail(b->err, KVP_ERR_INVALID_MODEL,
                         "metadata key general.architecture: missing or empty");
    for (size_t i = 0; i < KVP__COUNT(families); i++)
        if (kvp__str_is(name, families[i].name)) b->f = &families[i];
    char shown[64];
    kvp__str_copy(shown, sizeof shown, name);
    if (!b->f)
        return kvp__fail(b->err, KVP_ERR_UNKNOWN_ARCH,
                         "general.architecture: '%s' is not known; llama, qwen2, qwen3 and gemma3 are",
                         shown);
    kvp__str_copy(b->a->name, sizeof b->a->name, name);
    return KVP_OK;
}

static kvp_status refuse_foreign(builder *b)
{
    uint32_t experts = 0;
    bool causal = true;
    kvp_status s = kvp__gguf_u32(b->g, arch_key(b, "expert_count"), &experts, b->err);
    if (s != KVP_OK) return s;
    if (experts)
        return kvp__fail(b->err, KVP_ERR_UNSUPPORTED,
                         "%s: %u; models made of experts are not supported", b->key,
                         (unsigned)experts);
    s = kvp__gguf_bool(b->g, arch_key(b, "attention.causal"), &causal, b->err);
    if (s != KVP_OK) return s;
    if (!causal)
        return kvp__fail(b->err, KVP_ERR_UNSUPPORTED,
                         "%s: only models that look backwards are supported", b->key);
    for (size_t i = 0; i < KVP__COUNT(foreign_keys); i++) {
        float v = foreign_keys[i].neutral;
        s = kvp__gguf_f32(b->g, arch_key(b, foreign_keys[i].name), &v, b->err);
        if (s != KVP_OK) return s;
        if (v != foreign_keys[i].neutral)
            return kvp__fail(b->err, KVP_ERR_UNSUPPORTED, "metadata key %s: not supported", b->key);
    }
    return KVP_OK;
}

static kvp_status head_dims(builder *b)
{
    kvp__arch *a = b->a;
    uint32_t dim = a->width % a->query_heads ? 0 : a->width / a->query_heads;
    kvp_status s = count(b, "attention.key_length", dim, MAX_HEADS, &a->key_dim);
    if (s == KVP_OK) s = count(b, "attention.value_length", dim, MAX_HEADS, &a->value_dim);
    return s;
}

/* The forward pass has one number of query heads and one hidden size for all layers. */
static kvp_status uniform(builder *b, const char *name, uint32_t max, uint32_t *out)
{
    layered l;
    kvp_status s = layered_get(b, name, 0, &l);
    if (s != KVP_OK) return s;
    if (!kvp__gguf_find(b->g, b->key)) return wrong(b, "missing");
    *out = 0;
    for (uint32_t i = 0; i < b->a->n_layers; i++) {
        uint32_t v = layered_at(&l, i);
        if (v == 0 || v == *out) continue; /* 0: a layer without such a part */
        if (*out)
            return kvp__fail(b->err, KVP_ERR_UNSUPPORTED,
                             "metadata key %s: layers of different sizes (%u and %u)", b->key,
                             (unsigned)*out, (unsigned)v);
        *out = v;
    }
    if (*out == 0 || *out > max)
        return kvp__fail(b->err, KVP_ERR_INVALID_MODEL, "metadata key %s: %u is not in 1 to %u",
                         b->key, (unsigned)*out, (unsigned)max);
    return KVP_OK;
}

static kvp_status dimensions(builder *b)
{
    kvp__arch *a = b->a;
    double eps = 0, attention_softcap = 0, logit_softcap = 0;
    kvp_status s = count(b, "block_count", 0, KVP__MAX_LAYERS, &a->n_layers);
    if (s == KVP_OK) s = count(b, "context_length", 0, INT32_MAX, &a->context);
    if (s == KVP_OK) s = count(b, "embedding_length", 0, MAX_SIZE, &a->width);
    if (s == KVP_OK) s = uniform(b, "feed_forward_length", MAX_SIZE, &a->feed_forward);
    if (s == KVP_OK) s = uniform(b, "attention.head_count", MAX_HEADS, &a->query_heads);
    if (s == KVP_OK) s = head_dims(b);
    if (s == KVP_OK) s = number(b, "attn_logit_softcapping", 0, 1e30, &attention_softcap);
    if (s == KVP_OK) s = number(b, "final_logit_softcapping", 0, 1e30, &logit_softcap);
    if (s == KVP_OK) s = number(b, "attention.layer_norm_rms_epsilon", 1e-12, 1, &eps);
    if (s != KVP_OK) return s;
    if (eps == 0) return wrong(b, "missing");
    a->norm_eps = (float)eps;
    a->attention_softcap = (float)attention_softcap;
    a->logit_softcap = (float)logit_softcap;
    return KVP_OK;
}

static kvp_status scales(builder *b)
{
    kvp__arch *a = b->a;
    uint32_t dim = a->n_layers == b->f->per_head_scale_layers ? a->width / a->query_heads : 0;
    double scale = 1.0 / __builtin_sqrt((double)(dim ? dim : a->key_dim));
    kvp_status s = number(b, "attention.scale", 1e-6, 1e6, &scale);
    if (s != KVP_OK) return s;
    a->attention_scale = (float)scale;
    a->embedding_scale = b->f->sqrt_embedding ? (float)__builtin_sqrt((double)a->width) : 1.0f;
    a->activation = b->f->activation;
    return KVP_OK;
}

/* --- layers: heads and windows --- */

static kvp_status kv_heads(builder *b)
{
    kvp__arch *a = b->a;
    layered heads, queries;
    kvp_status s = layered_get(b, "attention.head_count", 0, &queries);
    if (s == KVP_OK) s = layered_get(b, "attention.head_count_kv", a->query_heads, &heads);
    if (s != KVP_OK) return s;
    for (uint32_t i = 0; i < a->n_layers; i++) {
        uint32_t n = layered_at(&heads, i);
        if (n && (a->query_heads % n || layered_at(&queries, i) == 0))
            return kvp__fail(b->err, KVP_ERR_INVALID_MODEL,
                             "metadata key %s: %u query heads are no multiple of layer %u's %u KV "
                             "heads", b->key, (unsigned)layered_at(&queries, i), (unsigned)i,
                             (unsigned)n);
        a->layers[i].kv_heads = n;
    }
    return KVP_OK;
}

/* Which layers have the window: as an array says (true: this one), or all but every n-th. */
static kvp_status windows(builder *b)
{
    kvp__arch *a = b->a;
    uint32_t window = 0;
    layered pattern;
    kvp_status s = kvp__gguf_u32(b->g, arch_key(b, "attention.sliding_window"), &window, b->err);
    if (s == KVP_OK)
        s = layered_get(b, "attention.sliding_window_pattern", b->f->global_every, &pattern);
    if (s != KVP_OK || window == 0) return s;
    if (window > INT32_MAX) return wrong(b, "the window is out of range");
    for (uint32_t i = 0; i < a->n_layers; i++) {
        bool local = pattern.each.count ? layered_at(&pattern, i) != 0
                                        : pattern.all == 0 || (i + 1) % pattern.all != 0;
        a->layers[i].window = local && a->layers[i].kv_heads ? window : 0;
    }
    return KVP_OK;
}

/* --- RoPE --- */

/* YaRN (arXiv 2309.00071, as transformers computes it): slow dimensions, which turn less than
 * beta_slow times in the original context, are interpolated; fast ones stay; a ramp between. */
static double yarn_dim(const kvp__rope_rule *r, uint32_t dim, double turns)
{
    return dim * kvp__ln(r->original_context / (turns * 6.283185307179586)) / (2 * kvp__ln(r->base));
}

static double yarn_kept(const kvp__rope_rule *r, uint32_t dim, uint32_t i)
{
    double low = __builtin_floor(yarn_dim(r, dim, r->beta_fast));
    double high = __builtin_ceil(yarn_dim(r, dim, r->beta_slow));
    if (low < 0) low = 0;
    if (high > dim - 1) high = dim - 1;
    double width = high - low > 0.001 ? high - low : 0.001;
    double ramp = (i - low) / width;
    if (ramp < 0) ramp = 0;
    if (ramp > 1) ramp = 1;
    return (1 - ramp) * r->extrapolation;
}

static double yarn_mscale(double factor, double m)
{
    return factor <= 1 ? 1 : 0.1 * m * kvp__ln(factor) + 1;
}

static double yarn_magnitude(const kvp__rope_rule *r)
{
    if (r->attention_factor > 0) return r->attention_factor;
    double magnitude = yarn_mscale(r->factor, 1);
    return r->log_multiplier ? magnitude / yarn_mscale(r->factor, r->log_multiplier) : magnitude;
}

void kvp__rope_table(const kvp__rope_rule *r, uint32_t dim, double *inv_freq, float *magnitude)
{
    for (uint32_t i = 0; i < dim / 2; i++) {
        double f = kvp__pow(r->base, -2.0 * i / dim);
        if (r->scaling == KVP__SCALING_LINEAR) f /= r->factor;
        if (r->scaling == KVP__SCALING_YARN) {
            double kept = yarn_kept(r, dim, i);
            f = f / r->factor * (1 - kept) + f * kept;
        }
        inv_freq[i] = f;
    }
    *magnitude = r->scaling == KVP__SCALING_YARN ? (float)yarn_magnitude(r) : 1.0f;
}

static kvp_status rope_scaling(builder *b, kvp__rope_rule *r)
{
    kvp__str type = {"", 0};
    kvp_status s = number(b, "rope.scale_linear", 1e-6, 1e6, &r->factor); /* an older key */
    if (s != KVP_OK) return s;
    if (r->factor != 1) r->scaling = KVP__SCALING_LINEAR;
    s = kvp__gguf_string(b->g, arch_key(b, "rope.scaling.type"), &type, b->err);
    if (s != KVP_OK || type.bytes == 0) return s;
    if (kvp__str_is(type, "none")) {
        r->scaling = KVP__SCALING_NONE;
    } else if (kvp__str_is(type, "linear")) {
        r->scaling = KVP__SCALING_LINEAR;
    } else if (kvp__str_is(type, "yarn")) {
        r->scaling = KVP__SCALING_YARN;
    } else {
        char shown[32];
        return kvp__fail(b->err, KVP_ERR_UNSUPPORTED,
                         "metadata key %s: '%s'; none, linear and yarn are supported", b->key,
                         kvp__str_copy(shown, sizeof shown, type));
    }
    return number(b, "rope.scaling.factor", 1e-6, 1e6, &r->factor);
}

static kvp_status yarn_keys(builder *b, kvp__rope_rule *r)
{
    uint32_t original = 0;
    kvp_status s = count(b, "rope.scaling.original_context_length", b->a->context, INT32_MAX,
                         &original);
    r->original_context = original;
    /* Two names have been in use for transformers' attention_factor; the longer one wins. */
    if (s == KVP_OK) s = number(b, "rope.scaling.attn_factor", 0, 1e3, &r->attention_factor);
    if (s == KVP_OK) s = number(b, "rope.scaling.yarn_attn_factor", 0, 1e3, &r->attention_factor);
    if (s == KVP_OK) s = number(b, "rope.scaling.yarn_log_multiplier", 0, 1e3, &r->log_multiplier);
    if (s == KVP_OK) s = number(b, "rope.scaling.yarn_ext_factor", 0, 1, &r->extrapolation);
    if (s == KVP_OK) s = number(b, "rope.scaling.yarn_beta_fast", 1e-3, 1e6, &r->beta_fast);
    if (s == KVP_OK) s = number(b, "rope.scaling.yarn_beta_slow", 1e-3, 1e6, &r->beta_slow);
    return s;
}

/* Llama 3.1's stretched frequencies come as a tensor of divisors. */
static kvp_status frequency_factors(builder *b, uint32_t dim, double *inv_freq)
{
    uint64_t index = kvp__gguf_tensor(b->g, "rope_freqs.weight");
    if (index == UINT64_MAX) return KVP_OK;
    const kvp__tensor *t = &b->m->tensors[index];
    b->used[index] = 1;
    if (t->type != KVP__F32 || t->dims[0] != dim / 2 || t->bytes != dim / 2 * sizeof(float))
        return kvp__fail(b->err, KVP_ERR_INVALID_MODEL,
                         "tensor %s: %s of %llu elements, F32 of %u wanted", t->name,
                         kvp__type_name(t->type), (unsigned long long)t->dims[0],
                         (unsigned)(dim / 2));
    float chunk[64];
    for (uint32_t i = 0; i < dim / 2; i++) {
        if (i % 64 == 0) {
            size_t bytes = (size_t)kvp__min64(64, dim / 2 - i) * sizeof(float);
            uint64_t at = t->offset + i * sizeof(float);
            if (b->m->source.read(b->m->source.user, at, chunk, bytes) != 0)
                return kvp__fail(b->err, KVP_ERR_IO, "tensor %s: could not be read", t->name);
        }
        if (!(chunk[i % 64] > 0 && chunk[i % 64] < 1e30f))
            return kvp__fail(b->err, KVP_ERR_INVALID_MODEL,
                             "tensor %s: element %u is not a positive number", t->name, (unsigned)i);
        inv_freq[i] /= (double)chunk[i % 64];
    }
    return KVP_OK;
}

static kvp_status take_rope(builder *b, const kvp__rope_rule *r, uint32_t dim, double **out)
{
    kvp__rope *rope = &b->a->ropes[b->a->n_ropes++];
    double *inv_freq = kvp__model_take(b->m, dim / 2 * sizeof *inv_freq);
    if (!inv_freq) return kvp__fail(b->err, KVP_ERR_NO_MEMORY, "no memory for RoPE frequencies");
    rope->kind = b->f->rope;
    rope->dim = dim;
    rope->inv_freq = inv_freq;
    kvp__rope_table(r, dim, inv_freq, &rope->magnitude);
    *out = inv_freq;
    return KVP_OK;
}

/* Window layers with a base of their own turn unscaled: their distances stay short. */
static kvp_status local_rope(builder *b, uint32_t dim)
{
    bool any = false;
    double *inv_freq;
    kvp__rope_rule r = {.base = b->f->local_base, .factor = 1};
    kvp_status s = number(b, "rope.freq_base_swa", 1.0001, 1e15, &r.base);
    if (s != KVP_OK || r.base == 0) return s;
    for (uint32_t i = 0; i < b->a->n_layers; i++) {
        if (b->a->layers[i].window == 0) continue;
        b->a->layers[i].rope = 1;
        any = true;
    }
    return any ? take_rope(b, &r, dim, &inv_freq) : KVP_OK;
}

static kvp_status ropes(builder *b)
{
    uint32_t dim;
    double *inv_freq;
    kvp__rope_rule r = {.base = 10000, .factor = 1, .beta_fast = 32, .beta_slow = 1,
                        .extrapolation = 1};
    kvp_status s = count(b, "rope.dimension_count", b->a->key_dim, b->a->key_dim, &dim);
    if (s != KVP_OK) return s;
    if (dim % 2) return wrong(b, "the number of rotated elements is odd");
    s = number(b, "rope.freq_base", 1.0001, 1e15, &r.base);
    if (s == KVP_OK) s = rope_scaling(b, &r);
    if (s == KVP_OK && r.scaling == KVP__SCALING_YARN) s = yarn_keys(b, &r);
    if (s == KVP_OK) s = take_rope(b, &r, dim, &inv_freq);
    if (s == KVP_OK) s = frequency_factors(b, dim, inv_freq);
    if (s == KVP_OK) s = local_rope(b, dim);
    return s;
}

/* --- tensors --- */

static uint64_t extent_of(const builder *b, extent x, uint32_t layer_kv_heads)
{
    const kvp__arch *a = b->a;
    switch (x) {
    case WIDTH: return a->width;
    case QUERIES: return (uint64_t)a->query_heads * a->key_dim;
    case KEYS: return (uint64_t)layer_kv_heads * a->key_dim;
    case VALUES: return (uint64_t)layer_kv_heads * a->value_dim;
    case MIXED: return (uint64_t)a->query_heads * a->value_dim;
    case HEAD: return a->key_dim;
    case HIDDEN: return a->feed_forward;
    default: return 1;
    }
}

/* Finds a tensor and checks its shape. `outputs` 1: a vector, in floats. Absent: *out stays NULL,
 * and that is an error if it is `needed`. */
static kvp_status find(builder *b, const char *name, bool needed, uint64_t inputs, uint64_t outputs,
                       bool vector, const kvp__tensor **out)
{
    uint64_t index = kvp__gguf_tensor(b->g, name);
    if (index == UINT64_MAX)
        return needed ? kvp__fail(b->err, KVP_ERR_INVALID_MODEL,
                                  "tensor %s: missing, and %s has it", name, b->f->name)
                      : KVP_OK;
    const kvp__tensor *t = &b->m->tensors[index];
    if (t->dims[0] != inputs || t->dims[1] != outputs || t->dims[2] != 1 || t->dims[3] != 1)
        return kvp__fail(b->err, KVP_ERR_INVALID_MODEL,
                         "tensor %s: its shape is %llu x %llu x %llu x %llu, the metadata asks for "
                         "%llu x %llu", t->name, (unsigned long long)t->dims[0],
                         (unsigned long long)t->dims[1], (unsigned long long)t->dims[2],
                         (unsigned long long)t->dims[3], (unsigned long long)inputs,
                         (unsigned long long)outputs);
    if (vector && t->type != KVP__F32 && t->type != KVP__F16 && t->type != KVP__BF16)
        return kvp__fail(b->err, KVP_ERR_UNSUPPORTED,
                         "tensor %s: type %s; norms and biases are taken as F32, F16 or BF16",
                         t->name, kvp__type_name(t->type));
    b->used[index] = 1;
    *out = t;
    return KVP_OK;
}

static bool has_part(const family *f, const part *p, uint32_t layer_kv_heads)
{
    switch (p->when) {
    case ALWAYS: return true;
    case QK_NORM: return f->qk_norm && layer_kv_heads;
    case POST_NORM: return f->post_norms;
    default: return layer_kv_heads > 0;
    }
}

static bool needs_part(const family *f, const part *p)
{
    return p->when == BIAS ? f->qkv_bias : p->when != ATTENTION_OR_NOT;
}

static kvp_status layer_tensors(builder *b, uint32_t index)
{
    kvp__layer *l = &b->a->layers[index];
    for (size_t i = 0; i < KVP__COUNT(parts); i++) {
        const part *p = &parts[i];
        const kvp__tensor *t = NULL;
        char name[64];
        if (!has_part(b->f, p, l->kv_heads)) continue;
        snprintf(name, sizeof name, "blk.%u.%s", (unsigned)index, p->name);
        kvp_status s = find(b, name, needs_part(b->f, p), extent_of(b, p->inputs, l->kv_heads),
                            extent_of(b, p->outputs, l->kv_heads), p->outputs == NOTHING, &t);
        if (s != KVP_OK) return s;
        memcpy((char *)l + p->at, &t, sizeof t);
    }
    return KVP_OK;
}

/* The embedding's rows are the vocabulary, whatever a key may say; an output matrix that is in the
 * file is used, and where there is none the embedding takes its place. */
static kvp_status outer_tensors(builder *b)
{
    kvp__arch *a = b->a;
    uint64_t index = kvp__gguf_tensor(b->g, "token_embd.weight");
    uint64_t rows = index == UINT64_MAX ? 0 : b->m->tensors[index].dims[1];
    if (rows > INT32_MAX)
        return kvp__fail(b->err, KVP_ERR_INVALID_MODEL, "tensor token_embd.weight: %llu rows",
                         (unsigned long long)rows);
    a->vocabulary = (uint32_t)rows;
    kvp_status s = find(b, "token_embd.weight", true, a->width, rows, false, &a->token_embedding);
    if (s == KVP_OK) s = find(b, "output_norm.weight", true, a->width, 1, true, &a->output_norm);
    if (s == KVP_OK) s = find(b, "output.weight", false, a->width, rows, false, &a->output);
    if (s == KVP_OK && !a->output) a->output = a->token_embedding;
    return s;
}

/* attn_rot_embd: RoPE tables that early converters wrote; nobody reads them. */
static kvp_status refuse_unused(builder *b)
{
    for (uint64_t i = 0; i < b->m->n_tensors; i++) {
        const char *name = b->m->tensors[i].name;
        if (!b->used[i] && !strstr(name, ".attn_rot_embd"))
            return kvp__fail(b->err, KVP_ERR_UNSUPPORTED,
                             "tensor %.80s: a %s model of %u layers has no such tensor", name,
                             b->f->name, (unsigned)b->a->n_layers);
    }
    return KVP_OK;
}

static kvp_status tensors(builder *b)
{
    kvp_status s = outer_tensors(b);
    for (uint32_t i = 0; s == KVP_OK && i < b->a->n_layers; i++) s = layer_tensors(b, i);
    if (s == KVP_OK) s = refuse_unused(b);
    return s;
}

/* --- groups --- */

static kvp_layer_group group_of(const kvp__arch *a, const kvp__layer *l)
{
    return (kvp_layer_group){.layers = 0, .kv_heads = l->kv_heads, .key_dim = a->key_dim,
                             .value_dim = a->value_dim, .window = l->window,
                             .query_heads = l->kv_heads ? a->query_heads : 0};
}

static bool same_group(const kvp_layer_group *x, const kvp_layer_group *y)
{
    return x->kv_heads == y->kv_heads && x->key_dim == y->key_dim &&
           x->value_dim == y->value_dim && x->window == y->window &&
           x->query_heads == y->query_heads;
}

/* Layers of equal geometry form a group, in the order in which they first appear. */
static kvp_status groups(builder *b)
{
    kvp__geometry *geo = &b->m->geometry;
    geo->n_layers = b->a->n_layers;
    geo->vocabulary = b->a->vocabulary;
    geo->context = b->a->context;
    for (uint32_t i = 0; i < geo->n_layers; i++) {
        kvp_layer_group want = group_of(b->a, &b->a->layers[i]);
        uint32_t n = 0;
        while (n < geo->n_groups && !same_group(&geo->groups[n], &want)) n++;
        if (n == KVP__MAX_GROUPS)
            return kvp__fail(b->err, KVP_ERR_UNSUPPORTED,
                             "layer %u: layers of more than %u different shapes", (unsigned)i,
                             KVP__MAX_GROUPS);
        if (n == geo->n_groups) geo->groups[geo->n_groups++] = want;
        geo->layer_group[i] = (uint8_t)n;
        geo->layer_index[i] = (uint16_t)geo->groups[n].layers++;
    }
    return KVP_OK;
}

/* --- all of it --- */

static kvp_status fill(builder *b)
{
    kvp_status s = find_family(b);
    if (s == KVP_OK) s = refuse_foreign(b);
    if (s == KVP_OK) s = dimensions(b);
    if (s == KVP_OK) s = scales(b);
    if (s != KVP_OK) return s;
    b->a->layers = kvp__model_take(b->m, b->a->n_layers * sizeof *b->a->layers);
    if (!b->a->layers)
        return kvp__fail(b->err, KVP_ERR_NO_MEMORY, "no memory for %u layers",
                         (unsigned)b->a->n_layers);
    s = kv_heads(b);
    if (s == KVP_OK) s = windows(b);
    if (s == KVP_OK) s = ropes(b);
    if (s == KVP_OK) s = tensors(b);
    if (s == KVP_OK) s = groups(b);
    return s;
}

kvp_status kvp__arch_fill(kvp__model *m, const kvp__gguf *g, kvp_error *err)
{
    builder b = {.m = m, .a = &m->arch, .g = g, .err = err};
    size_t used_bytes = (size_t)m->n_tensors + 1;
    b.used = kvp__alloc_zero(&m->hooks, used_bytes);
    if (!b.used) return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for marks on tensors");
    kvp_status s = fill(&b);
    kvp__free(&m->hooks, b.used, used_bytes);
    return s;
}
