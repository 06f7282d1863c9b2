/*
 * The vocabulary: read from the file's metadata, checked, and indexed; special tokens; and the two
 * ways, text to ids and ids to bytes. See tokenizer.h for what it promises.
 *
 * Everything that a text needs is in five arrays: the pieces' bytes one after the other, their
 * offsets, a hash table from bytes to id, one from a pair of ids to their merge, and the special
 * tokens sorted by their bytes. About 2 MiB for 49,152 tokens, 7 MiB for 262,144.
 *
 * What a file may do to us: count wrongly, name tokens that are not there, repeat pieces, leave
 * them empty, forge hash collisions (the hash is keyed). Where that has one meaning it is taken
 * (the lowest id of equal pieces, merges of unknown pieces passed over), else it is FORMAT.
 */
#include "model/tokenizer_priv.h"

#include "model/unicode.h"

#include <string.h>

#define MAX_TOKENS (1u << 28)
#define MAX_PIECE 4096u /* bytes: bounds the search for special tokens, and what a stream is fed */
#define MAX_TEXT (1u << 30)

/* The types of GGUF's tokenizer.ggml.token_type; others count as normal. */
enum { TYPE_NORMAL = 1, TYPE_UNKNOWN = 2, TYPE_CONTROL = 3, TYPE_USER = 4, TYPE_BYTE = 6 };

/* --- lists of ids --- */

bool kvp__ids_push(kvp__ids *ids, int32_t id)
{
    if (ids->count == ids->capacity) {
        size_t capacity = ids->capacity ? 2 * ids->capacity : 256;
        int32_t *data = kvp__alloc_array(ids->hooks, capacity, sizeof *data);
        if (!data) return false;
        if (ids->count) memcpy(data, ids->data, ids->count * sizeof *data);
        kvp__free(ids->hooks, ids->data, ids->capacity * sizeof *data);
        ids->data = data;
        ids->capacity = capacity;
    }
    ids->data[ids->count++] = id;
    return true;
}

void kvp__ids_free(kvp__ids *ids)
{
    kvp__free(ids->hooks, ids->data, ids->capacity * sizeof *ids->data);
    ids->data = NULL;
    ids->count = ids->capacity = 0;
}

kvp_status kvp__ids_store(const kvp__ids *ids, int32_t *out, size_t capacity, size_t *count,
                          kvp_error *err)
{
    *count = ids->count;
    if (ids->count > capacity)
        return kvp__fail_need(err, KVP_ERR_BUFFER, ids->count, capacity,
                              "%zu tokens do not fit into the %zu that the caller has room for",
                              ids->count, capacity);
    if (ids->count) memcpy(out, ids->data, ids->count * sizeof *out);
    return KVP_OK;
}

/* --- looking up --- */

static const uint8_t *piece_at(const kvp__tokenizer *t, uint32_t id)
{
    return (const uint8_t *)t->pieces + t->offsets[id];
}

static size_t piece_bytes(const kvp__tokenizer *t, uint32_t id)
{
    return t->offsets[id + 1] - t->offsets[id];
}

uint32_t kvp__vocab_find(const kvp__tokenizer *t, const uint8_t *piece, size_t bytes)
{
    if (bytes == 0 || bytes > t->longest) return KVP__NO_TOKEN;
    uint32_t mask = t->n_slots - 1;
    for (uint32_t i = (uint32_t)kvp__hash(t->key, piece, bytes).lo & mask;; i = (i + 1) & mask) {
        uint32_t id = t->slots[i];
        if (id == KVP__NO_TOKEN) return id;
        size_t n;
        const uint8_t *p = kvp__piece(t, id, &n);
        if (n == bytes && memcmp(p, piece, n) == 0) return id;
    }
}

static uint32_t merge_slot(const kvp__tokenizer *t, uint32_t left, uint32_t right)
{
    /* Two keyed rounds of multiply and fold: pairs come from the file too. */
    uint64_t h = ((uint64_t)left << 32 | right) ^ t->key.k0;
    h *= 0x9e3779b97f4a7c15u;
    h = (h ^ h >> 32 ^ t->key.k1) * 0xd6e8feb86659fd93u;
    return (uint32_t)(h >> 32) & (t->n_merge_slots - 1);
}

const kvp__merge *kvp__vocab_merge(const kvp__tokenizer *t, uint32_t left, uint32_t right)
{
    if (left == KVP__NO_TOKEN || right == KVP__NO_TOKEN) return NULL;
    for (uint32_t i = merge_slot(t, left, right);; i = (i + 1) & (t->n_merge_slots - 1)) {
        const kvp__merge *m = &t->merges[i];
        if (m->left == KVP__NO_TOKEN) return NULL;
        if (m->left == left && m->right == right) return m;
    }
}

