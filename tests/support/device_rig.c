/* See device_rig.h. */
#define _GNU_SOURCE
#include "support/device_rig.h"

#include "cpu/cpu.h"
#include "cuda/api.h"
#include "device/device.h"
#include "support/heap.h"

#include <math.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

/* The device's table: its own header knows another kvp__store than the CPU's. */
extern const kvp__device kvp__cuda_device;

enum { MAX_TOKENS = 4096, MAX_BLOCKS_OF_SEQ = 1024, MAX_ROWS = 1024 };

typedef struct sequence {
    bool used;
    int32_t tokens[MAX_TOKENS];
    uint32_t n, computed;
    uint32_t blocks[KVP__MAX_GROUPS][MAX_BLOCKS_OF_SEQ], n_blocks;
    rig_sampling sampling;
    kvp__sampler sampler;
} sequence;

/* What a device says of a step. */
typedef struct results {
    struct rig *rig;
    float *logits[RIG_OUTPUTS];
    int32_t chosen[RIG_OUTPUTS];
    uint32_t bad[RIG_OUTPUTS];
    _Atomic uint32_t done, posts;
} results;

struct rig {
    rig_options o;
    heap *heap;
    uint8_t *file;
    kvp__model model;
    kvp__layout layout;
    const kvp__device *device[2]; /* CPU, CUDA */
    kvp__weights *weights[2];
    kvp__store *store[2];
    kvp__runner *runner[2];
    results results[2];
    sequence seqs[RIG_SEQS];
    uint32_t *refs[KVP__MAX_GROUPS];
    kvp__work work;
    kvp__work_seq parts[RIG_SEQS];
    int32_t tokens[MAX_ROWS];
    uint32_t positions[MAX_ROWS], outputs[RIG_OUTPUTS], output_seq[RIG_OUTPUTS];
    kvp__choice choices[RIG_OUTPUTS];
    kvp__copy copies[RIG_SEQS * KVP__MAX_GROUPS];
    uint32_t n_copies;
    uint64_t rng;
};

static heap memory;
static char last_log[400];

static void keep_line(void *user, int32_t level, const char *line)
{
    (void)user, (void)level;
    strncpy(last_log, line, sizeof last_log - 1);
}

uint64_t rig_live(void) { return memory.live; }
const char *rig_log(void) { return last_log; }

/* --- opening --- */

/* A tiny model, two of whose matrices have another type. */
static uint8_t *mixed_file(const gw_model *m, size_t *bytes)
{
    gw w;
    uint64_t rng = 99, heads = m->heads ? m->heads : 4, kv = m->kv_heads ? m->kv_heads : 2;
    uint64_t width = m->width ? m->width : heads * m->head_dim;
    uint64_t feed_forward = m->feed_forward ? m->feed_forward : 2 * width;
    gw_init(&w);
    gw_skip(&w, "blk.0.attn_k.weight");
    gw_skip(&w, "blk.0.ffn_up.weight");
    gw_tiny_into(&w, m);
    w.n_skip = 0;
    gw_random(&w, "blk.0.attn_k.weight", KVP__F16, width, kv * m->head_dim, 0, 0.2f, &rng);
    gw_random(&w, "blk.0.ffn_up.weight", KVP__F16, width, feed_forward, 0, 0.2f, &rng);
    return gw_finish(&w, bytes);
}

static kvp_status open_model(rig *r, kvp_error *err)
{
    if (r->o.geometry) {
        r->model.hooks = memory.hooks;
        return kvp__geometry_fill(&r->model.geometry, r->o.geometry, err);
    }
    size_t bytes;
    kvp__source source;
    r->file = r->o.mixed ? mixed_file(r->o.model, &bytes) : gw_tiny(r->o.model, &bytes);
    kvp__source_memory(&source, r->file, bytes);
    kvp_status s = kvp__model_load(&r->model, &memory.hooks, &source, err);
    r->model.activations = KVP_ACTIVATIONS_F32;
    return s;
}

