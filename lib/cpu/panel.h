/*
 * How packed weights lie in memory. Shared by pack.c, which writes panels, and level/matmul.c,
 * which reads them.
 *
 * A panel holds 16 output rows, so that a vector has one lane per output. Along the input it is cut
 * in blocks of 32. F32, F16 and BF16: [input][16 outputs]. The quantised types:
 *
 *     Q4_0 .. Q8_0    [block head][low plane][high plane], for each block
 *     Q2_K .. Q6_K    [super head], then 8 of those, for each 256 inputs
 *
 * Planes hold what the file calls quants, unsigned (Q8_0: signed), split by bits. The unit is 64
 * bytes: byte 4 * o + i belongs to output o; a group of four inputs per output is what one integer
 * dot product takes. A block has 8 such groups c of inputs 4c .. 4c + 3:
 *
 *     8 bits   group c is unit c
 *     4 bits   group c is the low half of unit c, for c >= 4 the high half of unit c - 4
 *     2 bits   group c is bits 2 (c mod 4) and up of unit c / 4
 *     1 bit    group c is bit c of the only unit
 *
 * Heads, in vectors of 16 outputs:
 *
 *     block  Q4_0 Q5_0 Q8_0   scale (f16)
 *            Q4_1 Q5_1        scale, minimum (f16)
 *            Q2_K             one byte per half block: scale in the low, minimum in the high half
 *            Q6_K             scale (int8) per half block
 *     super  Q2_K             scale, minimum (f16)
 *            Q4_K Q5_K        scale, minimum (f16), then six-bit pairs: scale and minimum of block b
 *            Q3_K             scale (f16), then six-bit pairs: scale of each half of block b
 *            Q6_K             scale (f16)
 *
 * Six-bit pairs are three units of one int32 per output: four bits of the 8 first members (block b
 * at bit 4b), four bits of the 8 second members, and the upper two bits of both (at 2b and
 * 16 + 2b).
 *
 * Every type takes exactly as many bytes as in the file; only the rows that fill up the last panel
 * come on top.
 */
#ifndef KVP_CPU_PANEL_H
#define KVP_CPU_PANEL_H

#include "base/base.h"
#include "model/model.h"

/* Of how weights lie, here and in the walk of weights.c. Raised with every change: it says which packed
 * files (image.h) can be read. */
#define KVP__PANEL_LAYOUT 1u

#define KVP__PAIRS_BYTES 192u

typedef struct kvp__panel {
    uint32_t super;      /* blocks under one super head; 0: not quantised */
    uint32_t super_head; /* bytes */
    uint32_t block_head;
    uint32_t low_bits, high_bits;
    int32_t offset;      /* subtracted from the unsigned quants */
    bool minimum;        /* values have one added to them */
    bool halves;         /* a scale per 16 inputs */
} kvp__panel;

/* Inlined, so that it folds away where the type is known. */
static inline __attribute__((always_inline)) kvp__panel kvp__panel_of(uint32_t type)
{
    switch (type) {
    case KVP__Q4_0: return (kvp__panel){1, 0, 32, 4, 0, 8, false, false};
    case KVP__Q4_1: return (kvp__panel){1, 0, 64, 4, 0, 0, true, false};
    case KVP__Q5_0: return (kvp__panel){1, 0, 32, 4, 1, 16, false, false};
    case KVP__Q5_1: return (kvp__panel){1, 0, 64, 4, 1, 0, true, false};
    case KVP__Q8_0: return (kvp__panel){1, 0, 32, 8, 0, 0, false, false};
    case KVP__Q2_K: return (kvp__panel){8, 64, 32, 2, 0, 0, true, true};
    case KVP__Q3_K: return (kvp__panel){8, 32 + KVP__PAIRS_BYTES, 0, 2, 1, 4, false, true};
    case KVP__Q4_K: return (kvp__panel){8, 64 + KVP__PAIRS_BYTES, 0, 4, 0, 0, true, false};
    case KVP__Q5_K: return (kvp__panel){8, 64 + KVP__PAIRS_BYTES, 0, 4, 1, 0, true, false};
    case KVP__Q6_K: return (kvp__panel){8, 32, 32, 4, 2, 32, false, true};
    default: return (kvp__panel){0, 0, 0, 0, 0, 0, false, false};
    }
}

static inline __attribute__((always_inline)) uint32_t kvp__panel_low_bytes(kvp__panel p)
{
    return 64 * p.low_bits;
}

static inline __attribute__((always_inline)) uint32_t kvp__panel_block_bytes(kvp__panel p)
{
    return p.block_head + 64 * (p.low_bits + p.high_bits);
}

static inline __attribute__((always_inline)) uint32_t kvp__panel_super_bytes(kvp__panel p)
{
    return p.super_head + p.super * kvp__panel_block_bytes(p);
}

#endif
