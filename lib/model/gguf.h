/*
 * GGUF metadata, read from an untrusted source.
 *
 * kvp__gguf_open reads the header, the metadata and the tensor table into one buffer and checks all of
 * it, once: every length against the bytes that are there, every key and tensor name for being the
 * only one, every tensor for its type, shape, alignment and place. After that the calls below are
 * plain look-ups that cannot run out of the buffer.
 *
 * The object lives while a model is being loaded and no longer: strings and arrays point into its
 * buffer, so what is to stay must be copied. Users: model.c, arch.c, tokenizer.c, chat.c and their
 * tests.
 *
 *     kvp__gguf g;
 *     if (kvp__gguf_open(&g, hooks, &source, err) < 0) return ...;
 *     uint32_t bos = UINT32_MAX;                                  (stays so if the key is absent)
 *     s = kvp__gguf_u32(&g, "tokenizer.ggml.bos_token_id", &bos, err);
 *     kvp__gguf_array tokens;
 *     s = kvp__gguf_strings(&g, "tokenizer.ggml.tokens", &tokens, err);
 *     kvp__str token;
 *     while (kvp__gguf_next(&tokens, &token)) ...
 *     kvp__gguf_close(&g);
 */
#ifndef KVP_MODEL_GGUF_H
#define KVP_MODEL_GGUF_H

#include "model/model.h"

/* Bytes of the file, not NUL-terminated; may hold anything. */
typedef struct kvp__str {
    const char *data; /* never NULL after a successful call */
    size_t bytes;
} kvp__str;

bool kvp__str_is(kvp__str s, const char *text);

/* At most `size` - 1 characters, NUL-terminated, cut at a character's start, control characters made
 * '?': fit for one line of a message or for an info struct. Returns `out`. */
char *kvp__str_copy(char *out, size_t size, kvp__str s);

/* Value types, with the numbers of the format. */
typedef enum kvp__gguf_type {
    KVP__GGUF_U8 = 0, KVP__GGUF_I8 = 1, KVP__GGUF_U16 = 2, KVP__GGUF_I16 = 3, KVP__GGUF_U32 = 4,
    KVP__GGUF_I32 = 5, KVP__GGUF_F32 = 6, KVP__GGUF_BOOL = 7, KVP__GGUF_STRING = 8,
    KVP__GGUF_ARRAY = 9, KVP__GGUF_U64 = 10, KVP__GGUF_I64 = 11, KVP__GGUF_F64 = 12
} kvp__gguf_type;

/* One key. `data` is the value itself; of an array, its first element. */
typedef struct kvp__gguf_entry {
    const uint8_t *data;
    const char *key; /* not NUL-terminated */
    uint32_t key_bytes;
    uint8_t type;    /* kvp__gguf_type */
    uint8_t element; /* of an array: the type of its elements, never KVP__GGUF_ARRAY */
    uint64_t count;  /* of an array: elements; else 1 */
} kvp__gguf_entry;

typedef struct kvp__gguf {
    kvp__hooks hooks;
    uint8_t *buffer; /* the file's first bytes, up to the end of the tensor table */
    size_t buffer_bytes, buffer_size;
    kvp__gguf_entry *entries; /* in the file's order, like the tensors */
    uint32_t n_entries;
    uint32_t n_tensors;
    kvp__tensor *tensors;
    uint32_t *by_key;  /* numbers of entries, sorted by key */
    uint32_t *by_name; /* numbers of tensors, sorted by name */
    char *names;       /* what tensors[].name point to: printable ASCII */
    size_t names_bytes;
    uint32_t version;
    uint32_t alignment;
    uint64_t data_offset; /* of the tensors' bytes in the file */
} kvp__gguf;

/* Errors: IO, FORMAT (malformed, truncated, duplicate), UNSUPPORTED (version, byte order, a tensor
 * type we do not take, a file in parts), NO_MEMORY. On failure *out holds nothing. */
kvp_status kvp__gguf_open(kvp__gguf *out, const kvp__hooks *hooks, const kvp__source *source,
                          kvp_error *err);
void kvp__gguf_close(kvp__gguf *g);

/* --- one value --- */

/* NULL: no such key. */
const kvp__gguf_entry *kvp__gguf_find(const kvp__gguf *g, const char *key);

/* Each stores the value if the key is there, leaves *out as it is if not, and returns FORMAT naming
 * the key if the value is of another kind or does not fit. Integers of any width are taken for
 * integers, F32 and F64 for floats (which may be infinite or NaN). */
kvp_status kvp__gguf_u32(const kvp__gguf *g, const char *key, uint32_t *out, kvp_error *err);
kvp_status kvp__gguf_u64(const kvp__gguf *g, const char *key, uint64_t *out, kvp_error *err);
kvp_status kvp__gguf_f32(const kvp__gguf *g, const char *key, float *out, kvp_error *err);
kvp_status kvp__gguf_bool(const kvp__gguf *g, const char *key, bool *out, kvp_error *err);
kvp_status kvp__gguf_string(const kvp__gguf *g, const char *key, kvp__str *out, kvp_error *err);

/* --- arrays --- */

typedef struct kvp__gguf_array {
    const uint8_t *data;
    uint64_t count;  /* 0: empty, or the key is absent */
    uint8_t element; /* kvp__gguf_type */
    uint64_t next;   /* kvp__gguf_next: strings already given */
    const uint8_t *at;
} kvp__gguf_array;

/* As above: absent gives an empty array (and data NULL), another kind of value FORMAT. */
kvp_status kvp__gguf_strings(const kvp__gguf *g, const char *key, kvp__gguf_array *out,
                             kvp_error *err);
kvp_status kvp__gguf_ints(const kvp__gguf *g, const char *key, kvp__gguf_array *out,
                          kvp_error *err); /* integers of any width, or booleans */
kvp_status kvp__gguf_floats(const kvp__gguf *g, const char *key, kvp__gguf_array *out,
                            kvp_error *err);

/* The next string of an array from kvp__gguf_strings; false past the last one. Strings have
 * different lengths, so there is no access by number. Set `a->next = 0, a->at = a->data` to begin
 * again. */
bool kvp__gguf_next(kvp__gguf_array *a, kvp__str *out);

/* Element `i` < count. 64-bit unsigned values above INT64_MAX come as INT64_MAX. */
int64_t kvp__gguf_int_at(const kvp__gguf_array *a, uint64_t i);
float kvp__gguf_float_at(const kvp__gguf_array *a, uint64_t i);

/* --- tensors --- */

/* For messages; also of types that kvp__type_get does not know. */
const char *kvp__type_name(uint32_t type);

/* Index into tensors[], or UINT64_MAX. */
uint64_t kvp__gguf_tensor(const kvp__gguf *g, const char *name);

#endif
