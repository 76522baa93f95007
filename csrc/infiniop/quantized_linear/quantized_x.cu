// The CUDA kernels of linear_int8 and linear_int4 with quantized x: one kernel writes x as int8 with a scale per row to
// the workspace; then exact integer products, few rows by weight_stream.cuh, more by weight_tiles.cuh, many by int8
// weights by cuBLAS. Limit: memory bandwidth of the weight's bytes up to 16 rows; for more see those files.
#include "quantized_problem.cuh"
#include "quantize/int8_rows.cuh"

namespace infini::quantized_linear {
namespace {

template <typename Format> void multiply(const ExecutionContext &context, const Args &args) {
    const QuantizedX layout(args.x);
    auto *const q = static_cast<int8_t *>(args.workspace);
    auto *const scales = reinterpret_cast<float *>(q + layout.scales_at());
    cuda::with_float_type(args.x.dtype, [&](auto type) {
        using T = decltype(type);
        if constexpr (sizeof(T) <= 4) {
            quantize::quantize_rows<T>(context, args.x, q, layout.pitch, layout.pitch, scales);
        }
    });
    const many_rows::Problem many = many_rows_problem(args);
    if (many_rows::takes(many)) {
        return many_rows::run(context, many);
    }
    TensorView x = args.x; // becomes the quantized x
    x.data = q;
    x.dtype = INFINI_DTYPE_I8;
    int64_t stride = layout.pitch;
    for (int dim = x.ndim - 2; dim >= 0; --dim) {
        x.strides[dim] = stride;
        stride *= x.shape[dim];
    }
    weight_stream::Problem<int8_t> problem = problem_of<int8_t>(args, x);
    problem.row_scales.data = scales;
    problem.row_scales.dtype = INFINI_DTYPE_F32;
    multiply_few_rows<Format>(context, problem, many);
}

void run_int8_on_cuda(const ExecutionContext &context, const Args &args) {
    multiply<weight_stream::Int8ByInt8>(context, args);
}

void run_int4_on_cuda(const ExecutionContext &context, const Args &args) {
    multiply<weight_stream::Int4ByInt8>(context, args);
}

const RegisteredKernel<Args> int8_registered{int8_quantized_x_kernels, INFINI_DEVICE_NVIDIA, run_int8_on_cuda,
                                             cuda_workspace_bytes};
const RegisteredKernel<Args> int4_registered{int4_quantized_x_kernels, INFINI_DEVICE_NVIDIA, run_int4_on_cuda,
                                             cuda_workspace_bytes};

} // namespace
} // namespace infini::quantized_linear
