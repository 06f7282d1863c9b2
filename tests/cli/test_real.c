/* The command with a real model, named by KVPAGE_TEST_SMOLLM2; skipped without. */
#include "cli.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

static cli c;

static void real(const char *format, const char *input)
{
    char line[1024];
    if (!cli_real()) skip();
    snprintf(line, sizeof line, format, cli_real());
    cli_run(&c, line, input);
    if (c.code != 0) fail_msg("kvpage %s: code %d, %s", line, c.code, c.err);
}

static void it_knows_the_capital(void **state)
{
    (void)state;
    real("run %s The~capital~of~France~is --max-tokens 8", NULL);
    assert_true(has(c.out, "Paris"));
}

static void it_tells_what_it_is(void **state)
{
    (void)state;
    real("inspect %s --json", NULL);
    assert_true(has(c.out, "\"architecture\": \"llama\""));
    assert_true(has(c.out, "\"chat_format\": \"chatml\""));
    assert_true(json_number(c.out, "layers") == 30);
    assert_true(json_number(c.out, "kv_bytes_per_token") == 2 * 30 * 3 * 64 * 2);
}

/* The second turn finds the first one's tokens. */
static void a_conversation_reuses_its_turns(void **state)
{
    const char *last;
    (void)state;
    real("chat %s --max-tokens 16 --system You~are~brief.",
         "Name a colour.\nName another one.\n");
    last = strstr(c.err, "tokens reused in all");
    assert_non_null(last);
    while (last > c.err && last[-1] != '[') last--;
    assert_true(strtod(last, NULL) >= 20);
}

static void special_tokens_in_a_message_stay_text(void **state)
{
    static char plain[CLI_OUTPUT_MAX];
    (void)state;
    real("run %s <|im_end|> --json --max-tokens 1", NULL);
    strcpy(plain, c.out);
    real("run %s <|im_end|> --json --max-tokens 1 --special", NULL);
    assert_true(json_number(strstr(plain, "usage"), "prompt") >
                json_number(strstr(c.out, "usage"), "prompt"));
}

static void a_stop_text_ends_it(void **state)
{
    (void)state;
    real("run %s Count:~one,~two,~three, --max-tokens 40 --stop , --json", NULL);
    assert_true(has(c.out, "\"ending\": \"stop\""));
    assert_true(json_number(c.out, "generated") < 40);
}

static void sampling_repeats_by_its_seed(void **state)
{
    static char first[CLI_OUTPUT_MAX];
    (void)state;
    real("run %s Once~upon~a~time --max-tokens 16 --temp 0.9 --top-k 40 --top-p 0.9 --min-p 0.05 "
         "--seed 3",
         NULL);
    strcpy(first, c.out);
    real("run %s Once~upon~a~time --max-tokens 16 --temp 0.9 --top-k 40 --top-p 0.9 --min-p 0.05 "
         "--seed 3",
         NULL);
    assert_string_equal(c.out, first);
    real("run %s Once~upon~a~time --max-tokens 16 --temp 0.9 --top-k 40 --top-p 0.9 --min-p 0.05 "
         "--seed 4",
         NULL);
    assert_string_not_equal(c.out, first);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_knows_the_capital),
        cmocka_unit_test(it_tells_what_it_is),
        cmocka_unit_test(a_conversation_reuses_its_turns),
        cmocka_unit_test(special_tokens_in_a_message_stay_text),
        cmocka_unit_test(a_stop_text_ends_it),
        cmocka_unit_test(sampling_repeats_by_its_seed),
    };
    return cmocka_run_group_tests_name("cli: a real model", tests, NULL, NULL);
}
