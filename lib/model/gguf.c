/*
 * The GGUF reader. See gguf.h and docs/internals/model.md.
 *
 * The header is walked twice by the same functions. The first walk brings the bytes into the buffer
 * (which moves as it grows) and checks every length against what the file still has; the second finds
 * everything there and records where it lies. Work and memory are bounded by the bytes that are in the
 * file, never by a count that it states: a count is first divided into the bytes left.
 */
#include "model/gguf.h"

#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "GGUF files are read on little-endian machines only"
#endif

#define MAX_HEADER (256u << 20) /* the largest real ones, of big vocabularies, are near 20 MiB */
#define READ_STEP (256u << 10)
#define MAX_KEY 65535u
#define MAX_NAME 255u
#define MAX_DIMS 4u
#define MIN_ENTRY 14u  /* key length, one letter, type, one byte of value */
#define MIN_TENSOR 33u /* name length, one letter, dimensions, one of them, type, offset */
#define SHOWN 80       /* of a key, in a message */

static const uint8_t scalar_bytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

/* --- strings --- */

bool kvp__str_is(kvp__str s, const char *text)
{
    return s.bytes == strlen(text) && memcmp(s.data, text, s.bytes) == 0;
}

char *kvp__str_copy(char *out, size_t size, kvp__str s)
{
    size_t n = s.bytes;
    if (n > size - 1) {
        n = size - 1;
        while (n && ((unsigned char)s.data[n] & 0xc0u) == 0x80u) n--;
    }
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)s.data[i];
        out[i] = c < 32 || c == 127 ? '?' : (char)c;
    }
    out[n] = 0;
    return out;
}

/* --- bytes --- */

typedef struct reader {
    kvp__gguf *g;
    const kvp__source *source;
    uint64_t at;
    bool fill;        /* the second walk */
    const char *what; /* is being read, for messages */
    char shown[SHOWN];
    kvp_error *err;
} reader;

static kvp_status grow(reader *r, uint64_t end)
{
    kvp__gguf *g = r->g;
    if (end <= g->buffer_size) return KVP_OK;
    uint64_t size = kvp__max64(end, 2 * (uint64_t)g->buffer_size);
    uint8_t *grown = kvp__alloc(&g->hooks, (size_t)size);
    if (!grown)
        return kvp__fail_need(r->err, KVP_ERR_NO_MEMORY, size, 0,
                              "no memory for the file's header (%llu bytes)",
                              (unsigned long long)size);
    if (g->buffer_bytes) memcpy(grown, g->buffer, g->buffer_bytes);
    kvp__free(&g->hooks, g->buffer, g->buffer_size);
    g->buffer = grown;
    g->buffer_size = (size_t)size;
    return KVP_OK;
}

/* Sees to it that the next `bytes` are in the buffer. */
static kvp_status need(reader *r, uint64_t bytes)
{
    kvp__gguf *g = r->g;
    if (bytes > r->source->bytes - r->at)
        return kvp__fail(r->err, KVP_ERR_FORMAT, "%s%s: the file ends inside (at byte %llu)", r->what,
                         r->shown, (unsigned long long)r->source->bytes);
    uint64_t end = r->at + bytes;
    if (end <= g->buffer_bytes) return KVP_OK;
    if (end > MAX_HEADER)
        return kvp__fail(r->err, KVP_ERR_FORMAT, "%s%s: the header is larger than %u bytes", r->what,
                         r->shown, MAX_HEADER);
    end = kvp__min64(kvp__round_up(end, READ_STEP), r->source->bytes);
    kvp_status s = grow(r, end);
    if (s != KVP_OK) return s;
    if (r->source->read(r->source->user, g->buffer_bytes, g->buffer + g->buffer_bytes,
                        (size_t)(end - g->buffer_bytes)) != 0)
        return kvp__fail(r->err, KVP_ERR_IO, "%s%s: could not read %llu bytes at %llu", r->what,
                         r->shown, (unsigned long long)(end - g->buffer_bytes),
                         (unsigned long long)g->buffer_bytes);
    g->buffer_bytes = (size_t)end;
    return KVP_OK;
}

static kvp_status take(reader *r, void *out, size_t bytes)
{
    kvp_status s = need(r, bytes);
    if (s != KVP_OK) return s;
    memcpy(out, r->g->buffer + r->at, bytes);
    r->at += bytes;
    return KVP_OK;
}

