/*
 * A model as the engine and the devices see it: a descriptor, the places of its tensors, a reader
 * for their bytes, a tokenizer. Immutable once opened, so threads share it without locks.
 *
 * One descriptor covers every architecture: a family is a row of settings, never code of its own
 * (model/arch.c fills the descriptor from the file's metadata).
 */
#ifndef KVP_MODEL_MODEL_H
#define KVP_MODEL_MODEL_H

#include "base/base.h"
#include "plan/plan.h"

/* Tensor types, with the numbers of the GGUF format. */
typedef enum kvp__type {
    KVP__F32 = 0, KVP__F16 = 1, KVP__Q4_0 = 2, KVP__Q4_1 = 3, KVP__Q5_0 = 6, KVP__Q5_1 = 7,
    KVP__Q8_0 = 8, KVP__Q2_K = 10, KVP__Q3_K = 11, KVP__Q4_K = 12, KVP__Q5_K = 13, KVP__Q6_K = 14,
    KVP__BF16 = 30
} kvp__type;

typedef struct kvp__type_info {
    const char *name;      /* NULL: not a type we take */
    uint32_t block;        /* elements of a block along the innermost dimension */
    uint32_t bytes;        /* of a block */
} kvp__type_info;

/* name is NULL for types that are not supported. */
kvp__type_info kvp__type_get(uint32_t type);

typedef struct kvp__tensor {
    const char *name;
    uint32_t type;         /* kvp__type */
    uint32_t n_dims;
    uint64_t dims[4];      /* innermost first: dims[0] inputs, dims[1] outputs of a projection */
    uint64_t offset;       /* from the start of the file, checked to lie inside it */
    uint64_t bytes;
} kvp__tensor;

/* Where bytes come from: a file (pread), memory, or the host's reader. */
typedef struct kvp__source {
    void *user;
    uint64_t bytes;
    int (*read)(void *user, uint64_t offset, void *buffer, size_t bytes); /* 0: all were read */
    void (*close)(void *user); /* may be NULL */
    int64_t changed_ns;        /* a file's time of change; 0: not a file */
} kvp__source;

/* --- the descriptor --- */

typedef enum kvp__rope_kind {
    KVP__ROPE_NONE = 0,
    KVP__ROPE_PAIRS = 1,   /* rotates elements 2i and 2i + 1 (GGUF's "norm", llama files) */
    KVP__ROPE_HALVES = 2   /* rotates elements i and i + n/2 ("neox": qwen, gemma) */
} kvp__rope_kind;

typedef enum kvp__rope_scaling {
    KVP__SCALING_NONE = 0,
    KVP__SCALING_LINEAR = 1,
    KVP__SCALING_YARN = 2
} kvp__rope_scaling;

/* One table of inverse frequencies; layers choose by number (Gemma has two). */
typedef struct kvp__rope {
    kvp__rope_kind kind;
    uint32_t dim;          /* rotated elements of a head, even, <= key_dim; the rest passes */
    float magnitude;       /* multiplies sine and cosine (YaRN's attention factor), else 1 */
    const double *inv_freq; /* [dim / 2], scaling and rope_freqs factors already in */
} kvp__rope;

typedef enum kvp__activation { KVP__SILU = 0, KVP__GELU_TANH = 1 } kvp__activation;

/* A layer's tensors; NULL where the architecture has none. */
typedef struct kvp__layer {
    const kvp__tensor *attn_norm, *ffn_norm;           /* RMS weights [width] */
    const kvp__tensor *q, *k, *v, *o;                  /* [width -> heads * dim], [-> width] */
    const kvp__tensor *q_bias, *k_bias, *v_bias, *o_bias;
    const kvp__tensor *q_norm, *k_norm;                /* RMS per head [key_dim], before RoPE */
    const kvp__tensor *post_attn_norm, *post_ffn_norm; /* before the residual is added (gemma3) */
    const kvp__tensor *gate, *up, *down;
    uint32_t kv_heads;
    uint32_t window;       /* 0: sees everything */
    uint32_t rope;         /* index into ropes */
} kvp__layer;

typedef struct kvp__arch {
    char name[32];
    uint32_t n_layers, width, feed_forward, query_heads, key_dim, value_dim, vocabulary, context;
    float norm_eps;
    float embedding_scale; /* 1, or sqrt(width) for Gemma, rounded as the reference rounds it */
    float attention_scale; /* of the scores: 1/sqrt(key_dim) unless the file says otherwise */
    float attention_softcap, logit_softcap; /* 0: none */
    kvp__activation activation;
    kvp__rope ropes[2];
    uint32_t n_ropes;
    const kvp__tensor *token_embedding, *output_norm;
    const kvp__tensor *output; /* == token_embedding when tied */
    kvp__layer *layers;
} kvp__arch;

typedef struct kvp__tokenizer kvp__tokenizer; /* model/tokenizer.h */
typedef struct kvp__weights kvp__weights;     /* of a device */

typedef struct kvp__model {
    kvp__hooks hooks;
    kvp__source source;
    uint64_t n_tensors;
    kvp__tensor *tensors;
    kvp__arch arch;            /* all zero for an own-model geometry */
    kvp__geometry geometry;
    kvp__tokenizer *tokenizer; /* NULL: none that is understood; why is in tokenizer_error */
    kvp_error tokenizer_error;
    char name[96];
    char tokenizer_name[32], pre_tokenizer[32];
    uint32_t chat_format;      /* KVP_CHAT_... */
    uint64_t parameters, weight_bytes;
    uint32_t activations;      /* KVP_ACTIVATIONS_... */
    uint32_t cpu_level;        /* asked cap; 0: none */
    void *arena;               /* what the pointers above point into; gguf.c's own */
    uint8_t key[256];          /* own-model: the host's model key, which enters prefix keys */
    uint32_t key_bytes;
} kvp__model;

/* Reads and checks header, metadata and tensor table from `source`, fills the descriptor and the
 * tokenizer. On success the model owns the source. On failure nothing is kept and the source is
 * left to the caller. Reads at most what the header needs; memory stays within a small multiple of
 * the header's bytes, whatever counts the file declares. */
kvp_status kvp__model_load(kvp__model *out, const kvp__hooks *hooks, const kvp__source *source,
                           kvp_error *err);
void kvp__model_unload(kvp__model *m);

/* A source for a path (opens the file, close-on-exec) or borrowed memory. */
kvp_status kvp__source_path(kvp__source *out, const kvp__hooks *hooks, const char *path,
                            kvp_error *err);
void kvp__source_memory(kvp__source *out, const void *data, size_t bytes);

#endif
