/* See fake.h. */
#define _GNU_SOURCE
#include "fake.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

fake_behaviour fake;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t change = PTHREAD_COND_INITIALIZER;
static bool shut, lost;
static fake_record record;
static const kvp__device *cpu;

typedef enum phase { IDLE, PREPARED, RUNNING, OVER, ENDING } phase;

typedef struct fake_runner {
    kvp__runner *inner;
    pthread_t thread;
    phase phase;            /* under the lock */
    bool touching;          /* the thread may call the work's functions; under the lock */
    const kvp__work *work;
    kvp__work copy;         /* what the CPU runs: its results come here first */
    float *rows;            /* [max_outputs][vocabulary] */
    uint32_t vocabulary;
    void *scratch;
    bool cancelled;         /* under the lock */
} fake_runner;

static fake_runner *fake_of(const kvp__runner *r) { return (fake_runner *)(void *)(uintptr_t)r; }

static kvp_status refused(fake_call call, kvp_error *err)
{
    if (fake.refuses != call) return KVP_OK;
    return kvp__fail_need(err, fake.refusal, 1000, 10, "the fake has 10 of 1000");
}

#define REFUSE(call, err)                                                                          \
    do {                                                                                           \
        kvp_status refusal_ = refused(call, err);                                                  \
        if (refusal_ != KVP_OK) return refusal_;                                                   \
    } while (0)

/* --- the gate --- */

static void set(bool *what, bool value)
{
    pthread_mutex_lock(&lock);
    *what = value;
    pthread_cond_broadcast(&change);
    pthread_mutex_unlock(&lock);
}

void fake_shut(void) { set(&shut, true); }
void fake_open(void) { set(&shut, false); }
void fake_lose(void) { set(&lost, true); }

fake_record fake_seen(void)
{
    pthread_mutex_lock(&lock);
    fake_record seen = record;
    pthread_mutex_unlock(&lock);
    return seen;
}

static void note(uint32_t *what, int by)
{
    pthread_mutex_lock(&lock);
    *what += (uint32_t)by;
    pthread_mutex_unlock(&lock);
}

/* --- a step --- */

static void keep_row(void *user, uint32_t i, float *logits, void *scratch)
{
    (void)scratch;
    fake_runner *r = user;
    memcpy(r->rows + (size_t)i * r->vocabulary, logits, r->vocabulary * sizeof *logits);
}

/* The token of row i as kvp__sample finds it, told as a device tells it. */
static void choose(fake_runner *r, uint32_t i)
{
    const kvp__choice *c = &r->work->choices[i];
    kvp__sampled sampled = {.token = -1};
    if (!fake.broken)
        (void)kvp__sample(c->sampler, r->rows + (size_t)i * r->vocabulary, r->vocabulary, c->seed,
                          c->position, NULL, 0, r->scratch, &sampled, NULL);
    r->work->chosen(r->work->user, i, sampled.token, 5);
    note(&record.chosen, 1);
}

/* The last row first. */
static void deliver(fake_runner *r)
{
    for (uint32_t n = r->work->n_outputs; n-- > 0;) {
        const kvp__choice *c = &r->work->choices[n];
        if (fake.chooses && c->sampler && kvp__sampler_is_plain(c->sampler)) {
            choose(r, n);
            continue;
        }
        r->work->post(r->work->user, n, r->rows + (size_t)n * r->vocabulary, r->scratch);
        note(&record.posted, 1);
    }
    r->work->done(r->work->user);
}

static void run(fake_runner *r)
{
    (void)cpu->prepare(r->inner, &r->copy);
    (void)cpu->launch(r->inner);
    while (cpu->poll(r->inner) == KVP_AGAIN) cpu->advance(r->inner, UINT64_MAX);
    if (fake.delay_us)
        nanosleep(&(struct timespec){.tv_nsec = (long)fake.delay_us * 1000}, NULL);
}

