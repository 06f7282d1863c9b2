/*
 * The KV cache's memory, and attention over it in items. See attend.h.
 */
#include "cpu/attend.h"

#include <string.h>

#define ITEM_ROWS 48u              /* query heads x tokens of an item: what scratch holds */
#define LEAST_ROWS 6u              /* below, a tile of keys is loaded for too few rows */
#define ITEM_COST (128u << 10)     /* rows x keys at a head size of 64: about half a millisecond */
#define PART_COST 2048u            /* not worth sharing below */
#define PARTS_PER_THREAD 3u

/* --- the store --- */

static uint8_t *layer_of(const kvp__store *s, uint32_t group, uint32_t index, uint32_t block)
{
    return s->slab + kvp__layout_block(&s->layout, group, block) +
           (uint64_t)index * s->layout.groups[group].layer;
}

uint8_t *kvp__store_k(const kvp__store *s, uint32_t group, uint32_t index, uint32_t block,
                      uint32_t head)
{
    return layer_of(s, group, index, block) + head * s->layout.groups[group].k_head;
}

uint8_t *kvp__store_v(const kvp__store *s, uint32_t group, uint32_t index, uint32_t block,
                      uint32_t head)
{
    const kvp__group_layout *g = &s->layout.groups[group];
    return layer_of(s, group, index, block) + g->k_part + head * g->v_head;
}

/* A key's elements go to one lane each of the rows of its tile. */
static void store_key(uint8_t *tile, uint32_t lane, uint32_t tile_tokens, uint32_t size,
                      const void *key, uint32_t dim)
{
    if (size == 2) {
        const uint16_t *from = key;
        uint16_t *to = (uint16_t *)(void *)tile + lane;
        for (uint32_t d = 0; d < dim; d++) to[(size_t)d * tile_tokens] = from[d];
    } else {
        const uint32_t *from = key;
        uint32_t *to = (uint32_t *)(void *)tile + lane;
        for (uint32_t d = 0; d < dim; d++) to[(size_t)d * tile_tokens] = from[d];
    }
}

void kvp__store_token(const kvp__store *s, const kvp__kernels *kernels, uint32_t group,
                      uint32_t index, uint32_t block, uint32_t offset, const float *k,
                      size_t k_head, const float *v, size_t v_head)
{
    const kvp__layout *l = &s->layout;
    const kvp__group_layout *g = &l->groups[group];
    uint32_t tile = offset / l->tile, lane = offset % l->tile;
    _Alignas(KVP__CACHE_LINE) uint32_t key[256];
    for (uint32_t h = 0; h < g->kv_heads; h++) {
        kernels->to_kv(l->k_format, k + h * k_head, g->key_dim, key);
        uint8_t *kt = kvp__store_k(s, group, index, block, h) +
                      (size_t)tile * g->key_dim * l->tile * g->k_size;
        store_key(kt, lane, l->tile, g->k_size, key, g->key_dim);
        uint8_t *vt = kvp__store_v(s, group, index, block, h) +
                      (size_t)offset * g->value_dim * g->v_size;
        kernels->to_kv(l->v_format, v + h * v_head, g->value_dim, vt);
    }
}

void kvp__store_copy(const kvp__store *s, const kvp__copy *c)
{
    const kvp__layout *l = &s->layout;
    const kvp__group_layout *g = &l->groups[c->group];
    uint32_t tiles = (c->tokens + l->tile - 1) / l->tile;
    size_t k_bytes = (size_t)tiles * l->tile * g->key_dim * g->k_size;
    size_t v_bytes = (size_t)c->tokens * g->value_dim * g->v_size;
    for (uint32_t i = 0; i < g->layers; i++)
        for (uint32_t h = 0; h < g->kv_heads; h++) {
            memcpy(kvp__store_k(s, c->group, i, c->dst, h), kvp__store_k(s, c->group, i, c->src, h),
                   k_bytes);
            memcpy(kvp__store_v(s, c->group, i, c->dst, h), kvp__store_v(s, c->group, i, c->src, h),
                   v_bytes);
        }
}

