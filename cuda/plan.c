/*
 * A step's attention cut into items for the card: see plan.h.
 *
 * In the order in which it happens: sequences with a common beginning are found and it is decided
 * which share it; units of rows are made, the row list with them; units are cut into pieces; slots
 * are given to pieces whose results have to be merged; items and merges are written.
 *
 * Costs are counted in tiles of 64 keys. On the card that this was thought out for, a tile of 16
 * rows (a load from memory) and one of 128 rows (a product) take about as long, so rows do not
 * count.
 */
#include "cuda/plan.h"

#include <stdio.h>
#include <string.h>

#define CHARGE 4u            /* for an item being begun and ended */
#define LEAST_PIECE 2u       /* of a unit of one token; shorter is not worth a merge */
#define LEAST_LONG_PIECE 8u  /* of more tokens, whose results are longer */
#define MEMBER_ROWS 64u      /* of a sequence that shares; beyond, its rows share loads anyhow */
#define NOBODY 0xffffffffu
#define NO_SLOT 0xffffffffu
#define NO_UNIT 0xffffffffu
#define PARTS_PER_SM 2u

static uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }
static uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
static uint32_t ceil_div(uint32_t a, uint32_t b) { return (uint32_t)kvp__ceil_div(a, b); }

/* --- bounds --- */

/* The smallest tile that takes so many rows, or the largest. */
static uint32_t tile_for(const kvp__cuda_plan *p, uint64_t rows)
{
    uint32_t t = 0;
    while (t < p->largest && KVP__ATTEND_ROWS(t) < rows) t++;
    return t;
}

/* Whole tokens of a unit. */
static uint32_t unit_tokens(const kvp__cuda_plan *p, uint32_t tile)
{
    return larger(1, KVP__ATTEND_ROWS(tile) / p->heads);
}

/* Keys of a shared piece: whole blocks. */
static uint32_t piece_keys(const kvp__cuda_plan *p)
{
    return larger(KVP__PLAN_KEYS, p->block_tokens);
}

typedef struct bounds {
    uint64_t units, pieces, items, merges, slots, depths;
} bounds;

/* What the largest step can come to. A cut adds a piece, and slots for a unit's tokens once or
 * twice. */
static void find_bounds(kvp__cuda_plan *p, const kvp__cuda_limits *l, bounds *b)
{
    uint64_t rows = l->max_rows, seqs = l->max_seqs;
    uint32_t small_tokens = unit_tokens(p, p->small), large_tokens = unit_tokens(p, p->largest);
    uint64_t row_tiles = kvp__ceil_div(p->heads, KVP__ATTEND_ROWS(p->largest));
    uint64_t own = kvp__min64(rows, seqs + rows / large_tokens);
    uint64_t shared = p->split || !p->d ? 0 : seqs / 2 + rows / large_tokens;
    uint64_t cuts = p->parts - 1;
    p->max_chain_tokens = shared ? (uint32_t)kvp__min64(rows, 4 * seqs) : 0;
    b->units = own + shared;
    b->merges = rows;
    b->depths = shared ? l->max_positions / piece_keys(p) + 1 : 0;
    uint64_t few = kvp__min64(rows, seqs); /* units of the small tile, but those that are shared */
    uint64_t most = p->split ? l->max_positions / p->split + 2 : 1; /* pieces of each of these */
    if (p->split) {
        cuts = 0;
        b->slots = kvp__min64(rows, seqs * small_tokens) * most;
    } else {
        b->slots = 2ull * p->max_chain_tokens +
                   2 * cuts * (kvp__min64(rows, small_tokens) + kvp__min64(rows, large_tokens));
    }
    b->pieces = b->units + few * (most - 1) + 2 * cuts;
    b->items = b->pieces * row_tiles;
    for (uint32_t t = p->small; t <= p->largest; t++) {
        uint64_t units = p->small < p->largest && t == p->small ? few * most + shared : b->pieces;
        p->most_items[t] = (uint32_t)kvp__min64(b->items, (units + cuts) * row_tiles);
    }
}

