/*
 * The GGUF reader: what it gives, and that no file, however it lies, makes it read outside its bytes,
 * work longer or take more memory than the file's own size warrants. Cases B140 to B146.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "model/gguf.h"
#include "support/gguf_writer.h"
#include "support/heap.h"

#define TINY_PEAK (1u << 20) /* bytes that a hostile file of a few KiB may make us take */

static heap the_heap;

static kvp_status open_bytes(kvp__gguf *g, const uint8_t *data, size_t bytes, kvp_error *err)
{
    kvp__source source;
    memset(err, 0, sizeof *err);
    err->size = sizeof *err;
    heap_init(&the_heap);
    kvp__source_memory(&source, data, bytes);
    return kvp__gguf_open(g, &the_heap.hooks, &source, err);
}

static void close_clean(kvp__gguf *g)
{
    kvp__gguf_close(g);
    assert_int_equal(the_heap.blocks, 0);
    assert_int_equal(the_heap.mismatches, 0);
}

/* Opens exactly `bytes` bytes (a copy, so that a sanitizer sees one more), which must fail with
 * `status`, keep nothing, and say `word` in one line. */
static void refuse(const uint8_t *data, size_t bytes, kvp_status status, const char *word)
{
    kvp__gguf g;
    kvp_error err;
    uint8_t *copy = malloc(bytes ? bytes : 1);
    assert_non_null(copy);
    memcpy(copy, data, bytes);
    kvp_status s = open_bytes(&g, copy, bytes, &err);
    free(copy);
    if (s != status || !strstr(err.text, word) || strchr(err.text, '\n'))
        fail_msg("status %d, wanted %d; '%s' lacks '%s'", (int)s, (int)status, err.text, word);
    assert_int_equal(err.status, status);
    assert_int_equal(the_heap.blocks, 0);
    assert_int_equal(the_heap.mismatches, 0);
    assert_true(the_heap.peak < TINY_PEAK + 4 * bytes);
}

static void refuse_writer(gw *w, kvp_status status, const char *word)
{
    size_t bytes;
    uint8_t *data = gw_finish(w, &bytes);
    refuse(data, bytes, status, word);
    free(data);
}

/* --- what is read --- */

static gw sample(void)
{
    static const char *const words[] = {"", "a", "two words", "\xc3\xa9"};
    static const int32_t ints[] = {-1, 0, 7};
    static const uint32_t sizes[] = {5, 4000000000u};
    static const float floats[] = {0.5f, -2.0f};
    static const uint8_t bools[] = {1, 0, 1};
    int8_t minus = -3;
    uint16_t sixteen = 65535;
    int64_t large = 1;
    large <<= 40;
    double real = 0.25;
    uint8_t strange = 2;
    uint64_t dims[2] = {32, 3}, all[4] = {2, 3, 4, 5};
    gw w;
    gw_init(&w);
    gw_u32(&w, "z.u32", 42);
    gw_u64(&w, "u64", UINT64_MAX);
    gw_i32(&w, "negative", -5);
    gw_raw(&w, "i8", 1, &minus, 1);
    gw_raw(&w, "u16", 2, &sixteen, 2);
    gw_raw(&w, "i64", 11, &large, 8);
    gw_raw(&w, "f64", 12, &real, 8);
    gw_f32(&w, "f32", 1.5f);
    gw_bool(&w, "yes", 1);
    gw_raw(&w, "strange", 7, &strange, 1);
    gw_str(&w, "text", "hello");
    gw_strs(&w, "words", words, 4);
    gw_strs(&w, "none", words, 0);
    gw_i32s(&w, "ints", ints, 3);
    gw_u32s(&w, "sizes", sizes, 2);
    gw_f32s(&w, "floats", floats, 2);
    gw_bools(&w, "bools", bools, 3);
    gw_tensor(&w, "zeta", KVP__Q8_0, 2, dims, NULL, 3 * 34);
    gw_tensor(&w, "alpha", KVP__F16, 4, all, NULL, 240);
    return w;
}

