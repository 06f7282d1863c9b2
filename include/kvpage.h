/*
 * kvpage: run language models for many sequences at once, out of one paged KV cache.
 *
 * This is the whole public interface. Read it top to bottom: status, hooks, team, model, pool,
 * sequence, batch, events, and last the own-model way. docs/guide.md walks through a program.
 *
 *     kvp_model   the weights and the tokenizer, or only a geometry; immutable, shared by threads
 *     kvp_pool    the paged KV cache: blocks, the prefix index, and the domain's error record
 *     kvp_seq     one sequence of tokens, with its block tables
 *     kvp_batch   what is run together; stepped by the host's own loop
 *     kvp_team    worker threads, which batches may share
 *
 * Rules that hold for every call, unless its comment says otherwise:
 *   - Zero is the default: a zeroed field, a NULL options pointer, and a field that an older
 *     host's struct does not have all ask for the default. "None", "off" and "inline" are named
 *     non-zero values.
 *   - `size` comes first in every struct that may grow (not in kvp_string, kvp_chat_message,
 *     kvp_logit_bias, kvp_layer_group): set it to sizeof the struct, or call its _init. A kvp_error
 *     whose size is not set is not written. A larger struct than this library knows is accepted while its unknown tail is all zero.
 *     In a struct that is filled for the host, `size` says how much may be written and stays.
 *   - After an error nothing has changed, and out parameters are untouched.
 *   - Inputs are copied; nothing the host passes is kept, except where a comment says "borrowed".
 *   - Thread "domain": a pool with its sequences and its batch is one domain, used by one thread
 *     at a time, which may change. A second thread inside gets KVP_ERR_THREAD; a call from a hook
 *     back into the same domain gets KVP_ERR_REENTRANT.
 *   - Thread "any": safe from any thread at any time.
 *   - Destroy takes NULL, returns nothing, may be called in any order and a second time: a parent
 *     lives on until its last child is destroyed. A stale handle is refused, not followed, until
 *     1,024 later creations under the same model, or until the model and all that was made from it
 *     are gone.
 *   - After fork(2) models go on working in the child, on the CPU; pools, sequences, batches and
 *     teams of the parent answer KVP_ERR_FORKED there, as do a model's weights on other devices,
 *     and destroying them does nothing.
 *   - kvp_..._init zeroes a struct and sets its `size`; any thread, never blocks, since its struct.
 *   - No call exits, aborts, prints, reads the environment or depends on the locale. Stack use
 *     stays below 32 KiB.
 */
#ifndef KVPAGE_H
#define KVPAGE_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define KVP_API __attribute__((visibility("default")))
#else
#define KVP_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define KVP_VERSION_MAJOR 0
#define KVP_VERSION_MINOR 1
#define KVP_VERSION_PATCH 0

typedef struct kvp_model kvp_model;
typedef struct kvp_pool kvp_pool;
typedef struct kvp_seq kvp_seq;
typedef struct kvp_batch kvp_batch;
typedef struct kvp_team kvp_team;

/* ---------------------------------------------------------------------------------------------
 * Status
 *
 * 0 is success, above 0 is not an error, below 0 is one, in classes by hundreds: 1xx usage,
 * 2xx resource (may succeed later), 3xx device, 4xx data, 5xx internal. Numbers are never reused.
 */
typedef int32_t kvp_status;

/* X(name, number, text) */
#define KVP_STATUS_LIST(X)                                                                        \
    X(KVP_OK, 0, "success; of kvp_step: call again")                                              \
    X(KVP_AGAIN, 1, "nothing to do until the fd is readable or the deadline has passed")          \
    X(KVP_EVENTS, 2, "events can be taken")                                                       \
    X(KVP_PLANNED, 3, "a step is planned; run it, then commit or abort")                          \
    X(KVP_STALLED, 4, "only pinned blocks are in the way")                                        \
    X(KVP_DONE, 5, "no work left")                                                                \
    X(KVP_ERR_INVALID_ARG, -101, "an argument or option is out of range")                         \
    X(KVP_ERR_INVALID_HANDLE, -102, "the handle is of another kind, destroyed or not a handle")   \
    X(KVP_ERR_STATE, -103, "not possible in the present state")                                   \
    X(KVP_ERR_THREAD, -104, "another thread is inside this domain")                               \
    X(KVP_ERR_REENTRANT, -105, "called from a hook of the same domain")                           \
    X(KVP_ERR_FORKED, -106, "the handle belongs to the parent process")                           \
    X(KVP_ERR_INVALID_TOKEN, -107, "a token id is outside the vocabulary")                        \
    X(KVP_ERR_DUPLICATE, -108, "already there")                                                   \
    X(KVP_ERR_UNSUPPORTED, -109, "this library or device cannot do that")                         \
    X(KVP_ERR_TOO_LARGE, -110, "can never fit")                                                   \
    X(KVP_ERR_BUSY, -111, "still in use")                                                         \
    X(KVP_ERR_CANCELLED, -112, "cancelled by the host")                                           \
    X(KVP_ERR_BUFFER, -113, "the buffer is too small; the size needed has been stored")           \
    X(KVP_ERR_MISMATCH, -114, "belongs to another model, pool or batch")                          \
    X(KVP_ERR_NO_MEMORY, -201, "the allocator or the system gave no memory")                      \
    X(KVP_ERR_NO_BLOCKS, -202, "the pool has no block to spare now")                              \
    X(KVP_ERR_CAPACITY, -203, "grown to the limit of its pool, context or ring")                  \
    X(KVP_ERR_SYSTEM, -204, "the system refused a thread or a file descriptor")                   \
    X(KVP_ERR_NO_DEVICE, -301, "the device is not there or not usable")                           \
    X(KVP_ERR_DEVICE_LOST, -302, "the device stopped working")                                    \
    X(KVP_ERR_IO, -401, "a file or reader could not be read")                                     \
    X(KVP_ERR_FORMAT, -402, "the data is malformed or truncated")                                 \
    X(KVP_ERR_INVALID_MODEL, -403, "the model's configuration contradicts itself")                \
    X(KVP_ERR_UNKNOWN_ARCH, -404, "the model's architecture is not known")                        \
    X(KVP_ERR_NO_TOKENIZER, -405, "the model has no tokenizer that is understood")                \
    X(KVP_ERR_INTERNAL, -501, "a fault inside the library")

enum kvp_status_code {
#define KVP_STATUS_ENUM_(name, number, text) name = number,
    KVP_STATUS_LIST(KVP_STATUS_ENUM_)
#undef KVP_STATUS_ENUM_
    KVP_STATUS_END_ = 0x7fff
};

/* The status' name ("KVP_ERR_BUSY"), and a sentence. Static text, never NULL.
 * Thread: any. Blocking: no. Since: 0.1. */
KVP_API const char *kvp_status_name(kvp_status status);
KVP_API const char *kvp_status_text(kvp_status status);

/* What went wrong, in one line that names the thing. Calls on a model and calls that make a
 * handle fill the caller's struct (may be NULL); for the others ask kvp_pool_last_error,
 * kvp_seq_last_error or kvp_batch_last_error. `needed` and `available` carry the two numbers of a
 * resource error (bytes, blocks or tokens, as the text says), else 0. */
