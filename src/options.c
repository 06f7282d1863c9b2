/*
 * The option parser: tables of what a subcommand takes, one reader for all. Every refusal is one
 * line that names the option, what was given, and what would be right.
 */
#include "tool.h"

#include <stdlib.h>
#include <string.h>

static int wrong(const usage *u, const char *format, const char *a, const char *b)
{
    fprintf(stderr, "kvpage %.*s: ", (int)strcspn(u->line, " "), u->line);
    fprintf(stderr, format, a, b);
    fprintf(stderr, "\n");
    return EXIT_USAGE;
}

static const option *find(const usage *u, const char *name, size_t length)
{
    for (const option_group *g = u->groups; g->title; g++)
        for (const option *o = g->options; o->name; o++)
            if (strlen(o->name) == length && memcmp(o->name, name, length) == 0) return o;
    return NULL;
}

/* The option that shares the longest beginning, if that is at least three letters. */
static const option *nearest(const usage *u, const char *name)
{
    const option *best = NULL;
    size_t longest = 2;
    for (const option_group *g = u->groups; g->title; g++) {
        for (const option *o = g->options; o->name; o++) {
            size_t n = 0;
            while (o->name[n] && o->name[n] == name[n]) n++;
            if (n > longest) {
                longest = n;
                best = o;
            }
        }
    }
    return best;
}

/* --- help --- */

static void print_option(const option *o)
{
    char left[48];
    snprintf(left, sizeof left, "--%s%s%s", o->name, o->argument ? " " : "",
             o->argument ? o->argument : "");
    printf("  %-26s %s", left, o->help);
    if (o->kind == OPTION_CHOICE) {
        printf(": ");
        for (const choice *c = o->choices; c->name; c++)
            printf("%s%s", c == o->choices ? "" : ", ", c->name);
    }
    printf("\n");
}

static void print_help(const usage *u)
{
    printf("usage: kvpage %s\n\n%s", u->line, u->text);
    for (const option_group *g = u->groups; g->title; g++) {
        printf("\n%s:\n", g->title);
        for (const option *o = g->options; o->name; o++) print_option(o);
    }
}

/* --- values --- */

static bool read_number(const char *text, bool bytes, uint64_t *out)
{
    static const char units[] = "KMGT";
    uint64_t value = 0;
    if (!*text) return false;
    for (; *text >= '0' && *text <= '9'; text++)
        if (__builtin_mul_overflow(value, 10u, &value) ||
            __builtin_add_overflow(value, (uint64_t)(*text - '0'), &value))
            return false;
    if (bytes && *text) {
        const char *unit = strchr(units, *text >= 'a' ? *text - 'a' + 'A' : *text);
        if (!unit || __builtin_mul_overflow(value, (uint64_t)1 << 10 * (unit - units + 1), &value))
            return false;
        text++;
        if (text[0] == 'i' && text[1] == 'B') text += 2;
        else if (text[0] == 'B') text++;
    }
    *out = value;
    return *text == 0;
}

static bool read_real(const char *text, double *out)
{
    char *end;
    if (!*text || strspn(text, "0123456789.-+eE") != strlen(text)) return false;
    *out = strtod(text, &end);
    return *end == 0;
}

static bool in_range(const option *o, double value)
{
    return (o->least == 0 && o->most == 0) || (value >= o->least && value <= o->most);
}

static int wrong_value(const usage *u, const option *o, const char *text)
{
    char what[96];
    if (o->least == 0 && o->most == 0)
        snprintf(what, sizeof what, "'%%s' is not a %s",
                 o->kind == OPTION_BYTES ? "size (bytes, or with K, M, G, T behind)" : "number");
    else
        snprintf(what, sizeof what, "'%%s' is not a number from %.10g to %.10g", o->least, o->most);
    fprintf(stderr, "kvpage %.*s: --%s: ", (int)strcspn(u->line, " "), u->line, o->name);
    fprintf(stderr, what, text);
    fprintf(stderr, "\n");
    return EXIT_USAGE;
}

