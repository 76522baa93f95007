// A candidate of topksoftmax and topkrouter: a value with its index, as one integer that sorts by value and, among
// equal values, by descending index. NaN sorts above all numbers; -0 equals 0.
#pragma once

#include <cstring>

#include "tensor_view.h"

namespace infini::topk {

INFINI_ALWAYS_INLINE uint64_t candidate(float value, int64_t index) {
    const float positive_zero = value + 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &positive_zero, sizeof bits);
    const uint32_t order = value != value ? ~uint32_t{0} : bits >> 31 ? ~bits : bits | 0x80000000u;
    return static_cast<uint64_t>(order) << 32 | ~static_cast<uint32_t>(index);
}

INFINI_ALWAYS_INLINE int64_t index_of(uint64_t candidate) {
    return ~static_cast<uint32_t>(candidate);
}

// The value; -0 becomes 0.
INFINI_ALWAYS_INLINE float value_of(uint64_t candidate) {
    const auto order = static_cast<uint32_t>(candidate >> 32);
    const uint32_t bits = order >> 31 ? order ^ 0x80000000u : ~order;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value; // NaN
}

} // namespace infini::topk
