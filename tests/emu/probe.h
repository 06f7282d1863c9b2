#ifndef KVP_TESTS_EMU_PROBE_H
#define KVP_TESTS_EMU_PROBE_H

#include <stdint.h>

struct probe_args {
    const float *in;
    float *out;
    uint32_t n;
    uint32_t mode;
};

#endif
