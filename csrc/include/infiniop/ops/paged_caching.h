/* paged_caching: TO BE DESCRIBED
 */
#ifndef INFINIOP_OPS_PAGED_CACHING_H
#define INFINIOP_OPS_PAGED_CACHING_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopPagedCachingDescriptor_t;

INFINI_API infiniStatus_t infiniopCreatePagedCachingDescriptor(
    infiniopHandle_t handle, infiniopPagedCachingDescriptor_t *desc_ptr, infiniopTensorDescriptor_t k_cache_desc,
    infiniopTensorDescriptor_t v_cache_desc, infiniopTensorDescriptor_t k_desc, infiniopTensorDescriptor_t v_desc,
    infiniopTensorDescriptor_t slot_mapping_desc);

INFINI_API infiniStatus_t infiniopGetPagedCachingWorkspaceSize(infiniopPagedCachingDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopPagedCaching(infiniopPagedCachingDescriptor_t desc, void *workspace,
                                               size_t workspace_size, void *k_cache, void *v_cache, const void *k,
                                               const void *v, const void *slot_mapping, void *stream);

INFINI_API infiniStatus_t infiniopDestroyPagedCachingDescriptor(infiniopPagedCachingDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_PAGED_CACHING_H */
