/*
 * A host as others write it: only <kvpage.h> and the library, compiled as C and as C++, linked to
 * the shared and to the static library of an installed tree. Runs the own-model way from end to
 * end: no model file is needed, and every noun of the header takes part.
 */
#include <kvpage.h>

#include <stdio.h>
#include <string.h>

#define HEADS 2
#define DIM 32
#define TOKENS 40

static float qkv[TOKENS * HEADS * DIM], out[TOKENS * HEADS * DIM];

static int failed(const char *what, kvp_status status, const kvp_error *err)
{
    fprintf(stderr, "%s: %s: %s\n", what, kvp_status_name(status), err ? err->text : "");
    return 1;
}

/* One planned step: the same numbers for q, k and v, so every output is a mean of inputs. */
static kvp_status run_step(kvp_batch *batch)
{
    kvp_view view;
    kvp_attention_args args;
    int32_t tokens[1] = {7};
    uint32_t i;
    kvp_status s;

    kvp_view_init(&view, sizeof view);
    s = kvp_batch_get_view(batch, &view);
    if (s != KVP_OK) return s;
    if (view.n_rows > TOKENS || view.n_outputs > 1) return KVP_ERR_INTERNAL;
    for (i = 0; i < view.n_rows * HEADS * DIM; i++) qkv[i] = (float)(i % DIM) / DIM;
    kvp_attention_args_init(&args, sizeof args);
    args.q = qkv;
    args.k = qkv;
    args.v = qkv;
    args.out = out;
    s = kvp_attention(batch, 0, &args);
    if (s != KVP_OK) return s;
    for (i = 0; i < view.n_rows * HEADS * DIM; i++) {
        float d = out[i] - qkv[i];
        if (d > 1e-3f || d < -1e-3f) return KVP_ERR_INTERNAL;
    }
    return kvp_commit(batch, view.n_outputs ? tokens : NULL, view.n_outputs);
}

int main(void)
{
    kvp_error err;
    kvp_geometry geometry;
    kvp_layer_group group;
    kvp_pool_options pool_options;
    kvp_seq_options seq_options;
    kvp_sampling sampling;
    kvp_batch_options batch_options;
    kvp_event event;
    kvp_model *model = NULL;
    kvp_pool *pool = NULL;
    kvp_seq *seq = NULL;
    kvp_batch *batch = NULL;
    kvp_status s;
    int32_t prompt[TOKENS];
    int i, ended = 0;

    if (kvp_version() >> 8 != (KVP_VERSION_MAJOR << 8 | KVP_VERSION_MINOR)) return 1;
    if (!kvp_feature("own-model") || kvp_feature("no such thing")) return 1;

    kvp_error_init(&err, sizeof err);
    memset(&group, 0, sizeof group);
    group.layers = 1;
    group.kv_heads = HEADS;
    group.key_dim = DIM;
    group.value_dim = DIM;
    kvp_geometry_init(&geometry, sizeof geometry);
    geometry.n_groups = 1;
    geometry.groups = &group;
    s = kvp_model_create(&geometry, NULL, &model, &err);
    if (s != KVP_OK) return failed("kvp_model_create", s, &err);

    kvp_pool_options_init(&pool_options, sizeof pool_options);
    pool_options.blocks = 16;
    s = kvp_pool_create(model, &pool_options, &pool, &err);
    if (s != KVP_OK) return failed("kvp_pool_create", s, &err);

    kvp_sampling_init(&sampling, sizeof sampling);
    sampling.mode = KVP_SAMPLE_HOST;
    kvp_seq_options_init(&seq_options, sizeof seq_options);
    seq_options.sampling = &sampling;
    seq_options.max_tokens = 4;
    s = kvp_seq_create(pool, &seq_options, &seq, &err);
    if (s != KVP_OK) return failed("kvp_seq_create", s, &err);
    for (i = 0; i < TOKENS - 8; i++) prompt[i] = i;
    s = kvp_seq_append(seq, prompt, TOKENS - 8);
    if (s != KVP_OK) return failed("kvp_seq_append", s, NULL);

    kvp_batch_options_init(&batch_options, sizeof batch_options);
    batch_options.threads = KVP_THREADS_INLINE;
    s = kvp_batch_create(pool, &batch_options, &batch, &err);
    if (s != KVP_OK) return failed("kvp_batch_create", s, &err);
    s = kvp_batch_add(batch, seq);
    if (s != KVP_OK) return failed("kvp_batch_add", s, NULL);

    kvp_event_init(&event, sizeof event);
    for (i = 0; i < 100 && !ended; i++) {
        s = kvp_step(batch);
        if (s == KVP_PLANNED) {
            s = run_step(batch);
            if (s != KVP_OK) {
                kvp_batch_last_error(batch, &err);
                return failed("step", s, &err);
            }
        } else if (s < 0) {
            kvp_batch_last_error(batch, &err);
            return failed("kvp_step", s, &err);
        }
        while (kvp_next_event(batch, &event) == KVP_OK)
            if (event.kind == KVP_EVENT_ENDED) ended = (int)event.ending;
    }
    if (ended != KVP_END_LENGTH) return failed("the ending", ended, NULL);
    s = kvp_pool_check(pool);
    if (s != KVP_OK) return failed("kvp_pool_check", s, NULL);

    /* Any order will do. */
    kvp_model_destroy(model);
    kvp_pool_destroy(pool);
    kvp_batch_destroy(batch);
    kvp_seq_destroy(seq);
    puts("consumer: good");
    return 0;
}