/* The longest of these sorted tokens that the text begins with. */
static uint32_t longest_at(const kvp__tokenizer *t, const uint32_t *ids, uint32_t n,
                           const uint8_t *p, const uint8_t *end)
{
    uint32_t low = 0, high = n, found = KVP__NO_TOKEN;
    /* ids[low .. high) share their first `depth` bytes with the text. */
    for (size_t depth = 0; low < high; depth++) {
        uint32_t whole = low;
        while (low < high && piece_bytes(t, ids[low]) == depth) low++;
        if (low > whole) found = ids[whole];
        if (p + depth == end) break;
        uint32_t a = low, b = high;
        while (a < b) { /* the first with a byte >= the text's */
            uint32_t mid = a + (b - a) / 2;
            if (piece_at(t, ids[mid])[depth] < p[depth]) a = mid + 1;
            else b = mid;
        }
        low = a;
        b = high;
        while (a < b) { /* the first with a byte above it */
            uint32_t mid = a + (b - a) / 2;
            if (piece_at(t, ids[mid])[depth] <= p[depth]) a = mid + 1;
            else b = mid;
        }
        high = a;
    }
    return found;
}

int32_t kvp__tokenizer_find(const kvp__tokenizer *t, const char *piece, size_t bytes)
{
    const uint8_t *p = (const uint8_t *)piece;
    uint32_t id = longest_at(t, t->special, t->n_special, p, p + bytes);
    size_t n = 0;
    if (id != KVP__NO_TOKEN) kvp__piece(t, id, &n);
    if (n != bytes || bytes == 0) id = kvp__vocab_find(t, p, bytes);
    return (int32_t)id;
}

/* --- creation --- */

/* Byte-level BPE writes each byte as one character, so that a piece is always text: printable
 * Latin-1 characters stand for themselves, the other bytes follow in order from U+0100. -1: none
 * of these characters. */
static int byte_of_character(uint32_t c)
{
    static const uint8_t first[] = {0x00, 0x7f, 0xad}, last[] = {0x20, 0xa0, 0xad};
    bool printable = (c > 0x20 && c < 0x7f) || (c > 0xa0 && c <= 0xff && c != 0xad);
    if (printable) return (int)c;
    if (c < 0x100) return -1;
    uint32_t rest = c - 0x100;
    for (size_t i = 0; i < KVP__COUNT(first); i++) {
        uint32_t n = last[i] - first[i] + 1u;
        if (rest < n) return (int)(first[i] + rest);
        rest -= n;
    }
    return -1;
}

/* The bytes a BPE piece stands for, as many as the piece has at most. False, and the piece as it
 * is, if it holds something that stands for no byte. */
static bool decode_piece(kvp__str in, uint8_t *out, size_t *bytes)
{
    const uint8_t *p = (const uint8_t *)in.data, *end = p + in.bytes;
    size_t n = 0;
    while (p < end) {
        uint32_t c;
        p += kvp__unicode_next(p, end, &c);
        int byte = byte_of_character(c);
        if (byte < 0) {
            memcpy(out, in.data, in.bytes);
            *bytes = in.bytes;
            return false;
        }
        out[n++] = (uint8_t)byte;
    }
    *bytes = n;
    return true;
}

/* Marks of chat formats, and ends of turns: control tokens wherever a file has them, whatever
 * type it gives them, because user text must not become one. */
static const char *const marks[] = {
    "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|begin_of_text|>", "<|end_of_text|>",
    "<|endoftext|>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
};

/* Those that end a generation. */
static const char *const ends[] = {
    "<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>",
};

static bool is_one_of(const char *const *names, size_t n, kvp__str piece)
{
    for (size_t i = 0; i < n; i++)
        if (kvp__str_is(piece, names[i])) return true;
    return false;
}

