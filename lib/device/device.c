/*
 * The registry of devices: one table, in the order kvp_device_get shows. A device that cannot run
 * here is listed all the same and says why (describe), so that a host can tell "not built" from
 * "not there".
 */
#include "device/device.h"

#include "cpu/cpu.h"

#include <string.h>

static const kvp__device *const devices[] = {&kvp__cpu_device};

const kvp__device *kvp__device_at(uint32_t index)
{
    return index < KVP__COUNT(devices) ? devices[index] : NULL;
}

const kvp__device *kvp__device_find(const char *name)
{
    if (!name) name = "cpu";
    for (uint32_t i = 0; i < KVP__COUNT(devices); i++)
        if (strcmp(devices[i]->name, name) == 0) return devices[i];
    return NULL;
}
