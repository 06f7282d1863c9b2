/*
 * An opened model: what a kvp_model handle points to. The origin of everything made from it.
 *
 * The model itself is immutable; the only thing that changes is that weights appear when it is
 * placed on a device, once for each, under a lock. They are in a list that only grows, so that a
 * pool finds its own without the lock.
 */
#ifndef KVP_ENGINE_OPENED_H
#define KVP_ENGINE_OPENED_H

#include "device/device.h"
#include "engine/handle.h"

#include <pthread.h>

#define KVP__MAX_PLACES 16u

/* The weights on one device. */
typedef struct kvp__placed {
    const kvp__device *device;
    uint32_t ordinal;
    uint32_t generation; /* of the process: what an asynchronous device holds is lost by a fork */
    kvp__weights *weights;
} kvp__placed;

typedef struct kvp__opened {
    kvp__origin origin; /* first: the origin frees this object */
    kvp__model model;
    const kvp__device *cpu;            /* for levels, and the sizes a model's info states */
    pthread_mutex_t placing;
    _Atomic uint64_t placer;           /* the thread inside place; 0: none */
    _Atomic uint32_t n_placed;         /* entries that are there, and stay as they are */
    kvp__placed placed[KVP__MAX_PLACES];
    bool own_model;                    /* a geometry: no weights ever */
    kvp__shell *shell;
} kvp__opened;

kvp_status kvp__opened_from_source(kvp__opened **out, const kvp_model_options *options,
                                   kvp__source *source, kvp_error *err);
kvp_status kvp__opened_from_geometry(kvp__opened **out, const kvp_model_options *options,
                                     const kvp_geometry *geometry, kvp_error *err);

/* Places on number how->ordinal of a kind of device, unless it is done. `wait`: for another thread
 * that is placing, else BUSY. */
kvp_status kvp__opened_place(kvp__opened *m, const kvp__device *device, const kvp__place *how,
                             bool wait, kvp_error *err);

/* FORKED if the model's weights on this device are those of the process that this one was forked
 * from. */
kvp_status kvp__opened_check_ours(const kvp__opened *m, const kvp__device *device,
                                  uint32_t ordinal, kvp_error *err);

/* The weights there; NULL: it has not been placed there. */
kvp__weights *kvp__opened_weights(const kvp__opened *m, const kvp__device *device,
                                  uint32_t ordinal);

/* Ends the handle's count. */
void kvp__opened_close(kvp__opened *m);

#endif
