/*
 * The machine behind the emulated driver: see machine.h, and driver.h for what tests ask of it.
 *
 * A stream is a queue. What an operation does is a function that is kept in it; the order between
 * streams is given by events alone, and where several could go on, the oldest operation does, or a
 * random one if there is a seed. Nothing else runs beside an operation, so a step that needs an
 * order and has not asked for it is found by the seed, not by chance.
 */
#include "tests/emu/machine.h"

#include "tests/emu/emu.h"

#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace driver {

Machine *machine;
const char image[] = "the emulator's kernels are linked to the program";

/* Guards everything; `changes`: an operation ended, or one may begin. */
static std::mutex mutex;
/* Made when first used, since main_emu.cc installs before main, and never ended, since the thread
 * of the machine waits for it until the program is gone. */
static std::condition_variable_any &changes()
{
    static auto *made = new std::condition_variable_any;
    return *made;
}

/* Of an OS thread. */
struct Thread {
    uint64_t installed;                   /* of which installation the stack is */
    std::vector<kvp__cu_context> contexts;
    bool in_host_function;
    const char *call;                     /* the function of the tables that it is in */
};
static thread_local Thread self;
static uint64_t installations;

/* Contexts pushed before the last emu_install are forgotten. */
static std::vector<kvp__cu_context> &contexts()
{
    if (self.installed != installations) self.contexts.clear();
    self.installed = installations;
    return self.contexts;
}

uintptr_t new_handle()
{
    static uintptr_t last = 0x7ffff00000000000u; /* not an address of a program */
    return last += 16;
}

/* --- calls --- */

enum Rule : unsigned {
    BARE = 1,         /* goes before cuInit */
    NO_CONTEXT = 2,
    WAITS = 4,        /* may wait for the device, on a real driver at least */
    NOT_CAPTURED = 8, /* forbidden to a thread that captures */
    GIVES_BACK = 16,  /* does what it is for even when it fails */
    STILL = 32,       /* works on a lost device */
};

static unsigned rules_of(const std::string &name)
{
    static const std::map<std::string, unsigned> rules = {
        {"cuInit", BARE | NO_CONTEXT | STILL},
        {"cuDriverGetVersion", BARE | NO_CONTEXT | STILL},
        {"cuGetErrorName", BARE | NO_CONTEXT | STILL},
        {"cuDeviceGetCount", NO_CONTEXT | STILL},
        {"cuDeviceGet", NO_CONTEXT | STILL},
        {"cuDeviceGetName", NO_CONTEXT | STILL},
        {"cuDeviceGetAttribute", NO_CONTEXT | STILL},
        {"cuDeviceTotalMem", NO_CONTEXT | STILL},
        {"cuDevicePrimaryCtxRetain", NO_CONTEXT | WAITS},
        {"cuDevicePrimaryCtxRelease", NO_CONTEXT | WAITS | GIVES_BACK},
        {"cuCtxPushCurrent", NO_CONTEXT | STILL},
        {"cuCtxPopCurrent", NO_CONTEXT | STILL | GIVES_BACK},
        {"cuMemAlloc", WAITS | NOT_CAPTURED},
        {"cuMemFree", WAITS | NOT_CAPTURED | GIVES_BACK},
        {"cuMemHostAlloc", WAITS | NOT_CAPTURED},
        {"cuMemFreeHost", WAITS | NOT_CAPTURED | GIVES_BACK},
        {"cuModuleLoadData", WAITS | NOT_CAPTURED},
        {"cuModuleUnload", WAITS | NOT_CAPTURED | GIVES_BACK},
        {"cuStreamDestroy", GIVES_BACK},
        {"cuStreamSynchronize", WAITS},
        {"cuStreamEndCapture", GIVES_BACK},
        {"cuEventDestroy", GIVES_BACK},
        {"cuGraphDestroy", GIVES_BACK},
        {"cuGraphExecDestroy", GIVES_BACK},
        {"cublasCreate", WAITS | NOT_CAPTURED},
        {"cublasDestroy", WAITS | NOT_CAPTURED | GIVES_BACK},
    };
    auto i = rules.find(name);
    return i == rules.end() ? 0 : i->second;
}

Result refuse(Result error, const char *format, ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (machine->message.empty())
        machine->message = std::string(self.call ? self.call : "?") + ": " + text;
    return error;
}

