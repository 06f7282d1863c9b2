/*
 * Models: open, place, info.
 */
#include "api/api.h"

#include <stdio.h>
#include <string.h>

kvp__opened *kvp__opened_of(const kvp_model *handle)
{
    kvp__shell *shell = kvp__shell_of(handle, KVP__KIND_MODEL);
    return shell ? shell->object : NULL;
}

/* `source` is the callee's from here on, whatever comes. */
static kvp_status open_source(kvp__source *source, const kvp_model_options *o, kvp_model **out,
                              kvp_error *err)
{
    kvp__opened *m;
    kvp_status s = kvp__opened_from_source(&m, o, source, err);
    if (s == KVP_OK) *out = (kvp_model *)m->shell;
    return s;
}

/* What is wrong with a file's content is said of the file. */
static void name_file(kvp_error *err, const char *path)
{
    if (!err || err->size < sizeof *err) return;
    char line[sizeof err->text];
    const char *slash = strrchr(path, '/');
    snprintf(line, sizeof line, "%.80s: %.150s", slash ? slash + 1 : path, err->text);
    memcpy(err->text, line, sizeof line);
}

kvp_status kvp_model_open(const char *path, const kvp_model_options *options, kvp_model **out,
                          kvp_error *err)
{
    kvp_model_options o;
    kvp_status s = kvp__options_in(&o, sizeof o, options, "model options", err);
    if (s != KVP_OK) return s;
    if (!path || !out)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "%s: NULL", path ? "out" : "path");
    kvp__hooks hooks;
    s = kvp__hooks_fill(&hooks, o.hooks, err);
    if (s != KVP_OK) return s;
    kvp__source source;
    s = kvp__source_path(&source, &hooks, path, err);
    if (s != KVP_OK) return s;
    s = open_source(&source, &o, out, err);
    if (s != KVP_OK) name_file(err, path);
    return s;
}

kvp_status kvp_model_open_memory(const void *data, size_t bytes, const kvp_model_options *options,
                                 kvp_model **out, kvp_error *err)
{
    kvp_model_options o;
    kvp_status s = kvp__options_in(&o, sizeof o, options, "model options", err);
    if (s != KVP_OK) return s;
    if (!data || !out)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "%s: NULL", data ? "out" : "data");
    kvp__source source;
    kvp__source_memory(&source, data, bytes);
    return open_source(&source, &o, out, err);
}

kvp_status kvp_model_open_reader(const kvp_reader *reader, const kvp_model_options *options,
                                 kvp_model **out, kvp_error *err)
{
    kvp_reader r;
    kvp_model_options o;
    if (!reader || !out)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "%s: NULL", reader ? "out" : "reader");
    kvp_status s = kvp__options_in(&r, sizeof r, reader, "reader", err);
    if (s != KVP_OK) return s;
    if (!r.read) return kvp__fail(err, KVP_ERR_INVALID_ARG, "reader: read is NULL");
    s = kvp__options_in(&o, sizeof o, options, "model options", err);
    if (s != KVP_OK) {
        if (r.close) r.close(r.user);
        return s;
    }
    kvp__source source = {.user = r.user, .bytes = r.total_bytes, .read = r.read, .close = r.close};
    return open_source(&source, &o, out, err);
}

kvp_status kvp_model_create(const kvp_geometry *geometry, const kvp_model_options *options,
                            kvp_model **out, kvp_error *err)
{
    kvp_geometry g;
    kvp_model_options o;
    if (!geometry || !out)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "%s: NULL", geometry ? "out" : "geometry");
    kvp_status s = kvp__options_in(&g, sizeof g, geometry, "geometry", err);
    if (s == KVP_OK) s = kvp__options_in(&o, sizeof o, options, "model options", err);
    if (s != KVP_OK) return s;
    kvp__opened *m;
    s = kvp__opened_from_geometry(&m, &o, &g, err);
    if (s == KVP_OK) *out = (kvp_model *)m->shell;
    return s;
}

void kvp_model_destroy(kvp_model *model)
{
    kvp__shell *shell = kvp__shell_of(model, KVP__KIND_MODEL);
    if (!shell) return;
    kvp__opened *m = shell->object;
    if (kvp__shell_kill(shell, KVP__KIND_MODEL)) kvp__opened_close(m);
}

