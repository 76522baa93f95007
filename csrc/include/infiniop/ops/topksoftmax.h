/* Topksoftmax: the topk largest of softmax(x) in each row, largest first.
 *
 *   x        [N, width]  F16, BF16 or F32; stride 1 in a row, any from row to row
 *   values   [N, topk]   F32, contiguous
 *   indices  [N, topk]   I32, contiguous: their columns
 *   topk                 1 to width, or BAD_PARAM
 *   norm                 not 0: values are divided by their sum
 *
 * Columns are chosen and ordered by x: among equals the lower index comes first, a NaN before all numbers (all values
 * of its row are NaN). values and indices have no descriptor: their memory must have the sizes above.
 * Workspace: none.
 *
 * Dtypes: F16, BF16, F32.
 * Differs from InfiniCore: topk beyond the width is refused, not read out of bounds; of equal values the lower index
 * comes first; the row stride is honoured; any width on CUDA (InfiniCore: 512). */
#ifndef INFINIOP_OPS_TOPKSOFTMAX_H
#define INFINIOP_OPS_TOPKSOFTMAX_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopTopksoftmaxDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateTopksoftmaxDescriptor(infiniopHandle_t handle,
                                                              infiniopTopksoftmaxDescriptor_t *desc_ptr,
                                                              infiniopTensorDescriptor_t x_desc);

INFINI_API infiniStatus_t infiniopGetTopksoftmaxWorkspaceSize(infiniopTopksoftmaxDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopTopksoftmax(infiniopTopksoftmaxDescriptor_t desc, void *workspace,
                                              size_t workspace_size, void *values, void *indices, const void *x,
                                              size_t topk, int norm, void *stream);

INFINI_API infiniStatus_t infiniopDestroyTopksoftmaxDescriptor(infiniopTopksoftmaxDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_TOPKSOFTMAX_H */
