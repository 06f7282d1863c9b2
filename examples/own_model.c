/*
 * A model of one's own: kvpage knows only the geometry. It schedules, keeps the keys and values in
 * its paged cache and attends; everything else (embedding, projections, norms, RoPE, feed-forward,
 * sampling) is code of this program.
 *
 * The transformer has random weights, so its text means nothing, but its numbers can be checked:
 * at the end every sequence is computed again alone, token by token, with plain full attention
 * over plain arrays, and the largest difference of the logits is printed. On the way sequences
 * join while others run, two are forked in mid-generation, and all share one continuous batch.
 */
#include <kvpage.h>

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    VOCABULARY = 64,
    WIDTH = 64,
    LAYERS = 3,
    HEADS = 4,
    KV_HEADS = 2,
    DIM = 32,
    HIDDEN = 128,
    CONTEXT = 96,
    BUDGET = 32, /* rows of a step */
    SEQUENCES = 6,
    FORKS = 2
};

/* --- the transformer; knows nothing of batches or caches --- */

typedef struct layer {
    float q[HEADS * DIM * WIDTH], k[KV_HEADS * DIM * WIDTH], v[KV_HEADS * DIM * WIDTH];
    float o[WIDTH * HEADS * DIM];
    float gate[HIDDEN * WIDTH], up[HIDDEN * WIDTH], down[WIDTH * HIDDEN];
} layer;

static float embedding[VOCABULARY * WIDTH];
static layer layers[LAYERS];

static uint64_t random_state = 1;

static float uniform(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (float)(random_state >> 40) / 16777216.0f;
}

static void fill(float *w, size_t n, int inputs)
{
    for (size_t i = 0; i < n; i++) w[i] = (uniform() - 0.5f) * 3.4f / sqrtf((float)inputs);
}

static void make_weights(void)
{
    fill(embedding, VOCABULARY * WIDTH, 3);
    for (int l = 0; l < LAYERS; l++) {
        layer *w = &layers[l];
        fill(w->q, HEADS * DIM * WIDTH, WIDTH);
        fill(w->k, KV_HEADS * DIM * WIDTH, WIDTH);
        fill(w->v, KV_HEADS * DIM * WIDTH, WIDTH);
        fill(w->o, WIDTH * HEADS * DIM, HEADS * DIM);
        fill(w->gate, HIDDEN * WIDTH, WIDTH);
        fill(w->up, HIDDEN * WIDTH, WIDTH);
        fill(w->down, WIDTH * HIDDEN, HIDDEN);
    }
}

static void project(float *out, const float *weights, const float *in, int n_out, int n_in)
{
    for (int o = 0; o < n_out; o++) {
        float sum = 0;
        for (int i = 0; i < n_in; i++) sum += weights[o * n_in + i] * in[i];
        out[o] = sum;
    }
}

static void normalise(float *out, const float *in)
{
    float sum = 0;
    for (int i = 0; i < WIDTH; i++) sum += in[i] * in[i];
    for (int i = 0; i < WIDTH; i++) out[i] = in[i] / sqrtf(sum / WIDTH + 1e-5f);
}

static void rotate(float *heads, int n_heads, uint32_t position)
{
    for (int i = 0; i < DIM / 2; i++) {
        float angle = (float)position * powf(10000.0f, -2.0f * (float)i / DIM);
        float c = cosf(angle), s = sinf(angle);
        for (int h = 0; h < n_heads; h++) {
            float *x = heads + h * DIM + 2 * i;
            float a = x[0], b = x[1];
            x[0] = a * c - b * s;
            x[1] = a * s + b * c;
        }
    }
}

/* What comes before attention in a layer: queries, keys and values of one token. */
static void before(const layer *w, const float *x, uint32_t position, float *q, float *k, float *v)
{
    float n[WIDTH];
    normalise(n, x);
    project(q, w->q, n, HEADS * DIM, WIDTH);
    project(k, w->k, n, KV_HEADS * DIM, WIDTH);
    project(v, w->v, n, KV_HEADS * DIM, WIDTH);
    rotate(q, HEADS, position);
    rotate(k, KV_HEADS, position);
}

/* And what comes after it, added to the token's state x. */
static void after(const layer *w, float *x, const float *attended)
{
    float n[WIDTH], gate[HIDDEN], up[HIDDEN], y[WIDTH];
    project(y, w->o, attended, WIDTH, HEADS * DIM);
    for (int i = 0; i < WIDTH; i++) x[i] += y[i];
    normalise(n, x);
    project(gate, w->gate, n, HIDDEN, WIDTH);
    project(up, w->up, n, HIDDEN, WIDTH);
    for (int i = 0; i < HIDDEN; i++) gate[i] *= up[i] / (1.0f + expf(-gate[i]));
    project(y, w->down, gate, WIDTH, HIDDEN);
    for (int i = 0; i < WIDTH; i++) x[i] += y[i];
}

