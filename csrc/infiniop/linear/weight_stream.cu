// The kernels of weight_stream.cuh that several ops use: dense weights (gemm and linear) and int8 by int8 (int8_gemm
// and linear_int8). Limit: see weight_stream.cuh.
// SASS: stream: LDGSTS.E.BYPASS.128.ZFILL
#include "weight_stream.cuh"

namespace infini::weight_stream {

template void multiply<Dense<bf16>, 2>(const ExecutionContext &, const Problem<bf16> &);
template void multiply<Dense<f16>, 2>(const ExecutionContext &, const Problem<f16> &);
template void multiply<Int8ByInt8, kInt8Tiles>(const ExecutionContext &, const Problem<int8_t> &);
template void multiply_floats<32>(const ExecutionContext &, Problem<float>);

} // namespace infini::weight_stream
