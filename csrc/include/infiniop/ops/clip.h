/* clip: y = max(min(x, max_val), min_val), element by element.
 *
 *   y, x, min_val, max_val  any one shape, 0 to 8 dimensions, any strides; F16, BF16, F32 or F64, the same. In place
 *                           with an input. The bounds are tensors: give one number for all by strides of 0.
 *
 * Where min_val > max_val the result is min_val. A NaN in x stays NaN; a bound that is NaN does not bound.
 * Workspace: none.
 *
 * Dtypes: F16, BF16, F32, F64.
 * Differs from InfiniCore: a NaN in x stays NaN. */
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