typedef struct kvp_error {
    uint32_t size;
    kvp_status status;
    uint64_t needed;
    uint64_t available;
    char text[240];
} kvp_error;
KVP_API void kvp_error_init(kvp_error *out, size_t size);

/* (major << 16) | (minor << 8) | patch of the library that runs.
 * Thread: any. Blocking: no. Since: 0.1. */
KVP_API uint32_t kvp_version(void);

/* Whether the library has a named ability: 1 or 0; unknown names answer 0. Names of this version:
 * "cpu", "cuda" (built with the kernels; whether there is a device, kvp_device_get says),
 * "own-model", "gguf", "chat". Thread: any. Blocking: no. Since: 0.1. */
KVP_API int32_t kvp_feature(const char *name);

/* ---------------------------------------------------------------------------------------------
 * Devices
 *
 * Where weights and KV lie and steps are computed, by name: "cpu", which is there everywhere and is
 * what NULL means; "cuda" or "cuda:0", "cuda:1", ... for NVIDIA GPUs. The driver and cuBLAS are
 * looked for when a "cuda" device is first asked for, and the library needs neither to start. A
 * device that is not there or not usable is KVP_ERR_NO_DEVICE, with the sentence that
 * kvp_device_get shows too; memory of a device that does not suffice is KVP_ERR_NO_MEMORY with the
 * bytes needed and available.
 */

/* Instruction-set levels of the CPU device, for kvp_model_options.cpu_level. */
#define KVP_CPU_GENERIC 1 /* plain C */
#define KVP_CPU_AVX2 2    /* x86-64 with AVX2, FMA and F16C */
#define KVP_CPU_AVX512 3  /* and AVX-512 F, BW, DQ, VL and VNNI */
#define KVP_CPU_NEON 4    /* Arm64; with the dot product instructions where present */
#define KVP_CPU_AMX 5     /* KVP_CPU_AVX512, and AMX tiles of bytes; needs the system's leave, see
                             docs/threads.md */

typedef struct kvp_device_info {
    uint32_t size;
    int32_t usable;        /* 1 or 0 */
    char name[32];         /* "cpu", "cuda:0" */
    char description[128]; /* for people: the model or instruction-set level, or what is missing */
    uint32_t cpu_level;    /* the best level this machine has, KVP_CPU_..., 0 if not a CPU */
    uint32_t threads;      /* cores that workers may use, 0 if not a CPU */
    uint64_t memory_bytes; /* 0 if unknown */
} kvp_device_info;
KVP_API void kvp_device_info_init(kvp_device_info *out, size_t size);

/* Device number `index`, from 0: the CPU, then each GPU, or one entry that says why there is none.
 * KVP_ERR_INVALID_ARG past the last one.
 * Thread: any. Blocking: the first call looks for the driver. Since: 0.1. */
KVP_API kvp_status kvp_device_get(uint32_t index, kvp_device_info *out);

/* ---------------------------------------------------------------------------------------------
 * Hooks
 *
 * Given when a model is opened (or a team is created) and inherited by all that is made from it.
 * Every hook may be called from any thread that is inside a kvp call or, for `alloc`, `free` and
 * `log`, at the same time from several; it must return normally. The struct is copied, `user` is
 * borrowed until `released` has been called.
 */
#define KVP_LOG_ERROR 1
#define KVP_LOG_WARN 2
#define KVP_LOG_INFO 3
#define KVP_LOG_DEBUG 4

typedef struct kvp_hooks {
    uint32_t size;
    uint32_t log_level; /* the most verbose level that is wanted; 0: KVP_LOG_WARN */
    void *user;
    /* `align` is a power of two; NULL: no memory. Both or neither. Default: the C library's. */
    void *(*alloc)(void *user, size_t size, size_t align);
    void (*free)(void *user, void *ptr, size_t size, size_t align);
    /* One complete line without a newline. Default: silence. */
    void (*log)(void *user, int32_t level, const char *line);
    /* Nanoseconds that never go back. Default: CLOCK_MONOTONIC. A clock of another pace is for
     * tests: kvp_wait sleeps real time. */
    uint64_t (*clock)(void *user);
    /* The last call: everything made under these hooks has been freed. May be NULL. */
    void (*released)(void *user);
} kvp_hooks;
KVP_API void kvp_hooks_init(kvp_hooks *out, size_t size);

/* ---------------------------------------------------------------------------------------------
 * Team: worker threads
 */
#define KVP_THREADS_INLINE (-1) /* no worker: kvp_step computes on the calling thread */

typedef struct kvp_team_options {
    uint32_t size;
    int32_t threads;        /* 0: one per core this process may use; KVP_THREADS_INLINE is refused */
    const kvp_hooks *hooks; /* NULL: defaults */
} kvp_team_options;
KVP_API void kvp_team_options_init(kvp_team_options *out, size_t size);

/* Starts workers, which block all signals and sleep while there is nothing to do. Batches that
 * use the team keep it alive. KVP_ERR_SYSTEM when the system gives no thread.
 * Thread: any. Ownership: the caller destroys. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_team_create(const kvp_team_options *options, kvp_team **out, kvp_error *err);
/* Thread: any. Blocking: no, unless this frees the team (nothing runs on it): it then waits for
 * its sleeping workers to end. Since: 0.1. */
KVP_API void kvp_team_destroy(kvp_team *team);

/* ---------------------------------------------------------------------------------------------
 * Model: a GGUF file, or a geometry
 */
#define KVP_ACTIVATIONS_INT8 1 /* the default: 8-bit blocks of 32 against quantised weights */
#define KVP_ACTIVATIONS_F32 2  /* 32-bit products everywhere: slower, for comparisons */

typedef struct kvp_model_options {
    uint32_t size;
    uint32_t activations;   /* KVP_ACTIVATIONS_...; 0: KVP_ACTIVATIONS_INT8 */
    uint32_t cpu_level;     /* cap, KVP_CPU_...; 0: the best this machine has */
    uint32_t pad0;
    const kvp_hooks *hooks; /* NULL: defaults */
} kvp_model_options;
KVP_API void kvp_model_options_init(kvp_model_options *out, size_t size);

/* Opens a GGUF file (version 2 or 3) and validates it: header, metadata, tokenizer, the tensors'
 * names, types, shapes and places. No weight is read. The file stays open until it has been
 * placed on every device that is wanted, or the model is freed; it is never mapped.
 * Errors: IO, FORMAT, INVALID_MODEL, UNKNOWN_ARCH, UNSUPPORTED, NO_MEMORY.
 * Thread: any. Ownership: the caller destroys. Blocking: yes (reads the header). Since: 0.1. */
KVP_API kvp_status kvp_model_open(const char *path, const kvp_model_options *options,
                                  kvp_model **out, kvp_error *err);