static uint64_t take(uint64_t *used, uint64_t count, uint64_t size)
{
    uint64_t at = *used;
    *used = kvp__round_up(at + count * size, KVP__CACHE_LINE);
    return at;
}

static void place_upload(kvp__cuda_plan *p)
{
    uint64_t used = 0;
    p->rows_at = take(&used, p->max_rows, sizeof *p->rows);
    p->items_at = take(&used, p->max_items, sizeof *p->items);
    p->merges_at = take(&used, p->max_merges, sizeof *p->merges);
    p->slots_at = take(&used, p->max_slots, sizeof *p->slots);
    p->upload_bytes = used;
}

static void place_scratch(kvp__cuda_plan *p, uint8_t *memory)
{
    uint64_t used = 0, units = take(&used, p->max_units, sizeof *p->units);
    uint64_t pieces = take(&used, p->max_pieces, sizeof *p->pieces);
    uint64_t chains = take(&used, p->max_seqs, sizeof *p->chains);
    uint64_t bucket = take(&used, p->buckets, sizeof *p->bucket);
    uint64_t depths = take(&used, p->depth_count, sizeof *p->depths);
    p->scratch_bytes = used;
    if (!memory) return;
    p->units = (kvp__unit *)(void *)(memory + units);
    p->pieces = (kvp__piece *)(void *)(memory + pieces);
    p->chains = (kvp__cuda_chain *)(void *)(memory + chains);
    p->bucket = (uint32_t *)(void *)(memory + bucket);
    p->depths = (uint32_t *)(void *)(memory + depths);
}

static kvp_status check(const kvp_layer_group *g, uint32_t group, const kvp__cuda_limits *l,
                        kvp_error *err)
{
    if (g->kv_heads == 0 || g->value_dim == KVP_DIM_NONE || g->key_dim == 0 || g->value_dim == 0)
        return kvp__fail(err, KVP_ERR_UNSUPPORTED, "group %u: the CUDA device has no attention for "
                         "%u KV heads with keys of %u and no values of their own", group,
                         g->kv_heads, g->key_dim);
    if (l->max_rows == 0 || l->max_seqs == 0 || l->split % KVP__PLAN_KEYS)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "attention for %u rows of %u sequences, cut at "
                         "%u keys", l->max_rows, l->max_seqs, l->split);
    if (l->max_positions > 1u << 31 || l->max_seqs > 1u << 30 || l->max_rows > 1u << 30)
        return kvp__fail(err, KVP_ERR_TOO_LARGE, "%u rows of %u sequences over %u positions are "
                         "beyond what the CUDA device counts", l->max_rows, l->max_seqs,
                         l->max_positions);
    return KVP_OK;
}

kvp_status kvp__cuda_plan_place(kvp__cuda_plan *p, const kvp_layer_group *g, uint32_t group,
                                const kvp__layout *layout, const kvp__cuda_limits *l,
                                kvp_error *err)
{
    kvp_status s = check(g, group, l, err);
    if (s < 0) return s;
    kvp__cuda_plan n = {.group = group, .kv_heads = g->kv_heads, .key_dim = g->key_dim,
                        .value_dim = g->value_dim, .window = g->window,
                        .block_tokens = layout->block_tokens, .k_type = layout->k_format,
                        .split = l->split, .max_rows = l->max_rows, .max_seqs = l->max_seqs};
    n.query_heads = g->query_heads ? g->query_heads : g->kv_heads;
    n.heads = n.query_heads / n.kv_heads;
    n.d = kvp__attend_class(g->key_dim, g->value_dim, layout->k_format, layout->v_format);
    n.largest = n.d ? KVP__ATTEND_MOST_TILE(n.d) : 0;
    n.small = tile_for(&n, n.heads);
    n.parts = (uint32_t)kvp__max64(1, kvp__ceil_div((uint64_t)l->sms * PARTS_PER_SM, n.kv_heads));
    bounds b;
    find_bounds(&n, l, &b);
    uint64_t grid = kvp__max64(b.items * n.kv_heads, b.merges * n.query_heads);
    if (grid > INT32_MAX || b.slots > INT32_MAX || b.pieces > INT32_MAX)
        return kvp__fail(err, KVP_ERR_TOO_LARGE, "group %u: attention of %u rows over %u positions "
                         "would be cut into %llu pieces", group, l->max_rows, l->max_positions,
                         (unsigned long long)b.pieces);
    n.max_units = (uint32_t)b.units;
    n.max_pieces = (uint32_t)b.pieces;
    n.max_items = (uint32_t)b.items;
    n.max_merges = (uint32_t)b.merges;
    n.max_slots = (uint32_t)b.slots;
    n.depth_count = (uint32_t)b.depths;
    for (n.buckets = 2; n.buckets / 2 < l->max_seqs;) n.buckets *= 2;
    place_upload(&n);
    place_scratch(&n, NULL);
    *p = n;
    return KVP_OK;
}

