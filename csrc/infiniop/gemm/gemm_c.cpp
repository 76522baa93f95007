// infiniopGemm.
#include "c_api.h"
#include "gemm.h"

namespace {

using namespace infini;
using gemm::Args;

constexpr c_api::COp<Args> kOp("Gemm", gemm::kernels, gemm::check, gemm::run, gemm::workspace_bytes);

} // namespace

infiniStatus_t infiniopCreateGemmDescriptor(infiniopHandle_t handle, infiniopGemmDescriptor_t *desc_ptr,
                                            infiniopTensorDescriptor_t c_desc, infiniopTensorDescriptor_t a_desc,
                                            infiniopTensorDescriptor_t b_desc) {
    return kOp.create(handle, desc_ptr, [&](Args &args, const c_api::Tensors &tensor) {
        args.c = tensor("c_desc", c_desc);
        args.a = tensor("a_desc", a_desc);
        args.b = tensor("b_desc", b_desc);
    });
}

INFINIOP_WORKSPACE_SIZE(Gemm, kOp)

infiniStatus_t infiniopGemm(infiniopGemmDescriptor_t desc, void *workspace, size_t workspace_size, void *c,
                            const void *a, const void *b, float alpha, float beta, void *stream) {
    return kOp.launch(desc, workspace, workspace_size, stream, [&](Args &args, const c_api::Memory &memory) {
        memory(args.c, "c", c);
        memory(args.a, "a", a);
        memory(args.b, "b", b);
        args.alpha = alpha;
        args.beta = beta;
    });
}

INFINIOP_DESTROY(Gemm, kOp)
