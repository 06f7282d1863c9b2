/*
 * `kvpage bench`: the project's benchmark on a file of the user's. Reads the line, sees which
 * cases fit the model's context and the memory, runs them, and tells what came out: a table, JSON,
 * a page.
 *
 * Each figure is the median of the repeats, with the least and the most beside it, and with what
 * the memory would allow: decoding must read every weight and the KV of every sequence once per
 * step, so bytes over the measured read bandwidth bound it. A model that fits the CPU's cache may
 * pass it.
 */
#define _GNU_SOURCE
#include "bench.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

const bench_case bench_cases[BENCH_CASES] = {
    {"prefill-512", "reading a prompt of 512 tokens", BENCH_PREFILL, 1, 512, 1, 0, 0, false},
    {"decode", "generating, 1 sequence", BENCH_DECODE, 1, 16, 48, 0, 0, false},
    {"deep", "generating behind 7,900 tokens", BENCH_DECODE, 1, 0, 32, 7900, 128, false},
    {"16x128", "16 sequences, own prompts of 128", BENCH_DECODE, 16, 128, 24, 0, 0, false},
    {"32-shared", "32 sequences over one prompt of 2,048", BENCH_DECODE, 32, 2048, 24, 0, 0, true},
    {"32-own", "32 sequences, own prompts of 512", BENCH_DECODE, 32, 512, 24, 0, 0, false},
    {"mixed", "8 sequences, and a prompt of 8,000 comes in", BENCH_MIXED, 8, 128, 512, 8000, 256,
     false},
    {"overhead", "time outside the kernels, 32 sequences", BENCH_OVERHEAD, 32, 64, 32, 0, 0, false},
    {"start", "opening the file to first token, prompt of 64", BENCH_START, 1, 64, 1, 0, 0,
     false},
};

/* --- figures --- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_median(const bench_measure *m)
{
    double values[BENCH_REPEATS_MAX];
    memcpy(values, m->values, sizeof values);
    qsort(values, (size_t)m->n, sizeof values[0], by_value);
    return m->n % 2 ? values[m->n / 2] : (values[m->n / 2 - 1] + values[m->n / 2]) / 2;
}

double bench_least(const bench_measure *m)
{
    double least = m->values[0];
    for (uint64_t i = 1; i < m->n; i++)
        if (m->values[i] < least) least = m->values[i];
    return least;
}

double bench_most(const bench_measure *m)
{
    double most = m->values[0];
    for (uint64_t i = 1; i < m->n; i++)
        if (m->values[i] > most) most = m->values[i];
    return most;
}

double bench_share(const bench_measure *m)
{
    double median = bench_median(m);
    if (m->limit <= 0 || median <= 0) return 0;
    return m->less_is_better ? m->limit / median : median / m->limit;
}

const char *bench_count(char buffer[32], uint64_t value)
{
    char digits[32], *out = buffer;
    size_t n = (size_t)snprintf(digits, sizeof digits, "%llu", (unsigned long long)value);
    for (size_t i = 0; i < n; i++) {
        if (i && (n - i) % 3 == 0) *out++ = ',';
        *out++ = digits[i];
    }
    *out = 0;
    return buffer;
}

const char *bench_number(char buffer[32], double value)
{
    if (value >= 999.5 && value < 1e18) return bench_count(buffer, (uint64_t)(value + 0.5));
    snprintf(buffer, 32, value >= 9.95 ? "%.1f" : "%.2f", value);
    return buffer;
}

const char *bench_percent(char buffer[32], double share)
{
    snprintf(buffer, 32, share >= 0.095 ? "%.0f %%" : "%.1f %%", share * 100);
    return buffer;
}

const char *bench_model_name(const bench *b)
{
    const char *slash = strrchr(b->path, '/');
    return b->info.name[0] ? b->info.name : slash ? slash + 1 : b->path;
}

/* --- which cases --- */

static void leave_out(bench_result *r, const char *format, const char *a, const char *b)
{
    r->fits = false;
    snprintf(r->note, sizeof r->note, format, a, b);
}

