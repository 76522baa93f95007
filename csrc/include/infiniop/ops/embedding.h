/* Embedding: out[...] = weight[ids[...]]: the rows of a table at the ids, copied bit for bit.
 *
 *   out     [..., n]  one row for each id; the dtype of weight; stride 1 in the last dimension
 *   ids     [...]     0 to 7 dimensions; I64 or I32, each in 0 .. v - 1, else BAD_PARAM; on CUDA, where the host does
 *                     not read the values, the row of any other id becomes NaN
 *   weight  [v, n]    F16, BF16 or F32; stride 1 in the last dimension, rows at any distance
 *
 * out shares no memory with ids and weight. Workspace: none.
 *
 * Dtypes: F16, BF16, F32; ids I32 or I64.
 * Differs from InfiniCore: an addition, not in its interface. */
#ifndef INFINIOP_OPS_EMBEDDING_H
#define INFINIOP_OPS_EMBEDDING_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopEmbeddingDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateEmbeddingDescriptor(infiniopHandle_t handle,
                                                            infiniopEmbeddingDescriptor_t *desc_ptr,
                                                            infiniopTensorDescriptor_t out_desc,
                                                            infiniopTensorDescriptor_t ids_desc,
                                                            infiniopTensorDescriptor_t weight_desc);

INFINI_API infiniStatus_t infiniopGetEmbeddingWorkspaceSize(infiniopEmbeddingDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopEmbedding(infiniopEmbeddingDescriptor_t desc, void *workspace, size_t workspace_size,
                                            void *out, const void *ids, const void *weight, void *stream);

INFINI_API infiniStatus_t infiniopDestroyEmbeddingDescriptor(infiniopEmbeddingDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_EMBEDDING_H */