static kvp_status take_u32(reader *r, uint32_t *out) { return take(r, out, sizeof *out); }
static kvp_status take_u64(reader *r, uint64_t *out) { return take(r, out, sizeof *out); }

static kvp_status pass(reader *r, uint64_t bytes)
{
    kvp_status s = need(r, bytes);
    if (s == KVP_OK) r->at += bytes;
    return s;
}

/* A string; `out` points into the buffer and is good until the next call. */
static kvp_status take_str(reader *r, uint64_t max, kvp__str *out)
{
    uint64_t bytes;
    kvp_status s = take_u64(r, &bytes);
    if (s != KVP_OK) return s;
    if (bytes > max)
        return kvp__fail(r->err, KVP_ERR_FORMAT, "%s%s: a length of %llu bytes, at most %llu allowed",
                         r->what, r->shown, (unsigned long long)bytes, (unsigned long long)max);
    s = pass(r, bytes);
    if (s != KVP_OK) return s;
    out->data = (const char *)r->g->buffer + r->at - bytes;
    out->bytes = (size_t)bytes;
    return KVP_OK;
}

/* Refuses a stated number of things that the bytes left cannot hold. */
static kvp_status check_count(reader *r, const char *things, uint64_t count, uint32_t bytes_each)
{
    if (count <= (r->source->bytes - r->at) / bytes_each) return KVP_OK;
    return kvp__fail(r->err, KVP_ERR_FORMAT,
                     "%s%s: states %llu %s, more than the rest of the file can hold", r->what,
                     r->shown, (unsigned long long)count, things);
}

/* --- one value --- */

static kvp_status array_value(reader *r, kvp__gguf_entry *e)
{
    uint32_t element;
    uint64_t count;
    kvp_status s = take_u32(r, &element);
    if (s == KVP_OK) s = take_u64(r, &count);
    if (s != KVP_OK) return s;
    if (element == KVP__GGUF_ARRAY)
        return kvp__fail(r->err, KVP_ERR_FORMAT, "%s%s: arrays inside arrays are not taken", r->what,
                         r->shown);
    if (element > KVP__GGUF_F64)
        return kvp__fail(r->err, KVP_ERR_FORMAT, "%s%s: %u is not a type of an array's elements",
                         r->what, r->shown, (unsigned)element);
    uint32_t size = element == KVP__GGUF_STRING ? 8u : scalar_bytes[element];
    s = check_count(r, "elements", count, size);
    if (s != KVP_OK) return s;
    e->element = (uint8_t)element;
    e->count = count;
    e->data = r->g->buffer + r->at;
    if (element != KVP__GGUF_STRING) return pass(r, count * size);
    for (uint64_t i = 0; i < count && s == KVP_OK; i++) {
        kvp__str text;
        s = take_str(r, UINT64_MAX, &text);
    }
    return s;
}

static kvp_status value(reader *r, uint32_t type, kvp__gguf_entry *e)
{
    if (type > KVP__GGUF_F64)
        return kvp__fail(r->err, KVP_ERR_FORMAT, "%s%s: %u is not a type of a value", r->what,
                         r->shown, (unsigned)type);
    e->type = (uint8_t)type;
    e->element = (uint8_t)type;
    e->count = 1;
    e->data = r->g->buffer + r->at;
    if (type == KVP__GGUF_ARRAY) return array_value(r, e);
    kvp__str text;
    return type == KVP__GGUF_STRING ? take_str(r, UINT64_MAX, &text) : pass(r, scalar_bytes[type]);
}

/* Pointers into the buffer are right in the second walk only, where it does not move any more. */
static kvp_status entry(reader *r, uint32_t index)
{
    kvp__gguf_entry e;
    kvp__str key;
    uint32_t type = 0;
    memset(&e, 0, sizeof e);
    r->what = "a metadata key";
    r->shown[0] = 0;
    kvp_status s = take_str(r, MAX_KEY, &key);
    if (s != KVP_OK) return s;
    if (key.bytes == 0) return kvp__fail(r->err, KVP_ERR_FORMAT, "a metadata key is empty");
    r->what = "metadata key ";
    kvp__str_copy(r->shown, sizeof r->shown, key);
    e.key = key.data;
    e.key_bytes = (uint32_t)key.bytes;
    s = take_u32(r, &type);
    if (s == KVP_OK) s = value(r, type, &e);
    if (s == KVP_OK && r->fill) r->g->entries[index] = e;
    return s;
}

