/*
 * One step: quiet the bell, let what is in flight get on, take in what has landed, launch the next.
 *
 * At most one plan is launched per call, so a host's other work is never held up by more than one
 * planning; an inline call computes for as long as its budget lasts. See engine.h for what may
 * change under a step in flight.
 */
#define _GNU_SOURCE
#include "engine/engine.h"

#include <sched.h>
#include <string.h>
#include <time.h>

/* A lost device signals nothing: while a step is in flight somebody must look now and then. */
#define LOOK_NS 100000000u
/* Between two looks of a batch that ends with a step on an asynchronous device. */
#define WAIT_NS 20000

static const kvp__hooks *hooks_of(const kvp__loop *l) { return &l->cache->model->origin.hooks; }

static void count(_Atomic uint64_t *n, uint64_t more)
{
    atomic_store_explicit(n, atomic_load_explicit(n, memory_order_relaxed) + more,
                          memory_order_relaxed);
}

/* --- worker: from a row of logits to a result --- */

static void post(void *user, uint32_t i, float *logits, void *scratch)
{
    kvp__loop *l = user;
    kvp__pending *p = &l->pending[i];
    uint32_t n = kvp__cache_vocabulary(l->cache);
    if (p->host_row) {
        memcpy(p->host_row, logits, n * sizeof *logits);
        return;
    }
    const kvp__settings *t = p->settings;
    p->error.size = sizeof p->error;
    const kvp__choice *c = &l->choices[i];
    p->status = kvp__sample(&t->sampler, logits, n, c->seed, c->position, t->recent, t->n_recent,
                            scratch, &p->sampled, &p->error);
}

static void chosen(void *user, uint32_t i, int32_t token, uint32_t bad)
{
    kvp__loop *l = user;
    kvp__pending *p = &l->pending[i];
    p->error.size = sizeof p->error;
    p->sampled = (kvp__sampled){.token = token};
    if (token < 0) p->status = kvp__sample_broken(bad, kvp__cache_vocabulary(l->cache), &p->error);
}

static void done(void *user)
{
    kvp__loop *l = user;
    kvp__bell_ring(&l->bell);
}

/* --- launch --- */

/* What penalties look at, as it is now: the host may change the sequence while the step runs. */
static void remember_recent(kvp__settings *t, const kvp__seq *s)
{
    if (!t->recent) return;
    uint32_t n = t->sampler.penalty_window < s->length ? t->sampler.penalty_window : s->length;
    memcpy(t->recent, s->tokens + s->length - n, n * sizeof *t->recent);
    t->n_recent = n;
}

static void prepare_output(kvp__loop *l, const kvp__sched_item *item, kvp__sequence *s)
{
    uint32_t i = l->work.n_outputs++;
    l->outputs[i] = item->first_row + item->n_rows - 1;
    kvp__pending *p = &l->pending[i];
    p->settings = s->settings;
    p->settings->refs++;
    p->host_row = kvp__sequence_logits_row(s);
    p->status = KVP_OK;
    bool host = l->cache->model->own_model || p->host_row;
    l->choices[i] = (kvp__choice){.sampler = host ? NULL : &p->settings->sampler, .seed = s->seed,
                                  .position = (uint64_t)item->first_pos + item->n_rows};
    remember_recent(p->settings, &s->seq);
}

static void prepare_item(kvp__loop *l, uint32_t i, const kvp__sched_item *item)
{
    kvp__sequence *s = kvp__sequence_of_entry(item->entry);
    kvp__work_seq *w = &l->seqs[i];
    w->first_row = item->first_row;
    w->n_rows = item->n_rows;
    w->first_pos = item->first_pos;
    w->n_blocks = (uint32_t)kvp__ceil_div((uint64_t)item->first_pos + item->n_rows,
                                          l->cache->layout.block_tokens);
    for (uint32_t g = 0; g < l->cache->layout.n_groups; g++) {
        uint32_t *table = l->tables + ((size_t)g * l->max_sequences + i) * l->table_stride;
        memcpy(table, s->seq.tables[g], w->n_blocks * sizeof *table);
        w->tables[g] = table;
    }
    memcpy(l->tokens + item->first_row, s->seq.tokens + item->first_pos,
           item->n_rows * sizeof *l->tokens);
    for (uint32_t r = 0; r < item->n_rows; r++) {
        l->positions[item->first_row + r] = item->first_pos + r;
        l->row_sequence[item->first_row + r] = i;
    }
    l->item_output[i] = item->logits ? l->work.n_outputs : KVP__NONE;
    if (item->logits) prepare_output(l, item, s);
    if (!s->first_row_ns) s->first_row_ns = l->launched_ns;
    s->in_flight = true;
    l->riders[l->n_riders++] = s;
}

