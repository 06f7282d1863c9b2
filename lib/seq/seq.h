/*
 * One sequence: its tokens, how many of them have their KV in the pool, and in which blocks.
 *
 *     tokens     [0 ............................................ length)
 *     computed   [0 ..................... computed)   KV written and, block by block, published
 *     reserved                           [computed ... reserved)   writable, being written
 *
 * Between steps n_blocks = ceil(computed / block_tokens) in every group. A step is
 *
 *     attach (when admitted)  ->  reserve  ->  (copies, rows on the device)  ->  commit or abort
 *
 * and at most one block per sequence is copied in a step: the one that `computed` lies in. That
 * copy is kept here until commit (made) or abort (undone), and its source is held as long. Copies
 * of a step are made before its rows are stored; hence the last one who shares a block may write to
 * it, beyond what they take, in the same step in which the others copy from it.
 *
 * Rules for the caller:
 *   - reserve and attach only while no step is in flight; the fence is up from launch until the
 *     step's sequences were committed or aborted (or released).
 *   - fork, truncate, append, pin, release and fini may come at any time, also in flight: they take
 *     effect at once. What the device still touches stays out of use through the pool's fence, and
 *     commit counts only rows whose tokens were not cut meanwhile. Copy the block ids at launch:
 *     the tables may change under a running step.
 *   - a sequence that is released or truncated between plan and launch must leave the plan (its
 *     copy is gone with it); collect copies with kvp__seq_copies after the last of the planning.
 *
 * Embed struct kvp__seq where you like; do not move it (forks know the owner of a token buffer by
 * its address). Nothing allocates but append, fork and reserve_capacity (and reserve or attach, if
 * reserve_capacity was not asked for enough).
 */
#ifndef KVP_SEQ_SEQ_H
#define KVP_SEQ_SEQ_H

#include "plan/plan.h"
#include "pool/pool.h"
#include "prefix/prefix.h"

typedef struct kvp__seq kvp__seq;

typedef struct kvp__seq_tokens {
    uint32_t refs, used, capacity;
    uint32_t pad;
    const kvp__seq *owner; /* who may extend it in place; NULL: whoever ends where it ends */
    int32_t ids[];
} kvp__seq_tokens;

/* Tokens, since init. cached and reattached count when the first step after the attach commits. */
typedef struct kvp__seq_usage {
    uint64_t cached;     /* served from the prefix cache, never computed for this sequence */
    uint64_t reattached; /* own tokens found again after a release */
    uint64_t computed;   /* rows committed */
    uint64_t recomputed; /* of these for positions that had KV once */
    uint64_t copied;     /* tokens of KV copied for it, of one group */
} kvp__seq_usage;

enum { KVP__COPY_NONE = 0, KVP__COPY_WRITE = 1, KVP__COPY_TAIL = 2 };

struct kvp__seq {
    kvp__pool *pool;
    kvp__prefix *prefix;       /* NULL: nothing is published or found */
    uint32_t root;
    /* read freely: */
    uint32_t length;
    uint32_t computed;
    uint32_t reserved;         /* end of what the running or planned step may write */
    uint32_t peak;             /* most that `computed` ever was for these tokens */
    uint32_t n_blocks;
    uint32_t n_published;      /* leading full blocks that are nodes, all of them canonical */
    uint32_t pin;              /* tokens asked to be kept */
    uint32_t pin_blocks;       /* blocks that are kept now */
    uint32_t table_capacity;
    const int32_t *tokens;     /* [length]; changes with append and reserve_capacity */
    uint32_t *tables[KVP__MAX_GROUPS]; /* [n_blocks] each */
    kvp__seq_usage usage;
    /* internal: */
    kvp__seq_tokens *buffer;
    uint32_t copy_kind;        /* KVP__COPY_WRITE: of a block it shared; TAIL: of a partial hit */
    uint32_t copy_block;       /* index in the tables */
    uint32_t copy_tokens;
    uint32_t found_from;       /* an attach found [found_from, computed), and no commit has counted
                                  it yet; KVP__NONE */
    uint32_t copy_src[KVP__MAX_GROUPS];
};

/* An empty sequence. `prefix` may be NULL; takes over the caller's reference on `root`
 * (kvp__prefix_root_intern). Cannot fail. */
void kvp__seq_init(kvp__seq *s, kvp__pool *pool, kvp__prefix *prefix, uint32_t root);

/* Gives back everything, the pinned part and the root included. Idempotent; takes a zeroed one. */
void kvp__seq_fini(kvp__seq *s);

/* Adds tokens at the end; takes no block. NO_MEMORY, CAPACITY (KVP__MAX_TOKENS): unchanged.
 * O(count), amortised; a copy of the tokens if a fork shares them and this is not their owner. */
