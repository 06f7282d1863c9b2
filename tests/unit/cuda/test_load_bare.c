/*
 * A library without kernels says so before it looks for anything. A program of its own, because
 * the number of images is a constant of the program.
 */
#include "cuda/api.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

const kvp__cuda_image kvp__cuda_images[] = {{0, 0}};
const uint32_t kvp__cuda_n_images = 0;
const uint32_t kvp__cuda_toolkit = 0;

static void says_that_it_has_no_kernels(void **s)
{
    (void)s;
    const kvp__cuda_found *f = kvp__cuda_load();
    assert_string_equal(f->missing, "this library was built without CUDA kernels");
    assert_null(f->cuda);
    assert_null(f->blas);
    assert_int_equal(f->n_images, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(says_that_it_has_no_kernels)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
