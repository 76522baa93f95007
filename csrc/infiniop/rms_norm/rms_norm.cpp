// The rules of rms_norm and add_rms_norm, and the call of their kernel.
#include "rms_norm.h"

#include <limits>

#include "check.h"

namespace infini::rms_norm {

KernelTable<Args> kernels{"rms_norm"};

namespace {
const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, cpu_kernel};
}

infiniDtype_t output_dtype(infiniDtype_t x, infiniDtype_t weight, Rounding rounding) {
    return order_of(rounding) == Rounding::kLlama && weight == INFINI_DTYPE_F32 ? INFINI_DTYPE_F32 : x;
}

void check(const char *op, const Args &args) {
    const Checker rule(op);
    const TensorView &x = args.x, &weight = args.weight, &y = args.y;
    const auto rounding = static_cast<int>(args.rounding);
    if (rounding < 0 || rounding > 5) {
        rule.fail(INFINI_STATUS_BAD_PARAM, "rounding",
                  "be 0 (once), 1 (llama), 2 (gemma), 3 (wide_once), 4 (wide_llama) or 5 (wide_gemma)",
                  std::to_string(rounding));
    }
    rule.range("eps", args.eps, 0, std::numeric_limits<float>::max(), "be a finite number of at least 0");
    rule.rank("x", x, 1, kMaxDims);
    rule.dtype("x", x, INFINI_FLOATS_AND_DOUBLE);
    rule.dense_last("x", x);
    rule.shape("weight", weight, {x.size(-1)}, "to match the last dimension of x");
    const bool mixed_halves = is_half(x.dtype) && is_half(weight.dtype) && order_of(args.rounding) == Rounding::kOnce;
    const bool wide_weight = is_half(x.dtype) && weight.dtype == INFINI_DTYPE_F32;
    if (weight.dtype != x.dtype && !mixed_halves && !wide_weight) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_DTYPE, "weight",
                  message("be ", name_of(x.dtype), " as x is", is_half(x.dtype) ? ", or float32" : ""),
                  name_of(weight.dtype));
    }
    rule.dense_last("weight", weight);

    const auto check_output = [&](const char *name, const TensorView &out, infiniDtype_t dtype) {
        rule.same_shape(name, out, "x", x);
        rule.dtype(name, out, {dtype});
        rule.dense_last(name, out);
        rule.writable(name, out);
        rule.no_partial_overlap(name, out, "x", x);
        rule.no_partial_overlap(name, out, "weight", weight);
    };
    check_output(args.h.dtype ? "out0" : "out", y, output_dtype(x.dtype, weight.dtype, args.rounding));
    if (args.h.dtype) {
        rule.same_shape("residual", args.residual, "x", x);
        rule.same_dtype("residual", args.residual, "x", x);
        rule.dense_last("residual", args.residual);
        check_output("out1", args.h, x.dtype);
        rule.no_partial_overlap("out0", y, "residual", args.residual);
        rule.no_partial_overlap("out1", args.h, "residual", args.residual);
        rule.no_overlap("out0", y, "out1", args.h);
        rule.no_overlap("out1", args.h, "weight", weight); // the weight is read after out1 is written
    }
}

void run(const ExecutionContext &context, const char *op, const Args &args) {
    check(op, args);
    if (args.x.numel() > 0) {
        kernels.run(context, args);
    }
}

} // namespace infini::rms_norm
