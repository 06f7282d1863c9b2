/* The terminal, the clock and Ctrl-C. Whatever is only for a person's eyes goes to stderr. */
#define _GNU_SOURCE
#include "tool.h"

#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

bool term_is_tty(FILE *f) { return isatty(fileno(f)) == 1; }

int term_width(void)
{
    struct winsize w = {0};
    if (ioctl(STDERR_FILENO, TIOCGWINSZ, &w) == 0 && w.ws_col >= 20) return w.ws_col;
    return 80;
}

uint64_t clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

const char *format_bytes(char buffer[32], uint64_t bytes)
{
    static const char units[] = "KMGTPE";
    double value = (double)bytes;
    int unit = -1;
    while (value >= 1024 && unit < 5) {
        value /= 1024;
        unit++;
    }
    if (unit < 0) snprintf(buffer, 32, "%u B", (unsigned)bytes);
    else snprintf(buffer, 32, "%.2f %ciB", value, units[unit]);
    return buffer;
}

/* --- the progress line --- */

static struct {
    uint64_t since, last;
    bool shown;
} progress;

void progress_show(const char *what, uint64_t done, uint64_t total)
{
    static const uint64_t patience = 500000000u, pace = 50000000u;
    char bar[64];
    uint64_t now = clock_ns();
    int room = term_width() - (int)strlen(what) - 10, filled;

    if (!term_is_tty(stderr) || total == 0) return;
    if (!progress.since) progress.since = now;
    if (now - progress.since < patience || now - progress.last < pace) return;
    progress.last = now;
    progress.shown = true;
    if (room > (int)sizeof bar - 1) room = (int)sizeof bar - 1;
    if (room < 1) room = 1;
    filled = (int)((double)done / (double)total * room);
    for (int i = 0; i < room; i++) bar[i] = i < filled ? '=' : ' ';
    bar[room] = 0;
    fprintf(stderr, "\r%s [%s] %3d %%", what, bar, (int)((double)done / (double)total * 100));
}

void progress_end(void)
{
    if (progress.shown) fprintf(stderr, "\r\033[K");
    memset(&progress, 0, sizeof progress);
}

/* --- Ctrl-C --- */

static volatile sig_atomic_t interrupt_flag;
static kvp_batch *volatile interrupt_batch;

static void on_interrupt(int signal_number)
{
    kvp_batch *batch = interrupt_batch;
    (void)signal_number;
    interrupt_flag = 1;
    if (batch) kvp_wakeup(batch);
}

void interrupt_setup(bool keep)
{
    struct sigaction action = {.sa_handler = on_interrupt};
    sigemptyset(&action.sa_mask);
    action.sa_flags = keep ? 0 : (int)SA_RESETHAND;
    sigaction(SIGINT, &action, NULL);
}

bool interrupted(void) { return interrupt_flag != 0; }
void interrupt_clear(void) { interrupt_flag = 0; }
void interrupt_wakes(kvp_batch *batch) { interrupt_batch = batch; }
