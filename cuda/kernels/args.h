/*
 * What kernels are given: plain structs, one for each kernel, passed by value. The same file is read
 * by the C host (cuda/), by nvcc and by the emulator, and the sizes are asserted at the end, so that
 * the three agree.
 *
 * Two kinds of values. What is in these structs stays the same as long as a graph is replayed: shapes,
 * strides, addresses. What changes from step to step lies in device memory behind `step`, written by
 * one upload: how many rows there are, which tokens, which items of attention. A kernel is launched
 * with a grid for the most that the graph was made for, and its surplus blocks leave at once.
 *
 * Pointers are device addresses: the host never follows them. Strides called `_row`, `_head` are in
 * elements; those of blocks of KV are in bytes, as in plan/plan.h, and 64 bits wide.
 */
#ifndef KVP_CUDA_KERNELS_ARGS_H
#define KVP_CUDA_KERNELS_ARGS_H

#include <stdint.h>

/* Element types. Those of KV have the numbers of KVP_KV_... */
#define KVP__EL_F16 1u
#define KVP__EL_BF16 2u
#define KVP__EL_F32 3u
#define KVP__EL_Q8_0 4u /* weights alone, in the layout of kvp__quant_planes below */
#define KVP__EL_Q4_0 5u

/* Where a step begins, in device memory: the head of the upload. */
typedef struct kvp__cuda_step {
    uint32_t n_rows;    /* query tokens of the step */
    uint32_t n_seqs;
    uint32_t n_outputs; /* rows that are read */
    uint32_t n_patches;
    uint32_t n_copies;
    uint32_t pad[3];
    uint32_t n_items[16][4]; /* of each group's work list, by tile: see kvp__cuda_item */
    uint32_t n_merges[16];   /* of each group: rows that slots have parts of */
} kvp__cuda_step;

/* --- block tables: persistent on the device, kept up to date by patches --- */

typedef struct kvp__cuda_patch {
    uint32_t index; /* into all tables: [group][max_seqs][stride] */
    uint32_t value;
} kvp__cuda_patch;

typedef struct kvp__patch_args {
    const kvp__cuda_step *step;
    const kvp__cuda_patch *patches;
    uint32_t *tables;
} kvp__patch_args;

/* --- blocks of KV ---
 * On this device a head's part of a block is token-major, K like V: [kv head][token][dim]. The byte
 * counts are those of plan/plan.h, whose K part is ordered otherwise for the CPU. */
typedef struct kvp__kv_place {
    uint8_t *slab;
    uint64_t base;            /* of the group's blocks in the slab */
    uint64_t pitch;           /* from one block to the next */
    uint64_t k_layer, v_layer; /* of this layer's K and V part in a block */
    uint64_t k_head, v_head;  /* from one head's part to the next */
} kvp__kv_place;

typedef struct kvp__cuda_copy {
    uint32_t group, src, dst, tokens; /* the first `tokens` tokens of block src into block dst */
} kvp__cuda_copy;

typedef struct kvp__cuda_copy_group {
    uint64_t base, pitch, layer;      /* bytes: plan/plan.h */
    uint64_t k_part;                  /* V begins here in a layer */
    uint64_t k_head, v_head;
    uint32_t layers, kv_heads;
    uint32_t k_token, v_token;        /* bytes of one token of one head; multiples of 4 */
} kvp__cuda_copy_group;

/* grid (copies, layers); blocks beyond step->n_copies or the group's layers leave. No copy's dst is
 * another's src or dst. */
typedef struct kvp__copy_args {
    const kvp__cuda_step *step;
    const kvp__cuda_copy *copies;
    const kvp__cuda_copy_group *groups; /* [n_groups], in device memory */
    uint8_t *slab;
} kvp__copy_args;

/* --- rows --- */

/* x[row] = table[token[row]] * scale; zeros for a token outside the vocabulary. grid (rows). `type`
 * F16, BF16, F32; Q8_0, Q4_0 with the scales at KVP__QUANT_SCALES_AT (launch.h), width % 32 = 0. */
typedef struct kvp__embed_args {
    const kvp__cuda_step *step;
    const void *table;       /* [vocabulary][width] */
    const int32_t *tokens;
    float *x;                /* [row][width] */
    uint32_t type, width, vocabulary;
    float scale;
} kvp__embed_args;

/* The residual addition and the norm of a row. grid (rows).
 *     d = delta[r] (+ bias);  if post: d = rms_norm(d, post);  x[r] += d;  out[r] = rms_norm(x[r], weight)
 * where r is the row, or rows[i] if `rows` is given (of step->n_outputs rows; `x` is then left as it
 * is, and out is indexed by i). delta NULL: nothing is added. */
