/*
 * The contract of a step (B92): lengths beyond the table, ids beyond the pool, rows out of order are
 * refused before a device sees them.
 */
#include "device/device.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

enum { ROWS = 33, BLOCKS = 8 };

static kvp__layout layout = {.n_groups = 1, .block_tokens = 16, .blocks = BLOCKS};
static int32_t tokens[ROWS];
static uint32_t positions[ROWS], outputs[1], table[3];
static kvp__work_seq seq;
static kvp__copy copy;
static kvp__work work;

static int reset(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < ROWS; i++) positions[i] = i;
    memcpy(table, (uint32_t[]){5, 2, 7}, sizeof table);
    outputs[0] = ROWS - 1;
    copy = (kvp__copy){.src = 1, .dst = 7, .tokens = 3};
    seq = (kvp__work_seq){.n_rows = ROWS, .n_blocks = 3, .tables = {table}};
    work = (kvp__work){.n_rows = ROWS, .n_seqs = 1, .n_outputs = 1, .n_copies = 1,
                       .tokens = tokens, .positions = positions, .seqs = &seq, .copies = &copy,
                       .outputs = outputs};
    return 0;
}

static void refused(const char *word)
{
    kvp_error e = {.size = sizeof e};
    assert_int_equal(kvp__work_check(&work, &layout, &e), KVP_ERR_INTERNAL);
    if (!strstr(e.text, word)) fail_msg("\"%s\" does not say \"%s\"", e.text, word);
}

static void case_b92(void **state)
{
    (void)state;
    assert_int_equal(kvp__work_check(&work, &layout, NULL), KVP_OK);
    seq.n_blocks = 2; /* 33 tokens, two columns of 16 */
    refused("33 tokens long, its table covers 32");
    seq.n_blocks = 3;
    static const uint32_t bad[] = {UINT32_MAX, BLOCKS, INT32_MAX};
    for (int i = 0; i < 3; i++)
        for (int at = 0; at < 3; at++) {
            uint32_t good = table[at];
            table[at] = bad[i];
            refused("block table");
            table[at] = good;
        }
    seq.first_pos = UINT32_MAX; /* the sum must not wrap */
    refused("its table covers");
}

static void own_rows(void **state)
{
    (void)state;
    seq.n_rows = ROWS - 1;
    refused("rows");
    seq.n_rows = ROWS + 1;
    refused("rows");
    seq.n_rows = ROWS;
    positions[4] = 9;
    refused("row 4");
    positions[4] = 4;
    outputs[0] = ROWS;
    refused("output 0");
}

static void own_copies(void **state)
{
    (void)state;
    copy.dst = BLOCKS;
    refused("copy 0");
    copy.dst = copy.src;
    refused("copy 0");
    copy.dst = 7;
    copy.tokens = 17;
    refused("copy 0");
    copy.tokens = 16;
    copy.group = 1;
    refused("copy 0");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(case_b92, reset),
        cmocka_unit_test_setup(own_rows, reset),
        cmocka_unit_test_setup(own_copies, reset),
    };
    return cmocka_run_group_tests_name("device/work", tests, NULL, NULL);
}
