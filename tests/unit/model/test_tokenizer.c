/*
 * The tokenizer: equal ids with llama.cpp and transformers on the strings of tests/golden/tokenizer
 * (every pre-tokenizer on a small vocabulary that shows each cut; the real models when their files
 * are there), a naive merger on random texts, every way in which a file's vocabulary can be wrong,
 * and what the two directions promise. Case B160.
 */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "model/gguf.h"
#include "model/tokenizer_priv.h"
#include "support/gguf_writer.h"
#include "support/golden.h"
#include "support/heap.h"

#define START KVP_TOKENIZE_SPECIAL_START
#define PARSE KVP_TOKENIZE_PARSE_SPECIAL

/* --- making tokenizers --- */

static heap the_heap;

static kvp_status make(kvp__tokenizer **out, const void *data, size_t bytes, kvp_error *err)
{
    kvp__source source;
    kvp__gguf g;
    memset(err, 0, sizeof *err);
    err->size = sizeof *err;
    kvp__source_memory(&source, data, bytes);
    kvp_status s = kvp__gguf_open(&g, &the_heap.hooks, &source, err);
    if (s != KVP_OK) fail_msg("the test's own file: %s", err->text);
    s = kvp__tokenizer_create(out, &the_heap.hooks, &g, err);
    kvp__gguf_close(&g);
    return s;
}

static kvp__tokenizer *must_make(const void *data, size_t bytes)
{
    kvp__tokenizer *t;
    kvp_error err;
    heap_init(&the_heap);
    if (make(&t, data, bytes, &err) != KVP_OK) fail_msg("%s", err.text);
    return t;
}

static kvp__tokenizer *finish(gw *w)
{
    size_t bytes;
    uint8_t *data = gw_finish(w, &bytes);
    kvp__tokenizer *t = must_make(data, bytes);
    free(data);
    return t;
}

static void refuse(gw *w, kvp_status status, const char *word)
{
    size_t bytes;
    kvp__tokenizer *t = NULL;
    kvp_error err;
    uint8_t *data = gw_finish(w, &bytes);
    heap_init(&the_heap);
    kvp_status s = make(&t, data, bytes, &err);
    free(data);
    if (s != status || !strstr(err.text, word) || strchr(err.text, '\n'))
        fail_msg("status %d, wanted %d; '%s' lacks '%s'", (int)s, (int)status, err.text, word);
    assert_null(t);
    assert_int_equal(the_heap.blocks, 0);
    assert_int_equal(the_heap.mismatches, 0);
}

static void drop(kvp__tokenizer *t)
{
    kvp__tokenizer_destroy(t);
    assert_int_equal(the_heap.blocks, 0);
    assert_int_equal(the_heap.mismatches, 0);
}

/* tests/golden/tokenizer/NAME with another pre-tokenizer written into it. */
static kvp__tokenizer *with_pre(const char *name, const char *pre)
{
    static const char key[] = "tokenizer.ggml.pre";
    size_t bytes, rest, old;
    uint8_t *data = golden_file(name, &bytes);
    assert_non_null(data);
    uint8_t *at = memmem(data, bytes, key, strlen(key));
    assert_non_null(at);
    at += strlen(key) + 4; /* past the type of the value: its length, then its bytes */
    memcpy(&old, at, 8);
    rest = bytes - (size_t)(at + 8 + old - data);
    uint8_t *copy = malloc(bytes + strlen(pre));
    assert_non_null(copy);
    size_t head = (size_t)(at - data), n = strlen(pre);
    memcpy(copy, data, head);
    memcpy(copy + head, &n, 8);
    memcpy(copy + head + 8, pre, n);
    memcpy(copy + head + 8 + n, at + 8 + old, rest);
    kvp__tokenizer *t = must_make(copy, head + 8 + n + rest);
    free(copy);
    free(data);
    return t;
}

/* --- asking them --- */

typedef struct ids {
    int32_t at[8192];
    size_t n;
} ids;

static void encode(const kvp__tokenizer *t, const char *text, size_t bytes, uint32_t flags,
                   ids *out)
{
    kvp_error err = {.size = sizeof err};
    if (kvp__tokenizer_encode(t, text, bytes, flags, out->at, KVP__COUNT(out->at), &out->n, &err))
        fail_msg("%s", err.text);
}

/* Expects these ids, given as "1 2 3". */
static void expect(const kvp__tokenizer *t, const char *text, uint32_t flags, const char *wanted)
{
    ids got;
    char line[512] = "";
    encode(t, text, strlen(text), flags, &got);
    for (size_t i = 0; i < got.n; i++)
        snprintf(line + strlen(line), sizeof line - strlen(line), "%s%d", i ? " " : "", got.at[i]);
    assert_string_equal(line, wanted);
}

static void expect_text(const kvp__tokenizer *t, const int32_t *tokens, size_t n, uint32_t flags,
                        const char *wanted)
{
    char text[512];
    size_t bytes;
    assert_int_equal(kvp__tokenizer_decode(t, tokens, n, flags, text, sizeof text, &bytes, NULL),
                     KVP_OK);
    assert_int_equal(bytes, strlen(wanted));
    assert_memory_equal(text, wanted, bytes);
}

/* --- the goldens --- */

typedef struct lines {
    char *data;
    char **line;
    size_t n;
} lines;

