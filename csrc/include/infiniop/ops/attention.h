/* attention: TO BE DESCRIBED
 */
#ifndef INFINIOP_OPS_ATTENTION_H
#define INFINIOP_OPS_ATTENTION_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopAttentionDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateAttentionDescriptor(
    infiniopHandle_t handle, infiniopAttentionDescriptor_t *desc_ptr, infiniopTensorDescriptor_t out_desc,
    infiniopTensorDescriptor_t q_desc, infiniopTensorDescriptor_t k_desc, infiniopTensorDescriptor_t v_desc,
    infiniopTensorDescriptor_t k_cache_desc, infiniopTensorDescriptor_t v_cache_desc, size_t pos);

INFINI_API infiniStatus_t infiniopGetAttentionWorkspaceSize(infiniopAttentionDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopAttention(infiniopAttentionDescriptor_t desc, void *workspace, size_t workspace_size,
                                            void *out, const void *q, const void *k, const void *v, void *k_cache,
                                            void *v_cache, void *stream);

INFINI_API infiniStatus_t infiniopDestroyAttentionDescriptor(infiniopAttentionDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_ATTENTION_H */
