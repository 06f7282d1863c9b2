/*
 * Workers and the programs they run. See team.h for the model.
 *
 * The invariant that everything here serves: a thread may touch a program only while it holds a
 * chunk of it that has not been finished, or while its hazard pointer names the program and the
 * program is still in a slot of the team. Whoever finishes the last chunk takes the program out of
 * its slot, waits until no hazard pointer names it (a few instructions' time: a worker keeps the
 * pointer only while it runs or takes a chunk, never while it waits), and then calls `done`. So a
 * worker that spins or sleeps holds up nobody, and the owner may reuse or free the program as soon
 * as it is over.
 *
 * Waiting is on the team's `epoch`, which grows whenever chunks may have become available: first a
 * bounded spin, then a condition variable. The wakers' fast path is one atomic addition and one load.
 *
 * Why chunks from a counter and not a static split: a worker that the system has taken away then
 * holds up only the chunk it has begun; a static split waits for its whole share.
 *
 * Still the others wait for that chunk, phase after phase. So the team keeps a pace: if workers slept
 * through a good part of most programs of late, a few are run with one worker less (TRIAL), and if
 * these were faster it stays so for a while (FEWER) before it looks again. The spare worker waits
 * apart, so that the others' wake-ups do not concern it. Nothing of this shows in any result.
 */
#define _GNU_SOURCE
#include "base/team.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SLOTS 16u            /* programs that can progress at the same time; more wait their turn */
#define SPINS 4000u          /* pauses before a waiting worker sleeps: tens of microseconds */
#define STACK_BYTES (512u << 10)
#define MAX_WORKERS 1024u
#define TRIALS 4u            /* programs that are timed with a worker less */
#define LEAST_REST 1000000000u /* ns with a worker less, at first; doubles while that is right */
#define MOST_REST 8000000000u

typedef enum mode { ALL, TRIAL, FEWER } mode;

typedef struct pace {
    mode mode;
    uint32_t work;        /* of the programs that are compared */
    uint32_t n;           /* of them in this mode */
    uint32_t history;     /* of the last programs, newest in bit 0: was much time waited? */
    uint64_t all, fewer;  /* ns: a running mean, a sum */
    uint64_t until, rest; /* when to leave FEWER, or may try again; how long the next time */
} pace;

typedef struct worker {
    _Alignas(KVP__CACHE_LINE) _Atomic(kvp__program *) hazard;
    pthread_t thread;
    kvp__team *team;
    void *scratch;
    uint32_t index;
    bool started;
} worker;

struct kvp__team {
    kvp__hooks hooks;
    _Atomic uint32_t refs;
    uint32_t n_workers;
    size_t bytes;         /* of this allocation */
    size_t scratch_bytes; /* per worker, rounded */
    void *scratch;
    worker *workers;
    pthread_mutex_t lock; /* guards `waiting`, filling of slots, sleeping, `pace` */
    pthread_cond_t wake, unpark;
    pace pace;
    _Atomic uint64_t waited;  /* ns that workers slept while a program ran, since the last one ended */
    _Atomic uint32_t active;  /* workers from here on are spare */
    kvp__program *waiting_first, *waiting_last;
    _Alignas(KVP__CACHE_LINE) _Atomic uint64_t epoch;
    _Atomic uint32_t sleepers;
    _Atomic uint32_t stop;
    _Alignas(KVP__CACHE_LINE) _Atomic(kvp__program *) slots[SLOTS];
};

/* --- the floating-point state --- */

kvp__fp_state kvp__fp_enter(void)
{
    kvp__fp_state s = {0};
#if defined(__x86_64__)
    s.bits = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(0x1f80);
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(s.bits));
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
#endif
    return s;
}

void kvp__fp_leave(kvp__fp_state s)
{
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr((unsigned)s.bits);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(s.bits));
#else
    (void)s;
#endif
}

static inline void pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* For the waits whose end depends on another thread's few next instructions. */
static void back_off(uint32_t *spins)
{
    if (++*spins < 1000) pause_briefly();
    else sched_yield();
}

