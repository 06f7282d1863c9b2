/*
 * See gguf_writer.h. Random quantised tensors are made from random blocks, not by quantising random
 * floats: every bit pattern of the integers is a value, only the half-float scales need care.
 */
#include "gguf_writer.h"

#include "base/half.h"
#include "model/model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- bytes --- */

void gw_put(gw_buffer *b, const void *data, size_t bytes)
{
    if (b->bytes + bytes > b->size) {
        size_t size = (b->bytes + bytes) * 2 + 64;
        uint8_t *grown = realloc(b->data, size);
        if (!grown) exit(99);
        b->data = grown;
        b->size = size;
    }
    if (bytes == 0) return;
    if (data)
        memcpy(b->data + b->bytes, data, bytes);
    else
        memset(b->data + b->bytes, 0, bytes);
    b->bytes += bytes;
}

void gw_put_u32(gw_buffer *b, uint32_t v) { gw_put(b, &v, sizeof v); }
void gw_put_u64(gw_buffer *b, uint64_t v) { gw_put(b, &v, sizeof v); }

void gw_put_str(gw_buffer *b, const char *text)
{
    gw_put_u64(b, strlen(text));
    gw_put(b, text, strlen(text));
}

/* --- files --- */

void gw_init(gw *w)
{
    memset(w, 0, sizeof *w);
    w->version = 3;
    w->alignment = 32;
}

void gw_free(gw *w)
{
    free(w->keys.data);
    free(w->table.data);
    free(w->data.data);
    memset(w, 0, sizeof *w);
}

static void pad(gw_buffer *b, uint32_t alignment)
{
    if (b->bytes % alignment) gw_put(b, NULL, alignment - b->bytes % alignment);
}

uint8_t *gw_finish(gw *w, size_t *bytes)
{
    gw_buffer f = {0};
    gw_put(&f, "GGUF", 4);
    gw_put_u32(&f, w->version);
    gw_put_u64(&f, w->n_tensors);
    gw_put_u64(&f, w->n_keys);
    gw_put(&f, w->keys.data, w->keys.bytes);
    gw_put(&f, w->table.data, w->table.bytes);
    pad(&f, w->alignment);
    gw_put(&f, w->data.data, w->data.bytes);
    gw_free(w);
    *bytes = f.bytes;
    return f.data;
}

void gw_skip(gw *w, const char *name)
{
    if (w->n_skip == (int)KVP__COUNT(w->skip)) exit(99);
    w->skip[w->n_skip++] = name;
}

static int skipped(const gw *w, const char *name)
{
    for (int i = 0; i < w->n_skip; i++)
        if (strcmp(w->skip[i], name) == 0) return 1;
    return 0;
}

/* The key and its type; false: it is left out. */
static int begin(gw *w, const char *key, uint32_t type)
{
    if (skipped(w, key)) return 0;
    gw_put_str(&w->keys, key);
    gw_put_u32(&w->keys, type);
    w->n_keys++;
    return 1;
}

void gw_raw(gw *w, const char *key, uint32_t type, const void *value, size_t bytes)
{
    if (begin(w, key, type)) gw_put(&w->keys, value, bytes);
}

void gw_u32(gw *w, const char *key, uint32_t v) { gw_raw(w, key, 4, &v, sizeof v); }
void gw_u64(gw *w, const char *key, uint64_t v) { gw_raw(w, key, 10, &v, sizeof v); }
void gw_i32(gw *w, const char *key, int32_t v) { gw_raw(w, key, 5, &v, sizeof v); }
void gw_f32(gw *w, const char *key, float v) { gw_raw(w, key, 6, &v, sizeof v); }

void gw_bool(gw *w, const char *key, int v)
{
    uint8_t byte = v != 0;
    gw_raw(w, key, 7, &byte, 1);
}

void gw_str(gw *w, const char *key, const char *text)
{
    if (begin(w, key, 8)) gw_put_str(&w->keys, text);
}

static int array(gw *w, const char *key, uint32_t element, const void *v, size_t n, size_t size)
{
    if (!begin(w, key, 9)) return 0;
    gw_put_u32(&w->keys, element);
    gw_put_u64(&w->keys, n);
    gw_put(&w->keys, v, n * size);
    return 1;
}

void gw_strs(gw *w, const char *key, const char *const *texts, size_t n)
{
    if (!array(w, key, 8, NULL, n, 0)) return;
    for (size_t i = 0; i < n; i++) gw_put_str(&w->keys, texts[i]);
}

