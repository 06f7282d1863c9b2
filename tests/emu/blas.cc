/*
 * The emulated cuBLAS: the products that the device asks for, in the order of a stream.
 *
 * The arguments are those of columns: with op_a T and op_b N, column j of C is a row of outputs,
 * and C[j][i] is the sum over k of A[i][k] * B[j][k], where A has a row for each output and B for
 * each input row, both contiguous in k. All sums are of floats, eight at a time.
 *
 * A whole model runs on this, so it is made to be fast on one core: rows become floats once, a
 * block of B's stays in the cache, and four rows of A meet three of B in registers.
 */
#include "tests/emu/machine.h"

#include "base/half.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#endif

namespace driver {

constexpr Result BLAS_INVALID_VALUE = 7, BLAS_EXECUTION_FAILED = 13, BLAS_NOT_SUPPORTED = 15,
                 BLAS_NOT_INITIALIZED = 1;
constexpr size_t WIDTH = 8, A_ROWS = 4, B_ROWS = 3, B_BLOCK_FLOATS = 64u << 10;

struct Product {
    size_t m, n, k, lda, ldb, ldc;
    const uint16_t *a, *b;
    void *c;
    int in_type, c_type;
    float alpha, beta;
};

/* --- rows as floats --- */

static void floats_plain(const uint16_t *from, size_t n, int type, float *to)
{
    for (size_t i = 0; i < n; i++)
        to[i] = type == KVP__BLAS_R_16F ? kvp__f16_to_f32(from[i]) : kvp__bf16_to_f32(from[i]);
}

/* sums[i][j] of A_ROWS rows of A with B_ROWS of B, all of `k` floats, a multiple of WIDTH. */
static void sums_plain(const float *a, const float *b, size_t k, float sums[A_ROWS][B_ROWS])
{
    for (size_t i = 0; i < A_ROWS; i++)
        for (size_t j = 0; j < B_ROWS; j++) {
            float lanes[WIDTH] = {0};
            for (size_t at = 0; at < k; at += WIDTH)
                for (size_t l = 0; l < WIDTH; l++)
                    lanes[l] += a[i * k + at + l] * b[j * k + at + l];
            sums[i][j] = 0;
            for (size_t l = 0; l < WIDTH; l++) sums[i][j] += lanes[l];
        }
}

#ifdef AVX2

AVX2 static void floats_avx2(const uint16_t *from, size_t n, int type, float *to)
{
    size_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        __m128i h = _mm_loadu_si128((const __m128i *)(from + i));
        __m256 f = type == KVP__BLAS_R_16F
                       ? _mm256_cvtph_ps(h)
                       : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
        _mm256_storeu_ps(to + i, f);
    }
    floats_plain(from + i, n - i, type, to + i);
}

AVX2 static float sum_of(__m256 v)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

AVX2 static void sums_avx2(const float *a, const float *b, size_t k, float sums[A_ROWS][B_ROWS])
{
    __m256 acc[A_ROWS][B_ROWS];
    for (size_t i = 0; i < A_ROWS; i++)
        for (size_t j = 0; j < B_ROWS; j++) acc[i][j] = _mm256_setzero_ps();
    for (size_t at = 0; at < k; at += WIDTH) {
        __m256 y[B_ROWS];
        for (size_t j = 0; j < B_ROWS; j++) y[j] = _mm256_loadu_ps(b + j * k + at);
        for (size_t i = 0; i < A_ROWS; i++) {
            __m256 x = _mm256_loadu_ps(a + i * k + at);
            for (size_t j = 0; j < B_ROWS; j++) acc[i][j] = _mm256_fmadd_ps(x, y[j], acc[i][j]);
        }
    }
    for (size_t i = 0; i < A_ROWS; i++)
        for (size_t j = 0; j < B_ROWS; j++) sums[i][j] = sum_of(acc[i][j]);
}

/* What has these two has F16C, which not every compiler lets one ask for. */
static bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

#endif

struct Kernels {
    void (*floats)(const uint16_t *from, size_t n, int type, float *to);
    void (*sums)(const float *a, const float *b, size_t k, float sums[A_ROWS][B_ROWS]);
};

static Kernels kernels()
{
#ifdef AVX2
    if (has_avx2()) return {floats_avx2, sums_avx2};
#endif
    return {floats_plain, sums_plain};
}

