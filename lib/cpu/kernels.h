/*
 * The CPU device's kernels: what each computes, and one table of them per instruction-set level.
 *
 * The files of level/ are compiled once for each level with -DKVP__LEVEL=<KVP_CPU_...>; every
 * function there is named by KVP__AT(name), and table.c gathers a level's functions into one
 * constant kvp__kernels. Nothing else of the library may be compiled with a level's flags.
 *
 * Invariant: a kernel's result has the same bits at every level, and a row's result depends on that
 * row alone: not on how many rows, panels, keys or threads are in the call.
 *
 * A kernel is added with a function type kvp__<name>_fn, described here, and a line in
 * KVP__KERNEL_LIST. Who may call them: the files of cpu/.
 */
#ifndef KVP_CPU_KERNELS_H
#define KVP_CPU_KERNELS_H

#include "base/base.h"
#include "model/model.h"

/* KVP_CPU_NEON with the dot product instructions: to hosts it is KVP_CPU_NEON. */
#define KVP__CPU_NEON_DOT 6

#define KVP__LANES 16u /* outputs, keys or dimensions side by side, whatever the level */

/* --- matrices ----------------------------------------------------------------------------------
 *
 * y = W x for W of n_out rows and n_in columns, packed (pack.h) in panels of 16 output rows. The
 * last panel is filled up with zero rows, which are never stored.
 */
typedef struct kvp__mat {
    uint32_t type;         /* kvp__type */
    uint32_t n_out, n_in;
    uint64_t panel_bytes;
    const uint8_t *panels; /* aligned to 64 bytes */
} kvp__mat;

static inline uint32_t kvp__mat_panels(const kvp__mat *w)
{
    return w->n_out / KVP__LANES + (w->n_out % KVP__LANES != 0);
}

/* Rows of activations. `blocks` NULL: 32-bit products, from x. Else 8-bit blocks of 32 inputs, made
 * from x by the quantize kernel; quantised weights take those, and F32, F16 and BF16 weights x.
 *
 * Blocks lie side by side for a group of rows, so that a tile of rows is reached from one address:
 * for each group, for each block
 *     int8_t q[group][32]        -127..127
 *     float scale[group]         max|x| / 127
 *     float scaled_sum[group]    scale * the sum of the block's q
 *     int16_t sums[group][2]     of the block's two halves
 * The last group may have more rows than there are; their scales and sums are zero. */
typedef struct kvp__act {
    uint32_t n_in;
    const float *x;    /* row r: x + r * x_row; may be NULL when only quantised weights are used */
    size_t x_row;
    uint32_t rows, group; /* group: 1, 2, 4, 8 or 16, by the number of rows */
    uint8_t *blocks;
    size_t group_bytes;
} kvp__act;

#define KVP__ACT_BYTES 44u /* of a block of one row */

typedef struct kvp__act_block {
    int8_t *q;
    float *scale, *scaled_sum;
    int16_t *sums;
} kvp__act_block;

static inline kvp__act_block kvp__act_at(const kvp__act *a, uint32_t row, uint32_t block)
{
    uint8_t *p = a->blocks + row / a->group * a->group_bytes +
                 (size_t)block * KVP__ACT_BYTES * a->group;
    uint32_t g = a->group, r = row % g;
    return (kvp__act_block){(int8_t *)p + 32 * r, (float *)(void *)(p + 32 * g) + r,
                            (float *)(void *)(p + 36 * g) + r,
                            (int16_t *)(void *)(p + 40 * g) + 2 * r};
}

/* Memory for the quantised form of `rows` rows of `n_in` inputs; 0 if it overflows. */
uint64_t kvp__act_bytes(uint32_t rows, uint32_t n_in);
/* Lays `a` out in `memory` (64-byte aligned, kvp__act_bytes long); x is set to NULL. The memory may
 * be larger, so one workspace serves matrices of several widths, one after the other. */
void kvp__act_place(kvp__act *a, void *memory, uint32_t rows, uint32_t n_in);

/* Rows `first` to `first` + `rows` of a's quantised form, from a->x. n_in is a multiple of 32. */
typedef void kvp__quantize_fn(const kvp__act *a, uint32_t first, uint32_t rows);

typedef struct kvp__span {
    uint32_t first, count;
} kvp__span;

/* y[r * y_row + o] = (W x_r)[o] for the rows in `rows` and the outputs of the panels in `panels`;
 * with `add`, y += W x instead. Blocks along the input are added one after the other. */
typedef void kvp__matmul_fn(const kvp__mat *w, const kvp__act *x, kvp__span rows, kvp__span panels,
                            float *y, size_t y_row, bool add);

/* --- attention (docs/kernels/attention.md) -----------------------------------------------------
 *
 * Keys are cut at absolute positions into segments of 256, a segment into 16 tiles of 16 keys. A
 * row's scores have keys across lanes, its values the head's dimension; a segment's result is
 * complete in itself, and a row merges its segments from left to right.
 */
#define KVP__SEGMENT 256u
#define KVP__SEGMENT_TILES (KVP__SEGMENT / KVP__TILE)

