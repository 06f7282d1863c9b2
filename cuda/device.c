/*
 * CUDA behind device.h: which cards there are and what is missing, a card in use, the store's
 * memory, and the table.
 *
 * Invariant: whatever a call here finds wrong is one status and one line that names the thing; the
 * caller's current context is the same afterwards.
 */
#include "cuda/cuda.h"

#include "base/half.h"
#include "cuda/plan.h"

#include <stdio.h>
#include <string.h>

#define MAX_ORDINALS 16u
#define LEAST_ARCH 80

/* --- what is there --- */

static const char *error_name(const kvp__cuda_api *cu, kvp__cu_result e)
{
    const char *name = NULL;
    if (cu->cuGetErrorName(e, &name) != KVP__CU_SUCCESS || !name) return "an unknown error";
    return name;
}

/* How many cards, and 0 with the reason. */
static uint32_t count_cards(const kvp__cuda_found *f, char *why, size_t size)
{
    int n = 0;
    if (!f->cuda) {
        snprintf(why, size, "%s", f->missing[0] ? f->missing : "no CUDA driver");
        return 0;
    }
    kvp__cu_result e = f->cuda->cuInit(0);
    if (e == KVP__CU_SUCCESS) e = f->cuda->cuDeviceGetCount(&n);
    if (e == KVP__CU_SUCCESS && n > 0) return (uint32_t)kvp__min64((uint64_t)n, MAX_ORDINALS);
    if (e == KVP__CU_SUCCESS || e == KVP__CU_NO_DEVICE)
        snprintf(why, size, "the CUDA driver sees no card");
    else
        snprintf(why, size, "the CUDA driver does not start: %s", error_name(f->cuda, e));
    return 0;
}

typedef struct card {
    char name[64];
    size_t bytes;
    int major, minor, sms;
    kvp__cu_device device;
} card;

static kvp__cu_result ask(const kvp__cuda_api *cu, uint32_t ordinal, card *c)
{
    memset(c, 0, sizeof *c);
    kvp__cu_result e = cu->cuDeviceGet(&c->device, (int)ordinal);
    if (!e) e = cu->cuDeviceGetName(c->name, (int)sizeof c->name, c->device);
    if (!e) e = cu->cuDeviceTotalMem(&c->bytes, c->device);
    if (!e) e = cu->cuDeviceGetAttribute(&c->major, KVP__CU_ATTR_MAJOR, c->device);
    if (!e) e = cu->cuDeviceGetAttribute(&c->minor, KVP__CU_ATTR_MINOR, c->device);
    if (!e) e = cu->cuDeviceGetAttribute(&c->sms, KVP__CU_ATTR_SM_COUNT, c->device);
    c->name[sizeof c->name - 1] = 0;
    return e;
}

/* True: card `ordinal` is there and can be used; else why not. `c` is filled as far as it is known.
 * */
static bool usable(const kvp__cuda_found *f, uint32_t ordinal, card *c, char *why, size_t size)
{
    memset(c, 0, sizeof *c);
    uint32_t n = count_cards(f, why, size);
    if (n == 0) return false;
    if (ordinal >= n) {
        snprintf(why, size, "there %s %u CUDA card%s, numbered from 0", n == 1 ? "is" : "are",
                 (unsigned)n, n == 1 ? "" : "s");
        return false;
    }
    kvp__cu_result e = ask(f->cuda, ordinal, c);
    if (e)
        snprintf(why, size, "the card does not answer: %s", error_name(f->cuda, e));
    else if (c->major * 10 + c->minor < LEAST_ARCH)
        snprintf(why, size, "%.40s is of compute capability %d.%d; 8.0 is the least", c->name,
                 c->major, c->minor);
    else if (f->n_images == 0)
        snprintf(why, size, "%.40s: this library was built without CUDA kernels", c->name);
    else if (!f->blas)
        snprintf(why, size, "%.30s: %.90s", c->name, f->missing[0] ? f->missing : "no cuBLAS");
    else
        return true;
    return false;
}

static bool built(void) { return kvp__cuda_load()->n_images != 0; }

static uint32_t count(void)
{
    char why[128];
    return count_cards(kvp__cuda_load(), why, sizeof why);
}

