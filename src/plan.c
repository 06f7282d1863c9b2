/*
 * `kvpage plan`: how much memory a KV cache takes, from a model file, the geometry of a well-known
 * model, or numbers. Nothing is loaded; the arithmetic is kvp_plan's.
 */
#include "tool.h"

#include <string.h>

enum { PRESET_GROUPS = 2 };

/* Layers, KV heads, key and value size, window: as the models' configuration files have them. */
typedef struct preset {
    const char *name;
    uint32_t context;
    kvp_layer_group groups[PRESET_GROUPS];
} preset;

#define FULL(n, heads, dim) {.layers = n, .kv_heads = heads, .key_dim = dim, .value_dim = dim}
#define LOCAL(n, heads, dim, w) \
    {.layers = n, .kv_heads = heads, .key_dim = dim, .value_dim = dim, .window = w}
#define LATENT(n, dim) {.layers = n, .kv_heads = 1, .key_dim = dim, .value_dim = KVP_DIM_NONE}

static const preset presets[] = {
    {"llama-3.1-8b", 131072, {FULL(32, 8, 128)}},
    {"llama-3.1-70b", 131072, {FULL(80, 8, 128)}},
    {"llama-3.1-405b", 131072, {FULL(126, 8, 128)}},
    {"llama-3.2-1b", 131072, {FULL(16, 8, 64)}},
    {"llama-3.2-3b", 131072, {FULL(28, 8, 128)}},
    {"llama-2-7b", 4096, {FULL(32, 32, 128)}},
    {"llama-2-13b", 4096, {FULL(40, 40, 128)}},
    {"llama-2-70b", 4096, {FULL(80, 8, 128)}},
    {"mistral-7b", 32768, {FULL(32, 8, 128)}},
    {"qwen2.5-0.5b", 32768, {FULL(24, 2, 64)}},
    {"qwen2.5-7b", 32768, {FULL(28, 4, 128)}},
    {"qwen3-0.6b", 40960, {FULL(28, 8, 128)}},
    {"qwen3-8b", 40960, {FULL(36, 8, 128)}},
    {"qwen3-32b", 40960, {FULL(64, 8, 128)}},
    {"gemma-3-270m", 32768, {LOCAL(15, 1, 256, 512), FULL(3, 1, 256)}},
    {"gemma-3-1b", 32768, {LOCAL(22, 1, 256, 512), FULL(4, 1, 256)}},
    {"gemma-3-4b", 131072, {LOCAL(29, 4, 256, 1024), FULL(5, 4, 256)}},
    {"gemma-3-12b", 131072, {LOCAL(40, 8, 256, 1024), FULL(8, 8, 256)}},
    {"gemma-3-27b", 131072, {LOCAL(52, 16, 128, 1024), FULL(10, 16, 128)}},
    {"deepseek-v3", 163840, {LATENT(61, 512 + 64)}},
    {"smollm2-135m", 8192, {FULL(30, 3, 64)}},
    {"smollm2-1.7b", 8192, {FULL(24, 32, 64)}},
    {"tinyllama-1.1b", 2048, {FULL(22, 4, 64)}},
};

typedef struct plan_options {
    const char *preset;
    uint64_t layers, kv_heads, head_dim, value_dim, window;
    uint64_t context, sequences, block, memory;
    uint32_t kv, kv_values;
    const char *device;
    bool json, list;
} plan_options;

/* --- where the geometry comes from --- */

static int make_geometry(const kvp_layer_group *groups, uint32_t n, uint32_t context,
                         kvp_model **out)
{
    kvp_error err = {.size = sizeof err};
    kvp_geometry g = {.size = sizeof g, .n_groups = n, .groups = groups, .context = context};
    return kvp_model_create(&g, NULL, out, &err) < 0 ? fail_with(&err) : EXIT_DONE;
}

static int from_preset(const char *name, kvp_model **out)
{
    for (size_t i = 0; i < COUNT(presets); i++) {
        uint32_t n = 0;
        if (strcmp(presets[i].name, name)) continue;
        while (n < PRESET_GROUPS && presets[i].groups[n].layers) n++;
        return make_geometry(presets[i].groups, n, presets[i].context, out);
    }
    fprintf(stderr, "kvpage plan: --preset: '%s' is not known; --list names them all\n", name);
    return EXIT_USAGE;
}

