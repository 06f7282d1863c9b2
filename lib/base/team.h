/*
 * Workers, and programs they run.
 *
 * A program is a list of phases; a phase is a number of chunks, each a pure function of what earlier
 * phases left behind, so chunks run in any order on any thread, and a phase begins when every chunk
 * of the one before has ended. Chunks are taken one at a time from an atomic counter: a worker that
 * the system has taken away holds up at most the chunk it has begun. The same program can be run by a
 * team's workers, by the calling thread with a deadline (inline), or by both.
 *
 * Workers block all signals, set the floating-point state (round to nearest, denormals kept) and
 * sleep when nothing is there; while a program runs they spin for a bounded time at the end of a
 * phase and then sleep.
 *
 * A core that another program wants as well slows down everybody at the end of every phase. Where that
 * is seen to cost more than the worker brings, the team goes on with one worker less for a while.
 */
#ifndef KVP_BASE_TEAM_H
#define KVP_BASE_TEAM_H

#include "base/base.h"

#include <stdatomic.h>

typedef struct kvp__team kvp__team;

typedef struct kvp__phase {
    /* `scratch` belongs to the thread: kvp__program.scratch_bytes, aligned to a cache line. */
    void (*run)(void *user, uint32_t chunk, void *scratch);
    void *user;
    uint32_t n_chunks; /* 0: the phase is passed over */
} kvp__phase;

typedef struct kvp__program {
    const kvp__phase *phases;
    uint32_t n_phases;
    void (*done)(void *user); /* after the last chunk, from the thread that ran it; may be NULL */
    void *user;
    /* the runner's, set up by kvp__program_init; ask kvp__program_over for the end */
    _Atomic uint64_t cursor;   /* phase << 32 | next chunk */
    _Atomic uint32_t finished; /* chunks of the current phase */
    _Atomic uint32_t over;     /* 1: done is being called, 2: it has returned */
    _Atomic uint32_t cancelled;
    uint32_t work;             /* 0, or so much that programs of equal work take equally long: the
                                  team then watches its pace. Set after kvp__program_init */
    uint64_t started;
    struct kvp__program *next; /* in the team's queue */
    kvp__team *team;           /* NULL: inline */
} kvp__program;

/* The state a thread's floating-point unit had, to be put back. */
typedef struct kvp__fp_state {
    uint64_t bits;
} kvp__fp_state;
kvp__fp_state kvp__fp_enter(void); /* round to nearest, no flushing, no traps */
void kvp__fp_leave(kvp__fp_state s);

/* `threads` > 0, or 0: one per core this process may use. `scratch_bytes` per worker. SYSTEM,
 * NO_MEMORY. Reference-counted: created with one. */
kvp_status kvp__team_create(kvp__team **out, const kvp__hooks *hooks, int32_t threads,
                            size_t scratch_bytes, kvp_error *err);
void kvp__team_acquire(kvp__team *t);
/* Ends and joins the workers with the last count; true if this was the last. */
bool kvp__team_release(kvp__team *t);
uint32_t kvp__team_threads(const kvp__team *t);
uint32_t kvp__cores(void); /* that this process may use */

/* Scratch every chunk may count on, whoever runs it. */
#define KVP__SCRATCH_BYTES (768u << 10)

void kvp__program_init(kvp__program *p, const kvp__phase *phases, uint32_t n_phases,
                       void (*done)(void *), void *user);
/* Hands the program to the team and returns. It stays where it is until it is over. */
void kvp__team_start(kvp__team *t, kvp__program *p);
/* True once every chunk has run and `done` has returned: no thread touches the program any more. May
 * be asked inside neither chunks nor `done`. */
bool kvp__program_over(const kvp__program *p);
/* Chunks that have not begun are passed over from now on; the program ends as ever. Any thread. */
void kvp__program_cancel(kvp__program *p);
/* Runs chunks on the calling thread until the program is over or the clock passes `until` (0: no
 * limit); between two chunks only. True: over. With `wait` false it also returns when every chunk
 * that can run now is taken by others. */
bool kvp__program_advance(kvp__program *p, const kvp__hooks *clock, uint64_t until, bool wait,
                          void *scratch);

#endif
