/* add: c = a + b, element by element.
 *
 *   c, a, b    any one shape, 0 to 8 dimensions, any strides; F16, BF16, F32, F64, I32 or I64, the same. In place with
 *              a or b. An input is broadcast by stride 0, not by another shape.
 *
 * Workspace: none.
 *
 * Dtypes: F16, BF16, F32, F64, I32, I64.
 * Differs from InfiniCore: integers wrap around on overflow. */
#ifndef INFINIOP_OPS_ADD_H
#define INFINIOP_OPS_ADD_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopAddDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateAddDescriptor(infiniopHandle_t handle, infiniopAddDescriptor_t *desc_ptr,
                                                      infiniopTensorDescriptor_t c_desc,
                                                      infiniopTensorDescriptor_t a_desc,
                                                      infiniopTensorDescriptor_t b_desc);

INFINI_API infiniStatus_t infiniopGetAddWorkspaceSize(infiniopAddDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopAdd(infiniopAddDescriptor_t desc, void *workspace, size_t workspace_size, void *c,
                                      const void *a, const void *b, void *stream);

INFINI_API infiniStatus_t infiniopDestroyAddDescriptor(infiniopAddDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_ADD_H */