/* --- the list of items --- */

static uint32_t heads_per_item(const kvp__items *it, uint32_t *n_parts)
{
    uint32_t group = it->query_heads / it->kv_heads;
    *n_parts = (group + ITEM_ROWS - 1) / ITEM_ROWS;
    return (group + *n_parts - 1) / *n_parts;
}

uint32_t kvp__splits_capacity(uint32_t threads) { return 16 + PARTS_PER_THREAD * threads; }

uint32_t kvp__more_items_capacity(uint32_t threads) { return 8 * kvp__splits_capacity(threads); }

uint64_t kvp__items_capacity(const kvp_layer_group *g, uint32_t max_rows, uint32_t threads)
{
    uint32_t group = g->query_heads / g->kv_heads, parts = (group + ITEM_ROWS - 1) / ITEM_ROWS;
    return (uint64_t)max_rows * g->kv_heads * parts + kvp__more_items_capacity(threads);
}

/* Room to split a few tokens at full depth; deeper or more stay whole. */
uint64_t kvp__slots_capacity(const kvp_layer_group *g, uint32_t max_positions)
{
    return 4ull * g->query_heads * (max_positions / KVP__SEGMENT + 1);
}

static uint32_t first_key(const kvp__items *it, uint32_t position)
{
    return it->window && position >= it->window ? position + 1 - it->window : 0;
}

/* The tokens of an item that begins at a position: so many that its cost stays small enough for a
 * host's time budget, but enough rows to share the loads. */
static uint32_t tokens_per_item(const kvp__items *it, uint32_t heads, uint32_t position)
{
    uint32_t dim = it->key_dim > it->value_dim ? it->key_dim : it->value_dim;
    uint64_t keys = position + 1 - first_key(it, position) + KVP__TILE;
    uint64_t rows = (uint64_t)ITEM_COST * 64 / dim / keys;
    if (rows > ITEM_ROWS) rows = ITEM_ROWS;
    if (rows < LEAST_ROWS) rows = LEAST_ROWS;
    uint32_t tokens = (uint32_t)rows / heads;
    return tokens ? tokens : 1;
}

static uint64_t item_cost(const kvp__item *i)
{
    return (uint64_t)i->n_tokens * i->n_heads * (i->end_segment - i->first_segment) * KVP__SEGMENT;
}

/* Cuts the last item of the list into parts of about `target`, if there is room. */
static void split_last(kvp__items *it, uint64_t target)
{
    kvp__item whole = it->list[it->n - 1];
    uint32_t segments = whole.end_segment - whole.first_segment;
    uint64_t parts = (item_cost(&whole) + target - 1) / target;
    uint64_t slots = (uint64_t)segments * whole.n_tokens * whole.n_heads;
    if (parts > segments) parts = segments;
    if (parts < 2 || it->n_splits == it->max_splits || it->used_slots + slots > it->max_slots ||
        parts > it->max_more - it->more)
        return;
    kvp__split *sp = &it->splits[it->n_splits];
    atomic_store_explicit(&sp->left, (uint32_t)parts, memory_order_relaxed);
    sp->n_items = (uint32_t)parts;
    sp->first_segment = whole.first_segment;
    sp->end_segment = whole.end_segment;
    sp->slot = it->used_slots;
    it->used_slots += slots;
    it->more += (uint32_t)parts;
    it->n--;
    for (uint64_t p = 0; p < parts; p++) {
        kvp__item *i = &it->list[it->n++];
        *i = whole;
        i->first_segment = whole.first_segment + (uint32_t)(segments * p / parts);
        i->end_segment = whole.first_segment + (uint32_t)(segments * (p + 1) / parts);
        i->split = it->n_splits;
    }
    it->n_splits++;
}