static void read_out(float *logits, const float *x)
{
    float n[WIDTH];
    normalise(n, x);
    project(logits, embedding, n, VOCABULARY, WIDTH);
}

static int32_t sample(const float *logits)
{
    float sum = 0, below = 0, top = logits[0], at;
    for (int i = 1; i < VOCABULARY; i++) top = fmaxf(top, logits[i]);
    for (int i = 0; i < VOCABULARY; i++) sum += expf(logits[i] - top);
    at = uniform() * sum;
    for (int i = 0; i < VOCABULARY - 1; i++)
        if ((below += expf(logits[i] - top)) > at) return i;
    return VOCABULARY - 1;
}

/* --- the batched way, with kvpage --- */

/* The logits that each sequence (by tag) gave after each position. */
static float seen[SEQUENCES + FORKS][CONTEXT][VOCABULARY];
static uint8_t was_seen[SEQUENCES + FORKS][CONTEXT];

static kvp_status run_step(kvp_batch *batch)
{
    static float x[BUDGET][WIDTH], q[BUDGET][HEADS * DIM], out[BUDGET][HEADS * DIM];
    static float k[BUDGET][KV_HEADS * DIM], v[BUDGET][KV_HEADS * DIM];
    kvp_view view = {.size = sizeof view};
    kvp_attention_args args = {.size = sizeof args, .q = q[0], .k = k[0], .v = v[0], .out = out[0]};
    int32_t tokens[BUDGET];

    kvp_status status = kvp_batch_get_view(batch, &view);
    if (status < 0) return status;
    for (uint32_t r = 0; r < view.n_rows; r++)
        memcpy(x[r], embedding + view.tokens[r] * WIDTH, sizeof x[r]);

    for (uint32_t l = 0; l < LAYERS; l++) {
        for (uint32_t r = 0; r < view.n_rows; r++)
            before(&layers[l], x[r], view.positions[r], q[r], k[r], v[r]);
        status = kvp_attention(batch, l, &args);
        if (status < 0) return status;
        for (uint32_t r = 0; r < view.n_rows; r++) after(&layers[l], x[r], out[r]);
    }
    for (uint32_t i = 0; i < view.n_outputs; i++) {
        uint32_t row = view.outputs[i];
        uint64_t tag = view.tags[view.row_sequence[row]];
        float *logits = seen[tag][view.positions[row]];
        read_out(logits, x[row]);
        was_seen[tag][view.positions[row]] = 1;
        tokens[i] = sample(logits);
    }
    return kvp_commit(batch, tokens, view.n_outputs);
}

static kvp_status add_sequence(kvp_pool *pool, kvp_batch *batch, uint64_t tag, kvp_seq **out)
{
    kvp_seq_options options = {.size = sizeof options, .tag = tag, .max_tokens = 20 + 3 * tag};
    int32_t prompt[CONTEXT];
    size_t n = 5 + 7 * (size_t)tag;
    kvp_status status = kvp_seq_create(pool, &options, out, NULL);
    /* All prompts begin alike, so that they share blocks. */
    for (size_t i = 0; i < n; i++)
        prompt[i] = (int32_t)(i < 16 ? i * 5 % VOCABULARY : (i * 11 + tag) % VOCABULARY);
    if (status == KVP_OK) status = kvp_seq_append(*out, prompt, n);
    if (status == KVP_OK) status = kvp_batch_add(batch, *out);
    return status;
}

static kvp_status add_fork(kvp_batch *batch, kvp_seq *parent, uint64_t tag, kvp_seq **out)
{
    kvp_seq_options options = {.size = sizeof options, .tag = tag};
    kvp_status status = kvp_seq_fork(parent, KVP_FORK_END, &options, out, NULL);
    if (status == KVP_OK) status = kvp_batch_add(batch, *out);
    return status;
}

/* A new sequence joins every fourth step; the forks are taken in the middle of sequence 1. */
static kvp_status run(kvp_pool *pool, kvp_batch *batch, kvp_seq **seqs)
{
    uint64_t joined = 0;
    for (int step = 0;; step++) {
        kvp_event event = {.size = sizeof event};
        kvp_status status = KVP_OK;
        if (joined < SEQUENCES && step % 4 == 0) {
            status = add_sequence(pool, batch, joined, &seqs[joined]);
            joined++;
        }
        for (uint64_t f = 0; f < FORKS && step == 14 && status == KVP_OK; f++)
            status = add_fork(batch, seqs[1], SEQUENCES + f, &seqs[SEQUENCES + f]);
        if (status < 0) return status;

        status = kvp_step(batch);
        while (kvp_next_event(batch, &event) == KVP_OK)
            if (event.kind == KVP_EVENT_ENDED)
                printf("sequence %" PRIu64 " ended: %" PRIu64 " tokens of prompt, %" PRIu64
                       " of them cached, %" PRIu64 " generated\n",
                       event.tag, event.usage->prompt, event.usage->cached,
                       event.usage->generated);
        if (status == KVP_PLANNED) status = run_step(batch);
        if (status < 0) return status;
        if (status == KVP_DONE && joined == SEQUENCES) return KVP_OK;
    }
}

