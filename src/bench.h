/*
 * What the files of `kvpage bench` share: the cases, what a run of one gives, and the report.
 *
 *     bench.c        the command line, which cases fit, the order of things, text and JSON
 *     bench_run.c    one run of one case
 *     bench_html.c   the page
 *     machine.c      the machine's name, its memory, its read bandwidth
 */
#ifndef KVPAGE_BENCH_H
#define KVPAGE_BENCH_H

#include "tool.h"

enum { BENCH_REPEATS_MAX = 99, BENCH_SEQUENCES_MAX = 33, BENCH_CASES = 9, BENCH_MEASURES_MAX = 2 };

/* --- machine.c --- */

/* The CPU's name as the system tells it, else "unknown CPU". */
void machine_cpu_name(char *out, size_t size);
/* What a process could still take: of the system and of its control group. 0 if unknown. */
uint64_t machine_memory_available(void);
/* Bytes per second that `threads` threads read from memory, the best of a few passes; 0 if it could
 * not be measured. */
double machine_read_bandwidth(uint64_t threads);

/* --- cases and results --- */

typedef enum bench_kind {
    BENCH_PREFILL,  /* a prompt to its first token */
    BENCH_DECODE,   /* steps of sequences whose prompts are there */
    BENCH_OVERHEAD, /* the same; what of the time the library itself takes */
    BENCH_MIXED,    /* sequences that decode while a long prompt comes in */
    BENCH_START     /* opening the file to the first token */
} bench_kind;

typedef struct bench_case {
    const char *name, *title;
    bench_kind kind;
    uint64_t sequences;
    uint64_t prompt; /* of each */
    uint64_t steps;  /* that are timed */
    uint64_t longest, shortest; /* a length that gives way to the model's context: that of the long
                                   prompt if mixed, else the prompt's; 0: none does */
    bool shared;     /* one prompt for all, and a token of their own each */
} bench_case;

/* One figure of a case, a value for each repeat. */
typedef struct bench_measure {
    const char *name;  /* in JSON */
    const char *label; /* what it is, where a case has two */
    const char *unit;
    bool less_is_better;
    double limit;      /* what the memory's bandwidth allows, in the same unit; 0: not known */
    double values[BENCH_REPEATS_MAX];
    uint64_t n;
} bench_measure;

/* The time between two tokens of one sequence. */
typedef struct bench_gap {
    double at_ms, gap_ms; /* when the second came, from the arrival of the long prompt */
} bench_gap;

typedef struct bench_result {
    const bench_case *spec;
    uint64_t sequences, prompt, steps, long_prompt; /* as they were run */
    bool wanted, fits, done;
    char note[160]; /* why it was left out, or what is not as the title says */
    bench_measure measures[BENCH_MEASURES_MAX];
    size_t n_measures;
    double prompt_rate, first_ms; /* of reading the prompts, tokens per second; 0: not measured */
    uint64_t blocks_used;
} bench_result;

typedef struct bench_gaps {
    bench_gap *items;
    size_t n, capacity;
    double end_ms, p99_ms; /* when the long prompt had been read */
} bench_gaps;

typedef struct bench {
    settings set;
    uint64_t repeats;
    bool json, list;
    const char *html;
    text_list names;

    const char *path;
    session session;
    kvp_model_info info;
    uint64_t threads, context, block_bytes, block_tokens;
    uint64_t weight_bytes; /* that a step reads */
    double bandwidth;      /* of the CPU's memory; 0: not known */
    bool on_cpu;
    char device[32], machine[128], date[32];
    bench_result results[BENCH_CASES];

    /* A run: the prompts that stay from one repeat to the next, and the sequences of this one. */
    kvp_seq *prompts[BENCH_SEQUENCES_MAX], *seqs[BENCH_SEQUENCES_MAX];
    uint64_t given[BENCH_SEQUENCES_MAX];   /* tokens */
    uint64_t given_ns[BENCH_SEQUENCES_MAX]; /* when the last one came */
    bench_gaps *recording; /* NULL: nobody wants the gaps */
    uint64_t recording_from_ns;
    uint64_t salt, random;
    char label[40];        /* of the progress line */
    uint64_t rows_from, rows_expected;
    bench_gaps gaps;       /* of the mixed case's last repeat */
} bench;

extern const bench_case bench_cases[BENCH_CASES];

double bench_median(const bench_measure *m);
double bench_least(const bench_measure *m);
double bench_most(const bench_measure *m);
/* Of the limit that was reached, 1 for all of it; 0 without a limit. */
double bench_share(const bench_measure *m);
/* "1,702", "31.4", "0.52": into the caller's buffer, which is returned. */
const char *bench_number(char buffer[32], double value);
const char *bench_count(char buffer[32], uint64_t value); /* "512", "8,000" */
const char *bench_percent(char buffer[32], double share); /* "92 %", "0.4 %" */
/* Whether some share is above 1: then a line must say how that can be. */
bool bench_passes_limit(const bench *b);
const char *bench_model_name(const bench *b);

/* --- bench_run.c --- */

enum { BENCH_WARM_STEPS = 2, BENCH_MIXED_AROUND = 16 };

/* Tokens of KV a case takes at once, over all its sequences. */
uint64_t bench_case_tokens(const bench_result *r, uint64_t block);
/* The longest that one sequence of it becomes. */
uint64_t bench_case_length(const bench_result *r);

/* Makes pool and batch for so many blocks. EXIT_DONE or the code to leave with. */
int bench_open_pool(bench *b, uint64_t blocks);
/* Runs a case `b->repeats` times and fills the result. As above. */
int bench_run_case(bench *b, bench_result *r);

/* --- bench_html.c --- */

/* False when the page could not be written. */
bool bench_html(const bench *b, FILE *out);

#endif