static kvp_status read_pieces(kvp__tokenizer *t, const kvp__gguf *meta, kvp_error *err)
{
    kvp__gguf_array tokens, types;
    kvp__str piece;
    kvp_status s = kvp__gguf_strings(meta, "tokenizer.ggml.tokens", &tokens, err);
    if (s == KVP_OK) s = kvp__gguf_ints(meta, "tokenizer.ggml.token_type", &types, err);
    if (s != KVP_OK) return s;
    if (tokens.count == 0 || tokens.count > MAX_TOKENS)
        return kvp__fail(err, KVP_ERR_FORMAT, "tokenizer.ggml.tokens: %llu tokens",
                         (unsigned long long)tokens.count);
    if (types.count && types.count != tokens.count)
        return kvp__fail(err, KVP_ERR_FORMAT,
                         "tokenizer.ggml.token_type: %llu entries for %llu tokens",
                         (unsigned long long)types.count, (unsigned long long)tokens.count);
    t->n = (uint32_t)tokens.count;
    uint64_t total = 0;
    for (uint32_t i = 0; kvp__gguf_next(&tokens, &piece); i++) {
        if (piece.bytes > MAX_PIECE)
            return kvp__fail(err, KVP_ERR_FORMAT,
                             "tokenizer.ggml.tokens: token %u is %zu bytes long, %u is the most",
                             (unsigned)i, piece.bytes, MAX_PIECE);
        total += piece.bytes;
    }
    if (total > UINT32_MAX)
        return kvp__fail(err, KVP_ERR_FORMAT, "tokenizer.ggml.tokens: %llu bytes of text",
                         (unsigned long long)total);
    t->pieces_bytes = (size_t)total + 1;
    t->pieces = kvp__alloc(&t->hooks, t->pieces_bytes);
    t->offsets = kvp__alloc_array(&t->hooks, (size_t)t->n + 1, sizeof *t->offsets);
    t->flags = kvp__alloc(&t->hooks, t->n);
    if (!t->pieces || !t->offsets || !t->flags)
        return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for a vocabulary of %u tokens",
                         (unsigned)t->n);
    tokens.next = 0;
    tokens.at = tokens.data;
    uint32_t at = 0;
    for (uint32_t i = 0; kvp__gguf_next(&tokens, &piece); i++) {
        int64_t type = types.count ? kvp__gguf_int_at(&types, i) : TYPE_NORMAL;
        if (is_one_of(marks, KVP__COUNT(marks), piece)) type = TYPE_CONTROL;
        size_t bytes = piece.bytes;
        bool special = type == TYPE_CONTROL || type == TYPE_UNKNOWN || type == TYPE_USER;
        bool raw = false;
        if (t->kind == KVP__KIND_SPM || special) memcpy(t->pieces + at, piece.data, bytes);
        else raw = !decode_piece(piece, (uint8_t *)t->pieces + at, &bytes);
        t->flags[i] = type == TYPE_CONTROL || type == TYPE_UNKNOWN ? KVP_TOKEN_SPECIAL
                      : type == TYPE_BYTE                          ? KVP_TOKEN_BYTE
                      : type == TYPE_USER ? KVP_TOKEN_NORMAL | KVP__TOKEN_USER
                                          : KVP_TOKEN_NORMAL;
        if (type == TYPE_CONTROL && is_one_of(ends, KVP__COUNT(ends), piece))
            t->flags[i] |= KVP_TOKEN_END;
        if (raw) t->flags[i] |= KVP__TOKEN_RAW;
        t->offsets[i] = at;
        at += (uint32_t)bytes;
        if (bytes > t->longest) t->longest = (uint32_t)bytes;
    }
    t->offsets[t->n] = at;
    return KVP_OK;
}

/* Slots for n entries: a power of two, at most three quarters full. */
static uint32_t slots_for(uint32_t n)
{
    uint32_t slots = 16;
    while (slots - slots / 4 < n + 1) slots *= 2;
    return slots;
}

static kvp_status index_pieces(kvp__tokenizer *t, kvp_error *err)
{
    uint32_t n = 0, twice = 0;
    for (uint32_t i = 0; i < t->n; i++) n += (t->flags[i] & KVP_TOKEN_NORMAL) != 0;
    t->n_slots = slots_for(n);
    t->slots = kvp__alloc_array(&t->hooks, t->n_slots, sizeof *t->slots);
    if (!t->slots)
        return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory to index %u tokens", (unsigned)n);
    memset(t->slots, 0xff, t->n_slots * sizeof *t->slots);
    for (uint32_t id = 0; id < t->n; id++) {
        size_t bytes;
        const uint8_t *piece = kvp__piece(t, id, &bytes);
        if ((t->flags[id] & (KVP_TOKEN_NORMAL | KVP__TOKEN_RAW)) != KVP_TOKEN_NORMAL) continue;
        if (bytes == 0) continue;
        if (kvp__vocab_find(t, piece, bytes) != KVP__NO_TOKEN) {
            twice++;
            continue;
        }
        uint32_t i = (uint32_t)kvp__hash(t->key, piece, bytes).lo;
        while (t->slots[i & (t->n_slots - 1)] != KVP__NO_TOKEN) i++;
        t->slots[i & (t->n_slots - 1)] = id;
    }
    if (twice)
        kvp__log(&t->hooks, KVP_LOG_WARN,
                 "tokenizer: %u tokens repeat the piece of another; text becomes the first of them",
                 (unsigned)twice);
    return KVP_OK;
}

