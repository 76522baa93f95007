// Allocations: the memory of infinirtMalloc and the like, ordered by address. With it, a free of any other address
// fails, and a copy that begins inside an allocation must end in it.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <tuple>

#include "backend.h"

namespace infini::runtime {

struct Allocation {
    size_t size = 0; // 0: no allocation
    Device device;   // the device that allocated it
    bool host = false;
};

class Allocations {
public:
    void insert(void *ptr, const Allocation &allocation) {
        const std::lock_guard<std::mutex> lock(mutex_);
        by_address_[key(space(allocation), ptr)] = allocation;
    }

    // Removes the host's or the device's allocation that begins at ptr; CPU memory is both.
    Allocation erase(Device device, bool host, void *ptr) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = by_address_.find(key(host ? Device{} : device, ptr));
        if (found == by_address_.end()) {
            return {};
        }
        const Allocation allocation = found->second;
        if (allocation.host != host && allocation.device.type != INFINI_DEVICE_CPU) {
            return {};
        }
        by_address_.erase(found);
        return allocation;
    }

    // The bytes from ptr to the end of its allocation; SIZE_MAX if ptr is in no known allocation.
    size_t bytes_left(Device space, const void *ptr) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto after = by_address_.upper_bound(key(space, ptr));
        if (after == by_address_.begin()) {
            return SIZE_MAX;
        }
        const auto &[at, allocation] = *std::prev(after);
        const uintptr_t offset = reinterpret_cast<uintptr_t>(ptr) - std::get<2>(at);
        const bool inside = at <= key(space, ptr) && std::get<0>(at) == space.type && std::get<1>(at) == space.id &&
                            offset < allocation.size;
        return inside ? allocation.size - offset : SIZE_MAX;
    }

private:
    // Devices may use equal addresses for different memory. Host memory is registered for the CPU, Device{}.
    using Key = std::tuple<int, int, uintptr_t>;
    static Key key(Device space, const void *ptr) { return {space.type, space.id, reinterpret_cast<uintptr_t>(ptr)}; }
    static Device space(const Allocation &allocation) { return allocation.host ? Device{} : allocation.device; }

    std::mutex mutex_;
    std::map<Key, Allocation> by_address_;
};

} // namespace infini::runtime
