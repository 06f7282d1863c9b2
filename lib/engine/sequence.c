/*
 * Sequences: their options, their tokens, and how long they live. See engine.h.
 */
#include "engine/engine.h"

#include <string.h>

#define DEFAULT_RING 64u
#define MAX_RING 65536u
#define MAX_STOP_TOKENS 64u
#define MAX_SALT 256u
#define ALL_EVENTS (KVP_MASK_TOKEN | KVP_MASK_LOGITS | KVP_MASK_PROGRESS)

static const kvp__hooks *hooks_of(const kvp__cache *c) { return &c->model->origin.hooks; }

/* --- settings: how tokens are chosen --- */

static bool has_penalties(const kvp__sampler *s)
{
    return s->repetition != 1.0f || s->presence != 0.0f || s->frequency != 0.0f;
}

static kvp_status settings_make(kvp__settings **out, kvp__cache *c, const kvp_sampling *o,
                                kvp_error *err)
{
    kvp__sampler sampler;
    kvp_status s = kvp__sampler_fill(&sampler, o, kvp__cache_vocabulary(c), err);
    if (s != KVP_OK) return s;
    size_t bias = (size_t)sampler.n_bias * sizeof *sampler.bias;
    size_t recent = has_penalties(&sampler) ? sampler.penalty_window * sizeof(int32_t) : 0;
    size_t bytes = sizeof(kvp__settings) + bias + recent;
    kvp__settings *t = kvp__alloc_zero(hooks_of(c), bytes);
    if (!t) return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for sampling settings");
    t->refs = 1;
    t->bytes = bytes;
    t->sampler = sampler;
    char *rest = (char *)(t + 1);
    if (bias) t->sampler.bias = memcpy(rest, sampler.bias, bias);
    if (recent) t->recent = (int32_t *)(void *)(rest + bias);
    *out = t;
    return KVP_OK;
}

void kvp__settings_release(kvp__cache *c, kvp__settings *s)
{
    if (s && --s->refs == 0) kvp__free(hooks_of(c), s, s->bytes);
}

/* The host's struct, or all defaults, checked; an own-model host always chooses itself. */
static kvp_status sampling_in(kvp_sampling *out, const kvp__cache *c, const kvp_sampling *in,
                              kvp_error *err)
{
    memset(out, 0, sizeof *out);
    if (in && !kvp__struct_in(out, sizeof *out, in))
        return kvp__fail(err, KVP_ERR_INVALID_ARG,
                         "sampling: size %u is not a size of kvp_sampling", (unsigned)in->size);
    if (!c->model->own_model) return KVP_OK;
    if (out->mode == KVP_SAMPLE_LIBRARY)
        return kvp__fail(err, KVP_ERR_UNSUPPORTED,
                         "sampling: KVP_SAMPLE_LIBRARY needs a model, not a geometry");
    out->mode = KVP_SAMPLE_HOST;
    return KVP_OK;
}

bool kvp__sequence_is_host(const kvp__sequence *s)
{
    return s->settings->sampler.mode == KVP_SAMPLE_HOST;
}

static uint64_t fresh_seed(kvp__cache *c)
{
    uint64_t n = c->n_seeds++;
    uint64_t seed = kvp__hash(c->seeds, &n, sizeof n).lo;
    return seed ? seed : 1;
}

static size_t logits_bytes(const kvp__cache *c)
{
    return sizeof(kvp__logits) + kvp__cache_vocabulary(c) * sizeof(float);
}

/* Rows are taken when they may be needed, not when they are: a step allocates nothing. */
static kvp_status take_logits(kvp__cache *c, kvp__logits **out, kvp_error *err)
{
    if (*out) return KVP_OK;
    *out = kvp__alloc(hooks_of(c), logits_bytes(c));
    if (!*out)
        return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for %u logits",
                         (unsigned)kvp__cache_vocabulary(c));
    (*out)->refs = 1;
    return KVP_OK;
}

