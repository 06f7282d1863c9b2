/*
 * Fibers: a stack and a switch for each CUDA thread. A switch saves what the calling convention
 * wants saved and nothing else, 3 to 10 ns; where we have no assembly for it, ucontext does the
 * same in 230. Stacks stay mapped from block to block; below each lies a forbidden page.
 *
 * A thread that waits chooses who goes on and switches to it directly. Lanes of one warp go on
 * until none may, then another warp's; the random schedule chooses anew at every wait.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "tests/emu/runtime.h"

/* -DEMU_UCONTEXT asks for it elsewhere too. */
#if !defined(__x86_64__) && !defined(__aarch64__) && !defined(EMU_UCONTEXT)
#define EMU_UCONTEXT 1
#endif
#ifdef EMU_UCONTEXT
#include <ucontext.h>
#endif

namespace emu {

__thread lane_view *current;
__thread block_view block;
__thread engine *self;

/* Kernels of attention keep their accumulators in locals; sanitizers spread them. */
#ifdef EMU_ASAN
constexpr size_t STACK = 512 * 1024;
#else
constexpr size_t STACK = 128 * 1024;
#endif
constexpr size_t GUARD = 65536;

/* --- the switch --- */

#ifndef EMU_UCONTEXT
extern "C" void emu_switch(void **save, void *to) __attribute__((visibility("hidden")));
extern "C" void emu_first() __attribute__((visibility("hidden")));
#endif

#if defined(__x86_64__) && !defined(EMU_UCONTEXT)
/* By ret, not by a jump: threads wait in the same functions, so that the processor's own stack of
 * return addresses is right for whoever goes on. With a jump each return to the kernel is a
 * surprise. */
__asm__(".text\n"
        ".p2align 4\n"
        ".hidden emu_switch\n"
        ".globl emu_switch\n"
        ".type emu_switch, @function\n"
        "emu_switch:\n"
        "    pushq %rbp\n"
        "    pushq %rbx\n"
        "    pushq %r12\n"
        "    pushq %r13\n"
        "    pushq %r14\n"
        "    pushq %r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    popq %r15\n"
        "    popq %r14\n"
        "    popq %r13\n"
        "    popq %r12\n"
        "    popq %rbx\n"
        "    popq %rbp\n"
        "    ret\n"
        ".size emu_switch, . - emu_switch\n"
        ".p2align 4\n"
        ".hidden emu_first\n"
        ".globl emu_first\n"
        ".type emu_first, @function\n"
        "emu_first:\n"
        "    xorl %ebp, %ebp\n"
        "    call *%rbx\n"
        "    hlt\n"
        ".size emu_first, . - emu_first\n");

static void *first_frame(unsigned char *top, void (*run)())
{
    void **sp = reinterpret_cast<void **>(top) - 9; /* so that it is aligned before the call */
    memset(sp, 0, 9 * sizeof *sp);
    sp[4] = reinterpret_cast<void *>(run); /* rbx */
    sp[6] = reinterpret_cast<void *>(emu_first);
    return sp;
}
#elif defined(__aarch64__) && !defined(EMU_UCONTEXT)
__asm__(".text\n"
        ".p2align 4\n"
        ".hidden emu_switch\n"
        ".globl emu_switch\n"
        ".type emu_switch, %function\n"
        "emu_switch:\n"
        "    sub sp, sp, #160\n"
        "    stp x19, x20, [sp]\n"
        "    stp x21, x22, [sp, #16]\n"
        "    stp x23, x24, [sp, #32]\n"
        "    stp x25, x26, [sp, #48]\n"
        "    stp x27, x28, [sp, #64]\n"
        "    stp x29, x30, [sp, #80]\n"
        "    stp d8, d9, [sp, #96]\n"
        "    stp d10, d11, [sp, #112]\n"
        "    stp d12, d13, [sp, #128]\n"
        "    stp d14, d15, [sp, #144]\n"
        "    mov x9, sp\n"
        "    str x9, [x0]\n"
        "    mov sp, x1\n"
        "    ldp x19, x20, [sp]\n"
        "    ldp x21, x22, [sp, #16]\n"
        "    ldp x23, x24, [sp, #32]\n"
        "    ldp x25, x26, [sp, #48]\n"
        "    ldp x27, x28, [sp, #64]\n"
        "    ldp x29, x30, [sp, #80]\n"
        "    ldp d8, d9, [sp, #96]\n"
        "    ldp d10, d11, [sp, #112]\n"
        "    ldp d12, d13, [sp, #128]\n"
        "    ldp d14, d15, [sp, #144]\n"
        "    add sp, sp, #160\n"
        "    ret\n"
        ".size emu_switch, . - emu_switch\n"
        ".p2align 4\n"
        ".hidden emu_first\n"
        ".globl emu_first\n"
        ".type emu_first, %function\n"
        "emu_first:\n"
        "    mov x29, #0\n"
        "    mov x30, #0\n"
        "    br x19\n"
        ".size emu_first, . - emu_first\n");

static void *first_frame(unsigned char *top, void (*run)())
{
    void **sp = reinterpret_cast<void **>(top) - 20;
    memset(sp, 0, 20 * sizeof *sp);
    sp[0] = reinterpret_cast<void *>(run);       /* x19 */
    sp[11] = reinterpret_cast<void *>(emu_first); /* x30 */
    return sp;
}
#else
static void *first_frame(unsigned char *top, void (*run)())
{
    /* The context lies at the top of the stack that it describes. */
    ucontext_t *u = reinterpret_cast<ucontext_t *>(top) - 1;
    if (getcontext(u) != 0) abort();
    u->uc_stack.ss_sp = top - STACK;
    u->uc_stack.ss_size = STACK - sizeof *u - 64;
    u->uc_link = nullptr;
    makecontext(u, run, 0);
    return u;
}

static void emu_switch(void **save, void *to)
{
    ucontext_t here;
    *save = &here;
    if (swapcontext(&here, static_cast<ucontext_t *>(to)) != 0) abort();
}
#endif

/* What the sanitizer wants to hear after each switch, on the stack that was switched to. */
static inline void arrived([[maybe_unused]] void *fake)
{
#ifdef EMU_ASAN
    /* No locals whose address is taken: threads leave from here, and what the sanitizer puts around
     * them would stay on the stack. */
    engine *e = self;
    __sanitizer_finish_switch_fiber(fake, &e->from_bottom, &e->from_size);
    const unsigned char *bottom = static_cast<const unsigned char *>(e->from_bottom);
    if (bottom < e->stacks || bottom >= e->stacks + THREADS * (STACK + GUARD)) {
        e->main_bottom = e->from_bottom;
        e->main_size = e->from_size;
    }
    e->switching = false;
#endif
}

static void first();

static inline void switch_to(fiber *from, fiber *to)
{
    current = to;
    if (__builtin_expect(to->fresh, 0)) {
        to->fresh = false;
        /* Stacks are a power of two apart, and their tops would lie in the same sets of the cache.
         * */
        to->sp = first_frame(to->stack + STACK - 64 * 17 * (to->index % 32), first);
    }
#ifdef EMU_ASAN
    engine *e = self;
    bool back = to == &e->main;
    e->switching = true;
    __sanitizer_start_switch_fiber(from->gone ? nullptr : &from->fake_stack,
                                   back ? e->main_bottom : to->stack, back ? e->main_size : STACK);
#endif
    emu_switch(&from->sp, to->sp);
    arrived(from->fake_stack);
}

/* --- who goes on --- */

/* xorshift64*, one for all random choices of a launch. */
uint64_t random_bits(engine *e)
{
    uint64_t x = e->random;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    e->random = x;
    return x * 0x2545f4914f6cdd1dull;
}

/* The first set bit at or above `from`, or else the first of all. */
static inline unsigned next_up(uint32_t bits, unsigned from)
{
    uint32_t above = from < 32 ? bits & ALL << from : 0;
    return (unsigned)__builtin_ctz(above ? above : bits);
}

/* The last set bit at or below `from`, or else the last of all. */
static inline unsigned next_down(uint32_t bits, unsigned from)
{
    uint32_t below = from < 32 ? bits & ALL >> (31 - from) : 0;
    return 31u - (unsigned)__builtin_clz(below ? below : bits);
}

/* Who goes on after lane `lane` of warp `w`; NULL if nobody may. */
__attribute__((always_inline)) static inline fiber *choose(engine *e, unsigned w, unsigned lane)
{
    if (!e->ready) return nullptr;
    switch (e->options.schedule) {
    case EMU_FORWARD:
        if (!(e->ready >> w & 1)) w = next_up(e->ready, w), lane = 31;
        return &e->warps[w].lanes[next_up(e->warps[w].ready, lane + 1)];
    case EMU_REVERSE:
        if (!(e->ready >> w & 1)) w = next_down(e->ready, w), lane = 0;
        return &e->warps[w].lanes[next_down(e->warps[w].ready, lane - 1)];
    default: {
        uint64_t r = random_bits(e);
        w = next_up(e->ready, r >> 32 & 31);
        return &e->warps[w].lanes[next_up(e->warps[w].ready, r >> 40 & 31)];
    }
    }
}

void give_way()
{
    fiber *f = me(), *to = choose(self, f->warp->index, f->lane);
    if (to != f) switch_to(f, to ? to : &self->main);
}

/* The next in the order of numbers, so that everybody comes to it. */
void give_turn()
{
    engine *e = self;
    fiber *f = me(), *to = choose(e, f->warp->index, f->lane);
    if (e->options.schedule != EMU_RANDOM) {
        unsigned w = f->warp->index, lane = f->lane + 1;
        if (lane == LANES || !(f->warp->ready >> lane)) {
            w = next_up(e->ready, w + 1);
            lane = 0;
        }
        to = &e->warps[w].lanes[next_up(e->warps[w].ready, lane)];
    }
    if (to != f) switch_to(f, to);
}

void to_main()
{
    switch_to(me(), &self->main);
    abort(); /* nobody switches back */
}

/* What a stack runs: a thread, and when that has left, the next one if it has not begun yet,
 * without a switch. Threads that never wait all run on one stack, in a loop. */
static void first()
{
    arrived(nullptr);
    engine *e = self;
    for (;;) {
        kernel_thread();
        fiber *f = me(), *to = choose(e, f->warp->index, f->lane);
        if (!to || !to->fresh) {
            switch_to(f, to ? to : &e->main);
            abort();
        }
        unsigned char *mine = f->stack;
        f->stack = to->stack;
        to->stack = mine;
        to->fresh = false;
        current = to;
    }
}

/* --- stacks --- */

void make_stacks(engine *e)
{
    size_t bytes = THREADS * (STACK + GUARD);
    void *p = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        perror("emulator: stacks");
        exit(1);
    }
    e->stacks = static_cast<unsigned char *>(p);
    for (unsigned i = 0; i < THREADS; i++) {
        e->fibers[i].stack = e->stacks + i * (STACK + GUARD) + GUARD;
        if (mprotect(e->fibers[i].stack, STACK, PROT_READ | PROT_WRITE) != 0) {
            perror("emulator: stacks");
            exit(1);
        }
    }
}

