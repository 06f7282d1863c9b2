/*
 * Block tables: attach, fork, reserve, commit, truncate, release. See seq.h.
 *
 * Writing is safe because of one test, made in reserve for the block that `computed` lies in (later
 * blocks are fresh): nobody else holds it, apart from copies of what comes before `computed` (they
 * are made before anything is stored, and can still be undone), and no published token at or beyond
 * `computed` is in it. A prefix that only this sequence holds and that nobody builds on is cut down
 * to make that so; otherwise the live tokens move to a fresh block and the old one stays as it is
 * for the others and for the cache.
 *
 * Publishing keeps the leading full blocks of every table canonical: where an equal full node
 * exists already, the table takes that block and gives its own back. So whoever holds a node holds
 * all its ancestors, and two sequences with the same prompt hold one copy of it after the step in
 * which both computed it.
 */
#include "seq/seq.h"

#include "seq/tokens.h"

#include <string.h>

static uint32_t blocks_for(const kvp__seq *s, uint32_t tokens)
{
    return (uint32_t)(((uint64_t)tokens + s->pool->block_tokens - 1) >> s->pool->block_shift);
}

static kvp__block *record(const kvp__seq *s, uint32_t g, uint32_t id)
{
    return &s->pool->groups[g].blocks[id];
}