/* Whether this thread captures. What it may not do ends its captures. */
static bool breaks_capture()
{
    bool captures = false;
    for (auto &s : machine->queues)
        if (s->capture && s->capture->thread == std::this_thread::get_id()) {
            s->capture->valid = false;
            captures = true;
        }
    return captures;
}

static Result fault_of(const std::string &name)
{
    Machine &m = *machine;
    if (!m.fault_in || (!m.fault_name.empty() && m.fault_name != name) || --m.fault_in)
        return KVP__CU_SUCCESS;
    m.faulted = true;
    return m.fault;
}

/* An error of the driver's as a function of cuBLAS would say it. */
static Result as_of(const std::string &name, Result error)
{
    if (error == KVP__CU_SUCCESS || name.compare(0, 6, "cublas") != 0) return error;
    constexpr Result ALLOC_FAILED = 3, EXECUTION_FAILED = 13;
    return error == KVP__CU_OUT_OF_MEMORY ? ALLOC_FAILED : EXECUTION_FAILED;
}

Result call(const char *name, const std::function<Result()> &body)
{
    if (self.in_host_function) {
        fprintf(stderr, "emulator: %s is called from a host function\n", name);
        abort(); /* the driver may hang here, and no status would reach a test */
    }
    std::lock_guard<std::mutex> lock(mutex);
    if (!machine) return NOT_INITIALIZED;
    self.call = name;
    unsigned rules = rules_of(name);
    machine->all_calls++;
    machine->calls[name]++;
    if (rules & WAITS) machine->counts.waits++;
    Result error = fault_of(name);
    if (error == KVP__CU_SUCCESS && machine->lost && !(rules & STILL)) error = machine->lost;
    error = as_of(name, error);
    if (error && !(rules & GIVES_BACK)) return error;
    if (!machine->initialised && !(rules & BARE))
        return refuse(NOT_INITIALIZED, "before cuInit");
    if (!(rules & NO_CONTEXT) && (contexts().empty() || current_device() < 0))
        return refuse(INVALID_CONTEXT, "no context is current");
    if ((rules & NOT_CAPTURED) && breaks_capture())
        return refuse(CAPTURE_UNSUPPORTED, "not while this thread captures");
    machine->failing = error;
    Result result = body();
    machine->failing = KVP__CU_SUCCESS;
    return error ? error : result;
}

/* --- contexts --- */

int current_device()
{
    for (size_t i = 0; i < machine->devices.size(); i++)
        if (machine->devices[i].context == contexts().back()) return (int)i;
    return -1; /* released while it was current */
}

Result push(kvp__cu_context context)
{
    for (auto &d : machine->devices)
        if (context && d.context == context) {
            contexts().push_back(context);
            machine->pushed++;
            return KVP__CU_SUCCESS;
        }
    return refuse(INVALID_CONTEXT, "not a live context");
}

Result pop(kvp__cu_context *out)
{
    if (contexts().empty()) return refuse(INVALID_CONTEXT, "no context is current");
    if (out) *out = contexts().back();
    contexts().pop_back();
    machine->pushed--;
    return KVP__CU_SUCCESS;
}

/* --- memory --- */

/* Filled up to this size; above it, zero until written. */
constexpr uint64_t LARGE = 1u << 30;

uint64_t allocate(uint64_t bytes, int device)
{
    Machine &m = *machine;
    if (device >= 0 && bytes > m.options.memory - m.devices[(size_t)device].used) return 0;
    void *p = bytes > LARGE ? emu_alloc_sparse(bytes) : emu_alloc(bytes);
    if (!p) return 0;
    m.memory[(uint64_t)(uintptr_t)p] = {bytes, device};
    if (device >= 0) {
        m.devices[(size_t)device].used += bytes;
        m.counts.memory += bytes;
        if (m.counts.peak_memory < m.counts.memory) m.counts.peak_memory = m.counts.memory;
    }
    return (uint64_t)(uintptr_t)p;
}

bool release(uint64_t p, int device)
{
    Machine &m = *machine;
    auto i = m.memory.find(p);
    if (i == m.memory.end() || i->second.device != device) return false;
    if (device >= 0) {
        m.devices[(size_t)device].used -= i->second.bytes;
        m.counts.memory -= i->second.bytes;
    }
    m.memory.erase(i);
    if (emu_free((void *)(uintptr_t)p)) refuse(0, "something was written behind the allocation");
    return true;
}

