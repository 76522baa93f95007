// linear_add_: out = linear(input, weight, bias) + residual, with the bits of linear_ and add_; out may alias residual.
// An empty bias means no bias. InfiniCore has no op of that name; graphs use it in place of the two.
#pragma once

#include "infinicore/tensor.hpp"

namespace infinicore::op {

void linear_add_(Tensor out, Tensor input, Tensor weight, Tensor bias, Tensor residual);

} // namespace infinicore::op
