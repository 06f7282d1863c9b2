/*
 * Races: two accesses to one place by different threads, one of them a write, with nothing between that
 * orders them. Kernels compiled with -fsanitize=thread call a function before each load and store; the
 * functions are these, in place of the sanitizer's own, which knows nothing of fibers.
 *
 * Order is kept by clocks. Each warp counts; at a barrier, the warps that meet learn each other's counts
 * and begin a new one; __syncwarp begins a new one for its warp. An access is remembered by thread and
 * count, and comes before another if the other's warp knows of a later count. It does not matter which
 * ran first, so a barrier that is missing is found under every schedule.
 *
 * For each byte of shared memory and each two bytes of global memory we remember the last write and two
 * reads since, of different warps where there are such: one is not enough, since the thread that then
 * writes may be the one that read last. What blocks of a grid do is never ordered. Atomics do not race
 * with each other. Destinations of cp.async are in flight from issue until the thread has waited: nobody
 * may touch them. load16 takes a path on the GPU that does not see writes: what it reads must not have been
 * written by the grid at all.
 *
 * Single bytes that are written to global memory are not remembered: neighbours would look like races.
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

/* An access: generation (33 bits), thread (10), atomic (1), the count of its warp (20). 0: none. For
 * shared memory the generation is a number of the block; for global memory 16 bits of the launch's
 * number and 17 of the block's. */
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

/* Shared memory's cells: of one engine, all that a block can have. */
struct shadow {
    uint64_t generation; /* of the block */
    cell cells[MAX_SHARED];
    uint16_t flight[MAX_SHARED]; /* thread + 1 whose cp.async is under way */
};
static __thread shadow *shared_shadow;

/* --- order --- */

void race_block(engine *e)
{
    if (!shared_shadow) {
        void *p = mmap(nullptr, sizeof(shadow), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) abort();
        shared_shadow = static_cast<shadow *>(p);
    }
    shared_shadow->generation = (shared_shadow->generation + 1) & 0x1ffffffffu;
    memset(shared_shadow->flight, 0, e->shared_bytes * sizeof(uint16_t));
    for (unsigned w = 0; w < e->threads / LANES; w++) {
        memset(e->warps[w].clock, 0, sizeof e->warps[w].clock);
        e->warps[w].clock[w] = 1;
        for (unsigned i = 0; i < LANES; i++) e->fibers[w * LANES + i].n_plain = 0;
    }
}

void race_release()
{
    if (shared_shadow) munmap(shared_shadow, sizeof(shadow));
    shared_shadow = nullptr;
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
    if (then != here) return shared || then >> 17 != here >> 17; /* else another block of this grid */
    unsigned t = thread_of(a);
    return t == f->index || (a & COUNT) < f->warp->clock[t / LANES];
}

/* --- an access is checked and remembered --- */

struct site {
    const void *pc;
    const char *file;
    int line;
};

struct target {
    const char *name;
    size_t offset;
    bool shared;
};

[[noreturn]] static void report(const site &s, const target &t, const char *does, access other,
                                access now, const char *has)
{
    engine *e = self;
    char where[80] = "", block_name[32] = "";
    if (s.file) snprintf(where, sizeof where, " (%s:%d)", short_name(s.file), s.line);
    if (generation_of(other) != generation_of(now))
        snprintf(block_name, sizeof block_name, " of block %u",
                 (unsigned)(generation_of(other) & 0x1ffffu));
    e->failure_pc = s.pc;
    fail("race: thread %u %s %s memory at offset %zu, which thread %u%s %s%s", me()->index, does,
         t.name, t.offset, thread_of(other), block_name, has, where);
    to_main();
}

static inline bool same_warp(access a, access b)
{
    return a >> (COUNT_BITS + 6) == b >> (COUNT_BITS + 6);
}

static inline void remember_read(cell *c, access now, const fiber *f, bool shared)
{
    if (ordered(c->read, now, f, shared)) c->read = now;
    else if (ordered(c->read2, now, f, shared)) c->read2 = now;
    else if (same_warp(c->read, c->read2) && !same_warp(c->read, now)) c->read2 = now;
}

static inline void check_read(cell *c, access now, const fiber *f, const site &s, const target &t)
{
    if (!ordered(c->write, now, f, t.shared))
        report(s, t, "reads", c->write, now, "has written; no barrier lies between");
    remember_read(c, now, f, t.shared);
}

static inline void check_write(cell *c, access now, const fiber *f, const site &s, const target &t)
{
    bool both_atomic = (c->write & now & ATOMIC) != 0;
    if (!both_atomic && !ordered(c->write, now, f, t.shared))
        report(s, t, "writes", c->write, now, "has written; no barrier lies between");
    if (!ordered(c->read, now, f, t.shared))
        report(s, t, "writes", c->read, now, "has read; no barrier lies between");
    if (!ordered(c->read2, now, f, t.shared))
        report(s, t, "writes", c->read2, now, "has read; no barrier lies between");
    *c = {now, 0, 0};
}

