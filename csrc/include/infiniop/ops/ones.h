/* ones: TO BE DESCRIBED
 */
#ifndef INFINIOP_OPS_ONES_H
#define INFINIOP_OPS_ONES_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopOnesDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateOnesDescriptor(infiniopHandle_t handle, infiniopOnesDescriptor_t *desc_ptr,
                                                       infiniopTensorDescriptor_t y_desc,
                                                       infiniopTensorDescriptor_t x_desc);

INFINI_API infiniStatus_t infiniopGetOnesWorkspaceSize(infiniopOnesDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopOnes(infiniopOnesDescriptor_t desc, void *workspace, size_t workspace_size, void *y,
                                       const void *x, void *stream);

INFINI_API infiniStatus_t infiniopDestroyOnesDescriptor(infiniopOnesDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_ONES_H */
