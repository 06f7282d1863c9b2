/*
 * Status names and texts, versions, and the _init functions of public structs.
 */
#include "api/api.h"

#include <string.h>

const char *kvp_status_name(kvp_status status)
{
    switch (status) {
#define NAME(name, number, text) \
    case number: return #name;
        KVP_STATUS_LIST(NAME)
#undef NAME
    default: return "KVP_UNKNOWN";
    }
}

const char *kvp_status_text(kvp_status status)
{
    switch (status) {
#define TEXT(name, number, text) \
    case number: return text;
        KVP_STATUS_LIST(TEXT)
#undef TEXT
    default: return "a status that this library does not know";
    }
}

uint32_t kvp_version(void)
{
    return KVP_VERSION_MAJOR << 16 | KVP_VERSION_MINOR << 8 | KVP_VERSION_PATCH;
}

int32_t kvp_feature(const char *name)
{
    static const char *const names[] = {"cpu", "own-model", "gguf", "chat"};
    for (size_t i = 0; name && i < KVP__COUNT(names); i++)
        if (strcmp(name, names[i]) == 0) return 1;
    uint32_t ordinal;
    const kvp__device *cuda = kvp__device_find("cuda", &ordinal);
    return name && strcmp(name, "cuda") == 0 && cuda && (!cuda->built || cuda->built());
}

void kvp__init(void *out, size_t size)
{
    if (!out || size < sizeof(uint32_t)) return;
    memset(out, 0, size);
    uint32_t stated = size > UINT32_MAX ? UINT32_MAX : (uint32_t)size;
    memcpy(out, &stated, sizeof stated);
}

#define INIT(type)                                        \
    void type##_init(type *out, size_t size) { kvp__init(out, size); }

INIT(kvp_error)
INIT(kvp_device_info)
INIT(kvp_hooks)
INIT(kvp_team_options)
INIT(kvp_model_options)
INIT(kvp_reader)
INIT(kvp_geometry)
INIT(kvp_place_options)
INIT(kvp_model_info)
INIT(kvp_tensor_info)
INIT(kvp_plan_options)
INIT(kvp_plan_result)
INIT(kvp_pool_options)
INIT(kvp_pool_stats)
INIT(kvp_sampling)
INIT(kvp_seq_options)
INIT(kvp_seq_info)
INIT(kvp_batch_options)
INIT(kvp_event)
INIT(kvp_batch_stats)
INIT(kvp_view)
INIT(kvp_view_group)
INIT(kvp_attention_args)

kvp_status kvp__options_in(void *out, size_t size, const void *in, const char *what,
                           kvp_error *err)
{
    memset(out, 0, size);
    if (!in || kvp__struct_in(out, size, in)) return KVP_OK;
    uint32_t stated;
    memcpy(&stated, in, sizeof stated);
    return kvp__fail(err, KVP_ERR_INVALID_ARG,
                     "%s: size %u is not set, or bytes beyond what this version knows are not zero",
                     what, (unsigned)stated);
}

kvp_status kvp__result_out(void *out, const void *in, size_t size, const char *what,
                           kvp_error *err)
{
    if (!out) return kvp__fail(err, KVP_ERR_INVALID_ARG, "%s: no struct to fill", what);
    if (kvp__struct_out(out, in, size)) return KVP_OK;
    return kvp__fail(err, KVP_ERR_INVALID_ARG, "%s: size is not set", what);
}

kvp_status kvp__bad_handle(kvp_error *err, const char *what)
{
    return kvp__fail(err, KVP_ERR_INVALID_HANDLE, "not a live %s handle", what);
}

kvp_status kvp__refused(kvp_error *err, kvp_status status, const char *what)
{
    if (status == KVP_ERR_INVALID_HANDLE) return kvp__bad_handle(err, what);
    return kvp__fail(err, status, "%s", kvp_status_text(status));
}