/* The same from memory, borrowed until the model is freed.
 * Thread: any. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_model_open_memory(const void *data, size_t bytes,
                                         const kvp_model_options *options, kvp_model **out,
                                         kvp_error *err);

typedef struct kvp_reader {
    uint32_t size;
    uint32_t pad0;
    void *user;
    uint64_t total_bytes;
    /* Reads exactly `bytes` at `offset`: 0, or not 0 for failure. Called from one thread at a
     * time, inside open and place. */
    int32_t (*read)(void *user, uint64_t offset, void *buffer, size_t bytes);
    /* May be NULL. Called once, when the reader is not needed any more (also if open fails). */
    void (*close)(void *user);
} kvp_reader;
KVP_API void kvp_reader_init(kvp_reader *out, size_t size);

/* The same through a reader. The struct is copied, `user` is borrowed until `close`.
 * Thread: any. Blocking: as the reader. Since: 0.1. */
KVP_API kvp_status kvp_model_open_reader(const kvp_reader *reader, const kvp_model_options *options,
                                         kvp_model **out, kvp_error *err);

/* Layers with equal KV geometry; each group has block tables of its own. */
typedef struct kvp_layer_group {
    uint32_t layers;      /* how many */
    uint32_t kv_heads;    /* 0: these layers keep no KV (planning only) */
    uint32_t key_dim;     /* elements of a key per head */
    uint32_t value_dim;   /* elements of a value per head; KVP_DIM_NONE: held inside the key (MLA) */
    uint32_t window;      /* tokens a query sees, itself included; 0: all */
    uint32_t query_heads; /* a multiple of kv_heads; 0: kv_heads */
} kvp_layer_group;
#define KVP_DIM_NONE 0xffffffffu

typedef struct kvp_geometry {
    uint32_t size;
    uint32_t n_groups;             /* 1 to 16 */
    const kvp_layer_group *groups; /* n_groups of them, group_stride bytes apart */
    uint32_t group_stride;         /* 0: sizeof(kvp_layer_group) */
    uint32_t n_layers;             /* 0: the sum over the groups */
    const uint8_t *layer_groups;   /* the group of each layer; NULL: group after group */
    uint32_t vocabulary;           /* token ids are below; 0: not checked */
    uint32_t context;              /* longest sequence in tokens; 0: as the pool allows */
    const void *model_key;         /* which weights the host runs: enters every prefix key */
    uint64_t model_key_bytes;      /* at most 256 */
} kvp_geometry;
KVP_API void kvp_geometry_init(kvp_geometry *out, size_t size);

/* A model of which kvpage knows only the geometry: the host runs the projections (see "Own
 * model"). Errors: INVALID_ARG, UNSUPPORTED.
 * Thread: any. Ownership: the caller destroys. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_model_create(const kvp_geometry *geometry, const kvp_model_options *options,
                                    kvp_model **out, kvp_error *err);

/* Thread: any. Blocking: no. Since: 0.1. */
KVP_API void kvp_model_destroy(kvp_model *model);

typedef struct kvp_place_options {
    uint32_t size;
    uint32_t pad0;
    const char *device; /* "cpu", "cuda:0", ...; NULL: "cpu". A model may be on up to 16 */
    void *user;         /* borrowed during the call */
    /* Called between tensors, on the calling thread; not 0 cancels. May be NULL. */
    int32_t (*progress)(void *user, uint64_t done_bytes, uint64_t total_bytes);
    int32_t threads;    /* to pack with; 0: one per core; KVP_THREADS_INLINE: the caller's alone */
    uint32_t pad1;
    /* NULL, or the path of a packed file: the weights as they lie in memory, kept so that the next
     * process reads them and packs nothing. Where there is none, or one that is not of this model file
     * (its size, time of change and tensors) and library, the weights are packed and the file is
     * written, as large as kvp_model_info.packed_bytes; it is moved into place when it is whole.
     * Trouble with it is logged and is no error. Only for models opened by path, and the CPU. */
    const char *packed_file;
} kvp_place_options;
KVP_API void kvp_place_options_init(kvp_place_options *out, size_t size);

/* Reads the weights and lays them out for a device; pools share them. A second call for the same
 * device is a no-op. A pool does this itself if the host did not. After CANCELLED or another
 * error the model is as it was, and place can be called again.
 * Errors: NO_DEVICE, NO_MEMORY, DEVICE_LOST, IO, FORMAT, CANCELLED, UNSUPPORTED (own-model;
 * packed_file for a model that was not opened by path or a device that keeps none; on 16 devices
 * already).
 * Thread: any, one at a time per model (else BUSY). Blocking: yes. Since: 0.1. */
KVP_API kvp_status kvp_model_place(kvp_model *model, const kvp_place_options *options,
                                   kvp_error *err);

/* Prompt formats of chat models. */
#define KVP_CHAT_NONE 1 /* the file names no format that is known */
#define KVP_CHAT_CHATML 2
#define KVP_CHAT_GEMMA 3
#define KVP_CHAT_LLAMA3 4
#define KVP_CHAT_MISTRAL 5

typedef struct kvp_model_info {
    uint32_t size;
    uint32_t n_layers;
    char architecture[32]; /* "llama", "qwen2", "qwen3", "gemma3"; "geometry" if own-model */
    char name[96];         /* general.name, cut if longer */
    uint32_t n_groups;
    uint32_t width;        /* embedding length; 0 if own-model, like all that a file would say */
    uint32_t feed_forward;
    uint32_t query_heads;
    uint32_t vocabulary;
    uint32_t context;      /* trained context in tokens */
    uint64_t parameters;
    uint64_t file_bytes;
    uint64_t tensors;
    uint64_t weight_bytes; /* of the tensors in the file */
    uint64_t packed_bytes; /* of the weights once placed on the CPU */
    uint64_t kv_bytes_per_token; /* F16 K and V */
    uint32_t cpu_level;    /* KVP_CPU_... that will run */
    uint32_t activations;  /* KVP_ACTIVATIONS_... that will run */
    uint32_t chat_format;  /* KVP_CHAT_... */
    uint32_t has_tokenizer; /* 1 or 0 */
    char tokenizer[32];    /* "gpt2", "llama", ... as the file names it */
    char pre_tokenizer[32];
    int32_t bos_token;     /* -1: none, like the two below */
    int32_t eos_token;
    int32_t unknown_token;
    uint32_t adds_bos;     /* 1 if tokenizing with KVP_TOKENIZE_SPECIAL_START puts a BOS first */
    uint32_t tied_embeddings; /* 1 if the embedding is the output matrix too */
    uint32_t placed;       /* 1 once placed on any device */
} kvp_model_info;
KVP_API void kvp_model_info_init(kvp_model_info *out, size_t size);

/* Thread: any. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_model_get_info(const kvp_model *model, kvp_model_info *out);

/* Layer group `index`; INVALID_ARG past the last one. Thread: any. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_model_get_group(const kvp_model *model, uint32_t index,
                                       kvp_layer_group *out, size_t size);

typedef struct kvp_tensor_info {
    uint32_t size;
    uint32_t n_dims;
    uint64_t dims[4];  /* innermost first, as in the file; 1 beyond n_dims */
    uint64_t bytes;
    uint64_t offset;   /* in the file */
    const char *name;  /* borrowed from the model */
    const char *type;  /* "F16", "Q4_K", ...; static */
} kvp_tensor_info;
KVP_API void kvp_tensor_info_init(kvp_tensor_info *out, size_t size);

