/*
 * Block records, their lists, and the fence. See pool.h.
 *
 * A block changes state only in take, retain, release, publish, unpublish and settle; each of them
 * keeps `state`, the list it stands in, and the group's counts in step. Lists are doubly linked
 * through the records, so that a block leaves the middle of one at once: a prefix hit on a block in
 * limbo does that.
 */
#include "pool/pool.h"

#include <string.h>

/* --- lists --- */

static void list_push_front(kvp__pool_group *gr, kvp__block_list *l, uint32_t id)
{
    kvp__block *b = &gr->blocks[id];
    b->prev = KVP__NONE;
    b->next = l->head;
    if (l->head != KVP__NONE)
        gr->blocks[l->head].prev = id;
    else
        l->tail = id;
    l->head = id;
}

static void list_push_back(kvp__pool_group *gr, kvp__block_list *l, uint32_t id)
{
    kvp__block *b = &gr->blocks[id];
    b->next = KVP__NONE;
    b->prev = l->tail;
    if (l->tail != KVP__NONE)
        gr->blocks[l->tail].next = id;
    else
        l->head = id;
    l->tail = id;
}

static void list_remove(kvp__pool_group *gr, kvp__block_list *l, uint32_t id)
{
    kvp__block *b = &gr->blocks[id];
    if (b->prev != KVP__NONE)
        gr->blocks[b->prev].next = b->next;
    else
        l->head = b->next;
    if (b->next != KVP__NONE)
        gr->blocks[b->next].prev = b->prev;
    else
        l->tail = b->prev;
}

/* --- life --- */

kvp_status kvp__pool_init(kvp__pool *p, const kvp__hooks *hooks, uint32_t n_groups,
                          uint64_t n_blocks, uint32_t block_tokens, kvp_error *err)
{
    memset(p, 0, sizeof *p);
    if (n_groups < 1 || n_groups > KVP__MAX_GROUPS)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "pool: %u layer groups, 1 to %u are possible",
                         n_groups, KVP__MAX_GROUPS);
    if (n_blocks < 1 || n_blocks > KVP__MAX_BLOCKS)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "pool: %llu blocks, 1 to %u are possible",
                         (unsigned long long)n_blocks, KVP__MAX_BLOCKS);
    if (!kvp__is_pow2(block_tokens) || block_tokens > 256)
        return kvp__fail(err, KVP_ERR_INVALID_ARG,
                         "pool: block_tokens is %u, a power of two from 1 to 256 is possible",
                         block_tokens);
    p->hooks = hooks;
    p->n_groups = n_groups;
    p->n_blocks = (uint32_t)n_blocks;
    p->block_tokens = block_tokens;
    p->block_shift = (uint32_t)__builtin_ctz(block_tokens);
    for (uint32_t g = 0; g < n_groups; g++) {
        kvp__pool_group *gr = &p->groups[g];
        gr->blocks = kvp__alloc_array(hooks, p->n_blocks, sizeof *gr->blocks);
        if (!gr->blocks) {
            kvp__pool_fini(p);
            return kvp__fail(err, KVP_ERR_NO_MEMORY, "pool: no memory for %llu block records",
                             (unsigned long long)n_blocks);
        }
        memset(gr->blocks, 0, (size_t)p->n_blocks * sizeof *gr->blocks);
        gr->free = gr->limbo = (kvp__block_list){KVP__NONE, KVP__NONE};
        gr->n_free = p->n_blocks;
        for (uint32_t id = 0; id < p->n_blocks; id++) {
            gr->blocks[id].node = KVP__NONE;
            list_push_back(gr, &gr->free, id);
        }
    }
    return KVP_OK;
}

void kvp__pool_fini(kvp__pool *p)
{
    for (uint32_t g = 0; g < p->n_groups; g++)
        kvp__free(p->hooks, p->groups[g].blocks, (size_t)p->n_blocks * sizeof(kvp__block));
    memset(p, 0, sizeof *p);
}

/* --- holders --- */

static void to_free(kvp__pool_group *gr, uint32_t id)
{
    gr->blocks[id].state = KVP__BLOCK_FREE;
    list_push_front(gr, &gr->free, id);
    KVP__BUMP(gr->n_free, 1);
}

