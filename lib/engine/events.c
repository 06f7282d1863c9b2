/*
 * From what happened to what the host reads: pushing events, endings with usage, taking events.
 * See engine.h and ring.h.
 */
#include "engine/engine.h"

#include <string.h>

static const kvp__hooks *hooks_of(const kvp__loop *l) { return &l->cache->model->origin.hooks; }

/* A full ring pauses its sequence before a token could be lost. */
static void pause_if_full(kvp__loop *l, kvp__sequence *s)
{
    if (kvp__ring_room(&s->ring) || s->ring_full || !s->entry.in_batch) return;
    s->ring_full = true;
    if (!s->host_paused) kvp__sched_pause(&l->sched, &s->entry);
}

static void resume_if_room(kvp__loop *l, kvp__sequence *s)
{
    if (!s->ring_full || kvp__ring_room(&s->ring) == 0) return;
    s->ring_full = false;
    if (!s->entry.in_batch || s->host_paused) return;
    kvp__sched_resume(&l->sched, &s->entry);
    kvp__bell_ring(&l->bell);
}

void kvp__loop_push_token(kvp__loop *l, kvp__sequence *s, const kvp__sampled *sampled,
                          const char *text, size_t bytes)
{
    if (!(s->event_mask & KVP_MASK_TOKEN)) return;
    kvp__event_slot *e = kvp__ring_push(&s->ring, &l->events, KVP_EVENT_TOKEN);
    if (!e) return;
    e->token = sampled->token;
    e->position = s->seq.length - 1;
    e->logprob = sampled->logprob;
    e->n_top = sampled->n_top;
    if (e->n_top) {
        size_t top = (size_t)e->index * KVP__SAMPLE_MAX_TOP;
        memcpy(s->ring.top_tokens + top, sampled->top_tokens, e->n_top * sizeof(int32_t));
        memcpy(s->ring.top_logprobs + top, sampled->top_logprobs, e->n_top * sizeof(float));
    }
    e->text_bytes = (uint32_t)bytes;
    memcpy(kvp__ring_text(&s->ring, e->index), text, bytes);
    pause_if_full(l, s);
}

void kvp__loop_push_logits(kvp__loop *l, kvp__sequence *s)
{
    if (!(s->event_mask & KVP_MASK_LOGITS)) return;
    kvp__event_slot *e = kvp__ring_push(&s->ring, &l->events, KVP_EVENT_LOGITS);
    if (e) e->position = s->seq.length;
    pause_if_full(l, s);
}

/* Progress is told in the newest event if that is one, and not at all if only one slot is left. */
void kvp__loop_push_progress(kvp__loop *l, kvp__sequence *s)
{
    if (!(s->event_mask & KVP_MASK_PROGRESS)) return;
    kvp__event_slot *e = kvp__ring_newest(&s->ring, KVP_EVENT_PROGRESS);
    if (!e && kvp__ring_room(&s->ring) > 1)
        e = kvp__ring_push(&s->ring, &l->events, KVP_EVENT_PROGRESS);
    if (!e) return;
    e->done = s->seq.computed;
    e->total = s->seq.length;
}

static void fill_usage(kvp__loop *l, kvp__sequence *s)
{
    kvp__seq_usage u = kvp__sched_usage(&s->entry);
    uint64_t now = kvp__now(hooks_of(l));
    s->usage = (kvp_usage){
        .size = sizeof s->usage,
        .prompt = s->seq.length - kvp__min64(s->generated, s->seq.length),
        .cached = u.cached,
        .reattached = u.reattached + (s->held == UINT64_MAX ? 0 : s->held),
        .computed = u.computed,
        .recomputed = u.recomputed,
        .copied = u.copied,
        .generated = s->generated,
        .preemptions = s->entry.preemptions,
        .queued_ns = (s->first_row_ns ? s->first_row_ns : now) - s->added_ns,
        .first_token_ns = s->first_token_ns ? s->first_token_ns - s->added_ns : 0,
        .total_ns = now - s->added_ns};
}

void kvp__loop_end(kvp__loop *l, kvp__sequence *s, uint32_t ending, kvp_status status,
                   int32_t token)
{
    fill_usage(l, s);
    if (s->entry.in_batch) kvp__sched_remove(&l->sched, &s->entry);
    kvp__event_slot *e = kvp__ring_push(&s->ring, &l->events, KVP_EVENT_ENDED);
    if (e) {
        e->ending = ending;
        e->status = status;
        e->token = token;
        e->position = s->seq.length;
        if (s->ring.text_unit)
            e->text_bytes = (uint32_t)kvp__textstream_flush(
                &s->stream, kvp__ring_text(&s->ring, e->index));
    }
    atomic_fetch_add_explicit(&l->endings, 1, memory_order_relaxed);
    kvp__bell_ring(&l->bell);
}

kvp_status kvp__loop_next_event(kvp__loop *l, kvp_event *out)
{
    kvp__event_slot e;
    kvp__ring *r = kvp__ring_take(&l->events, &e);
    if (!r) return KVP_AGAIN;
    kvp__sequence *s = r->owner;
    size_t top = (size_t)e.index * KVP__SAMPLE_MAX_TOP;
    *out = (kvp_event){
        .size = sizeof *out,
        .kind = e.kind,
        .seq = (kvp_seq *)s->shell,
        .tag = s->tag,
        .position = e.position,
        .token = e.token,
        .ending = e.ending,
        .status = e.status,
        .n_top = e.n_top,
        .text = e.text_bytes ? kvp__ring_text(r, e.index) : "",
        .text_bytes = e.text_bytes,
        .top_tokens = e.n_top ? r->top_tokens + top : NULL,
        .top_logprobs = e.n_top ? r->top_logprobs + top : NULL,
        .logprob = e.logprob,
        .done = e.done,
        .total = e.total,
        .usage = e.kind == KVP_EVENT_ENDED ? &s->usage : NULL};
    resume_if_room(l, s);
    return KVP_OK;
}
