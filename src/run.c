/* `kvpage run`: one prompt, one or several continuations. */
#include "tool.h"

#include <stdlib.h>
#include <string.h>

enum { SAMPLES_MAX = 64, PROMPT_MAX = 64 << 20 };

/* Text of a sample that is not the one being shown. */
typedef struct held_text {
    char *bytes;
    size_t n, room;
} held_text;

typedef struct run {
    settings set;
    uint64_t samples, logprobs;
    const char *system;
    bool chat, json, special, quiet, want_logprobs;
    session session;
    kvp_seq *seqs[SAMPLES_MAX];
    held_text held[SAMPLES_MAX];
    bool ended[SAMPLES_MAX];
    uint64_t shown;  /* the sample whose text goes out as it comes */
    uint64_t prompt, cached, generated; /* summed over the endings */
    uint64_t first_token_ns, total_ns;  /* the longest */
    bool failed, cancelled;
    char last;       /* byte written to stdout */
} run;

/* --- the prompt --- */

static char *read_all(FILE *f, size_t *n)
{
    size_t room = 1 << 16;
    char *text = malloc(room);
    *n = 0;
    while (text) {
        size_t got = fread(text + *n, 1, room - *n, f);
        *n += got;
        if (got == 0 || *n > PROMPT_MAX) break;
        if (*n == room) {
            char *more = realloc(text, room *= 2);
            if (!more) free(text);
            text = more;
        }
    }
    return text;
}

static kvp_status append_prompt(run *r, kvp_seq *seq, const char *text, size_t bytes,
                                kvp_error *err)
{
    kvp_chat_message messages[2];
    size_t n = 0;
    if (!r->chat) {
        kvp_status status = kvp_seq_append_text(
            seq, text, bytes,
            KVP_TOKENIZE_SPECIAL_START | (r->special ? KVP_TOKENIZE_PARSE_SPECIAL : 0));
        if (status < 0) kvp_seq_last_error(seq, err);
        return status;
    }
    if (r->system)
        messages[n++] = (kvp_chat_message){"system", r->system, strlen(r->system)};
    messages[n++] = (kvp_chat_message){"user", text, bytes};
    return session_append_chat(&r->session, &r->set, seq, messages, n, KVP_CHAT_ADD_REPLY, err);
}

static kvp_status start(run *r, const char *text, size_t bytes, kvp_error *err)
{
    kvp_sampling sampling;
    kvp_string stops[LIST_MAX];
    kvp_seq_options options = {.size = sizeof options, .max_tokens = r->set.max_tokens,
                               .context = r->set.context, .sampling = &sampling,
                               .stop_strings = stops, .n_stop_strings = r->set.stop.n,
                               .eos = r->set.ignore_eos ? KVP_EOS_IGNORE : KVP_EOS_STOP,
                               .event_mask = KVP_MASK_DEFAULT | KVP_MASK_PROGRESS};
    kvp_status status;
    session_sampling(&r->set, &sampling);
    session_stops(&r->set, stops);
    sampling.logprobs = r->want_logprobs;
    sampling.top_logprobs = (uint32_t)r->logprobs;
    status = kvp_seq_create(r->session.pool, &options, &r->seqs[0], err);
    if (status < 0) return status;
    status = append_prompt(r, r->seqs[0], text, bytes, err);
    if (status < 0) return status;
    for (uint64_t i = 1; i < r->samples && status == KVP_OK; i++) {
        kvp_seq_options fork = {.size = sizeof fork, .tag = i};
        status = kvp_seq_fork(r->seqs[0], KVP_FORK_END, &fork, &r->seqs[i], NULL);
    }
    for (uint64_t i = 0; i < r->samples && status == KVP_OK; i++)
        status = kvp_batch_add(r->session.batch, r->seqs[i]);
    if (status < 0) kvp_pool_last_error(r->session.pool, err);
    return status;
}

/* --- text out --- */

static void put(run *r, const char *text, size_t n)
{
    if (n == 0) return;
    fwrite(text, 1, n, stdout);
    r->last = text[n - 1];
}

