/* See golden.h. */
#include "golden.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const golden_names[] = {
    "llama", "llama-bias", "llama-partial", "llama-linear", "llama3", "llama-yarn", "mistral",
    "qwen2", "qwen2-yarn", "qwen3", "gemma3", "gemma3-caps", NULL};

uint8_t *golden_file(const char *name, size_t *bytes)
{
    char path[1024];
    if (snprintf(path, sizeof path, "%s/golden/%s", KVPAGE_TESTS, name) >= (int)sizeof path)
        return NULL;
    FILE *f = fopen(path, "rb");
    if (!f) return NULL;
    fseek(f, 0, SEEK_END);
    long size = ftell(f);
    rewind(f);
    uint8_t *data = malloc(size > 0 ? (size_t)size : 1);
    if (!data || size < 0 || fread(data, 1, (size_t)size, f) != (size_t)size) exit(99);
    fclose(f);
    *bytes = (size_t)size;
    return data;
}

void golden_load(golden *g, const char *name)
{
    char file[128];
    size_t bytes;
    snprintf(file, sizeof file, "%s.logits", name);
    uint8_t *data = golden_file(file, &bytes);
    memset(g, 0, sizeof *g);
    if (!data || bytes < 8) exit(99);
    memcpy(&g->tokens, data, 4);
    memcpy(&g->vocabulary, data + 4, 4);
    if (bytes != 8 + 4 * (size_t)g->tokens * (1 + (size_t)g->vocabulary)) exit(99);
    g->memory = data;
    g->ids = (int32_t *)(void *)(data + 8);
    g->logits = (float *)(void *)(data + 8 + 4 * (size_t)g->tokens);
    snprintf(file, sizeof file, "%s.gguf", name);
    g->file = golden_file(file, &g->file_bytes);
    if (!g->file) exit(99);
}

void golden_free(golden *g)
{
    free(g->memory);
    free(g->file);
    memset(g, 0, sizeof *g);
}
