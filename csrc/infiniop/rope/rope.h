// rope: rotary position embedding. Each pair (x0, x1) of a head's first R columns is rotated by its token's angle: y0 =
// x0 cos - x1 sin, y1 = x1 cos + x0 sin; columns from R on are copied unchanged. Computed in float, rounded once;
// float64 in double.
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini {
class Checker;
}

namespace infini::rope {

struct Args {
    TensorView y;             // the shape and dtype of x; may alias x
    TensorView x;             // [S, H, D] or [B, S, H, D]
    TensorView cos, sin;      // with positions: tables [P, R/2]; without: [S, R/2] or [B or 1, S, R/2]
    TensorView positions;     // [S] or [B or 1, S], integers; dtype INFINI_DTYPE_INVALID: token t uses row t
    bool interleaved = false; // true: pairs are columns (2i, 2i + 1); false: (i, i + R/2)
};

// The position of token s of batch entry b; positions are [B, S].
INFINI_ALWAYS_INLINE int64_t position(const TensorView &positions, int64_t b, int64_t s) {
    const int64_t at = b * positions.strides[0] + s * positions.strides[1];
    switch (positions.dtype) {
    case INFINI_DTYPE_I32:
        return positions.as<const int32_t>()[at];
    case INFINI_DTYPE_I16:
        return positions.as<const int16_t>()[at];
    case INFINI_DTYPE_I8:
        return positions.as<const int8_t>()[at];
    case INFINI_DTYPE_U32:
        return positions.as<const uint32_t>()[at];
    case INFINI_DTYPE_U16:
        return positions.as<const uint16_t>()[at];
    case INFINI_DTYPE_U8:
        return positions.as<const uint8_t>()[at];
    default: // uint64 values beyond int64's largest become negative, which is out of range too
        return positions.as<const int64_t>()[at];
    }
}

// The view with a leading dimension of `batch` entries; its stride is 0 if the view had no such dimension, or one
// entry.
TensorView with_batch(const TensorView &view, int64_t batch, int ndim);

// Checks cos and sin except for their number of rows: at most `max_rank` dimensions, R/2 columns to suit the rows of x.
void check_tables(const Checker &rule, const char *x_name, const TensorView &x, const TensorView &cos,
                  const TensorView &sin, int max_rank);

// Check positions, [S] or [B, S]: an integer dtype; then each value, a row of a table of the given size.
void check_positions_dtype(const Checker &rule, const TensorView &positions);
void check_positions(const Checker &rule, const TensorView &positions, int64_t rows);

// Checks the arguments against the rules above, except the positions' values.
void check(const char *op, const Args &args);

// Checks everything, then computes y. On CUDA the kernel checks positions: one outside the table gives NaN in the
// rotated columns.
void run(const ExecutionContext &context, const char *op, const Args &args);

// Kernels get every view with its batch dimension, of stride 0 if one entry serves all: x and y [B, S, H, D], cos and
// sin [B, S, R/2] or [P, R/2], positions [B, S].
INFINI_CPU_KERNEL(cpu_kernel, Args)
extern KernelTable<Args> kernels;

} // namespace infini::rope
