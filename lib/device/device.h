/*
 * The one wall between the engine and compute. The engine knows sequences, plans and events; a
 * device knows weights, blocks of KV and arithmetic. Nothing of the engine is visible from here, and
 * nothing of a device's insides from the engine.
 *
 * The life of a device's objects:
 *     weights   packed from a model's tensors; shared by pools; immutable
 *     store     the memory of one pool's blocks
 *     runner    what one batch needs to run steps: workspace for its largest step, and a team
 * All memory is taken at creation; prepare, launch, advance, poll and attend allocate nothing.
 */
#ifndef KVP_DEVICE_DEVICE_H
#define KVP_DEVICE_DEVICE_H

#include "base/base.h"
#include "base/team.h"
#include "model/model.h"
#include "plan/plan.h"

typedef struct kvp__store kvp__store;
typedef struct kvp__runner kvp__runner;

/* One sequence's share of a step. Its rows are consecutive, and so are their positions. */
typedef struct kvp__work_seq {
    uint32_t first_row, n_rows;
    uint32_t first_pos;
    uint32_t n_blocks;                         /* enough for first_pos + n_rows tokens */
    const uint32_t *tables[KVP__MAX_GROUPS];   /* block ids; stable until the step is over */
} kvp__work_seq;

/* One step. Everything pointed to stays as it is until the step is over. */
typedef struct kvp__work {
    uint32_t n_rows, n_seqs, n_copies, n_outputs;
    const int32_t *tokens;         /* [n_rows] */
    const uint32_t *positions;     /* [n_rows] */
    const kvp__work_seq *seqs;
    const kvp__copy *copies;       /* done before any row is stored; no dst is another's src */
    const uint32_t *outputs;       /* [n_outputs]: rows whose logits are wanted */
    /* Takes the logits of output `i` (vocabulary floats, the device's, valid during the call, may
     * be overwritten by the callee) and the thread's scratch of KVP__SCRATCH_BYTES. Any worker,
     * different outputs at the same time. */
    void (*post)(void *user, uint32_t i, float *logits, void *scratch);
    /* The step is over; from whichever thread finished it. Must not call back into the runner. */
    void (*done)(void *user);
    void *user;
} kvp__work;

typedef struct kvp__place {
    int32_t threads;               /* as kvp_place_options.threads */
    int32_t (*progress)(void *user, uint64_t done, uint64_t total); /* may be NULL */
    void *user;
    const char *packed_file;       /* NULL: none */
} kvp__place;

typedef struct kvp__runner_options {
    const kvp__hooks *hooks;
    const kvp__model *model;
    const kvp__weights *weights;   /* NULL: own-model, attend only */
    kvp__store *store;
    kvp__team *team;               /* NULL: inline */
    uint32_t max_rows, max_seqs, max_outputs;
    uint32_t max_positions;        /* keys a row may see at most */
} kvp__runner_options;

/* Attention of one layer for rows the host computed (own-model way). Strides in bytes, set. */
typedef struct kvp__attend {
    uint32_t layer;
    float scale, softcap;
    const float *q, *k, *v;
    float *out;
    int64_t q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head;
} kvp__attend;

typedef struct kvp__device {
    const char *name; /* "cpu" */

    /* Fills all but `size`. */
    void (*describe)(kvp_device_info *out);

    /* The best level not above `cap` (0: no cap) that this machine runs; 0: none such. */
    uint32_t (*level)(uint32_t cap);

    /* Exact bytes that place would take, and a runner's workspace. */
    uint64_t (*packed_bytes)(const kvp__model *m);
    uint64_t (*workspace_bytes)(const kvp__model *m, uint32_t max_rows, uint32_t max_seqs,
                                uint32_t max_positions);

    kvp_status (*place)(const kvp__model *m, const kvp__place *how, kvp__weights **out,
                        kvp_error *err);
    void (*unplace)(kvp__weights *w);

    /* Whether kernels take this geometry; UNSUPPORTED with the shape named. */
    kvp_status (*supports)(const kvp__geometry *g, kvp_error *err);

    /* `slab` NULL: the device takes layout->bytes itself, committed when first written. */
    kvp_status (*store_create)(const kvp__hooks *hooks, const kvp__layout *layout, void *slab,
                               kvp__store **out, kvp_error *err);
    void (*store_destroy)(kvp__store *s);
    uint64_t slab_align;

    kvp_status (*runner_create)(const kvp__runner_options *o, kvp__runner **out, kvp_error *err);
    void (*runner_destroy)(kvp__runner *r); /* no step is in flight */

    /* Makes a step ready, as far as it can be before anything runs; `work` stays until it is over. */
    kvp_status (*prepare)(kvp__runner *r, const kvp__work *work);
    /* Starts the step that was prepared. With a team it returns at once and `done` is called later;
     * inline, the step is run by advance. One step at a time. */
    kvp_status (*launch)(kvp__runner *r);
    /* Inline only: computes until the step is over (`done` was called) or the clock hook passes
     * `until`. With a team: nothing. */
    void (*advance)(kvp__runner *r, uint64_t until);
    /* The step's results are not wanted any more: chunks that have not begun are passed over, and
     * `done` is called as ever. */
    void (*cancel)(kvp__runner *r);
    /* KVP_OK: no step in flight. KVP_AGAIN: running. DEVICE_LOST. */
    kvp_status (*poll)(const kvp__runner *r);

    /* Own-model: the copies of a planned step, now; then one layer's attention, now. Both use the
     * team if there is one and return when the result is there. */
    void (*copy)(kvp__runner *r, const kvp__copy *copies, uint32_t n);
    void (*attend)(kvp__runner *r, const kvp__work *work, const kvp__attend *a);

    /* For tests: the K and V of token `t` of a block as floats, [kv_heads][key_dim] and
     * [kv_heads][value_dim]; and poison for unused memory. */
    void (*peek)(const kvp__store *s, uint32_t group, uint32_t layer, uint32_t block, uint32_t t,
                 float *k, float *v);
    void (*poison)(kvp__store *s, uint32_t group, uint32_t block, uint32_t first_token);
} kvp__device;

/* Whether a step keeps the contract above: lengths within tables, ids within the pool, rows and
 * positions in order. INTERNAL with the first that does not. The engine asks before every step. */
kvp_status kvp__work_check(const kvp__work *w, const kvp__layout *l, kvp_error *err);

/* By name ("cpu", NULL: "cpu"); NULL if there is none. */
const kvp__device *kvp__device_find(const char *name);
const kvp__device *kvp__device_at(uint32_t index);

#endif
