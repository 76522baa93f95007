// The C functions of infinirt.h that speak of the CPU's instruction sets, and the thread's last error.
// Nothing throws across the ABI.
#include "cpu_capability.h"

#include <string>

#include "infinirt.h"
#include "status.h"

namespace {

thread_local std::string last_error;

template <typename Body> infiniStatus_t guarded(const Body &body) {
    try {
        body();
        return INFINI_STATUS_SUCCESS;
    } catch (const infini::Error &error) {
        last_error = error.what();
        return error.status;
    } catch (const std::exception &error) {
        last_error = error.what();
        return INFINI_STATUS_INTERNAL_ERROR;
    }
}

} // namespace

const char *infiniGetLastErrorMessage(void) {
    return last_error.c_str();
}

const char *infinirtCpuCapability(void) {
    const char *name = nullptr;
    guarded([&] { name = infini::name_of(infini::cpu_capability()); });
    return name;
}

const char *infinirtCpuHighestCapability(void) {
    return infini::name_of(infini::highest_cpu_capability());
}

infiniStatus_t infinirtCpuSetCapability(const char *name) {
    if (name == nullptr) {
        last_error = "infinirtCpuSetCapability: name must not be NULL";
        return INFINI_STATUS_NULL_POINTER;
    }
    return guarded([&] { infini::set_cpu_capability(name); });
}
