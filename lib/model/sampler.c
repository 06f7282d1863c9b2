/*
 * From logits to a token. See sampler.h for the order of things.
 *
 * Nothing is sorted, and no probability is stored. What top-k, top-p and min-p leave is always all
 * tokens from some place in the order (logit falling, id rising) upwards, so it is described by
 * that place, the `cut`: a logit, and the last id that is kept at exactly this logit. Finding the
 * place is a selection by the bits of the logits, eleven at a time: count (top-k) or add up the
 * probabilities of (top-p) each of 2,048 buckets, walk down to the bucket with the place in it,
 * look into that one. Drawing is two passes over what is kept: its mass, then the token at which a
 * share of it is used up.
 *
 * Weights are exp((logit - max) / temperature) in float, by a polynomial of our own, four at a
 * time; sums are by blocks of 64 in float lanes and then in double. All of it is IEEE arithmetic in
 * a fixed order, so it gives the same bits on every CPU.
 */
#include "model/sampler.h"

#include "base/fmath.h"
#include "base/half.h"

#include <float.h>
#include <string.h>

typedef float v4f __attribute__((vector_size(16)));
typedef int32_t v4i __attribute__((vector_size(16)));
typedef uint32_t v4u __attribute__((vector_size(16)));

#define BLOCK 64u
#define BUCKETS 2048u
#define NO_LIMIT INT32_MAX
#define COLDEST 1e-6f /* temperatures below it are greedy */

typedef struct scratch {
    union {
        double mass[4][BUCKETS]; /* a set per lane, so that additions do not wait for each other */
        uint32_t count[BUCKETS];
    } bucket;
    /* What was there before biases and penalties, to be put back, the last one first. */
    float undo_value[KVP__SAMPLE_MAX_BIAS + KVP__SAMPLE_MAX_WINDOW];
    uint32_t undo_id[KVP__SAMPLE_MAX_BIAS + KVP__SAMPLE_MAX_WINDOW];
    uint32_t n_undo;
    uint32_t pad;
    uint64_t seen[]; /* a bit per token: among the recent ones */
} scratch;

size_t kvp__sample_scratch_bytes(uint32_t n)
{
    return sizeof(scratch) + ((size_t)n / 64 + 1) * sizeof(uint64_t);
}

/* --- settings --- */

static bool within(float x, float low, float high) { return x >= low && x <= high; }

/* One range check; NaN fails every one. */
static kvp_status out_of_range(kvp_error *err, const char *field, const char *range)
{
    return kvp__fail(err, KVP_ERR_INVALID_ARG, "sampling: %s must be %s", field, range);
}

static kvp_status check_bias(const kvp_sampling *in, uint32_t vocabulary, kvp_error *err)
{
    if (in->n_bias > KVP__SAMPLE_MAX_BIAS || (in->n_bias && !in->bias))
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "sampling: n_bias: %u entries%s",
                         (unsigned)in->n_bias, in->bias ? ", 1024 are the most" : " at NULL");
    for (uint32_t i = 0; i < in->n_bias; i++) {
        int32_t token = in->bias[i].token;
        float bias = in->bias[i].bias;
        if (token < 0 || (vocabulary && (uint32_t)token >= vocabulary))
            return kvp__fail(err, KVP_ERR_INVALID_ARG, "sampling: bias[%u].token: %d is no token",
                             (unsigned)i, (int)token);
        if (!(bias <= FLT_MAX))
            return kvp__fail(err, KVP_ERR_INVALID_ARG,
                             "sampling: bias[%u].bias must be finite or -INFINITY", (unsigned)i);
    }
    return KVP_OK;
}

