// The current device, streams and events of infini. Backed by the CPU, there is one device, and streams and events are
// libinfinirt's; backed by CUDA, every call goes to CUDA's guard with the device type replaced.
#include "device.h"

#include <array>
#include <atomic>
#include <mutex>

#include <pthread.h>

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace infini::device {

Backing backing;

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;

std::atomic<bool> used{false};   // this process, or its parent, has used a backing GPU
std::atomic<bool> forked{false}; // this process is a child of such a fork

void check(infiniStatus_t status) {
    TORCH_CHECK(status == INFINI_STATUS_SUCCESS, infiniGetLastErrorMessage());
}

const c10::impl::DeviceGuardImplInterface *cuda() {
    return c10::impl::getDeviceGuardImpl(backing.type);
}

Device below_of(Device device) {
    return Device(backing.type, device.index());
}

Stream below_of(const Stream &stream) {
    return Stream(Stream::UNSAFE, below_of(stream.device()), stream.id());
}

Stream above_of(const Stream &stream) {
    return Stream(Stream::UNSAFE, Device(kInfini, stream.device_index()), stream.id());
}

// CPU streams: a stream's id is its infinirtStream_t; 0 is the default stream, infinirt's NULL. torch holds streams by
// value and never destroys them, so they come from a pool, round robin.
constexpr size_t kPool = 32;
std::array<infinirtStream_t, kPool> pool;
std::once_flag pool_made;
std::atomic<size_t> next_in_pool{0};
thread_local StreamId current_stream = 0;

infinirtStream_t handle(const Stream &stream) {
    return reinterpret_cast<infinirtStream_t>(stream.id());
}

Stream stream_of(StreamId id) {
    return Stream(Stream::UNSAFE, Device(kInfini, 0), id);
}

Stream pooled_stream() {
    std::call_once(pool_made, [] {
        for (infinirtStream_t &stream : pool) {
            check(infinirtStreamCreate(&stream));
        }
    });
    return stream_of(reinterpret_cast<StreamId>(pool[next_in_pool++ % kPool]));
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
public:
    c10::DeviceType type() const override { return kInfini; }

    Device exchangeDevice(Device device) const override {
        const DeviceIndex index = checked_index(device);
        return {kInfini, on_cpu() ? index : cuda()->exchangeDevice(Device(backing.type, index)).index()};
    }
    Device getDevice() const override { return {kInfini, current_index()}; }
    void setDevice(Device device) const override { exchangeDevice(device); }
    void uncheckedSetDevice(Device device) const noexcept override {
        if (!on_cpu()) {
            cuda()->uncheckedSetDevice(below_of(device));
        }
    }
    DeviceIndex deviceCount() const noexcept override { return device_count(); }

    c10::DeviceCapability getDeviceCapability(Device device) const override {
        return on_cpu() ? c10::DeviceCapability() : cuda()->getDeviceCapability(below_of(device));
    }

    Stream getStream(Device device) const override {
        return on_cpu() ? stream_of(current_stream) : above_of(cuda()->getStream(below_of(device)));
    }
    Stream getDefaultStream(Device device) const override {
        return on_cpu() ? stream_of(0) : above_of(cuda()->getDefaultStream(below_of(device)));
    }
    Stream getStreamFromGlobalPool(Device device, bool high) const override {
        return on_cpu() ? pooled_stream() : above_of(cuda()->getStreamFromGlobalPool(below_of(device), high));
    }
    Stream getNewStream(Device device, int priority) const override {
        checked_index(device);
        return on_cpu() ? pooled_stream() : above_of(cuda()->getNewStream(below_of(device), priority));
    }
    Stream exchangeStream(Stream stream) const override {
        if (!on_cpu()) {
            return above_of(cuda()->exchangeStream(below_of(stream)));
        }
        return stream_of(std::exchange(current_stream, stream.id()));
    }
    void *getStreamNativeHandle(const Stream stream) const override {
        return on_cpu() ? handle(stream) : cuda()->getStreamNativeHandle(below_of(stream));
    }
    bool queryStream(const Stream &stream) const override {
        if (!on_cpu()) {
            return cuda()->queryStream(below_of(stream));
        }
        infinirtEvent_t event = nullptr; // infinirt can only query events
        infinirtEventStatus_t status = INFINIRT_EVENT_COMPLETE;
        check(infinirtEventCreate(&event));
        const infiniStatus_t recorded = infinirtEventRecord(event, handle(stream));
        const infiniStatus_t asked = recorded ? recorded : infinirtEventQuery(event, &status);
        infinirtEventDestroy(event);
        check(asked);
        return status == INFINIRT_EVENT_COMPLETE;
    }
    void synchronizeStream(const Stream &stream) const override {
        if (on_cpu()) {
            check(infinirtStreamSynchronize(handle(stream)));
        } else {
            cuda()->synchronizeStream(below_of(stream));
        }
    }
    void synchronizeDevice(const DeviceIndex index) const override {
        if (on_cpu()) {
            check(infinirtDeviceSynchronize());
        } else {
            cuda()->synchronizeDevice(index);
        }
    }
    bool isStreamCapturing(const Stream &stream) const override {
        return !on_cpu() && cuda()->isStreamCapturing(below_of(stream));
    }

    void record(void **event, const Stream &stream, const DeviceIndex index, const c10::EventFlag flag) const override {
        if (!on_cpu()) {
            return cuda()->record(event, below_of(stream), index, flag);
        }
        if (*event == nullptr) {
            infinirtEvent_t made = nullptr;
            check(infinirtEventCreateWithFlags(&made, flag == c10::EventFlag::BACKEND_DEFAULT
                                                          ? INFINIRT_EVENT_DEFAULT
                                                          : INFINIRT_EVENT_DISABLE_TIMING));
            *event = made;
        }
        check(infinirtEventRecord(*event, handle(stream)));
    }
    void block(void *event, const Stream &stream) const override {
        if (!on_cpu()) {
            cuda()->block(event, below_of(stream));
        } else if (event != nullptr) {
            check(infinirtStreamWaitEvent(handle(stream), event));
        }
    }
    bool queryEvent(void *event) const override {
        if (!on_cpu()) {
            return cuda()->queryEvent(event);
        }
        infinirtEventStatus_t status = INFINIRT_EVENT_COMPLETE;
        if (event != nullptr) {
            check(infinirtEventQuery(event, &status));
        }
        return status == INFINIRT_EVENT_COMPLETE;
    }
    void synchronizeEvent(void *event) const override {
        if (!on_cpu()) {
            cuda()->synchronizeEvent(event);
        } else if (event != nullptr) {
            check(infinirtEventSynchronize(event));
        }
    }
    void destroyEvent(void *event, const DeviceIndex index) const noexcept override {
        if (!on_cpu()) {
            cuda()->destroyEvent(event, index);
        } else if (event != nullptr) {
            infinirtEventDestroy(event);
        }
    }
    double elapsedTime(void *start, void *end, const DeviceIndex index) const override {
        if (!on_cpu()) {
            return cuda()->elapsedTime(start, end, index);
        }
        TORCH_CHECK(start != nullptr && end != nullptr,
                    "Both events must be recorded before calculating elapsed time.");
        float ms = 0;
        check(infinirtEventElapsedTime(&ms, start, end));
        return ms;
    }

    void recordDataPtrOnStream(const c10::DataPtr &pointer, const Stream &stream) const override {
        device_allocator()->recordStream(pointer, stream);
    }

private:
    static bool on_cpu() { return backing.type == c10::kCPU; }
};

} // namespace

DeviceIndex device_count() noexcept {
    return backing.type == c10::kCPU ? DeviceIndex(1) : cuda()->deviceCount();
}

DeviceIndex current_index() {
    return backing.type == c10::kCPU ? DeviceIndex(0) : cuda()->getDevice().index();
}

DeviceIndex checked_index(Device device) {
    const DeviceIndex count = device_count();
    TORCH_CHECK(device.index() < count, "The device index is out of range: ", device, " was asked for, there ",
                count == 1 ? "is 1 infini device" : c10::str("are ", int(count), " infini devices"));
    return device.index() < 0 ? current_index() : device.index();
}

void check_fork() {
    if (backing.type == c10::kCPU) {
        return;
    }
    TORCH_CHECK(!forked, "Cannot re-initialize infini in forked subprocess. To use infini with multiprocessing, you "
                         "must use the 'spawn' start method");
    if (!used.exchange(true)) {
        pthread_atfork(nullptr, nullptr, [] { forked = true; });
    }
}

void register_guard() {
    c10::impl::registerDeviceGuard(kInfini, new Guard);
}

} // namespace infini::device
