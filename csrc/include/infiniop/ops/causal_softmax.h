/* CausalSoftmax: softmax over the last dimension with a causal mask: the rows are the last q of k tokens, and row i
 * sees columns j <= k - q + i. y = exp(x - m) / sum of exp(x - m) over the columns that the row sees, m the largest x
 * there, and 0 in the others, whatever x is there.
 *
 *   y, x  [..., q, k]  q <= k; 2 to 8 dimensions; F16, BF16 or F32, the same; any strides. In place.
 *
 * If a row sees only -inf, or any inf or NaN, all columns that it sees become NaN. One rounding at the end.
 * Reference for the method: Vaswani et al., Attention Is All You Need, 2017, section 3.2.3. Workspace: none.
 *
 * Dtypes: F16, BF16, F32.
 * Differs from InfiniCore: 2 to 8 dimensions, not only 2 or 3; one rounding (InfiniCore on the CPU: two). */
#ifndef INFINIOP_OPS_CAUSAL_SOFTMAX_H
#define INFINIOP_OPS_CAUSAL_SOFTMAX_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopCausalSoftmaxDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateCausalSoftmaxDescriptor(infiniopHandle_t handle,
                                                                infiniopCausalSoftmaxDescriptor_t *desc_ptr,
                                                                infiniopTensorDescriptor_t y_desc,
                                                                infiniopTensorDescriptor_t x_desc);

INFINI_API infiniStatus_t infiniopGetCausalSoftmaxWorkspaceSize(infiniopCausalSoftmaxDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopCausalSoftmax(infiniopCausalSoftmaxDescriptor_t desc, void *workspace,
                                                size_t workspace_size, void *y, const void *x, void *stream);

INFINI_API infiniStatus_t infiniopDestroyCausalSoftmaxDescriptor(infiniopCausalSoftmaxDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_CAUSAL_SOFTMAX_H */