static void release_logits(kvp__cache *c, kvp__logits *l)
{
    if (l && --l->refs == 0) kvp__free(hooks_of(c), l, logits_bytes(c));
}

static bool wants_logits(const kvp__sequence *s, const kvp__settings *t)
{
    return t->sampler.mode == KVP_SAMPLE_HOST && !s->cache->model->own_model;
}

/* Both read one row from here on; each has another to write to. */
static kvp_status share_logits(kvp__sequence *parent, kvp__sequence *child, kvp_error *err)
{
    kvp_status st = take_logits(parent->cache, &parent->spare, err);
    if (st != KVP_OK) return st;
    child->spare = child->logits;
    child->logits = parent->logits;
    child->logits->refs++;
    child->logits_pending = true;
    return KVP_OK;
}

float *kvp__sequence_logits_row(kvp__sequence *s)
{
    if (!s->logits || !kvp__sequence_is_host(s)) return NULL;
    s->logits_pending = false;
    if (s->logits->refs > 1) {
        s->logits->refs--;
        s->logits = s->spare;
        s->spare = NULL;
    }
    return s->logits->row;
}

kvp_status kvp__sequence_set_sampling(kvp__sequence *s, const kvp_sampling *in, kvp_error *err)
{
    kvp_sampling o;
    kvp__settings *t = NULL;
    kvp_status st = sampling_in(&o, s->cache, in, err);
    if (st == KVP_OK) st = settings_make(&t, s->cache, &o, err);
    if (st != KVP_OK) return st;
    if (wants_logits(s, t)) st = take_logits(s->cache, &s->logits, err);
    if (st == KVP_OK && s->entry.in_batch)
        st = kvp__ring_reserve(&s->ring, hooks_of(s->cache), t->sampler.top_logprobs, err);
    if (st != KVP_OK) {
        kvp__settings_release(s->cache, t);
        return st;
    }
    kvp__settings_release(s->cache, s->settings);
    s->settings = t;
    if (t->sampler.seed) s->seed = t->sampler.seed;
    if (!s->seed) s->seed = fresh_seed(s->cache);
    return KVP_OK;
}

/* --- endings: stop tokens and strings --- */

static void endings_release(kvp__cache *c, kvp__endings *e)
{
    if (e && --e->refs == 0) kvp__free(hooks_of(c), e, e->bytes);
}

static kvp_status endings_make(kvp__endings **out, kvp__cache *c, const kvp_seq_options *o,
                               kvp_error *err)
{
    *out = NULL;
    if (!o->n_stop_tokens && !o->n_stop_strings) return KVP_OK;
    if (o->n_stop_tokens > MAX_STOP_TOKENS)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "n_stop_tokens: %llu is above %u",
                         (unsigned long long)o->n_stop_tokens, MAX_STOP_TOKENS);
    kvp_status s = kvp__cache_check_tokens(c, o->stop_tokens, o->n_stop_tokens, err);
    if (s != KVP_OK) return s;
    if (o->n_stop_strings && c->model->own_model)
        return kvp__fail(err, KVP_ERR_UNSUPPORTED, "stop_strings: a geometry has no text");
    if (o->n_stop_strings && !o->stop_strings)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "stop_strings: NULL");
    size_t tokens = (size_t)kvp__round_up(o->n_stop_tokens * sizeof(int32_t), sizeof(void *));
    size_t bytes = sizeof(kvp__endings) + tokens + (o->n_stop_strings ? sizeof(kvp__stops) : 0);
    kvp__endings *e = kvp__alloc_zero(hooks_of(c), bytes);
    if (!e) return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for stop strings");
    e->refs = 1;
    e->bytes = bytes;
    e->n_tokens = (uint32_t)o->n_stop_tokens;
    if (e->n_tokens) memcpy(e->tokens, o->stop_tokens, e->n_tokens * sizeof(int32_t));
    if (o->n_stop_strings) {
        kvp__stops *stops = (kvp__stops *)(void *)((char *)e->tokens + tokens);
        s = kvp__stops_fill(stops, o->stop_strings, o->n_stop_strings, err);
        e->strings = stops;
    }
    if (s != KVP_OK)
        endings_release(c, e);
    else
        *out = e;
    return s;
}