static void describe(uint32_t ordinal, kvp_device_info *out)
{
    card c;
    char why[128];
    bool ok = usable(kvp__cuda_load(), ordinal, &c, why, sizeof why);
    memset(out->name, 0, sizeof out->name);
    memset(out->description, 0, sizeof out->description);
    snprintf(out->name, sizeof out->name, "cuda:%u", (unsigned)ordinal);
    if (ok)
        snprintf(out->description, sizeof out->description,
                 "%.60s, compute capability %d.%d, %d multiprocessors", c.name, c.major, c.minor,
                 c.sms);
    else
        snprintf(out->description, sizeof out->description, "%s", why);
    out->usable = ok;
    out->cpu_level = 0;
    out->threads = 0;
    out->memory_bytes = c.bytes;
}

/* --- a card in use --- */

kvp_status kvp__cuda_open(kvp__cuda *out, uint32_t ordinal, kvp_error *err)
{
    const kvp__cuda_found *f = kvp__cuda_load();
    card c;
    char why[128];
    memset(out, 0, sizeof *out);
    if (!usable(f, ordinal, &c, why, sizeof why))
        return kvp__fail(err, KVP_ERR_NO_DEVICE, "device cuda:%u: %s", (unsigned)ordinal, why);
    kvp__cuda to = {.found = f, .cu = f->cuda, .blas = f->blas, .ordinal = ordinal,
                    .sms = (uint32_t)c.sms, .arch = (uint32_t)(c.major * 10 + c.minor),
                    .device = c.device};
    kvp__cu_result e = to.cu->cuDevicePrimaryCtxRetain(&to.context, to.device);
    if (e == KVP__CU_OUT_OF_MEMORY)
        return kvp__fail(err, KVP_ERR_NO_MEMORY, "device cuda:%u: no memory for a context",
                         (unsigned)ordinal);
    if (e)
        return kvp__fail(err, KVP_ERR_NO_DEVICE, "device cuda:%u gives no context: %s",
                         (unsigned)ordinal, error_name(to.cu, e));
    *out = to;
    return KVP_OK;
}

void kvp__cuda_close(kvp__cuda *c)
{
    if (c->context) (void)c->cu->cuDevicePrimaryCtxRelease(c->device);
    c->context = NULL;
}

kvp_status kvp__cuda_enter(const kvp__cuda *c, kvp_error *err)
{
    kvp__cu_result e = c->cu->cuCtxPushCurrent(c->context);
    return e ? kvp__cuda_fail(c, err, e, "its context") : KVP_OK;
}

void kvp__cuda_leave(const kvp__cuda *c)
{
    kvp__cu_context ours;
    (void)c->cu->cuCtxPopCurrent(&ours);
}

/* Errors that stay with a context: memory errors, faults of a kernel, a card that fell off. */
bool kvp__cuda_is_sticky(kvp__cu_result e)
{
    static const int16_t all[] = {214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717,
                                  718, 719, 721, 810, 911, 999};
    for (size_t i = 0; i < KVP__COUNT(all); i++)
        if (e == all[i]) return true;
    return false;
}

static kvp_status status_of(kvp__cu_result e)
{
    if (e == KVP__CU_OUT_OF_MEMORY) return KVP_ERR_NO_MEMORY;
    if (e == KVP__CU_NO_BINARY || e == KVP__CU_INVALID_IMAGE || e == 218 || e == 222)
        return KVP_ERR_UNSUPPORTED;
    return kvp__cuda_is_sticky(e) ? KVP_ERR_DEVICE_LOST : KVP_ERR_INTERNAL;
}

kvp_status kvp__cuda_fail(const kvp__cuda *c, kvp_error *err, kvp__cu_result e, const char *what)
{
    return kvp__fail(err, status_of(e), "device cuda:%u: %s: %s", (unsigned)c->ordinal, what,
                     error_name(c->cu, e));
}

kvp_status kvp__cuda_take(const kvp__cuda *c, uint64_t bytes, const char *what, kvp__cu_ptr *out,
                          kvp_error *err)
{
    size_t free = 0, total = 0;
    kvp__cu_ptr p = 0;
    kvp__cu_result e = c->cu->cuMemGetInfo(&free, &total);
    if (!e) e = bytes > free ? KVP__CU_OUT_OF_MEMORY : c->cu->cuMemAlloc(&p, (size_t)bytes);
    if (e == KVP__CU_OUT_OF_MEMORY)
        return kvp__fail_need(err, KVP_ERR_NO_MEMORY, bytes, free,
                              "device cuda:%u: no memory for %s: %llu bytes were asked, %llu of "
                              "%llu are free", (unsigned)c->ordinal, what,
                              (unsigned long long)bytes, (unsigned long long)free,
                              (unsigned long long)total);
    if (e) return kvp__cuda_fail(c, err, e, what);
    *out = p;
    return KVP_OK;
}

