/*
 * The list of a step's attention items: how rows x keys are cut. See attend.h.
 *
 * Sequences that decode over the same blocks attend to them together (a cascade): the whole segments
 * of 256 keys that their tables have in common are read once for all of them, and what each has of
 * its own is an item of its own. Nobody has to tell: equal block ids at the beginning of two tables
 * are all there is to see. Merging segments from left to right is what every row does anyway, so a
 * shared prefix shows in no bit.
 */
#include "cpu/attend.h"

#include <string.h>

#define LEAST_ROWS 6u              /* below, a tile of keys is loaded for too few rows */
#define ITEM_COST (128u << 10)     /* rows x keys at a head size of 64: about half a millisecond */
#define PART_COST 2048u            /* not worth sharing below */
#define PARTS_PER_THREAD 3u
#define SLOTS_PER_SEQUENCE 4u      /* and head, for what is behind a shared prefix */
#define NOBODY 0xffffffffu

static uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* --- the memory of a list --- */

static uint32_t heads_per_item(uint32_t group, uint32_t *n_parts)
{
    *n_parts = (group + KVP__ITEM_ROWS - 1) / KVP__ITEM_ROWS;
    return (group + *n_parts - 1) / *n_parts;
}

static uint32_t segments_of(uint32_t positions) { return positions / KVP__SEGMENT + 1; }

/* Room to split a few tokens at full depth, and for every sequence behind a shared prefix; where more
 * would be needed, items stay whole or are not shared. */
static uint64_t slots_for(const kvp_layer_group *g, const kvp__items_limits *l)
{
    return (uint64_t)g->query_heads *
           (4ull * segments_of(l->max_positions) + (uint64_t)SLOTS_PER_SEQUENCE * l->max_seqs);
}

static void *place(uint8_t *memory, uint64_t *used, uint64_t count, uint64_t size)
{
    void *p = memory ? memory + *used : NULL;
    *used = kvp__round_up(*used + count * size, KVP__CACHE_LINE);
    return p;
}

uint64_t kvp__items_place(kvp__items *it, const kvp_layer_group *g, uint32_t group,
                          uint32_t block_tokens, const kvp__items_limits *l, void *memory)
{
    uint32_t parts, few = 16 + PARTS_PER_THREAD * l->threads;
    memset(it, 0, sizeof *it);
    it->group = group;
    it->query_heads = g->query_heads;
    it->kv_heads = g->kv_heads;
    it->key_dim = g->key_dim;
    it->value_dim = g->value_dim;
    it->window = g->window;
    it->block_tokens = block_tokens;
    (void)heads_per_item(it->query_heads / it->kv_heads, &parts);
    uint64_t heads = (uint64_t)it->kv_heads * parts;
    it->max_more = 8 * few;
    it->max_splits = few + heads * l->max_seqs;
    it->max_slots = slots_for(g, l);
    for (it->buckets = 2; it->buckets / 2 < l->max_seqs;) it->buckets *= 2;
    uint64_t used = 0, rows = (uint64_t)l->max_rows + l->max_seqs;
    it->list = place(memory, &used, rows * heads + it->max_more, sizeof *it->list);
    it->splits = place(memory, &used, it->max_splits, sizeof *it->splits);
    it->members = place(memory, &used, l->max_seqs, sizeof *it->members);
    it->chains = place(memory, &used, l->max_seqs, sizeof *it->chains);
    it->bucket = place(memory, &used, it->buckets, sizeof *it->bucket);
    it->depths = place(memory, &used, segments_of(l->max_positions) + 1ull, sizeof *it->depths);
    return used;
}

/* --- costs --- */

static uint32_t first_key(const kvp__items *it, uint32_t position)
{
    return kvp__first_key(it->window, position);
}

static uint64_t most_cost(const kvp__items *it)
{
    return (uint64_t)ITEM_COST * 64 / (it->key_dim > it->value_dim ? it->key_dim : it->value_dim);
}

/* The tokens of an item that begins at a position: so many that its cost stays small enough for a
 * host's time budget, but enough rows to share the loads. */
static uint32_t tokens_per_item(const kvp__items *it, uint32_t heads, uint32_t position)
{
    uint64_t keys = position + 1 - first_key(it, position) + KVP__TILE;
    uint64_t rows = most_cost(it) / keys;
    if (rows > KVP__ITEM_ROWS) rows = KVP__ITEM_ROWS;
    if (rows < LEAST_ROWS) rows = LEAST_ROWS;
    uint32_t tokens = (uint32_t)rows / heads;
    return tokens ? tokens : 1;
}

