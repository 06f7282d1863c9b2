/*
 * The descriptor: every architecture's settings, what contradicts itself, and the oddities of real
 * configurations (cases B109, B148, B154, B156, B158).
 */
#define _GNU_SOURCE
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/half.h"
#include "model/arch.h"
#include "plan/plan.h"
#include "support/gguf_writer.h"
#include "support/heap.h"

static heap the_heap;
static kvp__model the_model;
static uint8_t *the_bytes;

static kvp_status load_bytes(const uint8_t *data, size_t bytes, kvp_error *err)
{
    kvp__source source;
    memset(err, 0, sizeof *err);
    err->size = sizeof *err;
    heap_init(&the_heap);
    kvp__source_memory(&source, data, bytes);
    return kvp__model_load(&the_model, &the_heap.hooks, &source, err);
}

static const kvp__arch *load(gw *w)
{
    size_t bytes;
    kvp_error err;
    the_bytes = gw_finish(w, &bytes);
    if (load_bytes(the_bytes, bytes, &err) != KVP_OK) fail_msg("%s", err.text);
    return &the_model.arch;
}

static const kvp__arch *load_tiny(const gw_model *o)
{
    gw w;
    gw_init(&w);
    gw_tiny_into(&w, o);
    return load(&w);
}

static void unload(void)
{
    kvp__model_unload(&the_model);
    free(the_bytes);
    the_bytes = NULL;
    assert_int_equal(the_heap.blocks, 0);
    assert_int_equal(the_heap.mismatches, 0);
}

static void refuse(gw *w, kvp_status status, const char *word)
{
    size_t bytes;
    kvp_error err;
    uint8_t *data = gw_finish(w, &bytes);
    kvp_status s = load_bytes(data, bytes, &err);
    if (s != status || !strstr(err.text, word))
        fail_msg("status %d, wanted %d; '%s' lacks '%s'", (int)s, (int)status, err.text, word);
    assert_int_equal(the_heap.blocks, 0);
    free(data);
}

/* A tiny model without some of its keys or tensors, to be written anew. */
static gw without(const gw_model *o, const char *const *names)
{
    gw w;
    gw_init(&w);
    for (; *names; names++) gw_skip(&w, *names);
    gw_tiny_into(&w, o);
    return w;
}
#define WITHOUT(o, ...) without(o, (const char *const[]){__VA_ARGS__, NULL})

static void matrix(gw *w, const char *name, uint64_t inputs, uint64_t outputs)
{
    uint64_t rng = 1;
    gw_random(w, name, KVP__F32, inputs, outputs, 0, 1, &rng);
}

/* --- the families --- */

static void test_llama(void **state)
{
    (void)state;
    const kvp__arch *a = load_tiny(NULL);
    assert_string_equal(a->name, "llama");
    assert_int_equal(a->n_layers, 2);
    assert_int_equal(a->width, 32);
    assert_int_equal(a->feed_forward, 64);
    assert_int_equal(a->query_heads, 4);
    assert_int_equal(a->key_dim, 8);
    assert_int_equal(a->value_dim, 8);
    assert_int_equal(a->vocabulary, 64);
    assert_int_equal(a->context, 256);
    assert_true(a->norm_eps == 1e-5f);
    assert_true(a->embedding_scale == 1 && a->attention_scale == (float)(1 / sqrt(8)));
    assert_true(a->attention_softcap == 0 && a->logit_softcap == 0);
    assert_int_equal(a->activation, KVP__SILU);
    assert_int_equal(a->n_ropes, 1);
    assert_int_equal(a->ropes[0].kind, KVP__ROPE_PAIRS);
    assert_int_equal(a->ropes[0].dim, 8);
    assert_true(a->ropes[0].magnitude == 1);
    for (int i = 0; i < 4; i++)
        assert_true(fabs(a->ropes[0].inv_freq[i] * pow(10000, i / 4.0) - 1) < 1e-14);
    assert_string_equal(a->layers[1].down->name, "blk.1.ffn_down.weight");
    assert_int_equal(a->layers[1].kv_heads, 2);
    assert_null(a->layers[0].q_bias);
    assert_null(a->layers[0].q_norm);
    assert_null(a->layers[0].post_attn_norm);
    assert_string_equal(the_model.name, "tiny");
    assert_int_equal(the_model.n_tensors, 20);
    assert_int_equal(the_model.parameters * 4, the_model.weight_bytes);
    assert_int_equal(the_model.geometry.n_groups, 1);
    assert_int_equal(the_model.geometry.groups[0].layers, 2);
    assert_int_equal(the_model.geometry.context, 256);
    unload();
}

static void test_qwen(void **state)
{
    (void)state;
    const kvp__arch *a = load_tiny(&(gw_model){.arch = "qwen2"});
    assert_int_equal(a->ropes[0].kind, KVP__ROPE_HALVES);
    assert_string_equal(a->layers[0].v_bias->name, "blk.0.attn_v.bias");
    assert_null(a->layers[0].k_norm);
    unload();
    a = load_tiny(&(gw_model){.arch = "qwen3", .untied = 1});
    assert_int_equal(a->ropes[0].kind, KVP__ROPE_HALVES);
    assert_string_equal(a->layers[1].k_norm->name, "blk.1.attn_k_norm.weight");
    assert_null(a->layers[0].k_bias);
    assert_string_equal(a->output->name, "output.weight");
    unload();
    gw w = WITHOUT(&(gw_model){.arch = "qwen2"}, "blk.0.attn_k.bias");
    refuse(&w, KVP_ERR_INVALID_MODEL, "blk.0.attn_k.bias: missing");
}

