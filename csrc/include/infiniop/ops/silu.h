/* silu: TO BE DESCRIBED
 */
#ifndef INFINIOP_OPS_SILU_H
#define INFINIOP_OPS_SILU_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopSiluDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateSiluDescriptor(infiniopHandle_t handle, infiniopSiluDescriptor_t *desc_ptr,
                                                       infiniopTensorDescriptor_t output_desc,
                                                       infiniopTensorDescriptor_t input_desc);

INFINI_API infiniStatus_t infiniopGetSiluWorkspaceSize(infiniopSiluDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopSilu(infiniopSiluDescriptor_t desc, void *workspace, size_t workspace_size,
                                       void *output, const void *input, void *stream);

INFINI_API infiniStatus_t infiniopDestroySiluDescriptor(infiniopSiluDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_SILU_H */