/* --- creation --- */

static kvp_status check_options(const kvp_seq_options *o, kvp_error *err)
{
    if (o->salt_bytes > MAX_SALT)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "salt_bytes: %llu is above %u",
                         (unsigned long long)o->salt_bytes, MAX_SALT);
    if (o->salt_bytes && !o->salt) return kvp__fail(err, KVP_ERR_INVALID_ARG, "salt: NULL");
    if (o->eos > KVP_EOS_IGNORE)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "eos: %u is not KVP_EOS_...", (unsigned)o->eos);
    if (o->event_mask & ~ALL_EVENTS)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "event_mask: 0x%x has bits that are not known",
                         (unsigned)o->event_mask);
    if (o->ring > MAX_RING)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "ring: %u is above %u", (unsigned)o->ring,
                         MAX_RING);
    return KVP_OK;
}

/* No longer than positions can count, nor than the model was made for. */
static kvp_status resolve_context(const kvp__cache *c, uint64_t asked, uint64_t *out,
                                  kvp_error *err)
{
    uint64_t most = c->model->model.geometry.context;
    if (!most || most > KVP__MAX_TOKENS) most = KVP__MAX_TOKENS;
    if (asked > most)
        return kvp__fail_need(err, KVP_ERR_INVALID_ARG, asked, most,
                              "context: %llu is above the model's %llu",
                              (unsigned long long)asked, (unsigned long long)most);
    *out = asked ? asked : most;
    return KVP_OK;
}

static uint32_t text_unit(const kvp__cache *c)
{
    if (!c->model->model.tokenizer) return 0;
    kvp__tokenizer_info info;
    kvp__tokenizer_get_info(c->model->model.tokenizer, &info);
    return info.longest_piece + KVP__TEXT_HELD;
}

/* Ring, handle, entry and a place in the cache's list for a sequence whose `seq` is initialised. */
static kvp_status join(kvp__sequence *s, uint32_t ring, int32_t priority, kvp_error *err)
{
    kvp__cache *c = s->cache;
    kvp__ring_init(&s->ring, s, ring ? ring : DEFAULT_RING, text_unit(c));
    s->shell = kvp__shell_make(&c->model->origin, KVP__KIND_SEQ, s, &c->domain);
    if (!s->shell)
        return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for a sequence's handle");
    kvp__sched_entry_init(&s->entry, &c->holders, &s->seq, priority);
    kvp__textstream_init(&s->stream);
    s->next = c->sequences;
    if (s->next) s->next->prev = s;
    c->sequences = s;
    atomic_fetch_add_explicit(&c->n_sequences, 1, memory_order_relaxed);
    kvp__domain_acquire(&c->domain);
    return KVP_OK;
}

void kvp__sequence_free(kvp__sequence *s)
{
    kvp__cache *c = s->cache;
    kvp__seq_fini(&s->seq);
    kvp__ring_fini(&s->ring, hooks_of(c));
    kvp__settings_release(c, s->settings);
    endings_release(c, s->endings);
    release_logits(c, s->logits);
    release_logits(c, s->spare);
    kvp__free(hooks_of(c), s, sizeof *s);
}

static kvp_status init_seq(kvp__sequence *s, const kvp_seq_options *o, kvp_error *err)
{
    kvp__cache *c = s->cache;
    uint32_t root = KVP__NONE;
    if (c->caching) {
        kvp_status st = kvp__prefix_root_intern(&c->prefix, o->salt, (uint32_t)o->salt_bytes,
                                                c->model->model.key, c->model->model.key_bytes,
                                                &root, err);
        if (st != KVP_OK) return st;
    }
    kvp__seq_init(&s->seq, &c->pool, kvp__cache_prefix(c), root);
    return KVP_OK;
}

