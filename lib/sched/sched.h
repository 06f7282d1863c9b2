/*
 * The scheduler: which sequences compute which rows in the next step. (state) -> step, without
 * I/O, clock, device or allocation, so that a simulator can drive it at trace scale.
 *
 * It decides and keeps the books of states and blocks; the engine executes: it runs the copies and
 * rows of a planned step, samples, makes events. The life of a step:
 *
 *     step = kvp__sched_plan(s)                 rows and copies chosen, blocks taken
 *     ... the engine runs step->copies, then the rows ...
 *     kvp__sched_commit(s)                      the KV counts now and is published
 *     for each item: if (item->entry && item->decide)
 *         kvp__sched_token / _wait_host / _remove: what becomes of the sequence
 *
 * or kvp__sched_abort(s) in place of the last two. While a step is planned (kvp__sched_planned) the
 * pool's fence is up: blocks that are given back stay out of circulation until commit or abort.
 * The host may append, fork, truncate, pause, cancel and destroy meanwhile; what of that makes a
 * result void clears the `entry` of the item, so that a late result has nobody to go to.
 *
 * Order. Entries are ordered by priority (higher first), then by arrival. Waiting entries are
 * admitted strictly in that order; when blocks run out the last running entry in that order gives
 * up its own, never one that is ahead of the entry in need. So the first running entry always gets
 * on, and with it everybody in turn: nobody waits for ever.
 *
 * Invariants (kvp__sched_check walks them): an entry is in exactly one list, as its state says; an
 * entry in the running lists has passed admission since it last lost blocks; entries that hold
 * blocks without running are in a reclaim list, least recently active first.
 *
 * Called by the engine alone, inside the domain (one thread at a time).
 */
#ifndef KVP_SCHED_SCHED_H
#define KVP_SCHED_SCHED_H

#include "base/base.h"
#include "pool/pool.h"
#include "prefix/prefix.h"
#include "seq/seq.h"

typedef struct kvp__sched kvp__sched;
typedef struct kvp__sched_entry kvp__sched_entry;

typedef struct kvp__sched_link {
    kvp__sched_entry *prev, *next;
} kvp__sched_link;

typedef struct kvp__sched_list {
    kvp__sched_entry *head, *tail;
    uint32_t count;
} kvp__sched_list;

/* Per entry, since its last add; kvp_usage has their meaning. Counted at commit: what was planned
 * and then dropped does not count. */
typedef struct kvp__sched_usage {
    uint64_t cached, reattached, computed, recomputed, copied, preemptions;
} kvp__sched_usage;

/* One sequence as the scheduler sees it; embedded in the engine's own struct. Fields are read by
 * anybody in the domain and written by this room only. */
struct kvp__sched_entry {
    kvp__seq *seq;
    int32_t priority;
    uint32_t state;          /* KVP_SEQ_... */
    uint64_t arrival;        /* number of its add: unique, kept until it leaves the batch */
    uint64_t high;           /* tokens whose KV has been there, lost since or not */
    uint64_t prompt;         /* tokens that are not generated: at add, or appended by the host */
    uint64_t leader;         /* arrival of the entry whose prefill it waits for; 0: none */
    uint64_t leader_until;   /* until that one has computed so many tokens */
    uint32_t planned;        /* 1 + index of its item in the planned step; 0: none */
    bool in_batch;
    bool admitted;           /* has passed admission and lost no block since */
    bool counted;            /* its prompt has entered the pool's statistics */
    bool generating;         /* a token was chosen since the add */
    bool host;               /* waits for the host's token (also while paused) */
    bool paused;
    kvp__sched_usage usage;
    kvp__sched_link order;   /* in waiting, prefill or decode */
    kvp__sched_link hold;    /* in a reclaim list */
    kvp__sched_list *order_list, *hold_list; /* NULL: in none */
};

/* Who holds blocks without running, in the order in which they are asked to give them up. The pool
 * object owns it, because sequences are parked also when there is no batch. Zeroed is empty. */
typedef enum kvp__sched_hold {
    KVP__HOLD_PARKED, KVP__HOLD_PAUSED, KVP__HOLD_HOST, KVP__HOLD_WAITING, KVP__HOLDS
} kvp__sched_hold;

typedef struct kvp__sched_holders {
    kvp__sched_list lists[KVP__HOLDS];
} kvp__sched_holders;

/* --- entries, with or without a batch --- */

/* A new, parked entry for `seq`, which stays where it is. A fork's KV counts as its own. */
void kvp__sched_entry_init(kvp__sched_entry *e, kvp__sched_holders *h, kvp__seq *seq,
                           int32_t priority);
/* Before the sequence of a parked entry is destroyed. */
void kvp__sched_entry_drop(kvp__sched_entry *e);
/* After the pin of a sequence changed: what it holds may be asked for again. */
void kvp__sched_pinned(kvp__sched_entry *e, kvp__sched_holders *h);

/* --- a batch --- */

typedef struct kvp__sched_options {
    uint32_t token_budget;   /* as kvp_batch_options, defaults filled in */
    uint32_t max_sequences;
    uint32_t watermark;      /* thousandths, or KVP_WATERMARK_NONE */
    uint32_t prefill_share;  /* thousandths, or KVP_PREFILL_SHARE_NONE */
    uint32_t chunk_tokens;
} kvp__sched_options;

