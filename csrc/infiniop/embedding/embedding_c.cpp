// infiniopEmbedding.
#include "c_api.h"
#include "embedding.h"

namespace {

using namespace infini;
using embedding::Args;

constexpr c_api::COp<Args> kOp("Embedding", embedding::kernels, embedding::check, embedding::run);

} // namespace

infiniStatus_t infiniopCreateEmbeddingDescriptor(infiniopHandle_t handle, infiniopEmbeddingDescriptor_t *desc_ptr,
                                                 infiniopTensorDescriptor_t out_desc,
                                                 infiniopTensorDescriptor_t ids_desc,
                                                 infiniopTensorDescriptor_t weight_desc) {
    return kOp.create(handle, desc_ptr, [&](Args &args, const c_api::Tensors &tensor) {
        args.out = tensor("out_desc", out_desc);
        args.ids = tensor("ids_desc", ids_desc);
        args.weight = tensor("weight_desc", weight_desc);
        args.total = args.weight.ndim > 0 ? args.weight.shape[0] : 0; // the whole table
    });
}

INFINIOP_WORKSPACE_SIZE(Embedding, kOp)

infiniStatus_t infiniopEmbedding(infiniopEmbeddingDescriptor_t desc, void *workspace, size_t workspace_size, void *out,
                                 const void *ids, const void *weight, void *stream) {
    return kOp.launch(desc, workspace, workspace_size, stream, [&](Args &args, const c_api::Memory &memory) {
        memory(args.out, "out", out);
        memory(args.ids, "ids", ids);
        memory(args.weight, "weight", weight);
    });
}

INFINIOP_DESTROY(Embedding, kOp)
