/*
 * The walker: lists, states and counters of the scheduler against one another. See sched.h.
 */
#include "sched/states.h"

static kvp_status contradiction(kvp_error *err, const kvp__sched_entry *e, const char *what)
{
    return kvp__fail(err, KVP_ERR_INTERNAL, "scheduler: entry %llu (state %u) %s",
                     (unsigned long long)e->arrival, e->state, what);
}

static const char *wrong_entry(const kvp__sched *s, const kvp__sched_entry *e,
                               const kvp__sched_list *l)
{
    const kvp__seq *q = e->seq;
    uint32_t state = l == &s->waiting ? KVP_SEQ_WAITING
                     : l == &s->prefill ? KVP_SEQ_PREFILL : KVP_SEQ_DECODE;
    if (e->order_list != l) return "is in a list that it does not know of";
    if (!e->in_batch) return "is in a list without being in the batch";
    if (e->state != state) return "is in a list of another state";
    if (e->paused || e->host) return "is in a list although it is paused or asks the host";
    if (l != &s->waiting && !e->admitted) return "runs without having been admitted";
    if (l != &s->waiting && e->hold_list) return "runs and counts as a holder";
    if (l != &s->waiting && q->computed == q->length && !e->planned)
        return "runs with nothing to compute";
    if (l == &s->decode && q->length - q->computed != 1 && !e->planned)
        return "decodes with other than one token to compute";
    if (l != &s->decode && e->order.next && kvp__sched_ahead(e->order.next, e))
        return "is out of order";
    if (e->planned && (e->planned > s->step.n_items ||
                       s->step.items[e->planned - 1].entry != e))
        return "is planned under another entry's item";
    return NULL;
}

static kvp_status check_order(const kvp__sched *s, const kvp__sched_list *l, kvp_error *err)
{
    uint32_t n = 0;
    for (const kvp__sched_entry *e = l->head; e; e = e->order.next, n++) {
        const char *what = n == l->count ? "is in a list longer than its count"
                                         : wrong_entry(s, e, l);
        if (what) return contradiction(err, e, what);
    }
    if (n == l->count) return KVP_OK;
    return kvp__fail(err, KVP_ERR_INTERNAL, "scheduler: a list of %u entries counts %u", n,
                     l->count);
}

static kvp_status check_holders(const kvp__sched_holders *h, uint32_t which, kvp_error *err)
{
    static const uint32_t states[KVP__HOLDS] = { KVP_SEQ_PARKED, KVP_SEQ_PAUSED, KVP_SEQ_HOST,
                                                 KVP_SEQ_WAITING };
    const kvp__sched_list *l = &h->lists[which];
    uint32_t n = 0;
    for (const kvp__sched_entry *e = l->head; e; e = e->hold.next, n++) {
        const char *what = n == l->count ? "is a holder in a list longer than its count"
                           : e->hold_list != l ? "is in a list of holders that it does not know of"
                           : e->state != states[which] ? "is a holder of another state"
                           : e->seq->n_blocks <= e->seq->pin_blocks ? "is a holder of nothing"
                                                                    : NULL;
        if (what) return contradiction(err, e, what);
    }
    if (n == l->count) return KVP_OK;
    return kvp__fail(err, KVP_ERR_INTERNAL, "scheduler: %u holders count %u", n, l->count);
}

kvp_status kvp__sched_check(const kvp__sched *s, kvp_error *err)
{
    const kvp__sched_list *lists[] = { &s->waiting, &s->prefill, &s->decode };
    uint32_t listed = 0;
    for (size_t i = 0; i < KVP__COUNT(lists); i++) {
        kvp_status st = check_order(s, lists[i], err);
        if (st != KVP_OK) return st;
        listed += lists[i]->count;
    }
    for (uint32_t h = 0; h < KVP__HOLDS; h++) {
        kvp_status st = check_holders(s->holders, h, err);
        if (st != KVP_OK) return st;
    }
    if (kvp__sched_running(s) > s->o.max_sequences || listed > s->entries)
        return kvp__fail(err, KVP_ERR_INTERNAL, "scheduler: %u run, %u are listed, %u are there",
                         kvp__sched_running(s), listed, s->entries);
    if (s->planned != (s->pool->fence != 0))
        return kvp__fail(err, KVP_ERR_INTERNAL, "scheduler: planned %d but the fence is %u",
                         s->planned, s->pool->fence);
    return KVP_OK;
}
