/*
 * What the loop tests share: a tiny random model in memory, a pool and a batch, sequences over it,
 * and a host's loop that gives up loudly rather than hang.
 */
#ifndef TESTS_LOOP_RIG_H
#define TESTS_LOOP_RIG_H

#include <kvpage.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { RIG_PATIENCE_MS = 20000, RIG_VOCABULARY = 64 };

typedef struct rig {
    uint8_t *file;
    kvp_model *model;
    kvp_pool *pool;
    kvp_batch *batch;
} rig;

/* threads: 0 is one worker of the batch's own, else as in kvp_batch_options. */
void rig_open(rig *r, int32_t threads);
void rig_close(rig *r);

/* A sequence with `prompt` tokens, which depend on `tag`; the rest of the options as given (NULL:
 * defaults with 8 tokens). */
kvp_seq *rig_seq(rig *r, uint64_t tag, size_t prompt, const kvp_seq_options *options);
kvp_seq *rig_add(rig *r, uint64_t tag, size_t prompt, uint64_t max_tokens);

/* Takes all events that are there; returns how many, and counts endings and tokens by tag if the
 * arrays are not NULL. */
size_t rig_take(rig *r, unsigned *endings, unsigned *tokens);

/* Steps and sleeps until DONE, with every event taken. */
void rig_finish(rig *r, unsigned *endings, unsigned *tokens);

/* Steps without taking an event until the fd is quiet and the deadline far. */
void rig_settle(rig *r);

bool rig_readable(rig *r);
int rig_fd(rig *r);
uint64_t rig_now(void);

#endif
