/* Gemm: c = alpha * a @ b + beta * c, for one matrix each or a batch of them.
 *
 *   c  [m, n] or [batch, m, n]       F16, BF16 or F32
 *   a  [m, k] or [batch or 1, m, k]  the dtype of c; a batch of 1 serves all
 *   b  [k, n] or [batch or 1, k, n]  the dtype of c; a batch of 1 serves all
 *
 * Each matrix lies row by row or column by column: stride 1 in one of its two dimensions (a dimension of at most one
 * element has any stride), else BAD_TENSOR_STRIDES. Batch strides are free, for a and b also 0.
 * Sums in float, alpha and beta applied in float, rounded once. beta 0: c is not read. k 0: c = beta * c.
 * c shares no memory with a and b. The order of a sum depends on k and the dtype alone. On AVX-512 BF16, BF16 products
 * are added in pairs and denormals count as zero. Workspace: none on the CPU; on CUDA 32 MiB where cuBLAS multiplies.
 *
 * Dtypes: F16, BF16, F32.
 * Differs from InfiniCore: c is not read where beta is 0, so a NaN in fresh memory does no harm. */
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
