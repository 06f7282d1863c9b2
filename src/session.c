/*
 * What run, chat and bench have in common: settings and their option tables, a model opened with a
 * progress line, a pool and a batch of the right size, names and error lines.
 */
#include "tool.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* --- settings --- */

/* Small models repeat themselves for ever. */
enum { DEFAULT_MAX_TOKENS = 512 };

const choice kv_choices[] = {
    {"f16", KVP_KV_F16}, {"bf16", KVP_KV_BF16}, {"f32", KVP_KV_F32}, {NULL, 0}};
static const choice level_choices[] = {{"generic", KVP_CPU_GENERIC}, {"avx2", KVP_CPU_AVX2},
                                       {"avx512", KVP_CPU_AVX512},   {"amx", KVP_CPU_AMX},
                                       {"neon", KVP_CPU_NEON},
                                       {NULL, 0}};
static const choice activation_choices[] = {
    {"int8", KVP_ACTIVATIONS_INT8}, {"f32", KVP_ACTIVATIONS_F32}, {NULL, 0}};

static const choice format_choices[] = {{"chatml", KVP_CHAT_CHATML},
                                        {"gemma", KVP_CHAT_GEMMA},
                                        {"llama3", KVP_CHAT_LLAMA3},
                                        {"mistral", KVP_CHAT_MISTRAL},
                                        {NULL, 0}};

option chat_format_option(settings *s)
{
    return (option){.name = "format", .kind = OPTION_CHOICE, .value = &s->chat_format,
                    .argument = "NAME", .help = "chat format, if not the file's",
                    .choices = format_choices};
}

option device_option(const char **device)
{
    return (option){.name = "device", .kind = OPTION_TEXT, .value = device, .argument = "NAME",
                    .help = "cpu, the default, or cuda, cuda:1, ... (see `kvpage devices`)"};
}

void settings_engine(settings *s, option table[ENGINE_OPTIONS])
{
    const option options[ENGINE_OPTIONS] = {
        device_option(&s->device),
        {.name = "threads", .kind = OPTION_NUMBER, .value = &s->threads, .argument = "N",
         .help = "worker threads on the CPU; default: one per core", .least = 1, .most = 1024},
        {.name = "context", .kind = OPTION_NUMBER, .value = &s->context, .argument = "TOKENS",
         .help = "longest sequence; default: what the model was trained for", .least = 2,
         .most = 1 << 30},
        {.name = "kv", .kind = OPTION_CHOICE, .value = &s->kv, .argument = "FORMAT",
         .help = "how keys and values are stored (default f16)", .choices = kv_choices},
        {.name = "block", .kind = OPTION_NUMBER, .value = &s->block, .argument = "TOKENS",
         .help = "tokens of a KV block, a power of two up to 256; default: 16", .least = 1,
         .most = 256},
        {.name = "cache", .kind = OPTION_BYTES, .value = &s->cache_bytes, .argument = "SIZE",
         .help = "memory of the KV cache; default: what the sequences can need"},
        {.name = "cpu-level", .kind = OPTION_CHOICE, .value = &s->cpu_level, .argument = "LEVEL",
         .help = "at most this instruction set", .choices = level_choices},
        {.name = "packed-file", .kind = OPTION_TEXT, .value = &s->packed_file, .argument = "FILE",
         .help = "keep the weights as they lie in memory there: the next start is faster"},
        {.name = "activations", .kind = OPTION_CHOICE, .value = &s->activations,
         .argument = "KIND", .help = "arithmetic against quantised weights (default int8)",
         .choices = activation_choices},
        {.name = NULL}};
    memcpy(table, options, sizeof options);
}

