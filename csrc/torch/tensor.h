// Between torch and the kernels, on the LibTorch stable ABI: a TensorView of a torch tensor, and new output tensors.
// Only *_torch.cpp files include it. INFINI_TORCH_LIBRARY(m) { m.impl("rms_norm", TORCH_BOX(&rms_norm)); } registers
// implementations for the CPU; schemas and fakes are declared in torch_infini/ops/<op>.py.
#pragma once

#include <optional>
#include <type_traits>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "check.h"
#include "tensor_view.h"

namespace infini {

using torch::stable::Tensor;

// The view of a CPU tensor. Throws where the device, the layout or the number of dimensions cannot be served.
TensorView view(const Checker &rule, const char *argument, const Tensor &tensor);

// A new contiguous CPU tensor, uninitialised: of a given shape, or of the shape and dtype of `like`.
Tensor empty(std::initializer_list<int64_t> shape, infiniDtype_t dtype);
Tensor empty_like(const TensorView &like);
Tensor empty_like(const TensorView &like, infiniDtype_t dtype);

// Throws if autograd is on and the tensor was computed from one that requires a gradient; `index` counts from 1.
void refuse_gradient(const Checker &rule, int index, const Tensor &tensor);

// An op that writes into its arguments and returns nothing, behind a check: with a result torch itself objects when a
// gradient is asked for, without one it would be lost unseen.
template <auto function, const Checker &rule> struct Writer;

template <typename... Arguments, void (*function)(Arguments...), const Checker &rule> struct Writer<function, rule> {
    static void call(Arguments... arguments) {
        if (aoti_torch_grad_mode_is_enabled()) {
            int index = 0;
            (check(++index, arguments), ...);
        }
        function(arguments...);
    }

private:
    template <typename Argument> static void check(int index, const Argument &argument) {
        if constexpr (std::is_same_v<Argument, Tensor>) {
            refuse_gradient(rule, index, argument);
        } else if constexpr (std::is_same_v<Argument, std::optional<Tensor>>) {
            if (argument) {
                refuse_gradient(rule, index, *argument);
            }
        }
    }
};

} // namespace infini

// TORCH_BOX for such an op: m.impl("rope_", INFINI_WRITER(rope_, kRope)).
#define INFINI_WRITER(function, rule) TORCH_BOX((&::infini::Writer<&function, rule>::call))

#define INFINI_TORCH_LIBRARY(m) STABLE_TORCH_LIBRARY_IMPL(infini, CPU, m)
