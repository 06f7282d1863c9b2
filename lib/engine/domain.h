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
    _Atomic uint64_t settler;         /* the thread that settles, while owner says settling */
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

/* Enters the domain of a handle. KVP_OK: inside, `*object` lives at least as long as the caller stays.
 * INVALID_HANDLE (also: it died just now), FORKED, REENTRANT or THREAD: not inside. */
kvp_status kvp__domain_enter(const void *handle, kvp__kind kind, void **object);

/* Of another handle, for who is inside `d`: its object. INVALID_HANDLE; MISMATCH: of another domain. */
kvp_status kvp__domain_object(const kvp__domain *d, const void *handle, kvp__kind kind,
                              void **object);

/* May free the domain, if settling a destroy ended its last object. */
void kvp__domain_leave(kvp__domain *d);

/* Ends a handle, whoever is inside: it is settled now or when they leave. Not in a forked child. */
void kvp__domain_destroy_handle(const void *handle, kvp__kind kind);

/* Has something that `settle` finds with NULL, which `ask` says of the object, settled in the same
 * way. INVALID_HANDLE or FORKED: nothing was asked. */
kvp_status kvp__domain_ask(const void *handle, kvp__kind kind, void (*ask)(void *object));

#endif
