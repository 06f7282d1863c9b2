/*
 * Panels from the file's rows, and rows from panels. See pack.h and panel.h.
 *
 * Each type's blocks are read into one shape, 32 unsigned quants and a head, and written from it by
 * one function, and the same the other way: what differs per type is where the file keeps its bits.
 *
 * Invariant: nothing is rounded, so kvp__pack_row gives what the format's definition gives.
 */
#include "cpu/pack.h"

#include "base/half.h"
#include "cpu/panel.h"

#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES KVP__LANES

INLINE uint16_t get16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

INLINE void put16(uint8_t *p, uint16_t v)
{
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
}

INLINE uint32_t get32(const uint8_t *p)
{
    return (uint32_t)get16(p) | (uint32_t)get16(p + 2) << 16;
}

INLINE void put32(uint8_t *p, uint32_t v)
{
    put16(p, (uint16_t)v);
    put16(p + 2, (uint16_t)(v >> 16));
}

/* --- the file's blocks --- */

/* Where a block (of a K type: of 256 inputs) keeps its parts; NONE: it has no such part. */
enum { NONE = 0xff };
typedef struct place {
    uint8_t scale, minimum, small, high, low; /* small: scales of the smaller blocks */
} place;

INLINE place place_of(uint32_t type)
{
    switch (type) {
    case KVP__Q4_0: return (place){0, NONE, NONE, NONE, 2};
    case KVP__Q4_1: return (place){0, 2, NONE, NONE, 4};
    case KVP__Q5_0: return (place){0, NONE, NONE, 2, 6};
    case KVP__Q5_1: return (place){0, 2, NONE, 4, 8};
    case KVP__Q8_0: return (place){0, NONE, NONE, NONE, 2};
    case KVP__Q2_K: return (place){80, 82, 0, NONE, 16};
    case KVP__Q3_K: return (place){108, NONE, 96, 0, 32};
    case KVP__Q4_K: return (place){0, 2, 4, NONE, 16};
    case KVP__Q5_K: return (place){0, 2, 4, 16, 48};
    default: return (place){208, NONE, 192, 128, 0}; /* Q6_K */
    }
}

/* The 32 quants of block s of `raw`. */
INLINE void read_quants(uint32_t type, const uint8_t *raw, uint32_t s, uint8_t *q)
{
    place at = place_of(type);
    const uint8_t *low = raw + at.low, *high = raw + at.high;
    uint32_t third = s / 4, quarter = s % 4; /* of the K types: which 128 inputs, which 32 of them */
    switch (type) {
    case KVP__Q8_0:
        memcpy(q, low, 32);
        break;
    case KVP__Q4_0: case KVP__Q4_1: case KVP__Q5_0: case KVP__Q5_1: {
        uint32_t bits = at.high == NONE ? 0 : get32(high);
        for (uint32_t i = 0; i < 32; i++)
            q[i] = (uint8_t)((i < 16 ? low[i] & 15 : low[i - 16] >> 4) | (bits >> i & 1) << 4);
        break;
    }
    case KVP__Q2_K:
        for (uint32_t i = 0; i < 32; i++) q[i] = low[32 * third + i] >> 2 * quarter & 3;
        break;
    case KVP__Q3_K:
        for (uint32_t i = 0; i < 32; i++)
            q[i] = (uint8_t)((low[32 * third + i] >> 2 * quarter & 3) | (high[i] >> s & 1) << 2);
        break;
    case KVP__Q4_K:
        for (uint32_t i = 0; i < 32; i++) q[i] = low[32 * (s / 2) + i] >> 4 * (s % 2) & 15;
        break;
    case KVP__Q5_K:
        for (uint32_t i = 0; i < 32; i++)
            q[i] = (uint8_t)((low[32 * (s / 2) + i] >> 4 * (s % 2) & 15) | (high[i] >> s & 1) << 4);
        break;
    default: /* Q6_K */
        for (uint32_t i = 0; i < 32; i++)
            q[i] = (uint8_t)((low[64 * third + 32 * (quarter % 2) + i] >> 4 * (quarter / 2) & 15) |
                             (high[32 * third + i] >> 2 * quarter & 3) << 4);
        break;
    }
}

