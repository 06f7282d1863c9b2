/*
 * Random operations on pool, prefix and sequences, held against a naive model: every sequence keeps
 * a plain list of its tokens, every prefix that was ever computed is kept in an archive, and a
 * lookup is searched for by comparing token strings one by one. The world reads all KV back after
 * every operation.
 */
#include "support/cache_world.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define MAX_LENGTH 96
#define ARCHIVE 4096

typedef struct text {
    uint32_t salt, length;
    int32_t tokens[MAX_LENGTH];
} text;

typedef struct member {
    kvp__seq *seq;
    text text;
    bool touched; /* by the host while its step was in flight */
} member;

typedef struct game {
    world w;
    uint64_t random;
    member members[WORLD_SEQS];
    uint32_t n;
    text *archive; /* what was ever computed, a ring */
    uint64_t n_archive;
    uint32_t max_seqs, alphabet;
    bool cuts;     /* truncate, rewind, fork inside: then not all that was computed stays cached */
    world_flight flight;
    bool in_flight;
    uint32_t deepest; /* most nodes that share a place in the child index */
} game;

static uint32_t roll(game *g, uint32_t n)
{
    g->random ^= g->random << 13;
    g->random ^= g->random >> 7;
    g->random ^= g->random << 17;
    return (uint32_t)((g->random >> 20) % n);
}

static const char *const salts[3] = {NULL, "a", "b"};

/* --- the model --- */

static uint32_t same(const int32_t *a, uint32_t na, const int32_t *b, uint32_t nb)
{
    uint32_t i = 0;
    while (i < na && i < nb && a[i] == b[i]) i++;
    return i;
}

static void remember(game *g, const member *m, uint32_t length)
{
    text *t = &g->archive[g->n_archive++ % ARCHIVE];
    *t = m->text;
    t->length = length;
}

/* Most first tokens that this prompt shares with anything computed under its salt. */
static uint32_t best_ever(const game *g, const member *m)
{
    uint32_t best = 0;
    uint64_t n = g->n_archive < ARCHIVE ? g->n_archive : ARCHIVE;
    for (uint64_t i = 0; i < n; i++) {
        const text *t = &g->archive[i];
        if (t->salt != m->text.salt) continue;
        uint32_t k = same(t->tokens, t->length, m->text.tokens, m->text.length);
        if (k > best) best = k;
    }
    return best;
}

/* The whole token string that ends in this node. */
static uint32_t spell(const game *g, uint32_t node, int32_t *out)
{
    const kvp__prefix *x = &g->w.prefix;
    uint32_t b = g->w.pool.block_tokens, path[MAX_LENGTH], depth = 0, length = 0;
    for (; node < g->w.pool.n_blocks; node = x->nodes[node].parent) path[depth++] = node;
    while (depth) {
        uint32_t i = path[--depth];
        memcpy(out + length, x->tokens + (size_t)i * b, x->nodes[i].n * sizeof *out);
        length += x->nodes[i].n;
    }
    return length;
}

static uint32_t root_of(const game *g, uint32_t node)
{
    while (node < g->w.pool.n_blocks) node = g->w.prefix.nodes[node].parent;
    return node - g->w.pool.n_blocks;
}

/* The same among the nodes that are there now. Also counts siblings with one first token. */
static uint32_t best_now(game *g, const member *m)
{
    const kvp__prefix *x = &g->w.prefix;
    uint32_t best = 0;
    int32_t string[MAX_LENGTH + 256];
    g->deepest = 0;
    for (uint32_t i = 0; i < g->w.pool.n_blocks; i++) {
        if (x->nodes[i].n == 0 || root_of(g, i) != m->seq->root) continue;
        uint32_t n = spell(g, i, string), brothers = 0;
        uint32_t k = same(string, n, m->text.tokens, m->text.length);
        if (k > best) best = k;
        for (uint32_t j = 0; j < g->w.pool.n_blocks; j++)
            brothers += x->nodes[j].n && x->nodes[j].parent == x->nodes[i].parent;
        if (brothers > g->deepest) g->deepest = brothers;
    }
    return best;
}

static void check_hit(game *g, const member *m)
{
    kvp__hit h = kvp__prefix_lookup(&g->w.prefix, m->seq->root, m->seq->tokens, m->seq->length);
    uint32_t hit = kvp__hit_tokens(&g->w.prefix, &h), limit = m->text.length - 1;
    uint32_t now = best_now(g, m), ever = best_ever(g, m);
    if (now > limit) now = limit;
    if (ever > limit) ever = limit;
    assert_true(hit <= now);
    if (g->n_archive <= ARCHIVE) assert_true(now <= ever);
    if (g->deepest <= KVP__PREFIX_CANDIDATES) {
        assert_int_equal(hit, now);
        if (!g->cuts && g->w.pool.counters.blocks_evicted == 0) assert_int_equal(hit, ever);
    }
    uint32_t idle = 0, node = h.last;
    for (uint32_t i = 0; i < h.full; i++, node = g->w.prefix.nodes[node].parent)
        idle += g->w.prefix.nodes[node].held == 0;
    assert_int_equal(idle, h.idle);
}

