/*
 * The text stream against a naive one that keeps everything, over random cuts of random texts; what
 * it holds back, and what it does with bytes that are no UTF-8.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "model/textstream.h"
#include "support/gguf_writer.h"

static kvp__stops stops_of(const char *const *texts, size_t n)
{
    kvp_string strings[KVP__STOP_STRINGS];
    kvp__stops stops;
    kvp_error err = {.size = sizeof err};
    for (size_t i = 0; i < n; i++) strings[i] = (kvp_string){texts[i], strlen(texts[i])};
    if (kvp__stops_fill(&stops, strings, n, &err) != KVP_OK) fail_msg("%s", err.text);
    return stops;
}

/* Pushes and expects what comes out; `end` is whether a stop string does. */
static void push(kvp__textstream *ts, const kvp__stops *stops, const char *text, const char *wanted,
                 bool end)
{
    char out[512];
    size_t n = 0;
    assert_true(kvp__textstream_push(ts, stops, text, strlen(text), out, &n) == end);
    if (n != strlen(wanted) || memcmp(out, wanted, n))
        fail_msg("'%s' gave '%.*s', wanted '%s'", text, (int)n, out, wanted);
}

static void flush(kvp__textstream *ts, const char *wanted)
{
    char out[KVP__TEXT_HELD];
    size_t n = kvp__textstream_flush(ts, out);
    assert_int_equal(n, strlen(wanted));
    assert_memory_equal(out, wanted, n);
    assert_int_equal(kvp__textstream_flush(ts, out), 0);
}

static void test_characters_stay_whole(void **state)
{
    (void)state;
    kvp__textstream ts;
    kvp__textstream_init(&ts);
    push(&ts, NULL, "a\xc3", "a", false);
    push(&ts, NULL, "\xa9", "\xc3\xa9", false);
    push(&ts, NULL, "\xf0", "", false);
    push(&ts, NULL, "\x9f", "", false);
    push(&ts, NULL, "\x98", "", false);
    push(&ts, NULL, "\x80!", "\xf0\x9f\x98\x80!", false);
    push(&ts, NULL, "\xe4\xbd", "", false);
    flush(&ts, "\xe4\xbd");
    /* What can never become valid does not wait: a lone continuation, an overlong form, a
     * surrogate, a beginning that another beginning cuts short. */
    push(&ts, NULL, "\x80", "\x80", false);
    push(&ts, NULL, "\xc0", "\xc0", false);
    push(&ts, NULL, "\xed\xa0", "\xed\xa0", false);
    push(&ts, NULL, "\xe4", "", false);
    push(&ts, NULL, "\xbd", "", false);
    push(&ts, NULL, "x", "\xe4\xbdx", false);
    push(&ts, NULL, "\xf0\x9f", "", false);
    push(&ts, NULL, "\xc3", "\xf0\x9f", false);
    push(&ts, NULL, "", "", false);
    flush(&ts, "\xc3");
}

static void test_stop_strings(void **state)
{
    (void)state;
    static const char *const texts[] = {"END", "\n\n", "ENDING"};
    kvp__stops stops = stops_of(texts, 3);
    kvp__textstream ts;
    kvp__textstream_init(&ts);
    push(&ts, &stops, "one E", "one ", false);
    push(&ts, &stops, "N", "", false);
    push(&ts, &stops, "EN", "EN", false); /* the second E begins anew */
    push(&ts, &stops, "Dless", "", true); /* complete before "ENDING" could be */
    push(&ts, &stops, "a\n", "a", false); /* a new start after the end */
    push(&ts, &stops, "b\n", "\nb", false);
    push(&ts, &stops, "\n", "", true);
    push(&ts, &stops, "x", "x", false);

    /* Of those with the same end the longest: its text goes, too. */
    static const char *const nested[] = {"c", "abc", "bc"};
    stops = stops_of(nested, 3);
    kvp__textstream_init(&ts);
    push(&ts, &stops, "xab", "x", false);
    push(&ts, &stops, "c", "", true);
    push(&ts, &stops, "xabd", "xabd", false);
    push(&ts, &stops, "xbc", "x", true);

    /* Overlaps of a string with itself. */
    static const char *const own[] = {"aabaab"};
    stops = stops_of(own, 1);
    kvp__textstream_init(&ts);
    push(&ts, &stops, "aabaa", "", false);
    push(&ts, &stops, "aba", "aaba", false);
    push(&ts, &stops, "ab", "", true);
}

