/*
 * A card's answers, and ours: lanes.cc. lanes.h says what the operations are.
 */
#ifndef TESTS_EMU_LANES_FILE_H
#define TESTS_EMU_LANES_FILE_H

#include "tests/emu/lanes.h"

#include <string>
#include <vector>

const char *lanes_name(uint32_t operation);
/* Word `at` of an operation's LANES_OF_OP. */
uint32_t lanes_input(uint32_t operation, uint32_t at);
/* The answers of all operations one after the other, from what emu_launch runs on; none: it failed. */
std::vector<uint32_t> lanes_run();
/* Whether two answers are the same, as near as the operation promises. */
bool lanes_agree(uint32_t operation, uint32_t card, uint32_t ours);

/* False: not written; not there, or not such a file. */
bool lanes_write(const char *path, const char *card, const std::vector<uint32_t> &answers);
bool lanes_read(const char *path, std::string *card, std::vector<uint32_t> *answers);

#endif
