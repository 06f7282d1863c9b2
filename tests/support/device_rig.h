/*
 * One model on two devices, and steps that run on both: the CPU is the truth, the CUDA device has
 * to give the same logits to within its 16 bits. Sequences, block tables and copies are made here
 * by hand, so that a test says exactly what a step is. Usable from C++ too.
 *
 * A call that should succeed and does not fails the test.
 */
#ifndef TESTS_SUPPORT_DEVICE_RIG_H
#define TESTS_SUPPORT_DEVICE_RIG_H

#include "support/gguf_writer.h"

#include <kvpage.h>

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RIG_SEQS 64
#define RIG_OUTPUTS 256

typedef struct rig_options {
    const gw_model *model;      /* NULL: own model, see `geometry` */
    const kvp_geometry *geometry;
    uint32_t block_tokens;      /* 0: 16 */
    uint32_t blocks;            /* 0: 256 */
    uint32_t k_format, v_format; /* 0: KVP_KV_F16 */
    uint32_t max_rows, max_seqs; /* 0: 64, 16 */
    uint32_t max_positions;     /* 0: 256 */
    bool no_cpu;                /* the CUDA device alone */
    bool mixed;                 /* k and up of layer 0 are of another type than q, v and gate */
    uint32_t slow_done_us;      /* `done` takes so long */
    uint32_t refuse;            /* the CUDA device's n-th allocation of the host; 0: none */
    void *stream;               /* the host's */
    uint64_t (*slab)(uint64_t bytes); /* of the host's, for the KV blocks; NULL: none */
} rig_options;

typedef struct rig rig;

/* NULL: the CUDA device refused, with the reason in *err; everything has been given back. */
rig *rig_open(const rig_options *o, kvp_error *err);
void rig_close(rig *r);

/* What the CUDA device says of itself. */
void rig_describe(uint32_t ordinal, kvp_device_info *out);

/* Places a model and takes it away again; cancelled at the n-th call of `progress`, or with reads
 * that fail from the n-th on; 0: neither. How many calls of progress there were, and whether they
 * rose to the total, are stored. */
kvp_status rig_place(const gw_model *m, uint32_t cancel_at, uint32_t fail_reads_at, uint32_t *calls,
                     bool *rose, kvp_error *err);

/* How many CUDA devices there are. */
uint32_t rig_count(void);
/* Whether an allocation was refused. */
bool rig_refused(void);

/* Models that no file can be, given to place: how it answers. */
typedef enum rig_oddity {
    RIG_GEOMETRY,      /* no weights */
    RIG_HUGE,          /* beyond 64 bits */
    RIG_HUGE_WORKSPACE,
    RIG_VECTOR,        /* a norm in blocks */
    RIG_INPUTS,        /* k and q disagree on their inputs */
    RIG_PACKED_FILE    /* nothing odd, but for a packed file */
} rig_oddity;
kvp_status rig_place_odd(rig_oddity which, kvp_error *err);

/* Bytes that the device says a runner of this rig's limits takes, and that weights take. */
uint64_t rig_workspace(const rig *r);
uint64_t rig_packed(const rig *r);
uint64_t rig_slab_bytes(const rig *r);

/* Bytes that the library has taken by its hooks and not given back. */
uint64_t rig_live(void);
/* The last line that was logged; "" if none since rig_open. */
const char *rig_log(void);

typedef struct rig_sampling {
    kvp_sampling options;
    uint64_t seed;
    bool on;                    /* else the host reads the logits */
} rig_sampling;

/* A sequence with n random tokens; more are added with rig_append. Numbers from 0. */
uint32_t rig_seq(rig *r, uint32_t n);
void rig_append(rig *r, uint32_t seq, int32_t token);
/* One that begins with the first n tokens of another, all of them computed: whole blocks are
 * shared, the last one is copied in the next step. */
uint32_t rig_fork(rig *r, uint32_t seq, uint32_t n);
void rig_end(rig *r, uint32_t seq);
/* The first n tokens count as computed, and have blocks, whatever is in them. */
void rig_pretend(rig *r, uint32_t seq, uint32_t n);
void rig_set_sampling(rig *r, uint32_t seq, const rig_sampling *s);

/* The rows of a sequence that a step computes: the next `rows` of its tokens. */
typedef struct rig_part {
    uint32_t seq, rows;
    uint32_t outputs;           /* of the last so many rows the logits are wanted */
} rig_part;

/* Runs a step on both devices and compares the logits of all outputs that the host reads; the
 * largest difference over the largest logit. `again`: what was computed counts as not computed, so
 * that the same step can be run again. */
double rig_step(rig *r, const rig_part *parts, uint32_t n);
void rig_rewind(rig *r, const rig_part *parts, uint32_t n);

/* Of the last step on the CUDA device, by output. */
const float *rig_logits(const rig *r, uint32_t output);     /* NULL: they were not posted */
int32_t rig_chosen(const rig *r, uint32_t output, uint32_t *bad); /* -2: the host did */
/* What kvp__sample makes of logits. */
int32_t rig_sample(const rig_sampling *s, const float *logits, uint32_t n, uint64_t position);
uint32_t rig_vocabulary(const rig *r);
uint32_t rig_position(const rig *r, uint32_t output); /* the token's that comes next */

/* The largest difference between what the two devices keep of a sequence's K and V, over the
 * largest. */
double rig_compare_kv(const rig *r, uint32_t seq);
/* Poisons all blocks that no sequence holds, and the unused tails of those that are held. */
void rig_poison(rig *r);

/* The halves of a step on the CUDA device alone. */
void rig_prepare(rig *r, const rig_part *parts, uint32_t n);
kvp_status rig_launch(rig *r);
kvp_status rig_poll(rig *r);
void rig_cancel(rig *r);
uint32_t rig_done(const rig *r);  /* how often `done` was called, */
uint32_t rig_posts(const rig *r); /* and `post` and `chosen` together, since the last prepare */

/* Own model: the device's begin for the parts; then attention of a layer, given device pointers. */
kvp_status rig_begin(rig *r, const rig_part *parts, uint32_t n, kvp_error *err);
typedef struct rig_attend {
    uint32_t layer, type;
    uint64_t q, k, v, out;      /* on the card */
    int64_t q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head;
    float scale, softcap;
} rig_attend;
kvp_status rig_attention(rig *r, const rig_attend *a, kvp_error *err);
/* The same on the CPU, of packed floats. */
void rig_attention_cpu(rig *r, uint32_t layer, const float *q, const float *k, const float *v,
                       float *out, float scale, float softcap);

#ifdef __cplusplus
}
#endif
#endif