/* A length that may give way becomes what the context allows. */
static void cut_to_context(const bench *b, bench_result *r)
{
    const bench_case *spec = r->spec;
    uint64_t *length = spec->kind == BENCH_MIXED ? &r->long_prompt : &r->prompt, over;
    char now[32];
    if (spec->kind == BENCH_MIXED && r->prompt + 1 + r->steps > b->context)
        r->steps = b->context > r->prompt + 64 ? b->context - r->prompt - 1 : r->steps;
    if (!spec->longest) return;
    *length = spec->longest;
    over = bench_case_length(r) > b->context ? bench_case_length(r) - b->context : 0;
    if (!over || over + spec->shortest > *length) return;
    *length -= over;
    snprintf(r->note, sizeof r->note, "%s tokens here, which is what the context allows",
             bench_count(now, *length));
}

static void check_context(const bench *b, bench_result *r)
{
    char needed[32], context[32];
    if (bench_case_length(r) <= b->context) return;
    leave_out(r, "needs a context of %s tokens; there are %s",
              bench_count(needed, bench_case_length(r)),
              bench_count(context, b->context));
}

static uint64_t blocks_of(const bench *b, const bench_result *r)
{
    return bench_case_tokens(r, b->block_tokens) / b->block_tokens + 1;
}

/* On the CPU the pool commits memory as blocks are used: what is left of the system must hold them.
 * A GPU says itself what it lacks. */
static void check_memory(const bench *b, bench_result *r)
{
    uint64_t needed = blocks_of(b, r) * b->block_bytes;
    uint64_t available = b->on_cpu ? machine_memory_available() : 0;
    char a[32], c[32];
    if (b->set.cache_bytes && needed > b->set.cache_bytes)
        leave_out(r, "needs %s of KV cache; --cache allows %s", format_bytes(a, needed),
                  format_bytes(c, b->set.cache_bytes));
    else if (available && needed > available - available / 8)
        leave_out(r, "needs %s of KV cache; %s of memory are left", format_bytes(a, needed),
                  format_bytes(c, available));
}

static bool is_wanted(const bench *b, const char *name)
{
    for (size_t i = 0; i < b->names.n; i++)
        if (!strcmp(b->names.items[i], name)) return true;
    return b->names.n == 0;
}

static void choose_cases(bench *b)
{
    for (size_t i = 0; i < BENCH_CASES; i++) {
        bench_result *r = &b->results[i];
        const bench_case *spec = &bench_cases[i];
        *r = (bench_result){.spec = spec, .sequences = spec->sequences, .prompt = spec->prompt,
                            .steps = spec->steps, .fits = true};
        r->wanted = is_wanted(b, spec->name);
        cut_to_context(b, r);
        check_context(b, r);
        if (r->fits) check_memory(b, r);
    }
}

bool bench_passes_limit(const bench *b)
{
    for (size_t i = 0; i < BENCH_CASES; i++)
        for (size_t k = 0; b->results[i].done && k < b->results[i].n_measures; k++)
            if (bench_share(&b->results[i].measures[k]) > 1) return true;
    return false;
}

static int list_cases(void)
{
    for (size_t i = 0; i < BENCH_CASES; i++)
        printf("%-12s %s\n", bench_cases[i].name, bench_cases[i].title);
    return EXIT_DONE;
}

/* --- text --- */

static void print_head(const bench *b)
{
    char gb[32];
    printf("%s, %s", bench_model_name(b), b->machine);
    if (b->on_cpu)
        printf(", %s, %u thread%s", cpu_level_name(b->info.cpu_level), (unsigned)b->threads,
               b->threads == 1 ? "" : "s");
    if (b->bandwidth > 0) printf(", memory reads %s GB/s", bench_number(gb, b->bandwidth / 1e9));
    printf("\nmedians of %u\n\n", (unsigned)b->repeats);
    printf("%-12s %10s %-5s %19s %9s %6s\n", "case", "median", "", "least to most", "limit",
           "share");
    fflush(stdout);
}

