/*
 * One fixed run of each of a few tiny models, and the hash of all its logits: the same at every
 * instruction-set level and on every machine, today and after the next change of a kernel. A hash
 * that differs means that the arithmetic has changed; if that was meant, the new one is written
 * down in fixed_run.c, and in the changelog, because users' seeded outputs change with it.
 *
 * Only kvpage.h and the writer of files are used, so that a program without CMocka can run it.
 */
#ifndef TESTS_SUPPORT_FIXED_RUN_H
#define TESTS_SUPPORT_FIXED_RUN_H

#include "support/gguf_writer.h"

#include <kvpage.h>

typedef struct fixed_model {
    const char *name;
    gw_model description;
    uint64_t hash;
} fixed_model;

#define FIXED_MODELS 6
extern const fixed_model fixed_models[FIXED_MODELS];

/* An opened model capped at a level (0: none), and the bytes it borrows: free them after the model.
 * NULL: the reason is in *err. */
kvp_model *fixed_open(int which, uint32_t level, uint8_t **file, kvp_error *err);

/* The level the model runs at. */
uint32_t fixed_level(const kvp_model *m);

/* The hash of the run; 0 if a call fails. */
uint64_t fixed_run(kvp_model *m);

#endif
