// Whether the CUDA kernels of this process are emulated: compiled for the host, for tests (csrc/emulation).
#pragma once

namespace infini {

__attribute__((weak)) bool emulates_cuda(); // defined only if the emulation is linked

inline bool cuda_is_emulated() {
    return emulates_cuda != nullptr;
}

} // namespace infini
