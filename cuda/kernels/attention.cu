/*
 * Attention over blocks of KV on tensor cores: a tile of rows x a range of keys x a KV head per
 * block of threads, after a work list (see args.h). The same code serves decoding, chunks of
 * prompts, shared prefixes and all of them mixed.
 *
 * Algorithm: flash attention. Tiles of 64 keys (32 for heads above 128) go through a ring of stages
 * in shared memory; for each, S = Q K^T, the mask where a limit of some row lies inside, an online
 * softmax to base 2 in float, and O += P V with P in the type of the cache. Tiles of 16 and 32
 * rows, where loading is what counts, lay their warps along the keys too, each with its own maximum
 * and sum, and add up at the end; tiles of 64 and 128 rows lay them along the rows alone, 16 or 32
 * rows a warp.
 *
 * Keys are found through a list of 64-bit places in shared memory, one per key, which one thread
 * per key looks up a round before it is needed: one division into block and offset per key instead
 * of one per 16 bytes, and no wait for the table. A place behind the item's keys is nowhere: its
 * 16-byte pieces are zeros and nothing is read, neither of another sequence's block nor behind the
 * pool.
 *
 * Bytes and operations, a head size d, g query heads a KV head: an item reads 4 d bytes per key
 * once (K and V), whatever its rows are; 4 d operations per row and key on tensor cores, 1 ex2 and
 * about 8 others. Decoding 16-bit KV is thus bound by memory at g operations a byte; a tile of 128
 * rows at d 128 does 4 M operations on 32 KB.
 *
 * Shared memory (launch.h) is swizzled: the 16-byte pieces of a row are exchanged by the row's
 * number modulo 8, so that the 8 rows of a matrix that ldmatrix takes lie in different banks. Rows
 * of 96 elements are 12 pieces: there pairs of rows differ by half of the banks anyhow, and the
 * rest is done inside groups of 4 pieces.
 *
 * Registers of a thread, sm_90 / sm_80, no spills; tiles of 16, 32, 64 and 128 rows, F16 and BF16
 * alike. At 128 threads (64 in d256 of 16 rows) two blocks a multiprocessor fit with any of them.
 * d256 has no tile of 128 rows: a thread would need 256 accumulators.
 *     d64    94 / 94   101 / 96  128 / 123  238 / 254
 *     d96  155 / 165  127 / 128  128 / 158  255 / 255
 *     d128 168 / 168  167 / 168  168 / 163  255 / 255
 *     d256 255 / 254  255 / 255  238 / 235
 *
 * Tried: docs/kernels/cuda-attention.md. In short: what a thread needs at the end alone, and rows'
 * limits, wait in shared memory, and swizzled addresses are one register and a constant; else tiles
 * of 128 rows spill. The instruction for tanh is not exact enough for soft caps.
 */
#include "cuda/kernels/device.h"
#include "cuda/kernels/launch.h"

namespace {

using namespace kvp;

constexpr float LOG2E = 1.44269504088896340736f;
constexpr uint64_t NOWHERE = ~(uint64_t)0;
constexpr uint32_t NO_BLOCK = ~(uint32_t)0;

KVP_DEV float minus_infinity() { return -INFINITY; }
KVP_DEV uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }
KVP_DEV uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
KVP_DEV float larger(float a, float b) { return a > b ? a : b; }

/* What to subtract from scores whose maximum is m: nothing where there is none, since
 * (-inf) - (-inf) is no number. */
KVP_DEV float base_of(float m) { return m == minus_infinity() ? 0.0f : m; }

