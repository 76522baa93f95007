// silu, by libinfiniop's Silu.
#include "infinicore/ops/silu.hpp"

#include "call.h"

namespace infinicore::op {

namespace {

using Operator =
    COperator<infiniopCreateSiluDescriptor, infiniopGetSiluWorkspaceSize, infiniopSilu, infiniopDestroySiluDescriptor>;

void compute(Tensor output, Tensor input) {
    Operator::call("silu", {{"output", output, Argument::Write}, {"input", input}});
}

} // namespace

common::OpDispatcher<Silu::schema> &Silu::dispatcher() {
    static auto *const dispatcher = new common::OpDispatcher<schema>("silu", compute);
    return *dispatcher;
}

void Silu::execute(Tensor output, Tensor input) {
    dispatch(dispatcher(), compute, "silu", output, std::move(output), std::move(input));
}

void silu_(Tensor output, Tensor input) {
    Silu::execute(std::move(output), std::move(input));
}

Tensor silu(Tensor input) {
    Tensor output = result_like("silu", "input", input);
    silu_(output, std::move(input));
    return output;
}

} // namespace infinicore::op
