/*
 * Conversations as token ids: ChatML, Gemma, Llama 3 and Mistral, recognised from the template that
 * the file carries (tokenizer.chat_template) and the marks in its vocabulary.
 *
 * Invariant: only the format's own marks become special tokens; what stands in a message is
 * tokenized as plain text, so a user cannot write the end of a turn. That is why a conversation is
 * built as ids, piece by piece, and never as one string.
 *
 * The templates themselves are not run: they are programs in the file. docs/internals/text.md says
 * what is taken from them. The file's format is in kvp__tokenizer_info.chat_format.
 */
#ifndef KVP_MODEL_CHAT_H
#define KVP_MODEL_CHAT_H

#include "model/tokenizer.h"

/* As kvp_chat_tokenize of the public header. `stride`: bytes from one message to the next, 0:
 * sizeof(kvp_chat_message). */
kvp_status kvp__chat_tokenize(const kvp__tokenizer *t, uint32_t format,
                              const kvp_chat_message *messages, size_t n_messages, size_t stride,
                              uint32_t flags, int32_t *out, size_t capacity, size_t *count,
                              kvp_error *err);

#endif