template <uint32_t D, uint32_t T> struct tile {
    static constexpr uint32_t ROWS = KVP__ATTEND_ROWS(T), KEYS = KVP__ATTEND_KEYS(D);
    static constexpr uint32_t ROW_WARPS = KVP__ATTEND_ROW_WARPS(T);
    static constexpr uint32_t KEY_WARPS = KVP__ATTEND_KEY_WARPS(D, T);
    static constexpr uint32_t WARPS = ROW_WARPS * KEY_WARPS, THREADS = WARPS * 32;
    static constexpr uint32_t STAGES = KVP__ATTEND_STAGES(T);
    static constexpr uint32_t STAGE_BYTES = KVP__ATTEND_STAGE_BYTES(D);
    static constexpr uint32_t Q_BYTES = KVP__ATTEND_Q_BYTES(D, T);
    static constexpr uint32_t MMAS = ROWS / (16 * ROW_WARPS); /* 16 rows each, of a warp */
    static constexpr uint32_t WARP_KEYS = KEYS / KEY_WARPS;
    static constexpr bool Q_STAYS = Q_BYTES == 0;             /* in registers */
    static constexpr uint32_t PIECES = D / 8;                 /* of 16 bytes, of a row */
    /* Results on their way out; 8 more, and the rows of a fragment lie in different banks. */
    static constexpr uint32_t O_PITCH = D + 8;
    static_assert(KEY_WARPS * ROWS * (O_PITCH + 2) * 4 <= Q_BYTES + STAGES * STAGE_BYTES,
                  "results take the place of the stages");
    static_assert(THREADS == KVP__ATTEND_THREADS(D, T) && THREADS >= KEYS &&
                      KEYS * PIECES % THREADS == 0,
                  "every thread copies as much");
};

/* What a block works on. Threads keep what they need in the loop over keys; the rest waits in
 * shared memory, as do the rows' limits, since registers are short in tiles of 128 rows. */
struct job {
    kvp__cuda_item item;
    uint32_t kv_head, group; /* group: query heads of a KV head */
    uint32_t rows;           /* of the tile, that there are */
    const uint8_t *k, *v;    /* block 0, token 0 of this head */
    const uint32_t *table;
};
static_assert(sizeof(job) <= KVP__ATTEND_JOB_BYTES, "a job fits");

/* A row of the tile: an entry of the row list, and a query head of the KV head's. */
struct row_place {
    uint32_t token, head;
};

KVP_DEV row_place place_of(const job &j, uint32_t r)
{
    row_place p;
    p.token = (j.item.first_row + r) / j.group;
    p.head = j.kv_head * j.group + (j.item.first_row + r) % j.group;
    return p;
}

KVP_DEV uint32_t step_row(const kvp__attention_args &a, const job &j, uint32_t token)
{
    return a.rows[j.item.first_token + token];
}

template <class S> KVP_DEV bool find_job(const kvp__attention_args &a, uint32_t t, job &j)
{
    const uint32_t *counts = a.step->n_items[a.group];
    uint32_t before = 0, n = blockIdx.x / a.kv_heads;
    for (uint32_t i = 0; i < t; i++) before += counts[i];
    if (n >= counts[t]) return false;
    j.item = a.items[before + n];
    j.kv_head = blockIdx.x % a.kv_heads;
    j.group = a.query_heads / a.kv_heads;
    j.rows = smaller(S::ROWS, j.item.n_tokens * j.group - j.item.first_row);
    const uint8_t *blocks = a.kv.slab + a.kv.base;
    j.k = blocks + a.kv.k_layer + (uint64_t)j.kv_head * a.kv.k_head;
    j.v = blocks + a.kv.v_layer + (uint64_t)j.kv_head * a.kv.v_head;
    j.table = a.tables + (uint64_t)j.item.seq * a.table_stride;
    return true;
}

/* --- copies into shared memory --- */

template <uint32_t D> KVP_DEV uint32_t swizzled(uint32_t row, uint32_t piece)
{
    uint32_t turn = D == 96 ? row >> 1 & 3 : row & 7;
    return row * (D * 2) + ((piece ^ turn) << 4);
}

/* The same for pieces 2 c and 2 c + 1: `at` is swizzled(row, 0 or 1), a lane's own, and c is known
 * when this is compiled. Pieces are exchanged among 8 (4 in rows of 96) alone, so the rest is a
 * constant. */
template <uint32_t D> KVP_DEV uint32_t pair_of_pieces(uint32_t at, uint32_t c)
{
    constexpr uint32_t PAIRS = D == 96 ? 2 : 4;
    return (at ^ c % PAIRS * 32) + c / PAIRS * (PAIRS * 32);
}

