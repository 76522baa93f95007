/* rearrange: dst = src, element by element; copies between any two layouts.
 *
 *   dst, src    any one shape, 0 to 8 dimensions, any strides; any dtype, the same. src may be broadcast by stride 0.
 *               dst may be src itself, which then stays as it is.
 *
 * There is no workspace, and so there are only three functions.
 *
 * Dtypes: all.
 * Differs from InfiniCore: none. */
#ifndef INFINIOP_OPS_REARRANGE_H
#define INFINIOP_OPS_REARRANGE_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopRearrangeDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateRearrangeDescriptor(infiniopHandle_t handle,
                                                            infiniopRearrangeDescriptor_t *desc_ptr,
                                                            infiniopTensorDescriptor_t dst_desc,
                                                            infiniopTensorDescriptor_t src_desc);

INFINI_API infiniStatus_t infiniopRearrange(infiniopRearrangeDescriptor_t desc, void *dst, const void *src,
                                            void *stream);

INFINI_API infiniStatus_t infiniopDestroyRearrangeDescriptor(infiniopRearrangeDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_REARRANGE_H */
