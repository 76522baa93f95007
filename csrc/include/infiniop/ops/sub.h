/* sub: TO BE DESCRIBED
 */
#ifndef INFINIOP_OPS_SUB_H
#define INFINIOP_OPS_SUB_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopSubDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateSubDescriptor(infiniopHandle_t handle, infiniopSubDescriptor_t *desc_ptr,
                                                      infiniopTensorDescriptor_t c_desc,
                                                      infiniopTensorDescriptor_t a_desc,
                                                      infiniopTensorDescriptor_t b_desc);

INFINI_API infiniStatus_t infiniopGetSubWorkspaceSize(infiniopSubDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopSub(infiniopSubDescriptor_t desc, void *workspace, size_t workspace_size, void *c,
                                      const void *a, const void *b, void *stream);

INFINI_API infiniStatus_t infiniopDestroySubDescriptor(infiniopSubDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_SUB_H */