/* The allocation that p lies in. */
static std::map<uint64_t, Allocation>::const_iterator around(uint64_t p)
{
    auto i = machine->memory.upper_bound(p);
    if (i == machine->memory.begin()) return machine->memory.end();
    --i;
    return p - i->first < i->second.bytes ? i : machine->memory.end();
}

std::string outside(uint64_t p, uint64_t bytes, int device)
{
    char text[160];
    auto i = around(p);
    if (bytes == 0) return "";
    if (i == machine->memory.end() || i->second.device != device) {
        snprintf(text, sizeof text, "%#llx is in no allocation of device %d", (unsigned long long)p,
                 device);
        return text;
    }
    uint64_t at = p - i->first;
    if (bytes <= i->second.bytes - at) return "";
    snprintf(text, sizeof text, "%llu bytes at offset %llu of an allocation of %llu",
             (unsigned long long)bytes, (unsigned long long)at,
             (unsigned long long)i->second.bytes);
    return text;
}

Pinned pinned(const void *p, uint64_t bytes)
{
    uint64_t first = (uint64_t)(uintptr_t)p;
    auto i = around(first);
    if (i == machine->memory.end() || i->second.device >= 0) return Pinned::NO;
    return bytes <= i->second.bytes - (first - i->first) ? Pinned::YES : Pinned::PARTLY;
}

std::string outside_now(uint64_t p, uint64_t bytes, int device)
{
    std::lock_guard<std::mutex> lock(mutex);
    return outside(p, bytes, device);
}

bool pinned_now(const void *p, uint64_t bytes)
{
    std::lock_guard<std::mutex> lock(mutex);
    return pinned(p, bytes) == Pinned::YES;
}

/* --- streams --- */

std::shared_ptr<Stream> new_stream(int device)
{
    /* Those that were destroyed go when they have run empty. */
    auto &q = machine->queues;
    for (size_t i = q.size(); i-- > 0;)
        if (q[i].use_count() == 1 && q[i]->queue.empty()) q.erase(q.begin() + (ptrdiff_t)i);
    auto s = std::make_shared<Stream>();
    s->device = device;
    machine->queues.push_back(s);
    return s;
}

std::shared_ptr<Stream> stream_of(kvp__cu_stream handle, Result *error)
{
    if (handle) return object_of(machine->streams, handle, "stream", error);
    auto &s = machine->default_streams[current_device()];
    if (!s) s = new_stream(current_device());
    return s;
}

/* A lost device runs nothing more, and nobody is told. */
static void lose(Result error)
{
    if (!machine->lost) machine->lost = error;
    for (auto &s : machine->queues) s->queue.clear();
    changes().notify_all();
}

static void count(const Operation &o)
{
    emu_driver_counts &c = machine->counts;
    switch (o.kind) {
    case Kind::KERNEL:
        c.kernels++;
        machine->ran[o.name]++;
        break;
    case Kind::PRODUCT: c.products++; break;
    case Kind::UPLOAD:
        c.uploads++;
        c.upload_bytes += o.bytes;
        break;
    case Kind::DOWNLOAD:
        c.downloads++;
        c.download_bytes += o.bytes;
        break;
    case Kind::MEMSET: c.memsets++; break;
    case Kind::HOST: c.host_functions++; break;
    case Kind::RECORD:
    case Kind::WAIT: break;
    }
    if (o.pageable) c.pageable++;
}

static bool ready(const Stream &s)
{
    if (s.queue.empty()) return false;
    const Operation &o = *s.queue.front().second;
    return o.kind != Kind::WAIT || o.event->done >= o.ticket;
}

static std::shared_ptr<Stream> pick()
{
    std::vector<std::shared_ptr<Stream>> able;
    for (auto &s : machine->queues)
        if (ready(*s)) able.push_back(s);
    if (able.empty()) return nullptr;
    if (machine->options.seed) {
        machine->random = machine->random * 6364136223846793005u + 1442695040888963407u;
        return able[(machine->random >> 33) % able.size()];
    }
    size_t oldest = 0;
    for (size_t i = 1; i < able.size(); i++)
        if (able[i]->queue.front().first < able[oldest]->queue.front().first) oldest = i;
    return able[oldest];
}

