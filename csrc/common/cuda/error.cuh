// Errors of the CUDA runtime as Errors of this project: check_cuda(what, status) throws unless it is cudaSuccess.
// It also clears CUDA's last error, so that a later cudaGetLastError() does not report it again.
#pragma once

#include <cuda_runtime_api.h>

#include "../status.h"

namespace infini::cuda {

inline infiniStatus_t status_of(cudaError_t error) {
    switch (error) {
    case cudaSuccess:
        return INFINI_STATUS_SUCCESS;
    case cudaErrorInvalidValue:
    case cudaErrorInvalidMemcpyDirection:
    case cudaErrorInvalidResourceHandle:
    case cudaErrorIllegalState:
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureMerge:
    case cudaErrorStreamCaptureUnmatched:
    case cudaErrorStreamCaptureUnjoined:
    case cudaErrorStreamCaptureIsolation:
    case cudaErrorStreamCaptureImplicit:
    case cudaErrorCapturedEvent:
    case cudaErrorStreamCaptureWrongThread:
        return INFINI_STATUS_BAD_PARAM;
    case cudaErrorNotSupported:
        return INFINI_STATUS_NOT_IMPLEMENTED;
    case cudaErrorInvalidDevice:
    case cudaErrorNoDevice:
        return INFINI_STATUS_DEVICE_NOT_FOUND;
    case cudaErrorInitializationError:
    case cudaErrorInsufficientDriver:
        return INFINI_STATUS_DEVICE_NOT_INITIALIZED;
    case cudaErrorNoKernelImageForDevice:
        return INFINI_STATUS_DEVICE_ARCHITECTURE_NOT_SUPPORTED;
    default:
        return INFINI_STATUS_INTERNAL_ERROR;
    }
}

inline void check_cuda(const char *what, cudaError_t status) {
    if (status != cudaSuccess) {
        cudaGetLastError();
        throw Error(status_of(status),
                    message("infini: ", what, ": ", cudaGetErrorString(status), " (", cudaGetErrorName(status), ")"));
    }
}

} // namespace infini::cuda
