/*
 * The KV cache's memory, and attention over it, an item at a time. See attend.h.
 */
#include "cpu/attend.h"

#include <string.h>

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

/* --- running an item --- */

/* An item's share of scratch. */
typedef struct bench {
    kvp__segment segment;
    kvp__row_state state[KVP__ITEM_ROWS];
    uint16_t lo[KVP__ITEM_ROWS], hi[KVP__ITEM_ROWS];
    float max[KVP__ITEM_ROWS], sum[KVP__ITEM_ROWS];
    _Alignas(KVP__CACHE_LINE) float q[KVP__ITEM_ROWS * 256];
    float p[KVP__ITEM_ROWS * KVP__SEGMENT];
    float out[KVP__ITEM_ROWS * 256];
    float acc[KVP__ITEM_ROWS * 256];
    _Alignas(KVP__CACHE_LINE) uint8_t gathered[2][KVP__SEGMENT * 256 * 4]; /* keys, values */
} bench;

_Static_assert(sizeof(bench) <= KVP__SCRATCH_BYTES, "an item's memory is the thread's scratch");

/* Token t of an item: its sequence, and its row of the step. */
static const kvp__work_seq *seq_of(const kvp__attention *a, const kvp__item *i, uint32_t t)
{
    return &a->work->seqs[i->shared ? a->items->members[i->row + t] : i->seq];
}

static uint32_t row_of(const kvp__attention *a, const kvp__item *i, uint32_t t)
{
    return i->shared ? seq_of(a, i, t)->first_row : i->row + t;
}

static void load_queries(const kvp__attention *a, const kvp__item *i, bench *b)
{
    uint32_t dim = a->items->key_dim;
    float *to = b->q;
    for (uint32_t t = 0; t < i->n_tokens; t++) {
        const char *row = (const char *)a->q + (int64_t)row_of(a, i, t) * a->q_row;
        for (uint32_t h = 0; h < i->n_heads; h++, to += dim) {
            const float *from =
                (const float *)(const void *)(row + (int64_t)(i->first_head + h) * a->q_head);
            for (uint32_t d = 0; d < dim; d++) to[d] = from[d] * a->scale;
        }
    }
}

static uint16_t inside(uint32_t key, uint32_t segment)
{
    uint32_t begin = segment * KVP__SEGMENT;
    return (uint16_t)(key <= begin ? 0 : key - begin < KVP__SEGMENT ? key - begin : KVP__SEGMENT);
}

