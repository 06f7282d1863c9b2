/*
 * The batch's descriptor, its deadline and its wakeup, as a host with poll or epoll meets them.
 */
#define _GNU_SOURCE
#include "rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/time.h>
#include <unistd.h>

static void one_fd_for_life_with_the_right_flags(void **state)
{
    rig r;
    int fd;
    (void)state;
    rig_open(&r, 0);
    fd = rig_fd(&r);
    assert_true(fd >= 0);
    assert_int_equal(rig_fd(&r), fd);
    assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    assert_true(fcntl(fd, F_GETFL) & O_NONBLOCK);
    rig_close(&r);
    assert_int_equal(fcntl(fd, F_GETFD), -1);
    assert_int_equal(errno, EBADF);
}

static void quiet_when_idle(void **state)
{
    rig r;
    uint64_t deadline = 0;
    int32_t timeout = 7;
    (void)state;
    rig_open(&r, 0);
    assert_int_equal(kvp_step(r.batch), KVP_DONE);
    assert_false(rig_readable(&r));
    assert_int_equal(kvp_batch_deadline(r.batch, &deadline), KVP_OK);
    assert_true(deadline == UINT64_MAX);
    assert_int_equal(kvp_batch_timeout_ms(r.batch, &timeout), KVP_OK);
    assert_int_equal(timeout, -1);
    rig_close(&r);
}

static void work_makes_it_readable_and_stays_so(void **state)
{
    rig r;
    kvp_seq *seq;
    int32_t timeout = -1;
    (void)state;
    rig_open(&r, 0);
    assert_int_equal(kvp_step(r.batch), KVP_DONE);
    assert_false(rig_readable(&r));
    seq = rig_add(&r, 1, 5, 4);
    assert_true(rig_readable(&r));
    assert_true(rig_readable(&r));
    assert_int_equal(kvp_batch_timeout_ms(r.batch, &timeout), KVP_OK);
    assert_int_equal(timeout, 0);
    rig_finish(&r, NULL, NULL);
    assert_false(rig_readable(&r));
    kvp_seq_destroy(seq);
    rig_close(&r);
}

/* A host that never looks at what kvp_step returned, only at the fd and the timeout. */
static void poll_alone_is_enough_with(int32_t threads)
{
    rig r;
    kvp_seq *seqs[4];
    unsigned endings[4] = {0}, tokens[4] = {0}, ended = 0;
    uint64_t start = rig_now();
    rig_open(&r, threads);
    for (uint64_t i = 0; i < 4; i++) seqs[i] = rig_add(&r, i, 10 + 90 * (size_t)i, 12);
    while (ended < 4) {
        struct pollfd p = {.fd = rig_fd(&r), .events = POLLIN};
        int32_t timeout;
        assert_true(kvp_step(r.batch) >= 0);
        rig_take(&r, endings, tokens);
        assert_int_equal(kvp_batch_timeout_ms(r.batch, &timeout), KVP_OK);
        ended = endings[0] + endings[1] + endings[2] + endings[3];
        if (ended == 4) break;
        if (timeout < 0 || timeout > 5000) {
            if (poll(&p, 1, 5000) == 0) fail_msg("nothing made the fd readable");
        } else {
            poll(&p, 1, timeout);
        }
        if (rig_now() - start > RIG_PATIENCE_MS * 1000000ull) fail_msg("no end in sight");
    }
    for (int i = 0; i < 4; i++) {
        assert_int_equal(endings[i], 1);
        assert_int_equal(tokens[i], 12);
        kvp_seq_destroy(seqs[i]);
    }
    rig_close(&r);
}

static void poll_alone_is_enough_inline(void **state)
{
    (void)state;
    poll_alone_is_enough_with(KVP_THREADS_INLINE);
}

static void poll_alone_is_enough_with_workers(void **state)
{
    (void)state;
    poll_alone_is_enough_with(2);
}

