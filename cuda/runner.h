/*
 * A runner and its step, as the files that make up the runner share them.
 *
 *     runner.c    memory, creation, the states of a step, what happens on the driver's thread
 *     step.c      prepare: what is uploaded for a step
 *     forward.c   a step's kernels and products, put on a stream
 *     graph.c     the same, recorded and replayed
 *     attend.c    attention for a host's own model
 *
 * All of a runner's memory on the card is one piece, laid out once; addresses in it never change,
 * so that what is recorded stays right. A step's upload lies at one place too, in sections that
 * follow each other without gaps: how long they are is the step's shape. A shape is either of the
 * step itself, or of a bucket, the most that a recorded graph takes.
 */
#ifndef KVP_CUDA_RUNNER_H
#define KVP_CUDA_RUNNER_H

#include "cuda/cuda.h"
#include "cuda/kernels/launch.h"
#include "cuda/plan.h"

#include <stdatomic.h>

#define KVP__CUDA_HEAD_ROWS 64u  /* rows of logits at a time */
#define KVP__CUDA_FEW_ROWS 8u    /* quantised weights are multiplied as they are for so many */
#define KVP__CUDA_UPLOADS 3u     /* that a host's own model may be ahead of the card */
#define KVP__CUDA_BLAS_BYTES (32u << 20) /* of memory for cuBLAS: what it likes to have on Hopper */
#define KVP__CUDA_BUCKETS 14u    /* 1, 2, 4 ... 8192 rows */

/* The kernels that are not attention. */
#define KVP__CUDA_KERNELS(X)                                                                       \
    X(patch) X(copy_blocks) X(embed) X(rms_norm) X(append) X(merge) X(activate) X(sample)          \
    X(matvec_q8_0) X(matvec_q4_0) X(dequant_q8_0) X(dequant_q4_0)
enum {
#define KVP__CUDA_KERNEL_NUMBER(name) KVP__CUDA_##name,
    KVP__CUDA_KERNELS(KVP__CUDA_KERNEL_NUMBER)
#undef KVP__CUDA_KERNEL_NUMBER
    KVP__CUDA_N_KERNELS
};

/* How much of a group's attention: items by tile, and together; entries of the other lists. */
typedef struct kvp__cuda_counts {
    uint32_t items[KVP__ATTEND_TILES], all_items, rows, merges, slots;
} kvp__cuda_counts;

/* How much of everything. */
typedef struct kvp__cuda_shape {
    uint32_t rows, seqs, outputs, copies, patches;
    kvp__cuda_counts groups[KVP__MAX_GROUPS];
} kvp__cuda_shape;

/* Where the sections of an upload begin, in bytes. kvp__cuda_step is the first, at 0. */
typedef struct kvp__cuda_upload {
    uint64_t tokens, positions, row_seq, outputs, draws, copies, patches, bytes;
    struct {
        uint64_t items, rows, merges, slots;
    } groups[KVP__MAX_GROUPS];
} kvp__cuda_upload;

/* A tile of rows of logits. */
typedef struct kvp__cuda_tile {
    struct kvp__runner *runner;
    uint32_t first, n;         /* outputs, in the device's order */
    uint32_t host_first, n_host; /* of these the host reads */
    bool last;
} kvp__cuda_tile;

/* Of a step. Only the driver's thread leaves RUNNING, but for LOST. */
enum {
    KVP__CUDA_IDLE,
    KVP__CUDA_RUNNING,
    KVP__CUDA_POSTING, /* the host's functions are being called */
    KVP__CUDA_ENDING,  /* `done` is being called */
    KVP__CUDA_LOST     /* and no host function will touch the work any more */
};

typedef struct kvp__cuda_recorded {
    kvp__cu_graph_exec graph; /* NULL: not yet */
    bool seen;                /* the bucket's kernels have run once, so that they are loaded */
} kvp__cuda_recorded;

struct kvp__runner {
    kvp__hooks hooks;
    kvp__cuda card;
    const kvp__model *model;
    const kvp__arch *arch;        /* NULL: own model, attention alone */
    const kvp__weights *weights;
    kvp__store *store;
    uint32_t type;                /* KVP__EL_...: of activations */
    uint32_t max_rows, max_seqs, max_outputs, max_positions;
    uint32_t table_stride, block_shift, v_format;

    kvp__cu_stream stream, own;   /* the one in use, which may be the host's; ours */
    kvp__cu_stream recording;     /* where graphs are recorded */
    bool of_host;                 /* the stream in use is the host's */
    kvp__blas_handle blas;
    kvp__cu_module *modules;
    uint32_t n_modules;
    kvp__cu_function kernels[KVP__CUDA_N_KERNELS];
    kvp__cu_function attend[KVP__MAX_GROUPS][KVP__ATTEND_TILES];

    /* on the card */
    kvp__cu_ptr memory;
    uint64_t memory_bytes;
    kvp__cu_ptr x, delta;         /* [row][width] float */
    kvp__cu_ptr normed;           /* [row][width] */
    kvp__cu_ptr products;         /* [row][widest] float: Q, K, V; gate and up */
    kvp__cu_ptr q, attended, hidden;
    kvp__cu_ptr part_out, part_lse;
    kvp__cu_ptr results;          /* drawn tokens, then a tile of logits: what is downloaded */
    kvp__cu_ptr sample_scratch, dequantised, blas_room;
    kvp__cu_ptr tables, copy_groups, inv_freq[2];
    kvp__cu_ptr upload_at;
    uint64_t upload_bytes, logits_at, dequantised_bytes;
    uint32_t max_patches, most_layers;

