// The state of a thread: a stream for each device that it has used, and the graph that it records. Streams are created
// at first use and destroyed with the thread.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "allocator.h"
#include "infinicore/context/context.hpp"
#include "infinicore/graph/graph.hpp"

namespace infinicore {

// A graph that is being recorded.
struct Recording {
    Device device;
    std::shared_ptr<graph::Graph> graph;
    std::shared_ptr<GraphPool> pool;
    bool ends_at_errors = false; // context::GraphRecording::end_at_errors()
};

class ThreadState {
public:
    ~ThreadState();

    // This thread's state; nullptr if the thread is ending and has none any more.
    static ThreadState *current();

    // The thread's stream of the device. If there is none, creates it if `make`, else returns no stream.
    StreamId stream(const Device &device, bool make = true);
    // The stream to pass to an operator on the device. On the CPU nullptr, which bypasses the queue, as long as the
    // stream is immediate and the caller has not seen it, so that it cannot be captured.
    infinirtStream_t launch_stream(const Device &device);
    // Whether CPU streams queue their work, as a device's do.
    static bool cpu_streams_queue();
    // Call when the caller has asked for the thread's streams.
    void expose() { is_exposed_ = true; }

    std::unique_ptr<Recording> recording;
    // While a graph is captured, its ops allocate from here, because every replay writes there again.
    std::shared_ptr<GraphPool> capture_pool;

private:
    bool is_exposed_ = false;
    std::array<std::vector<StreamId>, static_cast<size_t>(Device::Type::COUNT)> streams_;
};

inline Recording *current_recording() {
    ThreadState *const state = ThreadState::current();
    return state == nullptr ? nullptr : state->recording.get();
}

// This thread's stream of its current device, for internal use; context::getStream() exposes it to the caller.
inline infinirtStream_t own_stream() {
    return ThreadState::current()->stream(context::getDevice()).stream;
}

// Makes a device current for a scope.
class DeviceScope {
public:
    explicit DeviceScope(const Device &device) : before_(context::getDevice()) { context::setDevice(device); }
    ~DeviceScope();
    DeviceScope(const DeviceScope &) = delete;
    DeviceScope &operator=(const DeviceScope &) = delete;

private:
    const Device before_;
};

} // namespace infinicore
