// infiniopLayerNorm.
#include "c_api.h"
#include "layer_norm.h"

namespace {

using namespace infini;
using layer_norm::Args;

constexpr layer_norm::Names kNames{"output", "input", "to match the last dimension of input"};

constexpr c_api::COp<Args> kOp(
    "LayerNorm", layer_norm::kernels, [](const Args &args) { layer_norm::check(args, kNames); },
    [](const ExecutionContext &context, const Args &args) { layer_norm::run(context, args, kNames); });

} // namespace

infiniStatus_t infiniopCreateLayerNormDescriptor(infiniopHandle_t handle, infiniopLayerNormDescriptor_t *desc_ptr,
                                                 infiniopTensorDescriptor_t output_desc,
                                                 infiniopTensorDescriptor_t input_standardization_desc,
                                                 infiniopTensorDescriptor_t input_std_deviation_desc,
                                                 infiniopTensorDescriptor_t input_desc,
                                                 infiniopTensorDescriptor_t weight_desc,
                                                 infiniopTensorDescriptor_t bias_desc, float eps) {
    return kOp.create(handle, desc_ptr, [&](Args &args, const c_api::Tensors &tensor) {
        args.output = tensor("output_desc", output_desc);
        args.standardization = tensor("input_standardization_desc", input_standardization_desc);
        args.deviation = tensor("input_std_deviation_desc", input_std_deviation_desc);
        args.input = tensor("input_desc", input_desc);
        args.weight = tensor("weight_desc", weight_desc);
        args.bias = tensor.optional("bias_desc", bias_desc);
        args.eps = eps;
    });
}

INFINIOP_WORKSPACE_SIZE(LayerNorm, kOp)

infiniStatus_t infiniopLayerNorm(infiniopLayerNormDescriptor_t desc, void *workspace, size_t workspace_size,
                                 void *output, void *input_standardization, void *input_std_deviation,
                                 const void *input, const void *weight, const void *bias, void *stream) {
    return kOp.launch(desc, workspace, workspace_size, stream, [&](Args &args, const c_api::Memory &memory) {
        memory(args.output, "output", output);
        memory(args.standardization, "input_standardization", input_standardization);
        memory(args.deviation, "input_std_deviation", input_std_deviation);
        memory(args.input, "input", input);
        memory(args.weight, "weight", weight);
        memory(args.bias, "bias", bias);
    });
}

INFINIOP_DESTROY(LayerNorm, kOp)
