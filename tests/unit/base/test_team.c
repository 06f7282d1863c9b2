/*
 * The team: every chunk runs once, phases are barriers, programs of several batches progress together,
 * an inline run keeps its deadline, and the floating-point state is the library's inside and the
 * host's outside. Run under the thread sanitizer this is also the proof that a program may be reused
 * or freed as soon as it is over.
 */
#define _GNU_SOURCE
#include "base/team.h"

#include <fenv.h>
#include <pthread.h>
#include <signal.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <time.h>
#include <cmocka.h>

static kvp__hooks hooks;

static int setup(void **s)
{
    (void)s;
    return kvp__hooks_fill(&hooks, NULL, NULL) == KVP_OK ? 0 : -1;
}

static kvp__team *team_of(int32_t threads)
{
    kvp__team *t = NULL;
    assert_int_equal(kvp__team_create(&t, &hooks, threads, 4096, NULL), KVP_OK);
    return t;
}

/* --- a program that checks itself --- */

enum { PHASES = 40, CHUNKS = 23 };

typedef struct job {
    kvp__program program;
    kvp__phase phases[PHASES];
    struct arg {
        struct job *job;
        uint32_t phase;
    } args[PHASES];
    uint32_t n_chunks[PHASES];
    uint32_t ran[PHASES][CHUNKS];   /* plain memory: the barrier has to order it */
    _Atomic uint32_t wrong;
    _Atomic uint32_t dones;
} job;

static void chunk(void *user, uint32_t i, void *scratch)
{
    struct arg *a = user;
    job *j = a->job;
    memset(scratch, (int)i, 4096);
    if (a->phase > 0)
        for (uint32_t k = 0; k < j->n_chunks[a->phase - 1]; k++)
            if (j->ran[a->phase - 1][k] != 1) atomic_fetch_add(&j->wrong, 1);
    j->ran[a->phase][i]++;
}

static void job_done(void *user) { atomic_fetch_add(&((job *)user)->dones, 1); }

static void job_init(job *j, uint32_t seed)
{
    memset(j->ran, 0, sizeof j->ran);
    atomic_store(&j->wrong, 0);
    atomic_store(&j->dones, 0);
    for (uint32_t p = 0; p < PHASES; p++) {
        seed = seed * 1664525u + 1013904223u;
        j->args[p].job = j;
        j->args[p].phase = p;
        j->n_chunks[p] = seed >> 16 & 7 ? (seed >> 20) % CHUNKS + 1 : 0;
        j->phases[p].run = chunk;
        j->phases[p].user = &j->args[p];
        j->phases[p].n_chunks = j->n_chunks[p];
    }
    kvp__program_init(&j->program, j->phases, PHASES, job_done, j);
}

static void job_check(job *j)
{
    assert_int_equal(atomic_load(&j->wrong), 0);
    assert_int_equal(atomic_load(&j->dones), 1);
    for (uint32_t p = 0; p < PHASES; p++)
        for (uint32_t i = 0; i < CHUNKS; i++)
            assert_int_equal(j->ran[p][i], i < j->n_chunks[p] ? 1 : 0);
}

static void wait_over(kvp__program *p)
{
    while (!kvp__program_over(p)) {
        struct timespec t = {0, 20000};
        nanosleep(&t, NULL);
    }
}

static void phases_are_barriers(void **s)
{
    (void)s;
    for (int32_t threads = 1; threads <= 4; threads++) {
        kvp__team *t = team_of(threads);
        assert_int_equal(kvp__team_threads(t), threads);
        job *j = malloc(sizeof *j);
        for (uint32_t round = 0; round < 200; round++) {
            job_init(j, round);
            kvp__team_start(t, &j->program);
            wait_over(&j->program);
            job_check(j);
        }
        free(j);
        assert_true(kvp__team_release(t));
    }
}

static void programs_are_freed_when_over(void **s)
{
    (void)s;
    kvp__team *t = team_of(3);
    for (uint32_t round = 0; round < 300; round++) {
        job *j = malloc(sizeof *j);
        job_init(j, round);
        kvp__team_start(t, &j->program);
        while (!kvp__program_over(&j->program)) continue;
        job_check(j);
        memset(j, 0xee, sizeof *j);
        free(j);
    }
    assert_true(kvp__team_release(t));
}

static void caller_helps(void **s)
{
    (void)s;
    kvp__team *t = team_of(2);
    void *scratch = malloc(4096);
    job *j = malloc(sizeof *j);
    for (uint32_t round = 0; round < 200; round++) {
        job_init(j, round);
        kvp__team_start(t, &j->program);
        assert_true(kvp__program_advance(&j->program, &hooks, 0, true, scratch));
        job_check(j);
    }
    free(j);
    free(scratch);
    assert_true(kvp__team_release(t));
}

