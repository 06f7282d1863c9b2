/*
 * kvp_plan.
 */
#include "api/api.h"

kvp_status kvp_plan(const kvp_model *model, const kvp_plan_options *options, kvp_plan_result *out,
                    kvp_error *err)
{
    const kvp__opened *m = kvp__opened_of(model);
    if (!m) return kvp__bad_handle(err, "model");
    kvp_plan_options o;
    kvp_status s = kvp__options_in(&o, sizeof o, options, "plan options", err);
    if (s != KVP_OK) return s;
    uint32_t ordinal;
    const kvp__device *device = kvp__device_find(o.device, &ordinal);
    if (!device)
        return kvp__fail(err, KVP_ERR_NO_DEVICE, "device \"%s\": there is none of that name",
                         o.device);
    kvp_plan_result r = {.size = sizeof r};
    s = kvp__plan(&m->model.geometry, &o, &r, err);
    if (s != KVP_OK) return s;
    if (!m->own_model) {
        uint64_t tokens = o.tokens ? o.tokens : m->model.geometry.context;
        r.weight_bytes = device->packed_bytes(&m->model);
        r.workspace_bytes = device->workspace_bytes(
            &m->model, o.token_budget ? o.token_budget : KVP__DEFAULT_BUDGET,
            KVP__DEFAULT_SEQUENCES, (uint32_t)kvp__min64(tokens, UINT32_MAX));
    }
    return kvp__result_out(out, &r, sizeof r, "plan result", err);
}
