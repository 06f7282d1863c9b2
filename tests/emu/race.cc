/*
 * Races: two accesses to one place by different threads, one of them a write, with nothing between
 * that orders them. Kernels compiled with -fsanitize=thread call a function before each load and
 * store; the functions are these, in place of the sanitizer's own, which knows nothing of fibers.
 *
 * Order is kept by clocks. Each warp counts; at a barrier, the warps that meet learn each other's
 * counts and begin a new one; __syncwarp begins a new one for its warp. An access is remembered by
 * thread and count, and comes before another if the other's warp knows of a later count. It does
 * not matter which ran first, so a barrier that is missing is found under every schedule.
 *
 * For each byte of shared and of global memory we remember the last write and two reads since, of
 * different warps where there are such: one is not enough, since the thread that then writes may be
 * the one that read last. Four bytes that were always touched together share one memory. What
 * blocks of a grid do is never ordered. Atomics do not race with each other. Destinations of
 * cp.async are in flight from issue until the thread has waited: nobody may touch them. load16
 * takes a path on the GPU that does not see writes: what it reads must not have been written by the
 * grid at all.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "tests/emu/runtime.h"

namespace emu {

static bool compiled_in;

bool race_build()
{
    return compiled_in;
}

/* --- what is remembered --- */

/* An access: generation (33 bits), thread (10), atomic (1), the count of its warp (20). 0: none.
 * For shared memory the generation is a number of the block; for global memory 16 bits of the
 * launch's number and 17 of the block's. */
typedef uint64_t access;

struct cell {
    access write, read, read2;
};

constexpr unsigned COUNT_BITS = 20;
constexpr access ATOMIC = 1u << COUNT_BITS, COUNT = ATOMIC - 1;

static unsigned thread_of(access a)
{
    return a >> (COUNT_BITS + 1) & (THREADS - 1);
}

static uint64_t generation_of(access a)
{
    return a >> (COUNT_BITS + 11);
}

static access make_access(uint64_t generation, const fiber *f, bool atomic)
{
    uint32_t count = f->warp->clock[f->warp->index];
    if (count > COUNT) fail("more barriers than can be counted for finding races");
    return generation << (COUNT_BITS + 11) | (access)f->index << (COUNT_BITS + 1) |
           (atomic ? ATOMIC : 0) | count;
}

/* The cells of a piece of memory: one for each word of four bytes; a word whose bytes have had
 * different fates is split, and has one for each byte. Pages that are not touched cost nothing. */
struct shadow {
    cell *words, *bytes;
};

constexpr access SPLIT = ~(access)0;

static size_t cells_in(size_t bytes)
{
    return (bytes + 3) / 4 * 5;
}

static cell *map_cells(size_t bytes)
{
    void *p = mmap(nullptr, cells_in(bytes) * sizeof(cell), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) abort();
    return static_cast<cell *>(p);
}

static shadow shadow_of(void *cells, size_t bytes)
{
    cell *c = static_cast<cell *>(cells);
    return {c, c + (bytes + 3) / 4};
}

/* Shared memory's: of one engine, all that a block can have. */
static __thread void *shared_cells;
static __thread uint64_t shared_generation; /* of the block */
static __thread uint16_t *flight; /* by word: thread + 1 whose cp.async is under way */

/* --- order --- */

void race_block(engine *e)
{
    if (!shared_cells) {
        shared_cells = map_cells(MAX_SHARED);
        flight = static_cast<uint16_t *>(malloc(MAX_SHARED / 4 * sizeof *flight));
        if (!flight) abort();
    }
    /* One less than there could be: SPLIT is no access. */
    shared_generation = (shared_generation + 1) % 0x1ffffffffu;
    memset(flight, 0, (e->shared_bytes + 3) / 4 * sizeof *flight);
    for (unsigned w = 0; w < e->threads / LANES; w++) {
        memset(e->warps[w].clock, 0, sizeof e->warps[w].clock);
        e->warps[w].clock[w] = 1;
        for (unsigned i = 0; i < LANES; i++) e->fibers[w * LANES + i].n_plain = 0;
    }
}

void race_release()
{
    if (shared_cells) munmap(shared_cells, cells_in(MAX_SHARED) * sizeof(cell));
    free(flight);
    shared_cells = nullptr;
}

void race_sync(uint32_t warps)
{
    engine *e = self;
    if (!e->race) return;
    uint32_t latest[WARPS] = {};
    for (uint32_t s = warps; s; s &= s - 1) {
        warp *w = &e->warps[__builtin_ctz(s)];
        w->clock[w->index]++;
        for (unsigned i = 0; i < WARPS; i++)
            if (w->clock[i] > latest[i]) latest[i] = w->clock[i];
    }
    for (uint32_t s = warps; s; s &= s - 1)
        memcpy(e->warps[__builtin_ctz(s)].clock, latest, sizeof latest);
}

