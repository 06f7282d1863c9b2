/*
 * What the files of the `kvpage` command share: the option parser, the terminal, JSON, and the
 * steps that every subcommand goes through with a model. The command uses kvpage.h alone: whatever
 * it does, a host can do.
 *
 * It never calls setlocale, so numbers are read and written as in the C locale everywhere.
 */
#ifndef KVPAGE_TOOL_H
#define KVPAGE_TOOL_H

#include <kvpage.h>

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* Exit codes; also in `kvpage --help` and docs/guide.md. */
enum { EXIT_DONE = 0, EXIT_FAILED = 1, EXIT_USAGE = 2, EXIT_INTERRUPTED = 130 };

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* --- options.c --- */

typedef enum option_kind {
    OPTION_FLAG,   /* bool */
    OPTION_NUMBER, /* uint64_t, least to most */
    OPTION_BYTES,  /* uint64_t, with K, M, G or T behind it (powers of 1024) */
    OPTION_REAL,   /* float, least to most */
    OPTION_TEXT,   /* const char * */
    OPTION_CHOICE, /* uint32_t, the value of a named choice */
    OPTION_LIST    /* text_list: may be given several times; of `choices` if there are any */
} option_kind;

typedef struct choice {
    const char *name; /* NULL ends a list of choices */
    uint32_t value;
} choice;

enum { LIST_MAX = 16 };

typedef struct text_list {
    const char *items[LIST_MAX];
    size_t n;
} text_list;

typedef struct option {
    const char *name; /* without dashes; NULL ends a table */
    option_kind kind;
    void *value;
    const char *argument; /* as the help shows it; NULL for flags */
    const char *help;
    double least, most;    /* both 0: not checked */
    const choice *choices; /* of OPTION_CHOICE */
    bool *given;           /* may be NULL: set when the option appears */
} option;

typedef struct option_group {
    const char *title; /* NULL ends the list of groups */
    const option *options;
} option_group;

typedef struct usage {
    const char *line; /* "run MODEL [PROMPT]" */
    const char *text; /* what it does, for the help */
    const option_group *groups;
    size_t least, most; /* positional arguments */
} usage;

typedef struct arguments {
    const char *items[4];
    size_t n;
} arguments;

/* Reads argv[1..] by the tables. True: go on. False: leave with *exit_code (help was asked for and
 * printed, or a line on stderr names the argument that is wrong). */
bool options_read(const usage *u, int argc, char **argv, arguments *out, int *exit_code);

/* --- term.c --- */

bool term_is_tty(FILE *f);
int term_width(void);
/* A line on stderr that overwrites itself, on a terminal only, and only once something takes longer
 * than half a second. `what` as "loading"; done of total. progress_end removes it. */
void progress_show(const char *what, uint64_t done, uint64_t total);
void progress_end(void);
uint64_t clock_ns(void);
/* "1.50 GiB", "640 B": into the caller's buffer, which is returned. */
const char *format_bytes(char buffer[32], uint64_t bytes);

/* The first Ctrl-C sets a flag and wakes the batch; with `keep` false a second one kills. */
void interrupt_setup(bool keep);
bool interrupted(void);
void interrupt_clear(void);
void interrupt_wakes(kvp_batch *batch); /* NULL: none */

/* --- json.c --- */

/* Writes one JSON text, with the commas; keys are NULL inside arrays and outermost. */
typedef struct json {
    FILE *out;
    bool first;
} json;

void json_open(json *j, const char *key, char bracket); /* '{' or '[' */
void json_close(json *j, char bracket);                 /* '}' or ']' */
void json_text(json *j, const char *key, const char *text, size_t bytes); /* bad UTF-8: U+FFFD */
void json_string(json *j, const char *key, const char *text);
void json_uint(json *j, const char *key, uint64_t value);
void json_int(json *j, const char *key, int64_t value);
void json_real(json *j, const char *key, double value); /* null if not finite */
void json_bool(json *j, const char *key, bool value);
void json_line(json *j); /* ends the line and flushes */
/* Bytes of the well-formed UTF-8 character at p, 0 if there is none (surrogates and overlong forms
 * are none). */
size_t utf8_length(const unsigned char *p, size_t left);

/* --- session.c --- */

/* Settings that several subcommands take, with their option tables. */
typedef struct settings {
    uint64_t threads, block, context, max_tokens, cache_bytes;
    uint32_t kv, cpu_level, activations;
    float temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
    uint64_t top_k, seed, penalty_window;
    text_list stop;
    const char *device; /* NULL: the CPU */
    const char *packed_file;
    bool ignore_eos;
    uint32_t chat_format; /* KVP_CHAT_...; 0: the file's */
} settings;

/* Each fills the caller's table and ends it; sizes are enough by construction. */
enum { ENGINE_OPTIONS = 11, SAMPLING_OPTIONS = 14 };
void settings_engine(settings *s, option table[ENGINE_OPTIONS]);
void settings_sampling(settings *s, option table[SAMPLING_OPTIONS]);
extern const choice kv_choices[];
option chat_format_option(settings *s);
option device_option(const char **device);

typedef struct session {
    kvp_model *model;
    kvp_pool *pool;
    kvp_batch *batch;
    kvp_model_info info;
    uint64_t context; /* longest sequence */
    uint64_t load_ns;
} session;

/* Opens the model, asks whether the device takes it with these settings, places it with a progress line.
 * EXIT_DONE, or the code to leave with, after a line on stderr. */
int session_open_model(session *s, const char *path, const settings *set);
/* And makes a pool for `sequences` of the context, and a batch. */
int session_open(session *s, const char *path, const settings *set, uint64_t sequences);
void session_close(session *s);

void session_sampling(const settings *set, kvp_sampling *out);
void session_stops(const settings *set, kvp_string out[LIST_MAX]);
/* Whether there is a chat format to use; else a line says so, ending with `instead`. */
bool session_can_chat(const session *s, const settings *set, const char *path,
                      const char *instead);
/* kvp_seq_append_chat, in the format that the settings name. */
kvp_status session_append_chat(const session *s, const settings *set, kvp_seq *seq,
                               const kvp_chat_message *messages, size_t n, uint32_t flags,
                               kvp_error *err);

/* Prints "kvpage: <error text>" and returns EXIT_FAILED (or EXIT_INTERRUPTED for CANCELLED). What is
 * wrong with a field that an option sets is said of the option, and is EXIT_USAGE. */
int fail_with(const kvp_error *err);
int fail_pool(const session *s);
int fail_line(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The device of that name ("cuda" is "cuda:0"; NULL: the CPU), or false: not in the list. */
bool device_named(const char *name, kvp_device_info *out);

const char *cpu_level_name(uint32_t level);
const char *activations_name(uint32_t activations);
const char *ending_name(uint32_t ending);
const char *chat_format_name(uint32_t format);
const char *kv_format_name(uint32_t format);

/* "usage": {...} */
void json_usage(json *j, const kvp_usage *u);

/* --- the subcommands; argv[0] is their name --- */

int command_run(int argc, char **argv);
int command_chat(int argc, char **argv);
int command_inspect(int argc, char **argv);
int command_plan(int argc, char **argv);
int command_bench(int argc, char **argv);
int command_devices(int argc, char **argv);

#endif
