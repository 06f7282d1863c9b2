/*
 * Several answers to one prompt by copy-on-write fork: the prompt is computed once, and its blocks
 * are shared. An answer pays for the one block that it writes into first, and for what it adds.
 *
 *     fork_samples model.gguf "Once upon a time" 4
 */
#include <kvpage.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_SAMPLES = 16, MAX_TEXT = 4096 };

typedef struct answer {
    kvp_seq *seq;
    char text[MAX_TEXT];
    size_t bytes;
} answer;

static void take_events(kvp_batch *batch, answer *answers)
{
    kvp_event event = {.size = sizeof event};
    while (kvp_next_event(batch, &event) == KVP_OK) {
        answer *a = &answers[event.tag];
        size_t room = MAX_TEXT - a->bytes;
        size_t n = event.text_bytes < room ? (size_t)event.text_bytes : room;
        memcpy(a->text + a->bytes, event.text, n);
        a->bytes += n;
    }
}

/* Steps until nothing is left to do. */
static kvp_status run(kvp_batch *batch, answer *answers)
{
    for (;;) {
        kvp_status status = kvp_step(batch);
        take_events(batch, answers);
        if (status == KVP_DONE || status < 0) return status;
        if (status == KVP_AGAIN) kvp_wait(batch, -1);
    }
}

static kvp_status sample(kvp_pool *pool, kvp_batch *batch, const char *prompt, uint64_t n,
                         answer *answers, kvp_error *err)
{
    kvp_sampling sampling = {.size = sizeof sampling, .temperature = 0.8f, .top_p = 0.95f,
                             .seed = 1};
    kvp_seq_options options = {.size = sizeof options, .max_tokens = 48, .sampling = &sampling};
    kvp_status status = kvp_seq_create(pool, &options, &answers[0].seq, err);
    if (status < 0) return status;
    status = kvp_seq_append_text(answers[0].seq, prompt, strlen(prompt),
                                 KVP_TOKENIZE_SPECIAL_START);

    /* Forked before anything is computed: the first one to run computes the prompt, the others
     * wait for its blocks. The seed of each fork is derived from its parent's. */
    for (uint64_t i = 1; i < n && status == KVP_OK; i++) {
        kvp_seq_options fork = {.size = sizeof fork, .tag = i};
        status = kvp_seq_fork(answers[0].seq, KVP_FORK_END, &fork, &answers[i].seq, NULL);
    }
    for (uint64_t i = 0; i < n && status == KVP_OK; i++)
        status = kvp_batch_add(batch, answers[i].seq);
    if (status == KVP_OK) status = run(batch, answers);
    if (status < 0) kvp_pool_last_error(pool, err);
    return status;
}

int main(int argc, char **argv)
{
    static answer answers[MAX_SAMPLES];
    kvp_model *model = NULL;
    kvp_pool *pool = NULL;
    kvp_batch *batch = NULL;
    kvp_error err = {.size = sizeof err};
    kvp_pool_stats stats = {.size = sizeof stats};
    kvp_status status;
    int n = argc == 4 ? atoi(argv[3]) : 0;

    if (n < 1 || n > MAX_SAMPLES) {
        fprintf(stderr, "usage: fork_samples MODEL.gguf PROMPT SAMPLES(1..%d)\n", MAX_SAMPLES);
        return 2;
    }
    if ((status = kvp_model_open(argv[1], NULL, &model, &err)) < 0 ||
        (status = kvp_pool_create(model, NULL, &pool, &err)) < 0 ||
        (status = kvp_batch_create(pool, NULL, &batch, &err)) < 0 ||
        (status = sample(pool, batch, argv[2], (uint64_t)n, answers, &err)) < 0) {
        fprintf(stderr, "fork_samples: %s\n", err.text);
    } else {
        kvp_pool_get_stats(pool, &stats);
        for (int i = 0; i < n; i++)
            printf("--- %d\n%s%.*s\n", i + 1, argv[2], (int)answers[i].bytes, answers[i].text);
        printf("--- %" PRIu64 " tokens computed, %" PRIu64 " shared, %" PRIu64
               " blocks copied on write\n",
               stats.tokens_computed, stats.tokens_cached, stats.blocks_copied);
    }
    for (int i = 0; i < MAX_SAMPLES; i++) kvp_seq_destroy(answers[i].seq);
    kvp_batch_destroy(batch);
    kvp_pool_destroy(pool);
    kvp_model_destroy(model);
    return status < 0;
}
