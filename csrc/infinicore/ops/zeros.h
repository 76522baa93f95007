// zeros_: 0 in every element of a tensor of any dtype. InfiniCore has no op of that name; Tensor::zeros uses it.
#pragma once

#include "infinicore/tensor.hpp"

namespace infinicore::op {

void zeros_(Tensor output);

} // namespace infinicore::op
