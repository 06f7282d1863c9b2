/*
 * exp, ln, pow, sine and cosine in double precision. See fmath.h.
 *
 * Every step is an IEEE addition, multiplication or division in a written order (the build forbids
 * contraction), so the results are the same bits on every machine. The polynomials are Taylor
 * series cut where the next term is below 2^-54: no table of magic coefficients to mistrust.
 */
#include "base/fmath.h"

#include <stdint.h>
#include <string.h>

static double from_bits(uint64_t u)
{
    double d;
    memcpy(&d, &u, sizeof d);
    return d;
}

static uint64_t to_bits(double d)
{
    uint64_t u;
    memcpy(&u, &d, sizeof u);
    return u;
}

/* To the nearest integer, ties to even; |x| < 2^51. */
static double nearest(double x)
{
    const double magic = 0x1.8p52;
    return (x + magic) - magic;
}

#define LN2_HI 0x1.62e42feep-1          /* 32 bits: times an exponent it is exact */
#define LN2_LO 0x1.a39ef35793c76p-33
#define LOG2_E 0x1.71547652b82fep0

static double pow2(int k) { return from_bits((uint64_t)(k + 1023) << 52); }

double kvp__exp(double x)
{
    if (x != x) return x;
    if (x > 709.782712893384) return from_bits(0x7ff0000000000000u);
    if (x < -745.2) return 0.0;
    double k = nearest(x * LOG2_E);
    double r = (x - k * LN2_HI) - k * LN2_LO; /* |r| <= ln(2) / 2 */
    double sum = 1.0 / 6227020800.0;          /* 1 / 13! */
    static const double inv[] = {479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0,
                                 720.0,       120.0,      24.0,      6.0,      2.0};
    for (unsigned i = 0; i < sizeof inv / sizeof inv[0]; i++) sum = sum * r + 1.0 / inv[i];
    double y = 1.0 + (r + r * r * sum);
    int n = (int)k, half = n / 2; /* in two steps, so that denormal results are reached */
    return y * pow2(half) * pow2(n - half);
}

double kvp__ln(double x)
{
    if (x != x) return x;
    if (x < 0.0) return from_bits(0x7ff8000000000000u);
    if (x == 0.0) return from_bits(0xfff0000000000000u);
    if (to_bits(x) == 0x7ff0000000000000u) return x;
    int k = 0;
    if (x < 0x1p-1022) {
        x *= 0x1p54;
        k = -54;
    }
    uint64_t u = to_bits(x);
    k += (int)(u >> 52) - 1023;
    double m = from_bits((u & 0xfffffffffffffu) | 0x3ff0000000000000u);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        k++;
    }
    /* ln(m) = 2 atanh(s), s = (m - 1) / (m + 1), |s| <= 0.1716; f = m - 1 is exact */
    double f = m - 1.0, s = f / (2.0 + f), z = s * s, sum = 1.0 / 23.0;
    for (int i = 21; i >= 3; i -= 2) sum = sum * z + 1.0 / (double)i;
    double tail = 2.0 * s * z * sum + (double)k * LN2_LO;
    return (double)k * LN2_HI + (2.0 * s + tail);
}

double kvp__pow(double base, double exponent) { return kvp__exp(exponent * kvp__ln(base)); }

/* pi / 2 = 0x1.921fb54442d18469898cc5170p0 in two parts of 21 and 23 bits, whose products with a
 * quadrant number below 2^30 are exact, and the rest. */
#define PIO2_A 0x1.921fbp0
#define PIO2_B 0x1.5110b4p-22
#define PIO2_C 0x1.8469898cc5170p-48
#define TWO_OVER_PI 0x1.45f306dc9c883p-1

void kvp__sincos(double x, double *sine, double *cosine)
{
    double k = nearest(x * TWO_OVER_PI);
    double a = x - k * PIO2_A; /* exact: the two are within a factor of two, or k is 0 */
    double b = k * PIO2_B;
    double r = a - b;
    double v = r - a;
    double lost = (a - (r - v)) - (b + v); /* what the subtraction rounded away */
    r = r + (lost - k * PIO2_C);

    double z = r * r;
    static const double sin_inv[] = {6227020800.0, 39916800.0, 362880.0, 5040.0, 120.0, 6.0};
    double s = -1.0 / 1307674368000.0;
    double sign = 1.0;
    for (unsigned i = 0; i < sizeof sin_inv / sizeof sin_inv[0]; i++, sign = -sign)
        s = s * z + sign / sin_inv[i];
    s = r + r * z * s;
    static const double cos_inv[] = {87178291200.0, 479001600.0, 3628800.0, 40320.0, 720.0, 24.0};
    double c = 1.0 / 20922789888000.0;
    sign = -1.0;
    for (unsigned i = 0; i < sizeof cos_inv / sizeof cos_inv[0]; i++, sign = -sign)
        c = c * z + sign / cos_inv[i];
    c = 1.0 - 0.5 * z + z * z * c;

    switch ((unsigned)(int64_t)k & 3u) {
    case 0: *sine = s; *cosine = c; break;
    case 1: *sine = c; *cosine = -s; break;
    case 2: *sine = -s; *cosine = -c; break;
    default: *sine = -c; *cosine = s; break;
    }
}
