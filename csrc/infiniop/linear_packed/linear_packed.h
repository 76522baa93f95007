// linear_packed: y = x @ weight^T + bias in bfloat16, with a weight in the layout of pack_linear. CPU only. A packed
// weight is [panels, words, 48, 2]: a panel is 48 rows of the weight (columns of y); word i of a row holds its elements
// 2i and 2i + 1, padded with 0 for odd k. Rows beyond the weight's are unspecified.
// Products are summed in float, word by word: a row of x has the same bits in any call.
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::linear_packed {

// A register tile of AVX-512 has three vectors of columns; the tiles of other instruction sets divide 48 too.
constexpr int64_t kPanel = 48;

struct Args {
    TensorView y;      // [..., n], bfloat16
    TensorView x;      // [..., k], bfloat16
    TensorView weight; // [at least n / 48, k / 2 rounded up, 48, 2], bfloat16, contiguous
    TensorView bias;   // [n], bfloat16 or float32; dtype == INFINI_DTYPE_INVALID: no bias
    int64_t n = 0;     // rows of the weight
};

// Check the arguments: the inputs, which determine the shape of y; then y too.
void check_inputs(const Args &args);
void check_output(const Args &args);

// Computes y. Call after the checks.
void run(const ExecutionContext &context, const Args &args);

// The arguments of pack_linear: rows of a weight, which become the packed weight's rows from first_row on.
struct PackArgs {
    TensorView packed; // as Args::weight
    TensorView weight; // [rows, k], bfloat16; any row stride
    int64_t first_row = 0;
};

// Checks the arguments, then packs.
void run_pack(const ExecutionContext &context, const PackArgs &args);

INFINI_CPU_KERNEL(cpu_kernel, Args)
INFINI_TILE_KERNEL(tile_kernel, Args)
INFINI_CPU_KERNEL(pack_kernel, PackArgs)
extern KernelTable<Args> kernels;
extern KernelTable<PackArgs> pack_kernels;

} // namespace infini::linear_packed
