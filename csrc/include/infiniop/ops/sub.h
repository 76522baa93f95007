/* sub: c = a - b, element by element.
 *
 *   c, a, b    any one shape, 0 to 8 dimensions, any strides; F16, BF16, F32 or F64, the same. In place with
 *              a or b. An input is broadcast by stride 0, not by another shape.
 *
 * Workspace: none.
 *
 * Dtypes: F16, BF16, F32, F64.
 * Differs from InfiniCore: none. */
#ifndef INFINIOP_OPS_SUB_H
#define INFINIOP_OPS_SUB_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopSubDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateSubDescriptor(infiniopHandle_t handle, infiniopSubDescriptor_t *desc_ptr,
                                                      infiniopTensorDescriptor_t c_desc,
                                                      infiniopTensorDescriptor_t a_desc,
                                                      infiniopTensorDescriptor_t b_desc);

INFINI_API infiniStatus_t infiniopGetSubWorkspaceSize(infiniopSubDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopSub(infiniopSubDescriptor_t desc, void *workspace, size_t workspace_size, void *c,
                                      const void *a, const void *b, void *stream);

INFINI_API infiniStatus_t infiniopDestroySubDescriptor(infiniopSubDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_SUB_H */
