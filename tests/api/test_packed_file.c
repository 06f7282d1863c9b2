/*
 * The packed file: that the second placement takes the weights from it and not from the model, that
 * whatever else lies there is not taken, and that trouble with it is never the host's.
 *
 * How one sees where weights came from: the model file's tensors are spoilt while its size and its time
 * of change stay. What is packed then gives other logits than before.
 */
#define _GNU_SOURCE
#include "support/fixed_run.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

enum { HEAD = 4096 };

static char folder[128], model_path[160], packed_path[160];
static uint64_t tensors_from; /* in the model file: what lies behind is weights */

typedef struct heard {
    int warnings;
    char last[400];
} heard;

static void hear(void *user, int32_t level, const char *line)
{
    heard *h = user;
    assert_int_equal(level, KVP_LOG_WARN);
    h->warnings++;
    (void)snprintf(h->last, sizeof h->last, "%s", line);
}

/* --- files --- */

static void put(const char *path, const void *data, size_t bytes)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, bytes, f), bytes);
    assert_int_equal(fclose(f), 0);
}

static uint8_t *get(const char *path, size_t *bytes)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    assert_int_equal(fseek(f, 0, SEEK_END), 0);
    *bytes = (size_t)ftell(f);
    rewind(f);
    uint8_t *p = malloc(*bytes + 1);
    assert_int_equal(fread(p, 1, *bytes, f), *bytes);
    assert_int_equal(fclose(f), 0);
    return p;
}

static void flip(const char *path, size_t at)
{
    uint8_t b;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &b, 1, (off_t)at), 1);
    b ^= 0x10;
    assert_int_equal(pwrite(fd, &b, 1, (off_t)at), 1);
    assert_int_equal(close(fd), 0);
}

/* Bytes in the middle of every tensor, with the file's times put back. */
static void spoil_model(void)
{
    struct stat st;
    size_t bytes;
    assert_int_equal(stat(model_path, &st), 0);
    uint8_t *p = get(model_path, &bytes);
    for (size_t i = tensors_from; i < bytes; i += 7) p[i] ^= 0x04;
    put(model_path, p, bytes);
    free(p);
    struct timespec times[2] = {st.st_atim, st.st_mtim};
    assert_int_equal(utimensat(AT_FDCWD, model_path, times, 0), 0);
}

static void write_model(int which)
{
    size_t bytes;
    uint8_t *p = gw_tiny(&fixed_models[which].description, &bytes);
    put(model_path, p, bytes);
    kvp_model *m = NULL;
    assert_int_equal(kvp_model_open(model_path, NULL, &m, NULL), KVP_OK);
    kvp_tensor_info t = {.size = sizeof t};
    tensors_from = bytes;
    for (uint64_t i = 0; kvp_model_get_tensor(m, i, &t) == KVP_OK; i++)
        if (t.offset < tensors_from) tensors_from = t.offset;
    kvp_model_destroy(m);
    free(p);
}

static int fresh_folder(void **state)
{
    (void)state;
    const char *temporary = getenv("TMPDIR");
    (void)snprintf(folder, sizeof folder, "%.80s/kvpage-packed-XXXXXX",
                   temporary && *temporary ? temporary : P_tmpdir);
    if (!mkdtemp(folder)) return -1;
    (void)snprintf(model_path, sizeof model_path, "%s/model.gguf", folder);
    (void)snprintf(packed_path, sizeof packed_path, "%s/model.packed", folder);
    return 0;
}

static int remove_folder(void **state)
{
    (void)state;
    (void)unlink(model_path);
    (void)unlink(packed_path);
    (void)rmdir(packed_path);
    return rmdir(folder); /* nothing else was left behind */
}

/* --- placing --- */

static kvp_status place(kvp_model *m, const char *packed, int32_t threads, kvp_error *err)
{
    kvp_place_options o;
    kvp_place_options_init(&o, sizeof o);
    o.threads = threads;
    o.packed_file = packed;
    return kvp_model_place(m, &o, err);
}

