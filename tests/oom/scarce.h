/*
 * A system that refuses one chosen request: the n-th of allocations (by the hooks), mappings,
 * threads and event descriptors, counted together. The test program is linked with
 * --wrap=mmap,munmap,pthread_create,eventfd so that the library's own calls come here.
 */
#ifndef TESTS_OOM_SCARCE_H
#define TESTS_OOM_SCARCE_H

#include <kvpage.h>

#include <stdbool.h>
#include <stdint.h>

/* Forgets all counts; request number `n` from now on will be refused once, 0: none. */
void scarce_reset(uint64_t n);
/* Requests seen since, and whether the chosen one has come. */
uint64_t scarce_requests(void);
bool scarce_refused(void);
/* Allocations and mappings not given back, `released` calls, and open descriptors and threads of
 * the process. */
int64_t scarce_live(void);
uint32_t scarce_released(void);
uint32_t scarce_descriptors(void);
uint32_t scarce_threads(void);

extern const kvp_hooks scarce_hooks;

#endif
