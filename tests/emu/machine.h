/*
 * What the emulated driver and cuBLAS share: the machine (machine.cc). Devices, memory, contexts,
 * streams and the operations in them, what was counted, and the faults that tests ask for.
 * driver.cc and blas.cc are the functions of the tables; each of them is a `call`.
 *
 * One lock guards all of it: the body of a call holds it, and what is declared here expects that.
 * An operation runs without it, one at a time, in the thread that the timing says.
 */
#ifndef TESTS_EMU_MACHINE_H
#define TESTS_EMU_MACHINE_H

#include "tests/emu/driver.h"

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace driver {

using Result = kvp__cu_result;

/* Results of the driver that only the emulator gives. */
constexpr Result NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
                 INVALID_HANDLE = 400, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901,
                 CAPTURE_UNMATCHED = 903, CAPTURE_ISOLATION = 905, CAPTURED_EVENT = 907,
                 CAPTURE_WRONG_THREAD = 908, UNKNOWN = 999;

struct Allocation {
    uint64_t bytes;
    int device; /* -1: pinned memory of the host */
};

struct Device {
    uint32_t retained = 0;
    kvp__cu_context context = nullptr;
    uint64_t used = 0;
};

struct Event {
    int device;
    uint64_t recorded = 0, done = 0; /* how often it was, and which of them are over */
    bool captured = false;           /* recorded last in a capture, of no use outside */
};

enum class Kind { KERNEL, PRODUCT, UPLOAD, DOWNLOAD, MEMSET, HOST, RECORD, WAIT };

struct Operation {
    Kind kind;
    std::function<std::string()> run; /* what went wrong, or ""; RECORD and WAIT have none */
    std::string name;                 /* of a kernel */
    uint64_t bytes = 0;               /* of a copy */
    bool pageable = false;
    std::shared_ptr<Event> event;
    uint64_t ticket = 0;              /* which of the event's records */
};
using Operations = std::vector<std::shared_ptr<const Operation>>;

struct Capture {
    std::thread::id thread;
    Operations operations;
    bool valid = true;
};

struct Stream {
    int device;
    std::deque<std::pair<uint64_t, std::shared_ptr<const Operation>>> queue; /* with their ages */
    std::unique_ptr<Capture> capture;
};

struct Module {
    int device;
};

struct Function {
    kvp__cu_module module;
    int device;
    std::string name;
    uint64_t args_bytes;
    uint32_t most_threads, most_shared;
};

struct Graph { /* one that can be launched, too */
    int device;
    Operations operations;
};

struct Blas {
    int device;
    kvp__cu_stream stream = nullptr;
    bool workspace = false;
};

/* Objects behind handles. A handle is never used twice, and is no address. */
uintptr_t new_handle();

template <class T> struct Table {
    std::map<uintptr_t, std::shared_ptr<T>> objects;

    template <class Handle> void add(std::shared_ptr<T> object, Handle *out)
    {
        uintptr_t h = new_handle();
        objects[h] = std::move(object);
        *out = reinterpret_cast<Handle>(h);
    }
    template <class Handle> std::shared_ptr<T> get(Handle h) const
    {
        auto i = objects.find(reinterpret_cast<uintptr_t>(h));
        return i == objects.end() ? nullptr : i->second;
    }
    template <class Handle> void remove(Handle h) { objects.erase(reinterpret_cast<uintptr_t>(h)); }
};

struct Machine {
    emu_driver_options options;
    bool initialised = false;
    std::vector<Device> devices;
    std::map<uint64_t, Allocation> memory; /* by its first address */
    std::map<int, std::shared_ptr<Stream>> default_streams; /* by device */
    std::vector<std::shared_ptr<Stream>> queues; /* all streams in which something may wait */
    Table<Stream> streams;
    Table<Event> events;
    Table<Module> modules;
    Table<Function> functions;
    Table<Graph> graphs, execs;
    Table<Blas> blas;
    uint64_t pushed = 0;          /* contexts, on all threads */
    Result failing = KVP__CU_SUCCESS; /* a call that gives back does so, and will end with this */

    uint64_t age = 0, random;
    bool running = false;         /* an operation, in some thread */
    bool held = false, stopping = false;
    Result lost = KVP__CU_SUCCESS;
    std::thread worker;

    emu_driver_counts counts = {};
    std::map<std::string, uint64_t> calls, ran;
    uint64_t all_calls = 0;
    std::string message;

    std::string fault_name;       /* "": any */
    uint64_t fault_in = 0;        /* calls; 0: no fault */
    Result fault = KVP__CU_SUCCESS;
    bool faulted = false;
};
extern Machine *machine; /* nullptr: not installed */

/* --- one call of a function of the tables --- */

/* Counts it, and gives the error with which it ends before anything is done: not allowed here, no
 * context, a fault that was asked for, a lost device. Otherwise what `body` gives. */
Result call(const char *name, const std::function<Result()> &body);

/* Within a call: an error of the host's, with the sentence for emu_driver_message. */
Result refuse(Result error, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Of the current context; there is one, unless the rules of machine.cc say that none is needed. */
int current_device();
/* Whether the object is alive and of the current context; else refused in *error. */
template <class T, class Handle>
std::shared_ptr<T> object_of(const Table<T> &table, Handle h, const char *what, Result *error)
{
    std::shared_ptr<T> object = table.get(h);
    if (!object)
        *error = refuse(INVALID_HANDLE, "not a live %s", what);
    else if (object->device != current_device())
        *error = refuse(INVALID_CONTEXT, "the %s is of another context", what), object = nullptr;
    return object;
}

/* --- contexts --- */

Result push(kvp__cu_context context);
Result pop(kvp__cu_context *out);

/* --- memory --- */

/* Of a device, or pinned: -1. From emu_alloc, so that a kernel's access behind it is found. 0:
 * there is not so much left. */
uint64_t allocate(uint64_t bytes, int device);
/* False: p is not the beginning of such an allocation. */
bool release(uint64_t p, int device);
/* "" if [p, p + bytes) lies in one allocation of the device, else what is wrong. */
std::string outside(uint64_t p, uint64_t bytes, int device);
/* How [p, p + bytes) of the host lies to pinned memory. */
enum class Pinned { NO, YES, PARTLY };
Pinned pinned(const void *p, uint64_t bytes);
/* The same for an operation, which does not hold the lock. */
std::string outside_now(uint64_t p, uint64_t bytes, int device);
bool pinned_now(const void *p, uint64_t bytes);

/* --- streams --- */

std::shared_ptr<Stream> new_stream(int device);
/* Of the current context, whose own stream has the handle 0; nullptr: refused, in *error. */
std::shared_ptr<Stream> stream_of(kvp__cu_stream handle, Result *error);
/* Into the stream, or its capture. */
Result issue(Stream &s, Operation operation);
void issue_all(Stream &s, const Operations &operations);
/* What a query is allowed to run. */
void run_some();
/* Waits, running what the timing leaves to the caller, until the streams are empty. */
Result wait_for(const Stream &s);
Result wait_for_device();

/* --- the tables --- */

extern const kvp__cuda_api driver_table; /* driver.cc */
extern const kvp__blas_api blas_table;   /* blas.cc */
extern const char image[];               /* what cuModuleLoadData takes */

}

#endif
