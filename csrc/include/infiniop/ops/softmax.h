/* Softmax: y = exp(x - m) / sum of exp(x - m) along one dimension, m the largest x there.
 *
 *   y, x  1 to 8 dimensions; F16, BF16 or F32, the same; any strides. In place.
 *   axis  the dimension; negative ones count from the last
 *
 * If all x are -inf, or one is inf or NaN, all results are NaN. Workspace: none.
 *
 * Dtypes: F16, BF16, F32.
 * Differs from InfiniCore: also on the CPU; any strides (InfiniCore: contiguous), and BF16. */
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