static kvp_status open_device(rig *r, int i, kvp_error *err)
{
    const kvp__device *d = r->device[i];
    kvp__place how = {.threads = KVP_THREADS_INLINE};
    kvp_status s = d->supports(&r->model.geometry, r->o.block_tokens, r->o.k_format,
                               r->o.v_format, 0, err);
    if (s == KVP_OK && !r->o.geometry) s = d->place(&r->model, &how, &r->weights[i], err);
    void *slab = i && r->o.slab ? (void *)(uintptr_t)r->o.slab(r->layout.bytes) : NULL;
    if (s == KVP_OK) s = d->store_create(&memory.hooks, &r->layout, slab, 0, &r->store[i], err);
    kvp__runner_options ro = {.hooks = &memory.hooks, .model = &r->model, .weights = r->weights[i],
                              .store = r->store[i], .stream = i ? r->o.stream : NULL,
                              .max_rows = r->o.max_rows, .max_seqs = r->o.max_seqs,
                              .max_outputs = r->o.max_rows, .max_positions = r->o.max_positions};
    if (s == KVP_OK) s = d->runner_create(&ro, &r->runner[i], err);
    return s;
}

static uint32_t or_else(uint32_t value, uint32_t fallback) { return value ? value : fallback; }

rig *rig_open(const rig_options *o, kvp_error *err)
{
    rig *r = calloc(1, sizeof *r);
    assert_non_null(r);
    heap_init(&memory);
    memory.given.log = keep_line;
    assert_int_equal(kvp__hooks_fill(&memory.hooks, &memory.given, NULL), KVP_OK);
    last_log[0] = 0;
    r->o = *o;
    r->o.block_tokens = or_else(o->block_tokens, 16);
    r->o.blocks = or_else(o->blocks, 256);
    r->o.k_format = or_else(o->k_format, KVP_KV_F16);
    r->o.v_format = or_else(o->v_format, KVP_KV_F16);
    r->o.max_rows = or_else(o->max_rows, 64);
    r->o.max_seqs = or_else(o->max_seqs, 16);
    r->o.max_positions = or_else(o->max_positions, 256);
    r->rng = 0x1234567;
    r->device[0] = &kvp__cpu_device;
    r->device[1] = &kvp__cuda_device;
    assert_int_equal(open_model(r, NULL), KVP_OK);
    assert_int_equal(kvp__layout_make(&r->layout, &r->model.geometry, r->o.block_tokens,
                                      r->o.k_format, r->o.v_format, r->o.blocks, NULL), KVP_OK);
    for (uint32_t g = 0; g < r->layout.n_groups; g++) {
        r->refs[g] = calloc(r->o.blocks, sizeof **r->refs);
        assert_non_null(r->refs[g]);
    }
    for (int i = 0; i < 2; i++) {
        r->results[i].rig = r;
        for (uint32_t k = 0; k < RIG_OUTPUTS && r->model.arch.n_layers; k++)
            r->results[i].logits[k] = malloc(r->model.arch.vocabulary * sizeof(float));
    }
    if (!o->no_cpu) assert_int_equal(open_device(r, 0, NULL), KVP_OK);
    memory.calls = 0;
    memory.refuse = o->refuse;
    if (open_device(r, 1, err) == KVP_OK) return r;
    rig_close(r);
    return NULL;
}

uint32_t rig_count(void) { return kvp__cuda_device.count(); }
bool rig_refused(void) { return memory.refuse && memory.calls >= memory.refuse; }

