/* Runs the `kvpage` command as a user does, and keeps what it wrote. */
#ifndef TESTS_CLI_CLI_H
#define TESTS_CLI_CLI_H

#include <stdbool.h>
#include <stddef.h>

enum { CLI_OUTPUT_MAX = 1 << 20, CLI_ARGS_MAX = 24 };

typedef struct cli {
    char out[CLI_OUTPUT_MAX], err[CLI_OUTPUT_MAX]; /* NUL-terminated */
    int code;                                      /* exit code; -1: ended by a signal */
    long interrupt_ms; /* > 0, set before: SIGINT this long after the first output */
} cli;

/* Runs `kvpage` with `line` cut at spaces (a '~' stands for a space inside an argument), `input` on
 * standard input (NULL: nothing). Ends it after a minute, which fails the test. */
void cli_run(cli *c, const char *line, const char *input);
/* The same with another program of the build folder ("examples/demo"), or an absolute path. */
void cli_program(cli *c, const char *program, const char *line, const char *input);
/* A path inside the build folder. */
void cli_built(char *out, size_t size, const char *name);

/* The file of a tiny random model (made once). */
const char *cli_tiny(void);
/* A file with these bytes under the same temporary folder. */
const char *cli_file(const char *name, const void *data, size_t bytes);
/* Removes these files: what a group of tests ends with. */
int cli_clean(void **state);

/* The real model, or NULL: then the test skips. */
const char *cli_real(void);

bool has(const char *text, const char *part);
/* The number behind "key": in JSON; fails the test if it is not there. */
double json_number(const char *text, const char *key);

#endif
