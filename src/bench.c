/*
 * `kvpage bench`: speed of a model on this machine, on four fixed loads. Prompts are random tokens
 * under a salt of their own, so that no run finds the prefix of an earlier one; end tokens are
 * ignored, so that every run generates the same number. Each figure is the median of the repeats.
 */
#include "tool.h"

#include <stdlib.h>
#include <string.h>

enum { SEQUENCES_MAX = 32, PROMPT_MAX = 2048, REPEATS_MAX = 99 };

typedef struct load {
    const char *name;
    uint64_t sequences, prompt, generate;
    bool shared; /* one prompt, forked; else each its own */
} load;

static const load loads[] = {
    {"prefill of 512 tokens", 1, 512, 1, false},
    {"decode, 1 sequence", 1, 16, 128, false},
    {"16 sequences of 128", 16, 128, 32, false},
    {"32 over one prompt of 2048", 32, 2048, 32, true},
};

/* What one run gives. A sequence's first token ends the prompt phase; once all have theirs, the
 * generation phase begins. */
typedef struct timing {
    double prompt_rate, generate_rate; /* tokens per second; 0: not measured by this load */
    double first_ms;                   /* until the last sequence's first token */
    uint64_t used_blocks;
} timing;

typedef struct bench {
    settings set;
    uint64_t repeats;
    bool json;
    session session;
    uint64_t salt, random;
    kvp_seq *seqs[SEQUENCES_MAX];
} bench;

static int32_t next_token(bench *b)
{
    for (;;) {
        int32_t token;
        b->random = b->random * 6364136223846793005u + 1442695040888963407u;
        token = (int32_t)((b->random >> 33) % b->session.info.vocabulary);
        if (!(kvp_token_flags(b->session.model, token) & (KVP_TOKEN_SPECIAL | KVP_TOKEN_END)))
            return token;
    }
}

static kvp_status make_sequences(bench *b, const load *l, kvp_error *err)
{
    int32_t prompt[PROMPT_MAX];
    kvp_seq_options options = {.size = sizeof options, .salt = &b->salt,
                               .salt_bytes = sizeof b->salt, .max_tokens = l->generate,
                               .eos = KVP_EOS_IGNORE};
    kvp_status status = KVP_OK;
    b->salt++;
    for (uint64_t i = 0; i < l->sequences && status == KVP_OK; i++) {
        if (l->shared && i) {
            kvp_seq_options fork = {.size = sizeof fork, .tag = i};
            status = kvp_seq_fork(b->seqs[0], KVP_FORK_END, &fork, &b->seqs[i], err);
            continue;
        }
        options.tag = i;
        status = kvp_seq_create(b->session.pool, &options, &b->seqs[i], err);
        if (status < 0) return status;
        for (uint64_t t = 0; t < l->prompt; t++) prompt[t] = next_token(b);
        status = kvp_seq_append(b->seqs[i], prompt, (size_t)l->prompt);
        if (status < 0) kvp_seq_last_error(b->seqs[i], err);
    }
    return status;
}

/* Runs what was added to its end; the time of the last first token, and tokens after it. */
static kvp_status drive(bench *b, const load *l, uint64_t *first_at, uint64_t *after)
{
    kvp_event e = {.size = sizeof e};
    uint64_t begun = 0;
    bool seen[SEQUENCES_MAX] = {false};
    for (;;) {
        kvp_status status = kvp_step(b->session.batch);
        while (kvp_next_event(b->session.batch, &e) == KVP_OK) {
            if (e.kind != KVP_EVENT_TOKEN) continue;
            if (begun == l->sequences) ++*after;
            if (!seen[e.tag]) begun++;
            seen[e.tag] = true;
            if (begun == l->sequences && !*first_at) *first_at = clock_ns();
        }
        if (status < 0 || status == KVP_DONE) return status;
        if (interrupted()) return KVP_ERR_CANCELLED;
        if (status == KVP_AGAIN || status == KVP_STALLED) kvp_wait(b->session.batch, -1);
    }
}

static kvp_status run_once(bench *b, const load *l, timing *out, kvp_error *err)
{
    kvp_pool_stats stats = {.size = sizeof stats};
    uint64_t start, first_at = 0, end, after = 0;
    kvp_status status = make_sequences(b, l, err);
    if (status < 0) return status;
    start = clock_ns();
    for (uint64_t i = 0; i < l->sequences && status == KVP_OK; i++)
        status = kvp_batch_add(b->session.batch, b->seqs[i]);
    if (status == KVP_OK) status = drive(b, l, &first_at, &after);
    if (status == KVP_ERR_CANCELLED) err->status = status;
    else if (status < 0) kvp_pool_last_error(b->session.pool, err);
    if (status < 0) return status;
    end = clock_ns();
    kvp_pool_get_stats(b->session.pool, &stats);
    out->first_ms = (double)(first_at - start) / 1e6;
    out->prompt_rate = (double)(l->shared ? l->prompt : l->prompt * l->sequences) /
                       ((double)(first_at - start) / 1e9);
    out->generate_rate = after ? (double)after / ((double)(end - first_at) / 1e9) : 0;
    out->used_blocks = stats.used;
    return KVP_OK;
}