KVP_DEV uint32_t look_up(const kvp__attention_args &a, const job &j, uint32_t key)
{
    return key >= j.item.kv_begin && key < j.item.kv_end ? j.table[key >> a.block_shift] : NO_BLOCK;
}

/* Bytes from block 0 to a key's row, the same for K and V. */
KVP_DEV uint64_t key_place(const kvp__attention_args &a, uint32_t key, uint32_t block)
{
    if (block == NO_BLOCK) return NOWHERE;
    uint32_t offset = key & ((1u << a.block_shift) - 1);
    return block * a.kv.pitch + (uint64_t)(offset * a.key_dim) * 2;
}

template <uint32_t D, class S>
KVP_DEV void copy_tile(const kvp__attention_args &a, const job &j, uint8_t *stage,
                       const uint64_t *places)
{
    KVP_UNROLL
    for (uint32_t i = 0; i < S::KEYS * S::PIECES / S::THREADS; i++) {
        uint32_t n = i * S::THREADS + threadIdx.x, key = n / S::PIECES, piece = n % S::PIECES;
        uint64_t at = places[key];
        bool on = at != NOWHERE && piece < a.key_dim / 8; /* zeros behind a head's end */
        uint64_t from = on ? at + piece * 16 : 0;
        uint8_t *to = stage + swizzled<D>(key, piece);
        cp_async16(to, j.k + from, on);
        cp_async16(to + S::STAGE_BYTES / 2, j.v + from, on);
    }
}

template <uint32_t D, class S>
KVP_DEV void copy_queries(const kvp__attention_args &a, const job &j, uint8_t *to)
{
    const uint16_t *q = (const uint16_t *)a.q;
    for (uint32_t n = threadIdx.x; n < S::ROWS * S::PIECES; n += S::THREADS) {
        uint32_t r = n / S::PIECES, piece = n % S::PIECES;
        bool on = r < j.rows && piece < a.key_dim / 8;
        const uint16_t *from = q;
        if (on) {
            row_place p = place_of(j, r);
            uint64_t head = (uint64_t)step_row(a, j, p.token) * a.query_heads + p.head;
            from = q + head * a.key_dim + piece * 8;
        }
        cp_async16(to + swizzled<D>(r, piece), from, on);
    }
}

/* --- a warp's rows --- */

/* Thread t of the 32 has, of each product of 16 rows, rows t / 4 and t / 4 + 8: `half` 0 and 1. */
template <uint32_t D, class S> struct warp_rows {
    uint32_t first, first_key;            /* in the tile of rows; in a tile of keys */
    float o[S::MMAS][D / 8][4];
    float max[S::MMAS][2], sum[S::MMAS][2];
    uint32_t q[S::Q_STAYS ? D / 16 : 1][4];
};

/* What a row sees of the item's keys: those up to its position, in its window. Rows that are not
 * there see nothing. */
KVP_DEV uint2 limits_of(const kvp__attention_args &a, const job &j, uint32_t r)
{
    if (r >= j.rows) return make_uint2(~0u, 0);
    uint32_t position = a.positions[step_row(a, j, place_of(j, r).token)];
    uint32_t lo = a.window && position >= a.window ? position + 1 - a.window : 0;
    return make_uint2(larger(lo, j.item.kv_begin), smaller(position + 1, j.item.kv_end));
}

/* Of a warp's rows: the least and greatest first key, the least and greatest end. */
struct bounds {
    uint32_t min_lo, max_lo, min_hi, max_hi;
};

template <class S>
KVP_DEV bounds join_limits(const job &j, const uint2 *limits, uint32_t first_row)
{
    uint32_t r = first_row + threadIdx.x % 32;
    bounds b = {~0u, 0, ~0u, 0};
    if (threadIdx.x % 32 < 16 * S::MMAS && r < j.rows) {
        b.min_lo = b.max_lo = limits[r].x;
        b.min_hi = b.max_hi = limits[r].y;
    }
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        b.min_lo = smaller(b.min_lo, shfl_xor(b.min_lo, lanes));
        b.max_lo = larger(b.max_lo, shfl_xor(b.max_lo, lanes));
        b.min_hi = smaller(b.min_hi, shfl_xor(b.min_hi, lanes));
        b.max_hi = larger(b.max_hi, shfl_xor(b.max_hi, lanes));
    }
    return b;
}

