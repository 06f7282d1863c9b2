/*
 * Roots: what must be equal before tokens are compared. See prefix.h.
 *
 * A root's number is part of its children's keys, so a slot is given to another content only when
 * no node and no sequence refers to it. Interning happens when sequences are made; slots that came
 * free since are gathered there, when the array is full.
 */
#include "prefix/prefix.h"

#include <string.h>

static kvp__hash128 content_hash(const kvp__prefix *x, const void *salt, uint32_t salt_bytes,
                                 const void *extra, uint32_t extra_bytes)
{
    uint8_t text[2 * KVP__ROOT_BYTES + 8];
    memcpy(text, &salt_bytes, 4);
    memcpy(text + 4, &extra_bytes, 4);
    if (salt_bytes) memcpy(text + 8, salt, salt_bytes);
    if (extra_bytes) memcpy(text + 8 + salt_bytes, extra, extra_bytes);
    return x->hash(x->key, text, 8u + salt_bytes + extra_bytes);
}

static bool content_equal(const kvp__root *r, const void *salt, uint32_t salt_bytes,
                          const void *extra, uint32_t extra_bytes)
{
    return r->salt_bytes == salt_bytes && r->extra_bytes == extra_bytes &&
           (!salt_bytes || memcmp(r->bytes, salt, salt_bytes) == 0) &&
           (!extra_bytes || memcmp(r->bytes + salt_bytes, extra, extra_bytes) == 0);
}

static uint32_t *bucket(kvp__prefix *x, kvp__hash128 h)
{
    return &x->root_heads[h.lo % KVP__ROOT_BUCKETS];
}

static uint32_t find(const kvp__prefix *x, kvp__hash128 h, const void *salt, uint32_t salt_bytes,
                     const void *extra, uint32_t extra_bytes)
{
    uint32_t i = x->root_heads[h.lo % KVP__ROOT_BUCKETS];
    while (i != KVP__NONE && !content_equal(&x->roots[i], salt, salt_bytes, extra, extra_bytes))
        i = x->roots[i].next;
    return i;
}

uint32_t kvp__prefix_root_find(const kvp__prefix *x, const void *salt, uint32_t salt_bytes,
                               const void *extra, uint32_t extra_bytes)
{
    if (salt_bytes > KVP__ROOT_BYTES || extra_bytes > KVP__ROOT_BYTES) return KVP__NONE;
    kvp__hash128 h = content_hash(x, salt, salt_bytes, extra, extra_bytes);
    return find(x, h, salt, salt_bytes, extra, extra_bytes);
}

static void make_spare(kvp__prefix *x, uint32_t i)
{
    kvp__root *r = &x->roots[i];
    memset(r, 0, sizeof *r);
    r->next = x->spare_root;
    x->spare_root = i;
}

/* Every root that nothing refers to becomes a spare slot. Returns how many did. */
static uint32_t gather_unused(kvp__prefix *x)
{
    uint32_t n = 0;
    for (uint32_t b = 0; b < KVP__ROOT_BUCKETS; b++) {
        uint32_t *link = &x->root_heads[b];
        while (*link != KVP__NONE) {
            uint32_t i = *link;
            kvp__root *r = &x->roots[i];
            if (r->refs > 0) {
                link = &r->next;
                continue;
            }
            *link = r->next;
            kvp__free(x->pool->hooks, r->bytes, (size_t)r->salt_bytes + r->extra_bytes);
            make_spare(x, i);
            n++;
        }
    }
    return n;
}

static bool grow(kvp__prefix *x)
{
    uint32_t cap = x->cap_roots ? x->cap_roots * 2 : 16;
    kvp__root *roots = kvp__alloc_array(x->pool->hooks, cap, sizeof *roots);
    if (!roots) return false;
    if (x->roots) memcpy(roots, x->roots, (size_t)x->n_roots * sizeof *roots);
    kvp__free(x->pool->hooks, x->roots, (size_t)x->cap_roots * sizeof *roots);
    x->roots = roots;
    x->cap_roots = cap;
    return true;
}

/* A slot to write to, or KVP__NONE without memory. Growing although some slots were gathered keeps
 * the walks rare: the array has room for as many again. */
static uint32_t slot_get(kvp__prefix *x)
{
    if (x->spare_root == KVP__NONE && x->n_roots == x->cap_roots) {
        uint32_t n = gather_unused(x);
        if (n < x->cap_roots / 4 + 1 && !grow(x) && n == 0) return KVP__NONE;
    }
    uint32_t i = x->spare_root;
    if (i == KVP__NONE) return x->n_roots++;
    x->spare_root = x->roots[i].next;
    return i;
}

kvp_status kvp__prefix_root_intern(kvp__prefix *x, const void *salt, uint32_t salt_bytes,
                                   const void *extra, uint32_t extra_bytes, uint32_t *out,
                                   kvp_error *err)
{
    if (salt_bytes > KVP__ROOT_BYTES || extra_bytes > KVP__ROOT_BYTES)
        return kvp__fail(err, KVP_ERR_INVALID_ARG,
                         "prefix: salt of %u and key of %u bytes, %u each are possible", salt_bytes,
                         extra_bytes, KVP__ROOT_BYTES);
    kvp__hash128 h = content_hash(x, salt, salt_bytes, extra, extra_bytes);
    uint32_t i = find(x, h, salt, salt_bytes, extra, extra_bytes);
    if (i == KVP__NONE) {
        size_t bytes = (size_t)salt_bytes + extra_bytes;
        uint8_t *copy = bytes ? kvp__alloc(x->pool->hooks, bytes) : NULL;
        i = bytes && !copy ? KVP__NONE : slot_get(x);
        if (i == KVP__NONE) {
            kvp__free(x->pool->hooks, copy, bytes);
            return kvp__fail(err, KVP_ERR_NO_MEMORY, "prefix: no memory for a salt");
        }
        if (salt_bytes) memcpy(copy, salt, salt_bytes);
        if (extra_bytes) memcpy(copy + salt_bytes, extra, extra_bytes);
        uint32_t *head = bucket(x, h);
        x->roots[i] = (kvp__root){.hash = h, .next = *head, .salt_bytes = salt_bytes,
                                  .extra_bytes = extra_bytes, .bytes = copy, .in_use = 1};
        *head = i;
    }
    x->roots[i].refs++;
    *out = i;
    return KVP_OK;
}

void kvp__prefix_root_retain(kvp__prefix *x, uint32_t root) { x->roots[root].refs++; }

void kvp__prefix_root_release(kvp__prefix *x, uint32_t root) { x->roots[root].refs--; }
