/* RoPE: rotary position embedding: each pair (x0, x1) of a head's columns is rotated by its token's angle,
 * y0 = x0 cos - x1 sin, y1 = x0 sin + x1 cos.
 *
 *   y, x       [seq, heads, dhead] or [batch, seq, heads, dhead]  F16, BF16, F32 or F64, the same; dhead even; stride 1
 *                     in the last dimension. In place.
 *   pos_ids    [seq], [1, seq] or [batch, seq]  any integer dtype, any strides: each token's row of the tables; one
 *                     outside them is refused with BAD_PARAM before anything is written
 *   sin_table, cos_table  [rows, dhead / 2]  the dtype of x, or F32 where x is F16 or BF16; stride 1 in the last
 *                     dimension. The order of arguments: sin before cos.
 *   algo       INFINIOP_ROPE_ALGO_GPT_J: pairs are columns (2i, 2i + 1); INFINIOP_ROPE_ALGO_GPT_NEOX: (i, i + dhead /
 *                    2)
 *
 * On NVIDIA GPUs positions are read by the kernel: a token whose position is outside the tables gets NaN.
 *
 * Reference for the method: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021. Workspace:
 * none.
 *
 * Dtypes: F16, BF16, F32, F64.
 * Differs from InfiniCore: strides of pos_ids are honoured and positions are checked against the tables; an unknown
 * algo is BAD_PARAM (InfiniCore: NULL_POINTER). */
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