kvp_status kvp__seq_append(kvp__seq *s, const int32_t *tokens, uint32_t count, kvp_error *err);

/* From here to a length of `tokens`, append, reserve, attach and commit allocate nothing.
 * NO_MEMORY: unchanged. */
kvp_status kvp__seq_reserve_capacity(kvp__seq *s, uint32_t tokens, kvp_error *err);

/* Initialises *child as a sequence of the first `length` tokens, sharing every block that is
 * computed up to there. Takes no block. The child has no pin. *child is written only on success.
 * INVALID_ARG (beyond the end), NO_MEMORY. O(blocks), no token is copied. */
kvp_status kvp__seq_fork(kvp__seq *s, uint32_t length, kvp__seq *child, kvp_error *err);

/* Cuts to `length` tokens (INVALID_ARG beyond the end); blocks go tail first. A pin is cut too. */
kvp_status kvp__seq_truncate(kvp__seq *s, uint32_t length, kvp_error *err);

/* Forgets the KV from position `computed` on, without cutting tokens (to compute the last token
 * again, say, when its logits are wanted). Nothing if so much is not computed. */
void kvp__seq_rewind(kvp__seq *s, uint32_t computed);

/* Keeps the blocks of the first `length` tokens, as far as they are computed, through
 * kvp__seq_release_unpinned; replaces the earlier pin; 0: none. INVALID_ARG beyond the end. */
kvp_status kvp__seq_pin(kvp__seq *s, uint32_t length, kvp_error *err);

/* Gives up the blocks (published ones stay cached), and what was planned for it; tokens stay. */
void kvp__seq_release(kvp__seq *s);          /* all, the pinned ones too; the pin stays asked for */
void kvp__seq_release_unpinned(kvp__seq *s);

/* Blocks that release_unpinned would make available. O(blocks). */
uint32_t kvp__seq_releasable(const kvp__seq *s);

/* Shares what `hit` (a lookup of this sequence's tokens just now) has beyond `computed`: whole
 * blocks by reference, the tail into a fresh block by a copy. Refused with NO_BLOCKS, and nothing
 * changed, unless `room` blocks are available once the whole blocks are shared; so
 * room = ceil(length / block_tokens) - hit->full + what is promised to others + watermark. The tail
 * is left out if its source, held until the copy is made, would take the last of that room. No
 * reservation is planned. NO_BLOCKS, NO_MEMORY. */
kvp_status kvp__seq_attach(kvp__seq *s, const kvp__hit *hit, uint32_t room, kvp_error *err);

/* Blocks that reserve(rows) would take now, a copy-on-write included. O(1). */
uint32_t kvp__seq_need(const kvp__seq *s, uint32_t rows);

/* Makes [computed, computed + rows) writable: takes blocks, and plans the copy of the block that
 * `computed` lies in if others hold it, or if a prefix that others build on is published beyond
 * `computed` in it. May be repeated with more rows. computed + rows <= length.
 * INVALID_ARG, NO_BLOCKS (needed, available), NO_MEMORY: unchanged. O(blocks taken). */
kvp_status kvp__seq_reserve(kvp__seq *s, uint32_t rows, kvp_error *err);

/* The copies that must be made before the reserved rows are stored: 0, or one per group, into
 * out[n_groups]. Returns how many. */
uint32_t kvp__seq_copies(const kvp__seq *s, kvp__copy *out);

/* The copies are made and the first `rows` reserved rows are stored: they count, and are published;
 * the rest of the reservation is returned. Rows whose tokens were truncated meanwhile do not count.
 * Returns the rows that do. */
uint32_t kvp__seq_commit(kvp__seq *s, uint32_t rows);

/* As if the step had not been planned: the copy is undone (a TAIL hit gives up its tail tokens) and
 * the blocks are returned. Idempotent. */
void kvp__seq_abort(kvp__seq *s);

/* Where the KV of position `pos` goes in group g: block id * block_tokens + offset.
 * pos < n_blocks * block_tokens. */
static inline int64_t kvp__seq_slot(const kvp__seq *s, uint32_t g, uint32_t pos)
{
    uint32_t b = s->pool->block_tokens;
    return (int64_t)s->tables[g][pos >> s->pool->block_shift] * b + (pos & (b - 1));
}

/* Blocks of the table that another sequence holds too (group 0). O(blocks). */
uint32_t kvp__seq_shared(const kvp__seq *s);

/* The checker, over all rooms: begin; one call per sequence alive; end. INTERNAL with the first
 * contradiction. `prefix` may be NULL. */
void kvp__check_begin(kvp__pool *pool);
kvp_status kvp__check_seq(const kvp__seq *s, kvp_error *err);
kvp_status kvp__check_end(kvp__pool *pool, kvp__prefix *prefix, kvp_error *err);

#endif
