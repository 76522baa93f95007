// Turns the arguments of linear_int8 and linear_int4 into those of weight_stream.cuh, and runs them with unquantized x.
#pragma once

#include "linear/weight_stream.cuh"
#include "linear/weight_tiles.cuh"
#include "quantized_linear.h"

namespace infini::quantized_linear {

constexpr int kMaxTiles = weight_stream::kInt8Tiles; // of 8 rows of x each, per pass over the weight

// x is an argument of its own, because it may be quantized; scales and zeros are always the weight's.
template <typename X> weight_stream::Problem<X> problem_of(const Args &args, const TensorView &x) {
    weight_stream::Problem<X> problem(args.y, x);
    problem.k = args.x.size(-1);
    problem.add(args.weight);
    weight_stream::Weight &weight = problem.weight[0];
    weight.bias = weight_stream::FloatVector(args.bias, 1);
    if (args.scales.ndim == 1) {
        weight.scales = weight_stream::FloatVector(args.scales, 1);
    } else {
        const int64_t groups = args.scales.size(1);
        problem.scales = weight_stream::FloatVector(args.scales, args.scales.stride(0));
        problem.zeros = weight_stream::FloatVector(args.zeros, args.zeros.ndim > 0 ? args.zeros.stride(0) : 0);
        const int64_t group = groups > 0 ? problem.k / groups : 32;
        problem.group_shift = group == 32 ? 5 : group == 64 ? 6 : 7; // the op's rules allow no other
    }
    return problem;
}

// The product of few rows, where many_rows.h does not take it. many: many_rows_problem(args).
template <typename F>
void multiply_few_rows(const ExecutionContext &context, const weight_stream::Problem<typename F::X> &problem,
                       const many_rows::Problem &many) {
    if (weight_tiles::takes<F>(problem)) {
        const gemm::ScaledSums epilogue{{}, many.y, many.row_scales, many.column_scales, many.bias};
        weight_tiles::multiply<F>(context, problem, epilogue, many.workspace);
    } else {
        weight_stream::multiply<F, kMaxTiles>(context, problem);
    }
}

// Unquantized x: few rows by weight_stream.cuh, more by weight_tiles.cuh, many by cuBLAS. Limit: memory bandwidth of the
// weight's bytes up to 16 rows. More are multiplied in tiles, or if unaligned read the weight again for every 32 (float32
// x: for every 4), until many_rows.h takes them.
template <int kBits> void run_unquantized_x(const ExecutionContext &context, const Args &args) {
    const many_rows::Problem many = many_rows_problem(args);
    if (many_rows::takes(many)) {
        return many_rows::run(context, many);
    }
    cuda::with_float_type(args.x.dtype, [&](auto type) {
        using T = decltype(type);
        if constexpr (sizeof(T) == 2) {
            using Format = std::conditional_t<kBits == 8, weight_stream::Int8<T>, weight_stream::Int4<T>>;
            multiply_few_rows<Format>(context, problem_of<T>(args, args.x), many);
        } else if constexpr (sizeof(T) == 4) {
            weight_stream::multiply_floats<kBits>(context, problem_of<T>(args, args.x));
        }
    });
}

} // namespace infini::quantized_linear
