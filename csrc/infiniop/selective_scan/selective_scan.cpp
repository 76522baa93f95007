// The rules of selective_scan, and the call of its kernel.
#include "selective_scan.h"

#include "check.h"

namespace infini::selective_scan {

KernelTable<Args> kernels{"selective_scan"};

namespace {
const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, cpu_kernel};
constexpr Checker kRule("selective_scan");

void check_of_channels(const char *name, const TensorView &given, const Args &args) {
    if (given.dtype) {
        kRule.same_dtype_or_float32(name, given, "x", args.x);
        kRule.shape(name, given, {args.x.size(-1)}, "one for each channel of x");
    }
}

} // namespace

void check(const Args &args) {
    constexpr Checker rule = kRule;
    const TensorView &x = args.x, &a = args.a, &b = args.b, &state = args.state;
    rule.rank("x", x, 2, 3);
    rule.dtype("x", x, INFINI_FLOATS);
    rule.dense_last("x", x);
    rule.same_shape("dt", args.dt, "x", x);
    rule.same_dtype_or_float32("dt", args.dt, "x", x);
    rule.dtype("a", a, {INFINI_DTYPE_F32});
    rule.rank("a", a, 2);
    const int64_t channels = x.size(-1), columns = a.shape[1];
    rule.shape("a", a, {channels, columns}, "to match the channels of x");
    rule.dense_last("a", a);
    rule.same_dtype("b", b, "x", x);
    rule.rank("b", b, x.ndim);
    if (x.ndim == 3) {
        rule.shape("b", b, {x.shape[0], x.shape[1], columns}, "to match the tokens of x and the columns of a");
    } else {
        rule.shape("b", b, {x.shape[0], columns}, "to match the tokens of x and the columns of a");
    }
    rule.dense_last("b", b);
    rule.same_dtype("c", args.c, "x", x);
    rule.same_shape("c", args.c, "b", b);
    rule.dense_last("c", args.c);
    check_of_channels("d", args.d, args);
    check_of_channels("dt_bias", args.dt_bias, args);
    if (args.z.dtype) {
        rule.same_dtype("z", args.z, "x", x);
        rule.same_shape("z", args.z, "x", x);
    }
    if (state.dtype) {
        rule.dtype("state", state, {INFINI_DTYPE_F32});
        rule.rank("state", state, 3);
        rule.shape("state", state, {state.shape[0], channels, columns}, "to match the channels and columns of a");
        rule.dense_last("state", state);
        rule.writable("state", state);
    }
    check_sequences(rule, args.sequences, "x", x, 1, state);
    rule.same_shape("out", args.y, "x", x);
    rule.same_dtype_or_float32("out", args.y, "x", x);
    rule.dense_last("out", args.y);
    rule.writable("out", args.y);
    check_no_overlap(rule,
                     {{"x", x},
                      {"dt", args.dt},
                      {"a", a},
                      {"b", b},
                      {"c", args.c},
                      {"d", args.d},
                      {"dt_bias", args.dt_bias},
                      {"z", args.z}},
                     args.sequences, state, args.y);
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

} // namespace infini::selective_scan
