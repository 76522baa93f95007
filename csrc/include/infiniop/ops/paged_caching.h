/* PagedCaching: writes the keys and values of new tokens into a paged cache,
 * cache[slot / block size, h, slot % block size, :] = k[t, h, :] for slot = slot_mapping[t].
 *
 *   k_cache, v_cache  [blocks, Hkv, block size, D]  F16, BF16 or F32, the same for all but slot_mapping; each with
 *                               strides of its own, stride 1 in the last dimension
 *   k, v              [tokens, Hkv, D]  stride 1 in the last dimension
 *   slot_mapping      [tokens]  I64 or I32: the slot of each token; below 0: the token is skipped
 *
 * Other slots of the caches stay unchanged; if two tokens have the same slot, the last one stays. Slots are checked
 * before anything is written: one of blocks * block size or more is refused with BAD_PARAM. k and v may lie in the
 * caches: they are then copied first. Workspace: none.
 *
 * On NVIDIA GPUs slots are read by the kernel: a token whose slot is outside the caches is skipped. k and v may not lie
 * in the caches there (BAD_PARAM).
 *
 * Dtypes: F16, BF16, F32.
 * Differs from InfiniCore: also on the CPU; slots are checked before anything is written (InfiniCore writes out of
 * bounds). */
#ifndef INFINIOP_OPS_PAGED_CACHING_H
#define INFINIOP_OPS_PAGED_CACHING_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopPagedCachingDescriptor_t;

INFINI_API infiniStatus_t infiniopCreatePagedCachingDescriptor(
    infiniopHandle_t handle, infiniopPagedCachingDescriptor_t *desc_ptr, infiniopTensorDescriptor_t k_cache_desc,
    infiniopTensorDescriptor_t v_cache_desc, infiniopTensorDescriptor_t k_desc, infiniopTensorDescriptor_t v_desc,
    infiniopTensorDescriptor_t slot_mapping_desc);

INFINI_API infiniStatus_t infiniopGetPagedCachingWorkspaceSize(infiniopPagedCachingDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopPagedCaching(infiniopPagedCachingDescriptor_t desc, void *workspace,
                                               size_t workspace_size, void *k_cache, void *v_cache, const void *k,
                                               const void *v, const void *slot_mapping, void *stream);

INFINI_API infiniStatus_t infiniopDestroyPagedCachingDescriptor(infiniopPagedCachingDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_PAGED_CACHING_H */
