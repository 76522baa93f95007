// infiniopTopksoftmax and infiniopTopkrouter.
#include "c_api.h"
#include "topk.h"

namespace {

using namespace infini;
using topk::Args;

constexpr topk::Names kNames{"values", "indices", "topk"};

void check(const Args &args) {
    topk::check(args, kNames);
}

void run(const ExecutionContext &context, const Args &args) {
    topk::run(context, args, kNames);
}

constexpr c_api::COp<Args> kSoftmax("Topksoftmax", topk::softmax_kernels, check, run);
constexpr c_api::COp<Args> kRouter("Topkrouter", topk::router_kernels, check, run);

} // namespace

infiniStatus_t infiniopCreateTopksoftmaxDescriptor(infiniopHandle_t handle, infiniopTopksoftmaxDescriptor_t *desc_ptr,
                                                   infiniopTensorDescriptor_t x_desc) {
    return kSoftmax.create(handle, desc_ptr,
                           [&](Args &args, const c_api::Tensors &tensor) { args.x = tensor("x_desc", x_desc); });
}

INFINIOP_WORKSPACE_SIZE(Topksoftmax, kSoftmax)

infiniStatus_t infiniopTopksoftmax(infiniopTopksoftmaxDescriptor_t desc, void *workspace, size_t workspace_size,
                                   void *values, void *indices, const void *x, size_t topk, int norm, void *stream) {
    return kSoftmax.launch(desc, workspace, workspace_size, stream, [&](Args &args, const c_api::Memory &memory) {
        topk::set_topk(args, topk);
        args.normalize = norm != 0;
        memory(args.values, "values", values);
        memory(args.indices, "indices", indices);
        memory(args.x, "x", x);
    });
}

INFINIOP_DESTROY(Topksoftmax, kSoftmax)

infiniStatus_t infiniopCreateTopkrouterDescriptor(infiniopHandle_t handle, infiniopTopkrouterDescriptor_t *desc_ptr,
                                                  infiniopTensorDescriptor_t x_desc,
                                                  infiniopTensorDescriptor_t correction_bias_desc) {
    return kRouter.create(handle, desc_ptr, [&](Args &args, const c_api::Tensors &tensor) {
        args.x = tensor("x_desc", x_desc);
        args.bias = tensor("correction_bias_desc", correction_bias_desc);
    });
}

INFINIOP_WORKSPACE_SIZE(Topkrouter, kRouter)

infiniStatus_t infiniopTopkrouter(infiniopTopkrouterDescriptor_t desc, void *workspace, size_t workspace_size,
                                  void *values, void *indices, const void *x, const void *correction_bias,
                                  float routed_scaling_factor, size_t topk, void *stream) {
    return kRouter.launch(desc, workspace, workspace_size, stream, [&](Args &args, const c_api::Memory &memory) {
        topk::set_topk(args, topk);
        args.scale = routed_scaling_factor;
        memory(args.values, "values", values);
        memory(args.indices, "indices", indices);
        memory(args.x, "x", x);
        memory(args.bias, "correction_bias", correction_bias);
    });
}

INFINIOP_DESTROY(Topkrouter, kRouter)
