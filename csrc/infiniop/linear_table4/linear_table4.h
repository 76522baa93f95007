// linear_table4: y = x @ w^T + bias with 4-bit weights that are looked up in a table of 16 integers. CPU only.
// Layout, made by quantize_table4: [panels, blocks, 576] uint8. A panel is 16 rows of w, a block 64 of its columns: 4
// groups of 16 columns. A block has the groups' scales, int8 [4, 16 rows], then indices, [8, 16 rows, 4] bytes: byte b
// of line l has column 8 l + b in its lower half and 8 l + 4 + b in the upper. With a float scale for each row,
// w = row_scale * scale * kTable[index]: 4.5 bits a weight. Beyond k and n a weight may hold anything.
// x is quantized in runs of 128 columns: int8 and a scale for each. What is summed between two runs are integers.
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::linear_table4 {

constexpr int64_t kPanel = 16, kBlock = 64, kGroup = 16, kBlockGroups = kBlock / kGroup, kRun = 128;
constexpr int64_t kScaleBytes = kBlockGroups * kPanel, kLineBytes = kPanel * 4;
constexpr int64_t kBlockBytes = kScaleBytes + kPanel * kBlock / 2;

// Levels that minimise the squared error of normally distributed weights in groups of 16 whose scale is fitted too
// (Lloyd's algorithm from equal steps, then single steps of integers while the error falls). One end is nearer to 0:
// a group's scale has the sign that lays its longer tail at the other. At most 64 in magnitude, so that sums of a group
// are exact in float, and of two blocks in int32.
constexpr int8_t kTable[16] = {-64, -52, -42, -32, -24, -17, -10, -4, 1, 6, 12, 18, 25, 33, 42, 57};

struct Args {
    TensorView y;      // [..., n], the dtype of x
    TensorView x;      // [..., k], any float
    TensorView weight; // [at least n / 16, k / 64 rounded up, 576] uint8, contiguous
    TensorView scales; // [n] float32
    TensorView bias;   // [n], the dtype of x or float32; dtype == INFINI_DTYPE_INVALID: none
};

// Check the arguments: the inputs, which determine the shape of y; and y.
void check_inputs(const Args &args);
void check_output(const Args &args);

// Computes y of arguments that were checked.
void run(const ExecutionContext &context, const Args &args);

// The arguments of quantize_table4: rows of a weight, and their place in the quantized one, from first_row on.
struct QuantizeArgs {
    TensorView packed; // as Args::weight
    TensorView scales; // [at least first_row + rows] float32
    TensorView weight; // [rows, k], any float; any row stride
    int64_t first_row = 0;
};

// Checks the arguments, then quantizes.
void run_quantize(const ExecutionContext &context, const QuantizeArgs &args);

INFINI_DOT_KERNEL(dot_kernel, Args)
INFINI_TILE_KERNEL(tile_kernel, Args)
INFINI_CPU_KERNEL(quantize_kernel, QuantizeArgs)
extern KernelTable<Args> kernels;
extern KernelTable<QuantizeArgs> quantize_kernels;

} // namespace infini::linear_table4
