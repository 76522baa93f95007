// The rules of gemm, and the call of its kernel.
#include "gemm.h"

#include "check.h"
#include "library.h"

namespace infini::gemm {

KernelTable<Args> kernels{"gemm"};

namespace {

constexpr Checker kRule("gemm");

// Checks the shape of a or b, given its rows and columns; it must have a batch if c has one.
void check_factor(const char *name, const TensorView &x, const TensorView &c, int64_t rows, int64_t columns,
                  Reason why) {
    if (c.ndim == 2) {
        kRule.shape(name, x, {rows, columns}, why);
    } else {
        kRule.shape(name, x, {x.shape[0] == 1 ? 1 : c.shape[0], rows, columns}, why);
    }
    check_layout(kRule, name, x);
}

} // namespace

void check_layout(const Checker &rule, const char *name, const TensorView &x) {
    const bool by_rows = x.size(-1) <= 1 || x.stride(-1) == 1, by_columns = x.size(-2) <= 1 || x.stride(-2) == 1;
    if (!by_rows && !by_columns && x.numel() > 0) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_STRIDES, name, "have stride 1 in one of its last two dimensions",
                  message("strides ", strides_of(x)));
    }
}

void check(const Args &args) {
    const TensorView &c = args.c, &a = args.a, &b = args.b;
    kRule.rank("c", c, 2, 3);
    kRule.dtype("c", c, INFINI_FLOATS);
    kRule.same_dtype("a", a, "c", c);
    kRule.same_dtype("b", b, "c", c);
    kRule.rank("a", a, c.ndim);
    kRule.rank("b", b, c.ndim);
    check_factor("a", a, c, c.size(-2), a.size(-1), "to match the rows of c");
    check_factor("b", b, c, a.size(-1), c.size(-1), "to match the columns of a and of c");
    check_layout(kRule, "c", c);
    kRule.writable("c", c);
    if (c.data != nullptr) {
        kRule.no_overlap("c", c, "a", a);
        kRule.no_overlap("c", c, "b", b);
    }
}

void run(const ExecutionContext &context, const Args &args) {
    check(args);
    if (args.c.numel() > 0) {
        compute(context, args);
    }
}

void compute(const ExecutionContext &context, const Args &args) {
    kernels.run(context, args);
}

namespace {

void compute_on_cpu(const ExecutionContext &context, const Args &args) {
    const TensorView &b = args.b;
    const bool batched = b.ndim == 3 && b.shape[0] > 1 && b.strides[0] != 0;
    if (library_takes(context, batched ? Products::kBatched : Products::kMatmul, args)) {
        return multiply_by_library(context, args);
    }
    args.c.dtype == INFINI_DTYPE_BF16 &&cpu_tiles() != Tiles::kNone ? tile_kernel(context, args)
                                                                    : cpu_kernel(context, args);
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, compute_on_cpu};

} // namespace

} // namespace infini::gemm
