/*
 * Which block holds which tokens: a tree of nodes under roots.
 *
 * A node is one logical block's worth of tokens (block_tokens, or fewer for a tail) after its
 * parent node, or first under a root. It owns one block in every group. A node's number is the
 * number of its block in group 0, so a block is published exactly when its node's n is not 0, and
 * no node is ever allocated.
 *
 * A root stands for what must be equal before any token is compared: the salt, and extra content
 * (which weights). Roots are interned by exact comparison.
 *
 * Invariants:
 *   - a node's KV was written before it was published;
 *   - a hit compares parent and tokens; the keyed 128-bit chain hash only finds the place;
 *   - full nodes are unique by (parent, tokens); a node with children is full;
 *   - who holds a node holds its ancestors, so of idle nodes a child is always evicted before its
 *     parent, and a parent's number cannot come to mean something else under a child.
 *
 * Nothing here allocates but init and root_intern. Callers: seq, sched (lookup), engine (roots,
 * reset); one thread at a time.
 */
#ifndef KVP_PREFIX_PREFIX_H
#define KVP_PREFIX_PREFIX_H

#include "base/hash.h"
#include "pool/pool.h"

#define KVP__PREFIX_CANDIDATES 8u /* nodes compared for a partial block, newest first */
#define KVP__ROOT_BUCKETS 256u
#define KVP__ROOT_BYTES 512u       /* of salt, and of extra content, at most */

typedef struct kvp__prefix kvp__prefix;

/* One cache line. */
typedef struct kvp__node {
    kvp__hash128 hash;      /* of the chain up to here; full nodes only */
    uint32_t parent;        /* node, or n_blocks + root */
    uint32_t children;
    uint32_t full_next;     /* bucket of the full index */
    uint32_t child_prev, child_next; /* bucket of the child index, newest first */
    uint32_t idle_prev, idle_next;   /* the policy's */
    uint16_t n;             /* tokens; 0: this node does not exist */
    uint16_t held;          /* groups in which its block has a holder; 0: idle */
    uint32_t mark[2];       /* scratch of the checker */
    uint32_t pad;
} kvp__node;

typedef struct kvp__root {
    kvp__hash128 hash;
    uint32_t refs;          /* sequences, and nodes right under it; 0: may be reused */
    uint32_t next;          /* bucket, or list of spare slots */
    uint32_t salt_bytes, extra_bytes;
    uint8_t *bytes;         /* salt, then extra; NULL if both are empty, or the slot is spare */
    uint32_t in_use;        /* 0: a spare slot */
    uint32_t mark;          /* scratch of the checker */
} kvp__root;

/* Who goes first. on_idle: nobody holds the node any more; on_use: somebody does again, or it is
 * being removed; victim: an idle node without children, or KVP__NONE. Each O(1). */
typedef struct kvp__policy {
    void (*on_idle)(kvp__prefix *x, uint32_t node);
    void (*on_use)(kvp__prefix *x, uint32_t node);
    uint32_t (*victim)(kvp__prefix *x);
} kvp__policy;

/* Least recently used, leaf first: one list in order of release; a node whose parent is already
 * idle goes right before it, so the order holds whatever the order of release was. */
extern const kvp__policy kvp__policy_lru;

typedef kvp__hash128 (*kvp__hash_fn)(kvp__hash_key key, const void *data, size_t bytes);

typedef struct kvp__prefix_options {
    kvp__hash_key key;           /* the pool's secret */
    kvp__hash_fn hash;           /* NULL: kvp__hash; tests give bad ones */
    const kvp__policy *policy;   /* NULL: kvp__policy_lru */
} kvp__prefix_options;

struct kvp__prefix {
    kvp__pool *pool;
    kvp__hash_key key;
    kvp__hash_fn hash;
    const kvp__policy *policy;
    kvp__node *nodes;            /* [n_blocks] */
    int32_t *tokens;             /* [n_blocks][block_tokens] */
    uint32_t *others;            /* [n_blocks][n_groups - 1]: its blocks in groups 1... */
    uint32_t *full_heads, *child_heads; /* [mask + 1] */
    uint32_t mask;
    uint32_t idle_head, idle_tail; /* the LRU policy's list, oldest first */
    kvp__root *roots;
    uint32_t n_roots, cap_roots, spare_root;
    uint32_t root_heads[KVP__ROOT_BUCKETS];
    uint64_t n_nodes;
    uint64_t visits;             /* node records looked at in chains: what work costs, for tests */
};

/* The pool must outlive it and have no published block. NO_MEMORY: *x is all zero. */
kvp_status kvp__prefix_init(kvp__prefix *x, kvp__pool *pool, const kvp__prefix_options *options,
                            kvp_error *err);
void kvp__prefix_fini(kvp__prefix *x);