/* Into how many parts `rows` x `segments` are cut for items of about `target`. */
static uint32_t parts_of(uint32_t rows, uint32_t segments, uint64_t target)
{
    uint64_t parts = ((uint64_t)rows * segments * KVP__SEGMENT + target - 1) / target;
    return (uint32_t)kvp__min64(parts, segments);
}

/* --- items --- */

/* The items of `one` (whose segments are all there are) in `parts` parts. */
static void add_parts(kvp__items *it, const kvp__item *one, uint32_t parts)
{
    uint32_t segments = one->end_segment - one->first_segment;
    for (uint64_t p = 0; p < parts; p++) {
        kvp__item *i = &it->list[it->n++];
        *i = *one;
        i->first_segment = one->first_segment + (uint32_t)(segments * p / parts);
        i->end_segment = one->first_segment + (uint32_t)(segments * (p + 1) / parts);
    }
    it->more += parts - 1;
}

/* A split with room for the results of segments `first` to `end` - 1. */
static uint32_t add_split(kvp__items *it, uint32_t rows, uint32_t first, uint32_t end,
                          uint32_t n_items)
{
    kvp__split *sp = &it->splits[it->n_splits];
    atomic_store_explicit(&sp->left, n_items, memory_order_relaxed);
    sp->n_items = n_items;
    sp->first_segment = first;
    sp->end_segment = end;
    sp->slot = it->used_slots;
    it->used_slots += (uint64_t)(end - first) * rows;
    return it->n_splits++;
}

/* Rows of one sequence against all that they see: whole, or in parts if there is room for it. */
static void add_item(kvp__items *it, kvp__item *one, uint64_t target)
{
    uint32_t rows = one->n_tokens * one->n_heads, segments = one->end_segment - one->first_segment;
    uint32_t parts = parts_of(rows, segments, target);
    if (parts < 2 || it->n_splits == it->max_splits || parts > it->max_more - it->more ||
        it->used_slots + (uint64_t)segments * rows > it->max_slots) {
        it->list[it->n++] = *one;
        return;
    }
    one->split = add_split(it, rows, one->first_segment, one->end_segment, parts);
    add_parts(it, one, parts);
}

/* Query heads of part `h` of kv_heads x parts. */
static void set_heads(const kvp__items *it, kvp__item *i, uint32_t h)
{
    uint32_t group = it->query_heads / it->kv_heads, parts, heads = heads_per_item(group, &parts);
    uint32_t begin = h % parts * heads, end = smaller(begin + heads, group);
    i->kv_head = h / parts;
    i->first_head = i->kv_head * group + begin;
    i->n_heads = end - begin;
}

static uint32_t head_parts(const kvp__items *it)
{
    uint32_t parts;
    (void)heads_per_item(it->query_heads / it->kv_heads, &parts);
    return it->kv_heads * parts;
}

static void add_sequence(kvp__items *it, const kvp__work *work, uint32_t seq, uint64_t target)
{
    const kvp__work_seq *s = &work->seqs[seq];
    uint32_t parts, heads = heads_per_item(it->query_heads / it->kv_heads, &parts);
    for (uint32_t done = 0, n; done < s->n_rows; done += n) {
        n = smaller(tokens_per_item(it, heads, s->first_pos + done), s->n_rows - done);
        uint32_t first = first_key(it, s->first_pos + done), last = s->first_pos + done + n - 1;
        for (uint32_t h = 0; h < it->kv_heads * parts; h++) {
            kvp__item i = {.seq = seq, .row = s->first_row + done, .n_tokens = n,
                           .first_segment = first / KVP__SEGMENT,
                           .end_segment = last / KVP__SEGMENT + 1, .split = KVP__NO_SPLIT};
            set_heads(it, &i, h);
            add_item(it, &i, target);
        }
    }
}

/* --- shared prefixes --- */

/* Segments that are whole before the sequence's row. */
static uint32_t whole_segments(const kvp__work_seq *s) { return s->first_pos / KVP__SEGMENT; }

/* Whole segments at the beginning that lie in the same blocks. */
static uint32_t common_segments(const kvp__items *it, const kvp__work_seq *a,
                                const kvp__work_seq *b)
{
    uint32_t most = smaller(whole_segments(a), whole_segments(b));
    size_t blocks = KVP__SEGMENT / it->block_tokens, n = 0;
    const uint32_t *x = a->tables[it->group], *y = b->tables[it->group];
    while (n < most && memcmp(x + n * blocks, y + n * blocks, blocks * sizeof *x) == 0) n++;
    return (uint32_t)n;
}

