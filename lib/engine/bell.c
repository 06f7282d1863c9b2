/*
 * The bell, on an eventfd. See bell.h.
 */
#define _GNU_SOURCE
#include "engine/bell.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

void kvp__bell_init(kvp__bell *b)
{
    atomic_store(&b->rung, 0);
    atomic_store(&b->fd, -1);
}

static void write_one(int32_t fd)
{
    int saved = errno; /* a signal handler must leave it alone */
    uint64_t one = 1;
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR) continue;
    errno = saved;
}

void kvp__bell_close(kvp__bell *b)
{
    int32_t fd = atomic_exchange(&b->fd, -1);
    if (fd < 0) return;
    write_one(fd); /* whoever still waits for it wakes up */
    close(fd);
}

void kvp__bell_ring(kvp__bell *b)
{
    if (atomic_exchange(&b->rung, 1)) return;
    int32_t fd = atomic_load(&b->fd);
    if (fd >= 0) write_one(fd);
}

void kvp__bell_quiet(kvp__bell *b)
{
    int32_t fd = atomic_load(&b->fd);
    if (fd >= 0) {
        uint64_t count;
        while (read(fd, &count, sizeof count) < 0 && errno == EINTR) continue;
    }
    atomic_store(&b->rung, 0);
}

kvp_status kvp__bell_fd(kvp__bell *b, int32_t *out, kvp_error *err)
{
    int32_t fd = atomic_load(&b->fd);
    if (fd < 0) {
        fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (fd < 0) return kvp__fail(err, KVP_ERR_SYSTEM, "the system gave no eventfd");
        atomic_store(&b->fd, fd);
        if (atomic_load(&b->rung)) write_one(fd);
    }
    *out = fd;
    return KVP_OK;
}

kvp_status kvp__bell_listen(kvp__bell *b, int32_t *out, kvp_error *err)
{
    int32_t fd;
    kvp_status s = kvp__bell_fd(b, &fd, err);
    if (s != KVP_OK) return s;
    *out = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (*out < 0) return kvp__fail(err, KVP_ERR_SYSTEM, "the system gave no descriptor to wait on");
    return KVP_OK;
}

kvp_status kvp__bell_wait(int32_t fd, int32_t timeout_ms)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};
    kvp_status s = poll(&p, 1, timeout_ms) < 0 && errno != EINTR ? KVP_ERR_SYSTEM : KVP_OK;
    close(fd);
    return s;
}
