/*
 * What the engine asks of the scheduler besides planning: entries come and go, pause, append, are
 * cut, get their tokens. See sched.h for the contract and states.h for the lists.
 */
#include "sched/states.h"

#include <string.h>

void kvp__sched_entry_init(kvp__sched_entry *e, kvp__sched_holders *h, kvp__seq *seq,
                           int32_t priority)
{
    memset(e, 0, sizeof *e);
    e->seq = seq;
    e->holders = h;
    e->priority = priority;
    e->state = KVP_SEQ_PARKED;
    e->base = seq->usage;
    kvp__sched_hold_settle(e);
}

void kvp__sched_entry_fini(kvp__sched_entry *e) { kvp__sched_hold_leave(e); }

void kvp__sched_pinned(kvp__sched_entry *e) { kvp__sched_hold_settle(e); }

kvp__seq_usage kvp__sched_usage(const kvp__sched_entry *e)
{
    kvp__seq_usage u = e->seq->usage;
    u.cached -= e->base.cached;
    u.reattached -= e->base.reattached;
    u.computed -= e->base.computed;
    u.recomputed -= e->base.recomputed;
    u.copied -= e->base.copied;
    return u;
}

/* --- a batch --- */

kvp_status kvp__sched_init(kvp__sched *s, const kvp__hooks *hooks, const kvp__sched_options *o,
                           kvp__pool *pool, kvp__prefix *prefix, kvp__sched_holders *holders,
                           kvp_error *err)
{
    memset(s, 0, sizeof *s);
    size_t n = o->max_sequences;
    kvp__sched_item *items = kvp__alloc_array(hooks, n, sizeof *items);
    kvp__copy *copies = kvp__alloc_array(hooks, n * pool->n_groups, sizeof *copies);
    kvp__sched_entry **ended = kvp__alloc_array(hooks, n, sizeof *ended);
    if (!items || !copies || !ended) {
        kvp__free(hooks, items, n * sizeof *items);
        kvp__free(hooks, copies, n * pool->n_groups * sizeof *copies);
        kvp__free(hooks, ended, n * sizeof *ended);
        return kvp__fail(err, KVP_ERR_NO_MEMORY, "batch: no memory to plan for %zu sequences", n);
    }
    s->hooks = hooks;
    s->o = *o;
    s->pool = pool;
    s->prefix = prefix;
    s->holders = holders;
    s->step.items = items;
    s->step.copies = copies;
    s->step.ended = ended;
    if (o->watermark != KVP_WATERMARK_NONE)
        s->watermark = (uint32_t)((uint64_t)pool->n_blocks * o->watermark / 1000);
    return KVP_OK;
}

void kvp__sched_fini(kvp__sched *s)
{
    if (!s->hooks) return;
    size_t n = s->o.max_sequences;
    kvp__free(s->hooks, s->step.items, n * sizeof *s->step.items);
    kvp__free(s->hooks, s->step.copies, n * s->pool->n_groups * sizeof *s->step.copies);
    kvp__free(s->hooks, s->step.ended, n * sizeof *s->step.ended);
    memset(s, 0, sizeof *s);
}

kvp_status kvp__sched_fits(const kvp__pool *pool, uint64_t tokens, kvp_error *err)
{
    if (tokens <= kvp__sched_pool_tokens(pool)) return KVP_OK;
    uint64_t needed = kvp__ceil_div(tokens, pool->block_tokens);
    return kvp__fail_need(err, KVP_ERR_TOO_LARGE, needed, pool->n_blocks,
                          "%llu tokens need %llu blocks, the pool has %llu",
                          (unsigned long long)tokens, (unsigned long long)needed,
                          (unsigned long long)pool->n_blocks);
}