/* --- a program's chunks --- */

#define CURSOR(phase, chunk) ((uint64_t)(phase) << 32 | (chunk))

static uint32_t phase_from(const kvp__program *p, uint32_t phase)
{
    while (phase < p->n_phases && p->phases[phase].n_chunks == 0) phase++;
    return phase;
}

void kvp__program_init(kvp__program *p, const kvp__phase *phases, uint32_t n_phases,
                       void (*done)(void *), void *user)
{
    p->phases = phases;
    p->n_phases = n_phases;
    p->done = done;
    p->user = user;
    p->next = NULL;
    p->team = NULL;
    p->work = 0;
    atomic_store_explicit(&p->finished, 0, memory_order_relaxed);
    atomic_store_explicit(&p->over, 0, memory_order_relaxed);
    atomic_store_explicit(&p->cancelled, 0, memory_order_relaxed);
    atomic_store_explicit(&p->cursor, CURSOR(phase_from(p, 0), 0), memory_order_release);
}

typedef enum take_result { TAKEN, ALL_TAKEN, ENDED } take_result;

static take_result take_chunk(kvp__program *p, uint32_t *phase, uint32_t *chunk)
{
    uint64_t c = atomic_load_explicit(&p->cursor, memory_order_acquire);
    for (;;) {
        *phase = (uint32_t)(c >> 32);
        *chunk = (uint32_t)c;
        if (*phase >= p->n_phases) return ENDED;
        if (*chunk >= p->phases[*phase].n_chunks) return ALL_TAKEN;
        if (atomic_compare_exchange_weak_explicit(&p->cursor, &c, c + 1, memory_order_acq_rel,
                                                  memory_order_acquire))
            return TAKEN;
    }
}

static void wake_workers(kvp__team *t)
{
    atomic_fetch_add_explicit(&t->epoch, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&t->sleepers, memory_order_seq_cst) == 0) return;
    pthread_mutex_lock(&t->lock);
    pthread_cond_broadcast(&t->wake);
    pthread_mutex_unlock(&t->lock);
}

/* --- the pace --- */

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static bool is_alone(const kvp__team *t, const kvp__program *p)
{
    for (uint32_t i = 0; i < SLOTS; i++) {
        kvp__program *q = atomic_load_explicit(&t->slots[i], memory_order_relaxed);
        if (q && q != p) return false;
    }
    return true;
}

static void set_mode(kvp__team *t, mode m)
{
    t->pace.mode = m;
    t->pace.n = 0;
    uint32_t active = m == ALL ? t->n_workers : t->n_workers - 1;
    if (atomic_exchange(&t->active, active) < active) pthread_cond_broadcast(&t->unpark);
}

static bool often_waited(uint32_t history)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < 8; i++) n += history >> i & 1;
    return n >= 4;
}

static void end_trial(kvp__team *t, uint64_t now)
{
    pace *c = &t->pace;
    bool better = c->fewer / TRIALS < c->all - c->all / 16;
    c->rest = better ? kvp__min64(kvp__max64(2 * c->rest, LEAST_REST), MOST_REST) : LEAST_REST;
    c->until = now + c->rest;
    set_mode(t, better ? FEWER : ALL);
}

/* A program has ended; the lock is held. */
static void keep_pace(kvp__team *t, const kvp__program *p)
{
    pace *c = &t->pace;
    uint64_t waited = atomic_exchange(&t->waited, 0), now = now_ns(), took = now - p->started;
    if (t->n_workers < 2) return;
    if (!p->work || !is_alone(t, p)) { /* no measure, but a spare worker comes back in time */
        if (c->mode == TRIAL || (c->mode == FEWER && now >= c->until)) {
            set_mode(t, ALL);
            c->work = 0;
            c->history = 0;
        }
        return;
    }
    c->history = c->history << 1 | (waited * 5 > took * (t->n_workers - 1));
    if (c->mode == FEWER) {
        if (now < c->until) return;
        set_mode(t, ALL);
        c->work = 0;
        c->history = 0;
        c->until = 0;
    }
    if (p->work != c->work) {
        c->work = p->work;
        set_mode(t, ALL);
        return;
    }
    c->n++;
    if (c->mode == TRIAL) {
        if (c->n == 1) c->fewer = 0; /* the spare one may still have taken part */
        else c->fewer += took;
        if (c->n == TRIALS + 1) end_trial(t, now);
    } else {
        c->all = c->n == 1 ? took : c->all - c->all / 4 + took / 4;
        if (c->n >= 4 && often_waited(c->history) && now >= c->until) set_mode(t, TRIAL);
    }
}