static lines read_lines(const char *name)
{
    size_t bytes;
    lines l = {.data = (char *)golden_file(name, &bytes)};
    assert_non_null(l.data);
    l.line = malloc((bytes + 1) * sizeof *l.line);
    assert_non_null(l.line);
    for (char *p = l.data; p < l.data + bytes;) {
        char *end = memchr(p, '\n', (size_t)(l.data + bytes - p));
        assert_non_null(end);
        *end = 0;
        l.line[l.n++] = p;
        p = end + 1;
    }
    return l;
}

static void free_lines(lines *l)
{
    free(l->data);
    free(l->line);
}

static size_t unescape(const char *p, char *out)
{
    size_t n = 0;
    for (; *p; p++) {
        unsigned byte = (unsigned char)*p;
        if (*p == '\\') {
            assert_int_equal(sscanf(p, "\\x%2x", &byte), 1);
            p += 3;
        }
        out[n++] = (char)byte;
    }
    return n;
}

/* What is in between must come back; of a vocabulary without a byte for each, except those. */
static void check_round_trip(const kvp__tokenizer *t, const char *text, size_t bytes)
{
    static char back[16384], wanted[16384];
    ids got;
    size_t n, m = 0;
    kvp__tokenizer_info info;
    kvp__tokenizer_get_info(t, &info);
    encode(t, text, bytes, 0, &got);
    assert_int_equal(
        kvp__tokenizer_decode(t, got.at, got.n, 0, back, sizeof back, &n, NULL), KVP_OK);
    if (t->adds_space && bytes) wanted[m++] = ' ';
    for (size_t i = 0; i < bytes; i++) {
        bool lacks = t->byte_ids[(uint8_t)text[i]] < 0;
        if (!lacks) wanted[m++] = text[i];
    }
    assert_int_equal(n, m);
    assert_memory_equal(back, wanted, n);
}

static size_t parse_ids(const char *p, ids *out, const char **rest)
{
    out->n = 0;
    while (*p == ' ' || (*p >= '0' && *p <= '9')) {
        if (*p == ' ') p++;
        else out->at[out->n++] = (int32_t)strtol(p, (char **)&p, 10);
    }
    *rest = p;
    return out->n;
}

static void compare(const kvp__tokenizer *t, const char *name, size_t line, const char *text,
                    size_t bytes, uint32_t flags, const ids *wanted)
{
    ids got;
    encode(t, text, bytes, flags, &got);
    bool same = got.n == wanted->n && !memcmp(got.at, wanted->at, got.n * sizeof got.at[0]);
    if (same) return;
    size_t i = 0;
    while (i < got.n && i < wanted->n && got.at[i] == wanted->at[i]) i++;
    fail_msg("%s line %zu, flags %u: %zu ids, wanted %zu; the first other one is number %zu", name,
             line + 1, (unsigned)flags, got.n, wanted->n, i);
}

static void check_golden(const kvp__tokenizer *t, const char *name)
{
    static char text[16384];
    char file[128];
    snprintf(file, sizeof file, "tokenizer/%s.ids", name);
    lines strings = read_lines("tokenizer/strings.txt"), answers = read_lines(file);
    lines base = read_lines("tokenizer/tiny-bpe.ids");
    assert_int_equal(strings.n, answers.n);
    assert_true(strings.n > 400);
    for (size_t i = 0; i < strings.n; i++) {
        const char *answer = answers.line[i][0] == '"' ? base.line[i] : answers.line[i];
        size_t bytes = unescape(strings.line[i], text);
        ids wanted;
        if (answer[0] == '-') {
            check_round_trip(t, text, bytes);
            continue;
        }
        parse_ids(answer + 1, &wanted, &answer);
        compare(t, name, i, text, bytes, 0, &wanted);
        if (*answer == '|') parse_ids(answer + 1, &wanted, &answer);
        compare(t, name, i, text, bytes, PARSE, &wanted);
    }
    free_lines(&strings);
    free_lines(&answers);
    free_lines(&base);
}

static void test_pre_tokenizers(void **state)
{
    (void)state;
    static const char *const pres[] = {"gpt-2", "llama-bpe", "qwen2", "tekken", "deepseek-v3",
                                       "default"};
    kvp__tokenizer *t = with_pre("tokenizer/tiny-bpe.gguf", "smollm");
    check_golden(t, "tiny-bpe");
    drop(t);
    for (size_t i = 0; i < KVP__COUNT(pres); i++) {
        char name[64];
        snprintf(name, sizeof name, "tiny-bpe-%s", pres[i]);
        t = with_pre("tokenizer/tiny-bpe.gguf", pres[i]);
        check_golden(t, name);
        drop(t);
    }
}

static void test_sentencepiece(void **state)
{
    (void)state;
    size_t bytes;
    uint8_t *data = golden_file("tokenizer/tiny-spm.gguf", &bytes);
    assert_non_null(data);
    kvp__tokenizer *t = must_make(data, bytes);
    check_golden(t, "tiny-spm");
    drop(t);
    free(data);
}

