/* topksoftmax: TO BE DESCRIBED
 */
#ifndef INFINIOP_OPS_TOPKSOFTMAX_H
#define INFINIOP_OPS_TOPKSOFTMAX_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopTopksoftmaxDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateTopksoftmaxDescriptor(infiniopHandle_t handle,
                                                              infiniopTopksoftmaxDescriptor_t *desc_ptr,
                                                              infiniopTensorDescriptor_t x_desc);

INFINI_API infiniStatus_t infiniopGetTopksoftmaxWorkspaceSize(infiniopTopksoftmaxDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopTopksoftmax(infiniopTopksoftmaxDescriptor_t desc, void *workspace,
                                              size_t workspace_size, void *values, void *indices, const void *x,
                                              size_t topk, int norm, void *stream);

INFINI_API infiniStatus_t infiniopDestroyTopksoftmaxDescriptor(infiniopTopksoftmaxDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_TOPKSOFTMAX_H */
