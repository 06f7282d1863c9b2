/*
 * Memory: global allocations and the block's shared memory, both with their end as near to a
 * forbidden page as alignment lets it be, what lies between guarded by a pattern and, in ASan
 * builds, by ASan; copies from one to the other; atomics; and the signal handler that turns an
 * access to a forbidden page into the end of the grid: it makes the thread go on in report_fault,
 * on its own stack.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <map>
#include <mutex>

#include "tests/emu/runtime.h"

namespace emu {

constexpr size_t PAGE = 4096;
constexpr unsigned char PATTERN = 0xa5; /* beside shared memory */
constexpr ptrdiff_t PATTERN_BEFORE = 1024;

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

/* --- global memory --- */

/* Addresses are taken one after the other and used again only when all were, so that a pointer that
 * is used after its memory was freed meets a forbidden page. Each granule belongs to one
 * allocation. */
static unsigned char *reserve_arena()
{
    void *p = mmap(nullptr, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        perror("emulator: arena");
        exit(1);
    }
    return reinterpret_cast<unsigned char *>(round_up((uintptr_t)p, GRANULE));
}

unsigned char *const arena = reserve_arena();

static std::mutex lock;
static std::map<size_t, size_t> taken; /* first granule, granules */
static size_t cursor;
static constexpr size_t GRANULES = ARENA / GRANULE - 1;

static allocation **make_table()
{
    void *p = mmap(nullptr, GRANULES * sizeof(allocation *), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        perror("emulator: table");
        exit(1);
    }
    return static_cast<allocation **>(p);
}

static allocation **const table = make_table();

const allocation *allocation_of(const void *p)
{
    size_t i = ((uintptr_t)p - (uintptr_t)arena) / GRANULE;
    return i < GRANULES ? __atomic_load_n(&table[i], __ATOMIC_ACQUIRE) : nullptr;
}

/* The first gap of n granules behind `from`; GRANULES if there is none. */
static size_t find_gap(size_t from, size_t n)
{
    auto next = taken.lower_bound(from);
    if (next != taken.begin()) {
        auto before = std::prev(next);
        if (before->first + before->second > from) from = before->first + before->second;
    }
    for (; next != taken.end(); ++next) {
        if (next->first - from >= n) return from;
        from = next->first + next->second;
    }
    return GRANULES - from >= n ? from : GRANULES;
}

static void *allocate(size_t bytes, bool fill)
{
    std::lock_guard<std::mutex> guard(lock);
    size_t pages = round_up(bytes ? bytes : 1, PAGE), n = (pages + PAGE + GRANULE - 1) / GRANULE;
    if (pages > ARENA / 2) return nullptr;
    size_t first = find_gap(cursor, n);
    if (first == GRANULES) first = find_gap(0, n);
    if (first == GRANULES) return nullptr;
    unsigned char *base = arena + first * GRANULE;
    if (mprotect(base, pages, PROT_READ | PROT_WRITE) != 0) return nullptr;
    taken[first] = n;
    cursor = first + n;
    if (fill) memset(base, 0xff, pages);
    allocation *a = new allocation{base + pages - round_up(bytes, 256), bytes, nullptr, 0};
    for (size_t i = 0; i < n; i++) __atomic_store_n(&table[first + i], a, __ATOMIC_RELEASE);
    /* What is behind the end stays readable to emu_free, which looks for a change. */
    unsigned char *end = a->begin + bytes;
    if (!fill) memset(end, 0xff, (size_t)(base + pages - end));
    ASAN_POISON_MEMORY_REGION(end, (size_t)(base + pages - end));
    return a->begin;
}

} // namespace emu

using namespace emu;

void *emu_alloc(size_t bytes)
{
    return allocate(bytes, true);
}

void *emu_alloc_sparse(size_t bytes)
{
    return allocate(bytes, false);
}

int emu_free(void *p)
{
    if (!p) return 0;
    std::lock_guard<std::mutex> guard(lock);
    const allocation *a = allocation_of(p);
    if (!a || a->begin != p) return -1;
    unsigned char *end = a->begin + a->bytes;
    size_t first = (size_t)(a->begin - arena) / GRANULE;
    while (first && table[first - 1] == a) first--;
    unsigned char *base = arena + first * GRANULE;
    size_t pages = round_up(a->bytes ? a->bytes : 1, PAGE);
    ASAN_UNPOISON_MEMORY_REGION(end, (size_t)(base + pages - end));
    int result = 0;
    for (unsigned char *q = end; q < base + pages; q++)
        if (*q != 0xff) result = -1;
    size_t n = taken[first];
    for (size_t i = 0; i < n; i++) __atomic_store_n(&table[first + i], nullptr, __ATOMIC_RELEASE);
    taken.erase(first);
    madvise(base, pages, MADV_DONTNEED);
    mprotect(base, pages, PROT_NONE);
    race_forget(const_cast<allocation *>(a));
    delete a;
    return result;
}