/* The six-bit pair of block s: Q4_K and Q5_K scale and minimum, Q3_K the scales of its halves. */
INLINE void read_pair(uint32_t type, const uint8_t *small, uint32_t s, uint32_t pair[2])
{
    if (type == KVP__Q3_K) {
        for (uint32_t h = 0; h < 2; h++) {
            uint32_t i = 2 * s + h;
            uint32_t low = i < 8 ? small[i] & 15 : small[i - 8] >> 4;
            pair[h] = low | (uint32_t)(small[8 + i % 4] >> 2 * (i / 4) & 3) << 4;
        }
    } else if (s < 4) {
        pair[0] = small[s] & 63;
        pair[1] = small[s + 4] & 63;
    } else {
        pair[0] = (small[s + 4] & 15) | (uint32_t)(small[s - 4] >> 6) << 4;
        pair[1] = (uint32_t)(small[s + 4] >> 4) | (uint32_t)(small[s] >> 6) << 4;
    }
}

/* --- panels --- */

/* Output o's four bytes of the units that groups 0 to 7 of `bits` bits are in. */
INLINE void write_plane(uint32_t bits, uint32_t shift, const uint8_t *q, uint32_t o, uint8_t *plane)
{
    uint8_t mask = (uint8_t)((1u << bits) - 1u);
    uint8_t *at = plane + 4 * o;
    for (uint32_t i = 0; i < 4; i++) {
        const uint8_t *v = q + i;
        if (bits == 8)
            for (uint32_t c = 0; c < 8; c++) at[64 * c + i] = v[4 * c];
        if (bits == 4)
            for (uint32_t c = 0; c < 4; c++)
                at[64 * c + i] = (uint8_t)((v[4 * c] & mask) | (v[4 * c + 16] & mask) << 4);
        if (bits == 2)
            for (uint32_t u = 0; u < 2; u++) {
                uint32_t t = 0;
                for (uint32_t c = 0; c < 4; c++)
                    t |= (uint32_t)(v[16 * u + 4 * c] >> shift & mask) << 2 * c;
                at[64 * u + i] = (uint8_t)t;
            }
        if (bits == 1) {
            uint32_t t = 0;
            for (uint32_t c = 0; c < 8; c++) t |= (uint32_t)(v[4 * c] >> shift & mask) << c;
            at[i] = (uint8_t)t;
        }
    }
}

INLINE uint32_t read_plane(uint32_t bits, const uint8_t *plane, uint32_t o, uint32_t input)
{
    uint32_t c = input / 4;
    const uint8_t *at = plane + 4 * o + input % 4;
    switch (bits) {
    case 8: return at[64 * c];
    case 4: return at[64 * (c % 4)] >> 4 * (c / 4) & 15;
    case 2: return at[64 * (c / 4)] >> 2 * (c % 4) & 3;
    case 1: return at[0] >> c & 1;
    default: return 0;
    }
}

/* Output o's share of one super-block (of the plain types: of one block). */
INLINE void pack_super(uint32_t type, const uint8_t *raw, uint32_t o, uint8_t *panel)
{
    kvp__panel p = kvp__panel_of(type);
    place at = place_of(type);
    put16(panel + 2 * o, get16(raw + at.scale));
    if (p.minimum) put16(panel + 32 + 2 * o, get16(raw + at.minimum));
    if (type == KVP__Q3_K || type == KVP__Q4_K || type == KVP__Q5_K) {
        uint32_t first = 0, second = 0, upper = 0;
        for (uint32_t s = 0; s < 8; s++) {
            uint32_t pair[2];
            read_pair(type, raw + at.small, s, pair);
            first |= (pair[0] & 15) << 4 * s;
            second |= (pair[1] & 15) << 4 * s;
            upper |= pair[0] >> 4 << 2 * s | pair[1] >> 4 << (16 + 2 * s);
        }
        uint8_t *pairs = panel + p.super_head - KVP__PAIRS_BYTES;
        put32(pairs + 4 * o, first);
        put32(pairs + 64 + 4 * o, second);
        put32(pairs + 128 + 4 * o, upper);
    }
    uint8_t *block = panel + p.super_head;
    for (uint32_t s = 0; s < p.super; s++, block += kvp__panel_block_bytes(p)) {
        if (type == KVP__Q2_K || type == KVP__Q6_K) {
            block[o] = raw[at.small + 2 * s];
            block[LANES + o] = raw[at.small + 2 * s + 1];
        }
        uint8_t q[32];
        read_quants(type, raw, s, q);
        uint8_t *planes = block + p.block_head;
        write_plane(p.low_bits, 0, q, o, planes);
        if (p.high_bits)
            write_plane(p.high_bits, p.low_bits, q, o, planes + kvp__panel_low_bytes(p));
    }
}

