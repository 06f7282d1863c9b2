/*
 * The emulator's operations against those of a card, as captured in lanes.bin by tests/gpu (or in
 * the file KVPAGE_LANES). Without that file nobody has seen a card yet, and the replay is skipped;
 * the rest shows that it would find something.
 */
#include "tests/emu/lanes_file.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
extern "C" {
#include <cmocka.h>
}

#include <set>

#include <unistd.h>

static void replay(const std::vector<uint32_t> &card, const std::vector<uint32_t> &ours)
{
    for (uint32_t op = 0; op < LANES_N; op++)
        for (uint32_t i = 0; i < LANES_OF_OP; i++) {
            uint32_t theirs = card[op * LANES_OF_OP + i], mine = ours[op * LANES_OF_OP + i];
            if (!lanes_agree(op, theirs, mine))
                fail_msg("%s, round %u, lane %u, word %u (given %08x): %08x on the card, %08x here",
                         lanes_name(op), i / 128, i / 4 % 32, i % 4, lanes_input(op, i), theirs,
                         mine);
        }
}

static void answers_of_a_card(void **)
{
    std::string name;
    std::vector<uint32_t> card, ours = lanes_run();
    assert_int_equal(ours.size(), LANES_N * LANES_OF_OP);
    const char *path = getenv("KVPAGE_LANES");
    if (!path) path = KVPAGE_TESTS "/emu/lanes.bin";
    if (access(path, R_OK)) skip();
    assert_true(lanes_read(path, &name, &card));
    replay(card, ours);
}

/* Answers differ enough among themselves that a wrong one would be seen. */
static void every_operation_does_something(void **)
{
    std::vector<uint32_t> a = lanes_run(), b = lanes_run();
    assert_int_equal(a.size(), LANES_N * LANES_OF_OP);
    assert_memory_equal(a.data(), b.data(), a.size() * 4);
    for (uint32_t op = 0; op < LANES_N; op++) {
        auto first = a.begin() + op * LANES_OF_OP;
        std::set<uint32_t> answers(first, first + LANES_OF_OP);
        if (answers.size() < 8 && op != LANES_cp_async16_off) /* which gives zeros */
            fail_msg("%s: %zu answers", lanes_name(op), answers.size());
    }
}

static void exact_means_every_bit(void **)
{
    assert_true(lanes_agree(LANES_add_rn, 0x3f800000u, 0x3f800000u));
    assert_false(lanes_agree(LANES_add_rn, 0x3f800000u, 0x3f800001u));
    assert_true(lanes_agree(LANES_ex2, 0x3f800000u, 0x3f800001u));
    assert_false(lanes_agree(LANES_ex2, 0x3f800000u, 0x3f800010u));
    assert_false(lanes_agree(LANES_ex2, 0x3f800000u, 0x7fc00000u));
    assert_false(lanes_agree(LANES_ldsm4, 0x7fc00001u, 0x7fc00000u));
    assert_true(lanes_agree(LANES_add_rn, 0x7fc00001u, 0xffc00000u));
    assert_true(lanes_agree(LANES_pack_f16, 0x7fff3c00u, 0x7e003c00u));
    assert_false(lanes_agree(LANES_pack_f16, 0x3c003c00u, 0x3c003c01u));
    assert_false(lanes_agree(LANES_pack_bf16, 0x7c003c00u, 0x7c013c00u));
}

static void files_come_back(void **)
{
    char path[] = "/tmp/kvpage-lanes-XXXXXX";
    int fd = mkstemp(path);
    std::string name;
    std::vector<uint32_t> back, some(LANES_N * LANES_OF_OP);
    for (size_t i = 0; i < some.size(); i++) some[i] = (uint32_t)i * 77;
    assert_true(fd >= 0);
    assert_true(lanes_write(path, "a card", some));
    assert_true(lanes_read(path, &name, &back));
    assert_string_equal(name.c_str(), "a card");
    assert_true(back == some);
    assert_int_equal(ftruncate(fd, 1000), 0);
    assert_false(lanes_read(path, &name, &back));
    close(fd);
    unlink(path);
}

int main()
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_of_a_card),
        cmocka_unit_test(every_operation_does_something),
        cmocka_unit_test(exact_means_every_bit),
        cmocka_unit_test(files_come_back),
    };
    return cmocka_run_group_tests(tests, nullptr, nullptr);
}
