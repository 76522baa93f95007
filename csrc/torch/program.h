// Program: calls of ops on the CPU, recorded instead of being run, and replayed by one C call.
// Each call is a function of a *_torch.cpp file with copies of its arguments: numbers, and handles of the tensors.
// torch_infini/runtime/_kernel_calls.py, the only user of the C functions, calls them through ctypes.
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

// The program that records this thread's calls, or null.
inline thread_local Program *recording = nullptr;

// Whether this thread's calls, of forms that can be recorded, end after the op's rules: nothing is read or written.
inline thread_local bool checks_only = false;

// Calls a function with a context of a device type that nothing is built for: it checks shapes, dtypes and strides, and
// no values, for those may be on a device; then it finds no kernel, which is the end that is expected.
void check_rules(const std::function<void(const ExecutionContext &)> &function);

// Whose kernels compute this thread's calls with CPU tensors: the CPU's, or those of a vendor's device that shares its
// memory with the host, where it has them.
struct HostDevice {
    infiniDevice_t type = INFINI_DEVICE_CPU;
    bool is_strict = false; // what it has no kernel for is an error; otherwise the CPU's kernel computes it
    void (*on_missing)(const char *op) = nullptr; // is told before that
};
inline thread_local HostDevice host_device;

// Whether a kernel says so that it is missing, or that it does not take such tensors. Where the op's own rules say it,
// they say it on the CPU once more.
constexpr bool is_refusal(infiniStatus_t status) {
    return status == INFINI_STATUS_NOT_IMPLEMENTED || status == INFINI_STATUS_BAD_TENSOR_DTYPE ||
           status == INFINI_STATUS_BAD_TENSOR_SHAPE || status == INFINI_STATUS_BAD_TENSOR_STRIDES;
}

// How many tensors a function returns.
template <typename Result> constexpr size_t result_count = 1;
template <> inline constexpr size_t result_count<void> = 0;
template <typename... Results> constexpr size_t result_count<std::tuple<Results...>> = sizeof...(Results);

// The context of a call with CPU tensors, which brings ATen's products; library_torch.cpp has both.
ExecutionContext cpu_context();

// The function registered for CPU tensors: calls the function with that context, or where calls are recorded, records
// this one and returns its result. Only forms that return nothing, or their last argument, which they write, are
// recorded.
template <auto function> struct OnCpu;

template <typename Result, typename... Arguments, Result (*function)(const ExecutionContext &, Arguments...)>
struct OnCpu<function> {
    static Result call(Arguments... arguments) {
        if constexpr (returns_last(kLast)) {
            if (checks_only) {
                check_rules([&](const ExecutionContext &context) { function(context, arguments...); });
                return last(std::tie(arguments...), kLast);
            }
            if (recording != nullptr) {
                recording->push_back([=, device = host_device] { compute(device, arguments...); });
                return last(std::tie(arguments...), kLast);
            }
        }
        if (host_device.type == INFINI_DEVICE_CPU) {
            return function(cpu_context(), static_cast<Arguments &&>(arguments)...);
        }
        return compute(host_device, arguments...);
    }

private:
    static Result compute(HostDevice device, const Arguments &...arguments) {
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
            device.on_missing(registered_name<function>);
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

// A new program, which records this thread's calls, without running them, until End. NULL: this thread records already.
INFINI_API void *infiniTorchProgramBegin(void);
// The number of recorded calls.
INFINI_API size_t infiniTorchProgramEnd(void);
// Runs the calls in order on this thread. The first failure ends it; infiniGetLastErrorMessage() has its message.
INFINI_API infiniStatus_t infiniTorchProgramReplay(const void *program);
INFINI_API void infiniTorchProgramDestroy(void *program);
// Whether calls of this thread check their arguments, without their values, and do nothing else.
INFINI_API void infiniTorchChecksOnly(bool checks_only);
// Sets whose kernels compute this thread's calls with CPU tensors (HostDevice).
INFINI_API void infiniTorchComputeOn(infiniDevice_t type, bool is_strict, void (*on_missing)(const char *op));
}
