/*
 * Token buffers. See seq.h.
 *
 * Forks share their parent's buffer: a fork of a long prompt copies no token. Only one sequence may
 * lengthen a buffer in place, its owner; the others see the part up to their own length, which
 * never changes under them, and copy it when they first append. A sequence that has reserved
 * capacity is the owner, so a fork cannot take its place and force it to allocate in a step.
 */
#include "seq/tokens.h"

#include <string.h>

static size_t buffer_bytes(uint32_t capacity)
{
    return sizeof(kvp__seq_tokens) + (size_t)capacity * sizeof(int32_t);
}

void kvp__seq_tokens_drop(kvp__seq *s)
{
    kvp__seq_tokens *b = s->buffer;
    if (!b) return;
    if (b->owner == s) b->owner = NULL;
    if (--b->refs == 0) kvp__free(s->pool->hooks, b, buffer_bytes(b->capacity));
    s->buffer = NULL;
    s->tokens = NULL;
}

void kvp__seq_tokens_cut(kvp__seq *s)
{
    kvp__seq_tokens *b = s->buffer;
    if (!b || b->used == s->length) return;
    if (b->refs == 1)
        b->used = s->length;
    else if (b->owner == s)
        b->owner = NULL;
}

/* Whether `s` may write at its end, after becoming the owner where nobody else is. */
static bool own(kvp__seq *s)
{
    kvp__seq_tokens *b = s->buffer;
    if (!b) return false;
    if (b->refs == 1) {
        b->used = s->length;
    } else if ((b->owner && b->owner != s) || b->used != s->length) {
        return false;
    }
    b->owner = s;
    return true;
}

bool kvp__seq_tokens_room(kvp__seq *s, uint32_t length)
{
    if (own(s) && s->buffer->capacity >= length) return true;
    kvp__seq_tokens *b = kvp__alloc(s->pool->hooks, buffer_bytes(length));
    if (!b) return false;
    *b = (kvp__seq_tokens){.refs = 1, .used = s->length, .capacity = length, .owner = s};
    if (s->length) memcpy(b->ids, s->tokens, (size_t)s->length * sizeof *b->ids);
    kvp__seq_tokens_drop(s);
    s->buffer = b;
    s->tokens = b->ids;
    return true;
}

kvp_status kvp__seq_append(kvp__seq *s, const int32_t *tokens, uint32_t count, kvp_error *err)
{
    if (count > KVP__MAX_TOKENS - s->length)
        return kvp__fail_need(err, KVP_ERR_CAPACITY, (uint64_t)s->length + count, KVP__MAX_TOKENS,
                              "a sequence of %u tokens cannot take %u more", s->length, count);
    if (count == 0) return KVP_OK;
    uint32_t length = s->length + count;
    kvp__seq_tokens *b = s->buffer;
    if (KVP__UNLIKELY(!b || b->owner != s || b->capacity < length)) {
        uint64_t want = !b || b->capacity < length ? (uint64_t)s->length * 2 : 0;
        if (want < 64) want = 64;
        if (want < length) want = length;
        if (want > KVP__MAX_TOKENS) want = KVP__MAX_TOKENS;
        if (!(own(s) && s->buffer->capacity >= length) && !kvp__seq_tokens_room(s, (uint32_t)want))
            return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for a sequence of %u tokens",
                             length);
        b = s->buffer;
    }
    for (uint32_t i = 0; i < count; i++) b->ids[s->length + i] = tokens[i];
    s->length = b->used = length;
    return KVP_OK;
}
