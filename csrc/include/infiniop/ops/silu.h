/* silu: output = input / (1 + e^-input), element by element.
 *
 *   output, input  any one shape, 0 to 8 dimensions, any strides; F16, BF16, F32 or F64, the same. In place.
 *
 * F32 errs by at most 3 units in the last place (measured on 10 million values); below -88.7, where the result is
 * nearer to 0 than 3e-37, it is -0. Minus infinity gives NaN. Reference for the method: Hendrycks and Gimpel, Gaussian
 * Error Linear Units, 2016. Workspace: none.
 *
 * Dtypes: F16, BF16, F32, F64.
 * Differs from InfiniCore: none. */
#ifndef INFINIOP_OPS_SILU_H
#define INFINIOP_OPS_SILU_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopSiluDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateSiluDescriptor(infiniopHandle_t handle, infiniopSiluDescriptor_t *desc_ptr,
                                                       infiniopTensorDescriptor_t output_desc,
                                                       infiniopTensorDescriptor_t input_desc);

INFINI_API infiniStatus_t infiniopGetSiluWorkspaceSize(infiniopSiluDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopSilu(infiniopSiluDescriptor_t desc, void *workspace, size_t workspace_size,
                                       void *output, const void *input, void *stream);

INFINI_API infiniStatus_t infiniopDestroySiluDescriptor(infiniopSiluDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_SILU_H */
