/*
 * The functions of the emulated driver. What they share is in machine.h; what is special about
 * them, as against a card's, is in driver.h.
 */
#include "tests/emu/machine.h"

#include "tests/emu/emu.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace driver {

/* Of a block without leave, and with it on the cards that kernels are made for. */
constexpr uint32_t SHARED_PLAIN = 48u << 10, SHARED_MOST = 227u << 10;

/* --- the driver and its devices --- */

static Result cuInit(unsigned flags)
{
    return call(__func__, [&]() -> Result {
        if (flags) return refuse(KVP__CU_INVALID_VALUE, "flags");
        if (machine->devices.empty()) return KVP__CU_NO_DEVICE;
        machine->initialised = true;
        return KVP__CU_SUCCESS;
    });
}

static Result cuDriverGetVersion(int *version)
{
    return call(__func__, [&]() -> Result {
        *version = machine->options.driver_version;
        return KVP__CU_SUCCESS;
    });
}

static Result cuGetErrorName(Result error, const char **name)
{
    static const std::map<Result, const char *> names = {
        {KVP__CU_SUCCESS, "CUDA_SUCCESS"},
        {KVP__CU_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
        {KVP__CU_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
        {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
        {KVP__CU_NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
        {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
        {KVP__CU_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE"},
        {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
        {KVP__CU_NO_BINARY, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
        {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
        {KVP__CU_NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
        {KVP__CU_NOT_READY, "CUDA_ERROR_NOT_READY"},
        {KVP__CU_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
        {KVP__CU_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"},
        {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
        {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
        {UNKNOWN, "CUDA_ERROR_UNKNOWN"},
    };
    return call(__func__, [&]() -> Result {
        auto i = names.find(error);
        if (i == names.end()) return KVP__CU_INVALID_VALUE;
        *name = i->second;
        return KVP__CU_SUCCESS;
    });
}

static Result cuDeviceGetCount(int *count)
{
    return call(__func__, [&]() -> Result {
        *count = (int)machine->devices.size();
        return KVP__CU_SUCCESS;
    });
}

/* A device's handle is its ordinal. */
static bool is_device(int device)
{
    return device >= 0 && (size_t)device < machine->devices.size();
}

static Result cuDeviceGet(kvp__cu_device *device, int ordinal)
{
    return call(__func__, [&]() -> Result {
        if (!is_device(ordinal)) return refuse(INVALID_DEVICE, "no device %d", ordinal);
        *device = ordinal;
        return KVP__CU_SUCCESS;
    });
}

static Result cuDeviceGetName(char *name, int bytes, kvp__cu_device device)
{
    return call(__func__, [&]() -> Result {
        if (!is_device(device) || bytes <= 0) return refuse(INVALID_DEVICE, "device %d", device);
        snprintf(name, (size_t)bytes, "emulated GPU");
        return KVP__CU_SUCCESS;
    });
}

static Result cuDeviceGetAttribute(int *value, int attribute, kvp__cu_device device)
{
    return call(__func__, [&]() -> Result {
        const emu_driver_options &o = machine->options;
        if (!is_device(device)) return refuse(INVALID_DEVICE, "device %d", device);
        switch (attribute) {
        case KVP__CU_ATTR_SM_COUNT: *value = o.sm_count; break;
        case KVP__CU_ATTR_MAJOR: *value = o.major; break;
        case KVP__CU_ATTR_MINOR: *value = o.minor; break;
        case KVP__CU_ATTR_SMEM_OPTIN: *value = (int)SHARED_MOST; break;
        default: return refuse(KVP__CU_INVALID_VALUE, "attribute %d is not emulated", attribute);
        }
        return KVP__CU_SUCCESS;
    });
}

static Result cuDeviceTotalMem(size_t *bytes, kvp__cu_device device)
{
    return call(__func__, [&]() -> Result {
        if (!is_device(device)) return refuse(INVALID_DEVICE, "device %d", device);
        *bytes = machine->options.memory;
        return KVP__CU_SUCCESS;
    });
}

/* --- contexts --- */

static Result cuDevicePrimaryCtxRetain(kvp__cu_context *context, kvp__cu_device device)
{
    return call(__func__, [&]() -> Result {
        if (!is_device(device)) return refuse(INVALID_DEVICE, "device %d", device);
        Device &d = machine->devices[(size_t)device];
        if (d.retained++ == 0) d.context = reinterpret_cast<kvp__cu_context>(new_handle());
        *context = d.context;
        return KVP__CU_SUCCESS;
    });
}

/* What is alive when the last one lets go would be gone with the context; here it leaks. */
static Result cuDevicePrimaryCtxRelease(kvp__cu_device device)
{
    return call(__func__, [&]() -> Result {
        if (!is_device(device)) return refuse(INVALID_DEVICE, "device %d", device);
        Device &d = machine->devices[(size_t)device];
        if (!d.retained) return refuse(INVALID_CONTEXT, "more often than it was retained");
        if (--d.retained == 0) {
            d.context = nullptr;
            machine->default_streams.erase(device);
        }
        return KVP__CU_SUCCESS;
    });
}

static Result cuCtxPushCurrent(kvp__cu_context context)
{
    return call(__func__, [&]() -> Result { return push(context); });
}

static Result cuCtxPopCurrent(kvp__cu_context *context)
{
    return call(__func__, [&]() -> Result { return pop(context); });
}

/* --- memory --- */

static Result cuMemGetInfo(size_t *free, size_t *total)
{
    return call(__func__, [&]() -> Result {
        *total = machine->options.memory;
        *free = *total - machine->devices[(size_t)current_device()].used;
        return KVP__CU_SUCCESS;
    });
}

static Result cuMemAlloc(kvp__cu_ptr *p, size_t bytes)
{
    return call(__func__, [&]() -> Result {
        if (!bytes) return refuse(KVP__CU_INVALID_VALUE, "no bytes");
        uint64_t at = allocate(bytes, current_device());
        if (!at) return KVP__CU_OUT_OF_MEMORY;
        *p = at;
        return KVP__CU_SUCCESS;
    });
}

static Result free_memory(uint64_t p, int device)
{
    Result waited = wait_for_device();
    if (waited && !machine->lost) return waited;
    if (!release(p, device))
        return refuse(KVP__CU_INVALID_VALUE, "%#llx is not allocated", (unsigned long long)p);
    return waited;
}

static Result cuMemFree(kvp__cu_ptr p)
{
    return call(__func__, [&]() -> Result { return free_memory(p, current_device()); });
}

static Result cuMemHostAlloc(void **p, size_t bytes, unsigned flags)
{
    return call(__func__, [&]() -> Result {
        if (!bytes || flags > 7) return refuse(KVP__CU_INVALID_VALUE, "no bytes, or flags");
        uint64_t at = allocate(bytes, -1);
        if (!at) return KVP__CU_OUT_OF_MEMORY;
        *p = (void *)(uintptr_t)at;
        return KVP__CU_SUCCESS;
    });
}

static Result cuMemFreeHost(void *p)
{
    return call(__func__, [&]() -> Result { return free_memory((uint64_t)(uintptr_t)p, -1); });
}

/* --- copies --- */

/* A copy or a fill of [p, p + bytes), which `act` does. The addresses are looked at when it is
 * asked for, as the driver does, and again when it runs, which may be long after, in a graph. */
static Result move(kvp__cu_stream stream, Kind kind, kvp__cu_ptr p, const void *host,
                   uint64_t bytes, const std::function<void()> &act)
{
    Result error = KVP__CU_SUCCESS;
    auto s = stream_of(stream, &error);
    if (!s) return error;
    std::string wrong = outside(p, bytes, s->device);
    if (!wrong.empty()) return refuse(KVP__CU_INVALID_VALUE, "%s", wrong.c_str());
    Pinned pin = host ? pinned(host, bytes) : Pinned::YES;
    if (pin == Pinned::PARTLY)
        return refuse(KVP__CU_INVALID_VALUE, "%llu bytes pass the end of pinned memory",
                      (unsigned long long)bytes);
    bool from_pinned = host && pin == Pinned::YES;
    int device = s->device;
    Operation o;
    o.kind = kind;
    o.bytes = bytes;
    o.pageable = pin == Pinned::NO;
    o.run = [=]() -> std::string {
        std::string bad = outside_now(p, bytes, device);
        if (bad.empty() && from_pinned && !pinned_now(host, bytes)) bad = "pinned memory is gone";
        if (bad.empty()) act();
        return bad.empty() ? bad : "a copy or a fill ran: " + bad;
    };
    return issue(*s, std::move(o));
}

static Result cuMemcpyHtoDAsync(kvp__cu_ptr to, const void *from, size_t bytes,
                                kvp__cu_stream stream)
{
    return call(__func__, [&]() -> Result {
        if (!from) return refuse(KVP__CU_INVALID_VALUE, "from NULL");
        return move(stream, Kind::UPLOAD, to, from, bytes,
                    [=] { memcpy((void *)(uintptr_t)to, from, bytes); });
    });
}

static Result cuMemcpyDtoHAsync(void *to, kvp__cu_ptr from, size_t bytes, kvp__cu_stream stream)
{
    return call(__func__, [&]() -> Result {
        if (!to) return refuse(KVP__CU_INVALID_VALUE, "to NULL");
        return move(stream, Kind::DOWNLOAD, from, to, bytes,
                    [=] { memcpy(to, (const void *)(uintptr_t)from, bytes); });
    });
}

static Result cuMemsetD8Async(kvp__cu_ptr p, unsigned char value, size_t bytes,
                              kvp__cu_stream stream)
{
    return call(__func__, [&]() -> Result {
        return move(stream, Kind::MEMSET, p, nullptr, bytes,
                    [=] { memset((void *)(uintptr_t)p, value, bytes); });
    });
}

/* --- modules and kernels --- */

static Result cuModuleLoadData(kvp__cu_module *module, const void *data)
{
    return call(__func__, [&]() -> Result {
        if (data != image) return refuse(KVP__CU_INVALID_IMAGE, "not the emulator's image");
        if (machine->options.major < 8) return KVP__CU_NO_BINARY;
        auto m = std::make_shared<Module>();
        m->device = current_device();
        machine->modules.add(m, module);
        return KVP__CU_SUCCESS;
    });
}

static Result cuModuleUnload(kvp__cu_module module)
{
    return call(__func__, [&]() -> Result {
        Result error = KVP__CU_SUCCESS;
        if (!object_of(machine->modules, module, "module", &error)) return error;
        Result waited = wait_for_device();
        if (waited && !machine->lost) return waited;
        machine->modules.remove(module);
        auto &functions = machine->functions.objects;
        for (auto i = functions.begin(); i != functions.end();)
            i = i->second->module == module ? functions.erase(i) : std::next(i);
        return waited;
    });
}

static Result cuModuleGetFunction(kvp__cu_function *function, kvp__cu_module module,
                                  const char *name)
{
    return call(__func__, [&]() -> Result {
        Result error = KVP__CU_SUCCESS;
        auto m = object_of(machine->modules, module, "module", &error);
        if (!m) return error;
        auto f = std::make_shared<Function>();
        size_t args_bytes;
        if (emu_kernel_info(name, &args_bytes, &f->most_threads)) return KVP__CU_NOT_FOUND;
        f->module = module;
        f->device = m->device;
        f->name = name;
        f->args_bytes = args_bytes;
        f->most_shared = SHARED_PLAIN;
        machine->functions.add(f, function);
        return KVP__CU_SUCCESS;
    });
}

static Result cuFuncSetAttribute(kvp__cu_function function, int attribute, int value)
{
    return call(__func__, [&]() -> Result {
        Result error = KVP__CU_SUCCESS;
        auto f = object_of(machine->functions, function, "function", &error);
        if (!f) return error;
        if (attribute != KVP__CU_FUNC_MAX_DYNAMIC_SMEM || value < 0 || value > (int)SHARED_MOST)
            return refuse(KVP__CU_INVALID_VALUE, "attribute %d, value %d", attribute, value);
        f->most_shared = std::max((uint32_t)value, SHARED_PLAIN);
        return KVP__CU_SUCCESS;
    });
}

static Result cuLaunchKernel(kvp__cu_function function, unsigned grid_x, unsigned grid_y,
                             unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z,
                             unsigned shared_bytes, kvp__cu_stream stream, void **arguments,
                             void **extra)
{
    return call(__func__, [&]() -> Result {
        Result error = KVP__CU_SUCCESS;
        auto f = object_of(machine->functions, function, "function", &error);
        if (!f) return error;
        auto s = stream_of(stream, &error);
        if (!s) return error;
        const char *name = f->name.c_str();
        if (!grid_x || !grid_y || !grid_z || grid_x > 0x7fffffff || grid_y > 65535 ||
            grid_z > 65535)
            return refuse(KVP__CU_INVALID_VALUE, "%s: a grid of %u x %u x %u", name, grid_x, grid_y,
                          grid_z);
        if (!block_x || block_x > f->most_threads || block_y != 1 || block_z != 1)
            return refuse(KVP__CU_INVALID_VALUE, "%s: %u x %u x %u threads; it takes %u at most",
                          name, block_x, block_y, block_z, f->most_threads);
        if (shared_bytes > f->most_shared)
            return refuse(KVP__CU_INVALID_VALUE, "%s: %u bytes of shared memory; %u are allowed",
                          name, shared_bytes, f->most_shared);
        if (!arguments || !arguments[0] || extra)
            return refuse(KVP__CU_INVALID_VALUE, "%s: no arguments, or extra ones", name);
        auto first = (const uint8_t *)arguments[0];
        std::vector<uint8_t> args(first, first + f->args_bytes);
        Operation o;
        o.kind = Kind::KERNEL;
        o.name = f->name;
        o.run = [=, kernel = f->name]() -> std::string {
            const char *wrong = emu_launch(kernel.c_str(), grid_x, grid_y, grid_z, block_x,
                                           shared_bytes, args.data());
            return wrong ? kernel + ": " + wrong : std::string();
        };
        return issue(*s, std::move(o));
    });
}

/* --- streams --- */

static Result cuStreamCreate(kvp__cu_stream *stream, unsigned flags)
{
    return call(__func__, [&]() -> Result {
        if (flags > KVP__CU_STREAM_NON_BLOCKING) return refuse(KVP__CU_INVALID_VALUE, "flags");
        machine->streams.add(new_stream(current_device()), stream);
        return KVP__CU_SUCCESS;
    });
}

/* What is in it still runs. */
static Result cuStreamDestroy(kvp__cu_stream stream)
{
    return call(__func__, [&]() -> Result {
        Result error = KVP__CU_SUCCESS;
        auto s = object_of(machine->streams, stream, "stream", &error);
        if (!s) return error;
        if (s->capture) return refuse(CAPTURE_UNSUPPORTED, "while it is being captured");
        machine->streams.remove(stream);
        return KVP__CU_SUCCESS;
    });
}

/* A stream that is being captured does not run, so it cannot be asked about. */
static std::shared_ptr<Stream> running_stream(kvp__cu_stream stream, Result *error)
{
    auto s = stream_of(stream, error);
    if (!s || !s->capture) return s;
    s->capture->valid = false;
    *error = refuse(CAPTURE_UNSUPPORTED, "the stream is being captured");
    return nullptr;
}

static Result cuStreamSynchronize(kvp__cu_stream stream)
{
    return call(__func__, [&]() -> Result {
        Result error = KVP__CU_SUCCESS;
        auto s = running_stream(stream, &error);
        return s ? wait_for(*s) : error;
    });
}

static Result cuStreamQuery(kvp__cu_stream stream)
{
    return call(__func__, [&]() -> Result {
        Result error = KVP__CU_SUCCESS;
        auto s = running_stream(stream, &error);
        if (!s) return error;
        run_some();
        if (machine->lost) return machine->lost;
        return s->queue.empty() ? KVP__CU_SUCCESS : KVP__CU_NOT_READY;
    });
}

/* --- events --- */

static Result cuEventCreate(kvp__cu_event *event, unsigned flags)
{
    return call(__func__, [&]() -> Result {
        if (flags > 3) return refuse(KVP__CU_INVALID_VALUE, "flags");
        auto e = std::make_shared<Event>();
        e->device = current_device();
        machine->events.add(e, event);
        return KVP__CU_SUCCESS;
    });
}

static Result cuEventDestroy(kvp__cu_event event)
{
    return call(__func__, [&]() -> Result {
        Result error = KVP__CU_SUCCESS;
        if (!object_of(machine->events, event, "event", &error)) return error;
        machine->events.remove(event);
        return KVP__CU_SUCCESS;
    });
}

static Result cuEventRecord(kvp__cu_event event, kvp__cu_stream stream)
{
    return call(__func__, [&]() -> Result {
        Result error = KVP__CU_SUCCESS;
        auto e = object_of(machine->events, event, "event", &error);
        if (!e) return error;
        auto s = stream_of(stream, &error);
        if (!s) return error;
        e->captured = s->capture != nullptr;
        if (e->captured) return s->capture->valid ? KVP__CU_SUCCESS : CAPTURE_INVALIDATED;
        Operation o;
        o.kind = Kind::RECORD;
        o.event = e;
        o.ticket = ++e->recorded;
        return issue(*s, std::move(o));
    });
}

static Result cuEventQuery(kvp__cu_event event)
{
    return call(__func__, [&]() -> Result {
        Result error = KVP__CU_SUCCESS;
        auto e = object_of(machine->events, event, "event", &error);
        if (!e) return error;
        if (e->captured) return refuse(CAPTURED_EVENT, "the event was recorded in a capture");
        run_some();
        if (machine->lost) return machine->lost;
        return e->done == e->recorded ? KVP__CU_SUCCESS : KVP__CU_NOT_READY;
    });
}

/* A capture stays within one stream here: to fork and join is refused; nothing of ours does. */
static Result cuStreamWaitEvent(kvp__cu_stream stream, kvp__cu_event event, unsigned flags)
{
    return call(__func__, [&]() -> Result {
        Result error = KVP__CU_SUCCESS;
        auto e = object_of(machine->events, event, "event", &error);
        if (!e) return error;
        auto s = stream_of(stream, &error);
        if (!s) return error;
        if (flags) return refuse(KVP__CU_INVALID_VALUE, "flags");
        if (e->captured || s->capture) {
            if (s->capture) s->capture->valid = false;
            return refuse(CAPTURE_ISOLATION, "an order between a captured stream and another");
        }
        if (!e->recorded) return KVP__CU_SUCCESS;
        Operation o;
        o.kind = Kind::WAIT;
        o.event = e;
        o.ticket = e->recorded;
        return issue(*s, std::move(o));
    });
}

static Result cuLaunchHostFunc(kvp__cu_stream stream, void (*fn)(void *user), void *user)
{
    return call(__func__, [&]() -> Result {
        Result error = KVP__CU_SUCCESS;
        auto s = stream_of(stream, &error);
        if (!s) return error;
        if (!fn) return refuse(KVP__CU_INVALID_VALUE, "no function");
        Operation o;
        o.kind = Kind::HOST;
        o.run = [=]() -> std::string {
            fn(user);
            return "";
        };
        return issue(*s, std::move(o));
    });
}

/* --- capture and graphs --- */

static Result cuStreamIsCapturing(kvp__cu_stream stream, int *status)
{
    return call(__func__, [&]() -> Result {
        Result error = KVP__CU_SUCCESS;
        auto s = stream_of(stream, &error);
        if (!s) return error;
        if (!s->capture)
            *status = KVP__CU_CAPTURE_NONE;
        else
            *status = s->capture->valid ? KVP__CU_CAPTURE_ACTIVE : 2;
        return KVP__CU_SUCCESS;
    });
}

static Result cuStreamBeginCapture(kvp__cu_stream stream, int mode)
{
    return call(__func__, [&]() -> Result {
        Result error = KVP__CU_SUCCESS;
        if (!stream) return refuse(CAPTURE_UNSUPPORTED, "the context's own stream");
        auto s = stream_of(stream, &error);
        if (!s) return error;
        if (s->capture) return refuse(CAPTURE_UNSUPPORTED, "it is being captured");
        if (mode != KVP__CU_CAPTURE_THREAD_LOCAL)
            return refuse(KVP__CU_INVALID_VALUE, "mode %d disturbs other threads", mode);
        s->capture = std::make_unique<Capture>();
        s->capture->thread = std::this_thread::get_id();
        return KVP__CU_SUCCESS;
    });
}

static Result cuStreamEndCapture(kvp__cu_stream stream, kvp__cu_graph *graph)
{
    return call(__func__, [&]() -> Result {
        Result error = KVP__CU_SUCCESS;
        *graph = nullptr;
        auto s = stream_of(stream, &error);
        if (!s) return error;
        if (!s->capture) return refuse(CAPTURE_UNMATCHED, "it is not being captured");
        if (s->capture->thread != std::this_thread::get_id())
            return refuse(CAPTURE_WRONG_THREAD, "another thread began");
        std::unique_ptr<Capture> c = std::move(s->capture);
        if (!c->valid) return CAPTURE_INVALIDATED;
        if (machine->failing) return machine->failing;
        auto g = std::make_shared<Graph>();
        g->device = s->device;
        g->operations = std::move(c->operations);
        machine->graphs.add(g, graph);
        return KVP__CU_SUCCESS;
    });
}

static Result cuGraphInstantiateWithFlags(kvp__cu_graph_exec *exec, kvp__cu_graph graph,
                                          unsigned long long flags)
{
    return call(__func__, [&]() -> Result {
        Result error = KVP__CU_SUCCESS;
        auto g = object_of(machine->graphs, graph, "graph", &error);
        if (!g) return error;
        if (flags) return refuse(KVP__CU_INVALID_VALUE, "flags");
        machine->execs.add(std::make_shared<Graph>(*g), exec);
        return KVP__CU_SUCCESS;
    });
}

static Result cuGraphLaunch(kvp__cu_graph_exec exec, kvp__cu_stream stream)
{
    return call(__func__, [&]() -> Result {
        Result error = KVP__CU_SUCCESS;
        auto g = object_of(machine->execs, exec, "graph to launch", &error);
        if (!g) return error;
        auto s = stream_of(stream, &error);
        if (!s) return error;
        if (s->capture) {
            s->capture->valid = false;
            return refuse(CAPTURE_UNSUPPORTED, "a graph in a captured stream");
        }
        machine->counts.graph_launches++;
        issue_all(*s, g->operations);
        return KVP__CU_SUCCESS;
    });
}

static Result cuGraphDestroy(kvp__cu_graph graph)
{
    return call(__func__, [&]() -> Result {
        Result error = KVP__CU_SUCCESS;
        if (!object_of(machine->graphs, graph, "graph", &error)) return error;
        machine->graphs.remove(graph);
        return KVP__CU_SUCCESS;
    });
}

static Result cuGraphExecDestroy(kvp__cu_graph_exec exec)
{
    return call(__func__, [&]() -> Result {
        Result error = KVP__CU_SUCCESS;
        if (!object_of(machine->execs, exec, "graph to launch", &error)) return error;
        machine->execs.remove(exec);
        return KVP__CU_SUCCESS;
    });
}

#define ENTRY(name, suffix, args) name,
const kvp__cuda_api driver_table = {KVP__CU_FUNCTIONS(ENTRY)};

}
