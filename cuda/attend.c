/*
 * Attention for a host's own model: a planned step begins with its upload, then a layer's attention
 * is two kernels and a merge on the stream, whose arguments are the same in every step.
 *
 * That is what lets a host record the call in a graph of its own: sections of the upload lie where
 * they lie for the largest step (not where this step's end), the host's pointers are the host's to
 * keep, and what differs between steps is in the upload, which `begin` sends outside of any
 * recording. A recorded call has the grids of the bucket of rows that its step was in (1, 2, 4,
 * ...): replayed in a later step that has begun, it is right if in both every sequence has one row
 * and the later one has no more rows than the bucket. Steps with prompts in them are put on the
 * stream as they are.
 *
 * `begin` fills one of a few pinned buffers in turn, so that the host may be steps ahead of the
 * card. It waits only for a buffer that the card has not read yet, KVP__CUDA_UPLOADS steps behind.
 *
 * Without a stream of the host's nobody could wait for the result, so then attend does.
 */
#include "cuda/runner.h"

#include <sched.h>

static kvp_status failed(kvp__runner *r, kvp_error *err)
{
    kvp_status s = kvp__cuda_fail(&r->card, err, r->error, r->what);
    if (s == KVP_ERR_DEVICE_LOST) atomic_store(&r->lost, 1);
    return s;
}

static kvp_status lost(const kvp__runner *r, kvp_error *err)
{
    return kvp__fail(err, KVP_ERR_DEVICE_LOST, "device cuda:%u stopped working",
                     (unsigned)r->card.ordinal);
}

static kvp_status is_recording(kvp__runner *r, bool *out, kvp_error *err)
{
    int capturing = KVP__CU_CAPTURE_NONE;
    if (r->of_host) {
        kvp__cu_result e = r->card.cu->cuStreamIsCapturing(r->stream, &capturing);
        if (e) return kvp__cuda_fail(&r->card, err, e, "the host's stream");
    }
    *out = capturing != KVP__CU_CAPTURE_NONE;
    return KVP_OK;
}

static uint8_t *next_upload(kvp__runner *r)
{
    r->turn = (r->turn + 1) % r->n_uploads;
    while (r->pending[r->turn]) {
        kvp__cu_result e = r->card.cu->cuEventQuery(r->sent[r->turn]);
        if (e == KVP__CU_NOT_READY) {
            (void)sched_yield();
            continue;
        }
        kvp__cuda_note(r, e, "a copy of a step", false);
        r->pending[r->turn] = false;
    }
    return r->uploads + r->turn * r->upload_bytes;
}

/* The tables that an upload reads from `shadow` itself must not change before it has. */
static void wait_for_tables(kvp__runner *r)
{
    if (r->whole_tables)
        kvp__cuda_note(r, r->card.cu->cuStreamSynchronize(r->queue), "a copy of block tables",
                       false);
}

static kvp_status begin(kvp__runner *r, const kvp__work *work, kvp_error *err)
{
    bool recording;
    kvp_status s = is_recording(r, &recording, err);
    if (s != KVP_OK) return s;
    if (recording)
        return kvp__fail(err, KVP_ERR_UNSUPPORTED,
                         "a step cannot begin while its stream is recorded; attention alone can "
                         "be");
    r->work = work;
    r->queue = r->stream;
    r->error = KVP__CU_SUCCESS;
    uint8_t *to = next_upload(r);
    kvp__cuda_shape most;
    kvp__cuda_most(r, r->max_rows, r->max_seqs, r->max_outputs, &most);
    kvp__cuda_count_step(r);
    kvp__cuda_fill_upload(r, &most, to);
    kvp__cuda_put_upload(r, to);
    if (!r->error) {
        kvp__cuda_note(r, r->card.cu->cuEventRecord(r->sent[r->turn], r->queue), "an event", false);
        r->pending[r->turn] = !r->error;
    }
    wait_for_tables(r);
    kvp__cuda_put_tables(r);
    r->shape.copies = r->shape.patches = 0; /* done */
    r->work = NULL;
    if (!r->error) return KVP_OK;
    kvp__cuda_forget_tables(r);
    return failed(r, err);
}

