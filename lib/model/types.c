/*
 * The tensor types of GGUF: those we compute with, and the names of the others for messages.
 */
#include "model/model.h"

#include "model/gguf.h"

static const kvp__type_info types[] = {
    [KVP__F32] = {"F32", 1, 4},       [KVP__F16] = {"F16", 1, 2},
    [KVP__BF16] = {"BF16", 1, 2},     [KVP__Q4_0] = {"Q4_0", 32, 18},
    [KVP__Q4_1] = {"Q4_1", 32, 20},   [KVP__Q5_0] = {"Q5_0", 32, 22},
    [KVP__Q5_1] = {"Q5_1", 32, 24},   [KVP__Q8_0] = {"Q8_0", 32, 34},
    [KVP__Q2_K] = {"Q2_K", 256, 84},  [KVP__Q3_K] = {"Q3_K", 256, 110},
    [KVP__Q4_K] = {"Q4_K", 256, 144}, [KVP__Q5_K] = {"Q5_K", 256, 176},
    [KVP__Q6_K] = {"Q6_K", 256, 210},
};

/* Of types that exist and are not taken; people look for these names. */
static const char *const other_names[] = {
    [9] = "Q8_1",     [15] = "Q8_K",     [16] = "IQ2_XXS", [17] = "IQ2_XS", [18] = "IQ3_XXS",
    [19] = "IQ1_S",   [20] = "IQ4_NL",   [21] = "IQ3_S",   [22] = "IQ2_S",  [23] = "IQ4_XS",
    [24] = "I8",      [25] = "I16",      [26] = "I32",     [27] = "I64",    [28] = "F64",
    [29] = "IQ1_M",   [34] = "TQ1_0",    [35] = "TQ2_0",   [39] = "MXFP4",
};

kvp__type_info kvp__type_get(uint32_t type)
{
    kvp__type_info none = {0};
    return type < KVP__COUNT(types) ? types[type] : none;
}

const char *kvp__type_name(uint32_t type)
{
    if (kvp__type_get(type).name) return types[type].name;
    if (type < KVP__COUNT(other_names) && other_names[type]) return other_names[type];
    return "of no known name";
}