static void pack_quantised(uint32_t type, uint32_t n_in, const uint8_t *rows, uint32_t n_rows,
                           uint8_t *panel)
{
    kvp__type_info info = kvp__type_get(type);
    uint32_t supers = n_in / info.block;
    size_t row_bytes = (size_t)supers * info.bytes;
    uint32_t panel_step = kvp__panel_super_bytes(kvp__panel_of(type));
    for (uint32_t o = 0; o < n_rows; o++)
        for (uint32_t s = 0; s < supers; s++) {
            const uint8_t *raw = rows + o * row_bytes + (size_t)s * info.bytes;
            uint8_t *to = panel + (size_t)s * panel_step;
#define CASE(t)                                                                                    \
    case t: pack_super(t, raw, o, to); break;
            switch (type) {
                CASE(KVP__Q4_0)
                CASE(KVP__Q4_1)
                CASE(KVP__Q5_0)
                CASE(KVP__Q5_1)
                CASE(KVP__Q8_0)
                CASE(KVP__Q2_K)
                CASE(KVP__Q3_K)
                CASE(KVP__Q4_K)
                CASE(KVP__Q5_K)
                CASE(KVP__Q6_K)
            }
#undef CASE
        }
}

uint64_t kvp__panel_bytes(uint32_t type, uint32_t n_in)
{
    kvp__type_info info = kvp__type_get(type);
    return (uint64_t)LANES * info.bytes * (n_in / info.block);
}

uint64_t kvp__mat_describe(kvp__mat *out, uint32_t type, uint32_t n_out, uint32_t n_in)
{
    kvp__type_info info = kvp__type_get(type);
    if (!info.name || n_in == 0 || n_in % info.block || n_out == 0) return 0;
    kvp__mat w = {.type = type, .n_out = n_out, .n_in = n_in};
    w.panel_bytes = kvp__panel_bytes(type, n_in);
    uint64_t bytes;
    if (!kvp__mul(w.panel_bytes, kvp__mat_panels(&w), &bytes) || bytes >> 63) return 0;
    *out = w;
    return bytes;
}

void kvp__pack_panel(uint32_t type, uint32_t n_in, const void *rows, uint32_t n_rows,
                     uint8_t *panel)
{
    if (n_rows < LANES) memset(panel, 0, (size_t)kvp__panel_bytes(type, n_in));
    if (kvp__panel_of(type).super) {
        pack_quantised(type, n_in, rows, n_rows, panel);
        return;
    }
    size_t size = kvp__type_get(type).bytes;
    const uint8_t *from = rows;
    for (uint32_t o = 0; o < n_rows; o++)
        for (uint32_t i = 0; i < n_in; i++, from += size)
            memcpy(panel + ((size_t)i * LANES + o) * size, from, size);
}

/* --- rows out of panels --- */

static float half_at(const uint8_t *p, uint32_t o) { return kvp__f16_to_f32(get16(p + 2 * o)); }

/* Scale and minimum of each half of block s: what a quant, less its offset, is multiplied by, and
 * what is then added. */
