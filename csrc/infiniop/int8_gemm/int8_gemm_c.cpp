// infiniopI8Gemm.
#include "c_api.h"
#include "int8_gemm.h"

namespace {

using namespace infini;
using int8_gemm::Args;

constexpr c_api::COp<Args> kOp(
    "I8Gemm", int8_gemm::kernels, [](const Args &args) { int8_gemm::check(args, int8_gemm::kNames); },
    [](const ExecutionContext &context, const Args &args) { int8_gemm::run(context, args, int8_gemm::kNames); },
    int8_gemm::workspace_size);

} // namespace

infiniStatus_t infiniopCreateI8GemmDescriptor(infiniopHandle_t handle, infiniopI8GemmDescriptor_t *desc_ptr,
                                              infiniopTensorDescriptor_t out_desc, infiniopTensorDescriptor_t bias_desc,
                                              infiniopTensorDescriptor_t x_desc,
                                              infiniopTensorDescriptor_t x_scale_desc,
                                              infiniopTensorDescriptor_t weights_desc,
                                              infiniopTensorDescriptor_t weights_scale_desc) {
    return kOp.create(handle, desc_ptr, [&](Args &args, const c_api::Tensors &tensor) {
        args.out = tensor("out_desc", out_desc);
        args.bias = tensor.optional("bias_desc", bias_desc);
        args.x = tensor("x_desc", x_desc);
        args.x_scale = tensor("x_scale_desc", x_scale_desc);
        args.weights = tensor("weights_desc", weights_desc);
        args.weights_scale = tensor("weights_scale_desc", weights_scale_desc);
        int8_gemm::squeeze(args);
        if (!tensor.context().is_cpu()) {
            args.slice_bytes = many_rows::slice_bytes(); // read now, because the workspace's size depends on it
        }
    });
}

INFINIOP_WORKSPACE_SIZE(I8Gemm, kOp)

infiniStatus_t infiniopI8Gemm(infiniopI8GemmDescriptor_t desc, void *workspace, size_t workspace_size, void *out,
                              const void *bias, const void *x, const void *x_scale, const void *weights,
                              const void *weights_scale, void *stream) {
    return kOp.launch(desc, workspace, workspace_size, stream, [&](Args &args, const c_api::Memory &memory) {
        memory(args.out, "out", out);
        if (bias == nullptr) {
            args.bias.dtype = INFINI_DTYPE_INVALID; // described, but no address given: no bias
        } else {
            memory(args.bias, "bias", bias);
        }
        memory(args.x, "x", x);
        memory(args.x_scale, "x_scale", x_scale);
        memory(args.weights, "weights", weights);
        memory(args.weights_scale, "weights_scale", weights_scale);
    });
}

INFINIOP_DESTROY(I8Gemm, kOp)
