/*
 * The text of a sequence as it is generated: bytes of tokens go in, whole UTF-8 characters come
 * out, and nothing that may turn out to be the beginning of a stop string.
 *
 * State of fixed size, no allocation: a kvp__textstream lies inside the sequence, a kvp__stops
 * beside it (a fork shares or copies it). Both are plain data and may be copied by assignment.
 *
 * Invariant: everything pushed is released, in order, once: by a push, by the flush, or, if a stop
 * string came, everything before it.
 */
#ifndef KVP_MODEL_TEXTSTREAM_H
#define KVP_MODEL_TEXTSTREAM_H

#include "base/base.h"

#define KVP__STOP_STRINGS 16u
#define KVP__STOP_BYTES 128u
/* The most that is held back: all but the last byte of a stop string, and in front of it an
 * unfinished character. */
#define KVP__TEXT_HELD (KVP__STOP_BYTES - 1u + 3u)

typedef struct kvp__stops {
    uint32_t n;
    uint8_t bytes[KVP__STOP_STRINGS];
    uint8_t text[KVP__STOP_STRINGS][KVP__STOP_BYTES];
    uint8_t fail[KVP__STOP_STRINGS][KVP__STOP_BYTES]; /* longest border of the first i + 1 bytes */
} kvp__stops;

/* INVALID_ARG: more than 16, or one that is empty or longer than 128 bytes. */
kvp_status kvp__stops_fill(kvp__stops *out, const kvp_string *strings, uint64_t n, kvp_error *err);

typedef struct kvp__textstream {
    uint32_t n_held;
    uint8_t matched[KVP__STOP_STRINGS]; /* of each stop string, at the end of what was pushed */
    uint8_t held[KVP__TEXT_HELD];
} kvp__textstream;

void kvp__textstream_init(kvp__textstream *ts);

/* Pushes the bytes of one token and stores what may be shown now: at most `bytes` + KVP__TEXT_HELD,
 * which is what `out` must hold. Bytes that can never become valid UTF-8 come as they are. True: a
 * stop string is complete; `out` ends where it begins, nothing is held any more, and the rest of
 * `text` is dropped. `stops` may be NULL. The string whose end comes first wins; of several with
 * the same end, the longest. */
bool kvp__textstream_push(kvp__textstream *ts, const kvp__stops *stops, const char *text,
                          size_t bytes, char *out, size_t *n_out);

/* What is still held, at most KVP__TEXT_HELD bytes, as it is: the sequence has ended. */
size_t kvp__textstream_flush(kvp__textstream *ts, char *out);

#endif