/* A block without holder, in no list, goes where it belongs while no step is in flight. */
static void settle(kvp__pool *p, uint32_t g, uint32_t id)
{
    kvp__pool_group *gr = &p->groups[g];
    kvp__block *b = &gr->blocks[id];
    if (b->node == KVP__NONE) {
        to_free(gr, id);
        return;
    }
    b->state = KVP__BLOCK_IDLE;
    KVP__BUMP(gr->n_idle, 1);
    p->released(p->index, b->node);
}

uint32_t kvp__pool_take(kvp__pool *p, uint32_t g)
{
    kvp__pool_group *gr = &p->groups[g];
    if (gr->free.head == KVP__NONE && (!p->evict || !p->evict(p->index))) return KVP__NONE;
    uint32_t id = gr->free.head;
    list_remove(gr, &gr->free, id);
    KVP__BUMP(gr->n_free, -1u);
    gr->blocks[id].ref = 1;
    gr->blocks[id].state = KVP__BLOCK_USED;
    if (g == 0) KVP__BUMP(p->counters.blocks_taken, 1);
    return id;
}

static inline void retain(kvp__pool *p, kvp__pool_group *gr, uint32_t id)
{
    kvp__block *b = &gr->blocks[id];
    if (b->ref++ > 0) return;
    if (b->state == KVP__BLOCK_LIMBO) {
        list_remove(gr, &gr->limbo, id);
        b->state = KVP__BLOCK_USED;
        return;
    }
    b->state = KVP__BLOCK_USED;
    KVP__BUMP(gr->n_idle, -1u);
    p->acquired(p->index, b->node);
}

void kvp__pool_retain(kvp__pool *p, uint32_t g, uint32_t id) { retain(p, &p->groups[g], id); }

void kvp__pool_retain_all(kvp__pool *p, uint32_t g, const uint32_t *ids, uint32_t n)
{
    kvp__pool_group *gr = &p->groups[g];
    for (uint32_t i = 0; i < n; i++) retain(p, gr, ids[i]);
}

void kvp__pool_release(kvp__pool *p, uint32_t g, uint32_t id)
{
    kvp__pool_group *gr = &p->groups[g];
    kvp__block *b = &gr->blocks[id];
    if (--b->ref > 0) return;
    if (p->fence) {
        b->state = KVP__BLOCK_LIMBO;
        list_push_back(gr, &gr->limbo, id);
        return;
    }
    settle(p, g, id);
}

void kvp__pool_pin(kvp__pool *p, uint32_t id)
{
    if (p->groups[0].blocks[id].pins++ == 0) KVP__BUMP(p->n_pinned, 1);
}

void kvp__pool_unpin(kvp__pool *p, uint32_t id)
{
    if (--p->groups[0].blocks[id].pins == 0) KVP__BUMP(p->n_pinned, -1u);
}

void kvp__pool_publish(kvp__pool *p, uint32_t g, uint32_t id, uint32_t node)
{
    p->groups[g].blocks[id].node = node;
}

void kvp__pool_unpublish(kvp__pool *p, uint32_t g, uint32_t id)
{
    kvp__pool_group *gr = &p->groups[g];
    kvp__block *b = &gr->blocks[id];
    b->node = KVP__NONE;
    if (b->state != KVP__BLOCK_IDLE) return;
    KVP__BUMP(gr->n_idle, -1u);
    to_free(gr, id);
}

/* --- fence --- */

void kvp__pool_fence_raise(kvp__pool *p) { p->fence = 1; }

void kvp__pool_fence_drop(kvp__pool *p)
{
    p->fence = 0;
    for (uint32_t g = 0; g < p->n_groups; g++) {
        kvp__pool_group *gr = &p->groups[g];
        while (gr->limbo.head != KVP__NONE) {
            uint32_t id = gr->limbo.head;
            list_remove(gr, &gr->limbo, id);
            settle(p, g, id);
        }
    }
}

/* --- checker --- */

