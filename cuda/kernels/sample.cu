/*
 * sample: from a row of logits to the next token, the same one that kvp__sample of model/sampler.c
 * chooses for the same bits.
 *
 * What makes it the same: weights are computed by the same operations, each rounded once (add_rn,
 * mul_rn: nothing is contracted); the weights of 64 tokens are summed in four lanes by id modulo 4,
 * as there, and the sums of the blocks of 64 are added in order by one thread; so are the
 * subtractions of the draw. The soft cap has the operations of cpu/vec.h's vf_tanh, hence the CPU
 * device's bits.
 *
 * Where the cuts are found the CPU adds weights per bucket in the order of ids, which threads
 * cannot do side by side. But a weight has 24 bits, and those that count are not below (1 - p) / 2n
 * of the total, so that every sum is a multiple of one unit and mostly below 2^53 units: then no
 * addition there rounds, and the order is of no matter. So buckets are summed as 64-bit integers,
 * and one that did not stay below 2^53, or met a weight that is no multiple of the unit, is marked.
 * If the walk down the buckets comes to a marked one it is summed again, in order (that needs p >
 * 0.999 and a large vocabulary, or a very low temperature).
 *
 * One block a row. Passes over the logits, n of them:
 *     look    largest logit of the row and of each 64; NaN and infinity. Greedy ends here
 *     cut     top-k and top-p, three passes each by 11, 11 and 10 bits of the logit, over those
 *             blocks of 64 alone whose largest logit is in question: few, but for flat rows
 *     draw    weights of the blocks that are left, summed; then within one block
 * Bytes: 4n from L2 or memory for the first, 4n once more without cuts. Operations: about 25 n for
 * weights. Neither is what takes the time but the sums in order: n / 64 additions of doubles one
 * after the other, twice (some 8 cycles each: 2,000 for a vocabulary of 128,000 are about 9 us),
 * less where a cut leaves few blocks.
 *
 * Weighed, not measured: weights of a block of 64 by one thread with 16-byte loads: the same number
 * of cache lines touched per instruction, and a quarter of the threads at work when few blocks are
 * left. Sums in order by shuffles of a warp instead of one thread over shared memory: two shuffles
 * per addition, no faster. Histograms of doubles in the CPU's order: milliseconds. To try on a
 * card: several blocks a row for the first pass and the masses, in kernels of their own.
 *
 * Registers on sm_90 / sm_80: 56 / 60; no spills (budget.txt).
 */
#include "cuda/kernels/elements.h"
#include "cuda/kernels/launch.h"