static uint32_t at_most(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* --- tables --- */

static bool tables_grow(kvp__seq *s, uint32_t capacity)
{
    if (capacity <= s->table_capacity) return true;
    uint32_t n = s->pool->n_groups;
    uint32_t *all = kvp__alloc_array(s->pool->hooks, (size_t)capacity * n, sizeof *all);
    if (!all) return false;
    for (uint32_t g = 0; g < n; g++)
        if (s->n_blocks)
            memcpy(all + (size_t)g * capacity, s->tables[g], (size_t)s->n_blocks * sizeof *all);
    kvp__free(s->pool->hooks, s->tables[0], (size_t)s->table_capacity * n * sizeof *all);
    for (uint32_t g = 0; g < n; g++) s->tables[g] = all + (size_t)g * capacity;
    s->table_capacity = capacity;
    return true;
}

static void set_pins(kvp__seq *s, uint32_t blocks)
{
    while (s->pin_blocks > blocks) kvp__pool_unpin(s->pool, s->tables[0][--s->pin_blocks]);
    while (s->pin_blocks < blocks) kvp__pool_pin(s->pool, s->tables[0][s->pin_blocks++]);
}

static uint32_t pins_wanted(const kvp__seq *s)
{
    return blocks_for(s, at_most(s->pin, s->computed));
}

/* Puts ids[g] in the place of block k; what was there goes to old[g], with its holder. */
static void exchange(kvp__seq *s, uint32_t k, const uint32_t *ids, uint32_t *old)
{
    bool pinned = k < s->pin_blocks;
    if (pinned) kvp__pool_unpin(s->pool, s->tables[0][k]);
    for (uint32_t g = 0; g < s->pool->n_groups; g++) {
        old[g] = s->tables[g][k];
        s->tables[g][k] = ids[g];
    }
    if (pinned) kvp__pool_pin(s->pool, s->tables[0][k]);
}

static void release_ids(kvp__seq *s, const uint32_t *ids)
{
    for (uint32_t g = 0; g < s->pool->n_groups; g++) kvp__pool_release(s->pool, g, ids[g]);
}

/* Gives back blocks from the tail on until `keep` are left. No pin is among them. */
static void release_tail(kvp__seq *s, uint32_t keep)
{
    while (s->n_blocks > keep) {
        uint32_t k = --s->n_blocks;
        for (uint32_t g = 0; g < s->pool->n_groups; g++)
            kvp__pool_release(s->pool, g, s->tables[g][k]);
    }
    s->n_published = at_most(s->n_published, keep);
}

/* Lets go of the source of a copy that was made, or is not wanted any more. */
static void copy_end(kvp__seq *s)
{
    if (s->copy_kind == KVP__COPY_NONE) return;
    s->copy_kind = KVP__COPY_NONE;
    for (uint32_t g = 0; g < s->pool->n_groups; g++) kvp__pool_unhold(s->pool, g, s->copy_src[g]);
    release_ids(s, s->copy_src);
}

/* `computed` becomes smaller, and everything that follows from it. */
static void computed_lower(kvp__seq *s, uint32_t computed)
{
    s->computed = computed;
    s->n_published = at_most(s->n_published, computed >> s->pool->block_shift);
    if (s->found_from != KVP__NONE && s->found_from >= computed) s->found_from = KVP__NONE;
    set_pins(s, pins_wanted(s));
}

/* --- life --- */

void kvp__seq_init(kvp__seq *s, kvp__pool *pool, kvp__prefix *prefix, uint32_t root)
{
    memset(s, 0, sizeof *s);
    s->pool = pool;
    s->prefix = prefix;
    s->root = root;
    s->found_from = KVP__NONE;
}

void kvp__seq_fini(kvp__seq *s)
{
    if (!s->pool) return;
    kvp__seq_release(s);
    kvp__seq_tokens_drop(s);
    kvp__free(s->pool->hooks, s->tables[0],
              (size_t)s->table_capacity * s->pool->n_groups * sizeof *s->tables[0]);
    if (s->prefix) kvp__prefix_root_release(s->prefix, s->root);
    memset(s, 0, sizeof *s);
}

kvp_status kvp__seq_reserve_capacity(kvp__seq *s, uint32_t tokens, kvp_error *err)
{
    if (tokens < s->length) tokens = s->length;
    if (tokens == 0) return KVP_OK;
    if (tokens > KVP__MAX_TOKENS || !tables_grow(s, blocks_for(s, tokens)) ||
        !kvp__seq_tokens_room(s, tokens))
        return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for a sequence of %u tokens", tokens);
    return KVP_OK;
}

kvp_status kvp__seq_fork(kvp__seq *s, uint32_t length, kvp__seq *child, kvp_error *err)
{
    if (length > s->length)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "fork at %u of a sequence of %u tokens", length,
                         s->length);
    kvp__seq c;
    kvp__seq_init(&c, s->pool, s->prefix, s->root);
    c.computed = c.reserved = at_most(s->computed, length);
    uint32_t n = blocks_for(s, c.computed);
    if (!tables_grow(&c, n))
        return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for a fork of %u tokens", length);
    c.length = length;
    c.peak = at_most(s->peak, length);
    if (c.peak < c.computed) c.peak = c.computed; /* what its parent found is its own */
    c.n_published = at_most(s->n_published, c.computed >> s->pool->block_shift);
    c.n_blocks = n;
    for (uint32_t g = 0; n && g < s->pool->n_groups; g++) {
        memcpy(c.tables[g], s->tables[g], (size_t)n * sizeof *c.tables[g]);
        /* The copy may still be undone, and its source has all that the child sees. */
        if (s->copy_kind != KVP__COPY_NONE && s->copy_block < n)
            c.tables[g][s->copy_block] = s->copy_src[g];
        kvp__pool_retain_all(s->pool, g, c.tables[g], n);
    }
    if (length) {
        c.buffer = s->buffer;
        c.tokens = s->tokens;
        c.buffer->refs++;
    }
    if (s->prefix) kvp__prefix_root_retain(s->prefix, s->root);
    *child = c;
    return KVP_OK;
}

kvp_status kvp__seq_truncate(kvp__seq *s, uint32_t length, kvp_error *err)
{
    if (length > s->length)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "truncate to %u of a sequence of %u tokens",
                         length, s->length);
    s->length = length;
    s->pin = at_most(s->pin, length);
    s->peak = at_most(s->peak, length);
    s->reserved = at_most(s->reserved, length);
    if (s->computed > length) computed_lower(s, length);
    uint32_t keep = blocks_for(s, s->reserved);
    if (s->copy_block >= keep) copy_end(s);
    set_pins(s, pins_wanted(s));
    release_tail(s, keep);
    kvp__seq_tokens_cut(s);
    return KVP_OK;
}

void kvp__seq_rewind(kvp__seq *s, uint32_t computed)
{
    kvp__seq_abort(s);
    if (computed >= s->computed) return;
    computed_lower(s, computed);
    s->reserved = computed;
    release_tail(s, blocks_for(s, computed));
}