/* The logits' hash of the model, placed with the packed file; what was logged. */
static uint64_t run_with(const char *packed, int32_t threads, heard *h)
{
    kvp_hooks hooks;
    kvp_hooks_init(&hooks, sizeof hooks);
    hooks.user = h;
    hooks.log = hear;
    kvp_model_options o;
    kvp_model_options_init(&o, sizeof o);
    o.hooks = &hooks;
    kvp_model *m = NULL;
    memset(h, 0, sizeof *h);
    kvp_error err = {.size = sizeof err};
    assert_int_equal(kvp_model_open(model_path, &o, &m, NULL), KVP_OK);
    if (place(m, packed, threads, &err) != KVP_OK) fail_msg("%s", err.text);
    uint64_t hash = fixed_run(m);
    kvp_model_destroy(m);
    return hash;
}

static void the_second_start_reads_it(void **state)
{
    (void)state;
    heard h;
    for (int i = 0; i < FIXED_MODELS; i++) {
        (void)unlink(packed_path);
        write_model(i);
        assert_int_equal(run_with(packed_path, KVP_THREADS_INLINE, &h), fixed_models[i].hash);
        spoil_model();
        assert_int_equal(run_with(packed_path, KVP_THREADS_INLINE, &h), fixed_models[i].hash);
        assert_int_equal(run_with(packed_path, 2, &h), fixed_models[i].hash);
        assert_int_equal(h.warnings, 0);
        assert_int_not_equal(run_with(NULL, 2, &h), fixed_models[i].hash); /* it was spoilt */
    }
}

/* A file of another layout must not be read: if this number changes, how weights lie has changed, and
 * KVP__PANEL_LAYOUT has to be raised with it. */
static void the_layout_is_what_its_number_says(void **state)
{
    (void)state;
    uint64_t hash = 0xcbf29ce484222325u;
    heard h;
    for (int i = 0; i < FIXED_MODELS; i++) {
        size_t bytes;
        (void)unlink(packed_path);
        write_model(i);
        (void)run_with(packed_path, 1, &h);
        uint8_t *p = get(packed_path, &bytes);
        assert_memory_equal(p, "kvpage weights\n", 16);
        assert_int_equal(p[16], 1); /* the layout */
        for (size_t b = HEAD; b < bytes; b++) hash = (hash ^ p[b]) * 0x100000001b3u;
        free(p);
    }
    assert_int_equal(hash, 0x4fb973340a3fd532u);
}

/* Not taken: packed anew, written anew, and said. */
static void expect_refused(const char *why)
{
    heard h;
    const uint64_t right = fixed_models[1].hash;
    assert_int_equal(run_with(packed_path, 1, &h), right);
    if (h.warnings != 1 || !strstr(h.last, why)) fail_msg("\"%s\" and not %s", h.last, why);
    assert_int_equal(run_with(packed_path, 1, &h), right);
    assert_int_equal(h.warnings, 0);
}

static void what_is_not_whole_is_not_taken(void **state)
{
    (void)state;
    heard h;
    size_t bytes;
    write_model(1);
    (void)run_with(packed_path, 1, &h);
    uint8_t *good = get(packed_path, &bytes);
    for (size_t at = 0; at < 80; at++) {
        put(packed_path, good, bytes);
        flip(packed_path, at);
        assert_int_equal(run_with(packed_path, 1, &h), fixed_models[1].hash);
        if (h.warnings != 1) fail_msg("byte %zu of the header", at);
    }
    static const size_t lengths[] = {0, 1, 15, 16, 79, 80, 4095, 4096, 5000};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        put(packed_path, good, lengths[i]);
        expect_refused("not of this model");
    }
    put(packed_path, good, bytes - 1);
    expect_refused("not of this model");
    free(good);
}

static void what_has_changed_is_not_taken(void **state)
{
    (void)state;
    heard h;
    size_t bytes;
    write_model(1);
    (void)run_with(packed_path, 1, &h);
    free(get(packed_path, &bytes));
    static const size_t places[] = {HEAD, HEAD + 1001, HEAD + 20000};
    for (size_t i = 0; i < 3; i++) {
        flip(packed_path, places[i]);
        assert_int_equal(run_with(packed_path, 1 + (int32_t)i % 2, &h), fixed_models[1].hash);
        assert_non_null(strstr(h.last, "content has changed"));
        assert_int_equal(run_with(packed_path, 1, &h), fixed_models[1].hash);
        assert_int_equal(h.warnings, 0);
    }
    flip(packed_path, bytes - 3); /* in the table of sums */
    assert_int_equal(run_with(packed_path, 1, &h), fixed_models[1].hash);
    assert_non_null(strstr(h.last, "content has changed"));
}

