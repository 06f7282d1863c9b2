/*
 * What `make demo` shows: eight users of one assistant, all in one continuous batch over one paged
 * cache. They share a system prompt, which is computed once; each has a question of its own; one of
 * them wants four answers, which are forks of one sequence. The text appears as it is made; then a
 * table says what that took.
 *
 *     demo model.gguf [tokens of each answer]
 */
#define _GNU_SOURCE
#include <kvpage.h>

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { USERS = 8, SAMPLES = 4, ANSWERS = USERS - 1 + SAMPLES, TEXT_MAX = 8192, GAPS_MAX = 65536 };

static const char system_prompt[] =
    "You are a helpful assistant for the visitors of a small science museum. Answer in plain "
    "words, in two or three short sentences, as you would speak to somebody who is curious "
    "but new to the subject. Do not use lists or headings. If a question is about an animal, "
    "say where it lives. If it is about a thing, say what it is used for. If you do not know "
    "an answer, say so and name somebody who might. Be friendly, be brief, and never make the "
    "visitor feel foolish for asking.";

static const struct {
    const char *name, *question;
} users[USERS] = {
    {"Ada", "Why is the sky blue?"},
    {"Bela", "What is the capital of France?"},
    {"Chidi", "How do bees make honey?"},
    {"Dora", "What is a black hole?"},
    {"Emil", "Why do cats purr?"},
    {"Farah", "How does a bicycle stay upright?"},
    {"Goro", "What is salt made of?"},
    {"Hana", "Tell me a very short story about a robot."}, /* asks for SAMPLES answers */
};

typedef struct answer {
    kvp_seq *seq;
    char label[16];
    const char *question;
    char text[TEXT_MAX];
    size_t bytes;
    size_t printed;       /* of these, in plain output */
    uint64_t last_ns;     /* when its latest token came; 0: none yet */
    uint64_t first_ns;    /* from add to first token */
    uint64_t prompt, generated;
} answer;

typedef struct demo {
    kvp_model *model;
    kvp_pool *pool;
    kvp_batch *batch;
    answer answers[ANSWERS];
    uint64_t max_tokens;
    float gaps_ms[GAPS_MAX];
    size_t n_gaps;
    int live; /* redraw one line per answer; else print lines as they fill */
    uint64_t drawn_ns;
} demo;

static volatile sig_atomic_t stop_asked;

static void on_signal(int number)
{
    (void)number;
    stop_asked = 1;
}

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* --- drawing --- */

static size_t width(void)
{
    struct winsize w = {0};
    return ioctl(STDOUT_FILENO, TIOCGWINSZ, &w) == 0 && w.ws_col >= 40 ? w.ws_col : 80;
}

/* Whether the answers fit on the screen, one a line. */
static int can_redraw(void)
{
    struct winsize w = {0};
    return isatty(STDOUT_FILENO) && ioctl(STDOUT_FILENO, TIOCGWINSZ, &w) == 0 &&
           w.ws_row > ANSWERS + 2;
}

/* Where the last `columns` characters of the text begin; never inside a UTF-8 character. */
static size_t tail(const char *text, size_t bytes, size_t columns)
{
    size_t at = bytes;
    while (at > 0 && columns > 0) {
        at--;
        if (((unsigned char)text[at] & 0xc0) != 0x80) columns--;
    }
    return at;
}

static void draw(demo *d, int again)
{
    size_t columns = width() - 10;
    if (again) printf("\033[%dA", ANSWERS);
    for (int i = 0; i < ANSWERS; i++) {
        const answer *a = &d->answers[i];
        const char *text = a->bytes ? a->text : a->question;
        size_t bytes = a->bytes ? a->bytes : strlen(text);
        size_t from = tail(text, bytes, columns);
        printf("\r\033[K\033[1m%-8s\033[0m %s%.*s\033[0m\n", a->label, a->bytes ? "" : "\033[2m",
               (int)(bytes - from), text + from);
    }
    fflush(stdout);
    d->drawn_ns = now_ns();
}

