/*
 * What a weight in a GGUF file stands for, in double precision, written from the format's
 * definition one weight at a time. Shares nothing with lib/cpu but the numbers of the types.
 */
#ifndef GGUF_ORACLE_H
#define GGUF_ORACLE_H

#include <stdint.h>

typedef struct oracle_type {
    const char *name;
    uint32_t type, block, bytes;
} oracle_type;

enum { ORACLE_TYPES = 13 };
extern const oracle_type oracle_types[ORACLE_TYPES];

/* Weight `i` of a row. */
double oracle_weight(const oracle_type *t, const uint8_t *row, uint32_t i);

/* A row of random blocks: any quants, scales of common size. The same for the same seed. */
void oracle_random_row(const oracle_type *t, uint32_t n_in, uint64_t *seed, uint8_t *row);

/* Uniform in [-1, 1). */
double oracle_random(uint64_t *seed);

#endif
