// The rules of linear_packed and pack_linear, and the calls of their kernels.
#include "linear_packed.h"

#include <limits>

#include "check.h"

namespace infini::linear_packed {

KernelTable<Args> kernels{"linear_packed"};
KernelTable<PackArgs> pack_kernels{"pack_linear"};

namespace {

void run_on_cpu(const ExecutionContext &context, const Args &args) {
    cpu_tiles() != Tiles::kNone ? tile_kernel(context, args) : cpu_kernel(context, args);
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, run_on_cpu};
const RegisteredKernel<PackArgs> pack_registered{pack_kernels, INFINI_DEVICE_CPU, pack_kernel};

constexpr Checker kLinear("linear_packed"), kPack("pack_linear");

// Checks a packed weight for rows of k elements.
void check_packed(const Checker &rule, const char *name, const TensorView &packed, int64_t k) {
    rule.rank(name, packed, 4);
    rule.dtype(name, packed, {INFINI_DTYPE_BF16});
    rule.shape(name, packed, {packed.size(0), (k + 1) / 2, kPanel, 2}, "of panels of 48 rows, two elements a word");
    rule.contiguous(name, packed);
    if (packed.size(0) > std::numeric_limits<int64_t>::max() / kPanel) { // such a view can only be empty
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, name, "have rows that 64 bits can count", shape_of(packed));
    }
}

} // namespace

void check_inputs(const Args &args) {
    const TensorView &x = args.x, &weight = args.weight, &bias = args.bias;
    kLinear.rank("x", x, 1, kMaxDims);
    kLinear.dtype("x", x, {INFINI_DTYPE_BF16});
    kLinear.dense_last("x", x);
    check_packed(kLinear, "weight", weight, x.size(-1));
    if (args.n < 0 || args.n > weight.size(0) * kPanel) {
        kLinear.fail(INFINI_STATUS_BAD_PARAM, "n",
                     message("be 0 to ", weight.size(0) * kPanel, ", the rows that weight has room for"),
                     std::to_string(args.n));
    }
    if (bias.dtype != INFINI_DTYPE_INVALID) {
        kLinear.same_dtype_or_float32("bias", bias, "x", x);
        kLinear.shape("bias", bias, {args.n}, "to match n");
        kLinear.dense_last("bias", bias);
    }
}

void check_output(const Args &args) {
    const TensorView &y = args.y;
    kLinear.rows_of_x("out", y, args.x, args.n, "the rows of x by n");
    kLinear.no_overlap("out", y, "weight", args.weight);
    if (args.bias.dtype != INFINI_DTYPE_INVALID) {
        kLinear.no_overlap("out", y, "bias", args.bias);
    }
}

void run(const ExecutionContext &context, const Args &args) {
    if (args.y.numel() > 0) {
        kernels.run(context, args);
    }
}

void run_pack(const ExecutionContext &context, const PackArgs &args) {
    const TensorView &packed = args.packed, &weight = args.weight;
    kPack.rank("weight", weight, 2);
    kPack.dtype("weight", weight, {INFINI_DTYPE_BF16});
    kPack.dense_last("weight", weight);
    check_packed(kPack, "packed", packed, weight.size(1));
    const int64_t rows = weight.size(0), room = packed.size(0) * kPanel;
    if (args.first_row < 0 || args.first_row > room - rows) {
        kPack.fail(INFINI_STATUS_BAD_PARAM, "first_row",
                   message("leave room for ", rows, " of the ", room, " rows of packed"),
                   std::to_string(args.first_row));
    }
    kPack.no_overlap("packed", packed, "weight", weight);
    if (weight.numel() > 0) {
        pack_kernels.run(context, args);
    }
}

} // namespace infini::linear_packed
