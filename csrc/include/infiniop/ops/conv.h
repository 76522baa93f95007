/* conv: TO BE DESCRIBED
 */
#ifndef INFINIOP_OPS_CONV_H
#define INFINIOP_OPS_CONV_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopConvDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateConvDescriptor(infiniopHandle_t handle, infiniopConvDescriptor_t *desc_ptr,
                                                       infiniopTensorDescriptor_t y_desc,
                                                       infiniopTensorDescriptor_t x_desc,
                                                       infiniopTensorDescriptor_t w_desc,
                                                       infiniopTensorDescriptor_t bias_desc, void *pads, void *strides,
                                                       void *dilations, size_t n);

INFINI_API infiniStatus_t infiniopGetConvWorkspaceSize(infiniopConvDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopConv(infiniopConvDescriptor_t desc, void *workspace, size_t workspace_size, void *y,
                                       const void *x, const void *w, const void *bias, void *stream);

INFINI_API infiniStatus_t infiniopDestroyConvDescriptor(infiniopConvDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_CONV_H */
