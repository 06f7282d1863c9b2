/*
 * Any text through any vocabulary. An input is
 *
 *     which, flags, bytes of text (two, little-endian), text, file
 *
 * where `which` chooses one of the vocabularies of tests/golden/tokenizer with a pre-tokenizer, or,
 * from 8 on, the file that follows. What must hold: ids are in range, there are not more than bytes
 * to carry, the text comes back from its ids, a text stream gives what the pieces say however it is
 * cut, messages of a conversation add no special token, and nothing is kept.
 */
#define _GNU_SOURCE
#include "model/chat.h"
#include "model/gguf.h"
#include "model/textstream.h"
#include "model/tokenizer_priv.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/golden.h"
#include "support/heap.h"

#define MAX_TEXT 512u
#define MAX_IDS (4 * MAX_TEXT + 64)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must(int holds, const char *what)
{
    if (holds) return;
    fprintf(stderr, "does not hold: %s\n", what);
    abort();
}

static int32_t ids[MAX_IDS], others[MAX_IDS];
/* A piece is at most 4,096 bytes long; what does not fit is not looked at. */
static char text_back[1u << 20], streamed[(1u << 20) + KVP__TEXT_HELD];

static kvp_status create(kvp__tokenizer **out, const kvp__hooks *hooks, const uint8_t *data,
                         size_t size)
{
    kvp__source source;
    kvp__gguf g;
    kvp_error err = {.size = sizeof err};
    kvp__source_memory(&source, data, size);
    kvp_status s = kvp__gguf_open(&g, hooks, &source, &err);
    if (s != KVP_OK) return s;
    s = kvp__tokenizer_create(out, hooks, &g, &err);
    kvp__gguf_close(&g);
    if (s != KVP_OK) must(err.text[0] && !strchr(err.text, '\n'), "an error is one line");
    return s;
}

/* The kept vocabularies, read once and for ever. */
static const kvp__tokenizer *kept_vocabulary(unsigned which)
{
    static const char *const pres[] = {"smollm", "gpt-2", "llama-bpe", "qwen2", "tekken",
                                       "deepseek-v3", "default"};
    static kvp__tokenizer *kept[8];
    static heap h;
    if (kept[which]) return kept[which];
    if (!h.hooks.alloc) heap_init(&h);
    size_t bytes;
    uint8_t *file = golden_file(which == 7 ? "tokenizer/tiny-spm.gguf" : "tokenizer/tiny-bpe.gguf",
                                &bytes);
    must(file && create(&kept[which], &h.hooks, file, bytes) == KVP_OK, "the vocabulary is there");
    free(file);
    if (which < 7) {
        kvp__str name = {pres[which], strlen(pres[which])};
        kept[which]->pre = kvp__pretoken_find(name);
    }
    return kept[which];
}

static size_t special_tokens(const kvp__tokenizer *t, const int32_t *list, size_t n)
{
    size_t special = 0;
    for (size_t i = 0; i < n; i++)
        special += (kvp__tokenizer_flags(t, list[i]) & KVP_TOKEN_SPECIAL) != 0;
    return special;
}

/* Every byte comes back, where the vocabulary has one for each; of a file that puts spaces in
 * front of texts, all but the spaces. */
static void check_text_back(const kvp__tokenizer *t, const uint8_t *text, size_t bytes, size_t n)
{
    size_t back = 0;
    bool spaces = !t->adds_space;
    for (size_t i = 0; i < bytes; i++)
        if (t->byte_ids[text[i]] < 0) return;
    if (t->kind == KVP__KIND_SPM && memmem(text, bytes, "\xe2\x96\x81", 3)) return;
    for (size_t i = 0; i <= bytes; i++) {
        if (i < bytes && text[i] == ' ' && !spaces) continue;
        while (back < n && text_back[back] == ' ' && !spaces) back++;
        if (i == bytes) break;
        must(back < n && text_back[back++] == (char)text[i], "the text comes back");
    }
    must(back == n, "nothing else does");
}

