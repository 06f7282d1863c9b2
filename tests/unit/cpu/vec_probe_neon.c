/* See vec_probe.h. */
#include "vec_probe.h"

#if defined(__aarch64__)
#define KVP__LEVEL 4
#define PROBE probe_neon
#include "vec_probe_body.h"
#endif
