/*
 * Hooks that count what the library takes, and refuse the n-th allocation. From one thread only.
 */
#ifndef TESTS_SUPPORT_HEAP_H
#define TESTS_SUPPORT_HEAP_H

#include "base/base.h"

typedef struct heap {
    kvp__hooks hooks;  /* internal form, with `user` pointing here */
    kvp_hooks given;   /* the same for the public interface */
    uint64_t live, peak; /* bytes */
    uint64_t blocks;     /* not freed */
    uint64_t calls;      /* of alloc, refused ones included */
    uint64_t refuse;     /* which call is refused, from 1; 0: none */
    uint64_t mismatches; /* frees whose size is not the one allocated */
} heap;

void heap_init(heap *h);

#endif