static void many_programs_at_once(void **s)
{
    (void)s;
    enum { N = 40 }; /* more than a team has slots for */
    kvp__team *t = team_of(2);
    job *j = calloc(N, sizeof *j);
    for (uint32_t round = 0; round < 10; round++) {
        for (uint32_t i = 0; i < N; i++) {
            job_init(&j[i], round * N + i);
            kvp__team_start(t, &j[i].program);
        }
        for (uint32_t i = 0; i < N; i++) wait_over(&j[i].program);
        for (uint32_t i = 0; i < N; i++) job_check(&j[i]);
    }
    free(j);
    assert_true(kvp__team_release(t));
}

static void *one_domain(void *user)
{
    kvp__team *t = user;
    job *j = malloc(sizeof *j);
    uintptr_t bad = 0;
    for (uint32_t round = 0; round < 100; round++) {
        job_init(j, round);
        kvp__team_start(t, &j->program);
        while (!kvp__program_over(&j->program)) sched_yield();
        bad |= atomic_load(&j->wrong) != 0 || atomic_load(&j->dones) != 1;
    }
    free(j);
    return (void *)bad;
}

static void several_domains_share_a_team(void **s)
{
    (void)s;
    kvp__team *t = team_of(2);
    pthread_t th[4];
    for (int i = 0; i < 4; i++) assert_int_equal(pthread_create(&th[i], NULL, one_domain, t), 0);
    for (int i = 0; i < 4; i++) {
        void *bad;
        pthread_join(th[i], &bad);
        assert_null(bad);
    }
    assert_true(kvp__team_release(t));
}

static void references_are_counted(void **s)
{
    (void)s;
    kvp__team *t = team_of(2);
    kvp__team_acquire(t);
    assert_false(kvp__team_release(t));
    assert_true(kvp__team_release(t));
}

static void empty_programs_end(void **s)
{
    (void)s;
    static char scratch[4096];
    kvp__phase none = {chunk, NULL, 0};
    job j;
    atomic_store(&j.dones, 0);
    kvp__program_init(&j.program, &none, 1, job_done, &j);
    assert_true(kvp__program_advance(&j.program, &hooks, 0, true, scratch));
    assert_int_equal(atomic_load(&j.dones), 1);
    kvp__team *t = team_of(1);
    kvp__program_init(&j.program, &none, 1, job_done, &j);
    kvp__team_start(t, &j.program);
    assert_true(kvp__program_over(&j.program));
    assert_int_equal(atomic_load(&j.dones), 2);
    assert_true(kvp__team_release(t));
}

/* --- inline with a deadline --- */

static uint64_t fake_now;
static uint64_t fake_clock(void *user) { return (void)user, fake_now; }

static void slow_chunk(void *user, uint32_t i, void *scratch)
{
    (void)i, (void)scratch;
    fake_now += 100;
    ++*(uint32_t *)user;
}

static void inline_run_keeps_its_deadline(void **s)
{
    (void)s;
    kvp__hooks h = hooks;
    h.clock = fake_clock;
    uint32_t ran = 0;
    kvp__phase ph[2] = {{slow_chunk, &ran, 7}, {slow_chunk, &ran, 3}};
    kvp__program p;
    kvp__program_init(&p, ph, 2, NULL, NULL);
    fake_now = 1000;
    assert_false(kvp__program_advance(&p, &h, 1250, true, NULL));
    assert_int_equal(ran, 3);
    assert_false(kvp__program_advance(&p, &h, 1250, true, NULL)); /* late already: one chunk */
    assert_int_equal(ran, 4);
    assert_false(kvp__program_advance(&p, &h, 1700, true, NULL));
    assert_int_equal(ran, 7);
    assert_false(kvp__program_over(&p));
    assert_true(kvp__program_advance(&p, &h, 0, true, NULL));
    assert_int_equal(ran, 10);
    assert_true(kvp__program_over(&p));
}

static kvp__program cancelled_program;

static void cancelling_chunk(void *user, uint32_t i, void *scratch)
{
    (void)scratch;
    atomic_fetch_add((_Atomic uint32_t *)user, 1);
    if (i == 2) kvp__program_cancel(&cancelled_program);
}

static void note_done(void *user) { atomic_fetch_add((_Atomic uint32_t *)user, 1000); }

static void cancelled_programs_end(void **s)
{
    (void)s;
    _Atomic uint32_t ran;
    kvp__phase ph[2] = {{cancelling_chunk, &ran, 5}, {cancelling_chunk, &ran, 5}};
    atomic_store(&ran, 0);
    kvp__program_init(&cancelled_program, ph, 2, note_done, &ran);
    assert_true(kvp__program_advance(&cancelled_program, &hooks, 0, true, NULL));
    assert_int_equal(atomic_load(&ran), 1003);
    kvp__team *t = team_of(2);
    atomic_store(&ran, 0);
    kvp__program_init(&cancelled_program, ph, 2, note_done, &ran);
    kvp__team_start(t, &cancelled_program);
    wait_over(&cancelled_program);
    /* The one that cancels has run; one taken before may look late and be passed over. */
    assert_in_range(atomic_load(&ran), 1001, 1005);
    assert_true(kvp__team_release(t));
}