/* Tensor `index` of the file; INVALID_ARG past the last one.
 * Thread: any. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_model_get_tensor(const kvp_model *model, uint64_t index,
                                        kvp_tensor_info *out);

/* --- text and tokens --- */

#define KVP_TOKENIZE_SPECIAL_START 1u /* put first what the model wants first (BOS), but once:
                                         a text whose first token is the BOS already keeps one */
#define KVP_TOKENIZE_PARSE_SPECIAL 2u /* special tokens written in the text become those tokens;
                                         without this flag they stay text */

/* Text (bytes; NUL and invalid UTF-8 are taken as they are) to token ids. *count gets the number
 * of tokens; BUFFER if that is above `capacity`, with *count set and `out` untouched (pass NULL
 * and 0 to ask). Errors: BUFFER, NO_TOKENIZER, NO_MEMORY.
 * Thread: any. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_tokenize(const kvp_model *model, const char *text, size_t bytes,
                                uint32_t flags, int32_t *out, size_t capacity, size_t *count,
                                kvp_error *err);

#define KVP_DETOKENIZE_SPECIAL 1u /* write special tokens too; without: they give no text */

/* Token ids to bytes, not NUL-terminated; sizes as in kvp_tokenize. Errors: BUFFER,
 * INVALID_TOKEN, NO_TOKENIZER. Thread: any. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_detokenize(const kvp_model *model, const int32_t *tokens, size_t count,
                                  uint32_t flags, char *out, size_t capacity, size_t *bytes,
                                  kvp_error *err);

#define KVP_TOKEN_NORMAL 1u
#define KVP_TOKEN_SPECIAL 2u /* control or unknown: never made from plain text */
#define KVP_TOKEN_BYTE 4u    /* stands for one byte */
#define KVP_TOKEN_END 8u     /* ends a generation: end of text, of turn, of message */

/* KVP_TOKEN_... flags of a token, 0 if the id is out of range or the model has no tokenizer.
 * Thread: any. Blocking: no. Since: 0.1. */
KVP_API uint32_t kvp_token_flags(const kvp_model *model, int32_t token);

typedef struct kvp_chat_message {
    const char *role; /* "system", "user" or "assistant"; NUL-terminated */
    const char *text;
    uint64_t text_bytes;
} kvp_chat_message;

#define KVP_CHAT_ADD_REPLY 1u /* end with the start of the assistant's turn */
#define KVP_CHAT_CONTINUE 2u  /* the messages follow a conversation whose tokens are already there:
                                 no BOS, no default system prompt, and the end of the assistant's
                                 turn that a generation leaves out comes first */

/* A conversation as token ids, in the model's own format (or `format`, KVP_CHAT_..., 0: the
 * file's). Only the format's own marks become special tokens; what stands in a message's text is
 * text. Sizes as in kvp_tokenize. Errors: as kvp_tokenize; UNSUPPORTED if the format is unknown or
 * its marks are not in the vocabulary; INVALID_ARG for an unknown role.
 * Thread: any. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_chat_tokenize(const kvp_model *model, uint32_t format,
                                     const kvp_chat_message *messages, size_t n_messages,
                                     size_t stride, uint32_t flags, int32_t *out, size_t capacity,
                                     size_t *count, kvp_error *err);

/* ---------------------------------------------------------------------------------------------
 * Plan: what will be needed, before anything is loaded
 */
#define KVP_KV_F16 1
#define KVP_KV_BF16 2
#define KVP_KV_F32 3

typedef struct kvp_plan_options {
    uint32_t size;
    uint32_t block_tokens;        /* 0: 16 */
    uint32_t k_format;            /* KVP_KV_...; 0: KVP_KV_F16 */
    uint32_t v_format;
    uint64_t tokens;              /* per sequence; 0: the model's context, or 4096 */
    uint64_t sequences;           /* 0: 1 */
    uint64_t memory_bytes;        /* for the KV cache; 0: not asked */
    uint32_t token_budget;        /* rows of a step; 0: 512 */
    uint32_t pad0;
    const char *device;           /* which need not be there; NULL: "cpu" */
} kvp_plan_options;
KVP_API void kvp_plan_options_init(kvp_plan_options *out, size_t size);

typedef struct kvp_plan_result {
    uint32_t size;
    uint32_t block_tokens;
    uint64_t kv_bytes_per_token;  /* all layers, K and V */
    uint64_t block_bytes;         /* all groups together, padding included */
    uint64_t blocks_per_sequence;
    uint64_t blocks;              /* for all sequences */
    uint64_t kv_bytes;            /* blocks * block_bytes: what a pool of so many blocks takes */
    uint64_t kv_bytes_ideal;      /* tokens * kv_bytes_per_token, no rounding */
    uint64_t kv_bytes_windowed;   /* the ideal if window layers kept only their window */
    uint64_t weight_bytes;        /* placed on the device; 0 without a file */
    uint64_t workspace_bytes;     /* of a batch with the token budget; 0 without a file */
    uint64_t blocks_fit;          /* in memory_bytes */
    uint64_t sequences_fit;       /* in memory_bytes, of `tokens` each */
} kvp_plan_result;
KVP_API void kvp_plan_result_init(kvp_plan_result *out, size_t size);

/* Exact arithmetic on the model's geometry; for a geometry alone make a model with
 * kvp_model_create. Errors: INVALID_ARG, TOO_LARGE (beyond 64 bits), NO_DEVICE (no such name).
 * Thread: any. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_plan(const kvp_model *model, const kvp_plan_options *options,
                            kvp_plan_result *out, kvp_error *err);

/* ---------------------------------------------------------------------------------------------
 * Pool: the paged KV cache
 */
#define KVP_PREFIX_CACHE_ON 1
#define KVP_PREFIX_CACHE_OFF 2

typedef struct kvp_pool_options {
    uint32_t size;
    uint32_t block_tokens;  /* power of two from 1 to 256; 0: 16 */
    const char *device;     /* "cpu", "cuda:0", ...; NULL: "cpu" */
    uint64_t blocks;        /* exactly so many; 0: as many as `bytes` holds */
    uint64_t bytes;         /* 0 (and no blocks): one sequence of the model's context, at least
                               8192 tokens. On the CPU memory is committed when a block is first
                               used, elsewhere all of it is taken at once. */
    uint32_t k_format;      /* KVP_KV_...; 0: KVP_KV_F16 */
    uint32_t v_format;
    uint32_t prefix_cache;  /* KVP_PREFIX_CACHE_...; 0: on */
    uint32_t pad0;
    void *slab;             /* borrowed memory of the device for the blocks, contents arbitrary, or
                               NULL; on CUDA what cuMemAlloc or cudaMalloc gave */
    uint64_t slab_bytes;    /* of kvp_pool_slab_size or more */
    void (*slab_released)(void *user, void *slab); /* the slab is not used any more; may be NULL */
    void *slab_user;
} kvp_pool_options;
KVP_API void kvp_pool_options_init(kvp_pool_options *out, size_t size);