kvp_status rig_place_odd(rig_oddity which, kvp_error *err)
{
    gw_model tiny = {.head_dim = 16, .type = KVP__Q8_0};
    size_t bytes;
    kvp__model m;
    kvp__source source;
    kvp__weights *w = NULL;
    kvp__place how = {.threads = KVP_THREADS_INLINE};
    heap_init(&memory);
    memory.given.log = keep_line;
    assert_int_equal(kvp__hooks_fill(&memory.hooks, &memory.given, NULL), KVP_OK);
    last_log[0] = 0;
    uint8_t *file = gw_tiny(&tiny, &bytes);
    kvp__source_memory(&source, file, bytes);
    assert_int_equal(kvp__model_load(&m, &memory.hooks, &source, NULL), KVP_OK);
    kvp__arch whole = m.arch;
    kvp__tensor odd = *m.arch.layers[0].q;
    const kvp__tensor **place = &m.arch.layers[0].q;
    if (which == RIG_GEOMETRY) m.arch.n_layers = 0;
    if (which == RIG_HUGE) odd.dims[0] = odd.dims[1] = INT32_MAX / 32 * 32;
    kvp__layer *l = &m.arch.layers[0];
    if (which == RIG_HUGE) l->k = l->v = l->o = l->gate = l->up = l->down = &odd;
    if (which == RIG_INPUTS) odd.dims[0] *= 2;
    if (which == RIG_VECTOR) odd.n_dims = 1, place = &m.arch.layers[0].attn_norm;
    if (which == RIG_PACKED_FILE) how.packed_file = "weights.packed";
    const kvp__tensor *was = *place;
    if (which != RIG_GEOMETRY) *place = &odd;
    kvp_status s;
    if (which == RIG_HUGE_WORKSPACE) {
        m.arch.width = m.arch.feed_forward = UINT32_MAX;
        uint64_t wide = kvp__cuda_device.workspace_bytes(&m, 1u << 28, 1, 16);
        uint64_t many = kvp__cuda_device.workspace_bytes(&m, 16, 1u << 30, 1u << 30);
        s = wide == UINT64_MAX && many == UINT64_MAX ? KVP_ERR_TOO_LARGE : KVP_OK;
    } else {
        uint64_t packed = kvp__cuda_device.packed_bytes(&m);
        s = kvp__cuda_device.place(&m, &how, &w, err);
        assert_int_equal(packed == 0, s != KVP_OK);
    }
    kvp__cuda_device.unplace(w);
    *place = was;
    m.arch = whole;
    kvp__model_unload(&m);
    free(file);
    return s;
}

void rig_describe(uint32_t ordinal, kvp_device_info *out)
{
    kvp__cuda_device.describe(ordinal, out);
}

uint64_t rig_workspace(const rig *r)
{
    return r->device[1]->workspace_bytes(&r->model, r->o.max_rows, r->o.max_seqs,
                                         r->o.max_positions);
}

uint64_t rig_packed(const rig *r) { return r->device[1]->packed_bytes(&r->model); }
uint64_t rig_slab_bytes(const rig *r) { return r->layout.bytes; }

typedef struct placing {
    kvp__source source;
    uint32_t cancel_at, fail_reads_at, calls, reads;
    uint64_t done;
    bool rose;
} placing;

static int32_t on_progress(void *user, uint64_t done, uint64_t total)
{
    placing *p = user;
    p->rose = p->rose && done >= p->done && done <= total;
    p->done = done;
    return ++p->calls == p->cancel_at;
}

static int read_or_fail(void *user, uint64_t offset, void *buffer, size_t bytes)
{
    placing *p = user;
    if (p->fail_reads_at && ++p->reads >= p->fail_reads_at) return -1;
    return p->source.read(p->source.user, offset, buffer, bytes);
}

kvp_status rig_place(const gw_model *m, uint32_t cancel_at, uint32_t fail_reads_at, uint32_t *calls,
                     bool *rose, kvp_error *err)
{
    size_t bytes;
    kvp__model model;
    placing p = {.cancel_at = cancel_at, .fail_reads_at = fail_reads_at, .rose = true};
    kvp__place how = {.threads = 2, .progress = on_progress, .user = &p};
    kvp__weights *w = NULL;
    heap_init(&memory);
    uint8_t *file = gw_tiny(m, &bytes);
    kvp__source_memory(&p.source, file, bytes);
    assert_int_equal(kvp__model_load(&model, &memory.hooks, &p.source, NULL), KVP_OK);
    model.source.read = read_or_fail;
    model.source.user = &p;
    kvp_status s = kvp__cuda_device.place(&model, &how, &w, err);
    assert_true((s == KVP_OK) == (w != NULL));
    kvp__cuda_device.unplace(w);
    kvp__model_unload(&model);
    free(file);
    *calls = p.calls;
    *rose = p.rose;
    return s;
}