kvp_status kvp__sequence_create(kvp__sequence **out, kvp__cache *c, const kvp_seq_options *o,
                                kvp_error *err)
{
    uint64_t context = 0;
    kvp_status st = check_options(o, err);
    if (st == KVP_OK) st = resolve_context(c, o->context, &context, err);
    if (st != KVP_OK) return st;
    kvp__sequence *s = kvp__alloc_zero(hooks_of(c), sizeof *s);
    if (!s) return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for a sequence");
    s->cache = c;
    s->context = context;
    s->max_tokens = o->max_tokens;
    s->tag = o->tag;
    s->eos = o->eos ? o->eos : KVP_EOS_STOP;
    s->event_mask = o->event_mask ? o->event_mask : KVP_MASK_DEFAULT;
    st = kvp__sequence_set_sampling(s, o->sampling, err);
    if (st == KVP_OK) st = endings_make(&s->endings, c, o, err);
    if (st == KVP_OK) st = init_seq(s, o, err);
    if (st == KVP_OK) st = join(s, o->ring, o->priority, err);
    if (st != KVP_OK) {
        kvp__sequence_free(s);
        return st;
    }
    *out = s;
    return KVP_OK;
}

/* Stop tokens and stop strings, each the fork's own if it gives any. */
static kvp_status inherit_endings(kvp__sequence *s, kvp__endings *theirs, const kvp_seq_options *o,
                                  kvp_error *err)
{
    if (theirs && !o->n_stop_tokens && !o->n_stop_strings) {
        s->endings = theirs;
        theirs->refs++;
        return KVP_OK;
    }
    kvp_seq_options both = *o;
    kvp_string strings[KVP__STOP_STRINGS];
    if (theirs && !both.n_stop_tokens) {
        both.stop_tokens = theirs->tokens;
        both.n_stop_tokens = theirs->n_tokens;
    }
    if (theirs && theirs->strings && !both.n_stop_strings) {
        const kvp__stops *stops = theirs->strings;
        for (uint32_t i = 0; i < stops->n; i++)
            strings[i] = (kvp_string){(const char *)stops->text[i], stops->bytes[i]};
        both.stop_strings = strings;
        both.n_stop_strings = stops->n;
    }
    return endings_make(&s->endings, s->cache, &both, err);
}

/* What a fork takes from its parent where its own options say nothing. */
static kvp_status inherit(kvp__sequence *s, kvp__sequence *parent, const kvp_seq_options *o,
                          kvp_error *err)
{
    kvp__cache *c = s->cache;
    s->max_tokens = o->max_tokens ? o->max_tokens : parent->max_tokens;
    s->tag = o->tag;
    s->eos = o->eos ? o->eos : parent->eos;
    s->event_mask = o->event_mask ? o->event_mask : parent->event_mask;
    s->seed = kvp__seed_fork(parent->seed, parent->forks + 1);
    kvp_status st = resolve_context(c, o->context ? o->context : parent->context, &s->context, err);
    if (st != KVP_OK) return st;
    st = inherit_endings(s, parent->endings, o, err);
    if (st != KVP_OK) return st;
    if (o->sampling) return kvp__sequence_set_sampling(s, o->sampling, err);
    const kvp__settings *p = parent->settings;
    kvp__settings *t = kvp__alloc(hooks_of(c), p->bytes);
    if (!t) return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for sampling settings");
    memcpy(t, p, p->bytes);
    t->refs = 1;
    if (p->sampler.n_bias)
        t->sampler.bias = (const kvp_logit_bias *)(const void *)((char *)t +
                          ((const char *)p->sampler.bias - (const char *)p));
    if (p->recent)
        t->recent = (int32_t *)(void *)((char *)t + ((char *)p->recent - (const char *)p));
    s->settings = t;
    return wants_logits(s, t) ? take_logits(c, &s->logits, err) : KVP_OK;
}