static void see(const kvp__attention *a, const kvp__item *i, uint32_t segment, bench *b)
{
    for (uint32_t t = 0, r = 0; t < i->n_tokens; t++) {
        const kvp__work_seq *s = seq_of(a, i, t);
        uint32_t position = s->first_pos + (row_of(a, i, t) - s->first_row);
        for (uint32_t h = 0; h < i->n_heads; h++, r++) {
            b->lo[r] = inside(kvp__first_key(a->items->window, position), segment);
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

/* The keys of the item's next segment, to be asked for in time, where they lie in tiles. */
static void find_next(const kvp__attention *a, const kvp__item *i, uint32_t segment, bench *b)
{
    kvp__segment *s = &b->segment;
    const kvp__work_seq *last = seq_of(a, i, i->n_tokens - 1);
    uint32_t end_key = last->first_pos + (row_of(a, i, i->n_tokens - 1) - last->first_row) + 1;
    uint32_t first = segment * KVP__SEGMENT_TILES;
    for (uint32_t t = 0; t < KVP__SEGMENT_TILES; t++) {
        bool there = segment < i->end_segment && (first + t) * KVP__TILE < end_key &&
                     a->store->layout.tile == KVP__TILE;
        s->next_k[t] = there ? key_tile(a, i, first + t, end_key, NULL) : NULL;
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

/* Rows that run from `max` on, wherever the results lie. */
static void merge_rows(const kvp__attention *a, bench *b, uint32_t rows, const float *max,
                       const float *sum, const float *out)
{
    uint32_t width = b->segment.v_row;
    for (uint32_t r = 0; r < rows; r++)
        a->kernels->merge(&b->state[r], b->acc + r * width, max[r], sum[r], out + r * width, width);
}

static void clear_state(bench *b, uint32_t rows) { memset(b->state, 0, rows * sizeof b->state[0]); }

/* The slot of the first of `rows` rows' results for a segment. */
static uint64_t slot_of(const kvp__split *sp, uint32_t segment, uint32_t rows)
{
    return sp->slot + (uint64_t)(segment - sp->first_segment) * rows;
}

/* One item of a split has ended. If it was the last, every segment's result is there: the tokens and
 * heads of `i`, of which only these are looked at, are merged and written. */
static void end_part(const kvp__attention *a, const kvp__item *i, kvp__split *sp, bench *b)
{
    uint32_t rows = i->n_tokens * i->n_heads, width = b->segment.v_row;
    if (atomic_fetch_sub_explicit(&sp->left, 1, memory_order_acq_rel) != 1) return;
    clear_state(b, rows);
    for (uint32_t s = sp->first_segment; s < sp->end_segment; s++) {
        uint64_t slot = slot_of(sp, s, rows);
        merge_rows(a, b, rows, a->partials.max + slot, a->partials.sum + slot,
                   a->partials.acc + slot * width);
    }
    write_rows(a, i, b);
    atomic_store_explicit(&sp->left, sp->n_items, memory_order_relaxed); /* for the next layer */
}

/* Results of rows [from, from + rows) of an item into a member's slots. */
static void keep(const kvp__attention *a, uint64_t slot, const bench *b, uint32_t from,
                 uint32_t rows, const float *max, const float *sum, const float *out)
{
    uint32_t width = b->segment.v_row;
    memcpy(a->partials.max + slot, max + from, rows * sizeof *max);
    memcpy(a->partials.sum + slot, sum + from, rows * sizeof *sum);
    memcpy(a->partials.acc + slot * width, out + (size_t)from * width,
           (size_t)rows * width * sizeof *out);
}

/* A shared item's results go to each member's split: those of the range that the prefix begins with
 * merged, in the slot of its last segment; those of later ranges segment by segment. */
static void keep_segment(const kvp__attention *a, const kvp__item *i, uint32_t segment, bench *b)
{
    const kvp__split *first = &a->items->splits[i->split];
    uint32_t heads = i->n_heads;
    if (segment > first->first_segment) {
        for (uint32_t t = 0; t < i->n_tokens; t++)
            keep(a, slot_of(first + t, segment, heads), b, t * heads, heads, b->max, b->sum,
                 b->out);
        return;
    }
    merge_rows(a, b, b->segment.n_rows, b->max, b->sum, b->out);
    if (segment < first->first_segment) return;
    float max[KVP__ITEM_ROWS], sum[KVP__ITEM_ROWS];
    for (uint32_t r = 0; r < b->segment.n_rows; r++) {
        max[r] = b->state[r].max;
        sum[r] = b->state[r].sum;
    }
    for (uint32_t t = 0; t < i->n_tokens; t++)
        keep(a, slot_of(first + t, segment, heads), b, t * heads, heads, max, sum, b->acc);
}

static void end_shared(const kvp__attention *a, const kvp__item *i, bench *b)
{
    for (uint32_t t = 0; t < i->n_tokens; t++) {
        kvp__item one = *i;
        one.shared = 0;
        one.n_tokens = 1;
        one.row = row_of(a, i, t);
        end_part(a, &one, &a->items->splits[i->split + t], b);
    }
}

static void set_segment(const kvp__attention *a, const kvp__item *i, bench *b)
{
    kvp__segment *s = &b->segment;
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
}

void kvp__item_run(const kvp__attention *a, uint32_t item, void *scratch)
{
    const kvp__item *i = &a->items->list[item];
    bench *b = scratch;
    kvp__segment *s = &b->segment;
    kvp__split *sp = i->split == KVP__NO_SPLIT ? NULL : &a->items->splits[i->split];
    set_segment(a, i, b);
    clear_state(b, s->n_rows);
    load_queries(a, i, b);
    for (uint32_t g = i->first_segment; g < i->end_segment; g++) {
        see(a, i, g, b);
        find_tiles(a, i, g, b);
        find_next(a, i, g + 1, b);
        if (sp && !i->shared) {
            uint64_t slot = slot_of(sp, g, s->n_rows);
            s->max = a->partials.max + slot;
            s->sum = a->partials.sum + slot;
            s->out = a->partials.acc + slot * s->v_row;
        }
        a->kernels->attend(s);
        if (i->shared) keep_segment(a, i, g, b);
        else if (!sp) merge_rows(a, b, s->n_rows, b->max, b->sum, b->out);
    }
    if (i->shared) end_shared(a, i, b);
    else if (sp) end_part(a, i, sp, b);
    else write_rows(a, i, b);
}
