// context: the calling thread's device and streams, memory and copies, events, and the recording of graphs.
// The current device and its stream belong to the calling thread. Errors are std::runtime_error with the C library's
// message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "../../infiniop/handle.h"
#include "../../infinirt.h"
#include "../device.hpp"
#include "../graph/graph.hpp"
#include "../memory.hpp"

namespace infinicore::context {

void setDevice(Device device);
Device getDevice();
size_t getDeviceCount(Device::Type type); // 0 where this build or this machine has none

// This thread's stream of its current device, created on first use. On the CPU work is done when a call returns, unless
// INFINI_CPU_STREAMS=queued.
infinirtStream_t getStream();
// One for each device of the process; never destroyed.
infiniopHandle_t getInfiniopHandle(Device device);

void syncStream();
void syncDevice();

// Memory of the current device, of the host, and pinned memory of the host, which the device copies faster. It comes
// from a cache: later work of the same stream reuses freed memory without waiting. Memory that is freed on another
// thread is reused once the work queued on that thread's stream is done. A stream of the caller's own must be done with
// memory before it is freed. If the system is out of memory, the cache is released and the allocation is retried. 0
// bytes have no address.
std::shared_ptr<Memory> allocateMemory(size_t size);
std::shared_ptr<Memory> allocateHostMemory(size_t size);
std::shared_ptr<Memory> allocatePinnedHostMemory(size_t size);

// Returns how much memory of a device is in use and cached (of the host: Device::cpu()); releases cached memory to the
// system. (Additions to InfiniCore's interface.)
MemoryStats memoryStats(Device device);
void trimMemory(Device device);

// Asynchronous copies are queued on this thread's stream: both ranges must stay valid until they are done.
void memcpyH2D(void *dst, const void *src, size_t size, bool async = true);
void memcpyD2H(void *dst, const void *src, size_t size);
void memcpyD2D(void *dst, const void *src, size_t size, bool async = true);
void memcpyH2H(void *dst, const void *src, size_t size);

// Events of the current device; the caller destroys them. A NULL stream means this thread's.
infinirtEvent_t createEvent();
infinirtEvent_t createEventWithFlags(uint32_t flags);
void recordEvent(infinirtEvent_t event, infinirtStream_t stream = nullptr);
bool queryEvent(infinirtEvent_t event);
void synchronizeEvent(infinirtEvent_t event);
void destroyEvent(infinirtEvent_t event);
float elapsedTime(infinirtEvent_t start, infinirtEvent_t end); // ms
void streamWaitEvent(infinirtStream_t stream, infinirtEvent_t event);

// Between start and stop this thread's ops on the current device are recorded and not run. A start while recording
// drops what was recorded; a stop without a start returns null; both warn on stderr. GraphRecording calls both, also if
// an exception is thrown in between.
bool isGraphRecording();
void startGraphRecording();
void addGraphOperator(std::shared_ptr<graph::GraphOperator> op);
std::shared_ptr<graph::Graph> stopGraphRecording();

// Starts a recording, and drops it at the end of its scope unless stop() was called. Throws if this thread is already
// recording. (An addition to InfiniCore's interface.)
class GraphRecording {
public:
    GraphRecording();
    ~GraphRecording();
    GraphRecording(const GraphRecording &) = delete;
    GraphRecording &operator=(const GraphRecording &) = delete;
    std::shared_ptr<graph::Graph> stop();
    // Whether it is still this thread's recording: no start, stop or error has ended it.
    bool is_active() const;
    // For callers without a scope: if an op fails, op_failed() drops the recording, with a warning.
    void end_at_errors();
    // Reports that a call on this thread has failed.
    static void op_failed() noexcept;

private:
    std::weak_ptr<graph::Graph> graph_; // of the recording
};

} // namespace infinicore::context