kvp_status kvp__sampler_fill(kvp__sampler *out, const kvp_sampling *in, uint32_t vocabulary,
                             kvp_error *err)
{
    static const kvp_sampling greedy;
    if (!in) in = &greedy;
    if (in->mode > KVP_SAMPLE_HOST)
        return out_of_range(err, "mode", "KVP_SAMPLE_LIBRARY or KVP_SAMPLE_HOST");
    if (!within(in->temperature, 0, 100)) return out_of_range(err, "temperature", "from 0 to 100");
    if (!within(in->top_p, 0, 1)) return out_of_range(err, "top_p", "from 0 to 1");
    if (!within(in->min_p, 0, 1)) return out_of_range(err, "min_p", "from 0 to 1");
    if (in->top_k < 0) return out_of_range(err, "top_k", "0 or more");
    if (!within(in->repetition_penalty, 0, 1000))
        return out_of_range(err, "repetition_penalty", "from 0 to 1000");
    if (!within(in->presence_penalty, -1000, 1000))
        return out_of_range(err, "presence_penalty", "from -1000 to 1000");
    if (!within(in->frequency_penalty, -1000, 1000))
        return out_of_range(err, "frequency_penalty", "from -1000 to 1000");
    if (in->penalty_window > KVP__SAMPLE_MAX_WINDOW)
        return out_of_range(err, "penalty_window", "8192 at most");
    if (in->top_logprobs > KVP__SAMPLE_MAX_TOP)
        return out_of_range(err, "top_logprobs", "20 at most");
    if (in->logprobs > 1) return out_of_range(err, "logprobs", "0 or 1");
    kvp_status s = check_bias(in, vocabulary, err);
    if (s != KVP_OK) return s;
    *out = (kvp__sampler){
        .mode = in->mode ? in->mode : KVP_SAMPLE_LIBRARY,
        .temperature = in->temperature < COLDEST ? 0 : in->temperature,
        .top_p = in->top_p > 0 ? in->top_p : 1,
        .min_p = in->min_p,
        .top_k = (uint32_t)in->top_k,
        .repetition = in->repetition_penalty > 0 ? in->repetition_penalty : 1,
        .presence = in->presence_penalty,
        .frequency = in->frequency_penalty,
        .penalty_window = in->penalty_window ? in->penalty_window : 64,
        .top_logprobs = in->top_logprobs,
        .logprobs = in->logprobs,
        .n_bias = in->n_bias,
        .bias = in->bias,
        .seed = in->seed,
    };
    return KVP_OK;
}

/* --- the generator: Philox 4x32 with ten rounds (Salmon, Moraes, Dror and Shaw, 2011) --- */

void kvp__random(uint64_t key, uint64_t low, uint64_t high, uint32_t out[4])
{
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    uint32_t c[4] = {(uint32_t)low, (uint32_t)(low >> 32), (uint32_t)high, (uint32_t)(high >> 32)};
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xd2511f53u * c[0], b = (uint64_t)0xcd9e8d57u * c[2];
        uint32_t c0 = (uint32_t)(b >> 32) ^ c[1] ^ k0, c2 = (uint32_t)(a >> 32) ^ c[3] ^ k1;
        c[1] = (uint32_t)b;
        c[3] = (uint32_t)a;
        c[0] = c0;
        c[2] = c2;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    memcpy(out, c, sizeof c);
}

/* In [0, 1), 53 bits. */
static double uniform(uint64_t seed, uint64_t position)
{
    uint32_t r[4];
    kvp__random(seed, position, 0, r);
    return (double)((uint64_t)r[0] << 21 | r[1] >> 11) * 0x1p-53;
}

uint64_t kvp__seed_fork(uint64_t parent, uint64_t counter)
{
    uint32_t r[4];
    kvp__random(parent, counter, 1, r); /* the draws have 0 in this place */
    uint64_t seed = (uint64_t)r[0] << 32 | r[1];
    return seed ? seed : (uint64_t)r[2] << 32 | r[3] | 1;
}

/* --- weights --- */

/* exp for x <= 0, to a unit in the last place or two; 0 below -87. */
static inline v4f exp4(v4f x)
{
    const v4f magic = {12582912.0f, 12582912.0f, 12582912.0f, 12582912.0f}; /* 1.5 * 2^23: rounds */
    v4i live = x >= -87.0f;
    v4f shifted = x * 1.44269504f + magic, n = shifted - magic;
    v4f r = x - n * 0.693359375f + n * 2.12194440e-4f; /* ln 2 in two parts */
    v4f r2 = r * r; /* the series to r^7, in pairs: a chain of seven would be waited for */
    v4f low = (r + 1.0f) + (r * (1.0f / 6) + 0.5f) * r2;
    v4f high = (r * (1.0f / 120) + 1.0f / 24) + (r * (1.0f / 5040) + 1.0f / 720) * r2;
    v4f p = low + high * (r2 * r2);
    v4i bits = (v4i)p + (((v4i)shifted - (v4i)magic) << 23);
    return (v4f)(bits & live);
}

static inline v4f load4(const float *x)
{
    v4f v;
    memcpy(&v, x, sizeof v);
    return v;
}