    /* pinned */
    uint8_t *uploads;             /* KVP__CUDA_UPLOADS, or one */
    uint8_t *results_host;
    uint32_t *shadow;             /* what the card's block tables hold, [group][seq][block] */
    uint64_t results_bytes, shadow_bytes;
    uint32_t n_uploads, turn;
    kvp__cu_event sent[KVP__CUDA_UPLOADS];
    bool pending[KVP__CUDA_UPLOADS]; /* `sent` was recorded and not seen yet */

    /* the host's */
    void *room;                   /* what follows */
    size_t room_bytes;
    kvp__cuda_plan plans[KVP__MAX_GROUPS];
    uint32_t *order;              /* [max_outputs]: the work's output, by the device's order */
    kvp__cuda_patch *patches;
    kvp__cuda_tile *tiles;
    void *scratch;                /* for `post` */

    /* the step */
    const kvp__work *work;
    kvp__cuda_shape shape;
    kvp__cuda_upload upload;
    uint32_t n_tiles, n_patches;
    uint32_t host_first, n_host;  /* outputs that the host reads, in the device's order */
    bool unsent;                  /* prepared, and not launched so far */
    bool whole_tables;            /* more patches than an upload holds: tables are sent instead */
    uint32_t tile_set;            /* of attention, that some group has: bits */
    uint32_t bucket;              /* that takes the step; KVP__CUDA_BUCKETS: none */
    kvp__cuda_recorded recorded[KVP__CUDA_BUCKETS][1u << KVP__ATTEND_TILES]; /* by tiles */
    bool graphs_off;              /* recording failed once */

    /* what is put on a stream: the first error, after which nothing more is */
    kvp__cu_stream queue, blas_queue;
    kvp__cu_result error;
    const char *what;
    bool blas_error;              /* `error` is cuBLAS's */
    char words[96];               /* what was said of it; "": nothing */

    _Atomic uint32_t state, cancelled, lost;
};

static inline kvp__cu_ptr kvp__cuda_table(const kvp__runner *r, uint32_t group)
{
    return r->tables + (uint64_t)group * r->max_seqs * r->table_stride * sizeof(uint32_t);
}

/* An address in the upload. */
static inline void *kvp__cuda_sent(const kvp__runner *r, uint64_t offset)
{
    return (void *)(uintptr_t)(r->upload_at + offset);
}

/* --- step.c --- */

/* The bytes of an upload of this shape, and where its sections lie. */
void kvp__cuda_place_upload(kvp__cuda_upload *u, const kvp__cuda_shape *s, uint32_t n_groups);

/* The most that any step of so many rows and sequences can have. */
void kvp__cuda_most(const kvp__runner *r, uint32_t rows, uint32_t seqs, uint32_t outputs,
                    kvp__cuda_shape *out);

/* For r->work: lists, patches and the shape of the step itself; and then `to`, with sections for
 * the shape `s`, which the step's own fits into. */
void kvp__cuda_count_step(kvp__runner *r);
void kvp__cuda_fill_upload(kvp__runner *r, const kvp__cuda_shape *s, uint8_t *to);

/* Both, for a step of the model, in the shape of a bucket if there is one that takes it. */
void kvp__cuda_prepare_step(kvp__runner *r);

/* The shape of the bucket that takes the decode step which was counted, with attention in tiles of
 * `tiles`, a set of bits; false: there is none. */
bool kvp__cuda_bucket_shape(const kvp__runner *r, uint32_t tiles, uint32_t *bucket,
                            kvp__cuda_shape *out);

/* The card's block tables are not known any more: every entry will be sent again. */
void kvp__cuda_forget_tables(kvp__runner *r);

/* Puts the upload on r->queue. */
void kvp__cuda_put_upload(kvp__runner *r, const uint8_t *from);

/* --- forward.c: put on r->queue; errors stay in r->error --- */

/* Keeps the first error. */
void kvp__cuda_note(kvp__runner *r, kvp__cu_result e, const char *what, bool blas);
void kvp__cuda_use_stream(kvp__runner *r, kvp__cu_stream stream); /* from now on, cuBLAS too */
void kvp__cuda_run(kvp__runner *r, kvp__cu_function f, kvp__launch l, const void *args,
                   const char *what);
void kvp__cuda_put_tables(kvp__runner *r);  /* patches and copies */
void kvp__cuda_put_forward(kvp__runner *r); /* all kernels of a step, copies and patches too */
void kvp__cuda_put_results(kvp__runner *r, const kvp__cuda_tile *t); /* and the host function */
/* Attention of a layer; q is there, K and V are in their blocks. */
void kvp__cuda_put_attention(kvp__runner *r, uint32_t layer, kvp__attention_args *a);
void kvp__cuda_fill_kv(const kvp__runner *r, uint32_t layer, kvp__kv_place *kv);

/* --- runner.c --- */

void kvp__cuda_on_tile(void *tile); /* the host function */

/* --- graph.c --- */

/* Replays the bucket's graph on r->queue, recording it first if its time has come. False: the step
 * has to be put there as it is. */
bool kvp__cuda_replay(kvp__runner *r);
void kvp__cuda_forget_graphs(kvp__runner *r);

#endif