kvp_status kvp__sequence_fork(kvp__sequence **out, kvp__sequence *parent, uint64_t length,
                              const kvp_seq_options *o, kvp_error *err)
{
    kvp__cache *c = parent->cache;
    kvp_status st = check_options(o, err);
    if (st != KVP_OK) return st;
    if (o->salt_bytes)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "salt: a fork has its parent's");
    if (length == KVP_FORK_END) length = parent->seq.length;
    if (length > parent->seq.length)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "length: %llu is beyond the end at %u",
                         (unsigned long long)length, (unsigned)parent->seq.length);
    kvp__sequence *s = kvp__alloc_zero(hooks_of(c), sizeof *s);
    if (!s) return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for a sequence");
    s->cache = c;
    st = inherit(s, parent, o, err);
    if (st == KVP_OK && length > s->context)
        st = kvp__fail(err, KVP_ERR_INVALID_ARG, "context: %llu is below the length %llu",
                       (unsigned long long)s->context, (unsigned long long)length);
    if (st == KVP_OK && parent->logits_pending && s->logits && length == parent->seq.length)
        st = share_logits(parent, s, err);
    if (st == KVP_OK) st = kvp__seq_fork(&parent->seq, (uint32_t)length, &s->seq, err);
    if (st == KVP_OK)
        st = join(s, o->ring ? o->ring : parent->ring.capacity,
                  o->priority ? o->priority : parent->entry.priority, err);
    if (st != KVP_OK) {
        kvp__sequence_free(s);
        return st;
    }
    parent->forks++;
    *out = s;
    return KVP_OK;
}

void kvp__sequence_destroy(kvp__sequence *s)
{
    kvp__cache *c = s->cache;
    kvp__loop *l = c->loop;
    if (s->entry.in_batch) kvp__sched_remove(&l->sched, &s->entry);
    kvp__sched_entry_fini(&s->entry);
    if (l) kvp__ring_purge(&s->ring, &l->events);
    if (s->prev)
        s->prev->next = s->next;
    else
        c->sequences = s->next;
    if (s->next) s->next->prev = s->prev;
    atomic_fetch_sub_explicit(&c->n_sequences, 1, memory_order_relaxed);
    if (s->in_flight) {
        /* Its logits may be written until the step is over; its blocks are the fence's. */
        kvp__seq_fini(&s->seq);
        s->next = l->doomed;
        l->doomed = s;
    } else {
        kvp__sequence_free(s);
    }
    if (l) kvp__bell_ring(&l->bell);
}

/* --- tokens --- */

uint64_t kvp__sequence_max_length(const kvp__sequence *s)
{
    uint64_t room = s->context;
    if (s->max_tokens == KVP_MAX_TOKENS_NONE) return s->seq.length;
    if (s->max_tokens) {
        uint64_t left = s->max_tokens - kvp__min64(s->generated, s->max_tokens);
        if (left < room) room = kvp__min64(room, s->seq.length + left);
    }
    /* One past the pool's end: the last token is known, though its KV can have no place. */
    const kvp__pool *p = &s->cache->pool;
    uint64_t pool = (uint64_t)p->n_blocks * p->block_tokens + 1;
    return kvp__max64(kvp__min64(room, pool), s->seq.length);
}

