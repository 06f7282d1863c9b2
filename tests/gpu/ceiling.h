/*
 * Arguments of ceiling.cu.
 */
#ifndef TESTS_GPU_CEILING_H
#define TESTS_GPU_CEILING_H

#include <stdint.h>

typedef struct ceiling_args {
    const void *from;
    uint32_t *out;    /* written if the bytes make `never`, so that they are read */
    uint64_t pieces;  /* of 16 bytes */
    uint32_t never, pad;
} ceiling_args;

#endif
