// linear, by libinfiniop's Linear.
#include "infinicore/ops/linear.hpp"

#include "call.h"

namespace infinicore::op {

namespace {

using Operator = COperator<infiniopCreateLinearDescriptor, infiniopGetLinearWorkspaceSize, infiniopLinear,
                           infiniopDestroyLinearDescriptor>;

const Tensor none;

} // namespace

void linear_(Tensor out, Tensor input, Tensor weight, std::optional<Tensor> bias) {
    Operator::call("linear", {{"out", out, Argument::Write},
                              {"input", input},
                              {"weight", weight},
                              {"bias", bias ? *bias : none, Argument::Read, true}});
}

Tensor linear(Tensor input, Tensor weight, std::optional<Tensor> bias) {
    if (input->ndim() == 0 || weight->ndim() != 2) {
        fail("infinicore::linear: input must have a dimension and weight two, got ", input->info(), " and ",
             weight->info());
    }
    Shape shape = input->shape();
    shape.back() = weight->size(0);
    Tensor out = Tensor::empty(shape, input->dtype(), input->device());
    linear_(out, std::move(input), std::move(weight), std::move(bias));
    return out;
}

} // namespace infinicore::op
