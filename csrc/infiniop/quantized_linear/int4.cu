// The CUDA kernel of linear_int4 with unquantized x: a source of its own, so that both compile at a time.
// SASS: stream: LDGSTS.E.BYPASS.128.ZFILL
#include "quantized_problem.cuh"

namespace infini::quantized_linear {
namespace {

const RegisteredKernel<Args> registered{int4_kernels, INFINI_DEVICE_NVIDIA, run_unquantized_x<4>, cuda_workspace_bytes};

} // namespace
} // namespace infini::quantized_linear