kvp_status kvp__seq_pin(kvp__seq *s, uint32_t length, kvp_error *err)
{
    if (length > s->length)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "pin of %u of a sequence of %u tokens", length,
                         s->length);
    s->pin = length;
    set_pins(s, pins_wanted(s));
    return KVP_OK;
}

static void release_keeping(kvp__seq *s, uint32_t keep)
{
    kvp__seq_abort(s);
    if (keep >= s->n_blocks) return;
    s->computed = s->reserved = at_most(s->computed, keep << s->pool->block_shift);
    s->found_from = KVP__NONE;
    release_tail(s, keep);
}

void kvp__seq_release(kvp__seq *s)
{
    kvp__seq_abort(s);
    set_pins(s, 0);
    release_keeping(s, 0);
}

void kvp__seq_release_unpinned(kvp__seq *s)
{
    kvp__seq_abort(s);
    release_keeping(s, s->pin_blocks);
}

uint32_t kvp__seq_releasable(const kvp__seq *s)
{
    uint32_t n = 0;
    for (uint32_t k = s->pin_blocks; k < s->n_blocks; k++)
        n += record(s, 0, s->tables[0][k])->ref == 1;
    return n;
}

uint32_t kvp__seq_shared(const kvp__seq *s)
{
    uint32_t n = 0;
    for (uint32_t k = 0; k < s->n_blocks; k++) {
        const kvp__block *b = record(s, 0, s->tables[0][k]);
        n += b->ref - b->holds > 1;
    }
    return n;
}

/* --- attach --- */

/* Block k of the tables that `hit` would put in the place of the sequence's own unfinished
 * block. */
static uint32_t hit_node_at(const kvp__seq *s, const kvp__hit *hit, uint32_t k)
{
    uint32_t node = hit->last;
    for (uint32_t i = hit->full - 1; i > k; i--) node = s->prefix->nodes[node].parent;
    return node;
}

static void attach_full(kvp__seq *s, const kvp__hit *hit)
{
    uint32_t base = s->n_published, old[KVP__MAX_GROUPS];
    bool replaces = s->n_blocks > base;
    for (uint32_t g = 0; replaces && g < s->pool->n_groups; g++) old[g] = s->tables[g][base];
    set_pins(s, at_most(s->pin_blocks, base));
    uint32_t node = hit->last;
    for (uint32_t k = hit->full; k-- > base; node = s->prefix->nodes[node].parent)
        for (uint32_t g = 0; g < s->pool->n_groups; g++) {
            s->tables[g][k] = kvp__prefix_block(s->prefix, node, g);
            kvp__pool_retain(s->pool, g, s->tables[g][k]);
        }
    if (replaces) release_ids(s, old);
    s->n_blocks = s->n_published = hit->full;
    s->computed = hit->full << s->pool->block_shift;
}

/* The tail goes to a fresh block; a block that the sequence had there goes back. */
static void attach_tail(kvp__seq *s, const kvp__hit *hit)
{
    uint32_t k = hit->full, fresh[KVP__MAX_GROUPS], old[KVP__MAX_GROUPS];
    for (uint32_t g = 0; g < s->pool->n_groups; g++) {
        s->copy_src[g] = kvp__prefix_block(s->prefix, hit->tail_node, g);
        kvp__pool_retain(s->pool, g, s->copy_src[g]);
        kvp__pool_hold(s->pool, g, s->copy_src[g], hit->tail);
    }
    for (uint32_t g = 0; g < s->pool->n_groups; g++) fresh[g] = kvp__pool_take(s->pool, g);
    if (s->n_blocks > k) {
        exchange(s, k, fresh, old);
        release_ids(s, old);
    } else {
        for (uint32_t g = 0; g < s->pool->n_groups; g++) s->tables[g][k] = fresh[g];
        s->n_blocks = k + 1;
    }
    s->copy_kind = KVP__COPY_TAIL;
    s->copy_block = k;
    s->copy_tokens = hit->tail;
    s->computed = (k << s->pool->block_shift) + hit->tail;
}

