// How this library reports what went wrong: one sentence in a std::runtime_error, made of parts or taken from a C library.
// warn() is for what is no error and must not pass unseen.
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

// The status of a call of a C library, whose sentence is the last error's.
inline void check(infiniStatus_t status) {
    if (status != INFINI_STATUS_SUCCESS) {
        throw infini::Error(status, infiniGetLastErrorMessage());
    }
}

// A shape or strides: "[2, 3]".
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