static void hold(held_text *h, const char *text, size_t n)
{
    if (h->room - h->n < n) {
        size_t room = (h->n + n) * 2 + 256;
        char *more = realloc(h->bytes, room);
        if (!more) return;
        h->bytes = more;
        h->room = room;
    }
    if (n) memcpy(h->bytes + h->n, text, n);
    h->n += n;
}

static void head(run *r)
{
    if (r->samples == 1) return;
    printf("%s--- %u of %u\n", r->shown ? "\n" : "", (unsigned)r->shown + 1,
           (unsigned)r->samples);
}

/* Goes on to the next sample whenever the shown one has ended. */
static void show_next(run *r)
{
    while (r->shown < r->samples && r->ended[r->shown]) {
        if (r->last != '\n') put(r, "\n", 1);
        if (++r->shown == r->samples) return;
        head(r);
        put(r, r->held[r->shown].bytes, r->held[r->shown].n);
    }
}

static void text_out(run *r, uint64_t sample, const char *text, size_t n)
{
    if (sample == r->shown) put(r, text, n);
    else hold(&r->held[sample], text, n);
}

/* A line per token: its log-probability and text, then the alternatives'. */
static void logprobs_out(run *r, const kvp_event *e)
{
    char line[512], piece[64];
    int n = snprintf(line, sizeof line, "%8.4f  ", (double)e->logprob);
    for (uint32_t i = 0; i <= e->n_top; i++) {
        int32_t token = i ? e->top_tokens[i - 1] : e->token;
        size_t bytes = 0;
        kvp_detokenize(r->session.model, &token, 1, KVP_DETOKENIZE_SPECIAL, piece,
                       sizeof piece - 1, &bytes, NULL);
        if (bytes >= sizeof piece) bytes = 0;
        for (size_t k = 0; k < bytes; k++)
            if (piece[k] == '\n') piece[k] = ' ';
        if (i) {
            n += snprintf(line + n, sizeof line - (size_t)n, "   %.4f '%.*s'",
                          (double)e->top_logprobs[i - 1], (int)bytes, piece);
        } else {
            n += snprintf(line + n, sizeof line - (size_t)n, "'%.*s'", (int)bytes, piece);
        }
        if (n >= (int)sizeof line - 1) break;
    }
    if (n > (int)sizeof line - 2) n = (int)sizeof line - 2;
    line[n++] = '\n';
    text_out(r, e->tag, line, (size_t)n);
}

static void json_event(run *r, const kvp_event *e)
{
    json j = {.out = stdout, .first = true};
    json_open(&j, NULL, '{');
    json_string(&j, "event",
                e->kind == KVP_EVENT_TOKEN ? "token"
                                           : e->kind == KVP_EVENT_PROGRESS ? "progress" : "end");
    json_uint(&j, "sample", e->tag);
    if (e->kind == KVP_EVENT_TOKEN) {
        json_uint(&j, "position", e->position);
        json_int(&j, "token", e->token);
    }
    if (e->kind == KVP_EVENT_PROGRESS) {
        json_uint(&j, "done", e->done);
        json_uint(&j, "total", e->total);
    } else {
        json_text(&j, "text", e->text, (size_t)e->text_bytes);
    }
    if (e->kind == KVP_EVENT_TOKEN && r->want_logprobs) {
        json_real(&j, "logprob", (double)e->logprob);
        json_open(&j, "top", '[');
        for (uint32_t i = 0; i < e->n_top; i++) {
            json_open(&j, NULL, '{');
            json_int(&j, "token", e->top_tokens[i]);
            json_real(&j, "logprob", (double)e->top_logprobs[i]);
            json_close(&j, '}');
        }
        json_close(&j, ']');
    }
    if (e->kind == KVP_EVENT_ENDED) {
        json_string(&j, "ending", ending_name(e->ending));
        if (e->ending == KVP_END_FAILED) json_string(&j, "status", kvp_status_name(e->status));
        json_usage(&j, e->usage);
    }
    json_close(&j, '}');
    json_line(&j);
}

