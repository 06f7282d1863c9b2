/*
 * What is uploaded for a step: lists of attention's items, changes of block tables, which output is
 * drawn how; and the shape by which the step is launched.
 *
 * Block tables live on the card. `shadow` is what they hold after the last upload, so that a step
 * sends what has changed alone: for a decode step one entry for each sequence that has begun a
 * block. Where more has changed than an upload holds, whole tables are sent.
 *
 * Outputs are in an order of our own: those whose logits the host reads lie together at the
 * beginning of the last tile, behind the drawn tokens, so that one copy brings everything.
 *
 * A decode step (every sequence has one row) is given the shape of a bucket, if it fits into it;
 * its kernels then are the bucket's, and can be replayed (graph.c).
 */
#include "cuda/runner.h"

#include <string.h>

/* --- where things lie --- */

/* Counts of 32 bits, a few dozen of them: their bytes fit into 64. */
static uint64_t section(uint64_t *used, uint32_t count, uint64_t size)
{
    uint64_t at = *used;
    *used = kvp__round_up(at + count * size, 16);
    return at;
}

/* Patches are last: as many as there are of them are sent. */
void kvp__cuda_place_upload(kvp__cuda_upload *u, const kvp__cuda_shape *shape, uint32_t n_groups)
{
    uint64_t s = 0;
    (void)section(&s, 1, sizeof(kvp__cuda_step));
    u->tokens = section(&s, shape->rows, sizeof(int32_t));
    u->positions = section(&s, shape->rows, sizeof(uint32_t));
    u->row_seq = section(&s, shape->rows, sizeof(uint32_t));
    u->outputs = section(&s, shape->outputs, sizeof(uint32_t));
    u->draws = section(&s, shape->outputs, sizeof(kvp__cuda_draw));
    for (uint32_t g = 0; g < n_groups; g++) {
        const kvp__cuda_counts *n = &shape->groups[g];
        u->groups[g].items = section(&s, n->all_items, sizeof(kvp__cuda_item));
        u->groups[g].rows = section(&s, n->rows, sizeof(uint32_t));
        u->groups[g].merges = section(&s, n->merges, sizeof(kvp__cuda_merge));
        u->groups[g].slots = section(&s, n->slots, sizeof(uint32_t));
    }
    u->copies = section(&s, shape->copies, sizeof(kvp__cuda_copy));
    u->patches = section(&s, shape->patches, sizeof(kvp__cuda_patch));
    u->bytes = s;
}

/* --- block tables --- */

static uint32_t *shadow_of(const kvp__runner *r, uint32_t group, uint32_t seq)
{
    return r->shadow + ((uint64_t)group * r->max_seqs + seq) * r->table_stride;
}

static void patch_table(kvp__runner *r, uint32_t group, uint32_t seq)
{
    const kvp__work_seq *s = &r->work->seqs[seq];
    const uint32_t *table = s->tables[group];
    uint32_t *has = shadow_of(r, group, seq);
    for (uint32_t b = 0; b < s->n_blocks; b++) {
        if (has[b] == table[b]) continue;
        has[b] = table[b];
        if (r->n_patches == r->max_patches) {
            r->whole_tables = true;
            continue;
        }
        r->patches[r->n_patches++] = (kvp__cuda_patch){(uint32_t)(has - r->shadow) + b, table[b]};
    }
}

void kvp__cuda_forget_tables(kvp__runner *r)
{
    memset(r->shadow, 0xff, (size_t)r->shadow_bytes); /* no block has this number */
}

static void patch_tables(kvp__runner *r)
{
    r->n_patches = 0;
    r->whole_tables = false;
    for (uint32_t g = 0; g < r->model->geometry.n_groups; g++)
        for (uint32_t s = 0; s < r->work->n_seqs; s++) patch_table(r, g, s);
    if (r->whole_tables) r->n_patches = 0;
}

/* --- outputs --- */

static bool can_choose(const kvp__work *w, uint32_t output)
{
    const kvp__sampler *s = w->choices ? w->choices[output].sampler : NULL;
    return s && w->chosen && kvp__sampler_is_plain(s);
}

