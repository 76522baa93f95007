// linear: out = input weight^T + bias, for input [..., in features] and weight [out features, in features].
#pragma once

#include <optional>

#include "../tensor.hpp"
#include "common/dispatcher.hpp"

namespace infinicore::op {

Tensor linear(Tensor input, Tensor weight, std::optional<Tensor> bias);
void linear_(Tensor out, Tensor input, Tensor weight, std::optional<Tensor> bias);

} // namespace infinicore::op
