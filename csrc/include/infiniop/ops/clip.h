/* clip: TO BE DESCRIBED
 */
#ifndef INFINIOP_OPS_CLIP_H
#define INFINIOP_OPS_CLIP_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopClipDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateClipDescriptor(infiniopHandle_t handle, infiniopClipDescriptor_t *desc_ptr,
                                                       infiniopTensorDescriptor_t y_desc,
                                                       infiniopTensorDescriptor_t x_desc,
                                                       infiniopTensorDescriptor_t min_val_desc,
                                                       infiniopTensorDescriptor_t max_val_desc);

INFINI_API infiniStatus_t infiniopGetClipWorkspaceSize(infiniopClipDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopClip(infiniopClipDescriptor_t desc, void *workspace, size_t workspace_size, void *y,
                                       const void *x, const void *min_val, const void *max_val, void *stream);

INFINI_API infiniStatus_t infiniopDestroyClipDescriptor(infiniopClipDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_CLIP_H */
