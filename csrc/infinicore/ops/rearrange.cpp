// rearrange, by libinfiniop's Rearrange.
#include "infinicore/ops/rearrange.hpp"

#include "call.h"

namespace infinicore::op {

namespace {

using Operator =
    COperator<infiniopCreateRearrangeDescriptor, nullptr, infiniopRearrange, infiniopDestroyRearrangeDescriptor>;

void compute(Tensor y, Tensor x) {
    Operator::call("rearrange", {{"y", y, Argument::Write}, {"x", x}});
}

} // namespace

common::OpDispatcher<Rearrange::schema> &Rearrange::dispatcher() {
    static auto *const dispatcher = new common::OpDispatcher<schema>("rearrange", compute);
    return *dispatcher;
}

void Rearrange::execute(Tensor y, Tensor x) {
    dispatch(dispatcher(), compute, "rearrange", y, std::move(y), std::move(x));
}

void rearrange_(Tensor y, Tensor x) {
    Rearrange::execute(std::move(y), std::move(x));
}

Tensor rearrange(Tensor x) {
    Tensor y = result_like("rearrange", "x", x);
    rearrange_(y, std::move(x));
    return y;
}

} // namespace infinicore::op
