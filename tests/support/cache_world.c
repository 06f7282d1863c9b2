/*
 * See cache_world.h.
 */
#include "support/cache_world.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static uint64_t mix(uint64_t before, int32_t token, uint32_t g)
{
    uint64_t x = before + 0x9e3779b97f4a7c15u * (uint64_t)(uint32_t)token + 0x1234567u + g;
    x = (x ^ x >> 31) * 0xbf58476d1ce4e5b9u;
    return (x ^ x >> 29) * 0x94d049bb133111ebu;
}

/* --- making --- */

static void shuffle(world *w)
{
    for (uint32_t g = 1; g < w->pool.n_groups; g++) {
        uint32_t n = w->pool.n_blocks;
        uint32_t *ids = malloc(n * sizeof *ids);
        assert_non_null(ids);
        for (uint32_t i = 0; i < n; i++) ids[i] = kvp__pool_take(&w->pool, g);
        for (uint32_t i = 0; i < n; i++) {
            uint32_t j = (i * 7 + g) % n, t = ids[i];
            ids[i] = ids[j];
            ids[j] = t;
        }
        for (uint32_t i = 0; i < n; i++) kvp__pool_release(&w->pool, g, ids[i]);
        free(ids);
    }
}

static void make(world *w, uint32_t blocks, uint32_t b, uint32_t groups, uint32_t flags,
                 kvp__hash_fn hash)
{
    memset(w, 0, sizeof *w);
    assert_int_equal(kvp__hooks_fill(&w->hooks, NULL, NULL), KVP_OK);
    assert_int_equal(kvp__pool_init(&w->pool, &w->hooks, groups, blocks, b, NULL), KVP_OK);
    if (!(flags & WORLD_NO_PREFIX)) {
        kvp__prefix_options o = {.key = {1, 2}, .hash = hash};
        assert_int_equal(kvp__prefix_init(&w->prefix, &w->pool, &o, NULL), KVP_OK);
        w->has_prefix = true;
    }
    for (uint32_t g = 0; g < groups; g++) {
        w->kv[g] = malloc((size_t)blocks * b * sizeof *w->kv[g]);
        assert_non_null(w->kv[g]);
        memset(w->kv[g], 0xee, (size_t)blocks * b * sizeof *w->kv[g]);
    }
    if (flags & WORLD_SHUFFLED) shuffle(w);
    world_check(w);
}

void world_make(world *w, uint32_t blocks, uint32_t block_tokens, uint32_t groups, uint32_t flags)
{
    make(w, blocks, block_tokens, groups, flags, NULL);
}

void world_make_hash(world *w, uint32_t blocks, uint32_t block_tokens, kvp__hash_fn hash)
{
    make(w, blocks, block_tokens, 1, 0, hash);
}

void world_free(world *w)
{
    while (w->n_seqs) world_end(w, w->seqs[w->n_seqs - 1]);
    if (w->has_prefix) assert_int_equal(kvp__prefix_reset(&w->prefix, NULL), KVP_OK);
    world_check(w);
    for (uint32_t g = 0; g < w->pool.n_groups; g++) {
        assert_int_equal(w->pool.groups[g].n_free, w->pool.n_blocks);
        free(w->kv[g]);
    }
    kvp__prefix_fini(&w->prefix);
    kvp__pool_fini(&w->pool);
}

static kvp__seq *add(world *w)
{
    assert_true(w->n_seqs < WORLD_SEQS);
    kvp__seq *s = malloc(sizeof *s);
    assert_non_null(s);
    w->seqs[w->n_seqs++] = s;
    return s;
}

kvp__seq *world_seq(world *w, const char *salt)
{
    kvp__seq *s = add(w);
    uint32_t root = KVP__NONE;
    if (w->has_prefix)
        assert_int_equal(kvp__prefix_root_intern(&w->prefix, salt,
                                                 salt ? (uint32_t)strlen(salt) : 0, "key", 3,
                                                 &root, NULL), KVP_OK);
    kvp__seq_init(s, &w->pool, w->has_prefix ? &w->prefix : NULL, root);
    world_check(w);
    return s;
}

