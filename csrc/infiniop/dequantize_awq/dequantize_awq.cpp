// The rules of dequantize_awq, and the call of its kernel.
#include "dequantize_awq.h"

#include "check.h"

namespace infini::dequantize_awq {

KernelTable<Args> kernels{"dequantize_awq"};

namespace {
const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, cpu_kernel};
}

void check(const Args &args) {
    constexpr Checker rule("dequantize_awq");
    const TensorView &out = args.out, &qweight = args.qweight, &scales = args.scales, &zeros = args.zeros;
    rule.rank("out", out, 2);
    rule.dtype("out", out, {INFINI_DTYPE_F16});
    const int64_t rows = out.size(0), columns = out.size(1);
    if (columns % 8 != 0) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "out", "have a multiple of 8 columns",
                  message(columns, " (shape ", shape_of(out), ")"));
    }
    rule.dense_last("out", out);
    rule.writable("out", out);
    rule.dtype("qweight", qweight, {INFINI_DTYPE_I32});
    rule.shape("qweight", qweight, {rows, columns / 8}, "for eight columns of out in each integer");
    rule.dense_last("qweight", qweight);
    rule.rank("scales", scales, 2);
    rule.dtype("scales", scales, {INFINI_DTYPE_F16});
    const int64_t groups = scales.size(0);
    rule.shape("scales", scales, {groups, columns}, "to match the columns of out");
    if (groups == 0 ? rows != 0 : rows % groups != 0) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "scales",
                  message("have a number of rows that divides the ", rows, " rows of out"), std::to_string(groups));
    }
    rule.dense_last("scales", scales);
    rule.dtype("zeros", zeros, {INFINI_DTYPE_I32});
    rule.shape("zeros", zeros, {groups, columns / 8}, "to match the groups of scales and the columns of out");
    rule.dense_last("zeros", zeros);
    rule.no_overlap("out", out, "qweight", qweight);
    rule.no_overlap("out", out, "scales", scales);
    rule.no_overlap("out", out, "zeros", zeros);
}

void run(const ExecutionContext &context, const Args &args) {
    check(args);
    if (args.out.numel() > 0) {
        kernels.run(context, args);
    }
}

} // namespace infini::dequantize_awq