/* Whether a comes before whatever f does now. */
static inline bool ordered(access a, access now, const fiber *f, bool shared)
{
    if (!a) return true;
    uint64_t then = generation_of(a), here = generation_of(now);
    if (then != here) return shared || then >> 17 != here >> 17; /* else a block of this grid */
    unsigned t = thread_of(a);
    return t == f->index || (a & COUNT) < f->warp->clock[t / LANES];
}

/* --- an access is checked and remembered --- */

struct site {
    const void *pc;
    const char *file;
    int line;
};

enum how { READS, READS_ONCE, WRITES, ATOMICALLY };

/* What is done now, to which memory. */
struct deed {
    how what;
    access now;
    const fiber *by;
    bool shared;
    site at;
};

[[noreturn]] static void report(const deed &d, size_t offset, access other, const char *has)
{
    engine *e = self;
    static const char *const does[] = {"reads", "reads by load16", "writes",
                                       "changes by an atomic"};
    char where[80] = "", block_name[32] = "";
    if (d.at.file) snprintf(where, sizeof where, " (%s:%d)", short_name(d.at.file), d.at.line);
    if (generation_of(other) != generation_of(d.now))
        snprintf(block_name, sizeof block_name, " of block %u",
                 (unsigned)(generation_of(other) & 0x1ffffu));
    e->failure_pc = d.at.pc;
    fail("race: thread %u %s %s memory at offset %zu, which thread %u%s %s%s", d.by->index,
         does[d.what], d.shared ? "shared" : "global", offset, thread_of(other), block_name, has,
         where);
    to_main();
}

static inline bool comes_before(access a, const deed &d)
{
    return ordered(a, d.now, d.by, d.shared);
}

static inline bool same_warp(access a, access b)
{
    return a >> (COUNT_BITS + 6) == b >> (COUNT_BITS + 6);
}

static inline void read_cell(cell *c, const deed &d, size_t offset)
{
    if (!comes_before(c->write, d))
        report(d, offset, c->write, "has written; no barrier lies between");
    if (d.what == READS_ONCE && c->write &&
        generation_of(c->write) >> 17 == generation_of(d.now) >> 17)
        report(d, offset, c->write, "has written: load16 is for what the grid does not write");
    if (comes_before(c->read, d)) c->read = d.now;
    else if (comes_before(c->read2, d)) c->read2 = d.now;
    else if (same_warp(c->read, c->read2) && !same_warp(c->read, d.now)) c->read2 = d.now;
}

static inline void write_cell(cell *c, const deed &d, size_t offset)
{
    bool both_atomic = (c->write & d.now & ATOMIC) != 0;
    if (!both_atomic && !comes_before(c->write, d))
        report(d, offset, c->write, "has written; no barrier lies between");
    if (!comes_before(c->read, d)) report(d, offset, c->read, "has read; no barrier lies between");
    if (!comes_before(c->read2, d))
        report(d, offset, c->read2, "has read; no barrier lies between");
    *c = {d.now, 0, 0};
}

static inline void touch_cell(cell *c, const deed &d, size_t offset)
{
    if (d.what <= READS_ONCE) read_cell(c, d, offset);
    else write_cell(c, d, offset);
}

static void touch_split(cell *word, cell *bytes, const deed &d, size_t from, size_t to)
{
    if (word->write != SPLIT) {
        for (unsigned i = 0; i < 4; i++) bytes[i] = *word;
        word->write = SPLIT;
    }
    for (size_t i = from; i < to; i++) touch_cell(&bytes[i % 4], d, i);
    /* All bytes have the same past again. */
    if (d.what >= WRITES && to - from == 4) *word = {d.now, 0, 0};
}

static void touch(const shadow &m, const deed &d, size_t offset, size_t n)
{
    size_t end = offset + n;
    for (size_t w = offset / 4; 4 * w < end; w++) {
        size_t from = 4 * w < offset ? offset : 4 * w, to = 4 * w + 4 < end ? 4 * w + 4 : end;
        cell *word = &m.words[w];
        if (to - from == 4 && word->write != SPLIT) touch_cell(word, d, from);
        else touch_split(word, m.bytes + 4 * w, d, from, to);
    }
}

static void check_flight(const deed &d, size_t offset, size_t n)
{
    for (size_t w = offset / 4; 4 * w < offset + n; w++) {
        if (!flight[w]) continue;
        engine *e = self;
        char where[80] = "";
        if (d.at.file) snprintf(where, sizeof where, " (%s:%d)", short_name(d.at.file), d.at.line);
        e->failure_pc = d.at.pc;
        fail("race: thread %u %s shared memory at offset %zu, into which a cp.async of thread %u "
             "is in flight%s",
             d.by->index, d.what <= READS_ONCE ? "reads" : "writes", 4 * w, flight[w] - 1u, where);
    }
}

