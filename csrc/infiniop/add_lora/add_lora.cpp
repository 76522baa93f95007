// The rules of add_lora, and the call of its kernel.
#include "add_lora.h"

#include "check.h"
#include "indices.h"

namespace infini::add_lora {

KernelTable<Args> kernels{"add_lora"};

namespace {

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, cpu_kernel};
constexpr Checker kRule("add_lora");

void check(const Args &args) {
    const TensorView &y = args.y, &x = args.x, &a = args.a, &b = args.b, &index = args.index;
    kRule.rank("x", x, 2);
    kRule.dtype("x", x, INFINI_FLOATS);
    kRule.dense_last("x", x);
    kRule.rank("a", a, 3);
    kRule.same_dtype("a", a, "x", x);
    kRule.shape("a", a, {a.size(0), a.size(1), x.size(1)}, "to match the columns of x");
    kRule.dense_last("a", a);
    kRule.rank("y", y, 2);
    kRule.same_dtype("y", y, "x", x);
    kRule.shape("y", y, {x.size(0), y.size(1)}, "to match the rows of x");
    kRule.dense_last("y", y);
    kRule.writable("y", y);
    kRule.rank("b", b, 3);
    kRule.same_dtype("b", b, "x", x);
    kRule.shape("b", b, {a.size(0), a.size(1), y.size(1)}, "to match a and the columns of y");
    kRule.dense_last("b", b);
    kRule.dtype("index", index, INFINI_INDICES);
    kRule.shape("index", index, {x.size(0)}, "to match the rows of x");
    kRule.no_overlap("y", y, "x", x);
    kRule.no_overlap("y", y, "a", a);
    kRule.no_overlap("y", y, "b", b);
    kRule.no_overlap("y", y, "index", index);
}

void check_index(const TensorView &index, int64_t slots) {
    for (int64_t t = 0; t < index.size(0); ++t) {
        const int64_t slot = Indices(index)[t];
        if (slot >= slots) {
            kRule.fail(INFINI_STATUS_BAD_PARAM, "index", message("be below 0 or less than ", slots, ", the slots of a"),
                       message(slot, " for row ", t));
        }
    }
}

} // namespace

void run(const ExecutionContext &context, const Args &args) {
    check(args);
    if (context.is_cpu()) { // the kernel for CUDA skips such rows
        check_index(args.index, args.a.size(0));
    }
    if (args.y.numel() > 0 && args.a.size(0) > 0) {
        kernels.run(context, args);
    }
}

} // namespace infini::add_lora
