/*
 * The emulator's interfaces (tests/emu/emu.h and driver.h) on a real card, so that the tests of
 * kernels, device and engine run there as they are: memory is managed, so that host and kernels
 * read the same addresses, and a launch returns when the grid has ended. What only an emulator can
 * do is not done: schedules are all the same, counters are zero, and run.sh leaves out the tests
 * that are about those, or about the driver's faults and timings.
 *
 * Kernels come from the library's own images and, for those of tests, from the fatbins in the
 * folder KVPAGE_GPU_IMAGES.
 */
#include "cuda/api.h"
#include "tests/emu/driver.h"
#include "tests/emu/emu.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <dirent.h>
#include <dlfcn.h>

namespace {

constexpr size_t GUARD = 256; /* bytes behind an allocation that nobody may write */
constexpr unsigned char PATTERN = 0xa5;

struct Card {
    const kvp__cuda_api *cu;
    kvp__cu_context context;
    int (*alloc_managed)(kvp__cu_ptr *p, size_t bytes, unsigned flags);
    std::vector<kvp__cu_module> modules;
    std::vector<std::vector<char>> files;
    std::map<std::string, kvp__cu_function> functions;
    std::map<uint64_t, size_t> memory;
};

std::mutex lock;

/* There is no test without the card. */
void need(bool ok, const char *what)
{
    if (ok) return;
    fprintf(stderr, "card: %s\n", what);
    exit(1);
}

void load_files(Card &c, const char *folder)
{
    DIR *d = folder ? opendir(folder) : nullptr;
    if (!d) return;
    while (dirent *e = readdir(d)) {
        std::string path = std::string(folder) + "/" + e->d_name;
        size_t dot = path.rfind('.');
        if (dot == std::string::npos || path.substr(dot) != ".fatbin") continue;
        FILE *f = fopen(path.c_str(), "rb");
        if (!f) continue;
        std::vector<char> bytes;
        for (int b; (b = fgetc(f)) != EOF;) bytes.push_back((char)b);
        fclose(f);
        c.files.push_back(std::move(bytes));
    }
    closedir(d);
}

Card *open_card()
{
    auto *c = new Card;
    kvp__cuda_use(nullptr);
    const kvp__cuda_found *found = kvp__cuda_load();
    need(found->cuda, found->missing);
    c->cu = found->cuda;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    void *managed = driver ? dlsym(driver, "cuMemAllocManaged") : nullptr;
    need(managed, "no cuMemAllocManaged");
    memcpy(&c->alloc_managed, &managed, sizeof managed);
    need(c->cu->cuInit(0) == 0 && c->cu->cuDevicePrimaryCtxRetain(&c->context, 0) == 0 &&
             c->cu->cuCtxPushCurrent(c->context) == 0,
         "the card gives no context");
    load_files(*c, getenv("KVPAGE_GPU_IMAGES"));
    for (uint32_t i = 0; i < found->n_images + c->files.size(); i++) {
        kvp__cu_module m;
        const void *image = i < found->n_images ? found->images[i].data
                                                : c->files[i - found->n_images].data();
        need(c->cu->cuModuleLoadData(&m, image) == 0, "an image does not load");
        c->modules.push_back(m);
    }
    c->cu->cuCtxPopCurrent(nullptr);
    return c;
}

/* The card, with its context current until the end of the scope. */
struct Use {
    std::lock_guard<std::mutex> guard;
    Card &c;
    static Card &card()
    {
        static Card *opened = open_card();
        return *opened;
    }
    Use() : guard(lock), c(card()) { need(c.cu->cuCtxPushCurrent(c.context) == 0, "no context"); }
    ~Use() { c.cu->cuCtxPopCurrent(nullptr); }
};

kvp__cu_function function_of(Card &c, const std::string &name)
{
    auto i = c.functions.find(name);
    if (i != c.functions.end()) return i->second;
    kvp__cu_function f = nullptr;
    for (auto m : c.modules)
        if (c.cu->cuModuleGetFunction(&f, m, name.c_str()) == 0) break;
    return c.functions[name] = f;
}

const char *error_of(Card &c, int e)
{
    const char *name = nullptr;
    if (c.cu->cuGetErrorName(e, &name) || !name) name = "an unknown error";
    return name;
}

emu_options options;

}

