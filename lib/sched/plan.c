/*
 * The planning of a step, its commit and its abort. See sched.h for the contract.
 *
 * A plan goes through four passes, each of which takes rows from the same budget:
 *
 *     decodes    least recently served first, as many as the share of prompts leaves
 *     prefills   running prompts in order, a chunk each
 *     admission  waiting entries in order, until one does not fit
 *     decodes    again, with the rows that prompts did not use
 *
 * Blocks are taken on the way (kvp__seq_reserve). Where none is to be had, make_room asks, in this
 * order: who holds blocks without running, and then the last running entry in order, whose item (if
 * this plan has given it one already) is taken out of the plan again. An entry that would have to
 * give up its own blocks keeps them and gets no row this time: that is no worse for anybody, since
 * whoever is ahead of it takes them when in need, and better for it if somebody ends before that.
 *
 * All of it is list work and O(1) calls below; the searches over running entries (for the last in
 * order) and over prompts (promised blocks, leaders) happen only under pressure or at admission.
 */
#include "sched/states.h"

#include <string.h>

/* --- planning: room --- */

static void put_item(kvp__sched *s, kvp__sched_entry *e, uint32_t rows)
{
    kvp__sched_item *item = &s->step.items[s->step.n_items++];
    memset(item, 0, sizeof *item);
    item->entry = e;
    item->n_rows = rows;
    item->first_pos = e->seq->computed;
    item->logits = item->first_pos + rows == e->seq->length;
    item->decode = e->state == KVP_SEQ_DECODE;
    s->step.n_rows += rows;
    e->planned = s->step.n_items;
}

static void drop_item(kvp__sched *s, kvp__sched_entry *e)
{
    kvp__sched_step *p = &s->step;
    uint32_t i = e->planned - 1;
    p->n_rows -= p->items[i].n_rows;
    p->n_items--;
    memmove(&p->items[i], &p->items[i + 1], (p->n_items - i) * sizeof *p->items);
    for (; i < p->n_items; i++) p->items[i].entry->planned = i + 1;
    e->planned = 0;
}

/* The last of the running entries in order. */
static kvp__sched_entry *last_running(const kvp__sched *s)
{
    kvp__sched_entry *last = s->prefill.tail;
    for (kvp__sched_entry *e = s->decode.head; e; e = e->order.next)
        if (!last || kvp__sched_ahead(last, e)) last = e;
    return last;
}

static void preempt(kvp__sched *s, kvp__sched_entry *e)
{
    if (e->planned) drop_item(s, e);
    kvp__sched_wait_turn(s, e);
    kvp__sched_give_up(e);
    e->preemptions++;
    KVP__BUMP(s->stats.preemptions, 1);
    KVP__BUMP(s->pool->counters.preemptions, 1);
}

/* Asks the next holder for its blocks. False: there is none. */
static bool reclaim(kvp__sched *s)
{
    for (uint32_t h = 0; h < KVP__HOLDS; h++) {
        kvp__sched_entry *e = s->holders->lists[h].head;
        if (!e) continue;
        kvp__sched_give_up(e);
        KVP__BUMP(s->pool->counters.reclaims, 1);
        return true;
    }
    return false;
}

/* Frees something for a running entry, or says that nobody behind it has anything. */
static bool make_room(kvp__sched *s, const kvp__sched_entry *needer)
{
    if (reclaim(s)) return true;
    kvp__sched_entry *last = last_running(s);
    if (last == needer) return false;
    preempt(s, last);
    return true;
}

/* Rows that fit into the blocks that can be had without preempting anybody; at most `rows`. */
static uint32_t rows_that_fit(const kvp__sched *s, const kvp__seq *seq, uint32_t rows)
{
    uint32_t b = s->pool->block_tokens, available = kvp__pool_available(s->pool);
    uint32_t first = kvp__seq_need(seq, 1);
    if (first > available) return 0;
    uint64_t fit = b - seq->computed % b + (uint64_t)(available - first) * b;
    return (uint32_t)kvp__min64(rows, fit);
}

/* Reserves up to `rows` rows for a running entry and plans them. Returns the rows. */
static uint32_t plan_rows(kvp__sched *s, kvp__sched_entry *e, uint32_t rows)
{
    kvp__seq *seq = e->seq;
    while (kvp__seq_reserve(seq, rows, NULL) != KVP_OK) {
        if (reclaim(s)) continue;
        uint32_t fit = rows_that_fit(s, seq, rows);
        if (fit > 0 && fit < rows) rows = fit;
        else if (!make_room(s, e)) return 0;
    }
    put_item(s, e, rows);
    return rows;
}

