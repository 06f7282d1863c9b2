/*
 * What the emulator's test and its kernels agree on.
 */
#ifndef KVP_TESTS_EMU_PROBE_H
#define KVP_TESTS_EMU_PROBE_H

#include <stdint.h>

struct probe_args {
    const void *in;
    void *out;
    uint32_t n;
    uint32_t mode; /* 0: right; else which mistake */
};

enum probe_mode {
    PROBE_RIGHT,
    PROBE_NO_BARRIER,
    PROBE_NO_SECOND_BARRIER,
    PROBE_NO_WAIT,
    PROBE_MISALIGNED_SHARED,
    PROBE_MISALIGNED_GLOBAL,
    PROBE_OUTSIDE_SHARED,
    PROBE_OUTSIDE_GLOBAL,
    PROBE_BEFORE_SHARED,
    PROBE_LANES_PART,
    PROBE_WARPS_PART,
    PROBE_LANE_LEAVES,
    PROBE_WARP_LEAVES,
    PROBE_NOT_IN_MASK,
    PROBE_SOURCE_NOT_IN_MASK,
    PROBE_COUNTS_DIFFER,
    PROBE_NO_SUCH_BARRIER,
    PROBE_NOBODY_COMES,
    PROBE_ENDLESS_COLLECTIVES,
    PROBE_ENDLESS_ATOMICS,
    PROBE_ENDLESS_LOOP,
    PROBE_NULL,
    PROBE_DEEP,
    PROBE_WRITTEN_BEFORE,
    PROBE_PLAIN_AND_ATOMIC,
    PROBE_TRANSPOSED,
    PROBE_BF16
};

#endif
