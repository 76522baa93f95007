// INFINI_CUDA_KERNEL(name, Args) declares an op's CUDA kernel: infini::<op>::nvidia::name, defined in <op>.cu. Calling
// name(args) launches it on current_place's stream. A build without CUDA links without it, and the call says so.
#pragma once

#include "../place.h"
#include "../status.h"

// Emulated: the same kernels compiled for the host, for tests (csrc/emulation). Linked in or not.
namespace infini {
__attribute__((weak)) bool emulates_cuda();
inline bool cuda_is_emulated() {
    return emulates_cuda != nullptr;
}
} // namespace infini

#define INFINI_CUDA_KERNEL(name, ...)                                                                                  \
    namespace nvidia {                                                                                                 \
    __attribute__((weak)) void name(const __VA_ARGS__ &);                                                              \
    }                                                                                                                  \
    inline void name(const __VA_ARGS__ &args) {                                                                        \
        if (nvidia::name == nullptr) {                                                                                 \
            throw Error(INFINI_STATUS_DEVICE_TYPE_NOT_SUPPORTED,                                                       \
                        "infini: this build of torch_infini has no CUDA kernels: rebuild it with nvcc on PATH and "    \
                        "FORCE_CUDA=1");                                                                               \
        }                                                                                                              \
        nvidia::name(args);                                                                                            \
    }