void settings_sampling(settings *s, option table[SAMPLING_OPTIONS])
{
    s->max_tokens = DEFAULT_MAX_TOKENS;
    const option options[SAMPLING_OPTIONS] = {
        {.name = "max-tokens", .kind = OPTION_NUMBER, .value = &s->max_tokens, .argument = "N",
         .help = "stop after so many tokens; default: 512, 0: at the end of the context",
         .least = 0, .most = 1 << 30},
        {.name = "temp", .kind = OPTION_REAL, .value = &s->temperature, .argument = "T",
         .help = "temperature; 0, the default, always takes the likeliest token", .least = 0,
         .most = 100},
        {.name = "top-k", .kind = OPTION_NUMBER, .value = &s->top_k, .argument = "N",
         .help = "choose among the N likeliest; 0: off", .least = 0, .most = 1 << 30},
        {.name = "top-p", .kind = OPTION_REAL, .value = &s->top_p, .argument = "P",
         .help = "choose among the likeliest that make up P; 1: off", .least = 0, .most = 1},
        {.name = "min-p", .kind = OPTION_REAL, .value = &s->min_p, .argument = "P",
         .help = "leave out what is less likely than P times the likeliest", .least = 0,
         .most = 1},
        {.name = "seed", .kind = OPTION_NUMBER, .value = &s->seed, .argument = "N",
         .help = "same seed, same text; 0, the default, draws one"},
        {.name = "repeat-penalty", .kind = OPTION_REAL, .value = &s->repetition_penalty,
         .argument = "X", .help = "make seen tokens less likely; 1: off", .least = 0.01,
         .most = 100},
        {.name = "presence-penalty", .kind = OPTION_REAL, .value = &s->presence_penalty,
         .argument = "X", .help = "subtracted once from seen tokens", .least = -100, .most = 100},
        {.name = "frequency-penalty", .kind = OPTION_REAL, .value = &s->frequency_penalty,
         .argument = "X", .help = "subtracted for each time a token was seen", .least = -100,
         .most = 100},
        {.name = "penalty-window", .kind = OPTION_NUMBER, .value = &s->penalty_window,
         .argument = "N", .help = "the last N tokens count as seen; default: 64", .least = 1,
         .most = 8192},
        {.name = "ignore-eos", .kind = OPTION_FLAG, .value = &s->ignore_eos,
         .help = "go on after the model's end token"},
        {.name = "stop", .kind = OPTION_LIST, .value = &s->stop, .argument = "TEXT",
         .help = "stop before this text; may be given several times"},
        {.name = NULL}};
    memcpy(table, options, sizeof options);
}

void session_sampling(const settings *set, kvp_sampling *out)
{
    kvp_sampling_init(out, sizeof *out);
    out->temperature = set->temperature;
    out->top_p = set->top_p;
    out->min_p = set->min_p;
    out->top_k = (int32_t)set->top_k;
    out->repetition_penalty = set->repetition_penalty;
    out->presence_penalty = set->presence_penalty;
    out->frequency_penalty = set->frequency_penalty;
    out->penalty_window = (uint32_t)set->penalty_window;
    out->seed = set->seed;
}

void session_stops(const settings *set, kvp_string out[LIST_MAX])
{
    for (size_t i = 0; i < set->stop.n; i++)
        out[i] = (kvp_string){set->stop.items[i], strlen(set->stop.items[i])};
}

bool session_can_chat(const session *s, const settings *set, const char *path,
                      const char *instead)
{
    if (set->chat_format || s->info.chat_format != KVP_CHAT_NONE) return true;
    fail_line("%s names no chat format that is known: give --format, or %s", path, instead);
    return false;
}

kvp_status session_append_chat(const session *s, const settings *set, kvp_seq *seq,
                               const kvp_chat_message *messages, size_t n, uint32_t flags,
                               kvp_error *err)
{
    int32_t *tokens = NULL;
    size_t count = 0;
    kvp_status status = kvp_chat_tokenize(s->model, set->chat_format, messages, n, 0, flags, NULL,
                                          0, &count, err);
    if (status != KVP_ERR_BUFFER) return status;
    tokens = malloc(count * sizeof *tokens);
    if (!tokens) return KVP_ERR_NO_MEMORY;
    status = kvp_chat_tokenize(s->model, set->chat_format, messages, n, 0, flags, tokens, count,
                               &count, err);
    if (status == KVP_OK) {
        status = kvp_seq_append(seq, tokens, count);
        if (status < 0) kvp_seq_last_error(seq, err);
    }
    free(tokens);
    return status;
}

/* --- opening --- */

static int32_t show_loading(void *user, uint64_t done, uint64_t total)
{
    (void)user;
    progress_show("loading", done, total);
    return interrupted();
}

