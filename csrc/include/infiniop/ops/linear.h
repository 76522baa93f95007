/* Linear: out = x @ weight^T + bias, a layer's product of activations by its weight.
 *
 *   out     [..., n]  the rows of x by those of weight; the dtype of x; stride 1 in the last dimension
 *   x       [..., k]  1 to 8 dimensions; F16, BF16 or F32; stride 1 in the last dimension, any others
 *   weight  [n, k]    the dtype of x; stride 1 in the last dimension, rows at any distance; read as it lies
 *   bias    [n]       the dtype of x or F32; stride 1; NULL at creation: none (then it is ignored when run)
 *
 * Sums in float, in an order that depends on k alone, rounded once with the bias: the result of a row of x has the same
 * bits whatever the other rows are. On CUDA that holds for up to 16 rows (4 of F32), which stream the weight; cuBLAS
 * multiplies more rows. out shares no memory with the others. Faster than Gemm if x has few rows, or if there is a
 * bias. Workspace: none on the CPU; on CUDA 32 MiB if cuBLAS multiplies, and out once more in F32 if only bias is F32.
 *
 * Dtypes: F16, BF16, F32.
 * Differs from InfiniCore: an addition, not in its interface; the kernels of torch.ops.infini.linear; on CUDA, more
 * than 16 rows (4 of F32) need a workspace of 32 MiB. */
#ifndef INFINIOP_OPS_LINEAR_H
#define INFINIOP_OPS_LINEAR_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopLinearDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateLinearDescriptor(infiniopHandle_t handle, infiniopLinearDescriptor_t *desc_ptr,
                                                         infiniopTensorDescriptor_t out_desc,
                                                         infiniopTensorDescriptor_t x_desc,
                                                         infiniopTensorDescriptor_t weight_desc,
                                                         infiniopTensorDescriptor_t bias_desc);

INFINI_API infiniStatus_t infiniopGetLinearWorkspaceSize(infiniopLinearDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopLinear(infiniopLinearDescriptor_t desc, void *workspace, size_t workspace_size,
                                         void *out, const void *x, const void *weight, const void *bias, void *stream);

INFINI_API infiniStatus_t infiniopDestroyLinearDescriptor(infiniopLinearDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_LINEAR_H */
