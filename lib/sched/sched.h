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
 *     for each item: if (item->decide)
 *         kvp__sched_token / _wait_host / _remove: what becomes of the sequence
 *
 * or kvp__sched_abort(s) in place of the last two. While a step is planned the pool's fence is up:
 * blocks that are given back stay out of circulation until commit or abort. The host may append,
 * fork, truncate, pause, cancel and destroy meanwhile: an entry that leaves clears the `entry` of
 * its item, so a late result has nobody to go to; a truncate or an append makes only the choice of
 * the next token void (`decide` stays false).
 *
 * Order. Entries are ordered by priority (higher first), then by arrival. Waiting entries are
 * admitted strictly in that order; when blocks run out the last running entry in that order gives
 * up its own, never one that is ahead of the entry in need. So the first running entry always gets
 * on, and with it everybody in turn: nobody waits for ever.
 *
 * Invariants (kvp__sched_check walks them): an entry is in exactly the list that its state says; a
 * running entry has passed admission since it last lost blocks; an entry that holds blocks it could
 * give up without running is in a list of holders, least recently active first.
 *
 * Called by the engine alone, inside the domain (one thread at a time). Worker threads look at
 * nothing here: copy rows, positions and block ids when the step is launched.
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

/* Who holds blocks without running, in the order in which they are asked to give them up. The
 * engine's pool object owns it, because sequences are parked also when there is no batch. */
enum { KVP__HOLD_PARKED, KVP__HOLD_PAUSED, KVP__HOLD_HOST, KVP__HOLD_WAITING, KVP__HOLDS };

typedef struct kvp__sched_holders {
    kvp__sched_list lists[KVP__HOLDS]; /* zeroed is empty */
} kvp__sched_holders;

/* One sequence as the scheduler sees it; embedded in the engine's own struct, never moved. Anybody
 * in the domain reads it, only this room writes it. */
struct kvp__sched_entry {
    kvp__seq *seq;
    kvp__sched_holders *holders;
    int32_t priority;
    uint32_t state;          /* KVP_SEQ_... */
    uint64_t arrival;        /* number of its add: unique, kept until it leaves the batch */
    uint64_t leader;         /* arrival of the entry whose prefill it waits for; 0: none */
    uint32_t leader_until;   /* until that one has computed so many tokens */
    uint32_t owed;           /* add asked for the last row of this length again; 0: it did not */
    uint32_t planned;        /* 1 + index of its item in the planned step; 0: none */
    uint64_t tried;          /* number of the plan that last considered it as a decode */
    uint64_t preemptions;    /* since its add */
    kvp__seq_usage base;     /* the sequence's usage at its add */
    bool in_batch;
    bool admitted;           /* has passed admission and lost no block since */
    bool counted;            /* its prompt has entered the pool's statistics */
    bool generating;         /* a token was chosen since its add */
    bool host;               /* waits for the host's token (also while paused) */
    bool paused;
    kvp__sched_link order;   /* in waiting, prefill or decode */
    kvp__sched_link hold;    /* in a list of holders */
    kvp__sched_list *order_list, *hold_list; /* NULL: in none */
};

/* --- entries, with or without a batch --- */

/* A new, parked entry for an initialised (or forked) sequence. */
void kvp__sched_entry_init(kvp__sched_entry *e, kvp__sched_holders *h, kvp__seq *seq,
                           int32_t priority);
/* Before the sequence of a parked entry is finished (kvp__sched_remove it first if in a batch). */
void kvp__sched_entry_fini(kvp__sched_entry *e);
/* After kvp__seq_pin. */
void kvp__sched_pinned(kvp__sched_entry *e);
/* What was cached, computed and so on since its add. */
kvp__seq_usage kvp__sched_usage(const kvp__sched_entry *e);

/* --- a batch --- */

typedef struct kvp__sched_options {
    uint32_t token_budget;   /* as in kvp_batch_options, defaults filled in */
    uint32_t max_sequences;
    uint32_t watermark;      /* thousandths, or KVP_WATERMARK_NONE */
    uint32_t prefill_share;  /* thousandths, or KVP_PREFILL_SHARE_NONE */
    uint32_t chunk_tokens;
    uint32_t level_tokens;   /* keys that cost a row of a prompt as much as all else in it. Where others
                                generate, deep chunks are made shorter by it, so that steps take equally
                                long, but to an eighth at most; 0: no */
} kvp__sched_options;

/* One entry's share of a step: rows for positions first_pos .. first_pos + n_rows - 1. */
typedef struct kvp__sched_item {
    kvp__sched_entry *entry; /* NULL: it left while the step was planned */
    uint32_t first_row, n_rows;
    uint32_t first_pos;
    bool logits;             /* its last row is the last known token: logits are wanted */
    bool decode;             /* one row of a generating sequence; else a prompt or a recompute */
    bool decide;             /* set by commit: the engine is to choose what comes after it */
    bool admitted;           /* by this plan */
    bool kept;               /* and held blocks before */
} kvp__sched_item;

