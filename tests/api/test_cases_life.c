/*
 * Cases of the field about lifetime and threads, through the public interface (B39, B115, B119), and
 * our own: destroy in any order and from any thread, a second thread inside, fork, lent memory.
 */
#define _GNU_SOURCE
#include "world.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

static uint8_t *file;
static size_t file_bytes;

static int make_file(void **state)
{
    (void)state;
    file = gw_tiny(&(gw_model){0}, &file_bytes);
    return 0;
}

static int free_file(void **state)
{
    (void)state;
    free(file);
    world_forget();
    return 0;
}

/* Counting hooks: what is out, and whether the last word was said. */
typedef struct ledger {
    _Atomic int64_t pieces, bytes; /* out now */
    _Atomic int64_t calls;         /* for memory, ever */
    _Atomic int released;
} ledger;

static void *ledger_alloc(void *user, size_t size, size_t align)
{
    ledger *l = user;
    void *p = NULL;
    if (posix_memalign(&p, align, size)) return NULL;
    atomic_fetch_add(&l->pieces, 1);
    atomic_fetch_add(&l->calls, 1);
    atomic_fetch_add(&l->bytes, (int64_t)size);
    return p;
}

static void ledger_free(void *user, void *p, size_t size, size_t align)
{
    (void)align;
    ledger *l = user;
    atomic_fetch_sub(&l->pieces, 1);
    atomic_fetch_sub(&l->bytes, (int64_t)size);
    free(p);
}

static void ledger_released(void *user) { atomic_fetch_add(&((ledger *)user)->released, 1); }

static kvp_hooks ledger_hooks(ledger *l)
{
    return (kvp_hooks){.size = sizeof(kvp_hooks), .user = l, .alloc = ledger_alloc,
                       .free = ledger_free, .released = ledger_released};
}

static kvp_model *ledger_model(ledger *l)
{
    kvp_hooks h = ledger_hooks(l);
    kvp_model_options o = {.size = sizeof o, .hooks = &h};
    kvp_model *m = NULL;
    assert_int_equal(kvp_model_open_memory(file, file_bytes, &o, &m, NULL), KVP_OK);
    return m;
}

static void expect_all_back(ledger *l)
{
    assert_int_equal(l->pieces, 0);
    assert_int_equal(l->bytes, 0);
    assert_int_equal(l->released, 1);
}

/* B39, and destroy in any order: the last one takes everything along. */
static void case_b39(void **state)
{
    (void)state;
    for (int order = 0; order < 24; order++) {
        for (int32_t threads = KVP_THREADS_INLINE; threads <= 1; threads += 2) {
            ledger l = {0};
            kvp_model *m = ledger_model(&l);
            kvp_pool *p = world_pool(m, 32, 4);
            kvp_batch *b = world_batch(p, &(kvp_batch_options){.size = sizeof(kvp_batch_options),
                                                               .threads = threads});
            kvp_seq *s = NULL;
            for (uint64_t i = 0; i < 10; i++) { /* ten cached prefixes */
                int32_t tokens[9];
                world_tokens(tokens, 9, i, 64);
                kvp_seq_destroy(s);
                s = world_seq(p, tokens, 9, i, KVP_SAMPLE_LIBRARY, 50);
                assert_int_equal(kvp_batch_add(b, s), KVP_OK);
                if (i < 9) world_run(b, NULL);
            }
            (void)kvp_step(b); /* in flight when the first is destroyed */
            int left[4] = {0, 1, 2, 3}, code = order;
            for (int n = 4; n; n--) {
                int pick = code % n;
                code /= n;
                switch (left[pick]) {
                case 0: kvp_model_destroy(m); break;
                case 1: kvp_pool_destroy(p); break;
                case 2: kvp_batch_destroy(b); break;
                default: kvp_seq_destroy(s); break;
                }
                left[pick] = left[n - 1];
                assert_int_equal(l.released, n == 1);
            }
            expect_all_back(&l);
        }
    }
}

