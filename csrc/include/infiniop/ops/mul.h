/* mul: c = a * b, element by element.
 *
 *   c, a, b    any one shape, 0 to 8 dimensions, any strides; F16, BF16, F32 or F64, the same. In place with
 *              a or b. An input is broadcast by stride 0, not by another shape.
 *
 * Workspace: none.
 *
 * Dtypes: F16, BF16, F32, F64.
 * Differs from InfiniCore: none. */
#ifndef INFINIOP_OPS_MUL_H
#define INFINIOP_OPS_MUL_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopMulDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateMulDescriptor(infiniopHandle_t handle, infiniopMulDescriptor_t *desc_ptr,
                                                      infiniopTensorDescriptor_t c_desc,
                                                      infiniopTensorDescriptor_t a_desc,
                                                      infiniopTensorDescriptor_t b_desc);

INFINI_API infiniStatus_t infiniopGetMulWorkspaceSize(infiniopMulDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopMul(infiniopMulDescriptor_t desc, void *workspace, size_t workspace_size, void *c,
                                      const void *a, const void *b, void *stream);

INFINI_API infiniStatus_t infiniopDestroyMulDescriptor(infiniopMulDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_MUL_H */