static int from_numbers(const plan_options *p, kvp_model **out)
{
    kvp_layer_group g = {.layers = (uint32_t)p->layers, .kv_heads = (uint32_t)p->kv_heads,
                         .key_dim = (uint32_t)p->head_dim, .window = (uint32_t)p->window};
    if (!p->layers || !p->kv_heads || !p->head_dim) {
        fprintf(stderr, "kvpage plan: give a MODEL, or --preset, or --layers, --kv-heads and "
                        "--head-dim\n");
        return EXIT_USAGE;
    }
    g.value_dim = p->value_dim ? (uint32_t)p->value_dim : g.key_dim;
    return make_geometry(&g, 1, 0, out);
}

static int get_model(const plan_options *p, const arguments *args, kvp_model **out)
{
    kvp_error err = {.size = sizeof err};
    int sources = (args->n != 0) + (p->preset != NULL) + (p->layers || p->kv_heads || p->head_dim);
    if (sources > 1) {
        fprintf(stderr, "kvpage plan: give only one of MODEL, --preset and a geometry\n");
        return EXIT_USAGE;
    }
    if (p->preset) return from_preset(p->preset, out);
    if (args->n == 0) return from_numbers(p, out);
    return kvp_model_open(args->items[0], NULL, out, &err) < 0 ? fail_with(&err) : EXIT_DONE;
}

/* --- output --- */

static void line(const char *name, uint64_t bytes, const char *note)
{
    char size[32];
    printf("%-22s %20llu bytes  %12s%s%s\n", name, (unsigned long long)bytes,
           format_bytes(size, bytes), *note ? "  " : "", note);
}

static void print_plan(const plan_options *p, const kvp_plan_result *r, uint64_t tokens)
{
    uint64_t sequences = p->sequences ? p->sequences : 1;
    char size[32];
    printf("%llu sequence%s of %llu tokens, blocks of %u, keys %s, values %s\n\n",
           (unsigned long long)sequences, sequences == 1 ? "" : "s", (unsigned long long)tokens,
           r->block_tokens, kv_format_name(p->kv), kv_format_name(p->kv_values));
    line("KV of a token", r->kv_bytes_per_token, "");
    line("block", r->block_bytes, "");
    printf("%-22s %20llu blocks (%llu a sequence)\n", "needed", (unsigned long long)r->blocks,
           (unsigned long long)r->blocks_per_sequence);
    line("KV cache", r->kv_bytes, "what a pool of these blocks takes");
    line("without rounding", r->kv_bytes_ideal, "tokens x KV of a token");
    if (r->kv_bytes_windowed != r->kv_bytes_ideal)
        line("windows alone", r->kv_bytes_windowed, "if window layers kept only their window");
    if (r->weight_bytes) line("weights", r->weight_bytes, "as they lie on the device");
    if (r->workspace_bytes) line("workspace", r->workspace_bytes, "of a batch");
    if (p->memory)
        printf("\nin %s of KV cache fit %llu blocks: %llu sequence%s of %llu tokens\n",
               format_bytes(size, p->memory), (unsigned long long)r->blocks_fit,
               (unsigned long long)r->sequences_fit, r->sequences_fit == 1 ? "" : "s",
               (unsigned long long)tokens);
}

static void json_plan(const plan_options *p, const kvp_plan_result *r, uint64_t tokens)
{
    json j = {.out = stdout, .first = true};
    json_open(&j, NULL, '{');
    json_uint(&j, "sequences", p->sequences ? p->sequences : 1);
    json_uint(&j, "tokens", tokens);
    json_uint(&j, "block_tokens", r->block_tokens);
    json_string(&j, "k_format", kv_format_name(p->kv));
    json_string(&j, "v_format", kv_format_name(p->kv_values));
    json_uint(&j, "kv_bytes_per_token", r->kv_bytes_per_token);
    json_uint(&j, "block_bytes", r->block_bytes);
    json_uint(&j, "blocks_per_sequence", r->blocks_per_sequence);
    json_uint(&j, "blocks", r->blocks);
    json_uint(&j, "kv_bytes", r->kv_bytes);
    json_uint(&j, "kv_bytes_ideal", r->kv_bytes_ideal);
    json_uint(&j, "kv_bytes_windowed", r->kv_bytes_windowed);
    json_uint(&j, "weight_bytes", r->weight_bytes);
    json_uint(&j, "workspace_bytes", r->workspace_bytes);
    if (p->memory) {
        json_uint(&j, "memory_bytes", p->memory);
        json_uint(&j, "blocks_fit", r->blocks_fit);
        json_uint(&j, "sequences_fit", r->sequences_fit);
    }
    json_close(&j, '}');
    json_line(&j);
}

