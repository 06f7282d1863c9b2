/*
 * Writes GGUF files into memory, and whole tiny random models, for tests. It checks nothing: a test
 * that wants a hostile file writes one here, or patches the bytes. Memory is malloc's; running out of
 * it ends the test program.
 */
#ifndef TESTS_SUPPORT_GGUF_WRITER_H
#define TESTS_SUPPORT_GGUF_WRITER_H

#include <stddef.h>
#include <stdint.h>

typedef struct gw_buffer {
    uint8_t *data;
    size_t bytes, size;
} gw_buffer;

void gw_put(gw_buffer *b, const void *data, size_t bytes); /* NULL: zeros */
void gw_put_u32(gw_buffer *b, uint32_t v);
void gw_put_u64(gw_buffer *b, uint64_t v);
void gw_put_str(gw_buffer *b, const char *text); /* length, then the bytes */

/* A file: keys and tensors are collected apart, gw_finish puts them together. */
typedef struct gw {
    uint32_t version, alignment; /* 3, 32 unless changed; another alignment needs its key too */
    uint64_t n_keys, n_tensors;
    gw_buffer keys, table, data;
    const char *skip[8]; /* names that are passed over; see gw_skip */
    int n_skip;
} gw;

void gw_init(gw *w);
void gw_free(gw *w);
/* The file; free() it. The writer is freed too. */
uint8_t *gw_finish(gw *w, size_t *bytes);

/* From here on keys and tensors of this name are left out; at most eight names, borrowed, until
 * gw_tiny_into returns. To change what a tiny model says, skip it and write it afterwards. */
void gw_skip(gw *w, const char *name);

void gw_u32(gw *w, const char *key, uint32_t v);
void gw_u64(gw *w, const char *key, uint64_t v);
void gw_i32(gw *w, const char *key, int32_t v);
void gw_f32(gw *w, const char *key, float v);
void gw_bool(gw *w, const char *key, int v);
void gw_str(gw *w, const char *key, const char *text);
void gw_strs(gw *w, const char *key, const char *const *texts, size_t n);
void gw_u32s(gw *w, const char *key, const uint32_t *v, size_t n);
void gw_i32s(gw *w, const char *key, const int32_t *v, size_t n);
void gw_f32s(gw *w, const char *key, const float *v, size_t n);
void gw_bools(gw *w, const char *key, const uint8_t *v, size_t n);
/* A key with a type and value bytes of one's own. */
void gw_raw(gw *w, const char *key, uint32_t type, const void *value, size_t bytes);

/* A tensor with its bytes (NULL: zeros), placed at the next aligned offset. */
void gw_tensor(gw *w, const char *name, uint32_t type, uint32_t n_dims, const uint64_t *dims,
               const void *data, size_t bytes);

/* A tensor of one or two dimensions (`outputs` 0: one) filled with random values of about the size
 * `scale`, quantised or not; for norms, around `mean`. Types: every one the library takes. */
void gw_random(gw *w, const char *name, uint32_t type, uint64_t inputs, uint64_t outputs,
               float mean, float scale, uint64_t *rng);

/* --- tiny models --- */

typedef struct gw_model {
    const char *arch;  /* NULL: "llama"; also "qwen2", "qwen3", "gemma3" */
    uint32_t type;     /* of the matrices: a GGUF tensor type, 0 is F32 */
    uint32_t layers;   /* 0: 2 */
    uint32_t heads;    /* 0: 4 */
    uint32_t kv_heads; /* 0: 2 */
    uint32_t head_dim; /* 0: 8 */
    uint32_t width;    /* 0: heads * head_dim, rounded up to a whole block of `type` */
    uint32_t feed_forward; /* 0: 2 * width */
    uint32_t vocabulary;   /* 0: 64 */
    uint32_t context;      /* 0: 256 */
    uint32_t window;       /* 0: none; gemma3: 16 */
    int untied;            /* 1: an output matrix of its own */
    int tokenizer;         /* 1: byte-level BPE, single characters only; needs vocabulary >= 64 */
    uint64_t seed;
} gw_model;

/* Random weights such that logits are of order one. `o` NULL: all defaults. Projections whose inputs
 * are no whole number of blocks (attn_output when heads * head_dim differs from the width) are
 * Q8_0, or F16, instead. free() the result. */
uint8_t *gw_tiny(const gw_model *o, size_t *bytes);
/* The same into a writer, for a test that adds or leaves out something before gw_finish. */
void gw_tiny_into(gw *w, const gw_model *o);

/* A small generator, for tests that need the same values everywhere. */
uint64_t gw_rand(uint64_t *state);
float gw_uniform(uint64_t *state); /* -1 to 1 */

#endif
