/* swiglu: TO BE DESCRIBED
 */
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