/* `n` < 4 logits, and -infinity where there is none. */
static v4f load_tail(const float *x, uint32_t n)
{
    float v[4] = {-__builtin_inff(), -__builtin_inff(), -__builtin_inff(), -__builtin_inff()};
    memcpy(v, x, n * sizeof *x);
    return load4(v);
}

static inline bool any4(v4i m)
{
    uint64_t half[2];
    memcpy(half, &m, sizeof half);
    return (half[0] | half[1]) != 0;
}

/* The first i >= from with x[i] >= floor; n if there is none. Sixteen at a time where it can. */
static uint32_t next_above(const float *x, uint32_t from, uint32_t n, float floor)
{
    uint32_t i = from;
    for (; i < n && i % 16; i++)
        if (x[i] >= floor) return i;
    for (; n - i >= 16; i += 16) {
        v4i hit = (load4(x + i) >= floor) | (load4(x + i + 4) >= floor) |
                  (load4(x + i + 8) >= floor) | (load4(x + i + 12) >= floor);
        if (any4(hit)) break;
    }
    while (i < n && !(x[i] >= floor)) i++;
    return i;
}

/* The tokens that are kept, and how their weights follow from their logits. */
typedef struct cut {
    float max, inverse; /* of all logits; 1 / temperature */
    float floor;        /* kept: logit > floor, */
    int32_t last_id;    /* or logit == floor and id <= last_id */
} cut;

/* The weights of four tokens from `id` on, 0 for those that are not kept. */
static inline v4f weights4(const cut *c, v4f x, v4i id)
{
    v4i kept = (x > c->floor) | ((x == c->floor) & (id <= c->last_id));
    return (v4f)((v4i)exp4((x - c->max) * c->inverse) & kept);
}

static inline v4i ids4(uint32_t id)
{
    v4i first = {0, 1, 2, 3};
    return first + (int32_t)id;
}

static inline v4f logits4(const float *x, uint32_t i, uint32_t n)
{
    return n - i >= 4 ? load4(x + i) : load_tail(x + i, n - i);
}

/* The summed weights of x[from .. to), at most BLOCK of them. */
static double block_mass(const float *x, uint32_t from, uint32_t to, const cut *c)
{
    if (c->floor > -FLT_MAX && next_above(x, from, to, c->floor) == to) return 0;
    v4f sum = {0, 0, 0, 0};
    for (uint32_t i = from; i < to; i += 4) sum += weights4(c, logits4(x, i, to), ids4(i));
    return ((double)sum[0] + sum[1]) + ((double)sum[2] + sum[3]);
}

static uint32_t block_end(uint32_t from, uint32_t n) { return n - from > BLOCK ? from + BLOCK : n; }

static double total_mass(const float *x, uint32_t n, const cut *c)
{
    double total = 0;
    for (uint32_t from = 0; from < n; from = block_end(from, n))
        total += block_mass(x, from, block_end(from, n), c);
    return total;
}

/* --- cuts --- */

/* Logits as numbers that sort like them. */
static uint32_t key_of(float x)
{
    uint32_t u = kvp__float_bits(x + 0.0f); /* one zero only */
    return u >> 31 ? ~u : u | 0x80000000u;
}