/* --- the pace --- */

/* A team of two of which the second, told by its scratch, is slow while `slow` says so, as if its core
 * were wanted by somebody else. */
typedef struct lame {
    void *_Atomic first;         /* the lower scratch seen */
    _Atomic bool slow;
    _Atomic uint32_t by_second;  /* chunks of this program */
    _Atomic uint32_t ran;
} lame;

static void lame_chunk(void *user, uint32_t i, void *scratch)
{
    (void)i;
    lame *l = user;
    void *first = atomic_load(&l->first);
    while (!first || (char *)scratch < (char *)first)
        if (atomic_compare_exchange_weak(&l->first, &first, scratch)) first = scratch;
    bool second = (char *)scratch > (char *)first;
    if (second) atomic_fetch_add(&l->by_second, 1);
    atomic_fetch_add(&l->ran, 1);
    usleep(second && atomic_load(&l->slow) ? 6000 : 200);
}

/* Runs programs of equal work until the second worker took part in `wanted` way for ten in a row. */
static bool comes_to(kvp__team *t, lame *l, bool with_second)
{
    enum { EACH = 6, MOST = 4000 };
    kvp__phase ph[2] = {{lame_chunk, l, EACH}, {lame_chunk, l, EACH}};
    uint32_t row = 0;
    for (uint32_t n = 0; n < MOST && row < 10; n++) {
        kvp__program p;
        atomic_store(&l->by_second, 0);
        atomic_store(&l->ran, 0);
        kvp__program_init(&p, ph, 2, NULL, NULL);
        p.work = 7;
        kvp__team_start(t, &p);
        wait_over(&p);
        assert_int_equal(atomic_load(&l->ran), 2 * EACH);
        row = (atomic_load(&l->by_second) != 0) == with_second ? row + 1 : 0;
    }
    return row == 10;
}

static void a_worker_that_holds_up_the_others_is_spared(void **s)
{
    (void)s;
    static lame l;
    kvp__team *t = team_of(2);
    atomic_store(&l.slow, false);
    assert_true(comes_to(t, &l, true));
    atomic_store(&l.slow, true);
    assert_true(comes_to(t, &l, false));
    atomic_store(&l.slow, false);
    assert_true(comes_to(t, &l, true));
    atomic_store(&l.slow, true);
    assert_true(comes_to(t, &l, false));
    assert_true(kvp__team_release(t)); /* the spare one ends too */
}

/* Programs of two batches that overlap all the time tell nothing about the pace; but the spare worker
 * must not stay away for ever because of it. */
static void a_spare_worker_comes_back_beside_other_programs(void **s)
{
    (void)s;
    static lame l;
    kvp__team *t = team_of(2);
    atomic_store(&l.slow, true);
    assert_true(comes_to(t, &l, false));
    atomic_store(&l.slow, false);
    atomic_store(&l.by_second, 0);
    kvp__phase ph = {lame_chunk, &l, 6};
    enum { AT_ONCE = 6 }; /* so many that none ends alone, however late this thread is */
    kvp__program p[AT_ONCE];
    for (int i = 0; i < AT_ONCE; i++) {
        kvp__program_init(&p[i], &ph, 1, NULL, NULL);
        p[i].work = 7;
        kvp__team_start(t, &p[i]);
    }
    for (int n = 0; n < 20000 && atomic_load(&l.by_second) == 0; n++) {
        wait_over(&p[n % AT_ONCE]);
        kvp__program_init(&p[n % AT_ONCE], &ph, 1, NULL, NULL);
        p[n % AT_ONCE].work = 7;
        kvp__team_start(t, &p[n % AT_ONCE]);
    }
    for (int i = 0; i < AT_ONCE; i++) wait_over(&p[i]);
    assert_true(atomic_load(&l.by_second) > 0);
    assert_true(kvp__team_release(t));
}

/* --- what surrounds a chunk --- */

/* By what the arithmetic does: fegetround would read the unit that our code does not use. */
typedef enum rounding { DOWN, NEAREST, UP } rounding;

static rounding round_mode(void)
{
    volatile float one = 1.0f, tiny = 0x1p-40f;
    volatile float above = one + tiny, below = -one - tiny;
    return above > one ? UP : below < -one ? DOWN : NEAREST;
}

typedef struct ambience {
    rounding rounding;
    float denormal;
    int blocked;
} ambience;