kvp__seq *world_fork(world *w, kvp__seq *s, uint32_t length)
{
    kvp__seq *c = add(w);
    assert_int_equal(kvp__seq_fork(s, length, c, NULL), KVP_OK);
    world_check(w);
    return c;
}

void world_end(world *w, kvp__seq *s)
{
    for (uint32_t i = 0; i < w->n_seqs; i++)
        if (w->seqs[i] == s) w->seqs[i] = w->seqs[--w->n_seqs];
    kvp__seq_fini(s);
    world_check(w);
    free(s);
}

void world_append(world *w, kvp__seq *s, int32_t first, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        int32_t t = first + (int32_t)i;
        assert_int_equal(kvp__seq_append(s, &t, 1, NULL), KVP_OK);
    }
    world_check(w);
}

/* --- reading back --- */

uint64_t world_expected(const kvp__seq *s, uint32_t g, uint32_t pos)
{
    uint64_t v = 0;
    for (uint32_t p = 0; p <= pos; p++) v = mix(v, s->tokens[p], g);
    return v;
}

uint64_t world_read(const world *w, const kvp__seq *s, uint32_t g, uint32_t pos)
{
    return w->kv[g][kvp__seq_slot(s, g, pos)];
}

/* The sequence's KV as its tables show it; a tail that is still to be copied is read at its source,
 * and so is a copy on write. */
static void check_sequence(const world *w, const kvp__seq *s)
{
    uint32_t b = w->pool.block_tokens;
    for (uint32_t g = 0; g < w->pool.n_groups; g++) {
        uint64_t v = 0;
        for (uint32_t p = 0; p < s->computed; p++) {
            v = mix(v, s->tokens[p], g);
            uint64_t at = (uint64_t)kvp__seq_slot(s, g, p);
            if (s->copy_kind != KVP__COPY_NONE && p / b == s->copy_block)
                at = (uint64_t)s->copy_src[g] * b + p % b;
            if (w->kv[g][at] != v)
                fail_msg("group %u: position %u of a sequence of %u is not its own", g, p,
                         s->length);
        }
    }
}

static void check_node(const world *w, uint32_t node)
{
    const kvp__prefix *x = &w->prefix;
    uint32_t b = w->pool.block_tokens, parent = x->nodes[node].parent;
    for (uint32_t g = 0; g < w->pool.n_groups; g++) {
        uint64_t v = 0;
        if (parent < w->pool.n_blocks)
            v = w->kv[g][(size_t)kvp__prefix_block(x, parent, g) * b + b - 1];
        for (uint32_t i = 0; i < x->nodes[node].n; i++) {
            v = mix(v, x->tokens[(size_t)node * b + i], g);
            if (w->kv[g][(size_t)kvp__prefix_block(x, node, g) * b + i] != v)
                fail_msg("group %u: token %u of published node %u is not its own", g, i, node);
        }
    }
}

static void check_books(world *w)
{
    kvp_error e = {.size = sizeof e};
    kvp_status status = KVP_OK;
    kvp__check_begin(&w->pool);
    for (uint32_t i = 0; i < w->n_seqs && status == KVP_OK; i++)
        status = kvp__check_seq(w->seqs[i], &e);
    if (status == KVP_OK)
        status = kvp__check_end(&w->pool, w->has_prefix ? &w->prefix : NULL, &e);
    if (status != KVP_OK) fail_msg("%s", e.text);
}

void world_check(world *w)
{
    check_books(w);
    for (uint32_t i = 0; i < w->n_seqs; i++) check_sequence(w, w->seqs[i]);
    for (uint32_t i = 0; w->has_prefix && i < w->pool.n_blocks; i++)
        if (w->prefix.nodes[i].n) check_node(w, i);
}

/* --- steps --- */

uint32_t world_cached(world *w, const kvp__seq *s)
{
    kvp__hit h = kvp__prefix_lookup(&w->prefix, s->root, s->tokens, s->length);
    return kvp__hit_tokens(&w->prefix, &h);
}

uint32_t world_attach(world *w, kvp__seq *s)
{
    if (!w->has_prefix) return 0;
    uint32_t before = s->computed;
    kvp__hit h = kvp__prefix_lookup(&w->prefix, s->root, s->tokens, s->length);
    assert_int_equal(kvp__seq_attach(s, &h, 0, NULL), KVP_OK);
    return s->computed - before;
}