void kvp__cuda_plan_use(kvp__cuda_plan *p, void *upload, void *scratch)
{
    uint8_t *u = upload;
    p->rows = (uint32_t *)(void *)(u + p->rows_at);
    p->items = (kvp__cuda_item *)(void *)(u + p->items_at);
    p->merges = (kvp__cuda_merge *)(void *)(u + p->merges_at);
    p->slots = (uint32_t *)(void *)(u + p->slots_at);
    place_scratch(p, scratch);
}

/* --- shared prefixes --- */

static uint32_t first_key(const kvp__cuda_plan *p, uint32_t position)
{
    return p->window && position >= p->window ? position + 1 - p->window : 0;
}

static uint32_t last_position(const kvp__work_seq *s) { return s->first_pos + s->n_rows - 1; }

/* Whole pieces before the sequence's rows. */
static uint32_t whole_pieces(const kvp__cuda_plan *p, const kvp__work_seq *s)
{
    return s->first_pos / piece_keys(p);
}

static bool may_share(const kvp__cuda_plan *p, const kvp__work_seq *s)
{
    return s->n_rows && (uint64_t)s->n_rows * p->heads <= larger(MEMBER_ROWS, p->heads) &&
           whole_pieces(p, s) > 0;
}

static uint32_t common_pieces(const kvp__cuda_plan *p, const kvp__work_seq *a,
                              const kvp__work_seq *b)
{
    uint32_t most = smaller(whole_pieces(p, a), whole_pieces(p, b)), n = 0;
    size_t blocks = piece_keys(p) / p->block_tokens;
    const uint32_t *x = a->tables[p->group], *y = b->tables[p->group];
    while (n < most && memcmp(x + n * blocks, y + n * blocks, blocks * sizeof *x) == 0) n++;
    return n;
}

/* Sequences with the same first block become a chain, under the first of them. */
static void make_chains(kvp__cuda_plan *p, const kvp__work *work)
{
    memset(p->bucket, 0, p->buckets * sizeof *p->bucket);
    for (uint32_t s = 0; s < work->n_seqs; s++) {
        const kvp__work_seq *seq = &work->seqs[s];
        kvp__cuda_chain *c = &p->chains[s];
        *c = (kvp__cuda_chain){.next = NOBODY, .last = s, .first = NOBODY};
        if (p->max_chain_tokens == 0 || !may_share(p, seq)) continue;
        uint32_t block = seq->tables[p->group][0], b = (block * 2654435761u) & (p->buckets - 1);
        while (p->bucket[b] && work->seqs[p->bucket[b] - 1].tables[p->group][0] != block)
            b = (b + 1) & (p->buckets - 1);
        if (p->bucket[b]) {
            kvp__cuda_chain *first = &p->chains[p->bucket[b] - 1];
            p->chains[first->last].next = s;
            first->last = s;
        } else {
            p->bucket[b] = s + 1;
        }
        c->first = p->bucket[b] - 1;
    }
}

