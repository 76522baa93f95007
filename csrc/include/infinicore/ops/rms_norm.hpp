// rms_norm: y = x / sqrt(mean(x^2) + epsilon) * weight over the last dimension. In place.
#pragma once

#include "../tensor.hpp"
#include "common/dispatcher.hpp"

namespace infinicore::op {

class RMSNorm {
public:
    using schema = void (*)(Tensor, Tensor, Tensor, float);
    static void execute(Tensor y, Tensor x, Tensor weight, float epsilon = 1e-5f);
    static common::OpDispatcher<schema> &dispatcher();
};

Tensor rms_norm(Tensor x, Tensor weight, float epsilon = 1e-5f);
void rms_norm_(Tensor y, Tensor x, Tensor weight, float epsilon = 1e-5f);

} // namespace infinicore::op