void rig_close(rig *r)
{
    if (!r) return;
    for (int i = 0; i < 2; i++) {
        r->device[i]->runner_destroy(r->runner[i]);
        r->device[i]->store_destroy(r->store[i]);
        r->device[i]->unplace(r->weights[i]);
        for (uint32_t k = 0; k < RIG_OUTPUTS; k++) free(r->results[i].logits[k]);
    }
    for (uint32_t g = 0; g < r->layout.n_groups; g++) free(r->refs[g]);
    if (!r->o.geometry) kvp__model_unload(&r->model);
    free(r->file);
    free(r);
    assert_int_equal(memory.mismatches, 0);
}

/* --- sequences --- */

static uint32_t random_below(rig *r, uint32_t n) { return (uint32_t)(gw_rand(&r->rng) >> 20) % n; }

uint32_t rig_vocabulary(const rig *r)
{
    return r->model.arch.n_layers ? r->model.arch.vocabulary : 1000;
}

static sequence *fresh(rig *r, uint32_t *number)
{
    for (uint32_t i = 0; i < RIG_SEQS; i++) {
        if (r->seqs[i].used) continue;
        memset(&r->seqs[i], 0, sizeof r->seqs[i]);
        r->seqs[i].used = true;
        *number = i;
        return &r->seqs[i];
    }
    fail_msg("too many sequences");
    return NULL;
}

uint32_t rig_seq(rig *r, uint32_t n)
{
    uint32_t number = 0;
    sequence *s = fresh(r, &number);
    assert_true(n <= MAX_TOKENS);
    for (uint32_t i = 0; i < n; i++) s->tokens[i] = (int32_t)random_below(r, rig_vocabulary(r));
    s->n = n;
    return number;
}

void rig_append(rig *r, uint32_t seq, int32_t token)
{
    sequence *s = &r->seqs[seq];
    assert_true(s->used && s->n < MAX_TOKENS);
    s->tokens[s->n++] = token;
}

/* A free block at a random place. */
static uint32_t take_block(rig *r, uint32_t g)
{
    uint32_t at = random_below(r, r->o.blocks);
    for (uint32_t i = 0; i < r->o.blocks; i++, at = (at + 1) % r->o.blocks)
        if (r->refs[g][at] == 0) {
            r->refs[g][at] = 1;
            return at;
        }
    fail_msg("no block left");
    return 0;
}

static void cover(rig *r, sequence *s, uint32_t tokens)
{
    uint32_t n = (tokens + r->o.block_tokens - 1) / r->o.block_tokens;
    assert_true(n <= MAX_BLOCKS_OF_SEQ);
    for (; s->n_blocks < n; s->n_blocks++)
        for (uint32_t g = 0; g < r->layout.n_groups; g++)
            s->blocks[g][s->n_blocks] = take_block(r, g);
}

uint32_t rig_fork(rig *r, uint32_t seq, uint32_t n)
{
    uint32_t number = 0, whole = n / r->o.block_tokens, rest = n % r->o.block_tokens;
    sequence *s = fresh(r, &number), *from = &r->seqs[seq];
    assert_true(n <= from->computed);
    memcpy(s->tokens, from->tokens, n * sizeof *s->tokens);
    s->n = s->computed = n;
    for (uint32_t g = 0; g < r->layout.n_groups; g++)
        for (uint32_t b = 0; b < whole; b++) {
            s->blocks[g][b] = from->blocks[g][b];
            r->refs[g][s->blocks[g][b]]++;
        }
    s->n_blocks = whole;
    if (rest == 0) return number;
    cover(r, s, n);
    for (uint32_t g = 0; g < r->layout.n_groups; g++)
        r->copies[r->n_copies++] =
            (kvp__copy){g, from->blocks[g][whole], s->blocks[g][whole], rest};
    return number;
}

