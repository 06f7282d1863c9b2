/*
 * Recounts the prefix index from scratch. See prefix.h for what must hold.
 *
 * Everything is derived anew from the nodes' own parents and tokens and from the pool's records;
 * the chains, counts and hashes that the fast paths keep are what is being checked.
 */
#include "prefix/prefix.h"

#include <string.h>

static kvp_status wrong(kvp_error *err, uint32_t node, const char *what)
{
    return kvp__fail(err, KVP_ERR_INTERNAL, "prefix node %u: %s", node, what);
}

static bool is_node(const kvp__prefix *x, uint32_t parent) { return parent < x->pool->n_blocks; }

/* mark[0] counts children, mark[1] is the place in the idle order. */
static kvp_status count_children(kvp__prefix *x, kvp_error *err)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < x->pool->n_blocks; i++) x->nodes[i].mark[0] = x->nodes[i].mark[1] = 0;
    for (uint32_t i = 0; i < x->pool->n_blocks; i++) {
        const kvp__node *nd = &x->nodes[i];
        if (nd->n == 0) continue;
        n++;
        if (nd->n > x->pool->block_tokens) return wrong(err, i, "more tokens than a block has");
        if (is_node(x, nd->parent)) {
            if (x->nodes[nd->parent].n != x->pool->block_tokens)
                return wrong(err, i, "its parent is not a full node");
            if (nd->held && !x->nodes[nd->parent].held)
                return wrong(err, i, "held, but its parent is not");
            x->nodes[nd->parent].mark[0]++;
        } else {
            uint32_t r = nd->parent - x->pool->n_blocks;
            if (r >= x->n_roots || !x->roots[r].in_use) return wrong(err, i, "under no root");
            x->roots[r].mark++;
        }
    }
    if (n != x->n_nodes)
        return kvp__fail(err, KVP_ERR_INTERNAL, "prefix: %llu nodes, counted as %llu",
                         (unsigned long long)n, (unsigned long long)x->n_nodes);
    return KVP_OK;
}

static kvp_status check_roots(const kvp__prefix *x, kvp_error *err)
{
    for (uint32_t i = 0; i < x->n_roots; i++)
        if (x->roots[i].mark != x->roots[i].refs)
            return kvp__fail(err, KVP_ERR_INTERNAL, "prefix root %u: %u references, counted as %u",
                             i, x->roots[i].mark, x->roots[i].refs);
    return KVP_OK;
}

static const char *wrong_index(kvp__prefix *x, uint32_t i)
{
    const kvp__node *nd = &x->nodes[i];
    const int32_t *tokens = x->tokens + ((size_t)i << x->pool->block_shift);
    if (nd->mark[0] != nd->children) return "number of children";
    if (nd->n == x->pool->block_tokens) {
        kvp__hash128 hash;
        if (kvp__prefix_find_full(x, nd->parent, tokens, &hash) != i)
            return "another or no full node is found by its parent and tokens";
        if (memcmp(&hash, &nd->hash, sizeof hash) != 0) return "chain hash";
    } else if (nd->children) {
        return "a partial node with children";
    }
    if (nd->child_next != KVP__NONE && x->nodes[nd->child_next].child_prev != i)
        return "links of the child index";
    if (nd->child_prev != KVP__NONE && x->nodes[nd->child_prev].child_next != i)
        return "links of the child index";
    return NULL;
}

static const char *wrong_blocks(const kvp__prefix *x, uint32_t i)
{
    uint32_t held = 0;
    for (uint32_t g = 0; g < x->pool->n_groups; g++) {
        uint32_t id = kvp__prefix_block(x, i, g);
        if (id >= x->pool->n_blocks) return "no such block";
        const kvp__block *b = &x->pool->groups[g].blocks[id];
        if (b->node != i) return "its block holds something else";
        if (b->state == KVP__BLOCK_FREE) return "its block is free";
        held += b->state != KVP__BLOCK_IDLE;
    }
    return held == x->nodes[i].held ? NULL : "number of groups that hold it";
}

/* Nodes reachable through the child index: with the count of all nodes and the links of each, this
 * says that every node is in it once. */
static kvp_status check_child_index(const kvp__prefix *x, kvp_error *err)
{
    uint64_t n = 0;
    for (uint32_t b = 0; b <= x->mask; b++) {
        uint32_t i = x->child_heads[b];
        if (i != KVP__NONE && x->nodes[i].child_prev != KVP__NONE)
            return wrong(err, i, "first in the child index, but not linked so");
        for (; i != KVP__NONE; i = x->nodes[i].child_next)
            if (x->nodes[i].n == 0 || ++n > x->n_nodes)
                return wrong(err, i, "in the child index, but not a node, or twice");
    }
    if (n != x->n_nodes)
        return kvp__fail(err, KVP_ERR_INTERNAL, "prefix: %llu of %llu nodes in the child index",
                         (unsigned long long)n, (unsigned long long)x->n_nodes);
    return KVP_OK;
}

/* Idle nodes are in the list, a child before its parent. */
static kvp_status check_idle_order(kvp__prefix *x, kvp_error *err)
{
    uint32_t n = 0, expected = 0, before = KVP__NONE;
    for (uint32_t i = 0; i < x->pool->n_blocks; i++)
        expected += x->nodes[i].n && !x->nodes[i].held;
    for (uint32_t i = x->idle_head; i != KVP__NONE; i = x->nodes[i].idle_next) {
        kvp__node *nd = &x->nodes[i];
        if (nd->n == 0 || nd->held || nd->idle_prev != before || ++n > expected)
            return wrong(err, i, "in the idle list, but not idle, or its links are wrong");
        nd->mark[1] = n;
        if (is_node(x, nd->parent) && x->nodes[nd->parent].mark[1])
            return wrong(err, i, "idle, and would be evicted after its parent");
        before = i;
    }
    if (n != expected || x->idle_tail != before)
        return kvp__fail(err, KVP_ERR_INTERNAL, "prefix: %u idle nodes, %u in the list", expected,
                         n);
    return KVP_OK;
}

static kvp_status check_published(const kvp__prefix *x, kvp_error *err)
{
    for (uint32_t g = 0; g < x->pool->n_groups; g++)
        for (uint32_t id = 0; id < x->pool->n_blocks; id++) {
            uint32_t node = x->pool->groups[g].blocks[id].node;
            if (node == KVP__NONE) continue;
            if (!is_node(x, node) || x->nodes[node].n == 0 || kvp__prefix_block(x, node, g) != id)
                return kvp__fail(err, KVP_ERR_INTERNAL,
                                 "group %u block %u: published as node %u, which has other blocks",
                                 g, id, node);
        }
    return KVP_OK;
}

void kvp__prefix_check_begin(kvp__prefix *x)
{
    for (uint32_t i = 0; i < x->n_roots; i++) x->roots[i].mark = 0;
}

kvp_status kvp__prefix_check_end(kvp__prefix *x, kvp_error *err)
{
    kvp_status s = count_children(x, err);
    if (s == KVP_OK) s = check_roots(x, err);
    for (uint32_t i = 0; s == KVP_OK && i < x->pool->n_blocks; i++) {
        if (x->nodes[i].n == 0) continue;
        const char *what = wrong_index(x, i);
        if (!what) what = wrong_blocks(x, i);
        if (what) s = wrong(err, i, what);
    }
    if (s == KVP_OK) s = check_child_index(x, err);
    if (s == KVP_OK && x->policy == &kvp__policy_lru) s = check_idle_order(x, err);
    if (s == KVP_OK) s = check_published(x, err);
    return s;
}
