// The C functions of programs (record, replay, destroy), and calls that only check their arguments. Independent of the
// ops: OnCpu, through which every function that INFINI_BOX registers is called, records the calls.
#include "program.h"

#include <optional>

#include "guard.h"
#include "infinirt.h"
#include "status.h"

using infini::Program;
using infini::recording;

namespace infini {
namespace {

// The last device type without a backend, and so without kernels. Empty if vendors have backends for all types.
std::optional<infiniDevice_t> device_without_kernels() {
    for (int type = INFINI_DEVICE_TYPE_COUNT - 1; type > INFINI_DEVICE_NVIDIA; --type) {
        int count = 0;
        if (infinirtGetDeviceCount(static_cast<infiniDevice_t>(type), &count) == INFINI_STATUS_SUCCESS && count == 0) {
            return static_cast<infiniDevice_t>(type);
        }
    }
    return std::nullopt;
}

} // namespace

void check_rules(const std::function<void(const ExecutionContext &)> &function) {
    static const std::optional<infiniDevice_t> type = device_without_kernels();
    if (!type) {
        return;
    }
    ExecutionContext context;
    context.device_type = *type;
    try {
        function(context);
    } catch (const Error &error) {
        if (error.status != INFINI_STATUS_NOT_IMPLEMENTED) {
            throw;
        }
    }
}

} // namespace infini

void *infiniTorchProgramBegin() {
    return recording == nullptr ? recording = new Program : nullptr;
}

size_t infiniTorchProgramEnd() {
    const size_t calls = recording == nullptr ? 0 : recording->size();
    recording = nullptr;
    return calls;
}

infiniStatus_t infiniTorchProgramReplay(const void *program) {
    return infini::guarded([&] {
        for (const auto &call : *static_cast<const Program *>(program)) {
            call();
        }
    });
}

void infiniTorchProgramDestroy(void *program) {
    delete static_cast<Program *>(program);
}

void infiniTorchChecksOnly(bool checks_only) {
    infini::checks_only = checks_only;
}

void infiniTorchComputeOn(infiniDevice_t type, bool is_strict, void (*on_missing)(const char *op)) {
    infini::host_device = {type, is_strict, on_missing};
}
