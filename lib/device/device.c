/*
 * The registry of devices: one table, in the order kvp_device_get shows. A kind of device of which
 * there is none here is listed all the same and says why (describe), so that a host can tell "not
 * built" from "not there".
 */
#include "device/device.h"

#include <string.h>

/* Not by the headers of their rooms, each of which says what its kvp__store is. */
extern const kvp__device kvp__cpu_device, kvp__cuda_device;

static const kvp__device *const built_in[] = {&kvp__cpu_device, &kvp__cuda_device};
static const kvp__device *_Atomic added;

void kvp__device_use(const kvp__device *extra) { atomic_store(&added, extra); }

/* The i-th kind, or NULL. */
static const kvp__device *kind(uint32_t i)
{
    if (i < KVP__COUNT(built_in)) return built_in[i];
    return i == KVP__COUNT(built_in) ? atomic_load(&added) : NULL;
}

const kvp__device *kvp__device_at(uint32_t index, uint32_t *ordinal)
{
    const kvp__device *d;
    for (uint32_t i = 0; (d = kind(i)); i++) {
        uint32_t n = d->count();
        uint32_t entries = n ? n : 1;
        if (index < entries) {
            *ordinal = index;
            return d;
        }
        index -= entries;
    }
    return NULL;
}

/* A decimal number below `limit`, written the one way there is: no sign, no zero in front. */
static bool parse_ordinal(const char *text, uint32_t limit, uint32_t *out)
{
    uint32_t n = 0;
    if (text[0] == '\0' || (text[0] == '0' && text[1])) return false;
    for (; *text; text++) {
        if (*text < '0' || *text > '9') return false;
        n = n * 10 + (uint32_t)(*text - '0');
        if (n >= limit) return false;
    }
    *out = n;
    return true;
}

static bool is_named(const kvp__device *d, const char *name, uint32_t *ordinal)
{
    size_t n = strlen(d->name);
    if (strncmp(name, d->name, n) != 0) return false;
    if (name[n] == '\0') {
        *ordinal = 0;
        return true;
    }
    return name[n] == ':' && d->max_ordinals > 1 &&
           parse_ordinal(name + n + 1, d->max_ordinals, ordinal);
}

const kvp__device *kvp__device_find(const char *name, uint32_t *ordinal)
{
    const kvp__device *d;
    if (!name) name = "cpu";
    for (uint32_t i = 0; (d = kind(i)); i++)
        if (is_named(d, name, ordinal)) return d;
    return NULL;
}
