/* LinearAdd: out = (x @ weight^T + bias) + residual: Linear followed by Add, in one pass and with the same bits.
 *
 *   out       [..., n]  as in Linear
 *   x         [..., k]  as in Linear: F16, BF16 or F32
 *   weight    [n, k]    as in Linear
 *   bias      [n]       as in Linear; NULL at creation: none (then it is ignored when run)
 *   residual  [..., n]  the shape, the dtype and the strides of out. In place: it may be out itself
 *
 * The product with its bias is rounded to the dtype, as Linear rounds it; then the residual is added, and the sum
 * rounded. out shares no memory with x, weight or bias. Workspace: as Linear's; if cuBLAS multiplies, also the bytes of
 * the product.
 *
 * Dtypes: F16, BF16, F32.
 * Differs from InfiniCore: an addition, not in its interface; on CUDA, a workspace where Linear has one, larger by the
 * product. */
#ifndef INFINIOP_OPS_LINEAR_ADD_H
#define INFINIOP_OPS_LINEAR_ADD_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopLinearAddDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateLinearAddDescriptor(
    infiniopHandle_t handle, infiniopLinearAddDescriptor_t *desc_ptr, infiniopTensorDescriptor_t out_desc,
    infiniopTensorDescriptor_t x_desc, infiniopTensorDescriptor_t weight_desc, infiniopTensorDescriptor_t bias_desc,
    infiniopTensorDescriptor_t residual_desc);

INFINI_API infiniStatus_t infiniopGetLinearAddWorkspaceSize(infiniopLinearAddDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopLinearAdd(infiniopLinearAddDescriptor_t desc, void *workspace, size_t workspace_size,
                                            void *out, const void *x, const void *weight, const void *bias,
                                            const void *residual, void *stream);

INFINI_API infiniStatus_t infiniopDestroyLinearAddDescriptor(infiniopLinearAddDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_LINEAR_ADD_H */
