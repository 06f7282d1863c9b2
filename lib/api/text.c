/*
 * Text and tokens, without a sequence.
 */
#include "api/api.h"

/* The tokenizer of a live model, or an error that says what it lacks. */
static kvp_status tokenizer_of(const kvp_model *model, const kvp__tokenizer **out, kvp_error *err)
{
    const kvp__opened *m = kvp__opened_of(model);
    if (!m) return kvp__bad_handle(err, "model");
    *out = m->model.tokenizer;
    if (*out) return KVP_OK;
    const char *why = m->model.tokenizer_error.text;
    return kvp__fail(err, KVP_ERR_NO_TOKENIZER, "%s", why[0] ? why : "the model has no tokenizer");
}

kvp_status kvp_tokenize(const kvp_model *model, const char *text, size_t bytes, uint32_t flags,
                        int32_t *out, size_t capacity, size_t *count, kvp_error *err)
{
    const kvp__tokenizer *t;
    kvp_status s = tokenizer_of(model, &t, err);
    if (s != KVP_OK) return s;
    if (!count || (bytes && !text) || (capacity && !out))
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "text, out or count: NULL");
    return kvp__tokenizer_encode(t, text, bytes, flags, out, capacity, count, err);
}

kvp_status kvp_detokenize(const kvp_model *model, const int32_t *tokens, size_t count,
                          uint32_t flags, char *out, size_t capacity, size_t *bytes,
                          kvp_error *err)
{
    const kvp__tokenizer *t;
    kvp_status s = tokenizer_of(model, &t, err);
    if (s != KVP_OK) return s;
    if (!bytes || (count && !tokens) || (capacity && !out))
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "tokens, out or bytes: NULL");
    return kvp__tokenizer_decode(t, tokens, count, flags, out, capacity, bytes, err);
}

uint32_t kvp_token_flags(const kvp_model *model, int32_t token)
{
    const kvp__tokenizer *t;
    if (tokenizer_of(model, &t, NULL) != KVP_OK) return 0;
    return kvp__tokenizer_flags(t, token);
}

kvp_status kvp_chat_tokenize(const kvp_model *model, uint32_t format,
                             const kvp_chat_message *messages, size_t n_messages, size_t stride,
                             uint32_t flags, int32_t *out, size_t capacity, size_t *count,
                             kvp_error *err)
{
    const kvp__tokenizer *t;
    kvp_status s = tokenizer_of(model, &t, err);
    if (s != KVP_OK) return s;
    if (!count || (n_messages && !messages) || (capacity && !out))
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "messages, out or count: NULL");
    if (format == 0) format = kvp__opened_of(model)->model.chat_format;
    return kvp__chat_tokenize(t, format, messages, n_messages, stride, flags, out, capacity, count,
                              err);
}