/* Sequences with one row and the same first block become a chain, under the first of them. */
static void make_chains(kvp__items *it, const kvp__work *work)
{
    memset(it->bucket, 0, it->buckets * sizeof *it->bucket);
    for (uint32_t s = 0; s < work->n_seqs; s++) {
        const kvp__work_seq *seq = &work->seqs[s];
        kvp__chain *c = &it->chains[s];
        *c = (kvp__chain){.next = NOBODY, .last = s, .first = NOBODY};
        if (seq->n_rows != 1 || whole_segments(seq) == 0) continue;
        uint32_t block = seq->tables[it->group][0], b = (block * 2654435761u) & (it->buckets - 1);
        while (it->bucket[b] && work->seqs[it->bucket[b] - 1].tables[it->group][0] != block)
            b = (b + 1) & (it->buckets - 1);
        if (it->bucket[b]) {
            kvp__chain *first = &it->chains[it->bucket[b] - 1];
            it->chains[first->last].next = s;
            first->last = s;
        } else {
            it->bucket[b] = s + 1;
        }
        c->first = it->bucket[b] - 1;
    }
}

/* The depth in segments that saves most: (sequences that share so much, but one) x depth. */
static uint32_t best_depth(kvp__items *it, const kvp__work *work, uint32_t first)
{
    uint32_t deepest = whole_segments(&work->seqs[first]), best = 0, n = 0;
    uint64_t most = 0;
    memset(it->depths, 0, (deepest + 1ull) * sizeof *it->depths);
    for (uint32_t s = first; s != NOBODY; s = it->chains[s].next) {
        it->chains[s].common = common_segments(it, &work->seqs[first], &work->seqs[s]);
        it->depths[it->chains[s].common]++;
    }
    for (uint32_t d = deepest; d > 0; d--) {
        n += it->depths[d];
        if (n > 1 && (uint64_t)(n - 1) * d > most) {
            most = (uint64_t)(n - 1) * d;
            best = d;
        }
    }
    return best;
}

/* Members by position, as a segment's rows have to be. Mostly they are in order already. */
static void sort_members(uint32_t *m, uint32_t n, const kvp__work *work)
{
    for (uint32_t gap = n / 2; gap; gap /= 2)
        for (uint32_t i = gap; i < n; i++)
            for (uint32_t j = i; j >= gap && work->seqs[m[j - gap]].first_pos >
                                                 work->seqs[m[j]].first_pos;
                 j -= gap) {
                uint32_t t = m[j];
                m[j] = m[j - gap];
                m[j - gap] = t;
            }
}

/* Those of a chain that have `depth` segments in common and see some of them. */
static uint32_t gather_members(const kvp__items *it, const kvp__work *work, uint32_t first,
                               uint32_t depth)
{
    uint32_t n = 0, *members = it->members + it->n_members;
    for (uint32_t s = first; s != NOBODY; s = it->chains[s].next)
        if (it->chains[s].common >= depth &&
            first_key(it, work->seqs[s].first_pos) / KVP__SEGMENT < depth)
            members[n++] = s;
    sort_members(members, n, work);
    return n;
}

/* How a prefix is shared: members [first, first + n) x segments [begin, end) in `ranges` ranges, of
 * which the first ends before `kept`. */
typedef struct share {
    uint32_t first, n, begin, end, ranges, kept;
    uint64_t target;
} share;

static uint32_t own_parts(const kvp__work_seq *q, const share *s, uint32_t heads)
{
    return parts_of(heads, q->first_pos / KVP__SEGMENT + 1 - s->end, s->target);
}

static bool has_room(const kvp__items *it, const kvp__work *work, const share *s)
{
    uint32_t parts, heads = heads_per_item(it->query_heads / it->kv_heads, &parts);
    uint32_t each = KVP__ITEM_ROWS / heads;
    uint64_t slots = 0, n = head_parts(it);
    uint64_t more = (uint64_t)((s->n + each - 1) / each) * (s->ranges - 1);
    for (uint32_t m = 0; m < s->n; m++) {
        const kvp__work_seq *q = &work->seqs[it->members[s->first + m]];
        slots += q->first_pos / KVP__SEGMENT + 2 - s->kept;
        more += own_parts(q, s, heads) - 1;
    }
    return it->n_splits + s->n * n <= it->max_splits && it->more + more * n <= it->max_more &&
           it->used_slots + slots * it->query_heads <= it->max_slots;
}

