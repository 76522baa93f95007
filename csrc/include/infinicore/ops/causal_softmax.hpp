// causal_softmax: softmax over the last dimension of [..., q, k], in which row i sees columns j <= k - q + i. In place.
#pragma once

#include "../tensor.hpp"
#include "common/dispatcher.hpp"

namespace infinicore::op {

class CausalSoftmax {
public:
    using schema = void (*)(Tensor, Tensor);
    static void execute(Tensor output, Tensor input);
    static common::OpDispatcher<schema> &dispatcher();
};

Tensor causal_softmax(Tensor input);
void causal_softmax_(Tensor output, Tensor input);

} // namespace infinicore::op
