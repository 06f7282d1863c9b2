/*
 * How kernels are launched: threads of a block and bytes of shared memory, as functions of what they
 * are launched for. Read by the host, by the kernels and by tests, so that none of them guesses.
 */
#ifndef KVP_CUDA_KERNELS_LAUNCH_H
#define KVP_CUDA_KERNELS_LAUNCH_H

#include "cuda/kernels/args.h"

/* A grid of x by y blocks. Nothing is launched where there is nothing to do (x or y 0). */
typedef struct kvp__launch {
    uint32_t x, y, threads, shared;
} kvp__launch;

static inline uint32_t kvp__tiles(uint64_t n, uint32_t each)
{
    return (uint32_t)((n + each - 1) / each);
}

/* --- attention.cu, attention_any.cu, merge.cu --- */

/* What a tiled kernel is made for: heads up to `d` elements (64, 96, 128 or 256) and tiles of
 * 16 << t rows, t 0 to 3; d 256 without 3. Warps lie along rows and, in tiles of few rows, along keys. */
#define KVP__ATTEND_TILES 4u
#define KVP__ATTEND_ROWS(t) (16u << (t))
#define KVP__ATTEND_MOST_TILE(d) ((d) > 128 ? 2u : 3u)
#define KVP__ATTEND_KEYS(d) ((d) > 128 ? 32u : 64u) /* of a stage: 16 to 32 KB of K and V */
#define KVP__ATTEND_ROW_WARPS(t) ((t) == 0 ? 1u : (t) == 1 ? 2u : 4u)
#define KVP__ATTEND_KEY_WARPS(d, t) ((t) == 0 ? KVP__ATTEND_KEYS(d) / 16u : (t) == 1 ? 2u : 1u)
#define KVP__ATTEND_STAGES(t) ((t) < 2 ? 3u : 2u)
#define KVP__ATTEND_THREADS(d, t) (32u * KVP__ATTEND_ROW_WARPS(t) * KVP__ATTEND_KEY_WARPS(d, t))

/* Stages of K and V; Q where it does not lie in registers; where each key of the stages is; what
 * each row sees; what the block works on. */
#define KVP__ATTEND_JOB_BYTES 128u
#define KVP__ATTEND_STAGE_BYTES(d) (KVP__ATTEND_KEYS(d) * (d) * 4u)
#define KVP__ATTEND_Q_BYTES(d, t) ((t) < 2 ? 0u : KVP__ATTEND_ROWS(t) * (d) * 2u)
#define KVP__ATTEND_SHARED(d, t)                                                                   \
    (KVP__ATTEND_STAGES(t) * (KVP__ATTEND_STAGE_BYTES(d) + KVP__ATTEND_KEYS(d) * 8u) +             \
     KVP__ATTEND_Q_BYTES(d, t) + KVP__ATTEND_ROWS(t) * 8u + KVP__ATTEND_JOB_BYTES)

#define KVP__ATTEND_ANY_WARPS 4u
#define KVP__MERGE_WARPS 4u

/* The class that a head size runs in; 0: attention_any alone takes it. */
static inline uint32_t kvp__attend_class(uint32_t key_dim, uint32_t value_dim, uint32_t k_type,
                                         uint32_t v_type)
{
    if (key_dim != value_dim || key_dim == 0 || key_dim % 8 || key_dim > 256) return 0;
    if (k_type != v_type || (k_type != KVP__EL_F16 && k_type != KVP__EL_BF16)) return 0;
    return key_dim <= 64 ? 64 : key_dim <= 96 ? 96 : key_dim <= 128 ? 128 : 256;
}

/* `items` of one tile, for all KV heads. */
static inline kvp__launch kvp__launch_attention(uint32_t d, uint32_t t, uint32_t items,
                                                uint32_t kv_heads)
{
    kvp__launch l = {items * kv_heads, 1, KVP__ATTEND_THREADS(d, t), KVP__ATTEND_SHARED(d, t)};
    return l;
}

/* A warp's row: the query, the sums, and the weights of 32 keys. */
static inline kvp__launch kvp__launch_attention_any(uint32_t items, uint32_t kv_heads,
                                                    uint32_t key_dim, uint32_t value_dim)
{
    kvp__launch l = {items * kv_heads, 1, 32u * KVP__ATTEND_ANY_WARPS,
                     KVP__ATTEND_ANY_WARPS * 4u * (key_dim + value_dim + 32u)};
    return l;
}

static inline kvp__launch kvp__launch_merge(uint32_t merges, uint32_t query_heads)
{
    kvp__launch l = {kvp__tiles((uint64_t)merges * query_heads, KVP__MERGE_WARPS), 1,
                     32u * KVP__MERGE_WARPS, 0};
    return l;
}

/* --- rows.cu, append.cu, blocks.cu, matvec.cu, sample.cu --- */