/* Errors: INVALID_ARG, NO_DEVICE, NO_MEMORY, TOO_LARGE, UNSUPPORTED (a shape no kernel takes), and
 * those of kvp_model_place if the model was not placed. The pool keeps the model alive.
 * Thread: any. Ownership: the caller destroys. Blocking: only if it has to place. Since: 0.1. */
KVP_API kvp_status kvp_pool_create(kvp_model *model, const kvp_pool_options *options,
                                   kvp_pool **out, kvp_error *err);

/* Bytes and alignment of the slab for these options (`blocks` must be given).
 * Thread: any. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_pool_slab_size(const kvp_model *model, const kvp_pool_options *options,
                                      uint64_t *bytes, uint64_t *align, kvp_error *err);

/* Thread: any; from another thread than the domain's it is queued until that one leaves.
 * Blocking: no. Since: 0.1. */
KVP_API void kvp_pool_destroy(kvp_pool *pool);

typedef struct kvp_pool_stats {
    uint32_t size;
    uint32_t block_tokens;
    uint64_t block_bytes;     /* all groups together */
    uint64_t blocks;          /* used + idle + free, per group; the groups move in step */
    uint64_t used;            /* some sequence, pin or running step holds them */
    uint64_t idle;            /* nobody does, but a published prefix is in them: given on demand */
    uint64_t free;
    uint64_t sequences;       /* alive */
    uint64_t pinned;          /* blocks held by pins */
    /* counters since creation, which only grow */
    uint64_t used_peak;       /* most blocks used at once */
    uint64_t blocks_taken;
    uint64_t blocks_evicted;  /* idle blocks given away */
    uint64_t blocks_copied;   /* copy-on-write and partial prefixes */
    uint64_t tokens_copied;
    uint64_t tokens_prompt;   /* asked for, at first admission */
    uint64_t tokens_cached;   /* of these served from the prefix cache */
    uint64_t tokens_reattached; /* own tokens found again after a preemption or a park */
    uint64_t tokens_computed;
    uint64_t preemptions;
    uint64_t reclaims;        /* parked, paused or waiting sequences that gave up their blocks */
} kvp_pool_stats;
KVP_API void kvp_pool_stats_init(kvp_pool_stats *out, size_t size);

/* Thread: any (the values are read one by one). Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_pool_get_stats(const kvp_pool *pool, kvp_pool_stats *out);

/* Recounts everything from the block tables and the index: OK, or INTERNAL with the first
 * contradiction in the error text. For tests and doubts; O(blocks).
 * Thread: domain. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_pool_check(kvp_pool *pool);

/* Forgets every published prefix (after the host's weights changed, say). BUSY, and nothing is
 * forgotten, while a sequence or a pin holds KV: destroy or truncate those to 0 first; `held` (may
 * be NULL) gets how many do. Thread: domain. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_pool_reset_prefix(kvp_pool *pool, uint64_t *held);

/* How many tokens of this prompt the prefix cache would serve now (nothing is held; at most
 * count - 1). Thread: domain. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_pool_lookup(kvp_pool *pool, const void *salt, size_t salt_bytes,
                                   const int32_t *tokens, size_t count, uint64_t *cached);

/* The last error of the domain that the handle belongs to. Works on a domain that another thread
 * is inside of: then a text per status. Thread: any. Blocking: no. Since: 0.1. */
KVP_API void kvp_pool_last_error(const kvp_pool *pool, kvp_error *out);
KVP_API void kvp_seq_last_error(const kvp_seq *seq, kvp_error *out);
KVP_API void kvp_batch_last_error(const kvp_batch *batch, kvp_error *out);

/* ---------------------------------------------------------------------------------------------
 * Sequence
 *
 * Tokens, block tables, and how the next token is chosen. A sequence outside a batch is parked: it
 * keeps its KV until somebody needs the blocks, and a pinned part longer than that. Add it to a
 * batch, and every appended token that is not computed yet will be, then tokens are generated.
 */
typedef struct kvp_logit_bias {
    int32_t token;
    float bias; /* added to the logit; -INFINITY forbids the token */
} kvp_logit_bias;

#define KVP_SAMPLE_LIBRARY 1 /* the default */
#define KVP_SAMPLE_HOST 2    /* the host reads the logits and appends the token of its choice */

typedef struct kvp_sampling {
    uint32_t size;
    uint32_t mode;             /* KVP_SAMPLE_...; 0: KVP_SAMPLE_LIBRARY */
    float temperature;         /* 0 to 100; 0: greedy; ties go to the lowest id */
    float top_p;               /* 0: off, like 1 */
    float min_p;               /* 0: off */
    int32_t top_k;             /* 0: off */
    float repetition_penalty;  /* divides positive logits of seen tokens; 0: off, like 1 */
    float presence_penalty;    /* subtracted once from seen tokens */
    float frequency_penalty;   /* subtracted per occurrence */
    uint32_t penalty_window;   /* last tokens that count as seen, at most 8192; 0: 64 */
    uint64_t seed;             /* 0: drawn anew; kvp_seq_get_info tells which */
    const kvp_logit_bias *bias;
    uint32_t n_bias;           /* at most 1024 */
    uint32_t top_logprobs;     /* so many alternatives in token events, at most 20; 0: none */
    uint32_t logprobs;         /* 1: token events carry the token's log-probability (before
                                  penalties, bias and temperature) */
    uint32_t pad0;
} kvp_sampling;
KVP_API void kvp_sampling_init(kvp_sampling *out, size_t size);

typedef struct kvp_string {
    const char *text;
    uint64_t bytes;
} kvp_string;

#define KVP_MAX_TOKENS_NONE UINT64_MAX
#define KVP_EOS_STOP 1   /* the default: a token with KVP_TOKEN_END ends the sequence */
#define KVP_EOS_IGNORE 2

typedef struct kvp_seq_options {
    uint32_t size;
    int32_t priority;          /* higher first; equal: first come first served */
    uint64_t tag;              /* the host's, given back in events; never looked at */
    const void *salt;          /* prefixes are shared only between equal salts */
    uint64_t salt_bytes;       /* at most 256 */
    uint64_t max_tokens;       /* generated per add; 0: no limit but the context;
                                  KVP_MAX_TOKENS_NONE: compute the prompt, generate nothing */
    uint64_t context;          /* longest length; 0: the model's */
    const kvp_sampling *sampling;   /* NULL: greedy */
    const int32_t *stop_tokens;     /* beside the model's own ends */
    uint64_t n_stop_tokens;         /* at most 64 */
    const kvp_string *stop_strings; /* end the sequence; not part of the text given */
    uint64_t n_stop_strings;        /* at most 16, of 1 to 128 bytes each */
    uint32_t eos;              /* KVP_EOS_...; 0: KVP_EOS_STOP */
    uint32_t event_mask;       /* KVP_MASK_...; 0: KVP_MASK_DEFAULT. Endings always come. */
    uint32_t ring;             /* undrained events before the sequence pauses; 0: 64 */
    uint32_t pad0;
} kvp_seq_options;
KVP_API void kvp_seq_options_init(kvp_seq_options *out, size_t size);

/* Errors: INVALID_ARG, NO_MEMORY, UNSUPPORTED (library sampling on an own-model geometry).
 * Thread: domain. Ownership: the caller destroys; the pool lives on with it. Blocking: no.
 * Since: 0.1. */
