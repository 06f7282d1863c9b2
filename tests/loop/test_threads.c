/*
 * Other threads beside the host's loop: the race between arming the fd and going to sleep, cancel
 * and destroy from elsewhere, a second thread inside the domain, two domains on one team. Written
 * to be run under a thread sanitizer as well.
 */
#define _GNU_SOURCE
#include "rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <cmocka.h>

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

/* --- the race between arming and sleeping --- */

typedef struct waker {
    kvp_batch *batch;
    atomic_bool stop;
    atomic_uint asked; /* wakeups made */
} waker;

static void *wake_often(void *arg)
{
    waker *w = arg;
    unsigned pause = 1;
    while (!atomic_load(&w->stop)) {
        kvp_wakeup(w->batch);
        atomic_fetch_add(&w->asked, 1);
        pause = (pause * 37 + 11) % 400;
        usleep(pause);
    }
    return NULL;
}

/* Many short sequences; the host sleeps in poll as long as it may. A lost notification shows as a
 * sleep that runs into its five seconds. */
static void no_notification_is_lost(void **state)
{
    rig r;
    waker w;
    pthread_t thread;
    unsigned rounds = 0;
    (void)state;
    rig_open(&r, 2);
    w.batch = r.batch;
    atomic_init(&w.stop, false);
    atomic_init(&w.asked, 0);
    pthread_create(&thread, NULL, wake_often, &w);
    for (; rounds < 150; rounds++) {
        unsigned endings[2] = {0};
        kvp_seq *seq = rig_add(&r, 1, 4 + rounds % 9, 3);
        while (!endings[1]) {
            struct pollfd p = {.fd = rig_fd(&r), .events = POLLIN};
            int32_t timeout;
            assert_true(kvp_step(r.batch) >= 0);
            rig_take(&r, endings, NULL);
            if (endings[1]) break;
            kvp_batch_timeout_ms(r.batch, &timeout);
            if (timeout != 0 && poll(&p, 1, 5000) == 0) fail_msg("a notification was lost");
        }
        kvp_seq_destroy(seq);
    }
    atomic_store(&w.stop, true);
    pthread_join(thread, NULL);
    assert_true(atomic_load(&w.asked) > 0);
    assert_int_equal(kvp_pool_check(r.pool), KVP_OK);
    rig_close(&r);
}

/* The same without anybody who wakes: only the workers' completions can end the sleep. */
static void completions_alone_end_every_sleep(void **state)
{
    rig r;
    (void)state;
    rig_open(&r, 2);
    for (unsigned round = 0; round < 150; round++) {
        unsigned endings[2] = {0};
        kvp_seq *seq = rig_add(&r, 1, 4 + round % 9, 3);
        while (!endings[1]) {
            uint64_t before = rig_now();
            kvp_status status = kvp_step(r.batch);
            assert_true(status >= 0);
            rig_take(&r, endings, NULL);
            if (status == KVP_AGAIN && !endings[1]) {
                kvp_wait(r.batch, 5000);
                if (rig_now() - before > 4500000000ull) fail_msg("a completion was lost");
            }
        }
        kvp_seq_destroy(seq);
    }
    rig_close(&r);
}

/* --- cancel and destroy from another thread --- */

static void *cancel_soon(void *arg)
{
    usleep(3000);
    assert_int_equal(kvp_seq_cancel(arg), KVP_OK);
    return NULL;
}

static void cancel_from_another_thread(void **state)
{
    rig r;
    (void)state;
    rig_open(&r, 2);
    for (unsigned round = 0; round < 20; round++) {
        unsigned endings[3] = {0};
        pthread_t thread;
        kvp_seq *seq = rig_add(&r, 1, 6, 3500), *other = rig_add(&r, 2, 6, 5);
        pthread_create(&thread, NULL, cancel_soon, seq);
        rig_finish(&r, endings, NULL);
        pthread_join(thread, NULL);
        assert_int_equal(endings[1], 1);
        assert_int_equal(endings[2], 1);
        kvp_seq_destroy(seq);
        kvp_seq_destroy(other);
    }
    assert_int_equal(kvp_pool_check(r.pool), KVP_OK);
    rig_close(&r);
}

static void *destroy_soon(void *arg)
{
    usleep(2000);
    kvp_seq_destroy(arg);
    return NULL;
}

static void destroy_from_another_thread(void **state)
{
    rig r;
    kvp_pool_stats stats = {.size = sizeof stats};
    (void)state;
    rig_open(&r, 2);
    for (unsigned round = 0; round < 20; round++) {
        unsigned endings[3] = {0};
        pthread_t thread;
        kvp_seq *gone = rig_add(&r, 1, 6, 3500), *other = rig_add(&r, 2, 6, 30);
        pthread_create(&thread, NULL, destroy_soon, gone);
        rig_finish(&r, endings, NULL);
        pthread_join(thread, NULL);
        assert_int_equal(endings[1], 0);
        assert_int_equal(endings[2], 1);
        kvp_seq_destroy(other);
    }
    rig_finish(&r, NULL, NULL);
    assert_int_equal(kvp_pool_get_stats(r.pool, &stats), KVP_OK);
    assert_int_equal(stats.sequences, 0);
    assert_int_equal(stats.used, 0);
    assert_int_equal(kvp_pool_check(r.pool), KVP_OK);
    rig_close(&r);
}