void kvp__loop_prepare(kvp__loop *l, const kvp__sched_step *step)
{
    l->launched_ns = kvp__now(hooks_of(l));
    l->step = step;
    l->n_riders = 0;
    l->work = (kvp__work){.n_rows = step->n_rows, .n_seqs = step->n_items,
                          .n_copies = step->n_copies, .tokens = l->tokens,
                          .positions = l->positions, .seqs = l->seqs, .copies = step->copies,
                          .outputs = l->outputs, .choices = l->choices, .post = post,
                          .chosen = chosen, .done = done, .user = l};
    for (uint32_t i = 0; i < step->n_items; i++) prepare_item(l, i, &step->items[i]);
}

void kvp__loop_note_plan(kvp__loop *l, const kvp__sched_step *step)
{
    kvp__cache *c = l->cache;
    uint64_t used = kvp__pool_used(&c->pool, 0);
    if (used > c->used_peak) __atomic_store_n(&c->used_peak, used, __ATOMIC_RELAXED);
    for (uint32_t i = 0; i < step->n_ended; i++)
        kvp__loop_end(l, kvp__sequence_of_entry(step->ended[i]), KVP_END_CAPACITY, KVP_OK, -1);
}

/* --- landing --- */

void kvp__loop_land(kvp__loop *l)
{
    for (uint32_t i = 0; i < l->n_riders; i++) l->riders[i]->in_flight = false;
    for (uint32_t i = 0; i < l->work.n_outputs; i++)
        kvp__settings_release(l->cache, l->pending[i].settings);
    l->n_riders = l->work.n_outputs = 0;
    l->flight = KVP__FLIGHT_NONE;
    while (l->doomed) {
        kvp__sequence *s = l->doomed;
        l->doomed = s->next;
        kvp__sequence_free(s);
    }
}

static bool is_stop_token(const kvp__sequence *s, int32_t token)
{
    const kvp__tokenizer *t = s->cache->model->model.tokenizer;
    if (s->eos == KVP_EOS_STOP && t && kvp__tokenizer_flags(t, token) & KVP_TOKEN_END) return true;
    for (uint32_t i = 0; s->endings && i < s->endings->n_tokens; i++)
        if (s->endings->tokens[i] == token) return true;
    return false;
}

/* Pushes the token's text through the stream into the event; true: a stop string is complete. */
static bool tell_token(kvp__loop *l, kvp__sequence *s, const kvp__sampled *sampled)
{
    const kvp__tokenizer *t = s->cache->model->model.tokenizer;
    if (!t || !s->ring.text_unit) {
        kvp__loop_push_token(l, s, sampled, "", 0);
        return false;
    }
    char *piece = l->piece, *out = l->piece + l->piece_bytes;
    size_t n = kvp__tokenizer_piece(t, sampled->token, 0, piece, l->piece_bytes), n_out = 0;
    const kvp__stops *stops = s->endings ? s->endings->strings : NULL;
    bool stop = kvp__textstream_push(&s->stream, stops, piece, n, out, &n_out);
    kvp__loop_push_token(l, s, sampled, out, n_out);
    return stop;
}

void kvp__loop_decide(kvp__loop *l, kvp__sequence *s, const kvp__sampled *sampled)
{
    if (s->max_tokens == KVP_MAX_TOKENS_NONE) {
        kvp__loop_end(l, s, KVP_END_LENGTH, KVP_OK, -1);
        return;
    }
    if (!sampled) {
        s->logits_pending = s->logits != NULL;
        kvp__sched_wait_host(&l->sched, &s->entry);
        kvp__loop_push_logits(l, s);
        return;
    }
    if (is_stop_token(s, sampled->token)) {
        kvp__loop_end(l, s, KVP_END_STOP, KVP_OK, sampled->token);
        return;
    }
    if (s->seq.length >= s->context) {
        kvp__loop_end(l, s, KVP_END_LENGTH, KVP_OK, -1);
        return;
    }
    kvp_status st = kvp__sched_token(&l->sched, &s->entry, sampled->token, NULL);
    if (st != KVP_OK) {
        kvp__loop_end(l, s, KVP_END_FAILED, st, -1);
        return;
    }
    if (!s->generated++) s->first_token_ns = kvp__now(hooks_of(l));
    count(&l->rows_generated, 1);
    if (tell_token(l, s, sampled))
        kvp__loop_end(l, s, KVP_END_STOP, KVP_OK, -1);
    else if ((s->max_tokens && s->generated >= s->max_tokens) || s->seq.length >= s->context)
        kvp__loop_end(l, s, KVP_END_LENGTH, KVP_OK, -1);
}

