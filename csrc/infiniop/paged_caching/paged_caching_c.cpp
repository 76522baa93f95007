// infiniopPagedCaching.
#include "c_api.h"
#include "paged_caching.h"

namespace {

using namespace infini;
using paged_caching::Args;

constexpr c_api::COp<Args> kOp("PagedCaching", paged_caching::kernels, paged_caching::check, paged_caching::run);

} // namespace

infiniStatus_t infiniopCreatePagedCachingDescriptor(infiniopHandle_t handle, infiniopPagedCachingDescriptor_t *desc_ptr,
                                                    infiniopTensorDescriptor_t k_cache_desc,
                                                    infiniopTensorDescriptor_t v_cache_desc,
                                                    infiniopTensorDescriptor_t k_desc,
                                                    infiniopTensorDescriptor_t v_desc,
                                                    infiniopTensorDescriptor_t slot_mapping_desc) {
    return kOp.create(handle, desc_ptr, [&](Args &args, const c_api::Tensors &tensor) {
        args.k_cache = tensor("k_cache_desc", k_cache_desc);
        args.v_cache = tensor("v_cache_desc", v_cache_desc);
        args.k = tensor("k_desc", k_desc);
        args.v = tensor("v_desc", v_desc);
        args.slot_mapping = tensor("slot_mapping_desc", slot_mapping_desc);
    });
}

INFINIOP_WORKSPACE_SIZE(PagedCaching, kOp)

infiniStatus_t infiniopPagedCaching(infiniopPagedCachingDescriptor_t desc, void *workspace, size_t workspace_size,
                                    void *k_cache, void *v_cache, const void *k, const void *v,
                                    const void *slot_mapping, void *stream) {
    return kOp.launch(desc, workspace, workspace_size, stream, [&](Args &args, const c_api::Memory &memory) {
        memory(args.k_cache, "k_cache", k_cache);
        memory(args.v_cache, "v_cache", v_cache);
        memory(args.k, "k", k);
        memory(args.v, "v", v);
        memory(args.slot_mapping, "slot_mapping", slot_mapping);
    });
}

INFINIOP_DESTROY(PagedCaching, kOp)