static void drop_sequences(bench *b)
{
    for (size_t i = 0; i < SEQUENCES_MAX; i++) {
        kvp_seq_destroy(b->seqs[i]);
        b->seqs[i] = NULL;
    }
}

/* --- medians --- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(const timing *runs, uint64_t n, size_t field)
{
    double values[REPEATS_MAX];
    for (uint64_t i = 0; i < n; i++)
        memcpy(&values[i], (const char *)&runs[i] + field, sizeof values[i]);
    qsort(values, (size_t)n, sizeof values[0], by_value);
    return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

static void report(bench *b, json *j, const load *l, const timing *runs)
{
    double prompt = median(runs, b->repeats, offsetof(timing, prompt_rate));
    double generate = median(runs, b->repeats, offsetof(timing, generate_rate));
    double first = median(runs, b->repeats, offsetof(timing, first_ms));
    if (!b->json) {
        printf("%-28s %12.1f ", l->name, prompt);
        if (generate > 0) printf("%14.1f ", generate);
        else printf("%14s ", "-");
        printf("%14.1f %12llu\n", first, (unsigned long long)runs[0].used_blocks);
        fflush(stdout);
        return;
    }
    json_open(j, NULL, '{');
    json_string(j, "load", l->name);
    json_uint(j, "sequences", l->sequences);
    json_uint(j, "prompt_tokens", l->prompt);
    json_uint(j, "generated_tokens", l->generate);
    json_bool(j, "shared_prompt", l->shared);
    json_real(j, "prompt_tokens_per_second", prompt);
    if (generate > 0) json_real(j, "generated_tokens_per_second", generate);
    json_real(j, "first_token_ms", first);
    json_uint(j, "blocks_used", runs[0].used_blocks);
    json_close(j, '}');
}

static int run_load(bench *b, json *j, const load *l)
{
    timing runs[REPEATS_MAX] = {{0}};
    kvp_error err = {.size = sizeof err};
    for (uint64_t i = 0; i < b->repeats; i++) {
        kvp_status status = run_once(b, l, &runs[i], &err);
        drop_sequences(b);
        if (status < 0) return fail_with(&err);
    }
    report(b, j, l, runs);
    return EXIT_DONE;
}

static int run_all(bench *b)
{
    json j = {.out = stdout, .first = true};
    kvp_batch_stats stats = {.size = sizeof stats};
    int code = EXIT_DONE;
    kvp_batch_get_stats(b->session.batch, &stats);
    if (b->json) {
        json_open(&j, NULL, '{');
        json_string(&j, "model", b->session.info.name);
        json_string(&j, "cpu_level", cpu_level_name(b->session.info.cpu_level));
        json_string(&j, "activations", activations_name(b->session.info.activations));
        json_string(&j, "kv", kv_format_name(b->set.kv));
        json_uint(&j, "threads", stats.threads);
        json_uint(&j, "repeats", b->repeats);
        json_open(&j, "loads", '[');
    } else {
        printf("%s, %s, %u threads, medians of %u\n\n", b->session.info.name,
               cpu_level_name(b->session.info.cpu_level), stats.threads, (unsigned)b->repeats);
        printf("%-28s %12s %14s %14s %12s\n", "", "prompt tok/s", "generated t/s",
               "first token ms", "blocks used");
    }
    for (size_t i = 0; i < COUNT(loads) && code == EXIT_DONE; i++)
        code = run_load(b, &j, &loads[i]);
    if (b->json) {
        json_close(&j, ']');
        json_close(&j, '}');
        json_line(&j);
    }
    return code;
}

int command_bench(int argc, char **argv)
{
    static bench b;
    option engine[ENGINE_OPTIONS];
    const option own[] = {
        {.name = "repeat", .kind = OPTION_NUMBER, .value = &b.repeats, .argument = "N",
         .help = "runs of each load; default: 3", .least = 1, .most = REPEATS_MAX},
        {.name = "json", .kind = OPTION_FLAG, .value = &b.json, .help = "as JSON"},
        {.name = NULL}};
    const option_group groups[] = {{"options", own}, {"engine", engine}, {NULL, NULL}};
    const usage u = {"bench MODEL",
                     "Measures reading and generating speed. Nothing else should be running.\n",
                     groups, 1, 1};
    arguments args;
    int code;

    b.repeats = 3;
    settings_engine(&b.set, engine);
    if (!options_read(&u, argc, argv, &args, &code)) return code;
    interrupt_setup(false);
    if (!b.set.context) b.set.context = PROMPT_MAX + 256;
    code = session_open(&b.session, args.items[0], &b.set, 4);
    if (code == EXIT_DONE) code = run_all(&b);
    drop_sequences(&b);
    session_close(&b.session);
    return code;
}