/* --- emu.h --- */

void emu_set(const emu_options *o) { options = *o; }
emu_options emu_get(void) { return options; }
void emu_stats_reset(void) {}
emu_stats emu_stats_get(void) { return {}; }
int emu_race_build(void) { return 0; }
const char *emu_kernel(size_t) { return nullptr; }

int emu_kernel_info(const char *kernel, size_t *args_bytes, uint32_t *threads)
{
    Use use;
    *args_bytes = 0;
    *threads = 1024;
    return function_of(use.c, kernel) ? 0 : -1;
}

const char *emu_launch(const char *kernel, uint32_t grid_x, uint32_t grid_y, uint32_t grid_z,
                       uint32_t threads, size_t shared_bytes, const void *args)
{
    static thread_local std::string wrong;
    Use use;
    const kvp__cuda_api *cu = use.c.cu;
    kvp__cu_function f = function_of(use.c, kernel);
    if (!f) return "no such kernel";
    void *arguments[] = {const_cast<void *>(args)};
    int e = 0;
    if (shared_bytes > 48u << 10)
        e = cu->cuFuncSetAttribute(f, KVP__CU_FUNC_MAX_DYNAMIC_SMEM, (int)shared_bytes);
    if (!e)
        e = cu->cuLaunchKernel(f, grid_x, grid_y, grid_z, threads, 1, 1, (unsigned)shared_bytes,
                               nullptr, arguments, nullptr);
    if (!e) e = cu->cuStreamSynchronize(nullptr);
    if (!e) return nullptr;
    wrong = std::string(kernel) + ": " + error_of(use.c, e);
    return wrong.c_str();
}

void *emu_alloc_sparse(size_t bytes)
{
    Use use;
    kvp__cu_ptr p = 0;
    if (use.c.alloc_managed(&p, bytes + GUARD, 1)) return nullptr; /* attached to all streams */
    use.c.memory[p] = bytes;
    auto *memory = (unsigned char *)(uintptr_t)p;
    memset(memory + bytes, PATTERN, GUARD);
    return memory;
}

void *emu_alloc(size_t bytes)
{
    void *p = emu_alloc_sparse(bytes);
    if (p) memset(p, 0xff, bytes);
    return p;
}

int emu_free(void *p)
{
    if (!p) return 0;
    Use use;
    auto i = use.c.memory.find((uint64_t)(uintptr_t)p);
    if (i == use.c.memory.end()) return -1;
    int broken = 0;
    for (size_t b = 0; b < GUARD; b++)
        if (((unsigned char *)p)[i->second + b] != PATTERN) broken = -1;
    use.c.memory.erase(i);
    return use.c.cu->cuMemFree((uint64_t)(uintptr_t)p) ? -1 : broken;
}

int emu_valid(const void *p, size_t bytes)
{
    Use use;
    uint64_t first = (uint64_t)(uintptr_t)p;
    auto i = use.c.memory.upper_bound(first);
    if (i == use.c.memory.begin()) return 0;
    --i;
    return first - i->first <= i->second && bytes <= i->second - (first - i->first);
}

/* --- driver.h: the real driver, of which nothing is known --- */

void emu_install(const emu_driver_options *) { kvp__cuda_use(nullptr); }
void emu_uninstall(void) {}
emu_driver_counts emu_driver_counted(void) { return {}; }
uint64_t emu_driver_calls(const char *) { return 0; }
uint64_t emu_driver_ran(const char *) { return 0; }
const char *emu_driver_message(void) { return ""; }
const char *emu_driver_leaks(void) { return ""; }
uint64_t emu_driver_pending(void) { return 0; }
void *emu_driver_memory(kvp__cu_ptr, uint64_t) { return nullptr; }
void emu_driver_fail(const char *, uint64_t, kvp__cu_result) {}
bool emu_driver_failed(void) { return false; }
void emu_driver_lose(kvp__cu_result) {}
void emu_driver_hold(bool) {}
uint64_t emu_driver_run(uint64_t) { return 0; }
