/* causal_softmax: TO BE DESCRIBED
 */
#ifndef INFINIOP_OPS_CAUSAL_SOFTMAX_H
#define INFINIOP_OPS_CAUSAL_SOFTMAX_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopCausalSoftmaxDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateCausalSoftmaxDescriptor(infiniopHandle_t handle,
                                                                infiniopCausalSoftmaxDescriptor_t *desc_ptr,
                                                                infiniopTensorDescriptor_t y_desc,
                                                                infiniopTensorDescriptor_t x_desc);

INFINI_API infiniStatus_t infiniopGetCausalSoftmaxWorkspaceSize(infiniopCausalSoftmaxDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopCausalSoftmax(infiniopCausalSoftmaxDescriptor_t desc, void *workspace,
                                                size_t workspace_size, void *y, const void *x, void *stream);

INFINI_API infiniStatus_t infiniopDestroyCausalSoftmaxDescriptor(infiniopCausalSoftmaxDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_CAUSAL_SOFTMAX_H */