template <uint32_t D, class S> KVP_DEV void begin_rows(warp_rows<D, S> &w)
{
    KVP_UNROLL
    for (uint32_t m = 0; m < S::MMAS; m++) {
        KVP_UNROLL
        for (uint32_t half = 0; half < 2; half++) {
            w.max[m][half] = minus_infinity();
            w.sum[m][half] = 0;
        }
        KVP_UNROLL
        for (uint32_t n = 0; n < D / 8; n++)
            KVP_UNROLL
            for (uint32_t i = 0; i < 4; i++) w.o[m][n][i] = 0;
    }
}

template <bool BF16>
KVP_DEV void mma(float (&c)[4], const uint32_t (&x)[4], uint32_t b0, uint32_t b1)
{
    if (BF16)
        mma_bf16(c, x, b0, b1);
    else
        mma_f16(c, x, b0, b1);
}

template <bool BF16> KVP_DEV uint32_t pack(float lo, float hi)
{
    return BF16 ? pack_bf16(lo, hi) : pack_f16(lo, hi);
}

/* 16 rows x 16 elements of Q: the four 8 x 8 matrices of an A fragment. */
template <uint32_t D>
KVP_DEV void load_q(uint32_t (&f)[4], const uint8_t *q, uint32_t first_row, uint32_t c)
{
    uint32_t lane = threadIdx.x % 32, at = swizzled<D>(lane % 16, lane / 16);
    ldsm4(f, q + first_row * (D * 2) + pair_of_pieces<D>(at, c));
}

/* S = Q K^T for the warp's keys. */
template <bool BF16, uint32_t D, class S>
KVP_DEV void multiply_keys(const warp_rows<D, S> &w, const uint8_t *q, const uint8_t *k,
                           float (&s)[S::MMAS][S::WARP_KEYS / 8][4])
{
    uint32_t lane = threadIdx.x % 32;
    uint32_t at = swizzled<D>(w.first_key + lane % 8 + lane / 16 * 8, lane / 8 % 2);
    KVP_UNROLL
    for (uint32_t m = 0; m < S::MMAS; m++)
        KVP_UNROLL
        for (uint32_t n = 0; n < S::WARP_KEYS / 8; n++)
            KVP_UNROLL
            for (uint32_t i = 0; i < 4; i++) s[m][n][i] = 0;
    KVP_UNROLL
    for (uint32_t c = 0; c < D / 16; c++) {
        uint32_t x[S::MMAS][4];
        KVP_UNROLL
        for (uint32_t m = 0; m < S::MMAS; m++)
            if (S::Q_STAYS) {
                KVP_UNROLL
                for (uint32_t i = 0; i < 4; i++) x[m][i] = w.q[S::Q_STAYS ? c : 0][i];
            } else {
                load_q<D>(x[m], q, w.first + m * 16, c);
            }
        KVP_UNROLL
        for (uint32_t n = 0; n < S::WARP_KEYS / 16; n++) {
            uint32_t b[4]; /* keys 0 to 7, elements 0 to 7 and 8 to 15; keys 8 to 15 */
            ldsm4(b, k + pair_of_pieces<D>(at, c) + n * (16 * D * 2));
            KVP_UNROLL
            for (uint32_t m = 0; m < S::MMAS; m++) {
                mma<BF16>(s[m][2 * n], x[m], b[0], b[1]);
                mma<BF16>(s[m][2 * n + 1], x[m], b[2], b[3]);
            }
        }
    }
}

/* cap tanh(s scale / cap), to base 2. tanh(x) = 1 - 2 / (1 + e^2x): exact enough for any cap, which
 * the instruction for it is not. */
