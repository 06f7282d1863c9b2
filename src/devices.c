/* `kvpage devices`: what this machine can run on. */
#include "tool.h"

static void json_device(json *j, const kvp_device_info *d)
{
    json_open(j, NULL, '{');
    json_string(j, "name", d->name);
    json_string(j, "description", d->description);
    json_bool(j, "usable", d->usable != 0);
    if (d->cpu_level) json_string(j, "cpu_level", cpu_level_name(d->cpu_level));
    json_uint(j, "threads", d->threads);
    json_uint(j, "memory_bytes", d->memory_bytes);
    json_close(j, '}');
}

static void print_device(const kvp_device_info *d)
{
    char memory[32];
    printf("%-8s %s%s", d->name, d->usable ? "" : "not usable: ", d->description);
    if (d->threads) printf(", %u threads", d->threads);
    if (d->memory_bytes) printf(", %s", format_bytes(memory, d->memory_bytes));
    printf("\n");
}

int command_devices(int argc, char **argv)
{
    bool as_json = false;
    const option own[] = {
        {.name = "json", .kind = OPTION_FLAG, .value = &as_json, .help = "as JSON"},
        {.name = NULL}};
    const option_group groups[] = {{"options", own}, {NULL, NULL}};
    const usage u = {"devices", "Lists the devices that models can run on, and what is missing "
                     "for the others.\n", groups, 0, 0};
    kvp_device_info d = {.size = sizeof d};
    json j = {.out = stdout, .first = true};
    arguments args;
    int code;

    if (!options_read(&u, argc, argv, &args, &code)) return code;
    if (as_json) json_open(&j, NULL, '[');
    for (uint32_t i = 0; kvp_device_get(i, &d) == KVP_OK; i++) {
        if (as_json) json_device(&j, &d);
        else print_device(&d);
    }
    if (as_json) {
        json_close(&j, ']');
        json_line(&j);
    }
    return EXIT_DONE;
}
