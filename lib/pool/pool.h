/*
 * Blocks: who holds them, and which are to be had. One record per block and layer group, made once;
 * a block is in exactly one of four states:
 *
 *     USED   ref > 0: tables of sequences, and copies that are still to be made from it
 *     LIMBO  ref 0, but the fence is up: the device may still read or write it. Counts as used.
 *     IDLE   ref 0, holds a published prefix (record.node): given away on demand
 *     FREE   ref 0, nothing of worth inside
 *
 * Invariant, per group: used + idle + free = n_blocks, and a block is in the free list exactly when
 * nobody refers to it and it holds no published prefix.
 *
 * The pool does not know what a prefix is. The room above it (prefix) registers three functions, by
 * which the pool tells it that the last holder of a node's block went away or the first one came,
 * and asks it to give up an idle node when the free list is empty. All operations are O(1), none
 * allocates. Callers: prefix, seq, sched, engine; one thread at a time, except the counters.
 */
#ifndef KVP_POOL_POOL_H
#define KVP_POOL_POOL_H

#include "base/base.h"
#include "plan/plan.h"

#define KVP__NONE 0xffffffffu
#define KVP__MAX_BLOCKS 0x7ffffff0u
#define KVP__MAX_TOKENS 0x7fffff00u /* of one sequence: positions and their sums fit 32 bits */

enum { KVP__BLOCK_FREE = 0, KVP__BLOCK_USED = 1, KVP__BLOCK_IDLE = 2, KVP__BLOCK_LIMBO = 3 };

typedef struct kvp__block {
    uint32_t ref;   /* holders: one per table that contains it, one per copy to be made from it */
    uint32_t node;  /* the prefix node whose tokens it holds; KVP__NONE: unpublished */
    uint32_t prev, next; /* of the free or the limbo list of its group */
    uint32_t pins;  /* group 0 only: sequences that pin it */
    uint32_t mark, marks; /* scratch of the checker: holders; pins and, times 65536, holds */
    uint16_t holds; /* of `ref`: copies to be made from it */
    uint8_t guard;  /* tokens that the largest of these copies takes; 0 without holds */
    uint8_t state;
} kvp__block;

typedef struct kvp__block_list {
    uint32_t head, tail;
} kvp__block_list;

typedef struct kvp__pool_group {
    kvp__block *blocks;          /* [n_blocks] */
    kvp__block_list free, limbo;
    uint32_t n_free, n_idle;     /* read by any thread */
} kvp__pool_group;

/* Only grow; written by the domain's thread, read by any. The pool and seq count the first six,
 * who admits and evicts sequences the last three. */
typedef struct kvp__pool_counters {
    uint64_t blocks_taken, blocks_evicted; /* of group 0 */
    uint64_t blocks_copied, tokens_copied; /* of one group */
    uint64_t tokens_cached, tokens_reattached, tokens_computed;
    uint64_t tokens_prompt, preemptions, reclaims;
} kvp__pool_counters;

typedef struct kvp__pool {
    const kvp__hooks *hooks;
    uint32_t n_groups, n_blocks, block_tokens, block_shift;
    uint32_t fence;              /* 1: a step is in flight */
    uint32_t n_pinned;           /* blocks with a pin; read by any thread */
    kvp__pool_group groups[KVP__MAX_GROUPS];
    kvp__pool_counters counters;
    /* The prefix room's; NULL while there is none. */
    void *index;
    void (*released)(void *index, uint32_t node); /* one of the node's blocks has no holder */
    void (*acquired)(void *index, uint32_t node); /* one that had none has one */
    bool (*evict)(void *index);  /* an idle node's blocks of all groups become free; false: none */
} kvp__pool;

/* Adds to a value that other threads may read at any moment: one writer, so no locked operation. */
#define KVP__BUMP(field, n) __atomic_store_n(&(field), (field) + (n), __ATOMIC_RELAXED)
#define KVP__PEEK(field) __atomic_load_n(&(field), __ATOMIC_RELAXED)

