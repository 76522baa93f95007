// linear_table4: y = x @ w^T + bias with 4-bit weights that are looked up in a table of 16 integers.
// Weights in panels, made by quantize_table4: byte b of line l of a block has the index of column 8 l + b in its lower half
// and that of column 8 l + 4 + b in the upper: 4.5 bits a weight, 576 bytes a block.
#pragma once

#include "cpu_capability.h"
#include "panel_weights/panel_weights.h"

namespace infini::linear_table4 {

using Layout = panels::Layout<4, 128>;

// Levels that minimise the squared error of normally distributed weights in groups of 16 whose scale is fitted too
// (Lloyd's algorithm from equal steps, then single steps of integers while the error falls). One end is nearer to 0:
// a group's scale has the sign that lays its longer tail at the other. At most 64 in magnitude, so that sums of a group
// are exact in float, and of two blocks in int32.
constexpr int8_t kTable[16] = {-64, -52, -42, -32, -24, -17, -10, -4, 1, 6, 12, 18, 25, 33, 42, 57};

extern const panels::Op kOp;

INFINI_DOT_KERNEL(dot_kernel, panels::Args)
INFINI_TILE_KERNEL(tile_kernel, panels::Args)
INFINI_CPU_KERNEL(quantize_kernel, panels::QuantizeArgs)

} // namespace infini::linear_table4
