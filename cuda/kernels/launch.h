/*
 * How kernels are launched: threads of a block and bytes of shared memory, as functions of what they
 * are launched for. Read by the host, by the kernels and by tests, so that none of them guesses.
 */
#ifndef KVP_CUDA_KERNELS_LAUNCH_H
#define KVP_CUDA_KERNELS_LAUNCH_H

#include "cuda/kernels/args.h"

/* --- attention.cu, attention_any.cu, merge.cu --- */

/* --- rows.cu, append.cu, blocks.cu, matvec.cu, sample.cu --- */

#endif