/* --- planning: running entries --- */

/* Ends an entry that has grown past the pool. False: no room to report it in this step. */
static bool end_capacity(kvp__sched *s, kvp__sched_entry *e)
{
    if (s->step.n_ended == s->o.max_sequences) return false;
    s->step.ended[s->step.n_ended++] = e;
    kvp__sched_park(s, e);
    return true;
}

static bool outgrown(const kvp__sched *s, const kvp__sched_entry *e)
{
    return e->seq->length > kvp__sched_pool_tokens(s->pool);
}

/* Rows that decodes may take before prompts get theirs. Where both want more than there is,
 * prompts get their share, fractions carried over, and each side at least a row where there are two
 * (of a budget of one, at least every tenth). */
static uint32_t decode_quota(kvp__sched *s)
{
    uint32_t budget = s->o.token_budget, decodes = s->decode.count;
    bool newcomers = s->waiting.count && kvp__sched_running(s) < s->o.max_sequences;
    bool prompts = s->prefill.count || newcomers;
    if (!prompts) return budget;
    uint32_t share = s->o.prefill_share == KVP_PREFILL_SHARE_NONE ? 0 : s->o.prefill_share;
    if (budget == 1) share = share < 100 ? 100 : share > 900 ? 900 : share;
    uint64_t owed = (uint64_t)budget * share + s->carry;
    uint32_t rows = (uint32_t)(owed / 1000);
    if (budget > 1) rows = rows < 1 ? 1 : rows > budget - 1 ? budget - 1 : rows;
    if (decodes > budget - (rows ? rows : 1)) s->carry = (uint32_t)(owed % 1000);
    return budget - rows;
}

/* Gives a row to each decoding entry that this plan has not considered yet, `quota` of them at
 * most. Those considered go to the end of the list. */
static void plan_decodes(kvp__sched *s, uint32_t quota)
{
    while (quota > 0) {
        kvp__sched_entry *e = s->decode.head;
        if (!e || e->tried == s->plans) return;
        e->tried = s->plans;
        kvp__sched_order_append(&s->decode, e);
        if (outgrown(s, e)) {
            if (!end_capacity(s, e)) return;
        } else {
            quota -= plan_rows(s, e, 1);
        }
    }
}

static uint32_t rows_left(const kvp__sched *s) { return s->o.token_budget - s->step.n_rows; }

/* Rows at depth `computed` that take as long as a whole chunk at the beginning: a row there costs
 * 1 + depth / level_tokens. */
static uint64_t level_chunk(const kvp__sched *s, uint64_t computed)
{
    uint64_t chunk = s->o.chunk_tokens, level = s->o.level_tokens;
    uint64_t rows = chunk * (2 * level + chunk) / (2 * level + 2 * computed + chunk);
    return kvp__max64(rows, chunk / 8 + 1);
}

static uint32_t chunk_of(const kvp__sched *s, const kvp__sched_entry *e)
{
    uint64_t rest = e->seq->length - e->seq->computed;
    uint64_t most = kvp__min64(s->o.chunk_tokens, rows_left(s));
    if (s->o.level_tokens && s->decode.count)
        most = kvp__min64(most, level_chunk(s, e->seq->computed));
    return (uint32_t)kvp__min64(rest, most);
}

static void plan_prefills(kvp__sched *s)
{
    kvp__sched_entry *e = s->prefill.head;
    while (e && rows_left(s) > 0) {
        kvp__sched_entry *next = e->order.next;
        if (outgrown(s, e)) {
            if (!end_capacity(s, e)) return;
        } else if (e->seq->length > e->seq->computed) {
            plan_rows(s, e, chunk_of(s, e));
            next = e->order.next; /* whoever came after it may have been preempted */
        }
        e = next;
    }
}

/* --- planning: admission --- */

/* Blocks that running prompts still need: they were admitted with these in mind. */
static uint64_t promised(const kvp__sched *s)
{
    uint64_t n = 0;
    for (const kvp__sched_entry *e = s->prefill.head; e; e = e->order.next) {
        uint64_t all = kvp__ceil_div(e->seq->length, s->pool->block_tokens);
        if (all > e->seq->n_blocks) n += all - e->seq->n_blocks;
    }
    return n;
}

