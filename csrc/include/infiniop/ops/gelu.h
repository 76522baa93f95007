/* gelu: TO BE DESCRIBED
 */
#ifndef INFINIOP_OPS_GELU_H
#define INFINIOP_OPS_GELU_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopGeluDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateGeluDescriptor(infiniopHandle_t handle, infiniopGeluDescriptor_t *desc_ptr,
                                                       infiniopTensorDescriptor_t output_desc,
                                                       infiniopTensorDescriptor_t input_desc);

INFINI_API infiniStatus_t infiniopGetGeluWorkspaceSize(infiniopGeluDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopGelu(infiniopGeluDescriptor_t desc, void *workspace, size_t workspace_size,
                                       void *output, const void *input, void *stream);

INFINI_API infiniStatus_t infiniopDestroyGeluDescriptor(infiniopGeluDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_GELU_H */