namespace kvp {

#define THREADS KVP__SAMPLE_THREADS
#define WARPS (THREADS / 32)
#define BLOCK KVP__SAMPLE_BLOCK
#define BUCKETS 2048u
#define NO_LIMIT 0x7fffffff
#define FLT_LARGEST 3.40282347e+38f
#define NONE 0xffffffffu

/* The tokens that are kept, and how their weights follow from their logits. */
struct kept_range {
    float max, inverse; /* of all logits; 1 / temperature */
    float floor;        /* kept: logit > floor, */
    int last_id;        /* or logit == floor and id <= last_id */
};

/* The block's shared memory. */
struct bench {
    uint32_t low[BUCKETS], high[BUCKETS]; /* 64-bit sums of a bucket */
    uint32_t marked[BUCKETS];             /* not 0: it may have to be summed in order */
    union {
        double mass[THREADS];
        float weight[THREADS];
    } stage;
    float warp_value[WARPS];
    uint32_t warp_id[WARPS], warp_count[WARPS];
    double quarter[4];
    double left, number;                  /* what a walk has left; a thread's answer to all */
    uint32_t place, from, ask, token;
};
static_assert(sizeof(bench) <= KVP__SAMPLE_SHARED, "launch.h says less");

/* A row under way. */
struct row_work {
    float *x;
    uint32_t n, blocks;
    float *largest;   /* of each block of 64 */
    double *mass;     /* of each block on the list */
    uint32_t *list, listed;
};

KVP_DEV float minus_infinity() { return float_of(0xff800000u); }
KVP_DEV float raise(float a, float b) { return a > b ? a : b; }
KVP_DEV uint32_t below_lane() { return (1u << threadIdx.x % 32) - 1; }

/* --- arithmetic of the CPU, operation by operation --- */

/* exp4 of model/sampler.c: e^x for x <= 0, 0 below -87. */
KVP_DEV float weight_of(float x)
{
    const float magic = 12582912.0f;
    float shifted = add_rn(mul_rn(x, 1.44269504f), magic), n = add_rn(shifted, -magic);
    float r = add_rn(add_rn(x, -mul_rn(n, 0.693359375f)), mul_rn(n, 2.12194440e-4f));
    float r2 = mul_rn(r, r);
    float low = add_rn(add_rn(r, 1.0f), mul_rn(add_rn(mul_rn(r, 1.0f / 6), 0.5f), r2));
    float high = add_rn(add_rn(mul_rn(r, 1.0f / 120), 1.0f / 24),
                        mul_rn(add_rn(mul_rn(r, 1.0f / 5040), 1.0f / 720), r2));
    float p = add_rn(low, mul_rn(high, mul_rn(r2, r2)));
    uint32_t bits = bits_of(p) + ((bits_of(shifted) - bits_of(magic)) << 23);
    return x >= -87.0f ? float_of(bits) : 0.0f;
}

KVP_DEV float weight_of(const kept_range &c, float x)
{
    return weight_of(mul_rn(add_rn(x, -c.max), c.inverse));
}

KVP_DEV bool is_kept(const kept_range &c, float x, uint32_t id)
{
    return x > c.floor || (x == c.floor && (int)id <= c.last_id);
}

/* kvp__ln of base/fmath.c, for x > 0 and normal. */
KVP_DEV double natural_log(double x)
{
    uint64_t u = __builtin_bit_cast(uint64_t, x);
    int k = (int)(u >> 52) - 1023;
    double m = __builtin_bit_cast(double, (u & 0xfffffffffffffull) | 0x3ff0000000000000ull);
    if (m > 1.4142135623730951) {
        m = mul_rn(m, 0.5);
        k++;
    }
    double f = add_rn(m, -1.0), s = div_rn(f, add_rn(2.0, f)), z = mul_rn(s, s);
    double sum = 1.0 / 23.0;
    KVP_UNROLL
    for (int i = 21; i >= 3; i -= 2) sum = add_rn(mul_rn(sum, z), div_rn(1.0, (double)i));
    double tail = add_rn(mul_rn(mul_rn(mul_rn(2.0, s), z), sum),
                         mul_rn((double)k, 0x1.a39ef35793c76p-33));
    return add_rn(mul_rn((double)k, 0x1.62e42feep-1), add_rn(mul_rn(2.0, s), tail));
}

/* vf_exp of cpu/vec.h for 0 <= x, or NaN. */
KVP_DEV float exponential(float x)
{
    const float magic = 12582912.0f;
    x = x > 89.0f ? 89.0f : x;
    float n = add_rn(add_rn(mul_rn(x, 0x1.715476p+0f), magic), -magic);
    float r = fma_rn(n, -0x1.62e400p-1f, x);
    r = fma_rn(n, -0x1.7f7d1cp-20f, r);
    float p = 0x1.6a23cep-10f;
    p = fma_rn(p, r, 0x1.123a20p-7f);
    p = fma_rn(p, r, 0x1.5558f2p-5f);
    p = fma_rn(p, r, 0x1.555492p-3f);
    p = fma_rn(p, r, 0x1.fffffcp-2f);
    p = add_rn(fma_rn(mul_rn(p, r), r, r), 1.0f);
    int i = x == x ? (int)n : 0, half = i >> 1;
    float a = float_of((uint32_t)(half + 127) << 23);
    float b = float_of((uint32_t)(i - half + 127) << 23);
    return mul_rn(mul_rn(p, a), b);
}

/* vf_tanh of cpu/vec.h. */
KVP_DEV float hyperbolic_tangent(float x)
{
    float a = x < 0.0f ? -x : x, z = mul_rn(x, x);
    float p = -0x1.759544p-8f;
    p = fma_rn(p, z, 0x1.521628p-6f);
    p = fma_rn(p, z, -0x1.b839f2p-5f);
    p = fma_rn(p, z, 0x1.110716p-3f);
    p = fma_rn(p, z, -0x1.555532p-2f);
    p = fma_rn(mul_rn(p, z), x, x);
    float e = exponential(add_rn(a, a));
    float t = add_rn(1.0f, -div_rn(2.0f, add_rn(e, 1.0f)));
    return a < 0.625f ? p : x < 0.0f ? -t : t;
}

KVP_DEV float softcapped(float x, float cap)
{
    return cap == 0.0f ? x : mul_rn(cap, hyperbolic_tangent(div_rn(x, cap)));
}

/* Philox 4x32 with ten rounds, as kvp__random, for a counter of 64 bits; in [0, 1), 53 bits. */
KVP_DEV double uniform(uint64_t seed, uint64_t position)
{
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    uint32_t c0 = (uint32_t)position, c1 = (uint32_t)(position >> 32), c2 = 0, c3 = 0;
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xd2511f53u * c0, b = (uint64_t)0xcd9e8d57u * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)b;
        c3 = (uint32_t)a;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    return mul_rn((double)((uint64_t)c0 << 21 | c1 >> 11), 0x1p-53);
}

