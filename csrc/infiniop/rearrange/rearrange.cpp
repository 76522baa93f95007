// The rules of rearrange, and the call of its kernel.
#include "rearrange.h"

#include "check.h"

namespace infini::rearrange {

KernelTable<Args> kernels{"rearrange"};

namespace {
const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, cpu_kernel};
}

void check(const Args &args, const Names &names) {
    constexpr Checker rule("rearrange");
    const TensorView *const views[] = {&args.dst, &args.src};
    const auto &[dst, src] = names.tensors;
    const int first = names.first, second = 1 - first;
    rule.same_shape(names.tensors[second], *views[second], names.tensors[first], *views[first]);
    rule.same_dtype(names.tensors[second], *views[second], names.tensors[first], *views[first]);
    rule.writable(dst, args.dst);
    rule.no_partial_overlap(dst, args.dst, src, args.src);
}

void run(const ExecutionContext &context, const Args &args, const Names &names) {
    check(args, names);
    if (args.dst.numel() > 0 && args.dst.data != args.src.data) { // at equal addresses they are the same elements
        kernels.run(context, args);
    }
}

} // namespace infini::rearrange
