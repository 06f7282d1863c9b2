/*
 * Reading and writing the packed file. See image.h.
 *
 * The sums are of 64-bit words, each piece's own: a running sum and the sum of the running sums, as
 * Fletcher (1982) has them, so that words that change places show. They find decay, not intent.
 */
#define _GNU_SOURCE
#include "cpu/image.h"

#include "base/hash.h"
#include "base/team.h"
#include "cpu/panel.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PIECE_BYTES ((uint64_t)4 << 20)
#define AT_ONCE 16u /* pieces between two calls of the progress hook */
#define HEAD_BYTES 4096u

typedef struct head {
    char magic[16];
    uint32_t layout, order; /* order: 1, as this machine writes it */
    uint64_t bytes, piece_bytes;
    uint64_t model[2];      /* what the image was made from */
    uint64_t pad;
    uint64_t sum[2];        /* of what is above */
} head;

typedef struct sums {
    uint64_t plain, running;
} sums;

static sums sums_of(const void *data, uint64_t bytes)
{
    const uint8_t *p = data;
    sums s = {1, 0};
    for (uint64_t i = 0; i < bytes; i += sizeof(uint64_t)) {
        uint64_t word;
        memcpy(&word, p + i, sizeof word);
        s.plain += word;
        s.running += s.plain;
    }
    return s;
}

static bool same(sums a, sums b) { return a.plain == b.plain && a.running == b.running; }

static kvp__hash128 mix(kvp__hash128 so_far, const void *data, size_t bytes)
{
    return kvp__hash((kvp__hash_key){so_far.lo, so_far.hi}, data, bytes);
}

static void head_of(const kvp__model *m, uint64_t bytes, head *h)
{
    memset(h, 0, sizeof *h);
    memcpy(h->magic, "kvpage weights\n", sizeof h->magic);
    h->layout = KVP__PANEL_LAYOUT;
    h->order = 1;
    h->bytes = bytes;
    h->piece_bytes = PIECE_BYTES;
    const uint64_t file[] = {m->source.bytes, (uint64_t)m->source.changed_ns};
    kvp__hash128 id = mix((kvp__hash128){0, 0}, file, sizeof file);
    for (uint64_t i = 0; i < m->n_tensors; i++) {
        const kvp__tensor *t = &m->tensors[i];
        const uint64_t shape[] = {t->type, t->dims[0], t->dims[1], t->dims[2], t->dims[3], t->offset};
        id = mix(mix(id, t->name, strlen(t->name)), shape, sizeof shape);
    }
    h->model[0] = id.lo;
    h->model[1] = id.hi;
    sums s = sums_of(h, offsetof(head, sum));
    h->sum[0] = s.plain;
    h->sum[1] = s.running;
}

static uint32_t pieces_of(uint64_t bytes)
{
    return (uint32_t)((bytes + PIECE_BYTES - 1) / PIECE_BYTES);
}

/* --- reading --- */

typedef struct reading {
    const kvp__source *file;
    uint8_t *memory;
    uint64_t bytes;
    const sums *wanted;
    uint32_t first;           /* piece */
    _Atomic uint32_t unread, wrong;
} reading;

static uint64_t length_of(uint64_t bytes, uint32_t piece)
{
    return kvp__min64(PIECE_BYTES, bytes - piece * PIECE_BYTES);
}

static void read_piece(void *user, uint32_t chunk, void *scratch)
{
    (void)scratch;
    reading *r = user;
    const uint32_t piece = r->first + chunk;
    uint8_t *to = r->memory + piece * PIECE_BYTES;
    const uint64_t n = length_of(r->bytes, piece);
    if (r->file->read(r->file->user, HEAD_BYTES + piece * PIECE_BYTES, to, (size_t)n) != 0)
        atomic_fetch_add(&r->unread, 1);
    else if (!same(sums_of(to, n), r->wanted[piece]))
        atomic_fetch_add(&r->wrong, 1);
}

static kvp_status tell(const kvp__place *how, uint64_t done, uint64_t total, kvp_error *err)
{
    if (how->progress && how->progress(how->user, done, total) != 0)
        return kvp__fail(err, KVP_ERR_CANCELLED, "placing was cancelled");
    return KVP_OK;
}