static void an_epoll_loop_shares_with_others(void **state)
{
    rig r;
    kvp_seq *seq;
    int ep = epoll_create1(EPOLL_CLOEXEC), pipes[2], heard = 0;
    unsigned endings[2] = {0};
    struct epoll_event e = {.events = EPOLLIN};
    uint64_t start = rig_now();
    (void)state;
    rig_open(&r, 0);
    assert_int_equal(pipe(pipes), 0);
    e.data.fd = rig_fd(&r);
    assert_int_equal(epoll_ctl(ep, EPOLL_CTL_ADD, e.data.fd, &e), 0);
    e.data.fd = pipes[0];
    assert_int_equal(epoll_ctl(ep, EPOLL_CTL_ADD, pipes[0], &e), 0);
    seq = rig_add(&r, 1, 300, 20);
    assert_int_equal(write(pipes[1], "x", 1), 1);
    while (!endings[1] || !heard) {
        struct epoll_event got[4];
        int32_t timeout;
        int n;
        assert_true(kvp_step(r.batch) >= 0);
        rig_take(&r, endings, NULL);
        kvp_batch_timeout_ms(r.batch, &timeout);
        n = epoll_wait(ep, got, 4, endings[1] ? 0 : timeout < 0 ? 5000 : timeout);
        for (int i = 0; i < n; i++) {
            char c;
            if (got[i].data.fd == pipes[0]) heard += (int)read(pipes[0], &c, 1);
        }
        if (rig_now() - start > RIG_PATIENCE_MS * 1000000ull) fail_msg("no end in sight");
    }
    assert_int_equal(heard, 1);
    assert_int_equal(endings[1], 1);
    kvp_seq_destroy(seq);
    close(pipes[0]);
    close(pipes[1]);
    close(ep);
    rig_close(&r);
}

static void events_left_alone_do_not_make_it_readable(void **state)
{
    rig r;
    kvp_seq *seq;
    unsigned endings[2] = {0};
    (void)state;
    rig_open(&r, 0);
    seq = rig_add(&r, 1, 5, 8);
    rig_settle(&r);
    assert_int_equal(kvp_step(r.batch), KVP_EVENTS);
    assert_false(rig_readable(&r));
    rig_take(&r, endings, NULL);
    assert_int_equal(endings[1], 1);
    assert_int_equal(kvp_step(r.batch), KVP_DONE);
    kvp_seq_destroy(seq);
    rig_close(&r);
}

static void append_resume_and_cancel_make_it_readable(void **state)
{
    rig r;
    kvp_sampling host = {.size = sizeof host, .mode = KVP_SAMPLE_HOST};
    kvp_seq_options o = {.size = sizeof o, .sampling = &host};
    const int32_t token = 3;
    kvp_seq *seq;
    (void)state;
    rig_open(&r, 0);
    seq = rig_seq(&r, 1, 5, &o);
    assert_int_equal(kvp_batch_add(r.batch, seq), KVP_OK);
    rig_finish(&r, NULL, NULL);
    assert_false(rig_readable(&r));

    assert_int_equal(kvp_seq_append(seq, &token, 1), KVP_OK);
    assert_true(rig_readable(&r));
    assert_int_equal(kvp_seq_pause(seq), KVP_OK);
    rig_finish(&r, NULL, NULL);
    assert_false(rig_readable(&r));

    assert_int_equal(kvp_seq_resume(seq), KVP_OK);
    assert_true(rig_readable(&r));
    rig_finish(&r, NULL, NULL);
    assert_false(rig_readable(&r));

    assert_int_equal(kvp_seq_cancel(seq), KVP_OK);
    assert_true(rig_readable(&r));
    kvp_seq_destroy(seq);
    rig_close(&r);
}

/* --- wakeup --- */

static void *wake_soon(void *arg)
{
    usleep(30000);
    assert_int_equal(kvp_wakeup(arg), KVP_OK);
    return NULL;
}

static void another_thread_ends_a_wait(void **state)
{
    rig r;
    pthread_t thread;
    (void)state;
    rig_open(&r, 0);
    assert_int_equal(kvp_step(r.batch), KVP_DONE);
    pthread_create(&thread, NULL, wake_soon, r.batch);
    assert_int_equal(kvp_wait(r.batch, -1), KVP_OK);
    pthread_join(thread, NULL);
    assert_true(rig_readable(&r));
    assert_int_equal(kvp_step(r.batch), KVP_DONE);
    assert_false(rig_readable(&r));
    rig_close(&r);
}

static void a_wakeup_before_the_wait_is_not_lost(void **state)
{
    rig r;
    uint64_t start;
    (void)state;
    rig_open(&r, 0);
    assert_int_equal(kvp_step(r.batch), KVP_DONE);
    for (int i = 0; i < 1000; i++) assert_int_equal(kvp_wakeup(r.batch), KVP_OK);
    start = rig_now();
    assert_int_equal(kvp_wait(r.batch, RIG_PATIENCE_MS), KVP_OK);
    assert_true(rig_now() - start < RIG_PATIENCE_MS * 500000ull);
    assert_int_equal(kvp_step(r.batch), KVP_DONE);
    assert_false(rig_readable(&r)); /* all thousand drained by one step */
    rig_close(&r);
}

