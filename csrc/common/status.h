// Error: what a check throws, a status code of the C ABI together with one sentence for a person.
// The torch binding lets it pass (it becomes a RuntimeError); the C ABI turns it into the code and keeps the sentence.
// message("a ", 3, ...) builds such sentences from parts.
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