/* --- one tensor --- */

static kvp_status tensor_name(reader *r, kvp__tensor *t)
{
    kvp__str name;
    r->what = "a tensor's name";
    r->shown[0] = 0;
    kvp_status s = take_str(r, MAX_NAME, &name);
    if (s != KVP_OK) return s;
    kvp__str_copy(r->shown, sizeof r->shown, name);
    for (size_t i = 0; i < name.bytes; i++)
        if (name.data[i] <= ' ' || name.data[i] > '~') name.bytes = 0;
    if (name.bytes == 0)
        return kvp__fail(r->err, KVP_ERR_FORMAT, "tensor name '%s': empty, or not printable ASCII",
                         r->shown);
    r->what = "tensor ";
    if (r->fill) {
        char *copy = r->g->names + r->g->names_bytes;
        memcpy(copy, name.data, name.bytes);
        copy[name.bytes] = 0;
        t->name = copy;
    }
    r->g->names_bytes += name.bytes + 1;
    return KVP_OK;
}

static kvp_status tensor_shape(reader *r, kvp__tensor *t)
{
    kvp_status s = take_u32(r, &t->n_dims);
    if (s != KVP_OK) return s;
    if (t->n_dims == 0 || t->n_dims > MAX_DIMS)
        return kvp__fail(r->err, KVP_ERR_FORMAT, "tensor %s: %u dimensions, 1 to %u allowed",
                         r->shown, (unsigned)t->n_dims, MAX_DIMS);
    for (uint32_t i = 0; i < MAX_DIMS; i++) {
        t->dims[i] = 1;
        if (i < t->n_dims) s = take_u64(r, &t->dims[i]);
        if (s != KVP_OK) return s;
        if (t->dims[i] == 0)
            return kvp__fail(r->err, KVP_ERR_FORMAT, "tensor %s: dimension %u is zero", r->shown,
                             (unsigned)i);
    }
    return KVP_OK;
}

static kvp_status tensor_bytes(reader *r, kvp__tensor *t)
{
    kvp__type_info info = kvp__type_get(t->type);
    if (!info.name)
        return kvp__fail(r->err, KVP_ERR_UNSUPPORTED, "tensor %s: type %u (%s) is not supported",
                         r->shown, (unsigned)t->type, kvp__type_name(t->type));
    if (t->dims[0] % info.block)
        return kvp__fail(r->err, KVP_ERR_FORMAT,
                         "tensor %s: rows of %llu elements are no whole number of %s blocks of %u",
                         r->shown, (unsigned long long)t->dims[0], info.name, (unsigned)info.block);
    uint64_t bytes = t->dims[0] / info.block;
    bool fits = kvp__mul(bytes, info.bytes, &bytes);
    for (uint32_t i = 1; i < MAX_DIMS && fits; i++) fits = kvp__mul(bytes, t->dims[i], &bytes);
    if (!fits || bytes > r->source->bytes)
        return kvp__fail(r->err, KVP_ERR_FORMAT,
                         "tensor %s: its shape needs more bytes than the file has", r->shown);
    t->bytes = bytes;
    return KVP_OK;
}

/* The offset stays relative to the data until that is known; see place_tensors. */
static kvp_status tensor(reader *r, uint32_t index)
{
    kvp__tensor t;
    memset(&t, 0, sizeof t);
    kvp_status s = tensor_name(r, &t);
    if (s == KVP_OK) s = tensor_shape(r, &t);
    if (s == KVP_OK) s = take_u32(r, &t.type);
    if (s == KVP_OK) s = take_u64(r, &t.offset);
    if (s == KVP_OK) s = tensor_bytes(r, &t);
    if (s == KVP_OK && r->fill) r->g->tensors[index] = t;
    return s;
}

/* --- the walk --- */

static kvp_status version(reader *r)
{
    char magic[4];
    kvp__gguf *g = r->g;
    kvp_status s = take(r, magic, sizeof magic);
    if (s != KVP_OK) return s;
    if (memcmp(magic, "GGUF", 4) != 0)
        return kvp__fail(r->err, KVP_ERR_FORMAT, "not a GGUF file: it does not begin with GGUF");
    s = take_u32(r, &g->version);
    if (s != KVP_OK || g->version == 2 || g->version == 3) return s;
    if (g->version != 0 && (g->version & 0xffffu) == 0)
        return kvp__fail(r->err, KVP_ERR_UNSUPPORTED,
                         "the GGUF file is big-endian; only little-endian ones are read");
    return kvp__fail(r->err, KVP_ERR_UNSUPPORTED, "GGUF version %u; 2 and 3 are read",
                     (unsigned)g->version);
}

