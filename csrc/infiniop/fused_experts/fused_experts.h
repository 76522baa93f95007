// fused_experts: the gated MLPs of a mixture of experts. For token t and its chosen experts e = index[t, j]
//     y[t] = sum over j of weights[t, j] * (act(x[t] @ gate[e]^T, x[t] @ up[e]^T) @ down[e]^T),
// where gate_up[e] is gate[e] above up[e], or their rows alternate; each product plus its bias, if there is one. A step
// reads the experts that were chosen, each once.
// Products are those of linear, of gemm for weights of adjacent columns, or of linear_group8, linear_table4,
// linear_blocks and linear_block_panels for quantized weights, with their bits for a row; gate, up, their gated product
// and each expert's result are rounded to the dtype of x, and the sum over j is taken in float, in order, and rounded
// once. Or weights multiply the inputs of the experts instead: x[t] * weights[t, j], rounded.
// Ranks may share the experts: those given are [first_expert, first_expert + experts) of total_experts, and the sum leaves
// out the others.
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "linear_block_panels/panel_kinds.h"
#include "linear_blocks/kinds.h"
#include "tensor_view.h"

namespace infini::fused_experts {

// act(gate, up), with g = min(gate, limit) and u = up clamped to +-limit:
enum class Activation : int {
    kSwiglu,        // silu(gate) * up
    kGeglu,         // gelu by tanh (gate) * up
    kSwigluOai,     // g * sigmoid(alpha * g) * (u + 1)
    kSwigluClamped, // silu(g) * u
    kRelu2NoMul     // max(up, 0)^2: without gate
};
constexpr int64_t kActivations = 5;

constexpr bool has_gate(int64_t activation) {
    return activation != static_cast<int64_t>(Activation::kRelu2NoMul);
}

// The weights of one product, for all experts: n rows, multiplied by rows of k elements.
//   dense:     data [experts, n, k] in the dtype of x; stride 1 in one of the last two dimensions, any other strides
//   in panels: data [experts, panels, blocks, bytes] uint8, contiguous (panel_weights.h), with scales
//   in blocks: data [experts, n, k / elements, bytes] uint8, the blocks of a row adjacent (linear_blocks.h), with kind
//   in panels of blocks: data [experts, n / 16, k / elements, 16 * bytes] uint8, contiguous (linear_block_panels.h), with
//              kind and panel_kind
struct Weights {
    TensorView data;
    TensorView scales; // [experts, n] float32; dtype == INFINI_DTYPE_INVALID: not in panels
    TensorView bias;   // [experts, n], the dtype of x; dtype == INFINI_DTYPE_INVALID: none
    const linear_blocks::Kind *kind = nullptr;
    const linear_block_panels::PanelKind *panel_kind = nullptr;
};

struct Args {
    TensorView y;       // [tokens, hidden], the dtype of x
    TensorView x;       // [tokens, hidden]
    Weights gate_up;    // n = 2 * inner, or inner without gate; k = hidden
    Weights down;       // n = hidden, k = inner
    TensorView index;   // [tokens, k] int64 or int32: experts, from 0 to total_experts - 1
    TensorView weights; // [tokens, k], the dtype of x or float32
    int64_t activation = 0;
    bool interleaved = false; // gate is the even rows of gate_up, up the odd ones
    double alpha = 1, limit = 0;
    bool weights_on_input = false;                // weights multiply x, not the results
    int64_t first_expert = 0, total_experts = -1; // -1: those given are all
    void *workspace = nullptr;                    // kernels.workspace_bytes bytes
};

// The number of experts that index may name, and the given one of such a number, or -1 for another rank's.
inline int64_t all_experts(const Args &args) {
    return args.total_experts < 0 ? args.gate_up.data.size(0) : args.total_experts;
}
INFINI_ALWAYS_INLINE int64_t own_expert(int64_t expert, int64_t first, int64_t experts) {
    return expert >= first && expert - first < experts ? expert - first : -1;
}

// Check the arguments: the inputs, which determine the shape of y; then y too.
void check_inputs(const Args &args);
void check_output(const Args &args);

// Computes y. Call after the checks. Throws for an index that is no expert, before anything is computed.
void run(const ExecutionContext &context, const Args &args);

extern KernelTable<Args> kernels;

// to[i] = x[token[i]] * weights[token[i], choice[i]].
struct ScaleArgs {
    TensorView x, weights;
    const int64_t *token, *choice;
    TensorView to; // [rows, hidden], contiguous, the dtype of x
};

INFINI_CPU_KERNEL(scale_kernel, ScaleArgs)

// y[i] = act(gate[i], up[i]).
struct GateArgs {
    TensorView y;    // [rows, inner], contiguous
    TensorView both; // [rows, 2 * inner], or inner without gate; contiguous, the dtype of y
    Activation activation;
    bool interleaved;
    float alpha, limit;
};

INFINI_CPU_KERNEL(gate_kernel, GateArgs)

// y[t] = the sum over j of weights[t, j] * results[row[t * k + j]]; without weights, of results. Rows below 0 are left out.
struct SumArgs {
    TensorView y, weights; // [tokens, hidden], [tokens, k]
    bool weighted;
    const void *results; // rows of hidden elements, the dtype of y
    const int64_t *row;
};

INFINI_CPU_KERNEL(sum_kernel, SumArgs)

} // namespace infini::fused_experts
