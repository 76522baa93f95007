// rms_norm, by libinfiniop's RMSNorm.
#include "infinicore/ops/rms_norm.hpp"

#include "call.h"

namespace infinicore::op {

namespace {

using Operator = COperator<infiniopCreateRMSNormDescriptor, infiniopGetRMSNormWorkspaceSize, infiniopRMSNorm,
                           infiniopDestroyRMSNormDescriptor>;

void compute(Tensor y, Tensor x, Tensor weight, float epsilon) {
    Operator::call("rms_norm", {{"y", y, Argument::Write}, {"x", x}, {"weight", weight}}, std::tuple{epsilon});
}

} // namespace

common::OpDispatcher<RMSNorm::schema> &RMSNorm::dispatcher() {
    static auto *const dispatcher = new common::OpDispatcher<schema>("rms_norm", compute);
    return *dispatcher;
}

void RMSNorm::execute(Tensor y, Tensor x, Tensor weight, float epsilon) {
    dispatch(dispatcher(), compute, "rms_norm", y, std::move(y), std::move(x), std::move(weight), std::move(epsilon));
}

void rms_norm_(Tensor y, Tensor x, Tensor weight, float epsilon) {
    RMSNorm::execute(std::move(y), std::move(x), std::move(weight), epsilon);
}

Tensor rms_norm(Tensor x, Tensor weight, float epsilon) {
    Tensor y = result_like("rms_norm", "x", x);
    rms_norm_(y, std::move(x), std::move(weight), epsilon);
    return y;
}

} // namespace infinicore::op