static void print_measure(const bench_result *r, const bench_measure *m)
{
    char median[32], least[32], most[32], spread[72], limit[32] = "-", share[32] = "-";
    snprintf(spread, sizeof spread, "%s to %s", bench_number(least, bench_least(m)),
             bench_number(most, bench_most(m)));
    if (m->limit > 0) {
        bench_number(limit, m->limit);
        bench_percent(share, bench_share(m));
    }
    printf("%-12s %10s %-5s %19s %9s %6s  %s\n", m == r->measures ? r->spec->name : "",
           bench_number(median, bench_median(m)), m->unit, spread, limit, share,
           m->label ? m->label : r->spec->title);
}

static void print_result(const bench_result *r)
{
    if (!r->fits) {
        printf("%-12s left out: %s\n", r->spec->name, r->note);
    } else {
        for (size_t i = 0; i < r->n_measures; i++) print_measure(r, &r->measures[i]);
        if (r->note[0]) printf("%-12s (%s)\n", "", r->note);
    }
    fflush(stdout);
}

/* --- JSON --- */

static void json_measure(json *j, const bench_measure *m)
{
    json_open(j, NULL, '{');
    json_string(j, "name", m->name);
    json_string(j, "unit", m->unit);
    json_real(j, "median", bench_median(m));
    json_real(j, "least", bench_least(m));
    json_real(j, "most", bench_most(m));
    if (m->limit > 0) {
        json_real(j, "limit", m->limit);
        json_real(j, "share", bench_share(m));
    }
    json_open(j, "runs", '[');
    for (uint64_t i = 0; i < m->n; i++) json_real(j, NULL, m->values[i]);
    json_close(j, ']');
    json_close(j, '}');
}

static void json_figures(json *j, const bench_result *r)
{
    if (r->prompt_rate > 0) json_real(j, "prompt_tokens_per_second", r->prompt_rate);
    if (r->spec->kind == BENCH_DECODE)
        json_real(j, "generated_tokens_per_second", bench_median(&r->measures[0]));
    if (r->first_ms > 0) json_real(j, "first_token_ms", r->first_ms);
    json_uint(j, "blocks_used", r->blocks_used);
    json_open(j, "measures", '[');
    for (size_t i = 0; i < r->n_measures; i++) json_measure(j, &r->measures[i]);
    json_close(j, ']');
}

static void json_result(json *j, const bench_result *r)
{
    json_open(j, NULL, '{');
    json_string(j, "case", r->spec->name);
    json_string(j, "load", r->spec->title);
    if (!r->fits) {
        json_string(j, "left_out", r->note);
    } else {
        if (r->note[0]) json_string(j, "note", r->note);
        json_uint(j, "sequences", r->sequences);
        json_uint(j, "prompt_tokens", r->prompt);
        if (r->spec->kind == BENCH_MIXED) json_uint(j, "long_prompt_tokens", r->long_prompt);
        else json_uint(j, "generated_tokens", r->steps);
        json_bool(j, "shared_prompt", r->spec->shared);
        json_figures(j, r);
    }
    json_close(j, '}');
}

static void print_json(const bench *b)
{
    json j = {.out = stdout, .first = true};
    uint32_t v = kvp_version();
    char version[40];
    snprintf(version, sizeof version, "%u.%u.%u", v >> 16, v >> 8 & 0xff, v & 0xff);
    json_open(&j, NULL, '{');
    json_string(&j, "model", bench_model_name(b));
    json_string(&j, "version", version);
    json_string(&j, "date", b->date);
    json_string(&j, "device", b->device);
    json_string(&j, b->on_cpu ? "cpu" : "gpu", b->machine);
    if (b->on_cpu) json_string(&j, "cpu_level", cpu_level_name(b->info.cpu_level));
    json_string(&j, "activations", activations_name(b->info.activations));
    json_string(&j, "kv", kv_format_name(b->set.kv));
    if (b->on_cpu) json_uint(&j, "threads", b->threads);
    json_uint(&j, "repeats", b->repeats);
    json_uint(&j, "weight_bytes_per_step", b->weight_bytes);
    json_uint(&j, "kv_bytes_per_token", b->info.kv_bytes_per_token *
                                            (b->set.kv == KVP_KV_F32 ? 2 : 1));
    if (b->bandwidth > 0) json_real(&j, "read_bytes_per_second", b->bandwidth);
    json_open(&j, "loads", '[');
    for (size_t i = 0; i < BENCH_CASES; i++)
        if (b->results[i].wanted) json_result(&j, &b->results[i]);
    json_close(&j, ']');
    json_close(&j, '}');
    json_line(&j);
}

