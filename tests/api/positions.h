/*
 * The logits after every token of some texts, through the public interface, with the host choosing
 * the tokens. Each text is cut into segments that run as sequences of their own at the same time: a
 * segment's beginning is a prompt (which the prefix cache mostly has), the rest is appended token by
 * token. So a step has many rows, and all of it is the library's ordinary work.
 */
#ifndef TESTS_API_POSITIONS_H
#define TESTS_API_POSITIONS_H

#include <kvpage.h>

#include <stddef.h>
#include <stdint.h>

typedef struct positions_text {
    const int32_t *ids;
    uint32_t n;
} positions_text;

typedef struct positions {
    kvp_model *model;
    const positions_text *texts;
    uint32_t n_texts;
    uint32_t segment;   /* tokens; 0: a text is one segment */
    uint32_t kv_format; /* KVP_KV_... */
    int32_t threads;    /* as in kvp_batch_options */
    /* Called once for each position of each text, in no order. */
    void (*row)(void *user, uint32_t text, uint32_t position, const float *logits, size_t count);
    void *user;
} positions;

/* Fails the running test if anything goes wrong. */
void positions_run(const positions *p);

#endif