kvp_status kvp__cuda_send(const kvp__cuda *c, kvp__cu_ptr to, const void *from, size_t bytes,
                          kvp_error *err)
{
    /* Not on the default stream, which would wait for all of the host's. */
    kvp__cu_stream stream = NULL;
    kvp__cu_result e = c->cu->cuStreamCreate(&stream, KVP__CU_STREAM_NON_BLOCKING);
    if (!e) e = c->cu->cuMemcpyHtoDAsync(to, from, bytes, stream);
    if (!e) e = c->cu->cuStreamSynchronize(stream);
    if (stream) (void)c->cu->cuStreamDestroy(stream);
    return e ? kvp__cuda_fail(c, err, e, "a copy to the card") : KVP_OK;
}

/* --- the store --- */

static kvp_status check_shape(const kvp__geometry *geometry, const kvp__layout *l, kvp_error *err)
{
    const kvp__cuda_limits least = {.max_rows = 1, .max_seqs = 1, .max_positions = 1, .sms = 1};
    for (uint32_t g = 0; g < l->n_groups; g++) {
        const kvp__group_layout *gl = &l->groups[g];
        kvp__cuda_plan plan;
        if (!gl->layers) continue;
        if (gl->key_dim * gl->k_size % 4 || gl->value_dim * gl->v_size % 4)
            return kvp__fail(err, KVP_ERR_UNSUPPORTED, "group %u: head sizes %u and %u: this "
                             "device takes even ones", (unsigned)g, (unsigned)gl->key_dim,
                             (unsigned)gl->value_dim);
        kvp_status s = kvp__cuda_plan_place(&plan, &geometry->groups[g], g, l, &least, err);
        if (s != KVP_OK) return s;
    }
    return KVP_OK;
}

static kvp_status supports(const kvp__geometry *g, uint32_t block_tokens, uint32_t k_format,
                           uint32_t v_format, uint32_t ordinal, kvp_error *err)
{
    kvp__layout l;
    card c;
    char why[128];
    if (!usable(kvp__cuda_load(), ordinal, &c, why, sizeof why))
        return kvp__fail(err, KVP_ERR_NO_DEVICE, "device cuda:%u: %s", (unsigned)ordinal, why);
    kvp_status s = kvp__layout_make(&l, g, block_tokens, k_format, v_format, 1, err);
    return s == KVP_OK ? check_shape(g, &l, err) : s;
}

static void store_destroy(kvp__store *s)
{
    if (!s) return;
    kvp__hooks h = s->hooks;
    if (s->owned && s->slab && kvp__cuda_enter(&s->card, NULL) == KVP_OK) {
        (void)s->card.cu->cuMemFree(s->slab); /* waits for the card */
        kvp__cuda_leave(&s->card);
    }
    kvp__cuda_close(&s->card);
    kvp__free(&h, s, sizeof *s);
}

static kvp_status store_create(const kvp__hooks *hooks, const kvp__layout *layout, void *slab,
                               uint32_t ordinal, kvp__store **out, kvp_error *err)
{
    kvp__store *s = kvp__alloc_zero(hooks, sizeof *s);
    if (!s) return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for a pool's store");
    s->hooks = *hooks;
    s->layout = *layout;
    s->owned = !slab;
    s->slab = (kvp__cu_ptr)(uintptr_t)slab;
    kvp_status st = kvp__cuda_open(&s->card, ordinal, err);
    if (st == KVP_OK && !slab) {
        st = kvp__cuda_enter(&s->card, err);
        if (st == KVP_OK) {
            st = kvp__cuda_take(&s->card, kvp__max64(layout->bytes, 1), "KV blocks", &s->slab, err);
            kvp__cuda_leave(&s->card);
        }
    }
    if (st != KVP_OK) {
        store_destroy(s);
        return st;
    }
    *out = s;
    return KVP_OK;
}

/* --- for tests --- */

