/*
 * What lanes do together. A lane leaves its operands with its warp and waits; the last to arrive
 * does the work for all of them, so that a collective costs one pass over data that lies side by
 * side. Lanes that arrive elsewhere, or that have left, end the grid with both places named.
 *
 * A barrier is a collective of each warp, whose last lane then counts its warp in.
 *
 * Results are read by a lane when it goes on, from a slot that is its own: before it has, it cannot
 * arrive at another collective, and before all have arrived there nothing is overwritten.
 */
#include <stdio.h>

#include "tests/emu/runtime.h"

namespace emu {

static void start_waiting(fiber *f)
{
    warp *w = f->warp;
    w->ready &= ~(1u << f->lane);
    if (!w->ready) self->ready &= ~(1u << w->index);
    give_way();
}

void wake(warp *w, uint32_t lanes)
{
    w->ready |= lanes;
    self->ready |= 1u << w->index;
}

static bool same_place(const place &a, const place &b)
{
    return a.line == b.line && a.what == b.what &&
           (a.file == b.file || !__builtin_strcmp(a.file, b.file));
}

static const char *who(const fiber *f, char (&text)[48])
{
    snprintf(text, sizeof text, "thread %u (warp %u, lane %u)", f->index, f->index / LANES,
             f->lane);
    return text;
}

[[noreturn]] static void diverged(warp *w, const meeting &m, const place &here)
{
    char a[48], b[48];
    const fiber *other = &w->lanes[__builtin_ctz(m.arrived)];
    fail("divergence: %s is at %s, %s:%d, but %s of the same warp waits at %s, %s:%d",
         who(me(), a), here.what, short_name(here.file), here.line, who(other, b), m.where.what,
         short_name(m.where.file), m.where.line);
    to_main();
}

/* The meeting for a mask; a new one if this lane is the first. */
static meeting *find_meeting(warp *w, uint32_t mask, const place &here)
{
    fiber *f = me();
    if (!(mask >> f->lane & 1))
        fail("%s, %s:%d: lane %u is not in its own mask 0x%08x", here.what, short_name(here.file),
             here.line, f->lane, mask);
    for (unsigned i = 0; i < w->n_meetings; i++) {
        meeting *m = &w->meetings[i];
        if (m->mask == mask && same_place(m->where, here)) return m;
        /* They wait for this lane there, and it for one of them here: neither comes. */
        if (m->mask >> f->lane & 1 && m->arrived & mask) diverged(w, *m, here);
    }
    uint32_t left = mask & ~w->present;
    if (left)
        fail("%s, %s:%d: lane %u of warp %u takes part but has left the kernel", here.what,
             short_name(here.file), here.line, (unsigned)__builtin_ctz(left), w->index);
    meeting *m = &w->meetings[w->n_meetings++];
    *m = {mask, 0, here};
    return m;
}

static void complete(warp *w, meeting *m)
{
    engine *e = self;
    if (e->options.banks) race_meet(w, m->mask);
    if (++e->collectives > e->options.collective_limit)
        fail("%s, %s:%d: the block has done %llu collectives and not ended", m->where.what,
             short_name(m->where.file), m->where.line, (unsigned long long)e->collectives);
    *m = w->meetings[--w->n_meetings];
}

bool last_to_arrive(warp *w, uint32_t mask, const char *what, const char *file, int line)
{
    fiber *f = me();
    meeting *m = &w->meetings[0];
    /* Nearly always the warp has one meeting, and this lane knows it by its addresses. */
    if (w->n_meetings != 1 || m->mask != mask || m->where.line != line || m->where.file != file ||
        m->where.what != what)
        m = find_meeting(w, mask, {what, file, line});
    m->arrived |= 1u << f->lane;
    if (m->arrived == mask) {
        complete(w, m);
        return true;
    }
    start_waiting(f);
    return false;
}

/* --- synchronisation --- */

void syncwarp(uint32_t mask, const char *file, int line)
{
    warp *w = me()->warp;
    if (!last_to_arrive(w, mask, "__syncwarp", file, line)) return;
    self->stats.collectives++;
    race_sync(1u << w->index);
    wake(w, mask);
}

static void barrier_done(engine *e, barrier *b)
{
    uint32_t warps = b->warps;
    *b = {};
    e->stats.barriers++;
    race_sync(warps);
    for (; warps; warps &= warps - 1) {
        warp *w = &e->warps[__builtin_ctz(warps)];
        wake(w, ALL);
    }
}

/* The last lane of a warp: counts the warp in. It goes on if the barrier is complete, else waits.
 * */
static void warp_at_barrier(unsigned id, unsigned threads, const place &here)
{
    engine *e = self;
    fiber *f = me();
    warp *w = f->warp;
    barrier *b = &e->barriers[id];
    if (!b->arrived) {
        b->expected = threads;
        b->where = here;
    } else if (b->expected != threads) {
        fail("bar_sync %u, %s:%d: for %u threads, but at %s:%d for %u", id, short_name(here.file),
             here.line, threads, short_name(b->where.file), b->where.line, b->expected);
    } else if (id == 0 && !same_place(b->where, here)) {
        fail("divergence: warp %u is at %s, %s:%d, but another warp waits at %s:%d", w->index,
             here.what, short_name(here.file), here.line, short_name(b->where.file),
             b->where.line);
    }
    b->arrived += LANES;
    b->warps |= 1u << w->index;
    if (b->arrived == b->expected) {
        barrier_done(e, b);
        return;
    }
    w->at_barrier = here;
    start_waiting(f);
}

void syncthreads(const char *file, int line)
{
    engine *e = self;
    if (e->live != e->threads) {
        unsigned i = 0;
        while (!e->fibers[i].gone) i++;
        fail("__syncthreads, %s:%d: thread %u has left the kernel", short_name(file), line, i);
    }
    const char *what = "__syncthreads";
    if (last_to_arrive(me()->warp, ALL, what, file, line))
        warp_at_barrier(0, e->threads, {what, file, line});
}

void named_barrier(int id, int threads, const char *file, int line)
{
    if (id < 1 || id >= (int)BARRIERS)
        fail("bar_sync, %s:%d: there is no barrier %d (1 to 15)", short_name(file), line, id);
    if (threads <= 0 || threads % (int)LANES || threads > (int)self->threads)
        fail("bar_sync %d, %s:%d: %d threads, of a block of %u: whole warps are wanted", id,
             short_name(file), line, threads, self->threads);
    /* The number is part of the place: lanes must agree on it. */
    static const char *const names[BARRIERS] = {
        "bar_sync 0", "bar_sync 1", "bar_sync 2", "bar_sync 3", "bar_sync 4", "bar_sync 5",
        "bar_sync 6", "bar_sync 7", "bar_sync 8", "bar_sync 9", "bar_sync 10", "bar_sync 11",
        "bar_sync 12", "bar_sync 13", "bar_sync 14", "bar_sync 15"};
    if (last_to_arrive(me()->warp, ALL, names[id], file, line))
        warp_at_barrier((unsigned)id, (unsigned)threads, {names[id], file, line});
}

/* A thread has left: whoever waits for it waits in vain. */
bool thread_left(engine *e, fiber *f)
{
    warp *w = f->warp;
    f->gone = true;
    w->present &= ~(1u << f->lane);
    w->ready &= ~(1u << f->lane);
    if (!w->ready) e->ready &= ~(1u << w->index);
    e->live--;
    if (e->options.banks && !w->present) race_meet(w, ALL);
    for (unsigned i = 0; i < w->n_meetings; i++)
        if (w->meetings[i].mask >> f->lane & 1) {
            const place &p = w->meetings[i].where;
            fail("%s, %s:%d: lane %u of warp %u takes part but has left the kernel", p.what,
                 short_name(p.file), p.line, f->lane, w->index);
            return false;
        }
    if (e->barriers[0].arrived) {
        const place &p = e->barriers[0].where;
        fail("%s, %s:%d: thread %u has left the kernel", p.what, short_name(p.file), p.line,
             f->index);
        return false;
    }
    return true;
}

/* Where a thread waits that has not left: in a meeting of its warp, or with its warp at a barrier.
 * */
static const place &where_it_waits(const fiber *f)
{
    const warp *w = f->warp;
    for (unsigned i = 0; i < w->n_meetings; i++)
        if (w->meetings[i].arrived >> f->lane & 1) return w->meetings[i].where;
    return w->at_barrier;
}

/* Nobody may go on, and some have not left. */
void describe_stuck(engine *e)
{
    const fiber *first = nullptr, *other = nullptr;
    for (unsigned i = 0; i < e->threads; i++) {
        const fiber *f = &e->fibers[i];
        if (f->gone) continue;
        if (!first) first = f;
        else if (!other && !same_place(where_it_waits(f), where_it_waits(first))) other = f;
    }
    char a[48], b[48];
    const place &p = where_it_waits(first), &q = where_it_waits(other ? other : first);
    if (other)
        fail("deadlock: %u threads never leave; %s waits at %s, %s:%d, %s at %s, %s:%d", e->live,
             who(first, a), p.what, short_name(p.file), p.line, who(other, b), q.what,
             short_name(q.file), q.line);
    else
        fail("deadlock: %u threads never leave; %s waits at %s, %s:%d", e->live, who(first, a),
             p.what, short_name(p.file), p.line);
}

/* --- data between lanes --- */

/* The lane that `lane` reads; its own where the sum leaves the warp. */
static unsigned source_of(shuffle how, unsigned lane, int by)
{
    unsigned n = (unsigned)by;
    switch (how) {
    case SHUFFLE_TO: return n & 31;
    case SHUFFLE_XOR: return lane ^ (n & 31);
    case SHUFFLE_UP: return n > lane ? lane : lane - n;
    default: return n > 31 - lane ? lane : lane + n;
    }
}

uint64_t shuffle_bits(shuffle how, uint32_t mask, uint64_t v, int by, const char *file, int line)
{
    static const char *const names[] = {"shfl", "shfl_xor", "shfl_up", "shfl_down"};
    fiber *f = me();
    warp *w = f->warp;
    w->in[f->lane] = v;
    w->r[0][f->lane] = source_of(how, f->lane, by);
    if (!last_to_arrive(w, mask, names[how], file, line)) return w->out[f->lane];
    for (unsigned i = 0; i < LANES; i++) {
        if (!(mask >> i & 1)) continue;
        unsigned from = w->r[0][i];
        if (!(mask >> from & 1))
            fail("%s, %s:%d: lane %u reads lane %u, which is not in the mask 0x%08x", names[how],
                 short_name(file), line, i, from, mask);
        w->out[i] = w->in[from];
    }
    self->stats.collectives++;
    wake(w, mask);
    return w->out[f->lane];
}

uint32_t vote(uint32_t mask, bool p, const char *file, int line)
{
    fiber *f = me();
    warp *w = f->warp;
    w->in[f->lane] = p;
    if (!last_to_arrive(w, mask, "vote", file, line)) return (uint32_t)w->out[f->lane];
    uint32_t yes = 0;
    for (unsigned i = 0; i < LANES; i++)
        if (mask >> i & 1) yes |= (uint32_t)(w->in[i] & 1) << i;
    for (unsigned i = 0; i < LANES; i++)
        if (mask >> i & 1) w->out[i] = yes;
    self->stats.collectives++;
    wake(w, mask);
    return yes;
}

} // namespace emu
