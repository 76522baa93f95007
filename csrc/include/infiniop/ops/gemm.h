/* gemm: TO BE DESCRIBED
 */
#ifndef INFINIOP_OPS_GEMM_H
#define INFINIOP_OPS_GEMM_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopGemmDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateGemmDescriptor(infiniopHandle_t handle, infiniopGemmDescriptor_t *desc_ptr,
                                                       infiniopTensorDescriptor_t c_desc,
                                                       infiniopTensorDescriptor_t a_desc,
                                                       infiniopTensorDescriptor_t b_desc);

INFINI_API infiniStatus_t infiniopGetGemmWorkspaceSize(infiniopGemmDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopGemm(infiniopGemmDescriptor_t desc, void *workspace, size_t workspace_size, void *c,
                                       const void *a, const void *b, float alpha, float beta, void *stream);

INFINI_API infiniStatus_t infiniopDestroyGemmDescriptor(infiniopGemmDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_GEMM_H */
