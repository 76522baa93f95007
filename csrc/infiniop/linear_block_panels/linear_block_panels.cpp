// The rules of linear_block_panels, pack_blocks and unpack_blocks, and the choice of their kernels.
#include "linear_block_panels.h"

#include <limits>

#include "check.h"
#include "linear_blocks/linear_blocks.h"

namespace infini::linear_block_panels {

KernelTable<Args> kernels{"linear_block_panels"};
KernelTable<PackArgs> pack_kernels{"pack_blocks"}, unpack_kernels{"unpack_blocks"};

namespace {

constexpr Checker kRule("linear_block_panels"), kPack("pack_blocks"), kUnpack("unpack_blocks");

// Unpacked rows have at most so many bytes, or 64 rows.
constexpr int64_t kSliceBytes = 4 << 20;

bool has(const TensorView &optional) {
    return optional.dtype != INFINI_DTYPE_INVALID;
}

bool has_kernel(const Args &args) {
#if defined(__x86_64__)
    const CpuCapability level = cpu_capability();
    return args.x.dtype == INFINI_DTYPE_BF16 && level >= kAvx2 && cpu_tiles() == Tiles::kNone;
#else
    return false;
#endif
}

// Rows of the weight that are unpacked at a time, whole panels.
int64_t slice_rows(const Args &args) {
    const int64_t row = args.weight.size(1) * args.block->bytes, rows = args.weight.size(0) * kPanel;
    const int64_t fit = kSliceBytes / (row > 0 ? row : 1) / kPanel * kPanel, most = fit < 64 ? 64 : fit;
    return rows < most ? rows : most;
}

int64_t slice_bytes(const Args &args) {
    return (slice_rows(args) * args.weight.size(1) * args.block->bytes + 255) / 256 * 256;
}

// The product of linear_blocks with a slice of rows that were unpacked to the workspace.
linear_blocks::Args slice_product(const Args &args, int64_t first, int64_t rows) {
    const auto part = [&](const TensorView &view, int dim) {
        TensorView some = view;
        if (has(view)) {
            some.data = view.as<char>() + first * view.strides[dim] * static_cast<int64_t>(size_of(view.dtype));
            some.shape[dim] = rows;
        }
        return some;
    };
    linear_blocks::Args product;
    product.kind = args.block;
    product.x = args.x;
    product.y = part(args.y, args.y.ndim - 1);
    product.bias = part(args.bias, 0);
    product.weight = args.weight;
    product.weight.data = args.workspace;
    product.weight.shape[0] = rows;
    product.weight.shape[2] = product.weight.strides[1] = args.block->bytes;
    product.weight.strides[0] = args.weight.size(1) * args.block->bytes;
    product.workspace = static_cast<char *>(args.workspace) + slice_bytes(args);
    return product;
}

void run_in_slices(const ExecutionContext &context, const Args &args) {
    const int64_t n = args.weight.size(0) * kPanel, most = slice_rows(args);
    for (int64_t first = 0; first < n; first += most) {
        const int64_t rows = n - first < most ? n - first : most;
        const linear_blocks::Args product = slice_product(args, first, rows);
        unpack_kernel(context, {args.weight, product.weight, first, args.block, args.kind});
        linear_blocks::run(context, product);
    }
}

size_t cpu_workspace(const ExecutionContext &context, const Args &args) {
    if (has_kernel(args)) {
        return 0;
    }
    return static_cast<size_t>(slice_bytes(args)) +
           linear_blocks::workspace_size(context, slice_product(args, 0, slice_rows(args)));
}

void run_on_cpu(const ExecutionContext &context, const Args &args) {
    has_kernel(args) ? multiply_kernel(context, {&args, 1}) : run_in_slices(context, args);
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, run_on_cpu, cpu_workspace};
const RegisteredKernel<PackArgs> pack_registered{pack_kernels, INFINI_DEVICE_CPU, pack_kernel};
const RegisteredKernel<PackArgs> unpack_registered{unpack_kernels, INFINI_DEVICE_CPU, unpack_kernel};

// Checks a weight in panels for rows of `blocks` blocks.
void check_panels(const Checker &rule, const char *name, const TensorView &weight, int64_t blocks, int64_t bytes) {
    rule.rank(name, weight, 3);
    rule.dtype(name, weight, {INFINI_DTYPE_U8});
    rule.shape(name, weight, {weight.size(0), blocks, kPanel * bytes}, "of panels of 16 rows of the kind's blocks");
    rule.contiguous(name, weight);
    if (weight.size(0) > std::numeric_limits<int64_t>::max() / kPanel) { // such a view can only be empty
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, name, "have rows that 64 bits can count", shape_of(weight));
    }
}

// Checks rows in blocks, and that panels have room for them.
void check_rows(const Checker &rule, const PackArgs &args) {
    const TensorView &packed = args.packed, &weight = args.weight;
    rule.rank("weight", weight, 3);
    rule.dtype("weight", weight, {INFINI_DTYPE_U8});
    const int64_t bytes = args.block->bytes, rows = weight.size(0);
    rule.shape("weight", weight, {rows, weight.size(1), bytes}, "of the kind's blocks");
    if (weight.numel() > 0 && (weight.stride(2) != 1 || (weight.size(1) > 1 && weight.stride(1) != bytes))) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_STRIDES, "weight",
                  "have the blocks of a row adjacent (call .contiguous() on it)",
                  message("strides ", strides_of(weight)));
    }
    check_panels(rule, "packed", packed, weight.size(1), bytes);
    const int64_t room = packed.size(0) * kPanel;
    if (args.first_row < 0 || args.first_row % kPanel != 0 || args.first_row > room - rows) {
        rule.fail(INFINI_STATUS_BAD_PARAM, "first_row",
                  message("be a multiple of 16 and leave room for ", rows, " of the ", room, " rows of packed"),
                  std::to_string(args.first_row));
    }
    rule.no_overlap("packed", packed, "weight", weight);
}

} // namespace

