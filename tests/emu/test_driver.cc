/*
 * The emulated driver itself: that what it lets through does what a card would do, and that what it is
 * there to find is found. Everything is called through the tables, as the device does.
 */
#include "tests/emu/driver.h"
#include "tests/emu/driver_kernels.h"

#include "base/half.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
extern "C" {
#include <cmocka.h>
}

#include <atomic>
#include <cmath>
#include <csignal>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

/* --- a device in use --- */

static const kvp__cuda_api *cu;
static const kvp__blas_api *blas;
static kvp__cu_context context;

static void begin(emu_driver_options o = {})
{
    emu_install(&o);
    cu = kvp__cuda_load()->cuda;
    blas = kvp__cuda_load()->blas;
    assert_int_equal(cu->cuInit(0), 0);
    assert_int_equal(cu->cuDevicePrimaryCtxRetain(&context, 0), 0);
    assert_int_equal(cu->cuCtxPushCurrent(context), 0);
}

static emu_driver_options timed(emu_timing t)
{
    emu_driver_options o = {};
    o.timing = t;
    return o;
}

static void let_go()
{
    cu->cuCtxPopCurrent(nullptr);
    cu->cuDevicePrimaryCtxRelease(0);
}

/* Nothing was refused and nothing is left. */
static void end()
{
    let_go();
    assert_string_equal(emu_driver_message(), "");
    assert_string_equal(emu_driver_leaks(), "");
    emu_uninstall();
}

/* The refusal that the test provoked is the first. */
static void end_refused(const char *wanted)
{
    let_go();
    if (!strstr(emu_driver_message(), wanted)) fail_msg("%s", emu_driver_message());
    assert_string_equal(emu_driver_leaks(), "");
    emu_uninstall();
}

static kvp__cu_ptr take(size_t bytes)
{
    kvp__cu_ptr p = 0;
    assert_int_equal(cu->cuMemAlloc(&p, bytes), 0);
    return p;
}

template <class T> static T *take_pinned(size_t n)
{
    void *p = nullptr;
    assert_int_equal(cu->cuMemHostAlloc(&p, n * sizeof(T), 0), 0);
    return (T *)p;
}

static kvp__cu_stream new_stream()
{
    kvp__cu_stream s = nullptr;
    assert_int_equal(cu->cuStreamCreate(&s, KVP__CU_STREAM_NON_BLOCKING), 0);
    return s;
}

struct Kernels {
    kvp__cu_module module;
    kvp__cu_function affine, shared, stuck;
};

static Kernels load()
{
    Kernels k = {};
    assert_int_equal(cu->cuModuleLoadData(&k.module, kvp__cuda_load()->images[0].data), 0);
    assert_int_equal(cu->cuModuleGetFunction(&k.affine, k.module, "driver_affine"), 0);
    assert_int_equal(cu->cuModuleGetFunction(&k.shared, k.module, "driver_shared"), 0);
    assert_int_equal(cu->cuModuleGetFunction(&k.stuck, k.module, "driver_stuck"), 0);
    return k;
}

static int launch(kvp__cu_function f, kvp__cu_stream s, driver_affine_args a, unsigned grid = 1,
                  unsigned threads = 64, unsigned shared = 0)
{
    void *args[] = {&a};
    return cu->cuLaunchKernel(f, grid, 1, 1, threads, 1, 1, shared, s, args, nullptr);
}

static int affine(const Kernels &k, kvp__cu_stream s, kvp__cu_ptr p, uint32_t n, float factor,
                  float term)
{
    driver_affine_args a = {(float *)(uintptr_t)p, n, 0, factor, term};
    return launch(k.affine, s, a, (n + 63) / 64);
}

/* --- what is there --- */

static void calls_need_init_and_context(void **)
{
    emu_install(nullptr);
    cu = kvp__cuda_load()->cuda;
    int count = 0;
    kvp__cu_ptr p;
    assert_int_equal(cu->cuDeviceGetCount(&count), 3);
    assert_int_equal(cu->cuInit(0), 0);
    assert_int_equal(cu->cuDeviceGetCount(&count), 0);
    assert_int_equal(count, 1);
    assert_int_equal(cu->cuMemAlloc(&p, 4), 201);
    assert_non_null(strstr(emu_driver_message(), "before cuInit"));
    emu_uninstall();
}

static void options_are_what_the_device_says(void **)
{
    emu_driver_options o = {};
    o.devices = 2;
    o.memory = 1000;
    o.sm_count = 7;
    o.major = 8;
    o.minor = 6;
    begin(o);
    int count, sms, major, minor;
    size_t bytes;
    char name[8];
    assert_int_equal(cu->cuDeviceGetCount(&count), 0);
    assert_int_equal(count, 2);
    assert_int_equal(cu->cuDeviceGetAttribute(&sms, KVP__CU_ATTR_SM_COUNT, 1), 0);
    assert_int_equal(cu->cuDeviceGetAttribute(&major, KVP__CU_ATTR_MAJOR, 1), 0);
    assert_int_equal(cu->cuDeviceGetAttribute(&minor, KVP__CU_ATTR_MINOR, 1), 0);
    assert_int_equal(cu->cuDeviceTotalMem(&bytes, 1), 0);
    assert_int_equal(cu->cuDeviceGetName(name, sizeof name, 1), 0);
    assert_int_equal(sms * 10000 + major * 100 + minor, 70806);
    assert_int_equal(bytes, 1000);
    assert_string_equal(name, "emulate");
    kvp__cu_device d;
    assert_int_equal(cu->cuDeviceGet(&d, 2), 101);
    end_refused("no device 2");
}

