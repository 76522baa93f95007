// NVIDIA devices: infinirt.h implemented by the CUDA runtime. Host code only; emulated like the kernels. Calls that
// infinirt.h forbids on a captured stream fail before they reach CUDA, where they would invalidate the capture.
#include "../backend.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/error.cuh"

namespace infini::runtime {

namespace {

using cuda::check_cuda;

// Sets CUDA's current device for a scope.
class DeviceScope {
public:
    explicit DeviceScope(int device_id) {
        check_cuda("cudaGetDevice", cudaGetDevice(&before_));
        changed_ = before_ != device_id;
        if (changed_) {
            check_cuda("cudaSetDevice", cudaSetDevice(device_id));
        }
    }
    ~DeviceScope() {
        if (changed_) {
            cudaSetDevice(before_);
        }
    }
    DeviceScope(const DeviceScope &) = delete;

private:
    int before_ = 0;
    bool changed_ = false;
};

// A scope for calls that have nothing to do with a capture and are therefore allowed during one.
class RelaxedCaptureScope {
public:
    RelaxedCaptureScope() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    ~RelaxedCaptureScope() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    RelaxedCaptureScope(const RelaxedCaptureScope &) = delete;

private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// A pool of streams for calls that are done on return: the legacy stream would wait for other streams. Take one while
// the device is current.
class StreamPool {
public:
    cudaStream_t take(int device_id) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            std::vector<cudaStream_t> &spare = spare_[device_id];
            if (!spare.empty()) {
                const cudaStream_t stream = spare.back();
                spare.pop_back();
                return stream;
            }
        }
        cudaStream_t stream = nullptr;
        check_cuda("cudaStreamCreateWithFlags", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        return stream;
    }
    void give_back(int device_id, cudaStream_t stream) {
        const std::lock_guard<std::mutex> lock(mutex_);
        spare_[device_id].push_back(stream);
    }

private:
    std::mutex mutex_;
    std::map<int, std::vector<cudaStream_t>> spare_;
};

// Calls body(stream) and waits for the work that it queued, even if it throws.
template <typename Body> void done_on_return(int device_id, const Body &body) {
    static StreamPool &spare = *new StreamPool; // never destroyed: threads may still run at exit
    const DeviceScope device(device_id);
    const RelaxedCaptureScope allowed;
    const cudaStream_t stream = spare.take(device_id);
    try {
        body(stream);
    } catch (...) {
        cudaStreamSynchronize(stream);
        spare.give_back(device_id, stream);
        throw;
    }
    const cudaError_t error = cudaStreamSynchronize(stream);
    spare.give_back(device_id, stream);
    check_cuda("cudaStreamSynchronize", error);
}

// A capture that began here, or one found on a stream that the caller created.
struct Capture {
    unsigned long long id = 0;
    int device_id = 0;
    std::thread::id thread;       // which alone may end it; none: any may
    std::atomic<bool> open{true}; // not updated for a capture that began elsewhere, whose end is unknown
};

struct CudaStream : Stream {
    CudaStream(cudaStream_t stream, bool is_own) : native(stream), own(is_own) { handle = stream; }
    ~CudaStream() override {
        if (own) {
            cudaStreamDestroy(native);
        }
    }
    const cudaStream_t native;
    const bool own;
    std::shared_ptr<Capture> began; // the latest capture that began on it; guarded by CudaBackend::captures_mutex_
};

struct CudaEvent : Event {
    explicit CudaEvent(uint32_t flags) {
        const unsigned timing = (flags & INFINIRT_EVENT_DISABLE_TIMING) != 0 ? cudaEventDisableTiming : 0;
        const unsigned sleeping = (flags & INFINIRT_EVENT_BLOCKING_SYNC) != 0 ? cudaEventBlockingSync : 0;
        check_cuda("cudaEventCreateWithFlags", cudaEventCreateWithFlags(&native, timing | sleeping));
    }
    ~CudaEvent() override { cudaEventDestroy(native); }

