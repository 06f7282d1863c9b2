/*
 * The machine itself: what a benchmark's figures are held against, and the state it was in.
 *
 *     bench_machine [--threads N] [anything, ignored]    all of it, once
 *     bench_machine --serve                              one question per line of stdin
 *
 * Questions, each answered by one JSON line:
 *
 *     read N    gigabytes per second that N threads read from memory together
 *     peak N    multiply-adds of N threads, in billions of operations per second (two each): 32-bit
 *               floats, and bytes summed in 32 bits; 0 where no instruction for it is known here
 *     ping      nanoseconds for a cache line to go from one core to another; 0 with one core only
 *
 * Each is the best of a few short spells: neighbours can only slow it down.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

enum { MAX_THREADS = 256, SPELLS = 7, STREAMS = 4, TRIPS = 2000 };
static const uint64_t READ_BYTES = 256u << 20; /* well beyond any cache */
static const double PEAK_SECONDS = 0.02;       /* of one spell */

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void die(const char *what)
{
    fprintf(stderr, "bench_machine: %s\n", what);
    exit(1);
}

/* --- N threads at the same work --- */

typedef struct crew {
    uint32_t threads;
    void (*work)(struct crew *, uint32_t thread);
    pthread_barrier_t line;
    double best;   /* seconds */
    uint64_t laps; /* for work that is counted in laps */
} crew;

typedef struct member {
    crew *crew;
    uint32_t thread;
} member;

static void *spells(void *arg)
{
    member *m = arg;
    for (int i = 0; i < SPELLS; i++) {
        pthread_barrier_wait(&m->crew->line);
        double start = now();
        m->crew->work(m->crew, m->thread);
        pthread_barrier_wait(&m->crew->line);
        double took = now() - start;
        if (m->thread == 0 && (i == 0 || took < m->crew->best)) m->crew->best = took;
    }
    return NULL;
}

/* Seconds of the best spell. */
static double run(crew *c)
{
    pthread_t ids[MAX_THREADS];
    member members[MAX_THREADS];
    if (pthread_barrier_init(&c->line, NULL, c->threads)) die("no barrier");
    for (uint32_t t = 0; t < c->threads; t++) {
        members[t] = (member){c, t};
        if (t && pthread_create(&ids[t], NULL, spells, &members[t])) die("no thread");
    }
    spells(&members[0]);
    for (uint32_t t = 1; t < c->threads; t++) pthread_join(ids[t], NULL);
    pthread_barrier_destroy(&c->line);
    return c->best;
}

static _Atomic uint64_t sink; /* results go here, so that the work is not optimised away */

/* --- reading --- */

static const uint8_t *memory;

/* In four streams, with the line after next asked for early: one stream alone gets less. */
static void read_share(crew *c, uint32_t thread)
{
    typedef uint64_t pair __attribute__((vector_size(16)));
    const uint64_t stream = READ_BYTES / c->threads / STREAMS / 64 * 64;
    const uint8_t *p = memory + thread * STREAMS * stream;
    pair sum[STREAMS] = {{0}};
    for (uint64_t i = 0; i < stream; i += 64)
        for (int s = 0; s < STREAMS; s++) {
            pair line[4];
            memcpy(line, p + (uint64_t)s * stream + i, sizeof line);
            __builtin_prefetch(p + (uint64_t)s * stream + i + 1024);
            sum[s] ^= line[0] ^ line[1] ^ line[2] ^ line[3];
        }
    sum[0] ^= sum[1] ^ sum[2] ^ sum[3];
    atomic_fetch_add(&sink, sum[0][0] ^ sum[0][1]);
}

static double read_rate(uint32_t threads)
{
    if (!memory) {
        uint8_t *p = malloc(READ_BYTES + 4096); /* prefetches run past the end */
        if (!p) die("no memory to read");
        for (uint64_t i = 0; i < READ_BYTES + 4096; i += 64) p[i] = (uint8_t)(i >> 6);
        memory = p;
    }
    crew c = {.threads = threads, .work = read_share};
    double seconds = run(&c);
    return (double)(READ_BYTES / threads / STREAMS / 64 * 64 * STREAMS * threads) / seconds * 1e-9;
}

/* --- multiply-adds: twelve independent sums, so that the latency of one does not show --- */

enum { SUMS = 12 };
typedef uint64_t lap_function(uint64_t laps); /* SUMS instructions of multiply-adds a lap */
typedef struct unit {
    lap_function *laps;
    double operations; /* of one lap */
} unit;

