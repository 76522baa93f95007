// Device: one device of one type, as tensors, memory and the context name it.
// The types and their values are those of infiniDevice_t.
#pragma once

#include <cstddef>
#include <string>

#include "../infinicore.h"

namespace infinicore {

class Device {
public:
    using Index = std::size_t;

    enum class Type {
        CPU = INFINI_DEVICE_CPU,
        NVIDIA = INFINI_DEVICE_NVIDIA,
        CAMBRICON = INFINI_DEVICE_CAMBRICON,
        ASCEND = INFINI_DEVICE_ASCEND,
        METAX = INFINI_DEVICE_METAX,
        MOORE = INFINI_DEVICE_MOORE,
        ILUVATAR = INFINI_DEVICE_ILUVATAR,
        KUNLUN = INFINI_DEVICE_KUNLUN,
        HYGON = INFINI_DEVICE_HYGON,
        QY = INFINI_DEVICE_QY,
        COUNT = INFINI_DEVICE_TYPE_COUNT
    };

    Device(const Type &type = Type::CPU, const Index &index = 0) : type_(type), index_(index) {}

    const Type &getType() const { return type_; }
    const Index &getIndex() const { return index_; }

    std::string toString() const; // "NVIDIA:0"
    static std::string toString(const Type &type);

    bool operator==(const Device &other) const { return type_ == other.type_ && index_ == other.index_; }
    bool operator!=(const Device &other) const { return !(*this == other); }

    static Device cpu() { return Device(); }

private:
    Type type_;
    Index index_;
};

} // namespace infinicore
