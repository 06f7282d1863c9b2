/*
 * The parts of the CUDA driver and of cuBLAS that this device uses, as tables of function pointers,
 * with declarations of our own: nothing of the toolkit is needed to build, and neither library to
 * start. load.c finds them at run time (libcuda.so.1, libcublas.so.13 or .12); tests put the
 * emulator's functions in their place, and all of the device runs on a machine without a GPU.
 *
 * Names, values and argument orders are those of the driver API and of cuBLAS. The number behind a
 * name in the lists is the suffix of the symbol that has this signature ("": none).
 */
#ifndef KVP_CUDA_API_H
#define KVP_CUDA_API_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef int kvp__cu_result; /* CUresult */
typedef int kvp__cu_device;
typedef uint64_t kvp__cu_ptr; /* CUdeviceptr */
typedef struct kvp__cu_context_st *kvp__cu_context;
typedef struct kvp__cu_module_st *kvp__cu_module;
typedef struct kvp__cu_function_st *kvp__cu_function;
typedef struct kvp__cu_stream_st *kvp__cu_stream;
typedef struct kvp__cu_event_st *kvp__cu_event;
typedef struct kvp__cu_graph_st *kvp__cu_graph;
typedef struct kvp__cu_graph_exec_st *kvp__cu_graph_exec;
typedef struct kvp__blas_handle_st *kvp__blas_handle;

enum {
    KVP__CU_SUCCESS = 0,
    KVP__CU_INVALID_VALUE = 1,
    KVP__CU_OUT_OF_MEMORY = 2,
    KVP__CU_NO_DEVICE = 100,
    KVP__CU_INVALID_IMAGE = 200,
    KVP__CU_NO_BINARY = 209, /* no code for this architecture */
    KVP__CU_NOT_FOUND = 500,
    KVP__CU_NOT_READY = 600,
    KVP__CU_ILLEGAL_ADDRESS = 700,
    KVP__CU_LAUNCH_FAILED = 719
};

enum { /* CUdevice_attribute */
    KVP__CU_ATTR_SM_COUNT = 16,
    KVP__CU_ATTR_MAJOR = 75,
    KVP__CU_ATTR_MINOR = 76,
    KVP__CU_ATTR_SMEM_OPTIN = 97
};
enum { KVP__CU_FUNC_MAX_DYNAMIC_SMEM = 8 }; /* CUfunction_attribute */
enum { KVP__CU_STREAM_NON_BLOCKING = 1, KVP__CU_EVENT_NO_TIMING = 2 };
enum { KVP__CU_CAPTURE_THREAD_LOCAL = 1 }; /* CUstreamCaptureMode */
enum { KVP__CU_CAPTURE_NONE = 0, KVP__CU_CAPTURE_ACTIVE = 1 };

#define KVP__CU_FUNCTIONS(X)                                                                       \
    X(cuInit, "", (unsigned flags))                                                                \
    X(cuDriverGetVersion, "", (int *version))                                                      \
    X(cuGetErrorName, "", (kvp__cu_result error, const char **name))                               \
    X(cuDeviceGetCount, "", (int *count))                                                          \
    X(cuDeviceGet, "", (kvp__cu_device *device, int ordinal))                                      \
    X(cuDeviceGetName, "", (char *name, int bytes, kvp__cu_device device))                         \
    X(cuDeviceGetAttribute, "", (int *value, int attribute, kvp__cu_device device))                \
    X(cuDeviceTotalMem, "_v2", (size_t *bytes, kvp__cu_device device))                             \
    X(cuDevicePrimaryCtxRetain, "", (kvp__cu_context *context, kvp__cu_device device))             \
    X(cuDevicePrimaryCtxRelease, "_v2", (kvp__cu_device device))                                   \
    X(cuCtxPushCurrent, "_v2", (kvp__cu_context context))                                          \
    X(cuCtxPopCurrent, "_v2", (kvp__cu_context *context))                                          \
    X(cuMemGetInfo, "_v2", (size_t *free, size_t *total))                                          \
    X(cuMemAlloc, "_v2", (kvp__cu_ptr *p, size_t bytes))                                           \
    X(cuMemFree, "_v2", (kvp__cu_ptr p))                                                           \
    X(cuMemHostAlloc, "", (void **p, size_t bytes, unsigned flags))                                \
    X(cuMemFreeHost, "", (void *p))                                                                \
    X(cuMemcpyHtoDAsync, "_v2",                                                                    \
      (kvp__cu_ptr to, const void *from, size_t bytes, kvp__cu_stream stream))                     \
    X(cuMemcpyDtoHAsync, "_v2",                                                                    \
      (void *to, kvp__cu_ptr from, size_t bytes, kvp__cu_stream stream))                           \
    X(cuMemsetD8Async, "",                                                                         \
      (kvp__cu_ptr p, unsigned char value, size_t bytes, kvp__cu_stream stream))                   \
    X(cuModuleLoadData, "", (kvp__cu_module *module, const void *image))                           \
    X(cuModuleUnload, "", (kvp__cu_module module))                                                 \
    X(cuModuleGetFunction, "",                                                                     \
      (kvp__cu_function *function, kvp__cu_module module, const char *name))                       \
    X(cuFuncSetAttribute, "", (kvp__cu_function function, int attribute, int value))               \
    X(cuLaunchKernel, "",                                                                          \
      (kvp__cu_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,               \
       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,                \
       kvp__cu_stream stream, void **arguments, void **extra))                                     \
    X(cuStreamCreate, "", (kvp__cu_stream *stream, unsigned flags))                                \
    X(cuStreamDestroy, "_v2", (kvp__cu_stream stream))                                             \
    X(cuStreamSynchronize, "", (kvp__cu_stream stream))                                            \
    X(cuStreamQuery, "", (kvp__cu_stream stream))                                                  \
    X(cuStreamWaitEvent, "", (kvp__cu_stream stream, kvp__cu_event event, unsigned flags))         \
    X(cuStreamIsCapturing, "", (kvp__cu_stream stream, int *status))                               \
    X(cuStreamBeginCapture, "_v2", (kvp__cu_stream stream, int mode))                              \
    X(cuStreamEndCapture, "", (kvp__cu_stream stream, kvp__cu_graph *graph))                       \
    X(cuEventCreate, "", (kvp__cu_event *event, unsigned flags))                                   \
    X(cuEventDestroy, "_v2", (kvp__cu_event event))                                                \
    X(cuEventRecord, "", (kvp__cu_event event, kvp__cu_stream stream))                             \
    X(cuEventQuery, "", (kvp__cu_event event))                                                     \
    X(cuLaunchHostFunc, "", (kvp__cu_stream stream, void (*fn)(void *user), void *user))           \
    X(cuGraphInstantiateWithFlags, "",                                                             \
      (kvp__cu_graph_exec *exec, kvp__cu_graph graph, unsigned long long flags))                   \
    X(cuGraphLaunch, "", (kvp__cu_graph_exec exec, kvp__cu_stream stream))                         \
    X(cuGraphDestroy, "", (kvp__cu_graph graph))                                                   \
    X(cuGraphExecDestroy, "", (kvp__cu_graph_exec exec))

