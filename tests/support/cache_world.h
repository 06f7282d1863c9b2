/*
 * A pool, its prefix index and sequences over a fake store of KV, for tests of the pure rooms.
 *
 * The fake KV of position p is a number made of the number read at p - 1 through the sequence's own
 * table, of the token, and of the group: like real KV it depends on every token before it, so that
 * a block that is shared, copied, evicted or overwritten wrongly shows in every later position.
 * After each operation everything that any sequence or published node has is read back and compared
 * with what its own token list says, and the invariant walker recounts.
 */
#ifndef TESTS_SUPPORT_CACHE_WORLD_H
#define TESTS_SUPPORT_CACHE_WORLD_H

#include "seq/seq.h"

#define WORLD_SEQS 64

typedef struct world {
    kvp__hooks hooks;
    kvp__pool pool;
    kvp__prefix prefix;
    bool has_prefix;
    uint64_t *kv[KVP__MAX_GROUPS]; /* [n_blocks * block_tokens] */
    kvp__seq *seqs[WORLD_SEQS];
    uint32_t n_seqs;
} world;

#define WORLD_NO_PREFIX 1u
#define WORLD_SHUFFLED 2u /* ids of the groups differ */

void world_make(world *w, uint32_t blocks, uint32_t block_tokens, uint32_t groups, uint32_t flags);
void world_make_hash(world *w, uint32_t blocks, uint32_t block_tokens, kvp__hash_fn hash);
/* Ends all sequences, resets the index, and finds every block free. */
void world_free(world *w);

/* A sequence of the world: `salt` may be NULL. */
kvp__seq *world_seq(world *w, const char *salt);
kvp__seq *world_fork(world *w, kvp__seq *s, uint32_t length);
void world_end(world *w, kvp__seq *s);

/* Appends `count` tokens: first, first + 1, ... */
void world_append(world *w, kvp__seq *s, int32_t first, uint32_t count);

/* Looks up and attaches; how many tokens beyond `computed` it got. */
uint32_t world_attach(world *w, kvp__seq *s);

/* One step: rows[i] rows of seqs[i] (0: none; fewer blocks than wanted: none). Returns a bit per
 * sequence that ran. Copies first, then rows, then commits. */
uint64_t world_step(world *w, kvp__seq *const *seqs, const uint32_t *rows, uint32_t n);
/* The same in two halves, for what happens while a step is in flight. */
typedef struct world_flight {
    kvp__seq *seqs[WORLD_SEQS];
    uint32_t rows[WORLD_SEQS], first[WORLD_SEQS], n;
    uint32_t *tables[WORLD_SEQS][KVP__MAX_GROUPS];
    int32_t *tokens[WORLD_SEQS];
    kvp__copy copies[WORLD_SEQS * KVP__MAX_GROUPS];
    uint32_t n_copies;
    uint64_t ran;
    bool spoiled; /* if it is lost: after its copies and rows were stored, the rows wrongly */
} world_flight;
void world_launch(world *w, world_flight *f, kvp__seq *const *seqs, const uint32_t *rows,
                  uint32_t n);
void world_land(world *w, world_flight *f, bool lost);

/* Computes all of one sequence, after an attach; false: not enough blocks. */
bool world_run(world *w, kvp__seq *s);

/* Recounts everything and reads everything back. */
void world_check(world *w);

/* Copies made, blocks used, ... */
static inline uint32_t world_used(const world *w) { return kvp__pool_used(&w->pool, 0); }
static inline uint32_t world_ref(const world *w, const kvp__seq *s, uint32_t k)
{
    return w->pool.groups[0].blocks[s->tables[0][k]].ref;
}
/* Tokens that the cache would serve of what `s` holds. */
uint32_t world_cached(world *w, const kvp__seq *s);

/* The KV number that position `pos` of `s` should have, and the one that it has. */
uint64_t world_expected(const kvp__seq *s, uint32_t g, uint32_t pos);
uint64_t world_read(const world *w, const kvp__seq *s, uint32_t g, uint32_t pos);

#endif