typedef struct kvp__norm_args {
    const kvp__cuda_step *step;
    float *x;                /* [row][width] */
    const float *delta;      /* [row][width] or NULL */
    const float *bias, *post; /* [width] or NULL */
    const float *weight;     /* [width] */
    const uint32_t *rows;    /* or NULL */
    void *out;               /* [row][width] of out_type */
    uint32_t width, out_type; /* F16 or BF16 */
    float eps;
    uint32_t pad;
} kvp__norm_args;

/* out = activation(gate) * up. grid (rows, ceil(n / (4 * threads))). */
typedef struct kvp__activate_args {
    const kvp__cuda_step *step;
    const float *gate_up;    /* [row][2 * n]: gate, then up */
    void *out;               /* [row][n] */
    uint32_t n, out_type;
    uint32_t activation;     /* 0: SiLU, 1: GELU by tanh */
    uint32_t pad;
} kvp__activate_args;

/* Biases, norms of heads, rotation; q into its buffer, K and V into their blocks. grid (rows, heads
 * by the eight: query heads, kv heads of K and, unless value_dim is 0, kv heads of V). What becomes
 * F16 is held within its range, as on the CPU. query_heads may be 0. */
typedef struct kvp__append_args {
    const kvp__cuda_step *step;
    const void *q, *k, *v;   /* of in_type */
    int64_t q_row, q_head, k_row, k_head, v_row, v_head;
    const float *q_bias, *k_bias, *v_bias; /* [heads * dim] or NULL */
    const float *q_norm, *k_norm;          /* [key_dim] or NULL */
    const double *inv_freq;  /* [rope_dim / 2] */
    const uint32_t *positions, *row_seq;   /* [row] */
    const uint32_t *tables;  /* of the group: [max_seqs][table_stride] */
    void *q_out;             /* [row][query_heads][key_dim] of k_type */
    kvp__kv_place kv;
    uint32_t table_stride, block_shift;
    uint32_t in_type, k_type, v_type;      /* F32, F16, BF16 */
    uint32_t query_heads, kv_heads, key_dim, value_dim;
    uint32_t rope_kind, rope_dim;          /* kvp__rope_kind of model/model.h; 0: none */
    float rope_magnitude, eps;
    uint32_t pad;
} kvp__append_args;

/* --- attention --- */

/* A tile of rows x a range of keys, done once for each KV head: block i of a launch is KV head
 * i % kv_heads of item i / kv_heads. A "token" is an entry of the row list, so that rows of several
 * sequences may attend together to blocks they share; a "row" is a token times a query head of the
 * KV head, token-major: row = token * (query_heads / kv_heads) + head. A tile is 16 << t rows; the
 * list has the items of t = 0 first, then those of 1, 2 and 3, and a launch does those of one t. */
typedef struct kvp__cuda_item {
    uint32_t seq;        /* whose block table */
    uint32_t first_token, n_tokens; /* entries of the row list that the rows are of */
    uint32_t first_row;  /* of this tile, counted from the first token's first head */
    uint32_t kv_begin, kv_end; /* keys, of which no other is read; nothing below 2^31 is too far */
    int32_t slot;        /* partial results of the first token go here, of token i to slot + i;
                            -1: this is all, the result goes to `out` */
    uint32_t pad;
} kvp__cuda_item;

typedef struct kvp__attention_args {
    const kvp__cuda_step *step;
    const kvp__cuda_item *items;
    const uint32_t *rows;       /* the row list: rows of the step */
    const uint32_t *positions;  /* [row]: the row sees keys 0 to position, */
    const uint32_t *tables;     /* of the group: [max_seqs][table_stride] */
    const void *q;              /* [row][query_heads][key_dim] of the type of K */
    void *out;                  /* [row]... of out_type */
    float *part_out, *part_lse; /* [slot][query_heads][value_dim], [slot][query_heads]: base 2 */
    const float *sinks;         /* [query_heads] or NULL: a score without a value, to base e */
    kvp__kv_place kv;
    int64_t out_row, out_head;
    uint32_t group, tile;       /* of step->n_items */
    uint32_t table_stride, block_shift;
    uint32_t query_heads, kv_heads, key_dim, value_dim;
    uint32_t window;            /* 0: all; w: the last w keys, itself included */
    uint32_t k_type, v_type;    /* for the fallback; the tiled kernels are made for one */
    uint32_t out_type;
    float scale, softcap;       /* scale above 0; softcap 0: none */
} kvp__attention_args;

