/*
 * kvpage inside somebody else's event loop: one thread, one epoll set, in it the batch's
 * descriptor, a timer and a client's socket. None of the three ever waits for another.
 *
 * The protocol is one line per request, answered by lines "ID text" as the text appears and
 * "ID ." at its end. To be runnable alone, the program is its own client: a child process on the
 * other end of a socketpair asks three questions and prints what comes back.
 *
 *     epoll_loop model.gguf
 */
#define _GNU_SOURCE
#include <kvpage.h>

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_REQUESTS = 64, LINE = 1024, OUTPUT = 1 << 16 };

typedef struct server {
    kvp_model *model;
    kvp_pool *pool;
    kvp_batch *batch;
    kvp_seq *requests[MAX_REQUESTS]; /* by tag; NULL: free */
    uint64_t open;                   /* of these */
    int epoll, timer, client;
    char line[LINE];                 /* what the client has sent of its next line */
    size_t line_bytes;
    char output[OUTPUT];             /* what the client has not taken yet */
    size_t output_bytes;
    int reading_done, gone;          /* the client sends no more; takes no more */
    int ticks;
} server;

static int watch(server *s, int fd, uint32_t events, int op)
{
    struct epoll_event e = {.events = events, .data = {.fd = fd}};
    return epoll_ctl(s->epoll, op, fd, &e);
}

/* --- the client's side of the loop --- */

/* The client went away: nobody is there to answer, so nothing needs to be computed either. The
 * endings of the cancelled sequences come like all others. */
static void client_gone(server *s)
{
    s->reading_done = s->gone = 1;
    s->output_bytes = 0;
    watch(s, s->client, 0, EPOLL_CTL_DEL);
    for (int i = 0; i < MAX_REQUESTS; i++)
        if (s->requests[i]) kvp_seq_cancel(s->requests[i]);
}

static void flush_client(server *s)
{
    while (!s->gone && s->output_bytes > 0) {
        ssize_t n = send(s->client, s->output, s->output_bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && errno == EAGAIN) break;
        if (n < 0) {
            client_gone(s);
            return;
        }
        s->output_bytes -= (size_t)n;
        memmove(s->output, s->output + n, s->output_bytes);
    }
    if (!s->gone)
        watch(s, s->client,
              (s->reading_done ? 0u : EPOLLIN) | (s->output_bytes ? EPOLLOUT : 0u), EPOLL_CTL_MOD);
}

static void reply(server *s, uint64_t id, const char *text, size_t bytes)
{
    char head[24];
    int n = snprintf(head, sizeof head, "%" PRIu64 " ", id);
    if (s->gone) return;
    if (s->output_bytes + (size_t)n + bytes + 1 > OUTPUT) { /* a client that never reads */
        client_gone(s);
        return;
    }
    memcpy(s->output + s->output_bytes, head, (size_t)n);
    s->output_bytes += (size_t)n;
    for (size_t i = 0; i < bytes; i++)
        s->output[s->output_bytes++] = text[i] == '\n' ? ' ' : text[i];
    s->output[s->output_bytes++] = '\n';
}

static void start_request(server *s, const char *text, size_t bytes)
{
    kvp_seq_options options = {.size = sizeof options, .max_tokens = 40};
    kvp_chat_message message = {.role = "user", .text = text, .text_bytes = bytes};
    kvp_error err = {.size = sizeof err};
    kvp_status status;
    uint64_t id = 0;

    while (id < MAX_REQUESTS && s->requests[id]) id++;
    if (id == MAX_REQUESTS) return;
    options.tag = id;
    status = kvp_seq_create(s->pool, &options, &s->requests[id], &err);
    if (status == KVP_OK) {
        status = kvp_seq_append_chat(s->requests[id], &message, 1, sizeof message,
                                     KVP_CHAT_ADD_REPLY);
        if (status == KVP_OK) status = kvp_batch_add(s->batch, s->requests[id]);
        if (status != KVP_OK) kvp_pool_last_error(s->pool, &err);
    }
    if (status == KVP_OK) {
        s->open++;
    } else {
        reply(s, id, err.text, strlen(err.text));
        reply(s, id, ".", 1);
        kvp_seq_destroy(s->requests[id]);
        s->requests[id] = NULL;
    }
}