static void test_gemma(void **state)
{
    (void)state;
    gw_model o = {.arch = "gemma3", .layers = 13, .window = 32};
    gw w = WITHOUT(&o, "gemma3.rope.freq_base");
    gw_f32(&w, "gemma3.rope.freq_base", 1e6f);
    gw_str(&w, "gemma3.rope.scaling.type", "linear");
    gw_f32(&w, "gemma3.rope.scaling.factor", 8);
    gw_f32(&w, "gemma3.final_logit_softcapping", 30);
    gw_f32(&w, "gemma3.attn_logit_softcapping", 50);
    const kvp__arch *a = load(&w);
    assert_int_equal(a->activation, KVP__GELU_TANH);
    assert_true(a->embedding_scale == sqrtf(32));
    assert_true(a->logit_softcap == 30 && a->attention_softcap == 50);
    assert_int_equal(a->n_ropes, 2);
    assert_true(fabs(a->ropes[0].inv_freq[1] * 8 * pow(1e6, 0.25) - 1) < 1e-14);
    assert_true(a->ropes[0].inv_freq[0] == 0.125);
    assert_true(a->ropes[1].inv_freq[0] == 1);
    assert_true(fabs(a->ropes[1].inv_freq[1] * 10 - 1) < 1e-14);
    for (uint32_t i = 0; i < 13; i++) {
        assert_int_equal(a->layers[i].window, i == 5 || i == 11 ? 0 : 32);
        assert_int_equal(a->layers[i].rope, i == 5 || i == 11 ? 0 : 1);
        assert_int_equal(the_model.geometry.layer_group[i], i == 5 || i == 11);
    }
    assert_int_equal(the_model.geometry.n_groups, 2);
    assert_int_equal(the_model.geometry.groups[0].layers, 11);
    assert_int_equal(the_model.geometry.groups[0].window, 32);
    assert_int_equal(the_model.geometry.groups[1].window, 0);
    assert_int_equal(the_model.geometry.layer_index[11], 1);
    assert_int_equal(the_model.geometry.layer_index[12], 10);
    assert_non_null(a->layers[0].post_ffn_norm);
    unload();
}

/* The pattern as a number, as an array, and the local base as a key. */
static void test_gemma_patterns(void **state)
{
    (void)state;
    gw_model o = {.arch = "gemma3", .layers = 4};
    static const uint8_t local[] = {0, 1, 1, 0};
    gw w = WITHOUT(&o, "no such key");
    gw_u32(&w, "gemma3.attention.sliding_window_pattern", 2);
    gw_f32(&w, "gemma3.rope.freq_base_swa", 16);
    const kvp__arch *a = load(&w);
    for (uint32_t i = 0; i < 4; i++) assert_int_equal(a->layers[i].window, i % 2 ? 0 : 16);
    assert_true(a->ropes[1].inv_freq[1] == 0.5);
    unload();
    w = WITHOUT(&o, "no such key");
    gw_bools(&w, "gemma3.attention.sliding_window_pattern", local, 4);
    a = load(&w);
    for (uint32_t i = 0; i < 4; i++) assert_int_equal(a->layers[i].window, local[i] ? 16 : 0);
    unload();
    w = WITHOUT(&o, "no such key");
    gw_bools(&w, "gemma3.attention.sliding_window_pattern", local, 3);
    refuse(&w, KVP_ERR_INVALID_MODEL, "sliding_window_pattern: an array of 3 for 4 layers");
    w = WITHOUT(&o, "gemma3.attention.sliding_window");
    a = load(&w);
    assert_int_equal(a->n_ropes, 1);
    assert_int_equal(the_model.geometry.n_groups, 1);
    unload();
}

/* Gemma 3 27B divides scores by the root of its width per head; its files do not say so. */
static void test_gemma_scale(void **state)
{
    (void)state;
    gw_model o = {.arch = "gemma3", .layers = 62, .width = 40};
    const kvp__arch *a = load_tiny(&o);
    assert_true(a->attention_scale == (float)(1 / sqrt(10)));
    unload();
    o.layers = 3;
    gw w = WITHOUT(&o, "no such key");
    gw_f32(&w, "gemma3.attention.scale", 0.5f);
    a = load(&w);
    assert_true(a->attention_scale == 0.5f);
    unload();
}

static void test_window_of_llama(void **state)
{
    (void)state;
    const kvp__arch *a = load_tiny(&(gw_model){.window = 24});
    assert_int_equal(a->layers[0].window, 24);
    assert_int_equal(a->layers[1].window, 24);
    assert_int_equal(a->layers[1].rope, 0);
    assert_int_equal(the_model.geometry.groups[0].window, 24);
    unload();
}