/* --- a second thread inside --- */

typedef struct intruder {
    kvp_seq *seq;
    atomic_bool stop;
    unsigned refused, answered, other;
} intruder;

static void *intrude(void *arg)
{
    intruder *in = arg;
    do { /* at least once, however late this thread begins */
        kvp_seq_info info = {.size = sizeof info};
        kvp_status status = kvp_seq_get_info(in->seq, &info);
        if (status == KVP_OK) in->answered++;
        else if (status == KVP_ERR_THREAD) in->refused++;
        else in->other++;
    } while (!atomic_load(&in->stop));
    return NULL;
}

/* Either of the two may be refused; nobody is hurt, and the work comes to its end. */
static void a_second_thread_is_refused(void **state)
{
    rig r;
    intruder in = {0};
    pthread_t thread;
    unsigned ended = 0;
    uint64_t start = rig_now();
    (void)state;
    rig_open(&r, KVP_THREADS_INLINE);
    in.seq = rig_add(&r, 1, 200, 60);
    atomic_init(&in.stop, false);
    pthread_create(&thread, NULL, intrude, &in);
    while (!ended) {
        kvp_event e = {.size = sizeof e};
        kvp_status status = kvp_step(r.batch);
        assert_true(status >= 0 || status == KVP_ERR_THREAD);
        while ((status = kvp_next_event(r.batch, &e)) == KVP_OK)
            if (e.kind == KVP_EVENT_ENDED) ended++;
        assert_true(status == KVP_AGAIN || status == KVP_ERR_THREAD);
        if (rig_now() - start > RIG_PATIENCE_MS * 1000000ull) fail_msg("no end in sight");
    }
    atomic_store(&in.stop, true);
    pthread_join(thread, NULL);
    assert_int_equal(ended, 1);
    assert_int_equal(in.other, 0);
    assert_true(in.answered + in.refused > 0);
    kvp_seq_destroy(in.seq);
    rig_close(&r);
}

/* --- domains on their own threads, one model and one team between them --- */

typedef struct lane {
    kvp_model *model;
    kvp_team *team;
    pthread_barrier_t *made;
    int32_t tokens[40];
    size_t n;
    kvp_status status;
} lane;

static void *drive_lane(void *arg)
{
    lane *l = arg;
    kvp_pool_options po = {.size = sizeof po, .blocks = 64};
    kvp_batch_options bo = {.size = sizeof bo, .team = l->team};
    rig r = {.model = l->model};
    l->status = kvp_pool_create(l->model, &po, &r.pool, NULL);
    if (l->status == KVP_OK) l->status = kvp_batch_create(r.pool, &bo, &r.batch, NULL);
    pthread_barrier_wait(l->made);
    if (l->status == KVP_OK) {
        kvp_seq *seq = rig_add(&r, 1, 20, 20);
        rig_finish(&r, NULL, NULL);
        l->status = kvp_seq_get_tokens(seq, 0, l->tokens, 40, &l->n);
        kvp_seq_destroy(seq);
    }
    kvp_batch_destroy(r.batch);
    kvp_pool_destroy(r.pool);
    return NULL;
}

static void domains_share_a_model_and_a_team(void **state)
{
    enum { LANES = 3 };
    rig r;
    kvp_team_options to = {.size = sizeof to, .threads = 2};
    kvp_team *team = NULL;
    lane lanes[LANES] = {{0}};
    pthread_t threads[LANES];
    pthread_barrier_t made;
    (void)state;
    rig_open(&r, 0);
    assert_int_equal(kvp_team_create(&to, &team, NULL), KVP_OK);
    pthread_barrier_init(&made, NULL, LANES + 1);
    for (int i = 0; i < LANES; i++) {
        lanes[i].made = &made;
        lanes[i].model = r.model;
        lanes[i].team = team;
        pthread_create(&threads[i], NULL, drive_lane, &lanes[i]);
    }
    pthread_barrier_wait(&made);
    kvp_team_destroy(team); /* the batches keep it alive */
    for (int i = 0; i < LANES; i++) pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&made);
    for (int i = 0; i < LANES; i++) {
        assert_int_equal(lanes[i].status, KVP_OK);
        assert_int_equal(lanes[i].n, 40);
        assert_memory_equal(lanes[i].tokens, lanes[0].tokens, sizeof lanes[0].tokens);
    }
    rig_close(&r);
}