enum { /* cublasOperation_t, cudaDataType, cublasComputeType_t, cublasGemmAlgo_t */
    KVP__BLAS_N = 0,
    KVP__BLAS_T = 1,
    KVP__BLAS_R_32F = 0,
    KVP__BLAS_R_16F = 2,
    KVP__BLAS_R_16BF = 14,
    KVP__BLAS_COMPUTE_32F = 68,
    KVP__BLAS_ALGO_DEFAULT = -1
};

#define KVP__BLAS_FUNCTIONS(X)                                                                     \
    X(cublasCreate, "_v2", (kvp__blas_handle *handle))                                             \
    X(cublasDestroy, "_v2", (kvp__blas_handle handle))                                             \
    X(cublasGetVersion, "_v2", (kvp__blas_handle handle, int *version))                            \
    X(cublasSetStream, "_v2", (kvp__blas_handle handle, kvp__cu_stream stream))                    \
    X(cublasSetWorkspace, "_v2", (kvp__blas_handle handle, void *workspace, size_t bytes))         \
    X(cublasGemmEx, "",                                                                            \
      (kvp__blas_handle handle, int op_a, int op_b, int m, int n, int k, const void *alpha,        \
       const void *a, int a_type, int lda, const void *b, int b_type, int ldb, const void *beta,   \
       void *c, int c_type, int ldc, int compute_type, int algo))

#define KVP__MEMBER(name, suffix, args) kvp__cu_result(*name) args;
typedef struct kvp__cuda_api {
    KVP__CU_FUNCTIONS(KVP__MEMBER)
} kvp__cuda_api;
typedef struct kvp__blas_api {
    KVP__BLAS_FUNCTIONS(KVP__MEMBER)
} kvp__blas_api;
#undef KVP__MEMBER

/* A kernel file, compiled into a fatbin for several architectures: what cuModuleLoadData takes. A
 * kernel is in exactly one of them. */
typedef struct kvp__cuda_image {
    const char *name;
    const void *data;
} kvp__cuda_image;

/* image.c: those that are in this library. */
extern const kvp__cuda_image kvp__cuda_images[];
extern const uint32_t kvp__cuda_n_images;
extern const uint32_t kvp__cuda_toolkit; /* that made them, as the driver counts: 13020; 0: none */

/* Whether a driver of this version (cuDriverGetVersion) cannot load what a toolkit made: drivers take
 * what newer toolkits of their own major version make; compressed as our images are, from 12.4 on. */
static inline int kvp__cuda_too_old(uint32_t driver, uint32_t toolkit)
{
    return driver / 1000 < toolkit / 1000 || (toolkit && driver < 12040);
}

/* What was found, once per process. A table is NULL where the library or one of its functions is
 * missing; `missing` then says which, in one sentence. Thread: any. */
typedef struct kvp__cuda_found {
    const kvp__cuda_api *cuda;
    const kvp__blas_api *blas;
    const kvp__cuda_image *images; /* one for each kernel file */
    uint32_t n_images;             /* 0: built without kernels */
    char missing[128];      /* empty: nothing */
} kvp__cuda_found;
const kvp__cuda_found *kvp__cuda_load(void);

/* For tests: these from now on, instead of looking for any; NULL: look again. `found` is borrowed. */
void kvp__cuda_use(const kvp__cuda_found *found);

#ifdef __cplusplus
}
#endif
#endif
