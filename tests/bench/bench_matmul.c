/*
 * Matrix products of every weight type on the shapes of a 1.1-billion-parameter model: one row with
 * weights from memory, in bytes per second beside what two threads can read in the same run, and
 * 512 rows, in operations per second.
 *
 *     bench_matmul [anything, ignored] [level] [type]
 *
 * Each figure is the median of rounds in which reading and every shape take turns, because a shared
 * machine changes its speed from second to second. Time is each thread's own processor time, and the
 * rates of the threads are added: what other processes take does not count.
 */
#define _GNU_SOURCE
#include "cpu/kernels.h"
#include "cpu/pack.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { THREADS = 2, ROUNDS = 9, SHAPES = 3, BATCH = 512 };
static const uint64_t WORKING_SET = 192u << 20; /* well beyond any cache */

static const struct { uint32_t type; const char *name; } types[] = {
    {KVP__F32, "F32"},   {KVP__F16, "F16"},   {KVP__BF16, "BF16"}, {KVP__Q8_0, "Q8_0"},
    {KVP__Q4_0, "Q4_0"}, {KVP__Q4_1, "Q4_1"}, {KVP__Q5_0, "Q5_0"}, {KVP__Q5_1, "Q5_1"},
    {KVP__Q2_K, "Q2_K"}, {KVP__Q3_K, "Q3_K"}, {KVP__Q4_K, "Q4_K"}, {KVP__Q5_K, "Q5_K"},
    {KVP__Q6_K, "Q6_K"},
};
static const struct { uint32_t n_out, n_in; } shapes[SHAPES] = {
    {2048, 2048}, {5632, 2048}, {2048, 5632}};