static void cut_tiles(kvp__runner *r, uint32_t outputs, bool from_end)
{
    uint32_t n = (outputs + KVP__CUDA_HEAD_ROWS - 1) / KVP__CUDA_HEAD_ROWS, first = 0;
    r->n_tiles = n;
    r->tiles[0] = (kvp__cuda_tile){.runner = r, .last = true};
    for (uint32_t t = 0; t < n; t++) {
        uint32_t rest = outputs - first, rows = KVP__CUDA_HEAD_ROWS;
        if (from_end && rest % KVP__CUDA_HEAD_ROWS) rows = rest % KVP__CUDA_HEAD_ROWS;
        if (rows > rest) rows = rest;
        r->tiles[t] = (kvp__cuda_tile){.runner = r, .first = first, .n = rows, .last = t + 1 == n};
        first += rows;
    }
}

/* Where the outputs that the host reads go; false: not all of them into the last tile. */
static bool place_outputs(kvp__runner *r)
{
    uint32_t outputs = r->work->n_outputs, n = r->n_host;
    uint32_t last = r->n_tiles ? r->tiles[r->n_tiles - 1].first : 0;
    bool fit = last <= outputs && n <= outputs - last;
    r->host_first = fit ? last : outputs - n;
    for (uint32_t t = 0; t < r->n_tiles; t++) {
        kvp__cuda_tile *tile = &r->tiles[t];
        uint32_t from = tile->first > r->host_first ? tile->first : r->host_first;
        uint32_t end = tile->first + tile->n, host_end = r->host_first + n;
        if (host_end < end) end = host_end;
        tile->host_first = from;
        tile->n_host = end > from ? end - from : 0;
    }
    return n == 0 || fit;
}

static void order_outputs(kvp__runner *r)
{
    uint32_t host = r->host_first, other = 0;
    for (uint32_t i = 0; i < r->work->n_outputs; i++) {
        if (other == r->host_first) other += r->n_host;
        if (can_choose(r->work, i)) r->order[other++] = i;
        else r->order[host++] = i;
    }
}

static kvp__cuda_draw draw_of(const kvp__work *w, uint32_t output)
{
    if (!can_choose(w, output)) return (kvp__cuda_draw){0};
    const kvp__choice *c = &w->choices[output];
    return (kvp__cuda_draw){.seed = c->seed, .position = c->position,
                            .temperature = c->sampler->temperature, .top_p = c->sampler->top_p,
                            .min_p = c->sampler->min_p, .top_k = c->sampler->top_k, .wanted = 1};
}

/* --- the shape --- */

/* Bounds of a group, for so many rows and sequences: what a plan for them alone would have. */
static void most_of_group(const kvp__runner *r, uint32_t group, uint32_t rows, uint32_t seqs,
                          kvp__cuda_counts *out)
{
    const kvp__cuda_plan *own = &r->plans[group];
    kvp__layout layout = {.block_tokens = own->block_tokens, .k_format = own->k_type,
                          .v_format = r->v_format};
    kvp__cuda_limits l = {.max_rows = rows, .max_seqs = seqs, .max_positions = r->max_positions,
                          .sms = r->card.sms};
    kvp__cuda_plan p = {0};
    /* It cannot fail, since the runner's own limits are larger; if it did, no step would fit. */
    (void)kvp__cuda_plan_place(&p, &r->model->geometry.groups[group], group, &layout, &l, NULL);
    memcpy(out->items, p.most_items, sizeof out->items);
    out->all_items = p.max_items;
    out->rows = rows;
    out->merges = p.max_merges;
    out->slots = p.max_slots;
}

void kvp__cuda_most(const kvp__runner *r, uint32_t rows, uint32_t seqs, uint32_t outputs,
                    kvp__cuda_shape *out)
{
    memset(out, 0, sizeof *out);
    out->rows = rows;
    out->seqs = seqs;
    out->outputs = outputs;
    out->copies = seqs * r->model->geometry.n_groups;
    out->patches = r->max_patches;
    for (uint32_t g = 0; g < r->model->geometry.n_groups; g++)
        if (r->model->geometry.groups[g].layers) most_of_group(r, g, rows, seqs, &out->groups[g]);
}