/* B115: two pools on one model, two models, two threads: each as if it were alone. */
static void *run_alone(void *arg)
{
    kvp_model *m = arg;
    int32_t prompt[10];
    intptr_t wrong = 0;
    for (uint64_t i = 0; i < 30; i++) {
        kvp_pool_options po = {.size = sizeof po, .blocks = 16, .block_tokens = 8};
        kvp_batch_options bo = {.size = sizeof bo, .threads = i % 2 ? 1 : KVP_THREADS_INLINE};
        kvp_sampling greedy = {.size = sizeof greedy};
        kvp_seq_options so = {.size = sizeof so, .max_tokens = 30, .sampling = &greedy,
                              .eos = KVP_EOS_IGNORE};
        kvp_pool *p = NULL;
        kvp_batch *b = NULL;
        kvp_seq *s = NULL;
        if (kvp_pool_create(m, &po, &p, NULL) || kvp_batch_create(p, &bo, &b, NULL) ||
            kvp_seq_create(p, &so, &s, NULL))
            return (void *)1;
        world_tokens(prompt, 10, 7, 64);
        wrong += kvp_seq_append(s, prompt, 10) != KVP_OK || kvp_batch_add(b, s) != KVP_OK;
        kvp_event e = {.size = sizeof e};
        uint64_t hash = 0;
        for (;;) {
            kvp_status st = kvp_step(b);
            while (kvp_next_event(b, &e) == KVP_OK)
                if (e.kind == KVP_EVENT_TOKEN) hash = hash * 31 + (uint64_t)e.token;
            if (st == KVP_DONE || st < 0) break;
            if (st == KVP_AGAIN) kvp_wait(b, 1000);
        }
        static _Atomic uint64_t first;
        uint64_t none = 0;
        if (!atomic_compare_exchange_strong(&first, &none, hash) && none != hash) wrong++;
        kvp_seq_destroy(s);
        kvp_batch_destroy(b);
        kvp_pool_destroy(p);
    }
    return (void *)wrong;
}

static void case_b115(void **state)
{
    (void)state;
    kvp_model *one = world_model(&(gw_model){0}), *two = world_model(&(gw_model){0});
    kvp_model *of_thread[3] = {one, one, two};
    pthread_t t[3];
    for (int i = 0; i < 3; i++) assert_int_equal(pthread_create(&t[i], NULL, run_alone, of_thread[i]), 0);
    for (int i = 0; i < 3; i++) {
        void *wrong;
        pthread_join(t[i], &wrong);
        assert_null(wrong);
    }
    kvp_model_destroy(one);
    kvp_model_destroy(two);
}