void rig_pretend(rig *r, uint32_t seq, uint32_t n)
{
    assert_true(n <= r->seqs[seq].n);
    cover(r, &r->seqs[seq], n);
    r->seqs[seq].computed = n;
}

void rig_end(rig *r, uint32_t seq)
{
    sequence *s = &r->seqs[seq];
    for (uint32_t g = 0; g < r->layout.n_groups; g++)
        for (uint32_t b = 0; b < s->n_blocks; b++) r->refs[g][s->blocks[g][b]]--;
    s->used = false;
}

void rig_set_sampling(rig *r, uint32_t seq, const rig_sampling *s)
{
    sequence *q = &r->seqs[seq];
    q->sampling = *s;
    assert_int_equal(kvp__sampler_fill(&q->sampler, &s->options, rig_vocabulary(r), NULL), KVP_OK);
}

int32_t rig_sample(const rig_sampling *s, const float *logits, uint32_t n, uint64_t position)
{
    kvp__sampler sampler;
    kvp__sampled out;
    float *copy = malloc(n * sizeof *copy);
    void *scratch = aligned_alloc(64, kvp__round_up(kvp__sample_scratch_bytes(n), 64));
    memcpy(copy, logits, n * sizeof *copy);
    assert_int_equal(kvp__sampler_fill(&sampler, &s->options, n, NULL), KVP_OK);
    kvp_status st = kvp__sample(&sampler, copy, n, s->seed, position, NULL, 0, scratch, &out, NULL);
    free(copy);
    free(scratch);
    return st == KVP_OK ? out.token : -1;
}

/* --- steps --- */

static void on_post(void *user, uint32_t i, float *logits, void *scratch)
{
    results *to = user;
    volatile float small = 0x1p-140f; /* below what a thread that flushes keeps */
    assert_true(i < RIG_OUTPUTS && scratch);
    assert_true(small * 2 > 0);
    memcpy(to->logits[i], logits, rig_vocabulary(to->rig) * sizeof *logits);
    to->chosen[i] = -3;
    to->posts++;
    memset(logits, 0xff, rig_vocabulary(to->rig) * sizeof *logits); /* the callee's to spoil */
    memset(scratch, 0xff, KVP__SCRATCH_BYTES);
}

static void on_chosen(void *user, uint32_t i, int32_t token, uint32_t bad)
{
    results *to = user;
    to->chosen[i] = token;
    to->bad[i] = bad;
    to->posts++;
}

static void on_done(void *user)
{
    results *to = user;
    if (to->rig->o.slow_done_us) usleep(to->rig->o.slow_done_us);
    to->done++;
}

static void add_outputs(rig *r, const rig_part *p, uint32_t end_row, uint32_t end_position)
{
    sequence *s = &r->seqs[p->seq];
    for (uint32_t i = p->outputs; i > 0; i--) {
        uint32_t n = r->work.n_outputs++;
        assert_true(n < RIG_OUTPUTS);
        r->outputs[n] = end_row - i;
        r->output_seq[n] = p->seq;
        r->choices[n] = (kvp__choice){s->sampling.on ? &s->sampler : NULL, s->sampling.seed,
                                      end_position - i + 1};
    }
}

static void make_work(rig *r, const rig_part *parts, uint32_t n)
{
    r->work = (kvp__work){.n_seqs = n, .tokens = r->tokens, .positions = r->positions,
                          .seqs = r->parts, .copies = r->copies, .n_copies = r->n_copies,
                          .outputs = r->outputs, .choices = r->choices, .post = on_post,
                          .chosen = on_chosen, .done = on_done};
    for (uint32_t i = 0; i < n; i++) {
        sequence *s = &r->seqs[parts[i].seq];
        kvp__work_seq *q = &r->parts[i];
        uint32_t end = s->computed + parts[i].rows;
        assert_true(s->used && end <= s->n && parts[i].rows);
        cover(r, s, end);
        *q = (kvp__work_seq){.first_row = r->work.n_rows, .n_rows = parts[i].rows,
                             .first_pos = s->computed,
                             .n_blocks = (end + r->o.block_tokens - 1) / r->o.block_tokens};
        for (uint32_t g = 0; g < r->layout.n_groups; g++) q->tables[g] = s->blocks[g];
        for (uint32_t k = 0; k < parts[i].rows; k++) {
            r->tokens[r->work.n_rows + k] = s->tokens[s->computed + k];
            r->positions[r->work.n_rows + k] = s->computed + k;
        }
        r->work.n_rows += parts[i].rows;
        add_outputs(r, &parts[i], r->work.n_rows, end);
        s->computed = end;
    }
    r->n_copies = 0;
    kvp_error err = {.size = sizeof err};
    if (kvp__work_check(&r->work, &r->layout, &err) != KVP_OK) fail_msg("%s", err.text);
}

