// The CUDA kernel of linear_int4 with unquantized x: few rows by weight_stream.cuh, more by
// weight_tiles.cuh, many by cuBLAS.
// Limit: memory bandwidth of the weight's bytes up to 16 rows. More are multiplied in tiles (weight_tiles.cuh), or if
// unaligned read the weight again for every 32 (float32 x: for every 4), until many_rows.h takes them.
// SASS: stream: LDGSTS.E.BYPASS.128.ZFILL
#include "linear/weight_stream.cuh"
#include "quantized_problem.cuh"

namespace infini::quantized_linear {

namespace {

void run_int4_on_cuda(const ExecutionContext &context, const Args &args) {
    const many_rows::Problem many = many_rows_problem(args);
    if (many_rows::takes(many)) {
        return many_rows::run(context, many);
    }
    cuda::with_float_type(args.x.dtype, [&](auto type) {
        using T = decltype(type);
        if constexpr (sizeof(T) == 2) {
            multiply_few_rows<weight_stream::Int4<T>>(context, problem_of<T>(args, args.x), many);
        } else if constexpr (sizeof(T) == 4) {
            weight_stream::multiply_floats<4>(context, problem_of<T>(args, args.x));
        }
    });
}

const RegisteredKernel<Args> registered{int4_kernels, INFINI_DEVICE_NVIDIA, run_int4_on_cuda, cuda_workspace_bytes};

} // namespace
} // namespace infini::quantized_linear
