/*
 * From logits to the next token: a pure function of (settings, logits, seed, position, recent
 * tokens), the same on every machine.
 *
 * Order: bias, repetition penalty, presence and frequency penalties, temperature, top-k, top-p
 * (over what top-k left, made to sum to 1), min-p, draw. Ties go to the lowest id everywhere. The
 * draw uses one number of a counter-based generator, so that a step that is run again (after a
 * preemption, say) draws the same token.
 *
 * No allocation, no C library mathematics, no state.
 */
#ifndef KVP_MODEL_SAMPLER_H
#define KVP_MODEL_SAMPLER_H

#include "base/base.h"

#define KVP__SAMPLE_MAX_TOP 20u
#define KVP__SAMPLE_MAX_BIAS 1024u
#define KVP__SAMPLE_MAX_WINDOW 8192u

/* Checked settings, with the defaults filled in. */
typedef struct kvp__sampler {
    uint32_t mode;            /* KVP_SAMPLE_... */
    float temperature;        /* 0: greedy; what is below 1e-6 counts as 0 */
    float top_p;              /* in (0, 1]; 1: off */
    float min_p;              /* in [0, 1]; 0: off */
    uint32_t top_k;           /* 0: off */
    float repetition;         /* > 0; 1: off */
    float presence, frequency;
    uint32_t penalty_window;
    uint32_t top_logprobs;
    uint32_t logprobs;        /* 1: wanted */
    uint32_t n_bias;
    const kvp_logit_bias *bias; /* the caller's: not copied by kvp__sampler_fill */
    uint64_t seed;            /* 0: the caller draws one */
} kvp__sampler;

/* Checks the host's settings (already through kvp__struct_in; NULL: greedy). `vocabulary` bounds
 * the ids of biases; 0: only negative ids are refused. out->bias points to in->bias: the caller
 * copies the array if it is to outlive the call. INVALID_ARG, and the text names the field. */
kvp_status kvp__sampler_fill(kvp__sampler *out, const kvp_sampling *in, uint32_t vocabulary,
                             kvp_error *err);

/* Whether the logits alone decide: no penalty, no bias, no log-probability is asked for. */
bool kvp__sampler_is_plain(const kvp__sampler *s);

typedef struct kvp__sampled {
    int32_t token;
    float logprob;            /* of it, if logprobs or top_logprobs ask for any; else 0 */
    uint32_t n_top;           /* min(top_logprobs, n) */
    int32_t top_tokens[KVP__SAMPLE_MAX_TOP]; /* most likely first */
    float top_logprobs[KVP__SAMPLE_MAX_TOP];
} kvp__sampled;

/* Bytes of scratch for n logits: below 192 KiB for a vocabulary of 262,144. */
size_t kvp__sample_scratch_bytes(uint32_t n);

/* Chooses a token from n > 0 logits. They are written to during the call and are the same again
 * after it, also after an error. `recent` are the last tokens of the sequence, at most
 * penalty_window of them count (the last ones); ids outside [0, n) are passed over. `scratch` is
 * aligned to 8. Log-probabilities are those of the raw logits.
 * INTERNAL: a logit is NaN or +inf, or all are -inf (the model is broken; the text says which).
 * INVALID_ARG: biases forbid every token that has a probability. `out` is then untouched. */
kvp_status kvp__sample(const kvp__sampler *s, float *logits, uint32_t n, uint64_t seed,
                       uint64_t position, const int32_t *recent, uint32_t n_recent, void *scratch,
                       kvp__sampled *out, kvp_error *err);

/* What kvp__sample says of logits in which `bad` is the first token that is broken, for a device that
 * chose by itself; n: all of them are -infinity. INTERNAL. */
kvp_status kvp__sample_broken(uint32_t bad, uint32_t n, kvp_error *err);

/* 128 random bits for a key and a counter of 128 bits. The draws use (seed; position, 0). */
void kvp__random(uint64_t key, uint64_t low, uint64_t high, uint32_t out[4]);

/* The seed of the counter-th fork of a sequence whose seed is `parent`; never 0. */
uint64_t kvp__seed_fork(uint64_t parent, uint64_t counter);

#endif
