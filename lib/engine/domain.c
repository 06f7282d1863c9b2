/*
 * Entering, leaving and settling. See domain.h.
 */
#include "engine/domain.h"

#include <pthread.h>
#include <sched.h>
#include <string.h>

#define SETTLING UINT64_MAX

void kvp__domain_init(kvp__domain *d, kvp__origin *origin,
                      void (*settle)(kvp__domain *, kvp__shell *), void (*finish)(kvp__domain *))
{
    memset(d, 0, sizeof *d);
    d->origin = origin;
    d->settle = settle;
    d->finish = finish;
    d->generation = kvp__origin_generation(origin);
    d->error.size = sizeof d->error;
    atomic_store(&d->refs, 1);
}

void kvp__domain_acquire(kvp__domain *d)
{
    atomic_fetch_add_explicit(&d->refs, 1, memory_order_relaxed);
}

void kvp__domain_release(kvp__domain *d)
{
    if (atomic_fetch_sub_explicit(&d->refs, 1, memory_order_acq_rel) == 1) d->finish(d);
}

static bool is_ours(const kvp__domain *d)
{
    return kvp__origin_is_ours(d->origin, d->generation);
}

/* The domain of a live handle, with a count; NULL: the handle is not live. */
static kvp__domain *domain_of(const void *handle, kvp__kind kind)
{
    kvp__shell *s = kvp__shell_pin(handle, kind);
    if (!s) return NULL;
    kvp__domain *d = atomic_load_explicit(&s->domain, memory_order_relaxed);
    kvp__domain_acquire(d);
    kvp__shell_unpin(s);
    return d;
}

static kvp_status take(kvp__domain *d)
{
    if (!is_ours(d)) return KVP_ERR_FORKED;
    uint64_t me = (uint64_t)(uintptr_t)pthread_self(), owner = 0;
    while (!atomic_compare_exchange_weak_explicit(&d->owner, &owner, me, memory_order_acquire,
                                                  memory_order_relaxed)) {
        if (owner == me || (owner == SETTLING && atomic_load(&d->settler) == me))
            return KVP_ERR_REENTRANT;
        if (owner != 0 && owner != SETTLING) return KVP_ERR_THREAD;
        if (owner == SETTLING) sched_yield();
        owner = 0;
    }
    return KVP_OK;
}

kvp_status kvp__domain_object(const kvp__domain *d, const void *handle, kvp__kind kind,
                              void **object)
{
    const kvp__shell *s = kvp__shell_of(handle, kind);
    if (!s) return KVP_ERR_INVALID_HANDLE;
    if (atomic_load_explicit(&s->domain, memory_order_relaxed) != d) return KVP_ERR_MISMATCH;
    *object = s->object;
    return KVP_OK;
}

kvp_status kvp__domain_enter(const void *handle, kvp__kind kind, void **object)
{
    kvp__domain *d = domain_of(handle, kind);
    if (!d) return KVP_ERR_INVALID_HANDLE;
    kvp_status s = take(d);
    if (s != KVP_OK) {
        kvp__domain_release(d);
        return s;
    }
    /* Nothing in it is freed from here on but by this thread; it may have died on the way. */
    if (kvp__domain_object(d, handle, kind, object) == KVP_OK) return KVP_OK;
    kvp__domain_leave(d);
    return KVP_ERR_INVALID_HANDLE;
}

static bool has_work(const kvp__domain *d)
{
    return atomic_load(&d->queue) || atomic_load(&d->asked);
}

/* The caller holds the domain, and a count on it. */
static void settle_all(kvp__domain *d)
{
    if (atomic_exchange_explicit(&d->asked, 0, memory_order_acq_rel)) d->settle(d, NULL);
    kvp__shell *killed = atomic_exchange_explicit(&d->queue, NULL, memory_order_acq_rel);
    kvp__shell *oldest = NULL;
    while (killed) {
        kvp__shell *next = killed->next_settled;
        killed->next_settled = oldest;
        oldest = killed;
        killed = next;
    }
    while (oldest) {
        kvp__shell *next = oldest->next_settled;
        d->settle(d, oldest);
        oldest = next;
    }
}

/* Settles unless somebody is inside, who will then do it on leaving: what was queued before the
 * owner left is seen either by the owner's last look or by this thread's attempt. */
static void try_settle(kvp__domain *d)
{
    while (has_work(d)) {
        uint64_t nobody = 0;
        if (!atomic_compare_exchange_strong(&d->owner, &nobody, SETTLING)) return;
        atomic_store(&d->settler, (uint64_t)(uintptr_t)pthread_self());
        settle_all(d);
        atomic_store(&d->settler, 0);
        atomic_store(&d->owner, 0);
    }
}

void kvp__domain_leave(kvp__domain *d)
{
    if (has_work(d)) settle_all(d);
    atomic_store(&d->owner, 0);
    try_settle(d);
    kvp__domain_release(d);
}

void kvp__domain_destroy_handle(const void *handle, kvp__kind kind)
{
    kvp__shell *s = kvp__shell_pin(handle, kind);
    if (!s) return;
    kvp__domain *d = atomic_load_explicit(&s->domain, memory_order_relaxed);
    bool killed = is_ours(d) && kvp__shell_kill(s, kind);
    if (killed) {
        kvp__domain_acquire(d);
        kvp__shell *head = atomic_load(&d->queue);
        do s->next_settled = head;
        while (!atomic_compare_exchange_weak(&d->queue, &head, s));
    }
    kvp__shell_unpin(s);
    if (!killed) return;
    try_settle(d);
    kvp__domain_release(d);
}

kvp_status kvp__domain_ask(const void *handle, kvp__kind kind, void (*ask)(void *object))
{
    kvp__shell *s = kvp__shell_pin(handle, kind);
    if (!s) return KVP_ERR_INVALID_HANDLE;
    kvp__domain *d = atomic_load_explicit(&s->domain, memory_order_relaxed);
    kvp_status st = is_ours(d) ? KVP_OK : KVP_ERR_FORKED;
    if (st == KVP_OK) {
        ask(s->object);
        kvp__domain_acquire(d);
    }
    kvp__shell_unpin(s);
    if (st != KVP_OK) return st;
    atomic_store(&d->asked, 1);
    try_settle(d);
    kvp__domain_release(d);
    return KVP_OK;
}