static bool group_fits(const kvp__cuda_counts *own, const kvp__cuda_counts *most)
{
    for (uint32_t t = 0; t < KVP__ATTEND_TILES; t++)
        if (own->items[t] > most->items[t]) return false;
    return own->all_items <= most->all_items && own->rows <= most->rows &&
           own->merges <= most->merges && own->slots <= most->slots;
}

static bool fits(const kvp__runner *r, const kvp__cuda_shape *own, const kvp__cuda_shape *most)
{
    if (own->rows > most->rows || own->seqs > most->seqs || own->outputs > most->outputs ||
        own->copies > most->copies || own->patches > most->patches)
        return false;
    for (uint32_t g = 0; g < r->model->geometry.n_groups; g++)
        if (!group_fits(&own->groups[g], &most->groups[g])) return false;
    return true;
}

static void plan_group(kvp__runner *r, uint32_t group)
{
    kvp__cuda_plan *p = &r->plans[group];
    kvp__cuda_counts *n = &r->shape.groups[group];
    kvp__cuda_plan_make(p, r->work);
    memcpy(n->items, p->n_items, sizeof n->items);
    for (uint32_t t = 0; t < KVP__ATTEND_TILES; t++) n->all_items += p->n_items[t];
    n->rows = p->n_rows;
    n->merges = p->n_merges;
    n->slots = p->n_slots;
    r->tile_set |= p->tiles;
}

void kvp__cuda_count_step(kvp__runner *r)
{
    const kvp__work *w = r->work;
    kvp__cuda_shape *s = &r->shape;
    memset(s, 0, sizeof *s);
    patch_tables(r);
    s->rows = w->n_rows;
    s->seqs = w->n_seqs;
    s->outputs = w->n_outputs;
    s->copies = w->n_copies;
    s->patches = r->n_patches;
    r->tile_set = 0;
    for (uint32_t g = 0; g < r->model->geometry.n_groups; g++)
        if (r->model->geometry.groups[g].layers) plan_group(r, g);
}

static uint32_t bucket_of(uint32_t rows)
{
    uint32_t b = 0;
    while (b < KVP__CUDA_BUCKETS && 1u << b < rows) b++;
    return b;
}

bool kvp__cuda_bucket_shape(const kvp__runner *r, uint32_t tiles, uint32_t *bucket,
                            kvp__cuda_shape *out)
{
    uint32_t b = bucket_of(r->shape.rows), rows;
    if (b == KVP__CUDA_BUCKETS || r->shape.rows != r->shape.seqs) return false;
    rows = 1u << b < r->max_rows ? 1u << b : r->max_rows;
    kvp__cuda_most(r, rows, rows < r->max_seqs ? rows : r->max_seqs,
                   rows < r->max_outputs ? rows : r->max_outputs, out);
    out->copies = 0;
    for (uint32_t g = 0; g < r->model->geometry.n_groups; g++)
        for (uint32_t t = 0; t < KVP__ATTEND_TILES; t++)
            if (!(tiles >> t & 1)) out->groups[g].items[t] = 0;
    *bucket = b;
    return fits(r, &r->shape, out);
}

/* A bucket's shape instead of the step's own, if it takes the step. */
static void choose_bucket(kvp__runner *r)
{
    uint32_t b;
    kvp__cuda_shape most;
    r->bucket = KVP__CUDA_BUCKETS;
    if (r->graphs_off || r->whole_tables || r->work->n_outputs == 0 ||
        !kvp__cuda_bucket_shape(r, r->tile_set, &b, &most))
        return;
    cut_tiles(r, most.outputs, false);
    if (!place_outputs(r)) return;
    r->bucket = b;
    r->shape = most;
}

/* --- filling --- */

static void fill_rows(const kvp__runner *r, uint8_t *to)
{
    const kvp__work *w = r->work;
    uint32_t *row_seq = (uint32_t *)(void *)(to + r->upload.row_seq);
    if (w->tokens) memcpy(to + r->upload.tokens, w->tokens, w->n_rows * sizeof *w->tokens);
    memcpy(to + r->upload.positions, w->positions, w->n_rows * sizeof *w->positions);
    for (uint32_t s = 0; s < w->n_seqs; s++)
        for (uint32_t i = 0; i < w->seqs[s].n_rows; i++) row_seq[w->seqs[s].first_row + i] = s;
}

