/*
 * Repacking weights from the file's rows into panels (panel.h), and rows back out of them. Plain C,
 * the same at every level: it runs at load, and for the rows of an embedding.
 */
#ifndef KVP_CPU_PACK_H
#define KVP_CPU_PACK_H

#include "cpu/kernels.h"

/* Bytes of one panel, a multiple of 32. `n_in` is a multiple of the type's block. */
uint64_t kvp__panel_bytes(uint32_t type, uint32_t n_in);

/* Fills `out` but for its panels; returns their bytes, all panels together. 0: a type we do not
 * take, n_in not a positive multiple of its block, no rows, or more bytes than 63 bits count. */
uint64_t kvp__mat_describe(kvp__mat *out, uint32_t type, uint32_t n_out, uint32_t n_in);

/* One panel from `n_rows` (1 to 16) rows as they lie in the file, one after the other; the other
 * rows of the panel become zero. `panel` is aligned to 32 bytes. */
void kvp__pack_panel(uint32_t type, uint32_t n_in, const void *rows, uint32_t n_rows,
                     uint8_t *panel);

/* Row `row` of a packed matrix as n_in floats: exactly what the file's format defines. */
void kvp__pack_row(const kvp__mat *w, uint32_t row, float *out);

#endif
