/*
 * Captures the answers of lanes.h: capture FILE. On a card they are what tests/emu/test_lanes.cc replays
 * from then on.
 */
#include "tests/emu/lanes_file.h"

#include "cuda/api.h"

#include <cstdio>

int main(int argc, char **argv)
{
    if (argc != 2) return 2;
    std::vector<uint32_t> answers = lanes_run();
    if (answers.empty()) return 1;
    char name[64] = "?";
    const kvp__cuda_found *found = kvp__cuda_load();
    if (found->cuda && found->cuda->cuInit(0) == 0)
        found->cuda->cuDeviceGetName(name, sizeof name, 0);
    if (!lanes_write(argv[1], name, answers)) {
        perror(argv[1]);
        return 1;
    }
    printf("%zu answers of %s\n", answers.size(), name);
    return 0;
}