/* The real vocabularies, whose files `make check` names; memory is part of the promise. */
static void check_model(const char *variable, const char *name, uint64_t most_bytes)
{
    const char *path = getenv(variable);
    if (!path || !*path) {
        skip();
        return;
    }
    kvp__source source;
    kvp__gguf g;
    kvp__tokenizer *t;
    kvp_error err = {.size = sizeof err};
    heap_init(&the_heap);
    if (kvp__source_path(&source, &the_heap.hooks, path, &err) != KVP_OK) fail_msg("%s", err.text);
    if (kvp__gguf_open(&g, &the_heap.hooks, &source, &err) != KVP_OK) fail_msg("%s", err.text);
    uint64_t before = the_heap.live;
    if (kvp__tokenizer_create(&t, &the_heap.hooks, &g, &err) != KVP_OK) fail_msg("%s", err.text);
    assert_true(the_heap.live - before < most_bytes);
    kvp__gguf_close(&g);
    check_golden(t, name);
    kvp__tokenizer_destroy(t);
    if (source.close) source.close(source.user);
    assert_int_equal(the_heap.mismatches, 0);
}

static void test_smollm2(void **state)
{
    (void)state;
    check_model("KVPAGE_TEST_SMOLLM2", "smollm2", 3u << 20);
}

static void test_gemma3(void **state)
{
    (void)state;
    check_model("KVPAGE_TEST_GEMMA3", "gemma3", 8u << 20);
}

/* --- a naive merger --- */

/* The same merges by looking through all pairs each time. */
static void merge_naively(const kvp__tokenizer *t, const uint8_t *text, size_t bytes, ids *out)
{
    size_t start[512], n = bytes;
    assert_true(bytes < KVP__COUNT(start));
    for (size_t i = 0; i <= n; i++) start[i] = i;
    for (;;) {
        size_t best = SIZE_MAX;
        double best_rank = 0;
        for (size_t i = 0; i + 1 < n; i++) {
            const uint8_t *p = text + start[i];
            uint32_t left = kvp__vocab_find(t, p, start[i + 1] - start[i]);
            uint32_t right = kvp__vocab_find(t, text + start[i + 1], start[i + 2] - start[i + 1]);
            uint32_t whole = kvp__vocab_find(t, p, start[i + 2] - start[i]);
            double rank;
            if (t->kind == KVP__KIND_BPE) {
                const kvp__merge *m = kvp__vocab_merge(t, left, right);
                if (!m) continue;
                assert_int_equal(m->product, whole);
                rank = m->rank;
            } else {
                if (whole == KVP__NO_TOKEN) continue;
                rank = -(double)t->scores[whole];
            }
            if (best != SIZE_MAX && rank >= best_rank) continue;
            best = i;
            best_rank = rank;
        }
        if (best == SIZE_MAX) break;
        memmove(start + best + 1, start + best + 2, (n - best - 1) * sizeof *start);
        n--;
    }
    out->n = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t id = kvp__vocab_find(t, text + start[i], start[i + 1] - start[i]);
        if (id != KVP__NO_TOKEN) {
            out->at[out->n++] = (int32_t)id;
            continue;
        }
        for (size_t k = start[i]; k < start[i + 1]; k++)
            if (t->byte_ids[text[k]] >= 0) out->at[out->n++] = t->byte_ids[text[k]];
    }
}

static void compare_with_naive(const kvp__tokenizer *t, uint64_t *rng, const char *letters)
{
    kvp__merge_space space = {.hooks = &the_heap.hooks};
    kvp__ids list = {.hooks = &the_heap.hooks};
    for (int round = 0; round < 400; round++) {
        uint8_t text[300];
        ids wanted;
        size_t n = (size_t)(gw_rand(rng) % sizeof text);
        for (size_t i = 0; i < n; i++) text[i] = (uint8_t)letters[gw_rand(rng) % strlen(letters)];
        merge_naively(t, text, n, &wanted);
        list.count = 0;
        assert_true(kvp__merge_word(t, &space, text, n, &list));
        assert_int_equal(list.count, wanted.n);
        if (wanted.n) assert_memory_equal(list.data, wanted.at, wanted.n * sizeof wanted.at[0]);
    }
    kvp__merge_space_free(&space);
    kvp__ids_free(&list);
}

static void test_merging_against_naive(void **state)
{
    (void)state;
    uint64_t rng = 11;
    kvp__tokenizer *t = with_pre("tokenizer/tiny-bpe.gguf", "smollm");
    compare_with_naive(t, &rng, "aab  !e-=th");
    compare_with_naive(t, &rng, "the quick brown fox\n\t=0123456789");
    drop(t);
    /* Single-byte characters alone: the naive one cuts by bytes. */
    t = with_pre("tokenizer/tiny-spm.gguf", "default");
    compare_with_naive(t, &rng, "aab!e-=th");
    compare_with_naive(t, &rng, "thequickbrownfox\n\t=0123456789(){};");
    drop(t);
}

/* --- small vocabularies of the test's own --- */

enum { UNKNOWN_TYPE = 2, CONTROL = 3, USER = 4, UNUSED = 5, BYTE = 6 };

#define STRINGS(w, key, ...)                                                                      \
    do {                                                                                          \
        const char *const strings_[] = {__VA_ARGS__};                                             \
        gw_strs(w, key, strings_, KVP__COUNT(strings_));                                          \
    } while (0)

#define INTS(w, key, ...)                                                                         \
    do {                                                                                          \
        const int32_t ints_[] = {__VA_ARGS__};                                                    \
        gw_i32s(w, key, ints_, KVP__COUNT(ints_));                                                \
    } while (0)

#define FLOATS(w, key, ...)                                                                       \
    do {                                                                                          \
        const float floats_[] = {__VA_ARGS__};                                                    \
        gw_f32s(w, key, floats_, KVP__COUNT(floats_));                                            \
    } while (0)

