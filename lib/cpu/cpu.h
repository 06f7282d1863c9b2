/*
 * The CPU device: what its files share. See docs/internals/cpu.md.
 *
 *     weights.c   a model's tensors, packed once
 *     attend.c    the store, and running an item of attention
 *     items.c     the list of a step's items
 *     forward.c   a step as a program of phases
 *     device.c    the table behind device.h
 *
 * Who may call: the files of cpu/; device/device.c takes the table.
 */
#ifndef KVP_CPU_CPU_H
#define KVP_CPU_CPU_H

#include "cpu/attend.h"
#include "cpu/kernels.h"
#include "device/device.h"

extern const kvp__device kvp__cpu_device;

/* --- weights --- */

typedef struct kvp__cpu_layer {
    kvp__mat q, k, v, o, gate, up, down;
    const float *attn_norm, *ffn_norm;
    const float *q_bias, *k_bias, *v_bias, *o_bias;    /* NULL: none, like the rest */
    const float *q_norm, *k_norm, *post_attn_norm, *post_ffn_norm;
} kvp__cpu_layer;

struct kvp__weights {
    kvp__hooks hooks;
    uint32_t n_layers;
    kvp__cpu_layer *layers;
    kvp__mat embedding, output; /* the same panels if tied */
    const float *output_norm;
    void *memory; /* all panels and vectors */
    uint64_t bytes;
};

uint64_t kvp__cpu_packed_bytes(const kvp__model *m);
kvp_status kvp__cpu_place(const kvp__model *m, const kvp__place *how, kvp__weights **out,
                          kvp_error *err);
void kvp__cpu_unplace(kvp__weights *w);

/* --- a batch's runner --- */

uint64_t kvp__cpu_workspace_bytes(const kvp__model *m, uint32_t max_rows, uint32_t max_seqs,
                                  uint32_t max_positions);
kvp_status kvp__cpu_runner_create(const kvp__runner_options *o, kvp__runner **out, kvp_error *err);
void kvp__cpu_runner_destroy(kvp__runner *r);
kvp_status kvp__cpu_prepare(kvp__runner *r, const kvp__work *work);
kvp_status kvp__cpu_launch(kvp__runner *r);
void kvp__cpu_advance(kvp__runner *r, uint64_t until);
void kvp__cpu_cancel(kvp__runner *r);
kvp_status kvp__cpu_poll(const kvp__runner *r);
kvp_status kvp__cpu_begin(kvp__runner *r, const kvp__work *work, kvp_error *err);
kvp_status kvp__cpu_attend(kvp__runner *r, const kvp__work *work, const kvp__attend *a,
                           kvp_error *err);

#endif
