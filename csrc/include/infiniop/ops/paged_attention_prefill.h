/* PagedAttentionPrefill: PagedAttention for several queries of each sequence, which see no keys after their own. The
 * new keys and values are already in the cache (PagedCaching).
 *
 *   out, q            [all queries, H, D]  the queries of one sequence after those of another; as in PagedAttention
 *   k_cache, v_cache  [blocks, Hkv, block size, D]
 *   block_tables      [n, max blocks]  I64 or I32
 *   seq_lens          [n]      I64 or I32: keys of each sequence, the new ones included; at least its number of queries
 *   cum_seq_lens_q    [n + 1]  I64 or I32: sequence i has the queries from cum_seq_lens_q[i] up to, not including,
 *                              cum_seq_lens_q[i + 1]: begins with 0, does not decrease, ends with the size of q
 *                              (BAD_PARAM; another number of dimensions too)
 *   alibi_slopes      [H]      F32, or NULL for none (descriptor and address)
 *   scale                      finite; usually 1 / sqrt(D)
 *
 * Query t of sequence i sees the keys 0 to p = seq_lens[i] - queries of i + t, its own; with ALiBi, key s gets
 * slope * (s - p). The rest and the checks of values in memory are those of PagedAttention, and so is the
 * workspace.
 *
 * Dtypes: F16, BF16, F32.
 * Differs from InfiniCore: those of PagedAttention. */
#ifndef INFINIOP_OPS_PAGED_ATTENTION_PREFILL_H
#define INFINIOP_OPS_PAGED_ATTENTION_PREFILL_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopPagedAttentionPrefillDescriptor_t;

INFINI_API infiniStatus_t infiniopCreatePagedAttentionPrefillDescriptor(
    infiniopHandle_t handle, infiniopPagedAttentionPrefillDescriptor_t *desc_ptr, infiniopTensorDescriptor_t out_desc,
    infiniopTensorDescriptor_t q_desc, infiniopTensorDescriptor_t k_cache_desc, infiniopTensorDescriptor_t v_cache_desc,
    infiniopTensorDescriptor_t block_tables_desc, infiniopTensorDescriptor_t seq_lens_desc,
    infiniopTensorDescriptor_t cum_seq_lens_q_desc, infiniopTensorDescriptor_t alibi_slopes_desc, float scale);

INFINI_API infiniStatus_t infiniopGetPagedAttentionPrefillWorkspaceSize(infiniopPagedAttentionPrefillDescriptor_t desc,
                                                                        size_t *size);

INFINI_API infiniStatus_t infiniopPagedAttentionPrefill(infiniopPagedAttentionPrefillDescriptor_t desc, void *workspace,
                                                        size_t workspace_size, void *out, const void *q,
                                                        const void *k_cache, const void *v_cache,
                                                        const void *block_tables, const void *seq_lens,
                                                        const void *cum_seq_lens_q, const void *alibi_slopes,
                                                        void *stream);

INFINI_API infiniStatus_t
infiniopDestroyPagedAttentionPrefillDescriptor(infiniopPagedAttentionPrefillDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_PAGED_ATTENTION_PREFILL_H */
