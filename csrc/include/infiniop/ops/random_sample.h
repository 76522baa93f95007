/* RandomSample: the index of one token, drawn from logits by temperature, top-k and top-p with a given random number.
 *
 *   result  []   I8, I16, I32, I64, U8, U16, U32 or U64; wide enough for n - 1 (BAD_TENSOR_DTYPE). Any other number of
 *                dimensions is BAD_TENSOR_SHAPE.
 *   probs   [n]  the logits (not probabilities): F16, BF16, F32 or F64, stride 1; 1 to 2^24 of them. -infinity masks a
 *                token; NaN, +infinity and logits that are all -infinity are BAD_PARAM; on CUDA, where the host does
 *                not read the values, the result has its highest bit set: below 0 if its type is signed.
 *   random_val   in [0, 1]: where the draw falls
 *   topp         finite, at least 0; 1 or more: no limit
 *   topk         0 or less: no limit
 *   temperature  finite, at least 0
 *
 * If random_val, topp or temperature is 0 or topk is 1: the first of the largest logits. Otherwise the tokens are
 * ordered by descending logit (equal ones: lower index first), weights are w = exp((x - max) / temperature), and the
 * result is the first token at which the running sum of weights reaches
 * random_val * min(sum of the first topk, topp * sum of all). Weights in float (F64: in double), sums in double.
 *
 * Workspace: none.
 *
 * The functions of several rows, CreateRandomSampleBatchDescriptor and RandomSampleBatch, are declared for callers that
 * look them up, and return NOT_IMPLEMENTED.
 *
 * Dtypes: F16, BF16, F32, F64.
 * Differs from InfiniCore: sums in double; topk = 0 is no limit, not a read out of bounds; parameters out of range are
 * refused; RandomSampleBatch returns NOT_IMPLEMENTED. */
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