static void test_output_bias(void **state)
{
    (void)state;
    uint64_t rng = 3;
    gw w = WITHOUT(NULL, "no such key");
    gw_random(&w, "blk.1.attn_output.bias", KVP__F16, 32, 0, 0, 1, &rng);
    const kvp__arch *a = load(&w);
    assert_null(a->layers[0].o_bias);
    assert_int_equal(a->layers[1].o_bias->type, KVP__F16);
    unload();
}

/* --- what is refused --- */

static void test_every_tensor_missing(void **state)
{
    (void)state;
    static const char *const archs[] = {"llama", "qwen2", "qwen3", "gemma3"};
    for (size_t i = 0; i < KVP__COUNT(archs); i++) {
        gw_model o = {.arch = archs[i]};
        char names[64][64];
        load_tiny(&o);
        uint64_t n = the_model.n_tensors;
        assert_true(n >= 20 && n < 64);
        for (uint64_t k = 0; k < n; k++)
            snprintf(names[k], sizeof names[k], "%s", the_model.tensors[k].name);
        unload();
        for (uint64_t k = 0; k < n; k++) {
            gw w = WITHOUT(&o, names[k]);
            refuse(&w, KVP_ERR_INVALID_MODEL, names[k]);
        }
    }
}

static void test_every_key_missing(void **state)
{
    (void)state;
    static const char *const keys[] = {
        "general.architecture", "llama.block_count", "llama.context_length",
        "llama.embedding_length", "llama.feed_forward_length", "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon"};
    for (size_t i = 0; i < KVP__COUNT(keys); i++) {
        gw w = WITHOUT(NULL, keys[i]);
        refuse(&w, KVP_ERR_INVALID_MODEL, keys[i]);
        w = WITHOUT(NULL, keys[i]);
        gw_bool(&w, keys[i], 1);
        refuse(&w, KVP_ERR_FORMAT, keys[i]);
    }
    for (size_t i = 1; i < KVP__COUNT(keys) - 1; i++) {
        gw w = WITHOUT(NULL, keys[i]);
        gw_u32(&w, keys[i], 0);
        refuse(&w, KVP_ERR_INVALID_MODEL, keys[i]);
        w = WITHOUT(NULL, keys[i]);
        gw_u32(&w, keys[i], UINT32_MAX);
        refuse(&w, KVP_ERR_INVALID_MODEL, keys[i]);
    }
}

static void test_wrong_shapes(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        uint64_t inputs, outputs;
    } wrong[] = {{"blk.0.attn_q.weight", 32, 31},    {"blk.0.attn_k.weight", 32, 32},
                 {"blk.1.attn_v.weight", 16, 16},    {"blk.1.attn_output.weight", 31, 32},
                 {"blk.0.attn_norm.weight", 33, 0},  {"blk.0.ffn_norm.weight", 32, 2},
                 {"blk.1.ffn_down.weight", 32, 64},  {"token_embd.weight", 31, 64},
                 {"output_norm.weight", 64, 0},      {"output.weight", 32, 63}};
    for (size_t i = 0; i < KVP__COUNT(wrong); i++) {
        char shape[64];
        gw w = WITHOUT(NULL, wrong[i].name);
        matrix(&w, wrong[i].name, wrong[i].inputs, wrong[i].outputs);
        snprintf(shape, sizeof shape, "%s: its shape is %u x %u", wrong[i].name,
                 (unsigned)wrong[i].inputs, (unsigned)(wrong[i].outputs ? wrong[i].outputs : 1));
        refuse(&w, KVP_ERR_INVALID_MODEL, shape);
    }
}

static void test_not_understood(void **state)
{
    (void)state;
    uint64_t rng = 5;
    gw w = WITHOUT(NULL, "general.architecture");
    gw_str(&w, "general.architecture", "mam\nba");
    refuse(&w, KVP_ERR_UNKNOWN_ARCH, "'mam?ba'");
    w = WITHOUT(NULL, "no such key");
    gw_u32(&w, "llama.expert_count", 8);
    refuse(&w, KVP_ERR_UNSUPPORTED, "llama.expert_count: 8");
    w = WITHOUT(NULL, "no such key");
    gw_bool(&w, "llama.attention.causal", 0);
    refuse(&w, KVP_ERR_UNSUPPORTED, "llama.attention.causal");
    w = WITHOUT(NULL, "no such key");
    gw_f32(&w, "llama.logit_scale", 0.25f);
    refuse(&w, KVP_ERR_UNSUPPORTED, "llama.logit_scale");
    w = WITHOUT(NULL, "no such key");
    gw_str(&w, "llama.rope.scaling.type", "longrope");
    refuse(&w, KVP_ERR_UNSUPPORTED, "'longrope'");
    w = WITHOUT(NULL, "no such key");
    matrix(&w, "blk.0.ffn_up.bias", 64, 0);
    refuse(&w, KVP_ERR_UNSUPPORTED, "blk.0.ffn_up.bias");
    w = WITHOUT(NULL, "no such key");
    matrix(&w, "blk.2.attn_q.weight", 32, 32);
    refuse(&w, KVP_ERR_UNSUPPORTED, "blk.2.attn_q.weight");
    w = WITHOUT(NULL, "no such key");
    matrix(&w, "blk.0.attn_rot_embd.weight", 4, 0); /* known to be useless */
    load(&w);
    unload();
    w = WITHOUT(NULL, "output_norm.weight");
    gw_random(&w, "output_norm.weight", KVP__Q8_0, 32, 0, 0, 1, &rng);
    refuse(&w, KVP_ERR_UNSUPPORTED, "output_norm.weight: type Q8_0");
    static const uint32_t hidden[] = {64, 96};
    w = WITHOUT(NULL, "llama.feed_forward_length");
    gw_u32s(&w, "llama.feed_forward_length", hidden, 2);
    refuse(&w, KVP_ERR_UNSUPPORTED, "llama.feed_forward_length");
}

