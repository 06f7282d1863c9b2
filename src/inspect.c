/* `kvpage inspect`: what is in a model file. Nothing but its header is read. */
#include "tool.h"

#include <stdarg.h>
#include <string.h>

enum { TYPES_MAX = 32 };

/* How much of the file each tensor type takes. */
typedef struct type_sum {
    const char *name;
    uint64_t tensors, bytes;
} type_sum;

static size_t sum_types(const kvp_model *model, uint64_t tensors, type_sum out[TYPES_MAX])
{
    kvp_tensor_info t = {.size = sizeof t};
    size_t n = 0;
    for (uint64_t i = 0; i < tensors && kvp_model_get_tensor(model, i, &t) == KVP_OK; i++) {
        size_t k = 0;
        while (k < n && strcmp(out[k].name, t.type)) k++;
        if (k == n) {
            if (n == TYPES_MAX) continue;
            out[n++] = (type_sum){.name = t.type};
        }
        out[k].tensors++;
        out[k].bytes += t.bytes;
    }
    return n;
}

/* --- text --- */

static void row(const char *name, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void row(const char *name, const char *format, ...)
{
    va_list args;
    printf("%-18s ", name);
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf("\n");
}

static void print_token(const kvp_model *model, const char *name, int32_t token)
{
    char text[64];
    size_t n = 0;
    if (token < 0) return;
    if (kvp_detokenize(model, &token, 1, KVP_DETOKENIZE_SPECIAL, text, sizeof text, &n, NULL) < 0)
        n = 0;
    row(name, "%d  %.*s", token, (int)n, text);
}

static void print_groups(const kvp_model *model, const kvp_model_info *info)
{
    kvp_layer_group g;
    for (uint32_t i = 0; i < info->n_groups; i++) {
        char window[48] = "";
        if (kvp_model_get_group(model, i, &g, sizeof g) < 0) return;
        if (g.window) snprintf(window, sizeof window, ", window %u", g.window);
        row(i ? "" : "attention", "%u layers: query heads %u, KV heads %u, of %u%s", g.layers,
            g.query_heads, g.kv_heads, g.key_dim, window);
    }
}

static void print_types(const type_sum *types, size_t n)
{
    char size[32];
    for (size_t i = 0; i < n; i++)
        row(i ? "" : "tensor types", "%-5s %6llu tensors  %s", types[i].name,
            (unsigned long long)types[i].tensors, format_bytes(size, types[i].bytes));
}

static void print_info(const kvp_model *model, const kvp_model_info *m)
{
    char a[32], b[32];
    type_sum types[TYPES_MAX];
    row("architecture", "%s", m->architecture);
    if (m->name[0]) row("name", "%s", m->name);
    row("parameters", "%.1f M", (double)m->parameters / 1e6);
    row("layers", "%u", m->n_layers);
    row("width", "%u, feed-forward %u", m->width, m->feed_forward);
    print_groups(model, m);
    row("context", "%u tokens", m->context);
    row("embeddings", "%u tokens, %s", m->vocabulary,
        m->tied_embeddings ? "tied: also the output matrix" : "the output matrix is its own");
    row("KV cache", "%llu bytes per token in f16, %s for the context",
        (unsigned long long)m->kv_bytes_per_token,
        format_bytes(a, m->kv_bytes_per_token * m->context));
    row("file", "%s, %llu tensors, weights %s", format_bytes(a, m->file_bytes),
        (unsigned long long)m->tensors, format_bytes(b, m->weight_bytes));
    row("in memory", "%s once packed for the CPU", format_bytes(a, m->packed_bytes));
    print_types(types, sum_types(model, m->tensors, types));
    if (m->tokenizer[0])
        row("tokenizer", "%s%s%s%s", m->tokenizer, m->pre_tokenizer[0] ? ", " : "",
            m->pre_tokenizer,
            m->has_tokenizer ? "" : " (not understood: takes token ids, refuses text)");
    else row("tokenizer", "none");
    print_token(model, "BOS token", m->bos_token);
    print_token(model, "EOS token", m->eos_token);
    print_token(model, "unknown token", m->unknown_token);
    row("chat format", "%s", chat_format_name(m->chat_format));
    row("runs with", "%s instructions, %s activations", cpu_level_name(m->cpu_level),
        activations_name(m->activations));
}

static void print_tensors(const kvp_model *model, uint64_t n)
{
    kvp_tensor_info t = {.size = sizeof t};
    printf("\n");
    for (uint64_t i = 0; i < n && kvp_model_get_tensor(model, i, &t) == KVP_OK; i++) {
        char dims[96] = "";
        for (uint32_t d = 0; d < t.n_dims && d < 4; d++)
            snprintf(dims + strlen(dims), sizeof dims - strlen(dims), "%s%llu", d ? " x " : "",
                     (unsigned long long)t.dims[d]);
        printf("%-40s %-5s %-20s %12llu bytes at %llu\n", t.name, t.type, dims,
               (unsigned long long)t.bytes, (unsigned long long)t.offset);
    }
}

/* --- JSON --- */

static void json_groups(json *j, const kvp_model *model, uint32_t n)
{
    kvp_layer_group g;
    json_open(j, "groups", '[');
    for (uint32_t i = 0; i < n && kvp_model_get_group(model, i, &g, sizeof g) == KVP_OK; i++) {
        json_open(j, NULL, '{');
        json_uint(j, "layers", g.layers);
        json_uint(j, "query_heads", g.query_heads);
        json_uint(j, "kv_heads", g.kv_heads);
        json_uint(j, "key_dim", g.key_dim);
        json_uint(j, "value_dim", g.value_dim);
        json_uint(j, "window", g.window);
        json_close(j, '}');
    }
    json_close(j, ']');
}

static void json_types(json *j, const kvp_model *model, uint64_t tensors)
{
    type_sum types[TYPES_MAX];
    size_t n = sum_types(model, tensors, types);
    json_open(j, "tensor_types", '[');
    for (size_t i = 0; i < n; i++) {
        json_open(j, NULL, '{');
        json_string(j, "type", types[i].name);
        json_uint(j, "tensors", types[i].tensors);
        json_uint(j, "bytes", types[i].bytes);
        json_close(j, '}');
    }
    json_close(j, ']');
}

static void json_tensors(json *j, const kvp_model *model, uint64_t n)
{
    kvp_tensor_info t = {.size = sizeof t};
    json_open(j, "tensors", '[');
    for (uint64_t i = 0; i < n && kvp_model_get_tensor(model, i, &t) == KVP_OK; i++) {
        json_open(j, NULL, '{');
        json_string(j, "name", t.name);
        json_string(j, "type", t.type);
        json_open(j, "dims", '[');
        for (uint32_t d = 0; d < t.n_dims && d < 4; d++) json_uint(j, NULL, t.dims[d]);
        json_close(j, ']');
        json_uint(j, "bytes", t.bytes);
        json_uint(j, "offset", t.offset);
        json_close(j, '}');
    }
    json_close(j, ']');
}

static void json_info(const kvp_model *model, const kvp_model_info *m, bool tensors)
{
    json j = {.out = stdout, .first = true};
    json_open(&j, NULL, '{');
    json_string(&j, "architecture", m->architecture);
    json_string(&j, "name", m->name);
    json_uint(&j, "parameters", m->parameters);
    json_uint(&j, "layers", m->n_layers);
    json_uint(&j, "width", m->width);
    json_uint(&j, "feed_forward", m->feed_forward);
    json_uint(&j, "query_heads", m->query_heads);
    json_groups(&j, model, m->n_groups);
    json_uint(&j, "vocabulary", m->vocabulary);
    json_uint(&j, "context", m->context);
    json_bool(&j, "tied_embeddings", m->tied_embeddings != 0);
    json_uint(&j, "kv_bytes_per_token", m->kv_bytes_per_token);
    json_uint(&j, "file_bytes", m->file_bytes);
    json_uint(&j, "weight_bytes", m->weight_bytes);
    json_uint(&j, "packed_bytes", m->packed_bytes);
    json_types(&j, model, m->tensors);
    json_string(&j, "tokenizer", m->tokenizer);
    json_string(&j, "pre_tokenizer", m->pre_tokenizer);
    json_bool(&j, "has_tokenizer", m->has_tokenizer != 0);
    json_int(&j, "bos_token", m->bos_token);
    json_int(&j, "eos_token", m->eos_token);
    json_int(&j, "unknown_token", m->unknown_token);
    json_bool(&j, "adds_bos", m->adds_bos != 0);
    json_string(&j, "chat_format", chat_format_name(m->chat_format));
    json_string(&j, "cpu_level", cpu_level_name(m->cpu_level));
    json_string(&j, "activations", activations_name(m->activations));
    if (tensors) json_tensors(&j, model, m->tensors);
    json_close(&j, '}');
    json_line(&j);
}

int command_inspect(int argc, char **argv)
{
    bool as_json = false, tensors = false;
    const option own[] = {
        {.name = "tensors", .kind = OPTION_FLAG, .value = &tensors, .help = "list every tensor"},
        {.name = "json", .kind = OPTION_FLAG, .value = &as_json, .help = "as JSON"},
        {.name = NULL}};
    const option_group groups[] = {{"options", own}, {NULL, NULL}};
    const usage u = {"inspect MODEL",
                     "Shows a model file's architecture, tensors and tokenizer. No weight is "
                     "read.\n",
                     groups, 1, 1};
    kvp_model_info info = {.size = sizeof info};
    kvp_error err = {.size = sizeof err};
    kvp_model *model = NULL;
    arguments args;
    int code;

    if (!options_read(&u, argc, argv, &args, &code)) return code;
    if (kvp_model_open(args.items[0], NULL, &model, &err) < 0) return fail_with(&err);
    kvp_model_get_info(model, &info);
    if (as_json) {
        json_info(model, &info, tensors);
    } else {
        print_info(model, &info);
        if (tensors) print_tensors(model, info.tensors);
    }
    kvp_model_destroy(model);
    return EXIT_DONE;
}
