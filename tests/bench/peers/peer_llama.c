/*
 * The peer: llama.cpp through its C interface, with the cases, tokens and habits of
 * ../bench_engine.c, one case per line of stdin, one JSON line each. Cases of 32 sequences are run
 * both ways that it has (one cache for all sequences, or one stream each): the better one counts.
 *
 * What a step holds is the host's choice here. Beside sequences that decode, a prompt comes in by
 * 256 rows, so that they wait less.
 *
 *     peer_llama MODEL THREADS
 */
#include <llama.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { DEPTH = 7900, SHARED = 2048, MIXED_SEQS = 8, MIXED_PROMPT = 128, MIXED_ROWS = 256 };

static struct llama_model *model;
static int threads, n_vocab;
static unsigned round_number;

static void quiet(enum ggml_log_level level, const char *text, void *user)
{
    (void)level, (void)text, (void)user;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int token_at(unsigned long i) { return (int)(1000 + i * 7919 % 40000); }

static int prompt_at(unsigned long i, unsigned which, unsigned number)
{
    return token_at(i * 31 + which * 101ul + number * 1009ul);
}

static struct llama_context *context(unsigned tokens, unsigned seqs, int unified)
{
    struct llama_context_params p = llama_context_default_params();
    p.n_ctx = tokens;
    p.n_batch = 512;
    p.n_ubatch = 512;
    p.n_seq_max = seqs;
    p.n_threads = threads;
    p.n_threads_batch = threads;
    p.kv_unified = unified;
    p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    struct llama_context *c = llama_init_from_model(model, p);
    if (!c) exit(1);
    return c;
}

static void put(struct llama_batch *b, int token, int pos, int seq, int logits)
{
    int i = b->n_tokens++;
    b->token[i] = token;
    b->pos[i] = pos;
    b->n_seq_id[i] = 1;
    b->seq_id[i][0] = seq;
    b->logits[i] = (signed char)logits;
}

static void compute(struct llama_context *c, struct llama_batch *b)
{
    if (llama_decode(c, *b)) {
        fprintf(stderr, "peer_llama: decode failed\n");
        exit(1);
    }
    llama_synchronize(c);
    b->n_tokens = 0;
}

static int greedy(struct llama_context *c, int row)
{
    const float *l = llama_get_logits_ith(c, row);
    int best = 0;
    for (int i = 1; i < n_vocab; i++)
        if (l[i] > l[best]) best = i;
    return best;
}

/* Greedy steps of all sequences from position `pos`; tokens per second, `warm` steps untimed. */
static double steps(struct llama_context *c, struct llama_batch *b, int *last, int seqs, int pos,
                    int warm, int n)
{
    double start = now();
    for (int i = 0; i < warm + n; i++) {
        if (i == warm) start = now();
        for (int s = 0; s < seqs; s++) put(b, last[s], pos + i, s, 1);
        compute(c, b);
        for (int s = 0; s < seqs; s++) last[s] = greedy(c, s);
    }
    return seqs * n / (now() - start);
}

/* A prompt that no round before had, or one that is the same in every round. */
static void prefill(struct llama_context *c, struct llama_batch *b, int n, int seq, unsigned which,
                    unsigned number)
{
    for (int i = 0; i < n; i++) {
        put(b, prompt_at((unsigned)i, which, number), i, seq, i == n - 1);
        if (b->n_tokens == 512 || i == n - 1) compute(c, b);
    }
}

static double first_token(struct llama_batch *b, int n)
{
    static struct llama_context *c;
    if (!c) c = context(1024, 1, 1);
    llama_memory_clear(llama_get_memory(c), 0);
    double start = now();
    prefill(c, b, n, 0, 0, round_number);
    greedy(c, -1);
    return n / (now() - start);
}

static double decode(struct llama_batch *b)
{
    static struct llama_context *c;
    if (!c) c = context(256, 1, 1);
    llama_memory_clear(llama_get_memory(c), 0);
    prefill(c, b, 16, 0, 0, round_number);
    int last = greedy(c, -1);
    return steps(c, b, &last, 1, 16, 0, 48);
}

/* The prompt is computed once and stays. */
static double decode_deep(struct llama_batch *b)
{
    static struct llama_context *c;
    static int first;
    if (!c) {
        c = context(8192, 1, 1);
        prefill(c, b, DEPTH, 0, 0, 0);
        first = greedy(c, -1);
    }
    llama_memory_seq_rm(llama_get_memory(c), 0, DEPTH, -1);
    int last = first;
    return steps(c, b, &last, 1, DEPTH, 0, 24);
}

static double sixteen(struct llama_batch *b)
{
    static struct llama_context *c;
    int last[16];
    if (!c) c = context(16 * 256, 16, 0);
    llama_memory_clear(llama_get_memory(c), 0);
    for (int s = 0; s < 16; s++) {
        prefill(c, b, 128, s, (unsigned)s, round_number);
        last[s] = greedy(c, -1);
    }
    return steps(c, b, last, 16, 128, 2, 24);
}

/* The prompts are computed once for each way and stay; a state of one way cannot be loaded into the
 * other. */
static double own_32(struct llama_batch *b, int unified)
{
    static struct llama_context *both[2];
    static int first[2][32];
    int last[32];
    struct llama_context *c = both[unified];
    if (!c) {
        c = both[unified] = context(unified ? 32 * 576 : 32 * 768, 32, unified);
        for (int s = 0; s < 32; s++) {
            prefill(c, b, 512, s, (unsigned)s, 0);
            first[unified][s] = greedy(c, -1);
        }
    }
    for (int s = 0; s < 32; s++) llama_memory_seq_rm(llama_get_memory(c), s, 512, -1);
    memcpy(last, first[unified], sizeof last);
    return steps(c, b, last, 32, 512, 2, 24);
}

/* The 2,048 tokens are computed once and copied to the others. */
static double shared_32(struct llama_batch *b, int unified)
{
    static struct llama_context *both[2];
    int last[32];
    struct llama_context *c = both[unified];
    if (!c) {
        c = both[unified] = context(unified ? SHARED + 32 * 64 + 256 : 32 * 2304, 32, unified);
        for (int i = 0; i < SHARED; i++) {
            put(b, token_at((unsigned)i), i, 0, i == SHARED - 1);
            if (b->n_tokens == 512) compute(c, b);
        }
    }
    llama_memory_t m = llama_get_memory(c);
    for (int s = 0; s < 32; s++) {
        llama_memory_seq_rm(m, s, s ? -1 : SHARED, -1);
        if (s) llama_memory_seq_cp(m, 0, s, -1, -1);
        last[s] = token_at((unsigned long)s * 50 + round_number * 13ul + 1);
    }
    return steps(c, b, last, 32, SHARED, 2, 24);
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double gap_ms;

/* Each step holds a token of each sequence that decodes and the next rows of the long prompt, whose
 * own rows come last. All sequences get their tokens at the same time: one gap a step for each. */
static double mixed(struct llama_batch *b, int prompt)
{
    static struct llama_context *c;
    double gaps[8192 / MIXED_ROWS + 1];
    int last[MIXED_SEQS], pos = MIXED_PROMPT, n = 0, long_seq = MIXED_SEQS;
    if (!c) c = context(8192 + MIXED_SEQS * 256, MIXED_SEQS + 1, 1);
    llama_memory_clear(llama_get_memory(c), 0);
    for (int s = 0; s < MIXED_SEQS; s++) {
        prefill(c, b, MIXED_PROMPT, s, (unsigned)s + 1, round_number);
        last[s] = greedy(c, -1);
    }
    steps(c, b, last, MIXED_SEQS, pos, 0, 4);
    pos += 4;
    double start = now(), before = start;
    for (int done = 0; done < prompt; pos++) {
        int rows = prompt - done < MIXED_ROWS ? prompt - done : MIXED_ROWS;
        for (int s = 0; s < MIXED_SEQS; s++) put(b, last[s], pos, s, 1);
        for (int i = 0; i < rows; i++, done++)
            put(b, prompt_at((unsigned)done, 0, round_number), done, long_seq, done == prompt - 1);
        compute(c, b);
        for (int s = 0; s < MIXED_SEQS; s++) last[s] = greedy(c, s);
        double t = now();
        gaps[n++] = t - before;
        before = t;
    }
    greedy(c, -1);
    double took = now() - start;
    qsort(gaps, (size_t)n, sizeof gaps[0], ascending);
    gap_ms = gaps[(99 * n + 99) / 100 - 1] * 1e3;
    return (prompt + MIXED_SEQS * n + 1) / took;
}

int main(int argc, char **argv)
{
    char line[64];
    if (argc != 3) return 2;
    threads = atoi(argv[2]);
    llama_log_set(quiet, NULL);
    llama_backend_init();
    model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) return 1;
    n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    struct llama_batch b = llama_batch_init(512, 0, 1);
    while (fgets(line, sizeof line, stdin)) {
        double v = -1;
        line[strcspn(line, "\n")] = 0;
        if (!strcmp(line, "prefill-512")) v = first_token(&b, 512);
        if (!strcmp(line, "start")) v = first_token(&b, 64);
        if (!strcmp(line, "decode")) v = decode(&b);
        if (!strcmp(line, "decode-7900")) v = decode_deep(&b);
        if (!strcmp(line, "16x128")) v = sixteen(&b);
        if (!strcmp(line, "32x512")) v = own_32(&b, 1);
        if (!strcmp(line, "32x512-streams")) v = own_32(&b, 0);
        if (!strcmp(line, "32-shared")) v = shared_32(&b, 1);
        if (!strcmp(line, "32-shared-streams")) v = shared_32(&b, 0);
        if (!strcmp(line, "mixed")) v = mixed(&b, 8000);
        if (!strcmp(line, "mixed-short")) v = mixed(&b, 1000);
        if (v < 0)
            printf("{\"case\":\"%s\",\"error\":\"not known\"}\n", line);
        else if (!strncmp(line, "mixed", 5))
            printf("{\"case\":\"%s\",\"value\":%.1f,\"gap_ms\":%.2f}\n", line, v, gap_ms);
        else
            printf("{\"case\":\"%s\",\"value\":%.1f,\"unit\":\"tokens/s\"}\n", line, v);
        fflush(stdout);
        round_number++;
    }
    return 0;
}
