/*
 * Pre-tokenizers: cutting a text into the words that byte-level BPE merges inside of.
 *
 * Where a model's authors wrote a regular expression, there is a matcher written by hand: given a
 * place in the text it returns how many bytes the expression would match there, or 0. The
 * expressions stand above their matchers; all are of the same few parts. Some models cut in stages,
 * each stage inside the pieces of the one before; what lies between two matches is a piece of its
 * own. A piece's end counts as the text's end for look-ahead.
 *
 * Bytes that are no UTF-8 count as characters of no class, one by one, and go through unchanged.
 */
#include "model/tokenizer_priv.h"

#include "model/unicode.h"

#include <string.h>

typedef size_t (*matcher)(const uint8_t *p, const uint8_t *end);

#define MAX_STAGES 4

struct kvp__pretoken {
    const char *names; /* as files write them, one space between two */
    matcher stages[MAX_STAGES];
    bool ignores_merges; /* a word that is a token is that token, whatever the merges say */
    bool adds_bos;
};

/* --- parts --- */

static uint32_t class_at(const uint8_t *p, const uint8_t *end, size_t *bytes)
{
    uint32_t c;
    *bytes = kvp__unicode_next(p, end, &c);
    return kvp__unicode_class(c);
}

/* The end of the run of characters of these classes. */
static const uint8_t *run(const uint8_t *p, const uint8_t *end, uint32_t classes)
{
    size_t n;
    while (p < end && (class_at(p, end, &n) & classes)) p += n;
    return p;
}

static bool is_at(const uint8_t *p, const uint8_t *end, uint32_t classes)
{
    size_t n;
    return p < end && (class_at(p, end, &n) & classes);
}

static bool is_newline(uint8_t c) { return c == '\r' || c == '\n'; }

#define NUMBER KVP__UNI_NUMBER
#define LETTER KVP__UNI_LETTER
#define SPACE KVP__UNI_SPACE
#define NO_WORD (~(KVP__UNI_SPACE | KVP__UNI_LETTER | KVP__UNI_NUMBER)) /* [^\s\p{L}\p{N}] */

/* '(s|t|re|ve|m|ll|d), in ASCII capitals too if `fold`. */
static size_t contraction(const uint8_t *p, const uint8_t *end, bool fold)
{
    static const char endings[][3] = {"s", "t", "re", "ve", "m", "ll", "d"};
    if (*p != '\'') return 0;
    uint8_t c[2];
    size_t n = 0;
    for (; n < 2 && n + 1 < (size_t)(end - p); n++) {
        c[n] = p[n + 1];
        if (fold && c[n] >= 'A' && c[n] <= 'Z') c[n] |= 0x20;
    }
    for (size_t i = 0; i < KVP__COUNT(endings); i++) {
        size_t length = strlen(endings[i]);
        if (length <= n && memcmp(c, endings[i], length) == 0) return length + 1;
    }
    return 0;
}

/* \s+(?!\S)|\s+: a run of spaces, without its last one if something follows. */
static size_t spaces(const uint8_t *p, const uint8_t *end)
{
    const uint8_t *q = p, *last = p;
    size_t n;
    while (q < end && class_at(q, end, &n) == SPACE) {
        last = q;
        q += n;
    }
    return (size_t)((q == end || last == p ? q : last) - p);
}

/* \s*[\r\n]+ */
static size_t spaces_to_newline(const uint8_t *p, const uint8_t *end)
{
    const uint8_t *q = run(p, end, SPACE);
    while (q > p && !is_newline(q[-1])) q--;
    return (size_t)(q - p);
}

/* [^\r\n\p{L}\p{N}] here: its bytes, or 0. */
static size_t lead_in(const uint8_t *p, const uint8_t *end)
{
    size_t n;
    return (class_at(p, end, &n) & (LETTER | NUMBER)) || is_newline(*p) ? 0 : n;
}

/* [^\r\n\p{L}\p{N}]?\p{L}+ */
static size_t letters_with_lead_in(const uint8_t *p, const uint8_t *end)
{
    const uint8_t *from = p + lead_in(p, end), *to = run(from, end, LETTER);
    return to > from ? (size_t)(to - p) : 0;
}

/* \p{N}{1,most} */
static size_t digits(const uint8_t *p, const uint8_t *end, unsigned most)
{
    const uint8_t *q = p;
    size_t n;
    while (most-- > 0 && q < end && class_at(q, end, &n) == NUMBER) q += n;
    return (size_t)(q - p);
}