void kvp__pool_check_begin(kvp__pool *p)
{
    for (uint32_t g = 0; g < p->n_groups; g++)
        for (uint32_t id = 0; id < p->n_blocks; id++) {
            kvp__block *b = &p->groups[g].blocks[id];
            b->mark = b->marks = 0;
        }
}

/* Walks one list: every block in it has `state`, links back to the one before, and there are as
 * many as the records with that state. */
static kvp_status check_list(const kvp__pool_group *gr, uint32_t g, const kvp__block_list *l,
                             uint32_t state, uint32_t expected, kvp_error *err)
{
    uint32_t n = 0, before = KVP__NONE;
    for (uint32_t id = l->head; id != KVP__NONE; id = gr->blocks[id].next) {
        const kvp__block *b = &gr->blocks[id];
        if (b->state != state || b->prev != before || ++n > expected)
            return kvp__fail(err, KVP_ERR_INTERNAL,
                             "group %u block %u: state %u, stands in the list of state %u", g, id,
                             b->state, state);
        before = id;
    }
    if (l->tail != before || n != expected)
        return kvp__fail(err, KVP_ERR_INTERNAL,
                         "group %u: %u blocks in the list of state %u, %u have that state", g, n,
                         state, expected);
    return KVP_OK;
}

static const char *wrong_block(const kvp__block *b)
{
    if (b->ref != b->mark) return "ref is not the number of its holders";
    if (b->holds != b->marks >> 16) return "holds is not the number of its copies";
    if (!b->holds && b->guard) return "guarded, but no copy is to be made";
    if ((b->pins & 0xffff) != (b->marks & 0xffff)) return "pins is not the number of its pins";
    if ((b->ref > 0) != (b->state == KVP__BLOCK_USED)) return "used and without holder, or held";
    if (b->state == KVP__BLOCK_FREE && b->node != KVP__NONE) return "free, but published";
    if (b->state == KVP__BLOCK_IDLE && b->node == KVP__NONE) return "idle, but not published";
    if (b->pins > b->ref) return "more pins than holders";
    return NULL;
}

static kvp_status check_group(const kvp__pool *p, uint32_t g, kvp_error *err)
{
    const kvp__pool_group *gr = &p->groups[g];
    uint32_t n[4] = {0}, pinned = 0;
    for (uint32_t id = 0; id < p->n_blocks; id++) {
        const kvp__block *b = &gr->blocks[id];
        const char *wrong = wrong_block(b);
        if (wrong)
            return kvp__fail(err, KVP_ERR_INTERNAL,
                             "group %u block %u: %s (state %u, ref %u, counted %u, pins %u)", g,
                             id, wrong, b->state, b->ref, b->mark, b->pins);
        n[b->state & 3]++;
        pinned += b->pins > 0;
    }
    if (n[KVP__BLOCK_FREE] != gr->n_free || n[KVP__BLOCK_IDLE] != gr->n_idle)
        return kvp__fail(err, KVP_ERR_INTERNAL,
                         "group %u: %u free and %u idle blocks, counted as %u and %u", g,
                         n[KVP__BLOCK_FREE], n[KVP__BLOCK_IDLE], gr->n_free, gr->n_idle);
    if (!p->fence && n[KVP__BLOCK_LIMBO])
        return kvp__fail(err, KVP_ERR_INTERNAL, "group %u: %u blocks in limbo without a fence", g,
                         n[KVP__BLOCK_LIMBO]);
    if (pinned != (g == 0 ? p->n_pinned : 0))
        return kvp__fail(err, KVP_ERR_INTERNAL, "group %u: %u blocks have pins, counted as %u", g,
                         pinned, p->n_pinned);
    kvp_status s = check_list(gr, g, &gr->free, KVP__BLOCK_FREE, n[KVP__BLOCK_FREE], err);
    if (s == KVP_OK)
        s = check_list(gr, g, &gr->limbo, KVP__BLOCK_LIMBO, n[KVP__BLOCK_LIMBO], err);
    return s;
}

kvp_status kvp__pool_check_end(kvp__pool *p, kvp_error *err)
{
    for (uint32_t g = 0; g < p->n_groups; g++) {
        kvp_status s = check_group(p, g, err);
        if (s != KVP_OK) return s;
    }
    return KVP_OK;
}