/* --- logits as numbers that sort like them, and their buckets --- */

KVP_DEV uint32_t key_of(float x)
{
    uint32_t u = bits_of(add_rn(x, 0.0f)); /* one zero only */
    return u >> 31 ? ~u : u | 0x80000000u;
}

/* The smallest logit with this key or above. */
KVP_DEV float value_of(uint32_t key)
{
    if (key < 0x007fffffu) return minus_infinity();
    return float_of(key >> 31 ? key & 0x7fffffffu : ~key);
}

/* The three looks at a key. */
KVP_DEV uint32_t look_shift(uint32_t look) { return look == 0 ? 21 : look == 1 ? 10 : 0; }
KVP_DEV uint32_t look_bits(uint32_t look) { return look == 2 ? 10 : 11; }
KVP_DEV uint32_t bucket_of(uint32_t key, uint32_t look)
{
    return key >> look_shift(look) & ((1u << look_bits(look)) - 1);
}

/* --- the first pass --- */

/* What a thread, and then everybody, knows of a row. */
struct first_look {
    float max;
    uint32_t id;  /* the first with it */
    uint32_t bad; /* the first NaN or infinity, or NONE */
};

KVP_DEV void merge_looks(first_look &a, float max, uint32_t id, uint32_t bad)
{
    if (max > a.max || (max == a.max && id < a.id)) {
        a.max = max;
        a.id = id;
    }
    if (bad < a.bad) a.bad = bad;
}

KVP_DEV void merge_lanes(first_look &a)
{
    KVP_UNROLL
    for (int m = 16; m > 0; m /= 2)
        merge_looks(a, shfl_xor(a.max, m), shfl_xor(a.id, m), shfl_xor(a.bad, m));
}

/* A logit, capped in place. Beyond the row: -infinity. */
KVP_DEV float take_logit(const row_work &r, uint32_t i, float cap)
{
    if (i >= r.n) return minus_infinity();
    float v = r.x[i];
    if (cap != 0.0f) r.x[i] = v = softcapped(v, cap);
    return v;
}