/* " ?[classes]+[\r\n]*", also with '/' in the last set. */
static size_t signs(const uint8_t *p, const uint8_t *end, uint32_t classes, bool slash)
{
    const uint8_t *from = p + (*p == ' '), *q = run(from, end, classes);
    if (q == from) return 0;
    while (q < end && (is_newline(*q) || (slash && *q == '/'))) q++;
    return (size_t)(q - p);
}

/* --- the expressions --- */

/* \p{N} */
static size_t match_digit(const uint8_t *p, const uint8_t *end) { return digits(p, end, 1); }

/* 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
static size_t match_gpt2(const uint8_t *p, const uint8_t *end)
{
    size_t n = contraction(p, end, false);
    if (n) return n;
    const uint8_t *from = p + (*p == ' ');
    if (from < end) {
        uint32_t c = class_at(from, end, &n);
        uint32_t classes = c & LETTER ? LETTER : c == NUMBER ? NUMBER : NO_WORD;
        if (c != SPACE) return (size_t)(run(from, end, classes) - p);
    }
    return spaces(p, end);
}

/* (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,most}| ?[^\s\p{L}\p{N}]+[\r\n]*
 * |\s*[\r\n]+|\s+(?!\S)|\s+ */
static size_t match_tiktoken(const uint8_t *p, const uint8_t *end, unsigned most)
{
    size_t n;
    if ((n = contraction(p, end, true))) return n;
    if ((n = letters_with_lead_in(p, end))) return n;
    if ((n = digits(p, end, most))) return n;
    if ((n = signs(p, end, NO_WORD, false))) return n;
    if ((n = spaces_to_newline(p, end))) return n;
    return spaces(p, end);
}

static size_t match_llama3(const uint8_t *p, const uint8_t *end)
{
    return match_tiktoken(p, end, 3);
}

static size_t match_qwen2(const uint8_t *p, const uint8_t *end)
{
    return match_tiktoken(p, end, 1);
}

/* [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}] and [\p{Ll}\p{Lm}\p{Lo}\p{M}] */
#define CAPITALS (KVP__UNI_UPPER | KVP__UNI_CASELESS | KVP__UNI_MARK)
#define SMALLS (KVP__UNI_LOWER | KVP__UNI_CASELESS | KVP__UNI_MARK)

/* CAPITALS*SMALLS+ from here on, with backtracking: what CAPITALS* took too much it gives back, to
 * the last character that SMALLS can begin with. NULL: no match. */
static const uint8_t *capitals_smalls(const uint8_t *p, const uint8_t *end)
{
    const uint8_t *q = p, *back = NULL;
    size_t n;
    uint32_t c;
    while (q < end && ((c = class_at(q, end, &n)) & CAPITALS)) {
        q += n;
        if (c & SMALLS) back = q;
    }
    const uint8_t *small = run(q, end, SMALLS);
    return small > q ? small : back;
}

/* [^\r\n\p{L}\p{N}]? before each: CAPITALS*SMALLS+|CAPITALS+SMALLS*. The option is taken first if
 * it can be, then left out (only a mark can be both it and a part of the word). */
static size_t camel_word(const uint8_t *p, const uint8_t *end)
{
    size_t n = lead_in(p, end);
    const uint8_t *q = NULL;
    if (n) q = capitals_smalls(p + n, end);
    if (!q) q = capitals_smalls(p, end);
    if (q) return (size_t)(q - p);
    /* No small letter anywhere: capitals alone, which cannot be marks then. */
    q = run(p + n, end, CAPITALS);
    return q > p + n ? (size_t)(q - p) : 0;
}

/* camel_word|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+ */
static size_t match_tekken(const uint8_t *p, const uint8_t *end)
{
    size_t n;
    if ((n = camel_word(p, end))) return n;
    if ((n = digits(p, end, 1))) return n;
    if ((n = signs(p, end, NO_WORD, true))) return n;
    if ((n = spaces_to_newline(p, end))) return n;
    return spaces(p, end);
}

/* \p{N}{1,3} */
static size_t match_digits3(const uint8_t *p, const uint8_t *end) { return digits(p, end, 3); }

/* [一-龥぀-ゟ゠-ヿ]+ */
static size_t match_cjk(const uint8_t *p, const uint8_t *end)
{
    const uint8_t *q = p;
    while (q < end) {
        uint32_t c;
        size_t n = kvp__unicode_next(q, end, &c);
        if (!(c >= 0x4e00 && c <= 0x9fa5) && !(c >= 0x3040 && c <= 0x30ff)) break;
        q += n;
    }
    return (size_t)(q - p);
}

static bool is_ascii_letter(uint8_t c) { return (uint8_t)((c | 0x20) - 'a') < 26; }

/* [!-/:-~ without letters][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*
 * |\s*[\r\n]+|\s+(?!\S)|\s+ */