#define TOKENS "tokenizer.ggml.tokens"
#define TYPES "tokenizer.ggml.token_type"
#define SCORES "tokenizer.ggml.scores"
#define MERGES "tokenizer.ggml.merges"

/* Byte-level BPE: <e> 0, a b c 1-3, ab 4, " a" 5, abc 6. */
static void begin_bpe(gw *w)
{
    gw_init(w);
    gw_str(w, "tokenizer.ggml.model", "gpt2");
    gw_str(w, "tokenizer.ggml.pre", "gpt-2");
}

static void put_bpe_tokens(gw *w)
{
    STRINGS(w, TOKENS, "<e>", "a", "b", "c", "ab", "\u0120a", "abc", "\u0120");
    INTS(w, TYPES, CONTROL, 1, 1, 1, 1, 1, 1, 1);
}

static void put_bpe_merges(gw *w) { STRINGS(w, MERGES, "a b", "\u0120 a", "ab c"); }

static void begin_spm(gw *w)
{
    gw_init(w);
    gw_str(w, "tokenizer.ggml.model", "llama");
}

/* <unk> 0, <s> 1, </s> 2, two bytes, then pieces. */
static void put_spm(gw *w)
{
    STRINGS(w, TOKENS, "<unk>", "<s>", "</s>", "<0xE2>", "<0x96>", "a", "b", "ab", "\u2581",
            "\u2581a");
    INTS(w, TYPES, UNKNOWN_TYPE, CONTROL, CONTROL, BYTE, BYTE, 1, 1, 1, 1, 1);
    FLOATS(w, SCORES, 0, 0, 0, 0, 0, -9, -9, -2, -9, -1);
}

static void test_bpe_by_hand(void **state)
{
    (void)state;
    gw w;
    begin_bpe(&w);
    put_bpe_tokens(&w);
    put_bpe_merges(&w);
    gw_u32(&w, "tokenizer.ggml.eos_token_id", 0);
    kvp__tokenizer *t = finish(&w);
    kvp__tokenizer_info info;
    kvp__tokenizer_get_info(t, &info);
    assert_int_equal(info.vocabulary, 8);
    assert_int_equal(info.bos, -1);
    assert_int_equal(info.eos, 0);
    assert_int_equal(info.unknown, -1);
    assert_false(info.adds_bos);
    assert_true(info.encodes);
    assert_int_equal(info.longest_piece, 3);
    assert_int_equal(info.chat_format, KVP_CHAT_NONE);
    assert_string_equal(info.name, "gpt2");
    assert_string_equal(info.pre, "gpt-2");
    expect(t, "", START | PARSE, "");
    expect(t, "abcab", 0, "6 4");
    expect(t, "ba a", 0, "2 1 5");
    expect(t, "  a", 0, "7 5");
    expect(t, "axb", 0, "1 2"); /* no token has this byte */
    expect(t, "a<e>b", 0, "1 2");
    expect(t, "a<e>b", PARSE, "1 0 2");
    expect(t, "ab<e", PARSE, "4");
    drop(t);
}

static void test_sentencepiece_by_hand(void **state)
{
    (void)state;
    gw w;
    begin_spm(&w);
    put_spm(&w);
    kvp__tokenizer *t = finish(&w);
    kvp__tokenizer_info info;
    kvp__tokenizer_get_info(t, &info);
    assert_int_equal(info.bos, 1); /* what SentencePiece has where the file is silent */
    assert_int_equal(info.eos, 2);
    assert_int_equal(info.unknown, 0);
    assert_true(info.adds_bos);
    assert_string_equal(info.pre, "");
    expect(t, "", 0, "");
    expect(t, "", START, "1");
    expect(t, "ab", 0, "9 6");       /* "_a" has a better score than "ab" */
    expect(t, "bab", START, "1 8 6 7");
    expect(t, "x", 0, "8 0");        /* no byte token: unknown */
    expect(t, "\xe2\x96", 0, "8 3 4"); /* no character: bytes */
    expect(t, "</s>a<s>", PARSE, "2 9 1"); /* the space comes again after a special token */
    drop(t);

    begin_spm(&w);
    put_spm(&w);
    gw_bool(&w, "tokenizer.ggml.add_space_prefix", 0);
    gw_bool(&w, "tokenizer.ggml.add_bos_token", 0);
    gw_u32(&w, "tokenizer.ggml.unknown_token_id", UINT32_MAX);
    t = finish(&w);
    expect(t, "ab ax", START, "7 9"); /* no unknown token either: nothing */
    drop(t);
}

/* A vocabulary without types and scores that mean anything: bytes are known by name. */
static void test_without_types(void **state)
{
    (void)state;
    gw w;
    begin_spm(&w);
    STRINGS(&w, TOKENS, "<unk>", "<s>", "</s>", "<0x41>", "a", "<0x4>", "<0xZZ>", "<0x4a>");
    FLOATS(&w, SCORES, 0, 0, 0, 0, 0, 0, 0, 0);
    gw_bool(&w, "tokenizer.ggml.add_space_prefix", 0);
    kvp__tokenizer *t = finish(&w);
    expect(t, "aA", 0, "4 3");
    assert_int_equal(kvp__tokenizer_flags(t, 3), KVP_TOKEN_BYTE);
    assert_int_equal(kvp__tokenizer_flags(t, 5), KVP_TOKEN_NORMAL);
    assert_int_equal(kvp__tokenizer_flags(t, 7), KVP_TOKEN_NORMAL);
    expect_text(t, (int32_t[]){3, 4, 5}, 3, 0, "Aa<0x4>");
    drop(t);
}

