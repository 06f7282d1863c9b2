/*
 * Attention's times on a card against the gates of the design, graph-replayed, merge included, over
 * buffers that are larger than the L2 cache:
 *
 *     decode   t <= bytes / (0.92 x copy bandwidth) + 5 us     16-bit KV, 32 query heads, 8 KV
 * heads, d 128
 *     prefill  330 TFLOP/s where every row sees every key, 290 causal
 *
 * The copy bandwidth is measured first, in the same run. Without a card the same program runs small
 * shapes on the emulator and leaves the times out. Prints a line a case, separated by tabs:
 * what, measured, unit, wanted, verdict. Exit 1 if something is wrong, not if a gate is missed.
 */
/* The library's headers are C; clang knows C's atomics in C++ too. */
#ifndef __clang__
#define _Atomic
#endif
extern "C" {
#include "cuda/plan.h"
}
#ifndef __clang__
#undef _Atomic
#endif
#include "cuda/api.h"
#include "tests/emu/driver.h"
#include "tests/gpu/ceiling.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <dlfcn.h>

namespace {

constexpr uint32_t HEADS = 32, KV_HEADS = 8, DIM = 128, BLOCK = 64;
constexpr uint64_t L2_BYTES = 256u << 20; /* more than any */
constexpr double COPY_SHARE = 0.92, OVERHEAD_US = 5;

const kvp__cuda_api *cu;
kvp__cu_stream stream;
bool on_card;
int sms;
int (*elapsed)(float *ms, kvp__cu_event from, kvp__cu_event to);
int (*copy_within)(kvp__cu_ptr to, kvp__cu_ptr from, size_t bytes, kvp__cu_stream stream);

void must(int e, const char *what)
{
    if (!e) return;
    const char *name = nullptr;
    cu->cuGetErrorName(e, &name);
    fprintf(stderr, "%s: %s %s\n", what, name ? name : "an unknown error",
            on_card ? "" : emu_driver_message());
    exit(1);
}

void report(const std::string &what, double value, const char *unit, const std::string &wanted,
            const char *verdict)
{
    if (on_card)
        printf("%s\t%.4g\t%s\t%s\t%s\n", what.c_str(), value, unit, wanted.c_str(), verdict);
    else
        printf("%s\t-\t%s\t%s\tran on the emulator\n", what.c_str(), unit, wanted.c_str());
    fflush(stdout);
}

std::string number(const char *format, double v)
{
    char text[64];
    snprintf(text, sizeof text, format, v);
    return text;
}

/* --- the card --- */

template <class F> void symbol(void *library, const char *name, F *f)
{
    void *p = library ? dlsym(library, name) : nullptr;
    if (!p) fprintf(stderr, "no %s\n", name), exit(1);
    memcpy(f, &p, sizeof p);
}

void open_card()
{
    on_card = kvp__cuda_load()->cuda != nullptr;
    emu_driver_options o = {};
    o.sm_count = 8;
    if (on_card) {
        void *library = dlopen("libcuda.so.1", RTLD_NOW);
        symbol(library, "cuEventElapsedTime", &elapsed);
        symbol(library, "cuMemcpyDtoDAsync_v2", &copy_within);
    } else {
        emu_install(&o);
    }
    cu = kvp__cuda_load()->cuda;
    if (!cu) fprintf(stderr, "%s\n", kvp__cuda_load()->missing), exit(1);
    kvp__cu_device device;
    kvp__cu_context context;
    must(cu->cuInit(0), "cuInit");
    must(cu->cuDeviceGet(&device, 0), "device");
    must(cu->cuDeviceGetAttribute(&sms, KVP__CU_ATTR_SM_COUNT, device), "attribute");
    must(cu->cuDevicePrimaryCtxRetain(&context, device), "context");
    must(cu->cuCtxPushCurrent(context), "context");
    must(cu->cuStreamCreate(&stream, KVP__CU_STREAM_NON_BLOCKING), "stream");
}

struct Memory {
    kvp__cu_ptr p = 0;
    explicit Memory(uint64_t bytes)
    {
        must(cu->cuMemAlloc(&p, std::max<uint64_t>(bytes, 1)), "memory");
    }
    Memory(const Memory &) = delete;
    ~Memory() { cu->cuMemFree(p); }
    void send(const void *from, uint64_t bytes)
    {
        must(cu->cuMemcpyHtoDAsync(p, from, bytes, stream), "upload");
        must(cu->cuStreamSynchronize(stream), "upload");
    }
    void fill(unsigned char value, uint64_t bytes)
    {
        must(cu->cuMemsetD8Async(p, value, bytes, stream), "fill");
        must(cu->cuStreamSynchronize(stream), "fill");
    }
    template <class T> T *as() const { return (T *)(uintptr_t)p; }
};

kvp__cu_function kernel(const char *name)
{
    static std::vector<kvp__cu_module> modules;
    const kvp__cuda_found *found = kvp__cuda_load();
    for (uint32_t i = 0; modules.size() < found->n_images; i++) {
        kvp__cu_module m;
        must(cu->cuModuleLoadData(&m, found->images[i].data), "an image");
        modules.push_back(m);
    }
    kvp__cu_function f;
    for (auto m : modules)
        if (cu->cuModuleGetFunction(&f, m, name) == 0) return f;
    fprintf(stderr, "no kernel %s\n", name);
    exit(1);
}

template <class Args> void launch(const char *name, kvp__launch l, Args a)
{
    kvp__cu_function f = kernel(name);
    void *arguments[] = {&a};
    if (l.shared > 48u << 10)
        must(cu->cuFuncSetAttribute(f, KVP__CU_FUNC_MAX_DYNAMIC_SMEM, (int)l.shared), name);
    must(cu->cuLaunchKernel(f, l.x, l.y, 1, l.threads, 1, 1, l.shared, stream, arguments, nullptr),
         name);
}

/* Microseconds of what `work` puts on the stream, replayed from a graph: the median of seven. */
template <class F> double time_of(F work)
{
    work(); /* what is not loaded yet is loaded now */
    must(cu->cuStreamSynchronize(stream), "a first run");
    kvp__cu_graph graph;
    kvp__cu_graph_exec exec;
    must(cu->cuStreamBeginCapture(stream, KVP__CU_CAPTURE_THREAD_LOCAL), "capture");
    work();
    must(cu->cuStreamEndCapture(stream, &graph), "capture");
    must(cu->cuGraphInstantiateWithFlags(&exec, graph, 0), "graph");
    std::vector<double> times;
    for (int i = 0; i < (on_card ? 9 : 1); i++) {
        kvp__cu_event from, to;
        float ms = 0;
        must(cu->cuEventCreate(&from, 0), "event");
        must(cu->cuEventCreate(&to, 0), "event");
        must(cu->cuEventRecord(from, stream), "event");
        must(cu->cuGraphLaunch(exec, stream), "graph");
        must(cu->cuEventRecord(to, stream), "event");
        must(cu->cuStreamSynchronize(stream), "graph");
        if (on_card) must(elapsed(&ms, from, to), "time");
        if (i >= 2 || !on_card) times.push_back(ms * 1000.0);
        cu->cuEventDestroy(from);
        cu->cuEventDestroy(to);
    }
    cu->cuGraphExecDestroy(exec);
    cu->cuGraphDestroy(graph);
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

/* --- ceilings --- */

std::vector<char> file(const std::string &path)
{
    std::vector<char> bytes;
    FILE *f = fopen(path.c_str(), "rb");
    if (!f) return bytes;
    for (int b; (b = fgetc(f)) != EOF;) bytes.push_back((char)b);
    fclose(f);
    return bytes;
}

/* By a kernel of the test's, from the folder of images. */
void read_bandwidth(const Memory &from, uint64_t bytes)
{
    const char *folder = getenv("KVPAGE_GPU_IMAGES");
    std::vector<char> image = file(std::string(folder ? folder : ".") + "/ceiling.fatbin");
    kvp__cu_module m;
    kvp__cu_function f;
    if (image.empty()) return;
    must(cu->cuModuleLoadData(&m, image.data()), "ceiling.fatbin");
    must(cu->cuModuleGetFunction(&f, m, "ceiling_read"), "ceiling_read");
    Memory out(4);
    ceiling_args a = {from.as<void>(), out.as<uint32_t>(), bytes / 16, 0x12345678, 0};
    void *arguments[] = {&a};
    double us = time_of([&] {
        must(cu->cuLaunchKernel(f, (unsigned)sms * 4, 1, 1, 512, 1, 1, 0, stream, arguments,
                                nullptr),
             "ceiling_read");
    });
    report("reading", bytes / us / 1e6, "TB/s", "", "");
}

/* Bytes per microsecond, read and written ones. */
double copy_bandwidth()
{
    const uint64_t bytes = (uint64_t)4 << 30;
    if (!on_card) {
        report("copy within the card", 0, "TB/s", "", "");
        return 1;
    }
    Memory from(bytes), to(bytes);
    from.fill(0x3c, bytes);
    double us = time_of([&] { must(copy_within(to.p, from.p, bytes, stream), "copy"); });
    report("copy within the card", 2 * bytes / us / 1e6, "TB/s", "", "");
    read_bandwidth(from, bytes);
    return 2 * bytes / us;
}

/* --- attention --- */

/* Sequences of the same length, of which the last `rows` tokens are this step's. */
struct Case {
    uint32_t seqs, keys, rows;
};

class Attention {
public:
    Case c;
    uint32_t layers, n_rows;
    kvp__layout layout = {};
    kvp__cuda_plan plan = {};

    Attention(Case of, uint32_t n_layers) : c(of), layers(n_layers), n_rows(of.seqs * of.rows)
    {
        make_layout();
        make_plan();
        send();
    }

    uint64_t layer_bytes() const { return (uint64_t)c.seqs * c.keys * KV_HEADS * DIM * 4; }

    /* One layer; `any`: by the plain kernel. */
    void run(uint32_t layer, bool any)
    {
        const kvp__group_layout &l = layout.groups[0];
        kvp__attention_args a = {};
        a.step = step->as<kvp__cuda_step>();
        a.items = (const kvp__cuda_item *)(uintptr_t)(lists->p + plan.items_at);
        a.rows = (const uint32_t *)(uintptr_t)(lists->p + plan.rows_at);
        a.positions = positions->as<uint32_t>();
        a.tables = tables->as<uint32_t>();
        a.q = q->as<void>();
        a.out = out->as<void>();
        a.part_out = part_out->as<float>();
        a.part_lse = part_lse->as<float>();
        a.kv = {slab->as<uint8_t>(), l.base, l.pitch, layer * l.layer, layer * l.layer + l.k_part,
                l.k_head, l.v_head};
        a.out_row = (int64_t)HEADS * DIM;
        a.out_head = DIM;
        a.table_stride = table_stride;
        a.block_shift = 6;
        a.query_heads = HEADS;
        a.kv_heads = KV_HEADS;
        a.key_dim = a.value_dim = DIM;
        a.k_type = a.v_type = a.out_type = KVP__EL_F16;
        a.scale = 1 / sqrtf((float)DIM);
        for (uint32_t t = 0; t < KVP__ATTEND_TILES; t++) {
            if (!plan.n_items[t]) continue;
            char name[KVP__KERNEL_NAME];
            a.tile = t;
            if (any)
                launch("attention_any",
                       kvp__launch_attention_any(plan.n_items[t], KV_HEADS, DIM, DIM), a);
            else
                launch(kvp__cuda_plan_kernel(&plan, t, name),
                       kvp__launch_attention(plan.d, t, plan.n_items[t], KV_HEADS), a);
        }
        if (!plan.n_merges) return;
        kvp__merge_args m = {};
        m.step = a.step;
        m.merges = (const kvp__cuda_merge *)(uintptr_t)(lists->p + plan.merges_at);
        m.slots = (const uint32_t *)(uintptr_t)(lists->p + plan.slots_at);
        m.part_out = a.part_out;
        m.part_lse = a.part_lse;
        m.out = a.out;
        m.out_row = a.out_row;
        m.out_head = a.out_head;
        m.query_heads = HEADS;
        m.value_dim = DIM;
        m.out_type = KVP__EL_F16;
        launch("merge", kvp__launch_merge(plan.n_merges, HEADS), m);
    }

    std::vector<uint16_t> result() const
    {
        std::vector<uint16_t> r((size_t)n_rows * HEADS * DIM);
        must(cu->cuMemcpyDtoHAsync(r.data(), out->p, r.size() * 2, stream), "download");
        must(cu->cuStreamSynchronize(stream), "download");
        return r;
    }

    ~Attention()
    {
        for (Memory *m : {step, lists, positions, tables, q, out, part_out, part_lse, slab})
            delete m;
    }

private:
    Memory *step = nullptr, *lists = nullptr, *positions = nullptr, *tables = nullptr, *q = nullptr,
           *out = nullptr, *part_out = nullptr, *part_lse = nullptr, *slab = nullptr;
    uint32_t table_stride = 0;
    std::vector<uint32_t> table;
    std::vector<uint8_t> upload, scratch;
    uint8_t *upload_at = nullptr;
    uint32_t noise = 1;

    uint32_t random()
    {
        noise = noise * 1664525u + 1013904223u;
        return noise >> 8;
    }

    void make_layout()
    {
        kvp__geometry g = {};
        g.n_layers = layers;
        g.n_groups = 1;
        g.groups[0] = group();
        table_stride = (c.keys + BLOCK - 1) / BLOCK;
        for (uint32_t i = 0; i < layers; i++) g.layer_index[i] = (uint16_t)i;
        if (kvp__layout_make(&layout, &g, BLOCK, KVP_KV_F16, KVP_KV_F16,
                             (uint64_t)c.seqs * table_stride, nullptr))
            fprintf(stderr, "layout\n"), exit(1);
        for (uint32_t i = 0; i < c.seqs * table_stride; i++) table.push_back(i);
        for (size_t i = table.size(); i > 1; i--) std::swap(table[i - 1], table[random() % i]);
    }

    kvp_layer_group group() const
    {
        kvp_layer_group g = {};
        g.layers = layers;
        g.kv_heads = KV_HEADS;
        g.query_heads = HEADS;
        g.key_dim = g.value_dim = DIM;
        return g;
    }

    void make_plan()
    {
        kvp_layer_group g = group();
        kvp__cuda_limits limits = {n_rows, c.seqs, c.keys, (uint32_t)sms, 0};
        if (kvp__cuda_plan_place(&plan, &g, 0, &layout, &limits, nullptr))
            fprintf(stderr, "plan\n"), exit(1);
        upload.resize(plan.upload_bytes + 64);
        scratch.resize(plan.scratch_bytes + 64);
        upload_at = (uint8_t *)(((uintptr_t)upload.data() + 63) & ~(uintptr_t)63);
        kvp__cuda_plan_use(&plan, upload_at,
                           (void *)(((uintptr_t)scratch.data() + 63) & ~(uintptr_t)63));
        std::vector<kvp__work_seq> seqs(c.seqs);
        std::vector<uint32_t> at = row_positions();
        for (uint32_t i = 0; i < c.seqs; i++) {
            seqs[i].first_row = i * c.rows;
            seqs[i].n_rows = c.rows;
            seqs[i].first_pos = c.keys - c.rows;
            seqs[i].n_blocks = table_stride;
            seqs[i].tables[0] = table.data() + (size_t)i * table_stride;
        }
        kvp__work w = {};
        w.n_rows = n_rows;
        w.n_seqs = c.seqs;
        w.positions = at.data();
        w.seqs = seqs.data();
        kvp__cuda_plan_make(&plan, &w);
    }

    std::vector<uint32_t> row_positions() const
    {
        std::vector<uint32_t> p;
        for (uint32_t i = 0; i < n_rows; i++) p.push_back(c.keys - c.rows + i % c.rows);
        return p;
    }

    /* Halves between -2 and 2 in what is small, and a pattern of 1 MB of them in what is large. */
    std::vector<uint16_t> halves(size_t n)
    {
        std::vector<uint16_t> h(n);
        for (auto &x : h) {
            uint32_t u = random();
            x = (uint16_t)((u & 0x83ff) | (11 + u / 65536 % 5) << 10);
        }
        return h;
    }

    void send()
    {
        kvp__cuda_step s = {};
        s.n_rows = n_rows;
        s.n_seqs = c.seqs;
        kvp__cuda_plan_counts(&plan, &s);
        step = new Memory(sizeof s);
        step->send(&s, sizeof s);
        lists = new Memory(plan.upload_bytes);
        lists->send(upload_at, plan.upload_bytes);
        std::vector<uint32_t> at = row_positions();
        positions = new Memory(at.size() * 4);
        positions->send(at.data(), at.size() * 4);
        tables = new Memory(table.size() * 4);
        tables->send(table.data(), table.size() * 4);
        size_t n = (size_t)n_rows * HEADS * DIM;
        std::vector<uint16_t> values = halves(n);
        q = new Memory(n * 2);
        q->send(values.data(), n * 2);
        out = new Memory(n * 2);
        part_out = new Memory((size_t)(plan.n_slots + 1) * HEADS * DIM * 4);
        part_lse = new Memory((size_t)(plan.n_slots + 1) * HEADS * 4);
        slab = new Memory(layout.bytes);
        fill_slab();
    }

    void fill_slab()
    {
        uint64_t first = std::min<uint64_t>(layout.bytes, 1u << 20);
        std::vector<uint16_t> pattern = halves((size_t)first / 2);
        uint64_t piece = pattern.size() * 2;
        for (uint64_t b = 0; b < layout.bytes; b += piece) {
            uint64_t n = std::min(piece, layout.bytes - b);
            if (b == 0 || !on_card)
                must(cu->cuMemcpyHtoDAsync(slab->p + b, pattern.data(), n, stream), "fill");
            else
                must(copy_within(slab->p + b, slab->p, n, stream), "fill");
        }
        must(cu->cuStreamSynchronize(stream), "fill");
    }
};

/* So many layers that their KV is beyond any cache. */
uint32_t layers_of(Case c)
{
    uint64_t bytes = (uint64_t)c.seqs * c.keys * KV_HEADS * DIM * 4;
    return on_card ? (uint32_t)std::clamp<uint64_t>((L2_BYTES + bytes - 1) / bytes, 1, 64) : 2;
}

double time_layers(Attention &a)
{
    return time_of([&] {
               for (uint32_t l = 0; l < a.layers; l++) a.run(l, false);
           }) / a.layers;
}

void decode(Case c, double copy)
{
    Attention a(c, layers_of(c));
    double us = time_layers(a), most = a.layer_bytes() / (COPY_SHARE * copy) + OVERHEAD_US;
    report("decode " + std::to_string(c.seqs) + " x " + std::to_string(c.keys), us, "us",
           on_card ? "<= " + number("%.4g", most) : "", us <= most ? "reached" : "MISSED");
}

/* Pairs of a row and a key that it sees: 4 d operations for each query head. */
void prefill(Case c, const char *what, double wanted)
{
    Attention a(c, 1);
    double pairs = 0;
    for (uint32_t i = 0; i < c.rows; i++) pairs += c.keys - c.rows + i + 1;
    double us = time_layers(a), tflops = pairs * c.seqs * HEADS * DIM * 4 / us / 1e6;
    report(std::string("prefill ") + what, tflops, "TFLOP/s",
           on_card ? ">= " + number("%g", wanted) : "", tflops >= wanted ? "reached" : "MISSED");
}

float half(uint16_t h)
{
    int e = h >> 10 & 31, m = h & 1023;
    float v = e == 31 ? NAN : e ? ldexpf((float)(1024 + m), e - 25) : ldexpf((float)m, -24);
    return h & 0x8000 ? -v : v;
}

/* The tiled kernels against the plain one, on the same memory. */
bool agrees(Case c)
{
    Attention a(c, 1);
    a.run(0, true);
    std::vector<uint16_t> plain = a.result();
    a.run(0, false);
    std::vector<uint16_t> tiled = a.result();
    double most = 0, size = 0;
    for (size_t i = 0; i < plain.size(); i++) {
        double d = std::fabs(half(plain[i]) - half(tiled[i]));
        most = d > most || std::isnan(d) ? d : most;
        size = std::max(size, (double)std::fabs(half(plain[i])));
    }
    bool ok = most <= 4e-3 * size;
    printf("tiled against plain attention, %u x %u, %u rows\t%.2g\trelative\t<= 0.004\t%s\n",
           c.seqs, c.keys, c.rows, most / size, ok ? "reached" : "WRONG");
    return ok;
}

}

int main()
{
    open_card();
    double copy = copy_bandwidth();
    bool ok = on_card ? agrees({8, 4096, 1}) && agrees({2, 1000, 333}) && agrees({1, 20000, 1})
                      : agrees({3, 200, 1}) && agrees({1, 100, 40});
    const Case decodes[] = {{1, 1024, 1},   {1, 8192, 1},   {1, 32768, 1},  {1, 131072, 1},
                            {8, 1024, 1},   {8, 4096, 1},   {8, 32768, 1},  {8, 131072, 1},
                            {32, 1024, 1},  {32, 4096, 1},  {32, 32768, 1}, {64, 8192, 1},
                            {256, 1024, 1}, {256, 8192, 1}, {256, 32768, 1}};
    if (on_card) {
        for (Case c : decodes) decode(c, copy);
        prefill({1, 8192, 8192}, "8,192 rows, causal", 290);
        prefill({1, 65536, 1024}, "1,024 rows that see 65,536 keys", 330);
    } else {
        decode({2, 130, 1}, copy);
        prefill({1, 70, 70}, "causal", 0);
    }
    return !ok;
}
