/*
 * The tree of published blocks and its two indexes. See prefix.h.
 *
 *     full index    chain hash -> full nodes; finds the next whole block of a prompt
 *     child index   (parent, first token) -> all nodes, newest first; finds partial blocks
 *
 * Both are arrays of bucket heads with the chains running through the nodes, so that publishing and
 * evicting allocate nothing and touch a handful of records whatever the size of the pool. The full
 * index stands by the keyed hash alone; a guest who knows our source still cannot aim at a bucket.
 */
#include "prefix/prefix.h"

#include <string.h>

#define AHEAD 16u /* blocks that a lookup hashes before it looks for them */

static bool is_node(const kvp__prefix *x, uint32_t parent) { return parent < x->pool->n_blocks; }

static int32_t *node_tokens(const kvp__prefix *x, uint32_t node)
{
    return x->tokens + ((size_t)node << x->pool->block_shift);
}

static kvp__hash128 parent_hash(const kvp__prefix *x, uint32_t parent)
{
    if (is_node(x, parent)) return x->nodes[parent].hash;
    return x->roots[parent - x->pool->n_blocks].hash;
}

/* The parent comes last, so that most of the work on one block does not wait for the one before. */
static kvp__hash128 chain_hash(const kvp__prefix *x, kvp__hash128 parent, const int32_t *tokens)
{
    uint8_t text[256 * sizeof *tokens + sizeof parent];
    size_t bytes = (size_t)x->pool->block_tokens * sizeof *tokens;
    memcpy(text, tokens, bytes);
    memcpy(text + bytes, &parent, sizeof parent);
    return x->hash(x->key, text, bytes + sizeof parent);
}

static uint32_t *full_bucket(const kvp__prefix *x, kvp__hash128 h)
{
    return &x->full_heads[h.lo & x->mask];
}

static uint32_t *child_bucket(const kvp__prefix *x, uint32_t parent, int32_t first)
{
    uint64_t k = ((uint64_t)parent << 32 | (uint32_t)first) ^ x->key.k0;
    k *= 0x9e3779b97f4a7c15u;
    k = (k ^ k >> 32 ^ x->key.k1) * 0xd6e8feb86659fd93u;
    return &x->child_heads[(k >> 32) & x->mask];
}

/* --- indexes --- */

static void full_link(kvp__prefix *x, uint32_t node)
{
    uint32_t *head = full_bucket(x, x->nodes[node].hash);
    x->nodes[node].full_next = *head;
    *head = node;
}

static void full_unlink(kvp__prefix *x, uint32_t node)
{
    uint32_t *link = full_bucket(x, x->nodes[node].hash);
    while (*link != node) {
        x->visits++;
        link = &x->nodes[*link].full_next;
    }
    *link = x->nodes[node].full_next;
}

static void child_link(kvp__prefix *x, uint32_t node)
{
    kvp__node *nd = &x->nodes[node];
    uint32_t *head = child_bucket(x, nd->parent, node_tokens(x, node)[0]);
    nd->child_prev = KVP__NONE;
    nd->child_next = *head;
    if (*head != KVP__NONE) x->nodes[*head].child_prev = node;
    *head = node;
}

static void child_unlink(kvp__prefix *x, uint32_t node)
{
    kvp__node *nd = &x->nodes[node];
    if (nd->child_prev != KVP__NONE)
        x->nodes[nd->child_prev].child_next = nd->child_next;
    else
        *child_bucket(x, nd->parent, node_tokens(x, node)[0]) = nd->child_next;
    if (nd->child_next != KVP__NONE) x->nodes[nd->child_next].child_prev = nd->child_prev;
}

/* --- nodes --- */

static void adopt(kvp__prefix *x, uint32_t parent)
{
    if (is_node(x, parent))
        x->nodes[parent].children++;
    else
        kvp__prefix_root_retain(x, parent - x->pool->n_blocks);
}

static void disown(kvp__prefix *x, uint32_t parent)
{
    if (is_node(x, parent))
        x->nodes[parent].children--;
    else
        kvp__prefix_root_release(x, parent - x->pool->n_blocks);
}