static void test_values(void **state)
{
    (void)state;
    for (uint32_t version = 2; version <= 3; version++) {
        kvp__gguf g;
        kvp_error err;
        size_t bytes;
        gw w = sample();
        w.version = version;
        uint8_t *data = gw_finish(&w, &bytes);
        assert_int_equal(open_bytes(&g, data, bytes, &err), KVP_OK);
        assert_int_equal(g.version, version);
        uint32_t u = 9;
        uint64_t u64 = 9;
        float f = 9;
        bool yes = false;
        kvp__str text = {NULL, 0};
        assert_int_equal(kvp__gguf_u32(&g, "z.u32", &u, &err), KVP_OK);
        assert_int_equal(u, 42);
        assert_int_equal(kvp__gguf_u32(&g, "u16", &u, &err), KVP_OK);
        assert_int_equal(u, 65535);
        assert_int_equal(kvp__gguf_u64(&g, "i64", &u64, &err), KVP_OK);
        assert_int_equal(u64, 1ll << 40);
        assert_int_equal(kvp__gguf_u64(&g, "u64", &u64, &err), KVP_OK);
        assert_true(u64 == UINT64_MAX);
        assert_int_equal(kvp__gguf_f32(&g, "f64", &f, &err), KVP_OK);
        assert_true(f == 0.25f);
        assert_int_equal(kvp__gguf_f32(&g, "f32", &f, &err), KVP_OK);
        assert_true(f == 1.5f);
        assert_int_equal(kvp__gguf_bool(&g, "yes", &yes, &err), KVP_OK);
        assert_true(yes);
        assert_int_equal(kvp__gguf_string(&g, "text", &text, &err), KVP_OK);
        assert_true(kvp__str_is(text, "hello"));
        close_clean(&g);
        free(data);
    }
}

static void test_absent_and_wrong(void **state)
{
    (void)state;
    kvp__gguf g;
    kvp_error err;
    size_t bytes;
    gw w = sample();
    uint8_t *data = gw_finish(&w, &bytes);
    uint32_t u = 9;
    uint64_t u64 = 9;
    float f = 9;
    bool b = true;
    kvp__str text = {"kept", 4};
    kvp__gguf_array a;
    assert_int_equal(open_bytes(&g, data, bytes, &err), KVP_OK);
    assert_null(kvp__gguf_find(&g, "absent"));
    assert_null(kvp__gguf_find(&g, ""));
    assert_int_equal(kvp__gguf_u32(&g, "absent", &u, &err), KVP_OK);
    assert_int_equal(kvp__gguf_f32(&g, "absent", &f, &err), KVP_OK);
    assert_int_equal(kvp__gguf_bool(&g, "absent", &b, &err), KVP_OK);
    assert_int_equal(kvp__gguf_string(&g, "absent", &text, &err), KVP_OK);
    assert_int_equal(kvp__gguf_ints(&g, "absent", &a, &err), KVP_OK);
    assert_int_equal(a.count, 0);
    assert_int_equal(kvp__gguf_u32(&g, "negative", &u, &err), KVP_ERR_FORMAT);
    assert_non_null(strstr(err.text, "negative"));
    assert_int_equal(kvp__gguf_u32(&g, "i8", &u, &err), KVP_ERR_FORMAT);
    assert_int_equal(kvp__gguf_u32(&g, "i64", &u, &err), KVP_ERR_FORMAT);
    assert_int_equal(kvp__gguf_u32(&g, "u64", &u, &err), KVP_ERR_FORMAT);
    assert_int_equal(kvp__gguf_u64(&g, "f32", &u64, &err), KVP_ERR_FORMAT);
    assert_int_equal(kvp__gguf_u64(&g, "ints", &u64, &err), KVP_ERR_FORMAT);
    assert_int_equal(kvp__gguf_f32(&g, "z.u32", &f, &err), KVP_ERR_FORMAT);
    assert_int_equal(kvp__gguf_bool(&g, "z.u32", &b, &err), KVP_ERR_FORMAT);
    assert_int_equal(kvp__gguf_bool(&g, "strange", &b, &err), KVP_ERR_FORMAT);
    assert_int_equal(kvp__gguf_string(&g, "words", &text, &err), KVP_ERR_FORMAT);
    assert_int_equal(kvp__gguf_strings(&g, "text", &a, &err), KVP_ERR_FORMAT);
    assert_int_equal(kvp__gguf_strings(&g, "ints", &a, &err), KVP_ERR_FORMAT);
    assert_int_equal(kvp__gguf_floats(&g, "ints", &a, &err), KVP_ERR_FORMAT);
    assert_int_equal(kvp__gguf_ints(&g, "words", &a, &err), KVP_ERR_FORMAT);
    assert_non_null(strstr(err.text, "words"));
    assert_int_equal(u, 9);
    assert_int_equal(u64, 9);
    assert_true(f == 9 && b);
    assert_true(kvp__str_is(text, "kept"));
    close_clean(&g);
    free(data);
}

