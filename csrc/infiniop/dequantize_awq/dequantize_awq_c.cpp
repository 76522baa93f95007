// infiniopDequantizeAWQ.
#include "c_api.h"
#include "dequantize_awq.h"

namespace {

using namespace infini;
using dequantize_awq::Args;

constexpr c_api::COp<Args> kOp("DequantizeAWQ", dequantize_awq::kernels, dequantize_awq::check, dequantize_awq::run);

} // namespace

infiniStatus_t
infiniopCreateDequantizeAWQDescriptor(infiniopHandle_t handle, infiniopDequantizeAWQDescriptor_t *desc_ptr,
                                      infiniopTensorDescriptor_t out_desc, infiniopTensorDescriptor_t qweight_desc,
                                      infiniopTensorDescriptor_t scales_desc, infiniopTensorDescriptor_t zeros_desc) {
    return kOp.create(handle, desc_ptr, [&](Args &args, const c_api::Tensors &tensor) {
        args.out = tensor("out_desc", out_desc);
        args.qweight = tensor("qweight_desc", qweight_desc);
        args.scales = tensor("scales_desc", scales_desc);
        args.zeros = tensor("zeros_desc", zeros_desc);
    });
}

INFINIOP_WORKSPACE_SIZE(DequantizeAWQ, kOp)

infiniStatus_t infiniopDequantizeAWQ(infiniopDequantizeAWQDescriptor_t desc, void *workspace, size_t workspace_size,
                                     void *out, const void *qweight, const void *scales, const void *zeros,
                                     void *stream) {
    return kOp.launch(desc, workspace, workspace_size, stream, [&](Args &args, const c_api::Memory &memory) {
        memory(args.out, "out", out);
        memory(args.qweight, "qweight", qweight);
        memory(args.scales, "scales", scales);
        memory(args.zeros, "zeros", zeros);
    });
}

INFINIOP_DESTROY(DequantizeAWQ, kOp)
