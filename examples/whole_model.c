/*
 * A whole model: a GGUF file and a prompt in, text out.
 *
 *     whole_model model.gguf "The capital of France is"
 */
#include <kvpage.h>

#include <stdio.h>
#include <string.h>

int main(int argc, char **argv)
{
    kvp_model *model = NULL;
    kvp_pool *pool = NULL;
    kvp_batch *batch = NULL;
    kvp_seq *seq = NULL;
    kvp_error err = {.size = sizeof err};
    kvp_seq_options options = {.size = sizeof options, .max_tokens = 64};
    kvp_event event = {.size = sizeof event};
    kvp_status status;

    if (argc != 3) {
        fprintf(stderr, "usage: whole_model MODEL.gguf PROMPT\n");
        return 2;
    }
    if ((status = kvp_model_open(argv[1], NULL, &model, &err)) < 0) goto out;
    if ((status = kvp_pool_create(model, NULL, &pool, &err)) < 0) goto out;
    if ((status = kvp_batch_create(pool, NULL, &batch, &err)) < 0) goto out;
    if ((status = kvp_seq_create(pool, &options, &seq, &err)) < 0) goto out;

    if ((status = kvp_seq_append_text(seq, argv[2], strlen(argv[2]),
                                      KVP_TOKENIZE_SPECIAL_START)) < 0 ||
        (status = kvp_batch_add(batch, seq)) < 0)
        kvp_pool_last_error(pool, &err);

    while (status >= 0 && status != KVP_DONE) {
        status = kvp_step(batch);
        while (kvp_next_event(batch, &event) == KVP_OK)
            fwrite(event.text, 1, event.text_bytes, stdout);
        fflush(stdout);
        if (status == KVP_AGAIN) kvp_wait(batch, -1);
        if (status < 0) kvp_batch_last_error(batch, &err);
    }
    printf("\n");
out:
    if (status < 0) fprintf(stderr, "whole_model: %s\n", err.text);
    kvp_seq_destroy(seq);
    kvp_batch_destroy(batch);
    kvp_pool_destroy(pool);
    kvp_model_destroy(model);
    return status < 0;
}
