// guarded: runs C++ code for a function of the C ABI and lets no exception escape. An Error becomes its status code;
// infiniGetLastErrorMessage() returns its message on this thread.
#pragma once

#include <cstdio>
#include <exception>
#include <new>

#include "infinirt.h"
#include "status.h"

namespace infini {

// The name of a C function in messages, concatenated only when a message is made.
struct Function {
    constexpr Function(const char *first, const char *middle = "", const char *last = "")
        : prefix(first), name(middle), suffix(last) {}
    const char *prefix, *name, *suffix;
};

inline std::ostream &operator<<(std::ostream &text, const Function &function) {
    return text << function.prefix << function.name << function.suffix;
}

template <typename Body> infiniStatus_t guarded(const Function &function, const Body &body) noexcept {
    try {
        body();
        return INFINI_STATUS_SUCCESS;
    } catch (const Error &error) {
        infinirtSetLastErrorMessage(error.what());
        return error.status;
    } catch (const std::bad_alloc &) {
        char sentence[256]; // a fixed buffer: there may be no memory for a string
        std::snprintf(sentence, sizeof sentence, "%s%s%s: no memory for the records of this call", function.prefix,
                      function.name, function.suffix);
        infinirtSetLastErrorMessage(sentence);
    } catch (const std::exception &error) {
        infinirtSetLastErrorMessage(error.what());
    } catch (...) {
        infinirtSetLastErrorMessage("infini: an unknown exception");
    }
    return INFINI_STATUS_INTERNAL_ERROR;
}

template <typename Body> infiniStatus_t guarded(const Body &body) noexcept {
    return guarded("infini", body);
}

// Throws NULL_POINTER, "<function>: <argument> must not be NULL".
inline void not_null(const Function &function, const char *argument, const void *pointer) {
    if (pointer == nullptr) {
        throw Error(INFINI_STATUS_NULL_POINTER, message(function, ": ", argument, " must not be NULL"));
    }
}

} // namespace infini