/* `n` rows as floats, `k` of them in `width`; what is behind, and rows up to `rows`, is zero. */
static void pack(const Kernels &f, const uint16_t *from, size_t stride, int type, size_t n,
                 size_t rows, size_t k, size_t width, float *to)
{
    for (size_t r = 0; r < n; r++) {
        f.floats(from + r * stride, k, type, to + r * width);
        std::fill(to + r * width + k, to + (r + 1) * width, 0.0f);
    }
    std::fill(to + n * width, to + rows * width, 0.0f);
}

static void store(const Product &p, size_t row, size_t column, float sum)
{
    size_t at = row * p.ldc + column;
    auto c16 = (uint16_t *)p.c;
    auto c32 = (float *)p.c;
    float old = 0, v = p.alpha * sum;
    if (p.beta != 0) {
        if (p.c_type == KVP__BLAS_R_32F)
            old = c32[at];
        else
            floats_plain(c16 + at, 1, p.c_type, &old);
        v += p.beta * old;
    }
    if (p.c_type == KVP__BLAS_R_32F)
        c32[at] = v;
    else
        c16[at] = p.c_type == KVP__BLAS_R_16F ? kvp__f32_to_f16(v) : kvp__f32_to_bf16(v);
}

static void multiply(const Product &p)
{
    const Kernels f = kernels();
    const size_t width = (p.k + WIDTH - 1) / WIDTH * WIDTH;
    const size_t fits = std::max(B_BLOCK_FLOATS / width / B_ROWS, (size_t)1) * B_ROWS;
    std::vector<float> a(A_ROWS * width), b(fits * width);
    for (size_t j0 = 0; j0 < p.n; j0 += fits) {
        size_t nb = std::min(fits, p.n - j0);
        size_t rows = (nb + B_ROWS - 1) / B_ROWS * B_ROWS;
        pack(f, p.b + j0 * p.ldb, p.ldb, p.in_type, nb, rows, p.k, width, b.data());
        for (size_t i0 = 0; i0 < p.m; i0 += A_ROWS) {
            size_t na = std::min(A_ROWS, p.m - i0);
            pack(f, p.a + i0 * p.lda, p.lda, p.in_type, na, A_ROWS, p.k, width, a.data());
            for (size_t j = 0; j < nb; j += B_ROWS) {
                float sums[A_ROWS][B_ROWS];
                f.sums(a.data(), b.data() + j * width, width, sums);
                for (size_t jj = 0; jj < B_ROWS && j + jj < nb; jj++)
                    for (size_t i = 0; i < na; i++) store(p, j0 + j + jj, i0 + i, sums[i][jj]);
            }
        }
    }
}

/* --- the functions --- */

static std::shared_ptr<Blas> blas_of(kvp__blas_handle handle, Result *error)
{
    auto b = object_of(machine->blas, handle, "cuBLAS handle", error);
    if (!b) *error = BLAS_NOT_INITIALIZED;
    return b;
}

static Result cublasCreate(kvp__blas_handle *handle)
{
    return call(__func__, [&]() -> Result {
        auto b = std::make_shared<Blas>();
        b->device = current_device();
        machine->blas.add(b, handle);
        return KVP__CU_SUCCESS;
    });
}

static Result cublasDestroy(kvp__blas_handle handle)
{
    return call(__func__, [&]() -> Result {
        Result error = KVP__CU_SUCCESS;
        if (!blas_of(handle, &error)) return error;
        Result waited = wait_for_device();
        if (waited && !machine->lost) return waited;
        machine->blas.remove(handle);
        return waited;
    });
}

static Result cublasGetVersion(kvp__blas_handle handle, int *version)
{
    return call(__func__, [&]() -> Result {
        Result error = KVP__CU_SUCCESS;
        if (!blas_of(handle, &error)) return error;
        *version = 130000;
        return KVP__CU_SUCCESS;
    });
}

/* This takes the workspace away, as cuBLAS does. */
static Result cublasSetStream(kvp__blas_handle handle, kvp__cu_stream stream)
{
    return call(__func__, [&]() -> Result {
        Result error = KVP__CU_SUCCESS;
        auto b = blas_of(handle, &error);
        if (!b) return error;
        if (!stream_of(stream, &error)) return BLAS_INVALID_VALUE;
        b->stream = stream;
        b->workspace = false;
        return KVP__CU_SUCCESS;
    });
}

