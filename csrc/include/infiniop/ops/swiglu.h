/* SwiGLU: c = silu(b) * a, element by element, where silu(b) = b / (1 + e^-b).
 *
 *   c    output
 *   a    up
 *   b    gate; it comes last
 *        All of one shape, 0 to 8 dimensions, any strides; F16, BF16, F32 or F64, the same. In place with a or b.
 *
 * The two halves of one fused product [..., 2d] are two descriptors with its strides. Reference for the method:
 * Shazeer, GLU Variants Improve Transformer, 2020. Workspace: none.
 *
 * Dtypes: F16, BF16, F32, F64.
 * Differs from InfiniCore: none. */
#ifndef INFINIOP_OPS_SWIGLU_H
#define INFINIOP_OPS_SWIGLU_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopSwiGLUDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateSwiGLUDescriptor(infiniopHandle_t handle, infiniopSwiGLUDescriptor_t *desc_ptr,
                                                         infiniopTensorDescriptor_t c_desc,
                                                         infiniopTensorDescriptor_t a_desc,
                                                         infiniopTensorDescriptor_t b_desc);

INFINI_API infiniStatus_t infiniopGetSwiGLUWorkspaceSize(infiniopSwiGLUDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopSwiGLU(infiniopSwiGLUDescriptor_t desc, void *workspace, size_t workspace_size,
                                         void *c, const void *a, const void *b, void *stream);

INFINI_API infiniStatus_t infiniopDestroySwiGLUDescriptor(infiniopSwiGLUDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_SWIGLU_H */
