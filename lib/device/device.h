/*
 * The one wall between the engine and compute. The engine knows sequences, plans and events; a
 * device knows weights, blocks of KV and arithmetic. Nothing of the engine is visible from here,
 * and nothing of a device's insides from the engine.
 *
 * The life of a device's objects:
 *     weights   packed from a model's tensors; shared by pools; immutable
 *     store     the memory of one pool's blocks
 *     runner    what one batch needs to run steps: workspace for its largest step, and a team
 * All memory is taken at creation; prepare, launch, advance, poll and attend allocate nothing.
 *
 * Two kinds of devices. The CPU computes on a team of workers, or inline, on the engine's thread.
 * An asynchronous device computes by itself: it takes no team, launch returns at once, advance is
 * never called, and `done` comes from a thread of its own. One table serves all devices of a kind,
 * told apart by their ordinals ("cuda:0", "cuda:1").
 */
#ifndef KVP_DEVICE_DEVICE_H
#define KVP_DEVICE_DEVICE_H

#include "base/base.h"
#include "base/team.h"
#include "model/model.h"
#include "model/sampler.h"
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

/* How the token after a wanted row is chosen. */
typedef struct kvp__choice {
    const kvp__sampler *sampler; /* NULL: the host reads the logits */
    uint64_t seed, position;     /* as kvp__sample takes them */
} kvp__choice;

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
    /* A device that can choose a token by itself, where kvp__sampler_is_plain, may call this
     * instead of `post`: the token that kvp__sample would have chosen for choices[i]; or -1, and
     * `bad` is the first token whose logit is NaN or +infinity; the vocabulary's size: all are
     * -infinity. */
    const kvp__choice *choices;    /* [n_outputs]; NULL: every row goes to `post` */
    void (*chosen)(void *user, uint32_t i, int32_t token, uint32_t bad);
    /* The step is over; from whichever thread finished it. Must not call back into the runner. */
    void (*done)(void *user);
    void *user;
} kvp__work;

typedef struct kvp__place {
    uint32_t ordinal;
    int32_t threads;               /* as kvp_place_options.threads */
    int32_t (*progress)(void *user, uint64_t done, uint64_t total); /* may be NULL */
    void *user;
    const char *packed_file;       /* NULL: none; the CPU alone keeps one */
} kvp__place;

typedef struct kvp__runner_options {
    const kvp__hooks *hooks;
    const kvp__model *model;
    const kvp__weights *weights;   /* NULL: own-model, attend only */
    kvp__store *store;             /* of the same ordinal as the weights */
    kvp__team *team;               /* NULL: inline; always so if asynchronous */
    void *stream;                  /* the host's, borrowed; NULL: none, always so on the CPU */
    uint32_t max_rows, max_seqs, max_outputs;
    uint32_t max_positions;        /* keys a row may see at most */
} kvp__runner_options;

/* Attention of one layer for rows the host computed (own-model way). Pointers into the device's
 * memory, aligned to an element; strides in bytes, set, multiples of an element. */
typedef struct kvp__attend {
    uint32_t layer;
    uint32_t type;                 /* KVP_KV_...: of q, k, v and out */
    float scale, softcap;
    const void *q, *k, *v;
    void *out;
    int64_t q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head;
} kvp__attend;

