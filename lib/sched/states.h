/*
 * Inside the scheduler: changes of state, shared by sched.c (what the engine asks for) and plan.c
 * (what planning decides). Called by these two alone.
 */
#ifndef KVP_SCHED_STATES_H
#define KVP_SCHED_STATES_H

#include "sched/sched.h"

static inline bool kvp__sched_is_running(const kvp__sched_entry *e)
{
    return e->state == KVP_SEQ_PREFILL || e->state == KVP_SEQ_DECODE;
}

static inline uint32_t kvp__sched_running(const kvp__sched *s)
{
    return s->prefill.count + s->decode.count;
}

static inline uint64_t kvp__sched_pool_tokens(const kvp__pool *p)
{
    return (uint64_t)p->n_blocks * p->block_tokens;
}

/* Its item in the planned step; NULL: it has none. */
static inline kvp__sched_item *kvp__sched_item_of(kvp__sched *s, const kvp__sched_entry *e)
{
    return e->planned ? &s->step.items[e->planned - 1] : NULL;
}

/* Whether a is ahead of b: by priority, then by arrival. */
bool kvp__sched_ahead(const kvp__sched_entry *a, const kvp__sched_entry *b);

/* To the end of a list that is not kept in order (again, if it is in there). */
void kvp__sched_order_append(kvp__sched_list *l, kvp__sched_entry *e);

/* Puts the entry where holders of its state are found, if it has something to give; its place in
 * that list is kept if it was there already. */
void kvp__sched_hold_settle(kvp__sched_entry *e);
void kvp__sched_hold_leave(kvp__sched_entry *e);

/* The states: prefill or decode, waiting, one without a list (paused, host), parked. */
void kvp__sched_run(kvp__sched *s, kvp__sched_entry *e);
void kvp__sched_wait_turn(kvp__sched *s, kvp__sched_entry *e);
void kvp__sched_stay(kvp__sched_entry *e, uint32_t state);
void kvp__sched_park(kvp__sched *s, kvp__sched_entry *e);

/* Back from the host or from a pause. Who has all its blocks still and is ahead of everybody that
 * waits need not wait for the next admission. */
void kvp__sched_come_back(kvp__sched *s, kvp__sched_entry *e);

/* The host is asked for the next token. */
void kvp__sched_ask_host(kvp__sched_entry *e);

/* Takes away the blocks, and what is planned; what is published of them stays cached. */
void kvp__sched_give_up(kvp__sched_entry *e);

/* Sequences, running and waiting, for readers in other threads. */
void kvp__sched_show_levels(kvp__sched *s);

#endif