static void test_numbers_out_of_range(void **state)
{
    (void)state;
    static const float bad[] = {NAN, INFINITY, -1, 1e35f};
    static const char *const keys[] = {
        "llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base", "llama.attention.scale",
        "llama.rope.scale_linear", "llama.attn_logit_softcapping", "llama.final_logit_softcapping"};
    for (size_t k = 0; k < KVP__COUNT(keys); k++) {
        for (size_t i = 0; i < KVP__COUNT(bad); i++) {
            gw w = WITHOUT(NULL, keys[k]);
            gw_f32(&w, keys[k], bad[i]);
            refuse(&w, KVP_ERR_INVALID_MODEL, keys[k]);
        }
    }
    gw w = WITHOUT(NULL, "no such key");
    gw_u32(&w, "llama.rope.dimension_count", 10);
    refuse(&w, KVP_ERR_INVALID_MODEL, "llama.rope.dimension_count: 10");
    w = WITHOUT(NULL, "no such key");
    gw_u32(&w, "llama.rope.dimension_count", 3);
    refuse(&w, KVP_ERR_INVALID_MODEL, "llama.rope.dimension_count");
}

static void test_tokenizer_larger_than_the_embedding(void **state)
{
    (void)state;
    gw_model o = {.tokenizer = 1, .vocabulary = 80};
    load_tiny(&o);
    assert_non_null(the_model.tokenizer);
    assert_string_equal(the_model.tokenizer_name, "gpt2");
    assert_string_equal(the_model.pre_tokenizer, "gpt-2");
    unload();
    gw w = WITHOUT(&o, "token_embd.weight");
    matrix(&w, "token_embd.weight", 32, 79);
    refuse(&w, KVP_ERR_INVALID_MODEL, "the tokenizer has 80 tokens");
}

static void test_no_tokenizer(void **state)
{
    (void)state;
    load_tiny(NULL);
    assert_null(the_model.tokenizer);
    assert_int_equal(the_model.tokenizer_error.status, KVP_ERR_NO_TOKENIZER);
    assert_true(the_model.tokenizer_error.text[0] != 0);
    assert_int_equal(the_model.chat_format, KVP_CHAT_NONE);
    unload();
}

/* --- cases --- */

static void case_b109(void **state)
{
    (void)state;
    static const struct {
        uint32_t heads, kv_heads;
    } good[] = {{1, 1}, {5, 1}, {6, 1}, {7, 1}, {71, 1}, {71, 71}, {12, 4}, {16, 8}, {64, 8}};
    for (size_t i = 0; i < KVP__COUNT(good); i++) {
        gw_model o = {.heads = good[i].heads, .kv_heads = good[i].kv_heads, .width = 32};
        load_tiny(&o);
        assert_int_equal(the_model.geometry.groups[0].query_heads, good[i].heads);
        assert_int_equal(the_model.geometry.groups[0].kv_heads, good[i].kv_heads);
        unload();
    }
    for (uint32_t kv = 3; kv < 9; kv++) {
        if (kv == 4) continue;
        gw w;
        gw_init(&w);
        gw_tiny_into(&w, &(gw_model){.kv_heads = kv});
        refuse(&w, KVP_ERR_INVALID_MODEL, "llama.attention.head_count_kv");
    }
}

static uint64_t kv_bytes_per_token(void)
{
    kvp_plan_options o = {.size = sizeof o};
    kvp_plan_result r = {.size = sizeof r};
    kvp_error err = {.size = sizeof err};
    assert_int_equal(kvp__plan(&the_model.geometry, &o, &r, &err), KVP_OK);
    return r.kv_bytes_per_token;
}

static gw with_kv_heads(const uint32_t *heads, size_t n)
{
    static const uint32_t of_layer[] = {2, 2, 4, 0};
    gw_model o = {.layers = 4};
    gw w = WITHOUT(&o, "llama.attention.head_count_kv", "blk.2.attn_k.weight",
                   "blk.2.attn_v.weight", "blk.3.attn_norm.weight", "blk.3.attn_q.weight",
                   "blk.3.attn_k.weight", "blk.3.attn_v.weight", "blk.3.attn_output.weight");
    gw_u32s(&w, "llama.attention.head_count_kv", heads, n);
    matrix(&w, "blk.2.attn_k.weight", 32, of_layer[2] * 8);
    matrix(&w, "blk.2.attn_v.weight", 32, of_layer[2] * 8);
    return w;
}

