// nn::Linear and its tensor-parallel forms.
#include "infinicore/nn/linear.hpp"

#include "../error.h"
#include "all_reduce.h"
#include "infinicore/ops/add.hpp"
#include "infinicore/ops/linear.hpp"

namespace infinicore::nn {

namespace {

std::optional<Tensor> present(const Tensor &bias) {
    return bias ? std::optional<Tensor>(bias) : std::nullopt;
}

std::string of_ranks(Size tp_rank, Size tp_size) {
    return message(", tp_rank=", tp_rank, ", tp_size=", tp_size);
}

} // namespace

BaseLinear::BaseLinear(size_t in_features, size_t out_features, bool bias, const DataType &dtype, const Device &device)
    : in_features_(in_features), out_features_(out_features), has_bias_(bias), dtype_(dtype) {
    device_ = device;
}

Tensor BaseLinear::compute_linear(Tensor &input) const {
    return op::linear(input, weight_, present(bias_));
}

Tensor BaseLinear::forward(Tensor &input) const {
    return compute_linear(input);
}

Tensor BaseLinear::forward(Tensor &input, Tensor &residual) const {
    Tensor output = forward(input);
    op::add_(output, output, residual);
    return output;
}

std::string BaseLinear::features_repr() const {
    return message("in_features=", in_features_, ", out_features=", out_features_,
                   ", bias=", has_bias_ ? "true" : "false", ", dtype=", toString(dtype_));
}

Linear::Linear(size_t in_features, size_t out_features, bool bias, const DataType &dtype, const Device &device)
    : BaseLinear(in_features, out_features, bias, dtype, device) {
    INFINICORE_NN_PARAMETER_INIT(weight, ({out_features, in_features}, dtype, device));
    if (bias) {
        INFINICORE_NN_PARAMETER_INIT(bias, ({out_features}, dtype, device));
    }
}

Tensor Linear::forward(Tensor &input) const {
    return compute_linear(input);
}

std::string Linear::extra_repr() const {
    return features_repr();
}

ColumnParallelLinear::ColumnParallelLinear(size_t in_features, size_t out_features, bool bias, const DataType &dtype,
                                           const Device &device, Size tp_rank, Size tp_size)
    : BaseLinear(in_features, out_features, bias, dtype, device), tp_rank_(tp_rank), tp_size_(tp_size) {
    INFINICORE_NN_PARAMETER_INIT(weight, ({out_features, in_features}, dtype, device, 0, tp_rank, tp_size));
    if (bias) {
        INFINICORE_NN_PARAMETER_INIT(bias, ({out_features}, dtype, device, 0, tp_rank, tp_size));
    }
}

Tensor ColumnParallelLinear::forward(Tensor &input) const {
    return compute_linear(input);
}

std::string ColumnParallelLinear::extra_repr() const {
    return features_repr() + of_ranks(tp_rank_, tp_size_);
}

RowParallelLinear::RowParallelLinear(size_t in_features, size_t out_features, bool bias, const DataType &dtype,
                                     const Device &device, Size tp_rank, Size tp_size, infinicclComm_t communicator)
    : BaseLinear(in_features, out_features, bias, dtype, device), tp_rank_(tp_rank), tp_size_(tp_size),
      communicator_(communicator) {
    INFINICORE_NN_PARAMETER_INIT(weight, ({out_features, in_features}, dtype, device, 1, tp_rank, tp_size));
    if (bias) {
        INFINICORE_NN_PARAMETER_INIT(bias, ({out_features}, dtype, device));
    }
}

Tensor RowParallelLinear::forward(Tensor &input) const {
    Tensor output = op::linear(input, weight_, tp_rank_ == 0 ? present(bias_) : std::nullopt);
    if (tp_size_ > 1 && communicator_ != nullptr) {
        all_reduce_(output, communicator_);
    }
    return output;
}

std::string RowParallelLinear::extra_repr() const {
    return features_repr() + of_ranks(tp_rank_, tp_size_);
}

} // namespace infinicore::nn
