/*
 * The table of one level's kernels. See kernels.h.
 */
#include "cpu/kernels.h"

const kvp__kernels KVP__AT(kernels) = {
    .level = KVP__LEVEL,
#define FIELD(name) .name = KVP__AT(name),
    KVP__KERNEL_LIST(FIELD)
#undef FIELD
};
