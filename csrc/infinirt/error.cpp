// The last error of each thread, for all libraries of the stack. It is kept in a fixed buffer, so that storing it
// cannot fail.
#include <cstdio>

#include "infinirt.h"

namespace {

thread_local char last_error[2048];

} // namespace

const char *infiniGetLastErrorMessage(void) {
    return last_error;
}

void infinirtSetLastErrorMessage(const char *message) {
    std::snprintf(last_error, sizeof last_error, "%s", message == nullptr ? "" : message);
}
