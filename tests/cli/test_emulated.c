/*
 * The command on a GPU, which is the emulator's (tests/emu): the same text as on the CPU, and clear
 * lines where it cannot be. Skipped where that command was not built.
 */
#include "cli.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>

#include <string.h>
#include <unistd.h>

static cli c;
static char command[4096];

static int find(void **state)
{
    (void)state;
    cli_built(command, sizeof command, "tests/emu/kvpage_emu");
    if (access(command, X_OK) != 0) command[0] = 0;
    return 0;
}

/* `%s` stands for the model. */
static void emulated(const char *format, const char *input)
{
    char line[512];
    if (!command[0]) skip();
    snprintf(line, sizeof line, format, cli_tiny());
    cli_program(&c, command, line, input);
}

static void expect_failure(const char *format, int code, const char *named)
{
    emulated(format, NULL);
    if (c.code != code || !has(c.err, named)) fail_msg("%s: code %d, '%s'", format, c.code, c.err);
    assert_ptr_equal(strchr(c.err, '\n'), c.err + strlen(c.err) - 1);
}

static void it_is_listed(void **state)
{
    (void)state;
    emulated("devices", NULL);
    assert_int_equal(c.code, 0);
    assert_true(has(c.out, "\ncuda:0   emulated GPU"));
    assert_false(has(c.out, "not usable"));
}

static void the_text_is_the_cpus(void **state)
{
    static char first[CLI_OUTPUT_MAX];
    (void)state;
    emulated("run %s abcd --max-tokens 12 --ignore-eos --quiet", NULL);
    assert_int_equal(c.code, 0);
    strcpy(first, c.out);
    assert_true(strlen(first) > 1);
    emulated("run %s abcd --max-tokens 12 --ignore-eos --quiet --device cuda", NULL);
    if (c.code != 0) fail_msg("code %d, '%s'", c.code, c.err);
    assert_string_equal(c.out, first);
    emulated("run %s --max-tokens 12 --ignore-eos --quiet --device cuda:0 --block 4 --n 2", "abcd");
    assert_int_equal(c.code, 0);
    assert_true(has(c.out, "--- 2 of 2\n"));
    assert_true(has(c.out, first));
}

static void bench_names_the_device(void **state)
{
    (void)state;
    emulated("bench %s --device cuda --repeats 1 --case decode --json --context 128", NULL);
    if (c.code != 0) fail_msg("code %d, '%s'", c.code, c.err);
    assert_true(has(c.out, "\"device\": \"cuda:0\""));
    assert_true(has(c.out, "\"gpu\": \"emulated GPU"));
    assert_false(has(c.out, "\"cpu\""));
    assert_false(has(c.out, "read_bytes_per_second"));
    assert_true(json_number(strstr(c.out, "\"case\": \"decode\""), "median") > 0);
}

static void what_cannot_be_is_said(void **state)
{
    (void)state;
    expect_failure("run %s abcd --device cuda:1", 1, "cuda:1: there is 1 CUDA card");
    expect_failure("run %s abcd --device cuda --cache 100G", 1, "bytes were asked");
    expect_failure("run %s abcd --device cuda --packed-file /tmp/packed", 2,
                   "--packed-file: only for the CPU");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_is_listed),
        cmocka_unit_test(the_text_is_the_cpus),
        cmocka_unit_test(bench_names_the_device),
        cmocka_unit_test(what_cannot_be_is_said),
    };
    return cmocka_run_group_tests_name("cli: emulated", tests, find, cli_clean);
}