/* What the device (`chosen` NULL) or the host has found for output `i` of the step. */
static void decide_output(kvp__loop *l, kvp__sequence *s, uint32_t i, const int32_t *chosen)
{
    const kvp__pending *p = &l->pending[i];
    if (chosen) {
        kvp__sampled sampled = {.token = chosen[i]};
        kvp__loop_decide(l, s, chosen[i] >= 0 ? &sampled : NULL);
    } else if (p->status != KVP_OK) {
        kvp__log(hooks_of(l), KVP_LOG_ERROR, "a sequence failed: %s", p->error.text);
        kvp__loop_end(l, s, KVP_END_FAILED, p->status, -1);
    } else {
        /* As it was launched: the host may have changed who chooses since. */
        bool host = l->cache->model->own_model || p->host_row;
        kvp__loop_decide(l, s, host ? NULL : &p->sampled);
    }
}

/* Of the tokens before its first row, those that no cache had to be asked for: kept while it was
 * parked, or shared by a fork. */
static void note_held(kvp__sequence *s, const kvp__sched_item *item)
{
    if (s->held != UINT64_MAX) return;
    kvp__seq_usage u = kvp__sched_usage(&s->entry);
    s->held = item->first_pos - kvp__min64(item->first_pos, u.cached + u.reattached);
}

void kvp__loop_take_in(kvp__loop *l, const int32_t *chosen)
{
    const kvp__sched_step *step = l->step;
    kvp__sched_commit(&l->sched);
    count(&l->steps, 1);
    count(&l->step_ns, kvp__now(hooks_of(l)) - l->launched_ns);
    for (uint32_t i = 0; i < step->n_items; i++) {
        const kvp__sched_item *item = &step->items[i];
        if (!item->entry) continue;
        kvp__sequence *s = kvp__sequence_of_entry(item->entry);
        note_held(s, item);
        if (!item->decode) kvp__loop_push_progress(l, s);
        if (item->decide && s->entry.in_batch) decide_output(l, s, l->item_output[i], chosen);
    }
    kvp__loop_land(l);
}

void kvp__loop_fail(kvp__loop *l, kvp_status status, const char *what, const char *why)
{
    kvp__sched_abort(&l->sched);
    kvp__loop_land(l);
    l->fatal = status;
    l->fatal_error.size = sizeof l->fatal_error;
    kvp__fail(&l->fatal_error, status, "%s%s%s", what, why ? ": " : "", why ? why : "");
    kvp__log(hooks_of(l), KVP_LOG_ERROR, "the batch failed: %s", l->fatal_error.text);
}

static const char *why(const kvp__loop *l)
{
    const kvp__device *d = l->cache->device;
    return d->why ? d->why(l->runner) : NULL;
}

/* Computes (inline) or looks; takes in a step that is over. */
static void get_on(kvp__loop *l, uint64_t until)
{
    const kvp__device *d = l->cache->device;
    if (kvp__loop_is_inline(l)) d->advance(l->runner, until);
    kvp_status s = d->poll(l->runner);
    if (s == KVP_OK) {
        uint64_t t = kvp__now(hooks_of(l));
        kvp__loop_take_in(l, NULL);
        count(&l->plan_ns, kvp__now(hooks_of(l)) - t);
    } else if (s < 0) {
        kvp__loop_fail(l, s, "the device stopped working", why(l));
    }
}

void kvp__loop_drop_flight(kvp__loop *l)
{
    const kvp__device *d = l->cache->device;
    if (l->flight == KVP__FLIGHT_NONE) return;
    if (l->flight == KVP__FLIGHT_DEVICE) {
        d->cancel(l->runner);
        while (d->poll(l->runner) == KVP_AGAIN) {
            if (kvp__loop_is_inline(l))
                d->advance(l->runner, UINT64_MAX);
            else if (d->asynchronous)
                nanosleep(&(struct timespec){.tv_nsec = WAIT_NS}, NULL);
            else
                sched_yield();
        }
    }
    kvp__sched_abort(&l->sched);
    kvp__loop_land(l);
}

