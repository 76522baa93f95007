// The functions and types of the CUDA runtime that this project uses, emulated on the host: see runtime.cpp (devices,
// memory) and streams.cpp. Only libinfinirt holds state; the other emulated libraries call its functions.
#pragma once

#include <cstddef>

#define CUDART_VERSION 13000
#define INFINI_EMULATED extern "C" __attribute__((visibility("default")))

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// ---- errors ----

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInitializationError = 3,
    cudaErrorInvalidMemcpyDirection = 21,
    cudaErrorInsufficientDriver = 35,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorNoKernelImageForDevice = 209,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorIllegalState = 401,
    cudaErrorNotReady = 600,
    cudaErrorNotSupported = 801,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorStreamCaptureInvalidated = 901,
    cudaErrorStreamCaptureMerge = 902,
    cudaErrorStreamCaptureUnmatched = 903,
    cudaErrorStreamCaptureUnjoined = 904,
    cudaErrorStreamCaptureIsolation = 905,
    cudaErrorStreamCaptureImplicit = 906,
    cudaErrorCapturedEvent = 907,
    cudaErrorStreamCaptureWrongThread = 908
};
INFINI_EMULATED const char *cudaGetErrorName(cudaError_t error);
INFINI_EMULATED const char *cudaGetErrorString(cudaError_t error);
INFINI_EMULATED cudaError_t cudaGetLastError();

// ---- devices ----

enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
INFINI_EMULATED cudaError_t cudaGetDeviceCount(int *count);
INFINI_EMULATED cudaError_t cudaGetDevice(int *device);
INFINI_EMULATED cudaError_t cudaSetDevice(int device);
INFINI_EMULATED cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device);
INFINI_EMULATED cudaError_t cudaDeviceSynchronize();

// ---- streams and events ----

typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
#define cudaStreamLegacy (reinterpret_cast<cudaStream_t>(1))
#define cudaStreamPerThread (reinterpret_cast<cudaStream_t>(2))
constexpr unsigned cudaStreamNonBlocking = 1;
constexpr unsigned cudaEventBlockingSync = 1, cudaEventDisableTiming = 2;

INFINI_EMULATED cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
INFINI_EMULATED cudaError_t cudaStreamDestroy(cudaStream_t stream);
INFINI_EMULATED cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device);
INFINI_EMULATED cudaError_t cudaStreamSynchronize(cudaStream_t stream);
INFINI_EMULATED cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
INFINI_EMULATED cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
INFINI_EMULATED cudaError_t cudaEventDestroy(cudaEvent_t event);
INFINI_EMULATED cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
INFINI_EMULATED cudaError_t cudaEventQuery(cudaEvent_t event);
INFINI_EMULATED cudaError_t cudaEventSynchronize(cudaEvent_t event);
INFINI_EMULATED cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end);

// ---- memory ----

enum cudaMemcpyKind {
    cudaMemcpyHostToHost = 0,
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3,
    cudaMemcpyDefault = 4
};
constexpr unsigned cudaHostAllocPortable = 1;

INFINI_EMULATED cudaError_t cudaMalloc(void **p, size_t size);
INFINI_EMULATED cudaError_t cudaFree(void *p);
INFINI_EMULATED cudaError_t cudaHostAlloc(void **p, size_t size, unsigned flags);
INFINI_EMULATED cudaError_t cudaFreeHost(void *p);
typedef struct CUmemPool_st *cudaMemPool_t;
enum cudaMemPoolAttr { cudaMemPoolAttrReleaseThreshold = 4 };
INFINI_EMULATED cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device);
INFINI_EMULATED cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void *value);
INFINI_EMULATED cudaError_t cudaMallocAsync(void **p, size_t size, cudaStream_t stream);
INFINI_EMULATED cudaError_t cudaFreeAsync(void *p, cudaStream_t stream);
INFINI_EMULATED cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t size, cudaMemcpyKind kind,
                                            cudaStream_t stream);
INFINI_EMULATED cudaError_t cudaMemsetAsync(void *p, int value, size_t size, cudaStream_t stream);

// ---- captures and graphs ----

typedef struct CUgraph_st *cudaGraph_t;
typedef struct CUgraphNode_st *cudaGraphNode_t;
typedef struct CUgraphExec_st *cudaGraphExec_t;
enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal = 0,
    cudaStreamCaptureModeThreadLocal = 1,
    cudaStreamCaptureModeRelaxed = 2
};
enum cudaStreamCaptureStatus {
    cudaStreamCaptureStatusNone = 0,
    cudaStreamCaptureStatusActive = 1,
    cudaStreamCaptureStatusInvalidated = 2
};
enum cudaGraphInstantiateResult { cudaGraphInstantiateSuccess = 0, cudaGraphInstantiateError = 1 };
struct cudaGraphInstantiateParams {
    unsigned long long flags;
    cudaStream_t uploadStream;
    cudaGraphNode_t errNode_out;
    cudaGraphInstantiateResult result_out;
};

INFINI_EMULATED cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode);
INFINI_EMULATED cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status,
                                                     unsigned long long *id = nullptr);
INFINI_EMULATED cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
INFINI_EMULATED cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
INFINI_EMULATED cudaError_t cudaGraphDestroy(cudaGraph_t graph);
INFINI_EMULATED cudaError_t cudaGraphInstantiateWithParams(cudaGraphExec_t *exec, cudaGraph_t graph,
                                                           cudaGraphInstantiateParams *params);
INFINI_EMULATED cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
INFINI_EMULATED cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