static void case_b148(void **state)
{
    (void)state;
    static const uint32_t heads[] = {2, 2, 4, 0, 2};
    kvp__layout layout;
    kvp_error err = {.size = sizeof err};
    kvp_plan_options po = {.size = sizeof po, .tokens = 4000, .sequences = 4};
    kvp_plan_result plan = {.size = sizeof plan};
    load_tiny(&(gw_model){.layers = 4});
    assert_int_equal(kv_bytes_per_token(), 4 * 2 * 2 * 8 * 2);
    assert_int_equal(kvp__plan(&the_model.geometry, &po, &plan, &err), KVP_OK);
    assert_int_equal(kvp__layout_make(&layout, &the_model.geometry, 16, KVP_KV_F16, KVP_KV_F16,
                                      plan.blocks, &err), KVP_OK);
    assert_true(fabs((double)plan.kv_bytes / (double)layout.bytes - 1) < 0.01);
    unload();

    gw w = with_kv_heads(heads, 4);
    const kvp__arch *a = load(&w);
    assert_int_equal(kv_bytes_per_token(), 2 * (2 + 2 + 4) * 8 * 2);
    assert_int_equal(the_model.geometry.n_groups, 3);
    assert_int_equal(the_model.geometry.groups[0].layers, 2);
    assert_int_equal(the_model.geometry.groups[1].kv_heads, 4);
    assert_int_equal(the_model.geometry.groups[2].kv_heads, 0);
    assert_int_equal(the_model.geometry.layer_group[3], 2);
    assert_null(a->layers[3].q);
    assert_null(a->layers[3].attn_norm);
    assert_non_null(a->layers[3].down);
    unload();

    w = with_kv_heads(heads, 3);
    refuse(&w, KVP_ERR_INVALID_MODEL, "head_count_kv: an array of 3 for 4 layers");
    w = with_kv_heads(heads, 5);
    refuse(&w, KVP_ERR_INVALID_MODEL, "head_count_kv: an array of 5 for 4 layers");
    static const int32_t negative[] = {2, 2, -4, 2};
    w = WITHOUT(&(gw_model){.layers = 4}, "llama.attention.head_count_kv");
    gw_i32s(&w, "llama.attention.head_count_kv", negative, 4);
    refuse(&w, KVP_ERR_INVALID_MODEL, "head_count_kv");
}

static void case_b154(void **state)
{
    (void)state;
    gw_model o = {.width = 40, .head_dim = 16};
    const kvp__arch *a = load_tiny(&o);
    assert_int_equal(a->key_dim, 16);
    assert_int_equal(a->layers[0].q->dims[1], 64);
    assert_int_equal(a->layers[0].o->dims[0], 64);
    assert_int_equal(a->layers[0].o->dims[1], 40);
    assert_int_equal(kv_bytes_per_token(), 2 * 2 * 2 * 16 * 2);
    unload();

    o.head_dim = 10; /* without the keys: width / heads */
    gw w = WITHOUT(&o, "llama.attention.key_length", "llama.attention.value_length");
    a = load(&w);
    assert_int_equal(a->key_dim, 10);
    assert_int_equal(a->value_dim, 10);
    assert_int_equal(a->ropes[0].dim, 10);
    unload();

    o.head_dim = 16; /* the tensors say 16, the metadata 10 */
    w = WITHOUT(&o, "llama.attention.key_length", "llama.attention.value_length");
    refuse(&w, KVP_ERR_INVALID_MODEL, "blk.0.attn_q.weight: its shape is 40 x 64");

    o.width = 41;
    w = WITHOUT(&o, "llama.attention.key_length", "llama.attention.value_length");
    refuse(&w, KVP_ERR_INVALID_MODEL, "llama.attention.key_length: missing");
}

static void test_value_length(void **state)
{
    (void)state;
    gw_model o = {.layers = 1};
    gw w = WITHOUT(&o, "llama.attention.value_length", "blk.0.attn_v.weight",
                   "blk.0.attn_output.weight");
    gw_u32(&w, "llama.attention.value_length", 6);
    matrix(&w, "blk.0.attn_v.weight", 32, 12);
    matrix(&w, "blk.0.attn_output.weight", 24, 32);
    const kvp__arch *a = load(&w);
    assert_int_equal(a->value_dim, 6);
    assert_int_equal(the_model.geometry.groups[0].value_dim, 6);
    assert_int_equal(kv_bytes_per_token(), 2 * (8 + 6) * 2);
    unload();
}

static gw yarn(float factor)
{
    gw w = WITHOUT(&(gw_model){.head_dim = 64}, "no such key");
    gw_str(&w, "llama.rope.scaling.type", "yarn");
    gw_f32(&w, "llama.rope.scaling.factor", factor);
    gw_u32(&w, "llama.rope.scaling.original_context_length", 128);
    return w;
}

static void expect_magnitude(gw *w, double wanted)
{
    const kvp__arch *a = load(w);
    assert_true(fabs((double)a->ropes[0].magnitude - wanted) < 1e-6);
    assert_true(a->attention_scale == 0.125f); /* applied once, to sine and cosine */
    unload();
}

