// DeviceEvent: an infinirt event with its device.
#include "infinicore/device_event.hpp"

#include <utility>

#include "infinicore/context/context.hpp"
#include "thread_state.h"

namespace infinicore {

DeviceEvent::DeviceEvent() : DeviceEvent(context::getDevice(), INFINIRT_EVENT_DEFAULT) {}
DeviceEvent::DeviceEvent(uint32_t flags) : DeviceEvent(context::getDevice(), flags) {}
DeviceEvent::DeviceEvent(Device device) : DeviceEvent(device, INFINIRT_EVENT_DEFAULT) {}

DeviceEvent::DeviceEvent(Device device, uint32_t flags) : device_(device) {
    const DeviceScope scope(device);
    event_ = context::createEventWithFlags(flags);
}

DeviceEvent::DeviceEvent(DeviceEvent &&other) noexcept
    : device_(other.device_), event_(std::exchange(other.event_, nullptr)),
      is_recorded_(std::exchange(other.is_recorded_, false)) {}

DeviceEvent &DeviceEvent::operator=(DeviceEvent &&other) noexcept {
    std::swap(device_, other.device_);
    std::swap(event_, other.event_);
    std::swap(is_recorded_, other.is_recorded_);
    return *this;
}

DeviceEvent::~DeviceEvent() {
    if (event_ != nullptr) {
        infinirtEventDestroy(event_);
    }
}

void DeviceEvent::record() {
    const DeviceScope scope(device_);
    record(own_stream());
}

void DeviceEvent::record(infinirtStream_t stream) {
    const DeviceScope scope(device_);
    context::recordEvent(event_, stream);
    is_recorded_ = true;
}

void DeviceEvent::synchronize() {
    context::synchronizeEvent(event_);
}

bool DeviceEvent::query() const {
    return context::queryEvent(event_);
}

float DeviceEvent::elapsed_time(const DeviceEvent &other) const {
    return context::elapsedTime(event_, other.event_);
}

void DeviceEvent::wait(infinirtStream_t stream) const {
    context::streamWaitEvent(stream, event_);
}

} // namespace infinicore
