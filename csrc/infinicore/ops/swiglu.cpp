// swiglu, by libinfiniop's SwiGLU.
#include "infinicore/ops/swiglu.hpp"

#include "call.h"

namespace infinicore::op {

namespace {

using Operator = COperator<infiniopCreateSwiGLUDescriptor, infiniopGetSwiGLUWorkspaceSize, infiniopSwiGLU,
                           infiniopDestroySwiGLUDescriptor>;

void compute(Tensor c, Tensor a, Tensor b) {
    Operator::call("swiglu", {{"c", c, Argument::Write}, {"a", a}, {"b", b}});
}

} // namespace

common::OpDispatcher<SwiGLU::schema> &SwiGLU::dispatcher() {
    static auto *const dispatcher = new common::OpDispatcher<schema>("swiglu", compute);
    return *dispatcher;
}

void SwiGLU::execute(Tensor c, Tensor a, Tensor b) {
    dispatch(dispatcher(), compute, "swiglu", c, std::move(c), std::move(a), std::move(b));
}

void swiglu_(Tensor c, Tensor a, Tensor b) {
    SwiGLU::execute(std::move(c), std::move(a), std::move(b));
}

Tensor swiglu(Tensor a, Tensor b) {
    Tensor c = result_like("swiglu", "a", a);
    swiglu_(c, std::move(a), std::move(b));
    return c;
}

} // namespace infinicore::op