/* The root for this salt and extra content (0 bytes: none), with one reference more. Roots without
 * references stay until their slot is wanted, so that giving one up frees nothing in a step.
 * INVALID_ARG (above KVP__ROOT_BYTES), NO_MEMORY; *out untouched. */
kvp_status kvp__prefix_root_intern(kvp__prefix *x, const void *salt, uint32_t salt_bytes,
                                   const void *extra, uint32_t extra_bytes, uint32_t *out,
                                   kvp_error *err);
/* The same without a reference; KVP__NONE if there is no such root (so nothing is cached). */
uint32_t kvp__prefix_root_find(const kvp__prefix *x, const void *salt, uint32_t salt_bytes,
                               const void *extra, uint32_t extra_bytes);
void kvp__prefix_root_retain(kvp__prefix *x, uint32_t root);
void kvp__prefix_root_release(kvp__prefix *x, uint32_t root);

/* What the cache has of a prompt. Holds nothing: valid until anything changes in pool or prefix. */
typedef struct kvp__hit {
    uint32_t full;      /* blocks that can be shared */
    uint32_t tail;      /* tokens more, to be copied out of tail_node's block */
    uint32_t last;      /* node of the last shared block; KVP__NONE if full is 0 */
    uint32_t tail_node; /* KVP__NONE if tail is 0 */
    uint32_t idle;      /* of the shared nodes, nobody holds these now: sharing makes them
                           unavailable */
    uint32_t idle_tail; /* 1 if nobody holds tail_node now: unavailable until the copy was made */
} kvp__hit;

static inline uint32_t kvp__hit_tokens(const kvp__prefix *x, const kvp__hit *h)
{
    return h->full * x->pool->block_tokens + h->tail;
}

/* Never more than length - 1 tokens: the last one is always computed. O(length); a partial block
 * compares at most KVP__PREFIX_CANDIDATES nodes. `root` KVP__NONE: no hit. */
kvp__hit kvp__prefix_lookup(kvp__prefix *x, uint32_t root, const int32_t *tokens,
                            uint32_t length);

/* --- for seq: what its tables do to the tree --- */

/* Parent of a first block. */
static inline uint32_t kvp__prefix_under_root(const kvp__prefix *x, uint32_t root)
{
    return x->pool->n_blocks + root;
}

/* The full node with this parent and these block_tokens tokens; KVP__NONE. *hash gets its chain
 * hash either way, for kvp__prefix_add_full. */
uint32_t kvp__prefix_find_full(kvp__prefix *x, uint32_t parent, const int32_t *tokens,
                               kvp__hash128 *hash);

/* Whether some node under `parent` begins with these n tokens (looks at the bounded candidates). */
bool kvp__prefix_covered(kvp__prefix *x, uint32_t parent, const int32_t *tokens, uint32_t n);

/* Publishes blocks[g] of every group, which somebody holds, as a node of n tokens (n <
 * block_tokens, or = with the hash of find_full). No equal full node exists. If blocks[0] is a node
 * already, it has the same parent, fewer tokens and these as its first ones, and grows. */
void kvp__prefix_add(kvp__prefix *x, uint32_t parent, const uint32_t *blocks,
                     const int32_t *tokens, uint32_t n, const kvp__hash128 *hash);

/* A node that is there has n tokens now, still fewer than a block's: these. */
static inline void kvp__prefix_grow(kvp__prefix *x, uint32_t node, const int32_t *tokens,
                                    uint32_t n)
{
    int32_t *have = x->tokens + ((size_t)node << x->pool->block_shift);
    for (uint32_t i = x->nodes[node].n; i < n; i++) have[i] = tokens[i];
    x->nodes[node].n = (uint16_t)n;
}

/* Cuts a node without children to n tokens; 0 removes it (its blocks stay with their holders). */
void kvp__prefix_shrink(kvp__prefix *x, uint32_t node, uint32_t n);

/* The node's block in group g. */
static inline uint32_t kvp__prefix_block(const kvp__prefix *x, uint32_t node, uint32_t g)
{
    return g == 0 ? node : x->others[(uint64_t)node * (x->pool->n_groups - 1) + g - 1];
}

/* Forgets every node. BUSY, and nothing is forgotten, while any block is used. */
kvp_status kvp__prefix_reset(kvp__prefix *x, kvp_error *err);

/* The checker: begin zeroes the roots' marks, the caller adds 1 for each sequence under a root, end
 * recounts tree, roots, indexes, hashes, idle order and the links to the pool's records. INTERNAL
 * with the first contradiction. O(blocks). */
void kvp__prefix_check_begin(kvp__prefix *x);
kvp_status kvp__prefix_check_end(kvp__prefix *x, kvp_error *err);

#endif
