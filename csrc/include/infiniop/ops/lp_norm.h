/* LPNorm: y = x / (norm + eps), norm = (sum of |x|^p)^(1 / p) along one dimension; y is output, x input.
 *
 *   output, input  1 to 8 dimensions; F16, BF16 or F32, the same; any strides. In place.
 *   axis           the dimension; negative ones count from the last
 *   p              at least 1
 *   eps            finite, at least 0
 *
 * Powers do not overflow or underflow: where they would, x is divided by the largest |x| first. Zeros stay zeros if
 * eps > 0 and become NaN (0 / 0) if it is 0; inf becomes NaN, and finite values beside it 0; with a NaN, all results
 * are NaN.
 *
 * torch.nn.functional.normalize has max(norm, eps) for norm + eps. Workspace: none.
 *
 * Dtypes: F16, BF16, F32.
 * Differs from InfiniCore: also on the CPU; powers of |x|, not of x; any strides and any axis (InfiniCore: stride 1 in
 * the last dimension, another axis only if contiguous). */
#ifndef INFINIOP_OPS_LP_NORM_H
#define INFINIOP_OPS_LP_NORM_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopLPNormDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateLPNormDescriptor(infiniopHandle_t handle, infiniopLPNormDescriptor_t *desc_ptr,
                                                         infiniopTensorDescriptor_t output_desc,
                                                         infiniopTensorDescriptor_t input_desc, int axis, int p,
                                                         float eps);

INFINI_API infiniStatus_t infiniopGetLPNormWorkspaceSize(infiniopLPNormDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopLPNorm(infiniopLPNormDescriptor_t desc, void *workspace, size_t workspace_size,
                                         void *output, const void *input, void *stream);

INFINI_API infiniStatus_t infiniopDestroyLPNormDescriptor(infiniopLPNormDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_LP_NORM_H */
