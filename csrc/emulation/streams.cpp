// The emulated CUDA runtime: streams, events, captures and graphs. Streams run their work when it is queued or, with
// INFINI_EMULATED_STREAMS=late, when something waits for it, so that a missing wait shows. The nodes of a graph run in
// a shuffled order that keeps their dependencies, so that a missing dependency shows. Calls that are not allowed during
// a capture return CUDA's error and, as in CUDA, invalidate the capture.
#include "streams.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "../common/cuda/error.cuh"
#include "emulator.h"
#include "queues.h"

namespace infini::emulation {

namespace {

using Places = std::vector<size_t>; // indices of nodes

struct Node {
    std::function<void()> work;
    Places after; // the nodes that it depends on, all earlier in the list
};
using Nodes = std::vector<Node>;

struct Capture {
    unsigned long long id;
    cudaStream_t origin;
    cudaStreamCaptureMode mode;
    std::thread::id thread; // that began the capture
    Nodes nodes;
    bool active = true, valid = true;
};

std::mutex mutex; // guards everything below, and all streams and events
std::vector<std::shared_ptr<Capture>> active_captures;
unsigned long long captures_made = 0;

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

} // namespace

} // namespace infini::emulation

struct CUstream_st {
    int device;
    std::shared_ptr<infini::emulation::Capture> capture; // the current or last one
    infini::emulation::Places last;                      // the next node depends on these
    std::shared_ptr<infini::emulation::Queue> queue;
};
struct CUevent_st {
    int device;
    bool recorded = false;
    std::chrono::steady_clock::time_point time{};
    std::shared_ptr<infini::emulation::Capture> capture{}; // of the last record
    infini::emulation::Places last{};
    infini::emulation::Point point{};
    unsigned asked = 0; // queries since it was recorded
};
struct CUgraph_st {
    std::shared_ptr<const infini::emulation::Nodes> nodes;
};
struct CUgraphExec_st {
    std::shared_ptr<const infini::emulation::Nodes> nodes;
    infini::emulation::Point last_launch{}; // the next launch, on any stream, runs after it
};

