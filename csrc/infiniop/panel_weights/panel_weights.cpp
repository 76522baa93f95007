// The rules of ops with weights in panels, and the calls of their kernels.
#include "panel_weights.h"

#include <limits>

namespace infini::panels {

namespace {

// Checks a packed weight for rows of k elements.
void check_packed(const Checker &rule, int64_t block_bytes, const char *name, const TensorView &packed, int64_t k) {
    rule.rank(name, packed, 3);
    rule.dtype(name, packed, {INFINI_DTYPE_U8});
    rule.shape(name, packed, {packed.size(0), k / kBlock + (k % kBlock != 0), block_bytes},
               "of panels of 16 rows, in blocks of 64 columns");
    rule.contiguous(name, packed);
    if (packed.size(0) > std::numeric_limits<int64_t>::max() / kPanel) { // such a view can only be empty
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, name, "have rows that 64 bits can count", shape_of(packed));
    }
}

} // namespace

void Op::check_inputs(const Args &args) const {
    const TensorView &x = args.x, &weight = args.weight, &scales = args.scales;
    linear.rank("x", x, 1, kMaxDims);
    linear.dtype("x", x, INFINI_FLOATS);
    linear.dense_last("x", x);
    check_packed(linear, block_bytes, "weight", weight, x.size(-1));
    linear.rank("scales", scales, 1);
    linear.dtype("scales", scales, {INFINI_DTYPE_F32});
    linear.dense_last("scales", scales);
    if (scales.size(0) > weight.size(0) * kPanel) {
        linear.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "scales",
                    message("have at most ", weight.size(0) * kPanel, " elements, the rows that weight has room for"),
                    std::to_string(scales.size(0)));
    }
    if (args.bias.dtype != INFINI_DTYPE_INVALID) {
        linear.same_dtype_or_float32("bias", args.bias, "x", x);
        linear.shape("bias", args.bias, {scales.size(0)}, "to match scales");
        linear.dense_last("bias", args.bias);
    }
}

void Op::check_output(const Args &args) const {
    linear.rows_of_x("out", args.y, args.x, args.scales.size(0), "the rows of x by the length of scales");
    linear.no_overlap("out", args.y, "weight", args.weight);
    linear.no_overlap("out", args.y, "scales", args.scales);
    if (args.bias.dtype != INFINI_DTYPE_INVALID) {
        linear.no_overlap("out", args.y, "bias", args.bias);
    }
}

size_t Op::workspace_size(const ExecutionContext &context, const Args &args) const {
    return args.y.numel() > 0 ? kernels.workspace_bytes(context, args) : 0;
}

void Op::run(const ExecutionContext &context, const Args &args) const {
    if (args.y.numel() > 0) {
        kernels.run(context, args);
    }
}

void Op::run_quantize(const ExecutionContext &context, const QuantizeArgs &args) const {
    const TensorView &packed = args.packed, &scales = args.scales, &weight = args.weight;
    quantize.rank("weight", weight, 2);
    quantize.dtype("weight", weight, INFINI_FLOATS);
    quantize.dense_last("weight", weight);
    check_packed(quantize, block_bytes, "packed", packed, weight.size(1));
    quantize.rank("scales", scales, 1);
    quantize.dtype("scales", scales, {INFINI_DTYPE_F32});
    quantize.dense_last("scales", scales);
    const int64_t rows = weight.size(0), room = packed.size(0) * kPanel;
    const int64_t fits = scales.size(0) < room ? scales.size(0) : room;
    if (args.first_row < 0 || args.first_row > fits - rows) {
        quantize.fail(INFINI_STATUS_BAD_PARAM, "first_row",
                      message("leave room for ", rows, " of the ", fits, " rows of packed and scales"),
                      std::to_string(args.first_row));
    }
    quantize.no_overlap("packed", packed, "weight", weight);
    quantize.no_overlap("scales", scales, "weight", weight);
    quantize.no_overlap("packed", packed, "scales", scales);
    if (rows > 0) {
        quantize_kernels.run(context, args);
    }
}

} // namespace infini::panels