/* A warp a block of 64. */
KVP_DEV first_look look_at_row(const row_work &r, bench &s, float cap, bool keeps_largest)
{
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    first_look mine = {minus_infinity(), NONE, NONE};
    for (uint32_t b = warp; b < r.blocks; b += WARPS) {
        uint32_t i = b * BLOCK + lane;
        float v = take_logit(r, i, cap), w = take_logit(r, i + 32, cap), most = raise(v, w);
        merge_looks(mine, v, i, v <= FLT_LARGEST ? NONE : i);
        merge_looks(mine, w, i + 32, w <= FLT_LARGEST ? NONE : i + 32);
        if (!keeps_largest) continue;
        KVP_UNROLL
        for (int m = 16; m > 0; m /= 2) most = raise(most, shfl_xor(most, m));
        if (lane == 0) r.largest[b] = most;
    }
    merge_lanes(mine);
    if (lane == 0) {
        s.warp_value[warp] = mine.max;
        s.warp_id[warp] = mine.id;
        s.warp_count[warp] = mine.bad;
    }
    __syncthreads();
    mine = {s.warp_value[lane], s.warp_id[lane], s.warp_count[lane]};
    merge_lanes(mine);
    __syncthreads();
    return mine;
}

/* --- among all threads --- */

/* How many threads before this one say yes; *total: of all. */
KVP_DEV uint32_t rank_of(bench &s, bool yes, uint32_t *total)
{
    uint32_t mask = ballot(yes), warp = threadIdx.x / 32, before = 0, all = 0;
    if (threadIdx.x % 32 == 0) s.warp_count[warp] = (uint32_t)__builtin_popcount(mask);
    __syncthreads();
    for (uint32_t w = 0; w < WARPS; w++) {
        before += w < warp ? s.warp_count[w] : 0;
        all += s.warp_count[w];
    }
    __syncthreads();
    *total = all;
    return before + (uint32_t)__builtin_popcount(mask & below_lane());
}

/* Lists the blocks of 64 with a logit of at least `floor`, in order. */
KVP_DEV void list_blocks(row_work &r, bench &s, float floor)
{
    r.listed = 0;
    for (uint32_t first = 0; first < r.blocks; first += THREADS) {
        uint32_t b = first + threadIdx.x, total;
        bool on = b < r.blocks && r.largest[b] >= floor;
        uint32_t rank = rank_of(s, on, &total);
        if (on) r.list[r.listed + rank] = b;
        r.listed += total;
    }
    __syncthreads();
}

/* --- masses of blocks --- */

/* Of each block on the list, its summed weights: four threads a block, by id modulo 4. */
KVP_DEV void weigh_blocks(const row_work &r, const kept_range &c)
{
    uint32_t k = threadIdx.x % 4;
    for (uint32_t first = 0; first < r.listed; first += THREADS / 4) {
        uint32_t j = first + threadIdx.x / 4;
        uint32_t begin = j < r.listed ? r.list[j] * BLOCK + k : NONE;
        float sum = 0.0f;
        KVP_UNROLL
        for (uint32_t i = 0; i < BLOCK; i += 4) {
            if (begin >= r.n || begin + i >= r.n) continue;
            float x = r.x[begin + i];
            sum = add_rn(sum, is_kept(c, x, begin + i) ? weight_of(c, x) : 0.0f);
        }
        double pair = add_rn((double)sum, (double)shfl_xor(sum, 1));
        double mass = add_rn(pair, shfl_xor(pair, 2));
        if (k == 0 && j < r.listed) r.mass[j] = mass;
    }
    __syncthreads();
}

/* The masses of up to THREADS blocks from `first` on, for one thread to walk over. */
KVP_DEV uint32_t stage_masses(const row_work &r, bench &s, uint32_t first)
{
    uint32_t n = r.listed - first < THREADS ? r.listed - first : THREADS;
    if (threadIdx.x < n) s.stage.mass[threadIdx.x] = r.mass[first + threadIdx.x];
    __syncthreads();
    return n;
}

