// The rules of linear_int8 and linear_int4, and the calls of their kernels.
#include "quantized_linear.h"

#include "check.h"
#include "int8_gemm/int8_gemm.h"

namespace infini::quantized_linear {

KernelTable<Args> int8_kernels{"linear_int8"}, int4_kernels{"linear_int4"};
KernelTable<Args> int8_quantized_x_kernels{"linear_int8"}, int4_quantized_x_kernels{"linear_int4"};

namespace {

constexpr Checker rule_of(Format format) {
    return Checker(format == Format::kInt8 ? "linear_int8" : "linear_int4");
}

bool has(const TensorView &optional) {
    return optional.dtype != INFINI_DTYPE_INVALID;
}

void check_scales_dtype(const Checker &rule, const TensorView &scales, const TensorView &x) {
    if (scales.dtype != INFINI_DTYPE_F32 && scales.dtype != x.dtype) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_DTYPE, "scales",
                  message("be float32 or have the dtype of x, ", name_of(x.dtype)), name_of(scales.dtype));
    }
}

void check_groups(const Checker &rule, const TensorView &scales, int64_t n, int64_t k) {
    const int64_t groups = scales.size(1), group = groups > 0 ? k / groups : 0;
    const bool whole = groups > 0 ? k % groups == 0 && (group == 32 || group == 64 || group == 128) : k == 0;
    if (scales.size(0) != n || !whole) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "scales",
                  message("have shape [", n, ", ", k, " / group] with groups of 32, 64 or 128"), shape_of(scales));
    }
}

// Rows of x from which on tiles are faster than vectors: measured on an Intel Xeon (Sapphire Rapids), one thread, 2048
// -> 5632. With quantized x both give the same bits; otherwise they add in different orders.
constexpr int64_t kInt4TileRowsFrom = 14, kFloatTileRowsFrom = 5;

bool in_tiles(Format format, const Args &args) {
    if (cpu_tiles() == Tiles::kNone || (!args.quantize_x && args.x.dtype != INFINI_DTYPE_BF16)) {
        return false; // tiles would round float16 and float32 x to bfloat16
    }
    const int64_t from = !args.quantize_x          ? kFloatTileRowsFrom
                         : format == Format::kInt8 ? int8_gemm::kTileRowsFrom
                                                   : kInt4TileRowsFrom;
    return args.y.numel() / args.weight.size(0) >= from;
}

} // namespace

void check_inputs(Format format, const Args &args) {
    const Checker rule = rule_of(format);
    const TensorView &x = args.x, &weight = args.weight, &scales = args.scales;
    rule.rank("x", x, 1, kMaxDims);
    rule.dtype("x", x, INFINI_FLOATS);
    rule.dense_last("x", x);
    rule.rank("weight", weight, 2);
    const int64_t n = weight.size(0), k = x.size(-1);
    if (format == Format::kInt8) {
        rule.dtype("weight", weight, {INFINI_DTYPE_I8});
        rule.shape("weight", weight, {n, k}, "to match the last dimension of x");
        if (args.quantize_x && k > kMaxDepth) {
            rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "x",
                      message("have a last dimension of at most ", kMaxDepth, " with quantize_x"), std::to_string(k));
        }
    } else {
        rule.dtype("weight", weight, {INFINI_DTYPE_U8});
        if (k % 2 != 0) {
            rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "x", "have an even last dimension", shape_of(x));
        }
        rule.shape("weight", weight, {n, k / 2}, "two to a byte, to match the last dimension of x");
    }
    rule.dense_last("weight", weight);
    check_scales_dtype(rule, scales, x);
    if (format == Format::kInt8) {
        rule.shape("scales", scales, {n}, "to match the rows of weight");
    } else {
        rule.rank("scales", scales, 2);
        check_groups(rule, scales, n, k);
    }
    rule.dense_last("scales", scales);
    if (has(args.zeros)) {
        rule.same_dtype("zeros", args.zeros, "scales", scales);
        rule.same_shape("zeros", args.zeros, "scales", scales);
        rule.dense_last("zeros", args.zeros);
    }
    if (has(args.bias)) {
        rule.same_dtype_or_float32("bias", args.bias, "x", x);
        rule.shape("bias", args.bias, {n}, "to match the rows of weight");
        rule.dense_last("bias", args.bias);
    }
}

