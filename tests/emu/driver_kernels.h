/*
 * Arguments of the kernels in driver_kernels.cu.
 */
#ifndef TESTS_EMU_DRIVER_KERNELS_H
#define TESTS_EMU_DRIVER_KERNELS_H

#include <stdint.h>

typedef struct driver_affine_args {
    float *p;
    uint32_t n, words;
    float factor, term;
} driver_affine_args;

#endif
