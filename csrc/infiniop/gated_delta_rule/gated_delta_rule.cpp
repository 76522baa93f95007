// The rules of gated_delta_rule, and the call of its kernel.
#include "gated_delta_rule.h"

#include <limits>

#include "check.h"

namespace infini::gated_delta_rule {

KernelTable<Args> kernels{"gated_delta_rule"};

namespace {
const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, cpu_kernel};
constexpr Checker kRule("gated_delta_rule");

// The shape of v without its last dimension.
void check_gate(const char *name, const TensorView &gate, const Args &args) {
    const TensorView &v = args.v;
    if (v.ndim == 4) {
        kRule.shape(name, gate, {v.shape[0], v.shape[1], v.shape[2]}, "to match the tokens and heads of v");
    } else {
        kRule.shape(name, gate, {v.shape[0], v.shape[1]}, "to match the tokens and heads of v");
    }
    kRule.same_dtype_or_float32(name, gate, "q", args.q);
}

} // namespace

void check(const Args &args) {
    constexpr Checker rule = kRule;
    const TensorView &q = args.q, &v = args.v, &state = args.state;
    constexpr double largest = std::numeric_limits<float>::max();
    rule.range("scale", args.scale, -largest, largest, "be a finite number");
    rule.rank("q", q, 3, 4);
    rule.dtype("q", q, INFINI_FLOATS);
    rule.dense_last("q", q);
    rule.same_dtype("k", args.k, "q", q);
    rule.same_shape("k", args.k, "q", q);
    rule.dense_last("k", args.k);
    rule.same_dtype("v", v, "q", q);
    rule.rank("v", v, q.ndim);
    const int64_t heads = v.size(-2), columns = v.size(-1);
    if (q.ndim == 4) {
        rule.shape("v", v, {q.shape[0], q.shape[1], heads, columns}, "to match the tokens of q");
    } else {
        rule.shape("v", v, {q.shape[0], heads, columns}, "to match the tokens of q");
    }
    if (q.size(-2) == 0 ? heads != 0 : heads % q.size(-2) != 0) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "v",
                  message("have a multiple of the ", q.size(-2), " heads of q and k"), message(heads));
    }
    rule.dense_last("v", v);
    check_gate("g", args.g, args);
    check_gate("beta", args.beta, args);
    if (state.dtype) {
        rule.dtype("state", state, {INFINI_DTYPE_F32});
        rule.rank("state", state, 4);
        rule.shape("state", state, {state.shape[0], heads, q.size(-1), columns},
                   "to match the heads and columns of k and v");
        rule.dense_last("state", state);
        rule.writable("state", state);
    }
    check_sequences(rule, args.sequences, "q", q, 2, state);
    rule.same_shape("out", args.y, "v", v);
    rule.same_dtype("out", args.y, "v", v);
    rule.dense_last("out", args.y);
    rule.writable("out", args.y);
    check_no_overlap(rule, {{"q", q}, {"k", args.k}, {"v", v}, {"g", args.g}, {"beta", args.beta}}, args.sequences,
                     state, args.y);
}

void run(const ExecutionContext &context, const Args &args) {
    check(args);
    if (context.is_cpu()) {
        check_sequence_values(kRule, args.sequences, args.q, args.state);
    }
    if (args.v.numel() > 0) {
        kernels.run(context, args);
    }
}

} // namespace infini::gated_delta_rule
