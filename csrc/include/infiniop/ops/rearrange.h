/* rearrange: TO BE DESCRIBED
 */
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
