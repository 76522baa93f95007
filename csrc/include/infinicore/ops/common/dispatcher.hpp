// OpDispatcher: an op's functions by device type. Other libraries may register their own, also in place of ours.
// Register at the start of a program: it must not happen while another thread calls the op.
#pragma once

#include <array>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "../../device.hpp"

namespace infinicore::op::common {

template <typename Fn> class OpDispatcher {
public:
    // lookup() names the op in its error.
    explicit OpDispatcher(const char *name = "op", Fn all = nullptr) : name_(name) {
        if (all != nullptr) {
            registerAll(all);
        }
    }

    // An existing function stays unless override_existing.
    void registerDevice(Device::Type device_type, Fn fn, bool override_existing = true) {
        Fn &entry = table_.at(static_cast<std::size_t>(device_type));
        if (entry == nullptr || override_existing) {
            entry = fn;
        }
    }

    void registerDevice(std::initializer_list<Device::Type> device_types, Fn fn, bool override_existing = true) {
        for (const Device::Type type : device_types) {
            registerDevice(type, fn, override_existing);
        }
    }

    void registerAll(Fn fn, bool override_existing = true) {
        for (std::size_t type = 0; type < table_.size(); ++type) {
            registerDevice(static_cast<Device::Type>(type), fn, override_existing);
        }
    }

    // Throws if nothing is registered for the type.
    Fn lookup(Device::Type device_type) const {
        const auto type = static_cast<std::size_t>(device_type);
        if (type >= table_.size() || table_[type] == nullptr) {
            throw std::runtime_error("infinicore::" + std::string(name_) + ": no implementation is registered for " +
                                     (type < table_.size() ? Device::toString(device_type) : "this device type"));
        }
        return table_[type];
    }

private:
    const char *name_;
    std::array<Fn, static_cast<std::size_t>(Device::Type::COUNT)> table_{};
};

} // namespace infinicore::op::common
