/*
 * Loading a model: the file's header, the descriptor, the tokenizer, put together. What stays of the
 * header is copied; its buffer is gone when the load is over.
 */
#include "model/arch.h"

#include "base/team.h"
#include "model/tokenizer.h"

#include <string.h>

/* --- memory that lives as long as the model --- */

typedef struct piece {
    struct piece *next;
    size_t size; /* as allocated */
} piece;

_Static_assert(sizeof(piece) <= KVP__CACHE_LINE, "a piece's head takes one cache line");

void *kvp__model_take(kvp__model *m, size_t size)
{
    if (size > SIZE_MAX - KVP__CACHE_LINE) return NULL;
    piece *p = kvp__alloc_zero(&m->hooks, size + KVP__CACHE_LINE);
    if (!p) return NULL;
    p->next = m->arena;
    p->size = size + KVP__CACHE_LINE;
    m->arena = p;
    return (char *)p + KVP__CACHE_LINE;
}

static void free_pieces(kvp__model *m)
{
    for (piece *p = m->arena, *next; p; p = next) {
        next = p->next;
        kvp__free(&m->hooks, p, p->size);
    }
    m->arena = NULL;
}

/* --- parts --- */

static kvp_status copy_tensors(kvp__model *m, const kvp__gguf *g, kvp_error *err)
{
    m->n_tensors = g->n_tensors;
    m->tensors = kvp__model_take(m, (size_t)g->n_tensors * sizeof *m->tensors);
    char *names = kvp__model_take(m, g->names_bytes);
    if (!m->tensors || !names)
        return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for %u tensors", (unsigned)g->n_tensors);
    if (g->names_bytes) memcpy(names, g->names, g->names_bytes);
    for (uint32_t i = 0; i < g->n_tensors; i++) {
        kvp__tensor *t = &m->tensors[i];
        *t = g->tensors[i];
        t->name = names + (t->name - g->names);
        m->weight_bytes += t->bytes;
        if (strcmp(t->name, "rope_freqs.weight") != 0)
            m->parameters += t->dims[0] * t->dims[1] * t->dims[2] * t->dims[3];
    }
    return KVP_OK;
}

static kvp_status copy_string(const kvp__gguf *g, const char *key, char *out, size_t size,
                              kvp_error *err)
{
    kvp__str text = {"", 0};
    kvp_status s = kvp__gguf_string(g, key, &text, err);
    if (s == KVP_OK) kvp__str_copy(out, size, text);
    return s;
}

/* A file without a tokenizer, or with one of another kind, is a model that takes ids alone. */
static kvp_status load_tokenizer(kvp__model *m, const kvp__gguf *g, kvp_error *err)
{
    kvp_error why;
    memset(&why, 0, sizeof why);
    why.size = sizeof why;
    kvp_status s = copy_string(g, "tokenizer.ggml.model", m->tokenizer_name,
                               sizeof m->tokenizer_name, err);
    if (s == KVP_OK)
        s = copy_string(g, "tokenizer.ggml.pre", m->pre_tokenizer, sizeof m->pre_tokenizer, err);
    if (s != KVP_OK) return s;
    m->chat_format = KVP_CHAT_NONE;
    s = kvp__tokenizer_create(&m->tokenizer, &m->hooks, g, &why);
    if (s == KVP_ERR_NO_TOKENIZER) {
        m->tokenizer = NULL;
        m->tokenizer_error = why;
        return KVP_OK;
    }
    if (s != KVP_OK) {
        m->tokenizer = NULL;
        return kvp__fail(err, s, "%s", why.text);
    }
    kvp__tokenizer_info info;
    kvp__tokenizer_get_info(m->tokenizer, &info);
    m->chat_format = info.chat_format;
    if (info.vocabulary > m->arch.vocabulary)
        return kvp__fail(err, KVP_ERR_INVALID_MODEL,
                         "the tokenizer has %u tokens, token_embd.weight only %u rows",
                         (unsigned)info.vocabulary, (unsigned)m->arch.vocabulary);
    return KVP_OK;
}

static kvp_status load_parts(kvp__model *m, const kvp__gguf *g, kvp_error *err)
{
    kvp_status s = copy_string(g, "general.name", m->name, sizeof m->name, err);
    if (s == KVP_OK) s = copy_tensors(m, g, err);
    /* Scales and frequencies enter every result: the host's rounding mode must not. */
    kvp__fp_state fp = kvp__fp_enter();
    if (s == KVP_OK) s = kvp__arch_fill(m, g, err);
    kvp__fp_leave(fp);
    if (s == KVP_OK) s = load_tokenizer(m, g, err);
    return s;
}

static void forget(kvp__model *m)
{
    kvp__tokenizer_destroy(m->tokenizer);
    m->tokenizer = NULL;
    free_pieces(m);
}

kvp_status kvp__model_load(kvp__model *out, const kvp__hooks *hooks, const kvp__source *source,
                           kvp_error *err)
{
    kvp__gguf g;
    memset(out, 0, sizeof *out);
    kvp_status s = kvp__gguf_open(&g, hooks, source, err);
    if (s != KVP_OK) return s;
    out->hooks = *hooks;
    out->source = *source;
    s = load_parts(out, &g, err);
    kvp__gguf_close(&g);
    if (s != KVP_OK) {
        forget(out);
        memset(out, 0, sizeof *out);
    }
    return s;
}

void kvp__model_unload(kvp__model *m)
{
    forget(m);
    if (m->source.close) m->source.close(m->source.user);
    memset(m, 0, sizeof *m);
}
