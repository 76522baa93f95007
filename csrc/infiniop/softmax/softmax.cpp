// The rules of softmax and log_softmax, and the call of their kernel.
#include "softmax.h"

#include "check.h"

namespace infini::softmax {

KernelTable<Args> kernels{"softmax"};

namespace {
const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, cpu_kernel};
}

void check(const Args &args, const Names &names) {
    const Checker rule(args.log ? "log_softmax" : "softmax");
    const TensorView &x = args.x, &y = args.y;
    rule.rank("x", x, 1, kMaxDims);
    rule.dtype("x", x, INFINI_FLOATS);
    rule.axis(names.axis, args.axis, x);
    rule.same_shape(names.y, y, "x", x);
    if (args.log) {
        rule.dtype(names.y, y, INFINI_FLOATS);
    } else {
        rule.same_dtype(names.y, y, "x", x);
    }
    rule.writable(names.y, y);
    rule.no_partial_overlap(names.y, y, "x", x);
}

void run(const ExecutionContext &context, const Args &args, const Names &names) {
    check(args, names);
    if (args.x.numel() > 0) {
        kernels.run(context, args);
    }
}

} // namespace infini::softmax