static bool piece_less(const kvp__tokenizer *t, uint32_t a, uint32_t b)
{
    size_t na, nb;
    const uint8_t *pa = kvp__piece(t, a, &na), *pb = kvp__piece(t, b, &nb);
    int c = memcmp(pa, pb, na < nb ? na : nb);
    return c ? c < 0 : na != nb ? na < nb : a < b;
}

static void sift_down(const kvp__tokenizer *t, uint32_t *ids, uint32_t i, uint32_t n)
{
    for (uint32_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && piece_less(t, ids[child], ids[child + 1])) child++;
        if (!piece_less(t, ids[i], ids[child])) return;
        uint32_t swap = ids[i];
        ids[i] = ids[child];
        ids[child] = swap;
    }
}

/* Heap sort: no memory of its own (the C library's qsort may take some behind our back). */
static void sort_by_piece(const kvp__tokenizer *t, uint32_t *ids, uint32_t n)
{
    for (uint32_t i = n / 2; i-- > 0;) sift_down(t, ids, i, n);
    while (n > 1) {
        uint32_t swap = ids[--n];
        ids[n] = ids[0];
        ids[0] = swap;
        sift_down(t, ids, 0, n);
    }
}

/* The tokens with one of these flags, sorted by piece. */
static bool list_tokens(const kvp__tokenizer *t, uint8_t flags, uint32_t **out, uint32_t *count,
                        uint32_t *first_bytes)
{
    uint32_t n = 0;
    for (uint32_t id = 0; id < t->n; id++) n += (t->flags[id] & flags) && piece_bytes(t, id);
    if (n == 0) return true;
    uint32_t *ids = kvp__alloc_array(&t->hooks, n, sizeof *ids);
    if (!ids) return false;
    *out = ids;
    *count = n;
    n = 0;
    for (uint32_t id = 0; id < t->n; id++) {
        if (!(t->flags[id] & flags) || !piece_bytes(t, id)) continue;
        uint8_t first = *piece_at(t, id);
        first_bytes[first / 32] |= 1u << first % 32;
        ids[n++] = id;
    }
    sort_by_piece(t, ids, n);
    return true;
}

static kvp_status list_special(kvp__tokenizer *t, kvp_error *err)
{
    if (!list_tokens(t, KVP_TOKEN_SPECIAL | KVP__TOKEN_USER, &t->special, &t->n_special,
                     t->first_bytes[1]) ||
        !list_tokens(t, KVP__TOKEN_USER, &t->user, &t->n_user, t->first_bytes[0]))
        return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for the list of special tokens");
    return KVP_OK;
}

static kvp_status read_scores(kvp__tokenizer *t, const kvp__gguf *meta, kvp_error *err)
{
    kvp__gguf_array scores;
    kvp_status s = kvp__gguf_floats(meta, "tokenizer.ggml.scores", &scores, err);
    if (s != KVP_OK) return s;
    if (scores.count != t->n)
        return kvp__fail(err, KVP_ERR_FORMAT, "tokenizer.ggml.scores: %llu entries for %u tokens",
                         (unsigned long long)scores.count, (unsigned)t->n);
    t->scores = kvp__alloc_array(&t->hooks, t->n, sizeof *t->scores);
    if (!t->scores)
        return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for %u scores", (unsigned)t->n);
    for (uint32_t i = 0; i < t->n; i++) {
        t->scores[i] = kvp__gguf_float_at(&scores, i);
        if (t->scores[i] != t->scores[i])
            return kvp__fail(err, KVP_ERR_FORMAT,
                             "tokenizer.ggml.scores: that of token %u is not a number",
                             (unsigned)i);
    }
    return KVP_OK;
}

/* "left right", as bytes; false if it is no merge of pieces that are there. */
static bool read_merge(const kvp__tokenizer *t, kvp__str text, uint8_t *buffer, kvp__merge *out)
{
    const char *space = text.bytes > 2 ? memchr(text.data + 1, ' ', text.bytes - 2) : NULL;
    if (!space || text.bytes > MAX_PIECE + 1) return false;
    kvp__str left = {text.data, (size_t)(space - text.data)};
    kvp__str right = {space + 1, text.bytes - left.bytes - 1};
    size_t n_left, n_right;
    if (!decode_piece(left, buffer, &n_left) || !decode_piece(right, buffer + n_left, &n_right))
        return false;
    out->left = kvp__vocab_find(t, buffer, n_left);
    out->right = kvp__vocab_find(t, buffer + n_left, n_right);
    out->product = kvp__vocab_find(t, buffer, n_left + n_right);
    return out->left != KVP__NO_TOKEN && out->right != KVP__NO_TOKEN &&
           out->product != KVP__NO_TOKEN;
}