/* Whether running entry `r` will compute, of the tokens of `e`, at least a block more than the
 * `have` first ones that are to be had now, or all up to the end. Then *until gets how many of its
 * tokens it has to compute for that. */
static bool leads(const kvp__sched *s, const kvp__sched_entry *r, const kvp__sched_entry *e,
                  uint32_t have, uint32_t *until)
{
    const kvp__seq *a = r->seq, *b = e->seq;
    if (a->root != b->root || a->length <= have || r->priority < e->priority) return false;
    uint32_t most = a->length < b->length - 1 ? a->length : b->length - 1; /* one is computed */
    if (most <= have || a->tokens[have] != b->tokens[have]) return false;
    if (memcmp(a->tokens, b->tokens, have * sizeof *a->tokens) != 0) return false;
    uint32_t common = have + 1;
    while (common < most && a->tokens[common] == b->tokens[common]) common++;
    if (common < b->length - 1 && common - have < s->pool->block_tokens) return false;
    if (a->computed >= common) return false;
    *until = common;
    return true;
}

/* Whether the entry waits for somebody who is computing the same tokens just now. */
static bool still_follows(const kvp__sched *s, const kvp__sched_entry *e)
{
    if (e->leader == 0) return false;
    for (const kvp__sched_entry *r = s->prefill.head; r; r = r->order.next)
        if (r->arrival == e->leader)
            return r->seq->computed < e->leader_until && r->seq->length >= e->leader_until;
    return false;
}

static bool find_leader(kvp__sched *s, kvp__sched_entry *e, uint32_t have)
{
    e->leader = 0;
    if (!s->prefix) return false;
    for (const kvp__sched_entry *r = s->prefill.head; r; r = r->order.next)
        if (leads(s, r, e, have, &e->leader_until)) {
            e->leader = r->arrival;
            return true;
        }
    return false;
}

static kvp__hit look_up(const kvp__sched *s, const kvp__seq *seq)
{
    kvp__hit none = { .last = KVP__NONE, .tail_node = KVP__NONE };
    return s->prefix ? kvp__prefix_lookup(s->prefix, seq->root, seq->tokens, seq->length) : none;
}

static uint32_t hit_tokens(const kvp__sched *s, const kvp__hit *hit)
{
    return hit->full * s->pool->block_tokens + hit->tail;
}

/* Blocks that the sequence has to take, besides what it shares of the hit, for all its tokens. */
static uint32_t blocks_to_take(const kvp__sched *s, const kvp__seq *seq, const kvp__hit *hit)
{
    uint32_t b = s->pool->block_tokens;
    if (hit->full * b <= seq->computed) return kvp__seq_need(seq, seq->length - seq->computed);
    return (uint32_t)kvp__ceil_div(seq->length, b) - hit->full;
}

/* Attaches what the cache has, if `reserve` blocks are left over besides what the entry needs.
 * Holders are asked for theirs as far as that is short. */
static bool attach(kvp__sched *s, kvp__sched_entry *e, kvp__hit hit, uint64_t reserve)
{
    for (;;) {
        uint64_t room = kvp__min64(blocks_to_take(s, e->seq, &hit) + reserve, UINT32_MAX);
        if (kvp__seq_attach(e->seq, &hit, (uint32_t)room, NULL) == KVP_OK) return true;
        if (!reclaim(s)) return false;
        while (kvp__pool_available(s->pool) < room + hit.idle && reclaim(s)) continue;
        hit = look_up(s, e->seq);
    }
}

/* Lets a waiting entry in, if there is room for all of its tokens. */
static bool admit(kvp__sched *s, kvp__sched_entry *e, const kvp__hit *hit, uint64_t reserve)
{
    bool kept = e->seq->n_blocks > 0;
    kvp__sched_hold_leave(e); /* it is not to be asked for its own blocks */
    if (!attach(s, e, *hit, reserve)) {
        kvp__sched_hold_settle(e);
        return false;
    }
    kvp__sched_run(s, e);
    e->admitted = true;
    plan_rows(s, e, chunk_of(s, e));
    kvp__sched_item *item = kvp__sched_item_of(s, e);
    if (item) {
        item->admitted = true;
        item->kept = kept;
        item->decode = false;
    }
    return true;
}