static kvp_status walk(reader *r)
{
    uint64_t n_tensors, n_entries;
    r->at = 0;
    r->what = "the GGUF header";
    r->shown[0] = 0;
    r->g->names_bytes = 0;
    kvp_status s = version(r);
    if (s == KVP_OK) s = take_u64(r, &n_tensors);
    if (s == KVP_OK) s = take_u64(r, &n_entries);
    if (s == KVP_OK) s = check_count(r, "metadata keys", n_entries, MIN_ENTRY);
    if (s == KVP_OK) s = check_count(r, "tensors", n_tensors, MIN_TENSOR);
    for (uint64_t i = 0; s == KVP_OK && i < n_entries; i++) s = entry(r, (uint32_t)i);
    for (uint64_t i = 0; s == KVP_OK && i < n_tensors; i++) s = tensor(r, (uint32_t)i);
    if (s != KVP_OK) return s;
    /* Both fit: what has been walked over lies within MAX_HEADER. */
    r->g->n_entries = (uint32_t)n_entries;
    r->g->n_tensors = (uint32_t)n_tensors;
    return KVP_OK;
}

/* An array of at least one element, so that an empty table is no NULL. */
static void *table(kvp__gguf *g, uint64_t count, size_t size)
{
    void *p = kvp__alloc_array(&g->hooks, count + 1, size);
    if (p) memset(p, 0, (size_t)(count + 1) * size);
    return p;
}

static kvp_status make_tables(kvp__gguf *g, kvp_error *err)
{
    g->entries = table(g, g->n_entries, sizeof *g->entries);
    g->by_key = table(g, g->n_entries, sizeof *g->by_key);
    g->tensors = table(g, g->n_tensors, sizeof *g->tensors);
    g->by_name = table(g, g->n_tensors, sizeof *g->by_name);
    g->names = table(g, g->names_bytes, 1);
    if (g->entries && g->by_key && g->tensors && g->by_name && g->names) return KVP_OK;
    return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for %u metadata keys and %u tensors",
                     (unsigned)g->n_entries, (unsigned)g->n_tensors);
}

/* --- order --- */

typedef int compare_fn(const kvp__gguf *g, uint32_t a, uint32_t b);

static void sift(const kvp__gguf *g, uint32_t *heap, uint32_t root, uint32_t n, compare_fn *compare)
{
    for (uint32_t child; (child = 2 * root + 1) < n; root = child) {
        if (child + 1 < n && compare(g, heap[child], heap[child + 1]) < 0) child++;
        if (compare(g, heap[root], heap[child]) >= 0) return;
        uint32_t swap = heap[root];
        heap[root] = heap[child];
        heap[child] = swap;
    }
}

/* Heapsort: n log n whatever the file's order is, and no memory (qsort may take some). */
static void sort(const kvp__gguf *g, uint32_t *index, uint32_t n, compare_fn *compare)
{
    for (uint32_t i = 0; i < n; i++) index[i] = i;
    for (uint32_t i = n / 2; i-- > 0;) sift(g, index, i, n, compare);
    for (uint32_t last = n; last-- > 1;) {
        uint32_t swap = index[0];
        index[0] = index[last];
        index[last] = swap;
        sift(g, index, 0, last, compare);
    }
}

static int compare_bytes(const char *a, size_t a_bytes, const char *b, size_t b_bytes)
{
    int c = memcmp(a, b, a_bytes < b_bytes ? a_bytes : b_bytes);
    return c ? c : a_bytes < b_bytes ? -1 : a_bytes > b_bytes;
}

static int compare_keys(const kvp__gguf *g, uint32_t a, uint32_t b)
{
    const kvp__gguf_entry *x = &g->entries[a], *y = &g->entries[b];
    return compare_bytes(x->key, x->key_bytes, y->key, y->key_bytes);
}

static int compare_names(const kvp__gguf *g, uint32_t a, uint32_t b)
{
    return strcmp(g->tensors[a].name, g->tensors[b].name);
}

