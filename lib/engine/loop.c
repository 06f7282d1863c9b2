/*
 * Batches: what a step needs, taken once, and who is in. See engine.h; the step is in step.c.
 */
#include "engine/engine.h"

#include <string.h>

#define MAX_BUDGET 8192u
#define MAX_SEQUENCES 4096u
#define DEFAULT_WATERMARK 30u
#define DEFAULT_PREFILL_SHARE 500u
#define DEFAULT_INLINE_NS 2000000u
#define DEFAULT_CHUNK 256u

static const kvp__hooks *hooks_of(const kvp__loop *l) { return &l->cache->model->origin.hooks; }

/* --- options --- */

static kvp_status check_range(const char *what, uint32_t value, uint32_t most, kvp_error *err)
{
    if (value <= most) return KVP_OK;
    return kvp__fail(err, KVP_ERR_INVALID_ARG, "%s: %u is above %u", what, (unsigned)value,
                     (unsigned)most);
}

/* Keys whose attention costs a row as much as its matrix products, taken that a multiply-add of
 * attention, in floats, takes as long as three of theirs, in bytes. */
static uint32_t level_tokens(const kvp__model *m)
{
    const kvp__arch *a = &m->arch;
    uint64_t products = 0, of_key = 0;
    for (uint32_t i = 0; i < a->n_layers; i++) {
        const kvp__layer *l = &a->layers[i];
        const uint64_t heads = a->query_heads, kv = l->kv_heads;
        products += (uint64_t)a->width * (heads * (a->key_dim + a->value_dim) +
                                          kv * (a->key_dim + a->value_dim) + 3ull * a->feed_forward);
        if (l->window == 0) of_key += heads * (a->key_dim + a->value_dim);
    }
    return of_key ? (uint32_t)kvp__min64(products / (3 * of_key) + 1, UINT32_MAX) : 0;
}

static kvp_status fill_options(kvp_batch_options *o, kvp_error *err)
{
    if (!o->token_budget) o->token_budget = KVP__DEFAULT_BUDGET;
    if (!o->max_sequences) o->max_sequences = KVP__DEFAULT_SEQUENCES;
    if (!o->watermark) o->watermark = DEFAULT_WATERMARK;
    if (!o->prefill_share) o->prefill_share = DEFAULT_PREFILL_SHARE;
    if (!o->inline_budget_ns) o->inline_budget_ns = DEFAULT_INLINE_NS;
    if (!o->chunk_tokens) o->chunk_tokens = DEFAULT_CHUNK;
    kvp_status s = check_range("token_budget", o->token_budget, MAX_BUDGET, err);
    if (s == KVP_OK) s = check_range("max_sequences", o->max_sequences, MAX_SEQUENCES, err);
    if (s == KVP_OK && o->watermark != KVP_WATERMARK_NONE)
        s = check_range("watermark", o->watermark, 999, err);
    if (s == KVP_OK && o->prefill_share != KVP_PREFILL_SHARE_NONE)
        s = check_range("prefill_share", o->prefill_share, 999, err);
    if (s == KVP_OK && (o->threads < KVP_THREADS_INLINE || o->threads > 1024))
        s = kvp__fail(err, KVP_ERR_INVALID_ARG, "threads: %d is not from -1 to 1024",
                      (int)o->threads);
    if (s == KVP_OK && o->team && o->threads)
        s = kvp__fail(err, KVP_ERR_INVALID_ARG, "threads: given beside a team");
    return s;
}

/* --- creation --- */

static void *take(const kvp__loop *l, size_t count, size_t size, bool *ok)
{
    void *p = kvp__alloc_array(hooks_of(l), count, size);
    if (p)
        memset(p, 0, count * size);
    else
        *ok = false;
    return p;
}

/* Every array of a step. The tables are mapped: they are as large as the longest step could make
 * them, and committed as far as steps really reach. */
