/*
 * UTF-8 decoding and character classes. See unicode.h. The table is a sorted list of runs, looked
 * up by halving: 14 KiB, about twelve steps, and only for what is not ASCII.
 */
#include "model/unicode.h"

#include "model/unicode_data.h"

#define N_RUNS (sizeof unicode_runs / sizeof unicode_runs[0])

size_t kvp__unicode_length(uint8_t lead)
{
    if (lead < 0x80) return 1;
    if (lead < 0xc2 || lead > 0xf4) return 0;
    return lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
}

/* The second byte has a narrower range after some first bytes: it is there that overlong forms,
 * surrogates and what lies beyond U+10FFFF are told apart. */
static bool second_fits(uint8_t lead, uint8_t second)
{
    uint8_t low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    uint8_t high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    return second >= low && second <= high;
}

static bool continues(const uint8_t *p, size_t n)
{
    if (n > 1 && !second_fits(p[0], p[1])) return false;
    for (size_t i = 2; i < n; i++)
        if ((p[i] & 0xc0) != 0x80) return false;
    return true;
}

size_t kvp__unicode_next(const uint8_t *p, const uint8_t *end, uint32_t *code_point)
{
    size_t n = kvp__unicode_length(*p);
    if (n == 1) {
        *code_point = *p;
        return 1;
    }
    if (n == 0 || n > (size_t)(end - p) || !continues(p, n)) {
        *code_point = KVP__UNI_INVALID;
        return 1;
    }
    uint32_t c = *p & (0x7fu >> n);
    for (size_t i = 1; i < n; i++) c = c << 6 | (p[i] & 0x3fu);
    *code_point = c;
    return n;
}

bool kvp__unicode_unfinished(const uint8_t *p, size_t n)
{
    return n > 0 && n < kvp__unicode_length(p[0]) && continues(p, n);
}

uint32_t kvp__unicode_class(uint32_t c)
{
    if (c > 0x10ffff) return KVP__UNI_OTHER;
    if (c - 'a' < 26u) return KVP__UNI_LOWER;
    if (c == ' ') return KVP__UNI_SPACE;
    uint32_t low = 0, high = N_RUNS, key = c << 4 | 15u;
    while (high - low > 1) {
        uint32_t mid = (low + high) / 2;
        if (unicode_runs[mid] <= key) low = mid;
        else high = mid;
    }
    return 1u << (unicode_runs[low] & 15u);
}