void check_inputs(const Args &args) {
    const TensorView &x = args.x, &weight = args.weight;
    kRule.rank("x", x, 1, kMaxDims);
    kRule.dtype("x", x, INFINI_FLOATS);
    kRule.dense_last("x", x);
    const int64_t k = x.size(-1), elements = args.block->elements;
    if (k % elements != 0) {
        kRule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "x",
                   message("have a last dimension that is a multiple of ", elements, ", the elements of a block of ",
                           args.block->name),
                   shape_of(x));
    }
    check_panels(kRule, "weight", weight, k / elements, args.block->bytes);
    if (has(args.bias)) {
        kRule.same_dtype_or_float32("bias", args.bias, "x", x);
        kRule.shape("bias", args.bias, {weight.size(0) * kPanel}, "to match the rows of weight");
        kRule.dense_last("bias", args.bias);
    }
}

void check_output(const Args &args) {
    kRule.rows_of_x("out", args.y, args.x, args.weight.size(0) * kPanel, "the rows of x by the rows of weight");
    kRule.no_overlap("out", args.y, "weight", args.weight);
    if (has(args.bias)) {
        kRule.no_overlap("out", args.y, "bias", args.bias);
    }
}

size_t workspace_size(const ExecutionContext &context, const Args &args) {
    return args.y.numel() > 0 ? kernels.workspace_bytes(context, args) : 0;
}

void run(const ExecutionContext &context, const Args &args) {
    if (args.y.numel() > 0) {
        kernels.run(context, args);
    }
}

void run_together(const ExecutionContext &context, const Products &products) {
    if (products.count > 1 && has_kernel(products.args[0]) && products.args[0].y.size(-1) > 0) {
        return multiply_kernel(context, products);
    }
    for (int64_t i = 0; i < products.count; ++i) {
        run(context, products.args[i]);
    }
}

void run_pack(const ExecutionContext &context, const PackArgs &args) {
    check_rows(kPack, args);
    if (args.weight.numel() > 0) {
        pack_kernels.run(context, args);
    }
}

void run_unpack(const ExecutionContext &context, const PackArgs &args) {
    check_rows(kUnpack, args);
    if (args.weight.numel() > 0) {
        unpack_kernels.run(context, args);
    }
}

} // namespace infini::linear_block_panels
