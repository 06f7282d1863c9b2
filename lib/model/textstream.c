/*
 * Text as it is generated. See textstream.h for the invariant.
 *
 * Each stop string is followed byte by byte with its failure function (Knuth, Morris and Pratt):
 * how many of its first bytes the text ends with. The longest of these, over all stop strings, is
 * what has to be held back. Of what is left, an unfinished UTF-8 character at the end waits too.
 */
#include "model/textstream.h"

#include "model/unicode.h"

#include <string.h>

kvp_status kvp__stops_fill(kvp__stops *out, const kvp_string *strings, uint64_t n, kvp_error *err)
{
    if (n > KVP__STOP_STRINGS || (n && !strings))
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "stop_strings: %llu of them%s",
                         (unsigned long long)n, strings ? ", 16 are the most" : " at NULL");
    for (uint32_t i = 0; i < n; i++)
        if (!strings[i].text || strings[i].bytes == 0 || strings[i].bytes > KVP__STOP_BYTES)
            return kvp__fail(err, KVP_ERR_INVALID_ARG,
                             "stop_strings[%u]: %llu bytes; from 1 to 128 are taken", (unsigned)i,
                             (unsigned long long)strings[i].bytes);
    memset(out, 0, sizeof *out);
    out->n = (uint32_t)n;
    for (uint32_t i = 0; i < n; i++) {
        uint8_t *text = out->text[i], *fail = out->fail[i];
        out->bytes[i] = (uint8_t)strings[i].bytes;
        memcpy(text, strings[i].text, out->bytes[i]);
        for (uint32_t at = 1, border = 0; at < out->bytes[i]; at++) {
            while (border > 0 && text[at] != text[border]) border = fail[border - 1];
            border += text[at] == text[border];
            fail[at] = (uint8_t)border;
        }
    }
    return KVP_OK;
}

void kvp__textstream_init(kvp__textstream *ts) { memset(ts, 0, sizeof *ts); }

/* Follows every stop string by one byte. The length of the longest that is complete now, or 0. */
static uint32_t follow(kvp__textstream *ts, const kvp__stops *stops, uint8_t c)
{
    uint32_t complete = 0;
    for (uint32_t i = 0; i < stops->n; i++) {
        uint32_t m = ts->matched[i];
        while (m > 0 && stops->text[i][m] != c) m = stops->fail[i][m - 1];
        m += stops->text[i][m] == c;
        if (m == stops->bytes[i]) {
            if (m > complete) complete = m;
            m = stops->fail[i][m - 1];
        }
        ts->matched[i] = (uint8_t)m;
    }
    return complete;
}

/* Bytes at the end that belong to a character that is not whole yet: at most three. */
static size_t unfinished(const uint8_t *p, size_t n)
{
    for (size_t tail = 1; tail <= 3 && tail <= n; tail++)
        if (kvp__unicode_unfinished(p + n - tail, tail)) return tail;
    return 0;
}

/* How many of the n bytes can be shown: not those that may become a stop string, and no part of a
 * character without the rest. */
static size_t showable(const kvp__textstream *ts, const kvp__stops *stops, const uint8_t *p,
                       size_t n)
{
    uint32_t held = 0;
    for (uint32_t i = 0; stops && i < stops->n; i++)
        if (ts->matched[i] > held) held = ts->matched[i];
    size_t shown = n - held;
    return shown - unfinished(p, shown);
}

bool kvp__textstream_push(kvp__textstream *ts, const kvp__stops *stops, const char *text,
                          size_t bytes, char *out, size_t *n_out)
{
    uint8_t *all = (uint8_t *)out; /* what was held, then the new bytes */
    size_t n = ts->n_held;
    memcpy(all, ts->held, n);
    for (size_t i = 0; i < bytes; i++) {
        all[n++] = (uint8_t)text[i];
        uint32_t complete = stops ? follow(ts, stops, (uint8_t)text[i]) : 0;
        if (complete) {
            kvp__textstream_init(ts);
            *n_out = n - complete;
            return true;
        }
    }
    *n_out = showable(ts, stops, all, n);
    ts->n_held = (uint32_t)(n - *n_out);
    memcpy(ts->held, all + *n_out, ts->n_held);
    return false;
}

size_t kvp__textstream_flush(kvp__textstream *ts, char *out)
{
    size_t n = ts->n_held;
    memcpy(out, ts->held, n);
    kvp__textstream_init(ts);
    return n;
}
