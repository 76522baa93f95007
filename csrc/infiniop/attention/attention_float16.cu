// Attention on tensor cores in float16; the limits are in tensor_core_kernel.cuh.
// See kernels.cuh for why it is a file.
// SASS: attend_by_tensor_cores: LDGSTS.E.BYPASS.128 STG.E.128
#include "tensor_core_kernel.cuh"

template <>
infini::attention::nvidia::Kernels<infini::f16> infini::attention::nvidia::tensor_core_kernels(int64_t size) {
    return tensor_core_kernels_of<f16>(size);
}
