// infiniopRearrange: an op without a workspace.
#include "c_api.h"
#include "rearrange.h"

namespace {

using namespace infini;
using rearrange::Args;

constexpr c_api::COp<Args> kRearrange(
    "Rearrange", rearrange::kernels, [](const Args &args) { rearrange::check(args); },
    [](const ExecutionContext &context, const Args &args) { rearrange::run(context, args); });

} // namespace

infiniStatus_t infiniopCreateRearrangeDescriptor(infiniopHandle_t handle, infiniopRearrangeDescriptor_t *desc_ptr,
                                                 infiniopTensorDescriptor_t dst_desc,
                                                 infiniopTensorDescriptor_t src_desc) {
    return kRearrange.create(handle, desc_ptr, [&](Args &args, const c_api::Tensors &tensor) {
        args.dst = tensor("dst_desc", dst_desc);
        args.src = tensor("src_desc", src_desc);
    });
}

infiniStatus_t infiniopRearrange(infiniopRearrangeDescriptor_t desc, void *dst, const void *src, void *stream) {
    return kRearrange.launch(desc, nullptr, 0, stream, [&](Args &args, const c_api::Memory &memory) {
        memory(args.dst, "dst", dst);
        memory(args.src, "src", src);
    });
}

INFINIOP_DESTROY(Rearrange, kRearrange)