KVP_API kvp_status kvp_seq_create(kvp_pool *pool, const kvp_seq_options *options, kvp_seq **out,
                                  kvp_error *err);

/* Ends it without an ending event and purges its events. Thread: any (queued if another thread is
 * in the domain). Blocking: no. Since: 0.1. */
KVP_API void kvp_seq_destroy(kvp_seq *seq);

/* Appends tokens, all or none. In a batch: while the prompt is being computed they join it; to a
 * sequence that waits for the host's token they are that token and what follows it; to one that
 * is generating: STATE (pause it first). Never takes a block.
 * Errors: INVALID_TOKEN (the text names the index), CAPACITY (context), TOO_LARGE (the pool),
 * STATE, NO_MEMORY. Thread: domain. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_seq_append(kvp_seq *seq, const int32_t *tokens, size_t count);

/* kvp_tokenize, then append. Flags KVP_TOKENIZE_.... Errors: of both.
 * Thread: domain. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_seq_append_text(kvp_seq *seq, const char *text, size_t bytes,
                                       uint32_t flags);

/* kvp_chat_tokenize in the file's format, then append. `stride` in bytes; 0:
 * sizeof(kvp_chat_message). Flags KVP_CHAT_ADD_REPLY, KVP_CHAT_CONTINUE. Errors: of both.
 * Thread: domain. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_seq_append_chat(kvp_seq *seq, const kvp_chat_message *messages,
                                       size_t n_messages, size_t stride, uint32_t flags);

/* Replaces how tokens are chosen, from the next token on. Errors: INVALID_ARG, UNSUPPORTED,
 * NO_MEMORY. Thread: domain. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_seq_set_sampling(kvp_seq *seq, const kvp_sampling *sampling);

/* Replaces the limit of tokens per add, as in kvp_seq_options. Errors: NO_MEMORY.
 * Thread: domain. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_seq_set_max_tokens(kvp_seq *seq, uint64_t max_tokens);

#define KVP_FORK_END UINT64_MAX

/* A new, parked sequence with the first `length` tokens (KVP_FORK_END: all). Takes no block: the
 * blocks are shared until one of the two writes into one, which copies that block only. What the
 * parent has not computed yet is shared through the prefix cache once it has. A fork of a sequence
 * whose tokens are all computed computes the last one again when it is added, unless logits are
 * pending. Inherits salt, pending logits and the options that `options` leaves zero; sampling as a
 * whole unless given, with a seed of its own. Only `tag` is taken as it is, 0 too: with `options`
 * NULL alone it is the parent's.
 * Errors: INVALID_ARG (beyond the end; a salt of its own), NO_MEMORY.
 * Thread: domain. Ownership: the caller destroys. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_seq_fork(kvp_seq *seq, uint64_t length, const kvp_seq_options *options,
                                kvp_seq **out, kvp_error *err);

/* Cuts to `length` tokens; later positions can then be written anew. A result that is still being
 * computed is dropped. A sequence in a batch that has nothing to compute afterwards waits for
 * kvp_seq_append. Errors: INVALID_ARG (beyond the end). Thread: domain. Blocking: no.
 * Since: 0.1. */
KVP_API kvp_status kvp_seq_truncate(kvp_seq *seq, uint64_t length);

/* Keeps the KV of the first `length` tokens while the sequence is parked, paused or waiting, once
 * it has been computed; replaces the earlier pin. 0: unpin. Errors: INVALID_ARG (beyond the end).
 * Thread: domain. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_seq_pin(kvp_seq *seq, uint64_t length);

#define KVP_SEQ_PARKED 1   /* in no batch */
#define KVP_SEQ_WAITING 2  /* in a batch, not yet admitted, or preempted */
#define KVP_SEQ_PREFILL 3  /* its tokens are being computed */
#define KVP_SEQ_DECODE 4   /* generating */
#define KVP_SEQ_PAUSED 5   /* by the host, or because its ring is full */
#define KVP_SEQ_HOST 6     /* waits for kvp_seq_append */

typedef struct kvp_seq_info {
    uint32_t size;
    uint32_t state;         /* KVP_SEQ_... */
    uint64_t length;        /* tokens, those not computed yet included */
    uint64_t computed;      /* of these with their KV in the pool */
    uint64_t pinned;
    uint64_t blocks;        /* in its table, per group */
    uint64_t shared_blocks; /* of these also held by another sequence */
    uint64_t tag;
    uint64_t seed;          /* of its sampling */
    uint64_t events;        /* not taken yet */
} kvp_seq_info;
KVP_API void kvp_seq_info_init(kvp_seq_info *out, size_t size);

/* Thread: domain. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_seq_get_info(const kvp_seq *seq, kvp_seq_info *out);

/* Token ids from position `from`; sizes as in kvp_tokenize. Readable after a fatal batch error
 * too. Thread: domain. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_seq_get_tokens(const kvp_seq *seq, uint64_t from, int32_t *out,
                                      size_t capacity, size_t *count);

/* The pending logits of a sequence in mode KVP_SAMPLE_HOST: `vocabulary` floats, owned by the
 * sequence, valid from the KVP_EVENT_LOGITS event until the next token is appended, a truncate, or
 * destruction. Errors: STATE (none pending). Thread: domain. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_seq_get_logits(const kvp_seq *seq, const float **out, size_t *count);

/* Pauses a sequence in a batch after what is running, or lets it go on. Idempotent.
 * Errors: STATE (in no batch). Thread: domain. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_seq_pause(kvp_seq *seq);
KVP_API kvp_status kvp_seq_resume(kvp_seq *seq);

/* Takes it out of its batch with a CANCELLED ending, after the part of a step that is running now
 * at the latest; its KV stays (parked), and no token event follows if called by the domain's
 * thread. In no batch: nothing happens. Thread: any. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_seq_cancel(kvp_seq *seq);

/* ---------------------------------------------------------------------------------------------
 * Batch: the loop
 *
 *     kvp_batch_add(batch, seq);
 *     for (;;) {
 *         kvp_status s = kvp_step(batch);
 *         while (kvp_next_event(batch, &event) == KVP_OK) ...
 *         if (s == KVP_DONE || s < 0) break;
 *         if (s == KVP_AGAIN) kvp_wait(batch, -1);   (or poll the fd among one's own)
 *         if (s == KVP_STALLED) unpin something;
 *     }
 */
