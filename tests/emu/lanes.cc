/*
 * What lanes are given, and the file of a card's answers: see lanes.h and lanes_file.h.
 *
 *     "kvp-lanes 1\n", the card's name up to 64 bytes, then LANES_OF_OP words for each operation
 */
#include "tests/emu/lanes_file.h"

#include "base/half.h"
#include "tests/emu/emu.h"

#include <cmath>
#include <cstdio>
#include <cstring>

static const char magic[] = "kvp-lanes 1\n";

static const struct {
    const char *name;
    int in, out;
    double relative, absolute;
} operations[] = {
#define ENTRY(name, in, out, relative, absolute) {#name, in, out, relative, absolute},
    LANES_OPERATIONS(ENTRY)
#undef ENTRY
};

const char *lanes_name(uint32_t operation) { return operations[operation].name; }

static uint32_t hash(uint32_t a, uint32_t b)
{
    uint64_t x = ((uint64_t)a << 32 | b) * 0x9e3779b97f4a7c15u;
    x ^= x >> 29;
    x *= 0xbf58476d1ce4e5b9u;
    return (uint32_t)(x >> 32);
}

static float between(uint32_t bits, float from, float to)
{
    return from + (to - from) * (float)(bits >> 8) / 16777216.0f;
}

/* Values at which rounding, overflow and flushing turn. */
static uint32_t corner(uint32_t bits)
{
    static const uint32_t corners[] = {
        0,          0x80000000u, 0x3f800000u, 0xbf800000u, 0x7f800000u, 0xff800000u, 0x7fc00000u,
        0x00000001u, 0x007fffffu, 0x00800000u, 0x7f7fffffu, 0x477fe000u, 0x477ff000u, 0x477fefffu,
        0x33000000u, 0x33000001u, 0x33800000u, 0x387fffffu, 0x38800000u, 0x3f801000u, 0x3f803000u,
        0x3f808000u, 0x3f818000u, 0x7f7f8000u, 0x7f7f7fffu, 0x42fe0000u, 0xc2fc0000u, 0xc3160000u};
    return corners[bits % (sizeof corners / sizeof *corners)];
}

static uint32_t word_of(int kind, uint32_t bits, uint32_t word)
{
    float f = between(bits, kind == LANES_POSITIVE ? 1e-3f : -8, 8);
    float high = between(hash(bits, 2), -2, 2);
    switch (kind) {
    case LANES_FLOATS: return bits & 64 ? corner(bits >> 8) : hash(bits, 1);
    case LANES_SMALL:
    case LANES_POSITIVE: return kvp__float_bits(f);
    case LANES_F16:
        return kvp__f32_to_f16(f / 4) | (uint32_t)kvp__f32_to_f16(high) << 16;
    case LANES_BF16:
        return kvp__f32_to_bf16(f / 4) | (uint32_t)kvp__f32_to_bf16(high) << 16;
    case LANES_DOUBLES: /* exponents near one another, so that sums round */
        return word % 2 ? (bits & 0x800fffffu) | (0x3f0u + (bits >> 20) % 32) << 20 : bits;
    default: return bits;
    }
}

uint32_t lanes_input(uint32_t operation, uint32_t at)
{
    return word_of(operations[operation].in, hash(operation + 1, at), at % LANES_WORDS);
}

std::vector<uint32_t> lanes_run()
{
    std::vector<uint32_t> answers;
    auto *in = (uint32_t *)emu_alloc(LANES_OF_OP * 4);
    auto *out = (uint32_t *)emu_alloc(LANES_OF_OP * 4);
    for (uint32_t op = 0; op < LANES_N; op++) {
        for (uint32_t i = 0; i < LANES_OF_OP; i++) in[i] = lanes_input(op, i);
        lanes_args a = {in, out, op, 0};
        const char *wrong = emu_launch("lanes", LANES_ROUNDS, 1, 1, 32, LANES_SHARED, &a);
        if (wrong) {
            fprintf(stderr, "%s: %s\n", lanes_name(op), wrong);
            answers.clear();
            break;
        }
        answers.insert(answers.end(), out, out + LANES_OF_OP);
    }
    emu_free(in);
    emu_free(out);
    return answers;
}

/* All NaNs as one. */
static uint32_t plain(int kind, uint32_t u)
{
    uint32_t infinity = kind == LANES_F16 ? 0x7c00 : 0x7f80, result = 0;
    if (kind == LANES_FLOATS) return std::isnan(kvp__bits_float(u)) ? 0x7fc00000u : u;
    if (kind != LANES_F16 && kind != LANES_BF16) return u;
    for (uint32_t half = 0; half < 32; half += 16) {
        uint32_t h = u >> half & 0xffff;
        result |= ((h & 0x7fff) > infinity ? 0x7fffu : h) << half;
    }
    return result;
}

bool lanes_agree(uint32_t operation, uint32_t card, uint32_t ours)
{
    const auto &o = operations[operation];
    if (plain(o.out, card) == plain(o.out, ours)) return true;
    if (o.relative == 0 && o.absolute == 0) return false;
    float x = kvp__bits_float(card), y = kvp__bits_float(ours);
    return std::fabs((double)x - y) <= o.relative * std::fabs(x) + o.absolute;
}

bool lanes_write(const char *path, const char *card, const std::vector<uint32_t> &answers)
{
    char name[64] = "";
    snprintf(name, sizeof name, "%s", card);
    FILE *f = fopen(path, "wb");
    if (!f) return false;
    bool ok = fwrite(magic, 1, sizeof magic - 1, f) == sizeof magic - 1 &&
              fwrite(name, 1, sizeof name, f) == sizeof name &&
              fwrite(answers.data(), 4, answers.size(), f) == answers.size();
    return fclose(f) == 0 && ok;
}

bool lanes_read(const char *path, std::string *card, std::vector<uint32_t> *answers)
{
    char head[sizeof magic] = "", name[64] = "";
    FILE *f = fopen(path, "rb");
    if (!f) return false;
    answers->assign(LANES_N * LANES_OF_OP, 0);
    bool ok = fread(head, 1, sizeof magic - 1, f) == sizeof magic - 1 && !strcmp(head, magic) &&
              fread(name, 1, sizeof name, f) == sizeof name &&
              fread(answers->data(), 4, answers->size(), f) == answers->size() && fgetc(f) == EOF;
    fclose(f);
    *card = std::string(name, strnlen(name, sizeof name));
    return ok;
}
