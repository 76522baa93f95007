// The rules of quantize_int8 and quantize_int4, and the call of their kernels.
#include "quantize.h"

#include "check.h"

namespace infini::quantize {

KernelTable<Args> int8_kernels{"quantize_int8"}, int4_kernels{"quantize_int4"};
namespace {

const RegisteredKernel<Args> int8_registered{int8_kernels, INFINI_DEVICE_CPU, int8_kernel};
const RegisteredKernel<Args> int4_registered{int4_kernels, INFINI_DEVICE_CPU, int4_kernel};

void check_weight(const Checker &rule, const TensorView &weight) {
    rule.rank("weight", weight, 2);
    rule.dtype("weight", weight, INFINI_FLOATS);
    rule.dense_last("weight", weight);
}

void check_output(const Checker &rule, const char *name, const TensorView &output, const Args &args) {
    rule.dense_last(name, output);
    rule.writable(name, output);
    rule.no_overlap(name, output, "weight", args.weight);
}

} // namespace

void check_int8(const Args &args) {
    check_weight(Checker("quantize_int8"), args.weight);
}

void check_int4(const Args &args) {
    constexpr Checker rule("quantize_int4");
    check_weight(rule, args.weight);
    const int64_t group_size = args.group_size, k = args.weight.size(1);
    if (group_size != 32 && group_size != 64 && group_size != 128) {
        rule.fail(INFINI_STATUS_BAD_PARAM, "group_size", "be 32, 64 or 128", std::to_string(group_size));
    }
    if (k % group_size != 0) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "weight",
                  message("have rows that are a multiple of group_size, ", group_size), std::to_string(k));
    }
}

void run_int8(const ExecutionContext &context, const Args &args) {
    constexpr Checker rule("quantize_int8");
    check_int8(args);
    const TensorView &q = args.q, &scales = args.scales;
    rule.shape("out0", q, {args.weight.size(0), args.weight.size(1)}, "to match weight");
    rule.dtype("out0", q, {INFINI_DTYPE_I8});
    check_output(rule, "out0", q, args);
    rule.shape("out1", scales, {args.weight.size(0)}, "to match the rows of weight");
    rule.dtype("out1", scales, {INFINI_DTYPE_F32});
    check_output(rule, "out1", scales, args);
    rule.no_overlap("out1", scales, "out0", q);
    if (scales.numel() > 0) {
        int8_kernels.run(context, args);
    }
}

void run_int4(const ExecutionContext &context, const Args &args) {
    constexpr Checker rule("quantize_int4");
    check_int4(args);
    const int64_t n = args.weight.size(0), k = args.weight.size(1);
    const TensorView &q = args.q, &scales = args.scales, &zeros = args.zeros;
    rule.shape("out0", q, {n, k / 2}, "for two columns of weight in a byte");
    rule.dtype("out0", q, {INFINI_DTYPE_U8});
    check_output(rule, "out0", q, args);
    const auto check_groups = [&](const char *name, const TensorView &output) {
        rule.shape(name, output, {n, k / args.group_size}, "to match the groups of weight");
        rule.same_dtype(name, output, "weight", args.weight);
        check_output(rule, name, output, args);
        rule.no_overlap(name, output, "out0", q);
    };
    check_groups("out1", scales);
    check_groups("out2", zeros);
    rule.no_overlap("out2", zeros, "out1", scales);
    if (scales.numel() > 0) {
        int4_kernels.run(context, args);
    }
}

} // namespace infini::quantize