static long resident_kib(void)
{
    long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    assert_non_null(f);
    assert_int_equal(fscanf(f, "%*s %ld", &pages), 1);
    fclose(f);
    return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

/* B119: creating and destroying a thousand times leaves nothing. */
static void case_b119(void **state)
{
    (void)state;
    long warm = 0;
    for (int i = 0; i < 50; i++) {
        kvp_model *m = NULL;
        assert_int_equal(kvp_model_open_memory(file, file_bytes, NULL, &m, NULL), KVP_OK);
        for (int k = 0; k < 20; k++) {
            kvp_pool *p = world_pool(m, 16, 16);
            kvp_batch *b = world_batch(p, NULL);
            int32_t tokens[5] = {1, 2, 3, 4, 5};
            kvp_seq *s = world_seq(p, tokens, 5, 0, KVP_SAMPLE_LIBRARY, 2);
            assert_int_equal(kvp_batch_add(b, s), KVP_OK);
            world_run(b, NULL);
            kvp_seq_destroy(s);
            kvp_batch_destroy(b);
            kvp_pool_destroy(p);
        }
        kvp_model_destroy(m);
        if (i == 10) warm = resident_kib();
    }
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    assert_true(resident_kib() - warm < 1024);
#else
    (void)warm; /* a sanitizer keeps freed memory for a while */
#endif
}

/* A second thread inside a domain is refused, however the two meet; and nothing breaks. */
struct crowd {
    kvp_batch *batch;
    kvp_pool *pool;
    _Atomic int refused, strange;
};

static void *intrude(void *arg)
{
    struct crowd *c = arg;
    for (int i = 0; i < 3000; i++) {
        uint64_t ns;
        kvp_status s = kvp_batch_deadline(c->batch, &ns);
        if (s == KVP_ERR_THREAD)
            c->refused++;
        else if (s != KVP_OK)
            c->strange++;
    }
    return NULL;
}

static void own_second_thread(void **state)
{
    (void)state;
    kvp_model *m = world_model(&(gw_model){0});
    struct crowd c = {.pool = world_pool(m, 64, 16)};
    c.batch = world_batch(c.pool, NULL);
    int32_t tokens[8];
    world_tokens(tokens, 8, 1, 64);
    kvp_seq *s = world_seq(c.pool, tokens, 8, 0, KVP_SAMPLE_LIBRARY, 200);
    assert_int_equal(kvp_batch_add(c.batch, s), KVP_OK);
    pthread_t t;
    assert_int_equal(pthread_create(&t, NULL, intrude, &c), 0);
    kvp_event e = {.size = sizeof e};
    for (int i = 0; i < 3000; i++) {
        kvp_status st = kvp_step(c.batch);
        if (st < 0 && st != KVP_ERR_THREAD) c.strange++;
        while (kvp_next_event(c.batch, &e) == KVP_OK) continue;
    }
    pthread_join(t, NULL);
    assert_int_equal(c.strange, 0);
    world_account(c.pool);
    kvp_seq_destroy(s);
    kvp_batch_destroy(c.batch);
    kvp_pool_destroy(c.pool);
    kvp_model_destroy(m);
}

/* Finalizers on another thread destroy and cancel while the owner steps: queued, never refused to the
 * owner. */
struct finalizer {
    kvp_seq *seqs[200];
    _Atomic int n;
    _Atomic int stop;
};

static void *finalize(void *arg)
{
    struct finalizer *f = arg;
    int done = 0;
    while (!f->stop || done < f->n) {
        if (done == f->n) continue;
        if (done % 3 == 0) kvp_seq_cancel(f->seqs[done]);
        kvp_seq_destroy(f->seqs[done]);
        done++;
    }
    return NULL;
}

static void own_finalizers(void **state)
{
    (void)state;
    ledger l = {0};
    kvp_model *m = ledger_model(&l);
    kvp_pool *p = world_pool(m, 64, 8);
    kvp_batch *b = world_batch(p, &(kvp_batch_options){.size = sizeof(kvp_batch_options),
                                                       .threads = 1});
    static struct finalizer f;
    memset(&f, 0, sizeof f);
    pthread_t t;
    assert_int_equal(pthread_create(&t, NULL, finalize, &f), 0);
    kvp_event e = {.size = sizeof e};
    for (int i = 0; i < 200; i++) {
        int32_t tokens[20];
        world_tokens(tokens, 20, (uint64_t)i, 64);
        f.seqs[i] = world_seq(p, tokens, 20, 0, KVP_SAMPLE_LIBRARY, 30);
        assert_int_equal(kvp_batch_add(b, f.seqs[i]), KVP_OK);
        for (int k = 0; k < 3; k++) {
            assert_true(kvp_step(b) >= 0);
            while (kvp_next_event(b, &e) == KVP_OK) continue;
        }
        f.n++;
    }
    f.stop = 1;
    pthread_join(t, NULL);
    world_run(b, NULL);
    assert_int_equal(world_stats(p).sequences, 0);
    world_account(p);
    kvp_model_destroy(m);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
    expect_all_back(&l);
}

/* A wait ends when somebody else destroys the batch. */
static void *wait_for_it(void *arg)
{
    (void)kvp_wait(arg, 20000);
    return NULL;
}

static void own_destroy_ends_wait(void **state)
{
    (void)state;
    kvp_model *m = world_model(&(gw_model){0});
    kvp_pool *p = world_pool(m, 16, 16);
    kvp_batch *b = world_batch(p, NULL);
    assert_int_equal(kvp_step(b), KVP_DONE);
    pthread_t t;
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    assert_int_equal(pthread_create(&t, NULL, wait_for_it, b), 0);
    usleep(50000);
    kvp_batch_destroy(b);
    pthread_join(t, NULL);
    clock_gettime(CLOCK_MONOTONIC, &end);
    assert_true(end.tv_sec - begin.tv_sec < 10);
    kvp_pool_destroy(p);
    kvp_model_destroy(m);
}

/* After fork the model works in the child, and what the parent made there is refused. */
static void own_fork_process(void **state)
{
    (void)state;
    kvp_model *m = world_model(&(gw_model){0});
    kvp_pool *p = world_pool(m, 16, 16);
    kvp_batch *b = world_batch(p, &(kvp_batch_options){.size = sizeof(kvp_batch_options),
                                                       .threads = 1});
    int32_t tokens[5] = {1, 2, 3, 4, 5}, want[3];
    kvp_seq *s = world_seq(p, tokens, 5, 0, KVP_SAMPLE_LIBRARY, 3);
    assert_int_equal(kvp_batch_add(b, s), KVP_OK);
    world_greedy(m, tokens, 5, want, 3);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        int bad = kvp_step(b) != KVP_ERR_FORKED || kvp_seq_append(s, tokens, 1) != KVP_ERR_FORKED ||
                  kvp_wakeup(b) != KVP_ERR_FORKED;
        kvp_seq_destroy(s);
        kvp_batch_destroy(b);
        kvp_pool_destroy(p);
        int32_t got[3];
        world_greedy(m, tokens, 5, got, 3);
        _exit(bad || memcmp(got, want, sizeof got));
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    static world_out out[1];
    memset(out, 0, sizeof out);
    world_run(b, out);
    assert_memory_equal(out[0].ids, want, sizeof want);
    kvp_seq_destroy(s);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
    kvp_model_destroy(m);
}

/* Lent memory comes back exactly once, when nothing uses it any more. */
static void slab_back(void *user, void *slab)
{
    (void)slab;
    ++*(int *)user;
}

static void own_slab_returned(void **state)
{
    (void)state;
    kvp_model *m = world_model(&(gw_model){0});
    int back = 0;
    kvp_pool_options o = {.size = sizeof o, .blocks = 8, .slab_released = slab_back,
                          .slab_user = &back};
    uint64_t bytes, align;
    assert_int_equal(kvp_pool_slab_size(m, &o, &bytes, &align, NULL), KVP_OK);
    o.slab = aligned_alloc(align, (bytes + align - 1) / align * align);
    assert_non_null(o.slab);
    o.slab_bytes = bytes;
    kvp_pool *p = NULL;
    assert_int_equal(kvp_pool_create(m, &o, &p, NULL), KVP_OK);
    kvp_seq *s = world_seq(p, NULL, 0, 0, KVP_SAMPLE_HOST, 0);
    kvp_pool_destroy(p);
    kvp_model_destroy(m);
    assert_int_equal(back, 0);
    kvp_seq_destroy(s);
    assert_int_equal(back, 1);
    free(o.slab);
}

/* A steady step asks nobody for memory. */
static void own_no_allocation(void **state)
{
    (void)state;
    ledger l = {0};
    kvp_model *m = ledger_model(&l);
    kvp_pool *p = world_pool(m, 200, 16);
    kvp_batch *b = world_batch(p, &(kvp_batch_options){.size = sizeof(kvp_batch_options),
                                                       .threads = 2, .token_budget = 64,
                                                       .chunk_tokens = 16});
    kvp_seq *s[12];
    for (uint64_t i = 0; i < 12; i++) {
        int32_t tokens[90];
        world_tokens(tokens, 90, i / 2, 64);
        s[i] = world_seq(p, tokens, 60 + i, i, KVP_SAMPLE_LIBRARY, 100);
        assert_int_equal(kvp_batch_add(b, s[i]), KVP_OK);
    }
    int64_t calls = l.calls, bytes = l.bytes;
    static world_out out[12];
    memset(out, 0, sizeof out);
    for (int i = 0; i < 100000; i++) {
        kvp_status st = world_step(b, out);
        assert_true(st >= 0);
        if (st == KVP_DONE) break;
        if (st == KVP_AGAIN) kvp_wait(b, 1000);
    }
    for (int i = 0; i < 12; i++) assert_int_equal(out[i].tokens, 100);
    assert_int_equal(l.calls, calls);
    assert_int_equal(l.bytes, bytes);
    for (int i = 0; i < 12; i++) kvp_seq_destroy(s[i]);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
    kvp_model_destroy(m);
    expect_all_back(&l);
}

/* Forks cost their block tables and little else; the tokens are their parent's until one writes. */
static void own_forks_are_small(void **state)
{
    (void)state;
    enum { FORKS = 63, TOKENS = 6000 };
    ledger l = {0};
    kvp_layer_group group = {.layers = 4, .kv_heads = 1, .key_dim = 8, .value_dim = 8,
                             .query_heads = 2};
    kvp_geometry g = {.size = sizeof g, .n_groups = 1, .groups = &group};
    kvp_hooks h = ledger_hooks(&l);
    kvp_model_options mo = {.size = sizeof mo, .hooks = &h};
    kvp_model *m = NULL;
    kvp_seq *forks[FORKS];
    int32_t tokens[TOKENS];
    world_tokens(tokens, TOKENS, 1, 1000);
    assert_int_equal(kvp_model_create(&g, &mo, &m, NULL), KVP_OK);
    kvp_pool *p = world_pool(m, TOKENS / 16 + 1, 16);
    kvp_batch *b = world_batch(p, &(kvp_batch_options){.size = sizeof(kvp_batch_options),
                                                       .token_budget = 4096,
                                                       .chunk_tokens = 4096});
    kvp_seq *s = world_seq(p, tokens, TOKENS, 0, KVP_SAMPLE_HOST, KVP_MAX_TOKENS_NONE);
    assert_int_equal(kvp_batch_add(b, s), KVP_OK);
    kvp_status st;
    while ((st = kvp_step(b)) == KVP_PLANNED) {
        kvp_view v = {.size = sizeof v};
        static const float zero[4096 * 2 * 8];
        static float out[4096 * 2 * 8];
        assert_int_equal(kvp_batch_get_view(b, &v), KVP_OK);
        kvp_attention_args a = {.size = sizeof a, .q = zero, .k = zero, .v = zero, .out = out};
        for (uint32_t layer = 0; layer < 4; layer++)
            assert_int_equal(kvp_attention(b, layer, &a), KVP_OK);
        assert_int_equal(kvp_commit(b, NULL, 0), KVP_OK);
    }
    assert_true(st >= 0);
    kvp_seq_info info = {.size = sizeof info};
    assert_int_equal(kvp_seq_get_info(s, &info), KVP_OK);
    assert_int_equal(info.computed, TOKENS);
    int64_t before = l.bytes;
    for (int i = 0; i < FORKS; i++)
        assert_int_equal(kvp_seq_fork(s, KVP_FORK_END, NULL, &forks[i], NULL), KVP_OK);
    assert_true(l.bytes - before <= 256 << 10);
    kvp_pool_stats stats = {.size = sizeof stats};
    assert_int_equal(kvp_pool_get_stats(p, &stats), KVP_OK);
    assert_int_equal(stats.used, TOKENS / 16);
    for (int i = 0; i < FORKS; i++) kvp_seq_destroy(forks[i]);
    kvp_seq_destroy(s);
    kvp_batch_destroy(b);
    kvp_pool_destroy(p);
    kvp_model_destroy(m);
    expect_all_back(&l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(case_b39), cmocka_unit_test(case_b115), cmocka_unit_test(case_b119),
        cmocka_unit_test(own_second_thread), cmocka_unit_test(own_finalizers),
        cmocka_unit_test(own_fork_process), cmocka_unit_test(own_destroy_ends_wait),
        cmocka_unit_test(own_slab_returned),
        cmocka_unit_test(own_no_allocation), cmocka_unit_test(own_forks_are_small),
    };
    return cmocka_run_group_tests_name("api/cases_life", tests, make_file, free_file);
}