kvp_status kvp__cuda_begin(kvp__runner *r, const kvp__work *work, kvp_error *err)
{
    if (atomic_load(&r->lost)) return lost(r, err);
    kvp_status s = kvp__cuda_enter(&r->card, err);
    if (s != KVP_OK) return s;
    s = begin(r, work, err);
    kvp__cuda_leave(&r->card);
    return s;
}

/* --- a layer --- */

static void put_append(kvp__runner *r, const kvp__attend *a)
{
    const kvp__geometry *geometry = &r->model->geometry;
    uint32_t group = geometry->layer_group[a->layer];
    const kvp_layer_group *g = &geometry->groups[group];
    int64_t size = a->type == KVP_KV_F32 ? 4 : 2;
    kvp__append_args args = {
        .step = kvp__cuda_sent(r, 0), .q = a->q, .k = a->k, .v = a->v, .q_row = a->q_row / size,
        .q_head = a->q_head / size, .k_row = a->k_row / size, .k_head = a->k_head / size,
        .v_row = a->v_row / size, .v_head = a->v_head / size,
        .positions = kvp__cuda_sent(r, r->upload.positions),
        .row_seq = kvp__cuda_sent(r, r->upload.row_seq),
        .tables = (const uint32_t *)(uintptr_t)kvp__cuda_table(r, group),
        .q_out = (void *)(uintptr_t)r->q, .table_stride = r->table_stride,
        .block_shift = r->block_shift, .in_type = a->type, .k_type = r->store->layout.k_format,
        .v_type = r->store->layout.v_format, .query_heads = g->query_heads, .kv_heads = g->kv_heads,
        .key_dim = g->key_dim, .value_dim = g->value_dim, .rope_magnitude = 1.0f, .eps = 1.0f};
    kvp__cuda_fill_kv(r, a->layer, &args.kv);
    kvp__cuda_run(r, r->kernels[KVP__CUDA_append], kvp__launch_append(r->shape.rows, &args), &args,
                  "append");
}

/* The grids of a recording: those of the bucket, in every tile that a later step may have. */
static kvp_status widen(kvp__runner *r, kvp__cuda_shape *own, kvp_error *err)
{
    kvp__cuda_shape bucket;
    uint32_t number;
    *own = r->shape;
    if (kvp__cuda_bucket_shape(r, ~0u, &number, &bucket)) {
        r->shape = bucket;
        return KVP_OK;
    }
    return kvp__fail(err, KVP_ERR_UNSUPPORTED,
                     "attention is recorded for steps in which every sequence has one row; this "
                     "one has %u rows of %u sequences", (unsigned)r->shape.rows,
                     (unsigned)r->shape.seqs);
}

static kvp_status attend(kvp__runner *r, const kvp__attend *a, kvp_error *err)
{
    int64_t size = a->type == KVP_KV_F32 ? 4 : 2;
    bool recording;
    kvp__cuda_shape own;
    kvp_status s = is_recording(r, &recording, err);
    if (s == KVP_OK && recording) s = widen(r, &own, err);
    if (s != KVP_OK) return s;
    kvp__attention_args args = {.out = a->out, .out_row = a->out_row / size,
                                .out_head = a->out_head / size, .out_type = a->type,
                                .scale = a->scale, .softcap = a->softcap};
    r->queue = r->stream;
    r->error = KVP__CU_SUCCESS;
    put_append(r, a);
    kvp__cuda_put_attention(r, a->layer, &args);
    if (recording) r->shape = own;
    if (!r->of_host && !r->error)
        kvp__cuda_note(r, r->card.cu->cuStreamSynchronize(r->stream), "attention", false);
    if (r->error) return failed(r, err);
    return recording ? KVP_PLANNED : KVP_OK;
}

kvp_status kvp__cuda_attend(kvp__runner *r, const kvp__work *work, const kvp__attend *a,
                            kvp_error *err)
{
    (void)work; /* what it says was sent by begin */
    if (atomic_load(&r->lost)) return lost(r, err);
    kvp_status s = kvp__cuda_enter(&r->card, err);
    if (s != KVP_OK) return s;
    s = attend(r, a, err);
    kvp__cuda_leave(&r->card);
    return s;
}
