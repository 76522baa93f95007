// Attention on tensor cores in float16; the limits are in decode_kernel.cuh and prefill_kernel.cuh.
// kernels.cuh says why this is a separate file.
// SASS: attend_few_rows: LDGSTS.E.BYPASS.128 HMMA.16816.F32
// SASS: attend_many_rows: LDGSTS.E.BYPASS.128 STG.E.128
#include "tensor_core_kernels.cuh"

template <>
infini::attention::nvidia::Kernels<infini::f16, infini::f16>
infini::attention::nvidia::tensor_core_kernels(int64_t size) {
    return tensor_core_kernels_of<f16, f16>(size);
}
