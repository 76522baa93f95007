// causal_softmax, by libinfiniop's CausalSoftmax.
#include "infinicore/ops/causal_softmax.hpp"

#include "call.h"

namespace infinicore::op {

namespace {

using Operator = COperator<infiniopCreateCausalSoftmaxDescriptor, infiniopGetCausalSoftmaxWorkspaceSize,
                           infiniopCausalSoftmax, infiniopDestroyCausalSoftmaxDescriptor>;

void compute(Tensor output, Tensor input) {
    Operator::call("causal_softmax", {{"output", output, Argument::Write}, {"input", input}});
}

} // namespace

common::OpDispatcher<CausalSoftmax::schema> &CausalSoftmax::dispatcher() {
    static auto *const dispatcher = new common::OpDispatcher<schema>("causal_softmax", compute);
    return *dispatcher;
}

void CausalSoftmax::execute(Tensor output, Tensor input) {
    dispatch(dispatcher(), compute, "causal_softmax", output, std::move(output), std::move(input));
}

void causal_softmax_(Tensor output, Tensor input) {
    CausalSoftmax::execute(std::move(output), std::move(input));
}

Tensor causal_softmax(Tensor input) {
    Tensor output = result_like("causal_softmax", "input", input);
    causal_softmax_(output, std::move(input));
    return output;
}

} // namespace infinicore::op
