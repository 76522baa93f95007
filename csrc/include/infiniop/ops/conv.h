/* Conv: y[i, o, p] = bias[o] + the sum over c and k of w[o, c, k] * x[i, c, p * stride - pad + k * dilation], where x
 * is 0 outside of its shape. p, k, stride, pad and dilation have a component for each of n spatial dimensions.
 *
 *   y     [N, Cout, out...]     F16, BF16 or F32; any strides;
 *                               out = (in + 2 * pad - dilation * (kernel - 1) - 1) / stride + 1, rounded down
 *   x     [N, Cin, in...]       the dtype of y; any strides
 *   w     [Cout, Cin, kernel..] the dtype of y; any strides
 *   bias  [Cout]                the dtype of y; NULL, at creation or when run: none
 *
 * pads, strides, dilations: host arrays of n int64_t, read when the descriptor is created; NULL: 0, 1 and 1 everywhere.
 * n: 1 to 6 spatial dimensions; each tensor has n + 2. No groups. y shares no memory with the others.
 * Sums in float, rounded once. Workspace: a tile of what the kernel sees, about half a MiB or 256 output positions;
 * and a copy of a w that is not contiguous, and of a y whose spatial dimensions are not.
 *
 * Dtypes: F16, BF16, F32.
 * Differs from InfiniCore: tensors may have any strides; the workspace is about half a MiB, not the padded input (more
 * where w or y is copied). */
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
