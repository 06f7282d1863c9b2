/*
 * A device of arithmetic for the scheduler's tests: the "KV" of a token is a digest of all tokens
 * up to and including it, and the next token is a function of the last digest. A row reads every
 * slot that its context needs and compares it with the digest computed from the tokens alone, so a
 * block that was handed out too early, published before it was written, copied too short or shared
 * wrongly shows at once, and a sequence's output is known in advance.
 *
 * Rooms are checked after every operation (sim_check recounts blocks, prefixes and lists).
 */
#ifndef TESTS_SCHED_SIM_H
#define TESTS_SCHED_SIM_H

#include "sched/sched.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define SIM_SEQS 256
#define SIM_VOCABULARY 40

typedef struct sim_options {
    uint32_t groups, blocks, block_tokens; /* 0: 1 group, 64 blocks of 4 */
    bool no_cache;
    uint32_t budget, max_sequences, watermark, share, chunk; /* 0: 64, 8, none, 500, 16 */
    uint64_t seed;
} sim_options;

typedef struct sim_seq {
    kvp__seq seq;
    kvp__sched_entry entry;
    bool alive;
    bool by_host;          /* the host chooses its tokens */
    bool asks;             /* a token is wanted from the host */
    int32_t given;         /* which one it would be */
    uint32_t max_tokens;   /* to generate */
    uint32_t generated;
    uint32_t rows, logits_rows;
    uint32_t endings;
    uint32_t ending;       /* KVP_END_... of the last one */
    uint32_t preempted_at; /* length when it was seen preempted last */
} sim_seq;

typedef struct sim {
    kvp__hooks hooks;
    kvp__pool pool;
    kvp__prefix prefix;
    kvp__sched_holders holders;
    kvp__sched sched;
    sim_options o;
    uint64_t *kv;          /* [group][block][offset] */
    sim_seq seqs[SIM_SEQS];
    uint64_t random;
    uint64_t steps;
    uint64_t allocations;  /* through the hooks */
    bool forked;           /* forks share token buffers: an append may have to copy one */
    bool stalled;          /* by the last step */
    bool abort_next;       /* the next step is aborted instead of committed */
    void (*in_flight)(struct sim *s); /* what the host does while a step runs; may be NULL */
    void (*planned)(struct sim *s, const kvp__sched_step *p); /* looks at a plan; may be NULL */
} sim;

sim *sim_create(const sim_options *o);
/* Destroys what is alive and checks that every block is free or idle, and free after a reset. */
void sim_destroy(sim *s);

uint32_t sim_random(sim *s, uint32_t below);
/* Tokens that nobody else has, or a function of `text` and the position. */
void sim_text(int32_t *out, uint32_t n, uint64_t text);

/* A parked sequence with n tokens of `text`. */
sim_seq *sim_new(sim *s, uint64_t text, uint32_t n, uint32_t max_tokens, int32_t priority);
sim_seq *sim_fork(sim *s, sim_seq *q, uint32_t length);
void sim_append(sim *s, sim_seq *q, const int32_t *tokens, uint32_t n);
void sim_append_text(sim *s, sim_seq *q, uint64_t text, uint32_t n);
void sim_truncate(sim *s, sim_seq *q, uint32_t length);
kvp_status sim_add(sim *s, sim_seq *q);
void sim_cancel(sim *s, sim_seq *q);
void sim_free(sim *s, sim_seq *q);
/* The host gives the token that is wanted. */
void sim_give(sim *s, sim_seq *q);

/* Plans, runs and commits (or aborts) a step. Returns its rows. */
uint32_t sim_step(sim *s);
/* Steps until no sequence has work; the host answers at once. Fails when that takes more than
 * `most` steps. */
void sim_run(sim *s, uint32_t most);

/* What the cache has of n tokens of `text`. */
uint32_t sim_probe(sim *s, uint64_t text, uint32_t n);

/* Token `n` that follows the first `n` tokens. */
int32_t sim_next(const int32_t *tokens, uint32_t n);
/* The last `generated` tokens are what the tokens before them lead to. */
void sim_expect_output(const sim_seq *q);

void sim_check(sim *s);

#endif