/* Waits until it is wanted; the loop of a spare worker. */
static void stay_apart(worker *w)
{
    kvp__team *t = w->team;
    pthread_mutex_lock(&t->lock);
    while (w->index >= atomic_load(&t->active) && !atomic_load(&t->stop))
        pthread_cond_wait(&t->unpark, &t->lock);
    pthread_mutex_unlock(&t->lock);
}

/* Takes the program out of the team; its slot goes to the one that has waited longest. */
static void leave_team(kvp__team *t, kvp__program *p, const worker *self)
{
    pthread_mutex_lock(&t->lock);
    keep_pace(t, p);
    for (uint32_t i = 0; i < SLOTS; i++) {
        if (atomic_load_explicit(&t->slots[i], memory_order_relaxed) != p) continue;
        kvp__program *heir = t->waiting_first;
        if (heir) t->waiting_first = heir->next;
        atomic_store_explicit(&t->slots[i], heir, memory_order_seq_cst);
        break;
    }
    pthread_mutex_unlock(&t->lock);
    for (uint32_t i = 0; i < t->n_workers; i++) {
        uint32_t spins = 0;
        while (&t->workers[i] != self &&
               atomic_load_explicit(&t->workers[i].hazard, memory_order_seq_cst) == p)
            back_off(&spins);
    }
    wake_workers(t);
}

static void end_program(kvp__program *p, worker *self)
{
    if (p->team) leave_team(p->team, p, self);
    if (self) atomic_store_explicit(&self->hazard, NULL, memory_order_release);
    void (*done)(void *) = p->done;
    void *user = p->user;
    atomic_store_explicit(&p->over, 1, memory_order_release);
    if (done) done(user);
    atomic_store_explicit(&p->over, 2, memory_order_release);
}

/* Runs one taken chunk; the last of a phase opens the next, the last of all ends the program. True:
 * that happened, and the program must not be touched. */
static bool run_chunk(kvp__program *p, uint32_t phase, uint32_t chunk, void *scratch, worker *self)
{
    const kvp__phase *ph = &p->phases[phase];
    if (!atomic_load_explicit(&p->cancelled, memory_order_relaxed))
        ph->run(ph->user, chunk, scratch);
    if (atomic_fetch_add_explicit(&p->finished, 1, memory_order_acq_rel) + 1 != ph->n_chunks)
        return false;
    atomic_store_explicit(&p->finished, 0, memory_order_relaxed);
    uint32_t next = phase_from(p, phase + 1);
    kvp__team *t = p->team;
    /* Nobody else can end the program before this store: every chunk that exists is finished. After
     * it, only if it opens a phase. */
    atomic_store_explicit(&p->cursor, CURSOR(next, 0), memory_order_release);
    if (next < p->n_phases) {
        if (t) wake_workers(t);
        return false;
    }
    end_program(p, self);
    return true;
}

bool kvp__program_over(const kvp__program *p)
{
    kvp__program *q = (kvp__program *)(uintptr_t)p;
    uint32_t spins = 0, over;
    while ((over = atomic_load_explicit(&q->over, memory_order_acquire)) == 1) back_off(&spins);
    return over == 2;
}

void kvp__program_cancel(kvp__program *p)
{
    atomic_store_explicit(&p->cancelled, 1, memory_order_relaxed);
}