static void check_tokens(const game *g)
{
    for (uint32_t i = 0; i < g->n; i++) {
        const member *m = &g->members[i];
        assert_int_equal(m->seq->length, m->text.length);
        if (m->text.length)
            assert_memory_equal(m->seq->tokens, m->text.tokens,
                                m->text.length * sizeof(int32_t));
    }
}

/* --- what the host does --- */

static void add(game *g)
{
    if (g->n == g->max_seqs) return;
    member *m = &g->members[g->n++];
    memset(m, 0, sizeof *m);
    m->text.salt = roll(g, 4) ? 0 : roll(g, 3);
    m->seq = world_seq(&g->w, salts[m->text.salt]);
}

/* Mostly what another sequence has at this place, so that prefixes meet. */
static void append(game *g, member *m)
{
    const member *other = &g->members[roll(g, g->n)];
    uint32_t n = roll(g, 2 * g->w.pool.block_tokens + 2);
    bool follow = roll(g, 3) > 0;
    int32_t tokens[MAX_LENGTH];
    if (n > MAX_LENGTH - m->text.length) n = MAX_LENGTH - m->text.length;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t at = m->text.length + i;
        tokens[i] = follow && at < other->text.length ? other->text.tokens[at]
                                                      : (int32_t)roll(g, g->alphabet);
    }
    assert_int_equal(kvp__seq_append(m->seq, tokens, n, NULL), KVP_OK);
    memcpy(m->text.tokens + m->text.length, tokens, n * sizeof *tokens);
    m->text.length += n;
}

static void fork_one(game *g, member *m)
{
    if (g->n == g->max_seqs) return;
    member *c = &g->members[g->n++];
    /* A fork in the middle of a block cuts what is cached in it once it holds it alone. */
    uint32_t length = !g->cuts || roll(g, 3) ? m->text.length : roll(g, m->text.length + 1);
    *c = *m;
    c->touched = false;
    c->text.length = length;
    c->seq = world_fork(&g->w, m->seq, length);
}

static void truncate(game *g, member *m)
{
    uint32_t length = roll(g, m->text.length + 1);
    if (roll(g, 2) && m->text.length) length = m->text.length - 1 - roll(g, m->text.length) / 8;
    assert_int_equal(kvp__seq_truncate(m->seq, length, NULL), KVP_OK);
    m->text.length = length;
}

static void end(game *g, member *m)
{
    for (uint32_t i = 0; i < g->flight.n && g->in_flight; i++)
        if (g->flight.seqs[i] == m->seq) g->flight.seqs[i] = NULL;
    world_end(&g->w, m->seq);
    *m = g->members[--g->n];
}

static void host(game *g)
{
    if (g->n == 0) {
        add(g);
        return;
    }
    member *m = &g->members[roll(g, g->n)];
    m->touched = true;
    switch (roll(g, 16)) {
    case 0: case 1: add(g); break;
    case 2: case 3: case 4: case 5: append(g, m); break;
    case 6: case 7: fork_one(g, m); break;
    case 8: case 9: if (g->cuts) truncate(g, m); break;
    case 10: kvp__seq_pin(m->seq, roll(g, m->text.length + 1), NULL); break;
    case 11: kvp__seq_release_unpinned(m->seq); break;
    case 12: kvp__seq_release(m->seq); break;
    case 13: end(g, m); break;
    case 14: if (g->cuts) kvp__seq_rewind(m->seq, roll(g, m->seq->computed + 1)); break;
    case 15:
        if (g->w.has_prefix && roll(g, 8) == 0) (void)kvp__prefix_reset(&g->w.prefix, NULL);
        break;
    }
}

/* --- steps --- */

static void try_attach(game *g, member *m)
{
    if (!g->w.has_prefix || m->text.length == 0) return;
    check_hit(g, m);
    kvp__hit h = kvp__prefix_lookup(&g->w.prefix, m->seq->root, m->seq->tokens, m->seq->length);
    uint32_t b = g->w.pool.block_tokens, room = (m->text.length + b - 1) / b - h.full;
    uint32_t before = m->seq->computed, found = kvp__hit_tokens(&g->w.prefix, &h);
    uint32_t available = kvp__pool_available(&g->w.pool);
    kvp_status status = kvp__seq_attach(m->seq, &h, room, NULL);
    world_check(&g->w);
    if (status == KVP_OK) {
        assert_true(m->seq->computed >= before);
        assert_true(m->seq->computed <= (found > before ? found : before));
    } else {
        assert_int_equal(status, KVP_ERR_NO_BLOCKS);
        assert_int_equal(m->seq->computed, before);
        assert_int_equal(kvp__pool_available(&g->w.pool), available);
        assert_true(available < room + h.idle);
    }
}