static void test_special_tokens(void **state)
{
    (void)state;
    gw w;
    begin_bpe(&w);
    STRINGS(&w, TOKENS, "<e>", "a", "b", "<e>b", "<u>", "<u>b", "", "b<", "<|im_end|>", "<e>");
    INTS(&w, TYPES, CONTROL, 1, 1, CONTROL, USER, USER, CONTROL, USER, 1, CONTROL);
    STRINGS(&w, MERGES, "a b");
    gw_u32(&w, "tokenizer.ggml.bos_token_id", 0);
    gw_u32(&w, "tokenizer.ggml.eot_token_id", 3);
    gw_u32(&w, "tokenizer.ggml.eom_token_id", 2);
    kvp__tokenizer *t = finish(&w);
    expect(t, "a<e>a", PARSE, "1 0 1");   /* the lowest of equals */
    expect(t, "a<e>b<u>", PARSE, "1 3 4"); /* the longest */
    expect(t, "<u><u>b<", 0, "4 5");      /* user-defined ones always */
    expect(t, "ab<e>", PARSE, "1 7");     /* the left-most, although a longer one follows */
    expect(t, "<|im_end|>", 0, "");       /* a mark is control, whatever the file says */
    expect(t, "<|im_end|>", PARSE, "8");
    assert_int_equal(kvp__tokenizer_find(t, "<e>", 3), 0);
    assert_int_equal(kvp__tokenizer_find(t, "<u>b", 4), 5);
    assert_int_equal(kvp__tokenizer_find(t, "a", 1), 1);
    assert_int_equal(kvp__tokenizer_find(t, "<", 1), -1);
    assert_int_equal(kvp__tokenizer_find(t, "", 0), -1);
    assert_int_equal(kvp__tokenizer_flags(t, 0), KVP_TOKEN_SPECIAL);
    assert_int_equal(kvp__tokenizer_flags(t, 3), KVP_TOKEN_SPECIAL | KVP_TOKEN_END);
    assert_int_equal(kvp__tokenizer_flags(t, 2), KVP_TOKEN_NORMAL | KVP_TOKEN_END);
    assert_int_equal(kvp__tokenizer_flags(t, 4), KVP_TOKEN_NORMAL);
    assert_int_equal(kvp__tokenizer_flags(t, 8), KVP_TOKEN_SPECIAL | KVP_TOKEN_END);
    assert_int_equal(kvp__tokenizer_flags(t, -1), 0);
    assert_int_equal(kvp__tokenizer_flags(t, 10), 0);
    drop(t);
}

/* "<bos>hi": one BOS with the flag, exactly what is written without. */
static void case_b160(void **state)
{
    (void)state;
    gw w;
    begin_spm(&w);
    STRINGS(&w, TOKENS, "<unk>", "<bos>", "<eos>", "hi", "h", "i");
    INTS(&w, TYPES, UNKNOWN_TYPE, CONTROL, CONTROL, 1, 1, 1);
    FLOATS(&w, SCORES, 0, 0, 0, -1, -2, -3);
    gw_bool(&w, "tokenizer.ggml.add_space_prefix", 0);
    kvp__tokenizer *t = finish(&w);
    expect(t, "<bos>hi", START | PARSE, "1 3");
    expect(t, "hi", START | PARSE, "1 3");
    expect(t, "<bos>hi", PARSE, "1 3");
    expect(t, "<bos><bos>hi", START | PARSE, "1 1 3"); /* the second one was asked for */
    expect(t, "hi", PARSE, "3");
    expect(t, "hi<bos>", START | PARSE, "1 3 1");
    drop(t);
}

static void test_pieces(void **state)
{
    (void)state;
    gw w;
    begin_bpe(&w);
    STRINGS(&w, TOKENS, "<e>", "\u00c3\u00a9", "\u4f60", "\u0120a", "<u> \u0120", "", "\xff");
    INTS(&w, TYPES, CONTROL, 1, 1, 1, USER, 1, UNUSED);
    STRINGS(&w, MERGES, "a b");
    kvp__tokenizer *t = finish(&w);
    char out[8] = "";
    assert_int_equal(kvp__tokenizer_piece(t, 1, 0, out, 8), 2);
    assert_memory_equal(out, "\xc3\xa9", 2);
    assert_int_equal(kvp__tokenizer_piece(t, 3, 0, out, 1), 2); /* cut, and says so */
    assert_int_equal(out[0], ' ');
    assert_int_equal(kvp__tokenizer_piece(t, 0, 0, out, 8), 0);
    assert_int_equal(kvp__tokenizer_piece(t, 0, KVP_DETOKENIZE_SPECIAL, NULL, 0), 3);
    assert_int_equal(kvp__tokenizer_piece(t, 7, 0, out, 8), 0);
    assert_int_equal(kvp__tokenizer_piece(t, -1, 0, out, 8), 0);
    expect_text(t, (int32_t[]){0, 2, 4, 5, 6}, 5, 0, "\u4f60<u> \u0120\xff");
    expect_text(t, (int32_t[]){0, 3, 0}, 3, KVP_DETOKENIZE_SPECIAL, "<e> a<e>");
    expect_text(t, NULL, 0, 0, "");
    expect(t, "\u4f60", 0, ""); /* that piece stands for no bytes, so no text becomes it */
    drop(t);

    begin_spm(&w);
    put_spm(&w);
    t = finish(&w);
    expect_text(t, (int32_t[]){1, 9, 8, 3, 4, 7}, 6, 0, " a \xe2\x96" "ab");
    expect_text(t, (int32_t[]){1, 9, 0}, 3, KVP_DETOKENIZE_SPECIAL, "<s> a<unk>");
    drop(t);
}

