/*
 * The emulator: kernels of cuda/kernels run on the CPU, each CUDA thread as a fiber, and everything
 * that a GPU would leave undefined ends the grid with a message. docs/internals/emulator.md says
 * how it works, what it proves and what it cannot.
 *
 * A test allocates with emu_alloc, launches by name and compares:
 *
 *     kvp__norm_args a = {...};
 *     assert_null(emu_launch("norm", rows, 1, 1, threads, 0, &a));
 *
 * Options and statistics are the process's; a launch reads the options when it begins and adds to
 * the statistics when it ends. Launches may run in several OS threads at a time.
 */
#ifndef KVP_TESTS_EMU_EMU_H
#define KVP_TESTS_EMU_EMU_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* In which order blocks, warps and lanes go on. Whatever a kernel computes must not depend on it.
 * */
typedef enum emu_schedule { EMU_FORWARD, EMU_REVERSE, EMU_RANDOM, EMU_SCHEDULES } emu_schedule;

/* When the bytes of a cp.async arrive: as early as they may, as late as they may, or a coin for
 * each. The first finds buffers that are overwritten too early, the second those that are read too
 * early. */
typedef enum emu_copies { EMU_AT_ISSUE, EMU_AT_WAIT, EMU_EITHER, EMU_COPIES } emu_copies;

typedef struct emu_options {
    emu_schedule schedule;
    emu_copies copies;
    uint64_t seed;           /* of what is random */
    uint64_t collective_limit; /* of a block, whose loops are to end; 0: 50 million */
    uint32_t seconds;        /* of CPU, of a launch; 0: 120 */
    uint32_t banks;          /* 1: count bank conflicts of plain accesses, in the race build */
} emu_options;

/* Zero for what has no option set: forward, at issue. */
void emu_set(const emu_options *o);
emu_options emu_get(void);

typedef struct emu_stats {
    uint64_t launches, blocks, threads;
    uint64_t collectives;     /* of warps, barriers not counted */
    uint64_t barriers;        /* that a block passed, named ones too */
    uint64_t mma, ldmatrix, atomics;
    uint64_t loaded;          /* bytes from global memory: load16 and cp.async; plain loads too in
                                 the race build, where `plain` is set */
    uint64_t stored;          /* bytes to global memory, in the race build */
    uint64_t ldmatrix_conflicts; /* passes beyond the four that a conflict-free ldmatrix.x4 takes */
    uint64_t shared_passes, shared_conflicts; /* of plain accesses, in the race build and where the
                                 option asks for it: all passes over the banks, and those beyond the
                                 fewest */
    uint64_t plain;           /* 1: plain loads and stores were seen */
} emu_stats;

void emu_stats_reset(void);
emu_stats emu_stats_get(void);

/* Runs a grid. NULL, or what is wrong, until the next launch of this OS thread. `args` is the
 * kernel's struct, which is copied. */
const char *emu_launch(const char *kernel, uint32_t grid_x, uint32_t grid_y, uint32_t grid_z,
                       uint32_t threads, size_t shared_bytes, const void *args);

/* What is linked in: the size of a kernel's argument struct and the most threads of a block. 0, or
 * -1 for a kernel that is not there. emu_kernel gives the i-th name, or NULL behind the last. */
int emu_kernel_info(const char *kernel, size_t *args_bytes, uint32_t *threads);
const char *emu_kernel(size_t i);

/* Nonzero if kernels were compiled for finding races: plain loads and stores are then seen. */
int emu_race_build(void);

/*
 * Global memory, aligned to 256 bytes, filled with 0xff (NaN as F16, BF16 and F32), with forbidden
 * pages behind it: an access there ends the grid. emu_alloc_sparse does not fill: pages that are
 * not touched cost nothing. Kernels may be given other memory too, of which less is known: nothing
 * is checked then but what the address sanitizer checks. emu_free gives 0, or -1 if it was not
 * allocated or something was written between its end and the forbidden page.
 */
void *emu_alloc(size_t bytes);
void *emu_alloc_sparse(size_t bytes);
int emu_free(void *p);

/* 1 if all of it lies in one allocation of emu_alloc; 0 otherwise. */
int emu_valid(const void *p, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
