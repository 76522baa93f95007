// The functions of infinicore::context except recording: each calls a C library, or an allocator.
#include "infinicore/context/context.hpp"

#include <atomic>

#include "allocator.h"
#include "error.h"
#include "thread_state.h"

namespace infinicore::context {

namespace {

infiniDevice_t c_type(const Device &device) {
    return static_cast<infiniDevice_t>(device.getType());
}

infinirtStream_t stream_or_own(infinirtStream_t stream) {
    return stream != nullptr ? stream : own_stream();
}

void copy(void *dst, const void *src, size_t size, infinirtMemcpyKind_t kind, bool async) {
    if (kind != INFINIRT_MEMCPY_H2H && current_recording() != nullptr) {
        fail("infinicore::context: a copy of an address cannot be recorded: use Tensor::copy_from, or copy before "
             "startGraphRecording()");
    }
    check(infinirtMemcpyAsync(dst, src, size, kind, own_stream()));
    if (!async) {
        syncStream();
    }
}

std::shared_ptr<Memory> allocate(CachingAllocator &allocator, size_t size, Device device, bool pinned) {
    if (size == 0) {
        return std::make_shared<Memory>(nullptr, 0, device, nullptr, pinned);
    }
    ThreadState *const state = ThreadState::current();
    if (state->recording != nullptr) {
        return state->recording->pool->allocate(allocator, size, device, pinned);
    }
    if (state->capture_pool != nullptr) {
        return state->capture_pool->allocate(allocator, size, device, pinned);
    }
    Block *const block = allocator.allocate(size, state->stream(allocator.device()));
    struct Free {
        CachingAllocator *allocator;
        Block *block;
        void operator()(std::byte *) const {
            ThreadState *const freeing = ThreadState::current();
            allocator->free(block, freeing == nullptr ? StreamId{} : freeing->stream(allocator->device(), false));
        }
    };
    return std::make_shared<Memory>(block->data, size, device, Free{&allocator, block}, pinned);
}

} // namespace

void setDevice(Device device) {
    check(infinirtSetDevice(c_type(device), static_cast<int>(device.getIndex())));
}

Device getDevice() {
    infiniDevice_t type = INFINI_DEVICE_CPU;
    int index = 0;
    check(infinirtGetDevice(&type, &index));
    return Device(static_cast<Device::Type>(type), static_cast<size_t>(index));
}

size_t getDeviceCount(Device::Type type) {
    int count = 0;
    check(infinirtGetDeviceCount(static_cast<infiniDevice_t>(type), &count));
    return static_cast<size_t>(count);
}

infinirtStream_t getStream() {
    ThreadState::current()->expose();
    return own_stream();
}

infiniopHandle_t getInfiniopHandle(Device device) {
    constexpr size_t kMaxIndex = 64;
    static std::atomic<infiniopHandle_t> made[INFINI_DEVICE_TYPE_COUNT][kMaxIndex];
    const size_t type = static_cast<size_t>(device.getType());
    if (type < INFINI_DEVICE_TYPE_COUNT && device.getIndex() < kMaxIndex) {
        std::atomic<infiniopHandle_t> &entry = made[type][device.getIndex()];
        infiniopHandle_t found = entry.load(std::memory_order_acquire);
        if (found == nullptr) {
            const DeviceScope scope(device);
            infiniopHandle_t fresh = nullptr;
            check(infiniopCreateHandle(&fresh));
            if (entry.compare_exchange_strong(found, fresh, std::memory_order_acq_rel)) {
                return fresh;
            }
            infiniopDestroyHandle(fresh);
        }
        return found;
    }
    setDevice(device); // throws with the reason
    fail("infinicore::context::getInfiniopHandle: device must have an index below ", kMaxIndex, ", got ",
         device.toString());
}

void syncStream() {
    check(infinirtStreamSynchronize(own_stream()));
}

void syncDevice() {
    check(infinirtDeviceSynchronize());
}

std::shared_ptr<Memory> allocateMemory(size_t size) {
    const Device device = getDevice();
    return allocate(CachingAllocator::of(device), size, device, false);
}

std::shared_ptr<Memory> allocateHostMemory(size_t size) {
    return allocate(CachingAllocator::of(Device::cpu()), size, Device::cpu(), false);
}

std::shared_ptr<Memory> allocatePinnedHostMemory(size_t size) {
    return allocate(CachingAllocator::of(getDevice(), CachingAllocator::Kind::Pinned), size, Device::cpu(), true);
}

MemoryStats memoryStats(Device device) {
    MemoryStats sum = CachingAllocator::of(device).stats();
    const MemoryStats pinned = CachingAllocator::of(device, CachingAllocator::Kind::Pinned).stats();
    sum.in_use += pinned.in_use;
    sum.cached += pinned.cached;
    sum.peak_in_use += pinned.peak_in_use;
    sum.allocations += pinned.allocations;
    sum.cache_hits += pinned.cache_hits;
    return sum;
}

void trimMemory(Device device) {
    const DeviceScope scope(device);
    CachingAllocator::of(device).trim();
    CachingAllocator::of(device, CachingAllocator::Kind::Pinned).trim();
}

void memcpyH2D(void *dst, const void *src, size_t size, bool async) {
    copy(dst, src, size, INFINIRT_MEMCPY_H2D, async);
}

void memcpyD2H(void *dst, const void *src, size_t size) {
    copy(dst, src, size, INFINIRT_MEMCPY_D2H, false);
}

void memcpyD2D(void *dst, const void *src, size_t size, bool async) {
    copy(dst, src, size, INFINIRT_MEMCPY_D2D, async);
}

void memcpyH2H(void *dst, const void *src, size_t size) {
    check(infinirtMemcpy(dst, src, size, INFINIRT_MEMCPY_H2H));
}

infinirtEvent_t createEvent() {
    infinirtEvent_t event = nullptr;
    check(infinirtEventCreate(&event));
    return event;
}

infinirtEvent_t createEventWithFlags(uint32_t flags) {
    infinirtEvent_t event = nullptr;
    check(infinirtEventCreateWithFlags(&event, flags));
    return event;
}

void recordEvent(infinirtEvent_t event, infinirtStream_t stream) {
    check(infinirtEventRecord(event, stream_or_own(stream)));
}

bool queryEvent(infinirtEvent_t event) {
    infinirtEventStatus_t status = INFINIRT_EVENT_NOT_READY;
    check(infinirtEventQuery(event, &status));
    return status == INFINIRT_EVENT_COMPLETE;
}

void synchronizeEvent(infinirtEvent_t event) {
    check(infinirtEventSynchronize(event));
}

void destroyEvent(infinirtEvent_t event) {
    check(infinirtEventDestroy(event));
}

float elapsedTime(infinirtEvent_t start, infinirtEvent_t end) {
    float ms = 0;
    check(infinirtEventElapsedTime(&ms, start, end));
    return ms;
}

void streamWaitEvent(infinirtStream_t stream, infinirtEvent_t event) {
    check(infinirtStreamWaitEvent(stream_or_own(stream), event));
}

} // namespace infinicore::context