static void look_around(void *user, uint32_t i, void *scratch)
{
    (void)i, (void)scratch;
    ambience *a = user;
    volatile float tiny = 0x1p-126f;
    sigset_t set;
    pthread_sigmask(SIG_SETMASK, NULL, &set);
    a->rounding = round_mode();
    a->denormal = tiny * 0.5f;
    a->blocked = sigismember(&set, SIGINT) && sigismember(&set, SIGUSR1);
}

static void workers_block_signals_and_keep_denormals(void **s)
{
    (void)s;
    fesetround(FE_UPWARD); /* threads inherit it */
    kvp__team *t = team_of(1);
    ambience a;
    memset(&a, 0, sizeof a);
    kvp__phase ph = {look_around, &a, 1};
    kvp__program p;
    kvp__program_init(&p, &ph, 1, NULL, NULL);
    kvp__team_start(t, &p);
    wait_over(&p);
    assert_int_equal(round_mode(), UP);
    fesetround(FE_TONEAREST);
    assert_int_equal(a.rounding, NEAREST);
    assert_true(a.denormal == 0x1p-127f);
    assert_true(a.blocked);
    assert_true(kvp__team_release(t));
}

static void flush_to_zero(bool on)
{
#if defined(__x86_64__)
    unsigned u = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(on ? u | 0x8040u : u & ~0x8040u);
#elif defined(__aarch64__)
    uint64_t u;
    __asm__ volatile("mrs %0, fpcr" : "=r"(u));
    u = on ? u | 1ull << 24 : u & ~(1ull << 24);
    __asm__ volatile("msr fpcr, %0" : : "r"(u));
#else
    (void)on;
#endif
}

static void inline_runs_put_the_hosts_state_back(void **s)
{
    (void)s;
    ambience a;
    memset(&a, 0, sizeof a);
    kvp__phase ph = {look_around, &a, 1};
    kvp__program p;
    kvp__program_init(&p, &ph, 1, NULL, NULL);
    fesetround(FE_DOWNWARD);
    flush_to_zero(true);
    assert_true(kvp__program_advance(&p, &hooks, 0, true, NULL));
    volatile float tiny = 0x1p-126f;
    float outside = tiny * 0.5f;
    rounding outer = round_mode();
    flush_to_zero(false);
    fesetround(FE_TONEAREST);
    assert_int_equal(outer, DOWN);
#if defined(__x86_64__) || defined(__aarch64__)
    assert_true(outside == 0.0f);
#else
    (void)outside;
#endif
    assert_int_equal(a.rounding, NEAREST);
    assert_true(a.denormal == 0x1p-127f);
}

/* --- refusals --- */

static int allocations_left;
static void *scarce(void *user, size_t size, size_t align)
{
    (void)user;
    return allocations_left-- > 0 ? aligned_alloc(align, (size + align - 1) / align * align) : NULL;
}
static void give_back(void *user, void *p, size_t size, size_t align)
{
    (void)user, (void)size, (void)align;
    free(p);
}

static void creation_fails_cleanly(void **s)
{
    (void)s;
    kvp__hooks h = hooks;
    h.alloc = scarce;
    h.free = give_back;
    kvp_error err;
    for (int n = 0; n < 2; n++) {
        memset(&err, 0, sizeof err);
        err.size = sizeof err;
        kvp__team *t = NULL;
        allocations_left = n;
        assert_int_equal(kvp__team_create(&t, &h, 2, 64, &err), KVP_ERR_NO_MEMORY);
        assert_null(t);
        assert_true(err.text[0] != 0);
    }
    kvp__team *t = NULL;
    assert_int_equal(kvp__team_create(&t, &hooks, -1, 64, NULL), KVP_ERR_INVALID_ARG);
    assert_int_equal(kvp__team_create(&t, &hooks, 100000, 64, NULL), KVP_ERR_INVALID_ARG);
    assert_null(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(phases_are_barriers),
        cmocka_unit_test(programs_are_freed_when_over),
        cmocka_unit_test(caller_helps),
        cmocka_unit_test(many_programs_at_once),
        cmocka_unit_test(several_domains_share_a_team),
        cmocka_unit_test(references_are_counted),
        cmocka_unit_test(empty_programs_end),
        cmocka_unit_test(inline_run_keeps_its_deadline),
        cmocka_unit_test(cancelled_programs_end),
        cmocka_unit_test(workers_block_signals_and_keep_denormals),
        cmocka_unit_test(inline_runs_put_the_hosts_state_back),
        cmocka_unit_test(creation_fails_cleanly),
        cmocka_unit_test(a_worker_that_holds_up_the_others_is_spared),
        cmocka_unit_test(a_spare_worker_comes_back_beside_other_programs),
    };
    return cmocka_run_group_tests_name("team", tests, setup, NULL);
}
