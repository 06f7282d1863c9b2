/*
 * Opening and placing models. See opened.h.
 */
#include "engine/opened.h"

#include <string.h>

static void finish(kvp__origin *origin)
{
    kvp__opened *m = (kvp__opened *)origin;
    kvp__weights *w = atomic_load(&m->weights);
    if (w) m->device->unplace(w);
    if (!m->own_model) kvp__model_unload(&m->model);
    pthread_mutex_destroy(&m->placing);
}

static kvp_status check_options(const kvp_model_options *o, const kvp__device *device,
                                kvp_error *err)
{
    if (o->activations > KVP_ACTIVATIONS_F32)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "activations: %u is not KVP_ACTIVATIONS_...",
                         (unsigned)o->activations);
    if (o->cpu_level > KVP_CPU_AMX)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "cpu_level: %u is not KVP_CPU_...",
                         (unsigned)o->cpu_level);
    if (device->level(o->cpu_level) == 0)
        return kvp__fail(err, KVP_ERR_UNSUPPORTED, "cpu_level %u: this machine has no such level",
                         (unsigned)o->cpu_level);
    return KVP_OK;
}

/* An object with an origin, a handle, and no model in it yet. */
static kvp_status make(kvp__opened **out, const kvp_model_options *options, kvp_error *err)
{
    kvp__hooks hooks;
    kvp_status s = kvp__hooks_fill(&hooks, options->hooks, err);
    if (s != KVP_OK) return s;
    uint32_t ordinal;
    const kvp__device *device = kvp__device_find(NULL, &ordinal);
    s = check_options(options, device, err);
    if (s != KVP_OK) return s;
    kvp__opened *m = kvp__alloc_zero(&hooks, sizeof *m);
    if (!m) return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for a model");
    s = kvp__origin_init(&m->origin, &hooks, sizeof *m, finish, err);
    if (s != KVP_OK) {
        kvp__free(&hooks, m, sizeof *m);
        return s;
    }
    m->device = device;
    pthread_mutex_init(&m->placing, NULL);
    m->model.hooks = hooks;
    m->model.activations = options->activations ? options->activations : KVP_ACTIVATIONS_INT8;
    m->model.cpu_level = options->cpu_level;
    m->own_model = true; /* until a file has been loaded: nothing to unload */
    *out = m;
    return KVP_OK;
}

/* Gives up an object that failed on its way, without the `released` call: nobody has seen it. */
static void unmake(kvp__opened *m)
{
    m->origin.hooks.released = NULL;
    kvp__origin_release(&m->origin);
}

static kvp_status give_handle(kvp__opened *m, kvp__opened **out, kvp_error *err)
{
    m->shell = kvp__shell_make(&m->origin, KVP__KIND_MODEL, m, NULL);
    if (!m->shell) {
        unmake(m);
        return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for a model's handle");
    }
    *out = m;
    return KVP_OK;
}

kvp_status kvp__opened_from_source(kvp__opened **out, const kvp_model_options *options,
                                   kvp__source *source, kvp_error *err)
{
    kvp__opened *m;
    kvp_status s = make(&m, options, err);
    if (s != KVP_OK) {
        if (source->close) source->close(source->user);
        return s;
    }
    kvp__model loaded;
    memset(&loaded, 0, sizeof loaded);
    s = kvp__model_load(&loaded, &m->origin.hooks, source, err);
    if (s != KVP_OK) {
        if (source->close) source->close(source->user);
        unmake(m);
        return s;
    }
    loaded.activations = m->model.activations;
    loaded.cpu_level = m->model.cpu_level;
    m->model = loaded;
    m->own_model = false;
    return give_handle(m, out, err);
}

kvp_status kvp__opened_from_geometry(kvp__opened **out, const kvp_model_options *options,
                                     const kvp_geometry *geometry, kvp_error *err)
{
    kvp__opened *m;
    kvp_status s = make(&m, options, err);
    if (s != KVP_OK) return s;
    s = kvp__geometry_fill(&m->model.geometry, geometry, err);
    if (s == KVP_OK && geometry->model_key_bytes > sizeof m->model.key)
        s = kvp__fail(err, KVP_ERR_INVALID_ARG, "model_key_bytes: %llu is above %zu",
                      (unsigned long long)geometry->model_key_bytes, sizeof m->model.key);
    if (s == KVP_OK && geometry->model_key_bytes && !geometry->model_key)
        s = kvp__fail(err, KVP_ERR_INVALID_ARG, "model_key: NULL with model_key_bytes %llu",
                      (unsigned long long)geometry->model_key_bytes);
    if (s != KVP_OK) {
        unmake(m);
        return s;
    }
    m->model.key_bytes = (uint32_t)geometry->model_key_bytes;
    if (m->model.key_bytes) memcpy(m->model.key, geometry->model_key, m->model.key_bytes);
    strcpy(m->model.arch.name, "geometry");
    return give_handle(m, out, err);
}

kvp_status kvp__opened_place(kvp__opened *m, const kvp__place *how, bool wait, kvp_error *err)
{
    if (m->own_model)
        return kvp__fail(err, KVP_ERR_UNSUPPORTED, "an own-model geometry has no weights to place");
    if (atomic_load(&m->weights)) return KVP_OK;
    uint64_t me = (uint64_t)(uintptr_t)pthread_self();
    if (atomic_load(&m->placer) == me)
        return kvp__fail(err, KVP_ERR_REENTRANT, "called from the progress hook of a placement");
    if (wait)
        pthread_mutex_lock(&m->placing);
    else if (pthread_mutex_trylock(&m->placing) != 0)
        return kvp__fail(err, KVP_ERR_BUSY, "another thread is placing this model");
    kvp_status s = KVP_OK;
    if (!atomic_load(&m->weights)) {
        atomic_store(&m->placer, me);
        kvp__weights *w = NULL;
        s = m->device->place(&m->model, how, &w, err);
        if (s == KVP_OK) atomic_store(&m->weights, w);
        atomic_store(&m->placer, 0);
    }
    pthread_mutex_unlock(&m->placing);
    return s;
}

void kvp__opened_close(kvp__opened *m)
{
    kvp__shell_give_back(m->shell);
    kvp__origin_release(&m->origin);
}