/* Runs an operation; false: none can begin, or one is running in another thread. */
static bool run_one()
{
    Machine &m = *machine;
    if (m.running || m.lost) return false;
    std::shared_ptr<Stream> s = pick();
    if (!s) return false;
    std::shared_ptr<const Operation> o = s->queue.front().second;
    m.running = true;
    std::string wrong;
    if (o->run) {
        mutex.unlock();
        self.in_host_function = o->kind == Kind::HOST;
        wrong = o->run();
        self.in_host_function = false;
        mutex.lock();
    } else if (o->kind == Kind::RECORD) {
        o->event->done = o->ticket;
    }
    m.running = false;
    if (!s->queue.empty()) s->queue.pop_front(); /* else the device was lost meanwhile */
    count(*o);
    if (!wrong.empty()) {
        if (m.message.empty()) m.message = wrong;
        lose(o->kind == Kind::KERNEL ? KVP__CU_LAUNCH_FAILED : KVP__CU_ILLEGAL_ADDRESS);
    }
    changes().notify_all();
    return true;
}

/* Runs all that can be run, if it is the caller who has to. */
static void run_at_once()
{
    while (machine->options.timing == EMU_AT_ONCE && !machine->held) {
        if (run_one()) continue;
        if (!machine->running) break;
        changes().wait(mutex);
    }
}

void run_some()
{
    if (machine->options.timing != EMU_LATE || machine->held) return;
    for (uint32_t i = 0; i < machine->options.late_operations && run_one(); i++)
        ;
}

static Result wait_until(const std::function<bool()> &over)
{
    for (;;) {
        if (machine->lost && !machine->running) return machine->lost;
        if (!machine->lost && over()) return KVP__CU_SUCCESS;
        bool others = machine->running ||
                      (machine->options.timing == EMU_THREAD && !machine->held && pick());
        if (others)
            changes().wait(mutex);
        else if (machine->held || !run_one())
            return refuse(UNKNOWN, "would wait for ever");
    }
}

Result wait_for(const Stream &s)
{
    return wait_until([&] { return s.queue.empty(); });
}

Result wait_for_device()
{
    return wait_until([] {
        for (auto &s : machine->queues)
            if (!s->queue.empty()) return false;
        return true;
    });
}

Result issue(Stream &s, Operation operation)
{
    auto o = std::make_shared<const Operation>(std::move(operation));
    if (s.capture) {
        if (!s.capture->valid) return CAPTURE_INVALIDATED;
        s.capture->operations.push_back(o);
        return KVP__CU_SUCCESS;
    }
    issue_all(s, {o});
    return KVP__CU_SUCCESS;
}

void issue_all(Stream &s, const Operations &operations)
{
    for (auto &o : operations) s.queue.emplace_back(++machine->age, o);
    changes().notify_all();
    run_at_once();
}

static void work()
{
    std::unique_lock<std::mutex> lock(mutex);
    Machine &m = *machine;
    while (!m.stopping) {
        if (m.held || !pick()) {
            changes().wait(mutex);
            continue;
        }
        if (m.options.pause_us) {
            lock.unlock();
            std::this_thread::sleep_for(std::chrono::microseconds(m.options.pause_us));
            lock.lock();
        }
        if (!m.stopping && !m.held) run_one();
    }
}

}

/* --- driver.h --- */

using namespace driver;

static kvp__cuda_image images[] = {{"emulator", driver::image}};
static kvp__cuda_found found;

static void set_default(int32_t *value, int32_t otherwise)
{
    if (!*value) *value = otherwise;
}

void emu_install(const emu_driver_options *o)
{
    emu_uninstall();
    auto *m = new Machine;
    m->options = o ? *o : emu_driver_options();
    set_default(&m->options.devices, 1);
    set_default(&m->options.sm_count, 132);
    if (!m->options.major) m->options.major = 9, m->options.minor = 0;
    set_default(&m->options.driver_version, 13000);
    if (!m->options.memory) m->options.memory = (uint64_t)8 << 30;
    if (!m->options.late_operations) m->options.late_operations = 1;
    m->random = m->options.seed;
    m->devices.resize(m->options.devices > 0 ? (size_t)m->options.devices : 0);
    {
        std::lock_guard<std::mutex> lock(mutex);
        installations++;
        machine = m;
        if (m->options.timing == EMU_THREAD) m->worker = std::thread(work);
    }
    found = {&driver_table, &blas_table, images, 1, ""};
    kvp__cuda_use(&found);
}

