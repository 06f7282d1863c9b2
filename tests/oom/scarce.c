/* See scarce.h. Counts are atomic: workers allocate too. */
#define _GNU_SOURCE
#include "scarce.h"

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

static _Atomic uint64_t requests, fail_at;
static _Atomic int64_t live;
static _Atomic uint32_t released;
static _Atomic bool refused;

static bool refuse(void)
{
    if (atomic_fetch_add(&requests, 1) + 1 != atomic_load(&fail_at)) return false;
    atomic_store(&refused, true);
    return true;
}

void scarce_reset(uint64_t n)
{
    atomic_store(&requests, 0);
    atomic_store(&live, 0);
    atomic_store(&released, 0);
    atomic_store(&refused, false);
    atomic_store(&fail_at, n);
}

uint64_t scarce_requests(void) { return atomic_load(&requests); }
bool scarce_refused(void) { return atomic_load(&refused); }
int64_t scarce_live(void) { return atomic_load(&live); }
uint32_t scarce_released(void) { return atomic_load(&released); }

static uint32_t entries(const char *path)
{
    uint32_t n = 0;
    DIR *dir = opendir(path);
    if (!dir) return 0;
    for (struct dirent *e; (e = readdir(dir));) n += e->d_name[0] != '.';
    closedir(dir);
    return n;
}

uint32_t scarce_descriptors(void) { return entries("/proc/self/fd"); }
uint32_t scarce_threads(void) { return entries("/proc/self/task"); }

static void *hook_alloc(void *user, size_t size, size_t align)
{
    (void)user;
    if (refuse()) return NULL;
    void *p = NULL;
    if (posix_memalign(&p, align < sizeof(void *) ? sizeof(void *) : align, size)) return NULL;
    atomic_fetch_add(&live, 1);
    return p;
}

static void hook_free(void *user, void *ptr, size_t size, size_t align)
{
    (void)user, (void)size, (void)align;
    if (!ptr) return;
    atomic_fetch_sub(&live, 1);
    free(ptr);
}

static void hook_released(void *user)
{
    (void)user;
    atomic_fetch_add(&released, 1);
}

const kvp_hooks scarce_hooks = {
    .size = sizeof(kvp_hooks), .alloc = hook_alloc, .free = hook_free, .released = hook_released};

/* --- what the linker puts in place of the C library's --- */

void *__real_mmap(void *addr, size_t size, int prot, int flags, int fd, off_t offset);
int __real_munmap(void *addr, size_t size);
int __real_pthread_create(pthread_t *t, const pthread_attr_t *attr, void *(*f)(void *), void *arg);
int __real_eventfd(unsigned initial, int flags);
void *__wrap_mmap(void *addr, size_t size, int prot, int flags, int fd, off_t offset);
int __wrap_munmap(void *addr, size_t size);
int __wrap_pthread_create(pthread_t *t, const pthread_attr_t *attr, void *(*f)(void *), void *arg);
int __wrap_eventfd(unsigned initial, int flags);

void *__wrap_mmap(void *addr, size_t size, int prot, int flags, int fd, off_t offset)
{
    if (refuse()) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    void *p = __real_mmap(addr, size, prot, flags, fd, offset);
    if (p != MAP_FAILED) atomic_fetch_add(&live, 1);
    return p;
}

int __wrap_munmap(void *addr, size_t size)
{
    atomic_fetch_sub(&live, 1);
    return __real_munmap(addr, size);
}

int __wrap_pthread_create(pthread_t *t, const pthread_attr_t *attr, void *(*f)(void *), void *arg)
{
    if (refuse()) return EAGAIN;
    return __real_pthread_create(t, attr, f, arg);
}

int __wrap_eventfd(unsigned initial, int flags)
{
    if (refuse()) {
        errno = EMFILE;
        return -1;
    }
    return __real_eventfd(initial, flags);
}
