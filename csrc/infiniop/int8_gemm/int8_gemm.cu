// The CUDA kernel of int8_gemm: few rows by weight_stream.cuh with the weights transposed, many by cuBLAS. Sums are
// exact in int32 either way.
// Limit: memory bandwidth of the weights up to 16 rows of x. More rows are multiplied in tiles, until many_rows.h takes
// them. Weights that are not column-major are always read byte by byte.
#include "int8_gemm.h"
#include "linear/weight_stream.cuh"
#include "linear/weight_tiles.cuh"

namespace infini::int8_gemm {

namespace {

size_t workspace_on_cuda(const ExecutionContext &, const Args &args) {
    const many_rows::Problem many = many_rows_problem(args);
    return many_rows::workspace_of(many);
}

void run_on_cuda(const ExecutionContext &context, const Args &args) {
    const many_rows::Problem many = many_rows_problem(args);
    if (many_rows::takes(many)) {
        return many_rows::run(context, many);
    }
    weight_stream::Problem<int8_t> problem(args.out, args.x);
    problem.add(many.weight);
    problem.weight[0].scales = weight_stream::FloatVector(args.weights_scale, args.weights_scale.stride(0));
    problem.weight[0].bias = weight_stream::FloatVector(args.bias, args.bias.ndim > 0 ? args.bias.stride(0) : 0);
    problem.row_scales = weight_stream::FloatVector(args.x_scale, args.x_scale.stride(0));
    if (weight_tiles::takes<weight_stream::Int8ByInt8>(problem)) {
        const gemm::ScaledSums epilogue{{}, many.y, many.row_scales, many.column_scales, many.bias};
        return weight_tiles::multiply<weight_stream::Int8ByInt8>(context, problem, epilogue, many.workspace);
    }
    weight_stream::multiply<weight_stream::Int8ByInt8, weight_stream::kInt8Tiles>(context, problem);
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_NVIDIA, run_on_cuda, workspace_on_cuda};

} // namespace
} // namespace infini::int8_gemm