static void case_b156(void **state)
{
    (void)state;
    gw w = yarn(16);
    expect_magnitude(&w, 0.1 * log(16) + 1); /* 1.2773 */
    w = yarn(16);
    gw_f32(&w, "llama.rope.scaling.yarn_log_multiplier", 1);
    expect_magnitude(&w, 1.0);
    w = yarn(16);
    gw_f32(&w, "llama.rope.scaling.yarn_log_multiplier", 0.5f);
    expect_magnitude(&w, (0.1 * log(16) + 1) / (0.05 * log(16) + 1));
    w = yarn(16);
    gw_f32(&w, "llama.rope.scaling.yarn_attn_factor", 1.5f);
    expect_magnitude(&w, 1.5);
    w = yarn(16);
    gw_f32(&w, "llama.rope.scaling.attn_factor", 1.5f);
    expect_magnitude(&w, 1.5);
    w = yarn(16);
    gw_f32(&w, "llama.rope.scaling.attn_factor", 3.0f);
    gw_f32(&w, "llama.rope.scaling.yarn_attn_factor", 1.5f);
    gw_f32(&w, "llama.rope.scaling.yarn_log_multiplier", 1);
    expect_magnitude(&w, 1.5);
    w = yarn(1);
    expect_magnitude(&w, 1.0);
}

/* The frequencies against the formulas, written down once more with the C library's functions. */
static void test_yarn_frequencies(void **state)
{
    (void)state;
    gw w = yarn(4);
    gw_f32(&w, "llama.rope.scaling.yarn_beta_fast", 4);
    gw_f32(&w, "llama.rope.scaling.yarn_beta_slow", 0.5f);
    const kvp__arch *a = load(&w);
    double two_pi = 2 * acos(-1);
    double low = floor(64 * log(128 / (4 * two_pi)) / (2 * log(10000)));
    double high = ceil(64 * log(128 / (0.5 * two_pi)) / (2 * log(10000)));
    for (int i = 0; i < 32; i++) {
        double f = pow(10000, -i / 32.0), ramp = fmin(1, fmax(0, (i - low) / (high - low)));
        double wanted = f / 4 * ramp + f * (1 - ramp);
        assert_true(fabs(a->ropes[0].inv_freq[i] / wanted - 1) < 1e-13);
    }
    assert_true(low > 0 && high > low + 1);
    unload();
    w = yarn(4); /* a ramp of no width */
    gw_f32(&w, "llama.rope.scaling.yarn_beta_fast", 1e5f);
    gw_f32(&w, "llama.rope.scaling.yarn_beta_slow", 1e4f);
    a = load(&w);
    for (int i = 0; i < 32; i++) assert_true(isfinite(a->ropes[0].inv_freq[i]));
    unload();
    w = yarn(4);
    gw_f32(&w, "llama.rope.scaling.yarn_ext_factor", 0);
    a = load(&w);
    assert_true(a->ropes[0].inv_freq[0] == 0.25);
    unload();
}

static void test_linear_and_partial(void **state)
{
    (void)state;
    gw w = WITHOUT(NULL, "no such key");
    gw_f32(&w, "llama.rope.scale_linear", 4);
    gw_u32(&w, "llama.rope.dimension_count", 4);
    const kvp__arch *a = load(&w);
    assert_int_equal(a->ropes[0].dim, 4);
    assert_true(a->ropes[0].inv_freq[0] == 0.25);
    assert_true(fabs(a->ropes[0].inv_freq[1] * 400 - 1) < 1e-14);
    unload();
    w = WITHOUT(NULL, "no such key");
    gw_f32(&w, "llama.rope.scale_linear", 4);
    gw_str(&w, "llama.rope.scaling.type", "none");
    a = load(&w);
    assert_true(a->ropes[0].inv_freq[0] == 1);
    unload();
}

/* Llama 3.1's divisors; more of them than are read at once. */
static void test_frequency_factors(void **state)
{
    (void)state;
    float factors[100];
    uint64_t dims[1] = {100};
    for (int i = 0; i < 100; i++) factors[i] = (float)(i + 1);
    gw_model o = {.head_dim = 200, .heads = 1, .kv_heads = 1, .width = 32};
    gw w = WITHOUT(&o, "no such key");
    gw_tensor(&w, "rope_freqs.weight", KVP__F32, 1, dims, factors, sizeof factors);
    const kvp__arch *a = load(&w);
    for (int i = 0; i < 100; i++)
        assert_true(fabs(a->ropes[0].inv_freq[i] * (i + 1) * pow(10000, i / 100.0) - 1) < 1e-13);
    assert_int_equal(the_model.parameters * 4 + sizeof factors, the_model.weight_bytes);
    unload();
    static const float bad[] = {0, -1, NAN, INFINITY};
    for (size_t i = 0; i < KVP__COUNT(bad); i++) {
        factors[70] = bad[i];
        w = WITHOUT(&o, "no such key");
        gw_tensor(&w, "rope_freqs.weight", KVP__F32, 1, dims, factors, sizeof factors);
        refuse(&w, KVP_ERR_INVALID_MODEL, "rope_freqs.weight: element 70");
    }
    dims[0] = 99;
    w = WITHOUT(&o, "no such key");
    gw_tensor(&w, "rope_freqs.weight", KVP__F32, 1, dims, factors, 99 * 4);
    refuse(&w, KVP_ERR_INVALID_MODEL, "rope_freqs.weight: F32 of 99");
}

