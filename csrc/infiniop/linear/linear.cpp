// The rules of linear and fused_linear, the way to their kernel, and the table that says where ATen's product is the
// faster one.
#include "linear.h"

#include <limits>

namespace infini::linear {

namespace {

// Up to how many rows of x the kernel computes; beyond, ATen. Measured on one Zen 5 core with 2048 x 5632 weights, in
// GFLOP/s at many rows, ATen held to the same instruction set:
//   bfloat16: AVX-512 BF16: kernel 400, oneDNN 270 at 32 rows, 360 at 64, 420 at 128, 480 at 512.
//             AVX-512: 170 against 82. AVX2: 89 against 31. Baseline: 33 against 10.
//   float32:  AVX-512: 205 against 105. AVX2: 107 against 96. Baseline: 44 against 96, but there as everywhere MKL
//   gives
//             other bits for other alignments of the same values.
//   float16:  AVX-512: 215 against 30: ATen has no dense product of its own here.
constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
constexpr int64_t kKernelRows[][kCpuCapabilities] = {
    // baseline, avx2, avx512, avx512_bf16
    {kAny, kAny, kAny, kAny}, // float32
    {kAny, kAny, kAny, 96},   // bfloat16
    {kAny, kAny, kAny, kAny}, // float16
};

bool given(const TensorView &bias) {
    return bias.dtype != INFINI_DTYPE_INVALID;
}

} // namespace

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
            op.rule.same_dtype(op.bias[i], bias, "x", x);
            op.rule.shape(op.bias[i], bias, {weight.size(0)}, op.bias_reason[i]);
            op.rule.dense_last(op.bias[i], bias);
        }
    }
}

void check_output(const Op &op, const Args &args) {
    const TensorView &y = args.y, &x = args.x;
    TensorView wanted = x;
    wanted.shape[x.ndim - 1] = columns(args);
    bool equal = y.ndim == x.ndim;
    for (int i = 0; equal && i < y.ndim; ++i) {
        equal = y.shape[i] == wanted.shape[i];
    }
    if (!equal) {
        op.rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "out",
                     message("have shape ", shape_of(wanted), ", ", op.out_reason), shape_of(y));
    }
    op.rule.same_dtype("out", y, "x", x);
    op.rule.dense_last("out", y);
    op.rule.writable("out", y);
    op.rule.no_overlap("out", y, "x", x);
    for (int i = 0; i < args.weights; ++i) {
        op.rule.no_overlap("out", y, op.weight[i], args.weight[i]);
        if (given(args.bias[i])) {
            op.rule.no_overlap("out", y, op.bias[i], args.bias[i]);
        }
    }
}

bool kernel_is_faster(const Args &args) {
    const int dtype = args.x.dtype == INFINI_DTYPE_F32 ? 0 : args.x.dtype == INFINI_DTYPE_BF16 ? 1 : 2;
    int64_t rows = 1;
    for (int i = 0; i + 1 < args.x.ndim; ++i) {
        rows *= args.x.shape[i];
    }
    return rows <= kKernelRows[dtype][cpu_capability()];
}

void run(const Args &args) {
    if (args.y.numel() > 0) {
        on_cuda() ? cuda_kernel(args) : cpu_kernel(args);
    }
}

} // namespace infini::linear
