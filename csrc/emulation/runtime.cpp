// The emulated CUDA runtime: errors, two devices that use host memory, and allocations. Memory is filled with 0xff,
// which reads as NaN, when it is allocated and before it is freed.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "emulator.h"
#include "queues.h"
#include "streams.h"

namespace infini::emulation {

namespace {

constexpr int kDevices = 2;
constexpr size_t kMemory = size_t{4} << 30; // bytes per device
constexpr size_t kAlignment = 256;

thread_local int device = 0;
thread_local cudaError_t last_error = cudaSuccess;

enum class Kind { kDevice, kPool, kHost };
struct Allocation {
    Kind kind;
    size_t size;
};
std::mutex mutex;
std::map<void *, Allocation> allocations;

void *poisoned(size_t size) {
    void *const memory =
        size > kMemory ? nullptr : std::aligned_alloc(kAlignment, (size + kAlignment - 1) / kAlignment * kAlignment);
    return memory == nullptr ? nullptr : std::memset(memory, 0xff, size);
}

cudaError_t allocate(void **p, size_t size, Kind kind) {
    void *const memory = poisoned(size);
    if (memory == nullptr) {
        return cudaErrorMemoryAllocation;
    }
    const std::lock_guard<std::mutex> lock(mutex);
    allocations[memory] = {kind, size};
    *p = memory;
    return cudaSuccess;
}

// Frees p if it is of either kind.
cudaError_t release(void *p, Kind kind, Kind or_kind) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = allocations.find(p);
    if (found == allocations.end() || (found->second.kind != kind && found->second.kind != or_kind)) {
        return cudaErrorInvalidValue;
    }
    std::memset(p, 0xff, found->second.size);
    allocations.erase(found);
    std::free(p);
    return cudaSuccess;
}

bool is_pinned(const void *p) {
    const std::lock_guard<std::mutex> lock(mutex);
    auto after = allocations.upper_bound(const_cast<void *>(p));
    if (after == allocations.begin()) {
        return false;
    }
    const auto &[begin, allocation] = *--after;
    return allocation.kind == Kind::kHost &&
           static_cast<const char *>(p) < static_cast<char *>(begin) + allocation.size;
}

struct ErrorText {
    cudaError_t error;
    const char *name, *text;
};
constexpr ErrorText kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge",
     "operation would result in a merge of separate capture sequences"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
     "capture was not ended in the same stream as it began"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing "
     "stream"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
};

const ErrorText &text_of(cudaError_t error) {
    for (const ErrorText &text : kErrors) {
        if (text.error == error) {
            return text;
        }
    }
    static const ErrorText unknown{error, "cudaErrorUnknown", "an error that is not emulated"};
    return unknown;
}

} // namespace

int current_device() {
    return device;
}

cudaError_t report(cudaError_t error) {
    last_error = error == cudaSuccess ? last_error : error;
    return error;
}

} // namespace infini::emulation

using namespace infini::emulation;

// Tells a process by its presence that the emulated libraries are loaded.
INFINI_EMULATED int infinirtEmulatesCuda() {
    return 1;
}

// This thread's substitute for torch's current stream, so that tests can capture calls of torch ops.
thread_local void *torch_stream = nullptr;
INFINI_EMULATED void infinirtEmulateTorchStream(void *stream) {
    torch_stream = stream;
}
INFINI_EMULATED void *infinirtEmulatedTorchStream() {
    return torch_stream;
}

// ---- errors ----

const char *cudaGetErrorName(cudaError_t error) {
    return text_of(error).name;
}

const char *cudaGetErrorString(cudaError_t error) {
    return text_of(error).text;
}

cudaError_t cudaGetLastError() {
    const cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

// ---- devices ----

cudaError_t cudaGetDeviceCount(int *count) {
    *count = kDevices;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *current) {
    *current = device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int wanted) {
    if (wanted < 0 || wanted >= kDevices) {
        return report(cudaErrorInvalidDevice);
    }
    device = wanted;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr, int) {
    *value = 8; // few, so that small tests are also split among multiprocessors
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
    run_queues_of(device);
    return report(check_device_wait());
}

// ---- memory ----

cudaError_t cudaMalloc(void **p, size_t size) {
    const cudaError_t error = check_unsafe_call();
    return report(error != cudaSuccess ? error : allocate(p, size, Kind::kDevice));
}

cudaError_t cudaFree(void *p) {
    const cudaError_t error = check_unsafe_call();
    run_queues_of(device);
    return report(error != cudaSuccess ? error : release(p, Kind::kDevice, Kind::kPool));
}

cudaError_t cudaHostAlloc(void **p, size_t size, unsigned) {
    const cudaError_t error = check_unsafe_call();
    return report(error != cudaSuccess ? error : allocate(p, size, Kind::kHost));
}

cudaError_t cudaFreeHost(void *p) {
    const cudaError_t error = check_unsafe_call();
    run_queues_of(device);
    return report(error != cudaSuccess ? error : release(p, Kind::kHost, Kind::kHost));
}

struct CUmemPool_st {
    uint64_t release_threshold = 0;
};
static CUmemPool_st pools[kDevices];

// How many freed bytes a pool keeps when a stream is waited for.
INFINI_EMULATED unsigned long long infinirtEmulatedReleaseThreshold(int of) {
    return pools[of].release_threshold;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int of) {
    *pool = of >= 0 && of < kDevices ? &pools[of] : nullptr;
    return report(*pool == nullptr ? cudaErrorInvalidDevice : cudaSuccess);
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr, void *value) {
    std::memcpy(&pool->release_threshold, value, sizeof pool->release_threshold);
    return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **p, size_t size, cudaStream_t stream) {
    if (!is_captured(stream)) {
        return report(allocate(p, size, Kind::kPool));
    }
    // Owned by the graph, at the same address in all replays.
    const std::shared_ptr<void> memory(poisoned(size), std::free);
    if (memory == nullptr) {
        return report(cudaErrorMemoryAllocation);
    }
    *p = memory.get();
    return report(submit(stream, [memory, size] { std::memset(memory.get(), 0xff, size); }));
}

cudaError_t cudaFreeAsync(void *p, cudaStream_t stream) {
    if (waits(stream)) {
        return report(submit(stream, [p] { release(p, Kind::kPool, Kind::kPool); }));
    }
    return report(is_captured(stream) ? submit(stream, [] {}) : release(p, Kind::kPool, Kind::kPool));
}

// As in CUDA, a copy from pageable memory has been read on return, and a copy to it has been written.
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
    if (waits(stream) && kind == cudaMemcpyHostToDevice && !is_pinned(src)) {
        const auto *const begin = static_cast<const char *>(src);
        const auto read = std::make_shared<std::vector<char>>(begin, begin + size);
        return report(submit(stream, [=] { std::memcpy(dst, read->data(), size); }));
    }
    const cudaError_t error = submit(stream, [=] { std::memcpy(dst, src, size); });
    if (waits(stream) && (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyHostToHost) && !is_pinned(dst)) {
        run_all_of(stream);
    }
    return report(error);
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t size, cudaStream_t stream) {
    return report(submit(stream, [=] { std::memset(p, value, size); }));
}
