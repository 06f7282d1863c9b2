/*
 * `kvpage bench` on tiny random models: every case runs or says why not, JSON and page are what
 * they should be, refusals come before anything is measured. No figure is judged.
 */
#define _GNU_SOURCE
#include "cli.h"
#include "wellformed.h"

#include "support/gguf_writer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

static cli c;
static char page[CLI_OUTPUT_MAX];
static const char *const cases[] = {"prefill-512", "decode", "deep",     "16x128", "32-shared",
                                    "32-own",      "mixed",  "overhead", "start"};
enum { N_CASES = sizeof cases / sizeof cases[0] };

/* --- models and files --- */

static const char *model(const char *name, uint32_t context, const char *says)
{
    gw_model tiny = {.head_dim = 16, .context = context, .tokenizer = 1, .seed = 5};
    const char *path;
    gw w;
    size_t bytes;
    uint8_t *data;
    gw_init(&w);
    gw_skip(&w, "general.name");
    gw_tiny_into(&w, &tiny);
    gw_str(&w, "general.name", says);
    data = gw_finish(&w, &bytes);
    path = cli_file(name, data, bytes);
    free(data);
    return path;
}

/* Every case fits, and none is long. */
static const char *roomy(void)
{
    static const char *path;
    if (!path) path = model("roomy.gguf", 2300, "a \"tiny\" <model> & \xff\x01 more");
    return path;
}

/* A path beside the models at which nothing is. */
static const char *absent(void)
{
    const char *path = cli_file("page.html", "", 0);
    unlink(path);
    return path;
}

static bool exists(const char *path) { return access(path, F_OK) == 0; }

static void read_page(const char *path)
{
    FILE *f = fopen(path, "rb");
    size_t n;
    assert_non_null(f);
    n = fread(page, 1, sizeof page - 1, f);
    page[n] = 0;
    fclose(f);
}

static void bench(const char *path, const char *options)
{
    char line[1024];
    snprintf(line, sizeof line, "bench %s %s", path, options);
    cli_run(&c, line, NULL);
    if (c.code != 0) fail_msg("kvpage %s: code %d, %s", line, c.code, c.err);
    assert_string_equal(c.err, ""); /* it is no terminal: no progress */
}

/* --- the cases --- */

static void every_case_runs(void **state)
{
    (void)state;
    bench(roomy(), "--repeats 2 --json");
    if (not_json(c.out)) fail_msg("no JSON from here on: %s", not_json(c.out));
    assert_false(has(c.out, "left_out"));
    assert_true(json_number(c.out, "repeats") == 2);
    for (size_t i = 0; i < N_CASES; i++) {
        char key[48];
        const char *at, *measure;
        snprintf(key, sizeof key, "\"case\": \"%s\"", cases[i]);
        at = strstr(c.out, key);
        if (!at) fail_msg("no %s in %s", key, c.out);
        measure = strstr(at, "\"measures\": [");
        assert_non_null(measure);
        assert_true(json_number(measure, "median") > 0);
        assert_true(json_number(measure, "least") <= json_number(measure, "median"));
        assert_true(json_number(measure, "most") >= json_number(measure, "median"));
    }
    assert_true(json_number(strstr(c.out, "\"case\": \"mixed\""), "long_prompt_tokens") == 2299);
    assert_true(json_number(strstr(c.out, "\"case\": \"decode\""), "sequences") == 1);
    assert_true(json_number(strstr(c.out, "\"case\": \"16x128\""), "prompt_tokens") == 128);
}

/* What a step must read over what is read in a second; nothing of it without a bandwidth. */
static void limit_and_share_are_those_of_the_bytes(void **state)
{
    double bandwidth, bytes, limit, median;
    (void)state;
    bench(roomy(), "--repeat 1 --json --case decode");
    if (!has(c.out, "read_bytes_per_second")) return; /* too little memory to measure it */
    bandwidth = json_number(c.out, "read_bytes_per_second");
    bytes = json_number(c.out, "weight_bytes_per_step") +
            json_number(c.out, "kv_bytes_per_token") * (16 + 1 + 2 + 24);
    limit = json_number(c.out, "limit");
    median = json_number(c.out, "median");
    assert_true(limit / (bandwidth / bytes) > 0.9999 && limit / (bandwidth / bytes) < 1.0001);
    assert_true(json_number(c.out, "share") / (median / limit) > 0.9999);
    assert_true(json_number(c.out, "share") / (median / limit) < 1.0001);
}