template <class S>
KVP_DEV void cap_scores(const kvp__attention_args &a, float (&s)[S::MMAS][S::WARP_KEYS / 8][4])
{
    float in = 2 * LOG2E * a.scale / a.softcap, out = LOG2E * a.softcap;
    KVP_UNROLL
    for (uint32_t m = 0; m < S::MMAS; m++)
        KVP_UNROLL
        for (uint32_t n = 0; n < S::WARP_KEYS / 8; n++)
            KVP_UNROLL
            for (uint32_t i = 0; i < 4; i++)
                s[m][n][i] = out - 2 * out * rcp(1 + ex2(in * s[m][n][i]));
}

/* `limits` are those of the warp's rows. */
template <class S>
KVP_DEV void mask_scores(const uint2 *limits, uint32_t first_key,
                         float (&s)[S::MMAS][S::WARP_KEYS / 8][4])
{
    KVP_UNROLL
    for (uint32_t m = 0; m < S::MMAS; m++)
        KVP_UNROLL
        for (uint32_t half = 0; half < 2; half++) {
            uint2 sees = limits[m * 16 + half * 8 + threadIdx.x % 32 / 4];
            KVP_UNROLL
            for (uint32_t n = 0; n < S::WARP_KEYS / 8; n++)
                KVP_UNROLL
                for (uint32_t i = 0; i < 2; i++) {
                    uint32_t key = first_key + n * 8 + threadIdx.x % 4 * 2 + i;
                    if (key < sees.x || key >= sees.y) s[m][n][half * 2 + i] = minus_infinity();
                }
        }
}

/* S becomes P = 2^(s scale - max); what was summed with an older maximum shrinks. */
template <uint32_t D, class S>
KVP_DEV void soften(warp_rows<D, S> &w, float scale, float (&s)[S::MMAS][S::WARP_KEYS / 8][4])
{
    float shrink[S::MMAS][2];
    bool moved = false;
    KVP_UNROLL
    for (uint32_t m = 0; m < S::MMAS; m++)
        KVP_UNROLL
        for (uint32_t half = 0; half < 2; half++) {
            float most = minus_infinity();
            KVP_UNROLL
            for (uint32_t n = 0; n < S::WARP_KEYS / 8; n++)
                most = larger(most, larger(s[m][n][half * 2], s[m][n][half * 2 + 1]));
            most = larger(most, shfl_xor(most, 1));
            most = larger(most, shfl_xor(most, 2));
            most = larger(w.max[m][half], most * scale);
            float base = base_of(most), sum = 0;
            shrink[m][half] = ex2(w.max[m][half] - base);
            moved = moved || w.max[m][half] != most;
            w.max[m][half] = most;
            KVP_UNROLL
            for (uint32_t n = 0; n < S::WARP_KEYS / 8; n++)
                KVP_UNROLL
                for (uint32_t i = 0; i < 2; i++) {
                    float p = ex2(fma_rn(s[m][n][half * 2 + i], scale, -base));
                    s[m][n][half * 2 + i] = p;
                    sum += p;
                }
            w.sum[m][half] = w.sum[m][half] * shrink[m][half] + sum;
        }
    if (!kvp::any(moved)) return;
    KVP_UNROLL
    for (uint32_t m = 0; m < S::MMAS; m++)
        KVP_UNROLL
        for (uint32_t n = 0; n < D / 8; n++)
            KVP_UNROLL
            for (uint32_t i = 0; i < 4; i++) w.o[m][n][i] *= shrink[m][i / 2];
}