static void test_arrays(void **state)
{
    (void)state;
    kvp__gguf g;
    kvp_error err;
    size_t bytes;
    gw w = sample();
    uint64_t top = UINT64_MAX;
    gw_raw(&w, "longs", 9, "\x0a\0\0\0\1\0\0\0\0\0\0\0", 12); /* one U64 follows */
    gw_put(&w.keys, &top, 8);
    uint8_t *data = gw_finish(&w, &bytes);
    assert_int_equal(open_bytes(&g, data, bytes, &err), KVP_OK);
    kvp__gguf_array a;
    kvp__str s;
    static const char *const words[] = {"", "a", "two words", "\xc3\xa9"};
    assert_int_equal(kvp__gguf_strings(&g, "words", &a, &err), KVP_OK);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 4; i++) {
            assert_true(kvp__gguf_next(&a, &s));
            assert_true(kvp__str_is(s, words[i]));
        }
        assert_false(kvp__gguf_next(&a, &s));
        a.next = 0;
        a.at = a.data;
    }
    assert_int_equal(kvp__gguf_strings(&g, "none", &a, &err), KVP_OK);
    assert_false(kvp__gguf_next(&a, &s));
    assert_int_equal(kvp__gguf_ints(&g, "ints", &a, &err), KVP_OK);
    assert_int_equal(a.count, 3);
    assert_int_equal(kvp__gguf_int_at(&a, 0), -1);
    assert_int_equal(kvp__gguf_int_at(&a, 2), 7);
    assert_int_equal(kvp__gguf_ints(&g, "sizes", &a, &err), KVP_OK);
    assert_int_equal(kvp__gguf_int_at(&a, 1), 4000000000ll);
    assert_int_equal(kvp__gguf_ints(&g, "bools", &a, &err), KVP_OK);
    assert_int_equal(kvp__gguf_int_at(&a, 0) + 2 * kvp__gguf_int_at(&a, 1), 1);
    assert_int_equal(kvp__gguf_ints(&g, "longs", &a, &err), KVP_OK);
    assert_true(kvp__gguf_int_at(&a, 0) == INT64_MAX);
    assert_int_equal(kvp__gguf_floats(&g, "floats", &a, &err), KVP_OK);
    assert_true(kvp__gguf_float_at(&a, 1) == -2.0f);
    close_clean(&g);
    free(data);
}