static int compare_offsets(const kvp__gguf *g, uint32_t a, uint32_t b)
{
    uint64_t x = g->tensors[a].offset, y = g->tensors[b].offset;
    return x != y ? (x < y ? -1 : 1) : a < b ? -1 : 1;
}

static kvp_status sort_keys(kvp__gguf *g, kvp_error *err)
{
    sort(g, g->by_key, g->n_entries, compare_keys);
    for (uint32_t i = 1; i < g->n_entries; i++) {
        if (compare_keys(g, g->by_key[i - 1], g->by_key[i]) != 0) continue;
        const kvp__gguf_entry *e = &g->entries[g->by_key[i]];
        char shown[SHOWN];
        kvp__str_copy(shown, sizeof shown, (kvp__str){e->key, e->key_bytes});
        return kvp__fail(err, KVP_ERR_FORMAT, "metadata key %s: there twice", shown);
    }
    return KVP_OK;
}

/* --- places --- */

static kvp_status check_whole(const kvp__gguf *g, kvp_error *err)
{
    uint32_t parts = 0;
    kvp_status s = kvp__gguf_u32(g, "split.count", &parts, err);
    if (s != KVP_OK || parts <= 1) return s;
    return kvp__fail(err, KVP_ERR_UNSUPPORTED,
                     "split.count: the model is in %u files; join them into one", (unsigned)parts);
}

/* Makes offsets absolute and checks each tensor's place. */
static kvp_status place_tensors(kvp__gguf *g, uint64_t header_end, uint64_t file_bytes,
                                kvp_error *err)
{
    g->alignment = 32;
    kvp_status s = kvp__gguf_u32(g, "general.alignment", &g->alignment, err);
    if (s != KVP_OK) return s;
    if (!kvp__is_pow2(g->alignment))
        return kvp__fail(err, KVP_ERR_FORMAT, "general.alignment: %u is not a power of two",
                         (unsigned)g->alignment);
    g->data_offset = kvp__round_up(header_end, g->alignment);
    for (uint32_t i = 0; i < g->n_tensors; i++) {
        kvp__tensor *t = &g->tensors[i];
        uint64_t end = 0;
        if (t->offset % g->alignment)
            return kvp__fail(err, KVP_ERR_FORMAT, "tensor %.80s: offset %llu is not a multiple of %u",
                             t->name, (unsigned long long)t->offset, (unsigned)g->alignment);
        if (!kvp__add(t->offset, g->data_offset, &t->offset) ||
            !kvp__add(t->offset, t->bytes, &end) || end > file_bytes)
            return kvp__fail(err, KVP_ERR_FORMAT,
                             "tensor %.80s: its %llu bytes do not lie inside the file of %llu bytes",
                             t->name, (unsigned long long)t->bytes,
                             (unsigned long long)file_bytes);
    }
    return KVP_OK;
}

/* by_name serves both orders; the names' comes last and stays. */
static kvp_status sort_tensors(kvp__gguf *g, kvp_error *err)
{
    sort(g, g->by_name, g->n_tensors, compare_offsets);
    for (uint32_t i = 1; i < g->n_tensors; i++) {
        const kvp__tensor *a = &g->tensors[g->by_name[i - 1]], *b = &g->tensors[g->by_name[i]];
        if (a->offset + a->bytes > b->offset)
            return kvp__fail(err, KVP_ERR_FORMAT, "tensor %.80s: its bytes overlap those of %.80s",
                             b->name, a->name);
    }
    sort(g, g->by_name, g->n_tensors, compare_names);
    for (uint32_t i = 1; i < g->n_tensors; i++)
        if (compare_names(g, g->by_name[i - 1], g->by_name[i]) == 0)
            return kvp__fail(err, KVP_ERR_FORMAT, "tensor %.80s: there twice",
                             g->tensors[g->by_name[i]].name);
    return KVP_OK;
}

/* --- open, close --- */

static kvp_status read_all(reader *r)
{
    kvp__gguf *g = r->g;
    kvp_status s = walk(r);
    if (s == KVP_OK) s = make_tables(g, r->err);
    if (s != KVP_OK) return s;
    size_t names_size = g->names_bytes;
    r->fill = true;
    s = walk(r);
    if (s == KVP_OK && g->names_bytes != names_size)
        s = kvp__fail(r->err, KVP_ERR_INTERNAL, "the two walks over a GGUF header differ");
    if (s == KVP_OK) s = sort_keys(g, r->err);
    if (s == KVP_OK) s = check_whole(g, r->err);
    if (s == KVP_OK) s = place_tensors(g, r->at, r->source->bytes, r->err);
    if (s == KVP_OK) s = sort_tensors(g, r->err);
    return s;
}

