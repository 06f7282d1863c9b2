#include "wellformed.h"

#include <stdbool.h>
#include <string.h>

/* --- JSON: each reads one thing and gives what follows it, or leaves `bad` at the fault --- */

typedef struct reader {
    const char *bad;
} reader;

static const char *value(reader *r, const char *p);

static const char *fault(reader *r, const char *p)
{
    if (!r->bad) r->bad = p;
    return p;
}

static const char *space(const char *p) { return p + strspn(p, " \n\r\t"); }

static const char *string(reader *r, const char *p)
{
    if (*p++ != '"') return fault(r, p - 1);
    while (*p != '"') {
        if ((unsigned char)*p < 0x20) return fault(r, p);
        if (*p == '\\' && !strchr("\"\\/bfnrtu", p[1])) return fault(r, p);
        p += *p == '\\' ? 2 : 1;
    }
    return p + 1;
}

static const char *number(reader *r, const char *p)
{
    static const char digits[] = "0123456789";
    size_t n;
    if (*p == '-') p++;
    n = strspn(p, digits);
    if (n == 0 || (n > 1 && *p == '0')) return fault(r, p);
    p += n;
    if (*p == '.') {
        n = strspn(++p, digits);
        if (n == 0) return fault(r, p);
        p += n;
    }
    if (*p == 'e' || *p == 'E') {
        p += p[1] == '-' || p[1] == '+' ? 2 : 1;
        n = strspn(p, digits);
        if (n == 0) return fault(r, p);
        p += n;
    }
    return p;
}

/* An object or an array. */
static const char *members(reader *r, const char *p)
{
    char end = *p == '{' ? '}' : ']';
    p = space(p + 1);
    if (*p == end) return p + 1;
    for (;;) {
        if (end == '}') {
            p = space(string(r, p));
            if (r->bad || *p++ != ':') return fault(r, p);
        }
        p = space(value(r, p));
        if (r->bad || *p == end) return p + 1;
        if (*p != ',') return fault(r, p);
        p = space(p + 1);
    }
}

static const char *value(reader *r, const char *p)
{
    static const char *const words[] = {"true", "false", "null"};
    p = space(p);
    for (size_t i = 0; i < 3; i++)
        if (!strncmp(p, words[i], strlen(words[i]))) return p + strlen(words[i]);
    if (*p == '{' || *p == '[') return members(r, p);
    return *p == '"' ? string(r, p) : number(r, p);
}

const char *not_json(const char *text)
{
    reader r = {0};
    const char *end = space(value(&r, text));
    return r.bad ? r.bad : *end ? end : NULL;
}

/* --- XML --- */

enum { DEPTH_MAX = 32 };

static const char names[] =
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-";

static bool entity(const char *p)
{
    static const char *const known[] = {"&amp;", "&lt;", "&gt;", "&quot;", "&#xfffd;"};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (!strncmp(p, known[i], strlen(known[i]))) return true;
    return false;
}

/* name="value" pairs up to the tag's end, which is where it returns; NULL: faulty. */
static const char *attributes(const char *p)
{
    for (;;) {
        size_t gap = strspn(p, " \n"), n;
        p += gap;
        if (*p == '>' || *p == '/') return p;
        n = strspn(p, names);
        if (!gap || !n || strncmp(p + n, "=\"", 2)) return NULL;
        for (p += n + 2; *p != '"'; p++)
            if (!*p || *p == '<' || (*p == '&' && !entity(p))) return NULL;
        p++;
    }
}

typedef struct open_tags {
    const char *name[DEPTH_MAX];
    size_t bytes[DEPTH_MAX], n;
    bool had_one;
} open_tags;

/* From the '<' to behind the '>'; NULL: faulty. */
static const char *tag(open_tags *t, const char *p)
{
    bool closing = p[1] == '/';
    const char *name = p + 1 + closing, *end;
    size_t n = strspn(name, names);
    if (!n) return NULL;
    if (closing) {
        if (!t->n-- || t->bytes[t->n] != n || memcmp(t->name[t->n], name, n)) return NULL;
        return name[n] == '>' ? name + n + 1 : NULL;
    }
    end = attributes(name + n);
    if (!end || t->n == DEPTH_MAX || (t->n == 0 && t->had_one)) return NULL;
    t->had_one = true;
    if (*end == '/') return end[1] == '>' ? end + 2 : NULL;
    t->name[t->n] = name;
    t->bytes[t->n++] = n;
    return end + 1;
}

const char *not_xml(const char *text)
{
    open_tags t = {.n = 0};
    const char *p = text;
    if (!strncmp(p, "<!DOCTYPE html>", 15)) p += 15;
    while (*p) {
        const char *at = p;
        if (*p == '<') p = tag(&t, p);
        else if (*p == '&' && !entity(p)) p = NULL;
        else if (t.n == 0 && *p != '\n') p = NULL;
        else p++;
        if (!p) return at;
    }
    return t.n || !t.had_one ? p : NULL;
}