    // The state of the last infinirtEventRecord(): whether there was one, and the capture it was made in, or nullptr.
    struct Record {
        bool made = false;
        std::shared_ptr<Capture> capture;
    };
    Record last() {
        const std::lock_guard<std::mutex> lock(mutex);
        return record;
    }

    cudaEvent_t native = nullptr;
    std::mutex mutex;
    Record record;
};

struct CudaGraph : Graph {
    ~CudaGraph() override {
        if (native != nullptr) {
            cudaGraphDestroy(native);
        }
    }
    cudaGraph_t native = nullptr;
};

struct CudaGraphExec : GraphExec {
    ~CudaGraphExec() override {
        if (native != nullptr) {
            cudaGraphExecDestroy(native);
        }
    }
    cudaGraphExec_t native = nullptr;
};

cudaStream_t native(Stream &stream) {
    return static_cast<CudaStream &>(stream).native;
}

CudaEvent &cuda_event(Event &event) {
    return static_cast<CudaEvent &>(event);
}

[[noreturn]] void bad_param(const std::string &sentence) {
    throw Error(INFINI_STATUS_BAD_PARAM, sentence);
}

struct CaptureInfo {
    bool captured = false;
    unsigned long long id = 0; // 0 also if the capture is invalid
};

CaptureInfo capture_info(Stream &stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    CaptureInfo info;
    check_cuda("cudaStreamGetCaptureInfo", cudaStreamGetCaptureInfo(native(stream), &status, &info.id));
    info.captured = status != cudaStreamCaptureStatusNone;
    info.id = status == cudaStreamCaptureStatusActive ? info.id : 0;
    return info;
}

void not_captured(const char *function, Stream &stream, infiniStatus_t status) {
    if (capture_info(stream).captured) {
        throw Error(status, message(function, ": stream must not be captured at the time"));
    }
}

// The event's last record. Throws if it was made in a capture, where it never completes.
CudaEvent::Record last_record(const char *function, const char *argument, Event &event) {
    const CudaEvent::Record record = cuda_event(event).last();
    if (record.capture != nullptr) {
        bad_param(message(function, ": ", argument, " must not be last recorded in a capture, which only orders it"));
    }
    return record;
}

bool is_complete(Event &event) {
    const cudaError_t error = cudaEventQuery(cuda_event(event).native);
    if (error == cudaErrorNotReady) {
        cudaGetLastError();
        return false;
    }
    check_cuda("cudaEventQuery", error);
    return true;
}

void must_be_complete(const char *argument, Event &event) {
    constexpr const char *function = "infinirtEventElapsedTime";
    const bool made = last_record(function, argument, event).made;
    if (!made || !is_complete(event)) {
        bad_param(message(function, ": ", argument, " must be an event that is complete, ",
                          made ? "got one that is not ready" : "got one that was never recorded"));
    }
}

// The largest request that is passed to CUDA, which would report a larger one as an invalid value.
constexpr size_t kAddressSpace = size_t{1} << 48;

// Returns the result of allocate(void **, size), or nullptr if memory is short.
template <typename Allocate> void *allocated(const char *what, size_t size, const Allocate &allocate) {
    void *ptr = nullptr;
    const cudaError_t error = size > kAddressSpace ? cudaErrorMemoryAllocation : allocate(&ptr, size);
    if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        return nullptr;
    }
    check_cuda(what, error);
    return ptr;
}

// Queues a copy. CUDA does not support overlapping ranges: they go through a temporary allocation of the stream.
void queue_copy(void *dst, const void *src, size_t size, infinirtMemcpyKind_t kind, cudaStream_t stream) {
    const auto copy = [&](void *to, const void *from, infinirtMemcpyKind_t direction) {
        constexpr cudaMemcpyKind kinds[] = {cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost,
                                            cudaMemcpyDeviceToDevice};
        check_cuda("cudaMemcpyAsync", cudaMemcpyAsync(to, from, size, kinds[direction], stream));
    };
    const auto to = reinterpret_cast<uintptr_t>(dst), from = reinterpret_cast<uintptr_t>(src);
    const bool one_memory = kind == INFINIRT_MEMCPY_H2H || kind == INFINIRT_MEMCPY_D2D;
    const bool overlap = one_memory && (to > from ? to - from : from - to) < size;
    if (!overlap) {
        copy(dst, src, kind);
    } else if (to != from) {
        const bool on_host = kind == INFINIRT_MEMCPY_H2H;
        void *between = nullptr;
        check_cuda("cudaMallocAsync", cudaMallocAsync(&between, size, stream));
        copy(between, src, on_host ? INFINIRT_MEMCPY_H2D : INFINIRT_MEMCPY_D2D);
        copy(dst, between, on_host ? INFINIRT_MEMCPY_D2H : INFINIRT_MEMCPY_D2D);
        check_cuda("cudaFreeAsync", cudaFreeAsync(between, stream));
    }
}

class CudaBackend : public Backend {
public:
    int device_count() override {
        static const int found = [] {
            int count = 0;
            if (cudaGetDeviceCount(&count) != cudaSuccess) { // no driver, or no device
                cudaGetLastError();
                return 0;
            }
            return count;
        }();
        return found;
    }

