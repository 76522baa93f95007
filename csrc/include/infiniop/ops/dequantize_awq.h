/* DequantizeAWQ: half-precision weights from AWQ's 4-bit integers, out = (q - zero) * scale.
 *
 *   out      [in, out columns]      F16; out columns a multiple of 8
 *   qweight  [in, out columns / 8]  I32, eight 4-bit values each
 *   scales   [groups, out columns]  F16; in is a multiple of groups, and row i belongs to group i / (in / groups)
 *   zeros    [groups, out columns / 8]  I32, packed as qweight is
 *
 * Column 8c + j is in bits 4b to 4b + 3 of integer c, b = (0, 4, 1, 5, 2, 6, 3, 7)[j]. All have stride 1 in the last
 * dimension and any row stride. The order of arguments: scales before zeros. The difference is exact, the product is
 * rounded once, to nearest even.
 * Reference for the method: Lin et al., AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration,
 * 2023. Workspace: none.
 *
 * Dtypes: F16.
 * Differs from InfiniCore: also on the CPU; shapes are checked. */
#ifndef INFINIOP_OPS_DEQUANTIZE_AWQ_H
#define INFINIOP_OPS_DEQUANTIZE_AWQ_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopDequantizeAWQDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateDequantizeAWQDescriptor(infiniopHandle_t handle,
                                                                infiniopDequantizeAWQDescriptor_t *desc_ptr,
                                                                infiniopTensorDescriptor_t out_desc,
                                                                infiniopTensorDescriptor_t qweight_desc,
                                                                infiniopTensorDescriptor_t scales_desc,
                                                                infiniopTensorDescriptor_t zeros_desc);

INFINI_API infiniStatus_t infiniopGetDequantizeAWQWorkspaceSize(infiniopDequantizeAWQDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopDequantizeAWQ(infiniopDequantizeAWQDescriptor_t desc, void *workspace,
                                                size_t workspace_size, void *out, const void *qweight,
                                                const void *scales, const void *zeros, void *stream);

INFINI_API infiniStatus_t infiniopDestroyDequantizeAWQDescriptor(infiniopDequantizeAWQDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_DEQUANTIZE_AWQ_H */