/* Whole lines of about 70 characters, cut between words; `all` also prints what is left. */
static void print_lines(answer *a, int all)
{
    while (a->bytes - a->printed > 70 || (all && a->bytes > a->printed)) {
        size_t n = a->bytes - a->printed;
        if (n > 70) {
            n = 70;
            while (n > 40 && a->text[a->printed + n - 1] != ' ') n--;
        }
        printf("%-8s %.*s\n", a->label, (int)n, a->text + a->printed);
        a->printed += n;
    }
    fflush(stdout);
}

static void print_answers(const demo *d)
{
    for (int i = 0; i < ANSWERS; i++)
        printf("\n\033[1m%s\033[0m \033[2m%s\033[0m\n%s\n", d->answers[i].label,
               d->answers[i].question, d->answers[i].text);
}

/* --- the batch --- */

static kvp_status ask(demo *d, int user, kvp_seq **out)
{
    kvp_sampling sampling = {.size = sizeof sampling, .temperature = 0.8f, .top_p = 0.95f,
                             .seed = 7};
    kvp_seq_options options = {.size = sizeof options, .tag = (uint64_t)user,
                               .max_tokens = d->max_tokens,
                               .sampling = user == USERS - 1 ? &sampling : NULL};
    kvp_chat_message messages[2] = {
        {"system", system_prompt, sizeof system_prompt - 1},
        {"user", users[user].question, strlen(users[user].question)}};
    kvp_status status = kvp_seq_create(d->pool, &options, out, NULL);
    if (status < 0) return status;
    return kvp_seq_append_chat(*out, messages, 2, sizeof messages[0], KVP_CHAT_ADD_REPLY);
}

static kvp_status add_everybody(demo *d)
{
    kvp_status status = KVP_OK;
    for (int i = 0; i < ANSWERS && status == KVP_OK; i++) {
        answer *a = &d->answers[i];
        int user = i < USERS ? i : USERS - 1;
        a->question = users[user].question;
        if (user == USERS - 1)
            snprintf(a->label, sizeof a->label, "%s %d", users[user].name, i - USERS + 2);
        else snprintf(a->label, sizeof a->label, "%s", users[user].name);
        if (i < USERS) {
            status = ask(d, user, &a->seq);
        } else {
            kvp_seq_options fork = {.size = sizeof fork, .tag = (uint64_t)i};
            status = kvp_seq_fork(d->answers[USERS - 1].seq, KVP_FORK_END, &fork, &a->seq, NULL);
        }
        if (status == KVP_OK) status = kvp_batch_add(d->batch, a->seq);
    }
    return status;
}

static void take_text(answer *a, const kvp_event *e)
{
    for (uint64_t i = 0; i < e->text_bytes && a->bytes < TEXT_MAX - 1; i++) {
        char c = e->text[i] == '\n' ? ' ' : e->text[i];
        if (c == ' ' && (a->bytes == 0 || a->text[a->bytes - 1] == ' ')) continue;
        a->text[a->bytes++] = c;
    }
}

static void take_events(demo *d)
{
    kvp_event e = {.size = sizeof e};
    while (kvp_next_event(d->batch, &e) == KVP_OK) {
        answer *a = &d->answers[e.tag];
        uint64_t now = now_ns();
        take_text(a, &e);
        if (e.kind == KVP_EVENT_TOKEN) {
            if (a->last_ns && d->n_gaps < GAPS_MAX)
                d->gaps_ms[d->n_gaps++] = (float)(now - a->last_ns) / 1e6f;
            a->last_ns = now;
        }
        if (e.kind == KVP_EVENT_ENDED) {
            a->first_ns = e.usage->first_token_ns;
            a->prompt = e.usage->prompt;
            a->generated = e.usage->generated;
        }
        if (!d->live) print_lines(a, e.kind == KVP_EVENT_ENDED);
    }
}

static kvp_status run(demo *d)
{
    if (d->live) draw(d, 0);
    for (;;) {
        kvp_status status = kvp_step(d->batch);
        take_events(d);
        if (d->live && (status == KVP_DONE || now_ns() - d->drawn_ns > 50000000)) draw(d, 1);
        if (status < 0 || status == KVP_DONE) return status;
        if (stop_asked) return KVP_DONE;
        if (status == KVP_AGAIN) kvp_wait(d->batch, 100);
    }
}