void gw_u32s(gw *w, const char *key, const uint32_t *v, size_t n) { array(w, key, 4, v, n, 4); }
void gw_i32s(gw *w, const char *key, const int32_t *v, size_t n) { array(w, key, 5, v, n, 4); }
void gw_f32s(gw *w, const char *key, const float *v, size_t n) { array(w, key, 6, v, n, 4); }
void gw_bools(gw *w, const char *key, const uint8_t *v, size_t n) { array(w, key, 7, v, n, 1); }

void gw_tensor(gw *w, const char *name, uint32_t type, uint32_t n_dims, const uint64_t *dims,
               const void *data, size_t bytes)
{
    if (skipped(w, name)) return;
    pad(&w->data, w->alignment);
    gw_put_str(&w->table, name);
    gw_put_u32(&w->table, n_dims);
    for (uint32_t i = 0; i < n_dims; i++) gw_put_u64(&w->table, dims[i]);
    gw_put_u32(&w->table, type);
    gw_put_u64(&w->table, w->data.bytes);
    gw_put(&w->data, data, bytes);
    w->n_tensors++;
}

/* --- random values --- */

uint64_t gw_rand(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

float gw_uniform(uint64_t *state)
{
    return (float)(int32_t)(gw_rand(state) >> 32) * (1.0f / 2147483648.0f);
}

/* Where a block's half-float scales lie (bytes), how large its scaled integers get, and whether the
 * second one is a minimum: added (Q4_1, Q5_1), or subtracted times a scale of its own (Q2_K, Q4_K,
 * Q5_K). -1: there is none. */
typedef struct block_shape {
    uint32_t type;
    int scale_at, min_at;
    float reach;     /* largest integer times largest inner scale */
    float min_reach; /* what the minimum is multiplied by at most */
    int min_sign;
} block_shape;

static const block_shape block_shapes[] = {
    {KVP__Q4_0, 0, -1, 8, 0, 0},       {KVP__Q4_1, 0, 2, 15, 1, -1},
    {KVP__Q5_0, 0, -1, 16, 0, 0},      {KVP__Q5_1, 0, 2, 31, 1, -1},
    {KVP__Q8_0, 0, -1, 127, 0, 0},     {KVP__Q2_K, 80, 82, 3 * 15, 15, 1},
    {KVP__Q3_K, 108, -1, 4 * 32, 0, 0}, {KVP__Q4_K, 0, 2, 15 * 63, 63, 1},
    {KVP__Q5_K, 0, 2, 31 * 63, 63, 1}, {KVP__Q6_K, 208, -1, 32 * 127, 0, 0},
};

static void put_half(uint8_t *at, float v)
{
    uint16_t h = kvp__f32_to_f16(v);
    memcpy(at, &h, sizeof h);
}

/* Scaled integers lie in [0, reach] for types with a minimum, which takes half of that away again. */
static void random_block(uint8_t *block, const block_shape *s, uint32_t bytes, float scale,
                         uint64_t *rng)
{
    for (uint32_t i = 0; i < bytes; i++) block[i] = (uint8_t)(gw_rand(rng) >> 56);
    float size = scale * (0.75f + 0.25f * gw_uniform(rng));
    if (s->type == KVP__Q8_0)
        for (uint32_t i = 2; i < bytes; i++)
            if (block[i] == 0x80) block[i] = 0x81;
    put_half(block + s->scale_at, (s->min_at < 0 ? size : 2 * size) / s->reach);
    if (s->min_at >= 0) put_half(block + s->min_at, (float)s->min_sign * size / s->min_reach);
}

static uint8_t *random_values(uint32_t type, uint64_t n, float mean, float scale, uint64_t *rng,
                              size_t *bytes)
{
    kvp__type_info info = kvp__type_get(type);
    *bytes = (size_t)(n / info.block * info.bytes);
    uint8_t *out = malloc(*bytes + 1);
    if (!out) exit(99);
    for (size_t i = 0; i < KVP__COUNT(block_shapes); i++) {
        if (block_shapes[i].type != type) continue;
        for (uint64_t b = 0; b < n / info.block; b++)
            random_block(out + b * info.bytes, &block_shapes[i], info.bytes, scale, rng);
        return out;
    }
    for (uint64_t i = 0; i < n; i++) {
        float v = mean + scale * gw_uniform(rng);
        uint16_t h = type == KVP__BF16 ? kvp__f32_to_bf16(v) : kvp__f32_to_f16(v);
        memcpy(out + i * info.bytes, info.bytes == 4 ? (void *)&v : (void *)&h, info.bytes);
    }
    return out;
}

void gw_random(gw *w, const char *name, uint32_t type, uint64_t inputs, uint64_t outputs,
               float mean, float scale, uint64_t *rng)
{
    uint64_t dims[2] = {inputs, outputs};
    size_t bytes;
    uint8_t *values = random_values(type, inputs * (outputs ? outputs : 1), mean, scale, rng, &bytes);
    gw_tensor(w, name, type, outputs ? 2 : 1, dims, values, bytes);
    free(values);
}

/* --- tiny models --- */

static gw_model completed(const gw_model *in)
{
    gw_model o = {0};
    if (in) o = *in;
    uint32_t block = kvp__type_get(o.type).block;
    if (!o.arch) o.arch = "llama";
    if (!o.layers) o.layers = 2;
    if (!o.heads) o.heads = 4;
    if (!o.kv_heads) o.kv_heads = 2;
    if (!o.head_dim) o.head_dim = 8;
    if (!o.width) o.width = (o.heads * o.head_dim + block - 1) / block * block;
    if (!o.feed_forward) o.feed_forward = 2 * o.width;
    if (!o.vocabulary) o.vocabulary = 64;
    if (!o.context) o.context = 256;
    if (!o.window && strcmp(o.arch, "gemma3") == 0) o.window = 16;
    return o;
}

static void arch_u32(gw *w, const gw_model *o, const char *name, uint32_t v)
{
    char key[96];
    snprintf(key, sizeof key, "%s.%s", o->arch, name);
    gw_u32(w, key, v);
}

static void arch_f32(gw *w, const gw_model *o, const char *name, float v)
{
    char key[96];
    snprintf(key, sizeof key, "%s.%s", o->arch, name);
    gw_f32(w, key, v);
}

static void tiny_keys(gw *w, const gw_model *o)
{
    gw_str(w, "general.architecture", o->arch);
    gw_str(w, "general.name", "tiny");
    arch_u32(w, o, "block_count", o->layers);
    arch_u32(w, o, "context_length", o->context);
    arch_u32(w, o, "embedding_length", o->width);
    arch_u32(w, o, "feed_forward_length", o->feed_forward);
    arch_u32(w, o, "attention.head_count", o->heads);
    arch_u32(w, o, "attention.head_count_kv", o->kv_heads);
    arch_u32(w, o, "attention.key_length", o->head_dim);
    arch_u32(w, o, "attention.value_length", o->head_dim);
    arch_f32(w, o, "attention.layer_norm_rms_epsilon", 1e-5f);
    arch_f32(w, o, "rope.freq_base", 10000.0f);
    if (o->window) arch_u32(w, o, "attention.sliding_window", o->window);
}

/* Token 0 ends a text; then the 63 characters below, a space (as byte-level BPE writes it) among
 * them; then words that no text makes. */
static void tiny_tokenizer(gw *w, const gw_model *o)
{
    static const char letters[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
    static const char *const no_merges[] = {"a b"};
    char(*text)[24] = calloc(o->vocabulary, sizeof *text);
    const char **tokens = calloc(o->vocabulary, sizeof *tokens);
    int32_t *types = calloc(o->vocabulary, sizeof *types);
    if (!text || !tokens || !types) exit(99);
    for (uint32_t i = 0; i < o->vocabulary; i++) {
        if (i == 0) snprintf(text[i], sizeof *text, "<|endoftext|>");
        else if (i == 1) snprintf(text[i], sizeof *text, "\xc4\xa0");
        else if (i - 2 < sizeof letters - 1) snprintf(text[i], sizeof *text, "%c", letters[i - 2]);
        else if (i == 64) snprintf(text[i], sizeof *text, "ab");
        else snprintf(text[i], sizeof *text, "<unused%u>", (unsigned)i);
        tokens[i] = text[i];
        types[i] = i == 0 ? 3 : i > 64 ? 5 : 1;
    }
    gw_str(w, "tokenizer.ggml.model", "gpt2");
    gw_str(w, "tokenizer.ggml.pre", "gpt-2");
    gw_strs(w, "tokenizer.ggml.tokens", tokens, o->vocabulary);
    gw_i32s(w, "tokenizer.ggml.token_type", types, o->vocabulary);
    gw_strs(w, "tokenizer.ggml.merges", no_merges, o->vocabulary > 64 ? 1 : 0);
    gw_u32(w, "tokenizer.ggml.bos_token_id", 0);
    gw_u32(w, "tokenizer.ggml.eos_token_id", 0);
    free(types);
    free(tokens);
    free(text);
}

/* A projection; its type gives way where the inputs are no whole number of blocks. */
static void matrix(gw *w, const gw_model *o, const char *name, uint32_t inputs, uint32_t outputs,
                   uint64_t *rng)
{
    uint32_t type = o->type;
    if (inputs % kvp__type_get(type).block) type = inputs % 32 ? KVP__F16 : KVP__Q8_0;
    float size = 1.7f / __builtin_sqrtf((float)inputs); /* uniform: a third of that squared */
    gw_random(w, name, type, inputs, outputs, 0.0f, size, rng);
}

static void vector(gw *w, const char *name, uint32_t n, float mean, uint64_t *rng)
{
    gw_random(w, name, KVP__F32, n, 0, mean, 0.2f, rng);
}

static void tiny_layer(gw *w, const gw_model *o, uint32_t layer, uint64_t *rng)
{
    int qwen2 = strcmp(o->arch, "qwen2") == 0, gemma = strcmp(o->arch, "gemma3") == 0;
    int qk_norm = gemma || strcmp(o->arch, "qwen3") == 0;
    uint32_t q = o->heads * o->head_dim, kv = o->kv_heads * o->head_dim;
    struct {
        const char *name;
        uint32_t inputs, outputs; /* outputs 0: a vector */
        float mean;
        int wanted;
    } parts[] = {
        {"attn_norm", o->width, 0, 1, 1},       {"attn_q", o->width, q, 0, 1},
        {"attn_k", o->width, kv, 0, 1},         {"attn_v", o->width, kv, 0, 1},
        {"attn_output", q, o->width, 0, 1},     {"attn_q_norm", o->head_dim, 0, 1, qk_norm},
        {"attn_k_norm", o->head_dim, 0, 1, qk_norm},
        {"post_attention_norm", o->width, 0, 1, gemma},
        {"ffn_norm", o->width, 0, 1, 1},        {"ffn_gate", o->width, o->feed_forward, 0, 1},
        {"ffn_up", o->width, o->feed_forward, 0, 1},
        {"ffn_down", o->feed_forward, o->width, 0, 1},
        {"post_ffw_norm", o->width, 0, 1, gemma},
    };
    char name[64];
    for (size_t i = 0; i < KVP__COUNT(parts); i++) {
        if (!parts[i].wanted) continue;
        snprintf(name, sizeof name, "blk.%u.%s.weight", (unsigned)layer, parts[i].name);
        if (parts[i].outputs)
            matrix(w, o, name, parts[i].inputs, parts[i].outputs, rng);
        else
            vector(w, name, parts[i].inputs, parts[i].mean, rng);
    }
    static const char *const biased[] = {"attn_q", "attn_k", "attn_v"};
    for (int i = 0; qwen2 && i < 3; i++) {
        snprintf(name, sizeof name, "blk.%u.%s.bias", (unsigned)layer, biased[i]);
        vector(w, name, i == 0 ? q : kv, 0.0f, rng);
    }
}

void gw_tiny_into(gw *w, const gw_model *options)
{
    gw_model o = completed(options);
    uint64_t rng = o.seed * 2654435761u + 12345;
    tiny_keys(w, &o);
    if (o.tokenizer) tiny_tokenizer(w, &o);
    matrix(w, &o, "token_embd.weight", o.width, o.vocabulary, &rng);
    for (uint32_t i = 0; i < o.layers; i++) tiny_layer(w, &o, i, &rng);
    vector(w, "output_norm.weight", o.width, 1.0f, &rng);
    if (o.untied) matrix(w, &o, "output.weight", o.width, o.vocabulary, &rng);
    w->n_skip = 0;
}

uint8_t *gw_tiny(const gw_model *o, size_t *bytes)
{
    gw w;
    gw_init(&w);
    gw_tiny_into(&w, o);
    return gw_finish(&w, bytes);
}