static void clear(results *to)
{
    to->done = to->posts = 0;
    for (uint32_t i = 0; i < RIG_OUTPUTS; i++) {
        to->chosen[i] = -2;
        to->bad[i] = 0;
    }
}

void rig_prepare(rig *r, const rig_part *parts, uint32_t n)
{
    make_work(r, parts, n);
    clear(&r->results[1]);
    r->work.user = &r->results[1];
    assert_int_equal(r->device[1]->prepare(r->runner[1], &r->work), KVP_OK);
}

kvp_status rig_launch(rig *r) { return r->device[1]->launch(r->runner[1]); }
kvp_status rig_poll(rig *r) { return r->device[1]->poll(r->runner[1]); }
void rig_cancel(rig *r) { r->device[1]->cancel(r->runner[1]); }
uint32_t rig_done(const rig *r) { return r->results[1].done; }
uint32_t rig_posts(const rig *r) { return r->results[1].posts; }

static void run_cpu(rig *r)
{
    kvp__work work = r->work;
    if (r->o.no_cpu) return;
    work.user = &r->results[0];
    work.choices = NULL;
    clear(&r->results[0]);
    assert_int_equal(r->device[0]->prepare(r->runner[0], &work), KVP_OK);
    assert_int_equal(r->device[0]->launch(r->runner[0]), KVP_OK);
    while (r->device[0]->poll(r->runner[0]) == KVP_AGAIN)
        r->device[0]->advance(r->runner[0], UINT64_MAX);
}

static double difference(const float *a, const float *b, uint32_t n, double *top)
{
    double most = 0;
    for (uint32_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - (double)b[i]);
        if (!(d <= most)) most = d; /* NaN stays */
        *top = fmax(*top, fabs((double)b[i]));
    }
    return most;
}

double rig_step(rig *r, const rig_part *parts, uint32_t n)
{
    rig_prepare(r, parts, n);
    assert_int_equal(rig_launch(r), KVP_OK);
    kvp_status s;
    while ((s = rig_poll(r)) == KVP_AGAIN) (void)sched_yield();
    if (s != KVP_OK) fail_msg("the step ended with %d", (int)s);
    assert_int_equal(rig_done(r), 1);
    assert_int_equal(rig_posts(r), r->work.n_outputs);
    run_cpu(r);
    double most = 0, top = 0;
    for (uint32_t i = 0; i < r->work.n_outputs && !r->o.no_cpu; i++) {
        if (r->results[1].chosen[i] != -3) continue;
        double d = difference(r->results[1].logits[i], r->results[0].logits[i], rig_vocabulary(r),
                              &top);
        if (!(d <= most)) most = d;
    }
    return top > 0 ? most / top : most;
}

void rig_rewind(rig *r, const rig_part *parts, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) r->seqs[parts[i].seq].computed -= parts[i].rows;
}

const float *rig_logits(const rig *r, uint32_t output)
{
    return r->results[1].chosen[output] == -3 ? r->results[1].logits[output] : NULL;
}

int32_t rig_chosen(const rig *r, uint32_t output, uint32_t *bad)
{
    if (bad) *bad = r->results[1].bad[output];
    return r->results[1].chosen[output] == -3 ? -2 : r->results[1].chosen[output];
}

uint32_t rig_position(const rig *r, uint32_t output)
{
    return (uint32_t)r->choices[output].position;
}

/* --- what is stored --- */

