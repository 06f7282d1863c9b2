/*
 * Text to token ids and back, with the tokenizer that the model's file carries.
 *
 * Two kinds: byte-level BPE (GGUF's "gpt2", with a pre-tokenizer by name) and SentencePiece-style
 * merging by score with byte fallback (GGUF's "llama"; TinyLlama, Mistral, Gemma). The ids are
 * those of llama.cpp and transformers; docs/tokenizer-differences.md lists where these two
 * disagree and which is followed.
 *
 * Immutable once created, so threads share it without locks; encoding takes scratch memory through
 * the hooks and gives it back before it returns. The vocabulary comes from an untrusted file:
 * creation checks every count and id.
 */
#ifndef KVP_MODEL_TOKENIZER_H
#define KVP_MODEL_TOKENIZER_H

#include "base/base.h"

typedef struct kvp__gguf kvp__gguf;           /* model/gguf.h */
typedef struct kvp__tokenizer kvp__tokenizer;

/* Reads everything under "tokenizer." from the file's metadata; keeps no pointer into `meta`.
 * NO_TOKENIZER: the file has none, or one of a kind that is not known; the model is then used by
 * ids alone, and `err` says why. An unknown pre-tokenizer is not an error here: ids still become
 * text, but text is refused. FORMAT: the metadata contradicts itself. NO_MEMORY. */
kvp_status kvp__tokenizer_create(kvp__tokenizer **out, const kvp__hooks *hooks,
                                 const kvp__gguf *meta, kvp_error *err);
/* NULL is taken. */
void kvp__tokenizer_destroy(kvp__tokenizer *t);

typedef struct kvp__tokenizer_info {
    uint32_t vocabulary;
    int32_t bos, eos, unknown; /* -1: none */
    bool adds_bos;             /* what KVP_TOKENIZE_SPECIAL_START does */
    bool encodes;              /* false: the pre-tokenizer is not known, text is refused */
    uint32_t longest_piece;    /* bytes, over the whole vocabulary */
    uint32_t chat_format;      /* KVP_CHAT_... */
    const char *name;          /* tokenizer.ggml.model; like the next one borrowed, never NULL */
    const char *pre;           /* tokenizer.ggml.pre, "" if the file has none */
} kvp__tokenizer_info;

void kvp__tokenizer_get_info(const kvp__tokenizer *t, kvp__tokenizer_info *out);

/* As kvp_tokenize of the public header; KVP_TOKENIZE_... flags. Control and unknown tokens
 * written in the text become those tokens with KVP_TOKENIZE_PARSE_SPECIAL only. User-defined
 * tokens always do, before anything else (as in llama.cpp and transformers): they are words that
 * the authors added, such as Gemma's runs of line ends. The longest at each place wins. A file
 * that makes a mark of a chat format user-defined is not believed: those are control tokens
 * here. */
kvp_status kvp__tokenizer_encode(const kvp__tokenizer *t, const char *text, size_t bytes,
                                 uint32_t flags, int32_t *out, size_t capacity, size_t *count,
                                 kvp_error *err);

/* As kvp_detokenize: the pieces one after the other, nothing else. (SentencePiece puts a space in
 * front of a text; it stays, as a host that joins pieces expects.) */
kvp_status kvp__tokenizer_decode(const kvp__tokenizer *t, const int32_t *tokens, size_t count,
                                 uint32_t flags, char *out, size_t capacity, size_t *bytes,
                                 kvp_error *err);

/* The bytes a token stands for: stores at most `capacity` of them and returns how many there are
 * (0 for an id out of range, and for control tokens without KVP_DETOKENIZE_SPECIAL). `out` may be
 * NULL when capacity is 0. */
size_t kvp__tokenizer_piece(const kvp__tokenizer *t, int32_t token, uint32_t flags, char *out,
                            size_t capacity);

/* KVP_TOKEN_...; 0 for an id out of range. */
uint32_t kvp__tokenizer_flags(const kvp__tokenizer *t, int32_t token);

/* The id whose piece is exactly these bytes (SentencePiece: with U+2581 for a space), or -1. For
 * marks such as "<|im_end|>". */
int32_t kvp__tokenizer_find(const kvp__tokenizer *t, const char *piece, size_t bytes);

#endif
