/* RMSNorm: y = x / sqrt(mean(x^2) + epsilon) * w, over the last dimension; one rounding at the end.
 *
 *   y, x  [..., n]  1 to 8 dimensions; F16, BF16, F32 or F64, the same; stride 1 in the last dimension. In place.
 *   w     [n]       the dtype of x; for F16 and BF16 also F16, BF16 or F32 in any mix; stride 1
 *   epsilon         finite, at least 0
 *
 * Reference for the method: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019. Workspace: none.
 *
 * Dtypes: F16, BF16, F32, F64.
 * Differs from InfiniCore: 1 to 8 dimensions, not only 2 or 3. */
#ifndef INFINIOP_OPS_RMS_NORM_H
#define INFINIOP_OPS_RMS_NORM_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopRMSNormDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateRMSNormDescriptor(infiniopHandle_t handle,
                                                          infiniopRMSNormDescriptor_t *desc_ptr,
                                                          infiniopTensorDescriptor_t y_desc,
                                                          infiniopTensorDescriptor_t x_desc,
                                                          infiniopTensorDescriptor_t w_desc, float epsilon);

INFINI_API infiniStatus_t infiniopGetRMSNormWorkspaceSize(infiniopRMSNormDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopRMSNorm(infiniopRMSNormDescriptor_t desc, void *workspace, size_t workspace_size,
                                          void *y, const void *x, const void *w, void *stream);

INFINI_API infiniStatus_t infiniopDestroyRMSNormDescriptor(infiniopRMSNormDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_RMS_NORM_H */
