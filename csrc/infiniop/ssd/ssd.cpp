// The rules of ssd, and the call of its kernel.
#include "ssd.h"

#include "check.h"

namespace infini::ssd {

KernelTable<Args> kernels{"ssd"};

namespace {
const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, cpu_kernel};
constexpr Checker kRule("ssd");

void check_of_heads(const char *name, const TensorView &given, const Args &args) {
    if (given.dtype) {
        kRule.same_dtype_or_float32(name, given, "x", args.x);
        kRule.shape(name, given, {args.x.size(-2)}, "one for each head of x");
    }
}

} // namespace

void check(const Args &args) {
    constexpr Checker rule = kRule;
    const TensorView &x = args.x, &b = args.b, &state = args.state;
    if (!(args.dt_min <= args.dt_max)) {
        rule.fail(INFINI_STATUS_BAD_PARAM, "dt_min", "be a number that is at most dt_max",
                  message(args.dt_min, " with ", args.dt_max));
    }
    rule.rank("x", x, 3, 4);
    rule.dtype("x", x, INFINI_FLOATS);
    rule.dense_last("x", x);
    const int64_t heads = x.size(-2);
    if (x.ndim == 4) {
        rule.shape("dt", args.dt, {x.shape[0], x.shape[1], heads}, "to match the tokens and heads of x");
    } else {
        rule.shape("dt", args.dt, {x.shape[0], heads}, "to match the tokens and heads of x");
    }
    rule.same_dtype_or_float32("dt", args.dt, "x", x);
    rule.dtype("a", args.a, {INFINI_DTYPE_F32});
    rule.shape("a", args.a, {heads}, "one for each head of x");
    rule.same_dtype("b", b, "x", x);
    rule.rank("b", b, x.ndim);
    const int64_t groups = b.size(-2), columns = b.size(-1);
    if (x.ndim == 4) {
        rule.shape("b", b, {x.shape[0], x.shape[1], groups, columns}, "to match the tokens of x");
    } else {
        rule.shape("b", b, {x.shape[0], groups, columns}, "to match the tokens of x");
    }
    if (groups == 0 ? heads != 0 : heads % groups != 0) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "x", message("have a multiple of the ", groups, " groups of b and c"),
                  message(heads, " heads"));
    }
    rule.dense_last("b", b);
    rule.same_dtype("c", args.c, "x", x);
    rule.same_shape("c", args.c, "b", b);
    rule.dense_last("c", args.c);
    check_of_heads("d", args.d, args);
    check_of_heads("dt_bias", args.dt_bias, args);
    if (state.dtype) {
        rule.dtype("state", state, {INFINI_DTYPE_F32});
        rule.rank("state", state, 4);
        rule.shape("state", state, {state.shape[0], heads, x.size(-1), columns},
                   "to match the heads and columns of x and b");
        rule.dense_last("state", state);
        rule.writable("state", state);
    }
    check_sequences(rule, args.sequences, "x", x, 2, state);
    rule.same_shape("out", args.y, "x", x);
    rule.same_dtype_or_float32("out", args.y, "x", x);
    rule.dense_last("out", args.y);
    rule.writable("out", args.y);
    check_no_overlap(
        rule,
        {{"x", x}, {"dt", args.dt}, {"a", args.a}, {"b", b}, {"c", args.c}, {"d", args.d}, {"dt_bias", args.dt_bias}},
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

} // namespace infini::ssd
