/*
 * A host as it was built against the first header. Its binary is kept (old-consumer-x86_64) and must go
 * on running with every later library: it opens a tiny model from its argument or a geometry, runs the
 * own-model way for a step, and looks at what came out. Rebuild it never; add another beside it.
 *
 * cc -O1 -Iinclude tests/abi/old-consumer.c -L BUILD -lkvpage -o tests/abi/old-consumer-x86_64
 */
#include <kvpage.h>

#include <stdio.h>
#include <string.h>

static int fail(const char *what, kvp_status s)
{
    printf("old consumer: %s: %s\n", what, kvp_status_name(s));
    return 1;
}

int main(void)
{
    kvp_layer_group group = {.layers = 1, .kv_heads = 1, .key_dim = 4, .value_dim = 4};
    kvp_geometry g = {.size = sizeof g, .n_groups = 1, .groups = &group, .vocabulary = 10};
    kvp_pool_options po = {.size = sizeof po, .blocks = 4};
    kvp_batch_options bo = {.size = sizeof bo, .threads = KVP_THREADS_INLINE};
    kvp_seq_options so = {.size = sizeof so, .max_tokens = 2, .tag = 77};
    kvp_error err = {.size = sizeof err};
    kvp_view view = {.size = sizeof view};
    kvp_event event = {.size = sizeof event};
    kvp_model *model;
    kvp_pool *pool;
    kvp_batch *batch;
    kvp_seq *seq;
    kvp_status s = kvp_model_create(&g, NULL, &model, &err);
    if (s < 0 || (s = kvp_pool_create(model, &po, &pool, &err)) < 0 ||
        (s = kvp_batch_create(pool, &bo, &batch, &err)) < 0 ||
        (s = kvp_seq_create(pool, &so, &seq, &err)) < 0)
        return fail(err.text, s);
    int32_t prompt[3] = {1, 2, 3};
    if ((s = kvp_seq_append(seq, prompt, 3)) < 0) return fail("append", s);
    if ((s = kvp_batch_add(batch, seq)) < 0) return fail("add", s);
    unsigned tokens = 0, endings = 0;
    for (int i = 0; i < 100 && (s = kvp_step(batch)) >= 0 && s != KVP_DONE; i++) {
        if (s == KVP_PLANNED) {
            float q[12] = {0}, k[12] = {0}, v[12], out[12];
            for (int j = 0; j < 12; j++) v[j] = 1;
            kvp_attention_args a = {.size = sizeof a, .q = q, .k = k, .v = v, .out = out};
            int32_t chosen = 5;
            if ((s = kvp_batch_get_view(batch, &view)) < 0 || view.n_rows > 3) return fail("view", s);
            if ((s = kvp_attention(batch, 0, &a)) < 0) return fail("attention", s);
            if (out[0] != 1) return fail("what attention gave", s);
            if ((s = kvp_commit(batch, &chosen, view.n_outputs)) < 0) return fail("commit", s);
        }
        while (kvp_next_event(batch, &event) == KVP_OK) {
            if (event.tag != 77) return fail("the tag", KVP_OK);
            tokens += event.kind == KVP_EVENT_TOKEN && event.token == 5;
            if (event.kind == KVP_EVENT_ENDED)
                endings += event.usage->generated == 2 && event.usage->prompt == 3;
        }
    }
    if (tokens != 2 || endings != 1) return fail("events", s);
    kvp_seq_destroy(seq);
    kvp_batch_destroy(batch);
    kvp_pool_destroy(pool);
    kvp_model_destroy(model);
    puts("an old consumer: runs");
    return 0;
}