/* The depth that saves most: (sequences that have so much in common, but one) x depth. */
static uint32_t best_depth(kvp__cuda_plan *p, const kvp__work *work, uint32_t first)
{
    uint32_t deepest = whole_pieces(p, &work->seqs[first]), best = 0, n = 0;
    uint64_t most = 0;
    memset(p->depths, 0, (deepest + 1ull) * sizeof *p->depths);
    for (uint32_t s = first; s != NOBODY; s = p->chains[s].next) {
        p->chains[s].common = common_pieces(p, &work->seqs[first], &work->seqs[s]);
        p->depths[p->chains[s].common]++;
    }
    for (uint32_t d = deepest; d > 0; d--) {
        n += p->depths[d];
        if (n > 1 && (uint64_t)(n - 1) * d > most) {
            most = (uint64_t)(n - 1) * d;
            best = d;
        }
    }
    return best;
}

/* Who shares what: the members' rows, as far as there are slots, and the range of keys, read
 * through the table of the member that sees furthest back, which has all of its blocks. */
typedef struct sharing {
    uint32_t members, tokens, most_rows, begin, end, seq;
} sharing;

static sharing gather_members(kvp__cuda_plan *p, const kvp__work *work, uint32_t first)
{
    uint32_t depth = best_depth(p, work, first), room = p->max_chain_tokens - p->chain_tokens;
    sharing s = {.end = depth * piece_keys(p), .begin = NOBODY};
    for (uint32_t i = first; i != NOBODY; i = p->chains[i].next) {
        const kvp__work_seq *q = &work->seqs[i];
        uint32_t begin = first_key(p, q->first_pos);
        p->chains[i].member = depth && p->chains[i].common >= depth &&
                              first_key(p, last_position(q)) < s.end &&
                              q->n_rows <= room - s.tokens;
        if (!p->chains[i].member) continue;
        s.members++;
        s.tokens += q->n_rows;
        if (begin < s.begin) {
            s.begin = begin;
            s.seq = i;
        }
    }
    return s;
}

/* Whether fewer loads make up for more items and merges. */
static bool pays(const kvp__cuda_plan *p, const sharing *s)
{
    if (s->members < 2) return false;
    uint32_t tile = tile_for(p, (uint64_t)s->tokens * p->heads);
    uint64_t units = ceil_div(s->tokens, unit_tokens(p, tile));
    uint64_t depth = ceil_div(s->end, KVP__PLAN_KEYS) - s->begin / KVP__PLAN_KEYS;
    return s->members > units &&
           (s->members - units) * depth * 2 > units * CHARGE * 2 + s->members;
}

/* Marks the members of every chain that pays. The greatest tile that is needed. */
static uint32_t find_sharing(kvp__cuda_plan *p, const kvp__work *work)
{
    uint32_t tile = 0;
    p->chain_tokens = 0;
    make_chains(p, work);
    for (uint32_t i = 0; i < work->n_seqs; i++) {
        if (p->chains[i].first != i || p->chains[i].next == NOBODY) continue;
        sharing s = gather_members(p, work, i);
        if (pays(p, &s)) {
            p->chains[i].depth = s.end / piece_keys(p);
            p->chain_tokens += s.tokens;
            tile = larger(tile, tile_for(p, (uint64_t)s.tokens * p->heads));
        } else {
            for (uint32_t m = i; m != NOBODY; m = p->chains[m].next) p->chains[m].member = 0;
        }
    }
    return tile;
}

/* --- units --- */

static kvp__unit *add_unit(kvp__cuda_plan *p, uint32_t tile, const kvp__unit *like)
{
    kvp__unit *u = &p->units[p->n_units++];
    *u = *like;
    u->tile = tile;
    u->row_tiles = ceil_div(u->n_tokens * p->heads, KVP__ATTEND_ROWS(tile));
    u->slot = NO_SLOT;
    u->n_pieces = 0;
    return u;
}

/* A sequence's rows that lie in the row list from `token` on, against all keys from `begin` on. */
static void add_own(kvp__cuda_plan *p, const kvp__work *work, uint32_t seq, uint32_t large,
                    uint32_t token, uint32_t begin, uint32_t behind)
{
    const kvp__work_seq *s = &work->seqs[seq];
    uint32_t tile = tile_for(p, (uint64_t)s->n_rows * p->heads);
    if (tile > p->small) tile = large;
    uint32_t each = unit_tokens(p, tile);
    kvp__unit u = {.seq = seq, .few = s->n_rows <= unit_tokens(p, p->small), .behind = behind,
                   .behind_token = behind == NO_UNIT ? 0 : p->units[behind].first_token};
    for (uint32_t done = 0; done < s->n_rows; done += each) {
        u.first_token = token + done;
        u.n_tokens = smaller(each, s->n_rows - done);
        u.begin = larger(begin, first_key(p, s->first_pos + done));
        u.end = s->first_pos + done + u.n_tokens;
        (void)add_unit(p, tile, &u);
    }
}

