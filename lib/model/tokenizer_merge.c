/*
 * Words into tokens: neighbours are merged, the best pair first, until no pair is left.
 *
 * Byte-level BPE and SentencePiece differ only in what a symbol is at first (a byte, a character)
 * and in how good a pair is (the rank of its merge, the score of the piece that it makes); both
 * prefer the left-most of equals.
 *
 * Candidates wait in a heap, as priority << 32 | offset of the left symbol, so the smallest is the
 * next. A candidate is looked up again when its turn comes: if the pair at that place is not the
 * one it stood for, its priority differs and it is dropped (equal priorities at one place mean the
 * same merge for ranks, and an equally good one for scores, which has a candidate of its own
 * anyway). A merge adds two candidates at most, so n bytes of text take O(n log n), whatever they
 * are: a word of a megabyte without a space is an ordinary input.
 */
#include "model/tokenizer_priv.h"

#include "base/half.h"
#include "model/unicode.h"

void kvp__merge_space_free(kvp__merge_space *space)
{
    kvp__free(space->hooks, space->symbols, space->capacity * sizeof(kvp__symbol));
    kvp__free(space->hooks, space->heap, 2 * space->capacity * sizeof(uint64_t));
    space->symbols = NULL;
    space->heap = NULL;
    space->capacity = 0;
}

static bool reserve(kvp__merge_space *space, size_t bytes)
{
    if (bytes <= space->capacity) return true;
    size_t capacity = bytes < 128 ? 128 : bytes < SIZE_MAX / 64 ? bytes + bytes / 2 : bytes;
    kvp__merge_space_free(space);
    kvp__symbol *symbols = kvp__alloc_array(space->hooks, capacity, sizeof(kvp__symbol));
    uint64_t *heap = kvp__alloc_array(space->hooks, capacity, 2 * sizeof(uint64_t));
    if (!symbols || !heap) {
        kvp__free(space->hooks, symbols, capacity * sizeof(kvp__symbol));
        kvp__free(space->hooks, heap, 2 * capacity * sizeof(uint64_t));
        return false;
    }
    space->symbols = symbols;
    space->heap = heap;
    space->capacity = capacity;
    return true;
}

static void heap_push(uint64_t *heap, size_t *n, uint64_t key)
{
    size_t i = (*n)++;
    while (i > 0 && heap[(i - 1) / 2] > key) {
        heap[i] = heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    heap[i] = key;
}

static uint64_t heap_pop(uint64_t *heap, size_t *n)
{
    uint64_t top = heap[0], last = heap[--*n];
    size_t i = 0, child;
    while ((child = 2 * i + 1) < *n) {
        if (child + 1 < *n && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= last) break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = last;
    return top;
}

/* The higher the score, the smaller the number. */
static uint32_t score_priority(float score)
{
    uint32_t u = kvp__float_bits(score + 0.0f); /* one zero only */
    return u >> 31 ? u : ~u & 0x7fffffffu;
}

/* Whether the symbol at `left` and its right neighbour can be merged, how soon, and into what. */
static bool pair_at(const kvp__tokenizer *t, const kvp__symbol *symbols, const uint8_t *text,
                    size_t bytes, uint32_t left, uint32_t *priority, uint32_t *product)
{
    uint32_t right = symbols[left].next;
    if (right == 0 || right >= bytes) return false;
    if (t->kind == KVP__KIND_BPE) {
        const kvp__merge *m = kvp__vocab_merge(t, symbols[left].id, symbols[right].id);
        if (!m) return false;
        *priority = m->rank;
        *product = m->product;
        return true;
    }
    uint32_t length = symbols[right].next - left;
    if (length > t->longest) return false;
    uint32_t id = kvp__vocab_find(t, text + left, length);
    if (id == KVP__NO_TOKEN) return false;
    *priority = score_priority(t->scores[id]);
    *product = id;
    return true;
}

static bool push_bytes(const kvp__tokenizer *t, const uint8_t *text, size_t bytes, kvp__ids *ids)
{
    for (size_t i = 0; i < bytes; i++) {
        int32_t id = t->byte_ids[text[i]];
        if (id >= 0 && !kvp__ids_push(ids, id)) return false;
    }
    return true;
}

/* Cuts the text into bytes (BPE) or characters (SPM). */
static void cut(const kvp__tokenizer *t, kvp__symbol *symbols, const uint8_t *text, size_t bytes)
{
    uint32_t prev = 0;
    for (size_t at = 0; at < bytes;) {
        size_t n = 1;
        uint32_t c;
        if (t->kind == KVP__KIND_SPM) n = kvp__unicode_next(text + at, text + bytes, &c);
        symbols[at].prev = prev;
        symbols[at].next = (uint32_t)(at + n);
        symbols[at].id = t->kind == KVP__KIND_BPE ? (uint32_t)t->byte_ids[text[at]]
                                                  : kvp__vocab_find(t, text + at, n);
        for (size_t i = 1; i < n; i++) symbols[at + i].next = 0;
        prev = (uint32_t)at;
        at += n;
    }
}

bool kvp__merge_word(const kvp__tokenizer *t, kvp__merge_space *space, const uint8_t *text,
                     size_t bytes, kvp__ids *ids)
{
    if (bytes == 0) return true;
    if (!reserve(space, bytes)) return false;
    kvp__symbol *s = space->symbols;
    uint64_t *heap = space->heap;
    size_t n_heap = 0;
    uint32_t priority, product;
    cut(t, s, text, bytes);
    for (uint32_t at = 0; at < bytes; at = s[at].next)
        if (pair_at(t, s, text, bytes, at, &priority, &product))
            heap_push(heap, &n_heap, (uint64_t)priority << 32 | at);
    while (n_heap > 0) {
        uint64_t best = heap_pop(heap, &n_heap);
        uint32_t left = (uint32_t)best;
        if (!pair_at(t, s, text, bytes, left, &priority, &product) || priority != best >> 32)
            continue;
        uint32_t right = s[left].next;
        s[left].id = product;
        s[left].next = s[right].next;
        s[right].next = 0;
        if (s[left].next < bytes) s[s[left].next].prev = left;
        if (pair_at(t, s, text, bytes, left, &priority, &product))
            heap_push(heap, &n_heap, (uint64_t)priority << 32 | left);
        uint32_t prev = s[left].prev;
        if (left > 0 && pair_at(t, s, text, bytes, prev, &priority, &product))
            heap_push(heap, &n_heap, (uint64_t)priority << 32 | prev);
    }
    for (uint32_t at = 0; at < bytes; at = s[at].next) {
        bool ok = s[at].id == KVP__NO_TOKEN
                      ? push_bytes(t, text + at, s[at].next - at, ids)
                      : kvp__ids_push(ids, (int32_t)s[at].id);
        if (!ok) return false;
    }
    return true;
}
