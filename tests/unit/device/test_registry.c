/*
 * The registry: which names mean which device, whether it is there or not, and the list with its
 * entries for what is missing.
 */
#include "device/device.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static uint32_t there;
static uint32_t how_many(void) { return there; }
static const kvp__device fake = {.name = "fake", .max_ordinals = 64, .count = how_many};

static uint32_t entries(const kvp__device *d)
{
    uint32_t n = 0, ordinal = 0;
    const kvp__device *at;
    for (uint32_t i = 0; (at = kvp__device_at(i, &ordinal)); i++) {
        if (at != d) continue;
        assert_int_equal(ordinal, n);
        n++;
    }
    return n;
}

static void names_are_taken_literally(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        uint32_t ordinal;
    } good[] = {{"fake", 0}, {"fake:0", 0}, {"fake:1", 1}, {"fake:10", 10}, {"fake:63", 63}};
    static const char *const bad[] = {
        "",        "fak",     "fakes",    "fake:",   "fake:64", "fake:00", "fake:01", "fake:-1",
        "fake:+1", "fake: 1", "fake:1 ",  "fake:1x", "fake1",   "FAKE",    "fake:0x1", "fake:99999999999",
        "cpu:0",   "cpu:",    " cpu",     "CPU",     "gpu"};
    kvp__device_use(&fake);
    for (size_t i = 0; i < KVP__COUNT(good); i++) {
        uint32_t ordinal = 77;
        assert_ptr_equal(kvp__device_find(good[i].name, &ordinal), &fake);
        assert_int_equal(ordinal, good[i].ordinal);
    }
    for (size_t i = 0; i < KVP__COUNT(bad); i++) {
        uint32_t ordinal = 77;
        assert_null(kvp__device_find(bad[i], &ordinal));
        assert_int_equal(ordinal, 77);
    }
    kvp__device_use(NULL);
}

static void no_name_is_the_cpu(void **state)
{
    (void)state;
    uint32_t ordinal = 77;
    const kvp__device *cpu = kvp__device_find(NULL, &ordinal);
    assert_non_null(cpu);
    assert_string_equal(cpu->name, "cpu");
    assert_false(cpu->asynchronous);
    assert_int_equal(ordinal, 0);
    assert_ptr_equal(kvp__device_find("cpu", &ordinal), cpu);
    assert_ptr_equal(kvp__device_at(0, &ordinal), cpu);
    assert_int_equal(entries(cpu), 1);
}

/* None of a kind is one entry, which says so; else there is one for each. */
static void the_list_has_what_is_there(void **state)
{
    (void)state;
    uint32_t ordinal;
    assert_int_equal(entries(&fake), 0);
    assert_null(kvp__device_find("fake", &ordinal));
    kvp__device_use(&fake);
    for (there = 0; there < 4; there++)
        assert_int_equal(entries(&fake), there ? there : 1);
    assert_null(kvp__device_at(UINT32_MAX, &ordinal));
    kvp__device_use(NULL);
    assert_int_equal(entries(&fake), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_are_taken_literally),
        cmocka_unit_test(no_name_is_the_cpu),
        cmocka_unit_test(the_list_has_what_is_there),
    };
    return cmocka_run_group_tests_name("device/registry", tests, NULL, NULL);
}
