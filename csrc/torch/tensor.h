// Connects torch and the kernels, on the LibTorch stable ABI: TensorViews of torch tensors, and new output tensors.
// Included only by *_torch.cpp files. INFINI_TORCH_LIBRARY(m) { m.impl("rms_norm", INFINI_BOX(rms_norm)); } registers
// implementations for CPU and CUDA tensors; schemas and fakes are declared in torch_infini/ops/<op>.py.
#pragma once

#include <optional>
#include <type_traits>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "autograd.h"
#include "check.h"
#include "cuda/emulated.h"
#include "execution_context.h"
#include "program.h"
#include "tensor_view.h"

namespace infini {

// The view of a tensor on the context's device. Throws if the device, the layout or the number of dimensions is not
// supported.
TensorView view(const ExecutionContext &context, const Checker &rule, const char *argument, const Tensor &tensor);

// The same for ops without a dtype list of their own. Accepts float64, float32, bfloat16, float16, bool and integers of
// 8 to 64 bits. view() accepts other dtypes too, so that ops' checks can name the dtypes they support.
TensorView view_of_numbers(const ExecutionContext &context, const Checker &rule, const char *argument,
                           const Tensor &tensor);

// The same as view; an absent view (dtype 0) if no tensor is given.
inline TensorView optional_view(const ExecutionContext &context, const Checker &rule, const char *argument,
                                const std::optional<Tensor> &tensor) {
    return tensor ? view(context, rule, argument, *tensor) : TensorView{};
}

// A new contiguous, uninitialized tensor on the context's device, of a given shape, or of the shape and dtype of
// `like`.
Tensor empty(const ExecutionContext &context, std::initializer_list<int64_t> shape, infiniDtype_t dtype);
Tensor empty_like(const ExecutionContext &context, const TensorView &like);
Tensor empty_like(const ExecutionContext &context, const TensorView &like, infiniDtype_t dtype);

// A tensor over a view's memory, of float32, bfloat16 or float16; autograd does not track it.
Tensor tensor_of(const ExecutionContext &context, const TensorView &view);

// Whether the CUDA kernels are registered: this build has them, and the loaded torch has CUDA.
bool has_cuda();

// The context of a call with CUDA tensors: makes the first tensor's device current for the scope, and holds torch's
// stream there.
class CudaCall {
public:
    template <typename... Arguments> explicit CudaCall(const Arguments &...arguments) : CudaCall(first(arguments...)) {}
    explicit CudaCall(const Tensor *first);
    ~CudaCall();
    CudaCall(const CudaCall &) = delete;
    CudaCall &operator=(const CudaCall &) = delete;

    const ExecutionContext &context() const { return context_; }

private:
    static const Tensor *first() { return nullptr; }
    template <typename Argument, typename... Others>
    static const Tensor *first(const Argument &argument, const Others &...others) {
        if constexpr (std::is_same_v<Argument, Tensor>) {
            if (argument.defined() && argument.is_cuda()) {
                return &argument;
            }
        } else if constexpr (std::is_same_v<Argument, std::optional<Tensor>>) {
            if (argument && argument->defined() && argument->is_cuda()) {
                return &*argument;
            }
        }
        return first(others...);
    }

    DeviceGuardHandle guard_ = nullptr;
    ExecutionContext context_;
};

// The calls of all registered functions of a type: they are compiled once for a signature, not for each op.
template <typename Function> struct Calls;

template <typename Result, typename... Arguments> struct Calls<Result (*)(const ExecutionContext &, Arguments...)> {
    // Calls current_call's function.
    static Result call(Arguments... arguments) {
        const RegisteredCall called = current_call; // a copy, since the function may call ops
        const auto function = reinterpret_cast<Result (*)(const ExecutionContext &, Arguments...)>(called.function);
        const auto run = [&](Arguments &&...checked) {
            if (called.on_cuda) {
                const CudaCall on_cuda(checked...);
                return function(on_cuda.context(), checked...);
            }
            return OnCpu<Result, Arguments...>::call(function, called.name, static_cast<Arguments &&>(checked)...);
        };
        return AutogradChecked<Result, Arguments...>::call(called.name, run, static_cast<Arguments &&>(arguments)...);
    }
};

// What torch calls for an op: the arguments come as a stack, which TORCH_BOX takes apart.
template <auto function, bool on_cuda> void call_boxed(StableIValue *stack, uint64_t arguments, uint64_t results) {
    current_call = {registered_name<function>, reinterpret_cast<void (*)()>(function), on_cuda};
    TORCH_BOX((&Calls<decltype(function)>::call))(stack, arguments, results);
}

// Registers functions of one library for one dispatch key.
class Registrar {
public:
    using Boxed = void (*)(StableIValue *, uint64_t, uint64_t);
    Registrar(torch::stable::detail::StableLibrary &library, bool cuda) : library_(library), cuda_(cuda) {}
    void impl(const char *name, const char **registered, Boxed on_cpu, Boxed on_cuda) {
        *registered = name;
        library_.impl(name, cuda_ ? on_cuda : on_cpu);
    }

private:
    torch::stable::detail::StableLibrary &library_;
    const bool cuda_;
};

} // namespace infini

// The arguments of Registrar::impl after the name: where to store the name, what to call for CPU tensors, and for CUDA
// tensors. The function's first parameter is the context; the others are the schema's.
#define INFINI_BOX(function)                                                                                           \
    &::infini::registered_name<&function>, &::infini::call_boxed<&function, false>,                                    \
        &::infini::call_boxed<&function, true>

// Emulated CUDA computes in host memory, so there CPU tensors go to the CUDA kernels.
#define INFINI_TORCH_LIBRARY(m)                                                                                        \
    static void register_functions(::infini::Registrar m);                                                             \
    STABLE_TORCH_LIBRARY_IMPL(infini, CPU, library) {                                                                  \
        register_functions({library, ::infini::cuda_is_emulated()});                                                   \
    }                                                                                                                  \
    STABLE_TORCH_LIBRARY_IMPL(infini, CUDA, library) {                                                                 \
        if (::infini::has_cuda()) {                                                                                    \
            register_functions({library, true});                                                                       \
        }                                                                                                              \
    }                                                                                                                  \
    static void register_functions(::infini::Registrar m)

// For ops that only the CPU has; with emulated CUDA the CPU computes them as always.
#define INFINI_TORCH_LIBRARY_CPU(m)                                                                                    \
    static void register_cpu_functions(::infini::Registrar m);                                                         \
    STABLE_TORCH_LIBRARY_IMPL(infini, CPU, library) {                                                                  \
        register_cpu_functions({library, false});                                                                      \
    }                                                                                                                  \
    static void register_cpu_functions(::infini::Registrar m)
