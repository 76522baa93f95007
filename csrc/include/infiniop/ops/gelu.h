/* gelu: output = input * (1 + erf(input / sqrt(2))) / 2, element by element: the exact form, not the one by tanh.
 *
 *   output, input  any one shape, 0 to 8 dimensions, any strides; F16, BF16, F32 or F64, the same. In place.
 *
 * F32 errs by at most 7 units in the last place, also far below 0 where the result is tiny (measured on 10 million
 * values). Minus infinity gives NaN. Reference for the method: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016.
 * Workspace: none.
 *
 * Dtypes: F16, BF16, F32, F64.
 * Differs from InfiniCore: none. */
#ifndef INFINIOP_OPS_GELU_H
#define INFINIOP_OPS_GELU_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopGeluDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateGeluDescriptor(infiniopHandle_t handle, infiniopGeluDescriptor_t *desc_ptr,
                                                       infiniopTensorDescriptor_t output_desc,
                                                       infiniopTensorDescriptor_t input_desc);

INFINI_API infiniStatus_t infiniopGetGeluWorkspaceSize(infiniopGeluDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopGelu(infiniopGeluDescriptor_t desc, void *workspace, size_t workspace_size,
                                       void *output, const void *input, void *stream);

INFINI_API infiniStatus_t infiniopDestroyGeluDescriptor(infiniopGeluDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_GELU_H */
