// nn::RMSNorm.
#include "infinicore/nn/rmsnorm.hpp"

#include "../error.h"
#include "infinicore/ops/ones.hpp"
#include "infinicore/ops/rms_norm.hpp"

namespace infinicore::nn {

RMSNorm::RMSNorm(size_t normalized_shape, double eps, const DataType &dtype, const Device &device)
    : normalized_shape_(normalized_shape), eps_(eps), dtype_(dtype) {
    device_ = device;
    INFINICORE_NN_PARAMETER_INIT(weight, ({normalized_shape}, dtype, device));
    op::ones_(weight_);
}

Tensor RMSNorm::forward(const Tensor &x) const {
    return op::rms_norm(x, weight_, static_cast<float>(eps_));
}

std::string RMSNorm::extra_repr() const {
    return message("normalized_shape=", normalized_shape_, ", eps=", eps_, ", dtype=", toString(dtype_));
}

} // namespace infinicore::nn
