// The rules of layer_norm, and the call of its kernel.
#include "layer_norm.h"

#include <limits>

#include "check.h"

namespace infini::layer_norm {

KernelTable<Args> kernels{"layer_norm"};

namespace {
const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, cpu_kernel};
}

void check(const Args &args, const Names &names) {
    constexpr Checker rule("layer_norm");
    const TensorView &input = args.input;
    const bool with_weight = args.weight.dtype != INFINI_DTYPE_INVALID;
    const bool with_bias = args.bias.dtype != INFINI_DTYPE_INVALID;
    rule.range("eps", args.eps, 0, std::numeric_limits<float>::max(), "be a finite number of at least 0");
    rule.rank(names.input, input, 1, kMaxDims);
    rule.dtype(names.input, input, INFINI_FLOATS);
    const auto check_parameter = [&](const char *name, const TensorView &parameter) {
        rule.shape(name, parameter, {input.size(-1)}, names.to_match);
        rule.same_dtype_or_float32(name, parameter, names.input, input);
    };
    if (with_weight) {
        check_parameter("weight", args.weight);
    }
    if (with_bias) {
        check_parameter("bias", args.bias);
    }
    if (with_weight && with_bias) {
        rule.same_dtype("bias", args.bias, "weight", args.weight);
    }

    const auto check_output = [&](const char *name, const TensorView &output) {
        rule.same_dtype(name, output, names.input, input);
        rule.writable(name, output);
        if (with_weight) {
            rule.no_overlap(name, output, "weight", args.weight);
        }
        if (with_bias) {
            rule.no_overlap(name, output, "bias", args.bias);
        }
    };
    rule.same_shape(names.output, args.output, names.input, input);
    check_output(names.output, args.output);
    rule.no_partial_overlap(names.output, args.output, names.input, input);
    if (args.standardization.dtype == INFINI_DTYPE_INVALID) {
        return;
    }
    rule.same_shape("input_standardization", args.standardization, "input", input);
    check_output("input_standardization", args.standardization);
    rule.no_partial_overlap("input_standardization", args.standardization, "input", input);
    rule.no_overlap("input_standardization", args.standardization, "output", args.output);
    TensorView row_starts = input;
    --row_starts.ndim;
    rule.same_shape("input_std_deviation", args.deviation, "input without its last dimension", row_starts);
    check_output("input_std_deviation", args.deviation);
    rule.no_overlap("input_std_deviation", args.deviation, "input", input);
    rule.no_overlap("input_std_deviation", args.deviation, "output", args.output);
    rule.no_overlap("input_std_deviation", args.deviation, "input_standardization", args.standardization);
}

void run(const ExecutionContext &context, const Args &args, const Names &names) {
    check(args, names);
    // An empty row has a deviation too.
    if (args.output.numel() > 0 || (args.deviation.dtype != INFINI_DTYPE_INVALID && args.deviation.numel() > 0)) {
        kernels.run(context, args);
    }
}

} // namespace infini::layer_norm
