/*
 * The events of one sequence that the host has not taken, and whose turn it is.
 *
 * A ring never grows: so many slots for tokens and the like, and one more that only an ending may use.
 * When no slot is left the sequence pauses, and nobody else. The text of a slot has a fixed place, large
 * enough for any token of the vocabulary and what a text stream may have held back. A ring takes its
 * memory when its sequence first joins a batch, and room for alternatives when they are first asked
 * for: forks that wait cost little, and a step allocates nothing.
 */
#ifndef KVP_ENGINE_RING_H
#define KVP_ENGINE_RING_H

#include "base/base.h"
#include "model/sampler.h"

typedef struct kvp__event_slot {
    uint32_t kind;       /* KVP_EVENT_... */
    uint32_t ending;
    kvp_status status;
    int32_t token;
    uint64_t position, done, total;
    uint32_t text_bytes;
    uint32_t n_top;
    float logprob;
    uint32_t index;      /* of this slot: where its text and alternatives are */
} kvp__event_slot;

typedef struct kvp__ring {
    struct kvp__ring *prev, *next; /* in the queue, while not empty */
    void *owner;
    uint32_t capacity;   /* without the ending's slot */
    uint32_t head, count;
    uint32_t text_unit;
    bool has_ending;
    kvp__event_slot *slots;
    char *text;          /* [capacity + 1][text_unit] */
    int32_t *top_tokens; /* [capacity + 1][KVP__SAMPLE_MAX_TOP] */
    float *top_logprobs;
} kvp__ring;

typedef struct kvp__ring_queue {
    kvp__ring *head, *tail;
} kvp__ring_queue;

/* Takes no memory. */
void kvp__ring_init(kvp__ring *r, void *owner, uint32_t capacity, uint32_t text_unit);
/* Memory for events, and for `top` alternatives each, where there is none yet. NO_MEMORY: the events
 * that are there stay. */
kvp_status kvp__ring_reserve(kvp__ring *r, const kvp__hooks *h, uint32_t top, kvp_error *err);
void kvp__ring_fini(kvp__ring *r, const kvp__hooks *h);

/* Slots left for other events than the ending. */
static inline uint32_t kvp__ring_room(const kvp__ring *r)
{
    return r->capacity - (r->count - r->has_ending);
}

/* The next slot, zeroed but for its index, or NULL: no room. Queues the ring. */
kvp__event_slot *kvp__ring_push(kvp__ring *r, kvp__ring_queue *q, uint32_t kind);
/* The newest event, if it is of this kind and not taken; NULL otherwise. */
kvp__event_slot *kvp__ring_newest(kvp__ring *r, uint32_t kind);
static inline char *kvp__ring_text(const kvp__ring *r, uint32_t index)
{
    return r->text + (size_t)index * r->text_unit;
}

/* Takes the oldest event of the ring whose turn it is, copying the slot; NULL: none. The slot's
 * text stays until something is pushed into that ring. */
kvp__ring *kvp__ring_take(kvp__ring_queue *q, kvp__event_slot *out);
/* Forgets all events. */
void kvp__ring_purge(kvp__ring *r, kvp__ring_queue *q);

#endif
