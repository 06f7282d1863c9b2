/*
 * Shells, origins and fork detection. See handle.h.
 */
#define _GNU_SOURCE
#include "engine/handle.h"

#include <sched.h>
#include <string.h>
#include <sys/mman.h>

#define SHELLS_OF_A_SLAB 63u
#define DEAD_BEFORE_REUSE 1024u
#define FORK_PAGE_BYTES 4096u

typedef struct kvp__shell_slab {
    struct kvp__shell_slab *next;
    uint32_t used;
    uint32_t pad[13];
    kvp__shell shells[SHELLS_OF_A_SLAB];
} kvp__shell_slab;

_Static_assert(sizeof(kvp__shell) == KVP__CACHE_LINE, "a shell is a cache line");

static void lock(kvp__origin *r)
{
    while (atomic_exchange_explicit(&r->lock, 1, memory_order_acquire)) sched_yield();
}

static void unlock(kvp__origin *r) { atomic_store_explicit(&r->lock, 0, memory_order_release); }

/* A page that the kernel gives back zeroed in a child: no system call is needed to ask. */
static uint32_t *fork_page_make(void)
{
    void *page = kvp__map(FORK_PAGE_BYTES);
    if (!page) return NULL;
#ifdef MADV_WIPEONFORK
    if (madvise(page, FORK_PAGE_BYTES, MADV_WIPEONFORK) == 0) return page;
#endif
    kvp__unmap(page, FORK_PAGE_BYTES);
    return NULL;
}

kvp_status kvp__origin_init(kvp__origin *r, const kvp__hooks *hooks, size_t bytes,
                          void (*finish)(kvp__origin *), kvp_error *err)
{
    memset(r, 0, sizeof *r);
    r->hooks = *hooks;
    r->bytes = bytes;
    r->finish = finish;
    r->fork_page = fork_page_make();
    if (!r->fork_page)
        return kvp__fail(err, KVP_ERR_NO_MEMORY, "no page for fork detection");
    r->fork_generation = 1;
    *r->fork_page = 1;
    atomic_store(&r->refs, 1);
    return KVP_OK;
}

void kvp__origin_acquire(kvp__origin *r)
{
    atomic_fetch_add_explicit(&r->refs, 1, memory_order_relaxed);
}

void kvp__origin_release(kvp__origin *r)
{
    if (atomic_fetch_sub_explicit(&r->refs, 1, memory_order_acq_rel) != 1) return;
    kvp__hooks hooks = r->hooks;
    size_t bytes = r->bytes;
    r->finish(r);
    for (kvp__shell_slab *s = r->slabs, *next; s; s = next) {
        next = s->next;
        kvp__free(&hooks, s, sizeof *s);
    }
    kvp__unmap(r->fork_page, FORK_PAGE_BYTES);
    kvp__free(&hooks, r, bytes);
    if (hooks.released) hooks.released(hooks.user);
}

uint32_t kvp__origin_generation(kvp__origin *r)
{
    lock(r);
    if (*r->fork_page == 0) *r->fork_page = ++r->fork_generation;
    uint32_t g = *r->fork_page;
    unlock(r);
    return g;
}

bool kvp__origin_is_ours(const kvp__origin *r, uint32_t g) { return *r->fork_page == g; }

/* Called with the lock held. */
static kvp__shell *take_shell(kvp__origin *r)
{
    if (r->n_dead > DEAD_BEFORE_REUSE) {
        kvp__shell *s = r->oldest_dead;
        r->oldest_dead = s->next;
        if (--r->n_dead == 0) r->newest_dead = NULL;
        return s;
    }
    if (!r->slabs || r->slabs->used == SHELLS_OF_A_SLAB) {
        kvp__shell_slab *slab = kvp__alloc_zero(&r->hooks, sizeof *slab);
        if (!slab) return NULL;
        slab->next = r->slabs;
        r->slabs = slab;
    }
    return &r->slabs->shells[r->slabs->used++];
}

kvp__shell *kvp__shell_make(kvp__origin *r, kvp__kind kind, void *object,
                            struct kvp__domain *domain)
{
    lock(r);
    kvp__shell *s = take_shell(r);
    unlock(r);
    if (!s) return NULL;
    s->origin = r;
    s->object = object;
    atomic_store_explicit(&s->domain, domain, memory_order_relaxed);
    s->next = s->next_settled = NULL;
    atomic_store_explicit(&s->magic, (uint32_t)kind, memory_order_release);
    return s;
}

bool kvp__shell_kill(kvp__shell *s, kvp__kind kind)
{
    uint32_t expected = (uint32_t)kind;
    return atomic_compare_exchange_strong(&s->magic, &expected, KVP__SHELL_DEAD);
}

void kvp__shell_give_back(kvp__shell *s)
{
    kvp__origin *r = s->origin;
    while (atomic_load(&s->pins)) sched_yield();
    lock(r);
    s->object = NULL;
    s->next = NULL;
    if (r->newest_dead)
        r->newest_dead->next = s;
    else
        r->oldest_dead = s;
    r->newest_dead = s;
    r->n_dead++;
    unlock(r);
}
