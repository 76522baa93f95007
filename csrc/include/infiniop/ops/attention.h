/* Attention: copies the keys and values of new tokens into a contiguous cache, then attends,
 * out = softmax(q k^T / sqrt(dim) + causal mask) v.
 *
 *   out      [seq, H, dim]    F16, BF16 or F32, the same for all; stride 1 in the last dimension
 *   q        [H, seq, dim]    stride 1 in the last dimension
 *   k, v     [Hkv, seq, dim]  stride 1 in the last dimension; query head h reads key head h / (H / Hkv)
 *   k_cache, v_cache  [Hkv, rows, dim]  rows at least pos + seq; stride 1 in the last dimension. Read and written: k
 *                    and v go to the rows pos to pos + seq - 1, the others stay as they are.
 *   pos      tokens that are in the cache already: query t sees the rows 0 to pos + t
 *
 * out may be q itself, seen as [seq, H, dim]; k and v may be the cache's rows pos to pos + seq - 1 themselves (the same
 * addresses and strides), and are then not copied. No other memory is both read and written.
 * The two caches may be interleaved in memory.
 *
 * Scores, probabilities and sums are float, the result is rounded once.
 * Workspace: none on the CPU; on CUDA the partial results of split sequences.
 *
 * Dtypes: F16, BF16, F32.
 * Differs from InfiniCore: scores and probabilities stay in float; out may have any outer strides; wrong shapes are
 * BAD_TENSOR_SHAPE (InfiniCore: BAD_PARAM). */
#ifndef INFINIOP_OPS_ATTENTION_H
#define INFINIOP_OPS_ATTENTION_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopAttentionDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateAttentionDescriptor(
    infiniopHandle_t handle, infiniopAttentionDescriptor_t *desc_ptr, infiniopTensorDescriptor_t out_desc,
    infiniopTensorDescriptor_t q_desc, infiniopTensorDescriptor_t k_desc, infiniopTensorDescriptor_t v_desc,
    infiniopTensorDescriptor_t k_cache_desc, infiniopTensorDescriptor_t v_cache_desc, size_t pos);

INFINI_API infiniStatus_t infiniopGetAttentionWorkspaceSize(infiniopAttentionDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopAttention(infiniopAttentionDescriptor_t desc, void *workspace, size_t workspace_size,
                                            void *out, const void *q, const void *k, const void *v, void *k_cache,
                                            void *v_cache, void *stream);

INFINI_API infiniStatus_t infiniopDestroyAttentionDescriptor(infiniopAttentionDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_ATTENTION_H */