static void node_remove(kvp__prefix *x, uint32_t node)
{
    kvp__node *nd = &x->nodes[node];
    if (nd->held == 0) x->policy->on_use(x, node);
    if (nd->n == x->pool->block_tokens) full_unlink(x, node);
    child_unlink(x, node);
    disown(x, nd->parent);
    nd->n = 0;
    x->n_nodes--;
    for (uint32_t g = 0; g < x->pool->n_groups; g++)
        kvp__pool_unpublish(x->pool, g, kvp__prefix_block(x, node, g));
}

static void on_released(void *index, uint32_t node)
{
    kvp__prefix *x = index;
    if (--x->nodes[node].held == 0) x->policy->on_idle(x, node);
}

static void on_acquired(void *index, uint32_t node)
{
    kvp__prefix *x = index;
    if (x->nodes[node].held++ == 0) x->policy->on_use(x, node);
}

static bool on_evict(void *index)
{
    kvp__prefix *x = index;
    uint32_t node = x->policy->victim(x);
    x->visits++;
    if (node == KVP__NONE) return false;
    node_remove(x, node);
    KVP__BUMP(x->pool->counters.blocks_evicted, 1);
    return true;
}

void kvp__prefix_add(kvp__prefix *x, uint32_t parent, const uint32_t *blocks,
                     const int32_t *tokens, uint32_t n, const kvp__hash128 *hash)
{
    uint32_t node = blocks[0], had = x->nodes[node].n;
    kvp__node *nd = &x->nodes[node];
    memcpy(node_tokens(x, node) + had, tokens + had, (size_t)(n - had) * sizeof *tokens);
    nd->n = (uint16_t)n;
    if (n == x->pool->block_tokens) {
        nd->hash = *hash;
        full_link(x, node);
    }
    if (had) return;
    nd->parent = parent;
    nd->children = 0;
    nd->held = (uint16_t)x->pool->n_groups;
    child_link(x, node);
    adopt(x, parent);
    x->n_nodes++;
    for (uint32_t g = 0; g < x->pool->n_groups; g++) {
        if (g) x->others[(size_t)node * (x->pool->n_groups - 1) + g - 1] = blocks[g];
        kvp__pool_publish(x->pool, g, blocks[g], node);
    }
}

void kvp__prefix_shrink(kvp__prefix *x, uint32_t node, uint32_t n)
{
    kvp__node *nd = &x->nodes[node];
    if (n == 0) {
        node_remove(x, node);
        return;
    }
    if (nd->n == x->pool->block_tokens) full_unlink(x, node);
    nd->n = (uint16_t)n;
}

kvp_status kvp__prefix_reset(kvp__prefix *x, kvp_error *err)
{
    uint32_t used = kvp__pool_used(x->pool, 0);
    for (uint32_t g = 1; g < x->pool->n_groups; g++) {
        uint32_t n = kvp__pool_used(x->pool, g);
        if (n > used) used = n;
    }
    if (used)
        return kvp__fail_need(err, KVP_ERR_BUSY, 0, used,
                              "prefix: %u blocks are held, so nothing was forgotten", used);
    for (uint32_t node; (node = x->policy->victim(x)) != KVP__NONE;) node_remove(x, node);
    return KVP_OK;
}

/* --- lookup --- */

/* `h` is the chain hash of these tokens under this parent. */
static uint32_t find_hashed(kvp__prefix *x, kvp__hash128 h, uint32_t parent, const int32_t *tokens)
{
    size_t bytes = (size_t)x->pool->block_tokens * sizeof *tokens;
    for (uint32_t i = *full_bucket(x, h); i != KVP__NONE; i = x->nodes[i].full_next) {
        const kvp__node *nd = &x->nodes[i];
        x->visits++;
        if (nd->hash.lo == h.lo && nd->hash.hi == h.hi && nd->parent == parent &&
            memcmp(node_tokens(x, i), tokens, bytes) == 0)
            return i;
    }
    return KVP__NONE;
}

uint32_t kvp__prefix_find_full(kvp__prefix *x, uint32_t parent, const int32_t *tokens,
                               kvp__hash128 *hash)
{
    *hash = chain_hash(x, parent_hash(x, parent), tokens);
    return find_hashed(x, *hash, parent, tokens);
}

static uint32_t common(const int32_t *a, const int32_t *b, uint32_t n)
{
    uint32_t i = 0;
    while (i < n && a[i] == b[i]) i++;
    return i;
}