static void fill_outputs(const kvp__runner *r, uint8_t *to)
{
    uint32_t *rows = (uint32_t *)(void *)(to + r->upload.outputs);
    kvp__cuda_draw *draws = (kvp__cuda_draw *)(void *)(to + r->upload.draws);
    for (uint32_t i = 0; i < r->work->n_outputs; i++) {
        rows[i] = r->work->outputs[r->order[i]];
        draws[i] = draw_of(r->work, r->order[i]);
    }
}

static void fill_copies(const kvp__runner *r, uint8_t *to)
{
    kvp__cuda_copy *copies = (kvp__cuda_copy *)(void *)(to + r->upload.copies);
    for (uint32_t i = 0; i < r->work->n_copies; i++) {
        const kvp__copy *c = &r->work->copies[i];
        copies[i] = (kvp__cuda_copy){c->group, c->src, c->dst, c->tokens};
    }
}

static void fill_lists(const kvp__runner *r, uint32_t group, uint8_t *to)
{
    const kvp__cuda_plan *p = &r->plans[group];
    uint32_t items = 0;
    for (uint32_t t = 0; t < KVP__ATTEND_TILES; t++) items += p->n_items[t];
    memcpy(to + r->upload.groups[group].items, p->items, items * sizeof *p->items);
    memcpy(to + r->upload.groups[group].rows, p->rows, p->n_rows * sizeof *p->rows);
    memcpy(to + r->upload.groups[group].merges, p->merges, p->n_merges * sizeof *p->merges);
    memcpy(to + r->upload.groups[group].slots, p->slots, p->n_slots * sizeof *p->slots);
}

void kvp__cuda_fill_upload(kvp__runner *r, const kvp__cuda_shape *s, uint8_t *to)
{
    const kvp__work *w = r->work;
    uint32_t n_groups = r->model->geometry.n_groups;
    kvp__cuda_step step = {.n_rows = w->n_rows, .n_seqs = w->n_seqs, .n_outputs = w->n_outputs,
                           .n_patches = r->n_patches, .n_copies = w->n_copies};
    kvp__cuda_place_upload(&r->upload, s, n_groups);
    fill_rows(r, to);
    if (r->arch) fill_outputs(r, to);
    for (uint32_t g = 0; g < n_groups; g++) {
        if (!r->model->geometry.groups[g].layers) continue;
        fill_lists(r, g, to);
        kvp__cuda_plan_counts(&r->plans[g], &step);
    }
    fill_copies(r, to);
    memcpy(to + r->upload.patches, r->patches, r->n_patches * sizeof *r->patches);
    memcpy(to, &step, sizeof step);
}

void kvp__cuda_prepare_step(kvp__runner *r)
{
    kvp__cuda_count_step(r);
    r->n_host = 0;
    for (uint32_t i = 0; i < r->work->n_outputs; i++) r->n_host += !can_choose(r->work, i);
    choose_bucket(r);
    if (r->bucket == KVP__CUDA_BUCKETS) {
        cut_tiles(r, r->work->n_outputs, true);
        (void)place_outputs(r);
    }
    order_outputs(r);
    kvp__cuda_fill_upload(r, &r->shape, r->uploads);
}

/* One copy; and the tables, where there was more to change than it holds. */
void kvp__cuda_put_upload(kvp__runner *r, const uint8_t *from)
{
    uint64_t bytes = r->upload.patches + r->n_patches * sizeof(kvp__cuda_patch);
    kvp__cuda_note(r, r->card.cu->cuMemcpyHtoDAsync(r->upload_at, from, (size_t)bytes, r->queue),
                   "a copy of a step", false);
    for (uint32_t g = 0; g < r->model->geometry.n_groups && r->whole_tables && !r->error; g++) {
        uint64_t table = (uint64_t)r->work->n_seqs * r->table_stride * sizeof *r->shadow;
        kvp__cuda_note(r, r->card.cu->cuMemcpyHtoDAsync(kvp__cuda_table(r, g), shadow_of(r, g, 0),
                                                        (size_t)table, r->queue),
                       "a copy of block tables", false);
    }
}
