// add, by libinfiniop's Add.
#include "infinicore/ops/add.hpp"

#include "call.h"

namespace infinicore::op {

namespace {

using Operator =
    COperator<infiniopCreateAddDescriptor, infiniopGetAddWorkspaceSize, infiniopAdd, infiniopDestroyAddDescriptor>;

void compute(Tensor c, Tensor a, Tensor b) {
    Operator::call("add", {{"c", c, Argument::Write}, {"a", a}, {"b", b}});
}

} // namespace

common::OpDispatcher<Add::schema> &Add::dispatcher() {
    static auto *const dispatcher = new common::OpDispatcher<schema>("add", compute);
    return *dispatcher;
}

void Add::execute(Tensor c, Tensor a, Tensor b) {
    dispatch(dispatcher(), compute, "add", c, std::move(c), std::move(a), std::move(b));
}

void add_(Tensor c, Tensor a, Tensor b) {
    Add::execute(std::move(c), std::move(a), std::move(b));
}

Tensor add(Tensor a, Tensor b) {
    Tensor c = result_like("add", "a", a);
    add_(c, std::move(a), std::move(b));
    return c;
}

Tensor operator+(Tensor a, Tensor b) {
    return add(std::move(a), std::move(b));
}

} // namespace infinicore::op
