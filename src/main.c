/* The `kvpage` command: finds the subcommand and hands the line to it. */
#include "tool.h"

#include <string.h>

static const struct subcommand {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
} subcommands[] = {
    {"run", command_run, "generate text from a prompt"},
    {"chat", command_chat, "have a conversation"},
    {"inspect", command_inspect, "what is in a model file"},
    {"plan", command_plan, "memory of a KV cache, before anything is loaded"},
    {"bench", command_bench, "measure speed"},
    {"devices", command_devices, "what this machine can run on"},
};

static void print_help(FILE *out)
{
    fprintf(out, "usage: kvpage COMMAND [ARGUMENTS]\n\n");
    for (size_t i = 0; i < COUNT(subcommands); i++)
        fprintf(out, "  %-10s %s\n", subcommands[i].name, subcommands[i].help);
    fprintf(out, "\n`kvpage COMMAND --help` lists a command's options.\n\n"
                 "exit codes: 0 done, 1 failed (a line on stderr says why),\n"
                 "            2 the command line is wrong, 130 interrupted by Ctrl-C\n");
}

/* A full disk must not look like success. */
static int close_output(int code)
{
    if ((fflush(stdout) || ferror(stdout)) && code == EXIT_DONE)
        return fail_line("standard output could not be written");
    return code;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        print_help(stderr);
        return EXIT_USAGE;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help")) {
        print_help(stdout);
        return EXIT_DONE;
    }
    if (!strcmp(argv[1], "--version")) {
        uint32_t v = kvp_version();
        printf("kvpage %u.%u.%u\n", v >> 16, v >> 8 & 0xff, v & 0xff);
        return EXIT_DONE;
    }
    for (size_t i = 0; i < COUNT(subcommands); i++)
        if (!strcmp(argv[1], subcommands[i].name))
            return close_output(subcommands[i].run(argc - 1, argv + 1));
    fprintf(stderr, "kvpage: '%s' is not a command; see kvpage --help\n", argv[1]);
    return EXIT_USAGE;
}