/* Tokens join a prompt that is being computed, or answer a wait; a generation is not disturbed. */
static kvp_status check_append(const kvp__sequence *s, size_t count, kvp_error *err)
{
    const kvp__sched_entry *e = &s->entry;
    bool deciding = s->in_flight && e->seq->reserved == e->seq->length;
    if (e->in_batch && !e->host && e->generating && (!e->paused || deciding))
        return kvp__fail(err, KVP_ERR_STATE, "the sequence is generating: pause it first");
    if (count > s->context - s->seq.length)
        return kvp__fail_need(err, KVP_ERR_CAPACITY, s->seq.length + count, s->context,
                              "%zu tokens to append, %u are there, and the context is %llu", count,
                              (unsigned)s->seq.length, (unsigned long long)s->context);
    if (!e->in_batch) return KVP_OK;
    return kvp__sched_fits(&s->cache->pool, s->seq.length + count, err);
}

kvp_status kvp__sequence_append(kvp__sequence *s, const int32_t *tokens, size_t count,
                                kvp_error *err)
{
    kvp_status st = kvp__cache_check_tokens(s->cache, tokens, count, err);
    if (st == KVP_OK) st = check_append(s, count, err);
    if (st != KVP_OK || count == 0) return st;
    st = kvp__seq_append(&s->seq, tokens, (uint32_t)count, err);
    if (st != KVP_OK) return st;
    kvp__loop *l = s->cache->loop;
    bool answered = s->entry.in_batch && s->entry.host;
    s->generated += answered;
    if (s->entry.in_batch)
        st = kvp__seq_reserve_capacity(&s->seq, (uint32_t)kvp__sequence_max_length(s), err);
    if (st != KVP_OK) {
        /* The tokens are in, but steps would have to allocate: take them back. */
        s->generated -= answered;
        (void)kvp__seq_truncate(&s->seq, s->seq.length - (uint32_t)count, NULL);
        return st;
    }
    s->logits_pending = false;
    if (!s->entry.in_batch) return KVP_OK;
    if (answered && !s->first_token_ns) s->first_token_ns = kvp__now(hooks_of(s->cache));
    kvp__sched_appended(&l->sched, &s->entry);
    if (answered && s->max_tokens && s->generated >= s->max_tokens)
        kvp__loop_end(l, s, KVP_END_LENGTH, KVP_OK, -1);
    kvp__bell_ring(&l->bell);
    return KVP_OK;
}

/* A buffer of as many ids as a first call says, filled by a second one, then appended. */
typedef kvp_status (*tokenizing)(const kvp__sequence *s, const void *what, size_t n, size_t stride,
                                 uint32_t flags, int32_t *out, size_t capacity, size_t *count,
                                 kvp_error *err);

static kvp_status append_tokenized(kvp__sequence *s, tokenizing tokenize, const void *what,
                                   size_t n, size_t stride, uint32_t flags, kvp_error *err)
{
    const kvp__model *m = &s->cache->model->model;
    if (!m->tokenizer)
        return kvp__fail(err, KVP_ERR_NO_TOKENIZER, "%s", m->tokenizer_error.text[0]
                         ? m->tokenizer_error.text : "the model has no tokenizer");
    size_t count = 0;
    kvp_error sizing = {.size = sizeof sizing}; /* asking how many is no error of the host's */
    kvp_status st = tokenize(s, what, n, stride, flags, NULL, 0, &count, &sizing);
    if (st < 0 && st != KVP_ERR_BUFFER) (void)kvp__struct_out(err, &sizing, sizeof sizing);
    if (st != KVP_ERR_BUFFER) return st;
    int32_t *ids = kvp__alloc_array(hooks_of(s->cache), count, sizeof *ids);
    if (!ids) return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for %zu tokens", count);
    size_t capacity = count;
    st = tokenize(s, what, n, stride, flags, ids, capacity, &count, err);
    if (st == KVP_OK) st = kvp__sequence_append(s, ids, count, err);
    kvp__free(hooks_of(s->cache), ids, capacity * sizeof *ids);
    return st;
}

static kvp_status tokenize_text(const kvp__sequence *s, const void *what, size_t n, size_t stride,
                                uint32_t flags, int32_t *out, size_t capacity, size_t *count,
                                kvp_error *err)
{
    (void)stride;
    return kvp__tokenizer_encode(s->cache->model->model.tokenizer, what, n, flags, out, capacity,
                                 count, err);
}