static void admit_waiting(kvp__sched *s)
{
    kvp__sched_entry *next;
    for (kvp__sched_entry *e = s->waiting.head; e; e = next) {
        next = e->order.next;
        if (rows_left(s) == 0 || kvp__sched_running(s) >= s->o.max_sequences) return;
        if (outgrown(s, e)) {
            if (!end_capacity(s, e)) return;
        } else if (e->admitted) {
            kvp__sched_run(s, e);
            e->tried = s->plans;
            plan_rows(s, e, chunk_of(s, e));
        } else if (!still_follows(s, e)) {
            kvp__hit hit = look_up(s, e->seq);
            uint32_t have = hit_tokens(s, &hit);
            if (find_leader(s, e, have > e->seq->computed ? have : e->seq->computed)) continue;
            uint64_t reserve = kvp__sched_running(s) ? promised(s) + s->watermark : 0;
            if (!admit(s, e, &hit, reserve)) return;
            e->tried = s->plans;
        }
    }
}

/* --- the step --- */

static void finish_plan(kvp__sched *s)
{
    kvp__sched_step *p = &s->step;
    uint32_t row = 0;
    for (uint32_t i = 0; i < p->n_items; i++) {
        p->items[i].first_row = row;
        row += p->items[i].n_rows;
        p->n_logits += p->items[i].logits;
        p->n_copies += kvp__seq_copies(p->items[i].entry->seq, p->copies + p->n_copies);
    }
    kvp__sched_show_levels(s);
    if (p->n_items == 0) return;
    s->planned = true;
    kvp__pool_fence_raise(s->pool);
}

const kvp__sched_step *kvp__sched_plan(kvp__sched *s)
{
    kvp__sched_step *p = &s->step;
    p->n_items = p->n_rows = p->n_logits = p->n_copies = p->n_ended = 0;
    s->plans++;
    plan_decodes(s, decode_quota(s));
    plan_prefills(s);
    admit_waiting(s);
    plan_decodes(s, rows_left(s));
    /* The first running entry can have whatever is not pinned, and the first that waits if nobody
     * runs: without a row for either, nothing but pins is in the way. */
    p->stalled = p->n_items == 0 && p->n_ended == 0 && kvp__sched_has_work(s);
    finish_plan(s);
    return p;
}

static void commit_item(kvp__sched *s, kvp__sched_item *item)
{
    kvp__sched_entry *e = item->entry;
    kvp__seq *seq = e->seq;
    e->planned = e->owed = 0;
    if (!e->counted) KVP__BUMP(s->pool->counters.tokens_prompt, seq->length);
    e->counted = true;
    (void)kvp__seq_commit(seq, item->n_rows);
    bool complete = seq->computed == seq->length;
    item->decide = item->logits && complete && seq->length == item->first_pos + item->n_rows;
    if (complete && !item->decide) kvp__sched_ask_host(e); /* it was cut to just this meanwhile */
    else if (!complete && kvp__sched_is_running(e)) kvp__sched_run(s, e);
    kvp__sched_hold_settle(e);
}

void kvp__sched_commit(kvp__sched *s)
{
    if (!s->planned) return;
    kvp__sched_step *p = &s->step;
    for (uint32_t i = 0; i < p->n_items; i++) {
        kvp__sched_item *item = &p->items[i];
        if (item->entry) commit_item(s, item);
        if (item->decode) KVP__BUMP(s->stats.rows_decode, item->n_rows);
        else KVP__BUMP(s->stats.rows_prefill, item->n_rows);
    }
    KVP__BUMP(s->stats.steps, 1);
    KVP__BUMP(s->stats.rows, p->n_rows);
    kvp__pool_fence_drop(s->pool);
    s->planned = false;
    kvp__sched_show_levels(s);
}

void kvp__sched_abort(kvp__sched *s)
{
    if (!s->planned) return;
    for (uint32_t i = 0; i < s->step.n_items; i++) {
        kvp__sched_item *item = &s->step.items[i];
        kvp__sched_entry *e = item->entry;
        if (!e) continue;
        e->planned = 0;
        kvp__seq_abort(e->seq);
        if (item->admitted) {
            e->admitted = false;
            if (!item->kept) kvp__seq_release_unpinned(e->seq);
            if (kvp__sched_is_running(e)) kvp__sched_wait_turn(s, e);
        }
        kvp__sched_hold_settle(e);
    }
    kvp__pool_fence_drop(s->pool);
    s->planned = false;
    kvp__sched_show_levels(s);
}
