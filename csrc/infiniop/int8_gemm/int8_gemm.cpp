// The rules of int8_gemm, and the way to its kernel.
#include "int8_gemm.h"

#include "check.h"

namespace infini::int8_gemm {

namespace {

constexpr Checker kRule("int8_gemm");

void drop(TensorView &view, int dim) {
    for (int i = dim; i + 1 < view.ndim; ++i) {
        view.shape[i] = view.shape[i + 1];
        view.strides[i] = view.strides[i + 1];
    }
    --view.ndim;
}

} // namespace

void squeeze(Args &args) {
    for (TensorView *matrix : {&args.out, &args.x, &args.weights}) {
        if (matrix->ndim == 3 && matrix->shape[0] == 1) {
            drop(*matrix, 0);
        }
    }
    for (TensorView *scale : {&args.x_scale, &args.weights_scale}) {
        if (scale->ndim == 2 && scale->shape[1] == 1) {
            drop(*scale, 1);
        } else if (scale->ndim == 2 && scale->shape[0] == 1) {
            drop(*scale, 0);
        }
    }
}

void check(const Args &args) {
    const TensorView &x = args.x, &weights = args.weights, &out = args.out;
    kRule.rank("x", x, 2);
    kRule.dtype("x", x, {INFINI_DTYPE_I8});
    kRule.dense_last("x", x);
    const int64_t m = x.size(0), k = x.size(1);
    if (k > kMaxDepth) {
        kRule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "x",
                   message("have at most ", kMaxDepth, " columns, for int32 to hold the product"), std::to_string(k));
    }
    kRule.rank("weights", weights, 2);
    kRule.dtype("weights", weights, {INFINI_DTYPE_I8});
    const int64_t n = weights.size(1);
    kRule.shape("weights", weights, {k, n}, "to match the columns of x");
    if (k > 1 && n > 0 && weights.stride(0) != 1) {
        kRule.fail(INFINI_STATUS_BAD_TENSOR_STRIDES, "weights", "be column-major, with stride 1 in its first dimension",
                   message("strides ", strides_of(weights)));
    }
    const auto check_vector = [&](const char *name, const TensorView &view, int64_t size, const char *why) {
        kRule.shape(name, view, {size}, why);
        kRule.dense_last(name, view);
    };
    check_vector("x_scale", args.x_scale, m, "to match the rows of x");
    kRule.dtype("x_scale", args.x_scale, {INFINI_DTYPE_F32});
    check_vector("weights_scale", args.weights_scale, n, "to match the columns of weights");
    kRule.dtype("weights_scale", args.weights_scale, {INFINI_DTYPE_F32});

    kRule.dtype("out", out, {INFINI_DTYPE_BF16, INFINI_DTYPE_F16});
    kRule.shape("out", out, {m, n}, "the rows of x by the columns of weights");
    kRule.dense_last("out", out);
    kRule.writable("out", out);
    kRule.no_overlap("out", out, "x", x);
    kRule.no_overlap("out", out, "weights", weights);
    kRule.no_overlap("out", out, "x_scale", args.x_scale);
    kRule.no_overlap("out", out, "weights_scale", args.weights_scale);
    if (args.bias.dtype != INFINI_DTYPE_INVALID) {
        check_vector("bias", args.bias, n, "to match the columns of weights");
        kRule.same_dtype("bias", args.bias, "out", out);
        kRule.no_overlap("out", out, "bias", args.bias);
    }
}

void run(const Args &args) {
    check(args);
    if (args.out.numel() > 0) {
        cpu_kernel(args);
    }
}

} // namespace infini::int8_gemm