static void shared_access(size_t offset, size_t n, how h, const site &s)
{
    const fiber *f = me();
    deed d = {h, make_access(shared_generation, f, h == ATOMICALLY), f, true, s};
    check_flight(d, offset, n);
    touch(shadow_of(shared_cells, MAX_SHARED), d, offset, n);
}

static uint64_t global_generation(const engine *e)
{
    return (uint64_t)(e->launch & 0xffffu) << 17 | (e->block_number & 0x1ffffu);
}

/* The cells of an allocation, made when the first is wanted. Numbers of launches come again after
 * 65,536: until then everything must have been forgotten. */
static shadow global_shadow(allocation *a, const engine *e)
{
    if (!a->cells) {
        a->cells = map_cells(a->bytes);
    } else if (a->cells_from != e->launch >> 16) {
        madvise(a->cells, cells_in(a->bytes) * sizeof(cell), MADV_DONTNEED);
    }
    a->cells_from = e->launch >> 16;
    return shadow_of(a->cells, a->bytes);
}

void race_forget(allocation *a)
{
    if (a->cells) munmap(a->cells, cells_in(a->bytes) * sizeof(cell));
}

static void global_access(const unsigned char *p, size_t n, how h, const site &s)
{
    engine *e = self;
    const fiber *f = me();
    allocation *a = const_cast<allocation *>(allocation_of(p));
    if (!a || p < a->begin || n > a->bytes || (size_t)(p - a->begin) > a->bytes - n) {
        e->failure_pc = s.pc;
        char who[32];
        snprintf(who, sizeof who, "thread %u", f->index);
        fail_outside_global(who, p);
    }
    deed d = {h, make_access(global_generation(e), f, h == ATOMICALLY), f, false, s};
    touch(global_shadow(a, e), d, (size_t)(p - a->begin), n);
}

static void access_at(const void *address, size_t n, how h, const site &s)
{
    engine *e = self;
    const unsigned char *p = static_cast<const unsigned char *>(address);
    if (in_shared(e, p)) {
        size_t at = (size_t)(p - e->shared);
        if (n <= e->shared_bytes - at) {
            shared_access(at, n, h, s);
            return;
        }
    }
    if (p >= e->region && p < e->region + MAX_SHARED + 4096) {
        e->failure_pc = s.pc;
        fail("thread %u: access to shared memory at offset %td of %zu bytes", me()->index,
             p - e->shared, e->shared_bytes);
    }
    if (in_arena(p)) global_access(p, n, h, s);
}

void race_read(const void *p, size_t n, const char *file, int line)
{
    access_at(p, n, READS, {nullptr, file, line});
}

void race_atomic(const void *p, size_t n, const char *file, int line)
{
    access_at(p, n, ATOMICALLY, {nullptr, file, line});
}

void race_once(const void *p, size_t n, const char *file, int line)
{
    access_at(p, n, READS_ONCE, {nullptr, file, line});
}

/* A cp.async is a write when it is issued, as to those who still use the old bytes, and another
 * when it has been waited for, as to those who want the new ones. */
void race_flight(const void *s, size_t n, bool begins, const char *file, int line)
{
    size_t at = (size_t)(static_cast<const unsigned char *>(s) - self->shared);
    if (!begins) memset(&flight[at / 4], 0, n / 4 * sizeof *flight);
    shared_access(at, n, WRITES, {nullptr, file, line});
    if (!begins) return;
    for (size_t i = 0; i < n / 4; i++) flight[at / 4 + i] = (uint16_t)(me()->index + 1);
}

/* --- bank conflicts of plain accesses --- What each lane does between two meetings of its warp is
 * written down, and compared when they meet: the lanes' next accesses from the same instruction are
 * taken to be one access of the warp. */

struct plain {
    const void *pc;
    uint32_t offset, bytes;
};

static void write_down(fiber *f, const void *pc, size_t offset, size_t n)
{
    if (f->n_plain == f->plain_room) {
        f->plain_room = f->plain_room ? 2 * f->plain_room : 64;
        f->plains = static_cast<plain *>(realloc(f->plains, f->plain_room * sizeof(plain)));
        if (!f->plains) abort();
    }
    f->plains[f->n_plain++] = {pc, (uint32_t)offset, (uint32_t)n};
}

