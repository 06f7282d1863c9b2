/*
 * `kvpage chat`: a conversation in one sequence. Each turn appends the new message alone; the
 * blocks of the turns before are still there (or found again by their prefix), and the line under
 * the answer says how many tokens that saved.
 */
#define _GNU_SOURCE
#include "tool.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

typedef struct chat {
    settings set;
    const char *system;
    bool quiet, tty;
    session session;
    kvp_seq *seq;
    uint64_t saved; /* tokens, over all turns */
    bool cancelled;
} chat;

static const char *dim(const chat *c) { return c->tty ? "\033[2m" : ""; }
static const char *bold(const chat *c) { return c->tty ? "\033[1m" : ""; }
static const char *plain(const chat *c) { return c->tty ? "\033[0m" : ""; }

static int new_sequence(chat *c)
{
    kvp_sampling sampling;
    kvp_string stops[LIST_MAX];
    kvp_error err = {.size = sizeof err};
    kvp_seq_options options = {.size = sizeof options, .max_tokens = c->set.max_tokens,
                               .context = c->set.context, .sampling = &sampling,
                               .stop_strings = stops, .n_stop_strings = c->set.stop.n,
                               .eos = c->set.ignore_eos ? KVP_EOS_IGNORE : KVP_EOS_STOP,
                               .event_mask = KVP_MASK_DEFAULT | KVP_MASK_PROGRESS};
    session_sampling(&c->set, &sampling);
    session_stops(&c->set, stops);
    kvp_seq_destroy(c->seq);
    c->seq = NULL;
    return kvp_seq_create(c->session.pool, &options, &c->seq, &err) < 0 ? fail_with(&err)
                                                                        : EXIT_DONE;
}

/* Only what is new: the conversation so far is in the sequence. */
static kvp_status append_turn(chat *c, const char *text, size_t bytes, kvp_error *err)
{
    kvp_seq_info info = {.size = sizeof info};
    kvp_chat_message messages[2];
    size_t n = 0;
    uint32_t flags = KVP_CHAT_ADD_REPLY;
    kvp_seq_get_info(c->seq, &info);
    if (info.length) flags |= KVP_CHAT_CONTINUE;
    else if (c->system)
        messages[n++] = (kvp_chat_message){"system", c->system, strlen(c->system)};
    messages[n++] = (kvp_chat_message){"user", text, bytes};
    return session_append_chat(&c->session, &c->set, c->seq, messages, n, flags, err);
}

/* What had not to be computed: kept by the sequence, or found again in the prefix cache. */
static uint64_t saved_tokens(const kvp_usage *u)
{
    uint64_t saved = u->cached + u->reattached;
    return saved < u->prompt ? saved : u->prompt;
}

static void report(chat *c, const kvp_usage *u, uint32_t ending)
{
    uint64_t saved = saved_tokens(u);
    double seconds = (double)(u->total_ns - u->first_token_ns) / 1e9;
    c->saved += saved;
    if (ending == KVP_END_CAPACITY || ending == KVP_END_LENGTH)
        fprintf(stderr, "%s[cut: %s]%s\n", dim(c),
                ending == KVP_END_CAPACITY ? "the KV cache is full" : "the limit is reached",
                plain(c));
    if (c->quiet) return;
    fprintf(stderr, "%s[%llu tokens so far, %llu reused from the turns before; ", dim(c),
            (unsigned long long)(u->prompt + u->generated), (unsigned long long)saved);
    fprintf(stderr, "first token after %.2f s, %.1f per second]%s\n",
            (double)u->first_token_ns / 1e9,
            u->generated > 1 && seconds > 0 ? (double)(u->generated - 1) / seconds : 0.0, plain(c));
}

static void take_events(chat *c)
{
    kvp_event e = {.size = sizeof e};
    while (kvp_next_event(c->session.batch, &e) == KVP_OK) {
        if (e.kind == KVP_EVENT_PROGRESS) {
            if (e.done < e.total) progress_show("reading", e.done, e.total);
            continue;
        }
        progress_end();
        fwrite(e.text, 1, (size_t)e.text_bytes, stdout);
        fflush(stdout);
        if (e.kind != KVP_EVENT_ENDED) continue;
        printf("\n");
        fflush(stdout);
        if (e.ending == KVP_END_FAILED) fail_line("%s", kvp_status_text(e.status));
        report(c, e.usage, e.ending);
    }
}