int emu_valid(const void *p, size_t bytes)
{
    const allocation *a = allocation_of(p);
    const unsigned char *q = static_cast<const unsigned char *>(p);
    return a && q >= a->begin && bytes <= a->bytes &&
           (size_t)(q - a->begin) <= a->bytes - bytes;
}

namespace emu {

/* --- shared memory --- */

void shared_prepare(engine *e, size_t bytes)
{
    size_t room = round_up(MAX_SHARED, PAGE);
    if (!e->region) {
        void *p = mmap(nullptr, room + 2 * GRANULE, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED || mprotect((char *)p + GRANULE, room, PROT_READ | PROT_WRITE) != 0) {
            perror("emulator: shared memory");
            exit(1);
        }
        e->region = static_cast<unsigned char *>(p) + GRANULE;
    }
    ASAN_UNPOISON_MEMORY_REGION(e->region, room);
    e->shared = e->region + room - round_up(bytes, 128);
    e->shared_bytes = bytes;
    unsigned char *before = e->shared - PATTERN_BEFORE;
    memset(before < e->region ? e->region : before, PATTERN,
           before < e->region ? (size_t)(e->shared - e->region) : PATTERN_BEFORE);
    memset(e->shared + bytes, PATTERN, (size_t)(e->region + room - e->shared) - bytes);
    ASAN_POISON_MEMORY_REGION(e->region, (size_t)(e->shared - e->region));
    ASAN_POISON_MEMORY_REGION(e->shared + bytes, (size_t)(e->region + room - e->shared) - bytes);
}

void shared_release(engine *e)
{
    if (!e->region) return;
    size_t room = round_up(MAX_SHARED, PAGE);
    ASAN_UNPOISON_MEMORY_REGION(e->region, room);
    munmap(e->region - GRANULE, room + 2 * GRANULE);
}

/* NaN in every type: a block finds nothing of the one before. */
void shared_poison(engine *e)
{
    memset(e->shared, 0xff, e->shared_bytes);
}

/* Whether a block has written beside its shared memory, where no forbidden page is. */
__attribute__((no_sanitize("address"))) void shared_verify(engine *e)
{
    const unsigned char *end = e->region + round_up(MAX_SHARED, PAGE);
    for (const unsigned char *p = e->shared + e->shared_bytes; p < end; p++)
        if (*p != PATTERN)
            fail("shared memory: something was written at offset %zu of %zu bytes",
                 (size_t)(p - e->shared), e->shared_bytes);
    for (const unsigned char *p = e->shared; p-- > e->region && e->shared - p <= PATTERN_BEFORE;)
        if (*p != PATTERN)
            fail("shared memory: something was written before its beginning");
}

void check_shared(const void *s, size_t bytes, const char *what, const char *file, int line)
{
    const engine *e = self;
    size_t at = (uintptr_t)s - (uintptr_t)e->shared;
    if ((uintptr_t)s % bytes)
        fail("%s, %s:%d: misaligned: shared offset %td is not a multiple of %zu", what,
             short_name(file), line, (ptrdiff_t)at, bytes);
    if (at >= e->shared_bytes || bytes > e->shared_bytes - at)
        fail("%s, %s:%d: offset %td is not in the %zu bytes of shared memory", what,
             short_name(file), line, (ptrdiff_t)at, e->shared_bytes);
}

/* The page behind an allocation is in its last granule, or begins the next. */
void fail_outside_global(const char *who, const void *p)
{
    const unsigned char *q = static_cast<const unsigned char *>(p);
    const allocation *a = allocation_of(q);
    if (!a && q >= arena + GRANULE) a = allocation_of(q - GRANULE);
    if (a)
        fail("%s: access to global memory at offset %td of an allocation of %zu bytes", who,
             q - a->begin, a->bytes);
    else fail("%s: access to global memory at %p, which is in no allocation", who, p);
}

void check_global(const void *g, size_t bytes, const char *what, const char *file, int line)
{
    if ((uintptr_t)g % bytes)
        fail("%s, %s:%d: misaligned: global address %p is not a multiple of %zu", what,
             short_name(file), line, g, bytes);
    if (!in_arena(g) || emu_valid(g, bytes)) return;
    char who[100];
    snprintf(who, sizeof who, "%s, %s:%d", what, short_name(file), line);
    fail_outside_global(who, g);
}

/* --- copies --- */

template <class T> static void grow(T *&list, unsigned count, unsigned &room)
{
    if (count < room) return;
    room = room ? 2 * room : 64;
    list = static_cast<T *>(realloc(list, room * sizeof *list));
    if (!list) abort();
}

static void carry_out(const copy &c)
{
    if (c.from) memcpy(c.to, c.from, 16);
    else memset(c.to, 0, 16);
}

void copy16(void *s, const void *g, bool on, const char *file, int line)
{
    engine *e = self;
    fiber *f = me();
    check_shared(s, 16, "cp.async", file, line);
    if (on) {
        check_global(g, 16, "cp.async", file, line);
        e->stats.loaded += 16;
    }
    if (e->race) {
        if (on) race_read(g, 16, file, line);
        race_flight(s, 16, true, file, line);
    }
    bool now = e->options.copies == EMU_AT_ISSUE ||
               (e->options.copies == EMU_EITHER && random_bits(e) >> 63);
    copy c = {static_cast<unsigned char *>(s), on ? g : nullptr, now, line, file};
    if (now) carry_out(c);
    if (now && !e->race) return; /* nothing is left to be done */
    grow(f->copies, f->n_copies, f->room);
    f->copies[f->n_copies++] = c;
}

void copy_commit()
{
    fiber *f = me();
    grow(f->groups, f->n_groups, f->group_room);
    f->groups[f->n_groups++] = f->n_copies;
}

void copy_wait(int pending)
{
    fiber *f = me();
    if (f->n_groups <= (unsigned)pending) return;
    unsigned groups = f->n_groups - (unsigned)pending, n = f->groups[groups - 1];
    for (unsigned i = 0; i < n; i++) {
        const copy &c = f->copies[i];
        if (!c.done) carry_out(c);
        if (self->race) race_flight(c.to, 16, false, c.file, c.line);
    }
    if (n) memmove(f->copies, f->copies + n, (f->n_copies - n) * sizeof *f->copies);
    f->n_copies -= n;
    for (unsigned i = groups; i < f->n_groups; i++) f->groups[i - groups] = f->groups[i] - n;
    f->n_groups -= groups;
}

/* --- loads and atomics --- */

uint4 load16(const void *g, const char *file, int line)
{
    check_global(g, 16, "load16", file, line);
    self->stats.loaded += 16;
    if (self->race) race_once(g, 16, file, line);
    uint4 v;
    memcpy(&v, g, sizeof v);
    return v;
}

/* A thread that does nothing but atomics waits for another, which must get its turn. */
static void begin_atomic(const void *p, const char *file, int line)
{
    engine *e = self;
    fiber *f = me();
    if (in_shared(e, p)) check_shared(p, 4, "atomic_add", file, line);
    else check_global(p, 4, "atomic_add", file, line);
    e->stats.atomics++;
    if (e->race) race_atomic(p, 4, file, line);
    if (++f->atomics % 64 == 0) give_turn();
    if (f->atomics > 1u << 24)
        fail("atomic_add, %s:%d: thread %u has done %u of them: does it wait for something?",
             short_name(file), line, f->index, f->atomics);
}

uint32_t atomic_add(uint32_t *p, uint32_t v, const char *file, int line)
{
    begin_atomic(p, file, line);
    return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}

float atomic_add(float *p, float v, const char *file, int line)
{
    begin_atomic(p, file, line);
    uint32_t *bits = reinterpret_cast<uint32_t *>(p);
    uint32_t old = __atomic_load_n(bits, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(bits, &old, to_bits(from_bits(old) + v), false,
                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return from_bits(old);
}

/* --- faults --- */

/* The handlers are the process's, installed while any thread launches; each thread has a stack for
 * them and a timer of its own. */
static std::mutex fault_lock;
static unsigned launching;
static struct sigaction old_segv, old_bus, old_timer;
static const int TIMER = SIGURG; /* ignored by default: one that is late does no harm */

static void resume_in_report(ucontext_t *u, engine *e)
{
    (void)e;
    /* One more: calls name the instruction behind theirs (launch.cc). */
#if defined(__x86_64__)
    uintptr_t sp = (uintptr_t)u->uc_mcontext.gregs[REG_RSP];
    e->failure_pc = reinterpret_cast<void *>(u->uc_mcontext.gregs[REG_RIP] + 1);
#elif defined(__aarch64__)
    uintptr_t sp = (uintptr_t)u->uc_mcontext.sp;
    e->failure_pc = reinterpret_cast<void *>(u->uc_mcontext.pc + 1);
#else
    uintptr_t sp = 0;
#endif
    /* Below what the thread has on its stack, unless that is what is full: then from its top. */
    fiber *f = me();
    uintptr_t low = (uintptr_t)f->stack;
    if (sp < low + 16384) sp = (uintptr_t)e->fibers[f->index].stack + 65536;
    sp = ((sp - 512) & ~(uintptr_t)15);
#if defined(__x86_64__)
    u->uc_mcontext.gregs[REG_RSP] = (greg_t)(sp - 8);
    u->uc_mcontext.gregs[REG_RIP] = (greg_t)(uintptr_t)report_fault;
#elif defined(__aarch64__)
    u->uc_mcontext.sp = sp;
    u->uc_mcontext.pc = (uintptr_t)report_fault;
#endif
}

static void chain(int signal, siginfo_t *info, void *context)
{
    const struct sigaction *old = signal == SIGSEGV  ? &old_segv
                                  : signal == SIGBUS ? &old_bus
                                                     : &old_timer;
    if (old->sa_flags & SA_SIGINFO) old->sa_sigaction(signal, info, context);
    else if (old->sa_handler == SIG_DFL && signal != TIMER) sigaction(signal, old, nullptr);
    else if (old->sa_handler != SIG_IGN && old->sa_handler != SIG_DFL) old->sa_handler(signal);
}

static __thread timer_t timer;
static __thread bool has_timer;
static __thread stack_t old_stack;

static void set_timer(uint32_t seconds, long nanoseconds)
{
    if (!has_timer) {
        struct sigevent how;
        memset(&how, 0, sizeof how);
        how.sigev_notify = SIGEV_THREAD_ID;
        how.sigev_signo = TIMER;
        how._sigev_un._tid = (pid_t)syscall(SYS_gettid);
        has_timer = timer_create(CLOCK_THREAD_CPUTIME_ID, &how, &timer) == 0;
        if (!has_timer) return;
    }
    struct itimerspec t;
    memset(&t, 0, sizeof t);
    t.it_value.tv_sec = seconds;
    t.it_value.tv_nsec = nanoseconds;
    timer_settime(timer, 0, &t, nullptr);
}

static void on_fault(int signal, siginfo_t *info, void *context)
{
    engine *e = self;
    bool in_kernel = e && current && current != &e->main && !e->failed;
#if !defined(__x86_64__) && !defined(__aarch64__)
    in_kernel = false;
#endif
    if (!in_kernel) {
        chain(signal, info, context);
        return;
    }
    if (signal == TIMER && e->switching) {
        set_timer(0, 1000000);
        return;
    }
    e->fault_time = signal == TIMER;
    e->fault_address = info->si_addr;
    resume_in_report(static_cast<ucontext_t *>(context), e);
}

static void install(int signal, struct sigaction *old)
{
    struct sigaction s;
    memset(&s, 0, sizeof s);
    s.sa_sigaction = on_fault;
    s.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&s.sa_mask);
    sigaction(signal, &s, old);
}

constexpr size_t SIGNAL_STACK = 256 * 1024;
static __thread void *signal_stack;

void faults_begin(engine *e)
{
    if (!signal_stack) signal_stack = malloc(SIGNAL_STACK);
    if (!signal_stack) abort();
    stack_t s = {};
    s.ss_sp = signal_stack;
    s.ss_size = SIGNAL_STACK;
    sigaltstack(&s, &old_stack);
    {
        std::lock_guard<std::mutex> guard(fault_lock);
        if (launching++ == 0) {
            install(SIGSEGV, &old_segv);
            install(SIGBUS, &old_bus);
            install(TIMER, &old_timer);
        }
    }
    set_timer(e->options.seconds, 0);
}

void faults_end(engine *)
{
    if (has_timer) set_timer(0, 0);
    {
        std::lock_guard<std::mutex> guard(fault_lock);
        if (--launching == 0) {
            sigaction(SIGSEGV, &old_segv, nullptr);
            sigaction(SIGBUS, &old_bus, nullptr);
            sigaction(TIMER, &old_timer, nullptr);
        }
    }
    if (!(old_stack.ss_flags & SS_ONSTACK)) sigaltstack(&old_stack, nullptr);
}

void faults_release()
{
    if (has_timer) timer_delete(timer);
    has_timer = false;
    free(signal_stack);
    signal_stack = nullptr;
}

void report_fault()
{
    engine *e = self;
    const unsigned char *p = static_cast<const unsigned char *>(e->fault_address);
    unsigned thread = me()->index;
    if (e->fault_time) {
        fail("thread %u: the launch has taken %u seconds of CPU and not ended", thread,
             e->options.seconds);
    }
    if (p >= me()->stack - 65536 && p < me()->stack)
        fail("thread %u: its stack is full", thread);
    size_t shared = (uintptr_t)p - (uintptr_t)e->shared;
    if (p >= e->region - GRANULE && p < e->region + round_up(MAX_SHARED, PAGE) + GRANULE)
        fail("thread %u: access to shared memory at offset %td of %zu bytes", thread,
             (ptrdiff_t)shared, e->shared_bytes);
    if (in_arena(p)) {
        char who[32];
        snprintf(who, sizeof who, "thread %u", thread);
        fail_outside_global(who, p);
    }
    fail("thread %u: access to %p, which is no memory", thread, e->fault_address);
    to_main();
}

} // namespace emu
