/*
 * What the files of the emulator share. One engine for each OS thread that launches; it holds the
 * fibers, warps and barriers of the one block that runs. No lock is taken while a kernel runs.
 *
 *     launch.cc     the registry, options, statistics; a grid from check to message
 *     fiber.cc      context switches, stacks, who goes on
 *     warp.cc       what lanes do together; barriers
 *     tensor.cc     ldmatrix, mma
 *     memory.cc     global and shared memory, copies, atomics, faults
 *     race.cc       plain loads and stores, where kernels are compiled for it
 */
#ifndef KVP_TESTS_EMU_RUNTIME_H
#define KVP_TESTS_EMU_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

#include "tests/emu/emu.h"
#include "tests/emu/intrinsics.h"

#if defined(__SANITIZE_ADDRESS__)
#define EMU_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EMU_ASAN 1
#endif
#endif
#ifdef EMU_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define ASAN_POISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#define ASAN_UNPOISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#endif

namespace emu {

constexpr unsigned LANES = 32, WARPS = 32, THREADS = LANES * WARPS, BARRIERS = 16;
constexpr size_t MAX_SHARED = 227 * 1024;
constexpr uint32_t ALL = 0xffffffffu;

/* A place in the source where threads meet. */
struct place {
    const char *what, *file;
    int line;
};

struct copy {
    unsigned char *to;
    const void *from; /* NULL: zeros */
    bool done;        /* at issue */
    int line;
    const char *file;
};

/* A CUDA thread. */
struct fiber : lane_view {
    void *sp;              /* while it does not run */
    unsigned index, lane;  /* in the block, in the warp */
    struct warp *warp;
    bool fresh, gone;      /* it has not begun, it has left the kernel */
    uint32_t atomics;
    copy *copies;          /* issued, oldest first */
    unsigned n_copies, room;
    unsigned *groups, n_groups, group_room; /* the end of each committed group in `copies` */
    struct plain *plains;  /* race.cc: its accesses to shared memory since its warp last met */
    unsigned n_plain, plain_room;
    unsigned char *stack;
    void *fake_stack;      /* the address sanitizer's */
};

/* Lanes that are on their way into one collective. */
struct meeting {
    uint32_t mask, arrived;
    place where;
};

struct warp {
    uint32_t ready;        /* lanes that may run, the running one among them */
    uint32_t present;      /* lanes that have not left */
    unsigned index;
    unsigned n_meetings;
    meeting meetings[LANES];
    place at_barrier;      /* where all lanes wait, while they do */
    fiber *lanes;          /* LANES of them */
    uint32_t clock[WARPS]; /* race.cc: what this warp knows of each warp's time */
    /* Operands and results, by lane. */
    alignas(64) uint64_t in[LANES], out[LANES];
    alignas(64) uint32_t a[4][LANES], b[2][LANES], r[4][LANES];
    alignas(64) float c[2][LANES][2];
    const unsigned char *rows[LANES];
};

struct barrier {
    unsigned arrived, expected; /* threads */
    uint32_t warps;             /* that wait */
    place where;                /* of the first */
};

struct engine {
    fiber fibers[THREADS];
    warp warps[WARPS];
    barrier barriers[BARRIERS];
    fiber main;                 /* the OS thread's own stack */
    uint32_t ready;             /* warps with a lane that may run */
    unsigned threads, live;
    emu_options options;
    emu_stats stats;
    uint64_t random;
    uint64_t collectives;       /* of this block */
    const kernel_entry *kernel;
    const void *args;
    unsigned char *shared;      /* exact; 128 bytes aligned */
    size_t shared_bytes;
    unsigned char *region;      /* pages around it */
    uint32_t launch;            /* number of this launch, in the process */
    uint32_t block_number;
    bool failed, race;
    char message[1024];
    const void *failure_pc;     /* whose place in the source is not in the message yet */
    const void *fault_address;  /* from the signal handler */
    bool fault_time;
    unsigned char *stacks;
    bool abandoned;             /* the last block failed, and threads were left on their stacks */
    volatile bool switching;    /* the sanitizer thinks of one stack, and we are on another */
    const void *main_bottom, *from_bottom; /* the sanitizer's idea of the OS thread's stack, and */
    size_t main_size, from_size;           /* of the one that was left last */
};

extern __thread engine *self EMU_TLS;

inline fiber *me() { return static_cast<fiber *>(current); }

/* fiber.cc */
void make_stacks(engine *e);
void release_stacks(engine *e);
void start_fibers(engine *e); /* runs the block; back when it has ended or failed */
void give_way();              /* the caller has cleared its ready bit: others go on */
void give_turn();             /* the caller stays ready, but others are asked first */
[[noreturn]] void to_main();
void kernel_thread();         /* what a fiber runs (launch.cc) */
uint64_t random_bits(engine *e);

/* warp.cc. last_to_arrive is true for the last lane: it does the work, then calls wake. Others come
 * back when that is done. */
bool last_to_arrive(warp *w, uint32_t mask, const char *what, const char *file, int line);
void wake(warp *w, uint32_t lanes);
bool thread_left(engine *e, fiber *f);
void describe_stuck(engine *e);

/* Ends the grid: the message of the first failure stays. In a fiber it does not come back. */
__attribute__((format(printf, 1, 2))) void fail(const char *format, ...);
void fail_outside_global(const char *who, const void *p);
const char *short_name(const char *file);

/* memory.cc */
struct allocation {
    unsigned char *begin;
    size_t bytes;
    void *cells;         /* race.cc */
    uint32_t cells_from;
};
extern unsigned char *const arena;
constexpr size_t ARENA = (size_t)256 << 30, GRANULE = 65536;
const allocation *allocation_of(const void *p); /* NULL outside, and between allocations */
inline bool in_arena(const void *p)
{
    return (uintptr_t)p - (uintptr_t)arena < ARENA;
}
inline bool in_shared(const engine *e, const void *p)
{
    return (uintptr_t)p - (uintptr_t)e->shared < e->shared_bytes;
}
void shared_prepare(engine *e, size_t bytes);
void shared_release(engine *e);
void shared_poison(engine *e);
void shared_verify(engine *e);
void check_shared(const void *s, size_t bytes, const char *what, const char *file, int line);
void check_global(const void *g, size_t bytes, const char *what, const char *file, int line);
void faults_begin(engine *e);
void faults_end(engine *e);
void faults_release();
[[noreturn]] void report_fault(); /* on the fiber that faulted */

/* race.cc; all of them do nothing unless kernels were compiled for it */
bool race_build();
void race_block(engine *e);
void race_release();
void race_sync(uint32_t warps);     /* they know of each other's past now */
void race_read(const void *p, size_t n, const char *file, int line);
void race_atomic(const void *p, size_t n, const char *file, int line);
void race_once(const void *p, size_t n, const char *file, int line); /* by load16 */
void race_flight(const void *p, size_t n, bool begins, const char *file, int line);
void race_forget(struct allocation *a);
void race_meet(warp *w, uint32_t lanes); /* counts bank conflicts of what lies behind them */

} // namespace emu

#endif
