#define _GNU_SOURCE
#include "cli.h"

#include "support/gguf_writer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PATIENCE_MS = 60000, FILES_MAX = 16 };

/* --- files --- */

static char folder[256];
static char files[FILES_MAX][320];
static size_t n_files;

const char *cli_file(const char *name, const void *data, size_t bytes)
{
    FILE *f;
    char *path = files[n_files++];
    assert_true(n_files <= FILES_MAX);
    if (!folder[0]) {
        const char *temporary = getenv("TMPDIR");
        snprintf(folder, sizeof folder, "%s/kvpage-cli-XXXXXX",
                 temporary && *temporary ? temporary : P_tmpdir);
        assert_non_null(mkdtemp(folder));
    }
    snprintf(path, sizeof files[0], "%s/%s", folder, name);
    f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, bytes, f), bytes);
    fclose(f);
    return path;
}

const char *cli_tiny(void)
{
    static const char *path;
    gw_model tiny = {.head_dim = 16, .context = 512, .tokenizer = 1, .seed = 5};
    size_t bytes;
    uint8_t *data;
    if (path) return path;
    data = gw_tiny(&tiny, &bytes);
    path = cli_file("tiny.gguf", data, bytes);
    free(data);
    return path;
}

int cli_clean(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_files; i++) unlink(files[i]);
    if (folder[0]) rmdir(folder);
    return 0;
}

const char *cli_real(void)
{
    const char *path = getenv("KVPAGE_TEST_SMOLLM2");
    return path && *path ? path : NULL;
}

/* --- running --- */

/* Test programs lie two folders down in the build: build/x/tests/cli/test_y. */
void cli_built(char *out, size_t size, const char *name)
{
    ssize_t n = readlink("/proc/self/exe", out, size - 1);
    assert_true(n > 0);
    out[n] = 0;
    for (int i = 0; i < 3; i++) {
        char *slash = strrchr(out, '/');
        assert_non_null(slash);
        *slash = 0;
    }
    assert_true(strlen(out) + strlen(name) + 2 < size);
    strcat(out, "/");
    strcat(out, name);
}

static void split(char *line, char *path, char *argv[CLI_ARGS_MAX + 2])
{
    size_t n = 0;
    argv[n++] = path;
    for (char *p = strtok(line, " "); p; p = strtok(NULL, " ")) {
        assert_true(n <= CLI_ARGS_MAX);
        for (char *q = p; *q; q++)
            if (*q == '~') *q = ' ';
        argv[n++] = p;
    }
    argv[n] = NULL;
}

static long now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* False at its end. */
static bool gather(int fd, char *out, size_t *n)
{
    ssize_t got = read(fd, out + *n, CLI_OUTPUT_MAX - 1 - *n);
    if (got > 0) *n += (size_t)got;
    out[*n] = 0;
    return got > 0;
}

static void watch(cli *c, pid_t child, int out, int err)
{
    struct pollfd p[2] = {{.fd = out, .events = POLLIN}, {.fd = err, .events = POLLIN}};
    size_t n_out = 0, n_err = 0;
    long start = now_ms(), interrupt_at = 0;
    while (p[0].fd >= 0 || p[1].fd >= 0) {
        poll(p, 2, 20);
        if (p[0].fd >= 0 && p[0].revents && !gather(out, c->out, &n_out)) p[0].fd = -1;
        if (p[1].fd >= 0 && p[1].revents && !gather(err, c->err, &n_err)) p[1].fd = -1;
        if (n_out && c->interrupt_ms && !interrupt_at) interrupt_at = now_ms() + c->interrupt_ms;
        if (interrupt_at && now_ms() >= interrupt_at) {
            kill(child, SIGINT);
            interrupt_at = 0;
            c->interrupt_ms = 0;
        }
        if (now_ms() - start > PATIENCE_MS) {
            kill(child, SIGKILL);
            waitpid(child, NULL, 0);
            fail_msg("the command ran for more than a minute");
        }
    }
}

void cli_program(cli *c, const char *program, const char *line, const char *input)
{
    char path[512], copy[2048], *argv[CLI_ARGS_MAX + 2];
    int in[2], out[2], err[2], status;
    pid_t child;
    if (program[0] == '/') snprintf(path, sizeof path, "%s", program);
    else cli_built(path, sizeof path, program);
    snprintf(copy, sizeof copy, "%s", line);
    split(copy, path, argv);
    c->out[0] = c->err[0] = 0;
    assert_true(pipe(in) == 0 && pipe(out) == 0 && pipe(err) == 0);
    child = fork();
    if (child == 0) {
        dup2(in[0], 0);
        dup2(out[1], 1);
        dup2(err[1], 2);
        for (int fd = 3; fd < 64; fd++) close(fd);
        execv(path, argv);
        _exit(127);
    }
    close(in[0]);
    close(out[1]);
    close(err[1]);
    signal(SIGPIPE, SIG_IGN);
    if (input) assert_true(write(in[1], input, strlen(input)) >= 0 || errno == EPIPE);
    close(in[1]);
    watch(c, child, out[0], err[0]);
    close(out[0]);
    close(err[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    c->code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    if (c->code == 127) fail_msg("%s could not be run", path);
}

void cli_run(cli *c, const char *line, const char *input)
{
    cli_program(c, "kvpage", line, input);
}

/* --- looking at the output --- */

bool has(const char *text, const char *part) { return strstr(text, part) != NULL; }

double json_number(const char *text, const char *key)
{
    char quoted[64];
    const char *at;
    snprintf(quoted, sizeof quoted, "\"%s\": ", key);
    at = strstr(text, quoted);
    if (!at) fail_msg("no %s in %s", quoted, text);
    return strtod(at + strlen(quoted), NULL);
}
