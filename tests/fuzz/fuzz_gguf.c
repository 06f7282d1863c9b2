/*
 * Any bytes as a model file: the reader, the descriptor and the tokenizer's construction. Whatever
 * they are, memory stays within a small multiple of them and nothing is kept; a model that loads has
 * what it promises.
 */
#include "model/arch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/heap.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must(int holds, const char *what)
{
    if (holds) return;
    fprintf(stderr, "does not hold: %s\n", what);
    abort();
}

/* Reads every value through the getters, whatever its kind. */
static void look(const kvp__gguf *g)
{
    for (uint32_t i = 0; i < g->n_entries; i++) {
        const kvp__gguf_entry *e = &g->entries[g->by_key[i]];
        char key[256];
        kvp__gguf_array a;
        kvp__str s = {"", 0};
        float f = 0;
        uint64_t u = 0;
        bool b = false;
        if (e->key_bytes >= sizeof key || memchr(e->key, 0, e->key_bytes)) continue;
        memcpy(key, e->key, e->key_bytes);
        key[e->key_bytes] = 0;
        must(kvp__gguf_find(g, key) == e, "a key is found under its name");
        (void)kvp__gguf_u64(g, key, &u, NULL);
        (void)kvp__gguf_f32(g, key, &f, NULL);
        (void)kvp__gguf_bool(g, key, &b, NULL);
        if (kvp__gguf_string(g, key, &s, NULL) == KVP_OK) (void)kvp__str_copy(key, 16, s);
        if (kvp__gguf_strings(g, key, &a, NULL) == KVP_OK)
            while (kvp__gguf_next(&a, &s)) must(s.bytes <= g->buffer_bytes, "strings are inside");
        if (kvp__gguf_ints(g, key, &a, NULL) == KVP_OK && a.count)
            (void)kvp__gguf_int_at(&a, a.count - 1);
        if (kvp__gguf_floats(g, key, &a, NULL) == KVP_OK && a.count)
            (void)kvp__gguf_float_at(&a, a.count - 1);
    }
    for (uint32_t i = 0; i < g->n_tensors; i++)
        must(kvp__gguf_tensor(g, g->tensors[i].name) == i, "a tensor is found under its name");
}

static void check_model(const kvp__model *m, size_t size)
{
    uint32_t layers = 0;
    for (uint64_t i = 0; i < m->n_tensors; i++)
        must(m->tensors[i].offset + m->tensors[i].bytes <= size, "tensors lie in the file");
    for (uint32_t i = 0; i < m->geometry.n_groups; i++) layers += m->geometry.groups[i].layers;
    must(layers == m->arch.n_layers, "each layer is in a group");
    must(m->arch.output != NULL && m->arch.vocabulary > 0, "there is an output matrix");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static kvp__model m;
    heap h;
    kvp__gguf g;
    kvp__source source;
    kvp_error err = {.size = sizeof err};
    heap_init(&h);
    kvp__source_memory(&source, data, size);
    if (kvp__gguf_open(&g, &h.hooks, &source, &err) == KVP_OK) {
        look(&g);
        kvp__gguf_close(&g);
    } else {
        must(err.text[0] != 0 && !strchr(err.text, '\n'), "an error is one line");
    }
    if (kvp__model_load(&m, &h.hooks, &source, &err) == KVP_OK) {
        check_model(&m, size);
        kvp__model_unload(&m);
    }
    must(h.blocks == 0 && h.mismatches == 0, "nothing is kept");
    must(h.peak < (4u << 20) + 64 * size, "memory is bounded by the file");
    return 0;
}