static void no_device(void **)
{
    emu_driver_options o = {};
    o.devices = -1;
    emu_install(&o);
    assert_int_equal(kvp__cuda_load()->cuda->cuInit(0), KVP__CU_NO_DEVICE);
    emu_uninstall();
}

static void old_card_has_no_code(void **)
{
    emu_driver_options o = {};
    o.major = 7;
    o.minor = 5;
    begin(o);
    kvp__cu_module m;
    assert_int_equal(cu->cuModuleLoadData(&m, kvp__cuda_load()->images[0].data), KVP__CU_NO_BINARY);
    end();
}

static void contexts_are_a_stack_of_each_thread(void **)
{
    emu_driver_options o = {};
    o.devices = 2;
    begin(o);
    kvp__cu_context second, popped;
    assert_int_equal(cu->cuDevicePrimaryCtxRetain(&second, 1), 0);
    assert_int_equal(cu->cuCtxPushCurrent(second), 0);
    kvp__cu_ptr p = take(16);
    assert_int_equal(cu->cuCtxPopCurrent(&popped), 0);
    assert_ptr_equal(popped, second);
    assert_string_equal(emu_driver_leaks(), "1 allocations, 2 retained contexts, 1 pushed contexts");
    std::thread([] {
        size_t free, total;
        assert_int_equal(cu->cuMemGetInfo(&free, &total), 201);
    }).join();
    assert_int_equal(cu->cuMemFree(p), KVP__CU_INVALID_VALUE); /* of the other device */
    cu->cuCtxPushCurrent(second);
    assert_int_equal(cu->cuMemFree(p), 0);
    cu->cuCtxPopCurrent(nullptr);
    assert_int_equal(cu->cuDevicePrimaryCtxRelease(1), 0);
    assert_int_equal(cu->cuCtxPushCurrent(second), 201);
    end_refused("cuMemGetInfo: no context is current");
}

/* --- memory --- */

static void memory_is_nan_and_counted(void **)
{
    emu_driver_options o = {};
    o.memory = 100000;
    begin(o);
    kvp__cu_ptr p = take(60000), q;
    size_t free, total;
    uint16_t *host = take_pinned<uint16_t>(30000);
    memset(host, 0, 60000);
    assert_int_equal(p % 256, 0);
    assert_int_equal(cu->cuMemGetInfo(&free, &total), 0);
    assert_int_equal(free, 40000);
    assert_int_equal(total, 100000);
    assert_int_equal(cu->cuMemAlloc(&q, 40001), KVP__CU_OUT_OF_MEMORY);
    assert_int_equal(cu->cuMemcpyDtoHAsync(host, p, 60000, nullptr), 0);
    for (int i = 0; i < 30000; i++) assert_true(std::isnan(kvp__f16_to_f32(host[i])));
    assert_ptr_equal(emu_driver_memory(p + 59999, 1), (void *)(uintptr_t)(p + 59999));
    assert_null(emu_driver_memory(p + 59999, 2));
    assert_int_equal(emu_driver_counted().memory, 60000);
    assert_int_equal(cu->cuMemFree(p), 0);
    q = take(100000);
    assert_int_equal(cu->cuMemFree(q), 0);
    assert_int_equal(cu->cuMemFreeHost(host), 0);
    assert_int_equal(emu_driver_counted().memory, 0);
    assert_int_equal(emu_driver_counted().peak_memory, 100000);
    end();
}

static void what_is_not_allocated_is_refused(void **)
{
    begin();
    kvp__cu_ptr p = take(100);
    uint8_t *host = take_pinned<uint8_t>(100), other[200] = {0};
    assert_int_equal(cu->cuMemcpyHtoDAsync(p, host, 100, nullptr), 0);
    assert_int_equal(cu->cuMemcpyHtoDAsync(p + 40, other, 60, nullptr), 0);
    assert_string_equal(emu_driver_message(), "");
    assert_int_equal(cu->cuMemcpyHtoDAsync(p + 1, host, 100, nullptr), KVP__CU_INVALID_VALUE);
    assert_string_equal(emu_driver_message(),
                        "cuMemcpyHtoDAsync: 100 bytes at offset 1 of an allocation of 100");
    assert_int_equal(cu->cuMemcpyHtoDAsync(p, host + 1, 100, nullptr), KVP__CU_INVALID_VALUE);
    assert_int_equal(cu->cuMemcpyDtoHAsync(other, p, 101, nullptr), KVP__CU_INVALID_VALUE);
    assert_int_equal(cu->cuMemcpyDtoHAsync(other, (kvp__cu_ptr)(uintptr_t)other, 1, nullptr),
                     KVP__CU_INVALID_VALUE);
    assert_int_equal(cu->cuMemsetD8Async(p + 99, 0, 2, nullptr), KVP__CU_INVALID_VALUE);
    assert_int_equal(cu->cuMemFree(p + 1), KVP__CU_INVALID_VALUE);
    assert_int_equal(cu->cuMemFree((kvp__cu_ptr)(uintptr_t)host), KVP__CU_INVALID_VALUE);
    assert_int_equal(cu->cuMemFree(p), 0);
    assert_int_equal(cu->cuMemFree(p), KVP__CU_INVALID_VALUE);
    assert_int_equal(cu->cuMemFreeHost(host), 0);
    emu_driver_counts c = emu_driver_counted();
    assert_int_equal(c.uploads, 2);
    assert_int_equal(c.upload_bytes, 160);
    assert_int_equal(c.pageable, 1);
    end_refused("offset 1");
}

