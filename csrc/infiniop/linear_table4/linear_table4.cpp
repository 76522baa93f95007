// The rules of linear_table4 and quantize_table4, and the calls of their kernels.
#include "linear_table4.h"

#include <limits>

#include "check.h"

namespace infini::linear_table4 {

KernelTable<Args> kernels{"linear_table4"};
KernelTable<QuantizeArgs> quantize_kernels{"quantize_table4"};

namespace {

// Rows of x from which on tiles are faster than vectors, with the same bits: measured on an Intel Xeon (Sapphire
// Rapids), one thread, 2048 -> 5632.
constexpr int64_t kTileRowsFrom = 12;

void run_on_cpu(const ExecutionContext &context, const Args &args) {
    const bool in_tiles = cpu_tiles() != Tiles::kNone && args.y.numel() / args.scales.size(0) >= kTileRowsFrom;
    in_tiles ? tile_kernel(context, args) : dot_kernel(context, args);
}

void quantize_on_cpu(const ExecutionContext &context, const QuantizeArgs &args) {
    quantize_kernel(context, args);
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, run_on_cpu};
const RegisteredKernel<QuantizeArgs> quantize_registered{quantize_kernels, INFINI_DEVICE_CPU, quantize_on_cpu};

constexpr Checker kLinear("linear_table4"), kQuantize("quantize_table4");

// The rules of a packed weight for rows of k elements.
void check_packed(const Checker &rule, const char *name, const TensorView &packed, int64_t k) {
    rule.rank(name, packed, 3);
    rule.dtype(name, packed, {INFINI_DTYPE_U8});
    rule.shape(name, packed, {packed.size(0), k / kBlock + (k % kBlock != 0), kBlockBytes},
               "of panels of 16 rows, in blocks of 64 columns");
    rule.contiguous(name, packed);
    if (packed.size(0) > std::numeric_limits<int64_t>::max() / kPanel) { // it holds nothing then
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, name, "have rows that 64 bits can count", shape_of(packed));
    }
}

} // namespace

void check_inputs(const Args &args) {
    const TensorView &x = args.x, &weight = args.weight, &scales = args.scales;
    kLinear.rank("x", x, 1, kMaxDims);
    kLinear.dtype("x", x, INFINI_FLOATS);
    kLinear.dense_last("x", x);
    check_packed(kLinear, "weight", weight, x.size(-1));
    kLinear.rank("scales", scales, 1);
    kLinear.dtype("scales", scales, {INFINI_DTYPE_F32});
    kLinear.dense_last("scales", scales);
    if (scales.size(0) > weight.size(0) * kPanel) {
        kLinear.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "scales",
                     message("have at most ", weight.size(0) * kPanel, " elements, the rows that weight has room for"),
                     std::to_string(scales.size(0)));
    }
    if (args.bias.dtype != INFINI_DTYPE_INVALID) {
        kLinear.same_dtype_or_float32("bias", args.bias, "x", x);
        kLinear.shape("bias", args.bias, {scales.size(0)}, "to match scales");
        kLinear.dense_last("bias", args.bias);
    }
}

void check_output(const Args &args) {
    kLinear.rows_of_x("out", args.y, args.x, args.scales.size(0), "the rows of x by the length of scales");
    kLinear.no_overlap("out", args.y, "weight", args.weight);
    kLinear.no_overlap("out", args.y, "scales", args.scales);
    if (args.bias.dtype != INFINI_DTYPE_INVALID) {
        kLinear.no_overlap("out", args.y, "bias", args.bias);
    }
}

void run(const ExecutionContext &context, const Args &args) {
    if (args.y.numel() > 0) {
        kernels.run(context, args);
    }
}

void run_quantize(const ExecutionContext &context, const QuantizeArgs &args) {
    const TensorView &packed = args.packed, &scales = args.scales, &weight = args.weight;
    kQuantize.rank("weight", weight, 2);
    kQuantize.dtype("weight", weight, INFINI_FLOATS);
    kQuantize.dense_last("weight", weight);
    check_packed(kQuantize, "packed", packed, weight.size(1));
    kQuantize.rank("scales", scales, 1);
    kQuantize.dtype("scales", scales, {INFINI_DTYPE_F32});
    kQuantize.dense_last("scales", scales);
    const int64_t rows = weight.size(0), room = packed.size(0) * kPanel;
    const int64_t fits = scales.size(0) < room ? scales.size(0) : room;
    if (args.first_row < 0 || args.first_row > fits - rows) {
        kQuantize.fail(INFINI_STATUS_BAD_PARAM, "first_row",
                       message("leave room for ", rows, " of the ", fits, " rows of packed and scales"),
                       std::to_string(args.first_row));
    }
    kQuantize.no_overlap("packed", packed, "weight", weight);
    kQuantize.no_overlap("scales", scales, "weight", weight);
    kQuantize.no_overlap("packed", packed, "scales", scales);
    if (rows > 0) {
        quantize_kernels.run(context, args);
    }
}

} // namespace infini::linear_table4