static uint32_t list_rows(kvp__cuda_plan *p, const kvp__work_seq *s)
{
    uint32_t token = p->n_rows;
    for (uint32_t r = 0; r < s->n_rows; r++) p->rows[p->n_rows++] = s->first_row + r;
    return token;
}

/* The units of a chain whose sharing pays: those of the prefix, then the members' own. */
static void add_chain(kvp__cuda_plan *p, const kvp__work *work, uint32_t first, uint32_t large)
{
    uint32_t end = p->chains[first].depth * piece_keys(p), token = p->n_rows, begin = NOBODY;
    kvp__unit u = {.shared = 1, .behind = NO_UNIT, .end = end};
    for (uint32_t m = first; m != NOBODY; m = p->chains[m].next) {
        if (!p->chains[m].member) continue;
        (void)list_rows(p, &work->seqs[m]);
        if (first_key(p, work->seqs[m].first_pos) < begin) {
            begin = first_key(p, work->seqs[m].first_pos);
            u.seq = m;
        }
    }
    uint32_t tokens = p->n_rows - token, behind = p->n_units;
    uint32_t tile = tile_for(p, (uint64_t)tokens * p->heads);
    if (tile > p->small) tile = large;
    u.begin = begin;
    for (uint32_t done = 0, each = unit_tokens(p, tile); done < tokens; done += each) {
        u.first_token = token + done;
        u.n_tokens = smaller(each, tokens - done);
        (void)add_unit(p, tile, &u);
    }
    for (uint32_t m = first; m != NOBODY; m = p->chains[m].next) {
        if (!p->chains[m].member) continue;
        add_own(p, work, m, large, token, end, behind);
        token += work->seqs[m].n_rows;
    }
}

static void make_units(kvp__cuda_plan *p, const kvp__work *work)
{
    uint32_t large = find_sharing(p, work);
    for (uint32_t i = 0; i < work->n_seqs; i++)
        large = larger(large, tile_for(p, (uint64_t)work->seqs[i].n_rows * p->heads));
    if (p->split) large = p->largest;
    p->n_rows = p->n_units = 0;
    for (uint32_t i = 0; i < work->n_seqs; i++) {
        if (p->chains[i].depth) add_chain(p, work, i, large);
        if (p->chains[i].member) continue;
        uint32_t token = list_rows(p, &work->seqs[i]);
        add_own(p, work, i, large, token, 0, NO_UNIT);
    }
}

/* --- pieces --- */

static uint32_t first_tile(const kvp__unit *u) { return u->begin / KVP__PLAN_KEYS; }
static uint32_t end_tile(const kvp__unit *u) { return ceil_div(u->end, KVP__PLAN_KEYS); }
static uint64_t cost(const kvp__unit *u, uint32_t tiles) { return (uint64_t)tiles * u->row_tiles; }

/* The present part's room, and how many parts there are with it. */
typedef struct sharing_out {
    uint64_t part, room;
    uint32_t parts_left;
} sharing_out;

static void next_part(sharing_out *o)
{
    o->room = o->part;
    o->parts_left--;
}

static bool has_parts(const kvp__unit *u)
{
    return u->shared || u->behind != NO_UNIT || u->n_pieces > 1;
}

static void add_piece(kvp__cuda_plan *p, uint32_t unit, uint32_t begin, uint32_t end)
{
    p->pieces[p->n_pieces++] = (kvp__piece){.unit = unit, .begin = begin, .end = end};
    p->units[unit].n_pieces++;
}

static bool may_cut(const kvp__unit *u, const sharing_out *o)
{
    return u->n_tokens == 1 || cost(u, end_tile(u) - first_tile(u)) + CHARGE > o->part;
}