static void test_tensors(void **state)
{
    (void)state;
    kvp__gguf g;
    kvp_error err;
    size_t bytes;
    gw w = sample();
    uint8_t *data = gw_finish(&w, &bytes);
    assert_int_equal(open_bytes(&g, data, bytes, &err), KVP_OK);
    assert_int_equal(g.n_tensors, 2);
    assert_int_equal(kvp__gguf_tensor(&g, "zeta"), 0);
    assert_int_equal(kvp__gguf_tensor(&g, "alpha"), 1);
    assert_true(kvp__gguf_tensor(&g, "beta") == UINT64_MAX);
    const kvp__tensor *t = &g.tensors[0];
    assert_string_equal(t->name, "zeta");
    assert_int_equal(t->bytes, 3 * 34);
    assert_int_equal(t->dims[0] * 1000 + t->dims[1] * 100 + t->dims[2] * 10 + t->dims[3], 32311);
    assert_int_equal(t->offset % 32, 0);
    assert_int_equal(g.tensors[1].offset, t->offset + 128);
    assert_int_equal(g.tensors[1].offset + g.tensors[1].bytes, bytes);
    assert_int_equal(g.tensors[1].dims[3], 5);
    close_clean(&g);
    free(data);
}

static void test_str_copy(void **state)
{
    (void)state;
    char out[8];
    assert_string_equal(kvp__str_copy(out, sizeof out, (kvp__str){"a\nb\x7f", 4}), "a?b?");
    assert_string_equal(kvp__str_copy(out, sizeof out, (kvp__str){"123456\xc3\xa9", 8}), "123456");
    assert_string_equal(kvp__str_copy(out, sizeof out, (kvp__str){"12345\xc3\xa9z", 8}),
                        "12345\xc3\xa9");
    assert_string_equal(kvp__str_copy(out, sizeof out, (kvp__str){"", 0}), "");
}

static void test_types(void **state)
{
    (void)state;
    static const struct {
        uint32_t type, block, bytes;
        const char *name;
    } known[] = {{0, 1, 4, "F32"},      {1, 1, 2, "F16"},      {2, 32, 18, "Q4_0"},
                 {3, 32, 20, "Q4_1"},   {6, 32, 22, "Q5_0"},   {7, 32, 24, "Q5_1"},
                 {8, 32, 34, "Q8_0"},   {10, 256, 84, "Q2_K"}, {11, 256, 110, "Q3_K"},
                 {12, 256, 144, "Q4_K"}, {13, 256, 176, "Q5_K"}, {14, 256, 210, "Q6_K"},
                 {30, 1, 2, "BF16"}};
    uint32_t taken = 0;
    for (uint32_t type = 0; type < 100; type++) taken += kvp__type_get(type).name != NULL;
    assert_int_equal(taken, KVP__COUNT(known));
    for (size_t i = 0; i < KVP__COUNT(known); i++) {
        kvp__type_info info = kvp__type_get(known[i].type);
        assert_string_equal(info.name, known[i].name);
        assert_int_equal(info.block, known[i].block);
        assert_int_equal(info.bytes, known[i].bytes);
    }
    assert_null(kvp__type_get(UINT32_MAX).name);
    assert_string_equal(kvp__type_name(23), "IQ4_XS");
    assert_string_equal(kvp__type_name(4), "of no known name");
}

/* --- what is refused --- */

static void test_not_gguf(void **state)
{
    (void)state;
    size_t bytes;
    gw w;
    refuse((const uint8_t *)"", 0, KVP_ERR_FORMAT, "header");
    refuse((const uint8_t *)"GGML....................", 24, KVP_ERR_FORMAT, "not a GGUF");
    static const struct {
        uint32_t version;
        const char *word;
    } versions[] = {{0, "version 0"}, {1, "version 1"}, {4, "version 4"}, {3u << 24, "big-endian"}};
    for (size_t i = 0; i < KVP__COUNT(versions); i++) {
        gw_init(&w);
        w.version = versions[i].version;
        refuse_writer(&w, KVP_ERR_UNSUPPORTED, versions[i].word);
    }
    kvp__gguf g;
    kvp_error err;
    gw_init(&w);
    uint8_t *data = gw_finish(&w, &bytes);
    assert_int_equal(open_bytes(&g, data, bytes, &err), KVP_OK); /* empty, but right */
    assert_int_equal(g.n_tensors + g.n_entries, 0);
    close_clean(&g);
    free(data);
}

