/*
 * A step's attention cut into items for the card: how rows x keys of one layer group are shared
 * out. One plan serves all layers of its group. Pure arithmetic: nothing of the driver, no
 * allocation but at creation.
 *
 *     place    how many bytes the largest step needs, for given limits
 *     use      in this memory
 *     make     a step's lists; then counts, into the head of the upload, and the launches:
 *
 *     for each tile t with n_items[t] > 0:
 *         kvp__launch_attention(p->d, t, n_items[t], p->kv_heads) of
 *         kvp__cuda_plan_kernel(p, t, name);  args.tile = t
 *         (p->d 0: kvp__launch_attention_any; the kernel's name says so too)
 *     if n_merges > 0:  kvp__launch_merge(n_merges, p->query_heads)
 *
 * A launch that is recorded takes most_items[t] and max_merges instead, or any numbers in between:
 * what is surplus leaves at once (but each such block costs a slot on the card for about a
 * microsecond, so record for limits that are near). Tiles are at most two in any step: one for
 * sequences with few rows, one for all others and for shared prefixes. Which they are depends on
 * the step, so a recorded step is one of a given set of tiles: `tiles` is that set as bits.
 *
 * A plan's arrays lie in `upload` at rows_at, items_at, merges_at and slots_at, as the kernels take
 * them: copy upload_bytes (or the four parts, as far as they are filled) to the card and point
 * kvp__attention_args and kvp__merge_args there. The workspace for parts, which groups and layers
 * share: part_out of max_slots * query_heads * value_dim floats, part_lse of max_slots *
 * query_heads.
 *
 * How a step is cut:
 *
 * - Rows of a sequence form units of whole tokens that fill a tile of 16, 32, 64 or 128 rows.
 * - Sequences with few rows whose tables begin with the same blocks attend together to what they
 *   share, in whole pieces of 64 keys, and apart to the rest (a cascade), where that saves more
 *   loads than the merge costs.
 * - The units of a tile in a row, each with a fixed charge for being begun, are shared out into as
 *   many parts of equal cost as blocks run at a time (two per multiprocessor, over the KV heads);
 *   where a part ends inside a unit, the unit is cut there, at a multiple of 64 keys. So there are
 *   never more items than units + parts - 1 of a tile, and the workspace has a bound. Units of
 *   several tokens, whose parts cost more, are cut only if they are longer than a part.
 * - Items are listed from long to short, so that the last to run are short.
 *
 * With limits.split, units of few rows are cut at multiples of that many keys instead, and no
 * others, nothing is shared, and larger tiles are the largest: then the bits of a row's result do
 * not depend on what else is in the step.
 *
 * Everything is a function of the step and the limits alone.
 */
#ifndef KVP_CUDA_PLAN_H
#define KVP_CUDA_PLAN_H

#include "cuda/kernels/launch.h"
#include "device/device.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KVP__PLAN_KEYS 64u /* cuts lie at multiples of it */

typedef struct kvp__cuda_limits {
    uint32_t max_rows, max_seqs; /* of a step; above 0 */
    uint32_t max_positions;      /* keys a row may see at most; up to 2^31 */
    uint32_t sms;                /* multiprocessors of the card */
    uint32_t split;              /* 0: by cost; else a multiple of 64 */
} kvp__cuda_limits;

/* Rows of one tile against a range of keys: what may be cut into items. */
typedef struct kvp__unit {
    uint32_t seq;
    uint32_t first_token, n_tokens; /* entries of the row list */
    uint32_t begin, end;            /* keys */
    uint32_t tile, row_tiles;       /* row_tiles: more than 1 only if a token's heads need it */
    uint32_t n_pieces, slot;        /* slot: of the first piece; NO_SLOT: none needed so far */
    uint32_t shared;                /* 1: of several sequences */
    uint32_t few;                   /* 1: all rows of a sequence, and small */
    uint32_t behind;                /* first unit of the shared prefix before it; NO_UNIT */
    uint32_t behind_token;          /* and that unit's first token */
} kvp__unit;

typedef struct kvp__piece {
    uint32_t unit, begin, end, slot; /* in tiles of 64 keys, from key 0 */
} kvp__piece;

/* A sequence among those with the same first block. */
typedef struct kvp__cuda_chain {
    uint32_t next, last, first; /* last: of the chain, kept by its first */
    uint32_t common;            /* pieces it has in common with the first */
    uint32_t depth;             /* of its chain's first: pieces that are shared; 0: none */
    uint32_t member;            /* 1: takes part in the sharing */
} kvp__cuda_chain;

typedef struct kvp__cuda_plan {
    /* what it is for */
    uint32_t group, query_heads, kv_heads, heads; /* heads: query heads of a KV head */
    uint32_t key_dim, value_dim, window, block_tokens, k_type;
    uint32_t d;                   /* class of the tiled kernels; 0: attention_any */
    uint32_t small, largest;      /* tiles: of one token; the largest there is */
    uint32_t parts, split;

    /* bounds */
    uint32_t max_rows, max_seqs, max_units, max_pieces, max_items, max_merges, max_slots;
    uint32_t most_items[KVP__ATTEND_TILES];
    uint32_t max_chain_tokens;
    uint32_t buckets, depth_count;

    /* the upload, and where in it */
    uint32_t *rows;
    kvp__cuda_item *items;
    kvp__cuda_merge *merges;
    uint32_t *slots;
    uint64_t rows_at, items_at, merges_at, slots_at, upload_bytes;

    /* the host's own */
    kvp__unit *units;
    kvp__piece *pieces;
    kvp__cuda_chain *chains;
    uint32_t *bucket, *depths;
    uint64_t scratch_bytes;

    /* a step's results */
    uint32_t n_rows, n_items[KVP__ATTEND_TILES], n_merges, n_slots; /* n_slots: also filled entries
                                                                       of `slots` */
    uint32_t tiles;
    uint32_t n_units, n_pieces, chain_tokens;
} kvp__cuda_plan;

/* Bounds and bytes. `layout` gives the size of blocks and the formats. UNSUPPORTED if the group's
 * shape is not for this device (no KV heads, MLA); TOO_LARGE if numbers do not fit. */
kvp_status kvp__cuda_plan_place(kvp__cuda_plan *p, const kvp_layer_group *g, uint32_t group,
                                const kvp__layout *layout, const kvp__cuda_limits *l,
                                kvp_error *err);

/* Memory of upload_bytes and scratch_bytes, aligned to 64; contents arbitrary. */
void kvp__cuda_plan_use(kvp__cuda_plan *p, void *upload, void *scratch);

/* The lists of a step within the limits. */
void kvp__cuda_plan_make(kvp__cuda_plan *p, const kvp__work *work);

/* The group's counts of the step that was made. */
void kvp__cuda_plan_counts(const kvp__cuda_plan *p, kvp__cuda_step *step);

/* The name of the kernel for tile t. */
#define KVP__KERNEL_NAME 32
const char *kvp__cuda_plan_kernel(const kvp__cuda_plan *p, uint32_t t, char name[KVP__KERNEL_NAME]);

#ifdef __cplusplus
}
#endif
#endif