kvp_status kvp__seq_attach(kvp__seq *s, const kvp__hit *hit, uint32_t room, kvp_error *err)
{
    uint32_t base = s->n_published, before = s->computed;
    uint32_t whole = s->prefix ? hit->full << s->pool->block_shift : 0;
    bool shares = whole > s->computed;
    bool copies = s->prefix && hit->tail && whole + hit->tail > s->computed;
    /* A block that is only partly computed gives way to a shared one: one more can be had, unless
     * others hold it or it is that very block, of which more was computed once. */
    bool own = s->n_blocks > base;
    bool own_tail = own && copies && !shares && s->tables[0][base] == hit->tail_node;
    bool gives_way = shares && own && record(s, 0, s->tables[0][base])->ref == 1 &&
                     hit_node_at(s, hit, base) != s->tables[0][base];
    uint64_t available = (uint64_t)kvp__pool_available(s->pool) + gives_way;
    uint64_t taken = shares ? hit->idle : 0;
    if (available < taken + room)
        return kvp__fail_need(err, KVP_ERR_NO_BLOCKS, taken + room, available,
                              "%llu blocks are needed, %llu are available",
                              (unsigned long long)(taken + room), (unsigned long long)available);
    if (copies && !own_tail)
        copies = available >= taken + hit->idle_tail + (room > 1 ? room : 1);
    if (!shares && !copies) return KVP_OK;
    if (!tables_grow(s, hit->full + (hit->tail > 0)))
        return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for a table of %u blocks", hit->full);
    if (shares) attach_full(s, hit);
    if (own_tail)
        s->computed = whole + hit->tail;
    else if (copies)
        attach_tail(s, hit);
    s->reserved = s->computed;
    if (s->found_from == KVP__NONE) s->found_from = before;
    set_pins(s, pins_wanted(s));
    return KVP_OK;
}

/* --- reserve --- */

/* Whether block k may be written to in place from its token `from` on, in every group. */
static inline bool writable(const kvp__seq *s, uint32_t k, uint32_t from)
{
    for (uint32_t g = 0; g < s->pool->n_groups; g++)
        if (!kvp__pool_writable(s->pool, g, s->tables[g][k], from)) return false;
    return true;
}

static bool must_copy(const kvp__seq *s)
{
    uint32_t off = s->computed & (s->pool->block_tokens - 1);
    if (off == 0 || s->copy_kind != KVP__COPY_NONE) return false;
    uint32_t k = s->computed >> s->pool->block_shift;
    if (!writable(s, k, off)) return true;
    const kvp__node *nd = s->prefix ? &s->prefix->nodes[s->tables[0][k]] : NULL;
    return nd && nd->n > off && nd->children;
}

static uint32_t need(const kvp__seq *s, uint32_t rows, bool copy)
{
    uint32_t blocks = blocks_for(s, s->computed + rows);
    return (blocks > s->n_blocks ? blocks - s->n_blocks : 0) + copy;
}

uint32_t kvp__seq_need(const kvp__seq *s, uint32_t rows) { return need(s, rows, must_copy(s)); }

/* Moves the live tokens of the block that `computed` lies in to a fresh one, by a planned copy. */
static void copy_on_write(kvp__seq *s)
{
    uint32_t fresh[KVP__MAX_GROUPS];
    uint32_t k = s->computed >> s->pool->block_shift;
    uint32_t off = s->computed & (s->pool->block_tokens - 1);
    for (uint32_t g = 0; g < s->pool->n_groups; g++) fresh[g] = kvp__pool_take(s->pool, g);
    exchange(s, k, fresh, s->copy_src);
    for (uint32_t g = 0; g < s->pool->n_groups; g++)
        kvp__pool_hold(s->pool, g, s->copy_src[g], off);
    s->copy_kind = KVP__COPY_WRITE;
    s->copy_block = k;
    s->copy_tokens = off;
}

/* Takes the published tokens at and beyond `computed` out of the index: they will be
 * overwritten. */
static void unpublish_beyond(kvp__seq *s)
{
    uint32_t off = s->computed & (s->pool->block_tokens - 1);
    if (!s->prefix || off == 0) return;
    uint32_t node = s->tables[0][s->computed >> s->pool->block_shift];
    if (s->prefix->nodes[node].n > off) kvp__prefix_shrink(s->prefix, node, off);
}

