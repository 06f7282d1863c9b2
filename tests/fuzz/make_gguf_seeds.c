/*
 * Writes the seeds of fuzz_gguf: small models of every architecture, a file with every kind of value,
 * and files that are wrong in one way each. From the top of the repository:
 *
 *     cc -Iinclude -Ilib -Itests tests/fuzz/make_gguf_seeds.c tests/support/gguf_writer.c \
 *         lib/model/types.c -lm -o build/seeds && build/seeds tests/fuzz/seeds/gguf
 */
#include "support/gguf_writer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *folder;

static void save(gw *w, const char *name)
{
    char path[512];
    size_t bytes;
    uint8_t *data = gw_finish(w, &bytes);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, bytes, f) != bytes || fclose(f) != 0) exit(1);
    free(data);
}

static const gw_model smallest = {.layers = 1, .heads = 1, .kv_heads = 1, .head_dim = 2, .width = 2,
                                  .feed_forward = 2, .vocabulary = 4};

static gw begin(const char *arch)
{
    gw_model o = smallest;
    gw w;
    o.arch = arch;
    gw_init(&w);
    gw_tiny_into(&w, &o);
    return w;
}

static void models(void)
{
    static const char *const archs[] = {"llama", "qwen2", "qwen3", "gemma3", "mamba"};
    static const uint32_t heads[] = {1};
    static const uint8_t local[] = {1};
    static const float factors[] = {2};
    for (int i = 0; i < 5; i++) {
        gw w = begin(archs[i]);
        save(&w, archs[i]);
    }
    gw w;
    gw_model o = smallest;
    gw_init(&w);
    gw_skip(&w, "llama.attention.head_count_kv");
    gw_tiny_into(&w, &o);
    gw_u32s(&w, "llama.attention.head_count_kv", heads, 1);
    gw_u32(&w, "llama.attention.sliding_window", 4);
    gw_bools(&w, "llama.attention.sliding_window_pattern", local, 1);
    gw_str(&w, "llama.rope.scaling.type", "yarn");
    gw_f32(&w, "llama.rope.scaling.factor", 4);
    gw_u32(&w, "llama.rope.scaling.original_context_length", 64);
    gw_f32(&w, "llama.rope.scaling.yarn_log_multiplier", 1);
    gw_tensor(&w, "rope_freqs.weight", 0, 1, (const uint64_t[]){1}, factors, 4);
    save(&w, "keys");
    o.vocabulary = 80;
    o.tokenizer = 1;
    gw_init(&w);
    gw_tiny_into(&w, &o);
    save(&w, "tokenizer");
    w = begin("llama");
    w.version = 2;
    save(&w, "version2");
}

static gw values(void)
{
    static const char *const words[] = {"", "two words"};
    static const int32_t ints[] = {-1, 7};
    static const float floats[] = {0.5f};
    static const uint8_t eight[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    static const uint32_t types[] = {0, 1, 2, 3, 10, 11, 12};
    static const size_t sizes[] = {1, 1, 2, 2, 8, 8, 8};
    char key[8] = "value0";
    gw w;
    gw_init(&w);
    for (int i = 0; i < 7; i++, key[5]++) {
        gw_raw(&w, key, types[i], eight, sizes[i]);
        key[0] = 'a';
        gw_raw(&w, key, 9, NULL, 0);
        gw_put_u32(&w.keys, types[i]);
        gw_put_u64(&w.keys, 1);
        gw_put(&w.keys, eight, sizes[i]);
        key[0] = 'v';
    }
    gw_bool(&w, "bool", 1);
    gw_f32(&w, "f32", 1.5f);
    gw_str(&w, "str", "text");
    gw_strs(&w, "strs", words, 2);
    gw_i32s(&w, "ints", ints, 2);
    gw_f32s(&w, "floats", floats, 1);
    gw_u32(&w, "general.alignment", 8);
    w.alignment = 8;
    gw_tensor(&w, "b", 8, 1, (const uint64_t[]){32}, NULL, 34);
    gw_tensor(&w, "a", 1, 4, (const uint64_t[]){1, 2, 1, 2}, NULL, 8);
    return w;
}

/* Each changes one thing of a file with every kind of value. */
static void wrong_tensors(void)
{
    static const struct {
        const char *name, *tensor;
        uint32_t type, n_dims;
        uint64_t dims[4];
    } list[] = {{"dims0", "t", 0, 0, {0}},          {"dims5", "t", 0, 5, {1, 1, 1, 1}},
                {"zero", "t", 0, 2, {4, 0}},        {"type", "t", 23, 1, {32}},
                {"block", "t", 2, 1, {31}},         {"overflow", "t", 0, 2, {1ull << 62, 8}},
                {"twice", "a", 0, 1, {1}},          {"name", "sp ace", 0, 1, {1}},
                {"beyond", "t", 0, 1, {1000}}};
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        gw w = values();
        uint64_t dims[8] = {list[i].dims[0], list[i].dims[1], list[i].dims[2], list[i].dims[3], 1};
        gw_tensor(&w, list[i].tensor, list[i].type, list[i].n_dims, dims, NULL, 4);
        save(&w, list[i].name);
    }
    static const uint64_t offsets[] = {0, 4, UINT64_MAX - 7};
    for (int i = 0; i < 3; i++) {
        char name[] = "offset0";
        gw w = values();
        gw_tensor(&w, "t", 0, 1, (const uint64_t[]){1}, NULL, 4);
        memcpy(w.table.data + w.table.bytes - 8, &offsets[i], 8);
        name[6] = (char)('0' + i);
        save(&w, name);
    }
}

static void wrong_keys(void)
{
    gw w = values();
    gw_raw(&w, "nested", 9, "\x9\0\0\0\1\0\0\0\0\0\0\0", 12);
    save(&w, "nested");
    w = values();
    gw_raw(&w, "element", 9, "\x0d\0\0\0\1\0\0\0\0\0\0\0", 12);
    save(&w, "element");
    w = values();
    gw_raw(&w, "count", 9, "\0\0\0\0\xff\xff\xff\xff\0\0\0\0", 12);
    save(&w, "count");
    w = values();
    gw_raw(&w, "kind", 13, "\0", 1);
    save(&w, "kind");
    w = values();
    gw_str(&w, "", "empty key");
    save(&w, "empty");
    w = values();
    gw_str(&w, "str", "again");
    save(&w, "key-twice");
    w = values();
    gw_u32(&w, "split.count", 2);
    save(&w, "split");
    gw_init(&w);
    gw_u32(&w, "general.alignment", 3);
    save(&w, "alignment");
    gw_init(&w);
    gw_raw(&w, "long", 8, "\xff\xff\xff\xff\xff\xff\xff\xff", 8);
    save(&w, "long");
    gw_init(&w);
    w.version = 3u << 24;
    save(&w, "big-endian");
    gw_init(&w);
    w.version = 1;
    save(&w, "version1");
}

int main(int argc, char **argv)
{
    if (argc != 2) return 2;
    folder = argv[1];
    gw w = values();
    save(&w, "values");
    models();
    wrong_tensors();
    wrong_keys();
    return 0;
}
