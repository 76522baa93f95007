/* LayerNorm: over the last dimension of input, with the values that a backward pass needs:
 *
 *   input_std_deviation = sqrt(var + eps), var = the mean of (input - mean)^2, without Bessel's correction
 *   input_standardization = (input - mean) / input_std_deviation
 *   output = input_standardization * weight + bias
 *
 *   input, output, input_standardization  [..., n]  1 to 8 dimensions
 *   input_std_deviation  [...]  the shape of input without its last dimension
 *   weight, bias         [n]
 *   eps                  finite, at least 0
 *
 * All of one dtype, F16, BF16 or F32, but for weight and bias, which may both be F32; any strides. bias_desc may be
 * NULL: no bias, and the run ignores its pointer. In place: output, or else input_standardization, may be input. The
 * outputs share no other memory, also not with weight and bias. Each output is rounded once, from values in float. The
 * variance is computed about the mean, so it does not suffer where the mean is far from 0. A row without elements has
 * the deviation NaN.
 *
 * Reference for the method: Ba, Kiros and Hinton, Layer Normalization, 2016. Workspace: none.
 *
 * Dtypes: F16, BF16, F32.
 * Differs from InfiniCore: any number of dimensions (InfiniCore on the CPU: 3); the variance is computed about the
 * mean, without cancellation. */
#ifndef INFINIOP_OPS_LAYER_NORM_H
#define INFINIOP_OPS_LAYER_NORM_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopLayerNormDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateLayerNormDescriptor(
    infiniopHandle_t handle, infiniopLayerNormDescriptor_t *desc_ptr, infiniopTensorDescriptor_t output_desc,
    infiniopTensorDescriptor_t input_standardization_desc, infiniopTensorDescriptor_t input_std_deviation_desc,
    infiniopTensorDescriptor_t input_desc, infiniopTensorDescriptor_t weight_desc, infiniopTensorDescriptor_t bias_desc,
    float eps);

INFINI_API infiniStatus_t infiniopGetLayerNormWorkspaceSize(infiniopLayerNormDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopLayerNorm(infiniopLayerNormDescriptor_t desc, void *workspace, size_t workspace_size,
                                            void *output, void *input_standardization, void *input_std_deviation,
                                            const void *input, const void *weight, const void *bias, void *stream);

INFINI_API infiniStatus_t infiniopDestroyLayerNormDescriptor(infiniopLayerNormDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_LAYER_NORM_H */