static void add_items(kvp__items *it, const kvp__work *work, uint32_t seq, uint64_t target)
{
    const kvp__work_seq *s = &work->seqs[seq];
    uint32_t parts, heads = heads_per_item(it, &parts), group = it->query_heads / it->kv_heads;
    for (uint32_t done = 0, n; done < s->n_rows; done += n) {
        n = tokens_per_item(it, heads, s->first_pos + done);
        if (n > s->n_rows - done) n = s->n_rows - done;
        uint32_t first = first_key(it, s->first_pos + done), last = s->first_pos + done + n - 1;
        for (uint32_t h = 0; h < it->kv_heads * parts; h++) {
            uint32_t begin = h % parts * heads, end = begin + heads < group ? begin + heads : group;
            kvp__item *i = &it->list[it->n++];
            i->seq = seq;
            i->row = s->first_row + done;
            i->n_tokens = n;
            i->kv_head = h / parts;
            i->first_head = i->kv_head * group + begin;
            i->n_heads = end - begin;
            i->first_segment = first / KVP__SEGMENT;
            i->end_segment = last / KVP__SEGMENT + 1;
            i->split = KVP__NO_SPLIT;
            split_last(it, target);
        }
    }
}

static uint64_t seq_cost(const kvp__items *it, const kvp__work_seq *s)
{
    uint32_t last = s->first_pos + s->n_rows - 1;
    uint64_t keys = last + 1 - first_key(it, s->first_pos + s->n_rows / 2);
    return keys * s->n_rows * it->query_heads;
}

void kvp__items_make(kvp__items *it, const kvp__work *work, uint32_t threads)
{
    it->n = it->n_splits = it->more = 0;
    it->used_slots = 0;
    uint64_t total = 0;
    for (uint32_t i = 0; i < work->n_seqs; i++) total += seq_cost(it, &work->seqs[i]);
    uint64_t target = total / (threads * PARTS_PER_THREAD) + 1;
    uint32_t dim = it->key_dim > it->value_dim ? it->key_dim : it->value_dim;
    uint64_t most = (uint64_t)ITEM_COST * 64 / dim;
    if (target > most) target = most;
    if (target < PART_COST) target = PART_COST;
    for (uint32_t i = 0; i < work->n_seqs; i++) add_items(it, work, i, target);
}

/* --- running an item --- */

/* An item's share of scratch. */
typedef struct bench {
    kvp__segment segment;
    kvp__row_state state[ITEM_ROWS];
    uint16_t lo[ITEM_ROWS], hi[ITEM_ROWS];
    float max[ITEM_ROWS], sum[ITEM_ROWS];
    _Alignas(KVP__CACHE_LINE) float q[ITEM_ROWS * 256];
    float p[ITEM_ROWS * KVP__SEGMENT];
    float out[ITEM_ROWS * 256];
    float acc[ITEM_ROWS * 256];
    _Alignas(KVP__CACHE_LINE) uint8_t gathered[2][KVP__SEGMENT * 256 * 4]; /* keys, values */
} bench;

_Static_assert(sizeof(bench) <= KVP__SCRATCH_BYTES, "an item's memory is the thread's scratch");

static void load_queries(const kvp__attention *a, const kvp__item *i, bench *b)
{
    uint32_t dim = a->items->key_dim;
    float *to = b->q;
    for (uint32_t t = 0; t < i->n_tokens; t++)
        for (uint32_t h = 0; h < i->n_heads; h++, to += dim) {
            const float *from = (const float *)(const void *)(
                (const char *)a->q + (int64_t)(i->row + t) * a->q_row +
                (int64_t)(i->first_head + h) * a->q_head);
            for (uint32_t d = 0; d < dim; d++) to[d] = from[d] * a->scale;
        }
}

static uint16_t inside(uint32_t key, uint32_t segment)
{
    uint32_t begin = segment * KVP__SEGMENT;
    return (uint16_t)(key <= begin ? 0 : key - begin < KVP__SEGMENT ? key - begin : KVP__SEGMENT);
}