static size_t match_deepseek(const uint8_t *p, const uint8_t *end)
{
    const uint32_t word = LETTER | KVP__UNI_MARK, sign = KVP__UNI_PUNCT | KVP__UNI_SYMBOL;
    size_t n;
    uint32_t c = class_at(p, end, &n);
    if (*p < 0x80 && (c & sign)) {
        const uint8_t *q = p + 1;
        while (q < end && is_ascii_letter(*q)) q++;
        if (q > p + 1) return (size_t)(q - p);
    }
    if (!(c & (LETTER | sign)) && !is_newline(*p) && is_at(p + n, end, word))
        return (size_t)(run(p + n, end, word) - p);
    if (c & word) return (size_t)(run(p, end, word) - p);
    if ((n = signs(p, end, sign, false))) return n;
    if ((n = spaces_to_newline(p, end))) return n;
    return spaces(p, end);
}

/* [\p{P}\$\+<=>\^~\|]+ */
static size_t match_punctuation(const uint8_t *p, const uint8_t *end)
{
    const uint8_t *q = p;
    for (;;) {
        const uint8_t *next = run(q, end, KVP__UNI_PUNCT);
        if (next < end && *next < 0x80 && *next && strchr("$+<=>^~|", *next)) next++;
        if (next == q) return (size_t)(q - p);
        q = next;
    }
}

/* \p{N}+ */
static size_t match_numbers(const uint8_t *p, const uint8_t *end)
{
    return (size_t)(run(p, end, NUMBER) - p);
}

/* [0-9][0-9][0-9] */
static size_t match_three_digits(const uint8_t *p, const uint8_t *end)
{
    if (end - p < 3) return 0;
    for (int i = 0; i < 3; i++)
        if (p[i] < '0' || p[i] > '9') return 0;
    return 3;
}

/* --- the models --- */

static const kvp__pretoken pretokens[] = {
    {"smollm starcoder refact command-r codeshell exaone minerva-7b",
     {match_digit, match_gpt2}, false, false},
    {"gpt-2 phi-2 mpt olmo jais gigachat roberta-bpe trillion granite-docling",
     {match_gpt2}, false, false},
    {"llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
     {match_llama3}, true, true},
    {"dbrx smaug-bpe", {match_llama3}, false, false},
    {"qwen2 deepseek-r1-qwen kormo stablelm2 hunyuan megrez", {match_qwen2}, false, false},
    {"tekken", {match_tekken}, true, true},
    {"deepseek-v3", {match_digits3, match_cjk, match_deepseek}, false, false},
    {"default", {match_punctuation, match_gpt2, match_numbers, match_three_digits}, false, false},
};

static bool lists(const char *names, kvp__str name)
{
    for (const char *p = names; *p;) {
        size_t n = strcspn(p, " ");
        if (n == name.bytes && memcmp(p, name.data, n) == 0) return true;
        p += n + (p[n] == ' ');
    }
    return false;
}

const kvp__pretoken *kvp__pretoken_find(kvp__str name)
{
    for (size_t i = 0; i < KVP__COUNT(pretokens); i++)
        if (lists(pretokens[i].names, name)) return &pretokens[i];
    return NULL;
}

bool kvp__pretoken_ignores_merges(const kvp__pretoken *p) { return p->ignores_merges; }
bool kvp__pretoken_adds_bos(const kvp__pretoken *p) { return p->adds_bos; }

/* --- cutting --- */

typedef struct splitter {
    const kvp__pretoken *pre;
    bool (*word)(void *user, const uint8_t *text, size_t bytes);
    void *user;
} splitter;

/* Cuts a piece by one stage, and what comes out by the next ones. MAX_STAGES deep at most. */
static bool split(const splitter *s, unsigned stage, const uint8_t *p, const uint8_t *end)
{
    if (p == end) return true;
    if (stage == MAX_STAGES || !s->pre->stages[stage])
        return s->word(s->user, p, (size_t)(end - p));
    const uint8_t *gap = p;
    while (p < end) {
        size_t n = s->pre->stages[stage](p, end);
        if (n == 0) {
            uint32_t c;
            p += kvp__unicode_next(p, end, &c);
            continue;
        }
        if (!split(s, stage + 1, gap, p) || !split(s, stage + 1, p, p + n)) return false;
        gap = p += n;
    }
    return split(s, stage + 1, gap, end);
}

bool kvp__pretoken_split(const kvp__pretoken *p, const uint8_t *text, size_t bytes,
                         bool (*word)(void *user, const uint8_t *text, size_t bytes), void *user)
{
    splitter s = {p, word, user};
    return split(&s, 0, text, text + bytes);
}
