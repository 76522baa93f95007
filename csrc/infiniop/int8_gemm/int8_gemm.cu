// The CUDA kernel of int8_gemm: weight_stream.cuh, to which a column of the weights is a row. Exact sums in int32.
// Limit: memory bandwidth of the weights up to 16 rows of x; more rows read them again for every 32. Weights that are
// not column-major are read byte by byte.
#include "int8_gemm.h"
#include "linear/weight_stream.cuh"

namespace infini::int8_gemm {

void nvidia::cuda_kernel(const Args &args) {
    TensorView columns = args.weights; // [n, k]
    for (int i = 0; i < 2; ++i) {
        columns.shape[i] = args.weights.shape[1 - i];
        columns.strides[i] = args.weights.strides[1 - i];
    }
    weight_stream::Problem<int8_t> problem(args.out, args.x);
    problem.add(columns);
    problem.weight[0].scales = weight_stream::Numbers(args.weights_scale, args.weights_scale.stride(0));
    problem.weight[0].bias = weight_stream::Numbers(args.bias, args.bias.ndim > 0 ? args.bias.stride(0) : 0);
    problem.row_scales = weight_stream::Numbers(args.x_scale, args.x_scale.stride(0));
    weight_stream::multiply<weight_stream::Int8ByInt8, weight_stream::kInt8Tiles>(problem);
}

} // namespace infini::int8_gemm
