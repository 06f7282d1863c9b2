/*
 * Crews. See crew.h.
 */
#include "engine/crew.h"

static void finish(kvp__origin *origin)
{
    kvp__crew *c = (kvp__crew *)origin;
    if (c->team) kvp__team_release(c->team);
}

kvp_status kvp__crew_create(kvp__crew **out, const kvp_team_options *options, kvp_error *err)
{
    if (options->threads < 0 || options->threads > 1024)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "threads: %d is not from 0 to 1024",
                         (int)options->threads);
    kvp__hooks hooks;
    kvp_status s = kvp__hooks_fill(&hooks, options->hooks, err);
    if (s != KVP_OK) return s;
    kvp__crew *c = kvp__alloc_zero(&hooks, sizeof *c);
    if (!c) return kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for a team");
    s = kvp__origin_init(&c->origin, &hooks, sizeof *c, finish, err);
    if (s != KVP_OK) {
        kvp__free(&hooks, c, sizeof *c);
        return s;
    }
    c->generation = kvp__origin_generation(&c->origin);
    s = kvp__team_create(&c->team, &c->origin.hooks, options->threads, KVP__SCRATCH_BYTES, err);
    if (s == KVP_OK) {
        c->shell = kvp__shell_make(&c->origin, KVP__KIND_TEAM, c, NULL);
        if (!c->shell) s = kvp__fail(err, KVP_ERR_NO_MEMORY, "no memory for a team's handle");
    }
    if (s != KVP_OK) {
        c->origin.hooks.released = NULL;
        kvp__origin_release(&c->origin);
        return s;
    }
    *out = c;
    return KVP_OK;
}

void kvp__crew_close(kvp__crew *c)
{
    kvp__shell_give_back(c->shell);
    kvp__origin_release(&c->origin);
}
