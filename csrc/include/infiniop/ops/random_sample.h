/* random_sample: TO BE DESCRIBED
 */
#ifndef INFINIOP_OPS_RANDOM_SAMPLE_H
#define INFINIOP_OPS_RANDOM_SAMPLE_H

#include "../operator_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct InfiniopDescriptor *infiniopRandomSampleDescriptor_t;

INFINI_API infiniStatus_t infiniopCreateRandomSampleDescriptor(infiniopHandle_t handle,
                                                               infiniopRandomSampleDescriptor_t *desc_ptr,
                                                               infiniopTensorDescriptor_t result_desc,
                                                               infiniopTensorDescriptor_t probs_desc);

INFINI_API infiniStatus_t infiniopGetRandomSampleWorkspaceSize(infiniopRandomSampleDescriptor_t desc, size_t *size);

INFINI_API infiniStatus_t infiniopCreateRandomSampleBatchDescriptor(infiniopHandle_t handle,
                                                                    infiniopRandomSampleDescriptor_t *desc_ptr,
                                                                    infiniopTensorDescriptor_t result_desc,
                                                                    infiniopTensorDescriptor_t probs_desc);

INFINI_API infiniStatus_t infiniopRandomSample(infiniopRandomSampleDescriptor_t desc, void *workspace,
                                               size_t workspace_size, void *result, const void *probs, float random_val,
                                               float topp, int topk, float temperature, void *stream);

INFINI_API infiniStatus_t infiniopRandomSampleBatch(infiniopRandomSampleDescriptor_t desc, void *workspace,
                                                    size_t workspace_size, void *result, const void *probs,
                                                    const float *random_val, const float *topp, const int *topk,
                                                    const float *temperature, int batch_size, void *stream);

INFINI_API infiniStatus_t infiniopDestroyRandomSampleDescriptor(infiniopRandomSampleDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPS_RANDOM_SAMPLE_H */
