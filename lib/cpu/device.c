/*
 * The CPU behind device.h: the store's memory, what this machine is, and the table.
 */
#define _GNU_SOURCE
#include "cpu/cpu.h"

#include "base/half.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char *level_name(uint32_t level)
{
    switch (level) {
    case KVP_CPU_AVX2: return "x86-64 with AVX2, FMA and F16C";
    case KVP_CPU_AVX512: return "x86-64 with AVX-512 and VNNI";
    case KVP_CPU_AMX: return "x86-64 with AVX-512, VNNI and AMX";
    case KVP_CPU_NEON: return "Arm64 with NEON";
    default: return "plain C";
    }
}

static uint32_t count(void) { return 1; }

static void describe(uint32_t ordinal, kvp_device_info *out)
{
    (void)ordinal;
    out->usable = 1;
    memset(out->name, 0, sizeof out->name);
    memcpy(out->name, "cpu", 4);
    out->cpu_level = kvp__cpu_level(0);
    out->threads = kvp__cores();
    snprintf(out->description, sizeof out->description, "%s, %u cores", level_name(out->cpu_level),
             (unsigned)out->threads);
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    out->memory_bytes = pages > 0 && page > 0 ? (uint64_t)pages * (uint64_t)page : 0;
}

static kvp_status supports(const kvp__geometry *g, uint32_t block_tokens, uint32_t k_format,
                           uint32_t v_format, uint32_t ordinal, kvp_error *err)
{
    (void)ordinal;
    kvp__layout l;
    return kvp__layout_make(&l, g, block_tokens, k_format, v_format, 1, err);
}

/* --- the store --- */

static kvp_status store_create(const kvp__hooks *hooks, const kvp__layout *layout, void *slab,
                               uint32_t ordinal, kvp__store **out, kvp_error *err)
{
    (void)ordinal;
    kvp__store *s = kvp__alloc_zero(hooks, sizeof *s);
    if (!s) return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for a pool's store");
    s->hooks = *hooks;
    s->layout = *layout;
    s->owned = !slab;
    s->slab = slab ? slab : layout->bytes <= SIZE_MAX ? kvp__map((size_t)layout->bytes) : NULL;
    if (!s->slab) {
        kvp__free(hooks, s, sizeof *s);
        return kvp__fail_need(err, KVP_ERR_NO_MEMORY, layout->bytes, 0,
                              "no memory for %llu bytes of KV blocks",
                              (unsigned long long)layout->bytes);
    }
    *out = s;
    return KVP_OK;
}

static void store_destroy(kvp__store *s)
{
    if (!s) return;
    kvp__hooks h = s->hooks;
    if (s->owned) kvp__unmap(s->slab, (size_t)s->layout.bytes);
    kvp__free(&h, s, sizeof *s);
}

/* --- for tests --- */

static uint32_t size_of(uint32_t format) { return format == KVP_KV_F32 ? 4 : 2; }

static float element(const uint8_t *base, uint64_t i, uint32_t format)
{
    uint16_t h;
    float f;
    if (format == KVP_KV_F32) {
        memcpy(&f, base + i * 4, sizeof f);
        return f;
    }
    memcpy(&h, base + i * 2, sizeof h);
    return format == KVP_KV_F16 ? kvp__f16_to_f32(h) : kvp__bf16_to_f32(h);
}

/* Where element d of token t lies in a head's part. */
static uint64_t key_at(const kvp__layout *l, uint32_t dim, uint32_t t, uint32_t d)
{
    return ((uint64_t)(t / l->tile) * dim + d) * l->tile + t % l->tile;
}

static void peek(const kvp__store *s, uint32_t group, uint32_t layer, uint32_t block, uint32_t t,
                 float *k, float *v)
{
    const kvp__layout *l = &s->layout;
    const kvp__group_layout *g = &l->groups[group];
    for (uint32_t h = 0; h < g->kv_heads; h++) {
        const uint8_t *kb = kvp__store_k(s, group, layer, block, h);
        const uint8_t *vb = kvp__store_v(s, group, layer, block, h);
        for (uint32_t d = 0; d < g->key_dim; d++)
            *k++ = element(kb, key_at(l, g->key_dim, t, d), l->k_format);
        for (uint32_t d = 0; d < g->value_dim; d++)
            *v++ = element(vb, (uint64_t)t * g->value_dim + d, l->v_format);
    }
}

/* All bits set is a NaN in every format. */
static void poison(kvp__store *s, uint32_t group, uint32_t block, uint32_t first_token)
{
    const kvp__layout *l = &s->layout;
    const kvp__group_layout *g = &l->groups[group];
    uint32_t ks = size_of(l->k_format), vs = size_of(l->v_format);
    for (uint32_t i = 0; i < g->layers; i++)
        for (uint32_t h = 0; h < g->kv_heads; h++) {
            uint8_t *kb = kvp__store_k(s, group, i, block, h);
            uint8_t *vb = kvp__store_v(s, group, i, block, h);
            for (uint32_t t = first_token; t < l->block_tokens; t++) {
                for (uint32_t d = 0; d < g->key_dim; d++)
                    memset(kb + key_at(l, g->key_dim, t, d) * ks, 0xff, ks);
                memset(vb + (uint64_t)t * g->value_dim * vs, 0xff, (size_t)g->value_dim * vs);
            }
        }
}

const kvp__device kvp__cpu_device = {
    .name = "cpu",
    .max_ordinals = 1,
    .count = count,
    .describe = describe,
    .level = kvp__cpu_level,
    .packed_bytes = kvp__cpu_packed_bytes,
    .workspace_bytes = kvp__cpu_workspace_bytes,
    .place = kvp__cpu_place,
    .unplace = kvp__cpu_unplace,
    .supports = supports,
    .store_create = store_create,
    .store_destroy = store_destroy,
    .slab_align = KVP__CACHE_LINE,
    .runner_create = kvp__cpu_runner_create,
    .runner_destroy = kvp__cpu_runner_destroy,
    .prepare = kvp__cpu_prepare,
    .launch = kvp__cpu_launch,
    .advance = kvp__cpu_advance,
    .cancel = kvp__cpu_cancel,
    .poll = kvp__cpu_poll,
    .begin = kvp__cpu_begin,
    .attend = kvp__cpu_attend,
    .peek = peek,
    .poison = poison,
};
