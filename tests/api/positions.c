/* See positions.h. */
#include "positions.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

typedef struct segment {
    kvp_seq *seq;
    uint32_t text, at, end; /* the next position to come, and the first not wanted */
} segment;

typedef struct run {
    const positions *p;
    kvp_pool *pool;
    kvp_batch *batch;
    segment *segments;
    uint32_t n_segments, ended;
} run;

static void cut(run *r)
{
    uint32_t most = 0;
    for (uint32_t t = 0; t < r->p->n_texts; t++) most += r->p->texts[t].n;
    r->segments = calloc(most, sizeof *r->segments);
    assert_non_null(r->segments);
    for (uint32_t t = 0; t < r->p->n_texts; t++) {
        uint32_t n = r->p->texts[t].n, step = r->p->segment ? r->p->segment : n;
        for (uint32_t at = 0; at < n; at += step)
            r->segments[r->n_segments++] =
                (segment){.text = t, .at = at, .end = n - at < step ? n : at + step};
    }
}

static void make(run *r)
{
    kvp_error err = {.size = sizeof err};
    kvp_pool_options po = {.size = sizeof po, .k_format = r->p->kv_format,
                           .v_format = r->p->kv_format};
    for (uint32_t i = 0; i < r->n_segments; i++) po.blocks += r->segments[i].end / 16 + 2;
    if (kvp_pool_create(r->p->model, &po, &r->pool, &err) != KVP_OK) fail_msg("%s", err.text);
    kvp_batch_options bo = {.size = sizeof bo, .threads = r->p->threads};
    if (kvp_batch_create(r->pool, &bo, &r->batch, &err) != KVP_OK) fail_msg("%s", err.text);
}

static void add(run *r, uint32_t index)
{
    kvp_error err = {.size = sizeof err};
    segment *g = &r->segments[index];
    kvp_sampling sampling = {.size = sizeof sampling, .mode = KVP_SAMPLE_HOST};
    kvp_seq_options so = {.size = sizeof so, .tag = index, .sampling = &sampling};
    if (kvp_seq_create(r->pool, &so, &g->seq, &err) != KVP_OK) fail_msg("%s", err.text);
    assert_int_equal(kvp_seq_append(g->seq, r->p->texts[g->text].ids, g->at + 1), KVP_OK);
    assert_int_equal(kvp_batch_add(r->batch, g->seq), KVP_OK);
}

static void take(run *r, const kvp_event *e)
{
    segment *g = &r->segments[e->tag];
    const float *logits;
    size_t count;
    if (e->kind == KVP_EVENT_ENDED) {
        if (e->ending != KVP_END_CANCELLED) fail_msg("segment %u ended early", (unsigned)e->tag);
        r->ended++;
        return;
    }
    if (e->kind != KVP_EVENT_LOGITS) return;
    assert_int_equal(kvp_seq_get_logits(g->seq, &logits, &count), KVP_OK);
    r->p->row(r->p->user, g->text, g->at, logits, count);
    if (++g->at < g->end)
        assert_int_equal(kvp_seq_append(g->seq, &r->p->texts[g->text].ids[g->at], 1), KVP_OK);
    else
        assert_int_equal(kvp_seq_cancel(g->seq), KVP_OK);
}

void positions_run(const positions *p)
{
    run r = {.p = p};
    kvp_event e = {.size = sizeof e};
    cut(&r);
    make(&r);
    for (uint32_t i = 0; i < r.n_segments; i++) add(&r, i);
    for (uint32_t idle = 0; r.ended < r.n_segments; idle++) {
        kvp_status s = kvp_step(r.batch);
        if (s < 0) fail_msg("step: %s", kvp_status_name(s));
        for (; kvp_next_event(r.batch, &e) == KVP_OK; idle = 0) take(&r, &e);
        if (idle > 100000) fail_msg("nothing comes any more (%s)", kvp_status_name(s));
        if (s == KVP_AGAIN) assert_int_equal(kvp_wait(r.batch, 1000), KVP_OK);
    }
    assert_int_equal(kvp_pool_check(r.pool), KVP_OK);
    for (uint32_t i = 0; i < r.n_segments; i++) kvp_seq_destroy(r.segments[i].seq);
    kvp_batch_destroy(r.batch);
    kvp_pool_destroy(r.pool);
    free(r.segments);
}
