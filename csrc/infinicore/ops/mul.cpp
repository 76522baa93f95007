// mul, by libinfiniop's Mul.
#include "infinicore/ops/mul.hpp"

#include "call.h"

namespace infinicore::op {

namespace {

using Operator =
    COperator<infiniopCreateMulDescriptor, infiniopGetMulWorkspaceSize, infiniopMul, infiniopDestroyMulDescriptor>;

void compute(Tensor c, Tensor a, Tensor b) {
    Operator::call("mul", {{"c", c, Argument::Write}, {"a", a}, {"b", b}});
}

} // namespace

common::OpDispatcher<Mul::schema> &Mul::dispatcher() {
    static auto *const dispatcher = new common::OpDispatcher<schema>("mul", compute);
    return *dispatcher;
}

void Mul::execute(Tensor c, Tensor a, Tensor b) {
    dispatch(dispatcher(), compute, "mul", c, std::move(c), std::move(a), std::move(b));
}

void mul_(Tensor c, Tensor a, Tensor b) {
    Mul::execute(std::move(c), std::move(a), std::move(b));
}

Tensor mul(Tensor a, Tensor b) {
    Tensor c = result_like("mul", "a", a);
    mul_(c, std::move(a), std::move(b));
    return c;
}

} // namespace infinicore::op