/* O += P V. Two products' results side by side are the fragment of the next product's left side. */
template <bool BF16, uint32_t D, class S>
KVP_DEV void add_values(warp_rows<D, S> &w, const uint8_t *v,
                        const float (&s)[S::MMAS][S::WARP_KEYS / 8][4])
{
    uint32_t lane = threadIdx.x % 32, at = swizzled<D>(w.first_key + lane % 16, lane / 16);
    KVP_UNROLL
    for (uint32_t c = 0; c < S::WARP_KEYS / 16; c++) {
        uint32_t p[S::MMAS][4];
        KVP_UNROLL
        for (uint32_t m = 0; m < S::MMAS; m++)
            KVP_UNROLL
            for (uint32_t i = 0; i < 4; i++) {
                const float(&x)[4] = s[m][2 * c + i / 2];
                p[m][i] = pack<BF16>(x[i % 2 * 2], x[i % 2 * 2 + 1]);
            }
        KVP_UNROLL
        for (uint32_t n = 0; n < D / 16; n++) {
            uint32_t b[4]; /* elements 0 to 7, keys 0 to 7 and 8 to 15; elements 8 to 15 */
            ldsm4t(b, v + pair_of_pieces<D>(at, n) + c * (16 * D * 2));
            KVP_UNROLL
            for (uint32_t m = 0; m < S::MMAS; m++) {
                mma<BF16>(w.o[m][2 * n], p[m], b[0], b[1]);
                mma<BF16>(w.o[m][2 * n + 1], p[m], b[2], b[3]);
            }
        }
    }
}

/* The warp's keys of a tile that is in shared memory and begins at `key`. */
template <bool BF16, uint32_t D, class S>
KVP_DEV void attend_tile(const kvp__attention_args &a, warp_rows<D, S> &w, const uint8_t *q,
                         const uint8_t *stage, const uint2 *limits, const bounds &all,
                         uint32_t key)
{
    key += w.first_key;
    if (key >= all.max_hi || key + S::WARP_KEYS <= all.min_lo) return;
    float s[S::MMAS][S::WARP_KEYS / 8][4];
    multiply_keys<BF16, D, S>(w, q, stage, s);
    if (a.softcap != 0) cap_scores<S>(a, s);
    if (key < all.max_lo || key + S::WARP_KEYS > all.min_hi)
        mask_scores<S>(limits + w.first, key, s);
    soften<D, S>(w, a.softcap != 0 ? 1.0f : a.scale * LOG2E, s);
    add_values<BF16, D, S>(w, stage + S::STAGE_BYTES / 2, s);
}

/* --- results --- */

/* Of the warps, in the place of the stages: [key warp][row][O_PITCH], maxima, sums. */
template <uint32_t D, class S> KVP_DEV void lay_out(const job &j, warp_rows<D, S> &w, float *shared)
{
    uint32_t lane = threadIdx.x % 32, key_warp = threadIdx.x / 32 / S::ROW_WARPS;
    float *maxima = shared + S::KEY_WARPS * S::ROWS * S::O_PITCH;
    float *sums = maxima + S::KEY_WARPS * S::ROWS;
    KVP_UNROLL
    for (uint32_t m = 0; m < S::MMAS; m++)
        KVP_UNROLL
        for (uint32_t half = 0; half < 2; half++) {
            float sum = w.sum[m][half];
            sum += shfl_xor(sum, 1);
            sum += shfl_xor(sum, 2);
            uint32_t r = w.first + m * 16 + half * 8 + lane / 4, at = key_warp * S::ROWS + r;
            if (r >= j.rows) continue;
            if (lane % 4 == 0) {
                maxima[at] = w.max[m][half];
                sums[at] = sum;
            }
            float *o = shared + at * S::O_PITCH + lane % 4 * 2;
            KVP_UNROLL
            for (uint32_t n = 0; n < D / 8; n++)
                *(float2 *)(o + n * 8) =
                    make_float2(w.o[m][n][half * 2], w.o[m][n][half * 2 + 1]);
        }
}

KVP_DEV uint32_t pack_as(uint32_t type, float lo, float hi)
{
    return type == KVP__EL_BF16 ? pack_bf16(lo, hi) : pack_f16(lo, hi);
}

