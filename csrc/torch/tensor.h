// Between torch and the kernels, on the LibTorch stable ABI: a TensorView of a torch tensor, and new output tensors.
// Only *_torch.cpp files include it. INFINI_TORCH_LIBRARY(m) { m.impl("rms_norm", TORCH_BOX(&rms_norm)); } registers
// implementations for the CPU; schemas and fakes are declared in torch_infini/ops/<op>.py.
#pragma once

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

} // namespace infini

#define INFINI_TORCH_LIBRARY(m) STABLE_TORCH_LIBRARY_IMPL(infini, CPU, m)
