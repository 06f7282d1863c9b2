/*
 * The engine: plans become device work, completions become events.
 *
 *     kvp__cache     what a kvp_pool points to: blocks, prefix index, store, and the domain
 *     kvp__sequence  what a kvp_seq points to
 *     kvp__loop      what a kvp_batch points to: scheduler, runner, the step in flight, the bell
 *
 * Everything here runs inside the domain (one thread at a time), except what is marked "worker":
 * those run on the device's threads and touch nothing but the kvp__pending they are given.
 *
 * A step in flight reads only what was copied for it at launch (kvp__loop's arrays), so the host may
 * append, fork, truncate, cancel and destroy meanwhile: what makes a result void clears the item's
 * entry in the scheduler, and the blocks that the device still touches are kept back by the pool's
 * fence.
 */
#ifndef KVP_ENGINE_ENGINE_H
#define KVP_ENGINE_ENGINE_H

#include "device/device.h"
#include "engine/bell.h"
#include "engine/crew.h"
#include "engine/domain.h"
#include "engine/opened.h"
#include "engine/ring.h"
#include "model/sampler.h"
#include "model/textstream.h"
#include "model/tokenizer.h"
#include "model/chat.h"
#include "sched/sched.h"

#define KVP__DEFAULT_BUDGET 512u
#define KVP__DEFAULT_SEQUENCES 64u
#define KVP__DEFAULT_BLOCK 16u

typedef struct kvp__cache kvp__cache;
typedef struct kvp__sequence kvp__sequence;
typedef struct kvp__loop kvp__loop;

/* How tokens are chosen: immutable, counted, so that a step in flight keeps the settings it began
 * with. `recent` is written at launch, for the penalties. */
typedef struct kvp__settings {
    uint32_t refs;
    uint32_t n_recent;
    size_t bytes;
    kvp__sampler sampler; /* bias points into this allocation */
    int32_t *recent;      /* [penalty_window], NULL without penalties */
} kvp__settings;

/* What ends a generation; immutable, counted, shared by forks. */
typedef struct kvp__endings {
    uint32_t refs;
    uint32_t n_tokens;
    size_t bytes;
    const kvp__stops *strings; /* NULL: none */
    int32_t tokens[];
} kvp__endings;

/* A row of logits that the host reads; counted, because a fork shares its parent's until one of the
 * two gets new ones. */
typedef struct kvp__logits {
    uint32_t refs;
    uint32_t pad[15]; /* the row begins on a cache line */
    float row[];
} kvp__logits;

struct kvp__sequence {
    kvp__sched_entry entry;
    kvp__seq seq;
    kvp__cache *cache;
    kvp__shell *shell;
    kvp__sequence *prev, *next; /* in the cache's list */
    kvp__ring ring;
    uint64_t tag;
    uint64_t max_tokens;        /* as in kvp_seq_options */
    uint64_t context;           /* resolved */
    uint64_t seed, forks;
    uint32_t event_mask;
    uint32_t eos;               /* KVP_EOS_... */
    kvp__settings *settings;
    kvp__endings *endings;      /* NULL: only the model's own */
    kvp__textstream stream;
    kvp__logits *logits;        /* mode KVP_SAMPLE_HOST; else NULL */
    kvp__logits *spare;         /* there whenever `logits` is shared: a step allocates nothing */
    bool logits_pending;
    bool ring_full;             /* paused for that; lifted when the host takes events */
    bool host_paused;           /* paused by kvp_seq_pause */
    bool in_flight;             /* the step in flight has rows of it */
    uint64_t generated;         /* since the add, like the rest below */
    uint64_t held;              /* tokens whose KV it had already; UINT64_MAX: no row yet */
    uint64_t added_ns, first_row_ns, first_token_ns;
    kvp_usage usage;            /* of the last ending */
    _Atomic uint32_t cancel_asked;
};

struct kvp__cache {
    kvp__domain domain; /* first */
    kvp__opened *model;
    const kvp__device *device;
    uint32_t ordinal;
    kvp__layout layout;
    kvp__store *store;
    kvp__pool pool;
    kvp__prefix prefix;
    bool caching;               /* the prefix room is in use */
    kvp__sched_holders holders;
    kvp__sequence *sequences;
    _Atomic uint64_t n_sequences;
    uint64_t used_peak;         /* read by any thread */
    kvp__loop *loop;            /* NULL: no batch */
    kvp__shell *shell;
    kvp__hash_key seeds;        /* fresh seeds are hashes of a counter */
    uint64_t n_seeds;
    void (*slab_released)(void *user, void *slab);
    void *slab, *slab_user;
};

/* One wanted row of the step in flight. The worker that has the row's logits, or the device that
 * chose by itself, fills in the result. */
typedef struct kvp__pending {
    kvp__settings *settings;
    float *host_row;            /* mode KVP_SAMPLE_HOST: where the logits go */
    kvp_status status;
    kvp__sampled sampled;
    kvp_error error;
} kvp__pending;

#define KVP__LAYER_DONE 1u      /* attended in the planned step */
#define KVP__LAYER_RECORDED 2u  /* in a graph of the host's, which may launch it in any step */

