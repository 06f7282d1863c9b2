/*
 * The forward pass of a loaded model as one would write it on paper: double precision, no cache, no
 * blocks, the C library's functions. An oracle for tiny models with F32 weights; it shares no code
 * with the library but the descriptor, which it is meant to test.
 */
#ifndef TESTS_SUPPORT_NAIVE_H
#define TESTS_SUPPORT_NAIVE_H

#include "model/model.h"

/* logits: [n][vocabulary], of every position. Only F32 tensors; else the program ends. */
void naive_logits(const kvp__model *m, const int32_t *tokens, uint32_t n, double *logits);

#endif
