/*
 * The front door: check, translate, call one inner function. Nothing is decided here.
 *
 * Helpers that every noun's file uses. A public function on a domain reads
 *
 *     KVP__ENTER_SEQ(handle, seq);
 *     return leave(seq->pool, kvp__seq_truncate(...));
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
kvp__cache *kvp__cache_of(const kvp_pool *handle);
kvp__sequence *kvp__sequence_of(const kvp_seq *handle);
kvp__loop *kvp__loop_of(const kvp_batch *handle);

/* INVALID_HANDLE with a line that says which handle. */
kvp_status kvp__bad_handle(kvp_error *err, const char *what);
/* Why a domain could not be entered. */
kvp_status kvp__refused(kvp_error *err, kvp_status status);

#endif