/* A row with parts in several slots. */
typedef struct kvp__cuda_merge {
    uint32_t row, first, count; /* slots[first .. first + count); count 0: empty, 0 and -inf */
} kvp__cuda_merge;

/* One warp a (row, query head). grid (ceil(merges * query_heads / warps)). */
typedef struct kvp__merge_args {
    const kvp__cuda_step *step;
    const kvp__cuda_merge *merges;
    const uint32_t *slots;
    const float *part_out, *part_lse;
    const float *sinks;
    void *out;
    float *lse;                 /* [row][query_heads], base 2, or NULL */
    int64_t out_row, out_head;
    uint32_t group, query_heads, value_dim, out_type;
} kvp__merge_args;

/* --- matrices --- */

/* Quantised weights on the device: the file's blocks of 32, taken apart so that loads are whole
 * 16-byte pieces. Q8_0: int8 [n_out][n_in], then F16 scales [n_out][n_in / 32]. Q4_0: 4 bits (value
 * + 8) [n_out][n_in / 2] with the file's order in a block (element i low, i + 16 high), then scales.
 * Both parts begin at multiples of 256 bytes. */
typedef struct kvp__quant_planes {
    const uint8_t *values;
    const uint16_t *scales;
} kvp__quant_planes;

/* y[row][n_out] = x[row] times w, for few rows: eight at a time. n_in a multiple of 32; x_type F16,
 * BF16 or F32; x aligned to 16 bytes. */
typedef struct kvp__matvec_args {
    const kvp__cuda_step *step;
    kvp__quant_planes w;
    const void *x;           /* [row][n_in] of x_type */
    float *y;                /* [row][y_row] */
    uint32_t n_in, n_out, x_type, y_row;
    uint32_t of_outputs;     /* 1: step->n_outputs rows, else step->n_rows */
    uint32_t pad;
} kvp__matvec_args;

/* Rows [first, first + n_rows) of a quantised matrix as 16-bit floats. */
typedef struct kvp__dequant_args {
    kvp__quant_planes w;
    void *out;               /* [n_rows][n_in] */
    uint32_t n_in, first, n_rows, out_type;
} kvp__dequant_args;

/* --- the next token --- */

/* kvp__sampler's settings of a row that the device chooses for. */
typedef struct kvp__cuda_draw {
    uint64_t seed, position;
    float temperature, top_p, min_p; /* temperature 0: greedy */
    uint32_t top_k;
    uint32_t wanted;         /* 0: the host takes the logits; they are softcapped, that is all */
    uint32_t pad;
} kvp__cuda_draw;

typedef struct kvp__cuda_drawn {
    int32_t token;           /* -1: a logit is NaN or +infinity, or all are -infinity */
    uint32_t bad;            /* the first such token; `vocabulary`: all are -infinity */
} kvp__cuda_drawn;

/* Softcaps the logits in place, then chooses as kvp__sample of model/sampler.c does, the same token
 * for the same logits. grid (rows of logits), one block each; row i is output first + i. */
typedef struct kvp__sample_args {
    const kvp__cuda_step *step;
    float *logits;           /* [output][vocabulary] */
    const kvp__cuda_draw *draws;
    kvp__cuda_drawn *drawn;
    void *scratch;           /* [row of logits][KVP__CUDA_SAMPLE_SCRATCH(vocabulary)] */
    uint32_t first;          /* the output that row 0 of `logits` is */
    uint32_t vocabulary;
    float softcap;
    uint32_t pad;
} kvp__sample_args;

#ifdef __cplusplus
#define KVP__SIZE(type, n) static_assert(sizeof(type) == (n), "host and kernel disagree on " #type)
#else
#define KVP__SIZE(type, n) _Static_assert(sizeof(type) == (n), "host and kernel disagree on " #type)
#endif
KVP__SIZE(kvp__cuda_step, 352);
KVP__SIZE(kvp__cuda_copy_group, 64);
KVP__SIZE(kvp__kv_place, 56);
KVP__SIZE(kvp__embed_args, 48);
KVP__SIZE(kvp__norm_args, 80);
KVP__SIZE(kvp__activate_args, 40);
KVP__SIZE(kvp__append_args, 272);
KVP__SIZE(kvp__cuda_item, 32);
KVP__SIZE(kvp__attention_args, 208);
KVP__SIZE(kvp__merge_args, 96);
KVP__SIZE(kvp__matvec_args, 64);
KVP__SIZE(kvp__dequant_args, 40);
KVP__SIZE(kvp__cuda_draw, 40);
KVP__SIZE(kvp__sample_args, 56);

#endif
