/* tanh: output = tanh(input), element by element.
 *
 *   output, input  any one shape, 0 to 8 dimensions, any strides; F16, BF16, F32 or F64, the same. In place.
 *
 * F32 errs by at most 2 units in the last place, also near 0 (measured on 10 million values). Workspace: none.
 *
 * Dtypes: F16, BF16, F32, F64.
 * Differs from InfiniCore: none. */
#ifndef INFINIOP_OPS_TANH_H
#define INFINIOP_OPS_TANH_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopTanhDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateTanhDescriptor(infiniopHandle_t handle, infiniopTanhDescriptor_t *desc_ptr,
                                                       infiniopTensorDescriptor_t output_desc,
                                                       infiniopTensorDescriptor_t input_desc);

INFINI_API infiniStatus_t infiniopGetTanhWorkspaceSize(infiniopTanhDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopTanh(infiniopTanhDescriptor_t desc, void *workspace, size_t workspace_size,
                                       void *output, const void *input, void *stream);

INFINI_API infiniStatus_t infiniopDestroyTanhDescriptor(infiniopTanhDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_TANH_H */
