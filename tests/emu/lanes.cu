/*
 * The kernel behind lanes.h: one operation, each lane with words of its own.
 */
#include "cuda/kernels/device.h"
#include "tests/emu/lanes.h"

namespace {

union word {
    uint32_t u;
    float f;
};

KVP_DEV float as_float(uint32_t u)
{
    word w;
    w.u = u;
    return w.f;
}

KVP_DEV uint32_t as_word(float f)
{
    word w;
    w.f = f;
    return w.u;
}

union pair {
    uint32_t u[2];
    double d;
};

KVP_DEV double as_double(uint32_t lo, uint32_t hi)
{
    pair p;
    p.u[0] = lo;
    p.u[1] = hi;
    return p.d;
}

KVP_DEV void put_double(uint32_t (&o)[4], double d)
{
    pair p;
    p.d = d;
    o[0] = p.u[0];
    o[1] = p.u[1];
}

/* Lanes' own words in shared memory, 16 bytes each, come back as whatever the operation makes of them. */
KVP_DEV void through_shared(uint32_t operation, const uint32_t (&i)[4], const uint32_t *from,
                            unsigned char *shared, uint32_t (&o)[4])
{
    uint32_t lane = threadIdx.x;
    auto *mine = reinterpret_cast<uint32_t *>(shared) + lane * 4;
    for (int w = 0; w < 4; w++) mine[w] = i[w];
    __syncwarp();
    if (operation == LANES_ldsm4) {
        kvp::ldsm4(o, mine);
    } else if (operation == LANES_ldsm4t) {
        kvp::ldsm4t(o, mine);
    } else {
        auto *other = reinterpret_cast<uint32_t *>(shared + 512) + lane * 4;
        kvp::cp_async16(other, from, operation == LANES_cp_async16_on);
        kvp::cp_commit();
        kvp::cp_wait<0>();
        for (int w = 0; w < 4; w++) o[w] = other[w];
    }
}

KVP_DEV void products(uint32_t operation, const uint32_t (&i)[4], uint32_t (&o)[4])
{
    float c[4] = {1.0f, -0.5f, 0.25f, 0.0f};
    if (operation == LANES_mma_f16)
        kvp::mma_f16(c, i, i[1] ^ 0x80008000u, i[2]);
    else
        kvp::mma_bf16(c, i, i[1] ^ 0x80008000u, i[2]);
    for (int w = 0; w < 4; w++) o[w] = as_word(c[w]);
}

KVP_DEV float approximate(uint32_t operation, float x)
{
    switch (operation) {
    case LANES_lg2: return kvp::lg2(x);
    case LANES_rcp: return kvp::rcp(x);
    case LANES_tanh_fast: return kvp::tanh_fast(x);
    default: return kvp::ex2(x);
    }
}

KVP_DEV uint32_t converted(uint32_t operation, uint32_t u, uint32_t next)
{
    float f = as_float(u);
    switch (operation) {
    case LANES_pack_f16: return kvp::pack_f16(f, as_float(next));
    case LANES_pack_bf16: return kvp::pack_bf16(f, as_float(next));
    case LANES_float_f16: return kvp::float_f16(f);
    case LANES_float_bf16: return kvp::float_bf16(f);
    case LANES_f16_float: return as_word(kvp::f16_float((uint16_t)u));
    default: return as_word(kvp::bf16_float((uint16_t)u));
    }
}

KVP_DEV void unpacked(uint32_t operation, const uint32_t (&i)[4], uint32_t (&o)[4])
{
    for (int w = 0; w < 4; w += 2) {
        float2 f = operation == LANES_unpack_f16 ? kvp::unpack_f16(i[w]) : kvp::unpack_bf16(i[w]);
        o[w] = as_word(f.x);
        o[w + 1] = as_word(f.y);
    }
}

KVP_DEV void shuffles(const uint32_t (&i)[4], uint32_t (&o)[4])
{
    o[0] = kvp::shfl(i[0], (int)(i[1] % 32));
    o[1] = kvp::shfl_xor(i[1], 5);
    o[2] = kvp::shfl_up(i[2], 3u);
    o[3] = (uint32_t)kvp::shfl_down((int)i[3], 7u);
}

KVP_DEV void votes(const uint32_t (&i)[4], uint32_t (&o)[4])
{
    o[0] = kvp::ballot((i[0] & 1) != 0);
    o[1] = kvp::any((i[1] & 63) == 0);
    o[2] = kvp::all((i[2] & 63) != 0);
    o[3] = kvp::ballot(true);
}

/* What a lane adds to is the neighbour's, and all add to one, which is looked at when all have. */
KVP_DEV void added(uint32_t operation, const uint32_t (&i)[4], unsigned char *shared, uint32_t (&o)[4])
{
    uint32_t lane = threadIdx.x;
    auto *sums = reinterpret_cast<uint32_t *>(shared);
    auto *floats = reinterpret_cast<float *>(shared + 256);
    sums[lane] = i[0];
    floats[lane] = (float)lane;
    if (lane == 0) sums[32] = 0;
    kvp::bar_sync(1, 32);
    o[0] = o[1] = o[2] = o[3] = 0;
    if (operation == LANES_bar_sync) {
        o[0] = sums[lane ^ 31];
        return;
    }
    o[0] = kvp::atomic_add(sums + (lane + 1) % 32, i[1]);
    o[1] = as_word(kvp::atomic_add(floats + (lane + 1) % 32, 0.5f));
    kvp::atomic_add(sums + 32, i[2]);
    kvp::bar_sync(1, 32);
    o[2] = sums[32];
    o[3] = as_word(floats[lane]);
}

KVP_DEV float rounded(uint32_t operation, float x, float y, float z)
{
    switch (operation) {
    case LANES_add_rn: return kvp::add_rn(x, y);
    case LANES_mul_rn: return kvp::mul_rn(x, y);
    case LANES_fma_rn: return kvp::fma_rn(x, y, z);
    default: return kvp::div_rn(x, y);
    }
}

KVP_DEV double rounded(uint32_t operation, double x, double y)
{
    switch (operation) {
    case LANES_add_rn_double: return kvp::add_rn(x, y);
    case LANES_mul_rn_double: return kvp::mul_rn(x, y);
    case LANES_fma_rn_double: return kvp::fma_rn(x, y, -x);
    default: return kvp::div_rn(x, y);
    }
}

} // namespace

