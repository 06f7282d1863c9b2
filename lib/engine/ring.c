/*
 * Event rings. See ring.h.
 */
#include "engine/ring.h"

#include <string.h>

kvp_status kvp__ring_init(kvp__ring *r, const kvp__hooks *h, void *owner, uint32_t capacity,
                          uint32_t text_unit, kvp_error *err)
{
    memset(r, 0, sizeof *r);
    size_t n = (size_t)capacity + 1, top = n * KVP__SAMPLE_MAX_TOP;
    size_t slots = n * sizeof *r->slots;
    r->bytes = slots + top * (sizeof(int32_t) + sizeof(float)) + n * text_unit;
    r->memory = kvp__alloc(h, r->bytes);
    if (!r->memory) {
        r->bytes = 0;
        return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for %u events", (unsigned)capacity);
    }
    r->slots = r->memory;
    r->top_tokens = (int32_t *)(void *)((char *)r->memory + slots);
    r->top_logprobs = (float *)(void *)(r->top_tokens + top);
    r->text = (char *)(r->top_logprobs + top);
    r->owner = owner;
    r->capacity = capacity;
    r->text_unit = text_unit;
    return KVP_OK;
}

void kvp__ring_fini(kvp__ring *r, const kvp__hooks *h)
{
    kvp__free(h, r->memory, r->bytes);
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
