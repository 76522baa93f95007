// Weights in panels, [panels, blocks, bytes of a block] uint8, which linear_table4 and linear_group8 take,
// on the CPU and on CUDA; the ops that make them are the CPU's.
// A panel is 16 rows of w, a block 64 of its columns: 4 groups of 16. A block has the groups' scales, int8 [4, 16 rows],
// then the weights in lines of 64 bytes, 4 to a row. With a float scale for each row, w = row_scale * scale * integer.
// Beyond k and n a weight may hold anything. x is quantized in runs of columns: int8 and a scale for each; what is summed
// between two runs are integers.
#pragma once

#include "check.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::panels {

constexpr int64_t kPanel = 16, kBlock = 64, kGroup = 16, kBlockGroups = kBlock / kGroup;
constexpr int64_t kScaleBytes = kBlockGroups * kPanel, kLineBytes = kPanel * 4;

// kBits of a weight without scales; kColumns of x in a run.
template <int kBits, int64_t kColumns> struct Layout {
    static constexpr int64_t kRun = kColumns, kRunBlocks = kRun / kBlock;
    static constexpr int kWordParts = 8 / kBits; // of 4 columns of a row, in a word of a line
    static constexpr int64_t kBlockBytes = kScaleBytes + kPanel * kBlock * kBits / 8;
};

struct Args {
    TensorView y;              // [..., n], the dtype of x
    TensorView x;              // [..., k], any float
    TensorView weight;         // [at least n / 16, k / 64 rounded up, bytes of a block] uint8, contiguous
    TensorView scales;         // [n] float32
    TensorView bias;           // [n], the dtype of x or float32; dtype == INFINI_DTYPE_INVALID: none
    void *workspace = nullptr; // as Op::workspace_size says, aligned to 16
};

// Rows of a weight, and their place in the quantized one, from first_row on.
struct QuantizeArgs {
    TensorView packed; // as Args::weight
    TensorView scales; // [at least first_row + rows] float32
    TensorView weight; // [rows, k], any float; any row stride
    int64_t first_row = 0;
};

// A product with such weights, and the op that makes them: rules and calls.
struct Op {
    Checker linear, quantize;
    int64_t block_bytes;
    KernelTable<Args> &kernels;
    KernelTable<QuantizeArgs> &quantize_kernels;

    // Check the arguments: the inputs, which determine the shape of y; and y.
    void check_inputs(const Args &args) const;
    void check_output(const Args &args) const;
    // The bytes of workspace that run needs. y is known.
    size_t workspace_size(const ExecutionContext &context, const Args &args) const;
    // Computes y of arguments that were checked.
    void run(const ExecutionContext &context, const Args &args) const;
    // Checks the arguments, then quantizes.
    void run_quantize(const ExecutionContext &context, const QuantizeArgs &args) const;
};

} // namespace infini::panels
