// infiniopLinear.
#include "c_api.h"
#include "linear.h"

namespace {

using namespace infini;
using linear::Args;

void check(const Args &args) {
    linear::check_inputs(linear::kLinear, args);
    linear::check_output(linear::kLinear, args);
}

void check_and_run(const ExecutionContext &context, const Args &args) {
    check(args);
    linear::run(context, args);
}

constexpr c_api::COp<Args> kOp("Linear", linear::kernels, check, check_and_run, linear::workspace_bytes);

} // namespace

infiniStatus_t infiniopCreateLinearDescriptor(infiniopHandle_t handle, infiniopLinearDescriptor_t *desc_ptr,
                                              infiniopTensorDescriptor_t out_desc, infiniopTensorDescriptor_t x_desc,
                                              infiniopTensorDescriptor_t weight_desc,
                                              infiniopTensorDescriptor_t bias_desc) {
    return kOp.create(handle, desc_ptr, [&](Args &args, const c_api::Tensors &tensor) {
        args.y = tensor("out_desc", out_desc);
        args.x = tensor("x_desc", x_desc);
        args.weight[0] = tensor("weight_desc", weight_desc);
        args.bias[0] = tensor.optional("bias_desc", bias_desc);
    });
}

INFINIOP_WORKSPACE_SIZE(Linear, kOp)

infiniStatus_t infiniopLinear(infiniopLinearDescriptor_t desc, void *workspace, size_t workspace_size, void *out,
                              const void *x, const void *weight, const void *bias, void *stream) {
    return kOp.launch(desc, workspace, workspace_size, stream, [&](Args &args, const c_api::Memory &memory) {
        memory(args.y, "out", out);
        memory(args.x, "x", x);
        memory(args.weight[0], "weight", weight);
        memory(args.bias[0], "bias", bias);
    });
}

INFINIOP_DESTROY(Linear, kOp)