static int wrong_choice(const usage *u, const option *o, const char *text)
{
    fprintf(stderr, "kvpage %.*s: --%s: '%s' is none of", (int)strcspn(u->line, " "), u->line,
            o->name, text);
    for (const choice *c = o->choices; c->name; c++)
        fprintf(stderr, "%s %s", c == o->choices ? "" : ",", c->name);
    fprintf(stderr, "\n");
    return EXIT_USAGE;
}

static const choice *choice_named(const option *o, const char *text)
{
    for (const choice *c = o->choices; c->name; c++)
        if (!strcmp(c->name, text)) return c;
    return NULL;
}

static int set_list(const usage *u, const option *o, const char *text)
{
    text_list *list = o->value;
    if (o->choices && !choice_named(o, text)) return wrong_choice(u, o, text);
    if (list->n == LIST_MAX) return wrong(u, "--%s: given too often ('%s')", o->name, text);
    list->items[list->n++] = text;
    return EXIT_DONE;
}

static int set(const usage *u, const option *o, const char *text)
{
    uint64_t number;
    double real;
    switch (o->kind) {
    case OPTION_FLAG:
        *(bool *)o->value = true;
        break;
    case OPTION_NUMBER:
    case OPTION_BYTES:
        if (!read_number(text, o->kind == OPTION_BYTES, &number) || !in_range(o, (double)number))
            return wrong_value(u, o, text);
        *(uint64_t *)o->value = number;
        break;
    case OPTION_REAL:
        if (!read_real(text, &real) || !in_range(o, real)) return wrong_value(u, o, text);
        *(float *)o->value = (float)real;
        break;
    case OPTION_TEXT:
        *(const char **)o->value = text;
        break;
    case OPTION_LIST:
        return set_list(u, o, text);
    case OPTION_CHOICE: {
        const choice *c = choice_named(o, text);
        if (!c) return wrong_choice(u, o, text);
        *(uint32_t *)o->value = c->value;
        break;
    }
    }
    return EXIT_DONE;
}

/* --- the line --- */

static int unknown(const usage *u, const char *given)
{
    const option *o = nearest(u, given + 2);
    if (o) return wrong(u, "unknown option %s; did you mean --%s?", given, o->name);
    return wrong(u, "unknown option %s%s", given, "");
}

/* One argument that begins with a dash; *i moves on if the next one is its value. */
static int read_option(const usage *u, int argc, char **argv, int *i)
{
    const char *given = argv[*i], *name = given + 2, *value = strchr(name, '=');
    size_t length = value ? (size_t)(value - name) : strlen(name);
    const option *o = given[1] == '-' ? find(u, name, length) : NULL;
    int code;
    if (!o) return unknown(u, given);
    if (value) value++;
    if (o->kind == OPTION_FLAG && value)
        return wrong(u, "--%s takes no value ('%s')", o->name, value);
    if (o->kind != OPTION_FLAG && !value) {
        if (*i + 1 >= argc) return wrong(u, "--%s needs a value (%s)", o->name, o->argument);
        value = argv[++*i];
    }
    code = set(u, o, value);
    if (code == EXIT_DONE && o->given) *o->given = true;
    return code;
}

bool options_read(const usage *u, int argc, char **argv, arguments *out, int *exit_code)
{
    bool options = true;
    *exit_code = EXIT_DONE;
    out->n = 0;
    for (int i = 1; i < argc && *exit_code == EXIT_DONE; i++) {
        if (options && (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h"))) {
            print_help(u);
            return false;
        }
        if (options && !strcmp(argv[i], "--")) {
            options = false;
        } else if (options && argv[i][0] == '-' && argv[i][1]) {
            *exit_code = read_option(u, argc, argv, &i);
        } else if (out->n == u->most) {
            *exit_code = wrong(u, "one argument too many: '%s' (usage: kvpage %s)", argv[i],
                               u->line);
        } else {
            out->items[out->n++] = argv[i];
        }
    }
    if (*exit_code == EXIT_DONE && out->n < u->least)
        *exit_code = wrong(u, "an argument is missing (usage: kvpage %s)%s", u->line, "");
    return *exit_code == EXIT_DONE;
}
