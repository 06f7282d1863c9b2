/*
 * What the files of the tokenizer share: tokenizer.c (vocabulary, special tokens, pieces),
 * tokenizer_pretoken.c (cutting a text into words), tokenizer_merge.c (words into tokens), chat.c
 * (conversations).
 * Nobody else includes this.
 */
#ifndef KVP_MODEL_TOKENIZER_PRIV_H
#define KVP_MODEL_TOKENIZER_PRIV_H

#include "base/hash.h"
#include "model/gguf.h"
#include "model/tokenizer.h"

#define KVP__NO_TOKEN UINT32_MAX

/* --- a list of ids that grows --- */

typedef struct kvp__ids {
    const kvp__hooks *hooks;
    int32_t *data;
    size_t count, capacity;
} kvp__ids;

bool kvp__ids_push(kvp__ids *ids, int32_t id); /* false: no memory */
void kvp__ids_free(kvp__ids *ids);
/* Copies the list out as kvp_tokenize promises: BUFFER and only *count stored if it does not
 * fit. */
kvp_status kvp__ids_store(const kvp__ids *ids, int32_t *out, size_t capacity, size_t *count,
                          kvp_error *err);

/* --- pre-tokenizers --- */

typedef struct kvp__pretoken kvp__pretoken;

/* NULL: not known. */
const kvp__pretoken *kvp__pretoken_find(kvp__str name);
bool kvp__pretoken_ignores_merges(const kvp__pretoken *p);
bool kvp__pretoken_adds_bos(const kvp__pretoken *p); /* unless the file says otherwise */
/* Calls `word` for each word in order; stops and returns false when it does. */
bool kvp__pretoken_split(const kvp__pretoken *p, const uint8_t *text, size_t bytes,
                         bool (*word)(void *user, const uint8_t *text, size_t bytes), void *user);

/* --- conversations --- */

/* How the marks of a Mistral template are spaced; it differs from version to version. */
typedef struct kvp__mistral_style {
    bool space_before_open, space_after_open, space_before_close, space_before_reply;
    bool system_mark; /* [SYSTEM_PROMPT]: no folding into the user's turn */
    bool space_after_system;
    bool trims_reply;
    bool system_last; /* the system prompt goes into the user's last turn, not into the first */
} kvp__mistral_style;

typedef struct kvp__chat_style {
    uint32_t format;      /* KVP_CHAT_... */
    char *default_system; /* when the conversation brings none; may be NULL */
    size_t default_system_bytes, default_system_size; /* used, allocated */
    bool dated_system;    /* Llama 3.1: two lines about dates in front of the system prompt */
    kvp__mistral_style mistral;
} kvp__chat_style;

/* Fills t->chat from the file's template (data NULL: it has none). False: no memory. */
bool kvp__chat_read(kvp__tokenizer *t, kvp__str text);

/* --- the vocabulary --- */

typedef struct kvp__merge {
    uint32_t left, right; /* ids; left KVP__NO_TOKEN: an empty slot */
    uint32_t rank, product;
} kvp__merge;

#define KVP__KIND_BPE 1 /* byte-level: pieces are kept as the bytes that they stand for */
#define KVP__KIND_SPM 2 /* SentencePiece: pieces are kept with U+2581 for a space */

/* Beside KVP_TOKEN_..., for ourselves. */
#define KVP__TOKEN_USER 0x80u /* user-defined: found in every text before it is cut into words */
#define KVP__TOKEN_RAW 0x40u  /* a BPE piece that stands for no bytes: given as it is, never made */

struct kvp__tokenizer {
    kvp__hooks hooks;
    kvp__hash_key key; /* the vocabulary is untrusted: nobody shall make its pieces collide */
    uint32_t kind;
    uint32_t n;
    uint32_t longest;
    char *pieces;
    size_t pieces_bytes;
    uint32_t *offsets;    /* [n + 1] */
    uint8_t *flags;       /* [n]: KVP_TOKEN_... and KVP__TOKEN_USER */
    float *scores;        /* [n], SPM */
    uint32_t *slots;      /* pieces that text can become, by hash; KVP__NO_TOKEN: empty */
    uint32_t n_slots;     /* a power of two */
    kvp__merge *merges;   /* by hash of (left, right), BPE */
    uint32_t n_merge_slots;
    uint32_t *special;    /* control, unknown and user-defined tokens, sorted by their bytes */
    uint32_t n_special;
    uint32_t *user;       /* of these the user-defined ones, sorted */
    uint32_t n_user;
    uint32_t first_bytes[2][8]; /* bits: a user-defined [0], any special [1] token begins so */
    int32_t byte_ids[256];
    int32_t bos, eos, unknown;
    bool adds_bos, adds_space;
    const kvp__pretoken *pre; /* BPE; NULL: not known */
    char name[32], pre_name[32];
    kvp__chat_style chat;
};

static inline const uint8_t *kvp__piece(const kvp__tokenizer *t, uint32_t id, size_t *bytes)
{
    *bytes = t->offsets[id + 1] - t->offsets[id];
    return (const uint8_t *)t->pieces + t->offsets[id];
}

/* The token whose piece these bytes are, among those that text can become; or KVP__NO_TOKEN. */
uint32_t kvp__vocab_find(const kvp__tokenizer *t, const uint8_t *piece, size_t bytes);
/* The merge of two tokens, or NULL. */
const kvp__merge *kvp__vocab_merge(const kvp__tokenizer *t, uint32_t left, uint32_t right);

/* Appends the tokens of a text that stands at the beginning or after a special token (where
 * SentencePiece puts a space in front, if the file wants that). Of the flags only PARSE_SPECIAL is
 * looked at. */
kvp_status kvp__tokenizer_append(const kvp__tokenizer *t, kvp__ids *ids, const char *text,
                                 size_t bytes, uint32_t flags, kvp_error *err);

/* --- merging --- */

typedef struct kvp__symbol {
    uint32_t id;         /* KVP__NO_TOKEN: these bytes are no token (yet) */
    uint32_t prev, next; /* byte offsets of its neighbours; next 0: merged into another one */
} kvp__symbol;

/* Memory of a merge, kept from word to word. All zero but `hooks` to begin with. */
typedef struct kvp__merge_space {
    const kvp__hooks *hooks;
    kvp__symbol *symbols; /* by the byte that a symbol begins with */
    uint64_t *heap;
    size_t capacity;      /* bytes of text */
} kvp__merge_space;

void kvp__merge_space_free(kvp__merge_space *space);
/* Appends the tokens of one word (BPE), or of a text with U+2581 for spaces (SPM). False: no
 * memory. bytes < 2^31. */
bool kvp__merge_word(const kvp__tokenizer *t, kvp__merge_space *space, const uint8_t *text,
                     size_t bytes, kvp__ids *ids);

#endif
