// The rules of rearrange, and the way to its kernel.
#include "rearrange.h"

#include "check.h"

namespace infini::rearrange {

void check(const Args &args) {
    constexpr Checker rule("rearrange");
    rule.same_shape("src", args.src, "dst", args.dst);
    rule.same_dtype("src", args.src, "dst", args.dst);
    rule.writable("dst", args.dst);
    rule.no_partial_overlap("dst", args.dst, "src", args.src);
}

void run(const Args &args) {
    check(args);
    if (args.dst.numel() > 0 && args.dst.data != args.src.data) { // of one address they are the same elements
        cpu_kernel(args);
    }
}

} // namespace infini::rearrange