    void set_device(int device_id) override { check_cuda("cudaSetDevice", cudaSetDevice(device_id)); }

    void device_synchronize(int device_id) override {
        no_capture_on("infinirtDeviceSynchronize", device_id);
        const DeviceScope device(device_id);
        check_cuda("cudaDeviceSynchronize", cudaDeviceSynchronize());
    }

    // ---- streams ----

    std::shared_ptr<Stream> stream_create(int device_id) override {
        const DeviceScope device(device_id);
        cudaStream_t stream = nullptr;
        check_cuda("cudaStreamCreateWithFlags", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        return std::make_shared<CudaStream>(stream, true);
    }

    std::shared_ptr<Stream> stream_from_native([[maybe_unused]] int device_id, void *native) override {
        const auto stream = static_cast<cudaStream_t>(native);
#if CUDART_VERSION >= 12080
        int of = device_id;
        const bool is_handle = stream != cudaStreamLegacy && stream != cudaStreamPerThread;
        if (is_handle && cudaStreamGetDevice(stream, &of) != cudaSuccess) {
            cudaGetLastError(); // the driver is too old for this function: assume a valid stream
        } else if (of != device_id) {
            bad_param(message("infinirtStreamFromNative: native must be a stream of the current device, nvidia ",
                              device_id, ", got one of nvidia ", of));
        }
#endif
        return std::make_shared<CudaStream>(stream, false);
    }

    // The stream is destroyed with its object, because threads may still wait for it.
    void stream_destroy(Stream &stream) override {
        const RelaxedCaptureScope allowed;
        if (capture_info(stream).captured) {
            cudaGraph_t graph = nullptr;
            if (cudaStreamEndCapture(native(stream), &graph) == cudaSuccess) {
                cudaGraphDestroy(graph);
            }
            close_capture(stream);
        } else {
            cudaStreamSynchronize(native(stream)); // its failures are not reported
        }
        cudaGetLastError();
    }

    void stream_synchronize(Stream &stream) override {
        not_captured("infinirtStreamSynchronize", stream, INFINI_STATUS_BAD_PARAM);
        check_cuda("cudaStreamSynchronize", cudaStreamSynchronize(native(stream)));
    }

    void stream_enqueue(int device_id, void *native, const std::function<void(void *)> &body) override {
        if (native == nullptr) {
            done_on_return(device_id, body);
        } else {
            const DeviceScope device(device_id);
            body(native);
        }
    }

    // ---- events ----

    std::shared_ptr<Event> event_create(int device_id, uint32_t flags) override {
        const DeviceScope device(device_id);
        return std::make_shared<CudaEvent>(flags);
    }

    void event_record(Event &event, Stream *stream) override {
        CudaEvent &recorded = cuda_event(event);
        const std::lock_guard<std::mutex> lock(recorded.mutex);
        if (stream != nullptr) {
            const std::shared_ptr<Capture> capture = capture_of(*stream);
            check_cuda("cudaEventRecord", cudaEventRecord(recorded.native, native(*stream)));
            recorded.record = {true, capture};
        } else {
            done_on_return(event.device_id, [&](cudaStream_t spare) {
                check_cuda("cudaEventRecord", cudaEventRecord(recorded.native, spare));
            });
            recorded.record = {true, nullptr};
        }
    }

    infinirtEventStatus_t event_query(Event &event) override {
        const bool made = last_record("infinirtEventQuery", "event", event).made;
        return !made || is_complete(event) ? INFINIRT_EVENT_COMPLETE : INFINIRT_EVENT_NOT_READY;
    }

    void event_synchronize(Event &event) override {
        if (last_record("infinirtEventSynchronize", "event", event).made) {
            check_cuda("cudaEventSynchronize", cudaEventSynchronize(cuda_event(event).native));
        }
    }

    float event_elapsed_time(Event &start, Event &end) override {
        must_be_complete("start", start);
        must_be_complete("end", end);
        float ms = 0;
        check_cuda("cudaEventElapsedTime", cudaEventElapsedTime(&ms, cuda_event(start).native, cuda_event(end).native));
        return ms;
    }

    void stream_wait_event(Stream &stream, Event &event) override {
        const CudaEvent::Record record = cuda_event(event).last();
        if (!record.made) {
            return; // never recorded: nothing to wait for
        }
        const CaptureInfo mine = capture_info(stream);
        if (record.capture == nullptr && mine.captured) {
            bad_param("infinirtStreamWaitEvent: event must be recorded in the capture that the stream is in, got one "
                      "that was recorded outside");
        }
        if (record.capture != nullptr && mine.captured && mine.id != record.capture->id) {
            bad_param("infinirtStreamWaitEvent: event must be recorded in the capture that the stream is in, got one "
                      "of another capture");
        }
        if (record.capture != nullptr && !record.capture->open) {
            bad_param("infinirtStreamWaitEvent: event must have been recorded since the capture in which it was last "
                      "recorded ended");
        }
        check_cuda("cudaStreamWaitEvent", cudaStreamWaitEvent(native(stream), cuda_event(event).native, 0));
    }

    // ---- memory ----

    void *malloc(int device_id, size_t size) override {
        const DeviceScope device(device_id);
        return allocated("cudaMalloc", size, [](void **ptr, size_t bytes) { return cudaMalloc(ptr, bytes); });
    }

    void *malloc_host(int device_id, size_t size) override {
        const DeviceScope device(device_id);
        return allocated("cudaHostAlloc", size,
                         [](void **ptr, size_t bytes) { return cudaHostAlloc(ptr, bytes, cudaHostAllocPortable); });
    }

    void free(int device_id, void *ptr) override {
        no_capture_on("infinirtFree", device_id);
        const DeviceScope device(device_id);
        cudaDeviceSynchronize(); // a failure stays pending for the next synchronization
        check_cuda("cudaFree", cudaFree(ptr));
        take_pooled(ptr);
    }

    void free_host(int device_id, void *ptr) override {
        no_capture_on("infinirtFreeHost", device_id);
        const DeviceScope device(device_id);
        cudaDeviceSynchronize();
        check_cuda("cudaFreeHost", cudaFreeHost(ptr));
    }

    void *malloc_async(size_t size, Stream &stream) override {
        not_captured("infinirtMallocAsync", stream, INFINI_STATUS_NOT_IMPLEMENTED);
        const DeviceScope device(stream.device_id);
        keep_freed_memory(stream.device_id);
        void *const ptr = allocated("cudaMallocAsync", size, [&](void **made, size_t bytes) {
            return cudaMallocAsync(made, bytes, native(stream));
        });
        const std::lock_guard<std::mutex> lock(pooled_mutex_);
        pooled_.insert(ptr);
        return ptr;
    }

    // CUDA frees only memory of cudaMallocAsync in stream order.
    void free_async(void *ptr, Stream &stream) override {
        not_captured("infinirtFreeAsync", stream, INFINI_STATUS_NOT_IMPLEMENTED);
        const DeviceScope device(stream.device_id);
        if (take_pooled(ptr)) {
            check_cuda("cudaFreeAsync", cudaFreeAsync(ptr, native(stream)));
        } else {
            check_cuda("cudaStreamSynchronize", cudaStreamSynchronize(native(stream)));
            check_cuda("cudaFree", cudaFree(ptr));
        }
    }

    void memcpy(int device_id, void *dst, const void *src, size_t size, infinirtMemcpyKind_t kind) override {
        if (kind == INFINIRT_MEMCPY_H2H) {
            std::memmove(dst, src, size);
        } else {
            done_on_return(device_id, [&](cudaStream_t spare) { queue_copy(dst, src, size, kind, spare); });
        }
    }

    void memcpy_async(void *dst, const void *src, size_t size, infinirtMemcpyKind_t kind, Stream &stream) override {
        const DeviceScope device(stream.device_id);
        queue_copy(dst, src, size, kind, native(stream));
    }

    // ---- graphs ----

    void stream_begin_capture(Stream &stream, infinirtStreamCaptureMode_t mode) override {
        constexpr cudaStreamCaptureMode modes[] = {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal,
                                                   cudaStreamCaptureModeRelaxed};
        if (capture_info(stream).captured) {
            bad_param("infinirtStreamBeginCapture: stream must not be captured already");
        }
        check_cuda("cudaStreamBeginCapture", cudaStreamBeginCapture(native(stream), modes[mode]));
        const auto capture = std::make_shared<Capture>();
        capture->id = capture_info(stream).id;
        capture->device_id = stream.device_id;
        capture->thread = mode == INFINIRT_STREAM_CAPTURE_MODE_RELAXED ? std::thread::id() : std::this_thread::get_id();
        const std::lock_guard<std::mutex> lock(captures_mutex_);
        static_cast<CudaStream &>(stream).began = capture;
        captures_[capture->id] = capture;
    }

    std::shared_ptr<Graph> stream_end_capture(Stream &stream) override {
        must_be_origin(stream);
        auto graph = std::make_shared<CudaGraph>();
        const cudaError_t error = cudaStreamEndCapture(native(stream), &graph->native);
        if (!capture_info(stream).captured) { // the capture is over, whether or not it failed
            close_capture(stream);
        }
        check_cuda("cudaStreamEndCapture", error);
        return graph;
    }

    std::shared_ptr<GraphExec> graph_instantiate(Graph &graph, infinirtGraphNode_t *fault) override {
        const DeviceScope device(graph.device_id);
        auto exec = std::make_shared<CudaGraphExec>();
        cudaGraphInstantiateParams parameters{};
        const cudaError_t error =
            cudaGraphInstantiateWithParams(&exec->native, static_cast<CudaGraph &>(graph).native, &parameters);
        *fault = parameters.errNode_out;
        if (error == cudaSuccess && parameters.result_out != cudaGraphInstantiateSuccess) {
            throw Error(INFINI_STATUS_INTERNAL_ERROR, message("infini: cudaGraphInstantiateWithParams: result ",
                                                              static_cast<int>(parameters.result_out)));
        }
        check_cuda("cudaGraphInstantiateWithParams", error);
        return exec;
    }

    void graph_launch(GraphExec &exec, Stream *stream) override {
        const cudaGraphExec_t launched = static_cast<CudaGraphExec &>(exec).native;
        const auto launch = [&](cudaStream_t on) { check_cuda("cudaGraphLaunch", cudaGraphLaunch(launched, on)); };
        if (stream == nullptr) {
            done_on_return(exec.device_id, launch);
        } else {
            const DeviceScope device(exec.device_id);
            // CUDA would refuse, and end the capture.
            not_captured("infinirtGraphLuanch", *stream, INFINI_STATUS_BAD_PARAM);
            launch(native(*stream));
        }
    }

private:
    // The capture that the stream is in, or nullptr.
    std::shared_ptr<Capture> capture_of(Stream &stream) {
        const CaptureInfo info = capture_info(stream);
        if (!info.captured) {
            return nullptr;
        }
        const std::lock_guard<std::mutex> lock(captures_mutex_);
        if (const auto found = captures_.find(info.id); found != captures_.end()) {
            return found->second;
        }
        auto capture = std::make_shared<Capture>();
        capture->id = info.id;
        return capture;
    }

    void close_capture(Stream &stream) {
        const std::lock_guard<std::mutex> lock(captures_mutex_);
        if (const auto began = std::exchange(static_cast<CudaStream &>(stream).began, nullptr)) {
            began->open = false;
            captures_.erase(began->id);
        }
    }

    // Throws unless the stream began its capture, on this thread if that matters: CUDA, asked by another one, ends the
    // capture and returns no graph. CUDA decides for a capture that began elsewhere.
    void must_be_origin(Stream &stream) {
        const CaptureInfo info = capture_info(stream);
        const std::lock_guard<std::mutex> lock(captures_mutex_);
        const auto &began = static_cast<CudaStream &>(stream).began;
        const bool joined = began == nullptr && captures_.count(info.id) != 0;
        if (!info.captured || joined) {
            bad_param("infinirtStreamEndCapture: stream must be the one on which a capture began");
        }
        if (began != nullptr && began->thread != std::thread::id() && began->thread != std::this_thread::get_id()) {
            bad_param("infinirtStreamEndCapture: the thread must be the one that began the capture, whose mode is not "
                      "relaxed");
        }
    }

    void no_capture_on(const char *function, int device_id) {
        const std::lock_guard<std::mutex> lock(captures_mutex_);
        for (const auto &[id, capture] : captures_) {
            if (capture->device_id == device_id) {
                bad_param(message(function, ": no stream of nvidia ", device_id,
                                  " may be captured at the time, as the call waits for all of them"));
            }
        }
    }

    // Whether the memory came from cudaMallocAsync; forgets it.
    bool take_pooled(void *ptr) {
        const std::lock_guard<std::mutex> lock(pooled_mutex_);
        return pooled_.erase(ptr) != 0;
    }

    // Makes a device's pool keep memory that is freed in stream order; called once per device. By default CUDA would
    // return it to the system at each synchronization. The driver still reclaims it if memory runs out.
    void keep_freed_memory(int device_id) {
        const std::lock_guard<std::mutex> lock(pooled_mutex_);
        if (keeping_.count(device_id) == 0) {
            cudaMemPool_t pool = nullptr;
            uint64_t all = UINT64_MAX;
            check_cuda("cudaDeviceGetDefaultMemPool", cudaDeviceGetDefaultMemPool(&pool, device_id));
            check_cuda("cudaMemPoolSetAttribute", cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all));
            keeping_.insert(device_id);
        }
    }

    std::mutex captures_mutex_;
    std::map<unsigned long long, std::shared_ptr<Capture>> captures_; // captures that began here and have not ended

    std::mutex pooled_mutex_;
    std::set<void *> pooled_; // memory from cudaMallocAsync
    std::set<int> keeping_;   // devices whose pool keeps freed memory
};

const Registered<CudaBackend> registered{INFINI_DEVICE_NVIDIA};

} // namespace

} // namespace infini::runtime