static void check_flight(const site &s, size_t offset, const char *does)
{
    unsigned other = shared_shadow->flight[offset];
    if (!other) return;
    engine *e = self;
    char where[80] = "";
    if (s.file) snprintf(where, sizeof where, " (%s:%d)", short_name(s.file), s.line);
    e->failure_pc = s.pc;
    fail("race: thread %u %s shared memory at offset %zu, into which a cp.async of thread %u is in "
         "flight%s",
         me()->index, does, offset, other - 1, where);
}

enum how { READS, WRITES, ATOMICALLY };

static void shared_access(size_t offset, size_t n, how h, const site &s)
{
    fiber *f = me();
    shadow *m = shared_shadow;
    access now = make_access(m->generation, f, h == ATOMICALLY);
    for (size_t i = offset; i < offset + n; i++) {
        if (m->flight[i]) check_flight(s, i, h == READS ? "reads" : "writes");
        target t = {"shared", i, true};
        if (h == READS) check_read(&m->cells[i], now, f, s, t);
        else check_write(&m->cells[i], now, f, s, t);
    }
}

static uint64_t global_generation(const engine *e)
{
    return (uint64_t)(e->launch & 0xffffu) << 17 | (e->block_number & 0x1ffffu);
}

/* The cells of an allocation, made when the first is wanted. Numbers of launches come again after 65,536:
 * until then everything must have been forgotten. */
static cell *cells_of(allocation *a, const engine *e)
{
    size_t bytes = (a->bytes / 2 + 1) * sizeof(cell);
    if (a->cells && a->cells_from == e->launch >> 16) return static_cast<cell *>(a->cells);
    if (!a->cells) {
        void *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) abort();
        a->cells = p;
    } else {
        madvise(a->cells, bytes, MADV_DONTNEED);
    }
    a->cells_from = e->launch >> 16;
    return static_cast<cell *>(a->cells);
}

void race_forget(allocation *a)
{
    if (a->cells) munmap(a->cells, (a->bytes / 2 + 1) * sizeof(cell));
}

static void global_access(const unsigned char *p, size_t n, how h, const site &s)
{
    engine *e = self;
    fiber *f = me();
    allocation *a = const_cast<allocation *>(allocation_of(p));
    if (!a || p < a->begin || n > a->bytes || (size_t)(p - a->begin) > a->bytes - n) {
        e->failure_pc = s.pc;
        if (!a) fail("thread %u: access to global memory at %p, which is in no allocation", f->index, p);
        fail("thread %u: access to global memory at offset %td of an allocation of %zu bytes", f->index,
             p - a->begin, a->bytes);
    }
    if (h != READS && n == 1) return;
    access now = make_access(global_generation(e), f, h == ATOMICALLY);
    size_t first = (size_t)(p - a->begin);
    cell *c = cells_of(a, e);
    for (size_t i = first / 2; i <= (first + n - 1) / 2; i++) {
        target t = {"global", 2 * i, false};
        if (h == READS) check_read(&c[i], now, f, s, t);
        else check_write(&c[i], now, f, s, t);
    }
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

void race_once(const void *address, size_t n, const char *file, int line)
{
    race_read(address, n, file, line);
    const unsigned char *p = static_cast<const unsigned char *>(address);
    if (!in_arena(p)) return;
    engine *e = self;
    allocation *a = const_cast<allocation *>(allocation_of(p));
    const cell *c = cells_of(a, e);
    access now = make_access(global_generation(e), me(), false);
    for (size_t i = (size_t)(p - a->begin) / 2; i < (size_t)(p - a->begin + n) / 2; i++)
        if (c[i].write && generation_of(c[i].write) >> 17 == generation_of(now) >> 17)
            report({nullptr, file, line}, {"global", 2 * i, false}, "reads by load16", c[i].write, now,
                   "has written: load16 is for what the grid does not write");
}

/* A cp.async is a write when it is issued, as to those who still use the old bytes, and another when
 * it has been waited for, as to those who want the new ones. */
void race_flight(const void *s, size_t n, bool begins, const char *file, int line)
{
    size_t at = (size_t)(static_cast<const unsigned char *>(s) - self->shared);
    if (!begins) memset(&shared_shadow->flight[at], 0, n * sizeof(uint16_t));
    shared_access(at, n, WRITES, {nullptr, file, line});
    if (!begins) return;
    for (size_t i = 0; i < n; i++) shared_shadow->flight[at + i] = (uint16_t)(me()->index + 1);
}

/* --- bank conflicts of plain accesses ---
 * What each lane does between two meetings of its warp is written down, and compared when they meet: the
 * lanes' next accesses from the same instruction are taken to be one access of the warp. */

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
        write_down(me(), pc, (size_t)(static_cast<const unsigned char *>(p) - e->shared), n);
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