/* `hooks` is borrowed. INVALID_ARG: groups, blocks (1 to KVP__MAX_BLOCKS) or block_tokens (a power
 * of two, 1 to 256) out of range; NO_MEMORY. On failure *p is all zero, which fini takes. */
kvp_status kvp__pool_init(kvp__pool *p, const kvp__hooks *hooks, uint32_t n_groups,
                          uint64_t n_blocks, uint32_t block_tokens, kvp_error *err);
void kvp__pool_fini(kvp__pool *p);

/* A block of group `g` with ref 1: a free one, else one of an evicted idle node. KVP__NONE: there
 * is none. Contents arbitrary. */
uint32_t kvp__pool_take(kvp__pool *p, uint32_t g);

/* One holder more, one less. The last one gone: to the front of the free list; idle, if it holds a
 * prefix; limbo, while the fence is up. Release a sequence's blocks tail first: then idle nodes are
 * evicted leaf first by age alone. */
void kvp__pool_retain(kvp__pool *p, uint32_t g, uint32_t id);
void kvp__pool_retain_all(kvp__pool *p, uint32_t g, const uint32_t *ids, uint32_t n);
void kvp__pool_release(kvp__pool *p, uint32_t g, uint32_t id);

/* Turns a holder into the hold of a copy of `tokens` tokens, and back. A hold keeps the block from
 * being given away, but does not mind if it is written to beyond the guard: a step makes its copies
 * before it stores anything. Below the guard it does, because the copy may be undone, and a fork
 * made meanwhile reads the source. */
static inline void kvp__pool_hold(kvp__pool *p, uint32_t g, uint32_t id, uint32_t tokens)
{
    kvp__block *b = &p->groups[g].blocks[id];
    b->holds++;
    if (b->guard < tokens) b->guard = (uint8_t)tokens;
}
static inline void kvp__pool_unhold(kvp__pool *p, uint32_t g, uint32_t id)
{
    kvp__block *b = &p->groups[g].blocks[id];
    if (--b->holds == 0) b->guard = 0;
}

/* Whether its one holder, apart from holds, may write to it from its token `from` on. */
static inline bool kvp__pool_writable(const kvp__pool *p, uint32_t g, uint32_t id, uint32_t from)
{
    const kvp__block *b = &p->groups[g].blocks[id];
    return b->ref - b->holds <= 1 && b->guard <= from;
}

void kvp__pool_pin(kvp__pool *p, uint32_t id);
void kvp__pool_unpin(kvp__pool *p, uint32_t id);

/* The block holds (or no more holds) `node`'s tokens. An idle or free block changes lists. */
void kvp__pool_publish(kvp__pool *p, uint32_t g, uint32_t id, uint32_t node);
void kvp__pool_unpublish(kvp__pool *p, uint32_t g, uint32_t id);

/* A step is in flight: blocks that lose their last holder stay as they are until the fence drops.
 * Dropping settles them in the order in which they were released. Idempotent; drop O(in limbo). */
void kvp__pool_fence_raise(kvp__pool *p);
void kvp__pool_fence_drop(kvp__pool *p);

/* Blocks that can be taken in every group: the smallest free + idle. */
static inline uint32_t kvp__pool_available(const kvp__pool *p)
{
    uint32_t least = p->groups[0].n_free + p->groups[0].n_idle;
    for (uint32_t g = 1; g < p->n_groups; g++) {
        uint32_t n = p->groups[g].n_free + p->groups[g].n_idle;
        if (n < least) least = n;
    }
    return least;
}

/* Blocks that somebody, or the step in flight, holds: what is neither free nor idle. */
static inline uint32_t kvp__pool_used(const kvp__pool *p, uint32_t g)
{
    return p->n_blocks - KVP__PEEK(p->groups[g].n_free) - KVP__PEEK(p->groups[g].n_idle);
}

/* The checker: begin zeroes the marks, the caller adds 1 to `mark` for each holder it knows (and to
 * `marks` for each pin and hold), end compares them with what the records, the lists and the counts
 * say. INTERNAL with the first contradiction. O(blocks). */
void kvp__pool_check_begin(kvp__pool *p);
kvp_status kvp__pool_check_end(kvp__pool *p, kvp_error *err);

#endif