/* --- the call --- */

/* Makes what was planned ready for the device, or a view for the host. */
static kvp_status make_ready(kvp__loop *l, kvp_error *err)
{
    const kvp__device *d = l->cache->device;
    kvp_status s = kvp__work_check(&l->work, &l->cache->layout, err);
    if (s != KVP_OK) return s;
    if (l->cache->model->own_model) {
        s = d->begin(l->runner, &l->work, err);
        if (s != KVP_OK) return s;
        for (uint32_t i = 0; i < l->cache->model->model.geometry.n_layers; i++)
            l->layers_done[i] &= KVP__LAYER_RECORDED;
        l->flight = KVP__FLIGHT_HOST;
        return KVP_OK;
    }
    l->flight = KVP__FLIGHT_DEVICE;
    return d->prepare(l->runner, &l->work);
}

static void launch(kvp__loop *l)
{
    uint64_t t = kvp__now(hooks_of(l));
    const kvp__sched_step *step = kvp__sched_plan(&l->sched);
    kvp__loop_note_plan(l, step);
    l->step = step;
    kvp_error e = {.size = sizeof e};
    kvp_status s = KVP_OK;
    if (step->n_rows) {
        kvp__loop_prepare(l, step);
        s = make_ready(l, &e);
    }
    /* Workers that wake up may take this thread's core from here on. */
    count(&l->plan_ns, kvp__now(hooks_of(l)) - t);
    if (s == KVP_OK && l->flight == KVP__FLIGHT_DEVICE) s = l->cache->device->launch(l->runner);
    if (s == KVP_OK) return;
    bool told = e.text[0] != '\0';
    if (s == KVP_ERR_UNSUPPORTED && l->cache->device->asynchronous) { /* it has changed nothing */
        kvp__sched_abort(&l->sched);
        kvp__loop_land(l);
        const char *words = told ? NULL : why(l);
        l->refused = s;
        l->refused_error.size = sizeof l->refused_error;
        kvp__fail(&l->refused_error, s, "%s", told ? e.text : words ? words : "the device took no step");
        return;
    }
    kvp__loop_fail(l, s, told ? e.text : "the device took no step", told ? NULL : why(l));
}

/* What kvp_step says, the deadline, and the bell, from the state that is left. */
static kvp_status answer(kvp__loop *l, kvp_error *err)
{
    l->deadline = UINT64_MAX;
    if (l->fatal) {
        if (err) *err = l->fatal_error;
        return l->fatal;
    }
    if (l->refused) {
        kvp_status s = l->refused;
        if (err) *err = l->refused_error;
        l->refused = KVP_OK;
        l->deadline = kvp__now(hooks_of(l)) + LOOK_NS;
        return s;
    }
    if (l->flight == KVP__FLIGHT_HOST) return KVP_PLANNED;
    bool computing = l->flight == KVP__FLIGHT_DEVICE;
    bool stalled = !computing && l->step && l->step->stalled;
    /* Inline work goes on when called again; so does what taking in results has made ready. */
    bool again = computing ? kvp__loop_is_inline(l) : !stalled && kvp__sched_has_work(&l->sched);
    if (again) {
        l->deadline = 0;
        kvp__bell_ring(&l->bell);
    } else if (computing) {
        l->deadline = kvp__now(hooks_of(l)) + LOOK_NS;
    }
    if (l->events.head) return KVP_EVENTS;
    if (again) return KVP_OK;
    if (computing) return KVP_AGAIN;
    return stalled ? KVP_STALLED : KVP_DONE;
}

static uint64_t later(uint64_t now, uint64_t ns)
{
    return now > UINT64_MAX - ns ? UINT64_MAX : now + ns;
}

kvp_status kvp__loop_step(kvp__loop *l, kvp_error *err)
{
    kvp__bell_quiet(&l->bell);
    if (l->fatal == KVP_OK) {
        bool computes = kvp__loop_is_inline(l);
        uint64_t until = computes ? later(kvp__now(hooks_of(l)), l->inline_budget_ns) : 0;
        if (l->flight == KVP__FLIGHT_DEVICE) get_on(l, until);
        if (l->flight == KVP__FLIGHT_NONE && !l->fatal) {
            launch(l);
            if (l->flight == KVP__FLIGHT_DEVICE && computes && !l->fatal) get_on(l, until);
        }
    }
    return answer(l, err);
}