static kvp_status read_merges(kvp__tokenizer *t, const kvp__gguf *meta, kvp_error *err)
{
    kvp__gguf_array merges;
    kvp__str text;
    kvp__merge m;
    kvp_status s = kvp__gguf_strings(meta, "tokenizer.ggml.merges", &merges, err);
    if (s != KVP_OK) return s;
    if (!merges.data || merges.count > MAX_TOKENS)
        return kvp__fail(err, KVP_ERR_FORMAT, merges.data ? "tokenizer.ggml.merges: too many"
                                                          : "tokenizer.ggml.merges is missing");
    t->n_merge_slots = slots_for((uint32_t)merges.count);
    t->merges = kvp__alloc_array(&t->hooks, t->n_merge_slots, sizeof *t->merges);
    if (!t->merges)
        return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for %llu merges",
                         (unsigned long long)merges.count);
    memset(t->merges, 0xff, t->n_merge_slots * sizeof *t->merges);
    uint32_t passed = 0;
    uint8_t buffer[MAX_PIECE + 1];
    for (uint32_t rank = 0; kvp__gguf_next(&merges, &text); rank++) {
        m.rank = rank;
        if (!read_merge(t, text, buffer, &m) || kvp__vocab_merge(t, m.left, m.right)) {
            passed++;
            continue;
        }
        uint32_t i = merge_slot(t, m.left, m.right);
        while (t->merges[i].left != KVP__NO_TOKEN) i = (i + 1) & (t->n_merge_slots - 1);
        t->merges[i] = m;
    }
    if (passed)
        kvp__log(&t->hooks, KVP_LOG_WARN,
                 "tokenizer: %u merges passed over: of unknown pieces, or repeated",
                 (unsigned)passed);
    return KVP_OK;
}

