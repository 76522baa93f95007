// add_rms_norm: residual_out = a + b, y = rms_norm(residual_out, weight, epsilon), in one pass. In place with a or b.
#pragma once

#include <utility>

#include "../tensor.hpp"
#include "common/dispatcher.hpp"

namespace infinicore::op {

class AddRMSNorm {
public:
    using schema = void (*)(Tensor, Tensor, Tensor, Tensor, Tensor, float);
    static void execute(Tensor y, Tensor residual_out, Tensor a, Tensor b, Tensor weight, float epsilon = 1e-5f);
    static common::OpDispatcher<schema> &dispatcher();
};

// (y, residual_out)
std::pair<Tensor, Tensor> add_rms_norm(Tensor a, Tensor b, Tensor weight, float epsilon = 1e-5f);
void add_rms_norm_(Tensor y, Tensor residual_out, Tensor a, Tensor b, Tensor weight, float epsilon = 1e-5f);

} // namespace infinicore::op