static void *thread(void *user)
{
    fake_runner *r = user;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (r->phase != RUNNING && r->phase != ENDING) pthread_cond_wait(&change, &lock);
        if (r->phase == ENDING) break;
        pthread_mutex_unlock(&lock);
        run(r);
        pthread_mutex_lock(&lock);
        while (shut && !lost && !r->cancelled) pthread_cond_wait(&change, &lock);
        if (lost) {
            r->phase = IDLE;
            pthread_cond_broadcast(&change);
            continue;
        }
        r->touching = true;
        pthread_mutex_unlock(&lock);
        deliver(r);
        pthread_mutex_lock(&lock);
        r->touching = false;
        r->phase = OVER;
        record.steps++;
        pthread_cond_broadcast(&change);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

static kvp_status prepare(kvp__runner *runner, const kvp__work *work)
{
    REFUSE(FAKE_PREPARE, NULL);
    fake_runner *r = fake_of(runner);
    r->work = work;
    r->copy = *work;
    r->copy.post = keep_row;
    r->copy.chosen = NULL;
    r->copy.choices = NULL;
    r->copy.done = NULL;
    r->copy.user = r;
    pthread_mutex_lock(&lock);
    r->phase = PREPARED;
    r->cancelled = false;
    pthread_mutex_unlock(&lock);
    return KVP_OK;
}

static kvp_status launch(kvp__runner *runner)
{
    REFUSE(FAKE_LAUNCH, NULL);
    fake_runner *r = fake_of(runner);
    pthread_mutex_lock(&lock);
    r->phase = RUNNING;
    pthread_cond_broadcast(&change);
    pthread_mutex_unlock(&lock);
    return KVP_OK;
}

/* It does not wait for the gate. */
static void cancel(kvp__runner *runner) { set(&fake_of(runner)->cancelled, true); }

static kvp_status poll(const kvp__runner *runner)
{
    fake_runner *r = fake_of(runner);
    pthread_mutex_lock(&lock);
    if (lost)
        while (r->phase == RUNNING) pthread_cond_wait(&change, &lock);
    while (r->touching && r->phase == RUNNING) pthread_cond_wait(&change, &lock);
    kvp_status s = lost ? KVP_ERR_DEVICE_LOST : r->phase == RUNNING ? KVP_AGAIN : KVP_OK;
    pthread_mutex_unlock(&lock);
    return s;
}

static const char *why(const kvp__runner *runner)
{
    (void)runner;
    return lost ? "it fell off the bus" : "it said no";
}

/* --- an own model: results are there at once --- */

static kvp_status begin(kvp__runner *runner, const kvp__work *work, kvp_error *err)
{
    REFUSE(FAKE_BEGIN, err);
    note(&record.begun, 1);
    return cpu->begin(fake_of(runner)->inner, work, err);
}

static kvp_status attend(kvp__runner *runner, const kvp__work *work, const kvp__attend *a,
                         kvp_error *err)
{
    REFUSE(FAKE_ATTEND, err);
    kvp_status s = cpu->attend(fake_of(runner)->inner, work, a, err);
    if (s == KVP_OK) note(&record.attended, 1);
    return s == KVP_OK && fake.records ? KVP_PLANNED : s;
}

/* --- objects: the CPU's --- */

static uint32_t count(void) { return 4; }

static void describe(uint32_t ordinal, kvp_device_info *out)
{
    memset(out->name, 0, sizeof out->name);
    memcpy(out->name, "fake:0", 6);
    out->name[5] = (char)('0' + ordinal);
    out->usable = 1;
}

static kvp_status supports(const kvp__geometry *g, uint32_t block_tokens, uint32_t k_format,
                           uint32_t v_format, uint32_t ordinal, kvp_error *err)
{
    REFUSE(FAKE_SUPPORTS, err);
    if (ordinal >= count())
        return kvp__fail(err, KVP_ERR_NO_DEVICE, "fake:%u: there are four", (unsigned)ordinal);
    return cpu->supports(g, block_tokens, k_format, v_format, 0, err);
}

static kvp_status place(const kvp__model *m, const kvp__place *how, kvp__weights **out,
                        kvp_error *err)
{
    REFUSE(FAKE_PLACE, err);
    kvp__place inner = *how;
    inner.threads = KVP_THREADS_INLINE;
    kvp_status s = cpu->place(m, &inner, out, err);
    if (s != KVP_OK) return s;
    note(&record.places, 1);
    record.ordinal = how->ordinal;
    return s;
}

static void unplace(kvp__weights *w)
{
    cpu->unplace(w);
    note(&record.unplaces, 1);
}

static kvp_status store_create(const kvp__hooks *hooks, const kvp__layout *layout, void *slab,
                               uint32_t ordinal, kvp__store **out, kvp_error *err)
{
    REFUSE(FAKE_STORE, err);
    kvp_status s = cpu->store_create(hooks, layout, slab, 0, out, err);
    if (s != KVP_OK) return s;
    note(&record.stores, 1);
    record.ordinal = ordinal;
    return s;
}

static void store_destroy(kvp__store *s)
{
    if (!s) return;
    cpu->store_destroy(s);
    note(&record.stores, -1);
}

static void end_runner(fake_runner *r)
{
    pthread_mutex_lock(&lock);
    r->phase = ENDING;
    pthread_cond_broadcast(&change);
    pthread_mutex_unlock(&lock);
    pthread_join(r->thread, NULL);
}

static kvp_status runner_create(const kvp__runner_options *o, kvp__runner **out, kvp_error *err)
{
    REFUSE(FAKE_RUNNER, err);
    record.with_team += o->team != NULL;
    record.stream = o->stream;
    kvp__runner_options inner = *o;
    inner.team = NULL;
    inner.stream = NULL;
    fake_runner *r = calloc(1, sizeof *r);
    r->vocabulary = o->model->geometry.vocabulary;
    r->rows = calloc((size_t)o->max_outputs * r->vocabulary + 1, sizeof *r->rows);
    r->scratch = aligned_alloc(64, KVP__SCRATCH_BYTES);
    kvp_status s = cpu->runner_create(&inner, &r->inner, err);
    if (s != KVP_OK || pthread_create(&r->thread, NULL, thread, r) != 0) abort();
    note(&record.runners, 1);
    *out = (kvp__runner *)(void *)r;
    return KVP_OK;
}

static void runner_destroy(kvp__runner *runner)
{
    if (!runner) return;
    fake_runner *r = fake_of(runner);
    end_runner(r);
    cpu->runner_destroy(r->inner);
    free(r->rows);
    free(r->scratch);
    free(r);
    note(&record.runners, -1);
}

static uint64_t packed_bytes(const kvp__model *m) { return cpu->packed_bytes(m) + 1; }

static uint64_t workspace_bytes(const kvp__model *m, uint32_t max_rows, uint32_t max_seqs,
                                uint32_t max_positions)
{
    return cpu->workspace_bytes(m, max_rows, max_seqs, max_positions) + 1;
}

static const kvp__device device = {
    .name = "fake",
    .max_ordinals = 64,
    .asynchronous = true,
    .count = count,
    .describe = describe,
    .packed_bytes = packed_bytes,
    .workspace_bytes = workspace_bytes,
    .place = place,
    .unplace = unplace,
    .supports = supports,
    .store_create = store_create,
    .store_destroy = store_destroy,
    .slab_align = 256,
    .runner_create = runner_create,
    .runner_destroy = runner_destroy,
    .prepare = prepare,
    .launch = launch,
    .cancel = cancel,
    .poll = poll,
    .why = why,
    .begin = begin,
    .attend = attend,
};

void fake_use(void)
{
    uint32_t ordinal;
    cpu = kvp__device_find(NULL, &ordinal);
    memset(&fake, 0, sizeof fake);
    memset(&record, 0, sizeof record);
    shut = lost = false;
    kvp__device_use(&device);
}

void fake_give_up(void) { kvp__device_use(NULL); }