static void *copy_of(const void *p, size_t bytes)
{
    void *c = malloc(bytes ? bytes : 1);
    assert_non_null(c);
    if (bytes) memcpy(c, p, bytes);
    return c;
}

void world_launch(world *w, world_flight *f, kvp__seq *const *seqs, const uint32_t *rows,
                  uint32_t n)
{
    memset(f, 0, sizeof *f);
    for (uint32_t i = 0; i < n; i++) {
        if (rows[i] == 0) continue;
        uint32_t want = kvp__seq_need(seqs[i], rows[i]);
        uint32_t before = kvp__pool_available(&w->pool), used = world_used(w);
        kvp_status status = kvp__seq_reserve(seqs[i], rows[i], NULL);
        if (status != KVP_OK) {
            assert_int_equal(status, KVP_ERR_NO_BLOCKS);
            assert_true(want > before);
            assert_int_equal(used, world_used(w));
            continue;
        }
        assert_int_equal(before - kvp__pool_available(&w->pool), want);
        f->ran |= 1ull << i;
        f->seqs[f->n] = seqs[i];
        f->first[f->n] = seqs[i]->computed;
        f->rows[f->n++] = rows[i];
    }
    for (uint32_t i = 0; i < f->n; i++) {
        kvp__seq *s = f->seqs[i];
        f->n_copies += kvp__seq_copies(s, &f->copies[f->n_copies]);
        for (uint32_t g = 0; g < w->pool.n_groups; g++)
            f->tables[i][g] = copy_of(s->tables[g], s->n_blocks * sizeof(uint32_t));
        f->tokens[i] = copy_of(s->tokens, s->length * sizeof(int32_t));
    }
    world_check(w);
    kvp__pool_fence_raise(&w->pool);
}

static void run_copies(world *w, const world_flight *f)
{
    uint32_t b = w->pool.block_tokens;
    for (uint32_t i = 0; i < f->n_copies; i++) {
        const kvp__copy *c = &f->copies[i];
        assert_true(c->tokens > 0 && c->tokens < b);
        for (uint32_t j = 0; j < f->n_copies; j++)
            if (f->copies[j].group == c->group) {
                assert_true(f->copies[j].src != c->dst);
                assert_true(i == j || f->copies[j].dst != c->dst);
            }
        memcpy(&w->kv[c->group][(size_t)c->dst * b], &w->kv[c->group][(size_t)c->src * b],
               c->tokens * sizeof(uint64_t));
    }
}

void world_land(world *w, world_flight *f, bool lost)
{
    uint32_t b = w->pool.block_tokens;
    bool stores = !lost || f->spoiled;
    if (stores) run_copies(w, f);
    for (uint32_t i = 0; i < f->n; i++) {
        for (uint32_t g = 0; g < w->pool.n_groups; g++) {
            const uint32_t *t = f->tables[i][g];
            for (uint32_t p = f->first[i]; p < f->first[i] + f->rows[i]; p++) {
                uint64_t before = p ? w->kv[g][(size_t)t[(p - 1) / b] * b + (p - 1) % b] : 0;
                if (stores)
                    w->kv[g][(size_t)t[p / b] * b + p % b] =
                        mix(before, f->tokens[i][p], g) + lost;
            }
            free(f->tables[i][g]);
        }
        free(f->tokens[i]);
    }
    for (uint32_t i = 0; i < f->n; i++) {
        if (!f->seqs[i]) continue;
        if (lost)
            kvp__seq_abort(f->seqs[i]);
        else
            kvp__seq_commit(f->seqs[i], f->rows[i]);
    }
    kvp__pool_fence_drop(&w->pool);
    world_check(w);
}

uint64_t world_step(world *w, kvp__seq *const *seqs, const uint32_t *rows, uint32_t n)
{
    world_flight f;
    world_launch(w, &f, seqs, rows, n);
    world_land(w, &f, false);
    return f.ran;
}

bool world_run(world *w, kvp__seq *s)
{
    world_attach(w, s);
    if (s->computed == s->length) return true;
    uint32_t rows = s->length - s->computed;
    return world_step(w, &s, &rows, 1) == 1;
}
