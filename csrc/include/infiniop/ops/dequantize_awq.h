/* dequantize_awq: TO BE DESCRIBED
 */
#ifndef INFINIOP_OPS_DEQUANTIZE_AWQ_H
#define INFINIOP_OPS_DEQUANTIZE_AWQ_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopDequantizeAWQDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateDequantizeAWQDescriptor(infiniopHandle_t handle,
                                                                infiniopDequantizeAWQDescriptor_t *desc_ptr,
                                                                infiniopTensorDescriptor_t out_desc,
                                                                infiniopTensorDescriptor_t qweight_desc,
                                                                infiniopTensorDescriptor_t scales_desc,
                                                                infiniopTensorDescriptor_t zeros_desc);

INFINI_API infiniStatus_t infiniopGetDequantizeAWQWorkspaceSize(infiniopDequantizeAWQDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopDequantizeAWQ(infiniopDequantizeAWQDescriptor_t desc, void *workspace,
                                                size_t workspace_size, void *out, const void *qweight,
                                                const void *scales, const void *zeros, void *stream);

INFINI_API infiniStatus_t infiniopDestroyDequantizeAWQDescriptor(infiniopDequantizeAWQDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_DEQUANTIZE_AWQ_H */
