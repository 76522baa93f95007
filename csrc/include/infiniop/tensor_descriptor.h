/* Tensor descriptors: element type, shape and strides of a tensor; its memory is given when an operator runs. */
#ifndef INFINIOP_TENSOR_DESCRIPTOR_H
#define INFINIOP_TENSOR_DESCRIPTOR_H

#include "../infinirt.h"

#ifdef __cplusplus
extern "C" {
#endif

struct InfiniopTensorDescriptor; /* opaque */

typedef struct InfiniopTensorDescriptor *infiniopTensorDescriptor_t;

/* ndim: 0 (one element) to 8. shape[ndim]: elements; 0 is allowed. strides[ndim]: in elements, from an index to the
 * next one; 0 repeats an element, negative ones count backwards from the address given when an operator runs, which is
 * that of the element with all indices 0. strides NULL: contiguous, the last dimension fastest. Both arrays are copied.
 * BAD_TENSOR_DTYPE for an invalid dtype, BAD_TENSOR_SHAPE or BAD_TENSOR_STRIDES beyond what can be addressed. */
INFINI_API infiniStatus_t infiniopCreateTensorDescriptor(infiniopTensorDescriptor_t *desc_ptr, size_t ndim,
                                                         const size_t *shape, const ptrdiff_t *strides,
                                                         infiniDtype_t dtype);

/* Operator descriptors made from it no longer need it. BAD_PARAM for a descriptor that was already destroyed or never
 * made. */
INFINI_API infiniStatus_t infiniopDestroyTensorDescriptor(infiniopTensorDescriptor_t desc);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_TENSOR_DESCRIPTOR_H */
