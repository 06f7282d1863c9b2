/* The examples run and say what they should: all with the real model, some with a tiny one. */
#include "cli.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static cli c;

static void example(const char *program, const char *model, const char *rest)
{
    char line[1024];
    snprintf(line, sizeof line, "%s %s", model, rest);
    cli_program(&c, program, line, NULL);
    if (c.code != 0) fail_msg("%s %s: code %d, %s", program, line, c.code, c.err);
}

/* It compares itself with plain full attention, and fails if that differs. */
static void own_model(void **state)
{
    (void)state;
    example("examples/own_model", "", "");
    assert_true(has(c.out, "from full attention: "));
    assert_true(has(c.out, "sequence 7 ended"));
}

static void whole_model(void **state)
{
    (void)state;
    example("examples/whole_model", cli_tiny(), "abcd");
    assert_true(has(c.out, "\n"));
    if (cli_real()) {
        example("examples/whole_model", cli_real(), "The~capital~of~France~is");
        assert_true(has(c.out, "Paris"));
    }
    cli_program(&c, "examples/whole_model", "/nowhere.gguf x", NULL);
    assert_int_equal(c.code, 1);
    assert_true(has(c.err, "/nowhere.gguf"));
}

static void fork_samples(void **state)
{
    (void)state;
    example("examples/fork_samples", cli_tiny(), "abcdefghijklmnopqrstuvwxyz 4");
    assert_true(has(c.out, "--- 4\n"));
    assert_true(has(c.out, "blocks copied on write"));
}

static void epoll_loop(void **state)
{
    (void)state;
    if (!cli_real()) skip();
    example("examples/epoll_loop", cli_real(), "");
    for (int i = 0; i < 3; i++) {
        char end[16];
        snprintf(end, sizeof end, "%d .\n", i);
        assert_true(has(c.out, end));
    }
    assert_true(has(c.out, "the timer fired"));
}

static void demo(void **state)
{
    (void)state;
    if (!cli_real()) skip();
    example("examples/demo", cli_real(), "12");
    assert_true(has(c.out, "8 users, 11 answers"));
    assert_true(has(c.out, "Hana 4"));
    assert_true(has(c.out, "from the prefix cache"));
}

static void python_with_cffi_alone(void **state)
{
    const char *python = getenv("KVPAGE_TEST_PYTHON"); /* one that has cffi, if not the system's */
    char script[512], library[512], line[1400];
    (void)state;
    if (!python) python = "/usr/bin/python3";
    /* A sanitizer's runtime would have to be loaded before Python itself. */
    if (!cli_real() || access(python, X_OK) || getenv("KVPAGE_SANITIZED")) skip();
    cli_program(&c, python, "-c import~cffi", NULL);
    if (c.code != 0) skip();
    cli_built(library, sizeof library, "libkvpage.so");
    snprintf(script, sizeof script, "%s/../examples/ffi.py", KVPAGE_TESTS);
    snprintf(line, sizeof line, "%s %s %s What~is~the~capital~of~France?", script, library,
             cli_real());
    cli_program(&c, python, line, NULL);
    if (c.code != 0) fail_msg("ffi.py: code %d, %s", c.code, c.err);
    assert_true(has(c.out, "[37 tokens of prompt, "));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(own_model),    cmocka_unit_test(whole_model),
        cmocka_unit_test(fork_samples), cmocka_unit_test(epoll_loop),
        cmocka_unit_test(demo),         cmocka_unit_test(python_with_cffi_alone),
    };
    return cmocka_run_group_tests_name("cli: examples", tests, NULL, cli_clean);
}