kvp_status kvp__gguf_open(kvp__gguf *out, const kvp__hooks *hooks, const kvp__source *source,
                          kvp_error *err)
{
    reader r;
    memset(&r, 0, sizeof r);
    memset(out, 0, sizeof *out);
    out->hooks = *hooks;
    r.g = out;
    r.source = source;
    r.err = err;
    kvp_status s = read_all(&r);
    if (s != KVP_OK) kvp__gguf_close(out);
    return s;
}

void kvp__gguf_close(kvp__gguf *g)
{
    const kvp__hooks *h = &g->hooks;
    kvp__free(h, g->names, g->names_bytes + 1);
    kvp__free(h, g->by_name, ((size_t)g->n_tensors + 1) * sizeof *g->by_name);
    kvp__free(h, g->tensors, ((size_t)g->n_tensors + 1) * sizeof *g->tensors);
    kvp__free(h, g->by_key, ((size_t)g->n_entries + 1) * sizeof *g->by_key);
    kvp__free(h, g->entries, ((size_t)g->n_entries + 1) * sizeof *g->entries);
    kvp__free(h, g->buffer, g->buffer_size);
    memset(g, 0, sizeof *g);
}

/* --- look-ups --- */

const kvp__gguf_entry *kvp__gguf_find(const kvp__gguf *g, const char *key)
{
    size_t bytes = strlen(key);
    for (uint32_t low = 0, high = g->n_entries; low < high;) {
        uint32_t middle = low + (high - low) / 2;
        const kvp__gguf_entry *e = &g->entries[g->by_key[middle]];
        int c = compare_bytes(key, bytes, e->key, e->key_bytes);
        if (c == 0) return e;
        if (c < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

uint64_t kvp__gguf_tensor(const kvp__gguf *g, const char *name)
{
    for (uint32_t low = 0, high = g->n_tensors; low < high;) {
        uint32_t middle = low + (high - low) / 2;
        int c = strcmp(name, g->tensors[g->by_name[middle]].name);
        if (c == 0) return g->by_name[middle];
        if (c < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return UINT64_MAX;
}

static kvp_status wrong_kind(const char *key, const char *wanted, kvp_error *err)
{
    return kvp__fail(err, KVP_ERR_FORMAT, "metadata key %s: the value is not %s", key, wanted);
}

static bool is_integer(uint8_t type)
{
    return type <= KVP__GGUF_I32 || type == KVP__GGUF_U64 || type == KVP__GGUF_I64;
}

/* Integers, and booleans, as 64 bits with a sign; unsigned 64-bit values as their bits. */
static int64_t integer(const uint8_t *data, uint8_t type)
{
    union {
        uint8_t u8; int8_t i8; uint16_t u16; int16_t i16; uint32_t u32; int32_t i32; int64_t i64;
    } v = {0};
    memcpy(&v, data, scalar_bytes[type]);
    switch (type) {
    case KVP__GGUF_U8: return v.u8;
    case KVP__GGUF_I8: return v.i8;
    case KVP__GGUF_U16: return v.u16;
    case KVP__GGUF_I16: return v.i16;
    case KVP__GGUF_U32: return v.u32;
    case KVP__GGUF_I32: return v.i32;
    case KVP__GGUF_BOOL: return v.u8 != 0;
    default: return v.i64;
    }
}

static float real(const uint8_t *data, uint8_t type)
{
    float f;
    double d;
    if (type == KVP__GGUF_F64) {
        memcpy(&d, data, sizeof d);
        return (float)d;
    }
    memcpy(&f, data, sizeof f);
    return f;
}

kvp_status kvp__gguf_u64(const kvp__gguf *g, const char *key, uint64_t *out, kvp_error *err)
{
    const kvp__gguf_entry *e = kvp__gguf_find(g, key);
    if (!e) return KVP_OK;
    if (!is_integer(e->type)) return wrong_kind(key, "an integer", err);
    int64_t v = integer(e->data, e->type);
    if (v < 0 && e->type != KVP__GGUF_U64)
        return kvp__fail(err, KVP_ERR_FORMAT, "metadata key %s: %lld is negative", key, (long long)v);
    *out = (uint64_t)v;
    return KVP_OK;
}

kvp_status kvp__gguf_u32(const kvp__gguf *g, const char *key, uint32_t *out, kvp_error *err)
{
    uint64_t v = *out;
    kvp_status s = kvp__gguf_u64(g, key, &v, err);
    if (s != KVP_OK) return s;
    if (v > UINT32_MAX)
        return kvp__fail(err, KVP_ERR_FORMAT, "metadata key %s: %llu is too large", key,
                         (unsigned long long)v);
    *out = (uint32_t)v;
    return KVP_OK;
}

kvp_status kvp__gguf_f32(const kvp__gguf *g, const char *key, float *out, kvp_error *err)
{
    const kvp__gguf_entry *e = kvp__gguf_find(g, key);
    if (!e) return KVP_OK;
    if (e->type != KVP__GGUF_F32 && e->type != KVP__GGUF_F64)
        return wrong_kind(key, "a floating-point number", err);
    *out = real(e->data, e->type);
    return KVP_OK;
}

kvp_status kvp__gguf_bool(const kvp__gguf *g, const char *key, bool *out, kvp_error *err)
{
    const kvp__gguf_entry *e = kvp__gguf_find(g, key);
    if (!e) return KVP_OK;
    if (e->type != KVP__GGUF_BOOL || e->data[0] > 1) return wrong_kind(key, "a boolean", err);
    *out = e->data[0] == 1;
    return KVP_OK;
}

static kvp__str string_at(const uint8_t *data)
{
    uint64_t bytes;
    memcpy(&bytes, data, sizeof bytes);
    return (kvp__str){(const char *)data + sizeof bytes, (size_t)bytes};
}

kvp_status kvp__gguf_string(const kvp__gguf *g, const char *key, kvp__str *out, kvp_error *err)
{
    const kvp__gguf_entry *e = kvp__gguf_find(g, key);
    if (!e) return KVP_OK;
    if (e->type != KVP__GGUF_STRING) return wrong_kind(key, "a string", err);
    *out = string_at(e->data);
    return KVP_OK;
}

/* --- arrays --- */

static bool is_string(uint8_t type) { return type == KVP__GGUF_STRING; }
static bool is_real(uint8_t type) { return type == KVP__GGUF_F32 || type == KVP__GGUF_F64; }
static bool is_integer_or_bool(uint8_t type) { return is_integer(type) || type == KVP__GGUF_BOOL; }

static kvp_status array_of(const kvp__gguf *g, const char *key, bool (*right)(uint8_t),
                           const char *wanted, kvp__gguf_array *out, kvp_error *err)
{
    const kvp__gguf_entry *e = kvp__gguf_find(g, key);
    if (e && (e->type != KVP__GGUF_ARRAY || !right(e->element))) return wrong_kind(key, wanted, err);
    memset(out, 0, sizeof *out);
    if (!e) return KVP_OK;
    out->data = e->data;
    out->count = e->count;
    out->element = e->element;
    out->at = e->data;
    return KVP_OK;
}

kvp_status kvp__gguf_strings(const kvp__gguf *g, const char *key, kvp__gguf_array *out,
                             kvp_error *err)
{
    return array_of(g, key, is_string, "an array of strings", out, err);
}

kvp_status kvp__gguf_ints(const kvp__gguf *g, const char *key, kvp__gguf_array *out, kvp_error *err)
{
    return array_of(g, key, is_integer_or_bool, "an array of integers", out, err);
}

kvp_status kvp__gguf_floats(const kvp__gguf *g, const char *key, kvp__gguf_array *out,
                            kvp_error *err)
{
    return array_of(g, key, is_real, "an array of floating-point numbers", out, err);
}

bool kvp__gguf_next(kvp__gguf_array *a, kvp__str *out)
{
    if (a->next >= a->count) return false;
    *out = string_at(a->at);
    a->at += sizeof(uint64_t) + out->bytes;
    a->next++;
    return true;
}

int64_t kvp__gguf_int_at(const kvp__gguf_array *a, uint64_t i)
{
    int64_t v = integer(a->data + i * scalar_bytes[a->element], a->element);
    return v < 0 && a->element == KVP__GGUF_U64 ? INT64_MAX : v;
}

float kvp__gguf_float_at(const kvp__gguf_array *a, uint64_t i)
{
    return real(a->data + i * scalar_bytes[a->element], a->element);
}
