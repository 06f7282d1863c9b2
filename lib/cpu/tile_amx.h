/*
 * Matrix tiles of AMX: up to 16 rows of 64 bytes in a register of the processor's own.
 *
 * A thread says how many rows its tiles have (kt_begin), and puts the registers back into their first
 * state when it is done (kt_end), so that they cost nothing when threads change.
 *
 *     rows 0, 1       [rows][4 n] bytes of activations
 *     weights 0, 1    [n][16][4] bytes: n groups of a block, as units of a panel have them
 *     sums 0 .. 3     [rows][16] int32: of rows 0 with weights 0 and 1, then of rows 1
 *
 * kt_dot(s) sets sums s to the exact products of its signed bytes. One-line asm, since the compiler's
 * own functions do not tell it that tiles read memory. With KVP__NO_ASM (the test build for machines
 * without tiles): plain C.
 */
#ifndef KVP_CPU_TILE_AMX_H
#define KVP_CPU_TILE_AMX_H

#include "base/base.h"

#include <string.h>

#define KT_INLINE static inline __attribute__((always_inline, unused))

#ifdef KVP__NO_ASM

typedef struct kt_state {
    uint32_t rows, groups;
    int8_t row[2][16][64], weight[2][16][64];
    int32_t sums[4][16][16];
} kt_state;
static _Thread_local kt_state kt;

KT_INLINE void kt_begin(uint32_t rows, uint32_t groups)
{
    memset(&kt, 0, sizeof kt);
    kt.rows = rows;
    kt.groups = groups;
}

KT_INLINE void kt_end(void) { kt.rows = 0; }

KT_INLINE void kt_load_rows(uint32_t i, const int8_t *p, size_t row)
{
    for (uint32_t r = 0; r < kt.rows; r++) memcpy(kt.row[i][r], p + r * row, 4 * kt.groups);
}

KT_INLINE void kt_load_weights(uint32_t i, const int8_t *p)
{
    for (uint32_t g = 0; g < kt.groups; g++) memcpy(kt.weight[i][g], p + 64 * g, 64);
}

KT_INLINE void kt_dot(uint32_t s)
{
    for (uint32_t r = 0; r < kt.rows; r++)
        for (uint32_t o = 0; o < 16; o++) {
            int32_t t = 0;
            for (uint32_t b = 0; b < 4 * kt.groups; b++)
                t += kt.row[s / 2][r][b] * kt.weight[s % 2][b / 4][4 * o + b % 4];
            kt.sums[s][r][o] = t;
        }
}

KT_INLINE void kt_store(uint32_t s, int32_t *p)
{
    for (uint32_t r = 0; r < kt.rows; r++) memcpy(p + 16 * r, kt.sums[s][r], 64);
}

#else

KT_INLINE void kt_begin(uint32_t rows, uint32_t groups)
{
    struct {
        uint8_t palette, start_row, zero[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } c;
    memset(&c, 0, sizeof c);
    c.palette = 1;
    for (int i = 0; i < 4; i++) { /* sums are 0 to 3, rows 4 and 5, weights 6 and 7 */
        c.rows[i] = (uint8_t)rows;
        c.row_bytes[i] = 64;
    }
    for (int i = 0; i < 2; i++) {
        c.rows[4 + i] = (uint8_t)rows;
        c.row_bytes[4 + i] = (uint16_t)(4 * groups);
        c.rows[6 + i] = (uint8_t)groups;
        c.row_bytes[6 + i] = 64;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(c));
}

KT_INLINE void kt_end(void) { __asm__ volatile("tilerelease" : : : "memory"); }

#define KT_LOAD(tile, p, row)                                                                      \
    __asm__ volatile("tileloadd (%0,%1,1), %%" tile : : "r"(p), "r"((size_t)(row)) : "memory")
#define KT_DOT(sums, rows, weights)                                                                \
    __asm__ volatile("tilezero %" sums "\n\ttdpbssd %" weights ", %" rows ", %" sums)
#define KT_STORE(tile, p)                                                                          \
    __asm__ volatile("tilestored %%" tile ", (%0,%1,1)" : : "r"(p), "r"((size_t)64) : "memory")

KT_INLINE void kt_load_rows(uint32_t i, const int8_t *p, size_t row)
{
    if (i == 0) KT_LOAD("tmm4", p, row);
    else KT_LOAD("tmm5", p, row);
}

KT_INLINE void kt_load_weights(uint32_t i, const int8_t *p)
{
    if (i == 0) KT_LOAD("tmm6", p, 64);
    else KT_LOAD("tmm7", p, 64);
}

KT_INLINE void kt_dot(uint32_t s)
{
    if (s == 0) KT_DOT("tmm0", "tmm4", "tmm6");
    else if (s == 1) KT_DOT("tmm1", "tmm4", "tmm7");
    else if (s == 2) KT_DOT("tmm2", "tmm5", "tmm6");
    else KT_DOT("tmm3", "tmm5", "tmm7");
}

KT_INLINE void kt_store(uint32_t s, int32_t *p)
{
    if (s == 0) KT_STORE("tmm0", p);
    else if (s == 1) KT_STORE("tmm1", p);
    else if (s == 2) KT_STORE("tmm2", p);
    else KT_STORE("tmm3", p);
}

#endif

#endif
