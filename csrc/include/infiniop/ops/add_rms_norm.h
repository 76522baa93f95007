/* AddRMSNorm: residual_out = round(a + b); y = RMSNorm of residual_out by weight (rms_norm.h).
 *
 *   y, residual_out, a, b  [..., n]  1 to 8 dimensions; F16, BF16, F32 or F64, the same; stride 1 in the last one.
 *                                    y and residual_out may each be a or b (in place), but share no memory.
 *   weight                 [n]       the dtype of a; for F16 and BF16 also F16, BF16 or F32 in any mix; stride 1
 *   epsilon                          finite, at least 0
 *
 * At creation residual_out comes last, after epsilon; it is required: BAD_PARAM for NULL. Workspace: none.
 *
 * Dtypes: F16, BF16, F32, F64.
 * Differs from InfiniCore: the squares are those of the rounded residual_out, so y equals RMSNorm of residual_out bit
 * for bit. */
#ifndef INFINIOP_OPS_ADD_RMS_NORM_H
#define INFINIOP_OPS_ADD_RMS_NORM_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopAddRMSNormDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateAddRMSNormDescriptor(
    infiniopHandle_t handle, infiniopAddRMSNormDescriptor_t *desc_ptr, infiniopTensorDescriptor_t y_desc,
    infiniopTensorDescriptor_t a_desc, infiniopTensorDescriptor_t b_desc, infiniopTensorDescriptor_t weight_desc,
    float epsilon, infiniopTensorDescriptor_t residual_out_desc);

INFINI_API infiniStatus_t infiniopGetAddRMSNormWorkspaceSize(infiniopAddRMSNormDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopAddRMSNorm(infiniopAddRMSNormDescriptor_t desc, void *workspace,
                                             size_t workspace_size, void *y, const void *a, const void *b,
                                             const void *weight, void *residual_out, void *stream);

INFINI_API infiniStatus_t infiniopDestroyAddRMSNormDescriptor(infiniopAddRMSNormDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_ADD_RMS_NORM_H */