static void test_duplicates(void **state)
{
    (void)state;
    uint64_t dims[1] = {8};
    gw w = sample();
    gw_u32(&w, "words", 1);
    refuse_writer(&w, KVP_ERR_FORMAT, "words");
    w = sample();
    gw_tensor(&w, "alpha", KVP__F32, 1, dims, NULL, 32);
    refuse_writer(&w, KVP_ERR_FORMAT, "alpha");
}

static void test_keys(void **state)
{
    (void)state;
    gw w;
    gw_init(&w);
    gw_u32(&w, "", 1);
    refuse_writer(&w, KVP_ERR_FORMAT, "empty");
    gw_init(&w);
    gw_raw(&w, "line\nbreak", 13, "\0\0\0\0\0\0\0", 8);
    refuse_writer(&w, KVP_ERR_FORMAT, "line?break: 13");
    gw_init(&w);
    gw_raw(&w, "odd", 9, "\x0d\0\0\0\1\0\0\0\0\0\0\0", 12);
    refuse_writer(&w, KVP_ERR_FORMAT, "odd: 13");
    gw_init(&w);
    gw_u32(&w, "general.alignment", 48);
    refuse_writer(&w, KVP_ERR_FORMAT, "general.alignment");
    gw_init(&w);
    gw_u32(&w, "general.alignment", 0);
    refuse_writer(&w, KVP_ERR_FORMAT, "general.alignment");
    gw_init(&w);
    gw_u32(&w, "split.count", 3);
    refuse_writer(&w, KVP_ERR_UNSUPPORTED, "3 files");
}

static void test_names_and_types(void **state)
{
    (void)state;
    static const char *const names[] = {"", "with space", "caf\xc3\xa9", "tab\there"};
    uint64_t dims[1] = {8}, odd[1] = {33};
    char name[300];
    gw w;
    for (size_t i = 0; i < KVP__COUNT(names); i++) {
        gw_init(&w);
        gw_tensor(&w, names[i], KVP__F32, 1, dims, NULL, 32);
        refuse_writer(&w, KVP_ERR_FORMAT, "tensor name");
    }
    memset(name, 'n', sizeof name);
    name[256] = 0;
    gw_init(&w);
    gw_tensor(&w, name, KVP__F32, 1, dims, NULL, 32);
    refuse_writer(&w, KVP_ERR_FORMAT, "256 bytes");
    gw_init(&w);
    gw_tensor(&w, "quant", 23, 1, dims, NULL, 32);
    refuse_writer(&w, KVP_ERR_UNSUPPORTED, "quant: type 23 (IQ4_XS)");
    gw_init(&w);
    gw_tensor(&w, "quant", 4000000000u, 1, dims, NULL, 32);
    refuse_writer(&w, KVP_ERR_UNSUPPORTED, "quant");
    gw_init(&w);
    gw_tensor(&w, "quant", KVP__Q4_0, 1, odd, NULL, 64);
    refuse_writer(&w, KVP_ERR_FORMAT, "quant: rows of 33");
}