typedef struct kvp__device {
    const char *name;      /* "cpu", "cuda" */
    uint32_t max_ordinals; /* 1: the name alone; n: the name, which is the first one's, or
                              "<name>:0" to "<name>:n-1", there or not */
    bool asynchronous;     /* computes by itself */

    /* Whether this library was built with what the device runs; NULL: always. */
    bool (*built)(void);
    /* How many there are now; 0: none, and describe(0) says why. */
    uint32_t (*count)(void);
    /* Fills all but `size`. One that is not there or not usable says what is missing. */
    void (*describe)(uint32_t ordinal, kvp_device_info *out);

    /* Of the CPU, NULL elsewhere: the best level not above `cap` (0: no cap) that this machine runs;
     * 0: none such. */
    uint32_t (*level)(uint32_t cap);

    /* Exact bytes that place would take, and a runner's workspace. Answered without the device. */
    uint64_t (*packed_bytes)(const kvp__model *m);
    uint64_t (*workspace_bytes)(const kvp__model *m, uint32_t max_rows, uint32_t max_seqs,
                                uint32_t max_positions);

    /* NO_DEVICE: what is missing, in a sentence. NO_MEMORY with what is needed and available. */
    kvp_status (*place)(const kvp__model *m, const kvp__place *how, kvp__weights **out,
                        kvp_error *err);
    void (*unplace)(kvp__weights *w);

    /* Whether this device is there, NO_DEVICE as above, and its kernels take this shape, UNSUPPORTED
     * with the shape named. */
    kvp_status (*supports)(const kvp__geometry *g, uint32_t block_tokens, uint32_t k_format,
                           uint32_t v_format, uint32_t ordinal, kvp_error *err);

    /* `slab`: the host's, in the device's memory; NULL: the device takes layout->bytes itself (the
     * CPU's are committed when first written). NO_MEMORY as above. */
    kvp_status (*store_create)(const kvp__hooks *hooks, const kvp__layout *layout, void *slab,
                               uint32_t ordinal, kvp__store **out, kvp_error *err);
    void (*store_destroy)(kvp__store *s);   /* waits until nothing uses the blocks any more */
    uint64_t slab_align;

    kvp_status (*runner_create)(const kvp__runner_options *o, kvp__runner **out, kvp_error *err);
    void (*runner_destroy)(kvp__runner *r); /* no step is in flight */

    /* Makes a step ready, as far as it can be before anything runs; `work` stays until it is over. */
    kvp_status (*prepare)(kvp__runner *r, const kvp__work *work);
    /* Starts the step that was prepared. With a team or asynchronous it returns at once and `done`
     * is called later; inline, the step is run by advance. One step at a time. An error: nothing of
     * the step runs, and `done` is not called. */
    kvp_status (*launch)(kvp__runner *r);
    /* Inline only (NULL if asynchronous): computes until the step is over (`done` was called) or the
     * clock hook passes `until`. With a team: nothing. */
    void (*advance)(kvp__runner *r, uint64_t until);
    /* The step's results are not wanted any more: what has not begun is passed over where that is
     * possible, and `done` is called as ever. */
    void (*cancel)(kvp__runner *r);
    /* KVP_AGAIN: a step is running. KVP_OK: none is, and no thread will touch the work or call one
     * of its functions any more; a `done` that is being called is waited for, those few
     * instructions. DEVICE_LOST: the same, but the step has no results, and no later one will have
     * any. Never waits otherwise. */
    kvp_status (*poll)(const kvp__runner *r);
    /* What the device itself says of the last error of prepare, launch or poll, as the rest of a
     * sentence, the runner's; NULL, or this whole function NULL: nothing. */
    const char *(*why)(const kvp__runner *r);

    /* Own-model: a planned step begins, with its copies; then one layer's attention. Both use the
     * team if there is one, and on the CPU the result is there on return; an asynchronous device
     * puts them on the stream, or waits for them if the host gave none. `work` is looked at during
     * these calls alone. KVP_PLANNED from attend: the host records its stream in a graph; the layer
     * is attended whenever it is launched, in this step and later ones. Nothing has changed after
     * INVALID_ARG or UNSUPPORTED. */
    kvp_status (*begin)(kvp__runner *r, const kvp__work *work, kvp_error *err);
    kvp_status (*attend)(kvp__runner *r, const kvp__work *work, const kvp__attend *a,
                         kvp_error *err);

    /* For tests: the K and V of token `t` of a block as floats, [kv_heads][key_dim] and
     * [kv_heads][value_dim]; and poison for unused memory. */
    void (*peek)(const kvp__store *s, uint32_t group, uint32_t layer, uint32_t block, uint32_t t,
                 float *k, float *v);
    void (*poison)(kvp__store *s, uint32_t group, uint32_t block, uint32_t first_token);
} kvp__device;

/* Whether a step keeps the contract above: lengths within tables, ids within the pool, rows and
 * positions in order. INTERNAL with the first that does not. The engine asks before every step. */
kvp_status kvp__work_check(const kvp__work *w, const kvp__layout *l, kvp_error *err);

/* By name ("cpu", NULL: "cpu"; "cuda", "cuda:N"), without asking whether it is there; NULL: no
 * device has such a name. `ordinal` is untouched then. */
const kvp__device *kvp__device_find(const char *name, uint32_t *ordinal);

/* Number `index` of all there are, and of each kind of which there is none one entry that says so;
 * NULL past the last one. */
const kvp__device *kvp__device_at(uint32_t index, uint32_t *ordinal);

/* For tests: one more device from now on, behind the others; NULL: none. Borrowed. */
void kvp__device_use(const kvp__device *extra);

#endif
