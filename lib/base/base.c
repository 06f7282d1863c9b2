/*
 * Hooks, memory, error records, and the structs that cross the ABI. See base.h.
 */
#define _GNU_SOURCE
#include "base/base.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

static void *default_alloc(void *user, size_t size, size_t align)
{
    (void)user;
    void *p = NULL;
    if (align < sizeof(void *)) align = sizeof(void *);
    return posix_memalign(&p, align, size) == 0 ? p : NULL;
}

static void default_free(void *user, void *ptr, size_t size, size_t align)
{
    (void)user, (void)size, (void)align;
    free(ptr);
}

static void default_log(void *user, int32_t level, const char *line)
{
    (void)user, (void)level, (void)line;
}

static uint64_t default_clock(void *user)
{
    (void)user;
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

kvp_status kvp__hooks_fill(kvp__hooks *out, const kvp_hooks *in, kvp_error *err)
{
    kvp_hooks h;
    memset(&h, 0, sizeof h);
    if (in && !kvp__struct_in(&h, sizeof h, in))
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "hooks: size %u is not a size of kvp_hooks",
                         (unsigned)in->size);
    if (!h.alloc != !h.free)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "hooks: alloc and free go together");
    if (h.log_level > KVP_LOG_DEBUG)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "hooks: log_level %u is not a level",
                         (unsigned)h.log_level);
    out->user = h.user;
    out->alloc = h.alloc ? h.alloc : default_alloc;
    out->free = h.free ? h.free : default_free;
    out->log = h.log ? h.log : default_log;
    out->log_level = !h.log ? 0 : h.log_level ? (int32_t)h.log_level : KVP_LOG_WARN;
    out->clock = h.clock ? h.clock : default_clock;
    out->released = h.released;
    return KVP_OK;
}

void *kvp__alloc(const kvp__hooks *h, size_t size)
{
    if (size == 0 || size > SIZE_MAX - KVP__CACHE_LINE) return NULL;
    return h->alloc(h->user, size, KVP__CACHE_LINE);
}

void *kvp__alloc_zero(const kvp__hooks *h, size_t size)
{
    void *p = kvp__alloc(h, size);
    if (p) memset(p, 0, size);
    return p;
}

void *kvp__alloc_array(const kvp__hooks *h, size_t count, size_t size)
{
    uint64_t bytes;
    if (!kvp__mul(count, size, &bytes) || bytes > SIZE_MAX) return NULL;
    return kvp__alloc(h, (size_t)bytes);
}

void kvp__free(const kvp__hooks *h, void *ptr, size_t size)
{
    if (ptr) h->free(h->user, ptr, size, KVP__CACHE_LINE);
}

void *kvp__map(size_t size)
{
    if (size == 0) return NULL;
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    if (p == MAP_FAILED) return NULL;
    /* Advice only: a kernel without huge pages says no and nothing is lost. */
    if (size >= (2u << 20)) (void)madvise(p, size, MADV_HUGEPAGE);
    return p;
}

void kvp__unmap(void *ptr, size_t size)
{
    if (ptr) (void)munmap(ptr, size);
}

uint64_t kvp__now(const kvp__hooks *h) { return h->clock(h->user); }

void kvp__log(const kvp__hooks *h, int32_t level, const char *fmt, ...)
{
    if (level > h->log_level) return;
    char line[400];
    va_list args;
    va_start(args, fmt);
    vsnprintf(line, sizeof line, fmt, args);
    va_end(args);
    h->log(h->user, level, line);
}

kvp_status kvp__fail_v(kvp_error *err, kvp_status status, const char *fmt, va_list args)
{
    if (!err) return status;
    kvp_error e;
    memset(&e, 0, sizeof e);
    e.size = err->size;
    e.status = status;
    vsnprintf(e.text, sizeof e.text, fmt, args);
    if (e.size == 0) e.size = sizeof e;
    if (e.size > sizeof e) e.size = sizeof e;
    kvp__struct_out(err, &e, sizeof e);
    return status;
}

kvp_status kvp__fail(kvp_error *err, kvp_status status, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    kvp__fail_v(err, status, fmt, args);
    va_end(args);
    return status;
}

kvp_status kvp__fail_need(kvp_error *err, kvp_status status, uint64_t needed, uint64_t available,
                          const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    kvp__fail_v(err, status, fmt, args);
    va_end(args);
    if (err && err->size >= offsetof(kvp_error, text)) {
        err->needed = needed;
        err->available = available;
    }
    return status;
}

bool kvp__struct_in(void *out, size_t size, const void *in)
{
    uint32_t in_size;
    memcpy(&in_size, in, sizeof in_size);
    if (in_size < 8 || in_size > 65536) return false;
    memset(out, 0, size);
    memcpy(out, in, in_size < size ? in_size : size);
    const unsigned char *tail = (const unsigned char *)in;
    for (size_t i = size; i < in_size; i++)
        if (tail[i]) return false;
    return true;
}

bool kvp__struct_out(void *out, const void *in, size_t size)
{
    uint32_t out_size;
    memcpy(&out_size, out, sizeof out_size);
    if (out_size < 8 || out_size > 65536) return false;
    size_t n = out_size < size ? out_size : size;
    memcpy((char *)out + sizeof out_size, (const char *)in + sizeof out_size, n - sizeof out_size);
    if (out_size > size) memset((char *)out + size, 0, out_size - size);
    return true;
}
