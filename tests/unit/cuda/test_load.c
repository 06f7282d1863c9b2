/*
 * The search for the driver and cuBLAS: what is missing is said, in one sentence, and what is found
 * is called by the right symbols. Each search is one of a process of its own (this program again),
 * with a folder of stand-ins in front of the machine's libraries; a broken file there is as good as
 * none. The program has an image of its own, so that it does not matter how the library was built.
 */
#define _GNU_SOURCE
#include "cuda/api.h"

#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

const kvp__cuda_image kvp__cuda_images[] = {{"none", ""}};
const uint32_t kvp__cuda_n_images = 1;
const uint32_t kvp__cuda_toolkit = 0;

/* --- the search, in a child --- */

/* The file whose symbol `name` is at p, without its folder; "?" if another symbol is there. */
static const char *file_of(const void *member, const char *name)
{
    void *p;
    Dl_info info;
    memcpy(&p, member, sizeof p);
    if (!dladdr(p, &info) || !info.dli_sname || strcmp(info.dli_sname, name) != 0) return "?";
    const char *slash = strrchr(info.dli_fname, '/');
    return slash ? slash + 1 : info.dli_fname;
}

/* Prints "<file of the driver>,<file of cuBLAS>,<missing>", a file being "-" without a table. */
static int search(void)
{
    const kvp__cuda_found *f = kvp__cuda_load();
    const char *driver = "-", *blas = "-";
#define DRIVER(name, suffix, args)                                                                 \
    if (f->cuda && driver[0] != '?') driver = file_of(&f->cuda->name, #name suffix);
    KVP__CU_FUNCTIONS(DRIVER)
#define BLAS(name, suffix, args)                                                                   \
    if (f->blas && blas[0] != '?') blas = file_of(&f->blas->name, #name suffix);
    KVP__BLAS_FUNCTIONS(BLAS)
    printf("%s,%s,%s", driver, blas, f->missing);
    return 0;
}

/* --- the parent --- */

static char folder[64], self[4096];

static int run(const char *format, ...)
{
    char line[8192];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    return system(line);
}

static int make_folder(void **s)
{
    (void)s;
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    snprintf(folder, sizeof folder, "/tmp/kvpage-load-XXXXXX");
    return n > 0 && mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **s)
{
    (void)s;
    return run("rm -rf %s", folder);
}

/* Each test begins with two broken libraries, whatever the machine has. */
static int break_all(void **s)
{
    (void)s;
    return run("cd %s && for f in libcuda.so.1 libcublas.so.13 libcublas.so.12; do"
               " rm -f $f && : >$f; done", folder);
}

static void put(const char *file, const char *list, const char *hidden)
{
    const char *cc = getenv("CC");
    char hide[128] = "";
    if (hidden) snprintf(hide, sizeof hide, "-DHIDE='\"%s\"'", hidden);
    assert_int_equal(run("rm -f %s/%s && %s -std=gnu11 -shared -fPIC -I%s/.. -DLIST=%s %s -o %s/%s"
                         " %s/unit/cuda/fake/library.c",
                         folder, file, cc && *cc ? cc : "cc", KVPAGE_TESTS, list, hide, folder,
                         file, KVPAGE_TESTS), 0);
}

static void assert_found(const char *wanted)
{
    char line[8192], said[512] = "";
    snprintf(line, sizeof line, "LD_LIBRARY_PATH=%s '%s' search", folder, self);
    FILE *child = popen(line, "r");
    assert_non_null(child);
    assert_true(fgets(said, sizeof said, child) != NULL);
    assert_int_equal(pclose(child), 0);
    assert_string_equal(said, wanted);
}

#define DRIVER_LIST "KVP__CU_FUNCTIONS"
#define BLAS_LIST "KVP__BLAS_FUNCTIONS"

static void no_driver(void **s)
{
    (void)s;
    put("libcublas.so.13", BLAS_LIST, NULL);
    assert_found("-,-,no CUDA driver (libcuda.so.1)");
}

static void driver_too_old(void **s)
{
    (void)s;
    put("libcublas.so.13", BLAS_LIST, NULL);
    put("libcuda.so.1", DRIVER_LIST, "cuGraphLaunch");
    assert_found("-,-,the driver has no cuGraphLaunch: one for CUDA 11.4 or newer is needed");
    put("libcuda.so.1", DRIVER_LIST, "cuMemAlloc_v2");
    assert_found("-,-,the driver has no cuMemAlloc: one for CUDA 11.4 or newer is needed");
}

static void no_blas(void **s)
{
    (void)s;
    put("libcuda.so.1", DRIVER_LIST, NULL);
    assert_found("libcuda.so.1,-,cuBLAS 12 or 13 (libcublas.so.13) is not installed");
    put("libcublas.so.12", BLAS_LIST, "cublasGemmEx");
    assert_found("libcuda.so.1,-,libcublas.so.12 has no cublasGemmEx");
}

static void newest_complete_blas(void **s)
{
    (void)s;
    put("libcuda.so.1", DRIVER_LIST, NULL);
    put("libcublas.so.12", BLAS_LIST, NULL);
    assert_found("libcuda.so.1,libcublas.so.12,");
    put("libcublas.so.13", BLAS_LIST, "cublasSetStream_v2");
    assert_found("libcuda.so.1,libcublas.so.12,");
    put("libcublas.so.13", BLAS_LIST, NULL);
    assert_found("libcuda.so.1,libcublas.so.13,");
}

/* --- in this process, with what the machine has --- */

static void *load(void *user)
{
    (void)user;
    return (void *)kvp__cuda_load();
}

static void all_threads_find_the_same(void **s)
{
    (void)s;
    enum { N = 8 };
    pthread_t threads[N];
    for (int i = 0; i < N; i++) assert_int_equal(pthread_create(&threads[i], NULL, load, NULL), 0);
    const kvp__cuda_found *f = kvp__cuda_load();
    for (int i = 0; i < N; i++) {
        void *other;
        assert_int_equal(pthread_join(threads[i], &other), 0);
        assert_ptr_equal(other, f);
    }
    assert_int_equal(f->missing[0] == 0, f->cuda && f->blas);
    assert_ptr_equal(f->images, kvp__cuda_images);
}

static void tests_may_put_theirs(void **s)
{
    (void)s;
    const kvp__cuda_found *real = kvp__cuda_load();
    char missing[sizeof real->missing];
    memcpy(missing, real->missing, sizeof missing);
    kvp__cuda_found mine = {.missing = "nothing at all"};
    kvp__cuda_use(&mine);
    assert_ptr_equal(kvp__cuda_load(), &mine);
    kvp__cuda_use(NULL);
    assert_ptr_equal(kvp__cuda_load(), real);
    assert_string_equal(real->missing, missing);
}

static void drivers_must_be_as_new_as_the_toolkit(void **state)
{
    (void)state;
    assert_false(kvp__cuda_too_old(13000, 13000));
    assert_false(kvp__cuda_too_old(13000, 13020)); /* minor versions are one family */
    assert_false(kvp__cuda_too_old(13010, 12080));
    assert_true(kvp__cuda_too_old(12090, 13000));
    assert_false(kvp__cuda_too_old(12040, 12080));
    assert_true(kvp__cuda_too_old(12030, 12080)); /* does not read our compression */
    assert_false(kvp__cuda_too_old(11040, 0));    /* nothing to load */
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "search") == 0) return search();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(no_driver, break_all),
        cmocka_unit_test_setup(driver_too_old, break_all),
        cmocka_unit_test_setup(no_blas, break_all),
        cmocka_unit_test_setup(newest_complete_blas, break_all),
        cmocka_unit_test(all_threads_find_the_same),
        cmocka_unit_test(drivers_must_be_as_new_as_the_toolkit),
        cmocka_unit_test(tests_may_put_theirs),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