static kvp_status tokenize_chat(const kvp__sequence *s, const void *what, size_t n, size_t stride,
                                uint32_t flags, int32_t *out, size_t capacity, size_t *count,
                                kvp_error *err)
{
    const kvp__model *m = &s->cache->model->model;
    return kvp__chat_tokenize(m->tokenizer, m->chat_format, what, n, stride, flags, out, capacity,
                              count, err);
}

kvp_status kvp__sequence_append_text(kvp__sequence *s, const char *text, size_t bytes,
                                     uint32_t flags, kvp_error *err)
{
    if (bytes && !text) return kvp__fail(err, KVP_ERR_INVALID_ARG, "text: NULL");
    return append_tokenized(s, tokenize_text, text, bytes, 0, flags, err);
}

kvp_status kvp__sequence_append_chat(kvp__sequence *s, const kvp_chat_message *messages,
                                     size_t n_messages, size_t stride, uint32_t flags,
                                     kvp_error *err)
{
    if (n_messages && !messages) return kvp__fail(err, KVP_ERR_INVALID_ARG, "messages: NULL");
    return append_tokenized(s, tokenize_chat, messages, n_messages, stride, flags, err);
}

kvp_status kvp__sequence_set_max_tokens(kvp__sequence *s, uint64_t max_tokens, kvp_error *err)
{
    uint64_t old = s->max_tokens;
    s->max_tokens = max_tokens;
    if (!s->entry.in_batch) return KVP_OK;
    kvp_status st =
        kvp__seq_reserve_capacity(&s->seq, (uint32_t)kvp__sequence_max_length(s), err);
    if (st != KVP_OK) s->max_tokens = old;
    return st;
}

kvp_status kvp__sequence_truncate(kvp__sequence *s, uint64_t length, kvp_error *err)
{
    if (length > s->seq.length)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "length: %llu is beyond the end at %u",
                         (unsigned long long)length, (unsigned)s->seq.length);
    if (length == s->seq.length) return KVP_OK;
    kvp_status st = kvp__seq_truncate(&s->seq, (uint32_t)length, err);
    if (st != KVP_OK) return st;
    s->logits_pending = false;
    kvp__textstream_init(&s->stream);
    kvp__loop *l = s->cache->loop;
    /* A fork may own the tokens that were cut: take a copy now rather than in a step. If there is
     * no memory for it, the step asks again. */
    if (s->entry.in_batch)
        (void)kvp__seq_reserve_capacity(&s->seq, (uint32_t)kvp__sequence_max_length(s), NULL);
    kvp__sched_truncated(l ? &l->sched : NULL, &s->entry);
    if (l) kvp__bell_ring(&l->bell);
    return KVP_OK;
}

kvp_status kvp__sequence_pin(kvp__sequence *s, uint64_t length, kvp_error *err)
{
    if (length > s->seq.length)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "length: %llu is beyond the end at %u",
                         (unsigned long long)length, (unsigned)s->seq.length);
    kvp_status st = kvp__seq_pin(&s->seq, (uint32_t)length, err);
    if (st != KVP_OK) return st;
    kvp__sched_pinned(&s->entry);
    if (s->cache->loop) kvp__bell_ring(&s->cache->loop->bell);
    return KVP_OK;
}

void kvp__sequence_get_info(const kvp__sequence *s, kvp_seq_info *out)
{
    memset(out, 0, sizeof *out);
    out->state = s->entry.state;
    out->length = s->seq.length;
    out->computed = s->seq.computed;
    out->pinned = s->seq.pin;
    out->blocks = s->seq.n_blocks;
    out->shared_blocks = kvp__seq_shared(&s->seq);
    out->tag = s->tag;
    out->seed = s->seed;
    out->events = s->ring.count;
}
