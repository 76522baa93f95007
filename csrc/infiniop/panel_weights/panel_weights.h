// Weights in panels, [panels, blocks, bytes of a block] uint8, for linear_table4 and linear_group8 on the CPU and on
// CUDA; the ops that create them run on the CPU.
// A panel is 16 rows of w, a block 64 of its columns: 4 groups of 16. A block holds the groups' scales, int8 [4, 16
// rows], then the weights in lines of 64 bytes, 4 per row. With one float scale per row, w = row_scale * scale *
// integer. A weight may hold anything beyond k and n. x is quantized in runs of columns, to int8 with one scale per
// run; sums within a run are integers.
#pragma once

#include "check.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::panels {

constexpr int64_t kPanel = 16, kBlock = 64, kGroup = 16, kBlockGroups = kBlock / kGroup;
constexpr int64_t kScaleBytes = kBlockGroups * kPanel, kLineBytes = kPanel * 4;

// kBits: bits per weight, without scales; kColumns: columns of x per run.
template <int kBits, int64_t kColumns> struct Layout {
    static constexpr int64_t kRun = kColumns, kRunBlocks = kRun / kBlock;
    static constexpr int kWordParts = 8 / kBits; // words of 4 columns of a row in one word of a line
    static constexpr int64_t kBlockBytes = kScaleBytes + kPanel * kBlock * kBits / 8;
};

struct Args {
    TensorView y;              // [..., n], the dtype of x
    TensorView x;              // [..., k], any float
    TensorView weight;         // [at least n / 16, k / 64 rounded up, bytes of a block] uint8, contiguous
    TensorView scales;         // [n] float32
    TensorView bias;           // [n], the dtype of x or float32; dtype == INFINI_DTYPE_INVALID: no bias
    void *workspace = nullptr; // Op::workspace_size() bytes, aligned to 16
};

// The arguments of the quantizing op: rows of a weight, which become the packed weight's rows from first_row on.
struct QuantizeArgs {
    TensorView packed; // as Args::weight
    TensorView scales; // [at least first_row + rows] float32
    TensorView weight; // [rows, k], any float; any row stride
    int64_t first_row = 0;
};

// The rules and calls of a product with such weights, and of the op that creates them.
struct Op {
    Checker linear, quantize;
    int64_t block_bytes;
    KernelTable<Args> &kernels;
    KernelTable<QuantizeArgs> &quantize_kernels;

    // Check the arguments: the inputs, which determine the shape of y; then y too.
    void check_inputs(const Args &args) const;
    void check_output(const Args &args) const;
    // The bytes of workspace that run needs. args.y must be set.
    size_t workspace_size(const ExecutionContext &context, const Args &args) const;
    // Computes y. Call after the checks.
    void run(const ExecutionContext &context, const Args &args) const;
    // Checks the arguments, then quantizes.
    void run_quantize(const ExecutionContext &context, const QuantizeArgs &args) const;
};

} // namespace infini::panels