#define KVP__EMBED_THREADS 128
#define KVP__NORM_THREADS 256
#define KVP__ACTIVATE_THREADS 256
#define KVP__APPEND_THREADS 256 /* a warp a head */
#define KVP__COPY_THREADS 256
#define KVP__PATCH_THREADS 256
#define KVP__SAMPLE_THREADS 1024
#define KVP__MATVEC_THREADS 256
#define KVP__DEQUANT_THREADS 256

#define KVP__ACTIVATE_EACH 4u   /* elements of a thread */
#define KVP__DEQUANT_EACH 16u
#define KVP__MATVEC_TILE 16u    /* outputs of a block at a time: 2 a warp */
#define KVP__MATVEC_SHARED 36864u
#define KVP__SAMPLE_SHARED 36864u
#define KVP__SAMPLE_BLOCK 64u   /* logits that are summed together, as in model/sampler.c */

/* Bytes of scratch for a row of logits, a multiple of 16: the largest logit of each block of 64, its
 * mass, and a list of blocks. */
#define KVP__CUDA_SAMPLE_SCRATCH(vocabulary)                                                       \
    ((((uint64_t)(vocabulary) + KVP__SAMPLE_BLOCK - 1) / KVP__SAMPLE_BLOCK + 1) / 2 * 32)

/* Where a quantised matrix's scales begin, in bytes from its values; `type` is KVP__EL_Q8_0 or
 * KVP__EL_Q4_0. embed finds them by this; kvp__quant_planes may lie elsewhere. */
#define KVP__QUANT_SCALES_AT(type, n_out, n_in)                                                    \
    (((uint64_t)(n_out) * (n_in) / ((type) == KVP__EL_Q4_0 ? 2 : 1) + 255) / 256 * 256)

static inline kvp__launch kvp__launch_embed(uint32_t rows)
{
    kvp__launch l = {rows, 1, KVP__EMBED_THREADS, 0};
    return l;
}

/* The row stays in shared memory between the passes. */
static inline kvp__launch kvp__launch_norm(uint32_t rows, uint32_t width)
{
    kvp__launch l = {rows, 1, KVP__NORM_THREADS, 64 + (width + 3) / 4 * 16};
    return l;
}

static inline kvp__launch kvp__launch_activate(uint32_t rows, uint32_t n)
{
    uint32_t each = KVP__ACTIVATE_THREADS * KVP__ACTIVATE_EACH;
    kvp__launch l = {rows, kvp__tiles(n, each), KVP__ACTIVATE_THREADS, 0};
    return l;
}

/* A head a warp, in shared memory, and the row's sines and cosines. */
static inline kvp__launch kvp__launch_append(uint32_t rows, const kvp__append_args *a)
{
    uint32_t warps = KVP__APPEND_THREADS / 32;
    uint32_t dim = a->key_dim > a->value_dim ? a->key_dim : a->value_dim;
    uint32_t heads = a->query_heads + a->kv_heads * (a->value_dim ? 2 : 1);
    kvp__launch l = {rows, kvp__tiles(heads, warps), KVP__APPEND_THREADS,
                     (warps * ((dim + 3) / 4 * 4) + a->rope_dim) * 4};
    return l;
}

/* `layers`: the most that a group has. */
static inline kvp__launch kvp__launch_copy_blocks(uint32_t copies, uint32_t layers)
{
    kvp__launch l = {copies, layers, KVP__COPY_THREADS, 0};
    return l;
}

static inline kvp__launch kvp__launch_patch(uint32_t patches)
{
    kvp__launch l = {kvp__tiles(patches, KVP__PATCH_THREADS), 1, KVP__PATCH_THREADS, 0};
    return l;
}

static inline kvp__launch kvp__launch_sample(uint32_t outputs)
{
    kvp__launch l = {outputs, 1, KVP__SAMPLE_THREADS, KVP__SAMPLE_SHARED};
    return l;
}

/* Any number of rows, eight at a time. Blocks go on to further outputs, so that they stage the rows
 * once: there are as many as fit on the card at the same time. */
static inline kvp__launch kvp__launch_matvec(uint32_t n_out, uint32_t sms)
{
    uint32_t tiles = kvp__tiles(n_out, KVP__MATVEC_TILE), most = 2 * (sms ? sms : 1);
    kvp__launch l = {tiles < most ? tiles : most, 1, KVP__MATVEC_THREADS, KVP__MATVEC_SHARED};
    return l;
}

static inline kvp__launch kvp__launch_dequant(uint32_t n_rows, uint32_t n_in)
{
    uint32_t each = KVP__DEQUANT_THREADS * KVP__DEQUANT_EACH;
    kvp__launch l = {kvp__tiles((uint64_t)n_rows * n_in, each), 1, KVP__DEQUANT_THREADS, 0};
    return l;
}

#endif
