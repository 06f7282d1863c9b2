/*
 * What the ways of computing matrix products share, in the vocabulary of vec.h: reading packed weights
 * (panel.h), that is the groups of a block's quants and what its integer sums are multiplied by, and
 * storing a tile of results. For the files of level/.
 */
#ifndef KVP_CPU_PRODUCT_H
#define KVP_CPU_PRODUCT_H

#include "cpu/panel.h"
#include "cpu/vec.h"

#if KVP__LEVEL == KVP_CPU_GENERIC /* kept small */
#define UNROLL
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define ONCE _Pragma("GCC unroll 1")

enum { AHEAD = 4096 }; /* how far weights are prefetched where few rows use them */

/* Group c of a block's quants. */
KVP__INLINE vb quants(uint32_t type, const uint8_t *planes, uint32_t c)
{
    kvp__panel p = kvp__panel_of(type);
    const uint8_t *high = planes + kvp__panel_low_bytes(p);
    vb v;
    if (p.low_bits == 8) return vb_load(planes + 64 * c);
    if (p.low_bits == 4) {
        v = vb_load(planes + 64 * (c % 4));
        v = vb_and(c < 4 ? v : vb_shr(v, 4), vb_set1(15));
    } else {
        v = vb_load(planes + 64 * (c / 4));
        v = vb_and(c % 4 ? vb_shr(v, 2 * (c % 4)) : v, vb_set1(3));
    }
    if (p.high_bits) {
        uint32_t from = p.high_bits == 2 ? 2 * (c % 4) : c;
        vb h = vb_load(p.high_bits == 2 ? high + 64 * (c / 4) : high);
        if (from < p.low_bits) h = vb_shl(h, p.low_bits - from);
        if (from > p.low_bits) h = vb_shr(h, from - p.low_bits);
        v = vb_or(v, vb_and(h, vb_set1((uint8_t)(((1u << p.high_bits) - 1u) << p.low_bits))));
    }
    return v;
}

/* What a block's integer sums are made with; of use only where the type has them. */
typedef struct small {
    vi half[2];         /* integer scales of the halves, each twice as two int16 */
    vi offset_pair;     /* int16 pairs: what the half sums of the activations are multiplied by */
    vi minimum_pair;    /* the integer minima of the halves */
} small;

/* And what they are multiplied by. */
typedef struct scales {
    vf scale, minimum;  /* minimum as it is added; of types with halves, of their integer minima */
} scales;

/* The members of block s's six-bit pairs. */
KVP__INLINE vi pair_first(const uint8_t *pairs, uint32_t s)
{
    vi low = vi_and(vi_shr(vb_vi(vb_load(pairs)), (int)(4 * s)), vi_set1(15));
    vi high = vi_and(vi_shr(vb_vi(vb_load(pairs + 128)), (int)(2 * s)), vi_set1(3));
    return vi_or(low, vi_shl(high, 4));
}

KVP__INLINE vi pair_second(const uint8_t *pairs, uint32_t s)
{
    vi low = vi_and(vi_shr(vb_vi(vb_load(pairs + 64)), (int)(4 * s)), vi_set1(15));
    vi high = vi_and(vi_shr(vb_vi(vb_load(pairs + 128)), (int)(16 + 2 * s)), vi_set1(3));
    return vi_or(low, vi_shl(high, 4));
}

KVP__INLINE vi pack_pair(vi a, vi b)
{
    return vi_or(vi_and(a, vi_set1(0xffff)), vi_shl(b, 16));
}

KVP__INLINE vf halves_at(const uint8_t *p) { return vf_load_f16((const uint16_t *)(const void *)p); }

KVP__INLINE small read_small(uint32_t type, const uint8_t *super, const uint8_t *block, uint32_t s)
{
    kvp__panel p = kvp__panel_of(type);
    const uint8_t *pairs = super + p.super_head - KVP__PAIRS_BYTES;
    small r;
    r.half[0] = r.half[1] = r.offset_pair = r.minimum_pair = vi_zero();
    if (!p.halves) {
        int32_t off = type == KVP__Q8_0 ? VD_S8_EXCESS : p.offset;
        r.offset_pair = vi_set1((int32_t)((uint32_t)(-off & 0xffff) * 0x10001u));
        return r;
    }
    vi a, b;
    if (type == KVP__Q2_K) {
        vi ta = vi_load_u8(block), tb = vi_load_u8(block + KVP__LANES);
        a = vi_and(ta, vi_set1(15));
        b = vi_and(tb, vi_set1(15));
        r.minimum_pair = pack_pair(vi_shr(ta, 4), vi_shr(tb, 4));
    } else if (type == KVP__Q3_K) {
        a = vi_sub(pair_first(pairs, s), vi_set1(32));
        b = vi_sub(pair_second(pairs, s), vi_set1(32));
    } else {
        a = vi_load_s8((const int8_t *)block);
        b = vi_load_s8((const int8_t *)block + KVP__LANES);
    }
    r.half[0] = pack_pair(a, a);
    r.half[1] = pack_pair(b, b);
    if (p.offset) {
        vi off = vi_set1(-p.offset);
        r.offset_pair = pack_pair(vi_mul(a, off), vi_mul(b, off));
    }
    return r;
}

KVP__INLINE scales read_scales(uint32_t type, const uint8_t *super, uint32_t s)
{
    kvp__panel p = kvp__panel_of(type);
    const uint8_t *pairs = super + p.super_head - KVP__PAIRS_BYTES;
    scales r;
    r.scale = halves_at(super);
    r.minimum = p.minimum ? halves_at(super + 32) : vf_zero();
    if (type == KVP__Q4_K || type == KVP__Q5_K) {
        r.scale = vf_mul(r.scale, vi_to_vf(pair_first(pairs, s)));
        r.minimum = vf_neg(vf_mul(r.minimum, vi_to_vf(pair_second(pairs, s))));
    }
    if (type == KVP__Q2_K) r.minimum = vf_neg(r.minimum);
    return r;
}

/* A block's two sums of activations as a pair, in every lane. */
KVP__INLINE vi sums_of(const int16_t *p)
{
    int32_t t;
    memcpy(&t, p, sizeof t);
    return vi_set1(t);
}

/* One call: y = W x, or y += W x. */
typedef struct product {
    const kvp__mat *w;
    const kvp__act *x;
    float *y;
    size_t y_row;
    bool add;
} product;

/* Results [row][16 outputs] of one panel to where they belong. */
KVP__INLINE void store_tile(const product *j, uint32_t row, uint32_t rows, uint32_t panel, const float *tile)
{
    const uint32_t first = panel * KVP__LANES, left = j->w->n_out - first;
    float *y = j->y + row * j->y_row + first;
    for (uint32_t t = 0; t < rows; t++, y += j->y_row, tile += KVP__LANES) {
        vf v = vf_load(tile);
        if (left >= KVP__LANES)
            vf_store(y, j->add ? vf_add(vf_load(y), v) : v);
        else
            vf_store_n(y, j->add ? vf_add(vf_load_n(y, left), v) : v, left);
    }
}

#endif