static kvp_status take_arrays(kvp__loop *l, kvp_error *err)
{
    const kvp__cache *c = l->cache;
    size_t rows = l->max_rows, seqs = l->max_sequences;
    bool ok = true;
    l->tokens = take(l, rows, sizeof *l->tokens, &ok);
    l->positions = take(l, rows, sizeof *l->positions, &ok);
    l->row_sequence = take(l, rows, sizeof *l->row_sequence, &ok);
    l->outputs = take(l, seqs, sizeof *l->outputs, &ok);
    l->item_output = take(l, seqs, sizeof *l->item_output, &ok);
    l->seqs = take(l, seqs, sizeof *l->seqs, &ok);
    l->riders = take(l, seqs, sizeof *l->riders, &ok);
    l->pending = take(l, seqs, sizeof *l->pending, &ok);
    l->choices = take(l, seqs, sizeof *l->choices, &ok);
    if (c->model->own_model) {
        l->slots = take(l, rows * c->layout.n_groups, sizeof *l->slots, &ok);
        l->view_handles = take(l, seqs, sizeof *l->view_handles, &ok);
        l->view_tags = take(l, seqs, sizeof *l->view_tags, &ok);
        l->view_lengths = take(l, seqs, sizeof *l->view_lengths, &ok);
        l->layers_done = take(l, c->model->model.geometry.n_layers, 1, &ok);
    }
    if (c->model->model.tokenizer) {
        kvp__tokenizer_info info;
        kvp__tokenizer_get_info(c->model->model.tokenizer, &info);
        l->piece_bytes = info.longest_piece;
        l->piece = take(l, 2 * l->piece_bytes + KVP__TEXT_HELD, 1, &ok);
    }
    uint64_t bytes;
    if (!kvp__mul((uint64_t)c->layout.n_groups * seqs * sizeof(uint32_t), l->table_stride, &bytes))
        return kvp__fail(err, KVP_ERR_TOO_LARGE, "block tables of %zu sequences", seqs);
    l->tables_bytes = bytes;
    l->tables = kvp__map(bytes);
    if (!ok || !l->tables)
        return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for steps of %zu rows", rows);
    return KVP_OK;
}

static void give_arrays(kvp__loop *l)
{
    const kvp__hooks *h = hooks_of(l);
    size_t rows = l->max_rows, seqs = l->max_sequences;
    kvp__free(h, l->tokens, rows * sizeof *l->tokens);
    kvp__free(h, l->positions, rows * sizeof *l->positions);
    kvp__free(h, l->row_sequence, rows * sizeof *l->row_sequence);
    kvp__free(h, l->outputs, seqs * sizeof *l->outputs);
    kvp__free(h, l->item_output, seqs * sizeof *l->item_output);
    kvp__free(h, l->seqs, seqs * sizeof *l->seqs);
    kvp__free(h, l->riders, seqs * sizeof *l->riders);
    kvp__free(h, l->pending, seqs * sizeof *l->pending);
    kvp__free(h, l->choices, seqs * sizeof *l->choices);
    kvp__free(h, l->slots, rows * l->cache->layout.n_groups * sizeof *l->slots);
    kvp__free(h, l->view_handles, seqs * sizeof *l->view_handles);
    kvp__free(h, l->view_tags, seqs * sizeof *l->view_tags);
    kvp__free(h, l->view_lengths, seqs * sizeof *l->view_lengths);
    kvp__free(h, l->layers_done, l->cache->model->model.geometry.n_layers);
    kvp__free(h, l->piece, 2 * l->piece_bytes + KVP__TEXT_HELD);
    kvp__unmap(l->tables, l->tables_bytes);
}

static kvp_status take_team(kvp__loop *l, const kvp_batch_options *o, kvp_error *err)
{
    if (l->cache->device->asynchronous) return KVP_OK;
    if (o->team) {
        kvp__shell *shell = kvp__shell_pin(o->team, KVP__KIND_TEAM);
        if (!shell) return kvp__fail(err, KVP_ERR_INVALID_HANDLE, "not a live team handle");
        kvp__crew *crew = shell->object;
        bool ours = kvp__origin_is_ours(&crew->origin, crew->generation);
        if (ours) kvp__origin_acquire(&crew->origin);
        kvp__shell_unpin(shell);
        if (!ours) return kvp__fail(err, KVP_ERR_FORKED, "the team belongs to the parent process");
        l->crew = crew;
        l->team = crew->team;
        return KVP_OK;
    }
    if (o->threads == KVP_THREADS_INLINE) return KVP_OK;
    return kvp__team_create(&l->team, hooks_of(l), o->threads, KVP__SCRATCH_BYTES, err);
}