kvp_status kvp_model_place(kvp_model *model, const kvp_place_options *options, kvp_error *err)
{
    kvp__opened *m = kvp__opened_of(model);
    if (!m) return kvp__bad_handle(err, "model");
    kvp_place_options o;
    kvp_status s = kvp__options_in(&o, sizeof o, options, "place options", err);
    if (s != KVP_OK) return s;
    if (o.threads < KVP_THREADS_INLINE || o.threads > 1024)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "threads: %d is not from -1 to 1024",
                         (int)o.threads);
    kvp__place how = {.threads = o.threads, .progress = o.progress, .user = o.user,
                      .packed_file = o.packed_file};
    const kvp__device *device = kvp__device_find(o.device, &how.ordinal);
    if (!device)
        return kvp__fail(err, KVP_ERR_NO_DEVICE, "device \"%s\": there is none of that name",
                         o.device);
    if (o.packed_file && !m->own_model && m->model.source.changed_ns == 0)
        return kvp__fail(err, KVP_ERR_UNSUPPORTED,
                         "packed_file: the model was not opened by path, so its file is not known");
    return kvp__opened_place(m, device, &how, false, err);
}

static void fill_from_file(kvp_model_info *i, const kvp__opened *m)
{
    const kvp__model *f = &m->model;
    const kvp__arch *a = &f->arch;
    i->width = a->width;
    i->feed_forward = a->feed_forward;
    i->query_heads = a->query_heads;
    i->parameters = f->parameters;
    i->file_bytes = f->source.bytes;
    i->tensors = f->n_tensors;
    i->weight_bytes = f->weight_bytes;
    i->packed_bytes = m->cpu->packed_bytes(f);
    i->tied_embeddings = a->output == a->token_embedding;
    i->chat_format = f->chat_format;
    memcpy(i->name, f->name, sizeof i->name);
    memcpy(i->tokenizer, f->tokenizer_name, sizeof i->tokenizer);
    memcpy(i->pre_tokenizer, f->pre_tokenizer, sizeof i->pre_tokenizer);
    if (!f->tokenizer) return;
    kvp__tokenizer_info t;
    kvp__tokenizer_get_info(f->tokenizer, &t);
    i->has_tokenizer = t.encodes;
    i->bos_token = t.bos;
    i->eos_token = t.eos;
    i->unknown_token = t.unknown;
    i->adds_bos = t.adds_bos;
}

kvp_status kvp_model_get_info(const kvp_model *model, kvp_model_info *out)
{
    const kvp__opened *m = kvp__opened_of(model);
    if (!m) return KVP_ERR_INVALID_HANDLE;
    const kvp__model *f = &m->model;
    kvp_model_info i;
    memset(&i, 0, sizeof i);
    memcpy(i.architecture, f->arch.name, sizeof i.architecture);
    i.n_layers = f->geometry.n_layers;
    i.n_groups = f->geometry.n_groups;
    i.vocabulary = f->geometry.vocabulary;
    i.context = f->geometry.context;
    i.cpu_level = m->cpu->level(f->cpu_level);
    i.activations = f->activations;
    i.chat_format = KVP_CHAT_NONE;
    i.bos_token = i.eos_token = i.unknown_token = -1;
    i.placed = atomic_load(&m->n_placed) != 0;
    kvp_plan_options po = {.size = sizeof po, .tokens = 1};
    kvp_plan_result plan = {.size = sizeof plan};
    if (kvp__plan(&f->geometry, &po, &plan, NULL) == KVP_OK)
        i.kv_bytes_per_token = plan.kv_bytes_per_token;
    if (!m->own_model) fill_from_file(&i, m);
    return kvp__result_out(out, &i, sizeof i, "model info", NULL);
}

kvp_status kvp_model_get_group(const kvp_model *model, uint32_t index, kvp_layer_group *out,
                               size_t size)
{
    const kvp__opened *m = kvp__opened_of(model);
    if (!m) return KVP_ERR_INVALID_HANDLE;
    if (index >= m->model.geometry.n_groups || !out) return KVP_ERR_INVALID_ARG;
    const kvp_layer_group *g = &m->model.geometry.groups[index];
    memset(out, 0, size);
    memcpy(out, g, size < sizeof *g ? size : sizeof *g);
    return KVP_OK;
}

kvp_status kvp_model_get_tensor(const kvp_model *model, uint64_t index, kvp_tensor_info *out)
{
    const kvp__opened *m = kvp__opened_of(model);
    if (!m) return KVP_ERR_INVALID_HANDLE;
    if (index >= m->model.n_tensors) return KVP_ERR_INVALID_ARG;
    const kvp__tensor *t = &m->model.tensors[index];
    kvp_tensor_info i;
    memset(&i, 0, sizeof i);
    i.n_dims = t->n_dims;
    for (uint32_t d = 0; d < 4; d++) i.dims[d] = d < t->n_dims ? t->dims[d] : 1;
    i.bytes = t->bytes;
    i.offset = t->offset;
    i.name = t->name;
    i.type = kvp__type_get(t->type).name;
    return kvp__result_out(out, &i, sizeof i, "tensor info", NULL);
}
