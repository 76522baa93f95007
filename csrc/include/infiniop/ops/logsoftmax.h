/* LogSoftmax: y = x - m - log(sum of exp(x - m)) over the last dimension, m the largest x there.
 *
 *   y, x  [..., n]  1 to 8 dimensions; F16, BF16 or F32, each its own; any strides. In place if of one dtype.
 *
 * If all x of a row are -inf, or one is inf or NaN, all results of the row are NaN. Workspace: none.
 *
 * Dtypes: F16, BF16, F32; x and y each its own.
 * Differs from InfiniCore: 1 to 8 dimensions, not only 2 or 3. */
#ifndef INFINIOP_OPS_LOGSOFTMAX_H
#define INFINIOP_OPS_LOGSOFTMAX_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopLogSoftmaxDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateLogSoftmaxDescriptor(infiniopHandle_t handle,
                                                             infiniopLogSoftmaxDescriptor_t *desc_ptr,
                                                             infiniopTensorDescriptor_t y_desc,
                                                             infiniopTensorDescriptor_t x_desc);

INFINI_API infiniStatus_t infiniopGetLogSoftmaxWorkspaceSize(infiniopLogSoftmaxDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopLogSoftmax(infiniopLogSoftmaxDescriptor_t desc, void *workspace,
                                             size_t workspace_size, void *y, const void *x, void *stream);

INFINI_API infiniStatus_t infiniopDestroyLogSoftmaxDescriptor(infiniopLogSoftmaxDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_LOGSOFTMAX_H */