/* One KV head's part: a split for each member, the shared items, and the members' own. */
static void add_share(kvp__items *it, const kvp__work *work, const share *s, uint32_t h)
{
    kvp__item i = {.seq = it->members[s->first], .shared = 1, .first_segment = s->begin,
                   .end_segment = s->end, .split = it->n_splits};
    set_heads(it, &i, h);
    for (uint32_t m = 0; m < s->n; m++) {
        const kvp__work_seq *q = &work->seqs[it->members[s->first + m]];
        /* All that lies before `kept` is merged already: the slot of the segment before. */
        (void)add_split(it, i.n_heads, s->kept - 1, q->first_pos / KVP__SEGMENT + 1,
                        s->ranges + own_parts(q, s, i.n_heads));
    }
    uint32_t each = KVP__ITEM_ROWS / i.n_heads, chunks = (s->n + each - 1) / each;
    for (uint32_t c = 0; c < chunks; c++) {
        kvp__item part = i;
        uint32_t from = (uint32_t)((uint64_t)s->n * c / chunks);
        part.row = s->first + from;
        part.n_tokens = (uint32_t)((uint64_t)s->n * (c + 1) / chunks) - from;
        part.split = i.split + from;
        add_parts(it, &part, s->ranges);
    }
    for (uint32_t m = 0; m < s->n; m++) {
        const kvp__work_seq *q = &work->seqs[it->members[s->first + m]];
        kvp__item own = i;
        own.seq = it->members[s->first + m];
        own.shared = 0;
        own.row = q->first_row;
        own.n_tokens = 1;
        own.split = i.split + m;
        own.first_segment = s->end;
        own.end_segment = q->first_pos / KVP__SEGMENT + 1;
        add_parts(it, &own, own_parts(q, s, i.n_heads));
    }
}

static void share_chain(kvp__items *it, const kvp__work *work, uint32_t first, uint64_t target)
{
    share s = {.first = it->n_members, .end = best_depth(it, work, first), .target = target};
    if (s.end == 0) return;
    s.n = gather_members(it, work, first, s.end);
    if (s.n < 2) return;
    uint32_t parts, heads = heads_per_item(it->query_heads / it->kv_heads, &parts);
    uint32_t rows = smaller(s.n, KVP__ITEM_ROWS / heads) * heads;
    s.begin = first_key(it, work->seqs[it->members[s.first]].first_pos) / KVP__SEGMENT;
    s.ranges = parts_of(rows, s.end - s.begin, target);
    /* Fewer ranges need less room; items then take longer than they should, but read the prefix once. */
    for (;; s.ranges = (s.ranges + 1) / 2) {
        s.kept = s.begin + (s.end - s.begin) / s.ranges;
        if (has_room(it, work, &s)) break;
        if (s.ranges == 1) return;
    }
    it->n_members += s.n;
    for (uint32_t m = 0; m < s.n; m++) it->chains[it->members[s.first + m]].shared = true;
    for (uint32_t h = 0; h < head_parts(it); h++) add_share(it, work, &s, h);
}

/* --- a step --- */

static uint64_t seq_cost(const kvp__items *it, const kvp__work_seq *s)
{
    uint32_t last = s->first_pos + s->n_rows - 1;
    uint64_t keys = last + 1 - first_key(it, s->first_pos + s->n_rows / 2);
    return keys * s->n_rows * it->query_heads;
}

void kvp__items_make(kvp__items *it, const kvp__work *work, uint32_t threads)
{
    it->n = it->n_splits = it->more = it->n_members = 0;
    it->used_slots = 0;
    uint64_t total = 0;
    for (uint32_t i = 0; i < work->n_seqs; i++) total += seq_cost(it, &work->seqs[i]);
    uint64_t target = total / (threads * PARTS_PER_THREAD) + 1;
    if (target > most_cost(it)) target = most_cost(it);
    if (target < PART_COST) target = PART_COST;
    make_chains(it, work);
    for (uint32_t i = 0; i < work->n_seqs; i++)
        if (it->chains[i].first == i && it->chains[i].next != NOBODY)
            share_chain(it, work, i, target);
    for (uint32_t i = 0; i < work->n_seqs; i++)
        if (!it->chains[i].shared) add_sequence(it, work, i, target);
}