/* --- calls that race with the end of their own handle --- */

typedef struct prey {
    _Atomic(kvp_seq *) seq;    /* destroyed and made anew all the time */
    _Atomic(kvp_batch *) batch;
    atomic_bool stop;
    atomic_uint answered, refused, wrong;
} prey;

static void note_answer(prey *p, kvp_status s)
{
    if (s == KVP_OK || s == KVP_ERR_THREAD)
        atomic_fetch_add(&p->answered, 1);
    else
        atomic_fetch_add(s == KVP_ERR_INVALID_HANDLE ? &p->refused : &p->wrong, 1);
}

/* The race has been seen to go either way: the other thread may begin late. */
static bool both_ways(prey *p) { return atomic_load(&p->answered) && atomic_load(&p->refused); }

static void *use_what_is_dying(void *arg)
{
    prey *p = arg;
    kvp_seq_info info = {.size = sizeof info};
    kvp_error e = {.size = sizeof e};
    for (unsigned i = 0; !atomic_load(&p->stop); i++) {
        kvp_seq *seq = atomic_load(&p->seq);
        switch (i % 4) {
        case 0: note_answer(p, kvp_seq_cancel(seq)); break;
        case 1: note_answer(p, kvp_seq_get_info(seq, &info)); break;
        case 2: kvp_seq_last_error(seq, &e); break;
        default: kvp_seq_destroy(seq);
        }
    }
    return NULL;
}

/* Two threads at once destroy a sequence and make other calls on it: each call comes before its end
 * or is refused. */
static void calls_race_with_the_end_of_their_handle(void **state)
{
    rig r;
    prey p = {0};
    pthread_t thread;
    (void)state;
    rig_open(&r, 2);
    kvp_seq *seq = rig_add(&r, 1, 6, 100);
    atomic_init(&p.seq, seq);
    pthread_create(&thread, NULL, use_what_is_dying, &p);
    for (unsigned round = 0; round < 3000 || !both_ways(&p); round++) {
        kvp_seq *old = seq;
        kvp_seq_options o = {.size = sizeof o, .max_tokens = 100};
        kvp_status s = kvp_seq_create(r.pool, &o, &seq, NULL);
        if (s == KVP_OK) atomic_store(&p.seq, seq);
        assert_true(s == KVP_OK || s == KVP_ERR_THREAD);
        if (round % 3 == 0) (void)kvp_step(r.batch);
        kvp_seq_destroy(old);
        rig_take(&r, NULL, NULL);
    }
    atomic_store(&p.stop, true);
    pthread_join(thread, NULL);
    kvp_seq_destroy(seq);
    assert_int_equal(atomic_load(&p.wrong), 0);
    assert_int_equal(kvp_pool_check(r.pool), KVP_OK);
    kvp_pool_stats stats = {.size = sizeof stats};
    assert_int_equal(kvp_pool_get_stats(r.pool, &stats), KVP_OK);
    assert_int_equal(stats.sequences, 0);
    rig_close(&r);
}

static void *wake_what_is_dying(void *arg)
{
    prey *p = arg;
    kvp_batch_stats stats = {.size = sizeof stats};
    while (!atomic_load(&p->stop)) {
        kvp_batch *b = atomic_load(&p->batch);
        note_answer(p, kvp_wakeup(b));
        note_answer(p, kvp_batch_get_stats(b, &stats));
    }
    return NULL;
}

static void wakeups_race_with_the_end_of_the_batch(void **state)
{
    rig r;
    prey p = {0};
    pthread_t thread;
    (void)state;
    rig_open(&r, KVP_THREADS_INLINE);
    atomic_init(&p.batch, r.batch);
    pthread_create(&thread, NULL, wake_what_is_dying, &p);
    kvp_batch_options o = {.size = sizeof o, .threads = KVP_THREADS_INLINE, .token_budget = 8};
    for (unsigned round = 0; round < 2000 || !both_ways(&p); round++) {
        kvp_batch_destroy(r.batch);
        assert_int_equal(kvp_batch_create(r.pool, &o, &r.batch, NULL), KVP_OK);
        atomic_store(&p.batch, r.batch);
    }
    atomic_store(&p.stop, true);
    pthread_join(thread, NULL);
    assert_int_equal(atomic_load(&p.wrong), 0);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_notification_is_lost),
        cmocka_unit_test(completions_alone_end_every_sleep),
        cmocka_unit_test(cancel_from_another_thread),
        cmocka_unit_test(destroy_from_another_thread),
        cmocka_unit_test(a_second_thread_is_refused),
        cmocka_unit_test(domains_share_a_model_and_a_team),
        cmocka_unit_test(calls_race_with_the_end_of_their_handle),
        cmocka_unit_test(wakeups_race_with_the_end_of_the_batch),
    };
    return cmocka_run_group_tests_name("loop: threads", tests, NULL, NULL);
}
