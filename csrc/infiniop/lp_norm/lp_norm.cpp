// The rules of lp_norm, and the call of its kernel.
#include "lp_norm.h"

#include <limits>

#include "check.h"

namespace infini::lp_norm {

KernelTable<Args> kernels{"lp_norm"};

namespace {
const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, cpu_kernel};
}

void check(const Args &args, const Names &names) {
    constexpr Checker rule("lp_norm");
    const TensorView &x = args.x, &y = args.y;
    if (args.p < 1) {
        rule.fail(INFINI_STATUS_BAD_PARAM, "p", "be at least 1", std::to_string(args.p));
    }
    rule.range("eps", args.eps, 0, std::numeric_limits<float>::max(), "be a finite number of at least 0");
    rule.rank(names.x, x, 1, kMaxDims);
    rule.dtype(names.x, x, INFINI_FLOATS);
    rule.axis(names.axis, args.axis, x);
    rule.same_shape(names.y, y, names.x, x);
    rule.same_dtype(names.y, y, names.x, x);
    rule.writable(names.y, y);
    rule.no_partial_overlap(names.y, y, names.x, x);
}

void run(const ExecutionContext &context, const Args &args, const Names &names) {
    check(args, names);
    if (args.x.numel() > 0) {
        kernels.run(context, args);
    }
}

} // namespace infini::lp_norm