typedef struct kvp__sched_step {
    kvp__sched_item *items;  /* [n_items] */
    uint32_t n_items;
    uint32_t n_rows;         /* 0: nothing to run, to commit or to abort */
    uint32_t n_logits;
    uint32_t n_copies;
    kvp__copy *copies;       /* to be run before any row is stored */
    kvp__sched_entry **ended; /* [n_ended]: grown past what the pool can hold alone: parked now, */
    uint32_t n_ended;         /* with all their tokens; their ending is CAPACITY */
    bool stalled;            /* n_rows is 0, somebody has work, and only pins are in the way */
} kvp__sched_step;

/* Written by the domain's thread, read by any (KVP__PEEK). */
typedef struct kvp__sched_stats {
    uint64_t sequences, running, waiting;                        /* levels */
    uint64_t steps, rows, rows_prefill, rows_decode, preemptions; /* only grow; counted at commit */
} kvp__sched_stats;

struct kvp__sched {
    const kvp__hooks *hooks;
    kvp__sched_options o;
    kvp__pool *pool;
    kvp__prefix *prefix;     /* NULL: off */
    kvp__sched_holders *holders;
    kvp__sched_list waiting; /* in order */
    kvp__sched_list prefill; /* running, in order */
    kvp__sched_list decode;  /* running, least recently served first */
    uint64_t arrivals, plans;
    uint32_t carry;          /* thousandths of a row that prompts are owed */
    uint32_t watermark;      /* blocks */
    uint32_t entries;
    bool planned;            /* a step is planned: commit or abort comes next */
    kvp__sched_step step;
    kvp__sched_stats stats;
};

/* Takes all memory of planning. Options are in range (the front door checks). `hooks` is borrowed.
 * NO_MEMORY: *s is all zero, which fini takes. */
kvp_status kvp__sched_init(kvp__sched *s, const kvp__hooks *hooks, const kvp__sched_options *o,
                           kvp__pool *pool, kvp__prefix *prefix, kvp__sched_holders *holders,
                           kvp_error *err);
/* All entries have been removed and no step is planned. */
void kvp__sched_fini(kvp__sched *s);

/* Whether `tokens` of one sequence fit the empty pool: TOO_LARGE with both numbers of blocks. */
kvp_status kvp__sched_fits(const kvp__pool *pool, uint64_t tokens, kvp_error *err);

/* Parked -> waiting. `max_length`: tokens it may grow to; memory for them is taken here, so that no
 * step has to. DUPLICATE, STATE (no token), TOO_LARGE, NO_MEMORY: nothing changed. A sequence whose
 * KV is complete will compute its last token again, because its logits are wanted. */
kvp_status kvp__sched_add(kvp__sched *s, kvp__sched_entry *e, uint64_t max_length, kvp_error *err);
/* Any state -> parked: for endings, cancel, remove, destroy. A planned result is dropped, the KV
 * that counts stays. */
void kvp__sched_remove(kvp__sched *s, kvp__sched_entry *e);

/* A paused entry keeps its blocks until somebody needs them; a planned result still counts. */
void kvp__sched_pause(kvp__sched *s, kvp__sched_entry *e);
void kvp__sched_resume(kvp__sched *s, kvp__sched_entry *e);

/* After kvp__seq_append by the host: an entry that waited for its token goes on. Any state. */
void kvp__sched_appended(kvp__sched *s, kvp__sched_entry *e);
/* After kvp__seq_truncate, in any state (s may be NULL for a parked entry): the choice of the next
 * token that was under way is void; an entry that has had KV for all that is left waits for the
 * host. */
void kvp__sched_truncated(kvp__sched *s, kvp__sched_entry *e);

/* Chooses the next step; none is planned. What it does to others - preempt, reclaim, evict - stays
 * done after an abort: it changes nobody's tokens. */
const kvp__sched_step *kvp__sched_plan(kvp__sched *s);
/* The step has run: its KV counts and is published. */
void kvp__sched_commit(kvp__sched *s);
/* The step does not count: blocks taken for it go back, and who was admitted by it waits again. */
void kvp__sched_abort(kvp__sched *s);

/* After commit, for an item with `decide`: a token was chosen and is appended here (NO_MEMORY only
 * beyond the length given to add, or after a fork: unchanged) ... */
kvp_status kvp__sched_token(kvp__sched *s, kvp__sched_entry *e, int32_t token, kvp_error *err);
/* ... or the host is asked for it. The third choice is kvp__sched_remove. */
void kvp__sched_wait_host(kvp__sched *s, kvp__sched_entry *e);

/* Whether anybody waits or runs; paused entries and those that wait for the host do not count. */
bool kvp__sched_has_work(const kvp__sched *s);

/* Walks lists, states and counters. INTERNAL with the first contradiction. */
kvp_status kvp__sched_check(const kvp__sched *s, kvp_error *err);

#endif
