// fused_experts: the gated MLPs of a mixture of experts. For token t and its chosen experts e = index[t, j]
//     y[t] = sum over j of weights[t, j] * (act(x[t] @ gate[e]^T) * (x[t] @ up[e]^T)) @ down[e]^T,
// where gate_up[e] is gate[e] above up[e]. A step reads the experts that were chosen, each once.
// Products are those of linear, or of linear_group8 and linear_table4 for weights in panels, with their bits for a row;
// gate, up, their gated product and each expert's result are rounded to the dtype of x, and the sum over j is taken in
// float, in order, and rounded once.
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::fused_experts {

enum class Activation : int { kSwiglu, kGeglu }; // silu, gelu by tanh
constexpr int64_t kActivations = 2;

struct Args {
    TensorView y;       // [tokens, hidden], the dtype of x
    TensorView x;       // [tokens, hidden]
    TensorView gate_up; // [experts, 2 * inner, hidden], the dtype of x; any outer strides
    TensorView down;    // [experts, hidden, inner], likewise
    TensorView index;   // [tokens, k] int64 or int32: experts
    TensorView weights; // [tokens, k], the dtype of x or float32
    int64_t activation = 0;
    // Of weights in panels (panel_weights.h), which are [experts, panels, blocks, bytes] uint8, contiguous: the scales
    // of their rows, float32, any outer strides. dtype == INFINI_DTYPE_INVALID: the weights are dense.
    TensorView gate_up_scales; // [experts, 2 * inner]
    TensorView down_scales;    // [experts, hidden]
};

// Check the arguments: the inputs, which determine the shape of y; then y too.
void check_inputs(const Args &args);
void check_output(const Args &args);

// Computes y. Call after the checks. Throws for an index that is no expert, before anything is computed.
void run(const ExecutionContext &context, const Args &args);

extern KernelTable<Args> kernels;

// y[t] = the sum over j of weights[t, j] * results[row[t * k + j]].
struct SumArgs {
    TensorView y, weights;
    const void *results; // rows of hidden elements, the dtype of y
    const int64_t *row;
};

INFINI_CPU_KERNEL(sum_kernel, SumArgs)

} // namespace infini::fused_experts