static void show_warning(void *user, int32_t level, const char *line)
{
    (void)user;
    (void)level;
    progress_end();
    fprintf(stderr, "kvpage: %s\n", line);
}

/* What the options ask for is refused before anything is loaded. */
static kvp_status check_settings(const session *s, const settings *set, kvp_error *err)
{
    kvp_plan_options plan = {.size = sizeof plan, .block_tokens = (uint32_t)set->block,
                             .k_format = set->kv, .v_format = set->kv, .device = set->device};
    kvp_pool_options pool = {.size = sizeof pool, .block_tokens = (uint32_t)set->block,
                             .k_format = set->kv, .v_format = set->kv, .device = set->device,
                             .blocks = 1};
    kvp_plan_result planned = {.size = sizeof planned};
    uint64_t bytes, align;
    kvp_status status = kvp_plan(s->model, &plan, &planned, err);
    if (status < 0) return status;
    return kvp_pool_slab_size(s->model, &pool, &bytes, &align, err);
}

int session_open_model(session *s, const char *path, const settings *set)
{
    kvp_error err = {.size = sizeof err};
    const kvp_hooks hooks = {.size = sizeof hooks, .log = show_warning};
    kvp_model_options options = {.size = sizeof options, .cpu_level = set->cpu_level,
                                 .activations = set->activations, .hooks = &hooks};
    kvp_place_options place = {.size = sizeof place, .progress = show_loading,
                               .threads = (int32_t)set->threads, .device = set->device,
                               .packed_file = set->packed_file};
    uint64_t start = clock_ns();
    kvp_status status = kvp_model_open(path, &options, &s->model, &err);
    if (status == KVP_OK) status = check_settings(s, set, &err);
    if (status == KVP_OK) status = kvp_model_place(s->model, &place, &err);
    progress_end();
    if (status < 0) return fail_with(&err);
    s->info.size = sizeof s->info;
    kvp_model_get_info(s->model, &s->info);
    s->context = set->context ? set->context : s->info.context;
    s->load_ns = clock_ns() - start;
    return EXIT_DONE;
}

int session_open(session *s, const char *path, const settings *set, uint64_t sequences)
{
    uint64_t block = set->block ? set->block : 16;
    kvp_error err = {.size = sizeof err};
    kvp_pool_options pool = {.size = sizeof pool, .block_tokens = (uint32_t)set->block,
                             .bytes = set->cache_bytes, .k_format = set->kv,
                             .v_format = set->kv, .device = set->device};
    kvp_batch_options batch = {.size = sizeof batch, .threads = (int32_t)set->threads};
    int code = session_open_model(s, path, set);
    if (code != EXIT_DONE) return code;
    /* One block more each: what a fork copies when it writes. */
    if (!set->cache_bytes) pool.blocks = sequences * (s->context / block + 2);
    if (kvp_pool_create(s->model, &pool, &s->pool, &err) < 0 ||
        kvp_batch_create(s->pool, &batch, &s->batch, &err) < 0)
        return fail_with(&err);
    interrupt_wakes(s->batch);
    return EXIT_DONE;
}

void session_close(session *s)
{
    interrupt_wakes(NULL);
    kvp_batch_destroy(s->batch);
    kvp_pool_destroy(s->pool);
    kvp_model_destroy(s->model);
    memset(s, 0, sizeof *s);
}

/* --- errors --- */

/* Fields of the library's structs and the options that set them. */
static const struct {
    const char *field, *option;
} fields[] = {{"block_tokens", "block"}, {"bytes", "cache"},
              {"context", "context"},    {"packed_file", "packed-file"},
              {"stop_strings", "stop"},  {"threads", "threads"}};

/* The option that the error is about, and the rest of the line; NULL: none. */
static const char *option_of(const kvp_error *err, const char **rest)
{
    static const char no_device[] = "device \"";
    if (err->status == KVP_ERR_NO_DEVICE && !strncmp(err->text, no_device, sizeof no_device - 1)) {
        *rest = err->text + sizeof no_device - 3;
        return "device";
    }
    if (err->status != KVP_ERR_INVALID_ARG && err->status != KVP_ERR_UNSUPPORTED) return NULL;
    for (size_t i = 0; i < COUNT(fields); i++) {
        size_t n = strlen(fields[i].field);
        if (strncmp(err->text, fields[i].field, n) || !strchr(": [", err->text[n])) continue;
        *rest = err->text + n;
        return fields[i].option;
    }
    return NULL;
}