/* The unit's pieces: what is left of the present part, then whole parts. */
static void share_out(kvp__cuda_plan *p, uint32_t unit, sharing_out *o)
{
    const kvp__unit *u = &p->units[unit];
    uint32_t at = first_tile(u), end = end_tile(u);
    uint32_t least = u->n_tokens == 1 ? LEAST_PIECE : LEAST_LONG_PIECE;
    for (;;) {
        uint64_t rest = cost(u, end - at) + CHARGE;
        if (rest <= o->room || o->parts_left == 1 || end - at < 2 * least || !may_cut(u, o)) {
            add_piece(p, unit, at, end);
            o->room = o->room > rest ? o->room - rest : 0;
            return;
        }
        uint64_t fits = o->room > CHARGE ? (o->room - CHARGE) / u->row_tiles : 0;
        if (fits < least && o->room < o->part) {
            next_part(o);
            continue;
        }
        uint32_t n = (uint32_t)kvp__min64(kvp__max64(fits, least), end - at - least);
        add_piece(p, unit, at, at + n);
        at += n;
        next_part(o);
    }
}

/* Pieces of equal cost for a tile's units. */
static void cut_by_cost(kvp__cuda_plan *p, uint32_t tile)
{
    uint64_t total = 0;
    for (uint32_t i = 0; i < p->n_units; i++)
        if (p->units[i].tile == tile)
            total += cost(&p->units[i], end_tile(&p->units[i]) - first_tile(&p->units[i])) + CHARGE;
    sharing_out o = {.part = kvp__ceil_div(total, p->parts) + CHARGE, .parts_left = p->parts};
    o.room = o.part;
    for (uint32_t i = 0; i < p->n_units; i++)
        if (p->units[i].tile == tile) share_out(p, i, &o);
}

/* Pieces of a fixed length for units of few rows, counted from key 0. */
static void cut_by_length(kvp__cuda_plan *p, uint32_t unit)
{
    const kvp__unit *u = &p->units[unit];
    uint32_t at = first_tile(u), end = end_tile(u), length = p->split / KVP__PLAN_KEYS;
    while (u->few && at / length < (end - 1) / length) {
        uint32_t to = (at / length + 1) * length;
        add_piece(p, unit, at, to);
        at = to;
    }
    add_piece(p, unit, at, end);
}

static void make_pieces(kvp__cuda_plan *p)
{
    p->n_pieces = 0;
    for (uint32_t t = 0; t < KVP__ATTEND_TILES && !p->split; t++) cut_by_cost(p, t);
    for (uint32_t i = 0; i < p->n_units && p->split; i++) cut_by_length(p, i);
}

/* Results of a unit that are only parts: token i's of piece n lie in slot + n * n_tokens + i. */
static void give_slots(kvp__cuda_plan *p)
{
    p->n_slots = 0;
    for (uint32_t i = 0; i < p->n_pieces; i++) {
        kvp__piece *x = &p->pieces[i];
        kvp__unit *u = &p->units[x->unit];
        x->slot = NO_SLOT;
        if (!has_parts(u)) continue;
        x->slot = p->n_slots;
        if (u->slot == NO_SLOT) u->slot = x->slot;
        p->n_slots += u->n_tokens;
    }
}

/* --- items and merges --- */

#define LENGTHS 256u /* that are told apart when items are ordered */

static uint32_t length_rank(const kvp__piece *x, uint32_t longest)
{
    return (uint32_t)((uint64_t)(longest - (x->end - x->begin)) * (LENGTHS - 1) /
                      larger(longest, 1));
}

static uint32_t write_item(const kvp__cuda_plan *p, const kvp__piece *x, uint32_t at)
{
    const kvp__unit *u = &p->units[x->unit];
    kvp__cuda_item item = {.seq = u->seq, .first_token = u->first_token, .n_tokens = u->n_tokens,
                           .slot = x->slot == NO_SLOT ? -1 : (int32_t)x->slot};
    item.kv_begin = x->begin == first_tile(u) ? u->begin : x->begin * KVP__PLAN_KEYS;
    item.kv_end = x->end == end_tile(u) ? u->end : x->end * KVP__PLAN_KEYS;
    for (uint32_t i = 0; i < u->row_tiles; i++) {
        item.first_row = i * KVP__ATTEND_ROWS(u->tile);
        p->items[at++] = item;
    }
    return at;
}

