// The device that a test program is called with: CPU (the default) or NVIDIA.
#pragma once

#include <infinicore.hpp>

#include <cstring>
#include <string>

inline infinicore::Device device_of(int count, char **arguments) {
    const bool is_nvidia = count > 1 && std::strcmp(arguments[1], "NVIDIA") == 0;
    return infinicore::Device(is_nvidia ? infinicore::Device::Type::NVIDIA : infinicore::Device::Type::CPU);
}

// What setDevice() of index 99 says.
inline std::string context_sentence(const infinicore::Device &device) {
    infinirtSetDevice(static_cast<infiniDevice_t>(device.getType()), 99);
    return infiniGetLastErrorMessage();
}