static uint64_t seed_of(const run *r)
{
    kvp_seq_info info = {.size = sizeof info};
    kvp_seq_get_info(r->seqs[0], &info);
    return info.seed;
}

/* What would give the same text again, where nobody chose it. */
static void show_seed(const run *r)
{
    if (r->quiet || r->json || r->set.seed || r->set.temperature == 0) return;
    fprintf(stderr, "[seed %llu]\n", (unsigned long long)seed_of(r));
}

/* --- the loop --- */

static void count_ending(run *r, const kvp_event *e)
{
    const kvp_usage *u = e->usage;
    r->ended[e->tag] = true;
    r->prompt += u->prompt;
    r->cached += u->cached + u->reattached;
    r->generated += u->generated;
    if (u->first_token_ns > r->first_token_ns) r->first_token_ns = u->first_token_ns;
    if (u->total_ns > r->total_ns) r->total_ns = u->total_ns;
    if (e->ending == KVP_END_FAILED) {
        r->failed = true;
        fail_line("sample %u: %s", (unsigned)e->tag + 1, kvp_status_text(e->status));
    }
    if (e->ending == KVP_END_CAPACITY)
        fail_line("sample %u ended early: the KV cache is full (see --cache)",
                  (unsigned)e->tag + 1);
}

static void take_events(run *r)
{
    kvp_event e = {.size = sizeof e};
    while (kvp_next_event(r->session.batch, &e) == KVP_OK) {
        if (e.kind == KVP_EVENT_PROGRESS && e.done < e.total)
            progress_show("reading the prompt", e.done, e.total);
        else progress_end();
        if (r->json) json_event(r, &e);
        else if (e.kind == KVP_EVENT_TOKEN && r->want_logprobs) logprobs_out(r, &e);
        else if (!r->want_logprobs) text_out(r, e.tag, e.text, (size_t)e.text_bytes);
        if (e.kind == KVP_EVENT_ENDED) {
            count_ending(r, &e);
            if (!r->json) show_next(r);
        }
    }
    fflush(stdout);
}

static int step_to_the_end(run *r)
{
    for (;;) {
        kvp_status status = kvp_step(r->session.batch);
        take_events(r);
        if (status < 0) return fail_pool(&r->session);
        if (status == KVP_DONE) return EXIT_DONE;
        if (interrupted() && !r->cancelled) {
            r->cancelled = true;
            for (uint64_t i = 0; i < r->samples; i++) kvp_seq_cancel(r->seqs[i]);
            continue;
        }
        if (status == KVP_AGAIN || status == KVP_STALLED) kvp_wait(r->session.batch, -1);
    }
}

/* --- the summary --- */

static void json_summary(const run *r, const kvp_pool_stats *p)
{
    json j = {.out = stdout, .first = true};
    json_open(&j, NULL, '{');
    json_string(&j, "event", "summary");
    json_real(&j, "load_ms", (double)r->session.load_ns / 1e6);
    json_uint(&j, "seed", seed_of(r));
    json_uint(&j, "generated", r->generated);
    json_uint(&j, "tokens_prompt", p->tokens_prompt);
    json_uint(&j, "tokens_cached", p->tokens_cached);
    json_uint(&j, "tokens_computed", p->tokens_computed);
    json_uint(&j, "blocks", p->blocks);
    json_uint(&j, "blocks_used_peak", p->used_peak);
    json_uint(&j, "blocks_copied", p->blocks_copied);
    json_uint(&j, "preemptions", p->preemptions);
    json_close(&j, '}');
    json_line(&j);
}