/* Blocks that are not on the list have no mass, and adding none changes nothing. */
KVP_DEV double total_mass(row_work &r, bench &s, const kept_range &c)
{
    weigh_blocks(r, c);
    double total = 0.0;
    for (uint32_t first = 0; first < r.listed; first += THREADS) {
        uint32_t n = stage_masses(r, s, first);
        if (threadIdx.x == 0)
            for (uint32_t i = 0; i < n; i++) total = add_rn(total, s.stage.mass[i]);
        __syncthreads();
    }
    if (threadIdx.x == 0) s.number = total;
    __syncthreads();
    total = s.number;
    __syncthreads();
    return total;
}

/* --- the selection by bits --- */

/* A selection under way: of counts (top-k), or of masses (top-p). */
struct selection {
    bool by_mass;
    uint32_t look, prefix; /* the key's bits that are known */
    float low, high;       /* the logits that have them */
    int unit;              /* masses are multiples of 2^(unit - 150) */
};

KVP_DEV bool is_wanted(const selection &q, float x)
{
    if (!(x >= q.low)) return false;
    if (q.by_mass) return x <= q.high;
    return q.look == 0 || key_of(x) >> (look_shift(q.look) + look_bits(q.look)) == q.prefix;
}

KVP_DEV void clear_buckets(bench &s)
{
    for (uint32_t b = threadIdx.x; b < BUCKETS; b += THREADS)
        s.low[b] = s.high[b] = s.marked[b] = 0;
    __syncthreads();
}

/* Adds to a bucket's sum in integers; marks it from 2^53 on. */
KVP_DEV void add_units(bench &s, uint32_t b, uint64_t units)
{
    uint32_t low = (uint32_t)units, high = (uint32_t)(units >> 32);
    high += atomic_add(&s.low[b], low) > ~low;
    if (high && atomic_add(&s.high[b], high) + high >= 1u << 21) atomic_add(&s.marked[b], 1u);
}

/* A weight in units: its 24 bits shifted to their place. */
KVP_DEV void add_weight(bench &s, uint32_t b, float weight, int unit)
{
    uint32_t u = bits_of(weight);
    if (u == 0) return;
    int shift = (int)(u >> 23) - unit;
    if (shift < 0 || shift > 29) atomic_add(&s.marked[b], 1u);
    else add_units(s, b, (uint64_t)((u & 0x7fffffu) | 0x800000u) << shift);
}

/* Fills the buckets of this look; a warp a block of the list. */
KVP_DEV void fill_buckets(const row_work &r, bench &s, const kept_range &c, const selection &q)
{
    clear_buckets(s);
    for (uint32_t j = threadIdx.x / 32; j < r.listed; j += WARPS) {
        uint32_t id = r.list[j] * BLOCK + threadIdx.x % 32;
        for (uint32_t end = id + BLOCK; id < end && id < r.n; id += 32) {
            float x = r.x[id];
            if (!is_wanted(q, x)) continue;
            uint32_t b = bucket_of(key_of(x), q.look);
            if (!q.by_mass) atomic_add(&s.low[b], 1u);
            else if (is_kept(c, x, id)) add_weight(s, b, weight_of(c, x), q.unit);
        }
    }
    __syncthreads();
}

/* 2^(unit - 150) */
KVP_DEV double unit_value(int unit)
{
    return __builtin_bit_cast(double, (uint64_t)(unit + 873) << 52);
}

/* The first warp goes down the buckets below s.from until s.left is used up. s.place: the bucket
 * where it is, or the last with anything in it; s.ask: that one is to be summed in order first. */
KVP_DEV void walk_buckets(bench &s, double unit)
{
    uint32_t lane = threadIdx.x, place = s.place;
    double left = s.left, last = s.number;
    bool found = false, ask = false;
    for (uint32_t from = s.from; from > 0 && !found && !ask; from = from > 32 ? from - 32 : 0) {
        uint32_t b = from - 1 - lane;
        bool on = lane < from && (s.low[b] | s.high[b] | s.marked[b]) != 0;
        double mass = on ? mul_rn((double)((uint64_t)s.high[b] << 32 | s.low[b]), unit) : 0.0;
        uint32_t marks = ballot(on && s.marked[b] != 0);
        for (uint32_t full = ballot(on); full && !found && !ask; full &= full - 1) {
            int first = __builtin_popcount(~full & (full - 1));
            place = from - 1 - (uint32_t)first;
            ask = marks >> first & 1;
            if (ask) break;
            last = shfl(mass, first);
            found = last >= left;
            if (!found) left = add_rn(left, -last);
        }
    }
    __syncwarp();
    if (lane == 0) {
        s.place = place;
        s.from = place;
        s.ask = ask;
        s.left = left;
        s.number = last;
        s.token = found;
    }
}