/* The node under `parent` that shares most of its first tokens with these n, the newest of equal
 * ones; *length gets how many. */
static uint32_t find_longest(kvp__prefix *x, uint32_t parent, const int32_t *tokens, uint32_t n,
                             uint32_t *length)
{
    uint32_t best = KVP__NONE, seen = 0;
    *length = 0;
    uint32_t i = *child_bucket(x, parent, tokens[0]);
    for (; i != KVP__NONE && seen < KVP__PREFIX_CANDIDATES; i = x->nodes[i].child_next) {
        const kvp__node *nd = &x->nodes[i];
        const int32_t *have = node_tokens(x, i);
        x->visits++;
        if (nd->parent != parent || have[0] != tokens[0]) continue;
        seen++;
        uint32_t k = common(have, tokens, n < nd->n ? n : nd->n);
        if (k <= *length) continue;
        *length = k;
        best = i;
        if (k == n) break;
    }
    return best;
}

bool kvp__prefix_covered(kvp__prefix *x, uint32_t parent, const int32_t *tokens, uint32_t n)
{
    uint32_t length;
    (void)find_longest(x, parent, tokens, n, &length);
    return length == n;
}

/* Chain hashes of the next `n` blocks. The chain depends on tokens alone, so it runs ahead of the
 * nodes, and their records are on the way into the cache when the comparisons get to them. */
static void hash_ahead(const kvp__prefix *x, kvp__hash128 before, const int32_t *tokens, uint32_t n,
                       kvp__hash128 *out)
{
    for (uint32_t i = 0; i < n; i++) {
        before = out[i] = chain_hash(x, before, tokens + ((size_t)i << x->pool->block_shift));
        __builtin_prefetch(full_bucket(x, before));
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t node = *full_bucket(x, out[i]);
        if (node == KVP__NONE) break;
        __builtin_prefetch(&x->nodes[node]);
        __builtin_prefetch(node_tokens(x, node));
    }
}

/* Whole blocks that are there, of the first `most` of these tokens. */
static void lookup_full(kvp__prefix *x, uint32_t root, const int32_t *tokens, uint32_t most,
                        kvp__hit *h)
{
    uint32_t parent = kvp__prefix_under_root(x, root), ahead = 0, i = 0;
    kvp__hash128 hashes[AHEAD], before = parent_hash(x, parent);
    for (; h->full < most; h->full++, i++, tokens += x->pool->block_tokens) {
        if (i == ahead) {
            /* One block at first: most prompts that miss do it at once. */
            ahead = ahead ? AHEAD : 1;
            if (ahead > most - h->full) ahead = most - h->full;
            hash_ahead(x, before, tokens, ahead, hashes);
            before = hashes[ahead - 1];
            i = 0;
        }
        uint32_t node = find_hashed(x, hashes[i], parent, tokens);
        if (node == KVP__NONE) return;
        h->idle += x->nodes[node].held == 0;
        parent = h->last = node;
    }
}

kvp__hit kvp__prefix_lookup(kvp__prefix *x, uint32_t root, const int32_t *tokens, uint32_t length)
{
    kvp__hit h = {.last = KVP__NONE, .tail_node = KVP__NONE};
    if (root == KVP__NONE || length < 2) return h;
    uint32_t b = x->pool->block_tokens;
    lookup_full(x, root, tokens, (length - 1) / b, &h);
    uint32_t rest = length - 1 - h.full * b;
    if (rest == 0) return h;
    uint32_t parent = h.full ? h.last : kvp__prefix_under_root(x, root);
    tokens += (size_t)h.full * b;
    h.tail_node = find_longest(x, parent, tokens, rest < b ? rest : b, &h.tail);
    if (h.tail) h.idle_tail = x->nodes[h.tail_node].held == 0;
    return h;
}

/* --- the default policy --- */

static bool parent_is_idle(const kvp__prefix *x, uint32_t node)
{
    uint32_t parent = x->nodes[node].parent;
    return is_node(x, parent) && x->nodes[parent].held == 0;
}