/* Where token t of a head's part in a layer of a block lies: [kv head][token][dim]. */
static kvp__cu_ptr token_at(const kvp__store *s, uint32_t group, uint32_t layer, uint32_t block,
                            uint32_t head, uint32_t t, bool v)
{
    const kvp__group_layout *g = &s->layout.groups[group];
    uint64_t at = kvp__layout_block(&s->layout, group, block) + (uint64_t)layer * g->layer;
    if (!v) return s->slab + at + head * g->k_head + (uint64_t)t * g->key_dim * g->k_size;
    return s->slab + at + g->k_part + head * g->v_head + (uint64_t)t * g->value_dim * g->v_size;
}

static void read_token(const kvp__store *s, kvp__cu_ptr from, uint32_t dim, uint32_t format,
                       float *out)
{
    uint8_t raw[256 * sizeof(float)];
    uint32_t size = format == KVP_KV_F32 ? 4 : 2;
    (void)s->card.cu->cuMemcpyDtoHAsync(raw, from, (size_t)dim * size, NULL);
    (void)s->card.cu->cuStreamSynchronize(NULL);
    for (uint32_t d = 0; d < dim; d++) {
        uint16_t h;
        if (format == KVP_KV_F32) {
            memcpy(out + d, raw + d * sizeof(float), sizeof(float));
            continue;
        }
        memcpy(&h, raw + d * sizeof h, sizeof h);
        out[d] = format == KVP_KV_F16 ? kvp__f16_to_f32(h) : kvp__bf16_to_f32(h);
    }
}

static void peek(const kvp__store *s, uint32_t group, uint32_t layer, uint32_t block, uint32_t t,
                 float *k, float *v)
{
    const kvp__layout *l = &s->layout;
    const kvp__group_layout *g = &l->groups[group];
    if (kvp__cuda_enter(&s->card, NULL) != KVP_OK) return;
    for (uint32_t h = 0; h < g->kv_heads; h++) {
        read_token(s, token_at(s, group, layer, block, h, t, false), g->key_dim, l->k_format,
                   k + h * g->key_dim);
        read_token(s, token_at(s, group, layer, block, h, t, true), g->value_dim, l->v_format,
                   v + h * g->value_dim);
    }
    kvp__cuda_leave(&s->card);
}

/* All bits set is a NaN in every format. */
static void poison(kvp__store *s, uint32_t group, uint32_t block, uint32_t first_token)
{
    const kvp__group_layout *g = &s->layout.groups[group];
    uint64_t left = s->layout.block_tokens - first_token;
    if (left == 0 || kvp__cuda_enter(&s->card, NULL) != KVP_OK) return;
    for (uint32_t i = 0; i < g->layers; i++)
        for (uint32_t h = 0; h < g->kv_heads; h++) {
            kvp__cu_ptr k = token_at(s, group, i, block, h, first_token, false);
            kvp__cu_ptr v = token_at(s, group, i, block, h, first_token, true);
            size_t k_bytes = (size_t)(left * g->key_dim * g->k_size);
            size_t v_bytes = (size_t)(left * g->value_dim * g->v_size);
            (void)s->card.cu->cuMemsetD8Async(k, 0xff, k_bytes, NULL);
            (void)s->card.cu->cuMemsetD8Async(v, 0xff, v_bytes, NULL);
        }
    (void)s->card.cu->cuStreamSynchronize(NULL);
    kvp__cuda_leave(&s->card);
}

const kvp__device kvp__cuda_device = {
    .name = "cuda",
    .max_ordinals = MAX_ORDINALS,
    .asynchronous = true,
    .built = built,
    .count = count,
    .describe = describe,
    .packed_bytes = kvp__cuda_packed_bytes,
    .workspace_bytes = kvp__cuda_workspace_bytes,
    .place = kvp__cuda_place,
    .unplace = kvp__cuda_unplace,
    .supports = supports,
    .store_create = store_create,
    .store_destroy = store_destroy,
    .slab_align = KVP__CUDA_ALIGN,
    .runner_create = kvp__cuda_runner_create,
    .runner_destroy = kvp__cuda_runner_destroy,
    .prepare = kvp__cuda_prepare,
    .launch = kvp__cuda_launch,
    .cancel = kvp__cuda_cancel,
    .poll = kvp__cuda_poll,
    .why = kvp__cuda_why,
    .begin = kvp__cuda_begin,
    .attend = kvp__cuda_attend,
    .peek = peek,
    .poison = poison,
};