/* --- streams --- */

struct Note {
    std::atomic<int> called{0};
    float *host;
    float seen = 0;
};

static void note(void *user)
{
    auto n = (Note *)user;
    n->seen = n->host[9];
    n->called++;
}

/* host[0] goes up, is doubled, and comes down as host[9], before the host function sees it. */
static void all_operations(emu_timing t)
{
    begin(timed(t));
    Kernels k = load();
    kvp__cu_stream s = new_stream();
    kvp__cu_ptr p = take(4);
    float *host = take_pinned<float>(10);
    Note n;
    n.host = host;
    host[0] = 1;
    emu_driver_counts before = emu_driver_counted();
    emu_driver_hold(t == EMU_THREAD);
    assert_int_equal(cu->cuMemcpyHtoDAsync(p, host, 4, s), 0);
    assert_int_equal(affine(k, s, p, 1, 2, 0.5f), 0);
    assert_int_equal(cu->cuMemcpyDtoHAsync(host + 9, p, 4, s), 0);
    assert_int_equal(cu->cuLaunchHostFunc(s, note, &n), 0);
    if (t != EMU_AT_ONCE) {
        assert_int_equal(emu_driver_pending(), 4);
        assert_int_equal(n.called, 0);
        host[0] = 3; /* read when the copy runs */
    }
    emu_driver_hold(false);
    int queries = 0, r;
    while ((r = cu->cuStreamQuery(s)) == KVP__CU_NOT_READY) queries++;
    assert_int_equal(r, 0);
    if (t == EMU_LATE) assert_int_equal(queries, 3);
    assert_int_equal(n.called, 1);
    assert_true(n.seen == (t == EMU_AT_ONCE ? 2.5f : 6.5f));
    emu_driver_counts after = emu_driver_counted();
    assert_int_equal(after.waits, before.waits);
    assert_int_equal(after.kernels, 1);
    assert_int_equal(after.uploads, 1);
    assert_int_equal(after.downloads, 1);
    assert_int_equal(after.host_functions, 1);
    assert_int_equal(after.pageable, 0);
    assert_int_equal(emu_driver_ran("driver_affine"), 1);
    assert_int_equal(emu_driver_calls("cuStreamSynchronize"), 0);
    assert_int_equal(cu->cuMemsetD8Async(p, 0, 4, s), 0);
    assert_int_equal(cu->cuMemcpyDtoHAsync(host, p, 4, s), 0);
    assert_int_equal(cu->cuStreamSynchronize(s), 0);
    assert_true(host[0] == 0);
    assert_int_equal(emu_driver_calls("cuStreamSynchronize"), 1);
    assert_int_equal(emu_driver_counted().waits, before.waits + 1);
    cu->cuMemFree(p);
    cu->cuMemFreeHost(host);
    cu->cuStreamDestroy(s);
    cu->cuModuleUnload(k.module);
    end();
}

static void operations_at_once(void **) { all_operations(EMU_AT_ONCE); }
static void operations_late(void **) { all_operations(EMU_LATE); }
static void operations_on_a_thread(void **) { all_operations(EMU_THREAD); }

/* A stream that is destroyed still does what is in it, and freeing waits for it. */
static void a_destroyed_stream_runs_empty(void **)
{
    begin(timed(EMU_LATE));
    kvp__cu_stream s = new_stream();
    kvp__cu_ptr p = take(4);
    assert_int_equal(cu->cuMemsetD8Async(p, 7, 4, s), 0);
    assert_int_equal(cu->cuStreamDestroy(s), 0);
    assert_int_equal(emu_driver_pending(), 1);
    assert_int_equal(cu->cuMemFree(p), 0);
    assert_int_equal(emu_driver_pending(), 0);
    assert_int_equal(emu_driver_counted().memsets, 1);
    assert_int_equal(cu->cuStreamQuery(s), 400);
    end_refused("not a live stream");
}

/* Two streams, where the second multiplies what the first has made; the event is what orders them. */
static float crossed(uint64_t seed, bool with_event)
{
    emu_driver_options o = timed(EMU_LATE);
    o.seed = seed;
    begin(o);
    Kernels k = load();
    kvp__cu_stream a = new_stream(), b = new_stream();
    kvp__cu_event e;
    kvp__cu_ptr p = take(4);
    float *host = take_pinned<float>(2);
    host[0] = 3;
    assert_int_equal(cu->cuEventCreate(&e, KVP__CU_EVENT_NO_TIMING), 0);
    assert_int_equal(cu->cuMemcpyHtoDAsync(p, host, 4, a), 0);
    assert_int_equal(cu->cuStreamSynchronize(a), 0);
    assert_int_equal(cu->cuEventQuery(e), 0); /* never recorded */
    assert_int_equal(affine(k, a, p, 1, 1, 1), 0);
    assert_int_equal(cu->cuEventRecord(e, a), 0);
    if (with_event) assert_int_equal(cu->cuStreamWaitEvent(b, e, 0), 0);
    assert_int_equal(affine(k, b, p, 1, 10, 0), 0);
    assert_int_equal(cu->cuMemcpyDtoHAsync(host + 1, p, 4, b), 0);
    while (cu->cuEventQuery(e) == KVP__CU_NOT_READY) continue;
    assert_int_equal(cu->cuStreamSynchronize(b), 0);
    float result = host[1];
    cu->cuMemFree(p);
    cu->cuMemFreeHost(host);
    cu->cuEventDestroy(e);
    cu->cuStreamDestroy(a);
    cu->cuStreamDestroy(b);
    cu->cuModuleUnload(k.module);
    end();
    return result;
}

