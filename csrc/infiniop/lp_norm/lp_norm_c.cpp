// infiniopLPNorm.
#include "c_api.h"
#include "lp_norm.h"

namespace {

using namespace infini;
using lp_norm::Args;

constexpr lp_norm::Names kNames{"output", "input", "axis"};

constexpr c_api::COp<Args> kOp(
    "LPNorm", lp_norm::kernels, [](const Args &args) { lp_norm::check(args, kNames); },
    [](const ExecutionContext &context, const Args &args) { lp_norm::run(context, args, kNames); });

} // namespace

infiniStatus_t infiniopCreateLPNormDescriptor(infiniopHandle_t handle, infiniopLPNormDescriptor_t *desc_ptr,
                                              infiniopTensorDescriptor_t output_desc,
                                              infiniopTensorDescriptor_t input_desc, int axis, int p, float eps) {
    return kOp.create(handle, desc_ptr, [&](Args &args, const c_api::Tensors &tensor) {
        args.y = tensor("output_desc", output_desc);
        args.x = tensor("input_desc", input_desc);
        args.axis = axis;
        args.p = p;
        args.eps = eps;
    });
}

INFINIOP_WORKSPACE_SIZE(LPNorm, kOp)

infiniStatus_t infiniopLPNorm(infiniopLPNormDescriptor_t desc, void *workspace, size_t workspace_size, void *output,
                              const void *input, void *stream) {
    return kOp.launch(desc, workspace, workspace_size, stream, [&](Args &args, const c_api::Memory &memory) {
        memory(args.y, "output", output);
        memory(args.x, "input", input);
    });
}

INFINIOP_DESTROY(LPNorm, kOp)