int fail_with(const kvp_error *err)
{
    const char *rest, *name = option_of(err, &rest);
    progress_end();
    if (err->status == KVP_ERR_CANCELLED) return EXIT_INTERRUPTED;
    if (name) {
        fprintf(stderr, "kvpage: --%s%s\n", name, rest);
        return EXIT_USAGE;
    }
    fprintf(stderr, "kvpage: %s\n", err->text);
    return EXIT_FAILED;
}

int fail_pool(const session *s)
{
    kvp_error err = {.size = sizeof err};
    kvp_pool_last_error(s->pool, &err);
    return fail_with(&err);
}

int fail_line(const char *format, ...)
{
    va_list args;
    progress_end();
    fprintf(stderr, "kvpage: ");
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fprintf(stderr, "\n");
    return EXIT_FAILED;
}

/* --- names --- */

bool device_named(const char *name, kvp_device_info *out)
{
    if (!name) name = "cpu";
    if (!strcmp(name, "cuda")) name = "cuda:0";
    for (uint32_t i = 0; kvp_device_get(i, out) == KVP_OK; i++)
        if (!strcmp(out->name, name)) return true;
    return false;
}

static const char *name_of(const char *const *names, size_t n, uint32_t value)
{
    return value < n && names[value] ? names[value] : "unknown";
}

const char *cpu_level_name(uint32_t level)
{
    static const char *const names[] = {[KVP_CPU_GENERIC] = "generic", [KVP_CPU_AVX2] = "avx2",
                                        [KVP_CPU_AVX512] = "avx512", [KVP_CPU_NEON] = "neon",
                                        [KVP_CPU_AMX] = "amx"};
    return name_of(names, COUNT(names), level);
}

const char *activations_name(uint32_t activations)
{
    static const char *const names[] = {[KVP_ACTIVATIONS_INT8] = "int8",
                                        [KVP_ACTIVATIONS_F32] = "f32"};
    return name_of(names, COUNT(names), activations);
}

const char *ending_name(uint32_t ending)
{
    static const char *const names[] = {
        [KVP_END_STOP] = "stop", [KVP_END_LENGTH] = "length", [KVP_END_CAPACITY] = "capacity",
        [KVP_END_CANCELLED] = "cancelled", [KVP_END_FAILED] = "failed"};
    return name_of(names, COUNT(names), ending);
}

const char *chat_format_name(uint32_t format)
{
    static const char *const names[] = {
        [KVP_CHAT_NONE] = "none", [KVP_CHAT_CHATML] = "chatml", [KVP_CHAT_GEMMA] = "gemma",
        [KVP_CHAT_LLAMA3] = "llama3", [KVP_CHAT_MISTRAL] = "mistral"};
    return name_of(names, COUNT(names), format);
}

const char *kv_format_name(uint32_t format)
{
    static const char *const names[] = {"f16", [KVP_KV_F16] = "f16", [KVP_KV_BF16] = "bf16",
                                        [KVP_KV_F32] = "f32"};
    return name_of(names, COUNT(names), format);
}

void json_usage(json *j, const kvp_usage *u)
{
    json_open(j, "usage", '{');
    json_uint(j, "prompt", u->prompt);
    json_uint(j, "cached", u->cached);
    json_uint(j, "reattached", u->reattached);
    json_uint(j, "computed", u->computed);
    json_uint(j, "recomputed", u->recomputed);
    json_uint(j, "copied", u->copied);
    json_uint(j, "generated", u->generated);
    json_uint(j, "preemptions", u->preemptions);
    json_real(j, "queued_ms", (double)u->queued_ns / 1e6);
    json_real(j, "first_token_ms", (double)u->first_token_ns / 1e6);
    json_real(j, "total_ms", (double)u->total_ns / 1e6);
    json_close(j, '}');
}