bool kvp__program_advance(kvp__program *p, const kvp__hooks *clock, uint64_t until, bool wait,
                          void *scratch)
{
    kvp__fp_state fp = kvp__fp_enter();
    bool over = false;
    uint32_t spins = 0;
    for (;;) {
        uint32_t phase, chunk;
        take_result r = take_chunk(p, &phase, &chunk);
        if (r == ENDED) {
            /* An inline program without chunks has nobody else to end it. */
            if (!p->team && atomic_load_explicit(&p->over, memory_order_relaxed) == 0)
                end_program(p, NULL);
            over = kvp__program_over(p);
            if (over || !wait) break;
            back_off(&spins);
        } else if (r == ALL_TAKEN) {
            if (!wait) break;
            back_off(&spins);
        } else {
            spins = 0;
            over = run_chunk(p, phase, chunk, scratch, NULL);
            if (over) break;
        }
        if (until && kvp__now(clock) >= until) break;
    }
    kvp__fp_leave(fp);
    return over;
}

/* --- workers --- */

/* Runs what can be run of the program in one slot. True: something was. */
static bool work_slot(worker *w, uint32_t slot)
{
    kvp__team *t = w->team;
    kvp__program *p = atomic_load_explicit(&t->slots[slot], memory_order_acquire);
    if (!p) return false;
    atomic_store_explicit(&w->hazard, p, memory_order_seq_cst);
    bool worked = false;
    if (atomic_load_explicit(&t->slots[slot], memory_order_seq_cst) == p) {
        uint32_t phase, chunk;
        while (take_chunk(p, &phase, &chunk) == TAKEN) {
            worked = true;
            if (run_chunk(p, phase, chunk, w->scratch, w)) return true;
        }
    }
    atomic_store_explicit(&w->hazard, NULL, memory_order_release);
    return worked;
}

static bool work_once(worker *w)
{
    bool worked = false;
    for (uint32_t i = 0; i < SLOTS; i++) worked |= work_slot(w, i);
    return worked;
}

static void sleep_until(kvp__team *t, uint64_t seen)
{
    bool inside = !is_alone(t, NULL); /* not between programs */
    uint64_t from = inside ? now_ns() : 0;
    pthread_mutex_lock(&t->lock);
    atomic_fetch_add_explicit(&t->sleepers, 1, memory_order_seq_cst);
    while (atomic_load_explicit(&t->epoch, memory_order_seq_cst) == seen)
        pthread_cond_wait(&t->wake, &t->lock);
    atomic_fetch_sub_explicit(&t->sleepers, 1, memory_order_seq_cst);
    pthread_mutex_unlock(&t->lock);
    if (inside) atomic_fetch_add_explicit(&t->waited, now_ns() - from, memory_order_relaxed);
}

static void *worker_main(void *arg)
{
    worker *w = arg;
    kvp__team *t = w->team;
    (void)kvp__fp_enter();
    for (;;) {
        uint64_t seen = atomic_load_explicit(&t->epoch, memory_order_seq_cst);
        if (atomic_load_explicit(&t->stop, memory_order_acquire)) return NULL;
        if (w->index >= atomic_load_explicit(&t->active, memory_order_relaxed)) {
            stay_apart(w);
            continue;
        }
        if (work_once(w)) continue;
        uint32_t spins = 0;
        while (spins < SPINS && atomic_load_explicit(&t->epoch, memory_order_relaxed) == seen) {
            pause_briefly();
            spins++;
        }
        if (spins == SPINS) sleep_until(t, seen);
    }
}

uint32_t kvp__cores(void)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        int n = CPU_COUNT(&set);
        if (n > 0) return (uint32_t)n;
    }
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (uint32_t)n : 1;
}

static void free_team(kvp__team *t)
{
    pthread_mutex_lock(&t->lock);
    atomic_store_explicit(&t->stop, 1, memory_order_release);
    pthread_cond_broadcast(&t->unpark);
    pthread_mutex_unlock(&t->lock);
    wake_workers(t);
    for (uint32_t i = 0; i < t->n_workers; i++)
        if (t->workers[i].started) pthread_join(t->workers[i].thread, NULL);
    pthread_cond_destroy(&t->wake);
    pthread_cond_destroy(&t->unpark);
    pthread_mutex_destroy(&t->lock);
    kvp__hooks h = t->hooks;
    size_t n = t->n_workers;
    if (t->scratch) kvp__unmap(t->scratch, t->scratch_bytes * n);
    kvp__free(&h, t->workers, n * sizeof(worker));
    kvp__free(&h, t, sizeof *t);
}