namespace infini::emulation {

namespace {

using Lock = std::lock_guard<std::mutex>;

bool is_handle(cudaStream_t stream) {
    return stream != nullptr && stream != cudaStreamLegacy && stream != cudaStreamPerThread;
}

// The stream's capture, or nullptr. Call under the mutex.
Capture *capture_of(cudaStream_t stream) {
    return is_handle(stream) && stream->capture != nullptr && stream->capture->active ? stream->capture.get() : nullptr;
}

void end(Capture &capture) {
    capture.active = false;
    const auto is_this = [&](const std::shared_ptr<Capture> &other) { return other.get() == &capture; };
    active_captures.erase(std::remove_if(active_captures.begin(), active_captures.end(), is_this),
                          active_captures.end());
}

void join(Places &places, const Places &others) {
    places.insert(places.end(), others.begin(), others.end());
    std::sort(places.begin(), places.end());
    places.erase(std::unique(places.begin(), places.end()), places.end());
}

// Whether all nodes precede the end of the stream on which the capture began.
bool is_joined(const Capture &capture) {
    std::vector<bool> reached(capture.nodes.size());
    Places next = capture.origin->last;
    while (!next.empty()) {
        const size_t place = next.back();
        next.pop_back();
        if (!reached[place]) {
            reached[place] = true;
            next.insert(next.end(), capture.nodes[place].after.begin(), capture.nodes[place].after.end());
        }
    }
    return std::find(reached.begin(), reached.end(), false) == reached.end();
}

void run(const Nodes &nodes) {
    static std::mutex shuffling;
    static std::mt19937 shuffler(0); // a fixed seed, so that failures repeat
    std::vector<size_t> waits_for(nodes.size());
    std::vector<Places> followers(nodes.size());
    Places ready;
    for (size_t place = 0; place < nodes.size(); ++place) {
        waits_for[place] = nodes[place].after.size();
        for (const size_t before : nodes[place].after) {
            followers[before].push_back(place);
        }
        if (waits_for[place] == 0) {
            ready.push_back(place);
        }
    }
    while (!ready.empty()) {
        {
            const Lock lock(shuffling);
            std::swap(ready[shuffler() % ready.size()], ready.back());
        }
        const size_t place = ready.back();
        ready.pop_back();
        nodes[place].work();
        for (const size_t follower : followers[place]) {
            if (--waits_for[follower] == 0) {
                ready.push_back(follower);
            }
        }
    }
}

} // namespace

bool is_captured(cudaStream_t stream) {
    const Lock lock(mutex);
    return capture_of(stream) != nullptr;
}

cudaError_t submit(cudaStream_t stream, std::function<void()> work) {
    {
        const Lock lock(mutex);
        if (Capture *const capture = capture_of(stream)) {
            if (!capture->valid) {
                return cudaErrorStreamCaptureInvalidated;
            }
            capture->nodes.push_back({std::move(work), stream->last});
            stream->last = {capture->nodes.size() - 1};
            return cudaSuccess;
        }
        if (runs_late() && is_handle(stream)) {
            push(stream->queue, std::move(work));
            return cudaSuccess;
        }
    }
    work();
    return cudaSuccess;
}

void enqueue(cudaStream_t stream, std::function<void()> work) {
    const bool elsewhere = is_handle(stream) && stream->device != current_device();
    cuda::check_cuda("a kernel launch",
                     report(elsewhere ? cudaErrorInvalidResourceHandle : submit(stream, std::move(work))));
}

cudaError_t check_unsafe_call() {
    const Lock lock(mutex);
    cudaError_t error = cudaSuccess;
    for (const std::shared_ptr<Capture> &capture : active_captures) {
        const bool mine = capture->thread == std::this_thread::get_id();
        const bool forbids =
            thread_mode != cudaStreamCaptureModeRelaxed &&
            (mine ? capture->mode != cudaStreamCaptureModeRelaxed
                  : capture->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal);
        if (forbids) {
            capture->valid = false;
            error = cudaErrorStreamCaptureUnsupported;
        }
    }
    return error;
}

cudaError_t check_device_wait() {
    const Lock lock(mutex);
    cudaError_t error = cudaSuccess;
    for (const std::shared_ptr<Capture> &capture : active_captures) {
        if (capture->origin->device == current_device()) {
            capture->valid = false;
            error = cudaErrorStreamCaptureUnsupported;
        }
    }
    return error;
}

void run_all_of(cudaStream_t stream) {
    if (is_handle(stream)) {
        run_until(end_of(stream->queue));
    }
}

bool waits(cudaStream_t stream) {
    return runs_late() && is_handle(stream) && !is_captured(stream);
}

} // namespace infini::emulation

using namespace infini::emulation;

// ---- streams ----

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
    *stream = new CUstream_st{current_device(), nullptr, {}, make_queue(current_device())};
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    {
        const Lock lock(mutex);
        if (Capture *const capture = capture_of(stream)) {
            capture->valid = false;
            if (capture->origin == stream) {
                end(*capture);
            }
        }
    }
    run_all_of(stream);
    delete stream;
    return cudaSuccess;
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device) {
    *device = stream->device;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    {
        const Lock lock(mutex);
        if (Capture *const capture = capture_of(stream)) {
            capture->valid = false;
            return report(cudaErrorStreamCaptureUnsupported);
        }
    }
    run_all_of(stream);
    return report(check_unsafe_call());
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    const Lock lock(mutex);
    Capture *const mine = capture_of(stream), *const theirs = event->capture.get();
    if (theirs == nullptr) {
        if (mine == nullptr) {
            if (is_handle(stream) && !is_past(event->point)) {
                push(stream->queue, nullptr, event->point);
            }
            return cudaSuccess;
        }
        mine->valid = false;
        return report(cudaErrorStreamCaptureIsolation);
    }
    if (!theirs->active || !theirs->valid) {
        return report(cudaErrorInvalidValue);
    }
    if (mine == nullptr) {
        stream->capture = event->capture;
        stream->last.clear();
    } else if (mine != theirs) {
        mine->valid = theirs->valid = false;
        return report(cudaErrorStreamCaptureMerge);
    }
    join(stream->last, event->last);
    return cudaSuccess;
}

