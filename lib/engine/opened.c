/*
 * Opening and placing models. See opened.h.
 */
#include "engine/opened.h"

#include <string.h>

/* The memory of an asynchronous device is its parent's alone after a fork. */
static bool is_usable(const kvp__opened *m, const kvp__placed *p)
{
    return !p->device->asynchronous || kvp__origin_is_ours(&m->origin, p->generation);
}

static void finish(kvp__origin *origin)
{
    kvp__opened *m = (kvp__opened *)origin;
    for (uint32_t i = 0; i < atomic_load(&m->n_placed); i++)
        if (is_usable(m, &m->placed[i])) m->placed[i].device->unplace(m->placed[i].weights);
    if (!m->own_model) kvp__model_unload(&m->model);
    pthread_mutex_destroy(&m->placing);
}

static kvp_status check_options(const kvp_model_options *o, const kvp__device *cpu,
                                kvp_error *err)
{
    if (o->activations > KVP_ACTIVATIONS_F32)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "activations: %u is not KVP_ACTIVATIONS_...",
                         (unsigned)o->activations);
    if (o->cpu_level > KVP_CPU_AMX)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "cpu_level: %u is not KVP_CPU_...",
                         (unsigned)o->cpu_level);
    if (cpu->level(o->cpu_level) == 0)
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
    const kvp__device *cpu = kvp__device_find(NULL, &ordinal);
    s = check_options(options, cpu, err);
    if (s != KVP_OK) return s;
    kvp__opened *m = kvp__alloc_zero(&hooks, sizeof *m);
    if (!m) return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for a model");
    s = kvp__origin_init(&m->origin, &hooks, sizeof *m, finish, err);
    if (s != KVP_OK) {
        kvp__free(&hooks, m, sizeof *m);
        return s;
    }
    m->cpu = cpu;
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

static const kvp__placed *placed_on(const kvp__opened *m, const kvp__device *device,
                                    uint32_t ordinal)
{
    uint32_t n = atomic_load(&m->n_placed);
    for (uint32_t i = 0; i < n; i++)
        if (m->placed[i].device == device && m->placed[i].ordinal == ordinal) return &m->placed[i];
    return NULL;
}

kvp_status kvp__opened_check_ours(const kvp__opened *m, const kvp__device *device,
                                  uint32_t ordinal, kvp_error *err)
{
    const kvp__placed *there = placed_on(m, device, ordinal);
    if (!there || is_usable(m, there)) return KVP_OK;
    return kvp__fail(err, KVP_ERR_FORKED,
                     "the weights on device \"%s\" belong to the parent process", device->name);
}

kvp__weights *kvp__opened_weights(const kvp__opened *m, const kvp__device *device,
                                  uint32_t ordinal)
{
    const kvp__placed *p = placed_on(m, device, ordinal);
    return p ? p->weights : NULL;
}

/* With the lock held. */
static kvp_status place_anew(kvp__opened *m, const kvp__device *device, const kvp__place *how,
                             kvp_error *err)
{
    uint32_t n = atomic_load(&m->n_placed);
    if (n == KVP__MAX_PLACES)
        return kvp__fail(err, KVP_ERR_UNSUPPORTED, "the model is on %u devices and can be on no more",
                         (unsigned)n);
    kvp__placed p = {.device = device, .ordinal = how->ordinal,
                     .generation = kvp__origin_generation(&m->origin)};
    kvp_status s = device->place(&m->model, how, &p.weights, err);
    if (s != KVP_OK) return s;
    m->placed[n] = p;
    atomic_store(&m->n_placed, n + 1);
    return KVP_OK;
}

kvp_status kvp__opened_place(kvp__opened *m, const kvp__device *device, const kvp__place *how,
                             bool wait, kvp_error *err)
{
    if (m->own_model)
        return kvp__fail(err, KVP_ERR_UNSUPPORTED, "an own-model geometry has no weights to place");
    if (how->packed_file && device != m->cpu)
        return kvp__fail(err, KVP_ERR_UNSUPPORTED, "packed_file: only for the CPU");
    kvp_status ours = kvp__opened_check_ours(m, device, how->ordinal, err);
    if (ours != KVP_OK) return ours;
    if (placed_on(m, device, how->ordinal)) return KVP_OK;
    uint64_t me = (uint64_t)(uintptr_t)pthread_self();
    if (atomic_load(&m->placer) == me)
        return kvp__fail(err, KVP_ERR_REENTRANT, "called from the progress hook of a placement");
    if (wait)
        pthread_mutex_lock(&m->placing);
    else if (pthread_mutex_trylock(&m->placing) != 0)
        return kvp__fail(err, KVP_ERR_BUSY, "another thread is placing this model");
    kvp_status s = KVP_OK;
    if (!placed_on(m, device, how->ordinal)) {
        atomic_store(&m->placer, me);
        s = place_anew(m, device, how, err);
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