typedef struct kvp_batch_options {
    uint32_t size;
    uint32_t token_budget;     /* rows of a step, 1 to 8192; 0: 512 */
    uint32_t max_sequences;    /* that run at once, 1 to 4096; 0: 64 */
    uint32_t watermark;        /* blocks kept free at admission, in thousandths of the pool; 0: 30;
                                  KVP_WATERMARK_NONE: none */
    uint32_t prefill_share;    /* rows of a step that prompts get when there are any, in
                                  thousandths; 0: 500; KVP_PREFILL_SHARE_NONE: decode first */
    int32_t threads;           /* of a team of its own; 0: one per core; KVP_THREADS_INLINE. A GPU
                                  computes by itself: there is no team then, whatever stands here */
    kvp_team *team;            /* kept alive by the batch; NULL: as `threads` says. GPU: not used */
    uint64_t inline_budget_ns; /* of one inline kvp_step; 0: 2 ms */
    uint32_t chunk_tokens;     /* of one prompt in one step; 0: 256, and less deep in a prompt while
                                  others generate, so that steps take about equally long */
    uint32_t pad0;
    void *stream;              /* the host's CUDA stream, of the pool's device, on which all work of
                                  the batch is put; of the device's primary context; borrowed until
                                  the batch is destroyed, which must not be while it is recorded.
                                  NULL: one of the batch's own. On the CPU: NULL */
} kvp_batch_options;
KVP_API void kvp_batch_options_init(kvp_batch_options *out, size_t size);
#define KVP_WATERMARK_NONE 0xffffffffu
#define KVP_PREFILL_SHARE_NONE 0xffffffffu

/* All memory of a step is taken here. A pool has one batch at a time (else BUSY).
 * Errors: INVALID_ARG, BUSY, NO_MEMORY, SYSTEM, DEVICE_LOST. Thread: domain. Ownership: the caller
 * destroys. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_batch_create(kvp_pool *pool, const kvp_batch_options *options,
                                    kvp_batch **out, kvp_error *err);

/* Its sequences become parked, without endings; their events are gone. A step that is running is
 * given up: the call waits for the chunks of work that workers have begun (well below a millisecond
 * on a free core), on a GPU for the rest of the step. Thread: any (queued if another thread is in
 * the domain). Blocking: as said. Since: 0.1. */
KVP_API void kvp_batch_destroy(kvp_batch *batch);

/* Adds a sequence; exactly one ending event will follow. What can never fit is refused here. If
 * all its tokens are computed already (it ended by LENGTH, say), the last one is computed again and
 * generation goes on.
 * Errors: DUPLICATE (in this batch), STATE (in another; or empty), MISMATCH (of another pool),
 * TOO_LARGE (the prompt needs more blocks than the pool has), NO_MEMORY.
 * Thread: domain. Ownership: the sequence stays the caller's. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_batch_add(kvp_batch *batch, kvp_seq *seq);

/* Like kvp_seq_cancel, but without an ending event. STATE if not in this batch.
 * Thread: domain. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_batch_remove(kvp_batch *batch, kvp_seq *seq);

/* Starts or continues work; never waits. Of several answers the first that is true:
 *   negative     concerns the batch, and stays: the fd is quiet, tokens can still be read. A GPU
 *                that stops working (DEVICE_LOST) is noticed at the next deadline at the latest,
 *                100 ms after a step; sequences and pool are then as they were before that step.
 *                UNSUPPORTED alone passes: the stream that the host lent is being recorded, nothing
 *                has changed, step again afterwards
 *   KVP_PLANNED  own model: run the view, then commit or abort (stepping again says so again)
 *   KVP_EVENTS   events can be taken; stepping on is allowed, a sequence with a full ring pauses
 *   KVP_OK       call again (inline: the time budget is used up)
 *   KVP_AGAIN    nothing to do until the fd is readable or the deadline has passed
 *   KVP_STALLED  sequences wait, and only pinned blocks are in the way; else like AGAIN
 *   KVP_DONE     no sequence has work left (some may be paused, or wait for kvp_seq_append)
 * Whatever it was, a host may take the events and then poll the fd with kvp_batch_timeout_ms: while
 * there is something for step to do the fd is readable and the timeout 0. Events that were left
 * alone do not make the fd readable.
 * Thread: domain. Blocking: no; but with a model of the host's own on a GPU, a call waits for the card
 * to read the upload of three steps before, or a large change of block tables. Since: 0.1. */
KVP_API kvp_status kvp_step(kvp_batch *batch);

#define KVP_EVENT_TOKEN 1    /* a token was generated; `text` may be empty for now */
#define KVP_EVENT_LOGITS 2   /* kvp_seq_get_logits, then kvp_seq_append */
#define KVP_EVENT_PROGRESS 3 /* `done` of `total` prompt tokens are in the cache */
#define KVP_EVENT_ENDED 4    /* the one ending: `ending`, `status`, `usage`, and the last text */

#define KVP_MASK_TOKEN 1u
#define KVP_MASK_LOGITS 2u
#define KVP_MASK_PROGRESS 4u
#define KVP_MASK_DEFAULT 3u

#define KVP_END_STOP 1      /* an end token or a stop token, which is not kept: it is not in the
                               sequence, has no token event and is not counted, but the ending
                               names it; or a stop string, whose tokens are kept */
#define KVP_END_LENGTH 2    /* max_tokens, or the context */
#define KVP_END_CAPACITY 3  /* grown past what the pool can hold alone; all its tokens are there */
#define KVP_END_CANCELLED 4
#define KVP_END_FAILED 5    /* see `status` */

/* Of one add, from kvp_batch_add to the ending. */
typedef struct kvp_usage {
    uint32_t size;
    uint32_t pad0;
    uint64_t prompt;       /* tokens there when it was added, or appended while prefilling */
    uint64_t cached;       /* of these served from the prefix cache */
    uint64_t reattached;   /* own KV that was there already: kept while parked, shared by a fork, or
                              found again after a preemption */
    uint64_t computed;     /* rows computed for it, recomputation included */
    uint64_t recomputed;   /* of these for tokens whose KV was there once */
    uint64_t copied;       /* tokens of KV copied for it */
    uint64_t generated;
    uint64_t preemptions;
    uint64_t queued_ns;    /* add to first row */
    uint64_t first_token_ns; /* add to first token; 0: none */
    uint64_t total_ns;     /* add to ending */
} kvp_usage;

typedef struct kvp_event {
    uint32_t size;
    uint32_t kind;         /* KVP_EVENT_... */
    kvp_seq *seq;
    uint64_t tag;
    uint64_t position;     /* of the token in the sequence */
    int32_t token;         /* generated, or what a STOP ending stopped at; else -1 */
    uint32_t ending;       /* KVP_END_... */
    kvp_status status;     /* of a FAILED ending */
    uint32_t n_top;
    const char *text;      /* whole UTF-8 characters, `text_bytes` long, never NULL; bytes that are
                              no UTF-8 come as they are */
    uint64_t text_bytes;
    const int32_t *top_tokens;  /* n_top, most likely first */
    const float *top_logprobs;  /* natural logarithm */
    float logprob;         /* of `token`, if asked for; else 0 */
    uint32_t pad0;
    uint64_t done;
    uint64_t total;
    const kvp_usage *usage; /* in an ending; else NULL */
} kvp_event;
KVP_API void kvp_event_init(kvp_event *out, size_t size);

/* Takes the oldest event of the sequence whose turn it is (they take turns; a sequence's own events
 * come in order, ENDED last). Its pointers are valid until the next call on the batch or the
 * destruction of the sequence. KVP_AGAIN: none there. Thread: domain. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_next_event(kvp_batch *batch, kvp_event *out);

/* One descriptor for the batch's life, made at the first call: level-triggered, nonblocking,
 * close-on-exec, readable when kvp_step has something to do. Poll it for input, never read it:
 * step drains it. Errors: SYSTEM. Thread: domain. Ownership: the batch's. Blocking: no.
 * Since: 0.1. */