static void test_misuse(void **state)
{
    (void)state;
    gw w;
    begin_bpe(&w);
    put_bpe_tokens(&w);
    put_bpe_merges(&w);
    kvp__tokenizer *t = finish(&w);
    kvp_error err = {.size = sizeof err};
    int32_t out[4] = {77, 77, 77, 77};
    char text[4] = "xyz";
    size_t n = 99;
    assert_int_equal(kvp__tokenizer_encode(t, "a b", 3, 0, out, 2, &n, &err), KVP_ERR_BUFFER);
    assert_int_equal(n, 3);
    assert_int_equal(err.needed, 3);
    assert_int_equal(err.available, 2);
    assert_int_equal(out[0], 77);
    assert_int_equal(kvp__tokenizer_encode(t, "ab", 2, 0, NULL, 0, &n, &err), KVP_ERR_BUFFER);
    assert_int_equal(n, 1);
    n = 99;
    assert_int_equal(kvp__tokenizer_encode(t, "a", 1, 4, out, 4, &n, &err), KVP_ERR_INVALID_ARG);
    assert_int_equal(kvp__tokenizer_encode(t, NULL, 1, 0, out, 4, &n, &err), KVP_ERR_INVALID_ARG);
    assert_int_equal(kvp__tokenizer_encode(t, "a", (size_t)1 << 31, 0, out, 4, &n, &err),
                     KVP_ERR_INVALID_ARG);
    assert_int_equal(n, 99);
    assert_int_equal(kvp__tokenizer_encode(t, NULL, 0, 0, NULL, 0, &n, &err), KVP_OK);
    assert_int_equal(n, 0);

    const int32_t tokens[] = {1, 2, 8}, negative[] = {-1};
    n = 99;
    assert_int_equal(kvp__tokenizer_decode(t, tokens, 3, 0, text, 4, &n, &err),
                     KVP_ERR_INVALID_TOKEN);
    assert_non_null(strstr(err.text, "index 2"));
    assert_int_equal(kvp__tokenizer_decode(t, negative, 1, 0, text, 4, &n, &err),
                     KVP_ERR_INVALID_TOKEN);
    assert_int_equal(kvp__tokenizer_decode(t, tokens, 2, 2, text, 4, &n, &err),
                     KVP_ERR_INVALID_ARG);
    assert_int_equal(n, 99);
    assert_int_equal(kvp__tokenizer_decode(t, tokens, 2, 0, text, 1, &n, &err), KVP_ERR_BUFFER);
    assert_int_equal(n, 2);
    assert_string_equal(text, "xyz");
    drop(t);
    kvp__tokenizer_destroy(NULL);
}

/* The model is then used by ids, and ids still become text. */
static void test_unknown_pre_tokenizer(void **state)
{
    (void)state;
    gw w;
    gw_init(&w);
    gw_str(&w, "tokenizer.ggml.model", "gpt2");
    gw_str(&w, "tokenizer.ggml.pre", "tomorrow");
    put_bpe_tokens(&w);
    put_bpe_merges(&w);
    kvp__tokenizer *t = finish(&w);
    kvp__tokenizer_info info;
    kvp_error err = {.size = sizeof err};
    size_t n;
    kvp__tokenizer_get_info(t, &info);
    assert_false(info.encodes);
    assert_string_equal(info.pre, "tomorrow");
    assert_int_equal(kvp__tokenizer_encode(t, "a", 1, 0, NULL, 0, &n, &err), KVP_ERR_NO_TOKENIZER);
    assert_non_null(strstr(err.text, "tomorrow"));
    expect_text(t, (int32_t[]){4, 5}, 2, 0, "ab a");
    drop(t);

    /* Without a name it is the default one, as others have it. */
    gw_init(&w);
    gw_str(&w, "tokenizer.ggml.model", "gpt2");
    put_bpe_tokens(&w);
    put_bpe_merges(&w);
    t = finish(&w);
    expect(t, "ab a", 0, "4 5");
    drop(t);
}