/* A bucket's mass by the CPU's sums: four, by id modulo 4, in the order of ids. */
KVP_DEV double mass_in_order(const row_work &r, bench &s, const kept_range &c, const selection &q,
                             uint32_t bucket)
{
    double sum = 0.0;
    for (uint32_t first = 0; first < r.listed; first += THREADS / BLOCK) {
        uint32_t j = first + threadIdx.x / BLOCK;
        uint32_t id = j < r.listed ? r.list[j] * BLOCK + threadIdx.x % BLOCK : NONE;
        float weight = 0.0f;
        if (id < r.n) {
            float x = r.x[id];
            if (is_wanted(q, x) && is_kept(c, x, id) && bucket_of(key_of(x), q.look) == bucket)
                weight = weight_of(c, x);
        }
        s.stage.weight[threadIdx.x] = weight;
        __syncthreads();
        if (threadIdx.x < 4)
            for (uint32_t i = threadIdx.x; i < THREADS; i += 4)
                sum = add_rn(sum, (double)s.stage.weight[i]);
        __syncthreads();
    }
    if (threadIdx.x < 4) s.quarter[threadIdx.x] = sum;
    __syncthreads();
    return add_rn(add_rn(s.quarter[0], s.quarter[1]), add_rn(s.quarter[2], s.quarter[3]));
}

/* Where `left` is used up in this look's buckets; *left becomes what is to be found inside that. */
KVP_DEV uint32_t find_bucket(const row_work &r, bench &s, const kept_range &c, const selection &q,
                             double *left)
{
    if (threadIdx.x == 0) {
        s.from = 1u << look_bits(q.look);
        s.place = 0;
        s.left = *left;
        s.number = 0.0;
    }
    __syncthreads();
    for (;;) {
        if (threadIdx.x < 32) walk_buckets(s, q.by_mass ? unit_value(q.unit) : 1.0);
        __syncthreads();
        bool ask = s.ask != 0;
        if (!ask) break;
        double mass = mass_in_order(r, s, c, q, s.place);
        if (threadIdx.x == 0) {
            s.number = mass;
            s.token = mass >= s.left;
            if (!s.token) s.left = add_rn(s.left, -mass);
        }
        __syncthreads();
        bool found = s.token != 0;
        __syncthreads();
        if (found) break;
    }
    *left = s.token ? s.left : s.number; /* all of the last one, if rounding left too little */
    uint32_t place = s.place;
    __syncthreads();
    return place;
}

/* The logit at which `left` is used up among those from `low` to c.max, by three looks. */
KVP_DEV float select(row_work &r, bench &s, const kept_range &c, bool by_mass, float low,
                     double *left)
{
    selection q = {by_mass, 0, 0, low, c.max, 0};
    for (; q.look < 3; q.look++) {
        list_blocks(r, s, q.low);
        /* Of the smallest weight, half again, so that rounding of the logarithm is no matter. */
        int exponent = (int)(bits_of(weight_of(c, q.low)) >> 23);
        q.unit = exponent > 2 ? exponent - 1 : 1;
        fill_buckets(r, s, c, q);
        q.prefix = q.prefix << look_bits(q.look) | find_bucket(r, s, c, q, left);
        uint32_t shift = look_shift(q.look);
        q.low = raise(q.low, value_of(q.prefix << shift));
        q.high = value_of(q.prefix << shift | ((1u << shift) - 1));
    }
    return value_of(q.prefix);
}