static void row_scales(uint32_t type, const uint8_t *super, const uint8_t *block, uint32_t s,
                       uint32_t o, float scale[2], float minimum[2])
{
    kvp__panel p = kvp__panel_of(type);
    const uint8_t *pairs = super + p.super_head - KVP__PAIRS_BYTES;
    float d = half_at(super, o), m = p.minimum ? half_at(super + 32, o) : 0.0f;
    uint32_t first = 0, second = 0;
    if (type == KVP__Q3_K || type == KVP__Q4_K || type == KVP__Q5_K) {
        uint32_t upper = get32(pairs + 128 + 4 * o);
        first = (get32(pairs + 4 * o) >> 4 * s & 15) | (upper >> 2 * s & 3) << 4;
        second = (get32(pairs + 64 + 4 * o) >> 4 * s & 15) | (upper >> (16 + 2 * s) & 3) << 4;
    }
    for (uint32_t h = 0; h < 2; h++) {
        uint8_t small = block[LANES * h + o];
        switch (type) {
        case KVP__Q2_K:
            scale[h] = d * (float)(small & 15);
            minimum[h] = -(m * (float)(small >> 4));
            break;
        case KVP__Q3_K:
            scale[h] = d * (float)((int32_t)(h ? second : first) - 32);
            minimum[h] = 0.0f;
            break;
        case KVP__Q4_K: case KVP__Q5_K:
            scale[h] = d * (float)first;
            minimum[h] = -(m * (float)second);
            break;
        case KVP__Q6_K:
            scale[h] = d * (float)(int8_t)small;
            minimum[h] = 0.0f;
            break;
        default:
            scale[h] = d;
            minimum[h] = m;
        }
    }
}

static void row_quantised(uint32_t type, const uint8_t *panel, uint32_t o, uint32_t n_in,
                          float *out)
{
    kvp__panel p = kvp__panel_of(type);
    for (uint32_t b = 0; b < n_in / 32; b++) {
        uint32_t s = b % p.super;
        const uint8_t *super = panel + (size_t)(b / p.super) * kvp__panel_super_bytes(p);
        const uint8_t *block = super + p.super_head + (size_t)s * kvp__panel_block_bytes(p);
        const uint8_t *planes = block + p.block_head;
        float scale[2], minimum[2];
        row_scales(type, super, block, s, o, scale, minimum);
        for (uint32_t i = 0; i < 32; i++, out++) {
            uint32_t q = read_plane(p.low_bits, planes, o, i);
            if (p.high_bits)
                q |= read_plane(p.high_bits, planes + kvp__panel_low_bytes(p), o, i) << p.low_bits;
            int32_t v = type == KVP__Q8_0 ? (int32_t)(int8_t)(uint8_t)q : (int32_t)q - p.offset;
            float product = (float)v * scale[i / 16];
            *out = p.minimum ? product + minimum[i / 16] : product;
        }
    }
}

void kvp__pack_row(const kvp__mat *w, uint32_t row, float *out)
{
    const uint8_t *panel = w->panels + row / LANES * w->panel_bytes;
    uint32_t o = row % LANES;
    for (uint32_t i = 0; i < w->n_in; i++) {
        size_t at = (size_t)i * LANES + o;
        switch (w->type) {
        case KVP__F32: memcpy(out + i, panel + 4 * at, 4); break;
        case KVP__F16: out[i] = kvp__f16_to_f32(get16(panel + 2 * at)); break;
        case KVP__BF16: out[i] = kvp__bf16_to_f32(get16(panel + 2 * at)); break;
        default: row_quantised(w->type, panel, o, w->n_in, out); return;
        }
    }
}

/* --- activations --- */

static uint32_t group_of(uint32_t rows)
{
    uint32_t group = 1;
    while (group < rows && group < KVP__LANES) group *= 2;
    return group;
}

/* Groups must not lie a power of two apart. */
static uint64_t group_bytes(uint32_t group, uint32_t n_in)
{
    return kvp__round_up((uint64_t)(n_in / 32) * KVP__ACT_BYTES * group, KVP__CACHE_LINE) +
           KVP__CACHE_LINE;
}

uint64_t kvp__act_bytes(uint32_t rows, uint32_t n_in)
{
    uint32_t group = group_of(rows);
    uint64_t groups = rows / group + (rows % group != 0), bytes;
    return kvp__mul(groups, group_bytes(group, n_in), &bytes) && !(bytes >> 63) ? bytes : 0;
}

void kvp__act_place(kvp__act *a, void *memory, uint32_t rows, uint32_t n_in)
{
    memset(a, 0, sizeof *a);
    a->n_in = n_in;
    a->rows = rows;
    a->group = group_of(rows);
    a->group_bytes = (size_t)group_bytes(a->group, n_in);
    a->blocks = memory;
}