static int answer(chat *c)
{
    c->cancelled = false;
    for (;;) {
        kvp_status status = kvp_step(c->session.batch);
        take_events(c);
        if (status < 0) return fail_pool(&c->session);
        if (status == KVP_DONE) return EXIT_DONE;
        if (interrupted() && !c->cancelled) {
            c->cancelled = true;
            kvp_seq_cancel(c->seq);
            continue;
        }
        if (status == KVP_AGAIN || status == KVP_STALLED) kvp_wait(c->session.batch, -1);
    }
}

/* One turn. A full context begins a new conversation rather than end the session. */
static int turn(chat *c, const char *text, size_t bytes)
{
    kvp_error err = {.size = sizeof err};
    kvp_status status = append_turn(c, text, bytes, &err);
    if (status == KVP_ERR_CAPACITY || status == KVP_ERR_TOO_LARGE) {
        int code = new_sequence(c);
        if (code != EXIT_DONE) return code;
        fprintf(stderr, "%s[the context is full: a new conversation begins]%s\n", dim(c),
                plain(c));
        status = append_turn(c, text, bytes, &err);
        if (status == KVP_ERR_CAPACITY || status == KVP_ERR_TOO_LARGE) {
            fail_with(&err); /* this message alone is too long: the next may do */
            return EXIT_DONE;
        }
    }
    if (status < 0) return fail_with(&err);
    status = kvp_batch_add(c->session.batch, c->seq);
    return status < 0 ? fail_pool(&c->session) : answer(c);
}

/* A line without its end; -1 at the end of input. Ctrl-C gives an empty line. */
static ssize_t read_line(chat *c, char **line, size_t *room)
{
    ssize_t n;
    if (c->tty) {
        fprintf(stderr, "%s> %s", bold(c), plain(c));
        fflush(stderr);
    }
    errno = 0;
    n = getline(line, room, stdin);
    if (n < 0 && errno == EINTR) {
        clearerr(stdin);
        fprintf(stderr, "\n%s[Ctrl-D ends]%s\n", dim(c), plain(c));
        return 0;
    }
    while (n > 0 && ((*line)[n - 1] == '\n' || (*line)[n - 1] == '\r')) n--;
    return n;
}

static int converse(chat *c)
{
    char *line = NULL;
    size_t room = 0;
    ssize_t n;
    int code = new_sequence(c);
    if (c->tty && code == EXIT_DONE)
        fprintf(stderr, "%s%s, context %llu. /new starts afresh, Ctrl-C stops an answer, Ctrl-D "
                        "ends.%s\n",
                dim(c), c->session.info.name[0] ? c->session.info.name : "model",
                (unsigned long long)c->session.context, plain(c));
    while (code == EXIT_DONE) {
        interrupt_clear();
        n = read_line(c, &line, &room);
        if (n < 0) break;
        interrupt_clear();
        if (n == 4 && !memcmp(line, "/new", 4)) code = new_sequence(c);
        else if (n > 0) code = turn(c, line, (size_t)n);
    }
    free(line);
    if (code == EXIT_DONE && !c->quiet)
        fprintf(stderr, "%s%s[%llu tokens reused in all]%s\n", c->tty ? "\n" : "", dim(c),
                (unsigned long long)c->saved, plain(c));
    return code;
}

int command_chat(int argc, char **argv)
{
    static chat c;
    option engine[ENGINE_OPTIONS], sampling[SAMPLING_OPTIONS];
    const option own[] = {
        {.name = "system", .kind = OPTION_TEXT, .value = &c.system, .argument = "TEXT",
         .help = "system message that the conversation begins with"},
        chat_format_option(&c.set),
        {.name = "quiet", .kind = OPTION_FLAG, .value = &c.quiet,
         .help = "no figures under the answers"},
        {.name = NULL}};
    const option_group groups[] = {
        {"options", own}, {"sampling", sampling}, {"engine", engine}, {NULL, NULL}};
    const usage u = {"chat MODEL",
                     "A conversation: one message a line, from the keyboard or a pipe. Ctrl-C "
                     "stops an\nanswer, Ctrl-D ends. Answers go to standard output, all else to "
                     "standard error.\n",
                     groups, 1, 1};
    arguments args;
    int code;

    settings_engine(&c.set, engine);
    settings_sampling(&c.set, sampling);
    if (!options_read(&u, argc, argv, &args, &code)) return code;
    c.tty = term_is_tty(stdin) && term_is_tty(stderr);
    interrupt_setup(true);
    code = session_open(&c.session, args.items[0], &c.set, 1);
    if (code == EXIT_DONE &&
        !session_can_chat(&c.session, &c.set, args.items[0], "`kvpage run` for plain text"))
        code = EXIT_FAILED;
    if (code == EXIT_DONE) code = converse(&c);
    kvp_seq_destroy(c.seq);
    session_close(&c.session);
    return code;
}