/* The output matrix: the file's if it is there, else the embedding. The logits: tests/api. */
static void case_b158(void **state)
{
    (void)state;
    const kvp__arch *a = load_tiny(NULL);
    assert_ptr_equal(a->output, a->token_embedding);
    unload();
    a = load_tiny(&(gw_model){.untied = 1});
    assert_string_equal(a->output->name, "output.weight");
    assert_ptr_not_equal(a->output, a->token_embedding);
    unload();
    gw w; /* a flag that says "tied" beside a matrix changes nothing */
    gw_init(&w);
    gw_tiny_into(&w, &(gw_model){.untied = 1});
    gw_bool(&w, "llama.tie_word_embeddings", 1);
    a = load(&w);
    assert_string_equal(a->output->name, "output.weight");
    unload();
}

static void test_groups_beyond_what_a_pool_holds(void **state)
{
    (void)state;
    uint32_t heads[17];
    gw w;
    gw_model o = {.layers = 17, .heads = 1, .kv_heads = 1, .width = 32};
    static const uint8_t local[] = {1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1};
    gw_init(&w); /* all alike but for the window: two groups */
    o.window = 8;
    gw_tiny_into(&w, &o);
    gw_bools(&w, "llama.attention.sliding_window_pattern", local, 17);
    load(&w);
    assert_int_equal(the_model.geometry.n_groups, 2);
    assert_int_equal(the_model.geometry.groups[0].layers, 9);
    unload();
    gw_init(&w);
    o = (gw_model){.layers = 17, .heads = 2520, .head_dim = 2, .width = 32};
    static const uint32_t divisors[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 15, 18, 20, 21, 24};
    char names[34][64];
    for (uint32_t i = 0; i < 17; i++) heads[i] = divisors[i];
    gw_u32(&w, "llama.block_count", 17);
    gw_u32s(&w, "llama.attention.head_count_kv", heads, 17);
    for (uint32_t i = 0; i < 17; i++) {
        snprintf(names[2 * i], 64, "blk.%u.attn_k.weight", (unsigned)i);
        snprintf(names[2 * i + 1], 64, "blk.%u.attn_v.weight", (unsigned)i);
        matrix(&w, names[2 * i], 1, heads[i] * 2);
        matrix(&w, names[2 * i + 1], 1, heads[i] * 2);
    }
    for (uint32_t i = 0; i < 17; i++) {
        static const char *const rest[] = {"attn_norm", "ffn_norm", "attn_q", "attn_output",
                                           "ffn_gate", "ffn_up", "ffn_down"};
        static const uint64_t shapes[][2] = {{1, 0}, {1, 0}, {1, 5040}, {5040, 1}, {1, 1}, {1, 1},
                                             {1, 1}};
        for (int k = 0; k < 7; k++) {
            char name[64];
            snprintf(name, sizeof name, "blk.%u.%s.weight", (unsigned)i, rest[k]);
            matrix(&w, name, shapes[k][0], shapes[k][1]);
        }
    }
    matrix(&w, "token_embd.weight", 1, 4);
    matrix(&w, "output_norm.weight", 1, 0);
    gw_str(&w, "general.architecture", "llama");
    gw_u32(&w, "llama.context_length", 64);
    gw_u32(&w, "llama.embedding_length", 1);
    gw_u32(&w, "llama.feed_forward_length", 1);
    gw_u32(&w, "llama.attention.head_count", 2520);
    gw_u32(&w, "llama.attention.key_length", 2);
    gw_u32(&w, "llama.attention.value_length", 2);
    gw_f32(&w, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    refuse(&w, KVP_ERR_UNSUPPORTED, "layer 16: layers of more than 16");
}

/* --- every weight type, faults, sources --- */

static void test_types(void **state)
{
    (void)state;
    static const uint32_t types[] = {KVP__F32, KVP__F16, KVP__BF16, KVP__Q4_0, KVP__Q4_1,
                                     KVP__Q5_0, KVP__Q5_1, KVP__Q8_0, KVP__Q2_K, KVP__Q3_K,
                                     KVP__Q4_K, KVP__Q5_K, KVP__Q6_K};
    for (size_t i = 0; i < KVP__COUNT(types); i++) {
        const kvp__arch *a = load_tiny(&(gw_model){.type = types[i], .layers = 1});
        assert_int_equal(a->layers[0].down->type, types[i]);
        assert_int_equal(a->width, kvp__type_get(types[i]).block == 256 ? 256 : 32);
        unload();
    }
}

static void test_every_allocation_refused(void **state)
{
    (void)state;
    size_t bytes;
    gw_model o = {.arch = "gemma3", .tokenizer = 1, .vocabulary = 80};
    uint8_t *data = gw_tiny(&o, &bytes);
    kvp__source source;
    kvp__source_memory(&source, data, bytes);
    for (uint64_t n = 1;; n++) {
        kvp_error err = {.size = sizeof err};
        heap_init(&the_heap);
        the_heap.refuse = n;
        kvp_status s = kvp__model_load(&the_model, &the_heap.hooks, &source, &err);
        if (s == KVP_OK) {
            assert_true(n > 12);
            kvp__model_unload(&the_model);
        }
        assert_int_equal(the_heap.blocks, 0);
        assert_int_equal(the_heap.mismatches, 0);
        if (s == KVP_OK) break;
        assert_int_equal(s, KVP_ERR_NO_MEMORY);
    }
    free(data);
}

static int no_factors(void *user, uint64_t offset, void *buffer, size_t bytes)
{
    if (offset > 0) return 1;
    memcpy(buffer, user, bytes);
    return 0;
}

static void test_factors_that_cannot_be_read(void **state)
{
    (void)state;
    static const float factors[4] = {1, 1, 1, 1};
    uint64_t dims[1] = {4};
    size_t bytes;
    kvp_error err = {.size = sizeof err};
    gw w = WITHOUT(&(gw_model){.vocabulary = 8192}, "no such key"); /* beyond the first read */
    gw_tensor(&w, "rope_freqs.weight", KVP__F32, 1, dims, factors, sizeof factors);
    uint8_t *data = gw_finish(&w, &bytes);
    kvp__source source = {data, bytes, no_factors, NULL};
    heap_init(&the_heap);
    assert_int_equal(kvp__model_load(&the_model, &the_heap.hooks, &source, &err), KVP_ERR_IO);
    assert_non_null(strstr(err.text, "rope_freqs.weight"));
    assert_int_equal(the_heap.blocks, 0);
    free(data);
}

static void test_mutations(void **state)
{
    (void)state;
    size_t bytes, loaded = 0;
    uint64_t rng = 11;
    gw_model o = {.arch = "gemma3", .tokenizer = 1, .vocabulary = 80, .layers = 1};
    uint8_t *data = gw_tiny(&o, &bytes);
    uint8_t *copy = malloc(bytes);
    assert_non_null(copy);
    for (int round = 0; round < 5000; round++) {
        kvp_error err;
        memcpy(copy, data, bytes);
        for (uint64_t n = gw_rand(&rng) % 3 + 1; n; n--)
            copy[gw_rand(&rng) % 4096] = (uint8_t)(gw_rand(&rng) >> 40);
        if (load_bytes(copy, bytes, &err) == KVP_OK) {
            loaded++;
            kvp__model_unload(&the_model);
        } else {
            assert_true(err.text[0] != 0);
        }
        assert_int_equal(the_heap.blocks, 0);
    }
    assert_true(loaded > 100);
    free(copy);
    free(data);
}

static void test_path(void **state)
{
    (void)state;
    char path[] = P_tmpdir "/kvpage-test-XXXXXX";
    size_t bytes;
    kvp__source source;
    kvp_error err = {.size = sizeof err};
    uint8_t *data = gw_tiny(NULL, &bytes);
    heap_init(&the_heap);
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, data, bytes), bytes);
    assert_int_equal(kvp__source_path(&source, &the_heap.hooks, path, &err), KVP_OK);
    assert_int_equal(source.bytes, bytes);
    assert_int_equal(kvp__model_load(&the_model, &the_heap.hooks, &source, &err), KVP_OK);
    assert_int_equal(ftruncate(fd, 100), 0); /* cut short while it is open */
    uint8_t buffer[64];
    assert_int_equal(source.read(source.user, 0, buffer, 64), 0);
    assert_memory_equal(buffer, data, 64);
    assert_int_not_equal(source.read(source.user, 64, buffer, 64), 0);
    kvp__model_unload(&the_model);
    assert_int_equal(the_heap.blocks, 0);
    the_heap.refuse = the_heap.calls + 1;
    assert_int_equal(kvp__source_path(&source, &the_heap.hooks, path, &err), KVP_ERR_NO_MEMORY);
    close(fd);
    unlink(path);
    assert_int_equal(kvp__source_path(&source, &the_heap.hooks, path, &err), KVP_ERR_IO);
    assert_non_null(strstr(err.text, path));
    assert_int_equal(kvp__source_path(&source, &the_heap.hooks, P_tmpdir, &err), KVP_ERR_IO);
    assert_non_null(strstr(err.text, "not a regular file"));
    free(data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_llama),
        cmocka_unit_test(test_qwen),
        cmocka_unit_test(test_gemma),
        cmocka_unit_test(test_gemma_patterns),
        cmocka_unit_test(test_gemma_scale),
        cmocka_unit_test(test_window_of_llama),
        cmocka_unit_test(test_output_bias),
        cmocka_unit_test(test_every_tensor_missing),
        cmocka_unit_test(test_every_key_missing),
        cmocka_unit_test(test_wrong_shapes),
        cmocka_unit_test(test_not_understood),
        cmocka_unit_test(test_numbers_out_of_range),
        cmocka_unit_test(test_tokenizer_larger_than_the_embedding),
        cmocka_unit_test(test_no_tokenizer),
        cmocka_unit_test(case_b109),
        cmocka_unit_test(case_b148),
        cmocka_unit_test(case_b154),
        cmocka_unit_test(test_value_length),
        cmocka_unit_test(case_b156),
        cmocka_unit_test(test_yarn_frequencies),
        cmocka_unit_test(test_linear_and_partial),
        cmocka_unit_test(test_frequency_factors),
        cmocka_unit_test(case_b158),
        cmocka_unit_test(test_groups_beyond_what_a_pool_holds),
        cmocka_unit_test(test_types),
        cmocka_unit_test(test_every_allocation_refused),
        cmocka_unit_test(test_factors_that_cannot_be_read),
        cmocka_unit_test(test_mutations),
        cmocka_unit_test(test_path),
    };
    return cmocka_run_group_tests_name("model/arch", tests, NULL, NULL);
}