static void give_team(kvp__loop *l)
{
    if (l->crew)
        kvp__origin_release(&l->crew->origin);
    else if (l->team)
        kvp__team_release(l->team);
}

static kvp_status take_runner(kvp__loop *l, const kvp_batch_options *o, kvp_error *err)
{
    kvp__cache *c = l->cache;
    if (o->stream && !c->device->asynchronous)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "stream: device \"%s\" has none",
                         c->device->name);
    uint64_t positions = (uint64_t)c->pool.n_blocks * c->pool.block_tokens;
    const kvp__model *m = &c->model->model;
    if (m->geometry.context) positions = kvp__min64(positions, m->geometry.context);
    kvp__runner_options ro = {
        .hooks = hooks_of(l), .model = m, .store = c->store, .team = l->team, .stream = o->stream,
        .weights = kvp__opened_weights(c->model, c->device, c->ordinal), .max_rows = l->max_rows,
        .max_seqs = l->max_sequences, .max_outputs = l->max_sequences,
        .max_positions = (uint32_t)kvp__min64(positions, KVP__MAX_TOKENS)};
    l->table_stride = (uint32_t)kvp__ceil_div(ro.max_positions, c->pool.block_tokens);
    return c->device->runner_create(&ro, &l->runner, err);
}

static void unmake(kvp__loop *l)
{
    kvp__cache *c = l->cache;
    if (l->runner) c->device->runner_destroy(l->runner);
    kvp__sched_fini(&l->sched);
    give_team(l);
    give_arrays(l);
    kvp__bell_close(&l->bell);
    kvp__free(hooks_of(l), l, sizeof *l);
}

kvp_status kvp__loop_create(kvp__loop **out, kvp__cache *c, const kvp_batch_options *options,
                            kvp_error *err)
{
    kvp_batch_options o = *options;
    kvp_status s = fill_options(&o, err);
    if (s != KVP_OK) return s;
    if (c->loop) return kvp__fail(err, KVP_ERR_BUSY, "the pool has a batch already");
    kvp__loop *l = kvp__alloc_zero(&c->model->origin.hooks, sizeof *l);
    if (!l) return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for a batch");
    l->cache = c;
    l->max_rows = o.token_budget;
    l->max_sequences = o.max_sequences < o.token_budget ? o.max_sequences : o.token_budget;
    l->inline_budget_ns = o.inline_budget_ns;
    l->deadline = UINT64_MAX;
    kvp__bell_init(&l->bell);
    kvp__sched_options so = {.token_budget = o.token_budget, .max_sequences = l->max_sequences,
                             .watermark = o.watermark, .prefill_share = o.prefill_share,
                             .chunk_tokens = o.chunk_tokens};
    if (!options->chunk_tokens) so.level_tokens = level_tokens(&c->model->model);
    s = kvp__sched_init(&l->sched, hooks_of(l), &so, &c->pool, kvp__cache_prefix(c), &c->holders,
                        err);
    if (s == KVP_OK) s = take_team(l, &o, err);
    if (s == KVP_OK) s = take_runner(l, &o, err);
    if (s == KVP_OK) s = take_arrays(l, err);
    if (s == KVP_OK) {
        l->shell = kvp__shell_make(&c->model->origin, KVP__KIND_BATCH, l, &c->domain);
        if (!l->shell) s = kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for a batch's handle");
    }
    if (s != KVP_OK) {
        unmake(l);
        return s;
    }
    c->loop = l;
    kvp__domain_acquire(&c->domain);
    *out = l;
    return KVP_OK;
}

void kvp__loop_destroy(kvp__loop *l)
{
    kvp__loop_drop_flight(l);
    for (kvp__sequence *s = l->cache->sequences; s; s = s->next) {
        if (s->entry.in_batch) kvp__sched_remove(&l->sched, &s->entry);
        kvp__ring_purge(&s->ring, &l->events);
    }
    l->cache->loop = NULL;
    unmake(l);
}

/* --- who is in --- */