static void see(const kvp__attention *a, const kvp__item *i, uint32_t segment, bench *b)
{
    const kvp__work_seq *s = &a->work->seqs[i->seq];
    for (uint32_t t = 0, r = 0; t < i->n_tokens; t++) {
        uint32_t position = s->first_pos + (i->row - s->first_row) + t;
        for (uint32_t h = 0; h < i->n_heads; h++, r++) {
            b->lo[r] = inside(first_key(a->items, position), segment);
            b->hi[r] = inside(position + 1, segment);
        }
    }
}

/* Blocks below 16 tokens: their tiles side by side make the lanes of one. */
static void gather_keys(uint8_t *to, const uint8_t *from, uint32_t dim, uint32_t tokens,
                        uint32_t size)
{
    size_t piece = (size_t)tokens * size, row = (size_t)KVP__TILE * size;
    for (uint32_t d = 0; d < dim; d++) memcpy(to + d * row, from + d * piece, piece);
}

static void gather_values(uint8_t *to, size_t to_row, const uint8_t *from, size_t from_row,
                          uint32_t tokens)
{
    for (uint32_t t = 0; t < tokens; t++) memcpy(to + t * to_row, from + t * from_row, from_row);
}

static const void *key_tile(const kvp__attention *a, const kvp__item *i, uint32_t tile,
                            uint32_t end_key, uint8_t *room)
{
    const kvp__layout *l = &a->store->layout;
    const kvp__group_layout *g = &l->groups[a->items->group];
    const uint32_t *table = a->work->seqs[i->seq].tables[a->items->group];
    if (l->tile == KVP__TILE) {
        uint32_t per_block = l->block_tokens / KVP__TILE;
        return kvp__store_k(a->store, a->items->group, a->index, table[tile / per_block],
                            i->kv_head) +
               (size_t)(tile % per_block) * g->key_dim * KVP__TILE * g->k_size;
    }
    for (uint32_t t = 0; t < KVP__TILE && tile * KVP__TILE + t < end_key; t += l->tile)
        gather_keys(room + (size_t)t * g->k_size,
                    kvp__store_k(a->store, a->items->group, a->index,
                                 table[(tile * KVP__TILE + t) / l->tile], i->kv_head),
                    g->key_dim, l->tile, g->k_size);
    return room;
}

static const void *value_tile(const kvp__attention *a, const kvp__item *i, uint32_t tile,
                              uint32_t end_key, uint32_t v_row, uint8_t *room)
{
    const kvp__layout *l = &a->store->layout;
    const kvp__group_layout *g = &l->groups[a->items->group];
    const uint32_t *table = a->work->seqs[i->seq].tables[a->items->group];
    size_t row = (size_t)g->value_dim * g->v_size;
    uint32_t step = l->tile; /* of consecutive tokens */
    if (l->tile == KVP__TILE) {
        uint32_t per_block = l->block_tokens / KVP__TILE;
        const uint8_t *from = kvp__store_v(a->store, a->items->group, a->index,
                                           table[tile / per_block], i->kv_head) +
                              (size_t)(tile % per_block) * KVP__TILE * row;
        if (v_row == g->value_dim) return from;
        gather_values(room, (size_t)v_row * g->v_size, from, row, KVP__TILE);
        return room;
    }
    for (uint32_t t = 0; t < KVP__TILE && tile * KVP__TILE + t < end_key; t += step)
        gather_values(room + (size_t)t * v_row * g->v_size, (size_t)v_row * g->v_size,
                      kvp__store_v(a->store, a->items->group, a->index,
                                   table[(tile * KVP__TILE + t) / step], i->kv_head),
                      row, step);
    return room;
}

/* Where the keys and values of a segment lie; tiles that no row sees are left out. */
static void find_tiles(const kvp__attention *a, const kvp__item *i, uint32_t segment, bench *b)
{
    kvp__segment *s = &b->segment;
    const kvp__group_layout *g = &a->store->layout.groups[a->items->group];
    uint32_t first = segment * KVP__SEGMENT_TILES, end_key = segment * KVP__SEGMENT +
                                                             b->hi[s->n_rows - 1];
    size_t k_bytes = (size_t)KVP__TILE * s->key_dim * g->k_size;
    size_t v_bytes = (size_t)KVP__TILE * s->v_row * g->v_size;
    for (uint32_t t = b->lo[0] / KVP__TILE; first * KVP__TILE + t * KVP__TILE < end_key; t++) {
        s->k[t] = key_tile(a, i, first + t, end_key, b->gathered[0] + t * k_bytes);
        s->v[t] = value_tile(a, i, first + t, end_key, s->v_row, b->gathered[1] + t * v_bytes);
    }
}

