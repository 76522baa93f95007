/* Topkrouter: which experts get each token, as DeepSeek-V3 chooses among 256 in 8 groups of 32.
 *
 *   s = sigmoid(x), c = s + correction_bias; a group's score is the sum of its two largest c; the 4 groups of largest
 *   score are kept, in the others c becomes 0 (not -inf: with negative c, or topk above 128, their experts are chosen);
 *   indices: the topk largest c, largest first
 *   values = s[indices] * routed_scaling_factor / (sum of s[indices] + 1e-9)
 *
 *   x                [N, 256]   F16, BF16 or F32; stride 1 in a row, any from row to row
 *   correction_bias  [256]      F32, any stride
 *   values           [N, topk]  F32, contiguous
 *   indices          [N, topk]  I32, contiguous
 *   topk                        1 to 256, or BAD_PARAM
 *
 * Among equal experts or groups the lower index comes first; a NaN comes before all numbers. values and indices have no
 * descriptor: their memory must have the sizes above.
 *
 * Reference for the method: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 2.1.2. Workspace: none.
 *
 * Dtypes: F16, BF16, F32.
 * Differs from InfiniCore: a width other than 256 is refused at creation with BAD_TENSOR_SHAPE (InfiniCore: when run,
 * with BAD_PARAM); of equal values the lower index comes first; the row stride is honoured. */
#ifndef INFINIOP_OPS_TOPKROUTER_H
#define INFINIOP_OPS_TOPKROUTER_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopTopkrouterDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateTopkrouterDescriptor(infiniopHandle_t handle,
                                                             infiniopTopkrouterDescriptor_t *desc_ptr,
                                                             infiniopTensorDescriptor_t x_desc,
                                                             infiniopTensorDescriptor_t correction_bias_desc);

INFINI_API infiniStatus_t infiniopGetTopkrouterWorkspaceSize(infiniopTopkrouterDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopTopkrouter(infiniopTopkrouterDescriptor_t desc, void *workspace,
                                             size_t workspace_size, void *values, void *indices, const void *x,
                                             const void *correction_bias, float routed_scaling_factor, size_t topk,
                                             void *stream);

INFINI_API infiniStatus_t infiniopDestroyTopkrouterDescriptor(infiniopTopkrouterDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_TOPKROUTER_H */