/* Four elements; a host's rows may begin anywhere. */
KVP_DEV void store4(void *out, int64_t at, uint32_t type, float4 x)
{
    if (type == KVP__EL_F32) {
        float *to = (float *)out + at;
        if ((uintptr_t)to % 16 == 0) {
            *(float4 *)to = x;
        } else {
            to[0] = x.x;
            to[1] = x.y;
            to[2] = x.z;
            to[3] = x.w;
        }
        return;
    }
    uint16_t *to = (uint16_t *)out + at;
    uint32_t lo = pack_as(type, x.x, x.y), hi = pack_as(type, x.z, x.w);
    if ((uintptr_t)to % 8 == 0) {
        *(uint2 *)to = make_uint2(lo, hi);
    } else {
        to[0] = (uint16_t)lo;
        to[1] = (uint16_t)(lo >> 16);
        to[2] = (uint16_t)hi;
        to[3] = (uint16_t)(hi >> 16);
    }
}

/* A row a warp: the key warps' parts, and the sink where this is all, by their weights. */
template <uint32_t D, class S>
KVP_DEV void write_row(const kvp__attention_args &a, const job &j, const float *shared, uint32_t r)
{
    const float *maxima = shared + S::KEY_WARPS * S::ROWS * S::O_PITCH + r;
    const float *sums = maxima + S::KEY_WARPS * S::ROWS;
    uint32_t lane = threadIdx.x % 32;
    row_place p = place_of(j, r);
    bool whole = j.item.slot < 0;
    float sink = whole && a.sinks ? a.sinks[p.head] * LOG2E : minus_infinity();
    float most = sink, weight[S::KEY_WARPS];
    KVP_UNROLL
    for (uint32_t i = 0; i < S::KEY_WARPS; i++) most = larger(most, maxima[i * S::ROWS]);
    float base = base_of(most), sum = ex2(sink - base);
    KVP_UNROLL
    for (uint32_t i = 0; i < S::KEY_WARPS; i++) {
        weight[i] = ex2(maxima[i * S::ROWS] - base);
        sum += weight[i] * sums[i * S::ROWS];
    }
    float inverse = sum == 0 ? 0.0f : rcp(sum);
    uint64_t part = whole ? 0 : (uint64_t)(j.item.slot + p.token) * a.query_heads + p.head;
    int64_t at = whole ? (int64_t)step_row(a, j, p.token) * a.out_row + p.head * a.out_head
                       : (int64_t)(part * a.value_dim);
    for (uint32_t c = lane * 4; c < a.value_dim; c += 128) {
        float4 x = make_float4(0, 0, 0, 0);
        KVP_UNROLL
        for (uint32_t i = 0; i < S::KEY_WARPS; i++) {
            float4 o = *(const float4 *)(shared + (i * S::ROWS + r) * S::O_PITCH + c);
            x.x += weight[i] * o.x;
            x.y += weight[i] * o.y;
            x.z += weight[i] * o.z;
            x.w += weight[i] * o.w;
        }
        x = make_float4(x.x * inverse, x.y * inverse, x.z * inverse, x.w * inverse);
        store4(whole ? a.out : a.part_out, at + c, whole ? a.out_type : KVP__EL_F32, x);
    }
    if (!whole && lane == 0) a.part_lse[part] = sum == 0 ? minus_infinity() : base + lg2(sum);
}

/* --- a block --- */

