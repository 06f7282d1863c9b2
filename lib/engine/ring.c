/*
 * Event rings. See ring.h.
 */
#include "engine/ring.h"

#include <string.h>

void kvp__ring_init(kvp__ring *r, void *owner, uint32_t capacity, uint32_t text_unit)
{
    memset(r, 0, sizeof *r);
    r->owner = owner;
    r->capacity = capacity;
    r->text_unit = text_unit;
}

static size_t event_bytes(const kvp__ring *r)
{
    return ((size_t)r->capacity + 1) * (sizeof *r->slots + r->text_unit);
}

static size_t top_bytes(const kvp__ring *r)
{
    size_t each = KVP__SAMPLE_MAX_TOP * (sizeof *r->top_tokens + sizeof *r->top_logprobs);
    return ((size_t)r->capacity + 1) * each;
}

kvp_status kvp__ring_reserve(kvp__ring *r, const kvp__hooks *h, uint32_t top, kvp_error *err)
{
    size_t n = (size_t)r->capacity + 1;
    if (!r->slots) {
        r->slots = kvp__alloc(h, event_bytes(r));
        if (r->slots) r->text = (char *)(r->slots + n);
    }
    if (r->slots && top && !r->top_tokens) {
        r->top_tokens = kvp__alloc(h, top_bytes(r));
        if (r->top_tokens)
            r->top_logprobs = (float *)(void *)(r->top_tokens + n * KVP__SAMPLE_MAX_TOP);
    }
    if (r->slots && (!top || r->top_tokens)) return KVP_OK;
    return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for %u events", (unsigned)r->capacity);
}

void kvp__ring_fini(kvp__ring *r, const kvp__hooks *h)
{
    kvp__free(h, r->slots, event_bytes(r));
    kvp__free(h, r->top_tokens, top_bytes(r));
    memset(r, 0, sizeof *r);
}

static void enqueue(kvp__ring *r, kvp__ring_queue *q)
{
    r->prev = q->tail;
    r->next = NULL;
    if (q->tail)
        q->tail->next = r;
    else
        q->head = r;
    q->tail = r;
}

static void dequeue(kvp__ring *r, kvp__ring_queue *q)
{
    if (r->prev)
        r->prev->next = r->next;
    else
        q->head = r->next;
    if (r->next)
        r->next->prev = r->prev;
    else
        q->tail = r->prev;
    r->prev = r->next = NULL;
}

kvp__event_slot *kvp__ring_push(kvp__ring *r, kvp__ring_queue *q, uint32_t kind)
{
    bool ending = kind == KVP_EVENT_ENDED;
    if (ending ? r->has_ending : kvp__ring_room(r) == 0) return NULL;
    uint32_t index = (r->head + r->count) % (r->capacity + 1);
    kvp__event_slot *slot = &r->slots[index];
    memset(slot, 0, sizeof *slot);
    slot->kind = kind;
    slot->token = -1;
    slot->index = index;
    r->has_ending |= ending;
    if (r->count++ == 0) enqueue(r, q);
    return slot;
}

kvp__event_slot *kvp__ring_newest(kvp__ring *r, uint32_t kind)
{
    if (r->count == 0) return NULL;
    kvp__event_slot *slot = &r->slots[(r->head + r->count - 1) % (r->capacity + 1)];
    return slot->kind == kind ? slot : NULL;
}

kvp__ring *kvp__ring_take(kvp__ring_queue *q, kvp__event_slot *out)
{
    kvp__ring *r = q->head;
    if (!r) return NULL;
    *out = r->slots[r->head];
    r->head = (r->head + 1) % (r->capacity + 1);
    r->count--;
    if (out->kind == KVP_EVENT_ENDED) r->has_ending = false;
    dequeue(r, q);
    if (r->count) enqueue(r, q);
    return r;
}

void kvp__ring_purge(kvp__ring *r, kvp__ring_queue *q)
{
    if (r->count) dequeue(r, q);
    r->head = r->count = 0;
    r->has_ending = false;
}
