/*
 * Decode steps recorded once and replayed: a step of many small kernels costs the host one call.
 *
 * A graph is recorded for a bucket of rows (1, 2, 4, ...) and the set of tiles that its attention
 * has, the first time but one that such a step comes: before, its kernels ran as they are, so that
 * the driver and cuBLAS have loaded what they load at the first use, which a recording may not.
 * Upload and results are not in the graph; whatever changes from step to step is in the upload
 * (kernels/args.h), so that any step which fits into the bucket's shape is right, whatever was
 * replayed before.
 *
 * It is recorded on a stream of its own: the host's is not touched, and the graph runs on any.
 */
#include "cuda/runner.h"

/* What a recording needs that fails leaves nothing behind but one line in the log: steps go on as
 * they are, launch by launch. */
static void give_up(kvp__runner *r, kvp__cu_result e, const char *what)
{
    const char *name = NULL;
    if (r->card.cu->cuGetErrorName(e, &name) || !name) name = "an unknown error";
    r->graphs_off = true;
    kvp__log(&r->hooks, KVP_LOG_WARN, "device cuda:%u: steps are not recorded: %s: %s",
             (unsigned)r->card.ordinal, what, name);
}

static bool record(kvp__runner *r, kvp__cuda_recorded *to)
{
    const kvp__cuda_api *cu = r->card.cu;
    kvp__cu_graph graph = NULL;
    kvp__cu_result e = cu->cuStreamBeginCapture(r->recording, KVP__CU_CAPTURE_THREAD_LOCAL);
    if (e) {
        give_up(r, e, "a recording does not begin");
        return false;
    }
    kvp__cuda_use_stream(r, r->recording);
    kvp__cuda_put_forward(r);
    kvp__cu_result failed = r->error;
    e = cu->cuStreamEndCapture(r->recording, &graph);
    if (failed) e = failed;
    if (!e) e = cu->cuGraphInstantiateWithFlags(&to->graph, graph, 0);
    if (graph) (void)cu->cuGraphDestroy(graph);
    r->error = KVP__CU_SUCCESS;
    r->blas_error = false;
    r->queue = r->stream;
    if (!e) return true;
    to->graph = NULL;
    give_up(r, e, failed ? r->what : "the recording");
    return false;
}

bool kvp__cuda_replay(kvp__runner *r)
{
    kvp__cuda_recorded *b = &r->recorded[r->bucket][r->tile_set];
    if (r->error) return true; /* nothing more is put on the stream */
    if (!b->seen) {
        b->seen = true;
        return false;
    }
    if (!b->graph && (r->graphs_off || !record(r, b))) return false;
    kvp__cuda_note(r, r->card.cu->cuGraphLaunch(b->graph, r->queue), "a recorded step", false);
    return true;
}

void kvp__cuda_forget_graphs(kvp__runner *r)
{
    for (uint32_t i = 0; i < KVP__CUDA_BUCKETS; i++)
        for (uint32_t t = 0; t < 1u << KVP__ATTEND_TILES; t++) {
            kvp__cu_graph_exec *graph = &r->recorded[i][t].graph;
            if (*graph) (void)r->card.cu->cuGraphExecDestroy(*graph);
            *graph = NULL;
        }
}
