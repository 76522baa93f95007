/* int8_gemm: TO BE DESCRIBED
 */
#ifndef INFINIOP_OPS_INT8_GEMM_H
#define INFINIOP_OPS_INT8_GEMM_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopI8GemmDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateI8GemmDescriptor(
    infiniopHandle_t handle, infiniopI8GemmDescriptor_t *desc_ptr, infiniopTensorDescriptor_t out_desc,
    infiniopTensorDescriptor_t bias_desc, infiniopTensorDescriptor_t x_desc, infiniopTensorDescriptor_t x_scale_desc,
    infiniopTensorDescriptor_t weights_desc, infiniopTensorDescriptor_t weights_scale_desc);

INFINI_API infiniStatus_t infiniopGetI8GemmWorkspaceSize(infiniopI8GemmDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopI8Gemm(infiniopI8GemmDescriptor_t desc, void *workspace, size_t workspace_size,
                                         void *out, const void *bias, const void *x, const void *x_scale,
                                         const void *weights, const void *weights_scale, void *stream);

INFINI_API infiniStatus_t infiniopDestroyI8GemmDescriptor(infiniopI8GemmDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_INT8_GEMM_H */