// ---- events ----

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    *event = new CUevent_st{current_device()};
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    const Lock lock(mutex);
    Capture *const capture = capture_of(stream);
    if (capture != nullptr && !capture->valid) {
        return report(cudaErrorStreamCaptureInvalidated);
    }
    event->recorded = true;
    event->time = std::chrono::steady_clock::now();
    event->capture = capture == nullptr ? nullptr : stream->capture;
    event->last = capture == nullptr ? Places{} : stream->last;
    event->asked = 0;
    event->point = capture == nullptr && is_handle(stream) ? end_of(stream->queue) : Point{};
    return cudaSuccess;
}

namespace {

// Whether the event may be queried.
cudaError_t check_query(cudaEvent_t event) {
    {
        const Lock lock(mutex);
        if (event->capture != nullptr) {
            event->capture->valid = false;
            return report(cudaErrorCapturedEvent);
        }
    }
    return report(check_unsafe_call());
}

} // namespace

cudaError_t cudaEventQuery(cudaEvent_t event) {
    constexpr unsigned kPatience = 100; // queries after which queued work runs, because the caller is waiting for it
    const cudaError_t error = check_query(event);
    Point point;
    {
        const Lock lock(mutex);
        if (error != cudaSuccess || is_past(event->point)) {
            return error;
        }
        point = ++event->asked > kPatience ? event->point : Point{};
    }
    run_until(point, 1);
    return report(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    const cudaError_t error = check_query(event);
    Point point;
    {
        const Lock lock(mutex);
        point = event->point;
    }
    if (error == cudaSuccess) {
        run_until(point);
    }
    return error;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
    const Lock lock(mutex);
    if (!start->recorded || !end->recorded) {
        return report(cudaErrorInvalidResourceHandle);
    }
    *ms = std::chrono::duration<float, std::milli>(end->time - start->time).count();
    return cudaSuccess;
}

// ---- captures and graphs ----

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
    std::swap(*mode, thread_mode);
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status, unsigned long long *id) {
    const Lock lock(mutex);
    const Capture *const capture = capture_of(stream);
    *status = capture == nullptr ? cudaStreamCaptureStatusNone
              : capture->valid   ? cudaStreamCaptureStatusActive
                                 : cudaStreamCaptureStatusInvalidated;
    if (id != nullptr && *status == cudaStreamCaptureStatusActive) {
        *id = capture->id;
    }
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    const Lock lock(mutex);
    if (stream == nullptr || stream == cudaStreamLegacy) {
        return report(cudaErrorStreamCaptureImplicit);
    }
    if (capture_of(stream) != nullptr) {
        return report(cudaErrorIllegalState);
    }
    stream->capture = std::make_shared<Capture>();
    stream->capture->id = ++captures_made;
    stream->capture->origin = stream;
    stream->capture->mode = mode;
    stream->capture->thread = std::this_thread::get_id();
    stream->last.clear();
    active_captures.push_back(stream->capture);
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    const Lock lock(mutex);
    *graph = nullptr;
    Capture *const capture = capture_of(stream);
    if (capture == nullptr) {
        return report(cudaErrorIllegalState);
    }
    if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id()) {
        end(*capture); // as an H100 does
        return report(cudaErrorStreamCaptureWrongThread);
    }
    if (capture->origin != stream) {
        capture->valid = false;
        return report(cudaErrorStreamCaptureUnmatched);
    }
    end(*capture);
    if (!capture->valid) {
        return report(cudaErrorStreamCaptureInvalidated);
    }
    if (!is_joined(*capture)) {
        return report(cudaErrorStreamCaptureUnjoined);
    }
    *graph = new CUgraph_st{std::make_shared<const Nodes>(std::move(capture->nodes))};
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithParams(cudaGraphExec_t *exec, cudaGraph_t graph,
                                           cudaGraphInstantiateParams *params) {
    params->errNode_out = nullptr;
    params->result_out = cudaGraphInstantiateSuccess;
    *exec = new CUgraphExec_st{graph->nodes, {}};
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    delete exec;
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    {
        const Lock lock(mutex);
        if (Capture *const capture = capture_of(stream)) {
            capture->valid = false;
            return report(cudaErrorStreamCaptureUnsupported);
        }
    }
    if (!waits(stream)) {
        return report(submit(stream, [nodes = exec->nodes] { run(*nodes); }));
    }
    const Lock lock(mutex);
    exec->last_launch = push(stream->queue, [nodes = exec->nodes] { run(*nodes); }, exec->last_launch);
    return cudaSuccess;
}
