// The rules of causal_softmax, and the call of its kernel.
#include "causal_softmax.h"

#include "check.h"

namespace infini::causal_softmax {

KernelTable<Args> kernels{"causal_softmax"};

namespace {
const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, cpu_kernel};
}

void check(const Args &args) {
    constexpr Checker rule("causal_softmax");
    const TensorView &x = args.x, &y = args.y;
    rule.rank("x", x, 2, kMaxDims);
    rule.dtype("x", x, INFINI_FLOATS);
    if (x.size(-2) > x.size(-1)) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "x", "have at most as many rows q as columns k",
                  message("q = ", x.size(-2), " and k = ", x.size(-1), " (shape ", shape_of(x), ")"));
    }
    rule.same_shape("out", y, "x", x);
    rule.same_dtype("out", y, "x", x);
    rule.writable("out", y);
    rule.no_partial_overlap("out", y, "x", x);
}

void run(const ExecutionContext &context, const Args &args) {
    check(args);
    if (args.x.numel() > 0) {
        kernels.run(context, args);
    }
}

} // namespace infini::causal_softmax