static void case_b140(void **state)
{
    (void)state;
    static const uint32_t counts[] = {0, 5, 9, UINT32_MAX};
    uint64_t dims[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
    for (size_t i = 0; i < KVP__COUNT(counts); i++) {
        gw w;
        gw_init(&w);
        gw_tensor(&w, "dimensional", KVP__F32, 9, dims, NULL, 64);
        memcpy(w.table.data + 8 + strlen("dimensional"), &counts[i], 4);
        refuse_writer(&w, KVP_ERR_FORMAT, "dimensional");
    }
}

static void case_b142(void **state)
{
    (void)state;
    static const uint64_t shapes[][4] = {{4, 0, 9, 9}, {0, 9, 9, 9}, {1, 0, 3, 9},
                                         {1ull << 63, 2, 9, 9}, {1ull << 32, 1ull << 32, 1, 9},
                                         {UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX},
                                         {1ull << 62, 9, 9, 9}};
    static const uint32_t n_dims[] = {2, 1, 3, 2, 3, 4, 1};
    static const uint32_t types[] = {KVP__F32, KVP__Q4_0, KVP__Q6_K};
    for (size_t i = 0; i < KVP__COUNT(shapes); i++) {
        for (size_t k = 0; k < KVP__COUNT(types); k++) {
            gw w;
            gw_init(&w);
            gw_tensor(&w, "shape", types[k], n_dims[i], shapes[i], NULL, 64);
            refuse_writer(&w, KVP_ERR_FORMAT, "tensor shape");
        }
    }
}

/* A file of one key, with `count` at byte `at` of it. */
static void refuse_count(const uint8_t *data, size_t bytes, size_t at, uint64_t count)
{
    uint8_t *copy = malloc(bytes);
    assert_non_null(copy);
    memcpy(copy, data, bytes);
    memcpy(copy + at, &count, 8);
    refuse(copy, bytes, KVP_ERR_FORMAT, "");
    free(copy);
}

static void refuse_nested(void)
{
    gw w;
    gw_init(&w);
    gw_raw(&w, "nest", 9, NULL, 0);
    for (int depth = 0; depth < 1000; depth++) {
        gw_put_u32(&w.keys, 9);
        gw_put_u64(&w.keys, 1);
    }
    gw_put_u32(&w.keys, 0);
    gw_put_u64(&w.keys, 1);
    gw_put(&w.keys, "x", 1);
    refuse_writer(&w, KVP_ERR_FORMAT, "nest: arrays inside arrays");
}

/* Where the counts stand: keys, tensors, a key's length, a string's, an array's of each type, a
 * string's in an array, a tensor's name's. */
static void case_b144(void **state)
{
    (void)state;
    size_t bytes, at[24], n = 0;
    clock_t begin = clock();
    gw w;
    gw_init(&w);
    at[n++] = 8;
    at[n++] = 16;
    at[n++] = 24 + w.keys.bytes;
    gw_str(&w, "s", "text");
    at[n++] = 24 + 8 + 1 + 4;
    for (uint32_t type = 0; type < 13; type++) {
        if (type == 8 || type == 9) continue;
        char key[2] = {(char)('a' + type), 0};
        size_t size = type < 2 || type == 7 ? 1 : type < 4 ? 2 : type < 7 ? 4 : 8;
        gw_raw(&w, key, 9, NULL, 0);
        gw_put_u32(&w.keys, type);
        at[n++] = 24 + w.keys.bytes;
        gw_put_u64(&w.keys, 3);
        gw_put(&w.keys, NULL, 3 * size);
    }
    gw_strs(&w, "strings", (const char *const[]){"x", "y"}, 2);
    at[n++] = 24 + w.keys.bytes - 2 * 9 - 8;
    at[n++] = 24 + w.keys.bytes - 9;
    size_t name_at = 24 + w.keys.bytes;
    gw_tensor(&w, "t", KVP__F32, 1, (const uint64_t[]){8}, NULL, 32);
    uint8_t *data = gw_finish(&w, &bytes);
    kvp__gguf g;
    kvp_error err;
    assert_int_equal(open_bytes(&g, data, bytes, &err), KVP_OK);
    close_clean(&g);
    for (size_t i = 0; i <= n; i++) {
        size_t place = i < n ? at[i] : name_at;
        refuse_count(data, bytes, place, 1ull << 63);
        refuse_count(data, bytes, place, UINT64_MAX);
        refuse_count(data, bytes, place, 1ull << 32);
        refuse_count(data, bytes, place, bytes - place - 8 + 1);
    }
    free(data);
    refuse_nested();
    assert_true(clock() - begin < 2 * CLOCKS_PER_SEC);
}

/* A source that says it is huge and gives zeros, or strings without end. */
static int endless(void *user, uint64_t offset, void *buffer, size_t bytes)
{
    const uint8_t *head = user;
    for (size_t i = 0; i < bytes; i++) ((uint8_t *)buffer)[i] = offset + i < 64 ? head[offset + i] : 0;
    return 0;
}

static void test_endless(void **state)
{
    (void)state;
    uint8_t head[64] = "GGUF\3";
    uint64_t many = 1ull << 40, long_string = 1ull << 50;
    kvp__gguf g;
    kvp_error err = {.size = sizeof err};
    kvp__source source = {head, 1ull << 60, endless, NULL};
    memcpy(head + 16, &many, 8); /* keys without a letter */
    heap_init(&the_heap);
    assert_int_equal(kvp__gguf_open(&g, &the_heap.hooks, &source, &err), KVP_ERR_FORMAT);
    head[24] = 1;
    head[32] = 'k';
    head[33] = 8;
    memcpy(head + 37, &long_string, 8);
    assert_int_equal(kvp__gguf_open(&g, &the_heap.hooks, &source, &err), KVP_ERR_FORMAT);
    assert_non_null(strstr(err.text, "key k: the header is larger"));
    assert_int_equal(the_heap.blocks, 0);
    assert_true(the_heap.peak < TINY_PEAK);
}

static void case_b146(void **state)
{
    (void)state;
    size_t bytes;
    gw_model o = {.tokenizer = 1, .vocabulary = 80};
    uint8_t *data = gw_tiny(&o, &bytes);
    for (size_t i = 0; i < 64; i++) refuse(data, bytes * i / 64, KVP_ERR_FORMAT, "");
    for (size_t cut = 1; cut < 1500; cut++) refuse(data, cut, KVP_ERR_FORMAT, "");
    refuse(data, bytes - 1, KVP_ERR_FORMAT, "output_norm.weight");
    free(data);
}

/* The offset of the second of two tensors, replaced. */
static void refuse_offset(uint64_t offset, const char *word)
{
    uint64_t dims[1] = {16};
    gw w;
    gw_init(&w);
    gw_tensor(&w, "first", KVP__F32, 1, dims, NULL, 64);
    gw_tensor(&w, "second", KVP__F32, 1, dims, NULL, 64);
    memcpy(w.table.data + w.table.bytes - 8, &offset, 8);
    refuse_writer(&w, KVP_ERR_FORMAT, word);
}

static void case_b146_places(void **state)
{
    (void)state;
    refuse_offset(0, "second: its bytes overlap those of first");
    refuse_offset(32, "second: its bytes overlap those of first");
    refuse_offset(72, "second: offset 72 is not a multiple");
    refuse_offset(96, "second: its 64 bytes do not lie inside");
    refuse_offset(1ull << 63, "second: its 64 bytes do not lie inside");
    refuse_offset(UINT64_MAX - 31, "second: its 64 bytes do not lie inside"); /* in the header */
    refuse_offset(UINT64_MAX - 63, "second");
}

static void test_alignment(void **state)
{
    (void)state;
    kvp__gguf g;
    kvp_error err;
    size_t bytes;
    gw w;
    gw_init(&w);
    w.alignment = 4096;
    gw_u32(&w, "general.alignment", 4096);
    gw_tensor(&w, "a", KVP__F32, 1, (const uint64_t[]){3}, NULL, 12);
    gw_tensor(&w, "b", KVP__F32, 1, (const uint64_t[]){3}, NULL, 12);
    uint8_t *data = gw_finish(&w, &bytes);
    assert_int_equal(open_bytes(&g, data, bytes, &err), KVP_OK);
    assert_int_equal(g.data_offset, 4096);
    assert_int_equal(g.tensors[1].offset, 8192);
    close_clean(&g);
    free(data);
}

/* --- faults around it --- */

static void test_every_allocation_refused(void **state)
{
    (void)state;
    size_t bytes;
    gw w = sample();
    uint8_t *data = gw_finish(&w, &bytes);
    kvp__source source;
    kvp__source_memory(&source, data, bytes);
    kvp_status s = KVP_ERR_NO_MEMORY;
    uint64_t n = 0;
    while (s != KVP_OK) {
        kvp__gguf g;
        kvp_error err = {.size = sizeof err};
        heap_init(&the_heap);
        the_heap.refuse = ++n;
        s = kvp__gguf_open(&g, &the_heap.hooks, &source, &err);
        if (s == KVP_OK) {
            close_clean(&g);
            break;
        }
        assert_int_equal(s, KVP_ERR_NO_MEMORY);
        assert_int_equal(the_heap.blocks, 0);
        assert_true(n < 100);
    }
    assert_true(n > 5);
    free(data);
}

typedef struct faulty {
    const uint8_t *data;
    int reads, fails_at;
} faulty;

static int faulty_read(void *user, uint64_t offset, void *buffer, size_t bytes)
{
    faulty *f = user;
    if (f->reads++ == f->fails_at) return 1;
    memcpy(buffer, f->data + offset, bytes);
    return 0;
}

static void test_every_read_fails(void **state)
{
    (void)state;
    size_t bytes;
    char *long_text = calloc(1, 1000001);
    assert_non_null(long_text);
    memset(long_text, 'x', 1000000);
    gw w = sample();
    gw_str(&w, "long", long_text);
    free(long_text);
    uint8_t *data = gw_finish(&w, &bytes);
    int fails = 0;
    for (;; fails++) {
        faulty f = {data, 0, fails};
        kvp__source source = {&f, bytes, faulty_read, NULL};
        kvp__gguf g;
        kvp_error err = {.size = sizeof err};
        heap_init(&the_heap);
        kvp_status s = kvp__gguf_open(&g, &the_heap.hooks, &source, &err);
        if (s == KVP_OK) {
            close_clean(&g);
            break;
        }
        assert_int_equal(s, KVP_ERR_IO);
        assert_int_equal(the_heap.blocks, 0);
    }
    assert_int_equal(fails, 2); /* a step, then all of the long string at once */
    free(data);
}

/* Bytes changed at random: whatever comes of it, nothing is kept and nothing is read outside. */
static void test_mutations(void **state)
{
    (void)state;
    size_t bytes, opened = 0;
    uint64_t rng = 7;
    gw w = sample();
    uint8_t *data = gw_finish(&w, &bytes);
    uint8_t *copy = malloc(bytes);
    assert_non_null(copy);
    for (int round = 0; round < 20000; round++) {
        kvp__gguf g;
        kvp_error err;
        memcpy(copy, data, bytes);
        for (uint64_t n = gw_rand(&rng) % 4 + 1; n; n--)
            copy[gw_rand(&rng) % (bytes - 256)] = (uint8_t)(gw_rand(&rng) >> 40);
        kvp_status s = open_bytes(&g, copy, bytes, &err);
        if (s == KVP_OK) {
            opened++;
            close_clean(&g);
        }
        assert_int_equal(the_heap.blocks, 0);
        assert_true(the_heap.peak < TINY_PEAK);
    }
    assert_true(opened > 100);
    free(copy);
    free(data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_absent_and_wrong),
        cmocka_unit_test(test_arrays),
        cmocka_unit_test(test_tensors),
        cmocka_unit_test(test_str_copy),
        cmocka_unit_test(test_types),
        cmocka_unit_test(test_not_gguf),
        cmocka_unit_test(test_duplicates),
        cmocka_unit_test(test_keys),
        cmocka_unit_test(test_names_and_types),
        cmocka_unit_test(case_b140),
        cmocka_unit_test(case_b142),
        cmocka_unit_test(case_b144),
        cmocka_unit_test(test_endless),
        cmocka_unit_test(case_b146),
        cmocka_unit_test(case_b146_places),
        cmocka_unit_test(test_alignment),
        cmocka_unit_test(test_every_allocation_refused),
        cmocka_unit_test(test_every_read_fails),
        cmocka_unit_test(test_mutations),
    };
    return cmocka_run_group_tests_name("model/gguf", tests, NULL, NULL);
}
