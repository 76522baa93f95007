// linear_group8: y = x @ w^T + bias with int8 weights that have one scale per 16 columns. The weights are in panels
// made by quantize_group8: byte b of line l of a block is column 4 l + b. That is 8.5 bits per weight, 1088 bytes per
// block. The groups' scales are from 0 to 127.
#pragma once

#include "cpu_capability.h"
#include "panel_weights/panel_weights.h"

namespace infini::linear_group8 {

using Layout = panels::Layout<8, 64>;

extern const panels::Op kOp;

INFINI_DOT_KERNEL(dot_kernel, panels::Args)
INFINI_TILE_KERNEL(tile_kernel, panels::Args)
INFINI_CPU_KERNEL(quantize_kernel, panels::QuantizeArgs)

} // namespace infini::linear_group8