static void check_stream(const kvp__tokenizer *t, size_t n, uint32_t flags, size_t text_bytes)
{
    static const char *const stop_texts[] = {"\n\n", "the end", "\xf0\x9f", "ab", "aab", "<"};
    kvp_string strings[KVP__COUNT(stop_texts)];
    for (size_t i = 0; i < KVP__COUNT(stop_texts); i++)
        strings[i] = (kvp_string){stop_texts[i], strlen(stop_texts[i])};
    static kvp__stops stops;
    must(kvp__stops_fill(&stops, strings, KVP__COUNT(strings), NULL) == KVP_OK, "they are stops");
    for (int with = 0; with < 2; with++) {
        kvp__textstream ts;
        size_t at = 0;
        bool stopped = false;
        char piece[4096];
        kvp__textstream_init(&ts);
        for (size_t i = 0; i < n && !stopped; i++) {
            size_t bytes = kvp__tokenizer_piece(t, ids[i], flags, piece, sizeof piece), out = 0;
            must(bytes <= t->longest, "a piece is no longer than the longest");
            stopped = kvp__textstream_push(&ts, with ? &stops : NULL, piece, bytes, streamed + at,
                                           &out);
            must(out <= bytes + KVP__TEXT_HELD, "no more than was pushed");
            at += out;
        }
        if (!stopped) at += kvp__textstream_flush(&ts, streamed + at);
        must(stopped ? at <= text_bytes : at == text_bytes, "everything is released");
        must(memcmp(streamed, text_back, at) == 0, "in order");
        if (stopped) continue;
        for (size_t i = 0; with && i < KVP__COUNT(stop_texts); i++)
            must(!memmem(text_back, text_bytes, stop_texts[i], strlen(stop_texts[i])),
                 "no stop string is missed");
    }
}

static void check_chat(const kvp__tokenizer *t, const char *text, size_t bytes)
{
    size_t n, harmless;
    kvp_chat_message m[] = {{"system", text, bytes}, {"user", text, bytes},
                            {"assistant", text, bytes}};
    kvp_chat_message a[] = {{"system", "a", 1}, {"user", "a", 1}, {"assistant", "a", 1}};
    for (uint32_t format = 0; format <= KVP_CHAT_MISTRAL; format++) {
        kvp_status s = kvp__chat_tokenize(t, format, m, 3, 0, KVP_CHAT_ADD_REPLY, others, MAX_IDS,
                                          &n, NULL);
        if (s != KVP_OK) continue; /* too long, or not a format of this vocabulary */
        size_t special = special_tokens(t, others, n);
        must(kvp__chat_tokenize(t, format, a, 3, 0, KVP_CHAT_ADD_REPLY, others, MAX_IDS, &harmless,
                                NULL) == KVP_OK, "a short one fits too");
        bool unknowns = t->unknown >= 0;
        must(unknowns || special == special_tokens(t, others, harmless), "messages add no marks");
    }
}

static void check(const kvp__tokenizer *t, uint8_t flags, const uint8_t *text, size_t bytes)
{
    kvp_error err = {.size = sizeof err};
    size_t n, again, back;
    uint32_t how = flags & 3, show = flags >> 2 & 1;
    kvp_status s = kvp__tokenizer_encode(t, (const char *)text, bytes, how, ids, MAX_IDS, &n, &err);
    if (s == KVP_ERR_NO_TOKENIZER) return;
    must(s == KVP_OK && n <= 4 * bytes + 8, "a text has tokens, and not too many");
    for (size_t i = 0; i < n; i++)
        must(ids[i] >= 0 && (uint32_t)ids[i] < t->n, "ids are in range");
    size_t less = n ? n - 1 : 0;
    s = kvp__tokenizer_encode(t, (const char *)text, bytes, how, others, less, &again, &err);
    must(n == 0 || (s == KVP_ERR_BUFFER && again == n), "one less is too small");
    s = kvp__tokenizer_decode(t, ids, n, show, text_back, sizeof text_back, &back, &err);
    if (s == KVP_ERR_BUFFER) return;
    must(s == KVP_OK, "ids have a text");
    if (how == 0 && t->unknown < 0) check_text_back(t, text, bytes, back);
    check_stream(t, n, show, back);
    check_chat(t, (const char *)text, bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 4) return 0;
    size_t bytes = data[2] | (size_t)data[3] << 8;
    if (bytes > size - 4) bytes = size - 4;
    const uint8_t *text = data + 4, *file = text + bytes;
    size_t file_bytes = size - 4 - bytes;
    if (bytes > MAX_TEXT) bytes = MAX_TEXT;
    if (data[0] < 8) {
        check(kept_vocabulary(data[0]), data[1], text, bytes);
        return 0;
    }
    heap h;
    kvp__tokenizer *t = NULL;
    heap_init(&h);
    if (create(&t, &h.hooks, file, file_bytes) == KVP_OK) {
        check(t, data[1], text, bytes);
        kvp__tokenizer_destroy(t);
    }
    must(h.blocks == 0 && h.mismatches == 0, "nothing is kept");
    return 0;
}
