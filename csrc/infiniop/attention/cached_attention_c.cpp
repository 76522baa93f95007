// infiniopAttention.
#include "attention.h"
#include "c_api.h"
#include "cached_attention.h"

namespace {

using namespace infini;
using cached_attention::Args;

constexpr c_api::COp<Args> kOp("Attention", attention::kernels, cached_attention::check, cached_attention::run,
                               cached_attention::workspace_bytes);

} // namespace

infiniStatus_t infiniopCreateAttentionDescriptor(infiniopHandle_t handle, infiniopAttentionDescriptor_t *desc_ptr,
                                                 infiniopTensorDescriptor_t out_desc, infiniopTensorDescriptor_t q_desc,
                                                 infiniopTensorDescriptor_t k_desc, infiniopTensorDescriptor_t v_desc,
                                                 infiniopTensorDescriptor_t k_cache_desc,
                                                 infiniopTensorDescriptor_t v_cache_desc, size_t pos) {
    return kOp.create(handle, desc_ptr, [&](Args &args, const c_api::Tensors &tensor) {
        args.out = tensor("out_desc", out_desc);
        args.q = tensor("q_desc", q_desc);
        args.k = tensor("k_desc", k_desc);
        args.v = tensor("v_desc", v_desc);
        args.k_cache = tensor("k_cache_desc", k_cache_desc);
        args.v_cache = tensor("v_cache_desc", v_cache_desc);
        args.pos = pos;
    });
}

INFINIOP_WORKSPACE_SIZE(Attention, kOp)

infiniStatus_t infiniopAttention(infiniopAttentionDescriptor_t desc, void *workspace, size_t workspace_size, void *out,
                                 const void *q, const void *k, const void *v, void *k_cache, void *v_cache,
                                 void *stream) {
    return kOp.launch(desc, workspace, workspace_size, stream, [&](Args &args, const c_api::Memory &memory) {
        memory(args.out, "out", out);
        memory(args.q, "q", q);
        memory(args.k, "k", k);
        memory(args.v, "v", v);
        memory(args.k_cache, "k_cache", k_cache);
        memory(args.v_cache, "v_cache", v_cache);
    });
}

INFINIOP_DESTROY(Attention, kOp)