static int hex_digit(uint8_t c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* The byte that "<0x1F>" names, or -1. */
static int named_byte(const uint8_t *piece, size_t bytes)
{
    if (bytes != 6 || memcmp(piece, "<0x", 3) || piece[5] != '>') return -1;
    int high = hex_digit(piece[3]), low = hex_digit(piece[4]);
    return high < 0 || low < 0 ? -1 : high * 16 + low;
}

/* What a byte becomes that is in no piece: its token, or (SentencePiece) the unknown one, or
 * nothing (-1): some byte-level vocabularies lack the rarest control characters, and their
 * authors drop them. */
static void index_bytes(kvp__tokenizer *t)
{
    for (int b = 0; b < 256; b++) t->byte_ids[b] = -1;
    if (t->kind == KVP__KIND_SPM) {
        for (uint32_t id = t->n; id-- > 0;) {
            int b = named_byte(piece_at(t, id), piece_bytes(t, id));
            if (b >= 0 && !(t->flags[id] & KVP_TOKEN_SPECIAL)) {
                t->byte_ids[b] = (int32_t)id;
                t->flags[id] = (uint8_t)((t->flags[id] & KVP_TOKEN_END) | KVP_TOKEN_BYTE);
            }
        }
    }
    for (int b = 0; b < 256; b++) {
        uint8_t byte = (uint8_t)b;
        if (t->byte_ids[b] < 0) t->byte_ids[b] = (int32_t)kvp__vocab_find(t, &byte, 1);
        if (t->byte_ids[b] < 0 && t->kind == KVP__KIND_SPM) t->byte_ids[b] = t->unknown;
    }
}

/* A token id from the file; `fallback` if the key is absent, -1 (none) if it is the largest
 * number. */
static kvp_status read_id(const kvp__tokenizer *t, const kvp__gguf *meta, const char *key,
                          int32_t fallback, int32_t *out, kvp_error *err)
{
    uint32_t id = fallback < 0 || (uint32_t)fallback >= t->n ? UINT32_MAX : (uint32_t)fallback;
    kvp_status s = kvp__gguf_u32(meta, key, &id, err);
    if (s != KVP_OK) return s;
    if (id != UINT32_MAX && id >= t->n)
        return kvp__fail(err, KVP_ERR_FORMAT, "%s: %u is not a token, there are %u", key,
                         (unsigned)id, (unsigned)t->n);
    *out = id == UINT32_MAX ? -1 : (int32_t)id;
    return KVP_OK;
}

static kvp_status read_special_ids(kvp__tokenizer *t, const kvp__gguf *meta, kvp_error *err)
{
    bool spm = t->kind == KVP__KIND_SPM;
    int32_t turn, message;
    kvp_status s;
    if ((s = read_id(t, meta, "tokenizer.ggml.bos_token_id", spm ? 1 : -1, &t->bos, err)) ||
        (s = read_id(t, meta, "tokenizer.ggml.eos_token_id", spm ? 2 : -1, &t->eos, err)) ||
        (s = read_id(t, meta, "tokenizer.ggml.unknown_token_id", spm ? 0 : -1, &t->unknown,
                     err)) ||
        (s = read_id(t, meta, "tokenizer.ggml.eot_token_id", -1, &turn, err)) ||
        (s = read_id(t, meta, "tokenizer.ggml.eom_token_id", -1, &message, err)))
        return s;
    if (t->eos >= 0) t->flags[t->eos] |= KVP_TOKEN_END;
    if (turn >= 0) t->flags[turn] |= KVP_TOKEN_END;
    if (message >= 0) t->flags[message] |= KVP_TOKEN_END;
    t->adds_bos = spm || (t->pre && kvp__pretoken_adds_bos(t->pre));
    t->adds_space = spm;
    if ((s = kvp__gguf_bool(meta, "tokenizer.ggml.add_bos_token", &t->adds_bos, err)) ||
        (s = kvp__gguf_bool(meta, "tokenizer.ggml.add_space_prefix", &t->adds_space, err)))
        return s;
    if (t->bos < 0) t->adds_bos = false;
    if (!spm) t->adds_space = false;
    return KVP_OK;
}

static kvp_status read_kind(kvp__tokenizer *t, const kvp__gguf *meta, kvp_error *err)
{
    kvp__str model = {NULL, 0}, pre = {NULL, 0};
    kvp_status s = kvp__gguf_string(meta, "tokenizer.ggml.model", &model, err);
    if (s == KVP_OK) s = kvp__gguf_string(meta, "tokenizer.ggml.pre", &pre, err);
    if (s != KVP_OK) return s;
    if (!model.data)
        return kvp__fail(err, KVP_ERR_NO_TOKENIZER,
                         "the file has no tokenizer (tokenizer.ggml.model)");
    kvp__str_copy(t->name, sizeof t->name, model);
    if (pre.data) kvp__str_copy(t->pre_name, sizeof t->pre_name, pre);
    if (kvp__str_is(model, "llama")) {
        t->kind = KVP__KIND_SPM;
        return KVP_OK;
    }
    if (!kvp__str_is(model, "gpt2"))
        return kvp__fail(err, KVP_ERR_NO_TOKENIZER,
                         "tokenizer.ggml.model: the kind \"%s\" is not known", t->name);
    t->kind = KVP__KIND_BPE;
    kvp__str standard = {"default", 7};
    t->pre = kvp__pretoken_find(pre.data ? pre : standard);
    if (!t->pre)
        kvp__log(&t->hooks, KVP_LOG_WARN,
                 "tokenizer: the pre-tokenizer \"%s\" is not known; text will be refused",
                 t->pre_name);
    return KVP_OK;
}

static kvp_status build(kvp__tokenizer *t, const kvp__gguf *meta, kvp_error *err)
{
    kvp_status s;
    if ((s = read_kind(t, meta, err)) || (s = read_pieces(t, meta, err)) ||
        (s = read_special_ids(t, meta, err)) || (s = index_pieces(t, err)) ||
        (s = list_special(t, err)))
        return s;
    s = t->kind == KVP__KIND_SPM ? read_scores(t, meta, err) : read_merges(t, meta, err);
    if (s != KVP_OK) return s;
    index_bytes(t);
    kvp__str chat = {NULL, 0};
    if ((s = kvp__gguf_string(meta, "tokenizer.chat_template", &chat, err))) return s;
    if (!kvp__chat_read(t, chat))
        return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for the chat format");
    return KVP_OK;
}

kvp_status kvp__tokenizer_create(kvp__tokenizer **out, const kvp__hooks *hooks,
                                 const kvp__gguf *meta, kvp_error *err)
{
    kvp__tokenizer *t = kvp__alloc_zero(hooks, sizeof *t);
    if (!t) return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for a tokenizer");
    t->hooks = *hooks;
    t->key = kvp__hash_secret();
    kvp_status s = build(t, meta, err);
    if (s != KVP_OK) {
        kvp__tokenizer_destroy(t);
        return s;
    }
    *out = t;
    return KVP_OK;
}

void kvp__tokenizer_destroy(kvp__tokenizer *t)
{
    if (!t) return;
    kvp__hooks h = t->hooks;
    kvp__free(&h, t->pieces, t->pieces_bytes);
    kvp__free(&h, t->offsets, ((size_t)t->n + 1) * sizeof *t->offsets);
    kvp__free(&h, t->flags, t->n);
    kvp__free(&h, t->scores, t->n * sizeof *t->scores);
    kvp__free(&h, t->slots, t->n_slots * sizeof *t->slots);
    kvp__free(&h, t->merges, t->n_merge_slots * sizeof *t->merges);
    kvp__free(&h, t->special, t->n_special * sizeof *t->special);
    kvp__free(&h, t->user, t->n_user * sizeof *t->user);
    kvp__free(&h, t->chat.default_system, t->chat.default_system_size);
    kvp__free(&h, t, sizeof *t);
}

void kvp__tokenizer_get_info(const kvp__tokenizer *t, kvp__tokenizer_info *out)
{
    out->vocabulary = t->n;
    out->bos = t->bos;
    out->eos = t->eos;
    out->unknown = t->unknown;
    out->adds_bos = t->adds_bos;
    out->encodes = t->kind == KVP__KIND_SPM || t->pre;
    out->longest_piece = t->longest;
    out->chat_format = t->chat.format;
    out->name = t->name;
    out->pre = t->pre_name;
}

/* --- text to ids --- */

/* One call: the list it fills, and the memory its words share. */
typedef struct encoder {
    const kvp__tokenizer *t;
    kvp__ids *ids;
    kvp__merge_space space;
    uint8_t *escaped; /* SPM: the text with U+2581 for each space */
    size_t escaped_size;
} encoder;

static bool encode_word(void *user, const uint8_t *text, size_t bytes)
{
    encoder *e = user;
    if (kvp__pretoken_ignores_merges(e->t->pre)) {
        uint32_t id = kvp__vocab_find(e->t, text, bytes);
        if (id != KVP__NO_TOKEN) return kvp__ids_push(e->ids, (int32_t)id);
    }
    return kvp__merge_word(e->t, &e->space, text, bytes, e->ids);
}

/* A text between special tokens. */
static bool encode_spm(encoder *e, const uint8_t *text, size_t bytes)
{
    size_t size = e->t->adds_space ? 3 : 0, n = 0;
    for (size_t i = 0; i < bytes; i++) size += text[i] == ' ' ? 3 : 1;
    if (size > e->escaped_size) {
        uint8_t *grown = kvp__alloc(&e->t->hooks, size);
        if (!grown) return false;
        kvp__free(&e->t->hooks, e->escaped, e->escaped_size);
        e->escaped = grown;
        e->escaped_size = size;
    }
    if (e->t->adds_space) {
        memcpy(e->escaped, "\xe2\x96\x81", 3);
        n = 3;
    }
    for (size_t i = 0; i < bytes; i++) {
        if (text[i] == ' ') {
            memcpy(e->escaped + n, "\xe2\x96\x81", 3);
            n += 3;
        } else {
            e->escaped[n++] = text[i];
        }
    }
    return kvp__merge_word(e->t, &e->space, e->escaped, n, e->ids);
}

static bool encode_plain(encoder *e, const uint8_t *p, const uint8_t *end)
{
    if (p == end) return true;
    if (e->t->kind == KVP__KIND_SPM) return encode_spm(e, p, (size_t)(end - p));
    return kvp__pretoken_split(e->t->pre, p, (size_t)(end - p), encode_word, e);
}

static bool encode(encoder *e, const uint8_t *p, size_t bytes, bool parse)
{
    const kvp__tokenizer *t = e->t;
    const uint32_t *list = parse ? t->special : t->user, *first = t->first_bytes[parse];
    uint32_t n_list = parse ? t->n_special : t->n_user;
    const uint8_t *end = p + bytes, *plain = p;
    while (p < end) {
        uint32_t id = KVP__NO_TOKEN;
        if (first[*p / 32] >> *p % 32 & 1) id = longest_at(t, list, n_list, p, end);
        if (id == KVP__NO_TOKEN) {
            p++;
            continue;
        }
        if (!encode_plain(e, plain, p) || !kvp__ids_push(e->ids, (int32_t)id)) return false;
        p += piece_bytes(t, id);
        plain = p;
    }
    return encode_plain(e, plain, end);
}

kvp_status kvp__tokenizer_append(const kvp__tokenizer *t, kvp__ids *ids, const char *text,
                                 size_t bytes, uint32_t flags, kvp_error *err)
{
    if (t->kind == KVP__KIND_BPE && !t->pre)
        return kvp__fail(err, KVP_ERR_NO_TOKENIZER,
                         "the pre-tokenizer \"%s\" is not known; give token ids", t->pre_name);
    if (bytes > MAX_TEXT || (!text && bytes))
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "text: %zu bytes%s", bytes,
                         text ? ", more than 1 GiB" : " at NULL");
    if (bytes == 0) return KVP_OK;
    encoder e = {.t = t, .ids = ids, .space = {.hooks = &t->hooks}};
    bool ok = encode(&e, (const uint8_t *)text, bytes, flags & KVP_TOKENIZE_PARSE_SPECIAL);
    kvp__merge_space_free(&e.space);
    kvp__free(&t->hooks, e.escaped, e.escaped_size);
    if (ok) return KVP_OK;
    return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory to tokenize %zu bytes", bytes);
}

