/*
 * Prints the hash of the fixed run of every model at every level this machine has, without CMocka,
 * so that it runs wherever the library does (an emulator, a board). Exit status 1: one of them is
 * not what is written down in tests/support/fixed_run.c.
 */
#include "support/fixed_run.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static int run_level(uint32_t cap)
{
    int wrong = 0;
    for (int i = 0; i < FIXED_MODELS; i++) {
        kvp_error err = { .size = sizeof err };
        uint8_t *file;
        kvp_model *m = fixed_open(i, cap, &file, &err);
        if (!m) {
            printf("level %" PRIu32 "  %s: %s\n", cap, fixed_models[i].name, err.text);
            return 1;
        }
        if (fixed_level(m) == cap) {
            uint64_t hash = fixed_run(m);
            int same = hash == fixed_models[i].hash;
            printf("level %" PRIu32 "  0x%016" PRIx64 "  %s%s\n", cap, hash, fixed_models[i].name,
                   same ? "" : "  WRONG");
            wrong += !same;
        }
        kvp_model_destroy(m);
        free(file);
    }
    return wrong;
}

int main(void)
{
    int wrong = 0;
    for (uint32_t cap = KVP_CPU_GENERIC; cap <= KVP_CPU_AMX; cap++) wrong += run_level(cap);
    return wrong ? 1 : 0;
}
