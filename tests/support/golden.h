/*
 * The tiny models of tests/golden and their reference logits. Running out of memory, or a file that is
 * not there, ends the test program: they are in the repository.
 */
#ifndef TESTS_SUPPORT_GOLDEN_H
#define TESTS_SUPPORT_GOLDEN_H

#include <stddef.h>
#include <stdint.h>

extern const char *const golden_names[]; /* ends with NULL */

typedef struct golden {
    uint32_t tokens, vocabulary;
    int32_t *ids;
    float *logits;       /* [tokens][vocabulary] */
    uint8_t *file;       /* the GGUF file */
    size_t file_bytes;
    void *memory;
} golden;

void golden_load(golden *g, const char *name);
void golden_free(golden *g);

/* A file of tests/golden, whole; free() it. NULL: not there. */
uint8_t *golden_file(const char *name, size_t *bytes);

#endif