void release_stacks(engine *e)
{
    size_t bytes = THREADS * (STACK + GUARD);
    ASAN_UNPOISON_MEMORY_REGION(e->stacks, bytes);
    munmap(e->stacks, bytes);
}

void start_fibers(engine *e)
{
    unsigned warps = e->threads / LANES;
    /* Stacks of threads that were abandoned are as those left them. */
    if (e->abandoned) ASAN_UNPOISON_MEMORY_REGION(e->stacks, THREADS * (STACK + GUARD));
    e->live = e->threads;
    e->ready = warps == 32 ? ALL : (1u << warps) - 1;
    for (unsigned i = 0; i < e->threads; i++) {
        fiber *f = &e->fibers[i];
        f->thread = {i, 0, 0};
        f->index = i;
        f->lane = i % LANES;
        f->warp = &e->warps[i / LANES];
        f->gone = false;
        f->fresh = true;
        f->atomics = 0;
        f->n_copies = f->n_groups = 0;
        f->fake_stack = nullptr;
    }
    for (unsigned w = 0; w < warps; w++) {
        warp *p = &e->warps[w];
        p->ready = p->present = ALL;
        p->index = w;
        p->n_meetings = 0;
        p->at_barrier = {};
        p->lanes = &e->fibers[w * LANES];
    }
    e->abandoned = false;
    memset(e->barriers, 0, sizeof e->barriers);
    fiber *to = e->options.schedule == EMU_REVERSE ? choose(e, warps - 1, 0) : choose(e, 0, 31);
    e->main.gone = false;
    switch_to(&e->main, to);
    current = nullptr;
    e->abandoned = e->live != 0;
}

} // namespace emu
