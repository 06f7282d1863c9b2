/*
 * An opened model: what a kvp_model handle points to. The origin of everything made from it.
 *
 * The model itself is immutable; the only thing that changes is that weights appear when it is placed
 * on a device, once, under a lock.
 */
#ifndef KVP_ENGINE_OPENED_H
#define KVP_ENGINE_OPENED_H

#include "device/device.h"
#include "engine/handle.h"

#include <pthread.h>

typedef struct kvp__opened {
    kvp__origin origin; /* first: the origin frees this object */
    kvp__model model;
    const kvp__device *device;         /* CPU; chosen at open, for sizes and levels */
    pthread_mutex_t placing;
    _Atomic uint64_t placer;           /* the thread inside place; 0: none */
    kvp__weights *_Atomic weights;     /* NULL: not placed */
    bool own_model;                    /* a geometry: no weights ever */
    kvp__shell *shell;
} kvp__opened;

kvp_status kvp__opened_from_source(kvp__opened **out, const kvp_model_options *options,
                                   kvp__source *source, kvp_error *err);
kvp_status kvp__opened_from_geometry(kvp__opened **out, const kvp_model_options *options,
                                     const kvp_geometry *geometry, kvp_error *err);

/* Places unless it is done. `wait`: for another thread that is placing, else BUSY. */
kvp_status kvp__opened_place(kvp__opened *m, const kvp__place *how, bool wait, kvp_error *err);

/* Ends the handle's count. */
void kvp__opened_close(kvp__opened *m);

#endif