void check_output(Format format, const Args &args) {
    const Checker rule = rule_of(format);
    const TensorView &y = args.y;
    rule.rows_of_x("out", y, args.x, args.weight.size(0), "the rows of x by the rows of weight");
    rule.no_overlap("out", y, "weight", args.weight);
    rule.no_overlap("out", y, "scales", args.scales);
    if (has(args.zeros)) {
        rule.no_overlap("out", y, "zeros", args.zeros);
    }
    if (has(args.bias)) {
        rule.no_overlap("out", y, "bias", args.bias);
    }
}

namespace {

const KernelTable<Args> &kernels_of(Format format, const Args &args) {
    const bool int8 = format == Format::kInt8;
    return args.quantize_x ? (int8 ? int8_quantized_x_kernels : int4_quantized_x_kernels)
                           : (int8 ? int8_kernels : int4_kernels);
}

// The CPU kernel: tiles if they are faster.
using Run = KernelTable<Args>::Run;
template <Format format, Run tile_kernel, Run kernel>
void run_on_cpu(const ExecutionContext &context, const Args &args) {
    in_tiles(format, args) ? tile_kernel(context, args) : kernel(context, args);
}

const RegisteredKernel<Args> registered[] = {
    {int8_kernels, INFINI_DEVICE_CPU, run_on_cpu<Format::kInt8, int8_tile_kernel, int8_kernel>},
    {int4_kernels, INFINI_DEVICE_CPU, run_on_cpu<Format::kInt4, int4_tile_kernel, int4_kernel>},
    {int8_quantized_x_kernels, INFINI_DEVICE_CPU,
     run_on_cpu<Format::kInt8, int8_quantized_x_tile_kernel, int8_quantized_x_kernel>},
    {int4_quantized_x_kernels, INFINI_DEVICE_CPU,
     run_on_cpu<Format::kInt4, int4_quantized_x_tile_kernel, int4_quantized_x_kernel>},
};

} // namespace

void run(const ExecutionContext &context, Format format, const Args &args) {
    if (args.y.numel() > 0) {
        kernels_of(format, args).run(context, args);
    }
}

size_t workspace_size(const ExecutionContext &context, Format format, const Args &args) {
    return args.y.numel() > 0 ? kernels_of(format, args).workspace_bytes(context, args) : 0;
}

many_rows::Problem many_rows_problem(const Args &args) {
    many_rows::Problem problem;
    problem.y = args.y;
    problem.x = args.x;
    problem.weight = args.weight;
    (args.scales.ndim == 1 ? problem.column_scales : problem.group_scales) = args.scales;
    problem.group_zeros = args.zeros;
    problem.bias = args.bias;
    problem.workspace = args.workspace;
    if (args.quantize_x) {
        const QuantizedX layout(args.x);
        const auto at = [&](int64_t byte) -> void * { // nullptr while the workspace's size is being computed
            return args.workspace == nullptr ? nullptr : static_cast<char *>(args.workspace) + byte;
        };
        TensorView &x = problem.x, &scales = problem.row_scales;
        x.data = at(0);
        x.dtype = INFINI_DTYPE_I8;
        x.ndim = 2;
        x.shape[0] = layout.rows;
        x.shape[1] = args.x.size(-1);
        x.strides[0] = layout.pitch;
        x.strides[1] = 1;
        scales.data = at(layout.scales_at());
        scales.dtype = INFINI_DTYPE_F32;
        scales.ndim = 1;
        scales.shape[0] = layout.rows;
        scales.strides[0] = 1;
        problem.workspace = at(layout.bytes());
    }
    return problem;
}

size_t cuda_workspace_bytes(const ExecutionContext &, const Args &args) {
    const many_rows::Problem problem = many_rows_problem(args);
    return (args.quantize_x ? static_cast<size_t>(QuantizedX(args.x).bytes()) : 0) + many_rows::workspace_of(problem);
}

} // namespace infini::quantized_linear
