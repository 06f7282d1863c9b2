/* See sim.h. */
#define _GNU_SOURCE
#include "sim.h"

#include <stdlib.h>
#include <string.h>

static uint64_t mix(uint64_t a, uint64_t b)
{
    uint64_t z = (a + 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u + b;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static void *count_alloc(void *user, size_t size, size_t align)
{
    sim *s = user;
    s->allocations++;
    void *p = NULL;
    return posix_memalign(&p, align, size) == 0 ? p : NULL;
}

static void count_free(void *user, void *p, size_t size, size_t align)
{
    (void)user, (void)size, (void)align;
    free(p);
}

uint32_t sim_random(sim *s, uint32_t below)
{
    s->random = mix(s->random, 1);
    return (uint32_t)(s->random % below);
}

void sim_text(int32_t *out, uint32_t n, uint64_t text)
{
    for (uint32_t i = 0; i < n; i++) out[i] = (int32_t)(mix(text, i) % SIM_VOCABULARY);
}

sim *sim_create(const sim_options *given)
{
    sim *s = calloc(1, sizeof *s);
    assert_non_null(s);
    sim_options o = *given;
    if (!o.groups) o.groups = 1;
    if (!o.blocks) o.blocks = 64;
    if (!o.block_tokens) o.block_tokens = 4;
    if (!o.budget) o.budget = 64;
    if (!o.max_sequences) o.max_sequences = 8;
    if (!o.watermark) o.watermark = KVP_WATERMARK_NONE;
    if (!o.share) o.share = 500;
    if (!o.chunk) o.chunk = 16;
    s->o = o;
    s->random = o.seed;
    kvp_hooks h = { .size = sizeof h, .user = s, .alloc = count_alloc, .free = count_free };
    assert_int_equal(kvp__hooks_fill(&s->hooks, &h, NULL), KVP_OK);
    kvp_error err = { .size = sizeof err };
    assert_int_equal(kvp__pool_init(&s->pool, &s->hooks, o.groups, o.blocks, o.block_tokens, &err),
                     KVP_OK);
    kvp__prefix_options po = { .key = { 7, o.seed } };
    assert_int_equal(kvp__prefix_init(&s->prefix, &s->pool, &po, &err), KVP_OK);
    kvp__sched_options so = { .token_budget = o.budget, .max_sequences = o.max_sequences,
                              .watermark = o.watermark, .prefill_share = o.share,
                              .chunk_tokens = o.chunk };
    assert_int_equal(kvp__sched_init(&s->sched, &s->hooks, &so, &s->pool,
                                     o.no_cache ? NULL : &s->prefix, &s->holders, &err), KVP_OK);
    s->kv = calloc((size_t)o.groups * o.blocks * o.block_tokens, sizeof *s->kv);
    assert_non_null(s->kv);
    return s;
}

void sim_destroy(sim *s)
{
    for (uint32_t i = 0; i < SIM_SEQS; i++)
        if (s->seqs[i].alive) sim_free(s, &s->seqs[i]);
    sim_check(s);
    for (uint32_t g = 0; g < s->o.groups; g++) assert_int_equal(kvp__pool_used(&s->pool, g), 0);
    assert_int_equal(kvp__prefix_reset(&s->prefix, NULL), KVP_OK);
    for (uint32_t g = 0; g < s->o.groups; g++)
        assert_int_equal(s->pool.groups[g].n_free, s->o.blocks);
    kvp__sched_fini(&s->sched);
    kvp__prefix_fini(&s->prefix);
    kvp__pool_fini(&s->pool);
    free(s->kv);
    free(s);
}

void sim_check(sim *s)
{
    kvp_error err = { .size = sizeof err };
    kvp__prefix *x = s->o.no_cache ? NULL : &s->prefix;
    kvp__check_begin(&s->pool);
    kvp_status st = KVP_OK;
    for (uint32_t i = 0; i < SIM_SEQS && st == KVP_OK; i++)
        if (s->seqs[i].alive) st = kvp__check_seq(&s->seqs[i].seq, &err);
    if (st == KVP_OK) st = kvp__check_end(&s->pool, x, &err);
    if (st == KVP_OK) st = kvp__sched_check(&s->sched, &err);
    if (st != KVP_OK) fail_msg("seed %llu, step %llu: %s", (unsigned long long)s->o.seed,
                                (unsigned long long)s->steps, err.text);
    for (uint32_t i = 0; i < SIM_SEQS; i++) {
        const sim_seq *q = &s->seqs[i];
        if (!q->alive) continue;
        bool running = q->entry.state == KVP_SEQ_PREFILL || q->entry.state == KVP_SEQ_DECODE;
        bool gives = q->seq.n_blocks > q->seq.pin_blocks;
        assert_int_equal(q->entry.hold_list != NULL, !running && gives);
    }
}

/* --- sequences --- */

static sim_seq *vacant(sim *s)
{
    for (uint32_t i = 0; i < SIM_SEQS; i++)
        if (!s->seqs[i].alive) {
            memset(&s->seqs[i], 0, sizeof s->seqs[i]);
            return &s->seqs[i];
        }
    fail_msg("no vacant sequence");
    return NULL;
}

sim_seq *sim_new(sim *s, uint64_t text, uint32_t n, uint32_t max_tokens, int32_t priority)
{
    sim_seq *q = vacant(s);
    uint32_t root = KVP__NONE;
    if (!s->o.no_cache)
        assert_int_equal(kvp__prefix_root_intern(&s->prefix, NULL, 0, NULL, 0, &root, NULL),
                         KVP_OK);
    kvp__seq_init(&q->seq, &s->pool, s->o.no_cache ? NULL : &s->prefix, root);
    kvp__sched_entry_init(&q->entry, &s->holders, &q->seq, priority);
    q->alive = true;
    q->max_tokens = max_tokens;
    sim_append_text(s, q, text, n);
    return q;
}

sim_seq *sim_fork(sim *s, sim_seq *q, uint32_t length)
{
    sim_seq *child = vacant(s);
    assert_int_equal(kvp__seq_fork(&q->seq, length, &child->seq, NULL), KVP_OK);
    kvp__sched_entry_init(&child->entry, &s->holders, &child->seq, q->entry.priority);
    child->alive = s->forked = true;
    child->max_tokens = q->max_tokens;
    sim_check(s);
    return child;
}

void sim_append(sim *s, sim_seq *q, const int32_t *tokens, uint32_t n)
{
    assert_int_equal(kvp__seq_append(&q->seq, tokens, n, NULL), KVP_OK);
    q->asks = false;
    kvp__sched_appended(&s->sched, &q->entry);
    sim_check(s);
}

void sim_append_text(sim *s, sim_seq *q, uint64_t text, uint32_t n)
{
    int32_t *tokens = malloc((n + 1) * sizeof *tokens);
    assert_non_null(tokens);
    sim_text(tokens, n, text);
    sim_append(s, q, tokens, n);
    free(tokens);
}

void sim_truncate(sim *s, sim_seq *q, uint32_t length)
{
    assert_int_equal(kvp__seq_truncate(&q->seq, length, NULL), KVP_OK);
    q->asks = false;
    kvp__sched_truncated(&s->sched, &q->entry);
    q->generated = 0;
    sim_check(s);
}

kvp_status sim_add(sim *s, sim_seq *q)
{
    kvp_status st = kvp__sched_add(&s->sched, &q->entry, UINT64_MAX, NULL);
    if (st == KVP_OK) q->generated = q->ending = q->rows = q->logits_rows = 0;
    sim_check(s);
    return st;
}

static void end(sim *s, sim_seq *q, uint32_t ending)
{
    kvp__sched_remove(&s->sched, &q->entry);
    q->ending = ending;
    q->endings++;
    q->asks = false;
}

void sim_cancel(sim *s, sim_seq *q)
{
    if (q->entry.in_batch) end(s, q, KVP_END_CANCELLED);
    sim_check(s);
}

void sim_free(sim *s, sim_seq *q)
{
    kvp__sched_remove(&s->sched, &q->entry);
    kvp__sched_entry_fini(&q->entry);
    kvp__seq_fini(&q->seq);
    q->alive = false;
    sim_check(s);
}

void sim_give(sim *s, sim_seq *q)
{
    assert_true(q->asks);
    int32_t token = q->given;
    q->generated++;
    sim_append(s, q, &token, 1);
}

/* --- the device --- */

/* What a launch copies, because the host may change the sequence while the step runs. */
typedef struct launched {
    int32_t *tokens; /* up to the last row */
    uint32_t *tables;
    uint32_t n_blocks;
    uint64_t last; /* digest of the last row */
} launched;

static uint64_t *slot(sim *s, uint32_t g, uint32_t block, uint32_t offset)
{
    return &s->kv[((size_t)g * s->o.blocks + block) * s->o.block_tokens + offset];
}

static void run_copies(sim *s, const kvp__sched_step *p)
{
    for (uint32_t i = 0; i < p->n_copies; i++) {
        const kvp__copy *c = &p->copies[i];
        assert_int_not_equal(c->src, c->dst);
        assert_in_range(c->tokens, 1, s->o.block_tokens);
        for (uint32_t k = 0; k < p->n_copies; k++)
            assert_false(p->copies[k].group == c->group && p->copies[k].src == c->dst);
        memcpy(slot(s, c->group, c->dst, 0), slot(s, c->group, c->src, 0),
               c->tokens * sizeof *s->kv);
    }
}

static void run_rows(sim *s, const kvp__sched_item *item, launched *l, bool store)
{
    uint32_t end_pos = item->first_pos + item->n_rows, b = s->o.block_tokens;
    for (uint32_t g = 0; g < s->o.groups; g++) {
        uint64_t digest = 1;
        for (uint32_t pos = 0; pos < end_pos; pos++) {
            digest = mix(digest, (uint64_t)l->tokens[pos]);
            assert_true(pos / b < l->n_blocks);
            uint64_t *kv = slot(s, g, l->tables[g * l->n_blocks + pos / b], pos % b);
            if (store && pos >= item->first_pos) *kv = mix(digest, g);
            else if (*kv != mix(digest, g))
                fail_msg("step %llu: position %u of %u, group %u: not the KV of these tokens",
                         (unsigned long long)s->steps, pos, end_pos, g);
        }
        l->last = digest;
    }
}

static void launch(sim *s, const kvp__sched_item *item, launched *l)
{
    const kvp__seq *q = item->entry->seq;
    uint32_t n = item->first_pos + item->n_rows;
    assert_true(n <= q->length);
    assert_int_equal(item->first_pos, q->computed);
    assert_int_equal(item->logits, n == q->length);
    l->n_blocks = q->n_blocks;
    l->tokens = malloc(n * sizeof *l->tokens);
    l->tables = malloc((size_t)q->n_blocks * s->o.groups * sizeof *l->tables);
    assert_true(l->tokens && l->tables);
    memcpy(l->tokens, q->tokens, n * sizeof *l->tokens);
    for (uint32_t g = 0; g < s->o.groups; g++)
        memcpy(l->tables + g * l->n_blocks, q->tables[g], l->n_blocks * sizeof *l->tables);
}

static sim_seq *owner(kvp__sched_entry *e)
{
    return (sim_seq *)(void *)((char *)e - offsetof(sim_seq, entry));
}

static void decide(sim *s, sim_seq *q, uint64_t digest)
{
    int32_t token = (int32_t)(digest % SIM_VOCABULARY);
    q->logits_rows++;
    assert_int_equal(token, sim_next(q->seq.tokens, q->seq.length));
    if (q->generated >= q->max_tokens) {
        end(s, q, KVP_END_LENGTH);
        return;
    }
    if (q->by_host) {
        q->asks = true;
        q->given = token;
        kvp__sched_wait_host(&s->sched, &q->entry);
        return;
    }
    uint64_t before = s->allocations;
    assert_int_equal(kvp__sched_token(&s->sched, &q->entry, token, NULL), KVP_OK);
    if (!s->forked) assert_int_equal(s->allocations, before);
    if (++q->generated >= q->max_tokens) end(s, q, KVP_END_LENGTH);
}

static void check_plan(sim *s, const kvp__sched_step *p)
{
    uint32_t rows = 0;
    assert_true(p->n_items <= s->o.max_sequences && p->n_rows <= s->o.budget);
    for (uint32_t i = 0; i < p->n_items; i++) {
        const kvp__sched_item *item = &p->items[i];
        assert_int_equal(item->first_row, rows);
        assert_int_equal(item->entry->planned, i + 1);
        assert_in_range(item->n_rows, 1, s->sched.o.chunk_tokens);
        rows += item->n_rows;
    }
    assert_int_equal(rows, p->n_rows);
    assert_false(p->stalled && (rows > 0 || !kvp__sched_has_work(&s->sched)));
    if (s->planned) s->planned(s, p);
}

uint32_t sim_step(sim *s)
{
    uint64_t before = s->allocations;
    const kvp__sched_step *p = kvp__sched_plan(&s->sched);
    assert_int_equal(s->allocations, before);
    s->steps++;
    sim_check(s);
    check_plan(s, p);
    s->stalled = p->stalled;
    for (uint32_t i = 0; i < p->n_ended; i++) {
        sim_seq *q = owner(p->ended[i]);
        assert_int_equal(q->entry.state, KVP_SEQ_PARKED);
        q->ending = KVP_END_CAPACITY;
        q->endings++;
    }
    if (p->n_rows == 0) return 0;
    uint32_t n = p->n_items, rows = p->n_rows;
    launched *l = calloc(n, sizeof *l);
    assert_non_null(l);
    for (uint32_t i = 0; i < n; i++) launch(s, &p->items[i], &l[i]);
    if (s->in_flight) s->in_flight(s);
    if (!s->abort_next) {
        run_copies(s, p);
        /* All rows are stored before any is read, as the layers of a real step do. */
        for (uint32_t i = 0; i < n; i++) run_rows(s, &p->items[i], &l[i], true);
        for (uint32_t i = 0; i < n; i++) run_rows(s, &p->items[i], &l[i], false);
        before = s->allocations;
        kvp__sched_commit(&s->sched);
        assert_int_equal(s->allocations, before);
        for (uint32_t i = 0; i < n; i++) {
            const kvp__sched_item *item = &p->items[i];
            if (!item->entry) continue;
            owner(item->entry)->rows += item->n_rows;
            if (item->decide) decide(s, owner(item->entry), l[i].last);
        }
    } else {
        kvp__sched_abort(&s->sched);
    }
    s->abort_next = false;
    for (uint32_t i = 0; i < n; i++) {
        free(l[i].tokens);
        free(l[i].tables);
    }
    free(l);
    sim_check(s);
    return rows;
}

void sim_run(sim *s, uint32_t most)
{
    for (uint32_t i = 0;; i++) {
        for (uint32_t k = 0; k < SIM_SEQS; k++)
            if (s->seqs[k].alive && s->seqs[k].asks) sim_give(s, &s->seqs[k]);
        if (!kvp__sched_has_work(&s->sched)) return;
        if (i == most) fail_msg("no end in %u steps", most);
        sim_step(s);
        if (s->stalled) return;
    }
}

uint32_t sim_probe(sim *s, uint64_t text, uint32_t n)
{
    int32_t *tokens = malloc(n * sizeof *tokens);
    assert_non_null(tokens);
    sim_text(tokens, n, text);
    uint32_t root = kvp__prefix_root_find(&s->prefix, NULL, 0, NULL, 0);
    kvp__hit hit = kvp__prefix_lookup(&s->prefix, root, tokens, n);
    free(tokens);
    return kvp__hit_tokens(&s->prefix, &hit);
}

int32_t sim_next(const int32_t *tokens, uint32_t n)
{
    uint64_t digest = 1;
    for (uint32_t i = 0; i < n; i++) digest = mix(digest, (uint64_t)tokens[i]);
    return (int32_t)(digest % SIM_VOCABULARY);
}

void sim_expect_output(const sim_seq *q)
{
    uint32_t n = q->seq.length;
    for (uint32_t i = n - q->generated; i < n; i++)
        assert_int_equal(q->seq.tokens[i], sim_next(q->seq.tokens, i));
}
