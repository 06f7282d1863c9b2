/*
 * The ground floor: memory through the host's hooks, checked arithmetic, error records, log lines,
 * the clock. Every room may use it; it uses nothing of ours but the public header's types.
 *
 * Invariant: no function here, or anywhere above, allocates but through kvp__alloc or
 * kvp__map, so that the host sees every byte and the tests can refuse any of them.
 */
#ifndef KVP_BASE_BASE_H
#define KVP_BASE_BASE_H

#include <kvpage.h>

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __FAST_MATH__
#error "kvpage promises the same bits everywhere: do not build it with -ffast-math"
#endif

#define KVP__LIKELY(x) __builtin_expect(!!(x), 1)
#define KVP__UNLIKELY(x) __builtin_expect(!!(x), 0)
#define KVP__PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#define KVP__COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define KVP__CACHE_LINE 64u

/* --- hooks --- */

/* The host's hooks with every default filled in: no pointer but `user` and `released` is NULL. */
typedef struct kvp__hooks {
    void *user;
    void *(*alloc)(void *user, size_t size, size_t align);
    void (*free)(void *user, void *ptr, size_t size, size_t align);
    void (*log)(void *user, int32_t level, const char *line);
    uint64_t (*clock)(void *user);
    void (*released)(void *user);
    int32_t log_level;
} kvp__hooks;

/* Checks and completes the host's struct (NULL: all defaults). INVALID_ARG with `err` filled. */
kvp_status kvp__hooks_fill(kvp__hooks *out, const kvp_hooks *in, kvp_error *err);

/* NULL on failure or when size is 0. Contents arbitrary. `align` is KVP__CACHE_LINE. */
void *kvp__alloc(const kvp__hooks *h, size_t size);
void *kvp__alloc_zero(const kvp__hooks *h, size_t size);
/* The same with count * size checked for overflow. */
void *kvp__alloc_array(const kvp__hooks *h, size_t count, size_t size);
/* `size` as given to kvp__alloc; NULL is taken. */
void kvp__free(const kvp__hooks *h, void *ptr, size_t size);

/* Large zeroed memory straight from the system, committed when touched, huge pages asked for. */
void *kvp__map(size_t size);
void kvp__unmap(void *ptr, size_t size);

uint64_t kvp__now(const kvp__hooks *h);

/* One line at most 400 bytes long; dropped if the level is not wanted. No %f, %g or %e: they
 * depend on the locale. */
void kvp__log(const kvp__hooks *h, int32_t level, const char *fmt, ...) KVP__PRINTF(3, 4);

/* --- errors --- */

/* Fills *err (may be NULL) and returns `status`, so that a check can be one line:
 * return kvp__fail(err, KVP_ERR_FORMAT, "tensor %s: ...", name). */
kvp_status kvp__fail(kvp_error *err, kvp_status status, const char *fmt, ...) KVP__PRINTF(3, 4);
kvp_status kvp__fail_v(kvp_error *err, kvp_status status, const char *fmt, va_list args);
/* The same with the two numbers of a resource error. */
kvp_status kvp__fail_need(kvp_error *err, kvp_status status, uint64_t needed, uint64_t available,
                          const char *fmt, ...) KVP__PRINTF(5, 6);

/* --- structs that cross the ABI --- */

/* Copies a host's options struct of `in_size` bytes (its first field) into a zeroed struct of
 * ours: a missing tail is zero, an unknown tail must be zero. False: refuse with INVALID_ARG. */
bool kvp__struct_in(void *out, size_t size, const void *in);
/* Copies our filled struct into the host's, cut to the size the host states. False: size < 8. */
bool kvp__struct_out(void *out, const void *in, size_t size);

/* --- checked arithmetic: false on overflow, *out untouched --- */

static inline bool kvp__mul(uint64_t a, uint64_t b, uint64_t *out)
{
    uint64_t r;
    if (__builtin_mul_overflow(a, b, &r)) return false;
    *out = r;
    return true;
}

static inline bool kvp__add(uint64_t a, uint64_t b, uint64_t *out)
{
    uint64_t r;
    if (__builtin_add_overflow(a, b, &r)) return false;
    *out = r;
    return true;
}

static inline uint64_t kvp__ceil_div(uint64_t a, uint64_t b) { return a / b + (a % b != 0); }
static inline uint64_t kvp__round_up(uint64_t a, uint64_t pow2)
{
    return (a + pow2 - 1) & ~(pow2 - 1);
}
static inline uint64_t kvp__min64(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t kvp__max64(uint64_t a, uint64_t b) { return a > b ? a : b; }
static inline bool kvp__is_pow2(uint64_t a) { return a && !(a & (a - 1)); }

#endif
