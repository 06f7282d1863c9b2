/*
 * A domain: a pool with its sequences and its batch, used by one thread at a time.
 *
 * Every public call enters and leaves. A second thread is refused, not queued, and a call from a hook
 * inside is told so. Destroy and cancel are the exception, since finalizers run anywhere: they are
 * queued without a lock, and settled by whoever leaves the domain, or at once if nobody is inside. A
 * thread that settles holds the domain as "settling"; a call that finds it so waits for those few
 * instructions instead of being refused for something its host did not do.
 */
#ifndef KVP_ENGINE_DOMAIN_H
#define KVP_ENGINE_DOMAIN_H

#include "engine/handle.h"

typedef struct kvp__domain {
    _Atomic uint64_t owner;           /* 0: nobody; all ones: settling; else the thread */
    _Atomic uint32_t refs;            /* objects in it, and threads inside or on their way out */
    kvp__shell *_Atomic queue;        /* killed handles to settle, newest first */
    _Atomic uint32_t asked;           /* something else is to be settled (a cancel) */
    uint32_t generation;              /* of the process it was made in */
    kvp__origin *origin;
    void (*settle)(struct kvp__domain *d, kvp__shell *killed); /* inside; killed may be NULL:
                                                                   look for cancels */
    void (*finish)(struct kvp__domain *d); /* frees it all, after the last count */
    kvp_error error;                  /* the last one */
} kvp__domain;

/* With one count. */
void kvp__domain_init(kvp__domain *d, kvp__origin *origin,
                      void (*settle)(kvp__domain *, kvp__shell *),
                      void (*finish)(kvp__domain *));
void kvp__domain_acquire(kvp__domain *d);
void kvp__domain_release(kvp__domain *d);

/* KVP_OK: inside. FORKED, REENTRANT or THREAD: not. */
kvp_status kvp__domain_enter(kvp__domain *d);
/* May free the domain, if settling a destroy ended its last object. */
void kvp__domain_leave(kvp__domain *d);

/* Queues a killed handle and settles it as soon as may be. */
void kvp__domain_settle_handle(kvp__domain *d, kvp__shell *killed);
/* The same for what `settle` finds with NULL. */
void kvp__domain_settle_asked(kvp__domain *d);

#endif
