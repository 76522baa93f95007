// The rules of linear and fused_linear, their kernels, and the table of which CPU kernel is faster.
#include "linear.h"

#include <limits>

#include "gemm/library.h"

namespace infini::linear {

KernelTable<Args> kernels{"linear"};

namespace {

// Up to how many rows of bfloat16 the kernel for few rows is faster. Measured on one Zen 5 core with weights of 2048 x
// 11264, 5632 x 2048, 2048 x 2560 and 768 x 4096, in GFLOP/s:
//   AVX-512 BF16: few 370 at 32 rows, 350 at 48, 370 at 64, 380 at 96; many 340 at 32, 370 at 48, 390 at 64, 420 at 96,
//                 440 at 512. oneDNN: 260, 310, 340, 380, 445.
//   AVX-512, AVX2: products are computed in float, and few is within 5 % of many. Baseline: few 30, many 35.
// float32 and float16, whose products are always computed in float, gain nothing from the kernel for many rows; what
// float32 gains from packing on AVX2, packed_groups.h does.
constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
#if defined(__aarch64__)
constexpr int64_t kFewRows[kCpuCapabilities] = {kAny, kAny, 40}; // neon_bf16 (40) is assumed, not measured
#else
constexpr int64_t kFewRows[kCpuCapabilities] = {40, kAny, kAny, kAny, kAny, 40}; // baseline first, avx512_bf16 last
#endif

bool has_few_rows(const Args &args) {
    return args.x.dtype != INFINI_DTYPE_BF16 || args.y.numel() / columns(args) <= kFewRows[cpu_capability()];
}

bool given(const TensorView &optional) {
    return optional.dtype != INFINI_DTYPE_INVALID;
}

// Kernels find an element of the residual at the offset of y's element.
void check_residual(const Op &op, const TensorView &residual, const TensorView &y) {
    op.rule.same_dtype("residual", residual, "out", y);
    op.rule.same_shape("residual", residual, "out", y);
    for (int dim = 0; dim < y.ndim; ++dim) {
        if (y.shape[dim] > 1 && residual.strides[dim] != y.strides[dim] && y.numel() > 0) {
            op.rule.fail(INFINI_STATUS_BAD_TENSOR_STRIDES, "residual",
                         message("have the strides of out, ", strides_of(y)),
                         message("strides ", strides_of(residual)));
        }
    }
    op.rule.no_partial_overlap("out", y, "residual", residual);
}

// Computes y by a library, if it supports the call. Calls with a residual come from the C ABI, which has no library.
bool run_by_library(const ExecutionContext &context, const Args &args) {
    if (context.library == nullptr || given(args.residual)) {
        return false;
    }
    for (int i = 0; i < args.weights; ++i) {
        if (given(args.bias[i]) && args.bias[i].dtype != args.x.dtype) {
            return false; // libraries support no other bias dtype
        }
    }
    const int64_t least = gemm::library_from(gemm::Products::kLinear, args.x.dtype);
    gemm::Args product;
    TensorView y;
    if (least == gemm::kNever || args.y.numel() / columns(args) < least || !as_matrix(args.x, product.a) ||
        !as_matrix(args.y, y)) {
        return false;
    }
    product.c = y;
    product.b = product.a;
    product.b.shape[0] = args.x.size(-1);
    product.b.shape[1] = columns(args);
    if (!gemm::library_takes(context, gemm::Products::kLinear, product)) {
        return false;
    }
    int64_t first = 0;
    for (int i = 0; i < args.weights; ++i) {
        const TensorView &weight = args.weight[i];
        product.c = y;
        product.c.data = y.as<char>() + first * static_cast<int64_t>(size_of(y.dtype));
        product.c.shape[1] = product.b.shape[1] = weight.size(0);
        product.b.data = weight.data;
        product.b.strides[0] = 1;
        product.b.strides[1] = weight.stride(0);
        first += weight.size(0);
        if (weight.size(0) > 0) {
            gemm::multiply_by_library(context, product, args.bias[i]);
        }
    }
    return true;
}

} // namespace

bool as_matrix(const TensorView &x, TensorView &matrix) {
    matrix = x;
    matrix.ndim = 2;
    matrix.shape[0] = matrix.strides[0] = 1;
    matrix.shape[1] = x.size(-1);
    matrix.strides[1] = 1;
    for (int dim = x.ndim - 2; dim >= 0; --dim) {
        if (x.shape[dim] == 1) {
            continue;
        }
        if (matrix.shape[0] > 1 && x.strides[dim] != matrix.strides[0] * matrix.shape[0]) {
            return false;
        }
        matrix.strides[0] = matrix.shape[0] > 1 ? matrix.strides[0] : x.strides[dim];
        matrix.shape[0] *= x.shape[dim];
    }
    return true;
}

int64_t columns(const Args &args) {
    int64_t n = 0;
    for (int i = 0; i < args.weights; ++i) {
        n += args.weight[i].size(0);
    }
    return n;
}

void check_inputs(const Op &op, const Args &args) {
    const TensorView &x = args.x;
    op.rule.rank("x", x, 1, kMaxDims);
    op.rule.dtype("x", x, INFINI_FLOATS);
    op.rule.dense_last("x", x);
    for (int i = 0; i < args.weights; ++i) {
        const TensorView &weight = args.weight[i], &bias = args.bias[i];
        op.rule.rank(op.weight[i], weight, 2);
        op.rule.same_dtype(op.weight[i], weight, "x", x);
        op.rule.shape(op.weight[i], weight, {weight.size(0), x.size(-1)}, "to match the last dimension of x");
        op.rule.dense_last(op.weight[i], weight);
        if (given(bias)) {
            op.rule.same_dtype_or_float32(op.bias[i], bias, "x", x);
            op.rule.shape(op.bias[i], bias, {weight.size(0)}, op.bias_reason[i]);
            op.rule.dense_last(op.bias[i], bias);
        }
    }
}

void check_output(const Op &op, const Args &args) {
    const TensorView &y = args.y;
    op.rule.rows_of_x("out", y, args.x, columns(args), op.out_reason);
    for (int i = 0; i < args.weights; ++i) {
        op.rule.no_overlap("out", y, op.weight[i], args.weight[i]);
        if (given(args.bias[i])) {
            op.rule.no_overlap("out", y, op.bias[i], args.bias[i]);
        }
    }
    if (given(args.residual)) {
        check_residual(op, args.residual, y);
    }
}

void run(const ExecutionContext &context, const Args &args) {
    if (args.y.numel() > 0) {
        kernels.run(context, args);
    }
}

namespace {

void run_on_cpu(const ExecutionContext &context, const Args &args) {
    if (run_by_library(context, args)) {
        return;
    }
    if (args.x.dtype == INFINI_DTYPE_BF16 && cpu_tiles() != Tiles::kNone) {
        return tile_kernel(context, args);
    }
    has_few_rows(args) ? few_rows_kernel(context, args) : many_rows_kernel(context, args);
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, run_on_cpu};

} // namespace

} // namespace infini::linear