static void write_rows(const kvp__attention *a, const kvp__item *i, const bench *b)
{
    uint32_t dim = a->items->value_dim, width = b->segment.v_row;
    for (uint32_t t = 0, r = 0; t < i->n_tokens; t++)
        for (uint32_t h = 0; h < i->n_heads; h++, r++) {
            float *to = (float *)(void *)((char *)a->out + (int64_t)(i->row + t) * a->out_row +
                                          (int64_t)(i->first_head + h) * a->out_head);
            float sum = b->state[r].sum, inverse = 1.0f / sum;
            if (sum == 0) memset(to, 0, dim * sizeof *to);
            else
                for (uint32_t d = 0; d < dim; d++) to[d] = b->acc[r * width + d] * inverse;
        }
}

static void merge_rows(const kvp__attention *a, bench *b, const float *max, const float *sum,
                       const float *out)
{
    uint32_t width = b->segment.v_row;
    for (uint32_t r = 0; r < b->segment.n_rows; r++)
        a->kernels->merge(&b->state[r], b->acc + r * width, max[r], sum[r], out + r * width, width);
}

/* The last of a split: every segment's result is there. */
static void merge_split(const kvp__attention *a, const kvp__item *i, kvp__split *sp, bench *b)
{
    uint32_t rows = b->segment.n_rows, width = b->segment.v_row;
    for (uint32_t s = sp->first_segment; s < sp->end_segment; s++) {
        uint64_t slot = sp->slot + (uint64_t)(s - sp->first_segment) * rows;
        merge_rows(a, b, a->partials.max + slot, a->partials.sum + slot,
                   a->partials.acc + slot * width);
    }
    write_rows(a, i, b);
    atomic_store_explicit(&sp->left, sp->n_items, memory_order_relaxed); /* for the next layer */
}

void kvp__item_run(const kvp__attention *a, uint32_t item, void *scratch)
{
    const kvp__item *i = &a->items->list[item];
    bench *b = scratch;
    kvp__segment *s = &b->segment;
    kvp__split *sp = i->split == KVP__NO_SPLIT ? NULL : &a->items->splits[i->split];
    s->k_format = a->store->layout.k_format;
    s->v_format = a->store->layout.v_format;
    s->key_dim = a->items->key_dim;
    s->value_dim = a->items->value_dim;
    s->v_row = (uint32_t)kvp__round_up(s->value_dim, KVP__LANES);
    s->n_rows = i->n_tokens * i->n_heads;
    s->softcap = a->softcap;
    s->q = b->q;
    s->q_row = s->key_dim;
    s->lo = b->lo;
    s->hi = b->hi;
    s->p = b->p;
    s->max = b->max;
    s->sum = b->sum;
    s->out = b->out;
    s->out_row = s->v_row;
    memset(b->state, 0, s->n_rows * sizeof b->state[0]);
    load_queries(a, i, b);
    for (uint32_t g = i->first_segment; g < i->end_segment; g++) {
        see(a, i, g, b);
        find_tiles(a, i, g, b);
        if (sp) {
            uint64_t slot = sp->slot + (uint64_t)(g - sp->first_segment) * s->n_rows;
            s->max = a->partials.max + slot;
            s->sum = a->partials.sum + slot;
            s->out = a->partials.acc + slot * s->v_row;
        }
        a->kernels->attend(s);
        if (!sp) merge_rows(a, b, b->max, b->sum, b->out);
    }
    if (!sp) write_rows(a, i, b);
    else if (atomic_fetch_sub_explicit(&sp->left, 1, memory_order_acq_rel) == 1)
        merge_split(a, i, sp, b);
}