static void test_stops_and_characters(void **state)
{
    (void)state;
    /* A stop string of bytes that is a part of a character: in front of it the rest waits. */
    static const char *const bytes[] = {"\x98\x80"};
    kvp__stops stops = stops_of(bytes, 1);
    kvp__textstream ts;
    kvp__textstream_init(&ts);
    push(&ts, &stops, "a\xf0\x9f\x98", "a", false);
    push(&ts, &stops, "\x81", "\xf0\x9f\x98\x81", false);
    push(&ts, &stops, "\xf0\x9f\x98", "", false);
    push(&ts, &stops, "\x80", "\xf0\x9f", true); /* everything before it, as it is */

    static const char *const euro[] = {"\xe2\x82\xac!"};
    stops = stops_of(euro, 1);
    kvp__textstream_init(&ts);
    push(&ts, &stops, "5\xe2", "5", false);
    push(&ts, &stops, "\x82\xac", "", false);
    push(&ts, &stops, ".", "\xe2\x82\xac.", false);
    push(&ts, &stops, "\xe2\x82", "", false);
    flush(&ts, "\xe2\x82");
    push(&ts, &stops, "\xac!", "\xac!", false); /* a flush forgets */
}

static void test_refused(void **state)
{
    (void)state;
    static char text[KVP__STOP_BYTES + 1];
    memset(text, 'x', sizeof text);
    kvp_string strings[17];
    for (int i = 0; i < 17; i++) strings[i] = (kvp_string){text, KVP__STOP_BYTES};
    kvp__stops stops = {.n = 77};
    kvp_error err = {.size = sizeof err};
    assert_int_equal(kvp__stops_fill(&stops, strings, 17, &err), KVP_ERR_INVALID_ARG);
    assert_non_null(strstr(err.text, "stop_strings"));
    assert_int_equal(kvp__stops_fill(&stops, NULL, 1, &err), KVP_ERR_INVALID_ARG);
    strings[3].bytes = 0;
    assert_int_equal(kvp__stops_fill(&stops, strings, 16, &err), KVP_ERR_INVALID_ARG);
    assert_non_null(strstr(err.text, "stop_strings[3]"));
    strings[3].bytes = KVP__STOP_BYTES + 1;
    assert_int_equal(kvp__stops_fill(&stops, strings, 16, &err), KVP_ERR_INVALID_ARG);
    strings[3] = (kvp_string){NULL, 4};
    assert_int_equal(kvp__stops_fill(&stops, strings, 16, &err), KVP_ERR_INVALID_ARG);
    assert_int_equal(stops.n, 77);
    strings[3] = strings[2];
    assert_int_equal(kvp__stops_fill(&stops, strings, 16, &err), KVP_OK);
    assert_int_equal(stops.n, 16);
    assert_int_equal(kvp__stops_fill(&stops, NULL, 0, &err), KVP_OK);
    assert_int_equal(stops.n, 0);
}

/* The most that can be held: 127 bytes of a stop string behind three of a character. */
static void test_most_held(void **state)
{
    (void)state;
    char stop[KVP__STOP_BYTES + 1], text[300], out[600];
    size_t n;
    memset(stop, '\x90', KVP__STOP_BYTES);
    stop[KVP__STOP_BYTES] = 0;
    const char *const texts[] = {stop};
    kvp__stops stops = stops_of(texts, 1);
    kvp__textstream ts;
    kvp__textstream_init(&ts);
    memset(text, '\x90', sizeof text);
    text[0] = 'a';
    text[1] = '\xf0';
    assert_false(kvp__textstream_push(&ts, &stops, text, 129, out, &n));
    assert_int_equal(n, 1);
    assert_int_equal(ts.n_held, 128);
    assert_true(kvp__textstream_push(&ts, &stops, text + 2, 1, out, &n));
    assert_int_equal(n, 1);
    assert_int_equal(out[0], '\xf0');
}