static void what_does_not_fit_is_left_out(void **state)
{
    (void)state;
    bench(cli_tiny(), "--repeats 1");
    assert_true(has(c.out, "prefill-512  left out: needs a context of 513 tokens; there are 512"));
    assert_true(has(c.out, "32-shared    left out: "));
    assert_true(has(c.out, "32-own       left out: "));
    assert_true(has(c.out, "\ndecode "));
    assert_true(has(c.out, "(469 tokens here, which is what the context allows)"));
    bench(cli_tiny(), "--repeats 1 --cache 40K --case 16x128 --case decode --json");
    if (not_json(c.out)) fail_msg("no JSON from here on: %s", not_json(c.out));
    assert_true(has(strstr(c.out, "\"case\": \"16x128\""), "KV cache; --cache allows 40.00 KiB"));
    assert_true(json_number(strstr(c.out, "\"case\": \"decode\""), "median") > 0);
    bench(roomy(), "--repeats 1 --context 128 --case deep --case mixed");
    assert_true(has(c.out, "deep         left out: "));
    assert_true(has(c.out, "mixed        left out: "));
}

static void only_the_cases_that_were_named(void **state)
{
    (void)state;
    bench(roomy(), "--repeats 1 --case 16x128 --case=start --threads 1 --kv f32 --block 32");
    assert_true(has(c.out, "\n16x128 "));
    assert_true(has(c.out, "\nstart "));
    assert_true(has(c.out, ", 1 thread"));
    assert_false(has(c.out, "prefill-512"));
    cli_run(&c, "bench --list", NULL);
    assert_int_equal(c.code, 0);
    for (size_t i = 0; i < N_CASES; i++) assert_true(has(c.out, cases[i]));
}

/* --- the page --- */

static void the_page_has_the_rows(void **state)
{
    char options[512];
    const char *path = absent();
    (void)state;
    snprintf(options, sizeof options, "--repeats 2 --html %s", path);
    bench(roomy(), options);
    read_page(path);
    if (not_xml(page)) fail_msg("not well formed from here on: %.200s", not_xml(page));
    for (size_t i = 0; i < N_CASES; i++) {
        char small[32];
        snprintf(small, sizeof small, "<small>%s", cases[i]);
        if (!has(page, small)) fail_msg("%s has no row", cases[i]);
    }
    assert_true(has(page, "a &quot;tiny&quot; &lt;model&gt; &amp; &#xfffd;? more"));
    assert_true(has(page, "<th scope=\"col\">"));
    assert_true(has(page, "<title id=\"gaps-t\">"));
    assert_true(has(page, "class=\"dot\""));
    assert_true(has(page, "prefers-color-scheme:dark"));
    assert_false(has(page, "<script"));
    assert_false(has(page, "http")); /* nothing to fetch */
    assert_false(has(page, "nan"));
    assert_false(has(page, "inf\""));
}

/* A page that was there is replaced whole; what was left out stands in the table, too. */
static void a_page_is_replaced(void **state)
{
    static char old[200000];
    char options[512];
    const char *path;
    (void)state;
    memset(old, '<', sizeof old);
    path = cli_file("page.html", old, sizeof old);
    snprintf(options, sizeof options, "--repeats 1 --case 32-own --case decode --html %s", path);
    bench(cli_tiny(), options);
    read_page(path);
    if (not_xml(page)) fail_msg("not well formed from here on: %.200s", not_xml(page));
    assert_true(has(page, "left out: needs a context"));
    unlink(path);
}

/* --- refusals --- */

static void refused(const char *line, int code, const char *named)
{
    cli_run(&c, line, NULL);
    if (c.code != code || !has(c.err, named))
        fail_msg("kvpage %s: code %d, '%s'", line, c.code, c.err);
    assert_string_equal(c.out, "");
    assert_int_equal(strncmp(c.err, "kvpage", 6), 0);
    assert_ptr_equal(strchr(c.err, '\n'), c.err + strlen(c.err) - 1);
}