/* A tile's items from long to short, those of about one length as they come: a counting sort. */
static uint32_t write_items(kvp__cuda_plan *p, uint32_t tile, uint32_t first)
{
    uint32_t at[LENGTHS + 1] = {0}, longest = 0;
    for (uint32_t i = 0; i < p->n_pieces; i++)
        if (p->units[p->pieces[i].unit].tile == tile)
            longest = larger(longest, p->pieces[i].end - p->pieces[i].begin);
    for (uint32_t i = 0; i < p->n_pieces; i++) {
        const kvp__unit *u = &p->units[p->pieces[i].unit];
        if (u->tile == tile) at[length_rank(&p->pieces[i], longest) + 1] += u->row_tiles;
    }
    at[0] = first;
    for (uint32_t i = 0; i < LENGTHS; i++) at[i + 1] += at[i];
    for (uint32_t i = 0; i < p->n_pieces; i++) {
        if (p->units[p->pieces[i].unit].tile != tile) continue;
        uint32_t *to = &at[length_rank(&p->pieces[i], longest)];
        *to = write_item(p, &p->pieces[i], *to);
    }
    return at[LENGTHS] - first;
}

static void list_slots(kvp__cuda_plan *p, const kvp__unit *u, uint32_t token, uint32_t *n)
{
    for (uint32_t i = 0; i < u->n_pieces; i++)
        p->slots[(*n)++] = u->slot + i * u->n_tokens + (token - u->first_token);
}

/* The shared unit that a token behind a shared prefix is in: they are of equal length, but the
 * last. */
static const kvp__unit *shared_unit(const kvp__cuda_plan *p, const kvp__unit *u, uint32_t token)
{
    const kvp__unit *first = &p->units[u->behind];
    return first + (token - u->behind_token) / first->n_tokens;
}

static void write_merges(kvp__cuda_plan *p)
{
    uint32_t n = 0;
    p->n_merges = 0;
    for (uint32_t i = 0; i < p->n_units; i++) {
        const kvp__unit *u = &p->units[i];
        if (u->shared || !has_parts(u)) continue;
        for (uint32_t t = u->first_token; t < u->first_token + u->n_tokens; t++) {
            kvp__cuda_merge *m = &p->merges[p->n_merges++];
            m->row = p->rows[t];
            m->first = n;
            if (u->behind != NO_UNIT) list_slots(p, shared_unit(p, u, t), t, &n);
            list_slots(p, u, t, &n);
            m->count = n - m->first;
        }
    }
}

void kvp__cuda_plan_make(kvp__cuda_plan *p, const kvp__work *work)
{
    make_units(p, work);
    make_pieces(p);
    give_slots(p);
    uint32_t n = 0;
    p->tiles = 0;
    for (uint32_t t = 0; t < KVP__ATTEND_TILES; t++) {
        p->n_items[t] = write_items(p, t, n);
        n += p->n_items[t];
        if (p->n_items[t]) p->tiles |= 1u << t;
    }
    write_merges(p);
}

void kvp__cuda_plan_counts(const kvp__cuda_plan *p, kvp__cuda_step *step)
{
    memcpy(step->n_items[p->group], p->n_items, sizeof p->n_items);
    step->n_merges[p->group] = p->n_merges;
}

const char *kvp__cuda_plan_kernel(const kvp__cuda_plan *p, uint32_t t, char name[KVP__KERNEL_NAME])
{
    if (p->d)
        snprintf(name, KVP__KERNEL_NAME, "attention_%s_d%u_r%u",
                 p->k_type == KVP__EL_BF16 ? "bf16" : "f16", p->d, KVP__ATTEND_ROWS(t));
    else
        snprintf(name, KVP__KERNEL_NAME, "attention_any");
    return name;
}