double rig_compare_kv(const rig *r, uint32_t seq)
{
    enum { WIDEST = 64 * 256 };
    float *kv[2][2];
    double most = 0, top = 0;
    const sequence *s = &r->seqs[seq];
    for (int i = 0; i < 4; i++) kv[i / 2][i % 2] = malloc(WIDEST * sizeof(float));
    for (uint32_t g = 0; g < r->layout.n_groups; g++) {
        const kvp__group_layout *l = &r->layout.groups[g];
        for (uint32_t layer = 0; layer < l->layers; layer++)
            for (uint32_t t = 0; t < s->computed; t++) {
                for (int i = 0; i < 2; i++)
                    r->device[i]->peek(r->store[i], g, layer, s->blocks[g][t / r->o.block_tokens],
                                       t % r->o.block_tokens, kv[i][0], kv[i][1]);
                double k = difference(kv[1][0], kv[0][0], l->kv_heads * l->key_dim, &top);
                double v = difference(kv[1][1], kv[0][1], l->kv_heads * l->value_dim, &top);
                if (!(k <= most)) most = k;
                if (!(v <= most)) most = v;
            }
    }
    for (int i = 0; i < 4; i++) free(kv[i / 2][i % 2]);
    return top > 0 ? most / top : most;
}

void rig_poison(rig *r)
{
    for (uint32_t g = 0; g < r->layout.n_groups; g++) {
        for (uint32_t b = 0; b < r->o.blocks; b++)
            if (r->refs[g][b] == 0) r->device[1]->poison(r->store[1], g, b, 0);
        for (uint32_t i = 0; i < RIG_SEQS; i++) {
            const sequence *s = &r->seqs[i];
            uint32_t b = s->computed / r->o.block_tokens, t = s->computed % r->o.block_tokens;
            if (s->used && t && b < s->n_blocks && r->refs[g][s->blocks[g][b]] == 1)
                r->device[1]->poison(r->store[1], g, s->blocks[g][b], t);
        }
    }
}

/* --- own model --- */

kvp_status rig_begin(rig *r, const rig_part *parts, uint32_t n, kvp_error *err)
{
    make_work(r, parts, n);
    kvp_status s = r->device[1]->begin(r->runner[1], &r->work, err);
    if (s == KVP_OK && !r->o.no_cpu)
        assert_int_equal(r->device[0]->begin(r->runner[0], &r->work, NULL), KVP_OK);
    return s;
}

kvp_status rig_attention(rig *r, const rig_attend *a, kvp_error *err)
{
    kvp__attend to = {.layer = a->layer, .type = a->type, .scale = a->scale, .softcap = a->softcap,
                      .q = (const void *)(uintptr_t)a->q, .k = (const void *)(uintptr_t)a->k,
                      .v = (const void *)(uintptr_t)a->v, .out = (void *)(uintptr_t)a->out,
                      .q_row = a->q_row, .q_head = a->q_head, .k_row = a->k_row,
                      .k_head = a->k_head,
                      .v_row = a->v_row, .v_head = a->v_head, .out_row = a->out_row,
                      .out_head = a->out_head};
    return r->device[1]->attend(r->runner[1], &r->work, &to, err);
}

void rig_attention_cpu(rig *r, uint32_t layer, const float *q, const float *k, const float *v,
                       float *out, float scale, float softcap)
{
    const kvp_layer_group *g = &r->model.geometry.groups[r->model.geometry.layer_group[layer]];
    int64_t f = sizeof(float), d = g->key_dim * f, e = g->value_dim * f;
    kvp__attend a = {.layer = layer, .type = KVP_KV_F32, .scale = scale, .softcap = softcap, .q = q,
                     .k = k, .v = v, .out = out, .q_row = g->query_heads * d, .q_head = d,
                     .k_row = g->kv_heads * d, .k_head = d, .v_row = g->kv_heads * e, .v_head = e,
                     .out_row = g->query_heads * e, .out_head = e};
    assert_int_equal(r->device[0]->attend(r->runner[0], &r->work, &a, NULL), KVP_OK);
}
