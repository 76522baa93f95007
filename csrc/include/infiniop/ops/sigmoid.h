/* sigmoid: y = 1 / (1 + e^-x), element by element.
 *
 *   y, x     any one shape, 0 to 8 dimensions, any strides; F16, BF16, F32 or F64, the same. In place.
 *
 * F32 errs by at most 3 units in the last place (measured on 10 million values); below -88.7, where the result is
 * beneath the normal floats, it is 0. Workspace: none.
 *
 * Dtypes: F16, BF16, F32, F64.
 * Differs from InfiniCore: none. */
#ifndef INFINIOP_OPS_SIGMOID_H
#define INFINIOP_OPS_SIGMOID_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopSigmoidDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateSigmoidDescriptor(infiniopHandle_t handle,
                                                          infiniopSigmoidDescriptor_t *desc_ptr,
                                                          infiniopTensorDescriptor_t y_desc,
                                                          infiniopTensorDescriptor_t x_desc);

INFINI_API infiniStatus_t infiniopGetSigmoidWorkspaceSize(infiniopSigmoidDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopSigmoid(infiniopSigmoidDescriptor_t desc, void *workspace, size_t workspace_size,
                                          void *y, const void *x, void *stream);

INFINI_API infiniStatus_t infiniopDestroySigmoidDescriptor(infiniopSigmoidDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_SIGMOID_H */
