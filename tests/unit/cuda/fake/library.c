/*
 * A library with the symbols of a list of cuda/api.h and nothing behind them: a stand-in for the
 * driver or cuBLAS when test_load.c looks for them. LIST is the list; HIDE, if given, is the symbol
 * that this library lacks.
 */
#include "cuda/api.h"

#define STUB(name, suffix, args)                                                                   \
    kvp__cu_result stub_##name args __asm__(#name suffix);                                         \
    kvp__cu_result stub_##name args { return KVP__CU_NO_DEVICE; }

LIST(STUB)

#ifdef HIDE
__asm__(".hidden " HIDE);
#endif
