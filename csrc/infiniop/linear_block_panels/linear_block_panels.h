// linear_block_panels: y = x @ w^T + bias, where the weight's blocks are those of linear_blocks in panels of 16 rows, made
// by pack_blocks: in as many bytes, so ordered that 16 rows are multiplied at once. CPU only. A row has the same bits in
// any call. Codes are multiplied by a bfloat16 x as integers, and the sums of groups by their scales, in float, where
// bfloat16 is multiplied in pairs, and on AVX2; otherwise, and for other x, the results have the bits of linear_blocks.
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "panel_kinds.h"
#include "tensor_view.h"

namespace infini::linear_block_panels {

struct Args {
    TensorView y;      // [..., 16 * panels], the dtype of x
    TensorView x;      // [..., k], any float
    TensorView weight; // [panels, k / elements, 16 * bytes of a block] uint8, contiguous
    TensorView bias;   // [16 * panels], the dtype of x or float32; dtype == INFINI_DTYPE_INVALID: no bias
    const linear_blocks::Kind *block = nullptr;
    const PanelKind *kind = nullptr;
    void *workspace = nullptr; // workspace_size() bytes
};

// Rows in blocks, which are the rows of the panels from first_row on.
struct PackArgs {
    TensorView packed; // as Args::weight
    TensorView weight; // [rows, k / elements, bytes] uint8, as linear_blocks takes it
    int64_t first_row = 0;
    const linear_blocks::Kind *block = nullptr;
    const PanelKind *kind = nullptr;
};

// Check the arguments: the inputs, which determine the shape of y; then y too.
void check_inputs(const Args &args);
void check_output(const Args &args);

// The bytes that run needs at args.workspace, aligned to 256. args.y must be set.
size_t workspace_size(const ExecutionContext &context, const Args &args);

// Computes y. Call after the checks.
void run(const ExecutionContext &context, const Args &args);

// Products with weights of one kind and shape, of at most kTogether rows of x in all if there are several: fused_experts
// has those of the experts of a few tokens, which are too short for a parallel region each.
constexpr int64_t kTogether = 64;
struct Products {
    const Args *args;
    int64_t count;
};

// Computes all y, with one workspace, which has the bytes that any of them needs. Call after the checks.
void run_together(const ExecutionContext &context, const Products &products);

// Checks the arguments, then copies rows into panels, or out of them.
void run_pack(const ExecutionContext &context, const PackArgs &args);
void run_unpack(const ExecutionContext &context, const PackArgs &args);

INFINI_CPU_KERNEL(multiply_kernel, Products)
INFINI_CPU_KERNEL(pack_kernel, PackArgs)
INFINI_CPU_KERNEL(unpack_kernel, PackArgs)

extern KernelTable<Args> kernels;
extern KernelTable<PackArgs> pack_kernels, unpack_kernels;

} // namespace infini::linear_block_panels
