// The CUDA kernel of linear_int4 with x in its own precision: few rows by weight_stream.cuh, many by cuBLAS.
// Limit: memory bandwidth of the weight's bytes up to 16 rows. More rows read the weight again for every 32 (float32 x:
// for every 4), from L2 where it fits, until many_rows.h takes them.
// SASS: stream: LDGSTS.E.BYPASS.128.ZFILL
#include "linear/weight_stream.cuh"
#include "problem.cuh"

namespace infini::quantised_linear {

void nvidia::int4_cuda_kernel(const Args &args) {
    const many_rows::Problem many = many_rows_problem(args);
    if (many_rows::takes(many)) {
        return many_rows::run(many);
    }
    cuda::with_float_type(args.x.dtype, [&](auto type) {
        using T = decltype(type);
        if constexpr (sizeof(T) == 2) {
            weight_stream::multiply<weight_stream::Int4<T>, kMaxTiles>(problem_of<T>(args, args.x));
        } else if constexpr (sizeof(T) == 4) {
            weight_stream::multiply_floats<4>(problem_of<T>(args, args.x));
        }
    });
}

} // namespace infini::quantised_linear
