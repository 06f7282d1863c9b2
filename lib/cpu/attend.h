/*
 * Attention of a step: the KV cache's memory, the list of work items, and running one item.
 *
 * An item is some tokens of one sequence x the query heads of one KV head x a range of segments, and
 * may run on any thread at any time after the step's keys are stored. An item that covers all
 * segments its rows see ends in the output; where that would leave threads idle, several items share
 * the segments, each segment's result is kept, and whoever comes last merges them from left to
 * right, so that the bits do not depend on the cut. A shared item has the rows of several sequences
 * whose tables begin with the same blocks.
 *
 * Invariant: how a step is cut into items never shows in the results (see level/attention.c).
 *
 * Who may call: the files of cpu/.
 */
#ifndef KVP_CPU_ATTEND_H
#define KVP_CPU_ATTEND_H

#include "cpu/kernels.h"
#include "device/device.h"
#include "plan/plan.h"

struct kvp__store {
    kvp__hooks hooks;
    kvp__layout layout;
    uint8_t *slab;
    bool owned;
};

/* The bytes of one KV head's tiles in one layer of one block. */
uint8_t *kvp__store_k(const kvp__store *s, uint32_t group, uint32_t index, uint32_t block,
                      uint32_t head);
uint8_t *kvp__store_v(const kvp__store *s, uint32_t group, uint32_t index, uint32_t block,
                      uint32_t head);

/* One token's K and V of all heads of a layer, in place. Heads are k_head and v_head floats apart. */
void kvp__store_token(const kvp__store *s, const kvp__kernels *kernels, uint32_t group,
                      uint32_t index, uint32_t block, uint32_t offset, const float *k,
                      size_t k_head, const float *v, size_t v_head);

/* The first `tokens` tokens of a block into another, all layers of the group. */
void kvp__store_copy(const kvp__store *s, const kvp__copy *c);

typedef struct kvp__item {
    uint32_t seq;                   /* in work->seqs: whose table leads to the keys */
    uint32_t row, n_tokens;         /* rows of the step; shared: members, of one row each */
    uint32_t shared;
    uint32_t kv_head;
    uint32_t first_head, n_heads;   /* query heads */
    uint32_t first_segment, end_segment;
    uint32_t split;                 /* KVP__NO_SPLIT, or an index; shared: that of the first member,
                                       the others' follow */
} kvp__item;
#define KVP__NO_SPLIT 0xffffffffu
#define KVP__ITEM_ROWS 48u          /* tokens x heads of an item at most: what scratch holds */

/* Rows whose segments several items compute. Behind a shared prefix, the first slot holds all that
 * lies before the next segment, merged. */
typedef struct kvp__split {
    _Atomic uint32_t left;  /* items that have not ended */
    uint32_t n_items;
    uint32_t first_segment, end_segment;
    uint64_t slot;          /* of the first segment's first row */
} kvp__split;

/* A sequence among those with the same first block. */
typedef struct kvp__chain {
    uint32_t next, last;    /* a sequence; last: of the chain, kept by its first */
    uint32_t first;         /* 0xffffffff: in no chain */
    uint32_t common;        /* segments it has in common with the first */
    bool shared;            /* it has been dealt with */
} kvp__chain;

/* The items of a step for one layer group. Made once per step, used by each of the group's layers. */
typedef struct kvp__items {
    uint32_t group;
    uint32_t query_heads, kv_heads, key_dim, value_dim, window;
    uint32_t block_tokens;
    uint32_t n;
    kvp__item *list;
    uint32_t more, max_more; /* items there are because of splits */
    uint32_t n_splits;
    uint64_t max_splits;
    kvp__split *splits;
    uint64_t used_slots, max_slots; /* of partial results; all groups use the same memory in turn */
    uint32_t n_members;
    uint32_t *members;       /* sequences of the shared items */
    kvp__chain *chains;      /* [sequence] */
    uint32_t buckets, *bucket; /* by first block: the first sequence of a chain + 1 */
    uint32_t *depths;        /* [segments]: sequences that have so many in common */
} kvp__items;

/* The largest step. */
typedef struct kvp__items_limits {
    uint32_t max_rows, max_seqs, max_positions, threads;
} kvp__items_limits;

/* Partial results of one step's split items: one slot per segment and row. */
typedef struct kvp__partials {
    float *acc;  /* [slot][value_dim rounded up to 16] */
    float *max, *sum;
} kvp__partials;

/* The bounds of one group's lists, and their place in `memory` (NULL: only counted), which is zeroed
 * and aligned to a cache line. Returns the bytes. */
uint64_t kvp__items_place(kvp__items *items, const kvp_layer_group *g, uint32_t group,
                          uint32_t block_tokens, const kvp__items_limits *limits, void *memory);

/* The first key that a row at a position sees; window 0: all. */
static inline uint32_t kvp__first_key(uint32_t window, uint32_t position)
{
    return window && position >= window ? position + 1 - window : 0;
}

/* Fills `list` for a step. `threads` that will work on it; 1 if inline. */
void kvp__items_make(kvp__items *items, const kvp__work *work, uint32_t threads);

/* What an item needs besides. Strides in bytes. */
typedef struct kvp__attention {
    const kvp__kernels *kernels;
    const kvp__store *store;
    const kvp__work *work;
    const kvp__items *items;
    kvp__partials partials;
    uint32_t index; /* of the layer in its group */
    float scale, softcap;
    const float *q;
    float *out;
    int64_t q_row, q_head, out_row, out_head;
} kvp__attention;

/* `scratch` is KVP__SCRATCH_BYTES long. */
void kvp__item_run(const kvp__attention *a, uint32_t item, void *scratch);

#endif
