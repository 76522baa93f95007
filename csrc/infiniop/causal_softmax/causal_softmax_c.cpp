// infiniopCausalSoftmax.
#include "c_api.h"
#include "causal_softmax.h"

namespace {

using namespace infini;
using causal_softmax::Args;

constexpr c_api::COp<Args> kOp("CausalSoftmax", causal_softmax::kernels, causal_softmax::check, causal_softmax::run);

} // namespace

infiniStatus_t infiniopCreateCausalSoftmaxDescriptor(infiniopHandle_t handle,
                                                     infiniopCausalSoftmaxDescriptor_t *desc_ptr,
                                                     infiniopTensorDescriptor_t y_desc,
                                                     infiniopTensorDescriptor_t x_desc) {
    return kOp.create(handle, desc_ptr, [&](Args &args, const c_api::Tensors &tensor) {
        args.y = tensor("y_desc", y_desc);
        args.x = tensor("x_desc", x_desc);
    });
}

INFINIOP_WORKSPACE_SIZE(CausalSoftmax, kOp)

infiniStatus_t infiniopCausalSoftmax(infiniopCausalSoftmaxDescriptor_t desc, void *workspace, size_t workspace_size,
                                     void *y, const void *x, void *stream) {
    return kOp.launch(desc, workspace, workspace_size, stream, [&](Args &args, const c_api::Memory &memory) {
        memory(args.y, "y", y);
        memory(args.x, "x", x);
    });
}

INFINIOP_DESTROY(CausalSoftmax, kOp)
