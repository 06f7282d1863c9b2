/*
 * From KV geometry to bytes: pure arithmetic, no memory, no device.
 *
 * A pool's blocks hold `block_tokens` tokens for every layer of a group. One block of one group is
 * one contiguous extent, so that a copy or a swap is one piece:
 *
 *     extent:  [layer in group] [K part][V part]
 *     K part:  [kv head] [tile] [key_dim][T]       tokens across lanes
 *     V part:  [kv head] [tile] [T][value_dim]     the head dimension across lanes
 *
 * where a tile is T = min(16, block_tokens) tokens and a block holds block_tokens / T tiles. Extents
 * are placed at `pitch` bytes, the extent rounded up to a cache line and skewed away from powers of
 * two, because streams at a power-of-two distance can halve the bandwidth.
 */
#ifndef KVP_PLAN_PLAN_H
#define KVP_PLAN_PLAN_H

#include "base/base.h"

#define KVP__MAX_GROUPS 16u
#define KVP__MAX_LAYERS 1024u
#define KVP__TILE 16u

typedef struct kvp__geometry {
    uint32_t n_layers;
    uint32_t n_groups;
    kvp_layer_group groups[KVP__MAX_GROUPS];
    uint8_t layer_group[KVP__MAX_LAYERS];  /* of each layer: its group */
    uint16_t layer_index[KVP__MAX_LAYERS]; /* and its place in the group */
    uint32_t vocabulary;                   /* 0: token ids are not checked */
    uint32_t context;                      /* 0: no limit */
} kvp__geometry;

/* Checks a host's geometry and completes it (n_layers, layer_index, query_heads).
 * INVALID_ARG or UNSUPPORTED (too many groups or layers). */
kvp_status kvp__geometry_fill(kvp__geometry *out, const kvp_geometry *in, kvp_error *err);

/* Where everything of one group lies, in bytes. */
typedef struct kvp__group_layout {
    uint32_t layers, kv_heads, key_dim, value_dim;
    uint32_t k_size, v_size;   /* bytes of an element: 2 or 4 */
    uint64_t k_head, v_head;   /* one head's part in one layer of a block */
    uint64_t k_part, v_part;   /* one layer: kv_heads * k_head, kv_heads * v_head, 64-byte rounded */
    uint64_t layer;            /* k_part + v_part: from one layer to the next */
    uint64_t extent;           /* layers * layer */
    uint64_t pitch;            /* from one block to the next */
    uint64_t base;             /* of the group's blocks, from the start of the slab */
} kvp__group_layout;

typedef struct kvp__layout {
    uint32_t n_groups;
    uint32_t block_tokens;
    uint32_t tile;             /* tokens */
    uint32_t k_format, v_format;
    uint64_t blocks;           /* per group */
    uint64_t bytes;            /* of the slab: all groups, all blocks */
    uint64_t block_bytes;      /* pitches of all groups together */
    kvp__group_layout groups[KVP__MAX_GROUPS];
} kvp__layout;

/* The layout of `blocks` blocks. block_tokens a power of two, 1 to 256; formats KVP_KV_...
 * INVALID_ARG, TOO_LARGE (64 bits), UNSUPPORTED (a group without KV heads, a head size beyond
 * what kernels take). */
kvp_status kvp__layout_make(kvp__layout *out, const kvp__geometry *g, uint32_t block_tokens,
                            uint32_t k_format, uint32_t v_format, uint64_t blocks, kvp_error *err);

/* Byte offset of block `id` of group `g` in the slab. 64-bit throughout: ids times pitch exceeds
 * 32 bits on any large pool. */
static inline uint64_t kvp__layout_block(const kvp__layout *l, uint32_t g, uint32_t id)
{
    return l->groups[g].base + (uint64_t)id * l->groups[g].pitch;
}

/* What kvp_plan answers; weight_bytes and workspace_bytes are left 0 for the caller. Groups
 * without KV heads count as nothing here, and an MLA group (value_dim KVP_DIM_NONE) holds its keys
 * once. */
kvp_status kvp__plan(const kvp__geometry *g, const kvp_plan_options *o, kvp_plan_result *out,
                     kvp_error *err);

/* Copy-on-write and partial prefixes: the first `tokens` tokens of block src into block dst. */
typedef struct kvp__copy {
    uint32_t group, src, dst, tokens;
} kvp__copy;

#endif
