/*
 * Teams.
 */
#include "api/api.h"
#include "engine/crew.h"

kvp_status kvp_team_create(const kvp_team_options *options, kvp_team **out, kvp_error *err)
{
    kvp_team_options o;
    kvp_status s = kvp__options_in(&o, sizeof o, options, "team options", err);
    if (s != KVP_OK) return s;
    if (!out) return kvp__fail(err, KVP_ERR_INVALID_ARG, "out: NULL");
    kvp__crew *c;
    s = kvp__crew_create(&c, &o, err);
    if (s == KVP_OK) *out = (kvp_team *)c->shell;
    return s;
}

void kvp_team_destroy(kvp_team *team)
{
    kvp__shell *shell = kvp__shell_of(team, KVP__KIND_TEAM);
    if (!shell) return;
    kvp__crew *c = shell->object;
    if (!kvp__origin_is_ours(&c->origin, c->generation)) return;
    if (kvp__shell_kill(shell, KVP__KIND_TEAM)) kvp__crew_close(c);
}
