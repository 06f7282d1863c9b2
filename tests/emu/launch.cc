/*
 * A launch: the kernel is found by its name, what a driver would refuse is refused, and the grid's
 * blocks run one after the other. The first failure ends the grid and is what emu_launch returns.
 */
#include <link.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <numeric>

#include "tests/emu/runtime.h"

namespace emu {

/* --- the registry; filled before main, so without a lock --- */

static kernel_entry *kernels;

kernel_entry::kernel_entry(const char *n, size_t bytes, uint32_t most, void (*f)(const void *))
    : name(n), args_bytes(bytes), threads(most), run(f), next(kernels)
{
    for (const kernel_entry *k = kernels; k; k = k->next)
        if (!strcmp(k->name, n)) {
            fprintf(stderr, "emulator: two kernels are called %s\n", n);
            exit(1);
        }
    kernels = this;
}

static const kernel_entry *find_kernel(const char *name)
{
    for (const kernel_entry *k = kernels; k; k = k->next)
        if (!strcmp(k->name, name)) return k;
    return nullptr;
}

/* --- options and statistics --- */

static std::mutex lock;
static emu_options options;
static emu_stats stats;
static std::atomic<uint32_t> launches;

static void add(emu_stats &to, const emu_stats &s)
{
    to.launches += s.launches;
    to.blocks += s.blocks;
    to.threads += s.threads;
    to.collectives += s.collectives;
    to.barriers += s.barriers;
    to.mma += s.mma;
    to.ldmatrix += s.ldmatrix;
    to.atomics += s.atomics;
    to.loaded += s.loaded;
    to.stored += s.stored;
    to.ldmatrix_conflicts += s.ldmatrix_conflicts;
    to.shared_passes += s.shared_passes;
    to.shared_conflicts += s.shared_conflicts;
    to.plain |= s.plain;
}

/* --- failures --- */

const char *short_name(const char *file)
{
    const char *slash = strrchr(file, '/');
    return slash ? slash + 1 : file;
}

void fail(const char *format, ...)
{
    engine *e = self;
    if (!e->failed) {
        e->failed = true;
        int n = snprintf(e->message, sizeof e->message, "%s, block (%u, %u, %u): ", e->kernel->name,
                         block.index.x, block.index.y, block.index.z);
        va_list list;
        va_start(list, format);
        vsnprintf(e->message + n, sizeof e->message - (size_t)n, format, list);
        va_end(list);
    }
    if (current) to_main();
}

/* Where an instruction is in the source, appended to the message, if there is an addr2line to ask.
 * */
static void append_place(engine *e)
{
    struct finder {
        static int first(dl_phdr_info *info, size_t, void *base)
        {
            *static_cast<uintptr_t *>(base) = info->dlpi_addr;
            return 1;
        }
    };
    uintptr_t base = 0;
    dl_iterate_phdr(finder::first, &base);
    char program[400], command[500], answer[400] = "";
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    if (n < 0) return;
    program[n] = 0;
    /* The call itself lies before the address that it returns to. */
    snprintf(command, sizeof command, "addr2line -e '%s' %#zx 2>/dev/null", program,
             (size_t)((uintptr_t)e->failure_pc - 1 - base));
    FILE *p = popen(command, "r");
    if (!p) return;
    bool has = fgets(answer, sizeof answer, p) != nullptr;
    pclose(p);
    if (!has || answer[0] == '?') return;
    answer[strcspn(answer, " \n")] = 0;
    size_t length = strlen(e->message);
    snprintf(e->message + length, sizeof e->message - length, " (%s)", short_name(answer));
}

/* --- a thread, a block, a grid --- */

void kernel_thread()
{
    engine *e = self;
    e->kernel->run(e->args);
    thread_left(e, me());
}

static void run_block(engine *e, uint64_t number)
{
    const index3 &g = block.grid;
    block.index = {(uint32_t)(number % g.x), (uint32_t)(number / g.x % g.y),
                   (uint32_t)(number / g.x / g.y)};
    e->block_number = (uint32_t)number;
    e->collectives = 0;
    e->stats.blocks++;
    e->stats.threads += e->threads;
    shared_poison(e);
    if (e->race) race_block(e);
    start_fibers(e);
    if (!e->failed && e->live) describe_stuck(e);
    if (!e->failed) shared_verify(e);
}

/* Every number once: forward, backward, or in steps of something that has no factor in common. */
static uint64_t block_order(const engine *e, uint64_t i, uint64_t blocks, uint64_t start,
                            uint64_t step)
{
    switch (e->options.schedule) {
    case EMU_FORWARD: return i;
    case EMU_REVERSE: return blocks - 1 - i;
    default: return (uint64_t)((start + (unsigned __int128)i * step) % blocks);
    }
}

static void run_grid(engine *e, uint64_t blocks)
{
    uint64_t start = random_bits(e) % blocks, step = random_bits(e) % blocks;
    while (std::gcd(step, blocks) != 1) step = (step + 1) % blocks;
    for (uint64_t i = 0; i < blocks && !e->failed; i++)
        run_block(e, block_order(e, i, blocks, start, step));
}

/* An OS thread's engine goes with the thread. */
struct engine_owner {
    ~engine_owner()
    {
        engine *e = self;
        if (!e) return;
        for (fiber &f : e->fibers) {
            free(f.copies);
            free(f.groups);
            free(f.plains);
        }
        release_stacks(e);
        shared_release(e);
        faults_release();
        race_release();
        free(e);
        self = nullptr;
    }
    void hold() {} /* what is used is destroyed */
};

static engine *this_engine()
{
    static thread_local engine_owner owner;
    if (!self) {
        owner.hold();
        void *p = nullptr;
        if (posix_memalign(&p, 64, sizeof(engine)) != 0) abort();
        memset(p, 0, sizeof(engine));
        self = static_cast<engine *>(p);
        make_stacks(self);
    }
    return self;
}

/* What cuLaunchKernel or the hardware would refuse. */
static bool refused(engine *e, const char *name, uint64_t blocks, const index3 &grid,
                    uint32_t threads, size_t shared_bytes)
{
    size_t room = sizeof e->message;
    if (!e->kernel) {
        snprintf(e->message, room, "there is no kernel %s", name);
    } else if (!blocks || grid.y > 65535 || grid.z > 65535 || grid.x > 0x7fffffffu) {
        snprintf(e->message, room, "%s: a grid of (%u, %u, %u) blocks cannot be launched", name,
                 grid.x, grid.y, grid.z);
    } else if (!threads || threads % LANES || threads > e->kernel->threads) {
        snprintf(e->message, room, "%s: %u threads; whole warps are wanted, %u threads at most",
                 name, threads, e->kernel->threads);
    } else if (shared_bytes > MAX_SHARED) {
        snprintf(e->message, room, "%s: %zu bytes of shared memory; a block has at most %zu", name,
                 shared_bytes, MAX_SHARED);
    } else {
        return false;
    }
    return true;
}

} // namespace emu

