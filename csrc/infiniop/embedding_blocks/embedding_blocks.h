// embedding_blocks: rows of a table in blocks (linear_blocks), selected by ids and decoded. Every id is checked before
// anything is written.
#pragma once

#include "kernel_table.h"
#include "linear_blocks/kinds.h"
#include "tensor_view.h"

namespace infini::embedding_blocks {

struct Args {
    TensorView out; // [m, k], any floating dtype
    TensorView ids; // [m] int64 or int32, in 0 .. v - 1
    // [v, k / kind->elements, kind->bytes] uint8, the blocks of a row adjacent; or in panels, as linear_block_panels
    // takes them, [v / 16, k / kind->elements, 16 * kind->bytes].
    TensorView weight;
    const linear_blocks::Kind *kind = nullptr;
};

// Checks ids and weight, which determine the shape of out; then out too.
void check_inputs(const Args &args);
void check_output(const Args &args);

// Checks the ids, then decodes. Call after the checks.
void run(const ExecutionContext &context, const Args &args);

extern KernelTable<Args> kernels;

} // namespace infini::embedding_blocks
