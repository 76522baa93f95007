/* I8Gemm: out = (x @ weights) * x_scale * weights_scale + bias: a product of bytes, exact in int32, with a scale for
 * each row of x and each column of weights (W8A8 quantized layers); scaled in float, one rounding.
 *
 *   out            [m, n]  F16, BF16 or F32; stride 1 in the last dimension
 *   bias           [n]     the dtype of out; NULL, at creation or when run: none
 *   x              [m, k]  I8; stride 1 in the last dimension; k at most 131071, so that the sum fits
 *   x_scale        [m]     F32 (also [m, 1])
 *   weights        [k, n]  I8; read as they lie if column-major (stride 1 in the first dimension), else transposed first
 *   weights_scale  [n]     F32 (also [1, n] or [n, 1])
 *
 * The matrices may have a leading dimension of 1. out shares no memory with the others. Workspace: none
 * on the CPU.
 *
 * Dtypes: I8 to F16, BF16, F32.
 * Differs from InfiniCore: also on the CPU; k is at most 131071, so that the sum fits in int32; weights may have any
 * strides; on CUDA, a run of 64 rows or more needs a workspace of at most 64 MiB (more beyond 131,072 rows). */
#ifndef INFINIOP_OPS_INT8_GEMM_H
#define INFINIOP_OPS_INT8_GEMM_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopI8GemmDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateI8GemmDescriptor(
    infiniopHandle_t handle, infiniopI8GemmDescriptor_t *desc_ptr, infiniopTensorDescriptor_t out_desc,
    infiniopTensorDescriptor_t bias_desc, infiniopTensorDescriptor_t x_desc, infiniopTensorDescriptor_t x_scale_desc,
    infiniopTensorDescriptor_t weights_desc, infiniopTensorDescriptor_t weights_scale_desc);

INFINI_API infiniStatus_t infiniopGetI8GemmWorkspaceSize(infiniopI8GemmDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopI8Gemm(infiniopI8GemmDescriptor_t desc, void *workspace, size_t workspace_size,
                                         void *out, const void *bias, const void *x, const void *x_scale,
                                         const void *weights, const void *weights_scale, void *stream);

INFINI_API infiniStatus_t infiniopDestroyI8GemmDescriptor(infiniopI8GemmDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_INT8_GEMM_H */
