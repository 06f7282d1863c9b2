/*
 * Characters as pre-tokenizers see them: UTF-8 decoding that takes any bytes, and the class of a
 * code point (Unicode 15.1, the version llama.cpp has).
 */
#ifndef KVP_MODEL_UNICODE_H
#define KVP_MODEL_UNICODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Classes are bits, so that a set of them is an or. */
#define KVP__UNI_OTHER 1u   /* control, format, unassigned, private; and bytes that are no UTF-8 */
#define KVP__UNI_UPPER 2u   /* Lu, Lt */
#define KVP__UNI_LOWER 4u   /* Ll */
#define KVP__UNI_CASELESS 8u /* Lm, Lo */
#define KVP__UNI_MARK 16u
#define KVP__UNI_NUMBER 32u
#define KVP__UNI_PUNCT 64u
#define KVP__UNI_SYMBOL 128u
#define KVP__UNI_SPACE 256u /* White_Space, line ends included */
#define KVP__UNI_LETTER (KVP__UNI_UPPER | KVP__UNI_LOWER | KVP__UNI_CASELESS)

#define KVP__UNI_INVALID UINT32_MAX

/* The bytes (1 to 4) of the character at `p` < `end`, which is stored; where there is no valid one
 * (overlong forms, surrogates and cut sequences count as none), 1 and KVP__UNI_INVALID. */
size_t kvp__unicode_next(const uint8_t *p, const uint8_t *end, uint32_t *code_point);

/* KVP__UNI_...; one bit. */
uint32_t kvp__unicode_class(uint32_t code_point);

/* How many bytes a character takes whose first byte is `lead`; 0 if no character begins so. */
size_t kvp__unicode_length(uint8_t lead);

/* Whether `n` < 4 bytes are the beginning of a valid character, and not a whole one. */
bool kvp__unicode_unfinished(const uint8_t *p, size_t n);

#endif