/* Written out rather than looped over, so that every sum stays in a register. */
#define EACH_SUM(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)

/* Keeps a value in a register, and the compiler from seeing what it is. */
#define OPAQUE(constraint, v) __asm__ volatile("" : "+" constraint(v))

#if defined(__x86_64__)

__attribute__((target("avx2,fma"))) static uint64_t floats_avx2(uint64_t laps)
{
    const __m256 a = _mm256_set1_ps(0.75f), b = _mm256_set1_ps(0.25f);
#define START(i) __m256 sum##i = _mm256_set1_ps(i);
    EACH_SUM(START)
#undef START
    while (laps--) {
#define ADD(i) sum##i = _mm256_fmadd_ps(sum##i, a, b); OPAQUE("x", sum##i);
        EACH_SUM(ADD)
#undef ADD
    }
    return (uint64_t)_mm256_cvtss_f32(sum0);
}

/* Products of bytes summed in 16 bits, four at a time, then in 32: what small weights allow. */
__attribute__((target("avx2"))) static uint64_t bytes_avx2(uint64_t laps)
{
    const __m256i w = _mm256_set1_epi8(3), ones = _mm256_set1_epi16(1);
    __m256i x = _mm256_set1_epi8(5), wide0 = ones, wide1 = ones, wide2 = ones;
    while (laps--) {
#define FOUR(wide)                                                                                 \
    {                                                                                              \
        OPAQUE("x", x);                                                                            \
        __m256i part = _mm256_maddubs_epi16(w, x);                                                 \
        OPAQUE("x", x);                                                                            \
        part = _mm256_add_epi16(part, _mm256_maddubs_epi16(w, x));                                 \
        OPAQUE("x", x);                                                                            \
        part = _mm256_add_epi16(part, _mm256_maddubs_epi16(w, x));                                 \
        OPAQUE("x", x);                                                                            \
        part = _mm256_add_epi16(part, _mm256_maddubs_epi16(w, x));                                 \
        wide = _mm256_add_epi32(wide, _mm256_madd_epi16(part, ones));                              \
    }
        FOUR(wide0)
        FOUR(wide1)
        FOUR(wide2)
#undef FOUR
    }
    wide0 = _mm256_xor_si256(wide0, _mm256_xor_si256(wide1, wide2));
    return (uint64_t)_mm256_extract_epi32(wide0, 0);
}

__attribute__((target("avx512f"))) static uint64_t floats_avx512(uint64_t laps)
{
    const __m512 a = _mm512_set1_ps(0.75f), b = _mm512_set1_ps(0.25f);
#define START(i) __m512 sum##i = _mm512_set1_ps(i);
    EACH_SUM(START)
#undef START
    while (laps--) {
#define ADD(i) sum##i = _mm512_fmadd_ps(sum##i, a, b); OPAQUE("v", sum##i);
        EACH_SUM(ADD)
#undef ADD
    }
    return (uint64_t)_mm512_cvtss_f32(sum0);
}

__attribute__((target("avx512f,avx512vnni"))) static uint64_t bytes_avx512(uint64_t laps)
{
    const __m512i w = _mm512_set1_epi8(3), x = _mm512_set1_epi8(5);
#define START(i) __m512i sum##i = _mm512_set1_epi32(i);
    EACH_SUM(START)
#undef START
    while (laps--) {
#define ADD(i) sum##i = _mm512_dpbusd_epi32(sum##i, w, x); OPAQUE("v", sum##i);
        EACH_SUM(ADD)
#undef ADD
    }
    return (uint64_t)_mm_cvtsi128_si32(_mm512_castsi512_si128(sum0));
}

static unit unit_of(int bytes)
{
    if (bytes) {
        if (__builtin_cpu_supports("avx512vnni")) return (unit){bytes_avx512, SUMS * 64 * 2};
        if (__builtin_cpu_supports("avx2")) return (unit){bytes_avx2, SUMS * 32 * 2};
    } else {
        if (__builtin_cpu_supports("avx512f")) return (unit){floats_avx512, SUMS * 16 * 2};
        if (__builtin_cpu_supports("fma")) return (unit){floats_avx2, SUMS * 8 * 2};
    }
    return (unit){NULL, 0};
}

#elif defined(__aarch64__)

