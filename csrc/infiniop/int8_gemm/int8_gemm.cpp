// The rules of int8_gemm, and the call of its kernel.
#include "int8_gemm.h"

#include "check.h"

namespace infini::int8_gemm {

KernelTable<Args> kernels{"int8_gemm"};

namespace {

void run_on_cpu(const ExecutionContext &context, const Args &args) {
    const bool columns = args.weights.stride(0) == 1 || args.weights.size(0) <= 1;
    const bool tiles = columns && args.x.size(0) >= kTileRowsFrom && cpu_tiles() != Tiles::kNone;
    tiles ? tile_kernel(context, args) : cpu_kernel(context, args);
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, run_on_cpu};

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

void check(const Args &args, const Names &names) {
    const Checker rule(names.op);
    const TensorView &x = args.x, &weights = args.weights, &out = args.out;
    rule.rank(names.x, x, 2);
    rule.dtype(names.x, x, {INFINI_DTYPE_I8});
    rule.dense_last(names.x, x);
    const int64_t m = x.size(0), k = x.size(1);
    if (k > kMaxDepth) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, names.x,
                  message("have at most ", kMaxDepth, " columns, for int32 to hold the product"), std::to_string(k));
    }
    rule.rank(names.weights, weights, 2);
    rule.dtype(names.weights, weights, {INFINI_DTYPE_I8});
    const int64_t n = weights.size(1);
    rule.shape(names.weights, weights, {k, n}, "to match the columns of the left factor");
    rule.shape(names.x_scale, args.x_scale, {m}, "to match the rows of the product");
    rule.dtype(names.x_scale, args.x_scale, {INFINI_DTYPE_F32});
    rule.shape(names.weights_scale, args.weights_scale, {n}, "to match the columns of the product");
    rule.dtype(names.weights_scale, args.weights_scale, {INFINI_DTYPE_F32});

    rule.dtype("out", out, INFINI_FLOATS);
    rule.shape("out", out, {m, n}, "to match the rows and columns of the factors");
    rule.dense_last("out", out);
    rule.writable("out", out);
    rule.no_overlap("out", out, names.x, x);
    rule.no_overlap("out", out, names.weights, weights);
    rule.no_overlap("out", out, names.x_scale, args.x_scale);
    rule.no_overlap("out", out, names.weights_scale, args.weights_scale);
    if (args.bias.dtype != INFINI_DTYPE_INVALID) {
        rule.shape("bias", args.bias, {n}, "to match the columns of the product");
        rule.same_dtype("bias", args.bias, "out", out);
        rule.no_overlap("out", out, "bias", args.bias);
    }
}

void run(const ExecutionContext &context, const Args &args, const Names &names) {
    check(args, names);
    if (args.out.numel() > 0) {
        kernels.run(context, args);
    }
}

many_rows::Problem many_rows_problem(const Args &args) {
    many_rows::Problem problem;
    problem.y = args.out;
    problem.x = args.x;
    problem.weight = args.weights; // [n, k]
    for (int i = 0; i < 2; ++i) {
        problem.weight.shape[i] = args.weights.shape[1 - i];
        problem.weight.strides[i] = args.weights.strides[1 - i];
    }
    problem.row_scales = args.x_scale;
    problem.column_scales = args.weights_scale;
    problem.bias = args.bias;
    problem.slice_bytes = args.slice_bytes;
    problem.workspace = args.workspace;
    return problem;
}

size_t workspace_size(const ExecutionContext &context, const Args &args) {
    return args.out.numel() > 0 ? kernels.workspace_bytes(context, args) : 0;
}

} // namespace infini::int8_gemm
