/* relu: y = max(x, 0), element by element.
 *
 *   y, x     any one shape, 0 to 8 dimensions, any strides; F16, BF16, F32 or F64, the same. In place.
 *
 * A NaN stays NaN. Workspace: none.
 *
 * Dtypes: F16, BF16, F32, F64.
 * Differs from InfiniCore: a NaN stays NaN, as in PyTorch. */
#ifndef INFINIOP_OPS_RELU_H
#define INFINIOP_OPS_RELU_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopReluDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateReluDescriptor(infiniopHandle_t handle, infiniopReluDescriptor_t *desc_ptr,
                                                       infiniopTensorDescriptor_t y_desc,
                                                       infiniopTensorDescriptor_t x_desc);

INFINI_API infiniStatus_t infiniopGetReluWorkspaceSize(infiniopReluDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopRelu(infiniopReluDescriptor_t desc, void *workspace, size_t workspace_size, void *y,
                                       const void *x, void *stream);

INFINI_API infiniStatus_t infiniopDestroyReluDescriptor(infiniopReluDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_RELU_H */