/* Up to some rows (query heads of tokens) against one segment of one KV head. */
typedef struct kvp__segment {
    uint32_t k_format, v_format; /* KVP_KV_... */
    uint32_t key_dim, value_dim;
    uint32_t v_row;              /* elements from a value to the next: a multiple of 16 */
    uint32_t n_rows;
    float softcap;               /* 0: none */
    const void *k[KVP__SEGMENT_TILES]; /* [key_dim][16]; only tiles that some row sees are read */
    const void *v[KVP__SEGMENT_TILES]; /* [16][v_row] */
    const void *next_k[KVP__SEGMENT_TILES]; /* to be asked for meanwhile; NULL: nothing */
    const float *q;              /* [n_rows], q_row apart, the scale already in */
    size_t q_row;
    const uint16_t *lo, *hi;     /* row r sees the keys lo[r] to hi[r] - 1; neither falls from row to
                                    row; lo[r] >= hi[r]: sees none */
    float *p;                    /* scratch: [n_rows][256] */
    float *max, *sum;            /* out: [n_rows]; sum 0: the row saw nothing */
    float *out;                  /* out: [n_rows], out_row apart, value_dim rounded up to 16 long */
    size_t out_row;
} kvp__segment;

/* max, sum and sum of exp(score - max) * value of each row over the keys it sees. What is stored
 * at keys that a row does not see has no influence on it, whatever it is. */
typedef void kvp__attend_fn(const kvp__segment *s);

/* A row's state: of the segments so far. Starts with sum 0. */
typedef struct kvp__row_state {
    float max, sum;
} kvp__row_state;

/* Adds the next segment's result to a row's state and accumulator of `dim` floats (a multiple of
 * 16). A segment that saw nothing changes no bit. */
typedef void kvp__merge_fn(kvp__row_state *state, float *acc, float max, float sum,
                           const float *segment, uint32_t dim);

/* n floats into the KV format: nearest, ties to even; F16 stays finite. */
typedef void kvp__to_kv_fn(uint32_t format, const float *x, uint32_t n, void *out);

/* --- what one row needs ------------------------------------------------------------------------
 *
 * `n` is any length; sums run in 16 lanes by index modulo 16 and are added by the fixed tree.
 */

/* out = x * (1 / sqrt(mean(x^2) + eps)) * weight; out may be x. */
typedef void kvp__rms_norm_fn(const float *x, const float *weight, uint32_t n, float eps,
                              float *out);

/* Rotates the first `dim` elements of `n` heads, `stride` apart: an element becomes
 * x[i] * cos[i] + x[partner] * sin[i], partner i ^ 1 (pairs) or dim / 2 away (halves). */
typedef void kvp__rotate_fn(float *x, uint32_t n, size_t stride, kvp__rope_kind kind, uint32_t dim,
                            const float *cosine, const float *sine);

/* gate = activation(gate) * up */
typedef void kvp__activate_fn(kvp__activation kind, float *gate, const float *up, uint32_t n);

/* x = x + y */
typedef void kvp__accumulate_fn(float *x, const float *y, uint32_t n);

/* x = cap * tanh(x / cap) */
typedef void kvp__softcap_fn(float *x, uint32_t n, float cap);

/* --- the tables --- */

#define KVP__KERNEL_LIST(X)                                                                        \
    X(matmul)                                                                                      \
    KVP__KERNELS_BESIDE(X)

#define KVP__KERNELS_BESIDE(X) /* the matrix product */                                            \
    X(quantize)                                                                                    \
    X(attend)                                                                                      \
    X(merge)                                                                                       \
    X(to_kv)                                                                                       \
    X(rms_norm)                                                                                    \
    X(rotate)                                                                                      \
    X(activate)                                                                                    \
    X(accumulate)                                                                                  \
    X(softcap)

typedef struct kvp__kernels {
    uint32_t level; /* KVP_CPU_..., or KVP__CPU_NEON_DOT */
#define KVP__KERNEL_FIELD_(name) kvp__##name##_fn *name;
    KVP__KERNEL_LIST(KVP__KERNEL_FIELD_)
#undef KVP__KERNEL_FIELD_
} kvp__kernels;

extern const kvp__kernels kvp__kernels_generic, kvp__kernels_avx2, kvp__kernels_avx512,
    kvp__kernels_amx, kvp__kernels_neon, kvp__kernels_neon_dot;

/* The best level not above `cap` (0: no cap) that this machine runs: KVP_CPU_..., never 0, since
 * plain C always does. Levels of another architecture count as plain C. */
uint32_t kvp__cpu_level(uint32_t cap);
/* The kernels of a level that kvp__cpu_level has answered. NULL: this build has no such level. */
const kvp__kernels *kvp__kernels_get(uint32_t level);

#ifdef KVP__LEVEL
#if KVP__LEVEL == KVP_CPU_GENERIC
#define KVP__AT(name) kvp__##name##_generic
#elif KVP__LEVEL == KVP_CPU_AVX2
#define KVP__AT(name) kvp__##name##_avx2
#elif KVP__LEVEL == KVP_CPU_AVX512
#define KVP__AT(name) kvp__##name##_avx512
#elif KVP__LEVEL == KVP_CPU_AMX
#define KVP__AT(name) kvp__##name##_amx
#elif KVP__LEVEL == KVP_CPU_NEON
#define KVP__AT(name) kvp__##name##_neon
#elif KVP__LEVEL == KVP__CPU_NEON_DOT
#define KVP__AT(name) kvp__##name##_neon_dot
#endif
#define KVP__KERNEL_PROTOTYPE_(name) kvp__##name##_fn KVP__AT(name);
KVP__KERNEL_LIST(KVP__KERNEL_PROTOTYPE_)
#undef KVP__KERNEL_PROTOTYPE_
#if KVP__LEVEL == KVP_CPU_AMX /* has a matrix product of its own, and the rest from below */
#define KVP__KERNEL_PROTOTYPE_(name) kvp__##name##_fn kvp__##name##_avx512;
KVP__KERNEL_LIST(KVP__KERNEL_PROTOTYPE_)
#undef KVP__KERNEL_PROTOTYPE_
#endif
#endif

#endif