static void lru_on_idle(kvp__prefix *x, uint32_t node)
{
    uint32_t after = parent_is_idle(x, node) ? x->nodes[node].parent : KVP__NONE;
    uint32_t before = after != KVP__NONE ? x->nodes[after].idle_prev : x->idle_tail;
    x->nodes[node].idle_prev = before;
    x->nodes[node].idle_next = after;
    *(before != KVP__NONE ? &x->nodes[before].idle_next : &x->idle_head) = node;
    *(after != KVP__NONE ? &x->nodes[after].idle_prev : &x->idle_tail) = node;
}

static void lru_on_use(kvp__prefix *x, uint32_t node)
{
    uint32_t before = x->nodes[node].idle_prev, after = x->nodes[node].idle_next;
    *(before != KVP__NONE ? &x->nodes[before].idle_next : &x->idle_head) = after;
    *(after != KVP__NONE ? &x->nodes[after].idle_prev : &x->idle_tail) = before;
}

static uint32_t lru_victim(kvp__prefix *x) { return x->idle_head; }

const kvp__policy kvp__policy_lru = {lru_on_idle, lru_on_use, lru_victim};

/* --- life --- */

static size_t others_bytes(const kvp__prefix *x)
{
    return (size_t)x->pool->n_blocks * (x->pool->n_groups - 1) * sizeof *x->others;
}

static size_t tokens_bytes(const kvp__prefix *x)
{
    return ((size_t)x->pool->n_blocks << x->pool->block_shift) * sizeof *x->tokens;
}

static size_t heads_bytes(const kvp__prefix *x)
{
    return ((size_t)x->mask + 1) * sizeof *x->full_heads;
}

kvp_status kvp__prefix_init(kvp__prefix *x, kvp__pool *pool, const kvp__prefix_options *options,
                            kvp_error *err)
{
    memset(x, 0, sizeof *x);
    x->pool = pool;
    x->key = options->key;
    x->hash = options->hash ? options->hash : kvp__hash;
    x->policy = options->policy ? options->policy : &kvp__policy_lru;
    x->mask = 1;
    while (x->mask < pool->n_blocks - 1) x->mask = x->mask * 2 + 1;
    x->idle_head = x->idle_tail = x->spare_root = KVP__NONE;
    memset(x->root_heads, 0xff, sizeof x->root_heads);
    x->nodes = kvp__alloc_zero(pool->hooks, (size_t)pool->n_blocks * sizeof *x->nodes);
    x->tokens = kvp__alloc(pool->hooks, tokens_bytes(x));
    x->others = others_bytes(x) ? kvp__alloc(pool->hooks, others_bytes(x)) : NULL;
    x->full_heads = kvp__alloc(pool->hooks, heads_bytes(x));
    x->child_heads = kvp__alloc(pool->hooks, heads_bytes(x));
    if (!x->nodes || !x->tokens || !x->full_heads || !x->child_heads ||
        (others_bytes(x) && !x->others)) {
        uint32_t n = pool->n_blocks;
        kvp__prefix_fini(x);
        return kvp__fail(err, KVP_ERR_NO_MEMORY, "prefix: no memory for the records of %u blocks",
                         n);
    }
    memset(x->full_heads, 0xff, heads_bytes(x));
    memset(x->child_heads, 0xff, heads_bytes(x));
    pool->index = x;
    pool->released = on_released;
    pool->acquired = on_acquired;
    pool->evict = on_evict;
    return KVP_OK;
}

void kvp__prefix_fini(kvp__prefix *x)
{
    if (!x->pool) return;
    const kvp__hooks *hooks = x->pool->hooks;
    for (uint32_t i = 0; i < x->n_roots; i++) {
        kvp__root *r = &x->roots[i];
        kvp__free(hooks, r->bytes, (size_t)r->salt_bytes + r->extra_bytes);
    }
    kvp__free(hooks, x->roots, (size_t)x->cap_roots * sizeof *x->roots);
    kvp__free(hooks, x->nodes, (size_t)x->pool->n_blocks * sizeof *x->nodes);
    kvp__free(hooks, x->tokens, tokens_bytes(x));
    kvp__free(hooks, x->others, others_bytes(x));
    kvp__free(hooks, x->full_heads, heads_bytes(x));
    kvp__free(hooks, x->child_heads, heads_bytes(x));
    if (x->pool->index == x) {
        x->pool->index = NULL;
        x->pool->released = x->pool->acquired = NULL;
        x->pool->evict = NULL;
    }
    memset(x, 0, sizeof *x);
}