static int make_plan(const plan_options *p, const kvp_model *model)
{
    kvp_error err = {.size = sizeof err};
    kvp_model_info info = {.size = sizeof info};
    kvp_plan_options o = {.size = sizeof o, .block_tokens = (uint32_t)p->block,
                          .k_format = p->kv, .v_format = p->kv_values,
                          .tokens = p->context, .sequences = p->sequences,
                          .memory_bytes = p->memory, .device = p->device};
    kvp_plan_result r = {.size = sizeof r};
    uint64_t tokens;
    if (kvp_plan(model, &o, &r, &err) < 0) return fail_with(&err);
    kvp_model_get_info(model, &info);
    tokens = p->context ? p->context : info.context ? info.context : 4096;
    if (p->json) json_plan(p, &r, tokens);
    else print_plan(p, &r, tokens);
    return EXIT_DONE;
}

static int list_presets(void)
{
    for (size_t i = 0; i < COUNT(presets); i++) {
        printf("%-16s", presets[i].name);
        for (size_t k = 0; k < PRESET_GROUPS && presets[i].groups[k].layers; k++) {
            const kvp_layer_group *g = &presets[i].groups[k];
            printf("%s %u layers x %u x %u", k ? "," : "", g->layers, g->kv_heads, g->key_dim);
            if (g->window) printf(" (window %u)", g->window);
            if (g->value_dim == KVP_DIM_NONE) printf(" (latent)");
        }
        printf(", context %u\n", presets[i].context);
    }
    return EXIT_DONE;
}

int command_plan(int argc, char **argv)
{
    plan_options p = {0};
    const option source[] = {
        {.name = "preset", .kind = OPTION_TEXT, .value = &p.preset, .argument = "NAME",
         .help = "a well-known model"},
        {.name = "list", .kind = OPTION_FLAG, .value = &p.list, .help = "list the presets"},
        {.name = "layers", .kind = OPTION_NUMBER, .value = &p.layers, .argument = "N",
         .help = "layers", .least = 1, .most = 1024},
        {.name = "kv-heads", .kind = OPTION_NUMBER, .value = &p.kv_heads, .argument = "N",
         .help = "key-value heads of a layer", .least = 1, .most = 65536},
        {.name = "head-dim", .kind = OPTION_NUMBER, .value = &p.head_dim, .argument = "N",
         .help = "elements of a head", .least = 1, .most = 65536},
        {.name = "value-dim", .kind = OPTION_NUMBER, .value = &p.value_dim, .argument = "N",
         .help = "of a value's head, if other than --head-dim", .least = 1, .most = 65536},
        {.name = "window", .kind = OPTION_NUMBER, .value = &p.window, .argument = "TOKENS",
         .help = "sliding window of the layers", .least = 1, .most = 1 << 30},
        {.name = NULL}};
    const option demand[] = {
        {.name = "context", .kind = OPTION_BYTES, .value = &p.context, .argument = "TOKENS",
         .help = "tokens of a sequence, 128K for 131,072; default: the model's, or 4096"},
        {.name = "sequences", .kind = OPTION_NUMBER, .value = &p.sequences, .argument = "N",
         .help = "how many; default: 1"},
        {.name = "kv", .kind = OPTION_CHOICE, .value = &p.kv, .argument = "FORMAT",
         .help = "of keys and values (default f16)", .choices = kv_choices},
        {.name = "kv-values", .kind = OPTION_CHOICE, .value = &p.kv_values,
         .argument = "FORMAT", .help = "of values, if other than --kv", .choices = kv_choices},
        {.name = "block", .kind = OPTION_NUMBER, .value = &p.block, .argument = "TOKENS",
         .help = "tokens of a block; default: 16", .least = 1, .most = 256},
        {.name = "memory", .kind = OPTION_BYTES, .value = &p.memory, .argument = "SIZE",
         .help = "for the KV cache: how many sequences fit?"},
        device_option(&p.device),
        {.name = "json", .kind = OPTION_FLAG, .value = &p.json, .help = "as JSON"},
        {.name = NULL}};
    const option_group groups[] = {
        {"from a geometry", source}, {"options", demand}, {NULL, NULL}};
    const usage u = {"plan [MODEL]", "Says what memory a KV cache takes. Nothing is loaded.\n",
                     groups, 0, 1};
    kvp_model *model = NULL;
    arguments args;
    int code;

    if (!options_read(&u, argc, argv, &args, &code)) return code;
    if (p.list) return list_presets();
    if (!p.kv_values) p.kv_values = p.kv;
    code = get_model(&p, &args, &model);
    if (code == EXIT_DONE) code = make_plan(&p, model);
    kvp_model_destroy(model);
    return code;
}
