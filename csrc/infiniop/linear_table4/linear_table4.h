// linear_table4: y = x @ w^T + bias with 4-bit weights that are indices into a table of 16 integers. The weights are in
// panels made by quantize_table4: byte b of line l of a block has the index of column 8 l + b in its lower half and
// that of column 8 l + 4 + b in its upper half. That is 4.5 bits per weight, 576 bytes per block.
#pragma once

#include "cpu_capability.h"
#include "panel_weights/panel_weights.h"

namespace infini::linear_table4 {

using Layout = panels::Layout<4, 128>;

// Levels that minimize the squared error of normally distributed weights in groups of 16 whose scale is fitted too
// (Lloyd's algorithm from equal steps, then changes of single levels by 1 while the error falls). The ends differ in
// magnitude: a group's scale has the sign that puts its longer tail at the larger end. At most 64 in magnitude, so that
// the sums of a group are exact in float, and those of two blocks in int32.
constexpr int8_t kTable[16] = {-64, -52, -42, -32, -24, -17, -10, -4, 1, 6, 12, 18, 25, 33, 42, 57};

extern const panels::Op kOp;

INFINI_DOT_KERNEL(dot_kernel, panels::Args)
INFINI_TILE_KERNEL(tile_kernel, panels::Args)
INFINI_CPU_KERNEL(quantize_kernel, panels::QuantizeArgs)

} // namespace infini::linear_table4