/* --- the page's file --- */

/* Tried before anything is measured, and written when all is. What stood there stays until then; a
 * file that was not there is not left behind by a run that ends early, however it ends. */
static int page_open(const bench *b, FILE **out)
{
    int fd;
    if (!b->html) return EXIT_DONE;
    fd = open(b->html, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd >= 0) {
        close(fd);
        unlink(b->html);
        return EXIT_DONE;
    }
    fd = open(b->html, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return fail_line("%s: %s", b->html, strerror(errno));
    *out = fdopen(fd, "w");
    if (*out) return EXIT_DONE;
    close(fd);
    return fail_line("%s: no memory", b->html);
}

/* Closes `f`, which is NULL where the file is still to be made. */
static int page_write(const bench *b, FILE *f)
{
    struct stat st;
    bool good;
    if (!f) f = fopen(b->html, "w");
    if (!f) return fail_line("%s: %s", b->html, strerror(errno));
    good = fstat(fileno(f), &st) == 0 &&
           (!S_ISREG(st.st_mode) || ftruncate(fileno(f), 0) == 0);
    good = good && bench_html(b, f);
    good = fclose(f) == 0 && good;
    return good ? EXIT_DONE : fail_line("%s could not be written", b->html);
}

/* --- the order of things --- */

/* Weights that a step reads: of an embedding that is not the output matrix too, a row per token. */
static uint64_t weights_of_a_step(const bench *b)
{
    uint64_t bytes = b->info.packed_bytes;
    kvp_tensor_info t = {.size = sizeof t};
    for (uint64_t i = 0; !b->info.tied_embeddings && i < b->info.tensors; i++)
        if (kvp_model_get_tensor(b->session.model, i, &t) == KVP_OK &&
            !strcmp(t.name, "token_embd.weight") && t.bytes < bytes)
            return bytes - t.bytes;
    return bytes;
}

static int look_at_model(bench *b)
{
    kvp_error err = {.size = sizeof err};
    kvp_plan_options options = {.size = sizeof options, .k_format = b->set.kv,
                                .v_format = b->set.kv, .block_tokens = (uint32_t)b->set.block};
    kvp_plan_result plan = {.size = sizeof plan};
    if (kvp_plan(b->session.model, &options, &plan, &err) < 0) return fail_with(&err);
    b->info = b->session.info;
    b->context = b->info.context;
    if (b->set.context && b->set.context < b->context) b->context = b->set.context;
    b->block_bytes = plan.block_bytes;
    b->block_tokens = plan.block_tokens;
    b->weight_bytes = weights_of_a_step(b);
    return EXIT_DONE;
}

static void look_at_machine(bench *b)
{
    kvp_device_info device = {.size = sizeof device};
    time_t now = time(NULL);
    struct tm utc;
    if (gmtime_r(&now, &utc)) strftime(b->date, sizeof b->date, "%Y-%m-%d %H:%M UTC", &utc);
    device_named(b->set.device, &device);
    snprintf(b->device, sizeof b->device, "%s", device.name);
    b->on_cpu = !strcmp(device.name, "cpu");
    if (!b->on_cpu) {
        snprintf(b->machine, sizeof b->machine, "%s", device.description);
        return;
    }
    b->threads = b->set.threads ? b->set.threads : device.threads;
    if (!b->threads) b->threads = 1;
    machine_cpu_name(b->machine, sizeof b->machine);
    b->bandwidth = machine_read_bandwidth(b->threads);
}

static bool runs(const bench_result *r, bool start)
{
    return r->wanted && r->fits && (r->spec->kind == BENCH_START) == start;
}

/* One pool for all cases that use one. */
static int open_largest_pool(bench *b)
{
    uint64_t blocks = 0;
    for (size_t i = 0; i < BENCH_CASES; i++)
        if (runs(&b->results[i], false) && blocks_of(b, &b->results[i]) > blocks)
            blocks = blocks_of(b, &b->results[i]);
    return blocks ? bench_open_pool(b, blocks) : EXIT_DONE;
}

/* The cases with a pool in their order, then the one that opens the file itself. */
static int run_cases(bench *b, bool start)
{
    int code = EXIT_DONE;
    for (size_t i = 0; i < BENCH_CASES && code == EXIT_DONE; i++) {
        bench_result *r = &b->results[i];
        if (!r->wanted || (r->spec->kind == BENCH_START) != start) continue;
        if (interrupted()) return EXIT_INTERRUPTED;
        if (runs(r, start)) code = bench_run_case(b, r);
        progress_end();
        if (code == EXIT_DONE && !b->json) print_result(r);
    }
    return code;
}

static int measure_all(bench *b)
{
    int code = session_open_model(&b->session, b->path, &b->set);
    if (code == EXIT_DONE) code = look_at_model(b);
    if (code != EXIT_DONE) return code;
    look_at_machine(b);
    if (interrupted()) return EXIT_INTERRUPTED;
    choose_cases(b);
    if (!b->json) print_head(b);
    code = open_largest_pool(b);
    if (code == EXIT_DONE) code = run_cases(b, false);
    session_close(&b->session);
    if (code == EXIT_DONE) code = run_cases(b, true);
    if (code == EXIT_DONE && !b->json && bench_passes_limit(b))
        printf("\nMore than 100 %%: the model stayed in the CPU's cache in part, or something else "
               "ran\nwhile the bandwidth was measured.\n");
    return code;
}

static void drop_everything(bench *b)
{
    for (size_t i = 0; i < BENCH_SEQUENCES_MAX; i++) {
        kvp_seq_destroy(b->seqs[i]);
        kvp_seq_destroy(b->prompts[i]);
    }
    session_close(&b->session);
    free(b->gaps.items);
}

static int bench_model(bench *b)
{
    FILE *page = NULL;
    int code = page_open(b, &page);
    if (code != EXIT_DONE) return code;
    code = measure_all(b);
    if (code == EXIT_DONE && b->json) print_json(b);
    if (code == EXIT_DONE && b->html) code = page_write(b, page);
    else if (page) fclose(page);
    drop_everything(b);
    return code;
}

int command_bench(int argc, char **argv)
{
    static bench b;
    choice names[BENCH_CASES + 1] = {{NULL, 0}};
    option engine[ENGINE_OPTIONS];
    const option own[] = {
        {.name = "case", .kind = OPTION_LIST, .value = &b.names, .argument = "NAME",
         .help = "only this case; may be given several times", .choices = names},
        {.name = "list", .kind = OPTION_FLAG, .value = &b.list, .help = "list the cases"},
        {.name = "repeats", .kind = OPTION_NUMBER, .value = &b.repeats, .argument = "N",
         .help = "runs of each case; default: 3", .least = 1, .most = BENCH_REPEATS_MAX},
        {.name = "repeat", .kind = OPTION_NUMBER, .value = &b.repeats, .argument = "N",
         .help = "the same", .least = 1, .most = BENCH_REPEATS_MAX},
        {.name = "json", .kind = OPTION_FLAG, .value = &b.json, .help = "as JSON"},
        {.name = "html", .kind = OPTION_TEXT, .value = &b.html, .argument = "FILE",
         .help = "also write a page with the table and plots"},
        {.name = NULL}};
    const option_group groups[] = {{"options", own}, {"engine", engine}, {NULL, NULL}};
    const usage u = {"bench MODEL",
                     "Measures reading and generating speed. Nothing else should be running.\n",
                     groups, 0, 1};
    arguments args;
    int code;

    for (size_t i = 0; i < BENCH_CASES; i++) names[i].name = bench_cases[i].name;
    b.repeats = 3;
    settings_engine(&b.set, engine);
    if (!options_read(&u, argc, argv, &args, &code)) return code;
    if (b.list) return list_cases();
    if (!args.n) {
        fprintf(stderr, "kvpage bench: an argument is missing (usage: kvpage %s)\n", u.line);
        return EXIT_USAGE;
    }
    b.path = args.items[0];
    interrupt_setup(false);
    return bench_model(&b);
}
