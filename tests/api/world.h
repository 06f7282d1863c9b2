/*
 * What the tests of the public interface share: tiny random models, the oracle (the same tokens alone
 * in a fresh pool), and small loops that end a test rather than hang. Only kvpage.h is used.
 */
#ifndef TESTS_API_WORLD_H
#define TESTS_API_WORLD_H

#include "support/gguf_writer.h"

#include <kvpage.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { WORLD_MAX_TAGS = 4096, WORLD_MAX_OUT = 256 };

/* The model a description makes; NULL: the default one. Owns nothing of the file: it is kept until
 * world_forget. */
kvp_model *world_model(const gw_model *o);
void world_forget(void);

/* Deterministic tokens that differ with `salt`. */
void world_tokens(int32_t *out, size_t n, uint64_t salt, uint32_t vocabulary);

kvp_pool *world_pool(kvp_model *m, uint64_t blocks, uint32_t block_tokens);
/* Inline, so that one thread decides when things happen. */
kvp_batch *world_batch(kvp_pool *p, const kvp_batch_options *o);
/* A sequence with these tokens, mode and limit; tag given back in events. */
kvp_seq *world_seq(kvp_pool *p, const int32_t *tokens, size_t n, uint64_t tag, uint32_t mode,
                   uint64_t max_tokens);

/* What came out, by tag. */
typedef struct world_out {
    uint32_t tokens, logits, endings;
    uint32_t ending; /* of the last one */
    kvp_status status;
    int32_t ids[WORLD_MAX_OUT];
    kvp_usage usage;
} world_out;

/* Steps once and takes all events; `out` is indexed by tag and may be NULL. */
kvp_status world_step(kvp_batch *b, world_out *out);
/* Until DONE (or STALLED, which is returned). */
kvp_status world_run(kvp_batch *b, world_out *out);
/* Steps until `tag` has so many tokens or an ending. */
void world_until(kvp_batch *b, world_out *out, uint64_t tag, uint32_t tokens);

/* The last row's logits of these tokens, alone in a fresh pool; free() them. */
float *world_oracle(kvp_model *m, const int32_t *tokens, size_t n);
/* The same with a KV format. */
float *world_oracle_kv(kvp_model *m, const int32_t *tokens, size_t n, uint32_t format);
/* The greedy continuation, alone in a fresh pool. */
void world_greedy(kvp_model *m, const int32_t *prompt, size_t n, int32_t *out, size_t count);
/* The pending logits of a sequence, compared bit for bit with the oracle of its own tokens. */
void world_expect_oracle(kvp_model *m, kvp_seq *s);
/* used + idle + free = blocks, and the pool's own recount. */
void world_account(kvp_pool *p);
kvp_pool_stats world_stats(kvp_pool *p);
kvp_seq_info world_info(kvp_seq *s);
uint32_t world_vocabulary(kvp_model *m);

#endif