void emu_uninstall(void)
{
    Machine *m = machine;
    if (!m) return;
    kvp__cuda_use(nullptr);
    mutex.lock();
    m->stopping = true;
    changes().notify_all();
    mutex.unlock();
    if (m->worker.joinable()) m->worker.join();
    std::lock_guard<std::mutex> lock(mutex);
    for (auto &a : m->memory) emu_free((void *)(uintptr_t)a.first);
    machine = nullptr;
    delete m;
}

emu_driver_counts emu_driver_counted(void)
{
    std::lock_guard<std::mutex> lock(mutex);
    return machine->counts;
}

/* A name that no table has is a mistake of the test's. */
static void check_name(const char *name)
{
#define IS(function, suffix, args)                                                                 \
    if (std::string(#function) == name) return;
    KVP__CU_FUNCTIONS(IS)
    KVP__BLAS_FUNCTIONS(IS)
#undef IS
    fprintf(stderr, "emulator: there is no function %s\n", name);
    abort();
}

uint64_t emu_driver_calls(const char *name)
{
    std::lock_guard<std::mutex> lock(mutex);
    if (!name) return machine->all_calls;
    check_name(name);
    return machine->calls[name];
}

uint64_t emu_driver_ran(const char *kernel)
{
    std::lock_guard<std::mutex> lock(mutex);
    return machine->ran[kernel];
}

const char *emu_driver_message(void)
{
    std::lock_guard<std::mutex> lock(mutex);
    return machine->message.c_str();
}

const char *emu_driver_leaks(void)
{
    static std::string text;
    std::lock_guard<std::mutex> lock(mutex);
    Machine &m = *machine;
    text.clear();
    size_t on_device = 0, retained = 0;
    for (auto &a : m.memory) on_device += a.second.device >= 0;
    for (auto &d : m.devices) retained += d.retained;
    const std::pair<const char *, size_t> alive[] = {
        {"allocations", on_device},
        {"pinned allocations", m.memory.size() - on_device},
        {"streams", m.streams.objects.size()},
        {"events", m.events.objects.size()},
        {"modules", m.modules.objects.size()},
        {"graphs", m.graphs.objects.size()},
        {"graphs to launch", m.execs.objects.size()},
        {"cuBLAS handles", m.blas.objects.size()},
        {"retained contexts", retained},
        {"pushed contexts", m.pushed},
    };
    for (auto &a : alive)
        if (a.second)
            text += (text.empty() ? "" : ", ") + std::to_string(a.second) + " " + a.first;
    return text.c_str();
}

uint64_t emu_driver_pending(void)
{
    std::lock_guard<std::mutex> lock(mutex);
    uint64_t n = 0;
    for (auto &s : machine->queues) n += s->queue.size();
    return n;
}

void *emu_driver_memory(kvp__cu_ptr p, uint64_t bytes)
{
    std::lock_guard<std::mutex> lock(mutex);
    for (int d = 0; d < machine->options.devices; d++)
        if (outside(p, bytes, d).empty()) return (void *)(uintptr_t)p;
    return nullptr;
}

void emu_driver_fail(const char *name, uint64_t nth, kvp__cu_result error)
{
    std::lock_guard<std::mutex> lock(mutex);
    if (name) check_name(name);
    Machine &m = *machine;
    m.fault_name = name ? name : "";
    m.fault_in = nth;
    m.fault = error;
    m.faulted = false;
}

bool emu_driver_failed(void)
{
    std::lock_guard<std::mutex> lock(mutex);
    return machine->faulted;
}

void emu_driver_lose(kvp__cu_result error)
{
    std::lock_guard<std::mutex> lock(mutex);
    lose(error);
}

void emu_driver_hold(bool on)
{
    std::lock_guard<std::mutex> lock(mutex);
    machine->held = on;
    changes().notify_all();
    run_at_once();
}

uint64_t emu_driver_run(uint64_t n)
{
    std::lock_guard<std::mutex> lock(mutex);
    Machine &m = *machine;
    if (m.options.timing == EMU_THREAD && !m.held) return 0;
    uint64_t ran = 0;
    while (ran < n) {
        if (run_one())
            ran++;
        else if (m.running)
            changes().wait(mutex);
        else
            break;
    }
    return ran;
}