static void test_bad_vocabularies(void **state)
{
    (void)state;
    gw w;
    gw_init(&w);
    refuse(&w, KVP_ERR_NO_TOKENIZER, "no tokenizer");
    gw_init(&w);
    gw_str(&w, "tokenizer.ggml.model", "bert");
    refuse(&w, KVP_ERR_NO_TOKENIZER, "\"bert\"");
    gw_init(&w);
    gw_u32(&w, "tokenizer.ggml.model", 3);
    refuse(&w, KVP_ERR_FORMAT, "tokenizer.ggml.model");
    begin_bpe(&w);
    refuse(&w, KVP_ERR_FORMAT, "tokenizer.ggml.tokens");
    begin_bpe(&w);
    INTS(&w, TOKENS, 1, 2);
    refuse(&w, KVP_ERR_FORMAT, "tokenizer.ggml.tokens");
    begin_bpe(&w);
    put_bpe_tokens(&w);
    refuse(&w, KVP_ERR_FORMAT, "tokenizer.ggml.merges is missing");
    begin_bpe(&w);
    STRINGS(&w, TOKENS, "a", "b");
    INTS(&w, TYPES, 1, 1, 1);
    refuse(&w, KVP_ERR_FORMAT, "3 entries for 2 tokens");
    begin_spm(&w);
    STRINGS(&w, TOKENS, "a", "b", "c");
    refuse(&w, KVP_ERR_FORMAT, "tokenizer.ggml.scores: 0 entries for 3 tokens");
    begin_spm(&w);
    STRINGS(&w, TOKENS, "a", "b", "c");
    FLOATS(&w, SCORES, 0, __builtin_nanf(""), 0);
    refuse(&w, KVP_ERR_FORMAT, "token 1 is not a number");
    begin_bpe(&w);
    put_bpe_tokens(&w);
    put_bpe_merges(&w);
    gw_u32(&w, "tokenizer.ggml.bos_token_id", 8);
    refuse(&w, KVP_ERR_FORMAT, "tokenizer.ggml.bos_token_id: 8 is not a token");
    begin_bpe(&w);
    put_bpe_tokens(&w);
    put_bpe_merges(&w);
    gw_str(&w, "tokenizer.ggml.eos_token_id", "2");
    refuse(&w, KVP_ERR_FORMAT, "tokenizer.ggml.eos_token_id");
    begin_bpe(&w);
    put_bpe_tokens(&w);
    put_bpe_merges(&w);
    gw_u32(&w, "tokenizer.ggml.add_bos_token", 1);
    refuse(&w, KVP_ERR_FORMAT, "tokenizer.ggml.add_bos_token");
    begin_bpe(&w);
    put_bpe_tokens(&w);
    put_bpe_merges(&w);
    gw_u32(&w, "tokenizer.chat_template", 1);
    refuse(&w, KVP_ERR_FORMAT, "tokenizer.chat_template");

    static char longest[4098];
    memset(longest, 'a', sizeof longest - 1);
    begin_bpe(&w);
    STRINGS(&w, TOKENS, "a", longest);
    refuse(&w, KVP_ERR_FORMAT, "token 1 is 4097 bytes long");
}

/* What has one meaning is taken: the lowest id of equal pieces, merges of unknown pieces passed
 * over, the first of equal merges, empty pieces never made. */
static void test_odd_vocabularies(void **state)
{
    (void)state;
    gw w;
    static char letters[4097], long_merge[8200];
    memset(letters, 'a', sizeof letters - 1);
    memset(long_merge, 'a', sizeof long_merge - 1);
    long_merge[4100] = ' ';
    begin_bpe(&w);
    STRINGS(&w, TOKENS, "a", "b", "a", "ab", "", "bb", "ab", letters);
    STRINGS(&w, MERGES, "b b", "", "a", " ", "a ", " b", "a x", "x a", "b a", "a b", "\u4f60 a",
            "a \u4f60", long_merge, "a b", "b b");
    kvp__tokenizer *t = finish(&w);
    expect(t, "abba", 0, "0 5 0");
    expect(t, "ab", 0, "3");
    drop(t);

    begin_bpe(&w);
    STRINGS(&w, TOKENS, "a");
    STRINGS(&w, MERGES, "a a");
    INTS(&w, TYPES, 99);
    t = finish(&w);
    expect(t, "aa", 0, "0 0");
    drop(t);
}

/* A word of a megabyte costs what a megabyte of words does. */
static void test_hostile_text(void **state)
{
    (void)state;
    size_t n = 1u << 20, count;
    char *text = malloc(n);
    int32_t *out = malloc(4 * n * sizeof *out);
    assert_non_null(text);
    assert_non_null(out);
    static const char *const files[] = {"tokenizer/tiny-bpe.gguf", "tokenizer/tiny-spm.gguf"};
    static const char *const fills[] = {"a", "ab", " ", "\n", "9", "!", "'", "\xff", "\xe4\xbd\xa0",
                                        "<mark", "A\xcc\x81", " \n", "\xcc\x81"};
    static const char *const pres[] = {"smollm", "llama-bpe", "tekken", "deepseek-v3", "default"};
    for (size_t f = 0; f < KVP__COUNT(files); f++) {
        for (size_t p = 0; p < (f ? 1 : KVP__COUNT(pres)); p++) {
            kvp__tokenizer *t = with_pre(files[f], pres[p]);
            for (size_t k = 0; k < KVP__COUNT(fills); k++) {
                size_t bytes = k == 0 ? n : n / 16;
                for (size_t i = 0; i < bytes; i++) text[i] = fills[k][i % strlen(fills[k])];
                struct timespec a, b;
                clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &a);
                assert_int_equal(
                    kvp__tokenizer_encode(t, text, bytes, 0, out, 4 * n, &count, NULL), KVP_OK);
                clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &b);
                assert_true(b.tv_sec - a.tv_sec < 10);
                assert_true(the_heap.live < 1u << 20);
            }
            drop(t);
        }
    }
    free(text);
    free(out);
}

