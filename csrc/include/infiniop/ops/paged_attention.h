/* PagedAttention: out = softmax(scale * q k^T + bias) v for one query of each sequence, whose keys and values lie in
 * the blocks of a paged cache (decode).
 *
 *   out, q            [n, H, D]  n sequences; F16, BF16 or F32, the same for all but the tables; D at most 1024; stride
 *                                1 in the last dimension. In place.
 *   k_cache, v_cache  [blocks, Hkv, block size, D]  stride 1 in the last dimension, each with strides of its own; query
 *                                head h reads key head h / (H / Hkv), so H is a multiple of Hkv (BAD_TENSOR_SHAPE)
 *   block_tables      [n, max blocks]  I64 or I32: key t of sequence i is row t % block size of block
 *                                block_tables[i, t / block size]; only the entries that its length needs are read
 *   seq_lens          [n]        I64 or I32: keys of each sequence, that of the query included. 0: its part of out is
 *                                left as it is
 *   alibi_slopes      [H]        F32, or NULL for none (descriptor and address): bias = slope * (t - (seq_len - 1)),
 *                                zero for the last key and negative before
 *   scale                        finite; usually 1 / sqrt(D)
 *
 * Lengths and blocks are checked before they are used: BAD_PARAM names the wrong one. Scores and sums are float. Long
 * sequences are split among threads by their length alone, so bits depend neither on the number of threads nor on the
 * other sequences of the batch.
 * Reference for the method: Kwon et al., Efficient Memory Management for Large Language Model Serving with
 * PagedAttention, 2023; Press et al., Train Short, Test Long (ALiBi), 2022.
 * Workspace: none on the CPU; on CUDA the partial results of split sequences.
 *
 * Dtypes: F16, BF16, F32.
 * Differs from InfiniCore: also on the CPU; ALiBi's distances are signed; nothing is added to the denominator
 * (InfiniCore: 1e-6); lengths and blocks are checked; any head size; all strides are honoured. */
#ifndef INFINIOP_OPS_PAGED_ATTENTION_H
#define INFINIOP_OPS_PAGED_ATTENTION_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopPagedAttentionDescriptor_t;

INFINI_API infiniStatus_t infiniopCreatePagedAttentionDescriptor(
    infiniopHandle_t handle, infiniopPagedAttentionDescriptor_t *desc_ptr, infiniopTensorDescriptor_t out_desc,
    infiniopTensorDescriptor_t q_desc, infiniopTensorDescriptor_t k_cache_desc, infiniopTensorDescriptor_t v_cache_desc,
    infiniopTensorDescriptor_t block_tables_desc, infiniopTensorDescriptor_t seq_lens_desc,
    infiniopTensorDescriptor_t alibi_slopes_desc, float scale);

INFINI_API infiniStatus_t infiniopGetPagedAttentionWorkspaceSize(infiniopPagedAttentionDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopPagedAttention(infiniopPagedAttentionDescriptor_t desc, void *workspace,
                                                 size_t workspace_size, void *out, const void *q, const void *k_cache,
                                                 const void *v_cache, const void *block_tables, const void *seq_lens,
                                                 const void *alibi_slopes, void *stream);

INFINI_API infiniStatus_t infiniopDestroyPagedAttentionDescriptor(infiniopPagedAttentionDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_PAGED_ATTENTION_H */