/* --- the check: one sequence alone, full attention, no cache but two plain arrays --- */

static void attend(float *out, const float *q, float (*k)[KV_HEADS * DIM],
                   float (*v)[KV_HEADS * DIM], uint32_t n_keys)
{
    for (int h = 0; h < HEADS; h++) {
        int kv = h / (HEADS / KV_HEADS) * DIM;
        double weight[CONTEXT], sum = 0, value[DIM] = {0};
        for (uint32_t t = 0; t < n_keys; t++) {
            double score = 0;
            for (int i = 0; i < DIM; i++) score += (double)q[h * DIM + i] * k[t][kv + i];
            weight[t] = exp(score / sqrt(DIM));
            sum += weight[t];
        }
        for (uint32_t t = 0; t < n_keys; t++)
            for (int i = 0; i < DIM; i++) value[i] += weight[t] / sum * v[t][kv + i];
        for (int i = 0; i < DIM; i++) out[h * DIM + i] = (float)value[i];
    }
}

static float check_sequence(kvp_seq *seq, uint64_t tag, size_t *compared)
{
    static float k[LAYERS][CONTEXT][KV_HEADS * DIM], v[LAYERS][CONTEXT][KV_HEADS * DIM];
    int32_t tokens[CONTEXT];
    size_t n = 0;
    float largest = 0;
    if (kvp_seq_get_tokens(seq, 0, tokens, CONTEXT, &n) < 0) return INFINITY;
    for (uint32_t t = 0; t < n; t++) {
        float x[WIDTH], q[HEADS * DIM], out[HEADS * DIM], logits[VOCABULARY];
        memcpy(x, embedding + tokens[t] * WIDTH, sizeof x);
        for (int l = 0; l < LAYERS; l++) {
            before(&layers[l], x, t, q, k[l][t], v[l][t]);
            attend(out, q, k[l], v[l], t + 1);
            after(&layers[l], x, out);
        }
        if (!was_seen[tag][t]) continue;
        read_out(logits, x);
        for (int i = 0; i < VOCABULARY; i++)
            largest = fmaxf(largest, fabsf(logits[i] - seen[tag][t][i]));
        ++*compared;
    }
    return largest;
}

int main(void)
{
    static const char weights_name[] = "own_model.c, seed 1";
    kvp_layer_group group = {.layers = LAYERS, .kv_heads = KV_HEADS, .key_dim = DIM,
                             .value_dim = DIM, .query_heads = HEADS};
    kvp_geometry geometry = {.size = sizeof geometry, .n_groups = 1, .groups = &group,
                             .vocabulary = VOCABULARY, .context = CONTEXT,
                             .model_key = weights_name, .model_key_bytes = sizeof weights_name};
    kvp_pool_options pool_options = {.size = sizeof pool_options, .blocks = 64, .block_tokens = 8,
                                     .k_format = KVP_KV_F32, .v_format = KVP_KV_F32};
    kvp_batch_options batch_options = {.size = sizeof batch_options, .token_budget = BUDGET,
                                       .threads = KVP_THREADS_INLINE};
    kvp_pool_stats stats = {.size = sizeof stats};
    kvp_error err = {.size = sizeof err};
    kvp_model *model = NULL;
    kvp_pool *pool = NULL;
    kvp_batch *batch = NULL;
    kvp_seq *seqs[SEQUENCES + FORKS] = {NULL};
    float largest = INFINITY;
    size_t compared = 0;
    kvp_status status;

    make_weights();
    if ((status = kvp_model_create(&geometry, NULL, &model, &err)) == KVP_OK &&
        (status = kvp_pool_create(model, &pool_options, &pool, &err)) == KVP_OK &&
        (status = kvp_batch_create(pool, &batch_options, &batch, &err)) == KVP_OK &&
        (status = run(pool, batch, seqs)) < 0)
        kvp_pool_last_error(pool, &err);

    if (status < 0) {
        fprintf(stderr, "own_model: %s\n", err.text);
    } else {
        largest = 0;
        for (uint64_t i = 0; i < SEQUENCES + FORKS; i++)
            largest = fmaxf(largest, check_sequence(seqs[i], i, &compared));
        kvp_pool_get_stats(pool, &stats);
        printf("%" PRIu64 " tokens computed, %" PRIu64 " served from the prefix cache, %" PRIu64
               " blocks copied on write\n",
               stats.tokens_computed, stats.tokens_cached, stats.blocks_copied);
        printf("largest difference of %zu rows of logits from full attention: %.2g\n", compared,
               (double)largest);
    }
    for (int i = 0; i < SEQUENCES + FORKS; i++) kvp_seq_destroy(seqs[i]);
    kvp_batch_destroy(batch);
    kvp_pool_destroy(pool);
    kvp_model_destroy(model);
    return !(largest < 1e-4f && compared > 0);
}
