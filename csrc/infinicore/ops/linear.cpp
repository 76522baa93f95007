// linear, by libinfiniop's Linear; and linear_add_, by LinearAdd.
#include "infinicore/ops/linear.hpp"

#include "call.h"
#include "linear_add.h"

namespace infinicore::op {

namespace {

using Operator = COperator<infiniopCreateLinearDescriptor, infiniopGetLinearWorkspaceSize, infiniopLinear,
                           infiniopDestroyLinearDescriptor>;

using Sum = COperator<infiniopCreateLinearAddDescriptor, infiniopGetLinearAddWorkspaceSize, infiniopLinearAdd,
                      infiniopDestroyLinearAddDescriptor>;

const Tensor none;

} // namespace

void linear_(Tensor out, Tensor input, Tensor weight, std::optional<Tensor> bias) {
    Operator::call("linear", {{"out", out, Argument::Write},
                              {"input", input},
                              {"weight", weight},
                              {"bias", bias ? *bias : none, Argument::Read, true}});
}

void linear_add_(Tensor out, Tensor input, Tensor weight, Tensor bias, Tensor residual) {
    Sum::call("linear_add", {{"out", out, Argument::Write},
                             {"input", input},
                             {"weight", weight},
                             {"bias", bias, Argument::Read, true},
                             {"residual", residual}});
}

Tensor linear(Tensor input, Tensor weight, std::optional<Tensor> bias) {
    if (present("linear", "input", input)->ndim() == 0 || present("linear", "weight", weight)->ndim() != 2) {
        fail("infinicore::linear: input must have a dimension and weight two, got ", input->info(), " and ",
             weight->info());
    }
    Shape shape = input->shape();
    shape.back() = weight->size(0);
    Tensor out = new_result("linear", "input", input, shape, input->dtype());
    linear_(out, std::move(input), std::move(weight), std::move(bias));
    return out;
}

} // namespace infinicore::op
