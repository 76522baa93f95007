// infiniopRMSNorm and infiniopAddRMSNorm.
#include "c_api.h"
#include "rms_norm.h"

namespace {

using namespace infini;
using rms_norm::Args;

constexpr c_api::COp<Args> kNorm(
    "RMSNorm", rms_norm::kernels, [](const Args &args) { rms_norm::check("rms_norm", args); },
    [](const ExecutionContext &context, const Args &args) { rms_norm::run(context, "rms_norm", args); });

constexpr c_api::COp<Args> kAddNorm(
    "AddRMSNorm", rms_norm::kernels, [](const Args &args) { rms_norm::check("add_rms_norm", args); },
    [](const ExecutionContext &context, const Args &args) { rms_norm::run(context, "add_rms_norm", args); });

} // namespace

infiniStatus_t infiniopCreateRMSNormDescriptor(infiniopHandle_t handle, infiniopRMSNormDescriptor_t *desc_ptr,
                                               infiniopTensorDescriptor_t y_desc, infiniopTensorDescriptor_t x_desc,
                                               infiniopTensorDescriptor_t w_desc, float epsilon) {
    return kNorm.create(handle, desc_ptr, [&](Args &args, const c_api::Tensors &tensor) {
        args.y = tensor("y_desc", y_desc);
        args.x = tensor("x_desc", x_desc);
        args.weight = tensor("w_desc", w_desc);
        args.eps = epsilon;
    });
}

INFINIOP_WORKSPACE_SIZE(RMSNorm, kNorm)

infiniStatus_t infiniopRMSNorm(infiniopRMSNormDescriptor_t desc, void *workspace, size_t workspace_size, void *y,
                               const void *x, const void *w, void *stream) {
    return kNorm.launch(desc, workspace, workspace_size, stream, [&](Args &args, const c_api::Memory &memory) {
        memory(args.y, "y", y);
        memory(args.x, "x", x);
        memory(args.weight, "w", w);
    });
}

INFINIOP_DESTROY(RMSNorm, kNorm)

infiniStatus_t infiniopCreateAddRMSNormDescriptor(infiniopHandle_t handle, infiniopAddRMSNormDescriptor_t *desc_ptr,
                                                  infiniopTensorDescriptor_t y_desc, infiniopTensorDescriptor_t a_desc,
                                                  infiniopTensorDescriptor_t b_desc,
                                                  infiniopTensorDescriptor_t weight_desc, float epsilon,
                                                  infiniopTensorDescriptor_t residual_out_desc) {
    return kAddNorm.create(handle, desc_ptr, [&](Args &args, const c_api::Tensors &tensor) {
        args.y = tensor("y_desc", y_desc);
        args.x = tensor("a_desc", a_desc);
        args.residual = tensor("b_desc", b_desc);
        args.weight = tensor("weight_desc", weight_desc);
        args.eps = epsilon;
        if (residual_out_desc == nullptr) { // BAD_PARAM, which callers of the interface expect, instead of NULL_POINTER
            throw Error(INFINI_STATUS_BAD_PARAM, message(tensor.function(), ": residual_out_desc must not be NULL"));
        }
        args.h = tensor("residual_out_desc", residual_out_desc);
    });
}

INFINIOP_WORKSPACE_SIZE(AddRMSNorm, kAddNorm)

infiniStatus_t infiniopAddRMSNorm(infiniopAddRMSNormDescriptor_t desc, void *workspace, size_t workspace_size, void *y,
                                  const void *a, const void *b, const void *weight, void *residual_out, void *stream) {
    return kAddNorm.launch(desc, workspace, workspace_size, stream, [&](Args &args, const c_api::Memory &memory) {
        memory(args.y, "y", y);
        memory(args.x, "a", a);
        memory(args.residual, "b", b);
        memory(args.weight, "weight", weight);
        memory(args.h, "residual_out", residual_out);
    });
}

INFINIOP_DESTROY(AddRMSNorm, kAddNorm)
