// On/off settings: environment variables with the value 1 or 0. Any other value throws an Error that names the
// variable.
#pragma once

#include <cstdlib>
#include <cstring>

#include "status.h"

namespace infini {

// Whether `name` is 1; returns `otherwise` if it is unset or empty. `reader` is the prefix of the error message.
inline bool setting_is_on(const char *name, bool otherwise, const char *reader = "infini") {
    const char *const text = std::getenv(name);
    if (text == nullptr || *text == 0) {
        return otherwise;
    }
    const bool on = std::strcmp(text, "1") == 0;
    if (!on && std::strcmp(text, "0") != 0) {
        throw Error(INFINI_STATUS_BAD_PARAM,
                    message(reader, ": ", name, " must be 0 or 1, or not be set, got '", text, "'"));
    }
    return on;
}

} // namespace infini
