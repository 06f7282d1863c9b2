/*
 * Rows of any tensor type as floats, exactly what the format's definition gives: plain C, for devices
 * that keep weights as floats. The CPU's own panels (cpu/pack.h) hold the same values.
 */
#ifndef KVP_MODEL_FLOATS_H
#define KVP_MODEL_FLOATS_H

#include "model/model.h"

/* Bytes of a row of n values in the file. 0: a type we do not take, or n is no positive multiple of
 * its block. */
uint64_t kvp__row_bytes(uint32_t type, uint64_t n);

/* The n values of a row as it lies in the file, whose bytes kvp__row_bytes counts. Any alignment. */
void kvp__row_floats(uint32_t type, const void *row, uint64_t n, float *out);

#endif
