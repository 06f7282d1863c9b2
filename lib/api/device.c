/*
 * Devices: what is there.
 */
#include "api/api.h"

#include <string.h>

kvp_status kvp_device_get(uint32_t index, kvp_device_info *out)
{
    uint32_t ordinal;
    const kvp__device *d = kvp__device_at(index, &ordinal);
    if (!d) return KVP_ERR_INVALID_ARG;
    kvp_device_info info;
    memset(&info, 0, sizeof info);
    d->describe(ordinal, &info);
    return kvp__result_out(out, &info, sizeof info, "device info", NULL);
}
