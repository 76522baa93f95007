/* topkrouter: TO BE DESCRIBED
 */
#ifndef INFINIOP_OPS_TOPKROUTER_H
#define INFINIOP_OPS_TOPKROUTER_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopTopkrouterDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateTopkrouterDescriptor(infiniopHandle_t handle,
                                                             infiniopTopkrouterDescriptor_t *desc_ptr,
                                                             infiniopTensorDescriptor_t x_desc,
                                                             infiniopTensorDescriptor_t correction_bias_desc);

INFINI_API infiniStatus_t infiniopGetTopkrouterWorkspaceSize(infiniopTopkrouterDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopTopkrouter(infiniopTopkrouterDescriptor_t desc, void *workspace,
                                             size_t workspace_size, void *values, void *indices, const void *x,
                                             const void *correction_bias, float routed_scaling_factor, size_t topk,
                                             void *stream);

INFINI_API infiniStatus_t infiniopDestroyTopkrouterDescriptor(infiniopTopkrouterDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_TOPKROUTER_H */
