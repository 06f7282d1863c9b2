/*
 * Handles: what a public pointer points to.
 *
 * A handle is a shell of one cache line in a slab that belongs to an origin (a model or a team) and is
 * never returned before the origin is gone. So a stale handle can be looked at safely: its shell says
 * dead until it is used again, first in, first out, behind at least 1,024 other dead shells. A handle
 * of another kind shows another magic number.
 *
 * A call that looks at the object without being inside its domain pins the shell meanwhile: who gives
 * a dead shell back, and frees its object afterwards, waits for those few instructions. So a call may
 * race with the end of its own handle in another thread, and is refused or comes before it. Only when
 * the last thing under an origin goes, its shells go too: then a handle must not be used any more.
 *
 * The origin counts what hangs on it: its own handle and every object made under it. The last one to go
 * takes the origin along, whatever the order. Origins also know whether the process has forked since.
 *
 * Thread: everything here may be called from any thread.
 */
#ifndef KVP_ENGINE_HANDLE_H
#define KVP_ENGINE_HANDLE_H

#include "base/base.h"

#include <stdatomic.h>

typedef enum kvp__kind {
    KVP__KIND_MODEL = 0x6b766d01,
    KVP__KIND_POOL = 0x6b767002,
    KVP__KIND_SEQ = 0x6b767303,
    KVP__KIND_BATCH = 0x6b766204,
    KVP__KIND_TEAM = 0x6b767405
} kvp__kind;

#define KVP__SHELL_DEAD 0x6b76dead

typedef struct kvp__origin kvp__origin;
struct kvp__domain;

typedef struct kvp__shell {
    _Atomic uint32_t magic;          /* kvp__kind, or KVP__SHELL_DEAD */
    _Atomic uint32_t pins;           /* calls that are looking at the object */
    kvp__origin *origin;
    void *object;
    struct kvp__domain *_Atomic domain; /* that of a pool, a sequence, a batch; else NULL */
    struct kvp__shell *next;         /* in the origin's list of dead shells */
    struct kvp__shell *next_settled; /* in a domain's queue of handles to settle */
    uint64_t rest[2];
} kvp__shell;

struct kvp__origin {
    kvp__hooks hooks;
    _Atomic uint32_t refs;
    _Atomic uint32_t lock;           /* of the fields below; held for a few instructions */
    kvp__shell *oldest_dead, *newest_dead;
    uint32_t n_dead;
    struct kvp__shell_slab *slabs;
    uint32_t *fork_page;             /* wiped in a child; NULL: no detection on this kernel */
    uint32_t fork_generation;        /* what the page says in this process */
    size_t bytes;                    /* of the object whose first member this is */
    void (*finish)(kvp__origin *origin); /* frees what the object holds, not the object */
};

/* Sets up the origin at the head of an object of `bytes` bytes from kvp__alloc, with one count. */
kvp_status kvp__origin_init(kvp__origin *r, const kvp__hooks *hooks, size_t bytes,
                          void (*finish)(kvp__origin *), kvp_error *err);
void kvp__origin_acquire(kvp__origin *r);
/* The last count frees everything under the origin, and then calls the `released` hook. */
void kvp__origin_release(kvp__origin *r);

/* The generation of this process for things made now, and whether things of generation `g` are
 * this process' own. */
uint32_t kvp__origin_generation(kvp__origin *r);
bool kvp__origin_is_ours(const kvp__origin *r, uint32_t g);

/* A live shell for `object` in `domain` (NULL: in none); NULL: no memory. Takes no count. */
kvp__shell *kvp__shell_make(kvp__origin *r, kvp__kind kind, void *object,
                            struct kvp__domain *domain);

/* The shell if `handle` is live and of this kind, else NULL. */
static inline kvp__shell *kvp__shell_of(const void *handle, kvp__kind kind)
{
    kvp__shell *s = (kvp__shell *)(uintptr_t)handle;
    if (!s || (uintptr_t)s % sizeof(void *)) return NULL;
    return atomic_load_explicit(&s->magic, memory_order_acquire) == (uint32_t)kind ? s : NULL;
}

/* The same, and its object stays until kvp__shell_unpin, a few instructions later: nothing that waits
 * or takes a domain may come between. From signal handlers too. */
static inline kvp__shell *kvp__shell_pin(const void *handle, kvp__kind kind)
{
    kvp__shell *s = kvp__shell_of(handle, kind);
    if (!s) return NULL;
    atomic_fetch_add(&s->pins, 1);
    if (atomic_load(&s->magic) == (uint32_t)kind) return s;
    atomic_fetch_sub(&s->pins, 1);
    return NULL;
}

static inline void kvp__shell_unpin(kvp__shell *s) { atomic_fetch_sub(&s->pins, 1); }

/* Ends a handle: exactly one caller gets true, who then settles the object and gives the shell
 * back, before it frees the object. */
bool kvp__shell_kill(kvp__shell *s, kvp__kind kind);
void kvp__shell_give_back(kvp__shell *s);

#endif