/* --- the table --- */

static int by_float(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static int by_first(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void table(demo *d, uint64_t wall_ns)
{
    kvp_pool_stats p = {.size = sizeof p};
    kvp_batch_stats b = {.size = sizeof b};
    uint64_t first[ANSWERS], generated = 0, reserved = 0;
    kvp_pool_get_stats(d->pool, &p);
    kvp_batch_get_stats(d->batch, &b);
    for (int i = 0; i < ANSWERS; i++) {
        const answer *a = &d->answers[i];
        first[i] = a->first_ns;
        generated += a->generated;
        reserved += (a->prompt + d->max_tokens + p.block_tokens - 1) / p.block_tokens;
    }
    qsort(first, ANSWERS, sizeof first[0], by_first);
    qsort(d->gaps_ms, d->n_gaps, sizeof d->gaps_ms[0], by_float);

    printf("\n%d users, %d answers, %" PRIu64 " tokens generated in %.1f s on %u threads\n\n",
           USERS, ANSWERS, generated, (double)wall_ns / 1e9, b.threads);
    printf("  tokens per second        %8.1f   all answers together, prompts included\n",
           (double)generated / ((double)wall_ns / 1e9));
    printf("  time to first token      %8.0f ms median, %.0f ms the last\n",
           (double)first[ANSWERS / 2] / 1e6, (double)first[ANSWERS - 1] / 1e6);
    if (d->n_gaps)
        printf("  gap between tokens       %8.1f ms median, %.1f ms at the 99th percentile\n",
               (double)d->gaps_ms[d->n_gaps / 2], (double)d->gaps_ms[d->n_gaps * 99 / 100]);
    printf("  KV blocks used           %8" PRIu64 "   of %u tokens, at the peak; %.1f MiB\n",
           p.used_peak, p.block_tokens, (double)(p.used_peak * p.block_bytes) / 1048576.0);
    printf("    reserved contiguously  %8" PRIu64 "   prompt and longest answer each; %.1f MiB\n",
           reserved, (double)(reserved * p.block_bytes) / 1048576.0);
    printf("  from the prefix cache    %8" PRIu64 "   of %" PRIu64 " prompt tokens\n",
           p.tokens_cached, p.tokens_prompt);
    printf("  blocks copied on write   %8" PRIu64 "   (%" PRIu64 " tokens)\n", p.blocks_copied,
           p.tokens_copied);
    printf("  preemptions              %8" PRIu64 "\n", p.preemptions);
}

int main(int argc, char **argv)
{
    static demo d;
    kvp_error err = {.size = sizeof err};
    struct sigaction action = {.sa_handler = on_signal};
    kvp_status status;
    uint64_t start, wall = 0;

    d.max_tokens = argc == 3 ? strtoull(argv[2], NULL, 10) : 64;
    if (argc < 2 || argc > 3 || d.max_tokens == 0) {
        fprintf(stderr, "usage: demo MODEL.gguf [TOKENS]\n");
        return 2;
    }
    d.live = can_redraw();
    sigaction(SIGINT, &action, NULL);
    printf("loading %s\n\n", argv[1]);
    fflush(stdout);
    if ((status = kvp_model_open(argv[1], NULL, &d.model, &err)) == KVP_OK &&
        (status = kvp_pool_create(d.model, NULL, &d.pool, &err)) == KVP_OK &&
        (status = kvp_batch_create(d.pool, NULL, &d.batch, &err)) == KVP_OK) {
        start = now_ns();
        status = add_everybody(&d);
        if (status == KVP_OK) status = run(&d);
        wall = now_ns() - start;
        if (status < 0) kvp_pool_last_error(d.pool, &err);
    }
    if (status < 0) {
        fprintf(stderr, "demo: %s\n", err.text);
    } else {
        if (d.live) print_answers(&d);
        if (!stop_asked) table(&d, wall);
    }
    for (int i = 0; i < ANSWERS; i++) kvp_seq_destroy(d.answers[i].seq);
    kvp_batch_destroy(d.batch);
    kvp_pool_destroy(d.pool);
    kvp_model_destroy(d.model);
    return status < 0;
}
