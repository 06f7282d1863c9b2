/*
 * The CUDA device: what its host files share. See docs/internals/cuda.md.
 *
 *     device.c    the table behind device.h: what is there, a card in use, the store
 *     weights.c   a model's tensors on the card
 *     forward.c   a runner: its memory, a step on the stream, attention for a host's own model
 *     graph.c     decode steps recorded once and replayed
 *
 * Each object (weights, store, runner) holds the card's primary context by itself, so they may end
 * in any order. Every entry pushes that context and pops it again: the caller's is as it was.
 */
#ifndef KVP_CUDA_CUDA_H
#define KVP_CUDA_CUDA_H

#include "cuda/api.h"
#include "cuda/kernels/args.h"
#include "device/device.h"

#define KVP__CUDA_ALIGN 256u /* of every part of the card's memory */

extern const kvp__device kvp__cuda_device;

/* --- a card in use --- */

typedef struct kvp__cuda {
    const kvp__cuda_found *found;
    const kvp__cuda_api *cu;
    const kvp__blas_api *blas;
    uint32_t ordinal, sms, arch; /* arch: 90 is compute capability 9.0 */
    kvp__cu_device device;
    kvp__cu_context context;     /* retained */
} kvp__cuda;

/* NO_DEVICE with what is missing. */
kvp_status kvp__cuda_open(kvp__cuda *out, uint32_t ordinal, kvp_error *err);
void kvp__cuda_close(kvp__cuda *c); /* one that was never opened, too */

/* Makes the context current, and the caller's again. */
kvp_status kvp__cuda_enter(const kvp__cuda *c, kvp_error *err);
void kvp__cuda_leave(const kvp__cuda *c);

/* The status of a driver's error, with one line: what was attempted and the error's name. Errors
 * after which a context is of no use any more are DEVICE_LOST. */
bool kvp__cuda_is_sticky(kvp__cu_result e);
kvp_status kvp__cuda_fail(const kvp__cuda *c, kvp_error *err, kvp__cu_result e, const char *what);

/* `bytes` > 0 of the card's memory. NO_MEMORY with what was asked and what is free. */
kvp_status kvp__cuda_take(const kvp__cuda *c, uint64_t bytes, const char *what, kvp__cu_ptr *out,
                          kvp_error *err);

/* Copies now, waiting. */
kvp_status kvp__cuda_send(const kvp__cuda *c, kvp__cu_ptr to, const void *from, size_t bytes,
                          kvp_error *err);

/* --- the store --- */

struct kvp__store {
    kvp__hooks hooks;
    kvp__cuda card;
    kvp__layout layout;
    kvp__cu_ptr slab;
    bool owned;
};

/* --- weights --- */

/* A matrix on the card. `type` is KVP__EL_...: of 16 bits, or quantised, whose scales lie apart. */
typedef struct kvp__cuda_mat {
    uint32_t type, n_out, n_in;
    kvp__cu_ptr values, scales;
} kvp__cuda_mat;

/* Projections of the same rows, whose outputs lie side by side in a row of results: one matrix as
 * far as the types agree. */
typedef struct kvp__cuda_stack {
    uint32_t n, n_out, n_in;
    kvp__cuda_mat part[3];
} kvp__cuda_stack;

typedef struct kvp__cuda_layer {
    kvp__cuda_stack qkv, o, gate_up, down;
    kvp__cu_ptr attn_norm, ffn_norm;                            /* floats */
    kvp__cu_ptr q_bias, k_bias, v_bias, o_bias;                 /* 0: none, like the rest */
    kvp__cu_ptr q_norm, k_norm, post_attn_norm, post_ffn_norm;
} kvp__cuda_layer;

struct kvp__weights {
    kvp__hooks hooks;
    kvp__cuda card;
    uint32_t type;               /* KVP__EL_F16 or BF16: of activations and unquantised matrices */
    uint32_t n_layers;
    kvp__cuda_layer *layers;
    kvp__cuda_stack embedding, output; /* of one part; the same if tied */
    kvp__cu_ptr output_norm;
    kvp__cu_ptr memory;          /* all of it */
    uint64_t bytes;
};

uint64_t kvp__cuda_packed_bytes(const kvp__model *m);
kvp_status kvp__cuda_place(const kvp__model *m, const kvp__place *how, kvp__weights **out,
                           kvp_error *err);
void kvp__cuda_unplace(kvp__weights *w);

/* --- a batch's runner --- */

uint64_t kvp__cuda_workspace_bytes(const kvp__model *m, uint32_t max_rows, uint32_t max_seqs,
                                   uint32_t max_positions);
kvp_status kvp__cuda_runner_create(const kvp__runner_options *o, kvp__runner **out, kvp_error *err);
void kvp__cuda_runner_destroy(kvp__runner *r);
kvp_status kvp__cuda_prepare(kvp__runner *r, const kvp__work *work);
kvp_status kvp__cuda_launch(kvp__runner *r);
void kvp__cuda_cancel(kvp__runner *r);
kvp_status kvp__cuda_poll(const kvp__runner *r);
const char *kvp__cuda_why(const kvp__runner *r);
kvp_status kvp__cuda_begin(kvp__runner *r, const kvp__work *work, kvp_error *err);
kvp_status kvp__cuda_attend(kvp__runner *r, const kvp__work *work, const kvp__attend *a,
                            kvp_error *err);

#endif
