/*
 * exp, log, power, sine and cosine of our own, in double precision, from IEEE basic operations in
 * a fixed order: the C library's choose their code by CPU and would leak into "same tokens, same
 * bits". Accurate to about 1e-15 relative (log, exp) and 1e-15 absolute (sine and cosine, arguments
 * up to 2^30). Vector versions for the kernels are in cpu/.
 */
#ifndef KVP_BASE_FMATH_H
#define KVP_BASE_FMATH_H

double kvp__exp(double x);            /* 0 below -745, +inf above 709.78; NaN stays */
double kvp__ln(double x);             /* x > 0; -inf at 0; NaN below */
double kvp__pow(double base, double exponent); /* base > 0 */
void kvp__sincos(double x, double *sine, double *cosine);

#endif
