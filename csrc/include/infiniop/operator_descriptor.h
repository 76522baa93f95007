/* Operator descriptors: an operator prepared for one device and one set of dtypes, shapes, strides and parameters.
 * Each header of ops/ has four functions (rearrange three) that follow the rules below, and documents its own rules:
 *
 * infiniopCreate<Op>Descriptor  checks everything that does not depend on memory, and copies it: the tensor descriptors
 *                               may be destroyed as soon as it returns. The descriptor belongs to the caller.
 * infiniopGet<Op>WorkspaceSize  bytes of workspace that a run needs, on the descriptor's device; often 0.
 * infiniop<Op>                  runs it on memory: the addresses of the tensors' first elements, as described at
 *                               creation.
 *                               workspace: at least that many bytes, aligned to 64, or NULL if 0; its contents are
 *                               overwritten. stream: a stream of the device, on which the run is queued: memory and
 *                               workspace must stay valid until it is done there, the descriptor need not. NULL, or an
 *                               immediate stream of the CPU: done on return.
 *                               A descriptor may run on several threads at once, each with a separate workspace.
 *                               On NVIDIA devices: memory and workspace are device memory. The stream is any
 *                               cudaStream_t of the device, infinirt's or the caller's; NULL waits for no other stream,
 *                               not even for CUDA's default one (that is cudaStreamLegacy). A run captured on a stream
 *                               is repeated by each replay, on what the same addresses hold then.
 * infiniopDestroy<Op>Descriptor frees the descriptor.
 *
 * Unless an op says otherwise: tensors have any strides, including negative ones, and any number of elements, including
 * none; inputs may be broadcast by stride 0, outputs may not (BAD_TENSOR_STRIDES). An output may be an input itself
 * (same address, shape and strides) if the op says "in place"; any other overlap is BAD_PARAM. F16 and BF16 are
 * computed in float and rounded once, to nearest even; F64 is computed in double.
 *
 * Status: NULL_POINTER for NULL where it is not allowed; BAD_PARAM for a handle, tensor descriptor or operator
 * descriptor that was destroyed, never made, or is of another op, and for parameters out of range; BAD_TENSOR_DTYPE,
 * _SHAPE, _STRIDES for tensors that break the op's rules; INSUFFICIENT_WORKSPACE; NOT_IMPLEMENTED for parts of the
 * interface that this build lacks. infiniGetLastErrorMessage() names the argument, the rule and the given value. A call
 * that fails has written nothing, unless a value in memory is at fault (a position, an index, a length): then the
 * output is unspecified. On NVIDIA devices such a value is no error, because the host does not wait to read it: no
 * memory outside of the tensors is accessed, outputs that depend on the value are NaN (integers 0), and writes out of
 * bounds are skipped. */
#ifndef INFINIOP_OPERATOR_DESCRIPTOR_H
#define INFINIOP_OPERATOR_DESCRIPTOR_H

#include "handle.h"
#include "tensor_descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The beginning of every operator descriptor; read-only for callers. */
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