/* The smallest logit with this key or above; what lies below -infinity would be a NaN. */
static float value_of(uint32_t key)
{
    if (key < 0x007fffffu) return -__builtin_inff();
    return kvp__bits_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

/* The three looks at a key: which bits, and how many are known before. */
static const struct look {
    unsigned shift, bits;
} looks[] = {{21, 11}, {10, 11}, {0, 10}};

static uint32_t bucket_of(uint32_t key, const struct look *l)
{
    return key >> l->shift & ((1u << l->bits) - 1);
}

static float raise(float a, float b) { return a > b ? a : b; }

/* The largest of x[from .. to). */
static float block_largest(const float *x, uint32_t from, uint32_t to)
{
    v4f max = load_tail(x, 0);
    for (uint32_t i = from; i < to; i += 4) {
        v4f v = logits4(x, i, to);
        v4i above = v > max;
        max = (v4f)(((v4i)v & above) | ((v4i)max & ~above));
    }
    return raise(raise(max[0], max[1]), raise(max[2], max[3]));
}

/* A logit that k at least are not below: k blocks have such a one. */
static float floor_of_count(const float *x, uint32_t n, uint32_t k, scratch *w)
{
    uint32_t blocks = (n + BLOCK - 1) / BLOCK, b = BUCKETS;
    if (k > blocks) return -__builtin_inff();
    memset(w->bucket.count, 0, sizeof w->bucket.count);
    for (uint32_t from = 0; from < n; from = block_end(from, n))
        w->bucket.count[bucket_of(key_of(block_largest(x, from, block_end(from, n))), looks)]++;
    for (uint32_t have = 0; have < k;) have += w->bucket.count[--b];
    return value_of(b << looks[0].shift);
}

/* Keeps the k largest; 0 < k < n. */
static void cut_to_count(const float *x, uint32_t n, uint32_t k, scratch *w, cut *c)
{
    uint32_t prefix = 0, left = k;
    float floor = floor_of_count(x, n, k, w);
    for (const struct look *l = looks; l < looks + KVP__COUNT(looks); l++) {
        memset(w->bucket.count, 0, sizeof w->bucket.count);
        for (uint32_t i = next_above(x, 0, n, floor); i < n; i = next_above(x, i + 1, n, floor)) {
            uint32_t key = key_of(x[i]);
            if (l == looks || key >> (l->shift + l->bits) == prefix)
                w->bucket.count[bucket_of(key, l)]++;
        }
        uint32_t b = (1u << l->bits) - 1;
        while (w->bucket.count[b] < left) left -= w->bucket.count[b--];
        prefix = prefix << l->bits | b;
        floor = value_of(prefix << l->shift);
    }
    c->floor = floor;
    uint32_t i = 0;
    for (;; i++) { /* the last of those that share the lowest place */
        i = next_above(x, i, n, floor);
        if (x[i] == floor && --left == 0) break;
    }
    c->last_id = (int32_t)i;
}

/* bucket_of(key_of(x)) four times. */
static inline void buckets4(v4f x, const struct look *l, uint32_t out[4])
{
    v4i bits = (v4i)(x + 0.0f), sign = bits < 0;
    v4u key = (v4u)(bits ^ (sign | INT32_MIN));
    key = key >> l->shift & ((1u << l->bits) - 1);
    memcpy(out, &key, sizeof key);
}

/* Adds the weights of what is kept, from logit `low` to `high`, into the buckets of this look: in
 * the end mass[0]. Of sixteen with one that is wanted all are added, the others with weight 0: that
 * is cheaper than branches guessed wrong. */
static void add_masses(const float *x, uint32_t n, float low, float high, const cut *c,
                       const struct look *l, double mass[4][BUCKETS])
{
    memset(mass, 0, 4 * sizeof mass[0]);
    for (uint32_t from = 0; from < n; from += 16) {
        v4f v[4];
        v4i wanted[4], any = {0, 0, 0, 0};
        uint32_t bucket[4];
        for (uint32_t j = 0; j < 4; j++) {
            uint32_t i = from + 4 * j;
            v[j] = i < n ? logits4(x, i, n) : load_tail(x, 0);
            wanted[j] = (v[j] >= low) & (v[j] <= high);
            any |= wanted[j];
        }
        if (!any4(any)) continue;
        for (uint32_t j = 0; j < 4; j++) {
            v4f weight = (v4f)((v4i)weights4(c, v[j], ids4(from + 4 * j)) & wanted[j]);
            buckets4(v[j], l, bucket);
            for (int k = 0; k < 4; k++) mass[k][bucket[k]] += (double)weight[k];
        }
    }
    for (uint32_t b = 0; b < BUCKETS; b++)
        mass[0][b] = (mass[0][b] + mass[1][b]) + (mass[2][b] + mass[3][b]);
}

/* Walks the buckets down until `left` is used up; false if their rounded sum was not enough. */
static bool walk_mass(const double *mass, uint32_t buckets, double *left, uint32_t *place)
{
    for (uint32_t b = buckets; b-- > 0;) {
        if (mass[b] == 0) continue;
        *place = b;
        if (mass[b] >= *left) return true;
        *left -= mass[b];
    }
    return false;
}

/* Keeps the smallest set of largest tokens that has `share` of the kept mass. */
static void cut_to_mass(const float *x, uint32_t n, float share, scratch *w, cut *c)
{
    double total = total_mass(x, n, c), left = share * total;
    /* Tokens below a weight of (1 - share) * total / n have less than 1 - share of it together, so
     * all the others have enough: the place is among these. Half of it leaves room for rounding. */
    double least = (1 - (double)share) * total / n / 2;
    float low = raise(c->floor, (float)(c->max + kvp__ln(least) / c->inverse)), high = c->max;
    uint32_t prefix = 0;
    for (const struct look *l = looks; l < looks + KVP__COUNT(looks); l++) {
        add_masses(x, n, low, high, c, l, w->bucket.mass);
        uint32_t b = 0;
        const double *mass = w->bucket.mass[0];
        if (!walk_mass(mass, 1u << l->bits, &left, &b)) left = mass[b];
        prefix = prefix << l->bits | b;
        low = raise(low, value_of(prefix << l->shift));
        high = value_of(prefix << l->shift | ((1u << l->shift) - 1));
    }
    float place = value_of(prefix);
    int32_t last = c->last_id;
    double each = 0;
    for (uint32_t i = next_above(x, 0, n, place); i < n; i = next_above(x, i + 1, n, place)) {
        if (x[i] != place || (place == c->floor && (int32_t)i > c->last_id)) continue;
        if (each == 0) each = weights4(c, load_tail(x + i, 1), ids4(i))[0];
        last = (int32_t)i;
        left -= each;
        if (left <= 0) break;
    }
    c->floor = place;
    c->last_id = last;
}

/* --- drawing --- */

/* The token of a block at which `left` of its mass is used up; its last one if that is too much. */
static uint32_t draw_in_block(const float *x, uint32_t from, uint32_t to, const cut *c, double left)
{
    uint32_t token = from;
    for (uint32_t i = from; i < to; i += 4) {
        v4f weight = weights4(c, logits4(x, i, to), ids4(i));
        for (uint32_t k = 0; k < 4; k++) {
            if (weight[k] == 0) continue;
            token = i + k;
            if (left < (double)weight[k]) return token;
            left -= (double)weight[k];
        }
    }
    return token;
}

static uint32_t draw(const float *x, uint32_t n, const cut *c, double share)
{
    double left = share * total_mass(x, n, c), mass;
    uint32_t block = 0;
    for (uint32_t from = 0; from < n; from = block_end(from, n)) {
        mass = block_mass(x, from, block_end(from, n), c);
        if (mass == 0) continue;
        block = from;
        if (left < mass) break;
        left -= mass;
    }
    return draw_in_block(x, block, block_end(block, n), c, left);
}

/* --- the whole --- */

/* The largest logit; *broken: there is a NaN or +infinity. */
static float largest(const float *x, uint32_t n, bool *broken)
{
    v4f max = load_tail(x, 0);
    v4i nan = {0, 0, 0, 0};
    for (uint32_t i = 0; i < n; i += 4) {
        v4f v = logits4(x, i, n);
        v4i above = v > max;
        max = (v4f)(((v4i)v & above) | ((v4i)max & ~above));
        nan |= v != v;
    }
    float m = raise(raise(max[0], max[1]), raise(max[2], max[3]));
    *broken = any4(nan) || m > FLT_MAX;
    return m;
}

static kvp_status check_logits(const float *x, uint32_t n, float *max, kvp_error *err)
{
    bool broken;
    *max = largest(x, n, &broken);
    if (broken) {
        uint32_t i = 0;
        while (x[i] <= FLT_MAX) i++;
        return kvp__fail(err, KVP_ERR_INTERNAL, "the logit of token %u is %s", (unsigned)i,
                         x[i] != x[i] ? "not a number" : "infinite");
    }
    return *max < -FLT_MAX ? kvp__sample_broken(n, n, err) : KVP_OK;
}

kvp_status kvp__sample_broken(uint32_t bad, uint32_t n, kvp_error *err)
{
    if (bad < n)
        return kvp__fail(err, KVP_ERR_INTERNAL, "the logit of token %u is not a number or infinite",
                         (unsigned)bad);
    return kvp__fail(err, KVP_ERR_INTERNAL, "every one of the %u logits is -infinity", (unsigned)n);
}

bool kvp__sampler_is_plain(const kvp__sampler *s)
{
    return s->repetition == 1 && s->presence == 0 && s->frequency == 0 && s->n_bias == 0 &&
           !s->logprobs && !s->top_logprobs;
}

/* The `most` largest, in order. */
static uint32_t top_of(const float *x, uint32_t n, uint32_t most, int32_t *ids, float *values)
{
    uint32_t have = 0;
    float floor = -__builtin_inff();
    for (uint32_t i = 0; most && (i = next_above(x, i, n, floor)) < n; i++) {
        if (have == most && !(x[i] > floor)) continue;
        uint32_t at = have < most ? have++ : most - 1;
        for (; at > 0 && x[i] > values[at - 1]; at--) {
            values[at] = values[at - 1];
            ids[at] = ids[at - 1];
        }
        values[at] = x[i];
        ids[at] = (int32_t)i;
        if (have == most) floor = values[most - 1];
    }
    return have;
}

/* Changes a logit, so that it can be put back. Biases and penalties never make one infinite
 * upwards. */
static void change(scratch *w, float *x, uint32_t id, float value)
{
    w->undo_id[w->n_undo] = id;
    w->undo_value[w->n_undo++] = x[id];
    x[id] = value > FLT_MAX ? FLT_MAX : value;
}

static void put_back(scratch *w, float *x)
{
    while (w->n_undo > 0) {
        w->n_undo--;
        x[w->undo_id[w->n_undo]] = w->undo_value[w->n_undo];
    }
}

static void penalise(const kvp__sampler *s, float *x, uint32_t n, const int32_t *recent,
                     uint32_t n_recent, scratch *w)
{
    uint32_t window = s->penalty_window < KVP__SAMPLE_MAX_WINDOW ? s->penalty_window
                                                                 : KVP__SAMPLE_MAX_WINDOW;
    if (n_recent > window) {
        recent += n_recent - window;
        n_recent = window;
    }
    memset(w->seen, 0, ((size_t)n / 64 + 1) * sizeof w->seen[0]);
    for (uint32_t i = 0; i < n_recent; i++) {
        uint32_t id = (uint32_t)recent[i];
        if (id >= n) continue;
        float v = x[id];
        if (!(w->seen[id / 64] >> id % 64 & 1)) {
            w->seen[id / 64] |= (uint64_t)1 << id % 64;
            v = v > 0 ? v / s->repetition : v * s->repetition;
            v -= s->presence;
        }
        change(w, x, id, v - s->frequency);
    }
}

static void adjust(const kvp__sampler *s, float *x, uint32_t n, const int32_t *recent,
                   uint32_t n_recent, scratch *w)
{
    w->n_undo = 0;
    for (uint32_t i = 0; i < s->n_bias; i++) {
        uint32_t id = (uint32_t)s->bias[i].token;
        if (id < n) change(w, x, id, x[id] + s->bias[i].bias);
    }
    if (s->repetition != 1 || s->presence != 0 || s->frequency != 0)
        penalise(s, x, n, recent, n_recent, w);
}

static uint32_t choose(const kvp__sampler *s, const float *x, uint32_t n, float max, double share,
                       scratch *w)
{
    if (s->temperature == 0) return next_above(x, 0, n, max);
    cut c = {max, 1 / s->temperature, -__builtin_inff(), NO_LIMIT};
    if (s->top_k > 0 && s->top_k < n) cut_to_count(x, n, s->top_k, w, &c);
    if (s->top_p < 1) cut_to_mass(x, n, s->top_p, w, &c);
    if (s->min_p > 0) {
        float floor = (float)(max + kvp__ln(s->min_p) * s->temperature);
        if (floor > c.floor) {
            c.floor = floor;
            c.last_id = NO_LIMIT;
        }
    }
    return draw(x, n, &c, share);
}

kvp_status kvp__sample(const kvp__sampler *s, float *logits, uint32_t n, uint64_t seed,
                       uint64_t position, const int32_t *recent, uint32_t n_recent, void *memory,
                       kvp__sampled *out, kvp_error *err)
{
    scratch *w = memory;
    float max;
    kvp_status status = check_logits(logits, n, &max, err);
    if (status != KVP_OK) return status;
    bool broken, wants_logprobs = s->logprobs || s->top_logprobs;
    double log_sum = 0;
    if (wants_logprobs) {
        cut all = {max, 1, -__builtin_inff(), NO_LIMIT};
        log_sum = max + kvp__ln(total_mass(logits, n, &all));
    }
    adjust(s, logits, n, recent, n_recent, w);
    if (w->n_undo) max = largest(logits, n, &broken);
    if (max < -FLT_MAX) {
        put_back(w, logits);
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "sampling: the biases forbid every token");
    }
    uint32_t token = choose(s, logits, n, max, uniform(seed, position), w);
    put_back(w, logits);
    out->token = (int32_t)token;
    out->logprob = wants_logprobs ? (float)(logits[token] - log_sum) : 0;
    out->n_top = top_of(logits, n, s->top_logprobs, out->top_tokens, out->top_logprobs);
    for (uint32_t i = 0; i < out->n_top; i++)
        out->top_logprobs[i] = (float)(out->top_logprobs[i] - log_sum);
    return KVP_OK;
}