static void read_client(server *s)
{
    ssize_t n = recv(s->client, s->line + s->line_bytes, LINE - s->line_bytes, MSG_DONTWAIT);
    if (n < 0) return;
    s->line_bytes += (size_t)n;
    for (char *end; (end = memchr(s->line, '\n', s->line_bytes)) != NULL;) {
        size_t used = (size_t)(end - s->line);
        start_request(s, s->line, used);
        s->line_bytes -= used + 1;
        memmove(s->line, end + 1, s->line_bytes);
    }
    if (n == 0 || s->line_bytes == LINE) s->reading_done = 1;
}

/* --- kvpage's side --- */

static void take_events(server *s)
{
    kvp_event event = {.size = sizeof event};
    while (kvp_next_event(s->batch, &event) == KVP_OK) {
        if (event.text_bytes) reply(s, event.tag, event.text, (size_t)event.text_bytes);
        if (event.kind == KVP_EVENT_ENDED) {
            reply(s, event.tag, ".", 1);
            kvp_seq_destroy(event.seq);
            s->requests[event.tag] = NULL;
            s->open--;
        }
    }
}

static int serve(server *s)
{
    int32_t fd;
    if (kvp_batch_fd(s->batch, &fd) < 0) return 1;
    watch(s, fd, EPOLLIN, EPOLL_CTL_ADD);
    watch(s, s->timer, EPOLLIN, EPOLL_CTL_ADD);
    watch(s, s->client, EPOLLIN, EPOLL_CTL_ADD);

    while (!s->reading_done || s->open || s->output_bytes) {
        struct epoll_event ready[8];
        int32_t timeout;

        /* Right whatever kvp_step returned: the fd is readable, or the timeout 0, while it has
         * more to do. It never waits. */
        if (kvp_step(s->batch) < 0) return 1;
        take_events(s);
        flush_client(s);
        kvp_batch_timeout_ms(s->batch, &timeout);

        int n = epoll_wait(s->epoll, ready, 8, timeout);
        for (int i = 0; i < n; i++) {
            uint64_t expired;
            if (ready[i].data.fd == s->timer && read(s->timer, &expired, sizeof expired) > 0)
                s->ticks += (int)expired;
            if (ready[i].data.fd != s->client || s->gone) continue;
            if (ready[i].events & EPOLLIN && !s->reading_done) read_client(s);
            else if (ready[i].events & (EPOLLHUP | EPOLLERR)) client_gone(s);
        }
    }
    return 0;
}

/* --- the client, in a process of its own --- */

static int ask(int socket)
{
    static const char questions[] = "What is the capital of France?\n"
                                    "Name three colours.\n"
                                    "Why is the sky blue?\n";
    char buffer[512];
    ssize_t n;
    if (send(socket, questions, sizeof questions - 1, 0) < 0) return 1;
    shutdown(socket, SHUT_WR);
    while ((n = recv(socket, buffer, sizeof buffer, 0)) > 0) fwrite(buffer, 1, (size_t)n, stdout);
    fflush(stdout);
    return n < 0;
}

int main(int argc, char **argv)
{
    static server s;
    kvp_error err = {.size = sizeof err};
    struct itimerspec every = {{0, 100000000}, {0, 100000000}};
    kvp_status status;
    int pair[2], failed;
    pid_t child;

    if (argc != 2) {
        fprintf(stderr, "usage: epoll_loop MODEL.gguf\n");
        return 2;
    }
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair)) return 1;
    child = fork(); /* before the library makes threads, as every forking program should */
    if (child == 0) {
        close(pair[0]);
        _exit(ask(pair[1]));
    }
    close(pair[1]);
    s.client = pair[0];
    s.epoll = epoll_create1(EPOLL_CLOEXEC);
    s.timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    timerfd_settime(s.timer, 0, &every, NULL);

    if ((status = kvp_model_open(argv[1], NULL, &s.model, &err)) < 0 ||
        (status = kvp_pool_create(s.model, NULL, &s.pool, &err)) < 0 ||
        (status = kvp_batch_create(s.pool, NULL, &s.batch, &err)) < 0) {
        fprintf(stderr, "epoll_loop: %s\n", err.text);
        failed = 1;
    } else {
        failed = serve(&s);
    }
    close(s.client);
    waitpid(child, NULL, 0);
    if (!failed) printf("the timer fired %d times meanwhile\n", s.ticks);

    for (int i = 0; i < MAX_REQUESTS; i++) kvp_seq_destroy(s.requests[i]);
    kvp_batch_destroy(s.batch);
    kvp_pool_destroy(s.pool);
    kvp_model_destroy(s.model);
    close(s.timer);
    close(s.epoll);
    return failed;
}
