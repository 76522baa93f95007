// DeviceEvent: an event of one device. Record it on a stream, wait for it, measure the time between two of them.
#pragma once

#include <cstdint>

#include "../infinirt.h"
#include "device.hpp"

namespace infinicore {

class DeviceEvent {
public:
    // Of the current device, or of another one; `flags` are infinirtEventFlags_t.
    DeviceEvent();
    explicit DeviceEvent(uint32_t flags);
    explicit DeviceEvent(Device device);
    DeviceEvent(Device device, uint32_t flags);
    DeviceEvent(const DeviceEvent &) = delete;
    DeviceEvent &operator=(const DeviceEvent &) = delete;
    DeviceEvent(DeviceEvent &&other) noexcept;
    DeviceEvent &operator=(DeviceEvent &&other) noexcept;
    ~DeviceEvent();

    void record(); // on this thread's stream of the event's device
    void record(infinirtStream_t stream);
    void synchronize();
    bool query() const; // whether the last record is complete; true if there is none
    // Milliseconds from this event to `other`, both recorded and complete.
    float elapsed_time(const DeviceEvent &other) const;
    // Work that is queued on the stream (NULL: this thread's) from now on waits for the event.
    void wait(infinirtStream_t stream = nullptr) const;

    Device device() const { return device_; }
    infinirtEvent_t get() const { return event_; }
    bool is_recorded() const { return is_recorded_; }

private:
    Device device_;
    infinirtEvent_t event_ = nullptr;
    bool is_recorded_ = false;
};

} // namespace infinicore
