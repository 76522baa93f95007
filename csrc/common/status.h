// Error: the exception of this project, a status code of the C ABI with a one-sentence message. The torch binding lets
// it pass (it becomes a RuntimeError); the C ABI returns the code and keeps the message. message("a ", 3, ...)
// concatenates its arguments.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include "infinicore.h"

namespace infini {

struct Error : std::runtime_error {
    Error(infiniStatus_t code, const std::string &sentence) : std::runtime_error(sentence), status(code) {}
    infiniStatus_t status;
};

template <typename... Parts> std::string message(const Parts &...parts) {
    std::ostringstream text;
    (text << ... << parts);
    return text.str();
}

} // namespace infini
