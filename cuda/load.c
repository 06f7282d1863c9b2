/*
 * Finds the CUDA driver and cuBLAS at run time and fills the tables of api.h, so that one library
 * starts everywhere and says in a sentence what a machine lacks.
 *
 * Invariant: what kvp__cuda_load returned stays as it is: libraries are never closed. Before the
 * first call nothing of CUDA is touched.
 *
 * A library counts only if it has every function of its list under the very symbol that the list
 * names, since behind another suffix there is another signature.
 */
#include "cuda/api.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static kvp__cuda_api driver;
static kvp__blas_api blas;
static kvp__cuda_found searched;

static pthread_mutex_t searching = PTHREAD_MUTEX_INITIALIZER;
static _Atomic(const kvp__cuda_found *) current;

/* A function's pointer by its symbol. dlsym gives an object's pointer, which C does not turn into
 * a function's; POSIX asks that the bits be the same. */
static bool find(void *library, const char *symbol, void *member, size_t size)
{
    void *p = dlsym(library, symbol);
    if (p) memcpy(member, &p, size);
    return p != NULL;
}

/* Fills `table`; the first name that the library has not, or NULL. */
#define FIND(name, suffix, args)                                                                   \
    if (!find(library, #name suffix, &table->name, sizeof table->name)) return #name;

static const char *fill_driver(void *library, kvp__cuda_api *table)
{
    KVP__CU_FUNCTIONS(FIND)
    return NULL;
}

static const char *fill_blas(void *library, kvp__blas_api *table)
{
    KVP__BLAS_FUNCTIONS(FIND)
    return NULL;
}

static bool find_driver(kvp__cuda_found *f)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(f->missing, sizeof f->missing, "no CUDA driver (libcuda.so.1)");
        return false;
    }
    const char *lacks = fill_driver(library, &driver);
    if (lacks) {
        snprintf(f->missing, sizeof f->missing,
                 "the driver has no %s: one for CUDA 11.4 or newer is needed", lacks);
        return false;
    }
    int version = 0;
    if (driver.cuDriverGetVersion(&version) == KVP__CU_SUCCESS &&
        kvp__cuda_too_old((uint32_t)version, kvp__cuda_toolkit)) {
        uint32_t needed = kvp__cuda_toolkit / 1000 == 12 ? 12040 : kvp__cuda_toolkit / 1000 * 1000;
        snprintf(f->missing, sizeof f->missing,
                 "the driver is for CUDA %d.%d, the kernels need one for %u.%u or newer",
                 version / 1000, version % 1000 / 10, (unsigned)needed / 1000,
                 (unsigned)needed % 1000 / 10);
        return false;
    }
    f->cuda = &driver;
    return true;
}

/* The newest that is complete and not of a newer CUDA than the driver. */
static void find_blas(kvp__cuda_found *f)
{
    static const char *const names[] = {"libcublas.so.13", "libcublas.so.12"};
    const char *incomplete = NULL, *lacks = NULL;
    int version = 0;
    bool old = driver.cuDriverGetVersion(&version) == KVP__CU_SUCCESS && version < 13000;
    for (size_t i = old; i < sizeof names / sizeof *names; i++) {
        void *library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        if (!library) continue;
        const char *name = fill_blas(library, &blas);
        if (!name) {
            f->blas = &blas;
            return;
        }
        if (!lacks) {
            incomplete = names[i];
            lacks = name;
        }
    }
    if (lacks)
        snprintf(f->missing, sizeof f->missing, "%s has no %s", incomplete, lacks);
    else
        snprintf(f->missing, sizeof f->missing,
                 "cuBLAS 12 or 13 (libcublas.so.13) is not installed");
}

/* Stops at the first thing that is missing: what lies behind it would be opened for nothing, and
 * cuBLAS is hundreds of megabytes. */
static void search(kvp__cuda_found *f)
{
    memset(f, 0, sizeof *f);
    f->images = kvp__cuda_images;
    f->n_images = kvp__cuda_n_images;
    if (!f->n_images)
        snprintf(f->missing, sizeof f->missing, "this library was built without CUDA kernels");
    else if (find_driver(f))
        find_blas(f);
}

const kvp__cuda_found *kvp__cuda_load(void)
{
    const kvp__cuda_found *f = atomic_load_explicit(&current, memory_order_acquire);
    if (f) return f;
    pthread_mutex_lock(&searching);
    f = atomic_load_explicit(&current, memory_order_relaxed);
    if (!f) {
        search(&searched);
        f = &searched;
        atomic_store_explicit(&current, f, memory_order_release);
    }
    pthread_mutex_unlock(&searching);
    return f;
}

void kvp__cuda_use(const kvp__cuda_found *found)
{
    pthread_mutex_lock(&searching);
    atomic_store_explicit(&current, found, memory_order_release);
    pthread_mutex_unlock(&searching);
}
