/*
 * From a file's metadata and tensor table to the one descriptor of every architecture. Users:
 * model.c, and tests.
 */
#ifndef KVP_MODEL_ARCH_H
#define KVP_MODEL_ARCH_H

#include "model/gguf.h"

/* Zeroed memory that lives as long as the model; NULL if there is none. */
void *kvp__model_take(kvp__model *m, size_t size);

/* Fills m->arch and m->geometry. m->tensors holds the table of `g` in the same order, m->source
 * can be read (rope_freqs.weight is), m->hooks are set. Errors: FORMAT, INVALID_MODEL,
 * UNKNOWN_ARCH, UNSUPPORTED, IO, NO_MEMORY; m->arena then holds what was taken so far. */
kvp_status kvp__arch_fill(kvp__model *m, const kvp__gguf *g, kvp_error *err);

/* inv_freq[i] for i < dim / 2 of a table without frequency factors, and the magnitude that belongs
 * to it. Everything in double, with our own pow and ln. */
typedef struct kvp__rope_rule {
    double base;             /* > 1 */
    kvp__rope_scaling scaling;
    double factor;           /* of LINEAR and YARN: how much longer contexts are meant to be */
    double original_context; /* YARN: that the model was trained with */
    double beta_fast, beta_slow;
    double extrapolation;    /* 1: YaRN as in the paper, 0: interpolation alone */
    double attention_factor; /* the magnitude as such; 0: by the rule */
    double log_multiplier;   /* mscale_all_dim, with an mscale of 1; 0: absent */
} kvp__rope_rule;
void kvp__rope_table(const kvp__rope_rule *rule, uint32_t dim, double *inv_freq, float *magnitude);

#endif