/* The id of the nth kept token that has exactly this logit, or of the last. */
KVP_DEV int nth_equal(row_work &r, bench &s, const kept_range &c, float logit, uint32_t nth)
{
    uint32_t seen = 0;
    list_blocks(r, s, logit);
    for (uint32_t first = 0; first < r.listed && seen < nth; first += THREADS / BLOCK) {
        uint32_t j = first + threadIdx.x / BLOCK, total;
        uint32_t id = j < r.listed ? r.list[j] * BLOCK + threadIdx.x % BLOCK : NONE;
        bool hit = id < r.n && r.x[id] == logit && is_kept(c, logit, id);
        uint32_t rank = seen + rank_of(s, hit, &total) + 1;
        seen += total;
        if (hit && rank == (nth < seen ? nth : seen)) s.token = id;
        __syncthreads();
    }
    return (int)s.token;
}

/* --- cuts --- */

/* A logit that k at least are not below: k blocks have such a one. */
KVP_DEV float floor_of_count(const row_work &r, bench &s, const kept_range &c, uint32_t k)
{
    if (k > r.blocks) return minus_infinity();
    clear_buckets(s);
    for (uint32_t b = threadIdx.x; b < r.blocks; b += THREADS)
        atomic_add(&s.low[bucket_of(key_of(r.largest[b]), 0)], 1u);
    __syncthreads();
    selection q = {false, 0, 0, 0.0f, 0.0f, 0};
    double left = k;
    return value_of(find_bucket(r, s, c, q, &left) << look_shift(0));
}

/* Keeps the k largest; 0 < k < n. */
KVP_DEV void cut_to_count(row_work &r, bench &s, uint32_t k, kept_range *c)
{
    double left = k;
    float floor = select(r, s, *c, false, floor_of_count(r, s, *c, k), &left);
    c->last_id = nth_equal(r, s, *c, floor, (uint32_t)left);
    c->floor = floor;
}

/* Keeps the smallest set of largest tokens that has `share` of the kept mass. */
KVP_DEV void cut_to_mass(row_work &r, bench &s, float share, kept_range *c)
{
    list_blocks(r, s, c->floor);
    double total = total_mass(r, s, *c), left = mul_rn((double)share, total);
    if (threadIdx.x == 0) {
        double rest = add_rn(1.0, -(double)share);
        double least = div_rn(div_rn(mul_rn(rest, total), (double)r.n), 2.0);
        s.number = add_rn((double)c->max, div_rn(natural_log(least), (double)c->inverse));
    }
    __syncthreads();
    float low = raise(c->floor, (float)s.number);
    __syncthreads();
    float place = select(r, s, *c, true, low, &left);
    if (threadIdx.x == 0) { /* how many of those that share the place */
        uint32_t nth = 0;
        double each = (double)weight_of(*c, place);
        do {
            nth++;
            left = add_rn(left, -each);
        } while (left > 0.0 && nth < r.n);
        s.place = nth;
    }
    __syncthreads();
    uint32_t nth = s.place;
    __syncthreads();
    c->last_id = nth_equal(r, s, *c, place, nth);
    c->floor = place;
}

KVP_DEV void cut_to_share_of_best(float min_p, float temperature, kept_range *c)
{
    double below = mul_rn(natural_log((double)min_p), (double)temperature);
    float floor = (float)add_rn((double)c->max, below);
    if (floor > c->floor) {
        c->floor = floor;
        c->last_id = NO_LIMIT;
    }
}

/* --- the draw --- */

/* The block of 64 at which `left` of the mass is used up, and in s.left what is left of it there;
 * the last with a mass if that is too much. */
