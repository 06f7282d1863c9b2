/*
 * A crew: what a kvp_team handle points to, a team of workers under an origin of its own. Batches that
 * use it hold a count on the origin.
 */
#ifndef KVP_ENGINE_CREW_H
#define KVP_ENGINE_CREW_H

#include "base/team.h"
#include "engine/handle.h"

typedef struct kvp__crew {
    kvp__origin origin; /* first: the origin frees this object */
    kvp__team *team;
    uint32_t generation; /* workers do not survive a fork */
    kvp__shell *shell;
} kvp__crew;

kvp_status kvp__crew_create(kvp__crew **out, const kvp_team_options *options, kvp_error *err);
void kvp__crew_close(kvp__crew *c);

#endif
