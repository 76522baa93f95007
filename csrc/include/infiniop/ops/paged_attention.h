/* paged_attention: TO BE DESCRIBED
 */
#ifndef INFINIOP_OPS_PAGED_ATTENTION_H
#define INFINIOP_OPS_PAGED_ATTENTION_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopPagedAttentionDescriptor_t;

INFINI_API infiniStatus_t infiniopCreatePagedAttentionDescriptor(
    infiniopHandle_t handle, infiniopPagedAttentionDescriptor_t *desc_ptr, infiniopTensorDescriptor_t out_desc,
    infiniopTensorDescriptor_t q_desc, infiniopTensorDescriptor_t k_cache_desc, infiniopTensorDescriptor_t v_cache_desc,
    infiniopTensorDescriptor_t block_tables_desc, infiniopTensorDescriptor_t seq_lens_desc,
    infiniopTensorDescriptor_t alibi_slopes_desc, float scale);

INFINI_API infiniStatus_t infiniopGetPagedAttentionWorkspaceSize(infiniopPagedAttentionDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopPagedAttention(infiniopPagedAttentionDescriptor_t desc, void *workspace,
                                                 size_t workspace_size, void *out, const void *q, const void *k_cache,
                                                 const void *v_cache, const void *block_tables, const void *seq_lens,
                                                 const void *alibi_slopes, void *stream);

INFINI_API infiniStatus_t infiniopDestroyPagedAttentionDescriptor(infiniopPagedAttentionDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_PAGED_ATTENTION_H */
