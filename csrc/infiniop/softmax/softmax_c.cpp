// infiniopSoftmax and infiniopLogSoftmax.
#include "c_api.h"
#include "softmax.h"

namespace {

using namespace infini;
using softmax::Args;

constexpr softmax::Names kNames{"y", "axis"};

void check(const Args &args) {
    softmax::check(args, kNames);
}

void run(const ExecutionContext &context, const Args &args) {
    softmax::run(context, args, kNames);
}

constexpr c_api::COp<Args> kSoftmax("Softmax", softmax::kernels, check, run);
constexpr c_api::COp<Args> kLogSoftmax("LogSoftmax", softmax::kernels, check, run);

} // namespace

infiniStatus_t infiniopCreateSoftmaxDescriptor(infiniopHandle_t handle, infiniopSoftmaxDescriptor_t *desc_ptr,
                                               infiniopTensorDescriptor_t y_desc, infiniopTensorDescriptor_t x_desc,
                                               int axis) {
    return kSoftmax.create(handle, desc_ptr, [&](Args &args, const c_api::Tensors &tensor) {
        args.y = tensor("y_desc", y_desc);
        args.x = tensor("x_desc", x_desc);
        args.axis = axis;
    });
}

INFINIOP_WORKSPACE_SIZE(Softmax, kSoftmax)

infiniStatus_t infiniopSoftmax(infiniopSoftmaxDescriptor_t desc, void *workspace, size_t workspace_size, void *y,
                               const void *x, void *stream) {
    return kSoftmax.launch(desc, workspace, workspace_size, stream, [&](Args &args, const c_api::Memory &memory) {
        memory(args.y, "y", y);
        memory(args.x, "x", x);
    });
}

INFINIOP_DESTROY(Softmax, kSoftmax)

infiniStatus_t infiniopCreateLogSoftmaxDescriptor(infiniopHandle_t handle, infiniopLogSoftmaxDescriptor_t *desc_ptr,
                                                  infiniopTensorDescriptor_t y_desc,
                                                  infiniopTensorDescriptor_t x_desc) {
    return kLogSoftmax.create(handle, desc_ptr, [&](Args &args, const c_api::Tensors &tensor) {
        args.y = tensor("y_desc", y_desc);
        args.x = tensor("x_desc", x_desc);
        args.log = true;
    });
}

INFINIOP_WORKSPACE_SIZE(LogSoftmax, kLogSoftmax)

infiniStatus_t infiniopLogSoftmax(infiniopLogSoftmaxDescriptor_t desc, void *workspace, size_t workspace_size, void *y,
                                  const void *x, void *stream) {
    return kLogSoftmax.launch(desc, workspace, workspace_size, stream, [&](Args &args, const c_api::Memory &memory) {
        memory(args.y, "y", y);
        memory(args.x, "x", x);
    });
}

INFINIOP_DESTROY(LogSoftmax, kLogSoftmax)