using namespace emu;

const char *emu_launch(const char *name, uint32_t grid_x, uint32_t grid_y, uint32_t grid_z,
                       uint32_t threads, size_t shared_bytes, const void *args)
{
    engine *e = this_engine();
    index3 grid = {grid_x, grid_y, grid_z};
    uint64_t blocks = (uint64_t)grid_x * grid_y * grid_z;
    e->kernel = find_kernel(name);
    if (refused(e, name, blocks, grid, threads, shared_bytes)) return e->message;

    e->options = emu_get();
    e->random = (e->options.seed + 1) * 0x9e3779b97f4a7c15ull | 1;
    e->stats = {};
    e->stats.launches = 1;
    e->failed = false;
    e->failure_pc = nullptr;
    e->threads = threads;
    e->launch = ++launches;
    e->race = race_build();
    e->stats.plain = e->race;
    void *copied = malloc(e->kernel->args_bytes);
    if (!copied) abort();
    memcpy(copied, args, e->kernel->args_bytes);
    e->args = copied;
    shared_prepare(e, shared_bytes);
    block = {{0, 0, 0}, {threads, 1, 1}, grid, e->shared};

    faults_begin(e);
    run_grid(e, blocks);
    faults_end(e);
    if (e->failure_pc) append_place(e);

    free(copied);
    std::lock_guard<std::mutex> guard(lock);
    add(stats, e->stats);
    return e->failed ? e->message : nullptr;
}

void emu_set(const emu_options *o)
{
    std::lock_guard<std::mutex> guard(lock);
    options = *o;
}

emu_options emu_get(void)
{
    std::lock_guard<std::mutex> guard(lock);
    emu_options o = options;
    if (!o.collective_limit) o.collective_limit = 50000000;
    if (!o.seconds) o.seconds = 120;
    return o;
}

void emu_stats_reset(void)
{
    std::lock_guard<std::mutex> guard(lock);
    stats = {};
}

emu_stats emu_stats_get(void)
{
    std::lock_guard<std::mutex> guard(lock);
    return stats;
}

int emu_kernel_info(const char *name, size_t *args_bytes, uint32_t *threads)
{
    const kernel_entry *k = find_kernel(name);
    if (!k) return -1;
    *args_bytes = k->args_bytes;
    *threads = k->threads;
    return 0;
}

const char *emu_kernel(size_t i)
{
    const kernel_entry *k = kernels;
    while (k && i--) k = k->next;
    return k ? k->name : nullptr;
}

int emu_race_build(void)
{
    return race_build();
}