KVP_DEV uint32_t draw_block(const row_work &r, bench &s, double left)
{
    uint32_t block = 0;
    if (threadIdx.x == 0) s.ask = 1;
    for (uint32_t first = 0; first < r.listed; first += THREADS) {
        uint32_t n = stage_masses(r, s, first);
        if (threadIdx.x == 0)
            for (uint32_t i = 0; i < n && s.ask; i++) {
                double mass = s.stage.mass[i];
                if (mass == 0.0) continue;
                block = r.list[first + i];
                if (left < mass) s.ask = 0;
                else left = add_rn(left, -mass);
            }
        __syncthreads();
        if (!s.ask) break;
    }
    if (threadIdx.x == 0) {
        s.left = left;
        s.place = block;
    }
    __syncthreads();
    return s.place;
}

/* The token of a block at which s.left is used up; its last one if that is too much. */
KVP_DEV uint32_t draw_in_block(const row_work &r, bench &s, const kept_range &c, uint32_t block)
{
    if (threadIdx.x < BLOCK) {
        uint32_t id = block * BLOCK + threadIdx.x;
        float x = id < r.n ? r.x[id] : minus_infinity();
        bool on = id < r.n && is_kept(c, x, id);
        s.stage.weight[threadIdx.x] = on ? weight_of(c, x) : 0.0f;
    }
    __syncthreads();
    if (threadIdx.x != 0) return 0;
    uint32_t token = block * BLOCK;
    double left = s.left;
    for (uint32_t i = 0; i < BLOCK; i++) {
        double weight = (double)s.stage.weight[i];
        if (weight == 0.0) continue;
        token = block * BLOCK + i;
        if (left < weight) break;
        left = add_rn(left, -weight);
    }
    return token;
}

/* In the first thread: the token. */
KVP_DEV uint32_t choose(row_work &r, bench &s, const kvp__cuda_draw &d, float max)
{
    kept_range c = {max, div_rn(1.0f, d.temperature), minus_infinity(), NO_LIMIT};
    if (d.top_k > 0 && d.top_k < r.n) cut_to_count(r, s, d.top_k, &c);
    if (d.top_p < 1.0f) cut_to_mass(r, s, d.top_p, &c);
    if (d.min_p > 0.0f) cut_to_share_of_best(d.min_p, d.temperature, &c);
    list_blocks(r, s, c.floor);
    double total = total_mass(r, s, c);
    double left = mul_rn(uniform(d.seed, d.position), total);
    return draw_in_block(r, s, c, draw_block(r, s, left));
}

/* Of a row that nobody chooses for. */
KVP_DEV void cap_row(const row_work &r, float cap)
{
    for (uint32_t i = threadIdx.x; i < r.n; i += THREADS) take_logit(r, i, cap);
}

KVP_KERNEL(sample, kvp__sample_args, KVP__SAMPLE_THREADS)
{
    KVP_SMEM(smem);
    bench &s = *(bench *)smem;
    uint32_t output = a.first + blockIdx.x;
    if (output >= a.step->n_outputs) return;
    const kvp__cuda_draw &d = a.draws[output];
    row_work r;
    r.n = a.vocabulary;
    r.blocks = (r.n + BLOCK - 1) / BLOCK;
    r.x = a.logits + (uint64_t)blockIdx.x * r.n;
    r.mass = (double *)((uint8_t *)a.scratch + blockIdx.x * KVP__CUDA_SAMPLE_SCRATCH(r.n));
    r.largest = (float *)(r.mass + r.blocks);
    r.list = (uint32_t *)(r.largest + r.blocks);
    r.listed = 0;
    if (!d.wanted) {
        if (a.softcap != 0.0f) cap_row(r, a.softcap);
        return;
    }
    first_look seen = look_at_row(r, s, a.softcap, d.temperature != 0.0f);
    kvp__cuda_drawn drawn = {-1, seen.bad};
    if (seen.bad == NONE && seen.max < -FLT_LARGEST) drawn.bad = r.n;
    if (drawn.bad == NONE) {
        uint32_t token = d.temperature == 0.0f ? seen.id : choose(r, s, d, seen.max);
        drawn.token = (int32_t)token;
        drawn.bad = 0;
    }
    if (threadIdx.x == 0) a.drawn[output] = drawn;
}

} // namespace kvp