static void launch(game *g)
{
    kvp__seq *seqs[WORLD_SEQS];
    uint32_t rows[WORLD_SEQS], n = 0;
    for (uint32_t i = 0; i < g->n; i++) {
        member *m = &g->members[i];
        m->touched = false;
        if (roll(g, 2)) continue;
        if (roll(g, 4)) try_attach(g, m);
        uint32_t left = m->text.length - m->seq->computed;
        if (left == 0) continue;
        rows[n] = roll(g, 3) ? left : 1 + roll(g, left);
        (void)kvp__seq_reserve(m->seq, rows[n], NULL);
        seqs[n++] = m->seq;
    }
    /* One that was planned already is preempted in favour of the others. */
    if (n && roll(g, 4) == 0) kvp__seq_release(seqs[--n]);
    world_check(&g->w);
    world_launch(&g->w, &g->flight, seqs, rows, n);
    for (uint32_t i = 0; i < g->n; i++) {
        bool runs = false;
        for (uint32_t j = 0; j < g->flight.n; j++) runs |= g->flight.seqs[j] == g->members[i].seq;
        if (!runs) kvp__seq_abort(g->members[i].seq);
    }
    g->in_flight = true;
}

static void land(game *g)
{
    kvp__seq before[WORLD_SEQS];
    bool lost = roll(g, 12) == 0;
    g->flight.spoiled = roll(g, 2);
    /* Some are stopped in the middle of their rows. */
    for (uint32_t j = 0; j < g->flight.n; j++)
        if (roll(g, 6) == 0) g->flight.rows[j] = roll(g, g->flight.rows[j] + 1);
    for (uint32_t i = 0; i < g->n; i++) before[i] = *g->members[i].seq;
    world_land(&g->w, &g->flight, lost);
    g->in_flight = false;
    for (uint32_t i = 0; i < g->n; i++) {
        const member *m = &g->members[i];
        const kvp__seq *s = m->seq, *was = &before[i];
        if (s->peak > was->peak || s->usage.computed > was->usage.computed)
            remember(g, m, s->computed);
        assert_int_equal(s->peak - was->peak, (s->usage.cached - was->usage.cached) +
                         (s->usage.computed - was->usage.computed) -
                         (s->usage.recomputed - was->usage.recomputed));
        if (m->touched || lost) continue;
        for (uint32_t j = 0; j < g->flight.n; j++)
            if (g->flight.seqs[j] == s)
                assert_int_equal(s->computed, g->flight.first[j] + g->flight.rows[j]);
    }
}

static void play(uint64_t seed, uint32_t steps, uint32_t blocks, uint32_t b, uint32_t groups,
                 uint32_t flags, bool cuts)
{
    static game g;
    memset(&g, 0, sizeof g);
    g.random = seed * 0x9e3779b97f4a7c15u + 1;
    g.archive = malloc(ARCHIVE * sizeof *g.archive);
    assert_non_null(g.archive);
    g.max_seqs = blocks > 100 ? 24 : 10;
    g.alphabet = 2 + roll(&g, 6);
    g.cuts = cuts;
    world_make(&g.w, blocks, b, groups, flags | WORLD_SHUFFLED);
    for (uint32_t i = 0; i < steps; i++) {
        for (uint32_t k = roll(&g, 4); k > 0; k--) {
            host(&g);
            world_check(&g.w);
        }
        launch(&g);
        for (uint32_t k = roll(&g, 3) ? 0 : roll(&g, 4); k > 0; k--) {
            host(&g);
            world_check(&g.w);
        }
        land(&g);
        check_tokens(&g);
    }
    world_free(&g.w);
    free(g.archive);
}

static void test_small_pools(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 60; seed++) {
        uint32_t b = 1u << seed % 5;
        play(seed, 150, (uint32_t)(6 + seed % 11) * (b < 4 ? 4 : 1), b, 1 + seed % 3, 0, true);
    }
}

/* Nothing is evicted and nothing cut: the cache serves all that was ever computed. */
static void test_nothing_is_lost_without_need(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 10; seed++)
        play(seed + 1000, 40, 4000, 1u << seed % 5, 1, 0, false);
}

static void test_without_prefix_cache(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 15; seed++) {
        uint32_t b = 1u << seed % 5;
        play(seed + 2000, 150, (uint32_t)(6 + seed % 11) * (b < 4 ? 4 : 1), b, 1 + seed % 3,
             WORLD_NO_PREFIX, true);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_small_pools),
        cmocka_unit_test(test_nothing_is_lost_without_need),
        cmocka_unit_test(test_without_prefix_cache),
    };
    return cmocka_run_group_tests_name("random operations", tests, NULL, NULL);
}