static __attribute__((noinline)) kvp_status reserve_blocks(kvp__seq *s, uint32_t rows,
                                                           kvp_error *err)
{
    if (rows == 0 || rows > s->length - s->computed)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "%u rows for a sequence with %u of %u computed",
                         rows, s->computed, s->length);
    uint32_t end = s->computed + rows;
    bool copy = must_copy(s);
    uint32_t n = need(s, rows, copy);
    if (n) {
        uint32_t available = kvp__pool_available(s->pool);
        if (available < n)
            return kvp__fail_need(err, KVP_ERR_NO_BLOCKS, n, available,
                                  "%u blocks are needed, %u are available", n, available);
        if (!tables_grow(s, blocks_for(s, end)))
            return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for a table of %u blocks",
                             blocks_for(s, end));
    }
    if (copy)
        copy_on_write(s);
    else
        unpublish_beyond(s);
    for (uint32_t last = blocks_for(s, end); s->n_blocks < last; s->n_blocks++)
        for (uint32_t g = 0; g < s->pool->n_groups; g++)
            s->tables[g][s->n_blocks] = kvp__pool_take(s->pool, g);
    if (end > s->reserved) s->reserved = end;
    return KVP_OK;
}

kvp_status kvp__seq_reserve(kvp__seq *s, uint32_t rows, kvp_error *err)
{
    /* Nearly every call: one more token into a block of one's own that has room. */
    uint32_t off = s->computed & (s->pool->block_tokens - 1);
    if (rows == 1 && off && s->computed < s->length) {
        uint32_t k = s->computed >> s->pool->block_shift;
        if (writable(s, k, off) && (!s->prefix || s->prefix->nodes[s->tables[0][k]].n <= off)) {
            if (s->reserved == s->computed) s->reserved++;
            return KVP_OK;
        }
    }
    return reserve_blocks(s, rows, err);
}

uint32_t kvp__seq_copies(const kvp__seq *s, kvp__copy *out)
{
    if (s->copy_kind == KVP__COPY_NONE) return 0;
    for (uint32_t g = 0; g < s->pool->n_groups; g++)
        out[g] = (kvp__copy){.group = g, .src = s->copy_src[g],
                             .dst = s->tables[g][s->copy_block], .tokens = s->copy_tokens};
    return s->pool->n_groups;
}

void kvp__seq_abort(kvp__seq *s)
{
    uint32_t unwanted[KVP__MAX_GROUPS];
    if (s->copy_kind == KVP__COPY_TAIL) {
        computed_lower(s, s->copy_block << s->pool->block_shift);
        copy_end(s);
    } else if (s->copy_kind == KVP__COPY_WRITE) {
        s->copy_kind = KVP__COPY_NONE;
        for (uint32_t g = 0; g < s->pool->n_groups; g++)
            kvp__pool_unhold(s->pool, g, s->copy_src[g]);
        exchange(s, s->copy_block, s->copy_src, unwanted);
        release_ids(s, unwanted);
    }
    s->reserved = s->computed;
    release_tail(s, blocks_for(s, s->computed));
}

/* --- commit --- */

static uint32_t parent_of(const kvp__seq *s, uint32_t k)
{
    return k ? s->tables[0][k - 1] : kvp__prefix_under_root(s->prefix, s->root);
}

static void block_ids(const kvp__seq *s, uint32_t k, uint32_t *ids)
{
    for (uint32_t g = 0; g < s->pool->n_groups; g++) ids[g] = s->tables[g][k];
}

/* Takes the canonical node's blocks in place of one's own, which hold the same. */
static void take_canonical(kvp__seq *s, uint32_t k, uint32_t node)
{
    uint32_t ids[KVP__MAX_GROUPS], own[KVP__MAX_GROUPS], mine = s->tables[0][k];
    if (s->prefix->nodes[mine].n && record(s, 0, mine)->ref == 1)
        kvp__prefix_shrink(s->prefix, mine, 0);
    for (uint32_t g = 0; g < s->pool->n_groups; g++) {
        ids[g] = kvp__prefix_block(s->prefix, node, g);
        kvp__pool_retain(s->pool, g, ids[g]);
    }
    exchange(s, k, ids, own);
    release_ids(s, own);
}

