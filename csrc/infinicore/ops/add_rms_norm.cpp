// add_rms_norm, by libinfiniop's AddRMSNorm, which takes the tensors in another order.
#include "infinicore/ops/add_rms_norm.hpp"

#include "call.h"

namespace infinicore::op {

namespace {

using Desc = infiniopTensorDescriptor_t;

infiniStatus_t create(infiniopHandle_t handle, infiniopAddRMSNormDescriptor_t *desc, Desc y, Desc residual_out, Desc a,
                      Desc b, Desc weight, float epsilon) {
    return infiniopCreateAddRMSNormDescriptor(handle, desc, y, a, b, weight, epsilon, residual_out);
}

infiniStatus_t run(infiniopAddRMSNormDescriptor_t desc, void *workspace, size_t workspace_size, void *y,
                   void *residual_out, const void *a, const void *b, const void *weight, void *stream) {
    return infiniopAddRMSNorm(desc, workspace, workspace_size, y, a, b, weight, residual_out, stream);
}

using Operator = COperator<create, infiniopGetAddRMSNormWorkspaceSize, run, infiniopDestroyAddRMSNormDescriptor>;

void compute(Tensor y, Tensor residual_out, Tensor a, Tensor b, Tensor weight, float epsilon) {
    Operator::call("add_rms_norm",
                   {{"y", y, Argument::Write},
                    {"residual_out", residual_out, Argument::Write},
                    {"a", a},
                    {"b", b},
                    {"weight", weight}},
                   std::tuple{epsilon});
}

} // namespace

common::OpDispatcher<AddRMSNorm::schema> &AddRMSNorm::dispatcher() {
    static auto *const dispatcher = new common::OpDispatcher<schema>("add_rms_norm", compute);
    return *dispatcher;
}

void AddRMSNorm::execute(Tensor y, Tensor residual_out, Tensor a, Tensor b, Tensor weight, float epsilon) {
    dispatch(dispatcher(), compute, "add_rms_norm", y, std::move(y), std::move(residual_out), std::move(a),
             std::move(b), std::move(weight), std::move(epsilon));
}

void add_rms_norm_(Tensor y, Tensor residual_out, Tensor a, Tensor b, Tensor weight, float epsilon) {
    AddRMSNorm::execute(std::move(y), std::move(residual_out), std::move(a), std::move(b), std::move(weight), epsilon);
}

std::pair<Tensor, Tensor> add_rms_norm(Tensor a, Tensor b, Tensor weight, float epsilon) {
    Tensor y = result_like("add_rms_norm", "a", a);
    Tensor residual_out = result_like("add_rms_norm", "a", a);
    add_rms_norm_(y, residual_out, std::move(a), std::move(b), std::move(weight), epsilon);
    return {y, residual_out};
}

} // namespace infinicore::op
