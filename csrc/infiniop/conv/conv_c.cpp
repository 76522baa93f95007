// infiniopConv.
#include "c_api.h"
#include "conv.h"

namespace {

using namespace infini;
using conv::Args;

constexpr c_api::COp<Args> kOp("Conv", conv::kernels, conv::check, conv::run, conv::workspace_size);

// Copies the caller's array of n values; NULL gives `otherwise` in each place.
void copy_parameters(int64_t *to, const void *from, int n, int64_t otherwise) {
    for (int i = 0; i < n; ++i) {
        to[i] = from == nullptr ? otherwise : static_cast<const int64_t *>(from)[i];
    }
}

} // namespace

infiniStatus_t infiniopCreateConvDescriptor(infiniopHandle_t handle, infiniopConvDescriptor_t *desc_ptr,
                                            infiniopTensorDescriptor_t y_desc, infiniopTensorDescriptor_t x_desc,
                                            infiniopTensorDescriptor_t w_desc, infiniopTensorDescriptor_t bias_desc,
                                            void *pads, void *strides, void *dilations, size_t n) {
    return kOp.create(handle, desc_ptr, [&](Args &args, const c_api::Tensors &tensor) {
        args.y = tensor("y_desc", y_desc);
        args.x = tensor("x_desc", x_desc);
        args.w = tensor("w_desc", w_desc);
        args.bias = tensor.optional("bias_desc", bias_desc);
        if (n < 1 || n > conv::kMaxSpatial) { // checked before the arrays are read
            throw Error(INFINI_STATUS_BAD_PARAM, message(tensor.function(), ": n must be 1 to ", conv::kMaxSpatial,
                                                         ", the spatial dimensions, got ", n));
        }
        args.spatial = static_cast<int>(n);
        copy_parameters(args.pads, pads, args.spatial, 0);
        copy_parameters(args.strides, strides, args.spatial, 1);
        copy_parameters(args.dilations, dilations, args.spatial, 1);
    });
}

INFINIOP_WORKSPACE_SIZE(Conv, kOp)

infiniStatus_t infiniopConv(infiniopConvDescriptor_t desc, void *workspace, size_t workspace_size, void *y,
                            const void *x, const void *w, const void *bias, void *stream) {
    return kOp.launch(desc, workspace, workspace_size, stream, [&](Args &args, const c_api::Memory &memory) {
        memory(args.y, "y", y);
        memory(args.x, "x", x);
        memory(args.w, "w", w);
        if (bias == nullptr) {
            args.bias.dtype = INFINI_DTYPE_INVALID; // described, but no address given: no bias
        } else {
            memory(args.bias, "bias", bias);
        }
    });
}

INFINIOP_DESTROY(Conv, kOp)
