// zeros_: fills a tensor of any dtype with 0. InfiniCore has no op of that name; Tensor::zeros uses it.
#pragma once

#include "infinicore/tensor.hpp"

namespace infinicore::op {

void zeros_(Tensor output);

} // namespace infinicore::op
