// The rules of topksoftmax and topkrouter, and the call of their kernels.
#include "topk.h"

#include "check.h"

namespace infini::topk {

KernelTable<Args> softmax_kernels{"topksoftmax"}, router_kernels{"topkrouter"};

namespace {
const RegisteredKernel<Args> softmax_registered{softmax_kernels, INFINI_DEVICE_CPU, softmax_kernel};
const RegisteredKernel<Args> router_registered{router_kernels, INFINI_DEVICE_CPU, router_kernel};
} // namespace

void set_topk(Args &args, size_t topk) {
    const int64_t rows = args.x.size(0), width = args.x.size(1);
    const auto describe = [&](TensorView &output, infiniDtype_t dtype) {
        output.dtype = dtype;
        output.ndim = 2;
        output.shape[0] = rows;
        // check() rejects a topk above width.
        output.shape[1] = output.strides[0] = topk < static_cast<size_t>(width) ? static_cast<int64_t>(topk) : width;
        output.strides[1] = 1;
    };
    args.topk = topk;
    describe(args.values, INFINI_DTYPE_F32);
    describe(args.indices, INFINI_DTYPE_I32);
}

void check(const Args &args, const Names &names) {
    const bool router = args.bias.dtype != INFINI_DTYPE_INVALID;
    const Checker rule(router ? "topkrouter" : "topksoftmax");
    const TensorView &x = args.x, &bias = args.bias;
    rule.rank("x", x, 2);
    rule.dtype("x", x, INFINI_FLOATS);
    rule.dense_last("x", x);
    if (router) {
        rule.shape("x", x, {x.size(0), kExperts}, "for 256 experts");
        rule.shape("correction_bias", bias, {kExperts}, "for 256 experts");
        rule.dtype("correction_bias", bias, {INFINI_DTYPE_F32});
    } else if (x.size(1) > INT32_MAX) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "x", "have at most 2147483647 columns, for indices are int32",
                  std::to_string(x.size(1)));
    }
    if (args.values.dtype == INFINI_DTYPE_INVALID) {
        return;
    }
    if (args.topk < 1 || args.topk > static_cast<size_t>(x.size(1))) {
        rule.fail(INFINI_STATUS_BAD_PARAM, names.topk,
                  message("be at least 1 and at most the ", x.size(1), " columns of x"), std::to_string(args.topk));
    }
    const auto check_output = [&](const char *name, const TensorView &output, infiniDtype_t dtype) {
        rule.shape(name, output, {x.size(0), static_cast<int64_t>(args.topk)}, "for the rows of x and as many chosen");
        rule.dtype(name, output, {dtype});
        rule.dense_last(name, output);
        rule.writable(name, output);
        rule.no_overlap(name, output, "x", x);
        if (router) {
            rule.no_overlap(name, output, "correction_bias", bias);
        }
    };
    check_output(names.values, args.values, INFINI_DTYPE_F32);
    check_output(names.indices, args.indices, INFINI_DTYPE_I32);
    rule.no_overlap(names.indices, args.indices, names.values, args.values);
}

void run(const ExecutionContext &context, const Args &args, const Names &names) {
    check(args, names);
    if (args.x.numel() == 0) {
        return;
    }
    if (args.bias.dtype == INFINI_DTYPE_INVALID) {
        softmax_kernels.run(context, args);
    } else {
        router_kernels.run(context, args);
    }
}

} // namespace infini::topk