/* The most different words of one bank that `count` lanes, of `bytes` each, want at once. */
static unsigned most_of_a_bank(const uint32_t *offsets, unsigned count, uint32_t bytes)
{
    uint32_t seen[LANES][LANES];
    unsigned n[LANES] = {}, most = 1;
    for (unsigned i = 0; i < count; i++)
        for (uint32_t word = offsets[i] / 4; word <= (offsets[i] + bytes - 1) / 4; word++) {
            unsigned bank = word % LANES, k = 0;
            while (k < n[bank] && seen[bank][k] != word) k++;
            if (k < n[bank] || k == LANES) continue;
            seen[bank][n[bank]++] = word;
            if (n[bank] > most) most = n[bank];
        }
    return most;
}

/* 128 bytes pass at a time: 32 lanes of 4 bytes, 8 lanes of 16. */
static void count_passes(engine *e, const uint32_t (&offset)[LANES], uint32_t lanes, uint32_t bytes)
{
    unsigned together = bytes <= 4 ? LANES : bytes >= 128 ? 1 : 128 / bytes;
    for (unsigned first = 0; first < LANES; first += together) {
        uint32_t list[LANES];
        unsigned count = 0;
        for (unsigned i = first; i < first + together && i < LANES; i++)
            if (lanes >> i & 1) list[count++] = offset[i];
        if (!count) continue;
        unsigned passes = most_of_a_bank(list, count, bytes);
        e->stats.shared_passes += passes;
        e->stats.shared_conflicts += passes - 1;
    }
}

void race_meet(warp *w, uint32_t lanes)
{
    unsigned next[LANES] = {};
    for (uint32_t left = lanes; left;) {
        unsigned lead = (unsigned)__builtin_ctz(left);
        if (next[lead] == w->lanes[lead].n_plain) {
            left &= left - 1;
            continue;
        }
        const plain first = w->lanes[lead].plains[next[lead]];
        uint32_t offset[LANES], group = 0;
        for (uint32_t rest = left; rest; rest &= rest - 1) {
            unsigned i = (unsigned)__builtin_ctz(rest);
            fiber *f = &w->lanes[i];
            if (next[i] == f->n_plain || f->plains[next[i]].pc != first.pc) continue;
            offset[i] = f->plains[next[i]++].offset;
            group |= 1u << i;
        }
        count_passes(self, offset, group, first.bytes);
    }
    for (uint32_t rest = lanes; rest; rest &= rest - 1)
        w->lanes[__builtin_ctz(rest)].n_plain = 0;
}

/* --- what the compiler calls --- */

static void seen(const void *p, size_t n, bool write, const void *pc)
{
    engine *e = self;
    if (!current || !e || current == &e->main) return;
    if (in_shared(e, p)) {
        size_t at = (size_t)(static_cast<const unsigned char *>(p) - e->shared);
        if (e->options.banks) write_down(me(), pc, at, n);
    } else if (in_arena(p)) {
        if (write) e->stats.stored += n;
        else e->stats.loaded += n;
    } else if (!(static_cast<const unsigned char *>(p) >= e->region &&
                 static_cast<const unsigned char *>(p) < e->region + MAX_SHARED + 4096)) {
        return;
    }
    access_at(p, n, write ? WRITES : READS, {pc, nullptr, 0});
}

} // namespace emu

#define EMU_PC __builtin_return_address(0)
#define EMU_HOOKS(n)                                                                               \
    void __tsan_read##n(void *p) { emu::seen(p, n, false, EMU_PC); }                               \
    void __tsan_write##n(void *p) { emu::seen(p, n, true, EMU_PC); }                               \
    void __tsan_unaligned_read##n(void *p) { emu::seen(p, n, false, EMU_PC); }                     \
    void __tsan_unaligned_write##n(void *p) { emu::seen(p, n, true, EMU_PC); }                     \
    void __tsan_volatile_read##n(void *p) { emu::seen(p, n, false, EMU_PC); }                      \
    void __tsan_volatile_write##n(void *p) { emu::seen(p, n, true, EMU_PC); }

extern "C" {
void __tsan_init() { emu::compiled_in = true; }
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}
EMU_HOOKS(1)
EMU_HOOKS(2)
EMU_HOOKS(4)
EMU_HOOKS(8)
EMU_HOOKS(16)
void __tsan_read_range(void *p, size_t n) { emu::seen(p, n, false, EMU_PC); }
void __tsan_write_range(void *p, size_t n) { emu::seen(p, n, true, EMU_PC); }
void *__tsan_memcpy(void *to, const void *from, size_t n)
{
    emu::seen(from, n, false, EMU_PC);
    emu::seen(to, n, true, EMU_PC);
    return memcpy(to, from, n);
}
void *__tsan_memmove(void *to, const void *from, size_t n)
{
    emu::seen(from, n, false, EMU_PC);
    emu::seen(to, n, true, EMU_PC);
    return memmove(to, from, n);
}
void *__tsan_memset(void *to, int c, size_t n)
{
    emu::seen(to, n, true, EMU_PC);
    return memset(to, c, n);
}
}