typedef enum kvp__flight {
    KVP__FLIGHT_NONE,
    KVP__FLIGHT_DEVICE,  /* launched */
    KVP__FLIGHT_HOST     /* planned for the host to run (own model) */
} kvp__flight;

struct kvp__loop {
    kvp__cache *cache;
    kvp__shell *shell;
    kvp__sched sched;
    kvp__runner *runner;
    kvp__team *team;             /* NULL: inline, or the device computes by itself */
    kvp__crew *crew;             /* the host's team, if it gave one */
    kvp__bell bell;
    kvp__ring_queue events;      /* sequences with events, in turn */
    uint64_t inline_budget_ns;
    uint32_t max_rows, max_sequences, table_stride;

    /* the step in flight */
    kvp__flight flight;
    const kvp__sched_step *step;
    kvp__work work;
    int32_t *tokens;             /* [max_rows] */
    uint32_t *positions;         /* [max_rows] */
    uint32_t *row_sequence;      /* [max_rows] */
    uint32_t *outputs;           /* [max_sequences] */
    uint32_t *item_output;       /* [max_sequences]: of each item, or KVP__NONE; as it was planned,
                                    whatever the host has cut since */
    kvp__work_seq *seqs;         /* [max_sequences] */
    kvp__sequence **riders;      /* [n_riders]: whose rows are in flight, doomed ones too */
    uint32_t n_riders;
    kvp__pending *pending;       /* [max_sequences] */
    kvp__choice *choices;        /* [max_sequences], of the same rows */
    uint32_t *tables;            /* [groups][max_sequences][table_stride], mapped */
    size_t tables_bytes;
    int64_t *slots;              /* [groups][max_rows], own model only */
    kvp_seq **view_handles;      /* [max_sequences] */
    uint64_t *view_tags;         /* [max_sequences] */
    uint32_t *view_lengths;      /* [max_sequences] */
    uint8_t *layers_done;        /* [n_layers], own model only: KVP__LAYER_... */
    uint64_t launched_ns;

    char *piece;                 /* a token's bytes, and behind them what a stream lets go */
    size_t piece_bytes;          /* of the first half */

    kvp_status fatal;            /* KVP_OK: none */
    kvp_error fatal_error;
    kvp_status refused;          /* what this call says and the next does not; KVP_OK: nothing */
    kvp_error refused_error;
    uint64_t deadline;           /* as kvp_batch_deadline */
    kvp__sequence *doomed;       /* destroyed while in flight; freed when it is over */

    /* counters, read by any thread */
    _Atomic uint64_t steps, rows_generated, endings, step_ns, plan_ns;
};

static inline kvp__sequence *kvp__sequence_of_entry(kvp__sched_entry *e)
{
    return (kvp__sequence *)(void *)e; /* its first member */
}

/* Whether kvp_step itself computes. */
static inline bool kvp__loop_is_inline(const kvp__loop *l)
{
    return !l->team && !l->cache->device->asynchronous;
}

static inline kvp__prefix *kvp__cache_prefix(kvp__cache *c) { return c->caching ? &c->prefix : NULL; }
static inline uint32_t kvp__cache_vocabulary(const kvp__cache *c)
{
    return c->model->model.geometry.vocabulary;
}

/* --- cache.c --- */

/* What a pool's options come to. */
typedef struct kvp__cache_shape {
    const kvp__device *device;
    uint32_t ordinal;
    kvp__layout layout;
} kvp__cache_shape;

/* Options with their defaults filled in and checked (block_tokens, formats, blocks). NO_DEVICE,
 * UNSUPPORTED, INVALID_ARG, TOO_LARGE. */
kvp_status kvp__cache_options(const kvp__opened *m, kvp_pool_options *o, kvp__cache_shape *out,
                              kvp_error *err);
kvp_status kvp__cache_create(kvp__cache **out, kvp__opened *m, const kvp_pool_options *o,
                             kvp_error *err);
void kvp__cache_get_stats(const kvp__cache *c, kvp_pool_stats *out);
kvp_status kvp__cache_check(kvp__cache *c, kvp_error *err);
kvp_status kvp__cache_reset(kvp__cache *c, uint64_t *held, kvp_error *err);
kvp_status kvp__cache_lookup(kvp__cache *c, const void *salt, size_t salt_bytes,
                             const int32_t *tokens, size_t count, uint64_t *cached,
                             kvp_error *err);
/* Token ids of a host: INVALID_TOKEN names the first bad index. */
kvp_status kvp__cache_check_tokens(const kvp__cache *c, const int32_t *tokens, size_t count,
                                   kvp_error *err);

/* --- sequence.c --- */

kvp_status kvp__sequence_create(kvp__sequence **out, kvp__cache *c, const kvp_seq_options *o,
                                kvp_error *err);
kvp_status kvp__sequence_fork(kvp__sequence **out, kvp__sequence *parent, uint64_t length,
                              const kvp_seq_options *o, kvp_error *err);
/* Settles a destroyed handle. */
void kvp__sequence_destroy(kvp__sequence *s);
/* The last of it: no step knows it any more. */
void kvp__sequence_free(kvp__sequence *s);
kvp_status kvp__sequence_append(kvp__sequence *s, const int32_t *tokens, size_t count,
                                kvp_error *err);
