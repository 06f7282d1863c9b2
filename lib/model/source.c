/*
 * Where a model's bytes come from: a file, read with pread so that threads need no common position
 * and a file that is cut short later gives an error, not SIGBUS; or memory. Callers read only inside
 * `bytes`, which the GGUF reader has checked every tensor against.
 */
#define _GNU_SOURCE
#include "model/model.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct file {
    kvp__hooks hooks;
    int fd;
} file;

static int file_read(void *user, uint64_t offset, void *buffer, size_t bytes)
{
    const file *f = user;
    char *at = buffer;
    while (bytes) {
        ssize_t n = pread(f->fd, at, bytes, (off_t)offset);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return -1;
        at += n;
        offset += (uint64_t)n;
        bytes -= (size_t)n;
    }
    return 0;
}

static void file_close(void *user)
{
    file *f = user;
    kvp__hooks hooks = f->hooks;
    (void)close(f->fd);
    kvp__free(&hooks, f, sizeof *f);
}

static kvp_status cannot_open(const char *path, int error, kvp_error *err)
{
    switch (error) {
    case ENOENT: return kvp__fail(err, KVP_ERR_IO, "%.160s: no such file", path);
    case EACCES: return kvp__fail(err, KVP_ERR_IO, "%.160s: no permission to read it", path);
    case EMFILE:
    case ENFILE:
        return kvp__fail(err, KVP_ERR_IO, "%.160s: too many files are open", path);
    default:
        return kvp__fail(err, KVP_ERR_IO, "%.160s: cannot be opened (system error %d)", path, error);
    }
}

kvp_status kvp__source_path(kvp__source *out, const kvp__hooks *hooks, const char *path,
                            kvp_error *err)
{
    struct stat st;
    /* Nonblocking, or a pipe of that name would stop us here. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return cannot_open(path, errno, err);
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        (void)close(fd);
        return kvp__fail(err, KVP_ERR_IO, "%.160s: not a regular file", path);
    }
    file *f = kvp__alloc(hooks, sizeof *f);
    if (!f) {
        (void)close(fd);
        return kvp__fail(err, KVP_ERR_NO_MEMORY, "%.160s: no memory to open it", path);
    }
    f->hooks = *hooks;
    f->fd = fd;
    *out = (kvp__source){.user = f, .bytes = (uint64_t)st.st_size, .read = file_read,
                         .close = file_close};
    out->changed_ns = (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
    return KVP_OK;
}

static int memory_read(void *user, uint64_t offset, void *buffer, size_t bytes)
{
    memcpy(buffer, (const char *)user + offset, bytes);
    return 0;
}

void kvp__source_memory(kvp__source *out, const void *data, size_t bytes)
{
    union {
        const void *borrowed;
        void *user;
    } p = {data}; /* never written through */
    *out = (kvp__source){.user = p.user, .bytes = bytes, .read = memory_read};
}
