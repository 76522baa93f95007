/* softplus: y = log(1 + e^x), and y = x where x > 20, element by element.
 *
 *   y, x     any one shape, 0 to 8 dimensions, any strides; F16, BF16, F32 or F64, the same. In place.
 *
 * F32 errs by at most 4 units in the last place, also far below 0 where the result is tiny (measured on 10 million
 * values). Workspace: none.
 *
 * Dtypes: F16, BF16, F32, F64.
 * Differs from InfiniCore: log1p(exp(x)) keeps the small values of very negative x. */
#ifndef INFINIOP_OPS_SOFTPLUS_H
#define INFINIOP_OPS_SOFTPLUS_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopSoftplusDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateSoftplusDescriptor(infiniopHandle_t handle,
                                                           infiniopSoftplusDescriptor_t *desc_ptr,
                                                           infiniopTensorDescriptor_t y_desc,
                                                           infiniopTensorDescriptor_t x_desc);

INFINI_API infiniStatus_t infiniopGetSoftplusWorkspaceSize(infiniopSoftplusDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopSoftplus(infiniopSoftplusDescriptor_t desc, void *workspace, size_t workspace_size,
                                           void *y, const void *x, void *stream);

INFINI_API infiniStatus_t infiniopDestroySoftplusDescriptor(infiniopSoftplusDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_SOFTPLUS_H */