static Result cublasSetWorkspace(kvp__blas_handle handle, void *workspace, size_t bytes)
{
    return call(__func__, [&]() -> Result {
        Result error = KVP__CU_SUCCESS;
        auto b = blas_of(handle, &error);
        if (!b) return error;
        uint64_t p = (uint64_t)(uintptr_t)workspace;
        std::string wrong = outside(p, bytes, b->device);
        if (!wrong.empty() || !bytes || p % 256)
            return refuse(BLAS_INVALID_VALUE, "the workspace: %s",
                          wrong.empty() ? "empty, or not aligned to 256" : wrong.c_str());
        b->workspace = true;
        return KVP__CU_SUCCESS;
    });
}

/* What an operand of `columns` columns of `rows` elements, `stride` apart, is wrong with. */
static std::string bad_operand(const void *p, size_t rows, size_t columns, size_t stride,
                               size_t element, int device)
{
    if (stride < rows) return "columns that overlap";
    if ((uintptr_t)p % element) return "an address between elements";
    return outside((uint64_t)(uintptr_t)p, ((columns - 1) * stride + rows) * element, device);
}

static bool is_16(int type) { return type == KVP__BLAS_R_16F || type == KVP__BLAS_R_16BF; }

static Result cublasGemmEx(kvp__blas_handle handle, int op_a, int op_b, int m, int n, int k,
                           const void *alpha, const void *a, int a_type, int lda, const void *b,
                           int b_type, int ldb, const void *beta, void *c, int c_type, int ldc,
                           int compute_type, int algo)
{
    return call(__func__, [&]() -> Result {
        Result error = KVP__CU_SUCCESS;
        auto h = blas_of(handle, &error);
        if (!h) return error;
        auto s = stream_of(h->stream, &error);
        if (!s) return BLAS_NOT_INITIALIZED;
        if (op_a != KVP__BLAS_T || op_b != KVP__BLAS_N || !is_16(a_type) || b_type != a_type ||
            (c_type != KVP__BLAS_R_32F && c_type != a_type) ||
            compute_type != KVP__BLAS_COMPUTE_32F || algo != KVP__BLAS_ALGO_DEFAULT)
            return refuse(BLAS_NOT_SUPPORTED, "not a product that the emulator does");
        if (m <= 0 || n <= 0 || k <= 0 || lda <= 0 || ldb <= 0 || ldc <= 0)
            return refuse(BLAS_INVALID_VALUE, "%d x %d x %d, strides %d, %d, %d", m, n, k, lda, ldb,
                          ldc);
        /* Without one it would take memory, which a graph must not do. */
        if (s->capture && !h->workspace)
            return refuse(BLAS_NOT_SUPPORTED, "no workspace is set for a product that is captured");
        Product p = {(size_t)m, (size_t)n, (size_t)k, (size_t)lda, (size_t)ldb, (size_t)ldc,
                     (const uint16_t *)a, (const uint16_t *)b, c, a_type, c_type,
                     *(const float *)alpha, *(const float *)beta};
        const struct {
            const char *name;
            const void *p;
            size_t rows, columns, stride, element;
        } operands[] = {{"A", a, p.k, p.m, p.lda, 2},
                        {"B", b, p.k, p.n, p.ldb, 2},
                        {"C", c, p.m, p.n, p.ldc, c_type == KVP__BLAS_R_32F ? (size_t)4 : 2}};
        for (auto &o : operands) {
            std::string bad = bad_operand(o.p, o.rows, o.columns, o.stride, o.element, s->device);
            if (!bad.empty()) return refuse(BLAS_INVALID_VALUE, "%s: %s", o.name, bad.c_str());
        }
        uint64_t a_bytes = ((p.m - 1) * p.lda + p.k) * 2;
        int device = s->device;
        Operation o;
        o.kind = Kind::PRODUCT;
        o.run = [=]() -> std::string {
            std::string bad = outside_now((uint64_t)(uintptr_t)p.a, a_bytes, device);
            if (bad.empty()) multiply(p);
            return bad.empty() ? bad : "a product ran: " + bad;
        };
        Result issued = issue(*s, std::move(o));
        return issued ? BLAS_EXECUTION_FAILED : KVP__CU_SUCCESS;
    });
}

#define ENTRY(name, suffix, args) name,
const kvp__blas_api blas_table = {KVP__BLAS_FUNCTIONS(ENTRY)};

}
