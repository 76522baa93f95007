// infiniopLinear and infiniopLinearAdd.
#include "c_api.h"
#include "linear.h"

namespace {

using namespace infini;
using linear::Args;

template <const linear::Op &kOp> void check(const Args &args) {
    linear::check_inputs(kOp, args);
    linear::check_output(kOp, args);
}

template <const linear::Op &kOp> void check_and_run(const ExecutionContext &context, const Args &args) {
    check<kOp>(args);
    linear::run(context, args);
}

template <const linear::Op &kOp> constexpr c_api::COp<Args> c_op(const char *name) {
    return c_api::COp<Args>(name, linear::kernels, check<kOp>, check_and_run<kOp>, linear::workspace_bytes);
}

constexpr c_api::COp<Args> kLinear = c_op<linear::kLinear>("Linear");
constexpr c_api::COp<Args> kLinearAdd = c_op<linear::kLinearAdd>("LinearAdd");

} // namespace

infiniStatus_t infiniopCreateLinearDescriptor(infiniopHandle_t handle, infiniopLinearDescriptor_t *desc_ptr,
                                              infiniopTensorDescriptor_t out_desc, infiniopTensorDescriptor_t x_desc,
                                              infiniopTensorDescriptor_t weight_desc,
                                              infiniopTensorDescriptor_t bias_desc) {
    return kLinear.create(handle, desc_ptr, [&](Args &args, const c_api::Tensors &tensor) {
        args.y = tensor("out_desc", out_desc);
        args.x = tensor("x_desc", x_desc);
        args.weight[0] = tensor("weight_desc", weight_desc);
        args.bias[0] = tensor.optional("bias_desc", bias_desc);
    });
}

INFINIOP_WORKSPACE_SIZE(Linear, kLinear)

infiniStatus_t infiniopLinear(infiniopLinearDescriptor_t desc, void *workspace, size_t workspace_size, void *out,
                              const void *x, const void *weight, const void *bias, void *stream) {
    return kLinear.launch(desc, workspace, workspace_size, stream, [&](Args &args, const c_api::Memory &memory) {
        memory(args.y, "out", out);
        memory(args.x, "x", x);
        memory(args.weight[0], "weight", weight);
        memory(args.bias[0], "bias", bias);
    });
}

INFINIOP_DESTROY(Linear, kLinear)

infiniStatus_t infiniopCreateLinearAddDescriptor(infiniopHandle_t handle, infiniopLinearAddDescriptor_t *desc_ptr,
                                                 infiniopTensorDescriptor_t out_desc, infiniopTensorDescriptor_t x_desc,
                                                 infiniopTensorDescriptor_t weight_desc,
                                                 infiniopTensorDescriptor_t bias_desc,
                                                 infiniopTensorDescriptor_t residual_desc) {
    return kLinearAdd.create(handle, desc_ptr, [&](Args &args, const c_api::Tensors &tensor) {
        args.y = tensor("out_desc", out_desc);
        args.x = tensor("x_desc", x_desc);
        args.weight[0] = tensor("weight_desc", weight_desc);
        args.bias[0] = tensor.optional("bias_desc", bias_desc);
        args.residual = tensor("residual_desc", residual_desc);
    });
}

INFINIOP_WORKSPACE_SIZE(LinearAdd, kLinearAdd)

infiniStatus_t infiniopLinearAdd(infiniopLinearAddDescriptor_t desc, void *workspace, size_t workspace_size, void *out,
                                 const void *x, const void *weight, const void *bias, const void *residual,
                                 void *stream) {
    return kLinearAdd.launch(desc, workspace, workspace_size, stream, [&](Args &args, const c_api::Memory &memory) {
        memory(args.y, "out", out);
        memory(args.x, "x", x);
        memory(args.weight[0], "weight", weight);
        memory(args.bias[0], "bias", bias);
        memory(args.residual, "residual", residual);
    });
}

INFINIOP_DESTROY(LinearAdd, kLinearAdd)