kvp_status kvp__tokenizer_encode(const kvp__tokenizer *t, const char *text, size_t bytes,
                                 uint32_t flags, int32_t *out, size_t capacity, size_t *count,
                                 kvp_error *err)
{
    if (flags & ~(KVP_TOKENIZE_SPECIAL_START | KVP_TOKENIZE_PARSE_SPECIAL))
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "flags: 0x%x is not known", (unsigned)flags);
    kvp__ids ids = {.hooks = &t->hooks};
    kvp_status s = kvp__tokenizer_append(t, &ids, text, bytes, flags, err);
    bool starts = ids.count > 0 && ids.data[0] == t->bos;
    if (s == KVP_OK && (flags & KVP_TOKENIZE_SPECIAL_START) && t->adds_bos && !starts) {
        if (!kvp__ids_push(&ids, t->bos)) {
            s = kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory to tokenize %zu bytes", bytes);
        } else {
            memmove(ids.data + 1, ids.data, (ids.count - 1) * sizeof *ids.data);
            ids.data[0] = t->bos;
        }
    }
    if (s == KVP_OK) s = kvp__ids_store(&ids, out, capacity, count, err);
    kvp__ids_free(&ids);
    return s;
}

/* --- ids to bytes --- */

uint32_t kvp__tokenizer_flags(const kvp__tokenizer *t, int32_t token)
{
    if (token < 0 || (uint32_t)token >= t->n) return 0;
    return t->flags[token] & ~(KVP__TOKEN_USER | KVP__TOKEN_RAW);
}

