// Settings that are on or off: environment variables that are 1 or 0. Any other value is an Error that names the
// variable.
#pragma once

#include <cstdlib>
#include <cstring>

#include "status.h"

namespace infini {

// Whether `name` is 1; `otherwise` where it is not set, or empty. `reader` is named in the error message.
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