/* Workers inherit a full signal mask, so that the host's handlers run on the host's threads. */
static bool start_workers(kvp__team *t)
{
    sigset_t all, old;
    pthread_attr_t attr;
    if (pthread_attr_init(&attr) != 0) return false;
    (void)pthread_attr_setstacksize(&attr, STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    bool ok = true;
    for (uint32_t i = 0; ok && i < t->n_workers; i++) {
        worker *w = &t->workers[i];
        w->team = t;
        w->index = i;
        w->scratch = (char *)t->scratch + (size_t)i * t->scratch_bytes;
        ok = pthread_create(&w->thread, &attr, worker_main, w) == 0;
        w->started = ok;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);
    return ok;
}

kvp_status kvp__team_create(kvp__team **out, const kvp__hooks *hooks, int32_t threads,
                            size_t scratch_bytes, kvp_error *err)
{
    if (threads < 0 || threads > (int32_t)MAX_WORKERS)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "team: threads %d is not 0 to %u", (int)threads,
                         MAX_WORKERS);
    uint32_t n = threads ? (uint32_t)threads : kvp__cores();
    if (n > MAX_WORKERS) n = MAX_WORKERS;
    kvp__team *t = kvp__alloc_zero(hooks, sizeof *t);
    worker *workers = kvp__alloc_zero(hooks, n * sizeof *workers);
    /* One more line per worker keeps equal offsets in neighbours' scratch off one cache set. */
    size_t each = (size_t)kvp__round_up(scratch_bytes, KVP__CACHE_LINE) + KVP__CACHE_LINE;
    void *scratch = t && workers ? kvp__map(each * n) : NULL;
    if (!scratch) {
        kvp__free(hooks, workers, n * sizeof *workers);
        kvp__free(hooks, t, sizeof *t);
        return kvp__fail_need(err, KVP_ERR_NO_MEMORY, each * n, 0, "team: no memory for %u workers",
                              (unsigned)n);
    }
    t->hooks = *hooks;
    t->n_workers = n;
    t->workers = workers;
    t->scratch = scratch;
    t->scratch_bytes = each;
    atomic_init(&t->refs, 1);
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->wake, NULL);
    pthread_cond_init(&t->unpark, NULL);
    atomic_init(&t->active, n);
    if (!start_workers(t)) {
        free_team(t);
        return kvp__fail(err, KVP_ERR_SYSTEM, "team: the system refused one of %u threads",
                         (unsigned)n);
    }
    *out = t;
    return KVP_OK;
}

void kvp__team_acquire(kvp__team *t) { atomic_fetch_add_explicit(&t->refs, 1, memory_order_relaxed); }

bool kvp__team_release(kvp__team *t)
{
    if (atomic_fetch_sub_explicit(&t->refs, 1, memory_order_acq_rel) != 1) return false;
    free_team(t);
    return true;
}

uint32_t kvp__team_threads(const kvp__team *t) { return t->n_workers; }

void kvp__team_start(kvp__team *t, kvp__program *p)
{
    p->team = t;
    p->started = p->work ? now_ns() : 0;
    if (phase_from(p, 0) >= p->n_phases) {
        p->team = NULL;
        end_program(p, NULL);
        return;
    }
    pthread_mutex_lock(&t->lock);
    uint32_t slot = 0;
    while (slot < SLOTS && atomic_load_explicit(&t->slots[slot], memory_order_relaxed)) slot++;
    if (slot < SLOTS) {
        atomic_store_explicit(&t->slots[slot], p, memory_order_seq_cst);
    } else {
        if (t->waiting_first) t->waiting_last->next = p;
        else t->waiting_first = p;
        t->waiting_last = p;
    }
    pthread_mutex_unlock(&t->lock);
    wake_workers(t);
}