/* One entry's share of a step: rows for positions first_pos .. first_pos + n_rows - 1. */
typedef struct kvp__sched_item {
    kvp__sched_entry *entry; /* NULL since the host changed it while the step was planned */
    uint32_t first_row;      /* of its rows in the step */
    uint32_t n_rows;
    uint64_t first_pos;
    bool logits;             /* its last row is the last known token: a token is wanted */
    bool decode;             /* one row of a generating sequence */
    bool decide;             /* set by commit: `logits` still holds, the engine decides */
    /* this room's own */
    bool fresh;              /* admitted by this plan */
    bool kept;               /* with blocks it held before */
    uint32_t first_copy, n_copies;
    uint64_t found;          /* tokens that admission found in the cache or in its own table */
} kvp__sched_item;

typedef struct kvp__sched_step {
    kvp__sched_item *items;  /* [n_items], at most max_sequences */
    uint32_t n_items;
    uint32_t n_rows;         /* 0: nothing to run, and nothing to commit or abort */
    uint32_t n_logits;
    uint32_t n_copies;
    kvp__copy *copies;       /* to be run before any row is stored */
    kvp__sched_entry **ended; /* [n_ended]: grown past what the pool can hold alone: they are */
    uint32_t n_ended;         /* parked now, with all their tokens; the ending is CAPACITY */
    bool stalled;            /* n_rows is 0, there is work, and only pinned blocks are in its way */
} kvp__sched_step;

/* Counters that only grow; read by any thread. */
typedef struct kvp__sched_stats {
    _Atomic uint64_t steps, rows, rows_prefill, rows_decode, preemptions;
    _Atomic uint64_t sequences, running, waiting; /* these three are levels */
} kvp__sched_stats;

struct kvp__sched {
    const kvp__hooks *hooks;
    kvp__sched_options o;
    kvp__pool *pool;
    kvp__prefix *prefix;
    kvp__sched_holders *holders;
    kvp__sched_list waiting; /* in order */
    kvp__sched_list prefill; /* running, in order */
    kvp__sched_list decode;  /* running, least recently served first */
    uint64_t arrivals;
    uint64_t carry;          /* thousandths of a row that the prefill share is owed */
    uint64_t watermark_blocks;
    uint32_t entries;
    bool planned;
    kvp__sched_step step;
    kvp__sched_stats stats;
};

/* Takes all memory of planning. Options are in range (the front door checks). NO_MEMORY. */
kvp_status kvp__sched_init(kvp__sched *s, const kvp__hooks *hooks, const kvp__sched_options *o,
                           kvp__pool *pool, kvp__prefix *prefix, kvp__sched_holders *holders,
                           kvp_error *err);
/* All entries become parked; no step is planned. */
void kvp__sched_fini(kvp__sched *s);

/* Whether a sequence of `tokens` fits an empty pool: TOO_LARGE with both numbers if not. */
kvp_status kvp__sched_fits(const kvp__sched *s, uint64_t tokens, kvp_error *err);

/* Parked -> waiting. `max_length`: tokens it may grow to; memory for them is taken here, so that no
 * step has to. DUPLICATE, STATE (no token), TOO_LARGE, NO_MEMORY: nothing changed. A sequence whose
 * KV is complete computes its last token again, because its logits are wanted. */
kvp_status kvp__sched_add(kvp__sched *s, kvp__sched_entry *e, uint64_t max_length, kvp_error *err);
/* Any state -> parked; a planned result is dropped, the KV stays. For endings, cancel and remove. */
void kvp__sched_remove(kvp__sched *s, kvp__sched_entry *e);

/* Paused entries keep their blocks until somebody needs them. A planned result still counts. */
void kvp__sched_pause(kvp__sched *s, kvp__sched_entry *e);
void kvp__sched_resume(kvp__sched *s, kvp__sched_entry *e);

/* After the host appended to the sequence: one that waited for its token goes on. */
void kvp__sched_appended(kvp__sched *s, kvp__sched_entry *e);
/* After kvp__seq_truncate (any entry, parked too): a planned result is dropped; one in the batch
 * that has had KV for all that is left waits for the host. */
void kvp__sched_truncated(kvp__sched *s, kvp__sched_entry *e);

/* Chooses the next step. No step is planned. What it has done to others - preempted, reclaimed,
 * evicted - stays done after an abort; it changes no sequence's tokens. */
const kvp__sched_step *kvp__sched_plan(kvp__sched *s);
/* The step has run. Items whose entry is still there have their KV counted and published. */
void kvp__sched_commit(kvp__sched *s);
/* The step's rows have not run or do not count; its copies have been run. Blocks taken for it go
 * back, and who was admitted by it waits again. */
void kvp__sched_abort(kvp__sched *s);

/* What becomes of an item's entry that is to be decided: a token was chosen (it is appended; NO_MEMORY
 * cannot happen within the length given to add) ... */
kvp_status kvp__sched_token(kvp__sched *s, kvp__sched_entry *e, int32_t token, kvp_error *err);
/* ... or the host chooses it (mode KVP_SAMPLE_HOST). The third choice is kvp__sched_remove. */
void kvp__sched_wait_host(kvp__sched *s, kvp__sched_entry *e);

/* Whether anybody waits or runs (paused and host entries do not count). */
bool kvp__sched_has_work(const kvp__sched *s);

/* Walks lists, states and counters: INTERNAL with the first contradiction. */
kvp_status kvp__sched_check(const kvp__sched *s, kvp_error *err);

#endif
