// The CUDA kernel of linear_group8; the limits are in panel_product.cuh.
// SASS: multiply_panels: LDG.E.64 LDG.E.128 IMMA.16816.S8.S8
#include "linear_group8.h"
#include "panel_weights/panel_product.cuh"

namespace infini::linear_group8 {
namespace {

struct ByteLines : Layout {
    static __device__ __forceinline__ uint32_t columns(uint32_t word, int) { return word; }
    static __device__ __forceinline__ void arrange(uint32_t (&)[2]) {}
};

const RegisteredKernel<panels::Args> registered{kOp.kernels, INFINI_DEVICE_NVIDIA, panels::multiply<ByteLines>,
                                                panels::workspace_bytes<ByteLines>};

} // namespace
} // namespace infini::linear_group8