template <bool BF16, uint32_t D, uint32_t T> KVP_DEV void attend(const kvp__attention_args &a)
{
    using S = tile<D, T>;
    KVP_SMEM(shared);
    uint8_t *stages = shared + S::Q_BYTES;
    uint8_t *q = S::Q_STAYS ? stages + (S::STAGES - 1) * S::STAGE_BYTES : shared;
    uint64_t *places = (uint64_t *)(stages + S::STAGES * S::STAGE_BYTES);
    uint2 *limits = (uint2 *)(places + S::STAGES * S::KEYS);
    job *kept = (job *)(limits + S::ROWS), j;
    if (!find_job<S>(a, T, j)) return;

    if (threadIdx.x == 0) *kept = j;
    for (uint32_t r = threadIdx.x; r < S::ROWS; r += S::THREADS) limits[r] = limits_of(a, j, r);
    uint32_t key = j.item.kv_begin & ~(S::KEYS - 1), end = j.item.kv_end; /* of a tile; of all */
    for (uint32_t i = threadIdx.x; i < S::STAGES * S::KEYS; i += S::THREADS)
        places[i] = key_place(a, key + i, look_up(a, j, key + i));
    copy_queries<D, S>(a, j, q);
    cp_commit();
    warp_rows<D, S> w;
    w.first = threadIdx.x / 32 % S::ROW_WARPS * (16 * S::MMAS);
    w.first_key = S::KEY_WARPS == 1 ? 0 : threadIdx.x / 32 / S::ROW_WARPS * S::WARP_KEYS;
    begin_rows<D, S>(w);
    __syncthreads();
    bounds all = join_limits<S>(j, limits, w.first);
    KVP_UNROLL
    for (uint32_t i = 0; i < S::STAGES - 1; i++) {
        if (key + i * S::KEYS < end)
            copy_tile<D, S>(a, j, stages + i * S::STAGE_BYTES, places + i * S::KEYS);
        cp_commit();
    }
    if (S::Q_STAYS) { /* Q lies in the stage that is filled last, after the first barrier below */
        cp_wait<S::STAGES - 1>();
        __syncthreads();
        KVP_UNROLL
        for (uint32_t c = 0; c < D / 16; c++) load_q<D>(w.q[S::Q_STAYS ? c : 0], q, w.first, c);
    }

    uint32_t stage = 0;
    for (; key < end; key += S::KEYS) {
        cp_wait<S::STAGES - 2>();
        __syncthreads();
        uint32_t free = stage == 0 ? S::STAGES - 1 : stage - 1; /* was read a round ago */
        if (key + (S::STAGES - 1) * S::KEYS < end)
            copy_tile<D, S>(a, j, stages + free * S::STAGE_BYTES, places + free * S::KEYS);
        cp_commit();
        uint32_t ahead = S::STAGES * S::KEYS + threadIdx.x, block = NO_BLOCK;
        if (threadIdx.x < S::KEYS) block = look_up(a, j, key + ahead);
        attend_tile<BF16, D, S>(a, w, q, stages + stage * S::STAGE_BYTES, limits, all, key);
        if (threadIdx.x < S::KEYS)
            places[stage * S::KEYS + threadIdx.x] = key_place(a, key + ahead, block);
        stage = stage + 1 == S::STAGES ? 0 : stage + 1;
    }

    cp_wait<0>();
    __syncthreads();
    j = *kept;
    lay_out<D, S>(j, w, (float *)shared);
    __syncthreads();
    for (uint32_t r = threadIdx.x / 32; r < j.rows; r += S::WARPS)
        write_row<D, S>(a, j, (const float *)shared, r);
}

} // namespace

#define KVP_ATTENTION(type, bf16, d, rows, t)                                                      \
    KVP_KERNEL(attention_##type##_d##d##_r##rows, kvp__attention_args, KVP__ATTEND_THREADS(d, t))  \
    {                                                                                              \
        attend<bf16, d, t>(a);                                                                     \
    }
#define KVP_ATTENTION_TYPES(d, rows, t)                                                            \
    KVP_ATTENTION(f16, false, d, rows, t)                                                          \
    KVP_ATTENTION(bf16, true, d, rows, t)

KVP_ATTENTION_TYPES(64, 16, 0)
KVP_ATTENTION_TYPES(64, 32, 1)
KVP_ATTENTION_TYPES(64, 64, 2)
KVP_ATTENTION_TYPES(64, 128, 3)
KVP_ATTENTION_TYPES(96, 16, 0)
KVP_ATTENTION_TYPES(96, 32, 1)
KVP_ATTENTION_TYPES(96, 64, 2)
KVP_ATTENTION_TYPES(96, 128, 3)
KVP_ATTENTION_TYPES(128, 16, 0)
KVP_ATTENTION_TYPES(128, 32, 1)
KVP_ATTENTION_TYPES(128, 64, 2)
KVP_ATTENTION_TYPES(128, 128, 3)
KVP_ATTENTION_TYPES(256, 16, 0)
KVP_ATTENTION_TYPES(256, 32, 1)
KVP_ATTENTION_TYPES(256, 64, 2)
