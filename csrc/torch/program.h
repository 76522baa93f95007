// Program: calls of ops on the CPU, recorded instead of run, and replayed by one C call. A call is a function of a
// *_torch.cpp file with copies of its arguments: numbers, and tensor handles. torch_infini/runtime/_kernel_calls.py,
// the only user of the C functions, calls them through ctypes.
#pragma once

#include <cstddef>
#include <functional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "autograd.h"
#include "execution_context.h"
#include "status.h"

namespace infini {

using Program = std::vector<std::function<void()>>;

// The program that records this thread's calls, or nullptr.
inline thread_local Program *recording = nullptr;

// Whether this thread's calls (of recordable forms) stop after the op's rules, without reading or writing tensors.
inline thread_local bool checks_only = false;

// Calls `function` with a context whose device type has no kernels. It checks shapes, dtypes and strides, but no
// values, since those may be on a device; then it finds no kernel, the expected end.
void check_rules(const std::function<void(const ExecutionContext &)> &function);

// Whose kernels compute this thread's calls with CPU tensors: the CPU's, or, if they exist, those of a vendor's device
// that shares its memory with the host.
struct HostDevice {
    infiniDevice_t type = INFINI_DEVICE_CPU;
    bool is_strict = false; // raise if the vendor has no kernel; otherwise the CPU's kernel computes
    void (*on_missing)(const char *op) = nullptr; // called before that
};
inline thread_local HostDevice host_device;

// Whether a kernel reports that it is missing or does not support such tensors. If the op's own rules report it, they
// do so again on the CPU.
constexpr bool is_refusal(infiniStatus_t status) {
    return status == INFINI_STATUS_NOT_IMPLEMENTED || status == INFINI_STATUS_BAD_TENSOR_DTYPE ||
           status == INFINI_STATUS_BAD_TENSOR_SHAPE || status == INFINI_STATUS_BAD_TENSOR_STRIDES;
}

// How many tensors a function returns.
template <typename Result> constexpr size_t result_count = 1;
template <> inline constexpr size_t result_count<void> = 0;
template <typename... Results> constexpr size_t result_count<std::tuple<Results...>> = sizeof...(Results);

// The context of a call with CPU tensors, with ATen's products. Defined in library_torch.cpp.
ExecutionContext cpu_context();

// Calls of registered functions with CPU tensors. They get that context; while calls are recorded, the call is recorded
// and its result returned. Only forms that return nothing, or their last argument, which they write, can be recorded.
template <typename Result, typename... Arguments> struct OnCpu {
    using Function = Result (*)(const ExecutionContext &, Arguments...);

    static Result call(Function function, const char *name, Arguments &&...arguments) {
        if constexpr (returns_last(kLast)) {
            if (checks_only) {
                check_rules([&](const ExecutionContext &context) { function(context, arguments...); });
                return last(std::tie(arguments...), kLast);
            }
            if (recording != nullptr) {
                recording->push_back([=, device = host_device] { compute(function, name, device, arguments...); });
                return last(std::tie(arguments...), kLast);
            }
        }
        if (host_device.type == INFINI_DEVICE_CPU) {
            return function(cpu_context(), static_cast<Arguments &&>(arguments)...);
        }
        return compute(function, name, host_device, arguments...);
    }

private:
    static Result compute(Function function, const char *name, HostDevice device, const Arguments &...arguments) {
        if (device.type != INFINI_DEVICE_CPU) {
            try {
                ExecutionContext context;
                context.device_type = device.type;
                return function(context, arguments...);
            } catch (const Error &error) {
                if (!is_refusal(error.status) || device.is_strict) {
                    throw;
                }
            }
            device.on_missing(name);
        }
        return function(cpu_context(), arguments...);
    }

    static constexpr size_t kOthers = sizeof...(Arguments) - result_count<Result>;
    static constexpr std::make_index_sequence<result_count<Result>> kLast{};

    template <size_t... i> static constexpr bool returns_last(std::index_sequence<i...>) {
        if constexpr (std::is_void_v<Result> || sizeof...(i) > sizeof...(Arguments)) {
            return std::is_void_v<Result>;
        } else {
            return std::is_constructible_v<Result, std::tuple_element_t<kOthers + i, std::tuple<Arguments...>>...>;
        }
    }
    template <typename All, size_t... i> static Result last(const All &all, std::index_sequence<i...>) {
        return Result(std::get<kOthers + i>(all)...);
    }
};

} // namespace infini

extern "C" {

// Starts a program that records this thread's calls, without running them, until End. NULL if this thread already
// records.
INFINI_API void *infiniTorchProgramBegin(void);
// The number of recorded calls.
INFINI_API size_t infiniTorchProgramEnd(void);
// Runs the calls in order on this thread. Stops at the first failure; infiniGetLastErrorMessage() has its message.
INFINI_API infiniStatus_t infiniTorchProgramReplay(const void *program);
INFINI_API void infiniTorchProgramDestroy(void *program);
// Sets whether this thread's calls only check their arguments (but not tensors' values).
INFINI_API void infiniTorchChecksOnly(bool checks_only);
// Sets whose kernels compute this thread's calls with CPU tensors (HostDevice).
INFINI_API void infiniTorchComputeOn(infiniDevice_t type, bool is_strict, void (*on_missing)(const char *op));
}
