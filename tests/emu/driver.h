/*
 * The emulated driver and cuBLAS (driver.cc, blas.cc): the tables of cuda/api.h with memory,
 * streams, events, graphs and kernels of the CPU behind them, so that all of the CUDA device's host
 * code runs on a machine without a GPU, as it is.
 *
 * It is stricter than a card. Every address and size given to it is checked against what is
 * allocated; memory that nobody has written is NaN (above 1 GiB in one piece, zero); a call without
 * a current context, on a handle that is not alive, or one that a capture does not allow is an
 * error with a sentence (emu_driver_message); a call from a host function, where a driver may hang,
 * ends the program. It counts every call, and in particular those that wait for the device.
 *
 * When operations run is the test's choice, and none of the choices is more right than another:
 * at once, inside the call; late, a few at each query; or on a thread of the emulator's. In every
 * case the host's memory that a copy reads is read when the copy runs, not when it is asked for.
 */
#ifndef TESTS_EMU_DRIVER_H
#define TESTS_EMU_DRIVER_H

#include "cuda/api.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum emu_timing {
    EMU_AT_ONCE, /* inside the call that asks */
    EMU_LATE,    /* `late_operations` of them in each cuStreamQuery and cuEventQuery, and all that
                    is needed in calls that wait. Host functions run inside these calls */
    EMU_THREAD   /* on a thread, which sleeps `pause_us` before each */
} emu_timing;

/* Zero: the default. */
typedef struct emu_driver_options {
    int32_t devices;            /* 1; -1: none */
    uint64_t memory;            /* of each, in bytes; 8 GiB */
    int32_t sm_count;           /* 132 */
    int32_t major, minor;       /* 9.0; below 8.0 there is no code for it */
    int32_t driver_version;     /* 13000 */
    emu_timing timing;
    uint32_t late_operations;   /* 1 */
    uint32_t pause_us;
    uint64_t seed;              /* which stream goes on where several can; 0: the oldest one */
} emu_driver_options;

/* Puts the emulator behind kvp__cuda_load. NULL: all defaults. The driver is as new: no device is
 * lost, no call counted. */
void emu_install(const emu_driver_options *o);
/* What is not given back is given back now; operations that have not run never do. kvp__cuda_load
 * finds what the machine has again. */
void emu_uninstall(void);

/* --- what tests look at --- */

typedef struct emu_driver_counts {
    uint64_t waits;             /* calls that waited, or may wait, for the device: synchronise,
                                   allocate, free, load a module, make or destroy a cuBLAS handle */
    uint64_t kernels, products, host_functions, memsets; /* that ran, from graphs or not */
    uint64_t graph_launches;
    uint64_t uploads, upload_bytes, downloads, download_bytes;
    uint64_t pageable;          /* copies from or to memory that is not pinned: these may wait */
    uint64_t memory, peak_memory; /* bytes allocated on all devices; the most since emu_install */
} emu_driver_counts;
emu_driver_counts emu_driver_counted(void);

/* Calls of a function of the tables by its name ("cuMemAlloc"), failed ones included; NULL: of all.
 * 0 for an unknown name would hide a spelling mistake, so it ends the program. */
uint64_t emu_driver_calls(const char *name);
/* Launches of a kernel that ran. */
uint64_t emu_driver_ran(const char *kernel);

/* The first thing that went wrong: a call that was refused and why, or what a kernel did. "" if
 * nothing has. Valid until emu_install. Errors that a test asked for are not meant. */
const char *emu_driver_message(void);

/* What is alive: allocations, pinned memory, streams, events, graphs, modules, retained and pushed
 * contexts, cuBLAS handles; one text, "" if there is nothing. Valid until the next call. */
const char *emu_driver_leaks(void);

/* Operations that have not run. */
uint64_t emu_driver_pending(void);

/* The allocation that [p, p + bytes) lies in, as a pointer that the CPU may use; NULL: in none. */
void *emu_driver_memory(kvp__cu_ptr p, uint64_t bytes);

/* --- what tests ask for --- */

/* The n-th call from now on (1: the next) of the function fails with `error` and does nothing, but
 * for those that give back, which do that first. NULL: of any function; cuBLAS's then fail with
 * what they have for it. n 0: not any more. */
void emu_driver_fail(const char *name, uint64_t nth, kvp__cu_result error);
/* Whether the failure that was asked for has happened. */
bool emu_driver_failed(void);

/* Every later call fails with `error` (as after an illegal address), and nothing that has not run
 * ever does: no host function is called. What gives back still does, and fails. */
void emu_driver_lose(kvp__cu_result error);

/* While on, no operation begins. A call that would have to wait then fails, instead of for ever. */
void emu_driver_hold(bool on);
/* Runs up to n operations now; how many ran. Late timing, or on hold; else 0. */
uint64_t emu_driver_run(uint64_t n);

#ifdef __cplusplus
}
#endif
#endif
