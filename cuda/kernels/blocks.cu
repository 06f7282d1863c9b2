/*
 * Blocks of KV and their tables: copy_blocks, patch.
 *
 * copy_blocks is copy-on-write: of a block, the live tokens alone, for every layer and head. A
 * block of threads takes one layer of one copy; a head's live part is contiguous. Bytes: twice the
 * live tokens' KV. Four loads are under way in a thread before the first is stored, in 16-byte
 * pieces where everything is aligned to that, else in 4-byte ones, which the layout guarantees.
 *
 * patch writes the entries of block tables that changed: 12 bytes each.
 *
 * Weighed, not measured: a loop over heads outside leaves most threads without work for small
 * blocks of small heads, so heads and pieces are one index. Division by the pieces of a head costs
 * less than the load it hides behind.
 *
 * Registers on sm_90 / sm_80: copy_blocks 40 / 40, patch 12 / 10; no spills (budget.txt).
 */
#include "cuda/kernels/elements.h"
#include "cuda/kernels/launch.h"

namespace kvp {

#define AT_ONCE 4u

KVP_DEV uint4 load_piece(const uint4 *p) { return load16(p); }
KVP_DEV uint32_t load_piece(const uint32_t *p) { return *p; }

/* `bytes` of each head. Piece i of all is piece i % pieces of head i / pieces. */
template <class Piece>
KVP_DEV void copy_pieces(uint8_t *to, const uint8_t *from, uint32_t heads, uint64_t head,
                         uint32_t bytes)
{
    uint32_t pieces = bytes / (uint32_t)sizeof(Piece), n = heads * pieces;
    for (uint32_t first = threadIdx.x; first < n; first += AT_ONCE * KVP__COPY_THREADS) {
        Piece piece[AT_ONCE] = {};
        uint64_t at[AT_ONCE];
        KVP_UNROLL
        for (uint32_t j = 0; j < AT_ONCE; j++) {
            uint32_t i = first + j * KVP__COPY_THREADS, h = i / pieces;
            at[j] = h * head + (uint64_t)(i - h * pieces) * sizeof(Piece);
            if (i < n) piece[j] = load_piece((const Piece *)(from + at[j]));
        }
        KVP_UNROLL
        for (uint32_t j = 0; j < AT_ONCE; j++)
            if (first + j * KVP__COPY_THREADS < n) *(Piece *)(to + at[j]) = piece[j];
    }
}

KVP_DEV void copy_part(uint8_t *to, const uint8_t *from, uint32_t heads, uint64_t head,
                       uint32_t bytes)
{
    if ((((uintptr_t)to | (uintptr_t)from | head | bytes) & 15) == 0)
        copy_pieces<uint4>(to, from, heads, head, bytes);
    else copy_pieces<uint32_t>(to, from, heads, head, bytes);
}

KVP_KERNEL(copy_blocks, kvp__copy_args, KVP__COPY_THREADS)
{
    if (blockIdx.x >= a.step->n_copies) return;
    const kvp__cuda_copy &c = a.copies[blockIdx.x];
    const kvp__cuda_copy_group &g = a.groups[c.group];
    if (blockIdx.y >= g.layers) return;
    uint8_t *layer = a.slab + g.base + blockIdx.y * g.layer;
    uint8_t *to = layer + c.dst * g.pitch;
    const uint8_t *from = layer + c.src * g.pitch;
    copy_part(to, from, g.kv_heads, g.k_head, c.tokens * g.k_token);
    copy_part(to + g.k_part, from + g.k_part, g.kv_heads, g.v_head, c.tokens * g.v_token);
}

KVP_KERNEL(patch, kvp__patch_args, KVP__PATCH_THREADS)
{
    uint32_t i = blockIdx.x * KVP__PATCH_THREADS + threadIdx.x;
    if (i >= a.step->n_patches) return;
    a.tables[a.patches[i].index] = a.patches[i].value;
}

} // namespace kvp
