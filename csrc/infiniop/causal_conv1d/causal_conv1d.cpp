// The rules of causal_conv1d, and the call of its kernel.
#include "causal_conv1d.h"

#include "check.h"

namespace infini::causal_conv1d {

KernelTable<Args> kernels{"causal_conv1d"};

namespace {
const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, cpu_kernel};
constexpr Checker kRule("causal_conv1d");
} // namespace

void check(const Args &args) {
    constexpr Checker rule = kRule;
    const TensorView &x = args.x, &weight = args.weight;
    rule.rank("x", x, 2, 3);
    rule.dtype("x", x, INFINI_FLOATS);
    rule.dense_last("x", x);
    const int64_t channels = x.size(-1);
    rule.rank("weight", weight, 2);
    if (weight.shape[1] < kMinWidth || weight.shape[1] > kMaxWidth) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "weight", "have a width of 2 to 8", shape_of(weight));
    }
    rule.shape("weight", weight, {channels, weight.shape[1]}, "to match the channels of x");
    rule.same_dtype_or_float32("weight", weight, "x", x);
    if (args.bias.dtype) {
        rule.shape("bias", args.bias, {channels}, "to match the channels of x");
        rule.same_dtype("bias", args.bias, "weight", weight);
    }
    if (args.state.dtype) {
        rule.rank("state", args.state, 3);
        rule.same_dtype("state", args.state, "x", x);
        rule.shape("state", args.state, {args.state.shape[0], channels, args.state.shape[2]},
                   "to match the channels of x");
        if (args.state.shape[2] < weight.shape[1] - 1) {
            rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "state",
                      message("have at least ", weight.shape[1] - 1, " columns, one less than the width"),
                      shape_of(args.state));
        }
        rule.writable("state", args.state);
    }
    check_sequences(rule, args.sequences, "x", x, 1, args.state);
    rule.same_shape("out", args.y, "x", x);
    rule.same_dtype("out", args.y, "x", x);
    rule.dense_last("out", args.y);
    rule.writable("out", args.y);
    check_no_overlap(rule, {{"x", x}, {"weight", weight}, {"bias", args.bias}}, args.sequences, args.state, args.y);
}

void run(const ExecutionContext &context, const Args &args) {
    check(args);
    if (context.is_cpu()) {
        check_sequence_values(kRule, args.sequences, args.x, args.state);
    }
    if (args.x.numel() > 0) {
        kernels.run(context, args);
    }
}

} // namespace infini::causal_conv1d