kvp_status kvp__loop_add(kvp__loop *l, kvp__sequence *s, kvp_error *err)
{
    if (l->fatal) return kvp__fail(err, l->fatal, "the batch has failed");
    if (s->entry.in_batch) return kvp__fail(err, KVP_ERR_DUPLICATE, "the sequence is in the batch");
    if (s->ring.has_ending)
        return kvp__fail(err, KVP_ERR_STATE, "take the ending of its last add first");
    if (s->seq.length == 0) return kvp__fail(err, KVP_ERR_STATE, "the sequence is empty: append its prompt first");
    kvp_status st = kvp__ring_reserve(&s->ring, hooks_of(l), s->settings->sampler.top_logprobs, err);
    if (st != KVP_OK) return st;
    uint64_t generated = s->generated;
    s->generated = 0;
    st = kvp__sched_add(&l->sched, &s->entry, kvp__sequence_max_length(s), err);
    if (st != KVP_OK) {
        s->generated = generated;
        return st;
    }
    s->added_ns = kvp__now(hooks_of(l));
    s->first_row_ns = s->first_token_ns = 0;
    s->held = UINT64_MAX;
    s->ring_full = s->host_paused = false;
    atomic_store(&s->cancel_asked, 0);
    kvp__textstream_init(&s->stream);
    if (kvp__ring_room(&s->ring) == 0) {
        s->ring_full = true;
        kvp__sched_pause(&l->sched, &s->entry);
    }
    kvp__bell_ring(&l->bell);
    return KVP_OK;
}

kvp_status kvp__loop_remove(kvp__loop *l, kvp__sequence *s, kvp_error *err)
{
    if (!s->entry.in_batch)
        return kvp__fail(err, KVP_ERR_STATE, "the sequence is not in the batch");
    kvp__sched_remove(&l->sched, &s->entry);
    kvp__bell_ring(&l->bell);
    return KVP_OK;
}

kvp_status kvp__loop_pause(kvp__sequence *s, bool pause, kvp_error *err)
{
    kvp__loop *l = s->cache->loop;
    if (!s->entry.in_batch)
        return kvp__fail(err, KVP_ERR_STATE, "the sequence is in no batch");
    if (s->host_paused == pause) return KVP_OK;
    s->host_paused = pause;
    if (pause && !s->ring_full) kvp__sched_pause(&l->sched, &s->entry);
    if (!pause && !s->ring_full) kvp__sched_resume(&l->sched, &s->entry);
    kvp__bell_ring(&l->bell);
    return KVP_OK;
}

/* --- waiting and counting --- */

/* What has rung the bell since the last step is due now. */
uint64_t kvp__loop_deadline(const kvp__loop *l)
{
    return atomic_load(&l->bell.rung) ? 0 : l->deadline;
}

int32_t kvp__loop_timeout_ms(const kvp__loop *l)
{
    uint64_t deadline = kvp__loop_deadline(l);
    if (deadline == UINT64_MAX) return -1;
    uint64_t now = kvp__now(hooks_of(l));
    if (deadline <= now) return 0;
    return (int32_t)kvp__min64(kvp__ceil_div(deadline - now, 1000000u), INT32_MAX);
}

kvp_status kvp__loop_wait_for(kvp__loop *l, int32_t *timeout_ms, int32_t *fd, kvp_error *err)
{
    int32_t own = kvp__loop_timeout_ms(l);
    if (own >= 0 && (*timeout_ms < 0 || own < *timeout_ms)) *timeout_ms = own;
    return kvp__bell_listen(&l->bell, fd, err);
}

static uint64_t peek(const _Atomic uint64_t *n)
{
    return atomic_load_explicit(n, memory_order_relaxed);
}

void kvp__loop_get_stats(const kvp__loop *l, kvp_batch_stats *out)
{
    const kvp__sched_stats *n = &l->sched.stats;
    memset(out, 0, sizeof *out);
    out->threads = l->team ? kvp__team_threads(l->team) : 0;
    out->sequences = KVP__PEEK(n->sequences);
    out->running = KVP__PEEK(n->running);
    out->waiting = KVP__PEEK(n->waiting);
    out->steps = peek(&l->steps);
    out->rows = KVP__PEEK(n->rows);
    out->rows_prefill = KVP__PEEK(n->rows_prefill);
    out->rows_decode = KVP__PEEK(n->rows_decode);
    out->generated = peek(&l->rows_generated);
    out->endings = peek(&l->endings);
    out->preemptions = KVP__PEEK(n->preemptions);
    out->step_ns = peek(&l->step_ns);
    out->plan_ns = peek(&l->plan_ns);
}
