/*
 * Inside of the seq room: token buffers (tokens.c) for the block tables (seq.c).
 */
#ifndef KVP_SEQ_TOKENS_H
#define KVP_SEQ_TOKENS_H

#include "seq/seq.h"

/* Gives up the buffer. */
void kvp__seq_tokens_drop(kvp__seq *s);
/* After `length` became smaller. */
void kvp__seq_tokens_cut(kvp__seq *s);
/* Makes `s` the owner of a buffer with room for `length` tokens (>= its own, > 0). False: no
 * memory, unchanged. */
bool kvp__seq_tokens_room(kvp__seq *s, uint32_t length);

#endif
