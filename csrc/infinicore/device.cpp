// The names of devices and element types.
#include "infinicore/device.hpp"

#include "dtype.h"
#include "infinicore/dtype.hpp"

namespace infinicore {

std::string Device::toString(const Type &type) {
    constexpr const char *names[] = {"CPU",   "NVIDIA",   "CAMBRICON", "ASCEND", "METAX",
                                     "MOORE", "ILUVATAR", "KUNLUN",    "HYGON",  "QY"};
    const auto index = static_cast<size_t>(type);
    return index < sizeof names / sizeof names[0] ? names[index] : "UNKNOWN";
}

std::string Device::toString() const {
    return toString(type_) + ":" + std::to_string(index_);
}

std::string toString(const DataType &dtype) {
    return infini::name_of(static_cast<infiniDtype_t>(dtype));
}

size_t dsize(const DataType &dtype) {
    return infini::size_of(static_cast<infiniDtype_t>(dtype));
}

} // namespace infinicore