static void another_model_is_not_taken(void **state)
{
    (void)state;
    heard h;
    write_model(1);
    (void)run_with(packed_path, 1, &h);
    /* The same bytes at another time: it cannot be known that they are the same. */
    struct timespec later[2] = {{.tv_sec = 1}, {.tv_sec = 1}};
    assert_int_equal(utimensat(AT_FDCWD, model_path, later, 0), 0);
    assert_int_equal(run_with(packed_path, 1, &h), fixed_models[1].hash);
    assert_int_equal(h.warnings, 1);
    write_model(0);
    assert_int_equal(run_with(packed_path, 1, &h), fixed_models[0].hash);
    assert_int_equal(h.warnings, 1);
    assert_int_equal(run_with(packed_path, 1, &h), fixed_models[0].hash);
    assert_int_equal(h.warnings, 0);
}

static void trouble_is_not_the_hosts(void **state)
{
    (void)state;
    heard h;
    char nowhere[200];
    (void)snprintf(nowhere, sizeof nowhere, "%s/none/x", folder);
    write_model(1);
    assert_int_equal(run_with(nowhere, 1, &h), fixed_models[1].hash);
    assert_int_equal(h.warnings, 1);
    assert_non_null(strstr(h.last, "not written"));
    assert_int_equal(mkdir(packed_path, 0700), 0);
    assert_int_equal(run_with(packed_path, 1, &h), fixed_models[1].hash);
    assert_int_equal(h.warnings, 2); /* it can be neither read nor replaced */
    assert_int_equal(rmdir(packed_path), 0);
}

static int32_t count_down(void *user, uint64_t done, uint64_t total)
{
    int *left = user;
    assert_true(done <= total);
    return (*left)-- == 0;
}

static void it_can_be_cancelled(void **state)
{
    (void)state;
    heard h;
    write_model(1);
    (void)run_with(packed_path, 1, &h);
    for (int calls = 0; calls < 2; calls++) {
        kvp_model *m = NULL;
        assert_int_equal(kvp_model_open(model_path, NULL, &m, NULL), KVP_OK);
        int left = calls;
        kvp_place_options o;
        kvp_place_options_init(&o, sizeof o);
        o.packed_file = packed_path;
        o.progress = count_down;
        o.user = &left;
        assert_int_equal(kvp_model_place(m, &o, NULL), KVP_ERR_CANCELLED);
        o.progress = NULL;
        assert_int_equal(kvp_model_place(m, &o, NULL), KVP_OK);
        assert_int_equal(fixed_run(m), fixed_models[1].hash);
        kvp_model_destroy(m);
    }
}

static void a_model_without_a_path_has_none(void **state)
{
    (void)state;
    uint8_t *file;
    kvp_error err = {.size = sizeof err};
    kvp_model *m = fixed_open(1, 0, &file, &err);
    assert_int_equal(place(m, packed_path, 1, &err), KVP_ERR_UNSUPPORTED);
    assert_non_null(strstr(err.text, "packed_file"));
    assert_int_equal(access(packed_path, F_OK), -1);
    assert_int_equal(place(m, NULL, 1, &err), KVP_OK);
    kvp_model_destroy(m);
    free(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_second_start_reads_it, fresh_folder, remove_folder),
        cmocka_unit_test_setup_teardown(the_layout_is_what_its_number_says, fresh_folder,
                                        remove_folder),
        cmocka_unit_test_setup_teardown(what_is_not_whole_is_not_taken, fresh_folder, remove_folder),
        cmocka_unit_test_setup_teardown(what_has_changed_is_not_taken, fresh_folder, remove_folder),
        cmocka_unit_test_setup_teardown(another_model_is_not_taken, fresh_folder, remove_folder),
        cmocka_unit_test_setup_teardown(trouble_is_not_the_hosts, fresh_folder, remove_folder),
        cmocka_unit_test_setup_teardown(it_can_be_cancelled, fresh_folder, remove_folder),
        cmocka_unit_test_setup_teardown(a_model_without_a_path_has_none, fresh_folder,
                                        remove_folder),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
