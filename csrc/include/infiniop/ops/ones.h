/* ones: y = 1 in every element.
 *
 *   y    any shape, 0 to 8 dimensions, any strides; BYTE, BOOL, I8 to I64, U8 to U64, F8 (float8_e4m3fn), F16, BF16,
 *        F32 or F64
 *   x    the shape of y; it is not read: any dtype and strides, and at a run its address may be NULL
 *
 * Workspace: none.
 *
 * Dtypes: BYTE, BOOL, I8, I16, I32, I64, U8, U16, U32, U64, F8, F16, BF16, F32, F64.
 * Differs from InfiniCore: x may be NULL when run: only its shape counts. */
#ifndef INFINIOP_OPS_ONES_H
#define INFINIOP_OPS_ONES_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopOnesDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateOnesDescriptor(infiniopHandle_t handle, infiniopOnesDescriptor_t *desc_ptr,
                                                       infiniopTensorDescriptor_t y_desc,
                                                       infiniopTensorDescriptor_t x_desc);

INFINI_API infiniStatus_t infiniopGetOnesWorkspaceSize(infiniopOnesDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopOnes(infiniopOnesDescriptor_t desc, void *workspace, size_t workspace_size, void *y,
                                       const void *x, void *stream);

INFINI_API infiniStatus_t infiniopDestroyOnesDescriptor(infiniopOnesDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_ONES_H */
