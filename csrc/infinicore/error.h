// How this library reports errors: one sentence in a std::runtime_error, concatenated from parts or taken from a C
// library. warn() is for what is no error but must be visible.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "infinirt.h"
#include "status.h"

namespace infinicore {

using infini::message;

template <typename... Parts> [[noreturn]] void fail(const Parts &...parts) {
    throw infini::Error(INFINI_STATUS_BAD_PARAM, message(parts...));
}

// Throws the last error's message unless the status of a C library's call is success.
inline void check(infiniStatus_t status) {
    if (status != INFINI_STATUS_SUCCESS) {
        throw infini::Error(status, infiniGetLastErrorMessage());
    }
}

// Formats a shape or strides: "[2, 3]".
template <typename Number> std::string text(const std::vector<Number> &values) {
    std::string out = "[";
    for (size_t i = 0; i < values.size(); ++i) {
        out += (i == 0 ? "" : ", ") + std::to_string(values[i]);
    }
    return out + "]";
}

template <typename... Parts> void warn(const Parts &...parts) {
    std::fprintf(stderr, "infinicore: warning: %s\n", message(parts...).c_str());
}

} // namespace infinicore