static void events_order_streams(void **)
{
    bool wrong = false;
    for (uint64_t seed = 0; seed < 20; seed++) {
        assert_true(crossed(seed, true) == 40);
        wrong |= crossed(seed, false) != 40;
    }
    assert_true(wrong); /* without the event, some seed shows it */
}

static void what_is_held_waits(void **)
{
    begin();
    kvp__cu_stream s = new_stream();
    kvp__cu_ptr p = take(4);
    emu_driver_hold(true);
    for (int i = 0; i < 3; i++) assert_int_equal(cu->cuMemsetD8Async(p, 7, 4, s), 0);
    assert_int_equal(cu->cuStreamQuery(s), KVP__CU_NOT_READY);
    assert_int_equal(cu->cuStreamSynchronize(s), 999);
    assert_int_equal(emu_driver_run(2), 2);
    assert_int_equal(cu->cuStreamQuery(s), KVP__CU_NOT_READY);
    assert_int_equal(emu_driver_run(2), 1);
    assert_int_equal(cu->cuStreamQuery(s), 0);
    emu_driver_hold(false);
    cu->cuMemFree(p);
    cu->cuStreamDestroy(s);
    end_refused("cuStreamSynchronize: would wait for ever");
}

static void calls_back(void *) { (void)cu->cuDriverGetVersion(nullptr); }