/* Any bytes go through both kinds unchanged. */
static void test_random_bytes_come_back(void **state)
{
    (void)state;
    uint64_t rng = 5;
    static const char *const pres[] = {"smollm", "gpt-2", "llama-bpe", "qwen2", "tekken",
                                       "deepseek-v3", "default"};
    static const char *const pieces[] = {" ", "\n", "\r\n", "'s", "a", "B", "7", "\xe4\xbd\xa0",
                                         "\xcc\x81", "\xf0\x9f\x98\x80", "\xff", "\xc2\xbd", "!",
                                         "/", "\xc3", "\xe2\x80\x83", "\xc3\x89", "\xe3\x81\x82"};
    for (size_t k = 0; k < KVP__COUNT(pres) + 1; k++) {
        bool spm = k == KVP__COUNT(pres);
        kvp__tokenizer *t = spm ? with_pre("tokenizer/tiny-spm.gguf", "default")
                                : with_pre("tokenizer/tiny-bpe.gguf", pres[k]);
        t->adds_space = false; /* it would come again after each user-defined token */
        for (int round = 0; round < 300; round++) {
            char text[128];
            size_t n = 0, wanted = (size_t)(gw_rand(&rng) % 100);
            while (n < wanted) {
                const char *piece = pieces[gw_rand(&rng) % KVP__COUNT(pieces)];
                if (round % 2) {
                    text[n++] = (char)(gw_rand(&rng) & 0xff);
                } else {
                    memcpy(text + n, piece, strlen(piece));
                    n += strlen(piece);
                }
            }
            check_round_trip(t, text, n);
        }
        drop(t);
    }
}

/* The n-th allocation refused, for every n: NO_MEMORY, nothing kept, and then it works. */
static void fail_each_allocation(const char *file, const char *pre)
{
    size_t bytes, count = 0;
    uint8_t *data = golden_file(file, &bytes);
    assert_non_null(data);
    kvp__source source;
    kvp__gguf g;
    kvp__tokenizer *t = NULL;
    kvp_error err = {.size = sizeof err};
    static const char text[] = "Hello  world<|im_start|> 1234<mark> \n\n\n\n  and it's so";
    (void)pre;
    heap_init(&the_heap);
    kvp__source_memory(&source, data, bytes);
    assert_int_equal(kvp__gguf_open(&g, &the_heap.hooks, &source, &err), KVP_OK);
    uint64_t kept = the_heap.blocks, before = the_heap.calls, total = 0;
    for (uint64_t n = 1; !t; n++) {
        the_heap.refuse = before + n;
        kvp_status s = kvp__tokenizer_create(&t, &the_heap.hooks, &g, &err);
        before = the_heap.calls;
        total = n;
        if (s == KVP_OK) break;
        assert_int_equal(s, KVP_ERR_NO_MEMORY);
        assert_null(t);
        assert_int_equal(the_heap.blocks, kept);
    }
    assert_true(total > 6);
    kvp__gguf_close(&g);
    free(data);
    kept = the_heap.blocks;
    for (uint64_t n = 1;; n++) {
        int32_t out[128];
        the_heap.refuse = the_heap.calls + n;
        kvp_status s = kvp__tokenizer_encode(t, text, strlen(text), START | PARSE, out, 128, &count,
                                             &err);
        assert_int_equal(the_heap.blocks, kept);
        total = n;
        if (s == KVP_OK) break;
        assert_int_equal(s, KVP_ERR_NO_MEMORY);
    }
    assert_true(total > 2 && count > 10);
    the_heap.refuse = 0;
    drop(t);
}

static void test_no_memory(void **state)
{
    (void)state;
    fail_each_allocation("tokenizer/tiny-bpe.gguf", "smollm");
    fail_each_allocation("tokenizer/tiny-spm.gguf", "default");
}

/* Long results pass through a list that grows. */
static void test_long_lists(void **state)
{
    (void)state;
    gw w;
    begin_bpe(&w);
    put_bpe_tokens(&w);
    put_bpe_merges(&w);
    gw_u32(&w, "tokenizer.ggml.bos_token_id", 0);
    gw_bool(&w, "tokenizer.ggml.add_bos_token", 1);
    kvp__tokenizer *t = finish(&w);
    ids got;
    char text[2048];
    for (size_t n = 200; n < sizeof text; n += 257) {
        memset(text, 'c', n);
        encode(t, text, n, START, &got);
        assert_int_equal(got.n, n + 1);
        assert_int_equal(got.at[0], 0);
        for (size_t i = 1; i <= n; i++) assert_int_equal(got.at[i], 3);
    }
    drop(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pre_tokenizers),
        cmocka_unit_test(test_sentencepiece),
        cmocka_unit_test(test_smollm2),
        cmocka_unit_test(test_gemma3),
        cmocka_unit_test(test_merging_against_naive),
        cmocka_unit_test(test_bpe_by_hand),
        cmocka_unit_test(test_sentencepiece_by_hand),
        cmocka_unit_test(test_without_types),
        cmocka_unit_test(test_special_tokens),
        cmocka_unit_test(case_b160),
        cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_misuse),
        cmocka_unit_test(test_unknown_pre_tokenizer),
        cmocka_unit_test(test_bad_vocabularies),
        cmocka_unit_test(test_odd_vocabularies),
        cmocka_unit_test(test_hostile_text),
        cmocka_unit_test(test_random_bytes_come_back),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_long_lists),
    };
    return cmocka_run_group_tests_name("tokenizer", tests, NULL, NULL);
}