/* --- against a naive one --- */

/* Where the first stop string ends in text[0..n), and where it begins; false: nowhere. */
static bool find_naively(const char *const *texts, size_t n_texts, const char *text, size_t n,
                         size_t *begin, size_t *end)
{
    for (*end = 1; *end <= n; (*end)++) {
        bool found = false;
        for (size_t i = 0; i < n_texts; i++) {
            size_t bytes = strlen(texts[i]);
            if (bytes > *end || memcmp(text + *end - bytes, texts[i], bytes)) continue;
            if (!found || *end - bytes < *begin) *begin = *end - bytes;
            found = true;
        }
        if (found) return true;
    }
    return false;
}

static void test_against_naive(void **state)
{
    (void)state;
    uint64_t rng = 77;
    static const char *const pieces[] = {"a", "b", "ab", "\xc3\xa9", "\xc3", "\xa9", "\xf0\x9f\x98\x80",
                                         "\x9f", "\xe4\xbd\xa0", "aab", "\n", "\xff"};
    for (int round = 0; round < 20000; round++) {
        char text[256], given[1024], stop_text[4][32];
        const char *texts[4];
        size_t n = 0, n_given = 0, n_texts = (size_t)(gw_rand(&rng) % 4);
        size_t begin = 0, end;
        while (n < 100) {
            const char *p = pieces[gw_rand(&rng) % KVP__COUNT(pieces)];
            memcpy(text + n, p, strlen(p));
            n += strlen(p);
        }
        for (size_t i = 0; i < n_texts; i++) {
            size_t at = (size_t)(gw_rand(&rng) % 90), bytes = 1 + (size_t)(gw_rand(&rng) % 9);
            memcpy(stop_text[i], text + at, bytes);
            if (gw_rand(&rng) % 2) stop_text[i][bytes - 1] = 'z';
            stop_text[i][bytes] = 0;
            texts[i] = stop_text[i];
        }
        kvp__stops stops = stops_of(texts, n_texts);
        kvp__textstream ts;
        kvp__textstream_init(&ts);
        bool stopped = false;
        for (size_t at = 0; at < n && !stopped;) {
            size_t bytes = (size_t)(gw_rand(&rng) % 9), out;
            if (bytes > n - at) bytes = n - at;
            stopped = kvp__textstream_push(&ts, n_texts ? &stops : NULL, text + at, bytes,
                                           given + n_given, &out);
            n_given += out;
            at += bytes;
            assert_true(ts.n_held <= KVP__TEXT_HELD);
        }
        if (!stopped) n_given += kvp__textstream_flush(&ts, given + n_given);
        assert_true(stopped == find_naively(texts, n_texts, text, n, &begin, &end));
        assert_int_equal(n_given, stopped ? begin : n);
        assert_memory_equal(given, text, n_given);
    }
}

/* Valid text without stop strings comes as whole characters, and none is held longer than its last
 * byte takes to come. */
static void test_whole_characters_at_once(void **state)
{
    (void)state;
    uint64_t rng = 5;
    static const char *const pieces[] = {"a", "\xc3\xa9", "\xf0\x9f\x98\x80", "\xe4\xbd\xa0"};
    kvp__textstream ts;
    kvp__textstream_init(&ts);
    for (int round = 0; round < 5000; round++) {
        const char *p = pieces[gw_rand(&rng) % KVP__COUNT(pieces)];
        char out[16 + KVP__TEXT_HELD];
        size_t n;
        for (size_t i = 0; p[i]; i++) {
            assert_false(kvp__textstream_push(&ts, NULL, p + i, 1, out, &n));
            assert_int_equal(n, p[i + 1] ? 0 : strlen(p));
        }
        assert_memory_equal(out, p, n);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_characters_stay_whole),
        cmocka_unit_test(test_stop_strings),
        cmocka_unit_test(test_stops_and_characters),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_most_held),
        cmocka_unit_test(test_against_naive),
        cmocka_unit_test(test_whole_characters_at_once),
    };
    return cmocka_run_group_tests_name("textstream", tests, NULL, NULL);
}