static double own_time(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* --- what the threads do together --- */

typedef struct task {
    const kvp__kernels *k;
    const uint8_t *memory; /* NULL: nothing is left to do */
    kvp__mat w;
    uint32_t copies, rows; /* rows 0: read only */
    kvp__act x;
    float *y;
    uint64_t bytes;
} task;

static task job;
static pthread_barrier_t begin, end;
static _Atomic uint64_t sink;

/* In four streams, which is how most is got out of memory. */
static void read_all(uint32_t thread)
{
    typedef uint64_t four __attribute__((vector_size(32)));
    const uint64_t quarter = job.bytes / THREADS / 4096 * 1024;
    const uint8_t *p = job.memory + thread * 4 * quarter;
    four s[4] = {{0}};
    for (uint64_t i = 0; i < quarter; i += 64)
        for (int j = 0; j < 4; j++) {
            four v[2];
            __builtin_prefetch(p + j * quarter + i + 2048);
            memcpy(v, p + j * quarter + i, sizeof v);
            s[j] ^= v[0] ^ v[1];
        }
    s[0] ^= s[1] ^ s[2] ^ s[3];
    atomic_fetch_add(&sink, s[0][0] ^ s[0][1] ^ s[0][2] ^ s[0][3]);
}

static double took[THREADS];

static void product_share(uint32_t thread)
{
    uint32_t panels = kvp__mat_panels(&job.w), half = panels / THREADS;
    kvp__mat w = job.w;
    for (uint32_t c = 0; c < job.copies; c++) {
        w.panels = job.memory + c * (w.panel_bytes * panels);
        job.k->matmul(&w, &job.x, (kvp__span){0, job.rows}, (kvp__span){thread * half, half}, job.y,
                      w.n_out, false);
    }
}

static void share_of(uint32_t thread)
{
    double t = own_time();
    if (job.rows)
        product_share(thread);
    else
        read_all(thread);
    took[thread] = own_time() - t;
}

static void *worker(void *arg)
{
    for (;;) {
        pthread_barrier_wait(&begin);
        if (!job.memory) return NULL;
        share_of(*(const uint32_t *)arg);
        pthread_barrier_wait(&end);
    }
}

/* How often the job can be done in a second. */
static double rate(void)
{
    pthread_barrier_wait(&begin);
    share_of(0);
    pthread_barrier_wait(&end);
    double r = 0;
    for (uint32_t t = 0; t < THREADS; t++) r += 1.0 / THREADS / took[t];
    return r;
}

/* --- figures --- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *v, uint32_t n)
{
    qsort(v, n, sizeof *v, by_value);
    return v[n / 2];
}

static void *take(uint64_t bytes)
{
    void *p = kvp__map(bytes);
    if (!p) {
        fprintf(stderr, "no memory\n");
        exit(1);
    }
    return p;
}

/* Any bytes are weights; halves must not be NaN, so every byte stays below the exponent's top. */
static void fill(uint8_t *p, uint64_t bytes)
{
    uint32_t s = 1;
    for (uint64_t i = 0; i < bytes; i += 4) {
        s = s * 1664525u + 1013904223u;
        uint32_t v = (s ^ s >> 15) & 0x37373737u;
        memcpy(p + i, &v, 4);
    }
}

static void bench(uint32_t i, const kvp__kernels *k, uint8_t *memory, const float *x, void *space,
                  float *y)
{
    double one[SHAPES][ROUNDS], batch[SHAPES][ROUNDS], reading[ROUNDS];
    for (uint32_t r = 0; r < ROUNDS; r++) {
        job = (task){.k = k, .memory = memory, .bytes = WORKING_SET};
        reading[r] = (double)WORKING_SET * rate();
        for (uint32_t s = 0; s < SHAPES; s++) {
            task t = {.k = k, .memory = memory, .y = y};
            uint64_t bytes = kvp__mat_describe(&t.w, types[i].type, shapes[s].n_out, shapes[s].n_in);
            kvp__act_place(&t.x, space, BATCH, t.w.n_in);
            t.x.x = x;
            t.x.x_row = t.w.n_in;
            k->quantize(&t.x, 0, BATCH);
            t.rows = 1;
            t.copies = (uint32_t)(WORKING_SET / bytes);
            job = t;
            one[s][r] = (double)(bytes * t.copies) * rate();
            if (r % 3) continue; /* 512 rows take long and vary less */
            job.rows = BATCH;
            job.copies = 1;
            batch[s][r / 3] = 2.0 * BATCH * t.w.n_out * t.w.n_in * rate();
        }
    }
    double bandwidth = median(reading, ROUNDS), worst = 1e9;
    printf("%-5s reads %5.1f GB/s | 1 row", types[i].name, bandwidth * 1e-9);
    for (uint32_t s = 0; s < SHAPES; s++) {
        double v = median(one[s], ROUNDS);
        printf(" %5.1f", v * 1e-9);
        if (v / bandwidth < worst) worst = v / bandwidth;
    }
    printf(" GB/s, at least %3.0f %% | %d rows", worst * 100, BATCH);
    for (uint32_t s = 0; s < SHAPES; s++) printf(" %5.0f", median(batch[s], ROUNDS / 3) * 1e-9);
    printf(" GOP/s\n");
    fflush(stdout);
}

int main(int argc, char **argv)
{
    uint32_t level = kvp__cpu_level(argc > 2 ? (uint32_t)atoi(argv[2]) : 0);
    const kvp__kernels *k = kvp__kernels_get(level);
    printf("matrix products, level %u, %d threads; outputs x inputs 2048 x 2048, 5632 x 2048, "
           "2048 x 5632\n", level, THREADS);
    uint8_t *memory = take(WORKING_SET + (64u << 20));
    fill(memory, WORKING_SET + (64u << 20));
    float *x = take(sizeof(float) * BATCH * 5632), *y = take(sizeof(float) * BATCH * 5632);
    for (uint32_t i = 0; i < BATCH * 5632; i++) x[i] = (float)(i * 2654435761u >> 8) * 0x1p-24f - 0.5f;
    void *space = take(kvp__act_bytes(BATCH, 5632));
    pthread_t threads[THREADS];
    static uint32_t ids[THREADS];
    pthread_barrier_init(&begin, NULL, THREADS);
    pthread_barrier_init(&end, NULL, THREADS);
    for (uint32_t t = 1; t < THREADS; t++) {
        ids[t] = t;
        if (pthread_create(&threads[t], NULL, worker, &ids[t])) return 1;
    }
    for (uint32_t i = 0; i < KVP__COUNT(types); i++)
        if (argc < 4 || strcmp(argv[3], types[i].name) == 0) bench(i, k, memory, x, space, y);
    job.memory = NULL;
    pthread_barrier_wait(&begin);
    for (uint32_t t = 1; t < THREADS; t++) pthread_join(threads[t], NULL);
    return 0;
}