kvp_status kvp__sequence_append_text(kvp__sequence *s, const char *text, size_t bytes,
                                     uint32_t flags, kvp_error *err);
kvp_status kvp__sequence_append_chat(kvp__sequence *s, const kvp_chat_message *messages,
                                     size_t n_messages, size_t stride, uint32_t flags,
                                     kvp_error *err);
kvp_status kvp__sequence_set_sampling(kvp__sequence *s, const kvp_sampling *o, kvp_error *err);
kvp_status kvp__sequence_set_max_tokens(kvp__sequence *s, uint64_t max_tokens, kvp_error *err);
kvp_status kvp__sequence_truncate(kvp__sequence *s, uint64_t length, kvp_error *err);
kvp_status kvp__sequence_pin(kvp__sequence *s, uint64_t length, kvp_error *err);
void kvp__sequence_get_info(const kvp__sequence *s, kvp_seq_info *out);
/* What it may grow to: its context, and what max_tokens leaves. */
uint64_t kvp__sequence_max_length(const kvp__sequence *s);
bool kvp__sequence_is_host(const kvp__sequence *s); /* the host chooses its tokens */
/* A row of logits that nobody else reads, to be written; NULL: none is kept for this sequence. */
float *kvp__sequence_logits_row(kvp__sequence *s);
void kvp__settings_release(kvp__cache *c, kvp__settings *s);

/* --- loop.c --- */

kvp_status kvp__loop_create(kvp__loop **out, kvp__cache *c, const kvp_batch_options *o,
                            kvp_error *err);
void kvp__loop_destroy(kvp__loop *l);
kvp_status kvp__loop_add(kvp__loop *l, kvp__sequence *s, kvp_error *err);
kvp_status kvp__loop_remove(kvp__loop *l, kvp__sequence *s, kvp_error *err);
kvp_status kvp__loop_pause(kvp__sequence *s, bool pause, kvp_error *err);
void kvp__loop_get_stats(const kvp__loop *l, kvp_batch_stats *out);
/* What a wait waits for: the bell, and no longer than the deadline. The wait itself is outside the
 * domain, so that others can cancel and destroy meanwhile. */
kvp_status kvp__loop_wait_for(kvp__loop *l, int32_t *timeout_ms, int32_t *fd, kvp_error *err);
uint64_t kvp__loop_deadline(const kvp__loop *l);
int32_t kvp__loop_timeout_ms(const kvp__loop *l);

/* --- step.c --- */

kvp_status kvp__loop_step(kvp__loop *l, kvp_error *err);
/* Ends the step in flight without its results, waiting for what has begun. */
void kvp__loop_drop_flight(kvp__loop *l);
/* The batch has failed, and says so from now on. Its step in flight, which the device has given up,
 * is dropped: sequences and pool are as they were before it. `why` (may be NULL): the device's own
 * words. */
void kvp__loop_fail(kvp__loop *l, kvp_status status, const char *what, const char *why);
/* Fills the arrays of a step and raises the riders' flags; what launch and the view work from. */
void kvp__loop_prepare(kvp__loop *l, const kvp__sched_step *step);
/* The step in flight is over: its KV counts, and its results become tokens and events. `chosen`: a
 * host's token per output, -1 for none; NULL: what the device has found. */
void kvp__loop_take_in(kvp__loop *l, const int32_t *chosen);
/* Lowers the flags and frees what was destroyed meanwhile. */
void kvp__loop_land(kvp__loop *l);
/* Tells sequences that grew past the pool, and keeps the peak of used blocks. */
void kvp__loop_note_plan(kvp__loop *l, const kvp__sched_step *step);
/* What a wanted row comes to: a token, or (NULL) the host is asked for one. */
void kvp__loop_decide(kvp__loop *l, kvp__sequence *s, const kvp__sampled *sampled);

/* --- events.c --- */

void kvp__loop_end(kvp__loop *l, kvp__sequence *s, uint32_t ending, kvp_status status,
                   int32_t token);
void kvp__loop_push_token(kvp__loop *l, kvp__sequence *s, const kvp__sampled *sampled,
                          const char *text, size_t bytes);
void kvp__loop_push_logits(kvp__loop *l, kvp__sequence *s);
void kvp__loop_push_progress(kvp__loop *l, kvp__sequence *s);
kvp_status kvp__loop_next_event(kvp__loop *l, kvp_event *out);

/* --- own.c --- */

kvp_status kvp__own_view(const kvp__loop *l, kvp_view *out, kvp_error *err);
kvp_status kvp__own_view_group(const kvp__loop *l, uint32_t group, kvp_view_group *out,
                               kvp_error *err);
kvp_status kvp__own_attention(kvp__loop *l, uint32_t layer, const kvp_attention_args *a,
                              kvp_error *err);
kvp_status kvp__own_commit(kvp__loop *l, const int32_t *tokens, size_t count, kvp_error *err);
kvp_status kvp__own_abort(kvp__loop *l, kvp_error *err);

#endif