KVP_API kvp_status kvp_batch_fd(kvp_batch *batch, int32_t *fd);

/* When kvp_step is to be called at the latest, in absolute nanoseconds of the clock hook;
 * UINT64_MAX: whenever the fd says so. Thread: domain. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_batch_deadline(const kvp_batch *batch, uint64_t *ns);

/* The same in milliseconds from now, rounded up, for poll: -1 for none, 0 for at once.
 * Thread: domain. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_batch_timeout_ms(const kvp_batch *batch, int32_t *ms);

/* Makes the fd readable and ends a kvp_wait. The caller sees to it that the batch is alive.
 * Thread: any, and from signal handlers. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_wakeup(kvp_batch *batch);

/* For tools: sleeps until kvp_step has something to do, a signal comes, or `timeout_ms` have passed
 * (-1: no limit). OK in each case. Thread: domain. Blocking: yes. Since: 0.1. */
KVP_API kvp_status kvp_wait(kvp_batch *batch, int32_t timeout_ms);

typedef struct kvp_batch_stats {
    uint32_t size;
    uint32_t threads;        /* workers; 0: inline, or a GPU */
    uint64_t sequences;      /* added, not ended */
    uint64_t running;        /* of these computing */
    uint64_t waiting;
    /* counters since creation, which only grow */
    uint64_t steps;
    uint64_t rows;           /* tokens computed */
    uint64_t rows_prefill;
    uint64_t rows_decode;
    uint64_t generated;
    uint64_t endings;
    uint64_t preemptions;
    uint64_t step_ns;        /* from launch to completion, summed */
    uint64_t plan_ns;        /* planning and committing, summed */
} kvp_batch_stats;
KVP_API void kvp_batch_stats_init(kvp_batch_stats *out, size_t size);

/* Thread: any (the values are read one by one). Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_batch_get_stats(const kvp_batch *batch, kvp_batch_stats *out);

/* ---------------------------------------------------------------------------------------------
 * Own model: kvpage schedules and attends, the host runs the projections
 *
 *     while ((s = kvp_step(batch)) >= 0 && s != KVP_DONE) {
 *         if (s != KVP_PLANNED) { take events, or kvp_wait; continue; }
 *         kvp_batch_get_view(batch, &view);
 *         x = embed(view.tokens, view.n_rows);
 *         for (layer ...) { q, k, v = project(x); rotate(q, k, view.positions);
 *                           kvp_attention(batch, layer, &args);  x = rest(x, args.out); }
 *         kvp_commit(batch, tokens, view.n_outputs);      (or NULL, 0 to append by hand)
 *         while (kvp_next_event(batch, &event) == KVP_OK) ...
 *     }
 *
 * Tokens given to kvp_commit count as generated: TOKEN events (without text), stop tokens, max_tokens
 * and the context apply.
 */
typedef struct kvp_view {
    uint32_t size;
    uint32_t n_rows;
    uint32_t n_sequences;
    uint32_t n_outputs;
    const int32_t *tokens;        /* [n_rows], a sequence's rows one after the other */
    const uint32_t *positions;    /* [n_rows] */
    const uint32_t *row_sequence; /* [n_rows]: index into the arrays below */
    const uint32_t *outputs;      /* [n_outputs]: rows after which a token is wanted */
    kvp_seq *const *sequences;    /* [n_sequences] */
    const uint64_t *tags;         /* [n_sequences] */
    const uint32_t *lengths;      /* [n_sequences]: keys the last row of each sees */
} kvp_view;
KVP_API void kvp_view_init(kvp_view *out, size_t size);

typedef struct kvp_view_group {
    uint32_t size;
    uint32_t table_stride;  /* entries from one sequence's table to the next */
    const uint32_t *tables; /* [n_sequences][table_stride]: block ids */
    const int64_t *slots;   /* [n_rows]: block id * block tokens + offset, where a row's KV goes */
} kvp_view_group;
KVP_API void kvp_view_group_init(kvp_view_group *out, size_t size);

/* The planned step; frozen, and valid, until commit or abort. Errors: STATE (none planned).
 * Thread: domain. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_batch_get_view(const kvp_batch *batch, kvp_view *out);
KVP_API kvp_status kvp_batch_get_view_group(const kvp_batch *batch, uint32_t group,
                                            kvp_view_group *out);

/* Rows in view order, heads inside a row, elements contiguous. Strides in bytes; 0: packed. The
 * arrays lie in the memory of the pool's device. */
typedef struct kvp_attention_args {
    uint32_t size;
    float scale;              /* 0: 1 / sqrt(key_dim) */
    float softcap;            /* c: scores become c * tanh(score / c); 0: none */
    uint32_t type;            /* of the arrays, KVP_KV_...; 0: KVP_KV_F32, all that the CPU takes */
    const void *q;            /* [n_rows][query_heads][key_dim] */
    const void *k;            /* [n_rows][kv_heads][key_dim], stored as they are (already rotated) */
    const void *v;            /* [n_rows][kv_heads][value_dim] */
    void *out;                /* [n_rows][query_heads][value_dim] */
    int64_t q_row_stride, q_head_stride;
    int64_t k_row_stride, k_head_stride;
    int64_t v_row_stride, v_head_stride;
    int64_t out_row_stride, out_head_stride;
} kvp_attention_args;
KVP_API void kvp_attention_args_init(kvp_attention_args *out, size_t size);

/* Stores K and V of the view's rows and attends, for one layer; each layer once per view, in any
 * order. On the CPU the result is there on return; on CUDA the work is put on the batch's stream,
 * so the arrays are borrowed until the stream has got there; without a stream the call waits.
 *
 * On CUDA the host may capture the call in a graph of its own, in a step in which every sequence
 * has one row. Launched in a later step of that kind the graph takes the place of the call, while there
 * are no more rows than in the captured step, rounded up to a power of two. kvp_commit counts a
 * layer that was captured once as done; the launches are the host's to see to.
 * Errors: STATE (none planned, or the layer was done), INVALID_ARG, UNSUPPORTED (a type the device
 * does not take; captured in another kind of step), DEVICE_LOST (the batch has failed).
 * Thread: domain. Blocking: on the CPU (computes), and without a stream. Since: 0.1. */
KVP_API kvp_status kvp_attention(kvp_batch *batch, uint32_t layer, const kvp_attention_args *args);

/* Ends the planned step: its KV counts. `tokens` holds one id per output row (-1: none, the
 * sequence then waits for kvp_seq_append); NULL with count 0: all -1. Errors: STATE (none planned,
 * or a layer is missing), INVALID_TOKEN, INVALID_ARG (another count than the view's n_outputs).
 * Thread: domain. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_commit(kvp_batch *batch, const int32_t *tokens, size_t count);

/* Drops the planned step: as if it had not been planned. Errors: STATE (none planned).
 * Thread: domain. Blocking: no. Since: 0.1. */
KVP_API kvp_status kvp_abort(kvp_batch *batch);

#ifdef __cplusplus
}
#endif
#endif
