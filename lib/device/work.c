/*
 * The contract of a step, checked before any device sees it: devices index memory by what is in here,
 * and a wrong id would be read or written without a trace. O(block ids), microseconds a step.
 */
#include "device/device.h"

static kvp_status check_table(const kvp__work *w, uint32_t s, uint32_t g, const kvp__layout *l,
                              kvp_error *err)
{
    const uint32_t *table = w->seqs[s].tables[g];
    for (uint32_t i = 0; i < w->seqs[s].n_blocks; i++)
        if (table[i] >= l->blocks)
            return kvp__fail(err, KVP_ERR_INTERNAL,
                             "step: entry %u of the block table of sequence %u is %u, of %llu blocks",
                             (unsigned)i, (unsigned)s, (unsigned)table[i],
                             (unsigned long long)l->blocks);
    return KVP_OK;
}

static kvp_status check_seq(const kvp__work *w, uint32_t s, uint32_t first_row,
                            const kvp__layout *l, kvp_error *err)
{
    const kvp__work_seq *q = &w->seqs[s];
    uint64_t length = (uint64_t)q->first_pos + q->n_rows;
    if (q->first_row != first_row || q->n_rows == 0 || q->n_rows > w->n_rows - first_row)
        return kvp__fail(err, KVP_ERR_INTERNAL, "step: sequence %u has rows %u to %llu of %u",
                         (unsigned)s, (unsigned)q->first_row,
                         (unsigned long long)q->first_row + q->n_rows, (unsigned)w->n_rows);
    if (length > (uint64_t)q->n_blocks * l->block_tokens)
        return kvp__fail_need(err, KVP_ERR_INTERNAL, length, (uint64_t)q->n_blocks * l->block_tokens,
                              "step: sequence %u is %llu tokens long, its table covers %llu",
                              (unsigned)s, (unsigned long long)length,
                              (unsigned long long)q->n_blocks * l->block_tokens);
    for (uint32_t r = 0; r < q->n_rows; r++)
        if (w->positions[first_row + r] != q->first_pos + r)
            return kvp__fail(err, KVP_ERR_INTERNAL, "step: row %u is at position %u, not %u",
                             (unsigned)(first_row + r), (unsigned)w->positions[first_row + r],
                             (unsigned)(q->first_pos + r));
    for (uint32_t g = 0; g < l->n_groups; g++) {
        kvp_status st = check_table(w, s, g, l, err);
        if (st != KVP_OK) return st;
    }
    return KVP_OK;
}

kvp_status kvp__work_check(const kvp__work *w, const kvp__layout *l, kvp_error *err)
{
    uint32_t row = 0;
    for (uint32_t s = 0; s < w->n_seqs; s++) {
        kvp_status st = check_seq(w, s, row, l, err);
        if (st != KVP_OK) return st;
        row += w->seqs[s].n_rows;
    }
    if (row != w->n_rows)
        return kvp__fail(err, KVP_ERR_INTERNAL, "step: its sequences have %u rows of %u",
                         (unsigned)row, (unsigned)w->n_rows);
    for (uint32_t i = 0; i < w->n_outputs; i++)
        if (w->outputs[i] >= w->n_rows)
            return kvp__fail(err, KVP_ERR_INTERNAL, "step: output %u is row %u of %u", (unsigned)i,
                             (unsigned)w->outputs[i], (unsigned)w->n_rows);
    for (uint32_t i = 0; i < w->n_copies; i++) {
        const kvp__copy *c = &w->copies[i];
        if (c->group >= l->n_groups || c->src >= l->blocks || c->dst >= l->blocks ||
            c->src == c->dst || c->tokens > l->block_tokens)
            return kvp__fail(err, KVP_ERR_INTERNAL, "step: copy %u of %u tokens from block %u to %u",
                             (unsigned)i, (unsigned)c->tokens, (unsigned)c->src, (unsigned)c->dst);
    }
    return KVP_OK;
}
