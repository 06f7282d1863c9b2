/* A JSON writer: commas, escapes, and text that may be no UTF-8. */
#include "tool.h"

#include <math.h>
#include <string.h>

size_t utf8_length(const unsigned char *p, size_t left)
{
    uint32_t least, code;
    size_t n;
    if (p[0] < 0x80) return 1;
    if (p[0] >= 0xc2 && p[0] < 0xe0) n = 2, least = 0x80, code = p[0] & 0x1fu;
    else if (p[0] >= 0xe0 && p[0] < 0xf0) n = 3, least = 0x800, code = p[0] & 0x0fu;
    else if (p[0] >= 0xf0 && p[0] < 0xf5) n = 4, least = 0x10000, code = p[0] & 0x07u;
    else return 0;
    if (left < n) return 0;
    for (size_t i = 1; i < n; i++) {
        if ((p[i] & 0xc0) != 0x80) return 0;
        code = code << 6 | (p[i] & 0x3fu);
    }
    return code < least || code > 0x10ffff || (code >= 0xd800 && code < 0xe000) ? 0 : n;
}

static void quoted(json *j, const char *text, size_t bytes)
{
    const unsigned char *p = (const unsigned char *)text, *end = p + bytes;
    fputc('"', j->out);
    while (p < end) {
        size_t n = utf8_length(p, (size_t)(end - p));
        if (n == 0) {
            fputs("\\ufffd", j->out);
            n = 1;
        } else if (*p == '"' || *p == '\\') {
            fprintf(j->out, "\\%c", *p);
        } else if (*p == '\n') {
            fputs("\\n", j->out);
        } else if (*p < 0x20 || *p == 0x7f) {
            fprintf(j->out, "\\u%04x", *p);
        } else {
            fwrite(p, 1, n, j->out);
        }
        p += n;
    }
    fputc('"', j->out);
}

static void before_value(json *j, const char *key)
{
    if (!j->first) fputs(", ", j->out);
    j->first = false;
    if (key) {
        quoted(j, key, strlen(key));
        fputs(": ", j->out);
    }
}

void json_open(json *j, const char *key, char bracket)
{
    before_value(j, key);
    fputc(bracket, j->out);
    j->first = true;
}

void json_close(json *j, char bracket)
{
    fputc(bracket, j->out);
    j->first = false;
}

void json_text(json *j, const char *key, const char *text, size_t bytes)
{
    before_value(j, key);
    quoted(j, text, bytes);
}

void json_string(json *j, const char *key, const char *text)
{
    json_text(j, key, text, strlen(text));
}

void json_uint(json *j, const char *key, uint64_t value)
{
    before_value(j, key);
    fprintf(j->out, "%llu", (unsigned long long)value);
}

void json_int(json *j, const char *key, int64_t value)
{
    before_value(j, key);
    fprintf(j->out, "%lld", (long long)value);
}

void json_real(json *j, const char *key, double value)
{
    before_value(j, key);
    if (isfinite(value)) fprintf(j->out, "%.9g", value);
    else fputs("null", j->out);
}

void json_bool(json *j, const char *key, bool value)
{
    before_value(j, key);
    fputs(value ? "true" : "false", j->out);
}

void json_line(json *j)
{
    fputc('\n', j->out);
    fflush(j->out);
    j->first = true;
}