static uint64_t floats_neon(uint64_t laps)
{
    const float32x4_t a = vdupq_n_f32(0.75f), b = vdupq_n_f32(0.25f);
#define START(i) float32x4_t sum##i = vdupq_n_f32(i);
    EACH_SUM(START)
#undef START
    while (laps--) {
#define ADD(i) sum##i = vfmaq_f32(sum##i, a, b); OPAQUE("w", sum##i);
        EACH_SUM(ADD)
#undef ADD
    }
    return (uint64_t)vgetq_lane_f32(sum0, 0);
}

static unit unit_of(int bytes)
{
    return bytes ? (unit){NULL, 0} : (unit){floats_neon, SUMS * 4 * 2};
}

#else

static unit unit_of(int bytes)
{
    (void)bytes;
    return (unit){NULL, 0};
}

#endif

static unit peak_unit;

static void peak_share(crew *c, uint32_t thread)
{
    (void)thread;
    atomic_fetch_add(&sink, peak_unit.laps(c->laps));
}

static double peak_rate(int bytes, uint32_t threads)
{
    crew c = {.threads = threads, .work = peak_share, .laps = 1 << 14};
    peak_unit = unit_of(bytes);
    if (!peak_unit.laps) return 0;
    double start = now();
    peak_share(&c, 0);
    double took = now() - start;
    if (took < PEAK_SECONDS) c.laps = (uint64_t)((double)c.laps * PEAK_SECONDS / (took + 1e-6));
    return peak_unit.operations * (double)c.laps * threads / run(&c) * 1e-9;
}

/* --- from core to core --- */

static _Alignas(128) _Atomic uint32_t ball;
static int cores[2];

/* One of two, bound to its core: hands the ball on when it has it. Seconds of the best spell. */
static double play(uint32_t me)
{
    double best = 0;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cores[me], &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
    for (int i = 0; i < SPELLS; i++) {
        double start = now();
        for (int k = 0; k < TRIPS; k++) {
            while (atomic_load_explicit(&ball, memory_order_acquire) % 2 != me) {}
            atomic_fetch_add_explicit(&ball, 1, memory_order_release);
        }
        double took = now() - start;
        if (i == 1 || (i > 1 && took < best)) best = took; /* the first also waits */
    }
    return best;
}

static void *other_player(void *arg)
{
    (void)arg;
    play(1);
    return NULL;
}

/* One way, so half a round trip, between the first two cores that are allowed. */
static double ping(void)
{
    cpu_set_t allowed;
    int found = 0;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return 0;
    for (int i = 0; i < CPU_SETSIZE && found < 2; i++)
        if (CPU_ISSET(i, &allowed)) cores[found++] = i;
    if (found < 2) return 0;

    pthread_t other;
    atomic_store(&ball, 0);
    if (pthread_create(&other, NULL, other_player, NULL)) die("no thread");
    double best = play(0);
    pthread_join(other, NULL);
    pthread_setaffinity_np(pthread_self(), sizeof allowed, &allowed);
    return best / TRIPS / 2 * 1e9;
}

/* --- questions --- */

static void answer(const char *what, uint32_t threads)
{
    if (threads < 1 || threads > MAX_THREADS) die("how many threads?");
    if (!strcmp(what, "read"))
        printf("{\"read_gb_s\":%.2f,\"threads\":%u}\n", read_rate(threads), threads);
    else if (!strcmp(what, "peak"))
        printf("{\"float_gop_s\":%.1f,\"byte_gop_s\":%.1f,\"threads\":%u}\n", peak_rate(0, threads),
               peak_rate(1, threads), threads);
    else if (!strcmp(what, "ping"))
        printf("{\"ping_ns\":%.1f}\n", ping());
    else
        die("no such question");
    fflush(stdout);
}

static uint32_t allowed_cores(void)
{
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return 1;
    return (uint32_t)CPU_COUNT(&allowed);
}

int main(int argc, char **argv)
{
    uint32_t threads = allowed_cores();
    char line[64], what[16];
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--threads") && i + 1 < argc) {
            threads = (uint32_t)atoi(argv[++i]);
        } else if (!strcmp(argv[i], "--serve")) {
            while (fgets(line, sizeof line, stdin)) {
                unsigned n = 1;
                if (sscanf(line, "%15s %u", what, &n) < 1) die("an empty question");
                answer(what, n);
            }
            return 0;
        }
    }
    answer("ping", 1);
    for (uint32_t n = 1;; n = threads) {
        answer("read", n);
        answer("peak", n);
        if (n >= threads) return 0;
    }
}