static void bad_options_are_refused(void **state)
{
    (void)state;
    refused("bench", 2, "MODEL");
    refused("bench a b", 2, "'b'");
    refused("bench m --case fast", 2, "--case: 'fast' is none of prefill-512, decode, deep");
    refused("bench m --case", 2, "--case needs a value");
    refused("bench m --repeats 0", 2, "--repeats: '0'");
    refused("bench m --repeat 100", 2, "--repeat: '100'");
    refused("bench m --threads 0", 2, "--threads: '0'");
    refused("bench m --html", 2, "--html needs a value");
    refused("bench m --list=all", 2, "--list takes no value");
    refused("bench m --htm x", 2, "did you mean --html?");
}

/* The model is not even looked for. */
static void an_unwritable_page_comes_first(void **state)
{
    char line[512];
    const char *path = absent();
    (void)state;
    refused("bench /nowhere/model.gguf --html /nowhere/page.html", 1, "/nowhere/page.html");
    refused("bench /nowhere/model.gguf --html /", 1, "kvpage: /: ");
    snprintf(line, sizeof line, "bench /nowhere/model.gguf --html %s", path);
    refused(line, 1, "/nowhere/model.gguf");
    assert_false(exists(path));
}

static void a_failure_keeps_the_old_page(void **state)
{
    char line[512];
    const char *path = cli_file("page.html", "old", 3);
    (void)state;
    snprintf(line, sizeof line, "bench /nowhere/model.gguf --html %s", path);
    refused(line, 1, "/nowhere/model.gguf");
    read_page(path);
    assert_string_equal(page, "old");
    unlink(path);
}

/* --- Ctrl-C, and the progress line --- */

static void ctrl_c_leaves_nothing(void **state)
{
    char line[512];
    const char *path = absent();
    (void)state;
    snprintf(line, sizeof line, "bench %s --repeats 99 --html %s", roomy(), path);
    c.interrupt_ms = 50;
    cli_run(&c, line, NULL);
    c.interrupt_ms = 0;
    assert_int_equal(c.code, 130);
    assert_false(exists(path));
    assert_string_equal(c.err, "");
}

static int terminal(int *far)
{
    struct winsize size = {.ws_row = 24, .ws_col = 80};
    int near = posix_openpt(O_RDWR | O_NOCTTY);
    if (near < 0 || grantpt(near) || unlockpt(near)) return -1;
    *far = open(ptsname(near), O_RDWR | O_NOCTTY);
    ioctl(*far, TIOCSWINSZ, &size);
    return near;
}

/* Until `wanted` has been read, or half a minute has passed without it. */
static bool shows(int fd, const char *wanted)
{
    size_t n = 0;
    for (int i = 0; i < 1500 && n < sizeof page - 1; i++) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        ssize_t got;
        if (poll(&p, 1, 20) < 1) continue;
        got = read(fd, page + n, sizeof page - 1 - n);
        if (got <= 0) return false;
        n += (size_t)got;
        page[n] = 0;
        if (has(page, wanted)) return true;
    }
    return false;
}

static void a_terminal_sees_how_far_it_is(void **state)
{
    char path[512];
    int far = -1, near = terminal(&far), status;
    const char *file = roomy();
    pid_t child;
    bool seen;
    (void)state;
    if (near < 0 || far < 0) skip();
    cli_built(path, sizeof path, "kvpage");
    child = fork();
    if (child == 0) {
        int nothing = open("/dev/null", O_WRONLY);
        dup2(nothing, 1);
        dup2(far, 2);
        execl(path, path, "bench", file, "--case", "mixed", "--repeats", "99", (char *)NULL);
        _exit(127);
    }
    close(far);
    seen = shows(near, " of 99 ");
    kill(child, SIGINT);
    close(near);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(seen);
    assert_true(has(page, "\rmixed       run "));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_case_runs),
        cmocka_unit_test(limit_and_share_are_those_of_the_bytes),
        cmocka_unit_test(what_does_not_fit_is_left_out),
        cmocka_unit_test(only_the_cases_that_were_named),
        cmocka_unit_test(the_page_has_the_rows),
        cmocka_unit_test(a_page_is_replaced),
        cmocka_unit_test(bad_options_are_refused),
        cmocka_unit_test(an_unwritable_page_comes_first),
        cmocka_unit_test(a_failure_keeps_the_old_page),
        cmocka_unit_test(ctrl_c_leaves_nothing),
        cmocka_unit_test(a_terminal_sees_how_far_it_is),
    };
    return cmocka_run_group_tests_name("cli: bench", tests, NULL, cli_clean);
}