static kvp_batch *volatile handler_batch;
static volatile sig_atomic_t handled;

static void on_alarm(int number)
{
    (void)number;
    handled++;
    if (handler_batch) kvp_wakeup(handler_batch);
}

static void alarm_soon(void)
{
    struct sigaction action = {.sa_handler = on_alarm};
    struct itimerval once = {{0, 0}, {0, 30000}};
    handled = 0;
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &once, NULL);
}

static void a_signal_handler_may_wake(void **state)
{
    rig r;
    (void)state;
    rig_open(&r, 0);
    assert_int_equal(kvp_step(r.batch), KVP_DONE);
    handler_batch = r.batch;
    alarm_soon();
    assert_int_equal(kvp_wait(r.batch, -1), KVP_OK);
    handler_batch = NULL;
    assert_int_equal(handled, 1);
    assert_true(rig_readable(&r));
    rig_close(&r);
}

static void a_signal_alone_ends_a_wait(void **state)
{
    rig r;
    (void)state;
    rig_open(&r, 0);
    assert_int_equal(kvp_step(r.batch), KVP_DONE);
    alarm_soon();
    assert_int_equal(kvp_wait(r.batch, -1), KVP_OK); /* workers block signals: it comes here */
    assert_int_equal(handled, 1);
    assert_false(rig_readable(&r));
    rig_close(&r);
}

static void a_wait_ends_in_time(void **state)
{
    rig r;
    uint64_t start, took;
    (void)state;
    rig_open(&r, 0);
    assert_int_equal(kvp_step(r.batch), KVP_DONE);
    start = rig_now();
    assert_int_equal(kvp_wait(r.batch, 30), KVP_OK);
    took = rig_now() - start;
    assert_true(took >= 29000000ull && took < 5000000000ull);
    rig_close(&r);
}

static void it_works_without_an_fd_too(void **state)
{
    rig r;
    kvp_seq *seq;
    unsigned endings[2] = {0};
    uint64_t start = rig_now();
    (void)state;
    rig_open(&r, 0);
    seq = rig_add(&r, 1, 40, 8);
    while (!endings[1]) {
        kvp_status status = kvp_step(r.batch);
        assert_true(status >= 0);
        rig_take(&r, endings, NULL);
        if (status == KVP_AGAIN) assert_int_equal(kvp_wait(r.batch, 5000), KVP_OK);
        if (rig_now() - start > RIG_PATIENCE_MS * 1000000ull) fail_msg("no end in sight");
    }
    kvp_seq_destroy(seq);
    rig_close(&r);
}

/* The fd alone tells that a step has landed: the deadline, which is there for lost devices, would tell
 * 100 ms later. */
static void a_step_that_lands_rings(void **state)
{
    rig r;
    unsigned waits = 0;
    (void)state;
    rig_open(&r, 2);
    for (unsigned round = 0; round < 10; round++) {
        unsigned endings[2] = {0};
        kvp_seq *seq = rig_add(&r, 1, 200, 3);
        while (!endings[1]) {
            struct pollfd p = {.fd = rig_fd(&r), .events = POLLIN};
            kvp_status status = kvp_step(r.batch);
            assert_true(status >= 0);
            rig_take(&r, endings, NULL);
            if (status != KVP_AGAIN) continue;
            waits++;
            if (poll(&p, 1, 5000) == 0) fail_msg("a step has landed, or never will, in silence");
        }
        kvp_seq_destroy(seq);
    }
    assert_true(waits > 0);
    rig_close(&r);
}

/* A clock that wakes the batch up whenever the library looks at it. */
typedef struct alarm_clock {
    kvp_batch *batch;
    unsigned rung;
} alarm_clock;

static uint64_t look_and_wake(void *user)
{
    alarm_clock *c = user;
    if (c->batch && kvp_wakeup(c->batch) == KVP_OK) c->rung++;
    return 1000;
}

