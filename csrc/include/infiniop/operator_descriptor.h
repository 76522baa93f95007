/* Operator descriptors: an operator prepared for one device and one set of dtypes, shapes, strides and parameters.
 * Each header of ops/ has four functions (rearrange three) that keep the rules below, and says what is its own:
 *
 * infiniopCreate<Op>Descriptor  checks everything that does not depend on memory, and copies it: the tensor descriptors
 *                               may be destroyed as soon as it returns. The descriptor belongs to the caller.
 * infiniopGet<Op>WorkspaceSize  bytes of workspace that a run needs, on the descriptor's device; often 0.
 * infiniop<Op>                  runs it on memory: the addresses of the tensors' first elements, as described then.
 *                               workspace: at least that many bytes, aligned to 64, or NULL where 0; its contents are
 *                               lost. stream: a stream of the device, on which the run is queued: memory and workspace
 *                               must stay valid until it is done there, the descriptor need not. NULL, or an immediate
 *                               stream of the CPU: done on return.
 *                               A descriptor may run on several threads at once, each with a separate workspace.
 *                               On NVIDIA devices: memory and workspace are device memory. The stream is any
 *                               cudaStream_t of the device, infinirt's or the caller's; NULL waits for no other stream,
 *                               not even for CUDA's default one (that is cudaStreamLegacy). A run captured on a stream
 *                               is repeated by each replay, on what the same addresses hold then.
 * infiniopDestroy<Op>Descriptor frees the descriptor.
 *
 * Unless an op says otherwise: tensors have any strides, also negative, and any number of elements, also none; inputs
 * may be broadcast by stride 0, outputs may not (BAD_TENSOR_STRIDES). An output may be an input itself (same address,
 * shape and strides) where the op says "in place"; any other element in common is refused with BAD_PARAM. F16 and
 * BF16 are computed in float and rounded once, to nearest even; F64 is computed in double.
 *
 * Status: NULL_POINTER for NULL where it is not allowed; BAD_PARAM for a handle, tensor descriptor or operator
 * descriptor that was destroyed, never made, or is of another op, and for parameters out of range; BAD_TENSOR_DTYPE,
 * _SHAPE, _STRIDES for tensors that break the op's rules; INSUFFICIENT_WORKSPACE; NOT_IMPLEMENTED for what the
 * interface has and this build has not. infiniGetLastErrorMessage() says which argument, which rule and what came. What
 * fails has written nothing, except where a value found in memory is at fault (a position, an index, a length): then
 * the output is unspecified. On NVIDIA devices such a value is no error, because the host does not wait to read it: no
 * memory outside of the tensors is accessed, what depends on the value in the output is NaN (0 in integers), and writes
 * out of bounds are skipped. */
#ifndef INFINIOP_OPERATOR_DESCRIPTOR_H
#define INFINIOP_OPERATOR_DESCRIPTOR_H

#include "handle.h"
#include "tensor_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What every operator descriptor begins with; to be read only. */
struct InfiniopDescriptor {
    infiniDevice_t device_type;
    int device_id;
};

INFINI_API infiniStatus_t infiniopGetDescriptorDeviceType(const struct InfiniopDescriptor *desc_ptr,
                                                          infiniDevice_t *device_type);

INFINI_API infiniStatus_t infiniopGetDescriptorDeviceId(const struct InfiniopDescriptor *desc_ptr, int *device_id);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_OPERATOR_DESCRIPTOR_H */