static void publish_full(kvp__seq *s, uint32_t k)
{
    const int32_t *tokens = s->tokens + ((size_t)k << s->pool->block_shift);
    uint32_t parent = parent_of(s, k), ids[KVP__MAX_GROUPS];
    kvp__hash128 hash;
    uint32_t node = kvp__prefix_find_full(s->prefix, parent, tokens, &hash);
    if (node == KVP__NONE) {
        block_ids(s, k, ids);
        kvp__prefix_add(s->prefix, parent, ids, tokens, s->pool->block_tokens, &hash);
    } else if (node != s->tables[0][k]) {
        take_canonical(s, k, node);
    }
}

/* The unfinished block, as far as it is computed; kept private if the cache has these tokens. */
static void publish_tail(kvp__seq *s, uint32_t k, uint32_t n)
{
    const int32_t *tokens = s->tokens + ((size_t)k << s->pool->block_shift);
    uint32_t published = s->prefix->nodes[s->tables[0][k]].n, ids[KVP__MAX_GROUPS];
    if (published >= n) return;
    if (published) {
        kvp__prefix_grow(s->prefix, s->tables[0][k], tokens, n);
        return;
    }
    if (kvp__prefix_covered(s->prefix, parent_of(s, k), tokens, n)) return;
    block_ids(s, k, ids);
    kvp__prefix_add(s->prefix, parent_of(s, k), ids, tokens, n, NULL);
}

static void publish(kvp__seq *s)
{
    uint32_t full = s->computed >> s->pool->block_shift;
    uint32_t tail = s->computed & (s->pool->block_tokens - 1);
    for (; s->n_published < full; s->n_published++) publish_full(s, s->n_published);
    if (tail) publish_tail(s, full, tail);
}

/* What the attach found was used by the step that is being committed. */
static void count_found(kvp__seq *s)
{
    if (s->found_from == KVP__NONE) return;
    uint32_t own = at_most(s->computed, s->peak);
    uint32_t again = own > s->found_from ? own - s->found_from : 0;
    uint32_t cached = s->computed - s->found_from - again;
    s->usage.reattached += again;
    s->usage.cached += cached;
    KVP__BUMP(s->pool->counters.tokens_reattached, again);
    KVP__BUMP(s->pool->counters.tokens_cached, cached);
    s->found_from = KVP__NONE;
}

static void count_copy(kvp__seq *s)
{
    if (s->copy_kind == KVP__COPY_NONE) return;
    s->usage.copied += s->copy_tokens;
    KVP__BUMP(s->pool->counters.blocks_copied, 1);
    KVP__BUMP(s->pool->counters.tokens_copied, s->copy_tokens);
}

static __attribute__((noinline)) uint32_t commit_blocks(kvp__seq *s, uint32_t rows)
{
    count_found(s);
    count_copy(s);
    copy_end(s);
    rows = at_most(rows, s->reserved - s->computed);
    if (s->computed < s->peak) s->usage.recomputed += at_most(rows, s->peak - s->computed);
    s->usage.computed += rows;
    KVP__BUMP(s->pool->counters.tokens_computed, rows);
    s->computed += rows;
    s->reserved = s->computed;
    if (s->peak < s->computed) s->peak = s->computed;
    release_tail(s, blocks_for(s, s->computed));
    if (s->prefix) publish(s);
    set_pins(s, pins_wanted(s));
    return rows;
}

/* Whether committing one row concerns nothing but the node of a block that stays unfinished. */
static inline bool only_grows(const kvp__seq *s, uint32_t k)
{
    uint32_t at = s->computed & (s->pool->block_tokens - 1);
    return s->prefix && s->copy_kind == KVP__COPY_NONE && s->found_from == KVP__NONE &&
           s->reserved == s->computed + 1 && s->peak == s->computed && s->n_blocks == k + 1 &&
           at && s->prefix->nodes[s->tables[0][k]].n == at && at + 1 < s->pool->block_tokens;
}

uint32_t kvp__seq_commit(kvp__seq *s, uint32_t rows)
{
    uint32_t k = s->computed >> s->pool->block_shift;
    if (rows != 1 || !only_grows(s, k)) return commit_blocks(s, rows);
    s->reserved = s->peak = ++s->computed;
    s->usage.computed++;
    KVP__BUMP(s->pool->counters.tokens_computed, 1);
    uint32_t first = k << s->pool->block_shift;
    kvp__prefix_grow(s->prefix, s->tables[0][k], s->tokens + first, s->computed - first);
    return 1;
}