/* What rings while a step is at work was not seen by that step: the fd must still be readable. */
static void a_wakeup_during_a_step_is_kept(void **state)
{
    (void)state;
    alarm_clock clock = {0};
    kvp_layer_group group = {.layers = 1, .kv_heads = 1, .key_dim = 8, .value_dim = 8,
                             .query_heads = 1};
    kvp_geometry g = {.size = sizeof g, .n_groups = 1, .groups = &group};
    kvp_hooks hooks = {.size = sizeof hooks, .user = &clock, .clock = look_and_wake};
    kvp_model_options mo = {.size = sizeof mo, .hooks = &hooks};
    rig r = {0};
    assert_int_equal(kvp_model_create(&g, &mo, &r.model, NULL), KVP_OK);
    assert_int_equal(kvp_pool_create(r.model, NULL, &r.pool, NULL), KVP_OK);
    assert_int_equal(kvp_batch_create(r.pool, NULL, &r.batch, NULL), KVP_OK);
    assert_int_equal(kvp_step(r.batch), KVP_DONE);
    assert_false(rig_readable(&r));
    clock.batch = r.batch;
    assert_int_equal(kvp_step(r.batch), KVP_DONE);
    clock.batch = NULL;
    assert_true(clock.rung > 0);
    assert_true(rig_readable(&r));
    assert_int_equal(kvp_step(r.batch), KVP_DONE);
    assert_false(rig_readable(&r));
    rig_close(&r);
}

/* A host whose allocator looks at the pool: also while a destroy is being settled. */
typedef struct nosy {
    kvp_pool *pool;
    kvp_status answer;
    bool asked;
} nosy;

static void *nosy_alloc(void *user, size_t size, size_t align)
{
    void *p = NULL;
    (void)user;
    return posix_memalign(&p, align, size) ? NULL : p;
}

static void nosy_free(void *user, void *p, size_t size, size_t align)
{
    nosy *n = user;
    (void)size;
    (void)align;
    if (n->pool && !n->asked) {
        n->asked = true;
        n->answer = kvp_pool_check(n->pool);
    }
    free(p);
}

static void a_hook_in_a_destroy_is_refused_too(void **state)
{
    (void)state;
    nosy n = {0};
    kvp_layer_group group = {.layers = 1, .kv_heads = 1, .key_dim = 8, .value_dim = 8,
                             .query_heads = 1};
    kvp_geometry g = {.size = sizeof g, .n_groups = 1, .groups = &group};
    kvp_hooks hooks = {.size = sizeof hooks, .user = &n, .alloc = nosy_alloc, .free = nosy_free};
    kvp_model_options mo = {.size = sizeof mo, .hooks = &hooks};
    rig r = {0};
    kvp_seq *seq = NULL;
    assert_int_equal(kvp_model_create(&g, &mo, &r.model, NULL), KVP_OK);
    assert_int_equal(kvp_pool_create(r.model, NULL, &r.pool, NULL), KVP_OK);
    assert_int_equal(kvp_seq_create(r.pool, NULL, &seq, NULL), KVP_OK);
    n.pool = r.pool;
    kvp_seq_destroy(seq);
    n.pool = NULL;
    assert_true(n.asked);
    assert_int_equal(n.answer, KVP_ERR_REENTRANT);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_fd_for_life_with_the_right_flags),
        cmocka_unit_test(quiet_when_idle),
        cmocka_unit_test(work_makes_it_readable_and_stays_so),
        cmocka_unit_test(poll_alone_is_enough_inline),
        cmocka_unit_test(poll_alone_is_enough_with_workers),
        cmocka_unit_test(an_epoll_loop_shares_with_others),
        cmocka_unit_test(events_left_alone_do_not_make_it_readable),
        cmocka_unit_test(append_resume_and_cancel_make_it_readable),
        cmocka_unit_test(another_thread_ends_a_wait),
        cmocka_unit_test(a_wakeup_before_the_wait_is_not_lost),
        cmocka_unit_test(a_signal_handler_may_wake),
        cmocka_unit_test(a_signal_alone_ends_a_wait),
        cmocka_unit_test(a_wait_ends_in_time),
        cmocka_unit_test(a_step_that_lands_rings),
        cmocka_unit_test(a_hook_in_a_destroy_is_refused_too),
        cmocka_unit_test(a_wakeup_during_a_step_is_kept),
        cmocka_unit_test(it_works_without_an_fd_too),
    };
    return cmocka_run_group_tests_name("loop: fd", tests, NULL, NULL);
}
