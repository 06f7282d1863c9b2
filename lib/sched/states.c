/*
 * States of entries and the lists they are in: every change of state goes through here, so that an
 * entry is always in exactly the list that its state says. See sched.h.
 */
#include "sched/states.h"

/* --- lists --- */

static kvp__sched_link *order_of(kvp__sched_entry *e) { return &e->order; }
static kvp__sched_link *hold_of(kvp__sched_entry *e) { return &e->hold; }

static void list_insert(kvp__sched_list *l, kvp__sched_entry *e, kvp__sched_entry *before,
                        kvp__sched_link *(*of)(kvp__sched_entry *))
{
    kvp__sched_entry *after = before ? of(before)->prev : l->tail;
    of(e)->prev = after;
    of(e)->next = before;
    if (after) of(after)->next = e;
    else l->head = e;
    if (before) of(before)->prev = e;
    else l->tail = e;
    l->count++;
}

static void list_remove(kvp__sched_list *l, kvp__sched_entry *e,
                        kvp__sched_link *(*of)(kvp__sched_entry *))
{
    kvp__sched_link *k = of(e);
    if (k->prev) of(k->prev)->next = k->next;
    else l->head = k->next;
    if (k->next) of(k->next)->prev = k->prev;
    else l->tail = k->prev;
    k->prev = k->next = NULL;
    l->count--;
}

bool kvp__sched_ahead(const kvp__sched_entry *a, const kvp__sched_entry *b)
{
    return a->priority != b->priority ? a->priority > b->priority : a->arrival < b->arrival;
}

static void order_leave(kvp__sched_entry *e)
{
    if (!e->order_list) return;
    list_remove(e->order_list, e, order_of);
    e->order_list = NULL;
}

void kvp__sched_order_append(kvp__sched_list *l, kvp__sched_entry *e)
{
    order_leave(e);
    list_insert(l, e, NULL, order_of);
    e->order_list = l;
}

/* Newcomers go to the end, and those who come back belong near the front: both are found fast. */
static void order_insert(kvp__sched_list *l, kvp__sched_entry *e)
{
    order_leave(e);
    kvp__sched_entry *at = NULL;
    if (l->tail && kvp__sched_ahead(e, l->tail)) {
        at = l->head;
        while (kvp__sched_ahead(at, e)) at = at->order.next;
    }
    list_insert(l, e, at, order_of);
    e->order_list = l;
}

void kvp__sched_hold_leave(kvp__sched_entry *e)
{
    if (!e->hold_list) return;
    list_remove(e->hold_list, e, hold_of);
    e->hold_list = NULL;
}

void kvp__sched_hold_settle(kvp__sched_entry *e)
{
    kvp__sched_list *l = NULL;
    if (!kvp__sched_is_running(e) && e->seq->n_blocks > e->seq->pin_blocks) {
        uint32_t h = e->state == KVP_SEQ_PARKED   ? KVP__HOLD_PARKED
                     : e->state == KVP_SEQ_PAUSED ? KVP__HOLD_PAUSED
                     : e->state == KVP_SEQ_HOST   ? KVP__HOLD_HOST
                                                  : KVP__HOLD_WAITING;
        l = &e->holders->lists[h];
    }
    if (l == e->hold_list) return;
    kvp__sched_hold_leave(e);
    if (!l) return;
    list_insert(l, e, NULL, hold_of);
    e->hold_list = l;
}

/* --- states --- */

void kvp__sched_show_levels(kvp__sched *s)
{
    __atomic_store_n(&s->stats.sequences, s->entries, __ATOMIC_RELAXED);
    __atomic_store_n(&s->stats.running, kvp__sched_running(s), __ATOMIC_RELAXED);
    __atomic_store_n(&s->stats.waiting, s->waiting.count, __ATOMIC_RELAXED);
}

void kvp__sched_stay(kvp__sched_entry *e, uint32_t state)
{
    order_leave(e);
    e->state = state;
    kvp__sched_hold_settle(e);
}

void kvp__sched_run(kvp__sched *s, kvp__sched_entry *e)
{
    bool decodes = e->generating && e->seq->length - e->seq->computed == 1;
    e->state = decodes ? KVP_SEQ_DECODE : KVP_SEQ_PREFILL;
    if (e->order_list == (decodes ? &s->decode : &s->prefill)) return;
    if (decodes) kvp__sched_order_append(&s->decode, e);
    else order_insert(&s->prefill, e);
    kvp__sched_hold_settle(e);
}

void kvp__sched_wait_turn(kvp__sched *s, kvp__sched_entry *e)
{
    e->state = KVP_SEQ_WAITING;
    e->leader = 0;
    order_insert(&s->waiting, e);
    kvp__sched_hold_settle(e);
}

void kvp__sched_come_back(kvp__sched *s, kvp__sched_entry *e)
{
    const kvp__sched_entry *first = s->waiting.head;
    bool next = !first || kvp__sched_ahead(e, first);
    if (e->admitted && next && kvp__sched_running(s) < s->o.max_sequences) kvp__sched_run(s, e);
    else kvp__sched_wait_turn(s, e);
}

void kvp__sched_give_up(kvp__sched_entry *e)
{
    kvp__seq_release_unpinned(e->seq);
    e->admitted = false;
    kvp__sched_hold_settle(e);
}

void kvp__sched_park(kvp__sched *s, kvp__sched_entry *e)
{
    e->in_batch = e->admitted = e->counted = e->generating = e->host = e->paused = false;
    s->entries--;
    kvp__sched_stay(e, KVP_SEQ_PARKED);
}

void kvp__sched_ask_host(kvp__sched_entry *e)
{
    e->host = true;
    if (!e->paused) kvp__sched_stay(e, KVP_SEQ_HOST);
}