static void summary(const run *r)
{
    kvp_pool_stats p = {.size = sizeof p};
    double seconds = (double)(r->total_ns - r->first_token_ns) / 1e9;
    kvp_pool_get_stats(r->session.pool, &p);
    if (r->json) {
        json_summary(r, &p);
        return;
    }
    if (r->quiet || !term_is_tty(stderr)) return;
    if (!r->generated) {
        fprintf(stderr, "\n[%llu tokens of prompt, none generated]\n",
                (unsigned long long)r->prompt);
        return;
    }
    fprintf(stderr, "\n[%llu tokens of prompt, %llu from the cache; first token after %.2f s; ",
            (unsigned long long)r->prompt, (unsigned long long)r->cached,
            (double)r->first_token_ns / 1e9);
    fprintf(stderr, "%llu generated, %.1f per second]\n", (unsigned long long)r->generated,
            r->generated > r->samples && seconds > 0
                ? (double)(r->generated - r->samples) / seconds
                : 0.0);
}

static int run_prompt(run *r, const char *text, size_t bytes)
{
    kvp_error err = {.size = sizeof err};
    int code;
    if (start(r, text, bytes, &err) < 0) return fail_with(&err);
    show_seed(r);
    if (!r->json) head(r);
    code = step_to_the_end(r);
    if (code != EXIT_DONE) return code;
    summary(r);
    if (r->failed) return EXIT_FAILED;
    return r->cancelled ? EXIT_INTERRUPTED : EXIT_DONE;
}

static void close_run(run *r)
{
    for (uint64_t i = 0; i < SAMPLES_MAX; i++) {
        kvp_seq_destroy(r->seqs[i]);
        free(r->held[i].bytes);
    }
    session_close(&r->session);
}

int command_run(int argc, char **argv)
{
    static run r;
    option engine[ENGINE_OPTIONS], sampling[SAMPLING_OPTIONS];
    const option own[] = {
        {.name = "chat", .kind = OPTION_FLAG, .value = &r.chat,
         .help = "the prompt is a user's message, in the model's own chat format"},
        {.name = "system", .kind = OPTION_TEXT, .value = &r.system, .argument = "TEXT",
         .help = "system message in front of it; implies --chat, like --format"},
        chat_format_option(&r.set),
        {.name = "special", .kind = OPTION_FLAG, .value = &r.special,
         .help = "special tokens written in a raw prompt become those tokens"},
        {.name = "n", .kind = OPTION_NUMBER, .value = &r.samples, .argument = "N",
         .help = "so many samples, forked from one prompt", .least = 1, .most = SAMPLES_MAX},
        {.name = "logprobs", .kind = OPTION_NUMBER, .value = &r.logprobs, .argument = "N",
         .help = "log-probability of each token, and of N alternatives", .least = 0, .most = 20,
         .given = &r.want_logprobs},
        {.name = "json", .kind = OPTION_FLAG, .value = &r.json,
         .help = "events as JSON, one a line, and a summary"},
        {.name = "quiet", .kind = OPTION_FLAG, .value = &r.quiet,
         .help = "no figures at the end"},
        {.name = NULL}};
    const option_group groups[] = {
        {"options", own}, {"sampling", sampling}, {"engine", engine}, {NULL, NULL}};
    const usage u = {"run MODEL [PROMPT]",
                     "Generates text after a prompt, which is read from standard input if it is "
                     "not given.\nCtrl-C ends it early, with exit code 130.\n",
                     groups, 1, 2};
    arguments args;
    char *input = NULL;
    size_t bytes;
    int code;

    r.samples = 1;
    settings_engine(&r.set, engine);
    settings_sampling(&r.set, sampling);
    if (!options_read(&u, argc, argv, &args, &code)) return code;
    if (r.system || r.set.chat_format) r.chat = true;
    interrupt_setup(false);
    code = session_open(&r.session, args.items[0], &r.set, r.samples);
    if (code == EXIT_DONE && r.chat &&
        !session_can_chat(&r.session, &r.set, args.items[0], "leave out --chat and --system"))
        code = EXIT_FAILED;
    if (code == EXIT_DONE) {
        const char *text = args.n > 1 ? args.items[1] : (input = read_all(stdin, &bytes));
        if (args.n > 1) bytes = strlen(text);
        code = text ? run_prompt(&r, text, bytes) : fail_line("no memory for the prompt");
    }
    free(input);
    close_run(&r);
    return code;
}
