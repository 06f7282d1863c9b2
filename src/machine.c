/*
 * The machine below a benchmark: its name, the memory that is left, and how fast it reads.
 *
 * The bandwidth is a limit that figures are held against, so the probe wants the most there is:
 * plain vector loads over a buffer that no cache holds, the best of many passes. Decoding reads all
 * weights once per step, and nothing that runs on the same threads can read them faster.
 */
#define _GNU_SOURCE
#include "bench.h"

#include <pthread.h>
#include <string.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/utsname.h>

/* --- what the system tells --- */

void machine_cpu_name(char *out, size_t size)
{
    char line[256];
    FILE *f = fopen("/proc/cpuinfo", "r");
    struct utsname system;
    snprintf(out, size, "unknown CPU");
    /* Arm's file has no name: then the architecture. */
    if (uname(&system) == 0) snprintf(out, size, "%s CPU", system.machine);
    while (f && fgets(line, sizeof line, f)) {
        const char *value = strchr(line, ':');
        if (strncmp(line, "model name", 10) || !value) continue;
        value += 1 + strspn(value + 1, " \t");
        snprintf(out, size, "%.*s", (int)strcspn(value, "\n"), value);
        break;
    }
    if (f) fclose(f);
}

/* The number behind `key` in a file of /proc or /sys ("": the file is that number). */
static bool read_figure(const char *path, const char *key, uint64_t *out)
{
    char line[256];
    bool found = false;
    FILE *f = fopen(path, "r");
    while (f && !found && fgets(line, sizeof line, f)) {
        char *end;
        if (strncmp(line, key, strlen(key))) continue;
        *out = strtoull(line + strlen(key), &end, 10);
        found = end > line + strlen(key);
    }
    if (f) fclose(f);
    return found;
}

uint64_t machine_memory_available(void)
{
    uint64_t available = 0, most, taken;
    if (read_figure("/proc/meminfo", "MemAvailable:", &available)) available *= 1024;
    /* "max" is no number: then the group has no limit of its own. */
    if (read_figure("/sys/fs/cgroup/memory.max", "", &most) &&
        read_figure("/sys/fs/cgroup/memory.current", "", &taken) && taken < most &&
        (!available || most - taken < available))
        available = most - taken;
    return available;
}

/* --- read bandwidth --- */

enum { PASSES_LEAST = 6, READERS_MAX = 256 };

/* Beyond the caches of most machines, and filled in a tenth of a second. */
static const uint64_t probe_bytes = (uint64_t)256 << 20;
static const uint64_t probe_ns = 250000000;

typedef uint64_t lanes __attribute__((vector_size(16)));

typedef struct reader {
    pthread_t thread;
    lanes *from;
    uint64_t n;
    uint64_t sum; /* so that the loads are not left out */
} reader;

static void *read_part(void *user)
{
    reader *r = user;
    lanes sum[4] = {{0}};
    for (uint64_t i = 0; i + 4 <= r->n; i += 4)
        for (int k = 0; k < 4; k++) sum[k] += r->from[i + (uint64_t)k];
    sum[0] += sum[1] + sum[2] + sum[3];
    r->sum = sum[0][0] + sum[0][1];
    return NULL;
}

static void *fill_part(void *user)
{
    reader *r = user;
    memset(r->from, 1, r->n * sizeof *r->from);
    return NULL;
}

/* Every reader on a thread of its own; false if the system gives none. */
static bool all_parts(reader *readers, uint64_t n, void *(*work)(void *))
{
    uint64_t started = 0;
    while (started < n &&
           pthread_create(&readers[started].thread, NULL, work, &readers[started]) == 0)
        started++;
    for (uint64_t i = 0; i < started; i++) pthread_join(readers[i].thread, NULL);
    return started == n;
}

static double best_pass(reader *readers, uint64_t n)
{
    uint64_t until;
    double best = 0;
    if (!all_parts(readers, n, fill_part)) return 0;
    until = clock_ns() + probe_ns;
    for (int pass = 0; (pass < PASSES_LEAST || clock_ns() < until) && !interrupted(); pass++) {
        uint64_t start = clock_ns();
        double rate;
        if (!all_parts(readers, n, read_part)) return 0;
        rate = (double)probe_bytes / ((double)(clock_ns() - start) / 1e9);
        if (rate > best) best = rate;
    }
    return best;
}

double machine_read_bandwidth(uint64_t threads)
{
    static reader readers[READERS_MAX];
    uint64_t available = machine_memory_available();
    uint64_t n = threads < READERS_MAX ? threads : READERS_MAX;
    uint64_t part = probe_bytes / sizeof(lanes) / n;
    double rate;
    lanes *buffer;
    if (available && available < 2 * probe_bytes) return 0;
    buffer = mmap(NULL, probe_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buffer == MAP_FAILED) return 0;
    madvise(buffer, probe_bytes, MADV_HUGEPAGE); /* as large weights may lie */
    for (uint64_t i = 0; i < n; i++)
        readers[i] = (reader){.from = buffer + i * part, .n = part};
    rate = best_pass(readers, n);
    munmap(buffer, probe_bytes);
    return rate;
}
