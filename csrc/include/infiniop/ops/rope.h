/* rope: TO BE DESCRIBED
 */
#ifndef INFINIOP_OPS_ROPE_H
#define INFINIOP_OPS_ROPE_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopRoPEDescriptor_t;

typedef enum INFINI_ENUM_BASE {
    INFINIOP_ROPE_ALGO_GPT_J = 0,    /* pairs are columns (2i, 2i + 1) */
    INFINIOP_ROPE_ALGO_GPT_NEOX = 1, /* pairs are columns (i, i + dhead / 2) */
    INFINIOP_ROPE_ALGO_COUNT = 2
} infiniopRoPEAlgo_t;

INFINI_API infiniStatus_t infiniopCreateRoPEDescriptor(
    infiniopHandle_t handle, infiniopRoPEDescriptor_t *desc_ptr, infiniopTensorDescriptor_t y_desc,
    infiniopTensorDescriptor_t x_desc, infiniopTensorDescriptor_t pos_ids_desc,
    infiniopTensorDescriptor_t sin_table_desc, infiniopTensorDescriptor_t cos_table_desc, infiniopRoPEAlgo_t algo);

INFINI_API infiniStatus_t infiniopGetRoPEWorkspaceSize(infiniopRoPEDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopRoPE(infiniopRoPEDescriptor_t desc, void *workspace, size_t workspace_size, void *y,
                                       const void *x, const void *pos_ids, const void *sin_table, const void *cos_table,
                                       void *stream);

INFINI_API infiniStatus_t infiniopDestroyRoPEDescriptor(infiniopRoPEDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_ROPE_H */
