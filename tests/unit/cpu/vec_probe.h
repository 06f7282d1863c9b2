/*
 * Every operation of lib/cpu/vec.h through arrays, so that levels can be compared. The body
 * (vec_probe_body.h) is compiled once per level: vec_probe_<level>.c.
 */
#ifndef VEC_PROBE_H
#define VEC_PROBE_H

#include <stdint.h>

/* Results of one probe: float operations give 16 floats, others 16 int32. */
enum { PROBE_FLOATS = 24, PROBE_INTS = 34 };
typedef struct probe_result {
    float f[PROBE_FLOATS][16];
    int32_t i[PROBE_INTS][16];
    uint16_t h[4][16];
} probe_result;

typedef struct probe {
    uint32_t level;
    /* All operations on three vectors of floats, three of integers, 64 weights, 4 activations. */
    void (*all)(const float *a, const float *b, const float *c, const int32_t *ia, const int32_t *ib,
                const int32_t *ic, const uint8_t *weights, const int8_t *x, uint32_t n,
                probe_result *out);
    void (*exp)(const float *x, float *out);
    void (*tanh)(const float *x, float *out);
    void (*sigmoid)(const float *x, float *out);
    void (*load_f16)(const uint16_t *x, float *out);
    void (*load_n)(const float *p, uint32_t n, float *out);
    void (*store_n)(float *p, uint32_t n, const float *in);
} probe;

extern const probe probe_generic, probe_avx2, probe_avx512, probe_neon;

#endif