KVP_KERNEL(lanes, lanes_args, 32)
{
    KVP_SMEM(shared);
    uint32_t at = (blockIdx.x * 32 + threadIdx.x) * LANES_WORDS;
    uint32_t i[4], o[4] = {0, 0, 0, 0};
    for (int w = 0; w < 4; w++) i[w] = a.in[at + w];
    switch (a.operation) {
    case LANES_cp_async16_on:
    case LANES_cp_async16_off:
    case LANES_ldsm4:
    case LANES_ldsm4t: through_shared(a.operation, i, a.in + at, shared, o); break;
    case LANES_load16: {
        uint4 v = kvp::load16(a.in + at);
        o[0] = v.x, o[1] = v.y, o[2] = v.z, o[3] = v.w;
        break;
    }
    case LANES_mma_f16:
    case LANES_mma_bf16: products(a.operation, i, o); break;
    case LANES_ex2:
    case LANES_ex2_any:
    case LANES_lg2:
    case LANES_rcp:
    case LANES_tanh_fast:
        for (int w = 0; w < 4; w++) o[w] = as_word(approximate(a.operation, as_float(i[w])));
        break;
    case LANES_unpack_f16:
    case LANES_unpack_bf16: unpacked(a.operation, i, o); break;
    case LANES_shuffles: shuffles(i, o); break;
    case LANES_shuffles_of_doubles: {
        put_double(o, kvp::shfl_xor(as_double(i[0], i[1]), 9));
        break;
    }
    case LANES_votes: votes(i, o); break;
    case LANES_bar_sync:
    case LANES_atomic_add: added(a.operation, i, shared, o); break;
    case LANES_add_rn:
    case LANES_mul_rn:
    case LANES_fma_rn:
    case LANES_div_rn:
        for (int w = 0; w < 4; w++)
            o[w] = as_word(rounded(a.operation, as_float(i[w]), as_float(i[(w + 1) % 4]),
                                   as_float(i[(w + 2) % 4])));
        break;
    case LANES_add_rn_double:
    case LANES_mul_rn_double:
    case LANES_fma_rn_double:
    case LANES_div_rn_double:
        put_double(o, rounded(a.operation, as_double(i[0], i[1]), as_double(i[2], i[3])));
        break;
    case LANES_dp4a: o[0] = (uint32_t)kvp::dp4a((int)i[0], (int)i[1], (int)i[2]); break;
    default:
        for (int w = 0; w < 4; w++) o[w] = converted(a.operation, i[w], i[(w + 1) % 4]);
    }
    for (int w = 0; w < 4; w++) a.out[at + w] = o[w];
}
