/* See vec_probe.h. */
#define KVP__LEVEL 1
#define PROBE probe_generic
#include "vec_probe_body.h"
