/*
 * The bell of a batch: how anybody tells the host that kvp_step has something to do.
 *
 * One flag and one descriptor. Ringing sets the flag and, if it was not set and the descriptor has
 * been made, writes to it; a step first drains the descriptor, then clears the flag, and only then looks
 * for work. In this order nothing is lost: who rings before the flag is cleared has made its work
 * visible to the look that follows, who rings after it finds the flag clear and writes. Draining does not
 * trust the flag, because a ringer may write late.
 *
 * Ringing is safe from any thread and from signal handlers; the rest is the domain's.
 */
#ifndef KVP_ENGINE_BELL_H
#define KVP_ENGINE_BELL_H

#include "base/base.h"

#include <stdatomic.h>

typedef struct kvp__bell {
    _Atomic uint32_t rung;
    _Atomic int32_t fd; /* -1: not made yet */
} kvp__bell;

void kvp__bell_init(kvp__bell *b);
void kvp__bell_close(kvp__bell *b);
void kvp__bell_ring(kvp__bell *b);
/* Before a step looks for work. */
void kvp__bell_quiet(kvp__bell *b);
/* Makes the descriptor at the first call. SYSTEM. */
kvp_status kvp__bell_fd(kvp__bell *b, int32_t *fd, kvp_error *err);
/* A descriptor of the same bell for one wait: it stays this bell's, and rings at the end, though the bell
 * is closed and its number given to somebody else meanwhile. SYSTEM. */
kvp_status kvp__bell_listen(kvp__bell *b, int32_t *fd, kvp_error *err);
/* Sleeps until the bell behind a descriptor of kvp__bell_listen, which this closes, rings, a signal
 * comes or the time is over (-1: no limit). SYSTEM. */
kvp_status kvp__bell_wait(int32_t fd, int32_t timeout_ms);

#endif