static void a_host_function_calls_nothing(void **)
{
    pid_t child = fork();
    if (child == 0) {
        if (!freopen("/dev/null", "w", stderr)) _exit(1);
        signal(SIGABRT, SIG_DFL);
        begin();
        cu->cuLaunchHostFunc(new_stream(), calls_back, nullptr);
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

/* --- kernels --- */

static void launches_are_checked(void **)
{
    begin();
    Kernels k = load();
    kvp__cu_function f;
    kvp__cu_stream s = new_stream();
    kvp__cu_ptr p = take(256);
    float *host = take_pinned<float>(64);
    driver_affine_args a = {(float *)(uintptr_t)p, 64, (50u << 10) / 4, 5, 0};
    assert_int_equal(cu->cuModuleGetFunction(&f, k.module, "no_such_kernel"), KVP__CU_NOT_FOUND);
    assert_string_equal(emu_driver_message(), "");
    assert_int_equal(launch(k.shared, s, a, 1, 64, 50u << 10), KVP__CU_INVALID_VALUE);
    assert_non_null(strstr(emu_driver_message(), "driver_shared: 51200 bytes of shared memory"));
    assert_int_equal(cu->cuFuncSetAttribute(k.shared, KVP__CU_FUNC_MAX_DYNAMIC_SMEM, 228 << 10),
                     KVP__CU_INVALID_VALUE);
    assert_int_equal(cu->cuFuncSetAttribute(k.shared, KVP__CU_FUNC_MAX_DYNAMIC_SMEM, 50 << 10), 0);
    assert_int_equal(launch(k.shared, s, a, 1, 64, 50u << 10), 0);
    assert_int_equal(cu->cuMemcpyDtoHAsync(host, p, 256, s), 0);
    for (int i = 0; i < 64; i++) assert_true(host[i] == 5);
    assert_int_equal(launch(k.affine, s, a, 0), KVP__CU_INVALID_VALUE);
    assert_int_equal(launch(k.affine, s, a, 1, 65), KVP__CU_INVALID_VALUE);
    assert_int_equal(cu->cuLaunchKernel(k.affine, 1, 65536, 1, 64, 1, 1, 0, s, nullptr, nullptr),
                     KVP__CU_INVALID_VALUE);
    assert_int_equal(cu->cuLaunchKernel(k.affine, 1, 1, 1, 64, 1, 1, 0, s, nullptr, nullptr),
                     KVP__CU_INVALID_VALUE);
    assert_int_equal(emu_driver_counted().kernels, 1);
    assert_int_equal(cu->cuModuleUnload(k.module), 0);
    assert_int_equal(launch(k.affine, s, a), 400);
    cu->cuMemFree(p);
    cu->cuMemFreeHost(host);
    cu->cuStreamDestroy(s);
    end_refused("driver_shared");
}

static void a_failed_kernel_loses_the_device(void **)
{
    begin(timed(EMU_LATE));
    Kernels k = load();
    kvp__cu_stream s = new_stream();
    Note n;
    assert_int_equal(launch(k.stuck, s, {}, 1, 32), 0);
    assert_int_equal(cu->cuLaunchHostFunc(s, note, &n), 0);
    assert_int_equal(cu->cuStreamQuery(s), KVP__CU_LAUNCH_FAILED);
    assert_int_equal(cu->cuStreamQuery(s), KVP__CU_LAUNCH_FAILED);
    assert_int_equal(n.called, 0);
    assert_int_equal(cu->cuModuleUnload(k.module), KVP__CU_LAUNCH_FAILED);
    assert_int_equal(cu->cuStreamDestroy(s), KVP__CU_LAUNCH_FAILED);
    end_refused("driver_stuck");
}

/* --- graphs --- */

static void graphs_replay_what_was_captured(void **)
{
    for (int t = EMU_AT_ONCE; t <= EMU_THREAD; t++) {
        begin(timed((emu_timing)t));
        Kernels k = load();
        kvp__cu_stream s = new_stream();
        kvp__cu_graph g;
        kvp__cu_graph_exec exec;
        kvp__cu_ptr p = take(4);
        float *host = take_pinned<float>(10);
        Note n;
        int status;
        n.host = host;
        host[9] = -1;
        assert_int_equal(cu->cuStreamBeginCapture(s, KVP__CU_CAPTURE_THREAD_LOCAL), 0);
        assert_int_equal(cu->cuStreamIsCapturing(s, &status), 0);
        assert_int_equal(status, KVP__CU_CAPTURE_ACTIVE);
        assert_int_equal(cu->cuMemcpyHtoDAsync(p, host, 4, s), 0);
        assert_int_equal(affine(k, s, p, 1, 3, 1), 0);
        assert_int_equal(cu->cuMemcpyDtoHAsync(host + 9, p, 4, s), 0);
        assert_int_equal(cu->cuLaunchHostFunc(s, note, &n), 0);
        assert_int_equal(cu->cuStreamEndCapture(s, &g), 0);
        assert_int_equal(cu->cuStreamIsCapturing(s, &status), 0);
        assert_int_equal(status, KVP__CU_CAPTURE_NONE);
        assert_int_equal(emu_driver_pending(), 0);
        assert_int_equal(emu_driver_counted().kernels, 0);
        assert_int_equal(cu->cuGraphInstantiateWithFlags(&exec, g, 0), 0);
        assert_int_equal(cu->cuGraphDestroy(g), 0);
        for (int i = 1; i <= 3; i++) {
            host[0] = (float)i;
            assert_int_equal(cu->cuGraphLaunch(exec, s), 0);
            assert_int_equal(cu->cuStreamSynchronize(s), 0);
            assert_int_equal(n.called, i);
            assert_true(n.seen == (float)(3 * i + 1));
        }
        assert_int_equal(emu_driver_counted().graph_launches, 3);
        assert_int_equal(emu_driver_counted().kernels, 3);
        cu->cuGraphExecDestroy(exec);
        cu->cuMemFree(p);
        cu->cuMemFreeHost(host);
        cu->cuStreamDestroy(s);
        cu->cuModuleUnload(k.module);
        end();
    }
}

/* Each of these ends the capture; nothing of it is left. */
static void captures_are_broken_by(int (*act)(kvp__cu_stream s), int wanted)
{
    begin();
    kvp__cu_stream s = new_stream();
    kvp__cu_graph g = nullptr;
    assert_int_equal(cu->cuStreamBeginCapture(s, KVP__CU_CAPTURE_THREAD_LOCAL), 0);
    assert_int_equal(act(s), wanted);
    assert_int_equal(cu->cuStreamEndCapture(s, &g), 901);
    assert_null(g);
    assert_int_equal(cu->cuStreamQuery(s), 0);
    cu->cuStreamDestroy(s);
    end_refused("captur");
}

static void what_a_capture_forbids(void **)
{
    captures_are_broken_by([](kvp__cu_stream) {
        kvp__cu_ptr p;
        return cu->cuMemAlloc(&p, 4);
    }, 900);
    captures_are_broken_by([](kvp__cu_stream s) { return cu->cuStreamSynchronize(s); }, 900);
    captures_are_broken_by([](kvp__cu_stream s) { return cu->cuStreamQuery(s); }, 900);
    captures_are_broken_by([](kvp__cu_stream) {
        kvp__blas_handle h;
        return blas->cublasCreate(&h);
    }, 900);
    captures_are_broken_by([](kvp__cu_stream s) {
        kvp__cu_event e;
        cu->cuEventCreate(&e, 0);
        int r = cu->cuStreamWaitEvent(s, e, 0);
        cu->cuEventDestroy(e);
        return r;
    }, 905);
}

static void captures_belong_to_a_thread(void **)
{
    begin();
    kvp__cu_stream s = new_stream();
    kvp__cu_event e;
    kvp__cu_graph g;
    assert_int_equal(cu->cuEventCreate(&e, 0), 0);
    assert_int_equal(cu->cuStreamBeginCapture(s, KVP__CU_CAPTURE_THREAD_LOCAL), 0);
    assert_int_equal(cu->cuEventRecord(e, s), 0);
    std::thread([s] {
        kvp__cu_graph other;
        assert_int_equal(cu->cuCtxPushCurrent(context), 0);
        kvp__cu_ptr p = take(4); /* another thread's business */
        assert_int_equal(cu->cuMemFree(p), 0);
        assert_int_equal(cu->cuStreamEndCapture(s, &other), 908);
        assert_int_equal(cu->cuCtxPopCurrent(nullptr), 0);
    }).join();
    assert_int_equal(cu->cuEventQuery(e), 907);
    assert_int_equal(cu->cuStreamEndCapture(s, &g), 0);
    assert_int_equal(cu->cuStreamEndCapture(s, &g), 903);
    assert_int_equal(cu->cuGraphDestroy(g), KVP__CU_SUCCESS + 400); /* NULL */
    assert_string_equal(emu_driver_leaks(), "1 streams, 1 events, 1 graphs, 1 retained contexts, "
                                            "1 pushed contexts");
    emu_uninstall();
}

static void a_graph_outlives_its_memory(void **)
{
    begin();
    kvp__cu_stream s = new_stream();
    kvp__cu_graph g;
    kvp__cu_graph_exec exec;
    kvp__cu_ptr p = take(4);
    assert_int_equal(cu->cuStreamBeginCapture(s, KVP__CU_CAPTURE_THREAD_LOCAL), 0);
    assert_int_equal(cu->cuMemsetD8Async(p, 1, 4, s), 0);
    assert_int_equal(cu->cuStreamEndCapture(s, &g), 0);
    assert_int_equal(cu->cuGraphInstantiateWithFlags(&exec, g, 0), 0);
    assert_int_equal(cu->cuMemFree(p), 0);
    assert_int_equal(cu->cuGraphLaunch(exec, s), 0);
    assert_int_equal(cu->cuStreamQuery(s), KVP__CU_ILLEGAL_ADDRESS);
    cu->cuGraphDestroy(g);
    cu->cuGraphExecDestroy(exec);
    cu->cuStreamDestroy(s);
    end_refused("is in no allocation");
}

/* --- faults --- */

static void the_nth_call_fails(void **)
{
    begin();
    kvp__cu_ptr p = 0, q = 0;
    emu_driver_fail("cuMemAlloc", 2, KVP__CU_OUT_OF_MEMORY);
    assert_int_equal(cu->cuMemAlloc(&p, 4), 0);
    assert_false(emu_driver_failed());
    assert_int_equal(cu->cuMemAlloc(&q, 4), KVP__CU_OUT_OF_MEMORY);
    assert_int_equal(q, 0);
    assert_true(emu_driver_failed());
    q = take(4);
    emu_driver_fail(nullptr, 2, KVP__CU_ILLEGAL_ADDRESS);
    assert_int_equal(cu->cuMemsetD8Async(p, 0, 4, nullptr), 0);
    assert_int_equal(cu->cuMemFree(p), KVP__CU_ILLEGAL_ADDRESS); /* but freed */
    assert_int_equal(cu->cuMemFree(q), 0);
    emu_driver_fail("cublasCreate", 1, KVP__CU_OUT_OF_MEMORY);
    kvp__blas_handle h;
    assert_int_equal(blas->cublasCreate(&h), 3);
    /* A capture that fails to end has ended. */
    kvp__cu_stream s = new_stream();
    kvp__cu_graph g;
    assert_int_equal(cu->cuStreamBeginCapture(s, KVP__CU_CAPTURE_THREAD_LOCAL), 0);
    emu_driver_fail("cuStreamEndCapture", 1, KVP__CU_OUT_OF_MEMORY);
    assert_int_equal(cu->cuStreamEndCapture(s, &g), KVP__CU_OUT_OF_MEMORY);
    assert_null(g);
    assert_int_equal(cu->cuStreamQuery(s), 0);
    cu->cuStreamDestroy(s);
    end();
}

static void a_lost_device_stays_lost(void **)
{
    for (int t = EMU_AT_ONCE; t <= EMU_THREAD; t++) {
        begin(timed((emu_timing)t));
        kvp__cu_stream s = new_stream();
        kvp__cu_ptr p = take(4);
        float *host = take_pinned<float>(10);
        kvp__blas_handle h;
        size_t free, total;
        Note n;
        n.host = host;
        assert_int_equal(blas->cublasCreate(&h), 0);
        emu_driver_hold(true);
        assert_int_equal(cu->cuLaunchHostFunc(s, note, &n), 0);
        emu_driver_lose(KVP__CU_ILLEGAL_ADDRESS);
        emu_driver_hold(false);
        assert_int_equal(cu->cuStreamQuery(s), KVP__CU_ILLEGAL_ADDRESS);
        assert_int_equal(cu->cuStreamSynchronize(s), KVP__CU_ILLEGAL_ADDRESS);
        assert_int_equal(cu->cuMemGetInfo(&free, &total), KVP__CU_ILLEGAL_ADDRESS);
        assert_int_equal(cu->cuMemsetD8Async(p, 0, 4, s), KVP__CU_ILLEGAL_ADDRESS);
        assert_int_equal(blas->cublasSetStream(h, s), 13);
        assert_int_equal(n.called, 0);
        assert_int_equal(emu_driver_pending(), 0);
        assert_int_equal(cu->cuMemFree(p), KVP__CU_ILLEGAL_ADDRESS);
        assert_int_equal(cu->cuMemFreeHost(host), KVP__CU_ILLEGAL_ADDRESS);
        assert_int_equal(cu->cuStreamDestroy(s), KVP__CU_ILLEGAL_ADDRESS);
        assert_int_equal(blas->cublasDestroy(h), 13);
        end();
    }
}

/* --- cuBLAS --- */

static uint32_t noise;

static float some()
{
    noise = noise * 1664525u + 1013904223u;
    return (float)((int32_t)(noise >> 8) % 2001 - 1000) / 1000;
}

struct Case {
    int m, n, k, lda, ldb, ldc, in_type, c_type;
    float alpha, beta;
};

static uint16_t half_of(float f, int type)
{
    return type == KVP__BLAS_R_16F ? kvp__f32_to_f16(f) : kvp__f32_to_bf16(f);
}

static float float_of(uint16_t h, int type)
{
    return type == KVP__BLAS_R_16F ? kvp__f16_to_f32(h) : kvp__bf16_to_f32(h);
}

/* In place of the device's memory, since the emulator's is the CPU's. NaN where nothing belongs. */
template <class T> static T *fill(kvp__cu_ptr p, int rows, int k, int stride, int type)
{
    auto at = (T *)(uintptr_t)p;
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < k; i++) {
            if constexpr (sizeof(T) == 2)
                at[r * stride + i] = half_of(some(), type);
            else
                at[r * stride + i] = some();
        }
    return at;
}

static void check(const Case &t, kvp__blas_handle h)
{
    size_t c_size = t.c_type == KVP__BLAS_R_32F ? 4 : 2;
    kvp__cu_ptr a = take(((size_t)(t.m - 1) * t.lda + t.k) * 2);
    kvp__cu_ptr b = take(((size_t)(t.n - 1) * t.ldb + t.k) * 2);
    kvp__cu_ptr c = take(((size_t)(t.n - 1) * t.ldc + t.m) * c_size);
    auto *fa = fill<uint16_t>(a, t.m, t.k, t.lda, t.in_type);
    auto *fb = fill<uint16_t>(b, t.n, t.k, t.ldb, t.in_type);
    auto *c32 = (float *)(uintptr_t)c;
    auto *c16 = (uint16_t *)(uintptr_t)c;
    std::vector<double> wanted;
    if (t.beta != 0 && c_size == 4) fill<float>(c, t.n, t.m, t.ldc, 0);
    if (t.beta != 0 && c_size == 2) fill<uint16_t>(c, t.n, t.m, t.ldc, t.c_type);
    for (int j = 0; j < t.n; j++)
        for (int i = 0; i < t.m; i++) {
            double sum = 0;
            for (int l = 0; l < t.k; l++)
                sum += (double)float_of(fa[i * t.lda + l], t.in_type) *
                       (double)float_of(fb[j * t.ldb + l], t.in_type);
            int at = j * t.ldc + i;
            double old = t.beta == 0 ? 0 : c_size == 4 ? c32[at] : float_of(c16[at], t.c_type);
            wanted.push_back(t.alpha * sum + t.beta * old);
        }
    assert_int_equal(blas->cublasGemmEx(h, KVP__BLAS_T, KVP__BLAS_N, t.m, t.n, t.k, &t.alpha,
                                        fa, t.in_type, t.lda, fb, t.in_type, t.ldb, &t.beta, c32,
                                        t.c_type, t.ldc, KVP__BLAS_COMPUTE_32F,
                                        KVP__BLAS_ALGO_DEFAULT), 0);
    double rounding = c_size == 4 ? 1e-6 : t.c_type == KVP__BLAS_R_16F ? 5e-4 : 4e-3;
    for (int j = 0; j < t.n; j++)
        for (int i = 0; i < t.m; i++) {
            double w = wanted[(size_t)j * t.m + i];
            double got = c_size == 4 ? c32[j * t.ldc + i] : float_of(c16[j * t.ldc + i], t.c_type);
            if (!(std::fabs(got - w) <= rounding * std::fabs(w) + 1e-6 * t.k))
                fail_msg("m %d n %d k %d: [%d][%d] is %g, not %g", t.m, t.n, t.k, j, i, got, w);
        }
    /* Between the columns nothing was written. */
    for (int j = 0; j + 1 < t.n; j++)
        for (int i = t.m; i < t.ldc; i++)
            assert_true(c_size == 4 ? std::isnan(c32[j * t.ldc + i])
                                    : c16[j * t.ldc + i] == 0xffff);
    cu->cuMemFree(a);
    cu->cuMemFree(b);
    cu->cuMemFree(c);
}

static void products(void **)
{
    const int F16 = KVP__BLAS_R_16F, BF16 = KVP__BLAS_R_16BF, F32 = KVP__BLAS_R_32F;
    const Case cases[] = {
        {1, 1, 1, 1, 1, 1, F16, F32, 1, 0},          {5, 1, 64, 64, 64, 5, F16, F32, 1, 0},
        {33, 7, 100, 101, 103, 40, F16, F32, 1, 0},  {64, 16, 576, 576, 576, 64, BF16, F32, 1, 0},
        {12, 9, 33, 40, 48, 12, F16, F16, 0.5f, 0},  {12, 9, 33, 40, 48, 13, BF16, BF16, 1, 0},
        {31, 5, 17, 17, 17, 31, F16, F32, 2, -0.5f}, {8, 4, 24, 24, 24, 8, F16, F16, 1, 1},
        {3, 200, 2000, 2000, 2000, 3, F16, F32, 1, 0},
    };
    begin();
    kvp__blas_handle h;
    int version = 0;
    assert_int_equal(blas->cublasCreate(&h), 0);
    assert_int_equal(blas->cublasGetVersion(h, &version), 0);
    assert_int_equal(version, 130000);
    for (auto &c : cases) check(c, h);
    assert_int_equal(emu_driver_counted().products, sizeof cases / sizeof *cases);
    cu->cuStreamSynchronize(nullptr);
    blas->cublasDestroy(h);
    end();
}

static int product(kvp__blas_handle h, kvp__cu_ptr a, kvp__cu_ptr b, kvp__cu_ptr c, int m, int n,
                   int k, int lda, int ldb, int ldc, int op_a = KVP__BLAS_T)
{
    const float one = 1, zero = 0;
    return blas->cublasGemmEx(h, op_a, KVP__BLAS_N, m, n, k, &one, (void *)(uintptr_t)a,
                              KVP__BLAS_R_16F, lda, (void *)(uintptr_t)b, KVP__BLAS_R_16F, ldb,
                              &zero, (void *)(uintptr_t)c, KVP__BLAS_R_32F, ldc,
                              KVP__BLAS_COMPUTE_32F, KVP__BLAS_ALGO_DEFAULT);
}

static void products_are_checked(void **)
{
    begin();
    kvp__blas_handle h;
    kvp__cu_ptr a = take(8 * 16 * 2), b = take(4 * 16 * 2), c = take(4 * 8 * 4);
    assert_int_equal(blas->cublasCreate(&h), 0);
    assert_int_equal(product(h, a, b, c, 8, 4, 16, 16, 16, 8), 0);
    assert_string_equal(emu_driver_message(), "");
    assert_int_equal(product(h, a, b, c, 9, 4, 16, 16, 16, 9), 7);
    assert_string_equal(emu_driver_message(),
                        "cublasGemmEx: A: 288 bytes at offset 0 of an allocation of 256");
    assert_int_equal(product(h, a, b, c, 8, 5, 16, 16, 16, 8), 7);
    assert_int_equal(product(h, a, b, c, 8, 4, 16, 17, 16, 8), 7);
    assert_int_equal(product(h, a, b, c, 8, 4, 16, 16, 17, 8), 7);
    assert_int_equal(product(h, a, b, c, 8, 4, 16, 16, 16, 9), 7);
    assert_int_equal(product(h, a, b, c, 8, 4, 16, 15, 16, 8), 7);
    assert_int_equal(product(h, a, b, c, 8, 4, 16, 16, 16, 7), 7);
    assert_int_equal(product(h, a + 1, b, c, 4, 4, 16, 16, 16, 8), 7);
    assert_int_equal(product(h, a, b, c, 8, 0, 16, 16, 16, 8), 7);
    assert_int_equal(product(h, a, b, c, 8, 4, 16, 16, 16, 8, KVP__BLAS_N), 15);
    assert_int_equal(emu_driver_counted().products, 1);
    blas->cublasDestroy(h);
    assert_int_equal(product(h, a, b, c, 8, 4, 16, 16, 16, 8), 1);
    cu->cuMemFree(a);
    cu->cuMemFree(b);
    cu->cuMemFree(c);
    end_refused("A: 288 bytes");
}

/* A stream takes the workspace away, and a captured product needs one. */
static void captured_products_need_a_workspace(void **)
{
    begin();
    kvp__blas_handle h;
    kvp__cu_stream s = new_stream();
    kvp__cu_graph g;
    kvp__cu_graph_exec exec;
    kvp__cu_ptr a = take(8 * 16 * 2), b = take(4 * 16 * 2), c = take(4 * 8 * 4), w = take(1024);
    memset((void *)(uintptr_t)a, 0, 256);
    memset((void *)(uintptr_t)b, 0, 128);
    assert_int_equal(blas->cublasCreate(&h), 0);
    assert_int_equal(blas->cublasSetWorkspace(h, (void *)(uintptr_t)w, 1025), 7);
    assert_int_equal(blas->cublasSetWorkspace(h, (void *)(uintptr_t)(w + 8), 512), 7);
    assert_int_equal(blas->cublasSetWorkspace(h, (void *)(uintptr_t)w, 1024), 0);
    assert_int_equal(blas->cublasSetStream(h, s), 0);
    assert_int_equal(cu->cuStreamBeginCapture(s, KVP__CU_CAPTURE_THREAD_LOCAL), 0);
    assert_int_equal(product(h, a, b, c, 8, 4, 16, 16, 16, 8), 15);
    assert_int_equal(blas->cublasSetWorkspace(h, (void *)(uintptr_t)w, 1024), 0);
    assert_int_equal(product(h, a, b, c, 8, 4, 16, 16, 16, 8), 0);
    assert_int_equal(cu->cuStreamEndCapture(s, &g), 0);
    assert_int_equal(emu_driver_counted().products, 0);
    assert_int_equal(cu->cuGraphInstantiateWithFlags(&exec, g, 0), 0);
    assert_int_equal(cu->cuGraphLaunch(exec, s), 0);
    assert_int_equal(emu_driver_counted().products, 1);
    for (int i = 0; i < 32; i++) assert_true(((float *)(uintptr_t)c)[i] == 0);
    cu->cuGraphDestroy(g);
    cu->cuGraphExecDestroy(exec);
    blas->cublasDestroy(h);
    for (kvp__cu_ptr p : {a, b, c, w}) cu->cuMemFree(p);
    cu->cuStreamDestroy(s);
    end_refused("the workspace");
}

static int clean_up(void **)
{
    emu_uninstall();
    return 0;
}

int main()
{
#define TEST(name) cmocka_unit_test_teardown(name, clean_up)
    const struct CMUnitTest tests[] = {
        TEST(calls_need_init_and_context),
        TEST(options_are_what_the_device_says),
        TEST(no_device),
        TEST(old_card_has_no_code),
        TEST(contexts_are_a_stack_of_each_thread),
        TEST(memory_is_nan_and_counted),
        TEST(what_is_not_allocated_is_refused),
        TEST(operations_at_once),
        TEST(operations_late),
        TEST(operations_on_a_thread),
        TEST(a_destroyed_stream_runs_empty),
        TEST(events_order_streams),
        TEST(what_is_held_waits),
        TEST(a_host_function_calls_nothing),
        TEST(launches_are_checked),
        TEST(a_failed_kernel_loses_the_device),
        TEST(graphs_replay_what_was_captured),
        TEST(what_a_capture_forbids),
        TEST(captures_belong_to_a_thread),
        TEST(a_graph_outlives_its_memory),
        TEST(the_nth_call_fails),
        TEST(a_lost_device_stays_lost),
        TEST(products),
        TEST(products_are_checked),
        TEST(captured_products_need_a_workspace),
    };
    return cmocka_run_group_tests(tests, nullptr, nullptr);
}