size_t kvp__tokenizer_piece(const kvp__tokenizer *t, int32_t token, uint32_t flags, char *out,
                            size_t capacity)
{
    uint32_t is = kvp__tokenizer_flags(t, token);
    if (is == 0 || ((is & KVP_TOKEN_SPECIAL) && !(flags & KVP_DETOKENIZE_SPECIAL))) return 0;
    size_t bytes, n = 0;
    const uint8_t *piece = kvp__piece(t, (uint32_t)token, &bytes);
    if ((is & KVP_TOKEN_BYTE) && named_byte(piece, bytes) >= 0) {
        if (capacity > 0) out[0] = (char)named_byte(piece, bytes);
        return 1;
    }
    bool escaped = t->kind == KVP__KIND_SPM && (t->flags[token] & KVP_TOKEN_NORMAL) &&
                   !(t->flags[token] & KVP__TOKEN_USER);
    for (size_t i = 0; i < bytes; n++) {
        bool space = escaped && bytes - i >= 3 && memcmp(piece + i, "\xe2\x96\x81", 3) == 0;
        if (n < capacity) out[n] = space ? ' ' : (char)piece[i];
        i += space ? 3 : 1;
    }
    return n;
}

kvp_status kvp__tokenizer_decode(const kvp__tokenizer *t, const int32_t *tokens, size_t count,
                                 uint32_t flags, char *out, size_t capacity, size_t *bytes,
                                 kvp_error *err)
{
    if (flags & ~KVP_DETOKENIZE_SPECIAL)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "flags: 0x%x is not known", (unsigned)flags);
    size_t need = 0, at = 0;
    for (size_t i = 0; i < count; i++) {
        if (tokens[i] < 0 || (uint32_t)tokens[i] >= t->n)
            return kvp__fail(err, KVP_ERR_INVALID_TOKEN, "token %d at index %zu: there are %u",
                             (int)tokens[i], i, (unsigned)t->n);
        need += kvp__tokenizer_piece(t, tokens[i], flags, NULL, 0);
    }
    *bytes = need;
    if (need > capacity)
        return kvp__fail_need(err, KVP_ERR_BUFFER, need, capacity,
                              "%zu bytes of text do not fit into %zu", need, capacity);
    for (size_t i = 0; i < count; i++)
        at += kvp__tokenizer_piece(t, tokens[i], flags, out + at, capacity - at);
    return KVP_OK;
}
