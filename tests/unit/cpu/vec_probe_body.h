/*
 * Included once by each vec_probe_<level>.c, which defines KVP__LEVEL and PROBE, the table's name.
 */
#include "cpu/vec.h"

#include "vec_probe.h"

static void all(const float *pa, const float *pb, const float *pc, const int32_t *pi,
                const int32_t *pj, const int32_t *pk, const uint8_t *weights, const int8_t *x,
                uint32_t n, probe_result *out)
{
    vf a = vf_load(pa), b = vf_load(pb), c = vf_load(pc);
    vi i = vi_load(pi), j = vi_load(pj), k = vi_load(pk);
    const vf floats[PROBE_FLOATS] = {
        vf_add(a, b), vf_sub(a, b), vf_mul(a, b), vf_div(a, b), vf_sqrt(vf_abs(a)), vf_fma(a, b, c),
        vf_max(a, b), vf_min(a, b), vf_abs(a), vf_neg(a), vf_round(a), vi_to_vf(i), vi_float(i),
        vf_swap_pairs(a), vf_set1(vf_sum(a)), vf_set1(vf_max_lane(a)),
        vf_select(vf_lt(a, b), a, c), vf_select(vf_le(a, b), a, c), vf_select(vf_eq(a, b), a, c),
        vf_select(vm_first(n), a, b), vf_clamp_f16(a), vf_load_n(pa, n),
        vf_select(vm_not(vm_or(vf_lt(a, b), vf_eq(b, c))), a, c),
        vf_select(vm_and(vf_lt(a, b), vf_lt(b, c)), a, c),
    };
    for (int t = 0; t < PROBE_FLOATS; t++) vf_store(out->f[t], floats[t]);

    int8_t bytes[16];
    vi_store_s8(bytes, vi_sar(i, 24));
    vb w = vb_load(weights), w7 = vb_and(w, vb_set1(127));
    vi zero = vi_zero(), scale = vi_set1(0x50005);
    int32_t off = VD_S8_EXCESS * (x[0] + x[1] + x[2] + x[3]);
    uint16_t wide[16];
    vi_store_u16(wide, i);
    const vi ints[PROBE_INTS] = {
        vi_add(i, j), vi_sub(i, j), vi_mul(i, j), vi_and(i, j), vi_or(i, j), vi_xor(i, j),
        vi_max(i, j), vi_min(i, j), vi_shl(i, 5), vi_shr(i, 9), vi_sar(i, 9), vi_iota(),
        vi_set1(pi[3]), vi_select(vi_gt(i, j), i, k), vi_select(vi_eq(i, j), i, k),
        vi_load_u16((const uint16_t *)(const void *)weights), vi_load_u16(wide),
        vi_load_u8(weights), vi_load_s8((const int8_t *)weights), vi_load_s8(bytes),
        vi_set1(vi_sum(vi_sar(i, 8))), vi_madd16(k, i, j), vf_bits(a),
        vf_to_vi(vf_mul(vi_to_vf(vi_sar(i, 8)), vf_set1(0.25f))),
        vb_vi(w), vb_vi(vb_set1(0xa3)), vb_vi(vb_or(w, vb_set1(0x11))),
        vb_vi(vb_and(vb_shl(w, 2), vb_set1(0x3c))), vb_vi(vb_and(vb_shr(w, 3), vb_set1(0x1f))),
        vd_close(k, vd_step(vd_open(k), w7, x)),
        vd_close_scaled(k, vd_step(vd_open(zero), w7, x), scale),
        vi_sub(vd_close(k, vd_step_s8(vd_open(k), w, x)), vi_set1(off)),
        vb_vi(vb_and(vb_shr(w, 4), vb_set1(15))), vb_vi(w7),
    };
    for (int t = 0; t < PROBE_INTS; t++) vi_store(out->i[t], ints[t]);

    vf_store_f16(out->h[0], a);
    vf_store_bf16(out->h[1], a);
    vf_store_bf16_n(out->h[2], b, n);
    vf_store_f16_n(out->h[3], vf_load_bf16_n(out->h[1], n), n);
}

static void exponential(const float *x, float *out) { vf_store(out, vf_exp(vf_load(x))); }
static void tangent(const float *x, float *out) { vf_store(out, vf_tanh(vf_load(x))); }
static void logistic(const float *x, float *out) { vf_store(out, vf_sigmoid(vf_load(x))); }
static void halves(const uint16_t *x, float *out) { vf_store(out, vf_load_f16(x)); }
static void load_n(const float *p, uint32_t n, float *out) { vf_store(out, vf_load_n(p, n)); }
static void store_n(float *p, uint32_t n, const float *in) { vf_store_n(p, vf_load(in), n); }

const probe PROBE = {KVP__LEVEL, all, exponential, tangent, logistic, halves, load_n, store_n};
