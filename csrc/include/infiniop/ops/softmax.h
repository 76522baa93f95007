/* softmax: TO BE DESCRIBED
 */
#ifndef INFINIOP_OPS_SOFTMAX_H
#define INFINIOP_OPS_SOFTMAX_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopSoftmaxDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateSoftmaxDescriptor(infiniopHandle_t handle,
                                                          infiniopSoftmaxDescriptor_t *desc_ptr,
                                                          infiniopTensorDescriptor_t y_desc,
                                                          infiniopTensorDescriptor_t x_desc, int axis);

INFINI_API infiniStatus_t infiniopGetSoftmaxWorkspaceSize(infiniopSoftmaxDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopSoftmax(infiniopSoftmaxDescriptor_t desc, void *workspace, size_t workspace_size,
                                          void *y, const void *x, void *stream);

INFINI_API infiniStatus_t infiniopDestroySoftmaxDescriptor(infiniopSoftmaxDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_SOFTMAX_H */