kvp_status kvp__sched_add(kvp__sched *s, kvp__sched_entry *e, uint64_t max_length, kvp_error *err)
{
    kvp__seq *seq = e->seq;
    if (e->in_batch)
        return kvp__fail(err, KVP_ERR_DUPLICATE, "batch add: the sequence is in the batch already");
    if (seq->length == 0)
        return kvp__fail(err, KVP_ERR_STATE, "batch add: the sequence is empty, append its prompt first");
    kvp_status st = kvp__sched_fits(s->pool, seq->length, err);
    if (st != KVP_OK) return st;
    uint64_t most = kvp__min64(max_length, kvp__sched_pool_tokens(s->pool) + 1);
    most = kvp__min64(kvp__max64(most, seq->length), KVP__MAX_TOKENS);
    st = kvp__seq_reserve_capacity(seq, (uint32_t)most, err);
    if (st != KVP_OK) return st;
    e->owed = seq->computed == seq->length ? seq->length : 0;
    if (e->owed) kvp__seq_rewind(seq, seq->length - 1);
    e->in_batch = true;
    e->arrival = ++s->arrivals;
    e->preemptions = 0;
    e->base = seq->usage;
    s->entries++;
    kvp__sched_wait_turn(s, e);
    kvp__sched_show_levels(s);
    return KVP_OK;
}

void kvp__sched_remove(kvp__sched *s, kvp__sched_entry *e)
{
    if (!e->in_batch) return;
    kvp__sched_item *item = kvp__sched_item_of(s, e);
    if (item) {
        kvp__seq_abort(e->seq);
        item->entry = NULL;
        item->decide = false;
        e->planned = 0;
    }
    kvp__sched_park(s, e);
    kvp__sched_show_levels(s);
}

void kvp__sched_pause(kvp__sched *s, kvp__sched_entry *e)
{
    if (!e->in_batch || e->paused) return;
    e->paused = true;
    kvp__sched_stay(e, KVP_SEQ_PAUSED);
    kvp__sched_show_levels(s);
}

void kvp__sched_resume(kvp__sched *s, kvp__sched_entry *e)
{
    if (!e->paused) return;
    e->paused = false;
    if (e->host) kvp__sched_stay(e, KVP_SEQ_HOST);
    else kvp__sched_come_back(s, e);
    kvp__sched_show_levels(s);
}

void kvp__sched_appended(kvp__sched *s, kvp__sched_entry *e)
{
    if (!e->in_batch || !e->host) return;
    e->host = false;
    e->generating = true;
    if (!e->paused) kvp__sched_come_back(s, e);
    kvp__sched_show_levels(s);
}

void kvp__sched_truncated(kvp__sched *s, kvp__sched_entry *e)
{
    kvp__seq *seq = e->seq;
    if (!e->in_batch) {
        kvp__sched_hold_settle(e);
        return;
    }
    kvp__sched_item *item = kvp__sched_item_of(s, e);
    if (item) item->logits = false;
    e->leader = 0;
    /* `peak` and not `computed`: the host is not to notice whether KV was lost meanwhile. */
    bool owed = e->owed && e->owed == seq->length;
    if (seq->length == seq->peak && !owed) kvp__sched_ask_host(e);
    else if (kvp__sched_is_running(e)) kvp__sched_run(s, e);
    kvp__sched_hold_settle(e);
    kvp__sched_show_levels(s);
}

kvp_status kvp__sched_token(kvp__sched *s, kvp__sched_entry *e, int32_t token, kvp_error *err)
{
    kvp_status st = kvp__seq_append(e->seq, &token, 1, err);
    if (st != KVP_OK) return st;
    e->generating = true;
    if (kvp__sched_is_running(e)) kvp__sched_run(s, e);
    return KVP_OK;
}

void kvp__sched_wait_host(kvp__sched *s, kvp__sched_entry *e)
{
    kvp__sched_ask_host(e);
    kvp__sched_show_levels(s);
}

bool kvp__sched_has_work(const kvp__sched *s)
{
    return s->waiting.count + kvp__sched_running(s) > 0;
}