static kvp_status read_pieces(const kvp__model *m, const kvp__place *how, kvp__team *team, reading *r,
                              kvp_error *err)
{
    const uint32_t n = pieces_of(r->bytes);
    kvp_status s = tell(how, 0, r->bytes, err);
    for (r->first = 0; s == KVP_OK && r->first < n; r->first += AT_ONCE) {
        uint32_t count = n - r->first < AT_ONCE ? n - r->first : AT_ONCE;
        kvp__phase phase = {read_piece, r, count};
        kvp__program program;
        kvp__program_init(&program, &phase, 1, NULL, NULL);
        if (team) kvp__team_start(team, &program);
        (void)kvp__program_advance(&program, &m->hooks, 0, true, NULL);
        if (atomic_load(&r->unread)) return kvp__fail(err, KVP_ERR_IO, "it is cut short");
        if (atomic_load(&r->wrong)) return kvp__fail(err, KVP_ERR_FORMAT, "its content has changed");
        s = tell(how, kvp__min64(r->bytes, (r->first + count) * PIECE_BYTES), r->bytes, err);
    }
    return s;
}

static kvp_status read_file(const kvp__model *m, const kvp__place *how, kvp__team *team,
                            const kvp__source *file, uint8_t *memory, uint64_t bytes, kvp_error *err)
{
    head found, wanted;
    const uint32_t n = pieces_of(bytes);
    const uint64_t table = HEAD_BYTES + n * PIECE_BYTES, size = table + n * sizeof(sums);
    head_of(m, bytes, &wanted);
    if (file->bytes != size || file->read(file->user, 0, &found, sizeof found) != 0 ||
        memcmp(&found, &wanted, sizeof found) != 0)
        return kvp__fail(err, KVP_ERR_FORMAT, "it is not of this model and this library");
    sums *of_pieces = kvp__alloc_array(&m->hooks, n, sizeof *of_pieces);
    if (!of_pieces) return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory to read it");
    kvp_status s = KVP_OK;
    if (file->read(file->user, table, of_pieces, n * sizeof *of_pieces) != 0)
        s = kvp__fail(err, KVP_ERR_IO, "it is cut short");
    reading r = {.file = file, .memory = memory, .bytes = bytes, .wanted = of_pieces};
    if (s == KVP_OK) s = read_pieces(m, how, team, &r, err);
    kvp__free(&m->hooks, of_pieces, n * sizeof *of_pieces);
    return s;
}

kvp_status kvp__image_read(const kvp__model *m, const kvp__place *how, kvp__team *team, void *memory,
                           uint64_t bytes, kvp_error *err)
{
    kvp__source file;
    kvp_status s = kvp__source_path(&file, &m->hooks, how->packed_file, err);
    if (s != KVP_OK) return s;
    s = read_file(m, how, team, &file, memory, bytes, err);
    file.close(file.user);
    return s;
}

/* --- writing --- */

static bool put(int fd, const void *data, uint64_t bytes)
{
    const char *p = data;
    while (bytes) {
        ssize_t n = write(fd, p, (size_t)kvp__min64(bytes, 1u << 30));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        p += n;
        bytes -= (uint64_t)n;
    }
    return true;
}

static bool put_all(int fd, const kvp__model *m, const uint8_t *memory, uint64_t bytes)
{
    const uint32_t n = pieces_of(bytes);
    uint8_t page[HEAD_BYTES] = {0};
    head h;
    head_of(m, bytes, &h);
    memcpy(page, &h, sizeof h);
    if (!put(fd, page, sizeof page) || !put(fd, memory, bytes)) return false;
    if (lseek(fd, (off_t)(HEAD_BYTES + n * PIECE_BYTES), SEEK_SET) < 0) return false;
    for (uint32_t i = 0; i < n; i++) {
        sums s = sums_of(memory + i * PIECE_BYTES, length_of(bytes, i));
        if (!put(fd, &s, sizeof s)) return false;
    }
    return fsync(fd) == 0;
}

kvp_status kvp__image_write(const kvp__model *m, const kvp__place *how, const void *memory,
                            uint64_t bytes, kvp_error *err)
{
    const size_t size = strlen(how->packed_file) + sizeof ".XXXXXX";
    char *beside = kvp__alloc(&m->hooks, size);
    if (!beside) return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory to write it");
    (void)snprintf(beside, size, "%s.XXXXXX", how->packed_file);
    kvp_status s = KVP_OK;
    int fd = mkostemp(beside, O_CLOEXEC);
    if (fd < 0) {
        s = kvp__fail(err, KVP_ERR_IO, "it cannot be written (system error %d)", errno);
    } else {
        bool ok = put_all(fd, m, memory, bytes);
        int error = errno;
        ok = close(fd) == 0 && ok;
        if (ok && rename(beside, how->packed_file) != 0) {
            ok = false;
            error = errno;
        }
        if (!ok) {
            (void)unlink(beside);
            s = kvp__fail(err, KVP_ERR_IO, "it cannot be written (system error %d)", error);
        }
    }
    kvp__free(&m->hooks, beside, size);
    return s;
}
