/*
 * The front door: check, translate, call one inner function. Nothing is decided here.
 *
 * Helpers that every noun's file uses. A public function on a domain reads
 *
 *     ENTER(handle, s);
 *     return kvp__leave(s->cache, kvp__sequence_truncate(s, ...));
 */
#ifndef KVP_API_API_H
#define KVP_API_API_H

#include "engine/engine.h"

/* Zeroes `size` bytes and sets the size field: what every kvp_..._init does. */
void kvp__init(void *out, size_t size);

/* Copies a host's options (NULL: all defaults) into a zeroed struct of ours. */
kvp_status kvp__options_in(void *out, size_t size, const void *in, const char *what,
                           kvp_error *err);
/* Our filled struct into the host's. */
kvp_status kvp__result_out(void *out, const void *in, size_t size, const char *what,
                           kvp_error *err);

/* The object of a live handle, or NULL. */
kvp__opened *kvp__opened_of(const kvp_model *handle);

/* Begins a call: on KVP_OK this thread is inside the domain and `*out` is the live object, until
 * kvp__leave. */
kvp_status kvp__enter_pool(const kvp_pool *handle, kvp__cache **out);
kvp_status kvp__enter_seq(const kvp_seq *handle, kvp__sequence **out);
kvp_status kvp__enter_batch(const kvp_batch *handle, kvp__loop **out);

/* Ends a call: the caller's answer, after the domain has been left. */
static inline kvp_status kvp__leave(kvp__cache *c, kvp_status status)
{
    kvp__domain_leave(&c->domain);
    return status;
}

/* INVALID_HANDLE with a line that says which handle. */
kvp_status kvp__bad_handle(kvp_error *err, const char *what);
/* Why the domain of a handle, a `what`, could not be entered. */
kvp_status kvp__refused(kvp_error *err, kvp_status status, const char *what);

#endif
